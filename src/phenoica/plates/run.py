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
from phenoica.plates.profiles import NO_METADATA, NO_PROFILE, find_profiles, listed, profile_metadata
from phenoica.plates.shards import find_shards, index_frame

# what to do with a well that lacks a channel (plates.missing_channels)
DROP_WELL, AVAILABLE_CHANNELS = "drop_well", "available_channels"
ORPHAN = "image of a well without metadata; add the well to the metadata"
IMAGELESS = "metadata without images; no shard holds the well"
QUARANTINE_COLUMNS = ("key", "well_id", "reason", "shard", "row_group", "row")


def inputs(config: Mapping[str, Any]) -> tuple[list[Path], Path | None]:
    """Return the files of a run, in the order of their numbers, and its metadata file.

    The files are shards, or profiles where these are the source; those may say themselves what their wells are, and
    then there is no metadata file.
    """
    if config["source"] == "profiles":
        metadata = config["plates"]["metadata"]
        return find_profiles(config), Path(metadata) if metadata else None
    if config["source"] == "demo":
        paths = RunPaths.of(config)
        return paths.demo_shards(config["demo"]["shards"]), paths.demo_metadata
    return find_shards(config["plates"]["shards"]), Path(config["plates"]["metadata"])


def truth_path(config: Mapping[str, Any]) -> Path | None:
    """Return the table of true factors: `truth` of the configuration, or that of the demo plates, or None."""
    if config["truth"] is not None:
        return Path(config["truth"])
    return RunPaths.of(config).demo_truth if config["source"] == "demo" else None


