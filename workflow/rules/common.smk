import json
from pathlib import Path

import pandas as pd
from snakemake.exceptions import WorkflowError

from phenoica.config import RunPaths, fingerprint, resolve
from phenoica.embed.encoder import PRETRAIN, checkpoint_path, encoder_folder
from phenoica.embed.training import training_shards, trains
from phenoica.errors import PhenoicaError
from phenoica.files import sha256
from phenoica.plates.profiles import joined_tables
from phenoica.plates.run import inputs, truth_path

try:
    CONFIG = resolve(config)
    SHARDS, METADATA = inputs(CONFIG)  # profiles instead of shards where these are the source
    CHECKPOINT = checkpoint_path(CONFIG)
    TRAINING_SHARDS = training_shards(CONFIG) if trains(CONFIG) else []
except PhenoicaError as error:
    raise WorkflowError(str(error)) from None
PATHS = RunPaths.of(CONFIG)
ENCODER = encoder_folder(CONFIG)  # of an encoder that phenoica trained, else None
TO_BE_TRAINED = (
    [CHECKPOINT] if CONFIG["embed"]["checkpoint"] == PRETRAIN else []
)  # what the workflow makes itself


def log_of(step):
    """Return the log file of a step; wildcards in the step are filled by Snakemake."""
    return f"{PATHS.root}/logs/{step}.log"


def version(*sections):
    """Return what a rule's results depend on besides its inputs: package version and config sections."""
    return fingerprint(CONFIG, "results", "run", *sections)


def settings(*sections):
    """Return, as JSON text, the configuration that a rule's command gets: its own sections, the others at defaults."""
    names = ("run", "results", "source", "seed", *sections)
    if CONFIG["source"] == "profiles":
        names += ("profiles",)  # without its files this source is no valid configuration
    chosen = {key: CONFIG[key] for key in CONFIG if key in names}
    if "embed" not in names:
        chosen["embed"] = part_of(
            "embed", "dna_channel"
        )  # checked against plates.channels whenever a job reads them
    if "score" not in names:
        chosen["score"] = {
            "rotation_draws": 1
        }  # its default may be more than disentangle.rotation_draws fits
    return json.dumps(chosen)


def part_of(section, *keys):
    return {key: CONFIG[section][key] for key in keys}


def image_settings():
    """Return the configuration of rendering images for pre-training: nothing else makes it run again."""
    chosen = {"demo": part_of("demo", "size"), "pretrain": part_of("pretrain", "demo_seeds")}
    return json.dumps({**{key: CONFIG[key] for key in ("run", "results", "source")}, **chosen})


def training_settings():
    """Return the configuration of training an encoder: a change of how it is used does not train it again."""
    chosen = {
        "demo": part_of("demo", "size"),
        "plates": part_of("plates", "shards", "metadata", "plate_format", "channels"),
        "embed": part_of("embed", "model", "device", "max_bad_fraction", "dna_channel"),
        "pretrain": CONFIG["pretrain"],
    }
    return json.dumps({**{key: CONFIG[key] for key in ("run", "results", "source")}, **chosen})


def checkpoint_version():
    """Return the hash of a finished checkpoint; random weights have none, and one that the workflow makes is an input."""
    return sha256(CHECKPOINT) if CHECKPOINT is not None and not TO_BE_TRAINED else ""


def all_cores(wildcards):
    """Return the cores of the run; 1 where none are given (a report, or a cluster that sets threads itself)."""
    return workflow.resource_settings.cores or 1


def training_cores(wildcards):
    """Return the cores of training: as many as its recipe names, if it names a number."""
    return CONFIG["pretrain"]["threads"] or all_cores(wildcards)


def embed_cores(wildcards):
    """Return the cores of an embed job: the run's, shared by as many jobs as its gpu resource lets run together."""
    gpus = workflow.global_resources.get("gpu")
    return max(1, all_cores(wildcards) // ((gpus and gpus.value) or 1))


def units(kind):
    """Return the jobs of a kind (shard, experiment, fold) from units.csv, once `plates` has run."""
    table = pd.read_csv(checkpoints.plates.get().output.units, dtype=str, keep_default_na=False)
    return table["name"][table["kind"] == kind].tolist()


def get_parts(wildcards):
    return [PATHS.part(unit) for unit in units("shard")]


def get_part_quarantines(wildcards):
    return [PATHS.part_quarantine(unit) for unit in units("shard")]


def get_plate_pages(wildcards):
    return [PATHS.plate_pages(experiment) for experiment in units("experiment")]


def get_fold_scores(wildcards):
    return [PATHS.score_fold(fold) for fold in units("fold")]


def get_fold_decisions(wildcards):
    return [PATHS.score_fold(fold, "json") for fold in units("fold")]


def get_view_scores(wildcards):
    return [PATHS.score_views(fold) for fold in units("fold")]


def views_option(wildcards, input):
    """Return the options that name the scores of the folds' views."""
    return [part for path in input.views for part in ("--views", path)]


def get_deletion_curves(wildcards):
    return [PATHS.deletion_fold(fold) for fold in units("fold")]


def get_known_tables(wildcards):
    """Return the tables of known biology that the configuration names, by key."""
    known = CONFIG["known_biology"]
    names = ("gene_pairs", "gene_positions", "compound_targets")
    return {name: known[name] for name in names if known[name]}


def metadata_option(wildcards, input):
    """Return the option that names the metadata; profiles may say themselves what their wells are."""
    return ["--metadata", input.metadata] if input.metadata else []


def get_truth(wildcards):
    path = truth_path(CONFIG)
    return [] if path is None else path


def truth_option(wildcards, input):
    """Return the option that names the true factors, if there are any."""
    return ["--truth", input.truth] if input.truth else []


def get_scored(wildcards):
    """Return the files that need a held-out fold; a run of one experiment has none."""
    if not units("fold"):
        return []
    scored = [PATHS.disentangled, PATHS.scores("csv"), PATHS.scores("txt"), PATHS.report("score.html")]
    scored += [PATHS.score_file("contrasts.csv"), PATHS.deletion, PATHS.consensus, PATHS.guide_concordance]
    return scored + ([PATHS.known_biology] if get_known_tables(wildcards) else [])


def get_scores(wildcards):
    """Return the table of scores; a run of one experiment has none."""
    return PATHS.scores("parquet") if units("fold") else []


def scores_option(wildcards, input):
    """Return the option that names the table of scores, if there is one."""
    return ["--scores", input.scores] if input.scores else []


def get_encoder_page(wildcards):
    """Return the page of the encoder; an encoder that phenoica did not train has none."""
    return PATHS.report("encoder.html") if ENCODER is not None else []


def summary():
    """Return the closing words of a run: where the results are, and the score table."""
    lines = [
        "",
        f"AnnData, raw embedding:         {PATHS.embeddings}",
        f"AnnData, views and components:  {PATHS.disentangled}",
        f"Pages, start here:              {PATHS.index}",
        "",
    ]
    if not PATHS.index.exists():
        return ""
    scored = "fold" in set(pd.read_csv(PATHS.plates("units.csv"), dtype=str)["kind"])
    if not scored:
        lines[2] = "One experiment, or none to hold out: no views and no scores."
    if scored and PATHS.scores("txt").exists():
        lines.append(PATHS.scores("txt").read_text())
    return "\n".join(lines)
