"""The plates stage: metadata and shard keys to wells.parquet, folds.csv, units.csv, design.csv and quarantine.csv.

Only key columns are read from the shards. Everything here derives from metadata and image locations, never from pixels.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from phenoica import files, schema
from phenoica.config import RunPaths
from phenoica.errors import MetadataError
from phenoica.plates.design import design_table
from phenoica.plates.folds import assign_folds, untestable
from phenoica.plates.metadata import read_metadata, wells_from_metadata
from phenoica.plates.shards import find_shards, index_frame

ORPHAN = "image of a well without metadata; add the well to the metadata"
QUARANTINE_COLUMNS = ("key", "well_id", "reason", "shard", "row_group", "row")


def inputs(config: Mapping[str, Any]) -> tuple[list[Path], Path]:
    """Return the shard files, in the order of their numbers, and the metadata file of a run, demo or own."""
    if config["source"] == "demo":
        paths = RunPaths.of(config)
        return paths.demo_shards(config["demo"]["shards"]), paths.demo_metadata
    return find_shards(config["plates"]["shards"]), Path(config["plates"]["metadata"])


def truth_path(config: Mapping[str, Any]) -> Path | None:
    """Return the table of true factors: `truth` of the configuration, or that of the demo plates, or None."""
    if config["truth"] is not None:
        return Path(config["truth"])
    return RunPaths.of(config).demo_truth if config["source"] == "demo" else None


def locate(wells: pd.DataFrame, images: pd.DataFrame, channels: list[int]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Join wells with the locations of their images.

    Parameters
    ----------
    wells
        `schema.WELL_COLUMNS`.
    images
        As the first frame of `index_frame`.
    channels
        The channel numbers each site must have, in the model's order; other channels are left aside.

    Returns
    -------
    (DataFrame, DataFrame)
        The wells with every channel at every site, with `schema.IMAGE_COLUMNS` and `unit`; and the quarantined
        images and wells (`QUARANTINE_COLUMNS`). A well with an incomplete site is quarantined whole, under each of
        its images.
    """
    order = {c: i for i, c in enumerate(channels)}
    known = images[schema.WELL_ID].isin(wells[schema.WELL_ID])
    rejected = [images[~known].assign(reason=ORPHAN)]
    images = images[known & images["channel"].isin(order)]
    images = images.assign(rank=images["channel"].map(order)).sort_values(
        [schema.WELL_ID, "site", "rank"], kind="stable"
    )
    per_site = images.groupby([schema.WELL_ID, "site"])["channel"].agg(set)
    lacking = {}
    for (well, site), present in per_site[per_site.map(len) < len(channels)].items():
        absent = ", ".join(str(c) for c in channels if c not in present)
        lacking.setdefault(well, f"missing channel {absent} at site {site}; the well is left out")
    incomplete = images[schema.WELL_ID].isin(lacking)
    rejected.append(images[incomplete].assign(reason=images.loc[incomplete, schema.WELL_ID].map(lacking)))
    images = images[~incomplete]
    lists = images.groupby(schema.WELL_ID, sort=False).agg(
        **{
            schema.IMAGE_SITE: ("site", list),
            schema.IMAGE_CHANNEL: ("channel", list),
            schema.IMAGE_SHARD: ("shard", list),
            schema.IMAGE_ROW_GROUP: ("row_group", list),
            schema.IMAGE_ROW: ("row", list),
            schema.UNIT: ("shard", "first"),
        }
    )
    located = wells.merge(lists, left_on=schema.WELL_ID, right_index=True, how="inner", validate="1:1")
    imageless = ~wells[schema.WELL_ID].isin(images[schema.WELL_ID]) & ~wells[schema.WELL_ID].isin(lacking)
    rejected.append(
        pd.DataFrame({
            "key": None, schema.WELL_ID: wells.loc[imageless, schema.WELL_ID],
            "reason": "metadata without images; no shard holds the well",
            "shard": -1, "row_group": -1, "row": -1,
        })
    )  # fmt: skip
    frames = [frame[list(QUARANTINE_COLUMNS)] for frame in rejected if len(frame)]
    quarantine = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(QUARANTINE_COLUMNS))
    return located.reset_index(drop=True), quarantine


