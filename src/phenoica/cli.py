"""The command line: one verb a step, thin over the stage packages.

Each verb takes the configuration and, for every file, the place in results/<run>/ unless told otherwise; the
workflow's rules call the same verbs with explicit paths.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from phenoica import __version__
from phenoica.config import RunPaths, load
from phenoica.errors import PhenoicaError

app = typer.Typer(
    help="Cell-microscopy plates in; disentangled and honestly scored perturbation embeddings out. "
    "`snakemake --cores all` runs the verbs below in order; each also works by itself. units.csv of the plates step "
    "lists the jobs: embed once a shard, disentangle and score once a fold (and disentangle once without --fold, for "
    "the exploration fit), report-plates once an experiment.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Config = Annotated[str, typer.Option("--config", "-c", help="Configuration file (YAML or JSON), or JSON text.")]
Fold = Annotated[int, typer.Option(help="Number of the held-out fold (units.csv, kind fold).")]


def _path(help_text: str) -> Any:
    return Annotated[Path | None, typer.Option(help=help_text + " Default: the place in results/<run>/.")]


def main() -> None:
    """Run the command line; a PhenoicaError prints its message and exits with 1."""
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    try:
        app()
    except PhenoicaError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


@app.callback(invoke_without_command=True)
def _callback(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command("config")
def config_verb(
    source: Annotated[str, typer.Argument(help="A configuration file, or the configuration itself as JSON text.")],
    out: Annotated[Path | None, typer.Option(help="Where to write; default: print.")] = None,
) -> None:
    """Validate a configuration, fill every default and write it as JSON."""
    from phenoica import files

    resolved = load(source)
    if out is None:
        print(json.dumps(resolved, indent=2))
    else:
        files.write_json(out, resolved)


@app.command()
def demo(
    config: Config,
    out: _path("Folder for shards, metadata.csv, truth.parquet and pretrain/.") = None,
    size: Annotated[int | None, typer.Option(help="Image side: 128, 256 or 512. Default: demo.size.")] = None,
    workers: Annotated[int, typer.Option(help="Processes that render.")] = 2,
) -> None:
    """Render the built-in demo plates."""
    from phenoica.demo.plates import write_demo

    cfg = load(config)
    section = cfg["demo"]
    write_demo(
        out or RunPaths.of(cfg).demo,
        size=section["size"] if size is None else size, seed=section["seed"], n_shards=section["shards"],
        workers=workers,
    )  # fmt: skip


@app.command("pretrain-images")
def pretrain_images(
    config: Config,
    out: _path("Folder for a shard of each seed.") = None,
    workers: Annotated[int, typer.Option(help="Processes that render.")] = 2,
) -> None:
    """Render the demo's images for pre-training, from pretrain.demo_seeds."""
    from phenoica.embed.training import render_images

    cfg = load(config)
    render_images(cfg, out or RunPaths.of(cfg).pretrain_images, workers)


@app.command()
def pretrain(
    config: Config,
    shards: Annotated[list[Path] | None, typer.Argument(help="Shard files with the images.")] = None,
    out: _path("Folder for encoder.safetensors, log.csv and recipe.json.") = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; pretrain.threads comes first.")] = 2,
) -> None:
    """Train an encoder on the experiments named for pre-training; a killed run goes on where it was."""
    import torch

    from phenoica.embed.gpu import claim_gpu
    from phenoica.embed.training import run_pretrain, training_shards

    torch.set_num_threads(threads)
    cfg = load(config)
    target = out or RunPaths.of(cfg).pretrain("encoder.safetensors").parent
    with claim_gpu(cfg["embed"]["device"]):
        run_pretrain(shards or training_shards(cfg), target, cfg)


