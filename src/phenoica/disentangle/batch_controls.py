"""Centre, scale and whiten every batch on its own fit controls.

In go features and the wells' metadata, out come features in which the fit controls of every batch look
alike. It is the common step of the views centerscale, pca_cs and tvn (TVN: Ando, McLean,
Berndl 2017). A batch seen at fit keeps the statistics stored then; a new batch brings its own fit controls.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from phenoica.disentangle.blocks import Rows, Step, Where, first_two_moments
from phenoica.errors import ControlsError, FitError, SchemaError
from phenoica.schema import CONTROL_ROLE, FIT

MISSING_CONTROLS = ("error", "pooled")
TVN_RIDGE = 0.5  # the 0.5 I added to the covariance of the controls before its inverse root


def fit_control_rows(obs: pd.DataFrame) -> np.ndarray:
    """Return a bool (n,) mask of the fit controls.

    Raises
    ------
    SchemaError
        If the metadata do not tell control roles.
    """
    return (column(obs, CONTROL_ROLE) == FIT).to_numpy()


def enough_fit_controls(obs: pd.DataFrame, least: int) -> np.ndarray:
    """Return the mask of the fit controls of all batches, of which there are at least so many.

    Raises
    ------
    FitError
        If there are fewer.
    """
    rows = fit_control_rows(obs)
    if rows.sum() < least:
        raise FitError(
            f"{rows.sum()} fit controls in all training batches; {least} are needed: list the negative controls in "
            "plates.negative_controls or lower disentangle.min_fit_controls"
        )
    return rows


def column(obs: pd.DataFrame | None, name: str) -> pd.Series:
    """Return one obs column as text, or say that it is missing."""
    if obs is None or name not in obs.columns:
        raise SchemaError(f"obs: column {name} is missing; this view reads batches and their fit controls from obs")
    if obs[name].isna().any():
        raise SchemaError(f"obs: column {name} is empty for well {obs.index[obs[name].isna()][0]}; fill it")
    return obs[name].astype(str)


class BatchControls:
    """Per-batch statistics of the fit controls, with a pooled set as the fallback.

    Centre and standard deviation (n - 1) of each feature among a batch's fit controls; with `whiten` also
    the matrix (covariance of the centre-scaled fit controls + 0.5 I)^(-1/2). A feature without variance
    among one batch's fit controls takes the scale of all training fit controls; without variance among
    those, it becomes 0.

    Parameters
    ----------
    batch_key
        obs column that names the batch.
    min_fit_controls
        Fit controls a batch must have.
    missing_controls
        "error", or "pooled": a batch with fewer takes the statistics of all training fit controls.
    whiten
        Whether to whiten after centring and scaling (TVN).

    Attributes
    ----------
    batches_
        Names of the batches seen at fit that had enough fit controls, sorted.
    centre_, scale_
        float64 (b + 1, p); the last row is pooled; scale is a reciprocal.
    whitening_
        float64 (b + 1, p, p), or None.
    """

    def __init__(self, batch_key: str, min_fit_controls: int, missing_controls: str, whiten: bool = False):
        self.batch_key, self.min_fit_controls = batch_key, min_fit_controls
        self.missing_controls, self.whiten = missing_controls, whiten

    def fit(self, rows: Rows, obs: pd.DataFrame) -> BatchControls:
        """Compute the statistics of every batch in `obs`, which is aligned with the (n, p) rows.

        Raises
        ------
        ControlsError
            Naming the batches with too few fit controls, unless `missing_controls` is "pooled".
        FitError
            If there are fewer than `min_fit_controls` fit controls in all batches together.
        """
        controls, batches = enough_fit_controls(obs, self.min_fit_controls), column(obs, self.batch_key)
        pooled = self._statistics(rows.where(controls), fallback=None)
        groups = self._controls_of(batches, controls)
        self.batches_ = sorted(groups)
        found = [self._statistics(rows.where(groups[batch]), fallback=pooled[1]) for batch in self.batches_]
        centre, scale, whitening = zip(*found, pooled, strict=True)
        self.centre_, self.scale_ = np.stack(centre), np.stack(scale)
        self.whitening_ = np.stack(whitening) if self.whiten else None
        return self

    def step(self, rows: Rows, obs: pd.DataFrame) -> Step:
        """Return the map of a block of these (n, p) rows by the statistics of each well's batch.

        Batches that the fit has not seen get theirs from their own fit controls among the rows.

        Raises
        ------
        ControlsError
            Naming the new batches with too few fit controls, unless `missing_controls` is "pooled".
        """
        batches = column(obs, self.batch_key)
        new = np.flatnonzero(~batches.isin(self.batches_).to_numpy())
        fresh = self._controls_of(batches.iloc[new], fit_control_rows(obs)[new]) if len(new) else {}
        found = [self._statistics(rows.where(new[fresh[batch]]), fallback=self.scale_[-1]) for batch in fresh]
        centre, scale = (
            np.concatenate([known, *(new_batch[part][None] for new_batch in found)])
            for part, known in enumerate((self.centre_, self.scale_))
        )
        whitening = np.concatenate([self.whitening_, *(f[2][None] for f in found)]) if self.whiten else None
        pooled = len(self.batches_)  # the last row of what the fit stored; new batches follow it
        places = {batch: i for i, batch in enumerate([*self.batches_, None, *fresh])}
        codes = np.array([places.get(batch, pooled) for batch in batches], dtype=np.intp)

        def step(block: np.ndarray, where: Where) -> np.ndarray:
            code = codes[where]
            scaled = (block - centre[code]) * scale[code]
            if whitening is None:
                return scaled
            out = np.empty_like(scaled)
            for one in np.unique(code):
                inside = code == one
                out[inside] = scaled[inside] @ whitening[one]
            return out

        return step

    def _controls_of(self, batches: pd.Series, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the positions of the fit controls of each batch that has enough; check the others."""
        groups, short = {}, []
        for batch, index in batches.groupby(batches, sort=True).indices.items():
            controls = index[rows[index]]
            if len(controls) >= self.min_fit_controls:
                groups[batch] = controls
            else:
                short.append(f"{batch} ({len(controls)})")
        if short and self.missing_controls == "error":
            raise ControlsError(
                f"too few fit controls in {self.batch_key} {', '.join(short[:10])}: {self.min_fit_controls} "
                "are needed; lower disentangle.min_fit_controls, or set disentangle.missing_controls to "
                "pooled to use the statistics of all training fit controls"
            )
        return groups

    def _statistics(self, controls: Rows, fallback: np.ndarray | None) -> tuple[np.ndarray, ...]:
        """Return centre, reciprocal scale and whitening (or None) of the fit controls of one batch."""
        found = first_two_moments(controls, scatter=self.whiten)
        scale = found.reciprocal_sd(ddof=1)
        if fallback is not None:
            scale = np.where((scale == 0) | (fallback == 0), fallback, scale)
        if not self.whiten:
            return found.mean, scale, None
        covariance = found.scatter * np.outer(scale, scale) / (found.n - 1)
        values, vectors = np.linalg.eigh(covariance + TVN_RIDGE * np.eye(len(scale)))
        return found.mean, scale, (vectors / np.sqrt(values)) @ vectors.T
