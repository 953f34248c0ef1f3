"""Pure scores of arrays: AUROC, sparsity of probe weights, and concentration of effects on few components.

Arrays come in, plain numbers go out; nothing here knows of files, views or folds. Formulas: AUROC is the Mann-Whitney
statistic; sparsity is Hoyer's (2004), as in Hurley and Rickard (2009); the exact concentration of Nelson et al. (2026)
is not public, so several readings of it stand side by side.
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
    weights = np.abs(np.asarray(weights, dtype=np.float64))
    if not np.isfinite(weights).all():
        raise ScoreError("sparsity needs finite weights")
    n = len(weights)
    if n < 2 or not weights.any():
        return None
    weights = weights / weights.max()  # so that squares of tiny weights do not underflow
    value = (np.sqrt(n) - weights.sum() / np.sqrt((weights**2).sum())) / (np.sqrt(n) - 1)
    return float(np.clip(value, 0.0, 1.0))


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
