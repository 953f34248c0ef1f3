from pathlib import Path

from snakemake.utils import min_version

min_version("9.0")


if not workflow.overwrite_configfiles:

    configfile: workflow.source_path("config/config.yaml")


include: "workflow/rules/common.smk"


wildcard_constraints:
    unit=r"\d+",
    fold=r"\d+",
    experiment="[^/]+",


onsuccess:
    print(summary())


rule all:
    default_target: True
    input:
        PATHS.index,
    localrule: True


rule embeddings:
    input:
        PATHS.embeddings,
        PATHS.quarantine,
    localrule: True


rule qc_pages:
    input:
        get_plate_pages,
        PATHS.report("plates/index.html"),
    localrule: True


rule disentangled:
    input:
        PATHS.disentangled,
    localrule: True


rule scores:
    input:
        PATHS.scores("parquet"),
        PATHS.report("score.html"),
    localrule: True


include: "workflow/rules/plates.smk"
include: "workflow/rules/pretrain.smk"
include: "workflow/rules/profiles.smk" if CONFIG["source"] == "profiles" else "workflow/rules/embed.smk"
include: "workflow/rules/qc.smk"
include: "workflow/rules/disentangle.smk"
include: "workflow/rules/score.smk"
include: "workflow/rules/report.smk"
