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


rule score_views:
    input:
        embeddings=PATHS.embeddings,
        qc_wells=PATHS.qc_wells,
        folds=PATHS.plates("folds.csv"),
        states=PATHS.fold("{fold}"),
    output:
        scores=PATHS.score_views("{fold}"),
        deletion=PATHS.deletion_fold("{fold}"),
        decisions=PATHS.score_views("{fold}", "json"),
    log:
        log_of("score_views_{fold}"),
    conda:
        "../envs/phenoica.yaml"
    params:
        version=version("score", "disentangle", "qc", "plates"),
        config=settings("score", "disentangle", "qc", "plates"),
    shell:
        "phenoica score-views --config {params.config:q} --fold {wildcards.fold} --embeddings {input.embeddings:q}"
        " --qc-wells {input.qc_wells:q} --folds {input.folds:q} --states {input.states:q}"
        " --out {output.scores:q} --deletion {output.deletion:q} --decisions {output.decisions:q} 2> {log:q}"


rule summarise:
    input:
        scores=get_fold_scores,
        decisions=get_fold_decisions,
        views=get_view_scores,
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
        views=views_option,
    shell:
        "phenoica summarise --config {params.config:q} --out-parquet {output.parquet:q}"
        " --out-csv {output.csv:q} --out-txt {output.txt:q} --out-hits {output.hits:q} {params.views:q} {input.scores:q}"
        " 2> {log:q}"


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


rule deletion:
    input:
        folds=get_deletion_curves,
    output:
        deletion=PATHS.deletion,
    log:
        log_of("deletion"),
    conda:
        "../envs/phenoica.yaml"
    params:
        version=version("score", "disentangle", "plates", "qc"),
        config=settings("score", "disentangle", "plates", "qc"),
    shell:
        "phenoica deletion --config {params.config:q} --out {output.deletion:q} {input.folds:q} 2> {log:q}"


rule consensus:
    input:
        disentangled=PATHS.disentangled,
    output:
        consensus=PATHS.consensus,
        concordance=PATHS.guide_concordance,
    log:
        log_of("consensus"),
    conda:
        "../envs/phenoica.yaml"
    params:
        version=version("score", "disentangle", "plates", "qc"),
        config=settings("score", "disentangle", "plates", "qc"),
    shell:
        "phenoica consensus --config {params.config:q} --disentangled {input.disentangled:q}"
        " --out {output.consensus:q} --concordance {output.concordance:q} 2> {log:q}"


rule known_biology:
    input:
        unpack(get_known_tables),
        consensus=PATHS.consensus,
    output:
        found=PATHS.known_biology,
    log:
        log_of("known_biology"),
    conda:
        "../envs/phenoica.yaml"
    params:
        version=version("known_biology"),
        config=settings("known_biology"),
    shell:
        "phenoica known-biology --config {params.config:q} --consensus {input.consensus:q}"
        " --out {output.found:q} 2> {log:q}"
