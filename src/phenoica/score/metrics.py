"""Pure scores of arrays: AUROC, average precision, sparsity of probe weights, concentration on few components.

Arrays come in, plain numbers go out; nothing here knows of files, views or folds. Formulas: AUROC is the Mann-Whitney
statistic; sparsity is Hoyer's (2004) and Gini's, as in Hurley and Rickard (2009); the exact concentration of Nelson et
al. (2026) is not public, so several readings of it stand side by side. docs/method.md lists every metric.
"""

from __future__ import annotations

import numpy as np

from phenoica.disentangle import concentration
from phenoica.disentangle.concentration import top_count as top_count
from phenoica.errors import ScoreError


def auroc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Return the probability that a case scores above a reference; a tie counts one half.

    Parameters
    ----------
    labels
        (n,) bool or 0/1; true is a case.
    scores
        (n,) float, higher means more like a case.

    Returns
    -------
    float
        In [0, 1].

    Raises
    ------
    ScoreError
        If one class is missing or a score is not finite.
    """
    from scipy.stats import rankdata

    labels, scores = _checked(labels, scores)
    n_case = int(labels.sum())
    n_reference = len(labels) - n_case
    ranks = rankdata(scores)
    return float((ranks[labels].sum() - n_case * (n_case + 1) / 2) / (n_case * n_reference))


def auroc_within(labels: np.ndarray, scores: np.ndarray, groups: np.ndarray) -> tuple[float, int]:
    """Return the AUROC that compares a case only with references of its own group.

    Parameters
    ----------
    labels, scores
        (n,) as in `auroc`.
    groups
        (n,) the experiment of each well. Groups that lack a class are left out.

    Returns
    -------
    value : float
        Mean over groups of the AUROC, weighted by the number of case-reference pairs.
    pairs : int
        The number of pairs compared.

    Raises
    ------
    ScoreError
        If no group holds both classes or a score is not finite.
    """
    labels, scores = _checked(labels, scores)
    groups = np.asarray(groups)
    total, pairs = 0.0, 0
    for group in np.unique(groups):
        inside = groups == group
        count = int(labels[inside].sum()) * int((~labels[inside]).sum())
        if count:
            total += count * auroc(labels[inside], scores[inside])
            pairs += count
    if not pairs:
        raise ScoreError("no group holds both cases and references; AUROC within groups needs one that does")
    return total / pairs, pairs


def average_precision(labels: np.ndarray, scores: np.ndarray) -> float:
    """Return the average precision: sum over thresholds of precision x gain in recall, as scikit-learn computes it.

    Its chance level is the prevalence (share of cases), not one half; wells of equal score enter together.

    Parameters
    ----------
    labels, scores
        (n,) as in `auroc`.

    Returns
    -------
    float
        In (0, 1].

    Raises
    ------
    ScoreError
        If one class is missing or a score is not finite.
    """
    labels, scores = _checked(labels, scores)
    order = np.argsort(-scores, kind="stable")
    last = np.flatnonzero(np.r_[np.diff(scores[order]) != 0, True])  # of each group of equal scores
    found = np.cumsum(labels[order])[last]
    return float((found / (last + 1)) @ np.diff(found, prepend=0) / found[-1])


def chance_average_precision(n_positive: np.ndarray | int, n: np.ndarray | int) -> np.ndarray:
    """Return the expected average precision of a random order of `n` items, `n_positive` of them positive.

    Exact: (H_n + (M - 1) / (n - 1) (n - H_n)) / n with M positives and H_n the n-th harmonic number (Bestgen 2015). It
    is above the prevalence M / n, the more so the fewer items there are.

    Parameters
    ----------
    n_positive, n
        Integers or arrays of one shape, 1 <= n_positive <= n.
    """
    n_positive, n = np.asarray(n_positive, dtype=np.float64), np.asarray(n, dtype=np.int64)
    if (n_positive < 1).any() or (n_positive > n).any():
        raise ScoreError("average precision needs at least one positive item, and no more of them than items")
    harmonic = np.concatenate([[0.0], np.cumsum(1.0 / np.arange(1, int(n.max()) + 1))])[n]
    others = np.where(n > 1, (n_positive - 1) / np.maximum(n - 1, 1), 1.0)
    return (harmonic + others * (n - harmonic)) / n


def _checked(labels: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    labels, scores = np.asarray(labels).astype(bool), np.asarray(scores, dtype=np.float64)
    if labels.shape != scores.shape or labels.ndim != 1:
        raise ScoreError(f"labels {labels.shape} and scores {scores.shape} must be one-dimensional and equally long")
    if not np.isfinite(scores).all():
        raise ScoreError(f"{(~np.isfinite(scores)).sum()} of {len(scores)} scores are not finite; check the features")
    if labels.all() or not labels.any():
        raise ScoreError("AUROC needs at least one case and one reference; only one class is here")
    return labels, scores


def hoyer(weights: np.ndarray) -> float | None:
    """Return Hoyer's sparsity, (sqrt n - |w|_1 / |w|_2) / (sqrt n - 1): 0 for equal weights, 1 for a single one.

    Parameters
    ----------
    weights
        (n,) float. Compare only vectors of equal n, on standardised inputs.

    Returns
    -------
    float or None
        In [0, 1]; None where it is 0/0, that is when every weight is zero or n is 1.

    Raises
    ------
    ScoreError
        If a weight is not finite.
    """
    weights, n = _sizes(weights), len(weights)
    if n < 2 or weights is None:
        return None
    value = (np.sqrt(n) - weights.sum() / np.sqrt((weights**2).sum())) / (np.sqrt(n) - 1)
    return float(np.clip(value, 0.0, 1.0))


def gini(weights: np.ndarray) -> float | None:
    """Return the Gini index, 1 - 2 sum_k (w_(k) / |w|_1)(n - k + 1/2) / n with |w| ascending: 0 for equal weights.

    Hurley and Rickard (2009). A single weight gives 1 - 1/n.

    Parameters
    ----------
    weights
        (n,) float. Compare only vectors of equal n, on standardised inputs.

    Returns
    -------
    float or None
        In [0, 1); None where it is 0/0, that is when every weight is zero.

    Raises
    ------
    ScoreError
        If a weight is not finite.
    """
    weights, n = _sizes(weights), len(weights)
    if weights is None:
        return None
    rank = np.arange(1, n + 1)
    return float(max(0.0, 1.0 - 2.0 * (np.sort(weights) / weights.sum() * (n - rank + 0.5)).sum() / n))


def _sizes(weights: np.ndarray) -> np.ndarray | None:
    """Return the sizes of weights relative to the largest, so that squares of tiny ones do not underflow, or None."""
    weights = np.abs(np.asarray(weights, dtype=np.float64))
    if not np.isfinite(weights).all():
        raise ScoreError("sparsity needs finite weights")
    return weights / weights.max() if weights.any() else None


def ranking(effects: np.ndarray) -> np.ndarray:
    """Return the component indices (n,) from largest to smallest effect; ties keep the component order."""
    return np.argsort(-_effects(effects), kind="stable")


def concentration_share(effects: np.ndarray, top: np.ndarray) -> float | None:
    """Return the share of the summed effects that the components `top` hold.

    Parameters
    ----------
    effects
        (n,) float, at least 0: measured on held-out experiments.
    top
        (q,) int component indices: ranked on training experiments.

    Returns
    -------
    float or None
        In [0, 1]; q / n by chance when effects are spread evenly. None when every effect is zero.
    """
    effects = _effects(effects)
    total = effects.sum()
    return float(effects[np.asarray(top)].sum() / total) if total > 0 else None


def corrected_share(share: float, n_top: int, n: int) -> float | None:
    """Return (share - q) / (1 - q) with q = n_top / n: 0 for an even spread, 1 when the top holds everything.

    None when the top is every component (q = 1).
    """
    q = n_top / n
    return float((share - q) / (1 - q)) if q < 1 else None


def purity(biology: np.ndarray, batch: np.ndarray, top: np.ndarray) -> float | None:
    """Return biology / (biology + batch), each summed over the components `top`.

    Parameters
    ----------
    biology, batch
        (n,) float, at least 0, in one unit (share of variance).
    top
        (q,) int component indices.

    Returns
    -------
    float or None
        In [0, 1]; None when both sums are zero.
    """
    top = np.asarray(top)
    good, bad = _effects(biology)[top].sum(), _effects(batch)[top].sum()
    return float(good / (good + bad)) if good + bad > 0 else None


def participation(effects: np.ndarray) -> float | None:
    """Return (sum e)^2 / sum e^2: between 1 (one component) and n (all alike); None when every effect is zero."""
    return concentration.participation(_effects(effects))


def overlap(top_a: np.ndarray, top_b: np.ndarray) -> float:
    """Return the share of the components `top_a` (q,) that are also in `top_b` (q,)."""
    top_a, top_b = set(np.asarray(top_a).tolist()), set(np.asarray(top_b).tolist())
    if not top_a or len(top_a) != len(top_b):
        raise ScoreError(f"overlap needs two equally long, non-empty sets, not {len(top_a)} and {len(top_b)}")
    return len(top_a & top_b) / len(top_a)


def _effects(effects: np.ndarray) -> np.ndarray:
    effects = np.asarray(effects, dtype=np.float64)
    if effects.ndim != 1 or not len(effects) or not np.isfinite(effects).all() or (effects < 0).any():
        raise ScoreError("effects must be a non-empty vector of finite numbers that are at least 0")
    return effects
