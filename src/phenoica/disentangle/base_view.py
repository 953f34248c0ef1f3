"""What all views share: checks of the input, `fit`, `transform`, and states saved and loaded without pickle.

A view is an estimator with `fit`, `transform`, `save` and attributes that end in an underscore once fitted. Wells come
in as float32 or float64 and are read in blocks (`blocks.Rows`); arithmetic is float64. The last step of every view but
mad gives each column unit population variance on the training wells, so that no probe has to rescale.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from phenoica.disentangle.blocks import Rows, Step
from phenoica.errors import ConfigError, FitError, SchemaError
from phenoica.files import atomic_path, write_json

STATE_FILE, META_FILE = "state.npz", "view.json"
STATE_FORMAT = 2
AUTO = "auto"


class View:
    """Base of all views.

    Attributes
    ----------
    name
        Name of the view, as `views.view` takes it.
    test_data_used
        What `transform` reads of a batch it was not fitted on, beside the well itself: "none", "controls" or
        "all".
    unit_variance
        Whether every column has unit population variance on the training wells (0 where it was constant).
    n_features_in_, n_components_
        Width of the input and of the output.
    warnings_
        What was said aloud during the fit.
    """

    name: str
    test_data_used: str = "none"
    unit_variance: ClassVar[bool] = True
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
            (n, d) features of the training wells and of no others; float32 and float64 are read as they are, in
            blocks, without a copy.
        obs
            Their metadata, aligned by position; needed by views that read controls or batches.

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
        X = finite_matrix(X, obs)
        if len(X) < 2:
            raise FitError(f"view {self.name}: {len(X)} training wells; at least 2 are needed")
        return self._fit_rows(Rows(X), obs)

    def _fit_rows(self, rows: Rows, obs: pd.DataFrame | None) -> View:
        """Fit to rows that are checked."""
        self.__dict__.pop("n_components_", None)  # a fit that fails leaves no fitted view
        self.n_features_in_ = rows.shape[1]
        self.warnings_: list[str] = []
        self._fit(rows, obs)
        return self

    def transform(self, X: np.ndarray, obs: pd.DataFrame | None = None, dtype: Any = np.float32) -> np.ndarray:
        """Put wells into the fitted view; nothing is refitted.

        Parameters
        ----------
        X
            (n, d) features, d as at the fit.
        obs
            Metadata aligned by position. A view whose `test_data_used` is "controls" reads from it the fit
            controls of batches it has not seen, so such a batch is passed whole; one that uses "all" needs the
            training wells too.
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
        return self.rows(X, obs).array(dtype)

    def rows(self, X: np.ndarray, obs: pd.DataFrame | None = None) -> Rows:
        """Return what `transform` does, but computed when it is read: all wells, some of them, or block by block.

        Parameters
        ----------
        X, obs
            As for `transform`, which raises the same errors.

        Returns
        -------
        Rows
            float64, (n, n_components_).
        """
        if not hasattr(self, "n_components_"):
            raise FitError(f"view {self.name} is not fitted; call fit first or load a state with load_view")
        X = finite_matrix(X, obs)
        if X.shape[1] != self.n_features_in_:
            raise SchemaError(
                f"view {self.name} was fitted on {self.n_features_in_} features, these wells have "
                f"{X.shape[1]}; use the encoder of the fit"
            )
        return self._mapped(Rows(X), obs)

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

    def _fit(self, rows: Rows, obs: pd.DataFrame | None) -> None:
        raise NotImplementedError

    def _step(self, rows: Rows, obs: pd.DataFrame | None) -> Step:
        """Return the map of a block; whatever it has to know of other rows is read from `rows` first."""
        raise NotImplementedError

    def _mapped(self, rows: Rows, obs: pd.DataFrame | None) -> Rows:
        return rows.then(self._step(rows, obs), self.n_components_)


class LinearView(View):
    """A view that is (X - mean_) @ components_."""

    mean_: np.ndarray
    components_: np.ndarray

    def _step(self, rows: Rows, obs: pd.DataFrame | None) -> Step:
        return projection(self.mean_, self.components_)


def projection(mean: np.ndarray, components: np.ndarray) -> Step:
    """Return the step (block - mean) @ components."""
    return lambda block, where: (block - mean) @ components


def scaling(centre: np.ndarray, scale: np.ndarray) -> Step:
    """Return the step (block - centre) * scale."""
    return lambda block, where: (block - centre) * scale


def whole_number(option: str, value: Any, least: int = 1, or_none: bool = False) -> Any:
    """Return an option that must be a whole number, or say what it is instead."""
    if or_none and value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ConfigError(f"{option} is {value!r}; it must be a whole number of at least {least}")
    return int(value)


def width_option(value: Any) -> Any:
    """Return n_components: a whole number, "auto", or None for as many as the data allow."""
    return AUTO if isinstance(value, str) and value == AUTO else whole_number("n_components", value, or_none=True)


def positive_number(option: str, value: Any) -> float:
    """Return an option that must be a positive float."""
    if not (isinstance(value, float) and 0 < value < np.inf):
        raise ConfigError(f"{option} is {value!r}; it must be a positive number")
    return value


def finite_matrix(X: np.ndarray, obs: pd.DataFrame | None) -> np.ndarray:
    """Return X as an array, checked: a finite matrix of numbers, as long as obs.

    Raises
    ------
    SchemaError
        Naming the first well and feature that are not finite.
    """
    X = np.asarray(X)
    if X.ndim != 2 or X.dtype.kind not in "fiu":
        raise SchemaError(f"X has shape {X.shape} and dtype {X.dtype}; it must be a matrix of numbers, a row a well")
    if obs is not None and len(obs) != len(X):
        raise SchemaError(f"X has {len(X)} rows but obs has {len(obs)}; they must be aligned by position")
    if not X.shape[1]:
        raise SchemaError("X has no feature")
    bad, first = 0, None
    for place, block in Rows(X).blocks():
        wrong = ~np.isfinite(block)
        if wrong.any():
            bad += int(wrong.any(axis=1).sum())
            first = first or (place.start + np.argwhere(wrong)[0][0], np.argwhere(wrong)[0][1])
    if first is not None:
        well = obs.index[first[0]] if obs is not None else f"row {first[0]}"
        raise SchemaError(
            f"X is not finite in {bad} wells, first well {well}, feature {first[1]}; drop these wells or mend their "
            "embedding"
        )
    return X
