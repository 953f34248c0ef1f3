"""Views: ways to look at one embedding, fitted on training wells only, saved and loaded without pickle.

Each view is an estimator with `fit`, `transform`, `save` and attributes that end in an underscore once
fitted. All arithmetic is float64, and the last step of every view gives each column unit population variance
on the training wells, so that no probe has to rescale. pca, rotation and ica of one fit differ by an
orthogonal matrix and nothing else.
"""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from phenoica.disentangle.batch_controls import (
    MISSING_CONTROLS,
    BatchControls,
    fit_control_rows,
    reciprocal_sd,
)
from phenoica.disentangle.ica import fit_rotation
from phenoica.errors import ConfigError, FitError, SchemaError
from phenoica.files import atomic_path, write_json
from phenoica.schema import BATCH_KEY_DEFAULT, TEST_DATA_USED

STATE_FILE, META_FILE = "state.npz", "view.json"
STATE_FORMAT = 1
_BLOCK_ROWS = 32768
_WHITE_TOLERANCE = 1e-3
_RELATIVE_VARIANCE = 1e-10


class View:
    """Base of all views.

    Attributes
    ----------
    name
        Name of the view, as `view` takes it.
    test_data_used
        What `transform` reads of a batch it was not fitted on, beside the well itself: "none", "controls" or
        "all".
    n_features_in_, n_components_
        Width of the input and of the output.
    warnings_
        What was said aloud during the fit.
    """

    name: str
    test_data_used: str = "none"
    _arrays: ClassVar[tuple[str, ...]] = ()
    _meta: ClassVar[tuple[str, ...]] = ()

    def options(self) -> dict[str, Any]:
        """Return the constructor's options that are plain values."""
        names = inspect.signature(type(self).__init__).parameters
        return {n: getattr(self, n) for n in names if n not in ("self", "pca")}

    def fit(self, X: np.ndarray, obs: pd.DataFrame | None = None) -> View:
        """Fit the view to training wells.

        Parameters
        ----------
        X
            (n, d) features of the training wells and of no others.
        obs
            Their metadata, aligned by position; needed by views that read controls.

        Returns
        -------
        View
            Itself.

        Raises
        ------
        SchemaError
            If X is not a finite matrix as long as obs.
        FitError, ControlsError
            If the data do not allow the view.
        """
        X = _matrix(X, obs)
        if len(X) < 2:
            raise FitError(f"view {self.name}: {len(X)} training wells; at least 2 are needed")
        self.n_features_in_ = X.shape[1]
        self.warnings_: list[str] = []
        self._fit(np.asarray(X, dtype=np.float64), obs)
        return self

    def transform(self, X: np.ndarray, obs: pd.DataFrame | None = None, dtype: Any = np.float32) -> np.ndarray:
        """Put wells into the fitted view; nothing is refitted.

        Parameters
        ----------
        X
            (n, d) features, d as at the fit.
        obs
            Metadata aligned by position. A view whose `test_data_used` is "controls" reads from it the fit
            controls of batches it has not seen, so such a batch is passed whole.
        dtype
            float32 or float64 of the result; the arithmetic is float64 either way.

        Returns
        -------
        ndarray
            (n, n_components_).

        Raises
        ------
        FitError
            If the view is not fitted.
        SchemaError
            If X has another width than at the fit, or is not finite.
        ControlsError
            If a new batch lacks fit controls.
        """
        if not hasattr(self, "n_components_"):
            raise FitError(f"view {self.name} is not fitted; call fit first or load a state with load_view")
        X = _matrix(X, obs)
        if X.shape[1] != self.n_features_in_:
            raise SchemaError(
                f"view {self.name} was fitted on {self.n_features_in_} features, these wells have "
                f"{X.shape[1]}; use the encoder of the fit"
            )
        return self._transform(X, obs).astype(dtype, copy=False)

    def save(self, directory: str | os.PathLike) -> None:
        """Write `state.npz` (float64 arrays, no pickle) and `view.json`; same fit, same bytes."""
        if not hasattr(self, "n_components_"):
            raise FitError(f"view {self.name} is not fitted; there is nothing to save")
        directory = Path(directory)
        with atomic_path(directory / STATE_FILE) as path, open(path, "wb") as handle:
            np.savez(handle, **{name: getattr(self, name) for name in sorted(self._arrays)})
        write_json(directory / META_FILE, self._description())

    def _description(self) -> dict[str, Any]:
        return {
            "format": STATE_FORMAT,
            "name": self.name,
            "test_data_used": self.test_data_used,
            "n_features_in": self.n_features_in_,
            "n_components": self.n_components_,
            "options": self.options(),
            "fitted": {name: getattr(self, name) for name in self._meta},
            "warnings": self.warnings_,
        }

    def _load(self, directory: Path, description: dict[str, Any]) -> None:
        try:
            with np.load(directory / STATE_FILE, allow_pickle=False) as state:
                arrays = {name: state[name] for name in self._arrays}
        except (OSError, KeyError, ValueError) as error:
            raise SchemaError(f"{directory / STATE_FILE}: cannot be read ({error}); fit the view again") from error
        for name, value in arrays.items():
            if not np.isfinite(value).all():
                raise SchemaError(f"{directory / STATE_FILE}: {name} is not finite; fit the view again")
            setattr(self, name, value)
        for name in self._meta:
            setattr(self, name, description["fitted"][name])
        self.n_features_in_, self.n_components_ = description["n_features_in"], description["n_components"]
        self.warnings_ = list(description["warnings"])
        self._derive()

    def _derive(self) -> None:
        """Compute what follows from the saved arrays."""

    def _fit(self, X: np.ndarray, obs: pd.DataFrame | None) -> None:
        raise NotImplementedError

    def _transform(self, X: np.ndarray, obs: pd.DataFrame | None) -> np.ndarray:
        raise NotImplementedError


