if TRAINING_SHARDS:

    # A package version is no reason to train again: unlike other rules, these two go by their configuration alone.
    if CONFIG["source"] == "demo":

        rule pretrain_images:
            output:
                shards=TRAINING_SHARDS,
            log:
                log_of("pretrain_images"),
            conda:
                "../envs/phenoica.yaml"
            threads: all_cores
            params:
                config=image_settings(),
                out=PATHS.pretrain_images,
            shell:
                "phenoica pretrain-images --config {params.config:q} --out {params.out:q} --workers {threads} 2> {log:q}"

    rule pretrain:
        input:
            shards=TRAINING_SHARDS,
        output:
            encoder=PATHS.pretrain("encoder.safetensors"),
            log=PATHS.pretrain("log.csv"),
            recipe=PATHS.pretrain("recipe.json"),
            pictures=PATHS.pretrain("reconstructions.npz"),
        log:
            log_of("pretrain"),
        conda:
            "../envs/phenoica.yaml"
        threads: training_cores
        resources:
            gpu=1,
        params:
            config=training_settings(),
            out=PATHS.pretrain("encoder.safetensors").parent,
        shell:
            "phenoica pretrain --config {params.config:q} --out {params.out:q} --threads {threads}"
            " {input.shards:q} 2> {log:q}"
