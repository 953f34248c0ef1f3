"""The ICA rotation of whitened data, and the one rule that says whether it has converged.

In goes a whitened matrix, out comes an orthogonal rotation to components that are as non-Gaussian as possible. Two
solvers find it: our own (`phenoica.disentangle.orthogonal`) and Picard-O with extended signs (Ablin, Cardoso, Gramfort
2018, python-picard), against which ours is tested. Convergence is never taken from a solver's word but from
`gradient_and_shape`, evaluated in float64 on all rows after the fit.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

from phenoica.disentangle.rotations import haar_rotation, nearest_rotation
from phenoica.errors import ConfigError

_BLOCK_ROWS = 8192
WELLS_PER_SQUARED_COMPONENT = 10

QUASI_NEWTON, PICARD = "quasi_newton", "picard"
SOLVERS = (QUASI_NEWTON, PICARD)
ADAPTIVE, LOGCOSH = "adaptive", "logcosh"
CONTRASTS = (ADAPTIVE, LOGCOSH)
DEVICES = ("cpu", "cuda", "auto")


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
        Passes over the data that the solver took, rounded up; one of its subsample counts as a part of one.
    gradient
        Largest relative gradient (`GradientAndShape.gradient`) of the components, re-evaluated after the fit.
    converged
        Whether `gradient` is at most the tolerance.
    seed
        Seed of the starting rotation.
    kurtosis
        float64 (k,), excess kurtosis of the components.
    warnings
        What was said aloud about this fit.
    """

    rotation: np.ndarray
    n_iter: int
    gradient: float
    converged: bool
    seed: int
    kurtosis: np.ndarray
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class GradientAndShape:
    """What a rotation makes of whitened data: how far from stationary it is, and the shape of its components.

    Attributes
    ----------
    gradient
        Largest entry of the relative gradient of the log-cosh likelihood under orthogonal updates. For components
        y_i with psi = tanh, G_ij = s_i E[psi(y_i) y_j]. With the adaptive contrast s_i = sign(E[psi'(y_i)]
        E[y_i^2] - E[psi(y_i) y_i]), +1 for super- and -1 for sub-Gaussian components; with the contrast
        logcosh it is +1. On the orthogonal group only the antisymmetric part moves the likelihood, so the
        number is max |G - G'| / 2; 0 is a stationary point. It has no unit and, since components have unit
        variance, can be compared between data sets.
    skew, kurtosis
        float64 (k,), population skew and excess kurtosis.
    """

    gradient: float
    skew: np.ndarray
    kurtosis: np.ndarray


def gradient_and_shape(Z: np.ndarray, rotation: np.ndarray | None = None, contrast: str = ADAPTIVE) -> GradientAndShape:
    """Evaluate the stopping rule, skew and kurtosis of components in float64, reading blocks of rows once.

    Parameters
    ----------
    Z
        (n, k) whitened data, or components of zero mean and unit variance.
    rotation
        (k, k); components are Z @ rotation. None: Z are the components.
    contrast
        One of `CONTRASTS`.
    """
    n, k = Z.shape
    G, slope = np.zeros((k, k)), np.zeros(k)
    powers = np.zeros((5, k))
    for start in range(0, n, _BLOCK_ROWS):
        y = np.asarray(Z[start : start + _BLOCK_ROWS], dtype=np.float64)
        if rotation is not None:
            y = y @ rotation
        psi = np.tanh(y)
        G += psi.T @ y
        slope += (1.0 - psi**2).sum(axis=0)
        square = y**2
        for order, power in ((1, y), (2, square), (3, square * y), (4, square**2)):
            powers[order] += power.sum(axis=0)
    G, slope, powers = G / n, slope / n, powers / n
    signs = np.ones(k)
    if contrast == ADAPTIVE:
        signs[slope * powers[2] - np.diag(G) < 0] = -1.0
    G *= signs[:, None]
    mean, variance = powers[1], powers[2] - powers[1] ** 2
    third = powers[3] - 3 * mean * powers[2] + 2 * mean**3
    fourth = powers[4] - 4 * mean * powers[3] + 6 * mean**2 * powers[2] - 3 * mean**4
    return GradientAndShape(
        float(np.abs(G - G.T).max() / 2),
        np.divide(third, variance**1.5, out=np.zeros(k), where=variance > 0),
        np.divide(fourth, variance**2, out=np.full(k, 3.0), where=variance > 0) - 3.0,
    )