class _LinearView(View):
    """A view that is (X - mean_) @ components_."""

    mean_: np.ndarray
    components_: np.ndarray

    def _transform(self, X: np.ndarray, obs: pd.DataFrame | None) -> np.ndarray:
        out = np.empty((len(X), self.components_.shape[1]))
        for start in range(0, len(X), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            out[block] = (np.asarray(X[block], dtype=np.float64) - self.mean_) @ self.components_
        return out


class Raw(View):
    """The features themselves, standardised on training wells; a feature constant there becomes 0.

    Attributes
    ----------
    mean_, scale_
        float64 (d,): training mean and reciprocal population standard deviation.
    """

    name = "raw"
    _arrays = ("mean_", "scale_")

    def __init__(self) -> None:
        pass

    def _fit(self, X: np.ndarray, obs: pd.DataFrame | None) -> None:
        self.mean_, self.scale_ = X.mean(axis=0), reciprocal_sd(X)
        self.n_components_ = X.shape[1]

    def _transform(self, X: np.ndarray, obs: pd.DataFrame | None) -> np.ndarray:
        return (np.asarray(X, dtype=np.float64) - self.mean_) * self.scale_


class Pca(_LinearView):
    """Whitened principal components, from the eigenvectors of the float64 covariance.

    Features are centred and not standardised (`"raw + pca"` is the PCA of the correlation matrix). The sign
    makes the largest |loading| of each component positive.

    Parameters
    ----------
    n_components
        Number of components, or None for as many as the data allow.

    Attributes
    ----------
    mean_
        float64 (d,), mean of the training wells.
    components_
        float64 (d, k), loadings divided by the component's population standard deviation.
    variance_
        float64 (k,), population variance along each component, decreasing.
    """

    name = "pca"
    _arrays = ("mean_", "components_", "variance_")

    def __init__(self, *, n_components: int | None = None):
        self.n_components = _positive("n_components", n_components, or_none=True)

    def _fit(self, X: np.ndarray, obs: pd.DataFrame | None) -> None:
        self.mean_, directions, self.variance_ = principal_axes(X, self.n_components, self.name, "training wells")
        self.components_ = directions / np.sqrt(self.variance_)
        self.n_components_ = len(self.variance_)


class _RotatedPca(_LinearView):
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
    pca: Pca | None
    n_components: int | None

    def _fit(self, X: np.ndarray, obs: pd.DataFrame | None) -> None:
        pca = self.pca
        if pca is None:
            pca = Pca(n_components=self.n_components).fit(X, obs)
        elif not isinstance(pca, Pca) or not hasattr(pca, "n_components_"):
            raise FitError(f"view {self.name}: option pca must be a fitted pca view")
        elif self.n_components not in (None, pca.n_components_):
            raise FitError(
                f"view {self.name}: n_components is {self.n_components} but the pca view has "
                f"{pca.n_components_}; leave n_components out"
            )
        Z = pca.transform(X, obs, dtype=np.float64)
        if np.abs(Z.T @ Z / len(Z) - np.eye(pca.n_components_)).max() > _WHITE_TOLERANCE:
            raise FitError(f"view {self.name}: the pca view was fitted on other wells; fit it on these")
        self.mean_, self.pca_components_ = pca.mean_, pca.components_
        self.rotation_ = self._rotation(Z)
        self._derive()
        self.n_components_ = pca.n_components_

    def _derive(self) -> None:
        self.components_ = self.pca_components_ @ self.rotation_

    def _rotation(self, Z: np.ndarray) -> np.ndarray:
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

    def __init__(self, *, n_components: int | None = None, seed: int = 0, draw: int = 0, pca: Pca | None = None):
        self.n_components = _positive("n_components", n_components, or_none=True)
        self.seed, self.draw, self.pca = _positive("seed", seed, 0), _positive("draw", draw, 0), pca

    def _rotation(self, Z: np.ndarray) -> np.ndarray:
        return haar_rotation(Z.shape[1], self.seed, self.draw)


class Ica(_RotatedPca):
    """PCA turned to independent components by Picard-O.

    Parameters
    ----------
    n_components
        As for pca; left out when `pca` is given.
    seed
        Seed of the starting rotation.
    max_iter, tolerance
        Stopping rule, see `phenoica.disentangle.ica.fit_rotation`.
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
        self, *, n_components: int | None = None, seed: int = 0, max_iter: int = 1000,
        tolerance: float = 1e-4,
        pca: Pca | None = None,
    ):  # fmt: skip
        self.n_components = _positive("n_components", n_components, or_none=True)
        self.seed, self.max_iter = _positive("seed", seed, 0), _positive("max_iter", max_iter)
        if not (isinstance(tolerance, float) and 0 < tolerance < np.inf):
            raise ConfigError(f"tolerance is {tolerance!r}; it must be a positive number")
        self.tolerance, self.pca = tolerance, pca

    def _rotation(self, Z: np.ndarray) -> np.ndarray:
        fit = fit_rotation(Z, seed=self.seed, max_iter=self.max_iter, tolerance=self.tolerance)
        self.n_iter_, self.gradient_, self.converged_ = fit.n_iter, fit.gradient, fit.converged
        self.n_wells_ = len(Z)
        self.warnings_.extend(fit.warnings)
        return fit.rotation


class BatchView(View):
    """A view that centres and scales every batch on its own fit controls (see `BatchControls`).

    Parameters
    ----------
    n_components
        Components of the PCA on training fit controls, or None for as many as the data allow (not
        centerscale).
    batch_key
        obs column that names the batch.
    min_fit_controls
        Fit controls a batch must have.
    missing_controls
        "error", or "pooled": a batch with fewer takes the statistics of all training fit controls.

    Attributes
    ----------
    batches_
        Batches seen at fit; they keep their statistics. Any other batch must come with its own fit controls.
    centre_, scale_
        float64 (b + 1, p), per batch and pooled (last row).
    unit_
        float64 (p,), reciprocal population standard deviation of the training wells after all other steps.
    """

    test_data_used = "controls"
    _arrays = ("centre_", "scale_", "unit_")
    _meta = ("batches_",)
    _whiten: ClassVar[bool] = False
    batch_key: str
    min_fit_controls: int
    missing_controls: str

    def _set_batch_options(self, batch_key: str, min_fit_controls: int, missing_controls: str) -> None:
        if not isinstance(batch_key, str) or not batch_key:
            raise ConfigError(f"batch_key is {batch_key!r}; it must name an obs column")
        if missing_controls not in MISSING_CONTROLS:
            raise ConfigError(f"missing_controls is {missing_controls!r}; allowed are {', '.join(MISSING_CONTROLS)}")
        self.batch_key, self.missing_controls = batch_key, missing_controls
        self.min_fit_controls = _positive("min_fit_controls", min_fit_controls, 2)

    def _fit(self, X: np.ndarray, obs: pd.DataFrame | None) -> None:
        projected = self._fit_projection(X, obs)
        steps = BatchControls(self.batch_key, self.min_fit_controls, self.missing_controls, self._whiten)
        steps.fit(projected, obs)
        self.batches_, self.centre_, self.scale_ = steps.batches_, steps.centre_, steps.scale_
        if self._whiten:
            self.whitening_ = steps.whitening_
        self._steps = steps
        self.unit_ = reciprocal_sd(steps.transform(projected, obs))
        self.n_components_ = len(self.unit_)

    def _derive(self) -> None:
        self._steps = BatchControls(self.batch_key, self.min_fit_controls, self.missing_controls, self._whiten)
        self._steps.batches_, self._steps.centre_, self._steps.scale_ = (
            self.batches_,
            self.centre_,
            self.scale_,
        )
        self._steps.whitening_ = self.whitening_ if self._whiten else None

    def _transform(self, X: np.ndarray, obs: pd.DataFrame | None) -> np.ndarray:
        return self._steps.transform(self._project(np.asarray(X, dtype=np.float64)), obs) * self.unit_

    def _fit_projection(self, X: np.ndarray, obs: pd.DataFrame | None) -> np.ndarray:
        return X

    def _project(self, X: np.ndarray) -> np.ndarray:
        return X


class CenterScale(BatchView):
    """Features centred and scaled per batch on its fit controls, then unit variance on training wells.

    Options and attributes are those of `BatchView`.
    """

    name = "centerscale"

    def __init__(
        self,
        *,
        batch_key: str = BATCH_KEY_DEFAULT,
        min_fit_controls: int = 8,
        missing_controls: str = "error",
    ):
        self._set_batch_options(batch_key, min_fit_controls, missing_controls)


class _ControlPcaView(BatchView):
    """A batch view on the principal components of the training fit controls."""

    _arrays = (*BatchView._arrays, "mean_", "components_")
    _standardise: ClassVar[bool] = False

    def __init__(
        self, *, n_components: int | None = None, batch_key: str = BATCH_KEY_DEFAULT,
        min_fit_controls: int = 8,
        missing_controls: str = "error",
    ):  # fmt: skip
        self.n_components = _positive("n_components", n_components, or_none=True)
        self._set_batch_options(batch_key, min_fit_controls, missing_controls)

    def _fit_projection(self, X: np.ndarray, obs: pd.DataFrame | None) -> np.ndarray:
        controls = X[fit_control_rows(obs)]
        if len(controls) < 2:
            raise FitError(
                f"view {self.name}: {len(controls)} fit controls in all training batches; list the negative "
                "controls in plates.negative_controls"
            )
        scale = reciprocal_sd(controls, ddof=1) if self._standardise else np.ones(X.shape[1])
        _, directions, _ = principal_axes(
            (controls - controls.mean(axis=0)) * scale, self.n_components, self.name, "training fit controls"
        )
        self.mean_, self.components_ = controls.mean(axis=0), scale[:, None] * directions
        return self._project(X)

    def _project(self, X: np.ndarray) -> np.ndarray:
        return (X - self.mean_) @ self.components_


class PcaCs(_ControlPcaView):
    """PCA on training fit controls, then centre and scale per batch on its fit controls.

    Options and attributes are those of `BatchView`; mean_ (d,) and components_ (d, k) are the PCA.
    """

    name = "pca_cs"


class Tvn(_ControlPcaView):
    """Typical variation normalisation (Ando, McLean, Berndl 2017).

    Centre-scale and PCA on training fit controls, then per batch: centre-scale and (covariance + 0.5
    I)^(-1/2) on its fit controls. Options and attributes are those of `BatchView`; mean_ (d,) and
    components_ (d, k) are scaling and PCA, whitening_ (b + 1, k, k) the last step.
    """

    name = "tvn"
    _arrays = (*_ControlPcaView._arrays, "whitening_")
    _whiten = True
    _standardise = True


class Chain(View):
    """Views one after the other, such as `centerscale + ica`; each is fitted on what the one before gives.

    Parameters
    ----------
    parts
        Unfitted views, two or more.
    """

    def __init__(self, parts: list[View]):
        self.parts = parts
        self.name = " + ".join(part.name for part in parts)
        self.test_data_used = max((p.test_data_used for p in parts), key=TEST_DATA_USED.index)

    def options(self) -> dict[str, Any]:
        """Return no options: the parts have their own."""
        return {}

    def _fit(self, X: np.ndarray, obs: pd.DataFrame | None) -> None:
        for part in self.parts:
            X = part.fit(X, obs).transform(X, obs, dtype=np.float64)
            self.warnings_.extend(part.warnings_)
        self.n_components_ = self.parts[-1].n_components_

    def _transform(self, X: np.ndarray, obs: pd.DataFrame | None) -> np.ndarray:
        for part in self.parts:
            X = part.transform(X, obs, dtype=np.float64)
        return X

    def save(self, directory: str | os.PathLike) -> None:
        """Write `view.json` and one folder a part: `part_0`, `part_1`, ..."""
        if not hasattr(self, "n_components_"):
            raise FitError(f"view {self.name} is not fitted; there is nothing to save")
        for i, part in enumerate(self.parts):
            part.save(Path(directory) / f"part_{i}")
        write_json(Path(directory) / META_FILE, self._description())

    def _load(self, directory: Path, description: dict[str, Any]) -> None:
        self.parts = [load_view(directory / f"part_{i}") for i in range(len(self.parts))]
        self.n_features_in_, self.n_components_ = description["n_features_in"], description["n_components"]
        self.warnings_ = list(description["warnings"])


VIEWS: dict[str, type[View]] = {v.name: v for v in (Raw, CenterScale, Pca, Rotation, Ica, Tvn, PcaCs)}


def view(name: str, **options: Any) -> View:
    """Make an unfitted view.

    Parameters
    ----------
    name
        raw, centerscale, pca, rotation, ica, tvn, pca_cs, or several joined by `+`, such as "centerscale +
        ica".
    **options
        Options of the view's class. In a chain each option goes to every part that knows it.

    Returns
    -------
    View
        To be fitted.

    Raises
    ------
    ConfigError
        For an unknown view, an option that no part knows, or a wrong value.
    """
    names = [part.strip() for part in name.split("+")]
    unknown = [n for n in names if n not in VIEWS]
    if unknown:
        raise ConfigError(f"unknown view {unknown[0]!r}; known views: {', '.join(VIEWS)}, joined by +")
    known = {n: set(inspect.signature(VIEWS[n]).parameters) for n in names}
    every = sorted(set().union(*known.values()))
    wrong = sorted(set(options) - set(every))
    if wrong:
        raise ConfigError(f"view {name!r} has no option {wrong[0]!r}; known: {', '.join(every) or 'none'}")
    if len(names) > 1 and options.get("pca") is not None:
        raise ConfigError(f"view {name!r}: option pca cannot be given in a chain; write pca as a part or leave it out")
    parts = [VIEWS[n](**{k: v for k, v in options.items() if k in known[n]}) for n in names]
    return parts[0] if len(parts) == 1 else Chain(parts)


def load_view(directory: str | os.PathLike) -> View:
    """Load a fitted view from the folder that `save` wrote.

    Raises
    ------
    SchemaError
        If the folder holds no view, or one of another format.
    """
    directory = Path(directory)
    try:
        description = json.loads((directory / META_FILE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise SchemaError(f"{directory / META_FILE}: not a saved view ({error}); fit the view again") from error
    if description.get("format") != STATE_FORMAT:
        raise SchemaError(
            f"{directory / META_FILE}: format {description.get('format')!r}, this version reads "
            f"{STATE_FORMAT}; fit the view again"
        )
    try:
        loaded = view(description["name"], **description["options"])
        loaded._load(directory, description)
    except KeyError as error:
        raise SchemaError(f"{directory / META_FILE}: key {error} is missing; fit the view again") from error
    return loaded


def principal_axes(
    X: np.ndarray, n_components: int | None, name: str, wells: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean (d,), orthonormal axes (d, k) and population variances (k,) of X, largest variance first.

    Parameters
    ----------
    X
        float64 (n, d).
    n_components
        k, or None for the numerical rank: axes with a variance over 1e-10 of the largest.
    name, wells
        For the message: the view and the kind of rows.

    Raises
    ------
    FitError
        Naming the largest possible k and the config key.
    """
    n, d = X.shape
    mean = X.mean(axis=0)
    centred = X - mean
    variance, axes = np.linalg.eigh(centred.T @ centred / n)
    variance, axes = variance[::-1], axes[:, ::-1]
    # below this an axis is float32 rounding of its input, and its float64 eigenvalue has no digits to whiten with;
    # the second term is what centring leaves behind where all features are constant
    floor = max(_RELATIVE_VARIANCE * variance[0], (1e-12 * np.abs(X).max()) ** 2)
    rank = min(int((variance > floor).sum()), n - 1)
    k = rank if n_components is None else n_components
    if not 0 < k <= rank:
        raise FitError(
            f"view {name}: n_components is {n_components}, but {n} {wells} with {d} features allow at most "
            f"{rank}; lower disentangle.n_components"
        )
    axes = axes[:, :k]
    signs = np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(k)])
    # the variance of the projection has more digits than the eigenvalue where variances differ by orders of magnitude
    return mean, axes * signs, ((centred @ axes) ** 2).mean(axis=0)


