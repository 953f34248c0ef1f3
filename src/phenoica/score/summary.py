"""From the rows of single folds to the table of scores.

Fold tables and fold records come in, rows over folds go out (`printed` makes text of them). Scores of different fold
models are never ranked together: values of folds are averaged, by the number of case-reference pairs, with the interval
that the number of experiments allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.score import inference, intervals, names
from phenoica.score.baselines import POSITION_LINEAR, POSITION_TREES, RANDOM_ENCODER
from phenoica.score.contrasts import POSITIVE, POSITIVE_CUTTING, QUERY
from phenoica.score.in_distribution import IN_DISTRIBUTION
from phenoica.score.intervals import Interval, delong_interval, detectable_difference, t_interval, weighted_mean
from phenoica.score.names import DETECTABLE, GAP, MACRO_AVERAGED, POSITION_OVERLAP, PREVALENCE
from phenoica.score.rows import (
    AUROC,
    L1,
    L2_CONTRAST,
    L2_METRICS,
    MACRO,
    OVER_FOLDS,
    PAIRS,
    POOLED,
    ROTATION,
    VARIANCE,
    Grouped,
    table,
)  # fmt: skip

COMPARED = "ica"  # the view that the verdict is about; every other one is subtracted from it
TRAINING = ("raw", RANDOM_ENCODER)  # the pair whose difference says what the encoder's training adds
POSITION_MODELS = (POSITION_LINEAR, POSITION_TREES)  # the better of those that were scored counts
CONFOUNDED = 0.5  # position_overlap under which the well's position alone explains a perturbation
_UNBOUNDED = ("participation",)
# what identifies one score across folds
_SCORE = ["contrast", "perturbation", "view", "test_data_used", "probe", "metric", "scope", "draw"]


def over_folds(
    folds: Sequence[pd.DataFrame], decided: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> pd.DataFrame:
    """Return the table of scores.

    Parameters
    ----------
    folds
        Rows of each fold (`rows.FOLD_COLUMNS`).
    decided
        The record of each fold, in the same order.
    config
        A complete configuration.

    Returns
    -------
    DataFrame
        `schema.SCORE_COLUMNS`. Beside the rows of the folds: rotation with draw null is the mean over the probed (or,
        for concentration, all) draws; perturbation "macro" is the mean over perturbations, each weighing alike;
        view_minus is filled in rows that hold the difference of ica and another view, or of the pair `TRAINING`, for
        macro averages (of the differences of single perturbations, where both views have a value) and positive
        controls; fold -1 is over folds, with the interval (t over folds from four test experiments on, else "within
        these experiments"); beside a value its reason tells why there is no interval or why folds are left out.
        Metrics that only exist over folds: p_value, p_floor and q_value (`inference.rows_of_tests`),
        detectable_difference (what the interval of the pooled AUROC could have shown) and position_overlap, whose view
        is the better position model. auroc_gap is AUROC in distribution minus pooled.
    """
    rows = pd.concat([_with_rotation_mean(frame) for frame in folds], ignore_index=True)
    rows = pd.concat([rows, table(_gaps(rows), rows.columns)], ignore_index=True)
    rows = pd.concat([rows, table(_differences(rows), rows.columns)], ignore_index=True)
    held_out = {int(record["fold"]): len(record["test_experiments"]) for record in decided}
    macros = table(_macro_rows(rows, held_out), rows.columns)
    kept = rows["view_minus"].isna() | rows["contrast"].isin([POSITIVE, POSITIVE_CUTTING])
    by_fold = pd.concat([rows[kept], macros], ignore_index=True)
    tested = by_fold["metric"].isin([inference.RANK_SUM, inference.ARRANGEMENTS])
    joined = _join(by_fold[~tested], _macro_centres(rows), config["score"]["confidence"])
    joined = table([*joined, *inference.rows_of_tests(by_fold, config)], rows.columns)
    scores = pd.concat([by_fold, joined, table(_position_rows(joined), rows.columns)], ignore_index=True)
    return table(scores[list(schema.SCORE_COLUMNS)].to_dict("records"), schema.SCORE_COLUMNS)


def is_held_out(rows: pd.DataFrame) -> pd.Series:
    """Return a bool mask of rows whose view read no test well but controls; comparators (combat, harmony) read all."""
    return rows["test_data_used"] != schema.TEST_DATA_USED[-1]


def _with_rotation_mean(frame: pd.DataFrame) -> pd.DataFrame:
    draws = Grouped(frame[(frame["view"] == ROTATION) & frame["draw"].notna()], [c for c in _SCORE if c != "draw"])
    rows = []
    for group in draws.groups:
        known = draws.known(group)
        variances = draws.numbers(known, VARIANCE)
        rows.append({
            **draws.records[group[0]], "draw": None, "value": draws.value[known].mean() if len(known) else None,
            # the mean of dependent draws varies at most as much as one of them does on average
            VARIANCE: variances.mean() if len(known) and np.isfinite(variances).all() else None,
            "reason": None if len(known) else draws.reasons(group),
        })  # fmt: skip
    return pd.concat([frame, table(rows, frame.columns)], ignore_index=True) if rows else frame


def of_probe(rows: pd.DataFrame) -> pd.Series:
    """Say which rows are of the L1 probe, or of the trees that stand beside it for the well's position."""
    return (rows["probe"] == L1) | (rows["view"] == POSITION_TREES)


def _macro_rows(rows: pd.DataFrame, held_out: Mapping[int, int]) -> list[dict[str, Any]]:
    """Average each contrast, also the differences of two views, over its perturbations, in every fold."""
    single = Grouped(
        rows[rows["metric"].isin(MACRO_AVERAGED)],
        [c for c in _SCORE if c != "perturbation"] + ["view_minus", "fold"],
    )
    result = []
    for group in single.groups:
        key, known = single.key(group), single.known(group)
        n = {c: counts[known] for c, counts in single.counts.items()}
        result.append({
            **key, "perturbation": MACRO, "value": single.value[known].mean() if len(known) else None,
            "n_case": n["n_case"].sum(), "n_reference": n["n_reference"].max(initial=0),
            "n_experiments": held_out[key["fold"]] if len(known) else 0,
            PAIRS: int(np.nansum(single.numbers(known, PAIRS))),
            "reason": None if len(known) else single.reasons(group),
        })  # fmt: skip
    return result


def _gaps(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return AUROC in distribution minus held-out AUROC of the same wells, of every fold, perturbation and view."""
    key = ["contrast", "perturbation", "view", "fold"]
    auroc = rows[(rows["metric"] == AUROC) & (rows["probe"] == L1) & rows["draw"].isna() & is_held_out(rows)]
    held_out = {tuple(r[c] for c in key): r for r in auroc[auroc["scope"] == POOLED].to_dict("records")}
    result = []
    for row in auroc[auroc["scope"] == IN_DISTRIBUTION].to_dict("records"):
        other = held_out.get(tuple(row[c] for c in key))
        if other is None:
            continue  # a contrast that has no held-out experiment says so in its own row
        known = not (pd.isna(row["value"]) or pd.isna(other["value"]))
        same = (row["n_case"], row["n_reference"]) == (other["n_case"], other["n_reference"])
        missing = row["reason"] if pd.isna(row["value"]) else other["reason"]
        result.append({
            **row, "metric": GAP, "value": row["value"] - other["value"] if known and same else None, VARIANCE: None,
            "reason": None if known and same else "other_wells" if known else missing,
        })  # fmt: skip
    return result


def _differences(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Subtract held-out AUROC, perturbation by perturbation and fold by fold: ica and every other view, and `TRAINING`.

    Averages are taken of these differences, so both views are averaged over the same perturbations and folds.
    """
    single = rows["draw"].isna()  # rotation: the mean over draws
    # what has read the test wells is compared with nothing that has not
    held_out = is_held_out(rows) & (rows["scope"] != IN_DISTRIBUTION)
    rows = rows[single & (rows["metric"] == AUROC) & of_probe(rows) & held_out]
    by_view: dict[str, dict[tuple, dict[str, Any]]] = {}
    for row in rows.to_dict("records"):
        key = tuple(row[c] for c in ("contrast", "perturbation", "scope", "fold"))
        by_view.setdefault(row["view"], {})[key] = row
    pairs = [(COMPARED, view) for view in by_view if view != COMPARED] + [TRAINING]
    return [
        _difference(by_view[first][key], row)
        for first, second in pairs for key, row in by_view.get(second, {}).items() if key in by_view.get(first, {})
    ]  # fmt: skip


def _difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of the first view's value minus the second's; without one of them, its reason."""
    known = not (pd.isna(first["value"]) or pd.isna(second["value"]))
    return {
        **second, "view": first["view"], "view_minus": second["view"], "n_components": first["n_components"],
        "test_data_used": _widest(first["test_data_used"], second["test_data_used"]),
        "value": first["value"] - second["value"] if known else None, VARIANCE: None,
        "reason": None if known else first["reason"] if pd.isna(first["value"]) else second["reason"],
    }  # fmt: skip


def _widest(*used: str) -> str:
    return max(used, key=schema.TEST_DATA_USED.index)


def _join(by_fold: pd.DataFrame, centres: Mapping[tuple, float], confidence: float) -> list[dict[str, Any]]:
    """Return the rows over folds (fold -1); a fold without a value leaves its reason in the row."""
    rows, scores = [], Grouped(by_fold, [*_SCORE, "view_minus"])
    for group in scores.groups:
        key, known = scores.key(group), scores.known(group)
        row = {
            **key, **{c: counts[known].sum() for c, counts in scores.counts.items()}, "fold": OVER_FOLDS,
            "reason": scores.reasons(group),
        }  # fmt: skip
        if key["contrast"] == L2_CONTRAST and len(known):
            # one fold in which the control fails is enough
            worst = np.min if key["metric"] == L2_METRICS[-1] else np.max
            row["value"] = worst(scores.value[known])
        elif len(known):
            centre = centres.get(tuple(key[c] for c in _CENTRE))
            interval = _interval(key, scores, known, confidence, centre)
            row.update({
                "value": interval.value, "ci_low": interval.low, "ci_high": interval.high, "ci_kind": interval.kind,
                "reason": ";".join(filter(None, [row["reason"], interval.reason])) or None,
            })  # fmt: skip
            rows += _power_note(row, interval, confidence)
        rows.append(row)
    return rows


def _power_note(row: Mapping[str, Any], interval: Interval, confidence: float) -> list[dict[str, Any]]:
    """Return the row that says what difference from 0.5 the interval of a pooled AUROC could have shown."""
    asked = (row["metric"], row["probe"], row["scope"]) == (AUROC, L1, POOLED)
    if not asked or interval.error is None or row["draw"] is not None or row["view_minus"] is not None:
        return []
    value = detectable_difference(interval.error, interval.freedom, confidence)
    return [{**row, "metric": DETECTABLE, "value": value, "ci_low": None, "ci_high": None, "reason": None}]


_CENTRE = ["contrast", "view", "probe", "metric", "scope", "draw", "view_minus"]


def _macro_centres(rows: pd.DataFrame) -> dict[tuple, float]:
    """Return each macro average over folds: perturbations weigh alike, whatever number of folds and pairs they have."""
    single = Grouped(rows[rows["metric"].isin(MACRO_AVERAGED) & rows["value"].notna()], [*_CENTRE, "perturbation"])
    values: dict[tuple, list[float]] = {}
    for group in single.groups:
        key = single.key(group)
        found = weighted_mean(single.value[group], _weights(key, single, group))
        values.setdefault(tuple(key[c] for c in _CENTRE), []).append(found)
    return {key: float(np.mean(found)) for key, found in values.items()}


def _weights(key: Mapping[str, Any], scores: Grouped, group: np.ndarray) -> np.ndarray:
    """Return the weight of each fold: the pairs behind an AUROC; other metrics weigh folds alike."""
    return scores.numbers(group, PAIRS) if names.is_auroc(key["metric"]) else np.ones(len(group))


def _interval(
    key: Mapping[str, Any], scores: Grouped, known: np.ndarray, confidence: float, centre: float | None
) -> Interval:
    values, weights = scores.value[known], _weights(key, scores, known)
    macro = key.get("perturbation") == MACRO
    centre = centre if macro else None
    if key["metric"] == PREVALENCE:  # a chance level: it has no error
        return Interval(weighted_mean(values, weights) if centre is None else centre)
    if scores.counts["n_experiments"][known].sum() >= intervals.MIN_EXPERIMENTS:
        bounds = names.bounds(key["metric"], difference=key["view_minus"] is not None)
        if key["metric"] in _UNBOUNDED:
            bounds = (1.0, scores.numbers(known, "n_components").max())
        return t_interval(values, weights, confidence, bounds=bounds, centre=centre)
    if key["metric"] == AUROC and not macro and key["view_minus"] is None:
        variances = [None if np.isnan(v) else v for v in scores.numbers(known, VARIANCE).tolist()]
        # plates inside an experiment train on each other, which their fold has counted; experiments then do not
        correlation = 0.0 if key["scope"] == IN_DISTRIBUTION else None
        return delong_interval(values, variances, weights, confidence, correlation=correlation)
    # wells of two perturbations, or of two views, share references: no simple interval within experiments is right
    return Interval(weighted_mean(values, weights) if centre is None else centre, reason="under_4_experiments")


def auroc_rows(total: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the held-out, pooled AUROC of the L1 probe; rotation is the mean over its draws."""
    return total[
        (total["metric"] == AUROC) & of_probe(total) & (total["scope"] == POOLED) & total["view_minus"].isna()
        & total["draw"].isna() & is_held_out(total)
    ]  # fmt: skip


def training_rows(total: pd.DataFrame) -> pd.DataFrame:
    """Return what the encoder's training adds: the rows over folds with the difference of the pair `TRAINING`.

    Pooled AUROC of the L1 probe: the macro average over query perturbations, that over positive controls, and single
    positive controls. Empty where the pair was not scored.
    """
    rows = total[
        (total["metric"] == AUROC) & (total["probe"] == L1) & (total["scope"] == POOLED)
        & (total["view"] == TRAINING[0]) & (total["view_minus"] == TRAINING[1])
    ]  # fmt: skip
    query = (rows["contrast"] == QUERY) & (rows["perturbation"] == MACRO)
    positive = rows["contrast"] == POSITIVE
    macro = rows["perturbation"] == MACRO
    return pd.concat([rows[query], rows[positive & macro], rows[positive & ~macro]])


def position_overlap(total: pd.DataFrame) -> pd.DataFrame:
    """Return how far the wells of every perturbation and its references can be told apart by position alone.

    position_overlap is min(1, 2 (1 - A)), A the held-out AUROC of the better model that sees the well's position only
    (of those among `POSITION_MODELS` that were scored); 1: position says nothing, 0: it says everything.

    Parameters
    ----------
    total
        Rows over folds.

    Returns
    -------
    DataFrame
        The AUROC row of the better model of each contrast and perturbation, held out where there is such a row and else
        in distribution, with `overlap` added.
    """
    rows = total[
        (total["metric"] == AUROC) & of_probe(total) & total["scope"].isin([POOLED, IN_DISTRIBUTION])
        & total["view_minus"].isna() & total["draw"].isna() & (total["perturbation"] != MACRO)
        & total["view"].isin(POSITION_MODELS) & total["value"].notna()
    ]  # fmt: skip
    rows = rows.assign(overlap=np.minimum(1.0, 2.0 * (1.0 - rows["value"].astype(float))))
    held_out_first = rows["scope"] != POOLED
    rows = rows.assign(later=held_out_first).sort_values(["later", "overlap"], kind="stable")
    return rows.drop_duplicates(["contrast", "perturbation"]).drop(columns="later").sort_index()


def _position_rows(joined: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {**row, "metric": POSITION_OVERLAP, "value": row["overlap"], "ci_low": None, "ci_high": None, "ci_kind": None}
        for row in position_overlap(joined).to_dict("records")
    ]
