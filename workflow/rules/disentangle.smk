rule fit_fold:
    input:
        embeddings=PATHS.embeddings,
        qc_wells=PATHS.qc_wells,
        folds=PATHS.plates("folds.csv"),
    output:
        states=directory(PATHS.fold("{fold}")),
    log:
        log_of("fit_fold_{fold}"),
    conda:
        "../envs/phenoica.yaml"
    params:
        version=version("disentangle", "qc", "plates"),
        config=settings("disentangle", "qc", "plates"),
    shell:
        "phenoica disentangle --config {params.config:q} --fold {wildcards.fold}"
        " --embeddings {input.embeddings:q} --qc-wells {input.qc_wells:q} --folds {input.folds:q}"
        " --out {output.states:q} 2> {log:q}"


rule fit_exploration:
    input:
        embeddings=PATHS.embeddings,
        qc_wells=PATHS.qc_wells,
        folds=PATHS.plates("folds.csv"),
    output:
        states=directory(PATHS.exploration),
    log:
        log_of("fit_exploration"),
    conda:
        "../envs/phenoica.yaml"
    params:
        version=version("disentangle", "qc", "plates"),
        config=settings("disentangle", "qc", "plates"),
    shell:
        "phenoica disentangle --config {params.config:q} --embeddings {input.embeddings:q}"
        " --qc-wells {input.qc_wells:q} --folds {input.folds:q} --out {output.states:q} 2> {log:q}"


rule exploration_views:
    input:
        embeddings=PATHS.embeddings,
        qc_wells=PATHS.qc_wells,
        states=PATHS.exploration,
    output:
        disentangled=PATHS.disentangled,
    log:
        log_of("exploration_views"),
    conda:
        "../envs/phenoica.yaml"
    params:
        version=version("disentangle", "qc", "plates", "embed", "demo", "licences"),
        config=settings("disentangle", "qc", "plates", "embed", "demo", "licences"),
    shell:
        "phenoica views --config {params.config:q} --embeddings {input.embeddings:q}"
        " --qc-wells {input.qc_wells:q} --states {input.states:q} --out {output.disentangled:q} 2> {log:q}"
