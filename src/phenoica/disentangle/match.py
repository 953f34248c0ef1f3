"""Which component of one fit is which of another: assignment on absolute correlation.

Two sets of weights come in, with the covariance of the wells on which they are compared; pairs and their correlations
go out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phenoica.errors import FitError


@dataclass(frozen=True)
class Match:
    """A one-to-one matching of components.

    Attributes
    ----------
    index
        int (k,): component of the second set that is given to each of the first; -1 where the second set is smaller
        and none was left.
    r
        float64 (k,): signed correlation of the pairs, 0 where there is none.
    """

    index: np.ndarray
    r: np.ndarray


def match(r: np.ndarray) -> Match:
    """Match components so that the sum of |r| is largest (Hungarian assignment, Kuhn 1955).

    Parameters
    ----------
    r
        float (k, l), correlations of the k components of one set with the l of another.

    Raises
    ------
    FitError
        If r is not a finite matrix.
    """
    from scipy.optimize import linear_sum_assignment

    r = np.asarray(r, dtype=np.float64)
    if r.ndim != 2 or not r.size or not np.isfinite(r).all():
        raise FitError(f"components cannot be matched on correlations of shape {r.shape} that are not all finite")
    rows, columns = linear_sum_assignment(-np.abs(r))
    index, value = np.full(len(r), -1), np.zeros(len(r))
    index[rows], value[rows] = columns, r[rows, columns]
    return Match(index, value)


def weight_correlations(V: np.ndarray, W: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """Return the (k, l) correlations of X @ V with X @ W where X has a known covariance; 0 for a constant component.

    Parameters
    ----------
    V, W
        float64 (d, k) and (d, l) weights.
    covariance
        float64 (d, d), of the wells on which the components are compared.
    """
    turned = covariance @ W
    products = V.T @ turned
    scale = np.sqrt(np.outer(((covariance @ V) * V).sum(axis=0), (turned * W).sum(axis=0)))
    return np.divide(products, scale, out=np.zeros_like(products), where=scale > 0)
