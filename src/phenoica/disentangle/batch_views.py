"""Views that make the fit controls of every batch look alike: centerscale, pca_cs and tvn.

Training wells and their metadata come in; statistics of each batch go out. A batch that the fit has not seen brings
its own fit controls, which is all that these views read of it.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pandas as pd

from phenoica.disentangle.base_view import AUTO, View, projection, scaling, whole_number
from phenoica.disentangle.batch_controls import MISSING_CONTROLS, BatchControls, fit_control_rows
from phenoica.disentangle.blocks import Rows, Step, first_two_moments
from phenoica.disentangle.linear_views import principal_axes
from phenoica.errors import ConfigError, FitError
from phenoica.schema import BATCH_KEY_DEFAULT


class BatchView(View):
    """A view that centres and scales every batch on its own fit controls (see `BatchControls`).

    Parameters
    ----------
    n_components
        Components of the PCA on training fit controls, or None for as many as the data allow (not
        centerscale).
    batch_key, min_fit_controls, missing_controls
        As of `BatchControls`.

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
        if missing_controls not in MISSING_CONTROLS:
            raise ConfigError(f"missing_controls is {missing_controls!r}; allowed are {', '.join(MISSING_CONTROLS)}")
        self.batch_key, self.missing_controls = batch_key_option(batch_key), missing_controls
        self.min_fit_controls = whole_number("min_fit_controls", min_fit_controls, 2)

    def _fit(self, rows: Rows, obs: pd.DataFrame | None) -> None:
        projected = self._fit_projection(rows, obs)
        steps = BatchControls(self.batch_key, self.min_fit_controls, self.missing_controls, self._whiten)
        steps.fit(projected, obs)
        self.batches_, self.centre_, self.scale_ = steps.batches_, steps.centre_, steps.scale_
        if self._whiten:
            self.whitening_ = steps.whitening_
        self._steps = steps
        width = projected.shape[1]
        self.unit_ = first_two_moments(projected.then(steps.step(projected, obs), width)).reciprocal_sd()
        self.n_components_ = width

    def _derive(self) -> None:
        self._steps = BatchControls(self.batch_key, self.min_fit_controls, self.missing_controls, self._whiten)
        self._steps.batches_, self._steps.centre_, self._steps.scale_ = self.batches_, self.centre_, self.scale_
        self._steps.whitening_ = self.whitening_ if self._whiten else None

    def _mapped(self, rows: Rows, obs: pd.DataFrame | None) -> Rows:
        projected = self._project(rows)
        scaled = projected.then(self._steps.step(projected, obs), self.n_components_)
        return scaled.then(scaling(np.zeros(self.n_components_), self.unit_), self.n_components_)

    def _fit_projection(self, rows: Rows, obs: pd.DataFrame | None) -> Rows:
        return rows

    def _project(self, rows: Rows) -> Rows:
        return rows

    def _step(self, rows: Rows, obs: pd.DataFrame | None) -> Step:
        raise NotImplementedError("a batch view maps rows in several steps; see _mapped")


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
        if isinstance(n_components, str) and n_components == AUTO:
            raise ConfigError(
                f"view {self.name}: n_components auto is decided on all training wells, by the pca view; give its "
                "number of components"
            )
        self.n_components = whole_number("n_components", n_components, or_none=True)
        self._set_batch_options(batch_key, min_fit_controls, missing_controls)

    def _fit_projection(self, rows: Rows, obs: pd.DataFrame | None) -> Rows:
        chosen = fit_control_rows(obs)
        if chosen.sum() < 2:
            raise FitError(
                f"view {self.name}: {chosen.sum()} fit controls in all training batches; list the negative "
                "controls in plates.negative_controls"
            )
        controls = rows.where(chosen)
        found = first_two_moments(controls)
        scale = found.reciprocal_sd(ddof=1) if self._standardise else np.ones(rows.shape[1])
        _, directions, _, _ = principal_axes(
            controls.then(scaling(found.mean, scale), len(scale)), self.n_components, self.name, "training fit controls"
        )
        self.mean_, self.components_ = found.mean, scale[:, None] * directions
        return self._project(rows)

    def _project(self, rows: Rows) -> Rows:
        return rows.then(projection(self.mean_, self.components_), self.components_.shape[1])


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


def batch_key_option(value: str) -> str:
    """Return the name of an obs column, or say that it is none."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"batch_key is {value!r}; it must name an obs column")
    return value