@app.command("fetch-model")
def fetch_model(
    config: Annotated[str | None, typer.Option("--config", "-c", help="Configuration. Default: all defaults.")] = None,
    repo: Annotated[str | None, typer.Option(help="Repository, owner/name. Default: hub.repo.")] = None,
    revision: Annotated[str | None, typer.Option(help="Commit, 40 hex digits. Default: hub.revision.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File for the weights. Default: embed.checkpoint if that is a path, else below data/."),
    ] = None,
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="You accept the licence of the weights (or hub.accept_licence).")
    ] = False,
) -> None:
    """Fetch published model weights from the Hugging Face hub, or from the mirror that HF_ENDPOINT names."""
    from phenoica.config import resolve
    from phenoica.plates import fetch

    cfg = resolve({"run": "fetch", "source": "demo"}) if config is None else load(config)
    print(f"licence of {repo or cfg['hub']['repo']}: {fetch.licence_line(cfg, repo or cfg['hub']['repo'])}", flush=True)
    for file in fetch.fetch_model(cfg, repo=repo, revision=revision, out=out, accept_licence=accept_licence):
        print(f"{file.path}  sha256 {file.sha256}")


@app.command("fetch-data")
def fetch_data(
    config: Config,
    revision: Annotated[str | None, typer.Option(help="Commit, 40 hex digits. Default: hub.data.revision.")] = None,
    shards: Annotated[str | None, typer.Option(help="Shards by number, such as 0-3,7. Default: all.")] = None,
    experiments: Annotated[
        list[str] | None,
        typer.Option(help="Only shards that hold such experiments, such as 'compound-*'; may be repeated."),
    ] = None,
    embeddings: Annotated[
        bool, typer.Option("--embeddings", help="The published embeddings instead of the image shards.")
    ] = False,
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="You accept the licence of the data (or hub.data.accept_licence).")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List files, sizes and places; fetch nothing.")] = False,
) -> None:
    """Fetch a published data set's metadata and shards from the Hugging Face hub, or from HF_ENDPOINT's mirror."""
    from phenoica.plates import fetch_data as data

    cfg = load(config)
    print(f"licence of {cfg['hub']['data']['repo']}: {data.data_licence(cfg)}", flush=True)
    plan = data.plan_data(
        cfg, revision=revision, shards=shards, experiments=experiments or (), embeddings=embeddings,
        accept_licence=accept_licence, dry_run=dry_run,
    )  # fmt: skip
    missing = [plan.missing(file) for file in plan.files]
    total = sum(file.size for file in plan.files)
    print(f"{len(plan.files)} files, {total / 1e9:.2f} GB; still to fetch {sum(missing) / 1e9:.2f} GB", flush=True)
    if dry_run:
        for file, rest in zip(plan.files, missing, strict=True):
            print(f"{file.place}  {file.size / 1e9:.3f} GB{'' if rest else ', there'}")
        data.check_space(plan)
        return
    for number, file in enumerate(data.fetch_data(plan), 1):
        print(f"{number}/{len(plan.files)}  {file.path}  sha256 {file.sha256}", flush=True)


