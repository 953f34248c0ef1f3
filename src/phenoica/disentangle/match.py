"""Which component of one fit is which of another: assignment on absolute correlation, and the best rotation.

Two matrices of components of the same wells come in, or two sets of weights with the covariance they share; pairs and
their correlations go out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phenoica.disentangle.rotations import nearest_rotation
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

    @property
    def mcc(self) -> float:
        """Mean correlation coefficient: the mean |r| over the components of the first set."""
        return float(np.abs(self.r).mean())


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


def correlations(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """Return the (k, l) correlations of the columns of A (n, k) with those of B (n, l); 0 for a constant column."""
    A, B = (np.asarray(Y, dtype=np.float64) for Y in (A, B))
    A, B = A - A.mean(axis=0), B - B.mean(axis=0)
    return _ratio(A.T @ B, (A**2).sum(axis=0), (B**2).sum(axis=0))


def weight_correlations(V: np.ndarray, W: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """Return the (k, l) correlations of X @ V with X @ W where X has a known covariance.

    Parameters
    ----------
    V, W
        float64 (d, k) and (d, l) weights.
    covariance
        float64 (d, d), of the wells on which the components are compared.
    """
    turned = covariance @ W
    return _ratio(V.T @ turned, ((covariance @ V) * V).sum(axis=0), (turned * W).sum(axis=0))


def procrustes(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """Return the orthogonal (k, k) matrix Q that makes |A Q - B| smallest, without scale (Schoenemann 1966).

    Parameters
    ----------
    A, B
        float (n, k), centred.
    """
    return nearest_rotation(np.asarray(A, dtype=np.float64).T @ np.asarray(B, dtype=np.float64))


def _ratio(products: np.ndarray, squares_a: np.ndarray, squares_b: np.ndarray) -> np.ndarray:
    scale = np.sqrt(np.outer(squares_a, squares_b))
    return np.divide(products, scale, out=np.zeros_like(products), where=scale > 0)
