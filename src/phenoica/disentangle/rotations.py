"""Orthogonal matrices: random ones, and the one next to a matrix that should be one."""

from __future__ import annotations

import numpy as np


def haar_rotation(k: int, seed: int, draw: int) -> np.ndarray:
    """Return a (k, k) float64 orthogonal matrix, uniform under the Haar measure.

    QR of a Gaussian matrix with the signs of R's diagonal moved into Q (Mezzadri 2007); the generator is
    seeded with (seed, draw).
    """
    q, r = np.linalg.qr(np.random.default_rng([seed, draw]).standard_normal((k, k)))
    return q * np.where(np.diag(r) < 0, -1.0, 1.0)


def nearest_rotation(matrix: np.ndarray) -> np.ndarray:
    """Return the orthogonal matrix next to a (k, k) matrix in the Frobenius norm: the factor U V' of its SVD."""
    left, _, right = np.linalg.svd(matrix)
    return left @ right