@app.command("import")
def import_verb(
    out: Annotated[Path, typer.Argument(help="Folder for shards and metadata; the same command goes on in it.")],
    images: Annotated[
        Path | None,
        typer.Option(
            "--list",
            help="csv with a row an image: experiment, plate, well, path (relative to the csv); site, channel, page "
            "and plane where needed (all from 1); further columns (treatment, gene, ...) describe the well.",
        ),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Instead of a list: folder of images, with --pattern.")] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            help="imagexpress, harmony, harmony-record, columbus, rxrx, or a regular expression for the end of the "
            "path: groups (?P<experiment>..) plate, well (or row and column), site (or field), channel (or "
            "wavelength), plane (or z)."
        ),
    ] = None,
    folders: Annotated[
        str | None,
        typer.Option(help="Regular expression for the folders above a file: groups (?P<experiment>..), (?P<plate>..)."),
    ] = None,
    experiment: Annotated[str | None, typer.Option(help="Experiment of all images, if nothing names it.")] = None,
    plate: Annotated[str | None, typer.Option(help="Plate of all images, if nothing names it.")] = None,
    plate_format: Annotated[
        int | None, typer.Option(help="96, 384 or 1536 wells. Default: any; the smallest that fits is suggested.")
    ] = None,
    channels: Annotated[
        str | None,
        typer.Option(help="Channels to take, in order, separated by commas: they become 1, 2, ... Default: all."),
    ] = None,
    planes: Annotated[
        str | None, typer.Option(help="max (maximum projection over z) or the number of a z plane.")
    ] = None,
    size: Annotated[int | None, typer.Option(help="Average to this side in pixels. Default: keep the size.")] = None,
    compression: Annotated[
        float | None,
        typer.Option(help="Irreversible JPEG 2000 of at least this ratio; published: 20. Default: lossless."),
    ] = None,
    low: Annotated[float | None, typer.Option(help="Percentile that becomes 0. Default: 0.1.")] = None,
    high: Annotated[float | None, typer.Option(help="Percentile that becomes 255. Default: 99.9.")] = None,
    sample: Annotated[
        int | None, typer.Option(help="Images a channel to take the percentiles from, of all plates. Default: 100.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sample. Default: 0.")] = None,
    scaling: Annotated[
        Path | None, typer.Option(help="scaling.json of an earlier import: use its scales, sample nothing.")
    ] = None,
    rescale_8bit: Annotated[
        bool, typer.Option("--rescale-8bit", help="Scale 8-bit images too; by default they stay as they are.")
    ] = False,
    images_per_shard: Annotated[int, typer.Option(help="Images of each shard but the last.")] = 6000,
    platemap: Annotated[
        Path | None,
        typer.Option(help="csv with well (and plate, experiment) and treatment, gene, concentration, SMILES, ..."),
    ] = None,
    perturbation_type: Annotated[str | None, typer.Option(help="COMPOUND or CRISPR, for all wells.")] = None,
    cell_type: Annotated[str | None, typer.Option(help="Cell type of all wells.")] = None,
    max_bad_fraction: Annotated[
        float, typer.Option(min=0, max=1, help="Stop when more than this share of images is bad.")
    ] = 0.01,
    threads: Annotated[int, typer.Option(min=1, help="Threads that decode and encode.")] = 2,
) -> None:
    """Import your own images: TIFF, PNG or JPEG 2000 to shards; print a configuration that uses them.

    16-bit images become 8-bit by one fixed linear scale a channel over the whole import.
    """
    from phenoica.plates.image_lists import choose_images, read_platemap
    from phenoica.plates.image_plan import import_options
    from phenoica.plates.import_metadata import config_text
    from phenoica.plates.importer import import_images

    options = import_options(
        channels=channels, planes=planes, scaling=scaling, size=size, compression=compression, low=low, high=high,
        sample=sample, seed=seed, rescale_8bit=rescale_8bit, images_per_shard=images_per_shard,
    )  # fmt: skip
    found = choose_images(
        images, folder, pattern, folders=folders, experiment=experiment, plate=plate, plate_format=plate_format or 1536
    )
    constants = {"perturbation_type": perturbation_type, "cell_type": cell_type}
    plan = import_images(
        found, out, options, scaling=scaling, max_bad_fraction=max_bad_fraction, threads=threads,
        platemap=None if platemap is None else read_platemap(platemap, plate_format or 1536),
        constants={name: value for name, value in constants.items() if value is not None},
    )  # fmt: skip
    print(config_text(plan, out, plate_format), end="")


@app.command()
def plates(
    config: Config,
    shards: Annotated[
        list[Path] | None, typer.Argument(help="Shard files (or files of profiles), in the order of their numbers.")
    ] = None,
    metadata: _path("Metadata csv or parquet.") = None,
    out: _path("Folder for wells.parquet, folds.csv, units.csv, design.csv, quarantine.csv.") = None,
) -> None:
    """Read metadata and shard keys (or profiles); write wells, control roles, folds and the job list."""
    from phenoica.plates.run import inputs, run_plates, run_profile_plates

    cfg = load(config)
    if not shards or metadata is None:
        known_shards, known_metadata = inputs(cfg)
        shards, metadata = shards or known_shards, metadata or known_metadata
    write = run_profile_plates if cfg["source"] == "profiles" else run_plates
    write(shards, metadata, out or RunPaths.of(cfg).plates("wells.parquet").parent, cfg)


