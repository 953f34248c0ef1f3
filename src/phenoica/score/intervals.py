"""Confidence intervals of held-out scores: over folds where there are enough experiments, else within experiments.

Values of single folds come in, an interval comes out. Over folds: Student's t with the variance correction of Nadeau
and Bengio (2003) for training sets that overlap. Within experiments: DeLong et al. (1988), stratified by plate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phenoica.errors import ScoreError

OVER_FOLDS = "t over folds"
WITHIN_EXPERIMENTS = "within these experiments"
MIN_EXPERIMENTS = 4  # below this many test experiments, fold values say too little of other experiments


@dataclass(frozen=True)
class Interval:
    """A value with its interval.

    Attributes
    ----------
    value
        The centre.
    low, high
        The limits, or None.
    kind
        `OVER_FOLDS`, `WITHIN_EXPERIMENTS`, or None where there is no interval.
    reason
        Why there is no interval: one_fold, zero_variance, no_variance; else None.
    error
        Standard error of the value, before limits are clipped; None where there is no interval.
    freedom
        Degrees of freedom of the t interval; None for a normal one.
    """

    value: float
    low: float | None = None
    high: float | None = None
    kind: str | None = None
    reason: str | None = None
    error: float | None = None
    freedom: int | None = None


POWER = 0.8  # of a power note


def quantile(probability: float, freedom: int | None) -> float:
    """Return the quantile of Student's t of `freedom` degrees, or of the normal distribution (None)."""
    from scipy.stats import norm, t

    return float(norm.ppf(probability) if freedom is None else t.ppf(probability, freedom))


