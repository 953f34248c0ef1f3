"""The ICA rotation of whitened data, and the one rule that says whether it has converged.

In goes a whitened matrix, out comes an orthogonal rotation to components that are as non-Gaussian as
possible. The solver is Picard-O with extended signs (Ablin, Cardoso, Gramfort 2018, python-picard);
convergence is never taken from the solver's word but from `relative_gradient`, evaluated in float64 on all
rows after the fit.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

_BLOCK_ROWS = 32768
_WELLS_PER_SQUARED_COMPONENT = 10


class IcaWarning(UserWarning):
    """An ICA fit that may not be trusted: not converged, or few wells for its width."""


@dataclass(frozen=True)
class IcaFit:
    """One fitted rotation.

    Attributes
    ----------
    rotation
        float64 (k, k), orthogonal; components = whitened data @ rotation. Signs give every component a
        positive skew on the training data; order is by excess kurtosis, largest first.
    n_iter
        Gradient evaluations the solver used.
    gradient
        `relative_gradient` of the components, re-evaluated after the fit.
    converged
        Whether `gradient` is at most the tolerance.
    seed
        Seed of the starting rotation.
    warnings
        What was said aloud about this fit.
    """

    rotation: np.ndarray
    n_iter: int
    gradient: float
    converged: bool
    seed: int
    warnings: tuple[str, ...]


def relative_gradient(Y: np.ndarray) -> float:
    """Largest entry of the relative gradient of the log-cosh likelihood under orthogonal updates.

    For components y_i with psi = tanh, G_ij = s_i E[psi(y_i) y_j] and s_i = sign(E[psi'(y_i)] E[y_i^2] -
    E[psi(y_i) y_i]) is +1 for super- and -1 for sub-Gaussian components. On the orthogonal group only the
    antisymmetric part moves the likelihood, so the result is max |G - G'| / 2; 0 is a stationary point.

    Parameters
    ----------
    Y
        (n, k) components of zero mean and unit variance; read in float64, in blocks of rows.

    Returns
    -------
    float
        Without unit; comparable between data sets because the components have unit variance.
    """
    n, k = Y.shape
    gradient, slope, power = np.zeros((k, k)), np.zeros(k), np.zeros(k)
    for start in range(0, n, _BLOCK_ROWS):
        block = np.asarray(Y[start : start + _BLOCK_ROWS], dtype=np.float64)
        psi = np.tanh(block)
        gradient += psi.T @ block
        slope += (1.0 - psi**2).sum(axis=0)
        power += (block**2).sum(axis=0)
    gradient /= n
    signs = np.where(slope / n * power / n - np.diag(gradient) < 0, -1.0, 1.0)
    gradient *= signs[:, None]
    return float(np.abs(gradient - gradient.T).max() / 2)


def fit_rotation(Z: np.ndarray, *, seed: int, max_iter: int = 1000, tolerance: float = 1e-4) -> IcaFit:
    """Find the orthogonal rotation of whitened data to independent components.

    Parameters
    ----------
    Z
        float64 (n, k), columns of zero mean and identity covariance.
    seed
        Seed of the random starting rotation.
    max_iter
        Largest number of solver iterations.
    tolerance
        Largest `relative_gradient` that counts as converged.

    Returns
    -------
    IcaFit
        With the sign and order fixed. Order is by kurtosis because that needs only this one fit.

    Warns
    -----
    IcaWarning
        If the fit has not converged, or n is under 10 k^2.
    """
    from picard import picard

    n, k = Z.shape
    said = []
    if n < _WELLS_PER_SQUARED_COMPONENT * k**2:
        said.append(
            f"ica: {n} wells for {k} components is fewer than 10 k^2 = {10 * k**2}; components may not be "
            "reproducible; lower disentangle.n_components or add wells"
        )
    with warnings.catch_warnings():
        # the solver's own verdict is replaced by relative_gradient below
        warnings.filterwarnings("ignore", message="Picard did not converge")
        _, unmixing, _, last = picard(
            np.ascontiguousarray(Z.T), ortho=True, extended=True, whiten=False, centering=False, fun="tanh",
            max_iter=max_iter, tol=tolerance, random_state=seed, return_n_iter=True,
        )  # fmt: skip
    # products of many small rotations drift from the orthogonal group by rounding: take the nearest one in it
    left, _, right = np.linalg.svd(unmixing.T)
    rotation, Y = _fix_sign_and_order(left @ right, Z)
    gradient = relative_gradient(Y)
    if gradient > tolerance:
        said.append(
            f"ica: not converged after {last + 1} iterations: relative gradient {gradient:.2g} is above the "
            f"tolerance {tolerance:.2g}; raise disentangle.ica_max_iter or lower disentangle.n_components"
        )
    for message in said:
        warnings.warn(message, IcaWarning, stacklevel=2)
    return IcaFit(rotation, int(last) + 1, gradient, gradient <= tolerance, seed, tuple(said))


def _fix_sign_and_order(rotation: np.ndarray, Z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    from scipy import stats

    Y = Z @ rotation
    signs = np.where(stats.skew(Y, axis=0) < 0, -1.0, 1.0)
    order = np.argsort(-stats.kurtosis(Y, axis=0), kind="stable")
    return (rotation * signs)[:, order], (Y * signs)[:, order]