def units_table(wells: pd.DataFrame, folds: pd.DataFrame) -> pd.DataFrame:
    """Return the job list: a row (kind, name) for each shard with wells, each experiment and each testable fold.

    A fold is listed only where another fold is left to train on.
    """
    fold_numbers = sorted(folds[schema.FOLD].unique())
    names = {
        "shard": sorted(wells[schema.UNIT].unique()),
        "experiment": sorted(wells[schema.EXPERIMENT].unique()),
        "fold": fold_numbers if len(fold_numbers) > 1 else [],
    }
    return pd.DataFrame([(kind, str(n)) for kind, group in names.items() for n in group], columns=["kind", "name"])


def run_plates(shards: Sequence[Path], metadata_path: Path, out_dir: Path, config: Mapping[str, Any]) -> None:
    """Write wells.parquet, folds.csv, units.csv, design.csv and quarantine.csv into `out_dir`.

    Parameters
    ----------
    shards
        Shard files; their order numbers them.
    metadata_path
        csv or parquet in the published columns.
    out_dir
        Folder that receives the five files.
    config
        The resolved configuration.

    Raises
    ------
    MetadataError, ShardError
        If an input cannot be used, or no well has images.
    """
    plates = config["plates"]
    metadata = read_metadata(metadata_path, plates["plate_format"])
    wells = wells_from_metadata(metadata, plates, config["seed"])
    images, rejected = index_frame(shards, plates["plate_format"])
    located, quarantine = locate(wells, images, plates["channels"])
    quarantine = pd.concat([f for f in (rejected, quarantine) if len(f)] or [quarantine], ignore_index=True)
    if located.empty:
        raise MetadataError(
            f"{metadata_path}: none of its {len(wells)} wells has every one of channels {plates['channels']} in the "
            f"{len(shards)} shards; check plates.channels and that well ids are experiment_plate_address"
        )
    _warn(located, quarantine)
    folds = assign_folds(located, config)
    _say_untestable(located, folds)
    schema.check_obs(located, "wells.parquet")
    files.write_parquet(out_dir / "wells.parquet", located)
    files.write_csv(out_dir / "folds.csv", folds)
    files.write_csv(out_dir / "units.csv", units_table(located, folds))
    files.write_csv(out_dir / "design.csv", design_table(metadata, plates))
    files.write_csv(out_dir / "quarantine.csv", with_files(quarantine, shards, metadata_path))


def _warn(wells: pd.DataFrame, quarantine: pd.DataFrame) -> None:
    for reason, rows in quarantine.groupby(quarantine["reason"].str.split(";").str[0]):
        example = rows["key"].dropna().tolist() or rows[schema.WELL_ID].tolist()
        print(f"warning: {len(rows)} quarantined: {reason} (first: {example[0]})", file=sys.stderr)
    controls = wells.assign(n=wells[schema.CONTROL] == schema.NEGATIVE).groupby(schema.PLATE_ID)["n"].sum()
    bare = controls.index[controls < 2]
    if len(bare):
        print(
            f"warning: {len(bare)} plate(s) have fewer than 2 negative controls, first {bare[0]}: no fit and reference "
            "controls there; check plates.negative_controls",
            file=sys.stderr,
        )


def _say_untestable(wells: pd.DataFrame, folds: pd.DataFrame) -> None:
    names = untestable(wells, folds)
    if names:
        shown = ", ".join(names[:10]) + (" ..." if len(names) > 10 else "")
        print(
            f"note: {len(names)} perturbation(s) lie in one fold only and cannot be tested on held-out "
            f"experiments: {shown}",
            file=sys.stderr,
        )


def with_files(quarantine: pd.DataFrame, shards: Sequence[Path], otherwise: str | Path = "") -> pd.DataFrame:
    """Return quarantine rows with the column `file`: the shard that holds the image, else `otherwise`."""
    names = [str(shards[number]) if number >= 0 else str(otherwise) for number in quarantine["shard"]]
    return quarantine[list(QUARANTINE_COLUMNS)].assign(file=names)


def read_wells(path: str | Path) -> pd.DataFrame:
    """Read wells.parquet; image lists become integer arrays."""
    frame = pd.read_parquet(path)
    for column in schema.IMAGE_COLUMNS:
        frame[column] = [np.asarray(v, np.int64) for v in frame[column]]
    return frame
