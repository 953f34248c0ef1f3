"""How much of a column's variance lies between groups of wells: analysis of variance, and what it is built of.

Values of wells and labels come in, shares of variance (omega2) and orthonormal bases of what groups explain go out.
Nothing here knows of components, controls or files.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd


def omega2(values: np.ndarray, groups: np.ndarray | pd.Series) -> np.ndarray:
    """Share of a component's variance that lies between groups, unbiased.

    One-way omega2 (Hays 1963): (SS_between - (g - 1) MS_within) / (SS_total + MS_within), clipped at
    0.

    Parameters
    ----------
    values
        (n, k).
    groups
        (n,) labels, g different ones.

    Returns
    -------
    ndarray
        float64 (k,) in [0, 1]. It is 0 where it cannot be measured: one group, no well beyond one a group,
        no variance.
    """
    return variance_between(values, groups)[0]


def variance_between(
    values: np.ndarray, groups: np.ndarray | pd.Series, within: np.ndarray | pd.Series | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the share of a component's variance that lies between groups, and its F test.

    Analysis of variance. Without `within` one-way: omega2 = (SS_between - df MS_rest) / (SS_total + MS_rest)
    (Hays 1963), F = SS_between / df / MS_rest. With `within` the means of its levels are removed from the
    values and from the group indicators first, so SS_between is what groups explain beyond the levels, df the
    rank of the indicators that is left, and their n - levels - df the degrees of freedom of the rest;
    SS_total stays that of all values, so omega2 is a share of the whole variance. The F test takes normal
    values; where they may be anything, `phenoica.disentangle.permutation` tests instead.

    Parameters
    ----------
    values
        (n, k).
    groups
        (n,) labels, such as the plate columns of the wells.
    within
        (n,) labels, such as the plates of the wells, or None.

    Returns
    -------
    omega2 : ndarray
        float64 (k,) in [0, 1]; 0 where it cannot be measured: groups that do not differ beyond `within`, no
        degree of freedom of the rest, no variance.
    p : ndarray
        float64 (k,), upper tail of F; 1 where it cannot be measured.
    """
    from scipy import stats

    values = np.asarray(values, dtype=np.float64)
    codes, names = pd.factorize(np.asarray(groups))
    n, g = len(values), len(names)
    centred = values - values.mean(axis=0)
    whole = (centred**2).sum(axis=0)
    if within is None:
        counts, means, squares = group_statistics(centred, codes, g)
        between, df = (counts[:, None] * means**2).sum(axis=0), g - 1
        rest, df_rest = squares.sum(axis=0), n - g
    else:
        levels, level_names = pd.factorize(np.asarray(within))
        centred = centre(centred, levels, len(level_names))
        if (
            len(np.unique(codes * len(level_names) + levels)) == g
        ):  # every group lies in one level, as plates do in batches
            counts, means, _ = group_statistics(centred, codes, g)
            between, df = (counts[:, None] * means**2).sum(axis=0), g - len(level_names)
        else:
            basis = basis_beyond(codes, levels)
            between, df = ((basis.T @ centred) ** 2).sum(axis=0), basis.shape[1]
        rest, df_rest = np.clip((centred**2).sum(axis=0) - between, 0.0, None), n - len(level_names) - df
    if df < 1 or df_rest < 1:
        return np.zeros(values.shape[1]), np.ones(values.shape[1])
    mean_square = rest / df_rest
    share = np.divide(between - df * mean_square, whole + mean_square, out=np.zeros_like(whole), where=whole > 0)
    F = np.divide(between / df, mean_square, out=np.full_like(whole, np.inf), where=mean_square > 0)
    return np.clip(share, 0.0, None), np.where(between > 0, stats.f.sf(F, df, df_rest), 1.0)


def basis_beyond(groups: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return an orthonormal basis (n, df) of what group indicators explain beyond the means of levels.

    Parameters
    ----------
    groups, levels
        (n,) int codes from 0, each used at least once.
    """
    n = len(groups)
    indicators = centre(np.eye(groups.max() + 1)[groups], levels, levels.max() + 1)
    basis, size, _ = np.linalg.svd(indicators, full_matrices=False)
    return basis[:, size > n * np.finfo(np.float64).eps * np.sqrt(n)]


def sum_by(codes: np.ndarray, n_groups: int) -> Any:
    """Return the sparse (n_groups, n) matrix that sums rows of equal code."""
    from scipy import sparse

    n = len(codes)
    return sparse.csr_array((np.ones(n), (codes, np.arange(n))), shape=(n_groups, n))


def centre(values: np.ndarray, codes: np.ndarray, n_groups: int) -> np.ndarray:
    """Return the (n, k) values minus the means of their groups."""
    return values - group_statistics(values, codes, n_groups)[1][codes]


def group_statistics(values: np.ndarray, codes: np.ndarray, n_groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return counts (g,), means (g, k) and sums of squares within (g, k); 0 for an empty group."""
    total = sum_by(codes, n_groups)
    counts = np.bincount(codes, minlength=n_groups).astype(np.float64)
    means = (total @ values) / np.maximum(counts, 1)[:, None]
    return counts, means, total @ (values - means[codes]) ** 2


def normal_scores(values: np.ndarray) -> np.ndarray:
    """Return the normal quantiles of rank / (n + 1) in each column of values (n, k); ties share the mean rank."""
    from scipy import special, stats

    n = len(values)
    order = np.argsort(values, axis=0)
    ordered = np.take_along_axis(values, order, axis=0)
    if (ordered[1:] == ordered[:-1]).any():
        return special.ndtri(stats.rankdata(values, axis=0) / (n + 1))
    scores = np.empty(values.shape)
    np.put_along_axis(scores, order, special.ndtri(np.arange(1, n + 1) / (n + 1))[:, None], axis=0)
    return scores


def adjust(p: np.ndarray) -> np.ndarray:
    """Benjamini-Hochberg adjusted p values along the first axis; same shape."""
    p = np.asarray(p, dtype=np.float64)
    m = len(p)
    order = np.argsort(p, axis=0)
    ranks = np.arange(1, m + 1).reshape((m,) + (1,) * (p.ndim - 1))
    scaled = np.take_along_axis(p, order, axis=0) * m / ranks
    monotone = np.minimum(np.minimum.accumulate(scaled[::-1], axis=0)[::-1], 1.0)
    out = np.empty_like(p)
    np.put_along_axis(out, order, monotone, axis=0)
    return out