def haar_rotation(k: int, seed: int, draw: int) -> np.ndarray:
    """Return a (k, k) float64 orthogonal matrix, uniform under the Haar measure.

    QR of a Gaussian matrix with the signs of R's diagonal moved into Q (Mezzadri 2007); the generator is
    seeded with (seed, draw).
    """
    q, r = np.linalg.qr(np.random.default_rng([seed, draw]).standard_normal((k, k)))
    return q * np.where(np.diag(r) < 0, -1.0, 1.0)


def _positive(option: str, value: Any, least: int = 1, or_none: bool = False) -> Any:
    if or_none and value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ConfigError(f"{option} is {value!r}; it must be a whole number of at least {least}")
    return int(value)


def _matrix(X: np.ndarray, obs: pd.DataFrame | None) -> np.ndarray:
    X = np.asarray(X)
    if X.ndim != 2 or X.dtype.kind not in "fiu":
        raise SchemaError(f"X has shape {X.shape} and dtype {X.dtype}; it must be a matrix of numbers, a row a well")
    if obs is not None and len(obs) != len(X):
        raise SchemaError(f"X has {len(X)} rows but obs has {len(obs)}; they must be aligned by position")
    bad = ~np.isfinite(X)
    if bad.any():
        row, feature = np.argwhere(bad)[0]
        well = obs.index[row] if obs is not None else f"row {row}"
        raise SchemaError(
            f"X is not finite in {int(bad.any(axis=1).sum())} wells, first well {well}, feature "
            f"{feature}; drop these wells or mend their embedding"
        )
    return X
