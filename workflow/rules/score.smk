rule score_fold:
    input:
        embeddings=PATHS.embeddings,
        qc_wells=PATHS.qc_wells,
        folds=PATHS.plates("folds.csv"),
        states=PATHS.fold("{fold}"),
        truth=get_truth,
    output:
        scores=PATHS.score_fold("{fold}"),
        decisions=PATHS.score_fold("{fold}", "json"),
    log:
        log_of("score_fold_{fold}"),
    conda:
        "../envs/phenoica.yaml"
    params:
        version=version("score", "disentangle", "qc", "plates", "truth"),
        config=settings("score", "disentangle", "qc", "plates", "truth"),
        truth=truth_option,
    shell:
        "phenoica score --config {params.config:q} --fold {wildcards.fold} --embeddings {input.embeddings:q}"
        " --qc-wells {input.qc_wells:q} --folds {input.folds:q} --states {input.states:q} {params.truth:q}"
        " --out {output.scores:q} --decisions {output.decisions:q} 2> {log:q}"


rule summarise:
    input:
        scores=get_fold_scores,
        decisions=get_fold_decisions,
    output:
        parquet=PATHS.scores("parquet"),
        csv=PATHS.scores("csv"),
        txt=PATHS.scores("txt"),
        hits=PATHS.score_file("hits.csv"),
    log:
        log_of("summarise"),
    conda:
        "../envs/phenoica.yaml"
    params:
        version=version("score", "disentangle", "plates", "qc"),
        config=settings("score", "disentangle", "plates", "qc"),
    shell:
        "phenoica summarise --config {params.config:q} --out-parquet {output.parquet:q}"
        " --out-csv {output.csv:q} --out-txt {output.txt:q} --out-hits {output.hits:q} {input.scores:q} 2> {log:q}"


rule contrasts:
    input:
        wells=PATHS.plates("wells.parquet"),
        folds=PATHS.plates("folds.csv"),
    output:
        csv=PATHS.score_file("contrasts.csv"),
        txt=PATHS.score_file("contrasts.txt"),
    log:
        log_of("contrasts"),
    conda:
        "../envs/phenoica.yaml"
    params:
        version=version("score", "plates"),
        config=settings("score", "disentangle", "plates"),
    shell:
        "phenoica contrasts --config {params.config:q} --wells {input.wells:q} --folds {input.folds:q}"
        " --out {output.csv:q} > {output.txt:q} 2> {log:q}"
