"""Cells, and the order of rows, that the tables of the score page share.

Rows of the table of scores come in; texts of a value, its interval and its reason go out. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from phenoica.report import pages
from phenoica.score.baselines import BASELINES, PERMUTED
from phenoica.score.contrasts import OF_FOLDS, REASONS
from phenoica.score.intervals import WITHIN_EXPERIMENTS
from phenoica.score.rows import ROTATION

NULLS = (ROTATION, PERMUTED)
INTERVAL_NOTE = f"interval {WITHIN_EXPERIMENTS}"


def kind(view: str) -> str:
    """Return how a row of the table is drawn: view, baseline, or null (what chance alone gives)."""
    return "null" if view in NULLS else "baseline" if view in BASELINES else "view"


def in_order(views: Sequence[str]) -> list[str]:
    """Return rows in reading order: views, the random rotation after pca, baselines in theirs, permuted labels last."""
    names = list(dict.fromkeys(views))
    ordered = [v for v in names if kind(v) == "view"]
    if ROTATION in names:
        ordered.insert(ordered.index("pca") + 1 if "pca" in ordered else len(ordered), ROTATION)
    return ordered + [v for v in BASELINES if v in names]


def by_order(frame: pd.DataFrame, column: str = "view") -> list[dict[str, Any]]:
    """Return the rows of a table as mappings, in the order of `in_order`."""
    order = in_order(frame[column])
    return sorted(frame.to_dict("records"), key=lambda row: order.index(row[column]))


def cell(row: Mapping[str, Any] | None, decimals: int = 3, sign: bool = False) -> dict[str, str]:
    """Return a score as text: its value, its interval, and why either is missing.

    Parameters
    ----------
    row
        With value, ci_low, ci_high, ci_kind and reason; None where there is no such score.
    decimals
        Of the value; bounds have two.
    sign
        Whether positive numbers get a plus.
    """
    if row is None or pages.is_missing(row["value"]):
        return {"value": "–", "range": "", "note": reason_words(row["reason"]) if row else "", "sort": ""}
    interval, notes = "", [reason_words(row["reason"], has_value=True)]
    if not pages.is_missing(row["ci_low"]):
        interval = f"{pages.fixed(row['ci_low'], 2, sign)} to {pages.fixed(row['ci_high'], 2, sign)}"
        if row["ci_kind"] == WITHIN_EXPERIMENTS:
            notes.insert(0, INTERVAL_NOTE)
    return {
        "value": pages.fixed(row["value"], decimals, sign),
        "range": interval,
        "note": "; ".join(filter(None, notes)),
        "sort": str(row["value"]),
    }


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
        Each such note once, after the heads of its columns; after "All columns" where it is that of every column.
    """
    found: dict[str, list[str]] = {}
    for column, head in enumerate(heads):
        cells = [row["cells"][column] for row in table]
        cells = [c for c in cells if c["note"] or c["value"] != "–"]
        if len(cells) > 1 and cells[0]["note"] and len({c["note"] for c in cells}) == 1:
            found.setdefault(cells[0]["note"], []).append(head)
            for shared in cells:
                shared["note"] = ""
    return [
        f"{'All columns' if len(columns) == len(heads) > 1 else '; '.join(columns)}: {note}."
        for note, columns in found.items()
    ]


def row_note(cells: Sequence[Mapping[str, Any]]) -> str:
    """Take the notes that all cells of a row share out of them, and return them as one text.

    Parameters
    ----------
    cells
        As from `cell`; one without a value has no say, one without an interval none in what intervals speak of.
    """

    def is_shared(part: str) -> bool:
        asked = [c for c in cells if (c["range"] if part == INTERVAL_NOTE else c["value"] != "–")]
        return all(part in c["note"].split("; ") for c in asked)

    parts = list(dict.fromkeys(part for c in cells if c["value"] != "–" for part in c["note"].split("; ") if part))
    shared = [part for part in parts if is_shared(part)]
    for each in cells:
        if each["value"] != "–":
            each["note"] = "; ".join(part for part in each["note"].split("; ") if part not in shared)
    return "; ".join(shared)


def reason_words(reason: Any, has_value: bool = False) -> str:
    """Return the reasons of a row in words; a reason without words is shown as it is.

    A row over folds may have a value and yet leave out folds: `has_value` says so of the reasons that only folds have.
    """
    if pages.is_missing(reason):
        return ""
    return "; ".join(
        f"without some folds: {REASONS[r]}" if has_value and r in OF_FOLDS else REASONS.get(r, r)
        for r in str(reason).split(";")
    )