@app.command()
def design(config: Config, metadata: _path("Metadata csv or parquet.") = None) -> None:
    """Print which treatments sit where, under which label, and which controls are inferred."""
    from phenoica.plates.design import design_table
    from phenoica.plates.metadata import read_metadata
    from phenoica.plates.profiles import profile_metadata
    from phenoica.plates.run import inputs

    cfg = load(config)
    files, known_metadata = inputs(cfg)
    if cfg["source"] == "profiles":
        table = profile_metadata(files, cfg, metadata or known_metadata)[0]
    else:
        table = read_metadata(metadata or known_metadata, cfg["plates"]["plate_format"])
    print(design_table(table, cfg["plates"]).to_string(index=False))


@app.command()
def embed(
    config: Config,
    unit: Annotated[int, typer.Option(help="Number of the shard whose wells are embedded (units.csv, kind shard).")],
    shards: Annotated[list[Path] | None, typer.Argument(help="All shard files, in the order of their numbers.")] = None,
    wells: _path("wells.parquet.") = None,
    plates_quarantine: _path("quarantine.csv of the plates stage.") = None,
    part: _path("The part to write (parquet).") = None,
    quarantine: _path("The quarantine list to write (csv).") = None,
    channelwise: Annotated[
        bool | None, typer.Option(help="Store each channel's embedding beside a pooled X. Default: embed.channelwise.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Cores of the job: of decoding, and of the model on a CPU.")] = 2,
) -> None:
    """Embed the wells of one shard and take their image measures; on a machine with GPUs, claim a free one."""
    import torch

    from phenoica.config import resolve
    from phenoica.embed.gpu import claim_gpu
    from phenoica.embed.run import embed_shard
    from phenoica.plates.run import inputs, read_wells

    torch.set_num_threads(threads)
    cfg = load(config)
    if channelwise is not None:
        cfg["embed"]["channelwise"] = channelwise
        cfg = resolve(cfg, where="--channelwise" if channelwise else "--no-channelwise")
    paths = RunPaths.of(cfg)
    with claim_gpu(cfg["embed"]["device"]):
        embed_shard(
            read_wells(wells or paths.plates("wells.parquet")), unit, shards or inputs(cfg)[0],
            plates_quarantine or paths.plates("quarantine.csv"), part or paths.part(unit),
            quarantine or paths.part_quarantine(unit), cfg, threads,
        )  # fmt: skip


@app.command()
def assemble(
    config: Config,
    parts: Annotated[list[Path] | None, typer.Argument(help="Part of each shard, .quarantine.csv beside it.")] = None,
    wells: _path("wells.parquet.") = None,
    plates_quarantine: _path("quarantine.csv of the plates stage.") = None,
    out: _path("embeddings.h5ad.") = None,
    quarantine: _path("The joined quarantine list (csv).") = None,
) -> None:
    """Join the parts of all shards into embeddings.h5ad."""
    from phenoica.embed.assemble import assemble as join
    from phenoica.plates.run import read_wells

    cfg = load(config)
    paths = RunPaths.of(cfg)
    frame = read_wells(wells or paths.plates("wells.parquet"))
    parts = parts or [paths.part(unit) for unit in sorted(frame["unit"].unique())]
    lists = [plates_quarantine or paths.plates("quarantine.csv"), *(p.with_suffix(".quarantine.csv") for p in parts)]
    join(frame, parts, lists, out or paths.embeddings, quarantine or paths.quarantine, cfg)


@app.command()
def profiles(
    config: Config,
    files: Annotated[
        list[Path] | None, typer.Argument(help="Files of profiles, in the order of their numbers.")
    ] = None,
    wells: _path("wells.parquet.") = None,
    plates_quarantine: _path("quarantine.csv of the plates stage.") = None,
    out: _path("embeddings.h5ad.") = None,
    quarantine: _path("The joined quarantine list (csv).") = None,
) -> None:
    """Write embeddings.h5ad from profiles (source profiles); no image is embedded."""
    from phenoica.embed.profiles import write_profiles
    from phenoica.plates.run import inputs

    cfg = load(config)
    paths = RunPaths.of(cfg)
    write_profiles(
        wells or paths.plates("wells.parquet"), files or inputs(cfg)[0],
        plates_quarantine or paths.plates("quarantine.csv"), out or paths.embeddings, quarantine or paths.quarantine,
        cfg,
    )  # fmt: skip