def check_options(solver: str, contrast: str, device: str) -> None:
    """Raise ConfigError unless solver, contrast and device are known."""
    for option, value, known in (
        ("ica_solver", solver, SOLVERS), ("ica_contrast", contrast, CONTRASTS), ("ica_device", device, DEVICES),
    ):  # fmt: skip
        if value not in known:
            raise ConfigError(f"{option} is {value!r}; known: {', '.join(known)}")


def fit_rotation(
    Z: np.ndarray, *, seed: int, max_iter: int = 1000, tolerance: float = 1e-4, solver: str = QUASI_NEWTON,
    contrast: str = ADAPTIVE, device: str = "cpu",
) -> IcaFit:  # fmt: skip
    """Find the orthogonal rotation of whitened data to independent components.

    Parameters
    ----------
    Z
        float32 or float64 (n, k), columns of zero mean and identity covariance; never copied whole by our own solver.
    seed
        Seed of the random starting rotation, and of the rows of the warm start.
    max_iter
        Largest number of passes over the data (quasi_newton) or of iterations (picard).
    tolerance
        Largest relative gradient that counts as converged.
    solver
        "quasi_newton", our own, or "picard", which keeps several float64 copies of Z.
    contrast
        "adaptive" finds super- and sub-Gaussian components, "logcosh" is the plain log-cosh likelihood, right for
        super-Gaussian ones.
    device
        Where quasi_newton multiplies: "cpu", "cuda", or "auto" for cuda where there is one.

    Returns
    -------
    IcaFit
        With the sign and order fixed. Order is by kurtosis because that needs only this one fit.

    Raises
    ------
    ConfigError
        If solver, contrast or device is unknown, or cuda is asked for and absent.

    Warns
    -----
    IcaWarning
        If the fit has not converged, or n is under 10 k^2.
    """
    check_options(solver, contrast, device)
    n, k = Z.shape
    said = []
    if n < WELLS_PER_SQUARED_COMPONENT * k**2:
        said.append(
            f"ica: {n} wells for {k} components is fewer than 10 k^2 = {10 * k**2}; components may not be "
            "reproducible; lower disentangle.n_components or add wells"
        )
    start = haar_rotation(k, seed, 0)
    options = {"max_iter": max_iter, "tolerance": tolerance, "contrast": contrast}
    if solver == PICARD:
        rotation, n_iter = _picard(Z, start, **options)
    else:
        from phenoica.disentangle.orthogonal import search

        found = search(Z, start, seed=seed, device=device, **options)
        rotation, n_iter = found.rotation, int(np.ceil(found.evaluations))
    found = gradient_and_shape(Z, rotation, contrast)
    order = np.argsort(-found.kurtosis, kind="stable")
    rotation = (rotation * np.where(found.skew < 0, -1.0, 1.0))[:, order]
    if found.gradient > tolerance:
        said.append(
            f"ica: not converged after {n_iter} iterations: relative gradient {found.gradient:.2g} is above the "
            f"tolerance {tolerance:.2g}; raise disentangle.ica_max_iter or lower disentangle.n_components"
        )
    for message in said:
        warnings.warn(message, IcaWarning, stacklevel=2)
    return IcaFit(
        rotation, n_iter, found.gradient, found.gradient <= tolerance, seed, found.kurtosis[order], tuple(said)
    )


def _picard(
    Z: np.ndarray, start: np.ndarray, *, max_iter: int, tolerance: float, contrast: str
) -> tuple[np.ndarray, int]:
    from picard import picard

    with warnings.catch_warnings():
        # the solver's own verdict is replaced by that of `gradient_and_shape`
        warnings.filterwarnings("ignore", message="Picard did not converge")
        _, unmixing, _, last = picard(
            np.ascontiguousarray(Z.T, dtype=np.float64), ortho=True, extended=contrast == ADAPTIVE, whiten=False,
            centering=False, fun="tanh", max_iter=max_iter, tol=tolerance, w_init=start.T, return_n_iter=True,
        )  # fmt: skip
    # products of many small rotations drift from the orthogonal group by rounding: take the nearest one in it
    return nearest_rotation(unmixing.T), int(last) + 1
