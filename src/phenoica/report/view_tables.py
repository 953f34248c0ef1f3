"""What the score page shows of whole views: replicates, the batch, few components, and the deletion curve.

The table of scores over folds comes in, cells and notes for two tables go out; nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from phenoica.report.score_cells import cell, in_order, shared_notes
from phenoica.score import names
from phenoica.score.contrasts import QUERY
from phenoica.score.rows import IN_DISTRIBUTION, MACRO, POOLED
from phenoica.score.summary import is_held_out
from phenoica.score.view_scores import DECODING_CONTRAST, DELETION_CONTRAST

# head, contrast, metric, scope, metric of its chance level
COLUMNS = (
    ("Replicates alike (cosine)", QUERY, names.CONSISTENCY, POOLED, names.CONSISTENCY_CHANCE),
    ("Replicates before controls, one experiment (mAP, 0 is chance)", QUERY, names.MAP_SAME_NORMALISED, None, None),
    ("The same across experiments", QUERY, names.MAP_CROSS_NORMALISED, None, None),
    ("AUROC of the best component", QUERY, names.best_components(1), POOLED, None),
    ("AUROC of the best four", QUERY, names.best_components(4), POOLED, None),
    ("Experiment told from controls, held out", DECODING_CONTRAST, names.DECODING, POOLED, names.DECODING_CHANCE),
    ("Experiment told from controls, training", DECODING_CONTRAST, names.DECODING, IN_DISTRIBUTION,
     names.DECODING_CHANCE),
)  # fmt: skip
DELETION_COLUMNS = {
    "Gain": names.DELETION_GAIN, "Held-out AUROC": names.DELETION_AUROC, "Experiment told": names.DELETION_DECODING,
}  # fmt: skip


def view_table(total: pd.DataFrame) -> dict[str, Any]:
    """Return the table of whole views.

    Parameters
    ----------
    total
        Rows over folds; views that have read all test wells are left out.

    Returns
    -------
    dict
        heads, rows (view and cells), notes below; the note of a cell tells its chance level. Without scores, no rows.
    """
    single = total[total["draw"].isna() & total["view_minus"].isna() & is_held_out(total)]
    found: dict[tuple[str, int], Mapping[str, Any]] = {}
    for number, (_, contrast, metric, scope, _chance) in enumerate(COLUMNS):
        for row in _rows(single, contrast, metric, scope).to_dict("records"):
            found[row["view"], number] = row
    rows = []
    for view in in_order([view for view, _ in found]):
        rows.append({"view": view, "cells": [cell(found.get((view, n)), 2) for n in range(len(COLUMNS))]})
    heads = [head for head, *_ in COLUMNS]
    for row in rows:
        for made, (_, contrast, _metric, scope, chance) in zip(row["cells"], COLUMNS, strict=True):
            level = _rows(single[single["view"] == row["view"]], contrast, chance, scope)["value"] if chance else []
            if len(level) and made["value"] != "–":
                made["note"] = "; ".join(filter(None, [f"chance {level.iloc[0]:.2f}", made["note"]]))
    return {"heads": heads, "rows": rows, "notes": shared_notes(heads, rows)}


def _rows(single: pd.DataFrame, contrast: str, metric: str, scope: str | None) -> pd.DataFrame:
    rows = single[(single["contrast"] == contrast) & (single["metric"] == metric)]
    if contrast == QUERY:
        rows = rows[rows["perturbation"] == MACRO]
    return rows if scope is None else rows[rows["scope"] == scope]


def deletion_table(total: pd.DataFrame) -> dict[str, Any]:
    """Return the areas between ica (and pca) and the rotations: heads, rows (view and cells), notes below."""
    found = total[(total["contrast"] == DELETION_CONTRAST) & total["view_minus"].notna()]
    rows = []
    for view, group in found.groupby("view", sort=True):
        by_metric = {row["metric"]: row for row in group.to_dict("records")}
        rows.append({"view": view, "cells": [cell(by_metric.get(m), sign=True) for m in DELETION_COLUMNS.values()]})
    heads = list(DELETION_COLUMNS)
    return {"heads": heads, "rows": rows, "notes": shared_notes(heads, rows)}