@app.command()
def qc(
    config: Config,
    embeddings: _path("embeddings.h5ad.") = None,
    wells_out: _path("Flags of each well (parquet).") = None,
    plates_out: _path("Statistics of each plate (parquet).") = None,
) -> None:
    """Compute plate statistics and flag wells; nothing is deleted."""
    from phenoica.qc.run import run_qc

    cfg = load(config)
    paths = RunPaths.of(cfg)
    run_qc(embeddings or paths.embeddings, wells_out or paths.qc_wells, plates_out or paths.qc_plates, cfg)


@app.command()
def disentangle(
    config: Config,
    fold: Annotated[int | None, typer.Option(help="Held-out fold; without it, the exploration fit.")] = None,
    embeddings: _path("embeddings.h5ad.") = None,
    qc_wells: _path("Flags of each well (parquet).") = None,
    folds: _path("folds.csv.") = None,
    out: _path("Folder of the states.") = None,
) -> None:
    """Fit every view on the training experiments of a fold, or the exploration fit on all of them."""
    from phenoica.disentangle.run import fit_fold

    cfg = load(config)
    paths = RunPaths.of(cfg)
    target = paths.exploration if fold is None else paths.fold(fold)
    fit_fold(
        embeddings or paths.embeddings, qc_wells or paths.qc_wells, folds or paths.plates("folds.csv"), fold,
        out or target, cfg,
    )  # fmt: skip


@app.command()
def views(
    config: Config,
    embeddings: _path("embeddings.h5ad.") = None,
    qc_wells: _path("Flags of each well (parquet).") = None,
    states: _path("Folder of the exploration fit.") = None,
    out: _path("disentangled.h5ad.") = None,
) -> None:
    """Write disentangled.h5ad: every well in the views of the exploration fit."""
    from phenoica.disentangle.run import assemble as join

    cfg = load(config)
    paths = RunPaths.of(cfg)
    join(
        embeddings or paths.embeddings, qc_wells or paths.qc_wells, states or paths.exploration,
        out or paths.disentangled, cfg,
    )  # fmt: skip


