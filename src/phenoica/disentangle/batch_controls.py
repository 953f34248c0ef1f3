"""Centre, scale and whiten every batch on its own fit controls.

In go features and the wells' metadata, out come features in which the fit controls of every batch look
alike. It is the common step of the views centerscale, pca_cs and tvn (TVN: Ando, McLean,
Berndl 2017). A batch seen at fit keeps the statistics stored then; a new batch brings its own fit controls.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from phenoica.errors import ControlsError, FitError, SchemaError
from phenoica.schema import CONTROL_ROLE, FIT

MISSING_CONTROLS = ("error", "pooled")
TVN_RIDGE = 0.5  # the 0.5 I added to the covariance of the controls before its inverse root
_RELATIVE_ZERO = 1e-9  # a spread below this share of the largest value is rounding, not variance


def reciprocal_sd(X: np.ndarray, ddof: int = 0) -> np.ndarray:
    """Return 1 / sd of every column, and 0 for a column without variance.

    Multiplying with it gives unit variance, and sets to 0 what cannot be scaled.

    Parameters
    ----------
    X
        float64 (n, d).
    ddof
        0 = population, 1 = sample standard deviation.

    Returns
    -------
    ndarray
        float64 (d,).
    """
    sd = X.std(axis=0, ddof=ddof)
    constant = sd <= _RELATIVE_ZERO * np.abs(X).max(axis=0)
    return np.where(constant, 0.0, 1.0 / np.where(constant, 1.0, sd))


def fit_control_rows(obs: pd.DataFrame) -> np.ndarray:
    """Return a bool (n,) mask of the fit controls.

    Raises
    ------
    SchemaError
        If the metadata do not tell control roles.
    """
    return (column(obs, CONTROL_ROLE) == FIT).to_numpy()


def column(obs: pd.DataFrame | None, name: str) -> pd.Series:
    """Return one obs column as text, or say that it is missing."""
    if obs is None or name not in obs.columns:
        raise SchemaError(f"obs: column {name} is missing; this view reads the fit controls of each batch from obs")
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

    def fit(self, X: np.ndarray, obs: pd.DataFrame) -> BatchControls:
        """Compute the statistics of every batch in `obs`; X is float64 (n, p).

        Raises
        ------
        ControlsError
            Naming the batches with too few fit controls, unless `missing_controls` is "pooled".
        FitError
            If there are fewer than `min_fit_controls` fit controls in all batches together.
        """
        rows, batches = fit_control_rows(obs), column(obs, self.batch_key)
        if rows.sum() < self.min_fit_controls:
            raise FitError(
                f"{rows.sum()} fit controls in all training batches; {self.min_fit_controls} are needed: "
                "list the negative controls in plates.negative_controls or lower disentangle.min_fit_controls"
            )
        pooled = self._statistics(X[rows], fallback=None)
        groups = self._controls_of(batches, rows)
        self.batches_ = sorted(groups)
        found = [self._statistics(X[groups[batch]], fallback=pooled[1]) for batch in self.batches_]
        centre, scale, whitening = zip(*found, pooled, strict=True)
        self.centre_, self.scale_ = np.stack(centre), np.stack(scale)
        self.whitening_ = np.stack(whitening) if self.whiten else None
        return self

    def transform(self, X: np.ndarray, obs: pd.DataFrame) -> np.ndarray:
        """Apply each batch's statistics to its wells; X is float64 (n, p), so is the result.

        Raises
        ------
        ControlsError
            Naming the new batches with too few fit controls, unless `missing_controls` is "pooled".
        """
        batches = column(obs, self.batch_key)
        new = ~batches.isin(self.batches_).to_numpy()
        fresh = self._controls_of(batches[new], fit_control_rows(obs)[new]) if new.any() else {}
        X_new = X[new]
        out = np.empty_like(X)
        for batch, index in batches.groupby(batches, sort=True).indices.items():
            if batch in fresh:
                centre, scale, whitening = self._statistics(X_new[fresh[batch]], fallback=self.scale_[-1])
            else:
                place = self.batches_.index(batch) if batch in self.batches_ else -1
                centre, scale = self.centre_[place], self.scale_[place]
                whitening = self.whitening_[place] if self.whiten else None
            scaled = (X[index] - centre) * scale
            out[index] = scaled @ whitening if self.whiten else scaled
        return out

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

    def _statistics(
        self, controls: np.ndarray, fallback: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        centre, scale = controls.mean(axis=0), reciprocal_sd(controls, ddof=1)
        if fallback is not None:
            scale = np.where((scale == 0) | (fallback == 0), fallback, scale)
        if not self.whiten:
            return centre, scale, None
        scaled = (controls - centre) * scale
        covariance = scaled.T @ scaled / (len(controls) - 1)
        values, vectors = np.linalg.eigh(covariance + TVN_RIDGE * np.eye(controls.shape[1]))
        return centre, scale, (vectors / np.sqrt(values)) @ vectors.T
