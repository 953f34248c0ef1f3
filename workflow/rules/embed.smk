rule embed_shard:
    input:
        wells=PATHS.plates("wells.parquet"),
        plates_quarantine=PATHS.plates("quarantine.csv"),
        shards=SHARDS,
        encoder=TO_BE_TRAINED,
    output:
        part=PATHS.part("{unit}"),
        quarantine=PATHS.part_quarantine("{unit}"),
    log:
        log_of("embed_shard_{unit}"),
    conda:
        "../envs/phenoica.yaml"
    threads: embed_cores
    resources:
        gpu=1,
    params:
        version=version("embed", "plates", "licences"),
        config=settings("embed", "plates", "licences"),
        checkpoint=checkpoint_version(),
    shell:
        "phenoica embed --config {params.config:q} --unit {wildcards.unit} --wells {input.wells:q}"
        " --plates-quarantine {input.plates_quarantine:q} --part {output.part:q} --quarantine {output.quarantine:q} --threads {threads}"
        " {input.shards:q} 2> {log:q}"


rule assemble:
    input:
        wells=PATHS.plates("wells.parquet"),
        plates_quarantine=PATHS.plates("quarantine.csv"),
        parts=get_parts,
        quarantines=get_part_quarantines,
    output:
        embeddings=PATHS.embeddings,
        quarantine=PATHS.quarantine,
    log:
        log_of("assemble"),
    conda:
        "../envs/phenoica.yaml"
    params:
        version=version("embed", "plates", "demo", "licences"),
        config=settings("embed", "plates", "demo", "licences"),
    shell:
        "phenoica assemble --config {params.config:q} --wells {input.wells:q}"
        " --plates-quarantine {input.plates_quarantine:q} --out {output.embeddings:q}"
        " --quarantine {output.quarantine:q} {input.parts:q} 2> {log:q}"