@app.command()
def transform(
    new: Annotated[Path, typer.Argument(help="AnnData of new wells (h5ad): embeddings of the same encoder in X.")],
    state: Annotated[
        Path,
        typer.Option(
            help="Folder of a fit (disentangle/exploration, disentangle/fold-<k>), for all its views, or of one view "
            "in it."
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write (h5ad); not the input.")],
) -> None:
    """Put a batch that a fit never saw into its saved views; nothing is refitted, and components keep their labels."""
    from phenoica.disentangle.apply import transform_file

    transform_file(new, state, out)


@app.command()
def score(
    config: Config,
    fold: Fold,
    embeddings: _path("embeddings.h5ad.") = None,
    qc_wells: _path("Flags of each well (parquet).") = None,
    folds: _path("folds.csv.") = None,
    states: _path("Folder of the fold's states.") = None,
    truth: _path("Table of true factors; joined on well_id.") = None,
    out: _path("Scores of the fold (parquet).") = None,
    decisions: _path("What the training side decided (json).") = None,
) -> None:
    """Score one fold's held-out experiments."""
    from phenoica.plates.run import truth_path
    from phenoica.score.run import score_fold

    cfg = load(config)
    paths = RunPaths.of(cfg)
    score_fold(
        embeddings or paths.embeddings, qc_wells or paths.qc_wells, folds or paths.plates("folds.csv"),
        states or paths.fold(fold), fold, out or paths.score_fold(fold), decisions or paths.score_fold(fold, "json"),
        cfg, truth=truth or truth_path(cfg),
    )  # fmt: skip


@app.command("score-views")
def score_views(
    config: Config,
    fold: Fold,
    embeddings: _path("embeddings.h5ad.") = None,
    qc_wells: _path("Flags of each well (parquet).") = None,
    folds: _path("folds.csv.") = None,
    states: _path("Folder of the fold's states.") = None,
    out: _path("Scores of the fold's views (parquet).") = None,
    deletion: _path("Deletion curves of the fold (parquet).") = None,
    decisions: _path("What the training side decided (json).") = None,
) -> None:
    """Score one fold's views as wholes: replicates, decodability of the batch, best components, deletion curve."""
    from phenoica.score.run import score_views as write

    cfg = load(config)
    paths = RunPaths.of(cfg)
    write(
        embeddings or paths.embeddings, qc_wells or paths.qc_wells, folds or paths.plates("folds.csv"),
        states or paths.fold(fold), fold, out or paths.score_views(fold), deletion or paths.deletion_fold(fold),
        decisions or paths.score_views(fold, "json"), cfg,
    )  # fmt: skip


@app.command()
def deletion(
    config: Config,
    folds: Annotated[list[Path] | None, typer.Argument(help="Deletion curves of each fold (parquet).")] = None,
    out: _path("The deletion curves of all folds (parquet).") = None,
) -> None:
    """Join the deletion curves of the folds, with the areas between them and their intervals."""
    from phenoica.score.run import summarise_deletion

    cfg = load(config)
    paths = RunPaths.of(cfg)
    summarise_deletion(folds or [paths.deletion_fold(k) for k in _folds(paths)], out or paths.deletion, cfg)


def _folds(paths: RunPaths) -> list[str]:
    """Return the folds of a run, from units.csv."""
    import pandas as pd

    units = pd.read_csv(paths.plates("units.csv"), dtype=str, keep_default_na=False)
    return units["name"][units["kind"] == "fold"].tolist()


@app.command()
def consensus(
    config: Config,
    disentangled: _path("disentangled.h5ad.") = None,
    out: _path("consensus.h5ad.") = None,
    concordance: _path("Concordance of the guides of each gene (csv).") = None,
) -> None:
    """Average wells to guides and guides to perturbations (exploration fit), and say whether guides of a gene agree."""
    from phenoica.score.consensus import write_consensus

    cfg = load(config)
    paths = RunPaths.of(cfg)
    write_consensus(
        disentangled or paths.disentangled, out or paths.consensus, concordance or paths.guide_concordance, cfg
    )


@app.command("known-biology")
def known_biology(
    config: Config,
    consensus: _path("consensus.h5ad.") = None,
    gene_pairs: Annotated[
        Path | None, typer.Option(help="Table of related genes. Default: known_biology.gene_pairs.")
    ] = None,
    gene_positions: Annotated[
        Path | None, typer.Option(help="Table of chromosome arms. Default: known_biology.gene_positions.")
    ] = None,
    compound_targets: Annotated[
        Path | None, typer.Option(help="Table of targets. Default: known_biology.compound_targets.")
    ] = None,
    out: _path("What is found again (csv).") = None,
) -> None:
    """Compare the consensus with tables of known gene-gene relations and compound-gene activities."""
    from phenoica.score.known_biology import write_known_biology

    cfg = load(config)
    paths = RunPaths.of(cfg)
    given = {"gene_pairs": gene_pairs, "gene_positions": gene_positions, "compound_targets": compound_targets}
    tables = {name: path or cfg["known_biology"][name] for name, path in given.items()}
    write_known_biology(consensus or paths.consensus, out or paths.known_biology, cfg, **tables)


@app.command()
def scib(
    config: Config,
    view: Annotated[str, typer.Option(help="raw, pca, ica, tvn, pca_cs, biology or batch, of the exploration fit.")],
    disentangled: _path("disentangled.h5ad.") = None,
    out: _path("The metrics (csv).") = None,
) -> None:
    """Give a view to scib-metrics (pip install 'phenoica[scib]'): how well batches mix and perturbations stay apart."""
    from phenoica.score.scib import write_scib

    cfg = load(config)
    paths = RunPaths.of(cfg)
    write_scib(disentangled or paths.disentangled, view, out or paths.scib(view), cfg)


@app.command()
def summarise(
    config: Config,
    folds: Annotated[list[Path] | None, typer.Argument(help="Scores of each fold (parquet), json beside.")] = None,
    views: Annotated[
        list[Path] | None,
        typer.Option(help="Scores of each fold's views (parquet); may be repeated. Default: those in results/<run>/."),
    ] = None,
    out_parquet: _path("The score table (parquet).") = None,
    out_csv: _path("The score table (csv).") = None,
    out_txt: _path("The short printed table (txt).") = None,
    out_hits: _path("The list of hits (csv).") = None,
) -> None:
    """Join the folds into the score table, with intervals, tests and macro averages, and list the hits."""
    from phenoica.score.run import summarise as join

    cfg = load(config)
    paths = RunPaths.of(cfg)
    if not folds:
        folds = [paths.score_fold(k) for k in _folds(paths)]
        views = views or [paths.score_views(k) for k in _folds(paths)]
    join(
        folds, [f.with_suffix(".json") for f in folds], out_parquet or paths.scores("parquet"),
        out_csv or paths.scores("csv"), out_txt or paths.scores("txt"), cfg, view_parquets=views or (),
        out_hits=out_hits or paths.score_file("hits.csv"),
    )  # fmt: skip


@app.command()
def contrasts(
    config: Config,
    wells: _path("wells.parquet.") = None,
    folds: _path("folds.csv.") = None,
    out: Annotated[Path | None, typer.Option(help="Also write the list (csv).")] = None,
    position: Annotated[bool, typer.Option(help="Fit position models; without them no position_overlap.")] = True,
) -> None:
    """List what will be tested, with wells a side and experiment, and what is skipped and why; needs `plates` only."""
    import pandas as pd

    from phenoica import files, schema
    from phenoica.score.contrast_list import contrast_list, listed

    cfg = load(config)
    paths = RunPaths.of(cfg)
    table = contrast_list(
        pd.read_parquet(wells or paths.plates("wells.parquet"), columns=list(schema.WELL_COLUMNS)),
        pd.read_csv(folds or paths.plates("folds.csv"), dtype={schema.EXPERIMENT: str}, keep_default_na=False),
        cfg, position=position,
    )  # fmt: skip
    if out is not None:
        files.write_csv(out, table)
    print(listed(table), end="")


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="Folder of a finished run, results/<run>.")],
    second: Annotated[Path, typer.Argument(help="Folder of another one.")],
    out: Annotated[Path | None, typer.Option(help="Also write every difference (csv).")] = None,
) -> None:
    """Compare two runs: held-out AUROC, paired over perturbations and folds, and what differs in their settings."""
    from phenoica import files
    from phenoica.score import compare as runs

    pair = [runs.read_run(folder) for folder in (first, second)]
    table = runs.compare(*pair, confidence=pair[0].config["score"]["confidence"])
    if out is not None:
        files.write_csv(out, table)
    print(runs.compared(table, *pair), end="")


