"""Flags of wells and plates, with the words that explain them.

Acquisition flags say that the images do not show the biology (blurred, saturated, incomplete, nothing
dispensed); their limits come from the negative controls of the same plate and they alone decide `qc_pass`.
Phenotype flags say that a well is unusual (cell count, distance to the controls) and only annotate:
excluding them would delete the toxic perturbations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from phenoica import schema
from phenoica.errors import SchemaError
from phenoica.qc import plate_stats

if TYPE_CHECKING:
    import pandas as pd

FOCUS, SATURATION, MISSING, EMPTY = "focus", "saturation", "missing", "empty"
PLATE_FOCUS, DISPENSER = "plate_focus", "dispenser"
COUNT, DISTANCE, NO_CELLS, LOW_FOCUS = "count", "distance", "no_cells", "low_focus"
NO_LIMITS = "no_limits"

ACQUISITION_WORDS = {
    FOCUS: "out of focus: much blurrier than the control wells of this plate",
    SATURATION: "saturated: too many pixels are at the brightest value",
    MISSING: "incomplete: images or measures of this well are missing",
    EMPTY: "empty: no cells and next to no signal in any channel",
    PLATE_FOCUS: "on a plate that is out of focus as a whole",
    DISPENSER: "in a plate column that looks as if nothing was dispensed into it",
}
PHENOTYPE_WORDS = {
    COUNT: "unusual number of cells for this plate",
    DISTANCE: "embedding far from the control wells of this plate",
    NO_CELLS: "no cells, as in other wells of this perturbation: read as a strong effect, not as a failure",
    LOW_FOCUS: "blurrier than the control wells, as other wells of this perturbation: read as an effect",
}
SPARED = {EMPTY: NO_CELLS, FOCUS: LOW_FOCUS}  # what these two become where replicates show them
PLATE_WORDS = {
    PLATE_FOCUS: "the whole plate is blurrier than the other plates of its experiment",
    DISPENSER: "a plate column looks as if nothing was dispensed into it",
    NO_LIMITS: "too few usable negative controls: limits that need them could not be set",
}

# what a run of profiles may not have, and what follows
NO_MEASURES, NO_COUNTS = schema.IMAGE_MEASURES, schema.CELL_COUNT
NOT_MEASURED_WORDS = {
    NO_MEASURES: "focus, saturation, intensity and empty wells (there are no images, so no acquisition flag either)",
    NO_COUNTS: "cell counts and what is made of them: count flags, their Z′, the edge effect, blocked columns",
}

EMPTY_SHARE = 0.05  # an empty well counts at most this share of the controls' median: a stray speck or two
SEPARATOR = ";"


def join(flags: set[str], order: Mapping[str, str]) -> str:
    """Return flag names in the order of their dictionary, joined by a semicolon; "" for none."""
    return SEPARATOR.join(name for name in order if name in flags)


def split(text: str) -> list[str]:
    """Return the flag names in a joined text."""
    return [name for name in str(text).split(SEPARATOR) if name]


def channels(measures: pd.DataFrame) -> list[int]:
    """Return the sorted channel numbers that a table of image measures covers.

    Raises
    ------
    SchemaError
        If no column is named like c1_focus.
    """
    found = sorted(int(m[1]) for m in (re.fullmatch(r"c(\d+)_focus", str(c)) for c in measures.columns) if m)
    if not found:
        raise SchemaError(f"obsm[{schema.IMAGE_MEASURES!r}]: no column like c1_focus; rerun the embed stage")
    return found


def measure(measures: pd.DataFrame, name: str) -> np.ndarray:
    """Return one measure of every channel as a float64 array (wells, channels).

    Raises
    ------
    SchemaError
        Naming the columns that are missing.
    """
    columns = [f"c{c}_{name}" for c in channels(measures)]
    missing = [c for c in columns if c not in measures.columns]
    if missing:
        raise SchemaError(f"obsm[{schema.IMAGE_MEASURES!r}]: columns {', '.join(missing)} are missing; rerun embed")
    return measures[columns].to_numpy(dtype=np.float64)


def cell_counts(obs: pd.DataFrame) -> np.ndarray:
    """Return the cell count of each well, float64 (n,); NaN where none is known."""
    if schema.CELL_COUNT not in obs.columns:
        return np.full(len(obs), np.nan)
    return obs[schema.CELL_COUNT].to_numpy(dtype=np.float64)


def complete_wells(obs: pd.DataFrame, measures: pd.DataFrame) -> np.ndarray:
    """Return which wells have every tile and only finite numbers, as booleans (n,).

    A well with fewer tiles than the fullest well of its plate has lost a site.
    """
    names = ("focus", "sd", "saturated", "empty", "mean")
    finite = np.isfinite(np.column_stack([measure(measures, name) for name in names])).all(axis=1)
    finite &= np.isfinite(obs[schema.CELL_COUNT].to_numpy(dtype=np.float64))
    most = obs.groupby(schema.PLATE_ID, observed=True)[schema.N_TILES].transform("max")
    return finite & (obs[schema.N_TILES].to_numpy() >= most.to_numpy())


def acquisition_flags(
    obs: pd.DataFrame, measures: pd.DataFrame, complete: np.ndarray, config: Mapping[str, Any]
) -> tuple[list[set[str]], list[str]]:
    """Return the acquisition flags of the wells of one plate, and why any limit could not be set.

    Parameters
    ----------
    obs, measures
        n wells of one plate, aligned by position.
    complete
        (n,) boolean; incomplete wells get the flag `missing` and take no part in limits.
    config
        The resolved configuration; reads `qc.limit_mads` and `qc.max_saturated_share`.
    """
    flags: list[set[str]] = [set() if ok else {MISSING} for ok in complete]
    limit, reasons = config["qc"]["limit_mads"], []
    control = (obs[schema.CONTROL].to_numpy() == schema.NEGATIVE) & complete

    def add(name: str, where: np.ndarray) -> None:
        for i in np.flatnonzero(where & complete):
            flags[i].add(name)

    add(SATURATION, (measure(measures, "saturated") > config["qc"]["max_saturated_share"]).any(axis=1))
    empty, reason = empty_wells(obs, measures, complete, control, limit)
    if reason:
        reasons.append(f"no empty-well limit: {reason}")
    add(EMPTY, empty)
    focus_z, reason = plate_stats.channel_z(np.where(complete[:, None], measure(measures, "focus"), 0.0), control)
    if focus_z is None:
        reasons.append(f"no focus limit: {reason}")
    else:
        # the median over channels: a blurred well is so in every stain, a texture phenotype usually only in
        # some; a well without any signal has no focus to judge
        add(FOCUS, (np.median(focus_z, axis=1) < -limit) & ~empty)
    return flags, reasons


def empty_wells(
    obs: pd.DataFrame, measures: pd.DataFrame, complete: np.ndarray, control: np.ndarray, limit: float
) -> tuple[np.ndarray, str]:
    """Return which wells of a plate hold nothing, and why the limit could not be set ("" if it could).

    A well is empty if every channel is blank (no block of pixels varies); or if it counts at most
    `EMPTY_SHARE` of the controls' median and the log of the grey values' sd is more than `limit` robust sd
    below the controls in every channel. A few cells of a toxic perturbation are bright, so they do not look
    like that.

    Parameters
    ----------
    obs, measures
        n wells of one plate.
    complete, control
        (n,) boolean.
    limit
        `qc.limit_mads`.
    """
    blank = (measure(measures, "empty") >= 1).all(axis=1) & complete
    sd = np.where(complete[:, None], np.maximum(measure(measures, "sd"), np.finfo(np.float64).tiny), 1.0)
    z, reason = plate_stats.channel_z(np.log(sd), control)
    if z is None:
        return blank, reason
    count = obs[schema.CELL_COUNT].to_numpy(dtype=np.float64)
    few = count <= EMPTY_SHARE * np.median(count[control])
    return blank | (complete & few & (z < -limit).all(axis=1)), ""


def phenotype_flags(
    obs: pd.DataFrame,
    complete: np.ndarray,
    distance: np.ndarray,
    known: np.ndarray,
    config: Mapping[str, Any],
) -> tuple[list[set[str]], list[str]]:
    """Return the phenotype flags of the wells of one plate, and why any limit could not be set.

    Parameters
    ----------
    obs
        n wells of one plate.
    complete
        (n,) boolean.
    distance, known
        (n,) from `plate_stats.control_distance`.
    config
        The resolved configuration; reads `qc.phenotype_mads`.
    """
    flags: list[set[str]] = [set() for _ in range(len(obs))]
    limit, reasons = config["qc"]["phenotype_mads"], []
    count = cell_counts(obs)
    counted = complete & np.isfinite(count)
    negative = (obs[schema.CONTROL].to_numpy() == schema.NEGATIVE) & complete
    counts = plate_stats.spread(count[negative & counted], "negative controls")
    # fit controls leave themselves out of the centre, so both roles are nulls of the same distance
    distances = plate_stats.spread(distance[negative & known], "negative controls with a distance")
    if counts.usable:
        for i in np.flatnonzero(counted & (np.abs(counts.z(count)) > limit)):
            flags[i].add(COUNT)
    elif schema.CELL_COUNT in obs.columns:
        reasons.append(f"no cell count limit: {counts.reason}")
    if distances.usable:
        for i in np.flatnonzero(complete & known & (distances.z(distance) > limit)):
            flags[i].add(DISTANCE)
    else:
        reasons.append(f"no distance limit: {distances.reason}")
    return flags, reasons


def spare_replicated_failures(
    acquisition: Sequence[set[str]],
    phenotype: Sequence[set[str]],
    perturbation: np.ndarray,
    experiment: np.ndarray,
    control: np.ndarray,
) -> None:
    """Turn `empty` and `focus` into phenotype flags (see `SPARED`) where replicates have one too, in place.

    One well without cells may be a failed dispense and one blurred well a failed image; when at least half of
    the other wells of the same perturbation in the same experiment (two or more, on whatever plate) are empty
    or blurred as well, the perturbation does that and must not be deleted. The two flags count alike, because
    a well with next to no cells is called one or the other by chance. Other experiments have no say: a
    held-out one would decide which wells are trained on.

    Parameters
    ----------
    acquisition, phenotype
        n sets of flags each, all wells of the run; before flags of whole plates or columns are added.
    perturbation, experiment, control
        (n,) labels; negative controls are never spared.
    """
    failed = np.array([not f.isdisjoint(SPARED) for f in acquisition], dtype=bool)
    for label, where in sorted(set(zip(perturbation[failed], experiment[failed], strict=True))):
        rows = np.flatnonzero((perturbation == label) & (experiment == where) & (control != schema.NEGATIVE))
        others_failed, others = failed[rows].sum() - 1, len(rows) - 1
        if others_failed >= max(2, others / 2):
            for i in rows:
                phenotype[i].update(SPARED[name] for name in acquisition[i] & SPARED.keys())
                acquisition[i] -= SPARED.keys()
