"""The varimax rotation of a loading matrix (Kaiser 1958).

Loadings come in, an orthogonal rotation to simple structure goes out. Pairs of columns are turned by the angle that
Kaiser gives in closed form, which can only raise the criterion; pairs that share no column are turned together.
"""

from __future__ import annotations

import numpy as np

from phenoica.disentangle.rotations import nearest_rotation

_MAX_SWEEPS = 1000
_ANGLE = 1e-6


def varimax_rotation(loadings: np.ndarray) -> tuple[np.ndarray, int, bool]:
    """Return the rotation that maximises Kaiser's normal varimax criterion.

    Rows are divided by the root of their communality (Kaiser normalisation), so that each feature weighs alike
    whatever its variance; rows of zeros take no part. The criterion is the sum over columns of the variance of the
    squared loadings.

    Parameters
    ----------
    loadings
        float64 (d, k).

    Returns
    -------
    rotation : ndarray
        float64 (k, k), orthogonal; the rotated loadings are loadings @ rotation. One column has nothing to turn.
    sweeps : int
        Sweeps over all pairs.
    converged : bool
        Whether the last sweep turned every pair by at most 1e-6.
    """
    k = loadings.shape[1]
    length = np.sqrt((loadings**2).sum(axis=1))
    kept = length > 1e-12 * length.max(initial=0.0)
    # columns of both are contiguous rows here, turned side by side
    turned, rotation = (loadings[kept] / length[kept, None]).T.copy(), np.eye(k)
    rounds = _rounds(k)
    sweeps, largest = 0, np.inf
    while largest > _ANGLE and sweeps < _MAX_SWEEPS:
        largest = max((_turn(turned, rotation, first, second) for first, second in rounds), default=0.0)
        sweeps += 1
    # many small rotations drift from the orthogonal group by rounding: take the nearest one in it
    return nearest_rotation(rotation.T), sweeps, largest <= _ANGLE


def _rounds(k: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return all pairs of k columns in rounds that use each column at most once (the circle method)."""
    if k < 2:
        return []
    seats = list(range(k)) + [-1] * (k % 2)
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = [(a, b) for a, b in zip(seats[:half], seats[half:][::-1], strict=True) if min(a, b) >= 0]
        rounds.append(tuple(np.array(side) for side in zip(*[sorted(p) for p in pairs], strict=True)))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def _turn(turned: np.ndarray, rotation: np.ndarray, first: np.ndarray, second: np.ndarray) -> float:
    """Turn pairs of rows of both matrices in place to their best angle; return the largest angle."""
    x, y = turned[first], turned[second]
    u, v = (x - y) * (x + y), 2 * x * y
    A, B = u.sum(axis=1), v.sum(axis=1)
    uu, vv, uv = (np.einsum("ij,ij->i", one, two) for one, two in ((u, u), (v, v), (u, v)))
    p = turned.shape[1]
    above, below = 2 * uv - 2 * A * B / p, uu - vv - (A**2 - B**2) / p
    # where both are rounding there is nothing to gain at any angle
    flat = np.hypot(above, below) <= 1e-14 * (uu + vv + np.finfo(float).tiny)
    angle = np.where(flat, 0.0, np.arctan2(above, below) / 4)
    c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
    turned[first], turned[second] = c * x + s * y, c * y - s * x
    one, two = rotation[first], rotation[second]
    rotation[first], rotation[second] = c * one + s * two, c * two - s * one
    return float(np.abs(angle).max(initial=0.0))
