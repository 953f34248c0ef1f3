"""What the score page shows of the list of hits: how many there are, which, and what could explain them away.

score/hits.csv comes in, cells of tables and sentences go out. Nothing is computed here: of a screen the page shows the
first rows of each contrast and view, and links the file, which has all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from phenoica.errors import SchemaError
from phenoica.report import pages, score_cells
from phenoica.score.hits import (
    BATCH_FLAG,
    COUNT_CHANGES,
    COUNT_ONLY,
    HIT_COLUMNS,
    INCLUDES_0,
    NO_FLAG,
    NOT_SIGNIFICANT,
    OTHER_EXPERIMENTS,
    POSITION_FLAG,
    THESE_EXPERIMENTS,
)
from phenoica.score.rows import IN_DISTRIBUTION

MOST_ROWS = 300  # on the page; more are shared out evenly over contrasts and views
FLAGS = ("position_flag", "batch_flag", "count_flag")
FLAG_WORDS = {
    POSITION_FLAG: ("position", "position alone tells cases from references (overlap under 0.5): no claim"),
    BATCH_FLAG: ("batch", "not above 0.5 inside experiments, so the batch may tell the two apart: no claim"),
    COUNT_ONLY: ("count only", "the number of cells alone tells as much: growth or death, perhaps nothing beyond them"),
    COUNT_CHANGES: ("count changes", "the number of cells differs too, and the view tells more than it"),
}  # fmt: skip
REASON_WORDS = {
    NOT_SIGNIFICANT: "q above the level",
    INCLUDES_0: "the interval reaches down to 0.5",
    POSITION_FLAG: "position alone explains it",
    BATCH_FLAG: "not above 0.5 inside experiments",
}
FLAGGED = (REASON_WORDS[POSITION_FLAG], REASON_WORDS[BATCH_FLAG])  # a row says these by its flags
HOLDS_FOR = {THESE_EXPERIMENTS: "these", OTHER_EXPERIMENTS: "others too"}
_TEXT = ("contrast", "perturbation", "view")


def read_hits(hits_csv: str | os.PathLike) -> pd.DataFrame:
    """Return the list of hits; a perturbation called NA keeps its name.

    Raises
    ------
    SchemaError
        If there is no such file, or it lacks columns.
    """
    if not Path(hits_csv).is_file():
        raise SchemaError(f"{hits_csv}: no such file; run `phenoica summarise`")
    empty_is_missing = {name: [""] for name in HIT_COLUMNS if name not in _TEXT}
    found = pd.read_csv(hits_csv, dtype=dict.fromkeys(_TEXT, str), keep_default_na=False, na_values=empty_is_missing)
    missing = [name for name in HIT_COLUMNS if name not in found.columns]
    if missing:
        raise SchemaError(f"{hits_csv}: columns {', '.join(missing)} are missing; run `phenoica summarise` again")
    return found.astype({"claim": bool})


def hit_section(hits: pd.DataFrame, titles: Mapping[str, str], alpha: float) -> dict[str, Any]:
    """Return what the page says of hits.

    Parameters
    ----------
    hits
        As from `read_hits`, in the order of the file.
    titles
        Contrasts in words (`presets.titles`).
    alpha
        The level of the tests (`score.alpha`).

    Returns
    -------
    dict
        sentence: that there is no hit, and why not, or empty; views and overview: hits of each contrast and view;
        groups: a table a contrast of rows with q at most alpha; n_rows of all, n_shown on the page; flags: (name,
        words) of those that stand on the page.
    """
    passed = hits[hits["q"] <= alpha]
    shown = _first_of_each(passed, MOST_ROWS)
    views = score_cells.in_order(hits["view"])
    used = {flag for name in FLAGS for flag in shown[name].dropna()} - {NO_FLAG}
    return {
        "sentence": "" if hits["claim"].any() else _no_hit(hits, passed, alpha),
        "views": views,
        "overview": [
            {"title": titles[contrast], **_counts(group, views, alpha)}
            for contrast, group in hits.groupby("contrast", sort=False)
        ],
        "groups": [
            {"title": titles[contrast], "rows": [_row(row) for row in group.to_dict("records")],
             "n": int((passed["contrast"] == contrast).sum()),
             "within": bool((group["scope"] == IN_DISTRIBUTION).all())}
            for contrast, group in shown.groupby("contrast", sort=False)
        ],
        "n_rows": len(passed),
        "n_shown": len(shown),
        "flags": [FLAG_WORDS[flag] for flag in FLAG_WORDS if flag in used],
    }  # fmt: skip


def _first_of_each(rows: pd.DataFrame, most: int) -> pd.DataFrame:
    """Return at most `most` rows in their order: the first of every contrast and view, then the second of each, ..."""
    rank = rows.groupby(["contrast", "view"], sort=False).cumcount()
    return rows.loc[rank.sort_values(kind="stable").index[:most]].sort_index()


def _no_hit(hits: pd.DataFrame, passed: pd.DataFrame, alpha: float) -> str:
    """Say that there is no hit, among how many, and what keeps those that pass the test from being one."""
    tested = int(hits["q"].notna().sum())
    if not tested:
        return "No hit: no comparison could be tested; the table of what was not testable says why."
    text = f"No hit: of {pages.counted(tested, 'tested comparison')} (a perturbation in a view) none supports a claim."
    if passed.empty:
        return f"{text} None has q at most {alpha:g}."
    counts: dict[str, int] = {}
    for row in passed.to_dict("records"):
        for word in dict.fromkeys(_why_not(row)):
            counts[word] = counts.get(word, 0) + 1
    parts = ", ".join(f"{word} ({n})" for word, n in sorted(counts.items(), key=lambda item: -item[1]))
    return f"{text} {len(passed):,} {'has' if len(passed) == 1 else 'have'} q at most {alpha:g}, but: {parts}."


def _why_not(row: Mapping[str, Any]) -> list[str]:
    """Return what keeps a row from being a claim; reasons that only speak of its value or interval are left out."""
    if row["claim"] or pages.is_missing(row["reason"]):
        return []
    words = {**REASON_WORDS, **({INCLUDES_0: "there is no interval"} if pages.is_missing(row["ci_low"]) else {})}
    return [words[reason] for reason in str(row["reason"]).split(";") if reason in words]


def _counts(group: pd.DataFrame, views: Sequence[str], alpha: float) -> dict[str, Any]:
    """Return a row of the overview: hits of each view, and how many more pass the test but support no claim."""
    cells = []
    for view in views:
        rows = group[group["view"] == view]
        tested, claims = int(rows["q"].notna().sum()), int(rows["claim"].sum())
        alone = int((rows["q"] <= alpha).sum()) - claims
        count_only = int((rows["claim"] & (rows["count_flag"] == COUNT_ONLY)).sum())
        notes = [f"{count_only} count only"] if count_only else []
        notes += [f"{alone} more without claim"] if alone else []
        cells.append({"value": str(claims) if tested else "–", "range": f"of {tested}" if tested else "",
                      "note": "; ".join(notes), "sort": str(claims) if tested else ""})  # fmt: skip
    first = group[group["view"] == group["view"].iloc[0]]
    adjusted = first["adjustment"].dropna()
    return {
        "cells": cells,
        "untested": int(first["q"].isna().sum()),
        "adjustment": str(adjusted.iloc[0]) if len(adjusted) else "–",
        "p_floor": pages.number(first["p_floor"].min(), 2),
    }


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the list as texts: AUROC is the effect plus 0.5, as in the other tables of the page."""
    auroc = {name: None if pages.is_missing(row[name]) else row[name] + 0.5
             for name in ("effect", "ci_low", "ci_high")}  # fmt: skip
    flags = [FLAG_WORDS[row[name]][0] for name in FLAGS if not pages.is_missing(row[name]) and row[name] != NO_FLAG]
    return {
        "perturbation": row["perturbation"],
        "view": row["view"],
        "auroc": {**score_cells.cell({**row, **auroc, "value": auroc["effect"], "reason": None}), "note": ""},
        **{name: (row[name], pages.number(row[name], 2)) for name in ("p", "q")},
        "overlap": ("" if pages.is_missing(row["position_overlap"]) else row["position_overlap"],
                    pages.fixed(row["position_overlap"])),
        "count": _plus_half(row["count_effect"]),
        "wells": f"{row['n_case']:.0f} / {row['n_reference']:.0f} ({row['n_experiments']:.0f})",
        "n_case": int(row["n_case"]),
        "hit": "yes" if row["claim"] else "no",
        "holds_for": HOLDS_FOR[row["holds_for"]] if row["claim"] else "–",
        "flags": ", ".join(flags),
        "why_not": "; ".join(word for word in _why_not(row) if word not in FLAGGED),
    }  # fmt: skip


def _plus_half(effect: Any) -> tuple[Any, str]:
    return ("", "–") if pages.is_missing(effect) else (effect + 0.5, pages.fixed(effect + 0.5))
