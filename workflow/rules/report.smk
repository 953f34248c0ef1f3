rule plate_pages:
    input:
        embeddings=PATHS.embeddings,
        qc_wells=PATHS.qc_wells,
        qc_plates=PATHS.qc_plates,
        plotly=PATHS.report("plotly.min.js"),
    output:
        pages=directory(PATHS.plate_pages("{experiment}")),
    log:
        log_of("plate_pages_{experiment}"),
    conda:
        "../envs/phenoica.yaml"
    params:
        version=version("report", "qc", "plates"),
        config=settings("report", "qc", "plates"),
    shell:
        "phenoica report-plates --config {params.config:q} --experiment {wildcards.experiment:q}"
        " --embeddings {input.embeddings:q} --qc-wells {input.qc_wells:q} --qc-plates {input.qc_plates:q}"
        " --plotly {input.plotly:q} --out {output.pages:q} 2> {log:q}"


rule plate_index:
    input:
        embeddings=PATHS.embeddings,
        qc_plates=PATHS.qc_plates,
    output:
        page=PATHS.report("plates/index.html"),
        plotly=PATHS.report("plotly.min.js"),
        figure=report(PATHS.report("plates.svg"), caption="../report/plates.rst", category="Plates"),
    log:
        log_of("plate_index"),
    conda:
        "../envs/phenoica.yaml"
    params:
        version=version("report", "plates"),
        config=settings("report", "plates"),
    shell:
        "phenoica report-plate-index --config {params.config:q} --embeddings {input.embeddings:q}"
        " --qc-plates {input.qc_plates:q} --out {output.page:q} --figure {output.figure:q}"
        " --plotly {output.plotly:q} 2> {log:q}"


rule score_page:
    input:
        scores=PATHS.scores("parquet"),
        hits=PATHS.score_file("hits.csv"),
        summary=PATHS.scores("txt"),
        decisions=get_fold_decisions,
        disentangled=PATHS.disentangled,
    output:
        page=PATHS.report("score.html"),
        figure=report(PATHS.report("score.svg"), caption="../report/score.rst", category="Scores"),
    log:
        log_of("score_page"),
    conda:
        "../envs/phenoica.yaml"
    params:
        version=version("report", "plates", "score", "disentangle"),
        config=settings("report", "plates", "score", "disentangle"),
    shell:
        "phenoica report-scores --config {params.config:q} --scores {input.scores:q}"
        " --hits {input.hits:q}"
        " --summary {input.summary:q} --disentangled {input.disentangled:q} --out {output.page:q}"
        " --figure {output.figure:q} {input.decisions:q} 2> {log:q}"


if ENCODER is not None:

    rule encoder_page:
        input:
            recipe=ENCODER / "recipe.json",
            log=ENCODER / "log.csv",
            pictures=ENCODER / "reconstructions.npz",
            embeddings=PATHS.embeddings,
            scores=get_scores,
        output:
            page=PATHS.report("encoder.html"),
            figure=report(PATHS.report("encoder.svg"), caption="../report/encoder.rst", category="Encoder"),
        log:
            log_of("encoder_page"),
        conda:
            "../envs/phenoica.yaml"
        params:
            version=version("report", "plates"),
            config=settings("report", "plates"),
            folder=ENCODER,
            scores=scores_option,
        shell:
            "phenoica report-encoder --config {params.config:q} --encoder {params.folder:q}"
            " --embeddings {input.embeddings:q} {params.scores:q} --out {output.page:q}"
            " --figure {output.figure:q} 2> {log:q}"


rule run_index:
    input:
        config=PATHS.config,
        design=PATHS.plates("design.csv"),
        units=PATHS.plates("units.csv"),
        embeddings=PATHS.embeddings,
        quarantine=PATHS.quarantine,
        qc_plates=PATHS.qc_plates,
        plate_index=PATHS.report("plates/index.html"),
        plate_pages=get_plate_pages,
        scored=get_scored,
        encoder_page=get_encoder_page,
    output:
        page=PATHS.index,
    log:
        log_of("run_index"),
    conda:
        "../envs/phenoica.yaml"
    params:
        version=version(*CONFIG),
        config=settings(*CONFIG),
    shell:
        "phenoica report-index --config {params.config:q} --out {output.page:q} 2> {log:q}"