@app.command()
def export(
    config: Config,
    out: Annotated[Path, typer.Option(help="Table to write: .parquet, .csv or .csv.gz.")],
    pycytominer: Annotated[
        bool, typer.Option("--pycytominer", help="In the columns of pycytominer: Metadata_ first, then features.")
    ] = False,
    view: Annotated[
        str, typer.Option(help="raw (the embedding), pca, ica, another fitted view, biology or batch.")
    ] = "raw",
    h5ad: Annotated[
        Path | None, typer.Option(help="Default: embeddings.h5ad of the run for raw, else disentangled.h5ad.")
    ] = None,
) -> None:
    """Write the wells as a plain table for other tools; `source: profiles` reads it back."""
    from phenoica.errors import ConfigError
    from phenoica.export import RAW, export_pycytominer

    if not pycytominer:
        raise ConfigError("phenoica export: name the format, --pycytominer")
    paths = RunPaths.of(load(config))
    export_pycytominer(h5ad or (paths.embeddings if view == RAW else paths.disentangled), out, view)


@app.command("report-plates")
def report_plates(
    config: Config,
    experiment: Annotated[str, typer.Option(help="The experiment whose plates get a page (units.csv).")],
    embeddings: _path("embeddings.h5ad.") = None,
    qc_wells: _path("Flags of each well (parquet).") = None,
    qc_plates: _path("Statistics of each plate (parquet).") = None,
    plotly: _path("The shared plotly script.") = None,
    out: _path("Folder of the pages.") = None,
) -> None:
    """Write a page for every plate of an experiment."""
    from phenoica.report.plate_pages import write_experiment

    cfg = load(config)
    paths = RunPaths.of(cfg)
    write_experiment(
        embeddings or paths.embeddings, qc_wells or paths.qc_wells, qc_plates or paths.qc_plates, experiment,
        out or paths.plate_pages(experiment), plotly or paths.report("plotly.min.js"),
        plate_format=cfg["plates"]["plate_format"], exclude_flagged=cfg["qc"]["exclude_flagged"],
    )  # fmt: skip