def detectable_difference(error: float, freedom: int | None, confidence: float, power: float = POWER) -> float:
    """Return the smallest difference that an interval of this standard error excludes 0 for, with this power.

    Parameters
    ----------
    error
        Standard error of the value, as in `Interval`.
    freedom
        Degrees of freedom, None for a normal interval.
    confidence
        Level of the interval, e.g. 0.95.
    power
        Share of repetitions in which the interval would exclude 0.

    Returns
    -------
    float
        (q(1/2 + confidence / 2) + q(power)) x error, q the quantiles of the interval's distribution; for an AUROC the
        difference from 0.5. The usual approximation, good where power is well above the level.
    """
    return (quantile(0.5 + confidence / 2, freedom) + quantile(power, freedom)) * error


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the mean of `values` (K,) weighted by `weights` (K,), which are at least 0 and not all 0.

    Raises
    ------
    ScoreError
        If a value is not finite, or the weights sum to nothing.
    """
    values, weights = np.asarray(values, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    if not np.isfinite(values).all() or (weights < 0).any() or not weights.sum() > 0:
        raise ScoreError("a weighted mean needs finite values and weights of at least 0 that are not all 0")
    return float(values @ weights / weights.sum())


def t_interval(
    values: Sequence[float],
    weights: Sequence[float],
    confidence: float,
    *,
    bounds: tuple[float, float] = (0.0, 1.0),
    centre: float | None = None,
) -> Interval:
    """Return the t interval over fold values.

    Parameters
    ----------
    values
        (K,) one value a fold, K the folds that have one.
    weights
        (K,) case-reference pairs of each fold; the centre is the mean weighted by them.
    confidence
        Level, e.g. 0.95.
    bounds
        The limits are clipped to these.
    centre
        A centre computed elsewhere (macro averages); None for the weighted mean.

    Returns
    -------
    Interval
        centre +- t(K - 1) * sqrt(s^2 (1/K + 1/(K - 1))), s^2 the variance of the fold values with K - 1 degrees of
        freedom. The second term stands for the overlap of training sets (test to training size 1 : K - 1). Without
        limits and with a reason when K < 2 or all values are equal.
    """
    value = weighted_mean(values, weights) if centre is None else float(centre)
    k = len(values)
    if k < 2:
        return Interval(value, reason="one_fold")
    variance = float(np.var(np.asarray(values, dtype=np.float64), ddof=1))
    if variance <= 1e-24:  # equal values differ by rounding only
        return Interval(value, reason="zero_variance")
    error = float(np.sqrt(variance * (1 / k + 1 / (k - 1))))
    half = quantile(0.5 + confidence / 2, k - 1) * error
    low, high = np.clip([value - half, value + half], *bounds)
    return Interval(value, float(low), float(high), OVER_FOLDS, error=error, freedom=k - 1)


def delong_variance(labels: np.ndarray, scores: np.ndarray, plates: np.ndarray) -> float | None:
    """Return the variance of one AUROC given its plates: DeLong's, with the spread of placements taken in plates.

    The placement of a case is the share of references it exceeds (ties one half), and the reverse for a reference.
    Their means are the AUROC; wells are seen as drawn within their plate, so differences between plates do not count.
    With one plate this is DeLong's variance. Plates with a single well of a class borrow the pooled spread of others.

    Parameters
    ----------
    labels
        (n,) bool, true is a case; both classes are present.
    scores
        (n,) float.
    plates
        (n,) plate of each well.

    Returns
    -------
    float or None
        None when no plate holds two wells of a class, so that no spread can be measured.
    """
    from scipy.stats import rankdata

    labels, scores, plates = np.asarray(labels).astype(bool), np.asarray(scores), np.asarray(plates)
    if labels.all() or not labels.any():
        raise ScoreError("DeLong's variance needs cases and references; only one class is here")
    n_case, n_reference = int(labels.sum()), int((~labels).sum())
    all_ranks = rankdata(scores)
    of_cases = (all_ranks[labels] - rankdata(scores[labels])) / n_reference
    of_references = 1 - (all_ranks[~labels] - rankdata(scores[~labels])) / n_case
    parts = [_stratified(of_cases, plates[labels]), _stratified(of_references, plates[~labels])]
    return None if None in parts else float(sum(parts))


def _stratified(placements: np.ndarray, strata: np.ndarray) -> float | None:
    """Return the variance of the mean of `placements` when its wells are drawn within strata."""
    squares, freedom, terms = 0.0, 0, []
    for stratum in np.unique(strata):
        inside = placements[strata == stratum]
        if len(inside) > 1:
            squares += float(((inside - inside.mean()) ** 2).sum())
            freedom += len(inside) - 1
            terms.append((len(inside), float(inside.var(ddof=1))))
        else:
            terms.append((1, None))
    if not freedom:
        return None
    pooled = squares / freedom
    return sum(m * (pooled if s2 is None else s2) for m, s2 in terms) / len(placements) ** 2


def fold_correlation(k: int) -> float:
    """Return the correlation between scores of `k` folds that train on each other: 1 / (k - 1), 1 for two; 0 for one.

    Two folds both ask whether the differences of the same two sets of experiments point alike, so their scores say the
    same thing twice. For linear scores, T_k = d_k (sum of the other d_j): two of K share one of K - 1 terms. With equal
    variances v the mean of K then has variance v (1/K + 1/K), near Nadeau and Bengio's v (1/K + 1/(K - 1)).
    """
    return 1.0 / (k - 1) if k > 1 else 0.0


def joint_variance(variances: Sequence[float], weights: Sequence[float], correlation: float) -> float:
    """Return the variance of the weighted sum of scores whose pairwise correlation is `correlation`.

    Parameters
    ----------
    variances, weights
        (K,) of each score.
    correlation
        0: independent, their variances add; 1: their standard deviations add.
    """
    deviations = np.asarray(weights, dtype=np.float64) * np.sqrt(np.asarray(variances, dtype=np.float64))
    return float((1 - correlation) * (deviations**2).sum() + correlation * deviations.sum() ** 2)


def delong_interval(
    values: Sequence[float], variances: Sequence[float | None], weights: Sequence[float], confidence: float,
    *, correlation: float | None = None,
) -> Interval:  # fmt: skip
    """Return the normal interval of fold AUROCs that speaks of the tested experiments only.

    Parameters
    ----------
    values
        (K,) AUROC of each fold.
    variances
        (K,) its `delong_variance`, None where it cannot be measured.
    weights
        (K,) n_case x n_reference of each fold: value and variance are weighted by it.
    confidence
        Level, e.g. 0.95.
    correlation
        Between two folds; None for folds that train on each other (`fold_correlation`). Taking such folds as
        independent makes the interval of two experiments too short: it covers 0.5 in 71 to 78 % of empty screens.

    Returns
    -------
    Interval
        Clipped to [0, 1]; without limits, and with a reason, when a variance is missing or all are zero.
    """
    value = weighted_mean(values, weights)
    if any(v is None for v in variances):
        return Interval(value, reason="no_variance")
    share = np.asarray(weights, dtype=np.float64) / np.sum(weights)
    correlation = fold_correlation(len(values)) if correlation is None else correlation
    variance = joint_variance(variances, share, correlation)
    if variance <= 0:
        return Interval(value, reason="zero_variance")
    error = float(np.sqrt(variance))
    half = quantile(0.5 + confidence / 2, None) * error
    low, high = np.clip([value - half, value + half], 0.0, 1.0)
    return Interval(value, float(low), float(high), WITHIN_EXPERIMENTS, error=error)
