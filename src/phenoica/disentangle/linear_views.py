"""Views that are one centring and one matrix: raw, mad, spherize, and pca with its rotations varimax, rotation and ica.

Training wells come in, `mean_` and `components_` go out. The rotations are composed in float64 onto one saved pca
fit, so pca, varimax, rotation and ica of one fit differ by an orthogonal matrix and nothing else.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pandas as pd

from phenoica.disentangle.base_view import (
    AUTO,
    LinearView,
    View,
    positive_number,
    projection,
    scaling,
    whole_number,
    width_option,
)
from phenoica.disentangle.batch_controls import enough_fit_controls
from phenoica.disentangle.blocks import Rows, Step, first_two_moments
from phenoica.disentangle.ica import ADAPTIVE, QUASI_NEWTON, check_options, fit_rotation
from phenoica.disentangle.rotations import haar_rotation
from phenoica.disentangle.varimax import varimax_rotation
from phenoica.disentangle.width import parallel_width
from phenoica.errors import FitError

SPHERIZE_REGULARISATION = 0.01
_MAD_TO_SD = 1.4826  # the sd of a Gaussian over its median absolute deviation, as pycytominer rounds it
_WHITE_TOLERANCE = 1e-3
_RELATIVE_VARIANCE = 1e-10


class ScaledView(View):
    """A view that is (X - mean_) * scale_."""

    mean_: np.ndarray
    scale_: np.ndarray
    _arrays = ("mean_", "scale_")

    def __init__(self) -> None:
        pass

    def _step(self, rows: Rows, obs: pd.DataFrame | None) -> Step:
        return scaling(self.mean_, self.scale_)


class Raw(ScaledView):
    """The features themselves, standardised on training wells; a feature constant there becomes 0.

    Attributes
    ----------
    mean_, scale_
        float64 (d,): training mean and reciprocal population standard deviation.
    """

    name = "raw"

    def _fit(self, rows: Rows, obs: pd.DataFrame | None) -> None:
        found = first_two_moments(rows)
        self.mean_, self.scale_ = found.mean, found.reciprocal_sd()
        self.n_components_ = rows.shape[1]


class Mad(ScaledView):
    """Features centred on their median and divided by 1.4826 x their median absolute deviation.

    The `mad_robustize` of pycytominer, fitted on all training wells (not plate by plate, and reading nothing of a test
    batch). The scale stays that of the MAD: unit variance after it would undo it, as `raw` up to a shift, so columns
    with long tails have more than unit variance. A feature whose MAD is 0 becomes 0; one that is not constant is
    counted in `warnings_`.

    Attributes
    ----------
    mean_, scale_
        float64 (d,): training median and reciprocal of 1.4826 MAD.
    """

    name = "mad"
    unit_variance = False

    def _fit(self, rows: Rows, obs: pd.DataFrame | None) -> None:
        width = rows.shape[1]
        self.mean_, spread, varies = np.zeros(width), np.zeros(width), np.zeros(width, dtype=bool)
        for place, columns in rows.columns():
            self.mean_[place] = np.median(columns, axis=0)
            varies[place] = columns.max(axis=0) > columns.min(axis=0)
            columns -= self.mean_[place]
            np.abs(columns, out=columns)
            spread[place] = _MAD_TO_SD * np.median(columns, axis=0, overwrite_input=True)
        without = spread == 0
        self.scale_ = np.where(without, 0.0, 1.0 / np.where(without, 1.0, spread))
        lost = int((without & varies).sum())
        if lost:
            self.warnings_.append(
                f"mad: {lost} of {width} features hold one value in at least half of the training wells, so their "
                "median absolute deviation is 0; they are set to 0 (raw keeps them)"
            )
        self.n_components_ = width


class Spherize(LinearView):
    """ZCA-cor whitening on the training fit controls, with a ridge.

    Features are centred and scaled to unit variance (n - 1) on the fit controls of all training batches together and
    multiplied by (R + regularisation I)^(-1/2), R their correlation matrix on those wells: what varies among controls
    is made alike in all directions, and each column still resembles its feature (Kessy, Lewin, Strimmer 2018; the
    ZCA-cor of pycytominer's Spherize). Then unit variance on all training wells. Without the ridge, directions that
    hardly vary among controls, and the null space of fewer controls than features, would be blown up without limit;
    with 0.01 by at most 10. A feature constant among the controls becomes 0.

    Parameters
    ----------
    regularisation
        Added to the eigenvalues of R, whose mean is 1.
    min_fit_controls
        Fit controls that all training batches together must have.

    Attributes
    ----------
    mean_
        float64 (d,), mean of the training fit controls.
    components_
        float64 (d, d), all steps in one matrix.
    """

    name = "spherize"
    _arrays = ("mean_", "components_")

    def __init__(self, *, regularisation: float = SPHERIZE_REGULARISATION, min_fit_controls: int = 8):
        self.regularisation = positive_number("regularisation", regularisation)
        self.min_fit_controls = whole_number("min_fit_controls", min_fit_controls, 2)

    def _fit(self, rows: Rows, obs: pd.DataFrame | None) -> None:
        controls = first_two_moments(rows.where(enough_fit_controls(obs, self.min_fit_controls)), scatter=True)
        scale = controls.reciprocal_sd(ddof=1)
        correlation = controls.scatter * np.outer(scale, scale) / (controls.n - 1)
        values, vectors = np.linalg.eigh(correlation)
        whitening = (vectors / np.sqrt(np.clip(values, 0.0, None) + self.regularisation)) @ vectors.T
        self.mean_ = controls.mean
        whitening = scale[:, None] * whitening * (scale > 0)
        whitened = rows.then(projection(self.mean_, whitening), len(scale))
        self.components_ = whitening * first_two_moments(whitened).reciprocal_sd()
        self.n_components_ = len(scale)


class Pca(LinearView):
    """Whitened principal components, from the eigenvectors of the float64 covariance.

    Features are centred and not standardised (`"raw + pca"` is the PCA of the correlation matrix). The sign
    makes the largest |loading| of each component positive.

    Parameters
    ----------
    n_components
        Number of components, "auto" for parallel analysis (see `width.parallel_width`), or None for as many as the
        data allow.
    seed
        Seed of the parallel analysis.

    Attributes
    ----------
    mean_
        float64 (d,), mean of the training wells.
    components_
        float64 (d, k), loadings divided by the component's population standard deviation.
    variance_
        float64 (k,), population variance along each component, decreasing.
    column_variance_
        float64 (d,), population variance of each feature.
    n_wells_
        Number of training wells.
    """

    name = "pca"
    _arrays = ("mean_", "components_", "variance_", "column_variance_")
    _meta = ("n_wells_",)

    def __init__(self, *, n_components: int | str | None = None, seed: int = 0):
        self.n_components, self.seed = width_option(n_components), whole_number("seed", seed, 0)

    def _fit(self, rows: Rows, obs: pd.DataFrame | None) -> None:
        asked = None if self.n_components == AUTO else self.n_components
        self.mean_, directions, self.variance_, self.column_variance_ = principal_axes(
            rows, asked, self.name, "training wells"
        )
        self.n_wells_ = len(rows)
        if self.n_components == AUTO:
            k, said = parallel_width(self.variance_, self.column_variance_, len(rows), self.seed)
            self.warnings_.extend(said)
            directions, self.variance_ = directions[:, :k], self.variance_[:k]
        self.components_ = directions / np.sqrt(self.variance_)
        self.n_components_ = len(self.variance_)

    def truncated(self, k: int) -> Pca:
        """Return the view of the first k components, as a fit with n_components k would be."""
        if not 0 < k <= self.n_components_:
            raise FitError(f"view pca: {k} components of {self.n_components_} were asked for")
        short = Pca(n_components=k, seed=self.seed)
        short.__dict__.update(self.__dict__)
        short.n_components, short.n_components_ = k, k
        short.components_, short.variance_ = self.components_[:, :k], self.variance_[:k]
        return short


class _RotatedPca(LinearView):
    """An orthogonal rotation of a whitened PCA, composed in float64 onto that one fit.

    Attributes
    ----------
    mean_, pca_components_
        float64 (d,) and (d, k), of the pca view.
    rotation_
        float64 (k, k), orthogonal: this view = pca view @ rotation_.
    components_
        float64 (d, k) = pca_components_ @ rotation_.
    """

    _arrays = ("mean_", "pca_components_", "rotation_")
    _needs_white: ClassVar[str] = "the pca view was fitted on other wells; fit it on these"
    pca: Pca | None
    n_components: int | str | None
    seed: int

    def _fit(self, rows: Rows, obs: pd.DataFrame | None) -> None:
        pca = self.pca
        if pca is None:
            pca = Pca(n_components=self.n_components, seed=self.seed)._fit_rows(rows, obs)
        elif not isinstance(pca, Pca) or not hasattr(pca, "n_components_"):
            raise FitError(f"view {self.name}: option pca must be a fitted pca view")
        elif self.n_components not in (None, AUTO, pca.n_components_):
            raise FitError(
                f"view {self.name}: n_components is {self.n_components} but the pca view has "
                f"{pca.n_components_}; leave n_components out"
            )
        if pca.n_features_in_ != rows.shape[1]:
            raise FitError(f"view {self.name}: {self._needs_white}")
        whitened = pca._mapped(rows, obs)
        if np.abs(_second_moment(whitened) - np.eye(pca.n_components_)).max() > _WHITE_TOLERANCE:
            raise FitError(f"view {self.name}: {self._needs_white}")
        self.warnings_.extend(pca.warnings_)
        self.mean_, self.pca_components_ = pca.mean_, pca.components_
        self.rotation_ = self._rotation(whitened, pca)
        self._derive()
        self.n_components_ = pca.n_components_

    def _derive(self) -> None:
        self.components_ = self.pca_components_ @ self.rotation_

    def _rotation(self, whitened: Rows, pca: Pca) -> np.ndarray:
        raise NotImplementedError


class Rotation(_RotatedPca):
    """PCA turned by a random Haar rotation: the null for ICA.

    Parameters
    ----------
    n_components
        As for pca; left out when `pca` is given.
    seed, draw
        The rotation is a function of these two numbers and the width.
    pca
        A pca view fitted on the same wells; None fits one.
    """

    name = "rotation"

    def __init__(self, *, n_components: int | str | None = None, seed: int = 0, draw: int = 0, pca: Pca | None = None):
        self.n_components = width_option(n_components)
        self.seed, self.draw, self.pca = whole_number("seed", seed, 0), whole_number("draw", draw, 0), pca

    def _rotation(self, whitened: Rows, pca: Pca) -> np.ndarray:
        return haar_rotation(pca.n_components_, self.seed, self.draw)


class Varimax(_RotatedPca):
    """PCA turned so that each component loads on few features: Kaiser's normal varimax of the loadings.

    The loadings are the covariances of features and whitened components, axes times standard deviations. Varimax is
    taken of them, as Kaiser (1958) defines it, and not of the scores: varimax of the scores maximises their fourth
    moments (Rohe, Zeng 2023), which is ICA by another contrast, while that of the loadings asks for simple structure
    in the features and never looks at the distribution of the wells. Starts at pca, uses no random number; components
    are ordered by the variance they explain in the features, with the largest |loading| positive.

    Parameters
    ----------
    n_components
        As for pca; left out when `pca` is given.
    seed
        Seed of the parallel analysis where n_components is "auto" and no pca is given.
    pca
        A pca view fitted on the same wells; None fits one.

    Attributes
    ----------
    n_iter_, converged_
        Sweeps over all pairs of components, and whether the last one turned none by more than 1e-6.
    """

    name = "varimax"
    _meta = ("n_iter_", "converged_")

    def __init__(self, *, n_components: int | str | None = None, seed: int = 0, pca: Pca | None = None):
        self.n_components, self.seed, self.pca = width_option(n_components), whole_number("seed", seed, 0), pca

    def _rotation(self, whitened: Rows, pca: Pca) -> np.ndarray:
        loadings = pca.components_ * pca.variance_
        rotation, self.n_iter_, self.converged_ = varimax_rotation(loadings)
        if not self.converged_:
            self.warnings_.append(f"varimax: still turning after {self.n_iter_} sweeps; its axes are not settled")
        turned = loadings @ rotation
        order = np.argsort(-(turned**2).sum(axis=0), kind="stable")
        turned, rotation = turned[:, order], rotation[:, order]
        return rotation * np.sign(turned[np.abs(turned).argmax(axis=0), np.arange(turned.shape[1])])


class Ica(_RotatedPca):
    """PCA turned to independent components.

    Parameters
    ----------
    n_components
        As for pca; left out when `pca` is given.
    seed
        Seed of the starting rotation.
    max_iter, tolerance
        Stopping rule, see `phenoica.disentangle.ica.fit_rotation`.
    solver, contrast, device
        See there.
    pca
        A pca view fitted on the same wells; None fits one.

    Attributes
    ----------
    n_iter_, gradient_, converged_
        Of the fit; `gradient_` is the relative gradient re-evaluated in float64 on all training wells.
    n_wells_
        Number of training wells.
    """

    name = "ica"
    _meta = ("n_iter_", "gradient_", "converged_", "n_wells_")

    def __init__(
        self, *, n_components: int | str | None = None, seed: int = 0, max_iter: int = 1000,
        tolerance: float = 1e-4, solver: str = QUASI_NEWTON, contrast: str = ADAPTIVE, device: str = "cpu",
        pca: Pca | None = None,
    ):  # fmt: skip
        self.n_components = width_option(n_components)
        check_options(solver, contrast, device)
        self.solver, self.contrast, self.device = solver, contrast, device
        self.seed, self.max_iter = whole_number("seed", seed, 0), whole_number("max_iter", max_iter)
        self.tolerance, self.pca = positive_number("tolerance", tolerance), pca

    def _rotation(self, whitened: Rows, pca: Pca) -> np.ndarray:
        # the one matrix the solver needs whole, in the precision of the input
        Z = whitened.array(whitened.dtype)
        fit = fit_rotation(
            Z, seed=self.seed, max_iter=self.max_iter, tolerance=self.tolerance, solver=self.solver,
            contrast=self.contrast, device=self.device,
        )  # fmt: skip
        self.n_iter_, self.gradient_, self.converged_ = fit.n_iter, fit.gradient, fit.converged
        self.n_wells_ = len(Z)
        self.warnings_.extend(fit.warnings)
        return fit.rotation

    def reorder(self, order: np.ndarray) -> None:
        """Put the components of the fitted view into another order: a permutation of their indices (k,)."""
        self.rotation_ = self.rotation_[:, order]
        self._derive()


def principal_axes(
    rows: Rows, n_components: int | None, name: str, wells: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean, axes and variances of rows, largest variance first.

    Parameters
    ----------
    rows
        (n, d).
    n_components
        k, or None for the numerical rank: axes with a variance over 1e-10 of the largest.
    name, wells
        For the message: the view and the kind of rows.

    Returns
    -------
    mean : ndarray
        float64 (d,).
    axes : ndarray
        float64 (d, k), orthonormal; the largest |entry| of each is positive.
    variance : ndarray
        float64 (k,), population variance along the axes.
    column_variance : ndarray
        float64 (d,), population variance of the columns.

    Raises
    ------
    FitError
        Naming the largest possible k and the config key.
    """
    n, d = rows.shape
    found = first_two_moments(rows, scatter=True)
    variance, axes = np.linalg.eigh(found.scatter / n)
    variance, axes = variance[::-1], axes[:, ::-1]
    # below this an axis is float32 rounding of its input, and its float64 eigenvalue has no digits to whiten with;
    # the second term is what centring leaves behind where all features are constant
    floor = max(_RELATIVE_VARIANCE * variance[0], (1e-12 * found.largest.max()) ** 2)
    rank = min(int((variance > floor).sum()), n - 1)
    k = rank if n_components is None else n_components
    if not 0 < k <= rank:
        asked = "" if n_components is None else f"n_components is {n_components}, but "
        remedy = "lower disentangle.n_components" if rank else "no feature varies among them"
        raise FitError(f"view {name}: {asked}{n} {wells} with {d} features allow at most {rank}; {remedy}")
    axes = axes[:, :k]
    axes = axes * np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(k)])
    # the variance of the projection has more digits than the eigenvalue where variances differ by orders of magnitude
    spread = np.zeros(k)
    for _, block in rows.then(projection(found.mean, axes), k).blocks():
        spread += np.einsum("ij,ij->j", block, block)
    return found.mean, axes, spread / n, found.squares / n


def _second_moment(rows: Rows) -> np.ndarray:
    """Return the (k, k) mean of the products of columns, about zero."""
    total = np.zeros((rows.shape[1], rows.shape[1]))
    for _, block in rows.blocks():
        total += block.T @ block
    return total / len(rows)
