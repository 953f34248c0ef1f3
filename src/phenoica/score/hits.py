"""The list of hits: every perturbation with its held-out effect, its test, and what could explain the effect away.

The table of scores comes in, `score/hits.csv` goes out: a row a contrast, perturbation and view. Nothing is computed
from wells here, so whatever a row says can be looked up in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from phenoica import schema
from phenoica.score import inference
from phenoica.score.baselines import BASELINES, CELL_COUNT
from phenoica.score.in_distribution import IN_DISTRIBUTION
from phenoica.score.intervals import OVER_FOLDS
from phenoica.score.rows import AUROC, POOLED, WITHIN
from phenoica.score.summary import (
    CONFOUNDED,
    DETECTABLE,
    MACRO,
    POSITION_MODELS,
    POSITION_OVERLAP,
    ROTATION,
    is_held_out,
    of_probe,
)
from phenoica.score.summary import OVER_FOLDS as ALL_FOLDS

NO_FLAG = "none"
POSITION_FLAG = "position_confounded"
COUNT_ONLY, COUNT_CHANGES = "count_only", "count_changes"
BATCH_FLAG = "not_within_experiments"
NOT_SIGNIFICANT, INCLUDES_0 = "not_significant", "interval_includes_0"  # why a row is no claim, as are the flags
OTHER_EXPERIMENTS, THESE_EXPERIMENTS = "other experiments", "these experiments"
HIT_COLUMNS = (
    "contrast", "perturbation", "view", "test_data_used", "scope", "effect", "ci_low", "ci_high", "ci_kind", "p", "q",
    "adjustment", "p_floor", "detectable_difference", "n_case", "n_reference", "n_experiments", "within_experiment",
    "batch_flag", "position_overlap", "position_flag", "count_effect", "count_flag", "claim", "holds_for", "reason",
)  # fmt: skip
NO_VIEWS = (*BASELINES, *POSITION_MODELS, ROTATION)  # rows of the scores that no hit can come from
_KEY = ["contrast", "perturbation", "scope"]


def hits(scores: pd.DataFrame, config: Mapping[str, Any]) -> pd.DataFrame:
    """Return the list of hits.

    Parameters
    ----------
    scores
        As from `summary.over_folds`.
    config
        A complete configuration.

    Returns
    -------
    DataFrame
        `HIT_COLUMNS` of views that have read no test well but controls, sorted by contrast and view in the order of the
        scores, then claims first and by q.

        effect, ci_low, ci_high
            AUROC - 0.5 of the L1 probe and its interval; ci_kind as in the scores. Held out (scope pooled), or for
            contrasts within experiments only in distribution.
        p, q, p_floor, adjustment
            See `inference.rows_of_tests`. q is empty where the comparison cannot be tested.
        detectable_difference
            The smallest effect that this interval could have shown (80 % power).
        within_experiment, batch_flag
            AUROC - 0.5 among wells of one experiment; not_within_experiments where the pooled interval is above 0 and
            this one is not: the batch may tell cases from references.
        position_overlap, position_flag
            position_confounded under 0.5: well position alone explains the perturbation.
        count_effect, count_flag
            AUROC - 0.5 of the cell count. Where it passes the same test: count_only if the view's AUROC is not above
            the interval of the count's, else count_changes.
        claim
            True where q is at most `score.alpha`, the interval is above 0, and neither the position nor the batch flag
            is set. holds_for says for which experiments, reason why not, or what is missing.
    """
    total = scores[
        (scores["fold"] == ALL_FOLDS) & of_probe(scores) & scores["draw"].isna() & scores["view_minus"].isna()
        & (scores["perturbation"] != MACRO) & is_held_out(scores)
    ]  # fmt: skip
    auroc = total[(total["metric"] == AUROC) & ~total["view"].isin(NO_VIEWS)]
    held_out = auroc["scope"] == POOLED
    only_within = (auroc["scope"] == IN_DISTRIBUTION) & ~auroc["contrast"].isin(auroc["contrast"][held_out])
    asked = auroc[held_out | only_within]
    lookup = {
        (row["metric"], row["view"], *(row[c] for c in _KEY)): row
        for row in total.to_dict("records")
    }  # fmt: skip
    rows = [_hit(row, lookup, config["score"]["alpha"]) for row in asked.to_dict("records")]
    frame = pd.DataFrame(rows, columns=list(HIT_COLUMNS))
    order = {name: i for i, name in enumerate(dict.fromkeys(auroc["contrast"]))}
    views = {name: i for i, name in enumerate(dict.fromkeys(auroc["view"]))}
    keys = frame.assign(
        c=frame["contrast"].map(order), v=frame["view"].map(views), k=~frame["claim"].astype(bool),
        e=-frame["effect"].astype(float),
    )  # fmt: skip
    return frame.loc[keys.sort_values(["c", "v", "k", "q", "e"], kind="stable").index].reset_index(drop=True)


def _value(row: Mapping[str, Any] | None, column: str = "value", minus: float = 0.0) -> float | None:
    return None if row is None or pd.isna(row[column]) else float(row[column]) - minus


def _hit(row: Mapping[str, Any], lookup: Mapping[tuple, Mapping[str, Any]], alpha: float) -> dict[str, Any]:
    name = tuple(row[c] for c in _KEY)

    def find(metric: str, view: str = row["view"], scope: str | None = None) -> Mapping[str, Any] | None:
        return lookup.get((metric, view, *name[:2], scope or row["scope"]))

    overlap = _overlap(lookup, name)
    q_row, within, count = find(inference.Q_VALUE), find(AUROC, scope=WITHIN), find(AUROC, CELL_COUNT)
    held_out = row["scope"] == POOLED
    found = {
        "contrast": row["contrast"], "perturbation": row["perturbation"], "view": row["view"],
        "test_data_used": row["test_data_used"], "scope": row["scope"], "effect": _value(row, minus=0.5),
        "ci_low": _value(row, "ci_low", 0.5), "ci_high": _value(row, "ci_high", 0.5), "ci_kind": row["ci_kind"],
        "p": _value(find(inference.P_VALUE)), "q": _value(q_row), "p_floor": _value(find(inference.P_FLOOR)),
        "adjustment": None if q_row is None else q_row["ci_kind"],
        "detectable_difference": _value(find(DETECTABLE)), "n_case": row["n_case"], "n_reference": row["n_reference"],
        "n_experiments": row["n_experiments"], "within_experiment": _value(within, minus=0.5) if held_out else None,
        "batch_flag": _batch_flag(row, within) if held_out else NO_FLAG,
        "position_overlap": overlap,
        "position_flag": POSITION_FLAG if overlap is not None and overlap < CONFOUNDED else NO_FLAG,
        "count_effect": _value(count, minus=0.5),
        "count_flag": _count_flag(row, count, find(inference.P_VALUE, CELL_COUNT), alpha),
    }  # fmt: skip
    return {**found, **_claim(found, row, q_row, alpha)}


def _overlap(lookup: Mapping[tuple, Mapping[str, Any]], name: tuple) -> float | None:
    """Return the position_overlap of a perturbation, of whichever model and scope it was taken."""
    keys = [(POSITION_OVERLAP, view, *name[:2], s) for s in (POOLED, IN_DISTRIBUTION) for view in POSITION_MODELS]
    return next((float(lookup[key]["value"]) for key in keys if key in lookup), None)


def _batch_flag(row: Mapping[str, Any], within: Mapping[str, Any] | None) -> str:
    low, low_within = _value(row, "ci_low"), _value(within, "ci_low")
    above = low is not None and low > 0.5
    return BATCH_FLAG if above and not (low_within is not None and low_within > 0.5) else NO_FLAG


def _count_flag(
    row: Mapping[str, Any], count: Mapping[str, Any] | None, p: Mapping[str, Any] | None, alpha: float
) -> str | None:
    """Return what the cell count says; None where there is no count."""
    if _value(count) is None or _value(p) is None or _value(row) is None:
        return None
    if p["value"] > alpha:
        return NO_FLAG
    ceiling = _value(count, "ci_high")
    ceiling = _value(count) if ceiling is None else ceiling
    return COUNT_ONLY if row["value"] <= ceiling else COUNT_CHANGES


def _claim(
    found: Mapping[str, Any], row: Mapping[str, Any], q_row: Mapping[str, Any] | None, alpha: float
) -> dict[str, Any]:
    """Return whether the row supports a claim, for which experiments it holds, and the reason where it does not."""
    reasons = [] if row["reason"] is None or pd.isna(row["reason"]) else [row["reason"]]
    if q_row is not None and pd.isna(q_row["value"]):
        reasons.append(q_row["reason"])
    reasons += [found[flag] for flag in ("position_flag", "batch_flag") if found[flag] != NO_FLAG]
    above = found["ci_low"] is not None and found["ci_low"] > 0
    significant = found["q"] is not None and found["q"] <= alpha
    claim = significant and above and found["position_flag"] == NO_FLAG and found["batch_flag"] == NO_FLAG
    if found["q"] is not None and not significant:
        reasons.append(NOT_SIGNIFICANT)
    elif significant and not above:
        reasons.append(INCLUDES_0)
    everywhere = found["ci_kind"] == OVER_FOLDS and row["scope"] == schema.SCOPES[0]
    holds_for = (OTHER_EXPERIMENTS if everywhere else THESE_EXPERIMENTS) if claim else None
    return {"claim": bool(claim), "holds_for": holds_for, "reason": ";".join(reasons) or None}
