"""Tests of held-out scores: plate-stratified rank sums, their floor, and the adjustment for many perturbations.

Scores of held-out wells with their plates come in from the folds; one-sided p values of "cases score above references",
the smallest p that so few wells could give, and adjusted p values go out. The rank sum compares wells of one plate only
(Wilcoxon 1945, stratified as by van Elteren 1960 with weights by pairs), so differences between plates cannot make it
small. Its null is that cases and references of a plate are exchangeable: it speaks of the tested experiments, and the
interval over folds of others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from phenoica.errors import ScoreError
from phenoica.score.intervals import fold_correlation, joint_variance
from phenoica.score.names import ARRANGEMENTS, P_FLOOR, P_VALUE, Q_VALUE, RANK_SUM

HOLM, BENJAMINI_HOCHBERG = "Holm", "Benjamini-Hochberg"
HOLM_AT_MOST = 10  # comparisons of a family that is a short list and not a screen
_SAME = ["contrast", "perturbation", "view", "test_data_used", "probe", "scope", "draw"]


@dataclass(frozen=True)
class RankSum:
    """The plate-stratified rank sum of one fold.

    Attributes
    ----------
    auroc
        Share of the pairs within plates in which the case scores higher; a tie counts one half. None without pairs.
    pairs
        Their number.
    variance
        Of `auroc` when labels are permuted within plates, given the ties.
    untied_variance
        The same if no two scores were equal: what the design allows.
    log10_arrangements
        log10 of the number of ways to label the wells within their plates; the exact test has no smaller p than its
        inverse.
    """

    auroc: float | None
    pairs: int
    variance: float
    untied_variance: float
    log10_arrangements: float


def rank_sum(labels: np.ndarray, scores: np.ndarray, plates: np.ndarray) -> RankSum:
    """Compare cases with the references of their own plate.

    Parameters
    ----------
    labels
        (n,) bool, true is a case.
    scores
        (n,) float.
    plates
        (n,) plate of each well. Plates without both sides count for nothing.

    Returns
    -------
    RankSum
        A plate of m cases and r references adds U of variance m r (m + r + 1 - sum(t^3 - t) / (N (N - 1))) / 12, t the
        sizes of its ties and N = m + r.

    Raises
    ------
    ScoreError
        If a score is not finite.
    """
    from scipy.special import gammaln
    from scipy.stats import rankdata

    labels, scores, plates = np.asarray(labels).astype(bool), np.asarray(scores, dtype=np.float64), np.asarray(plates)
    if not np.isfinite(scores).all():
        raise ScoreError("a rank sum needs finite scores")
    wins = pairs = variance = untied = arrangements = 0.0
    for plate in np.unique(plates):
        inside = plates == plate
        m, n = int(labels[inside].sum()), int(inside.sum())
        if not 0 < m < n:
            continue
        found = scores[inside]
        wins += rankdata(found)[labels[inside]].sum() - m * (m + 1) / 2
        ties = np.unique(found, return_counts=True)[1].astype(np.float64)
        pairs += m * (n - m)
        untied += m * (n - m) * (n + 1) / 12
        variance += m * (n - m) * (n + 1 - (ties**3 - ties).sum() / (n * (n - 1))) / 12
        arrangements += float(gammaln(n + 1) - gammaln(m + 1) - gammaln(n - m + 1)) / np.log(10)
    if not pairs:
        return RankSum(None, 0, 0.0, 0.0, 0.0)
    return RankSum(wins / pairs, int(pairs), max(0.0, variance) / pairs**2, untied / pairs**2, arrangements)


def combined_p(
    aurocs: Sequence[float], pairs: Sequence[float], variances: Sequence[float], correlation: float
) -> float:
    """Return the one-sided p value of rank sums of several folds.

    Parameters
    ----------
    aurocs, pairs, variances
        (K,) of each fold, as in `RankSum`.
    correlation
        Between the rank sums of two folds when there is nothing to find: `intervals.fold_correlation` for folds that
        train on each other's wells, 0 for independent ones.

    Returns
    -------
    float
        Normal approximation with continuity correction: z = (sum_k pairs_k (auroc_k - 1/2) - 1/2) / sd, sd^2 = sum v_k
        + correlation sum_{j != k} sqrt(v_j v_k), v_k = pairs_k^2 variance_k. 1 where all scores are tied.
    """
    from scipy.stats import norm

    aurocs, pairs = np.asarray(aurocs, dtype=np.float64), np.asarray(pairs, dtype=np.float64)
    variance = joint_variance(variances, pairs, correlation)
    if variance <= 0:
        return 1.0
    return float(norm.sf((pairs @ (aurocs - 0.5) - 0.5) / np.sqrt(variance)))


def p_floor(
    pairs: Sequence[float], untied_variances: Sequence[float], log10_arrangements: Sequence[float], correlation: float
) -> float:
    """Return the smallest p that the numbers of wells allow: every case above every reference of its plate."""
    separated = combined_p(np.ones(len(pairs)), pairs, untied_variances, correlation)
    return float(max(separated, 10.0 ** -float(np.sum(log10_arrangements))))


def holm(p_values: Sequence[float]) -> np.ndarray:
    """Return Holm's (1979) adjusted p values (m,): those at most alpha have that family-wise error."""
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate((len(p) - np.arange(len(p))) * p[order])
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted


