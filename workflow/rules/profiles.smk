rule profiles:
    input:
        wells=PATHS.plates("wells.parquet"),
        plates_quarantine=PATHS.plates("quarantine.csv"),
        profiles=SHARDS,
    output:
        embeddings=PATHS.embeddings,
        quarantine=PATHS.quarantine,
    log:
        log_of("profiles"),
    conda:
        "../envs/phenoica.yaml"
    params:
        version=version("profiles", "plates", "embed", "licences"),
        config=settings("profiles", "plates", "embed", "licences"),
    shell:
        "phenoica profiles --config {params.config:q} --wells {input.wells:q}"
        " --plates-quarantine {input.plates_quarantine:q} --out {output.embeddings:q}"
        " --quarantine {output.quarantine:q} {input.profiles:q} 2> {log:q}"
