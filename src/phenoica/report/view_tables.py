"""What the score page shows of whole views: replicates, the batch, few components, and the deletion curve.

The table of scores over folds comes in, cells for one table and one sentence go out; nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

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
    notes = shared_notes(heads, rows)
    for row in rows:
        for made, (_, contrast, _metric, scope, chance) in zip(row["cells"], COLUMNS, strict=True):
            level = _rows(single[single["view"] == row["view"]], contrast, chance, scope)["value"] if chance else []
            if len(level) and made["value"] != "–":
                made["note"] = "; ".join(filter(None, [f"chance {level.iloc[0]:.2f}", made["note"]]))
    return {"heads": heads, "rows": rows, "notes": notes}


def shared_notes(heads: Sequence[str], table: Sequence[Mapping[str, Any]]) -> list[str]:
    """Take the notes that all rows of a column share out of its cells.

    Parameters
    ----------
    heads
        Of the columns.
    table
        Rows with `cells`, each with a value and a note; shared notes are emptied. A cell of a mere dash shares any.

    Returns
    -------
    list of str
        Each such note once, after the heads of its columns.
    """
    found: dict[str, list[str]] = {}
    for column, head in enumerate(heads):
        cells = [row["cells"][column] for row in table]
        cells = [c for c in cells if c["note"] or c["value"] != "–"]
        if len(cells) > 1 and cells[0]["note"] and len({c["note"] for c in cells}) == 1:
            found.setdefault(cells[0]["note"], []).append(head)
            for cell in cells:
                cell["note"] = ""
    return [f"{'; '.join(columns)}: {note}." for note, columns in found.items()]


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