def benjamini_hochberg(p_values: Sequence[float]) -> np.ndarray:
    """Return Benjamini and Hochberg's (1995) adjusted p values (m,), for a false discovery rate."""
    from scipy.stats import false_discovery_control

    p = np.asarray(p_values, dtype=np.float64)
    return false_discovery_control(p) if len(p) else p


def adjusted(p_values: Sequence[float]) -> tuple[np.ndarray, str]:
    """Return adjusted p values and the name of the method: Holm for a short list, Benjamini-Hochberg for a screen."""
    if len(p_values) <= HOLM_AT_MOST:
        return holm(p_values), HOLM
    return benjamini_hochberg(p_values), BENJAMINI_HOCHBERG


def fold_rows(base: Mapping[str, Any], found: RankSum, scope: str) -> list[dict[str, Any]]:
    """Return the two rows that a fold keeps of a rank sum.

    Parameters
    ----------
    base
        Columns of the fold's row.
    found
        As from `rank_sum`.
    scope
        Scope of the scores.

    Returns
    -------
    list of dict
        `RANK_SUM`: value is the AUROC within plates, variance that under permutation. `ARRANGEMENTS`: value is
        log10_arrangements, variance that without ties. Both hold the pairs. Without pairs a null and its reason.
    """
    reason = base.get("reason") if found.pairs else "no_case_plate"
    rows = [
        (RANK_SUM, found.auroc, found.variance),
        (ARRANGEMENTS, found.log10_arrangements if found.pairs else None, found.untied_variance),
    ]
    return [
        {**base, "scope": scope, "metric": metric, "value": value, "pairs": found.pairs, "variance": variance,
         "reason": reason} for metric, value, variance in rows
    ]  # fmt: skip


def rows_of_tests(by_fold: pd.DataFrame, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows over folds that hold p values, their floors and their adjusted values.

    Parameters
    ----------
    by_fold
        Rows of single folds (`fold.FOLD_COLUMNS`).
    config
        A complete configuration.

    Returns
    -------
    list of dict
        `P_VALUE` and `P_FLOOR` of every perturbation, contrast and view, and `Q_VALUE`, whose ci_kind says how and
        among how many it was adjusted: the perturbations of one contrast in one view and scope are a family. Where the
        floor is above `score.alpha`, q is null with the reason floor_above_threshold, and the comparison is not counted
        in the family: it could not have been rejected whatever its wells look like (Tarone 1990).
    """
    alpha = config["score"]["alpha"]
    families: dict[tuple, list[tuple[dict[str, Any], float, float]]] = {}
    for row, p, floor in _over_folds(by_fold):
        key = tuple(row[c] for c in ("contrast", "view", "probe", "scope", "draw"))
        families.setdefault(key, []).append((row, p, floor))
    rows = []
    for family in families.values():
        tested = [item for item in family if item[2] <= alpha]
        values, method = adjusted([p for _, p, _ in tested])
        kind = f"{method} of {len(tested)}"
        rows += [{**row, "metric": P_VALUE, "value": p} for row, p, _ in family]
        rows += [{**row, "metric": P_FLOOR, "value": floor} for row, _, floor in family]
        rows += [
            {**row, "metric": Q_VALUE, "value": float(q), "ci_kind": kind}
            for (row, _, _), q in zip(tested, values, strict=True)
        ]
        rows += [
            {**row, "metric": Q_VALUE, "value": None, "reason": "floor_above_threshold"}
            for row, _, floor in family if floor > alpha
        ]  # fmt: skip
    return rows


def _over_folds(by_fold: pd.DataFrame) -> Iterator[tuple[dict[str, Any], float, float]]:
    """Yield the common columns, p and floor of everything that was tested."""
    known = by_fold[by_fold["metric"].isin([RANK_SUM, ARRANGEMENTS]) & by_fold["value"].notna()]
    for key, group in known.groupby(_SAME, sort=False, dropna=False):
        sums = group[group["metric"] == RANK_SUM]
        counts = group[group["metric"] == ARRANGEMENTS]
        base = {c: None if pd.isna(v) else v for c, v in zip(_SAME, key, strict=True)}
        # plates inside an experiment train on each other, which their fold has counted; experiments then do not
        correlation = 0.0 if base["scope"] == "in_distribution" else fold_correlation(len(sums))
        pairs = sums["pairs"].to_numpy(np.float64)
        floor = p_floor(pairs, counts["variance"].to_numpy(), counts["value"].to_numpy(), correlation)
        p = combined_p(sums["value"].to_numpy(), pairs, sums["variance"].to_numpy(), correlation)
        reasons = sorted(set(sums["reason"].dropna()))
        row = {
            **base, "n_components": sums["n_components"].iloc[0], "fold": -1, "n_case": sums["n_case"].sum(),
            "n_reference": sums["n_reference"].sum(), "n_experiments": sums["n_experiments"].sum(),
            "reason": ";".join(reasons) or None,
        }  # fmt: skip
        yield row, max(p, floor), floor
