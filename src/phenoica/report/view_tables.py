"""What the score page shows of whole views: replicates, the batch, few components, and the deletion curve.

The table of scores over folds comes in, cells for one table and one sentence go out; nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from phenoica import schema
from phenoica.score import names
from phenoica.score.contrasts import QUERY
from phenoica.score.summary import is_held_out
from phenoica.score.view_scores import DECODING_CONTRAST, DELETION_CONTRAST, MACRO

POOLED, IN_DISTRIBUTION = schema.SCOPES[0], schema.SCOPES[2]
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


def view_table(
    total: pd.DataFrame, cell: Callable[..., dict[str, str]], in_order: Callable[[Sequence[str]], list[str]]
) -> dict[str, Any]:
    """Return the table of whole views.

    Parameters
    ----------
    total
        Rows over folds; views that have read all test wells are left out.
    cell
        Makes a cell of a row (`score_page`).
    in_order
        Puts views into reading order.

    Returns
    -------
    dict
        heads, and rows with view and cells; the note of a cell tells its chance level. Without such scores, no rows.
    """
    single = total[total["draw"].isna() & total["view_minus"].isna() & is_held_out(total)]
    found: dict[tuple[str, int], Mapping[str, Any]] = {}
    for number, (_, contrast, metric, scope, _chance) in enumerate(COLUMNS):
        for row in _rows(single, contrast, metric, scope).to_dict("records"):
            found[row["view"], number] = row
    rows = []
    for view in in_order([view for view, _ in found]):
        cells = []
        for number, (_, contrast, _metric, scope, chance) in enumerate(COLUMNS):
            made = cell(found.get((view, number)), 2)
            level = _rows(single[single["view"] == view], contrast, chance, scope)["value"] if chance else []
            if len(level) and made["value"] != "–":
                made["note"] = "; ".join(filter(None, [f"chance {level.iloc[0]:.2f}", made["note"]]))
            cells.append(made)
        rows.append({"view": view, "cells": cells})
    return {"heads": [head for head, *_ in COLUMNS], "rows": rows}


def _rows(single: pd.DataFrame, contrast: str, metric: str, scope: str | None) -> pd.DataFrame:
    rows = single[(single["contrast"] == contrast) & (single["metric"] == metric)]
    if contrast == QUERY:
        rows = rows[rows["perturbation"] == MACRO]
    return rows if scope is None else rows[rows["scope"] == scope]


def deletion_rows(total: pd.DataFrame, cell: Callable[..., dict[str, str]]) -> list[dict[str, Any]]:
    """Return the areas between ica (and pca) and the rotations: view, and cells of gain, AUROC and decodability."""
    rows = total[(total["contrast"] == DELETION_CONTRAST) & total["view_minus"].notna()]
    result = []
    for view, group in rows.groupby("view", sort=True):
        by_metric = {row["metric"]: row for row in group.to_dict("records")}
        metrics = (names.DELETION_GAIN, names.DELETION_AUROC, names.DELETION_DECODING)
        result.append({"view": view, "cells": [cell(by_metric.get(m), sign=True) for m in metrics]})
    return result
