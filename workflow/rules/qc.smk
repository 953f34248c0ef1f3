rule qc:
    input:
        embeddings=PATHS.embeddings,
    output:
        wells=PATHS.qc_wells,
        plates=PATHS.qc_plates,
    log:
        log_of("qc"),
    conda:
        "../envs/phenoica.yaml"
    params:
        version=version("qc", "plates"),
        config=settings("qc", "plates"),
    shell:
        "phenoica qc --config {params.config:q} --embeddings {input.embeddings:q}"
        " --wells-out {output.wells:q} --plates-out {output.plates:q} 2> {log:q}"
