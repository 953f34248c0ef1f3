rule config:
    output:
        config=PATHS.config,
    log:
        log_of("config"),
    conda:
        "../envs/phenoica.yaml"
    params:
        version=version(*CONFIG),
        config=settings(*CONFIG),
    shell:
        "phenoica config {params.config:q} --out {output.config:q} 2> {log:q}"


if CONFIG["source"] == "demo":

    rule demo:
        output:
            shards=PATHS.demo_shards(CONFIG["demo"]["shards"]),
            metadata=PATHS.demo_metadata,
            truth=PATHS.demo_truth,
            pretrain=directory(PATHS.demo / "pretrain"),
        log:
            log_of("demo"),
        conda:
            "../envs/phenoica.yaml"
        threads: all_cores
        params:
            version=version("demo"),
            config=settings("demo"),
            out=PATHS.demo,
        shell:
            "phenoica demo --config {params.config:q} --out {params.out:q} --workers {threads} 2> {log:q}"


checkpoint plates:
    input:
        shards=SHARDS,
        metadata=METADATA or [],
        tables=joined_tables(CONFIG),
    output:
        wells=PATHS.plates("wells.parquet"),
        folds=PATHS.plates("folds.csv"),
        units=PATHS.plates("units.csv"),
        design=PATHS.plates("design.csv"),
        quarantine=PATHS.plates("quarantine.csv"),
    log:
        log_of("plates"),
    conda:
        "../envs/phenoica.yaml"
    params:
        version=version("plates", "demo", "profiles"),
        config=settings("plates", "demo"),
        metadata=metadata_option,
        out=PATHS.plates("wells.parquet").parent,
    shell:
        "phenoica plates --config {params.config:q} {params.metadata:q} --out {params.out:q}"
        " {input.shards:q} 2> {log:q}"
