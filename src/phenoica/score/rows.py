"""The rows of the tables of scores: names of probes, metrics and contrasts, the frame they become, and its groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.score import names

POOLED, WITHIN, IN_DISTRIBUTION = schema.SCOPES
MACRO = "macro"  # the perturbation that is the mean over all of a contrast
OVER_FOLDS = -1  # the fold of rows over folds
ROTATION = "rotation"
L1, L2, TREES, NO_PROBE = "l1", "l2", names.TREES, names.NO_PROBE
AUROC, HOYER = names.AUROC, names.HOYER
CONCENTRATION, L2_METRICS = names.CONCENTRATION, names.L2_CONTROL

CONCENTRATION_CONTRAST = "all_vs_reference"  # effects of all perturbations together
L2_CONTRAST = "l2_control"
ALL = "all"  # the perturbation of these two
ROTATED = ("pca", ROTATION, "varimax", "ica")  # views of one fit that differ by an orthogonal matrix

# a fold's table has two more columns than the final one: pairs compared, and the AUROC's plate-stratified variance
PAIRS, VARIANCE = "pairs", "variance"
FOLD_COLUMNS = (*schema.SCORE_COLUMNS, PAIRS, VARIANCE)
_INTEGERS = ("n_components", "draw", "n_case", "n_reference", "n_experiments", "fold", PAIRS)
_FLOATS = ("value", "ci_low", "ci_high", VARIANCE)


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """Return rows as a frame with exactly `columns`: nullable integers, float64 numbers, text or None elsewhere."""
    frame = pd.DataFrame(list(rows), columns=list(columns))
    for name in frame.columns:
        if name in _INTEGERS:
            frame[name] = frame[name].astype("Int64")
        elif name in _FLOATS:
            frame[name] = frame[name].astype("float64")
        else:
            frame[name] = frame[name].astype(object).where(frame[name].notna(), None)
    return frame


class Grouped:
    """A table of scores as plain lists, and its groups: thousands of small groups are too many for frames.

    Parameters
    ----------
    frame
        Rows of scores, with `value`, `reason` and the numbers of wells and experiments.
    columns
        What identifies a group; null is a key like any other.

    Attributes
    ----------
    records
        A dict a row.
    value
        float64 (n,).
    counts
        int64 (n,) n_case, n_reference and n_experiments, 0 where null.
    groups
        Positions of the rows of each group, int (m,), in order of appearance.
    """

    def __init__(self, frame: pd.DataFrame, columns: Sequence[str]):
        self.columns = list(columns)
        self.records = frame.to_dict("records")
        self.value = frame["value"].to_numpy(np.float64)
        self.counts = {
            c: frame[c].fillna(0).to_numpy(np.int64) for c in ("n_case", "n_reference", "n_experiments")
        }  # fmt: skip
        codes = frame.groupby(self.columns, sort=False, dropna=False).ngroup().to_numpy()
        order = np.argsort(codes, kind="stable")
        self.groups = np.split(order, np.flatnonzero(np.diff(codes[order])) + 1) if len(codes) else []

    def key(self, group: np.ndarray) -> dict[str, Any]:
        """Return what identifies a group, and its n_components; None for null."""
        first = self.records[group[0]]
        return {c: None if pd.isna(first[c]) else first[c] for c in [*self.columns, "n_components"]}

    def known(self, group: np.ndarray) -> np.ndarray:
        """Return the rows of a group that have a value."""
        return group[np.isfinite(self.value[group])]

    def numbers(self, group: np.ndarray, column: str) -> np.ndarray:
        """Return a column of a group as float64 (m,), NaN for null."""
        found = [self.records[i][column] for i in group]
        return np.array([np.nan if pd.isna(v) else v for v in found], dtype=np.float64)

    def reasons(self, group: np.ndarray) -> str | None:
        """Return the reasons of a group, joined; None when it has none."""
        found = [self.records[i]["reason"] for i in group]
        return ";".join(sorted({r for text in found if not pd.isna(text) for r in text.split(";")})) or None