@app.command("report-plate-index")
def report_plate_index(
    config: Config,
    embeddings: _path("embeddings.h5ad.") = None,
    qc_plates: _path("Statistics of each plate (parquet).") = None,
    out: _path("The page of all plates.") = None,
    figure: _path("The overview of all plates as SVG.") = None,
    plotly: _path("The shared plotly script.") = None,
) -> None:
    """Write the page of all plates, its figure and the script that the plate pages share."""
    from phenoica.report import pages, plate_pages

    cfg = load(config)
    paths = RunPaths.of(cfg)
    table = qc_plates or paths.qc_plates
    plate_pages.write_index(table, embeddings or paths.embeddings, out or paths.report("plates/index.html"))
    plate_pages.write_figure(table, figure or paths.report("plates.svg"))
    pages.plotly_script(plotly or paths.report("plotly.min.js"))


@app.command("report-scores")
def report_scores(
    config: Config,
    decisions: Annotated[list[Path] | None, typer.Argument(help="Decisions of each fold (json).")] = None,
    scores: _path("The score table (parquet).") = None,
    hits: _path("The list of hits (csv).") = None,
    summary: _path("The short printed table (txt).") = None,
    disentangled: _path("disentangled.h5ad.") = None,
    out: _path("The score page.") = None,
    figure: _path("The score figure as SVG.") = None,
) -> None:
    """Write the score page and its figure."""
    from phenoica.report import score_page

    cfg = load(config)
    paths = RunPaths.of(cfg)
    table = scores or paths.scores("parquet")
    score_page.write(
        table, hits or paths.score_file("hits.csv"),
        decisions or sorted(paths.scores("txt").parent.glob("fold-*.json")), summary or paths.scores("txt"),
        disentangled or paths.disentangled, out or paths.report("score.html"), cfg,
    )  # fmt: skip
    score_page.write_figure(table, figure or paths.report("score.svg"), cfg)


@app.command("report-encoder")
def report_encoder(
    config: Config,
    encoder: Annotated[
        Path | None,
        typer.Option(help="Folder that pre-training wrote. Default: that of the run's encoder."),
    ] = None,
    embeddings: _path("embeddings.h5ad.") = None,
    scores: _path("The score table (parquet); of a run without held-out folds, none.") = None,
    out: _path("The page of the encoder.") = None,
    figure: _path("The loss curve as SVG.") = None,
) -> None:
    """Write the page of an encoder that phenoica trained, and its loss curve."""
    from phenoica.report import encoder_page, run_index

    cfg = load(config)
    paths = RunPaths.of(cfg)
    folder = encoder or encoder_page.folder_of(cfg)
    if scores is None and run_index.is_scored(paths):
        scores = paths.scores("parquet")
    encoder_page.write(folder, embeddings or paths.embeddings, scores, out or paths.report("encoder.html"))
    encoder_page.write_figure(folder, figure or paths.report("encoder.svg"))


@app.command("report-index")
def report_index(config: Config, out: _path("The run index page.") = None) -> None:
    """Write the page that links everything; it looks for the files of the run in results/<run>/."""
    from phenoica.report import run_index

    cfg = load(config)
    run_index.write(cfg, out or RunPaths.of(cfg).index)


if __name__ == "__main__":
    main()