def locate(
    wells: pd.DataFrame, images: pd.DataFrame, channels: list[int], missing_channels: str = DROP_WELL
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Join wells with the locations of their images.

    Parameters
    ----------
    wells
        `schema.WELL_COLUMNS`.
    images
        As the first frame of `index_frame`.
    channels
        The channel numbers each site must have, in the model's order; other channels are left aside.
    missing_channels
        drop_well leaves a well with an incomplete site out; available_channels keeps it with the channels that all its
        sites have.

    Returns
    -------
    (DataFrame, DataFrame)
        The wells, in their order, with `schema.IMAGE_COLUMNS` (lists) and `unit`; and the quarantined images and wells
        (`QUARANTINE_COLUMNS`): images of unknown wells, wells without images, and a well that is left out under each
        of its images.
    """
    ids = images[schema.WELL_ID].astype("category").cat
    well = pd.Index(wells[schema.WELL_ID]).get_indexer(ids.categories)[ids.codes]
    rejected = [images[well < 0].assign(reason=ORPHAN)]
    rank = pd.Index(channels).get_indexer(images["channel"])
    used = np.flatnonzero((well >= 0) & (rank >= 0))
    used = used[np.lexsort((rank[used], images["site"].to_numpy()[used], well[used]))]
    images, well, rank = images.iloc[used], well[used], rank[used]
    kept, lacking = _complete(well, images["site"].to_numpy(), rank, channels, missing_channels)
    left_out = images[~kept & np.isin(well, list(lacking))]
    reasons = [lacking[w] for w in well[~kept & np.isin(well, list(lacking))]]
    rejected.append(left_out.assign(reason=reasons))
    located = _with_lists(wells, images[kept], well[kept])
    imageless = ~np.isin(np.arange(len(wells)), well)
    rejected.append(
        pd.DataFrame({
            "key": None, schema.WELL_ID: wells.loc[imageless, schema.WELL_ID],
            "reason": IMAGELESS,
            "shard": -1, "row_group": -1, "row": -1,
        })
    )  # fmt: skip
    text = {"key": object, schema.WELL_ID: object}
    frames = [frame[list(QUARANTINE_COLUMNS)].astype(text) for frame in rejected if len(frame)]
    quarantine = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(QUARANTINE_COLUMNS))
    return located, quarantine


def _complete(
    well: np.ndarray, site: np.ndarray, rank: np.ndarray, channels: list[int], missing_channels: str
) -> tuple[np.ndarray, dict[int, str]]:
    """Say which images are used, bool (n,), and why a well is left out; images are sorted by well, site, channel."""
    starts = np.flatnonzero(np.r_[True, (np.diff(well) != 0) | (np.diff(site) != 0)]) if len(well) else np.empty(0, int)
    stops = np.r_[starts[1:], len(well)]
    kept = np.ones(len(well), bool)
    lacking: dict[int, str] = {}
    for w in np.unique(well[starts[stops - starts < len(channels)]]):
        first, last = np.searchsorted(well, [w, w + 1])
        present = {s: {channels[r] for r in rank[first:last][site[first:last] == s]} for s in site[first:last]}
        common = set.intersection(*present.values())
        if missing_channels == AVAILABLE_CHANNELS and common:
            kept[first:last] = [channels[r] in common for r in rank[first:last]]
            continue
        kept[first:last] = False
        s, there = next((s, there) for s, there in present.items() if len(there) < len(channels))
        absent = ", ".join(str(c) for c in channels if c not in there)
        lacking[w] = f"missing channel {absent} at site {s}; the well is left out"
    return kept, lacking


def _with_lists(wells: pd.DataFrame, images: pd.DataFrame, well: np.ndarray) -> pd.DataFrame:
    """Return the wells that have images, each with the lists of its images' places; images are sorted by well."""
    there, starts = np.unique(well, return_index=True)
    located = wells.iloc[there].reset_index(drop=True)
    sources = ("site", "channel", "shard", "row_group", "row")
    for name, source in zip(schema.IMAGE_COLUMNS, sources, strict=True):
        values = np.split(images[source].to_numpy(np.int64), starts[1:])
        located[name] = pd.Series([v.tolist() for v in values] if len(there) else [], dtype=object)
    located[schema.UNIT] = images["shard"].to_numpy(np.int64)[starts]
    return located


def units_table(wells: pd.DataFrame, folds: pd.DataFrame) -> pd.DataFrame:
    """Return the job list: a row (kind, name) for each shard with wells, each experiment and each testable fold.

    Profiles have no shards.

    A fold is listed only where another fold is left to train on.
    """
    fold_numbers = sorted(folds[schema.FOLD].unique())
    names = {
        "shard": sorted(wells[schema.UNIT].unique()) if schema.UNIT in wells.columns else [],
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
    located, quarantine = locate(wells, images, plates["channels"], plates["missing_channels"])
    quarantine = pd.concat([f for f in (rejected, quarantine) if len(f)] or [quarantine], ignore_index=True)
    if located.empty:
        raise MetadataError(
            f"{metadata_path}: none of its {len(wells)} wells has every one of channels {plates['channels']} in the "
            f"{len(shards)} shards; check plates.channels and that well ids are experiment_plate_address"
        )
    _judge_orphans(quarantine, plates["orphans"], {ORPHAN: metadata_path, IMAGELESS: listed(shards)})
    _write(located, metadata, with_files(quarantine, shards, metadata_path), out_dir, config)


def _write(
    wells: pd.DataFrame, metadata: pd.DataFrame, quarantine: pd.DataFrame, out_dir: Path, config: Mapping[str, Any]
) -> None:
    """Assign folds, say what is left out or cannot be tested, and write the five files of the stage."""
    _warn(wells, quarantine)
    folds = assign_folds(wells, config)
    _say_untestable(wells, folds)
    schema.check_obs(wells, "wells.parquet")
    files.write_parquet(out_dir / "wells.parquet", wells)
    files.write_csv(out_dir / "folds.csv", folds)
    files.write_csv(out_dir / "units.csv", units_table(wells, folds))
    files.write_csv(out_dir / "design.csv", design_table(metadata, config["plates"]))
    files.write_csv(out_dir / "quarantine.csv", quarantine)


def _judge_orphans(left_out: pd.DataFrame, policy: str, reasons: Mapping[str, str | Path | None]) -> None:
    """Stop where `plates.orphans` is error and wells were left out for one of the reasons (reason -> what lacks them).

    Raises
    ------
    MetadataError
        With the number of each and their first wells.
    """
    parts = []
    for reason, where in reasons.items():
        wells = left_out.loc[left_out["reason"] == reason, schema.WELL_ID].drop_duplicates()
        if len(wells):
            shown = ", ".join(wells.head(5)) + ", ..." * (len(wells) > 5)
            parts.append(f"{len(wells)} wells are not in {where}: {shown}")
    if parts and policy == "error":
        raise MetadataError("; ".join(parts) + ". Mend the files, or set plates.orphans to warn")


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


def run_profile_plates(
    profiles: Sequence[Path], metadata_path: Path | None, out_dir: Path, config: Mapping[str, Any]
) -> None:
    """Write the files of `run_plates` for profiles instead of images.

    wells.parquet has `schema.PROFILE_FILE` and `schema.PROFILE_ROW` in the place of the image columns, and `cell_count`
    where it is known; units.csv lists experiments and folds only.

    Parameters
    ----------
    profiles
        Files of profiles; their order numbers them.
    metadata_path
        Published metadata, or None where the files say what their wells are.
    out_dir
        Folder that receives the five files.
    config
        The resolved configuration.

    Raises
    ------
    MetadataError
        If an input cannot be used, or no well has a profile.
    """
    plates = config["plates"]
    metadata, left_out = profile_metadata(profiles, config, metadata_path)
    if metadata.empty:
        raise MetadataError(
            f"{metadata_path}: none of its wells is in {profiles[0]} and the other files; check that both spell well "
            "ids alike (experiment_plate_address), and profiles.columns.well_id"
        )
    _judge_orphans(left_out, plates["orphans"], {NO_METADATA: metadata_path, NO_PROFILE: listed(profiles)})
    wells = wells_from_metadata(metadata, plates, config["seed"])
    more = [c for c in (schema.PROFILE_FILE, schema.PROFILE_ROW, schema.CELL_COUNT) if c in metadata.columns]
    wells = wells.merge(metadata[[schema.WELL_ID, *more]], on=schema.WELL_ID, validate="1:1")
    _write(wells, metadata, profile_quarantine(left_out, profiles, metadata_path or ""), out_dir, config)


def profile_quarantine(left_out: pd.DataFrame, profiles: Sequence[Path], otherwise: str | Path = "") -> pd.DataFrame:
    """Return wells that were left out (well_id, reason, profile_file, profile_row) as rows of quarantine.csv."""
    numbers = left_out[schema.PROFILE_FILE].to_numpy(np.int64)
    frame = pd.DataFrame({
        "key": None, schema.WELL_ID: left_out[schema.WELL_ID].to_numpy(), "reason": left_out["reason"].to_numpy(),
        "shard": -1, "row_group": -1, "row": left_out[schema.PROFILE_ROW].to_numpy(np.int64),
    })  # fmt: skip
    return frame.assign(file=[str(profiles[n]) if n >= 0 else str(otherwise) for n in numbers])
