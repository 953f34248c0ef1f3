"""The page a run starts from: where its files and pages are, and what they were made with.

The folder of a run and its configuration come in; index.html goes out. Stages that a run did not reach (one
experiment has no held-out fold) are named as such.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from phenoica import config as configuration
from phenoica import schema
from phenoica.config import RunPaths
from phenoica.embed.encoder import encoder_folder
from phenoica.errors import SchemaError
from phenoica.report import pages
from phenoica.report.plate_pages import not_measured_sentence
from phenoica.report.score_page import verdict


def write(config: Mapping[str, Any], out_path: str | os.PathLike | None = None) -> None:
    """Write index.html of a run.

    Parameters
    ----------
    config
        The resolved configuration; `config.RunPaths` says where the run's files are.
    out_path
        The page; by default index.html in the folder of the run.

    Raises
    ------
    SchemaError
        If embeddings.h5ad was not written by phenoica.
    """
    paths = RunPaths.of(config)
    page = Path(out_path) if out_path is not None else paths.index
    uns = pages.read_uns(paths.embeddings)
    plates = pd.read_parquet(paths.qc_plates)
    scored = is_scored(paths)
    summary = paths.scores("txt").read_text(encoding="utf-8") if scored else ""
    pages.write_page(
        "run.html",
        page,
        title=config["report"]["title"],
        run=config["run"],
        demo=config["source"] == "demo",
        profiles=config["source"] == "profiles",
        not_measured=not_measured_sentence(plates.iloc[0]) if config["source"] == "profiles" else "",
        links=[_entry(page, *entry, scored=scored) for entry in _pages(paths, config)],
        data=[_entry(page, *entry, scored=scored) for entry in _data(paths, config)],
        n_wells=int(plates["n_wells"].sum()),
        n_plates=len(plates),
        n_experiments=int(plates[schema.EXPERIMENT].nunique()),
        n_flagged_plates=int((plates["flags"] != "").sum()),
        n_acquisition=int(plates["n_acquisition"].sum()),
        design=design(paths),
        quarantine=quarantine(paths),
        quarantine_link=pages.link(paths.quarantine, page),
        verdict=verdict(summary) if scored else "",
        summary=summary,
        provenance=provenance(config, uns),
        settings=list(flatten(config)),
        sentences=pages.encoder_sentences(uns),
    )


def is_scored(paths: RunPaths) -> bool:
    """Return whether the run has a held-out fold and its table of scores is there.

    A file of an earlier run under this name must not pass for a result of this one.

    Raises
    ------
    SchemaError
        If the run has no job list.
    """
    if not paths.plates("units.csv").is_file():
        raise SchemaError(f"{paths.plates('units.csv')}: no such file; run `phenoica plates`")
    units = pd.read_csv(paths.plates("units.csv"), dtype=str, keep_default_na=False)
    return bool((units["kind"] == "fold").any()) and paths.scores("txt").exists()


def _pages(paths: RunPaths, config: Mapping[str, Any]) -> Iterator[tuple]:
    yield paths.report("plates/index.html"), "All plates", "quality of every plate, with a page for each"
    yield paths.report("score.html"), "Scores", "held-out AUROC beside every baseline, sparsity, components", True
    if encoder_folder(config) is not None:
        yield paths.report("encoder.html"), "Encoder", "how it was trained, its loss, what it can fill in"


def _data(paths: RunPaths, config: Mapping[str, Any]) -> Iterator[tuple]:
    profiles = config["source"] == "profiles"
    content = "the profiles" if profiles else "raw embedding and image measures"
    yield paths.disentangled, "disentangled.h5ad", "AnnData: every well in the views of the exploration fit", True
    yield paths.embeddings, "embeddings.h5ad", f"AnnData: {content}"
    yield paths.scores("csv"), "scores.csv", "the score table, one row a score", True
    yield paths.score_file("hits.csv"), "hits.csv", "every perturbation with effect, interval, p, q and flags", True
    yield paths.deletion, "deletion.parquet", "scores while batch-bound components are dropped", True
    yield paths.consensus, "consensus.h5ad", "guides and perturbations (exploration fit)", True
    yield paths.guide_concordance, "guide_concordance.csv", "whether the guides of a gene agree", True
    if any(config["known_biology"][name] for name in ("gene_pairs", "compound_targets")):
        yield paths.known_biology, "known_biology.csv", "what is found again of known biology", True
    places = "where its profile is" if profiles else "image locations"
    yield paths.plates("wells.parquet"), "wells.parquet", f"every well: metadata, controls, {places}"
    yield paths.plates("design.csv"), "design.csv", "every treatment: label, control, wells, addresses"
    yield paths.plates("folds.csv"), "folds.csv", "the fold of every experiment"
    yield paths.qc_wells, "qc/wells.parquet", "flags of every well"
    yield paths.qc_plates, "qc/plates.parquet", "numbers and flags of every plate"
    yield paths.config, "config.json", "the configuration, defaults included; `phenoica` takes it with --config"


def _entry(
    page: Path, target: Path, name: str, what: str, needs_folds: bool = False, *, scored: bool
) -> dict[str, Any]:
    return {
        "link": pages.link(target, page),
        "path": str(target),
        "name": name,
        "what": what,
        "exists": target.exists() and (scored or not needs_folds),
        "needs_folds": needs_folds,
    }


def design(paths: RunPaths) -> dict[str, Any]:
    """Return the control rows of design.csv, and how many other treatments there are and how many sit fixed.

    A treatment is fixed when all its wells, of at least two plates, have one address: position could explain it.
    """
    table = pd.read_csv(paths.plates("design.csv"), keep_default_na=False)
    control = table[schema.CONTROL] != schema.NONE
    fixed = (table["n_addresses"] == 1) & (table["n_plates"] > 1)
    return {
        "rows": table[control].to_dict("records"),
        "n_other": int((~control).sum()),
        "n_fixed": int((fixed & ~control).sum()),
        "inferred": bool((table["control_source"] == "inferred").any()),
    }


def quarantine(paths: RunPaths) -> dict[str, Any]:
    """Return how many images and wells were left out, and the reasons with their counts."""
    table = pd.read_csv(paths.quarantine, dtype=str, keep_default_na=False)
    reasons = table["reason"].value_counts()
    return {
        "n_entries": len(table),
        "n_wells": int(table.loc[table[schema.WELL_ID] != "", schema.WELL_ID].nunique()),
        "reasons": [(str(reason), int(n)) for reason, n in reasons.head(10).items()],
        "n_more": max(len(reasons) - 10, 0),
    }


def provenance(config: Mapping[str, Any], uns: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what the results were made with, as names and texts."""
    profiles = config["source"] == "profiles"
    listed = [("SHA-256 of a file of profiles", str(line)) for line in uns.get("profiles_sha256", [])]
    return [
        ("Profiles" if profiles else "Encoder", str(uns["checkpoint"])),
        *(listed or [("SHA-256 of the checkpoint", str(uns["checkpoint_sha256"]) or "none")]),
        ("Encoder trained on images of these experiments", str(uns["encoder_saw_test_images"])),
        ("Licences", str(uns["licences"])),
        ("Seed", str(config["seed"])),
        ("Fingerprint of the configuration", configuration.fingerprint(config)),
        ("Version of phenoica that embedded", str(uns["version"])),
    ]


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every key of a configuration as a dotted name and its value as text."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            yield f"{prefix}{key}", "(not set)" if value is None or value == [] else text
