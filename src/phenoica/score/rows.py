"""The rows of a fold's table: the names of its probes, metrics and contrasts, and the frame they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from phenoica import schema
from phenoica.score import names

POOLED, WITHIN = schema.SCOPES[:2]
L1, L2, TREES, NO_PROBE = "l1", "l2", names.TREES, names.NO_PROBE
AUROC, HOYER = names.AUROC, names.HOYER
CONCENTRATION, L2_METRICS = names.CONCENTRATION, names.L2_CONTROL

CONCENTRATION_CONTRAST = "all_vs_reference"  # effects of all perturbations together
L2_CONTRAST = "l2_control"
ALL = "all"  # the perturbation of these two
ROTATED = ("pca", "rotation", "varimax", "ica")  # views of one fit that differ by an orthogonal matrix

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
