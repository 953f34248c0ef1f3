"""Comparators: batch corrections that read all wells at once, the test wells included.

ComBat and Harmony have no state that a new batch could be put into: the corrected wells are a function of all wells
together. They are therefore no held-out views. A fit on training wells keeps which batches these are (and Harmony's
principal axes), `transform` takes training and test wells together and corrects them all, and `test_data_used` is
"all", which keeps their scores out of every held-out comparison. Unlike the other views they copy the matrix several
times.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from phenoica.disentangle.base_view import View, projection, whole_number, width_option
from phenoica.disentangle.batch_controls import column
from phenoica.disentangle.batch_views import batch_key_option
from phenoica.disentangle.blocks import Rows, first_two_moments
from phenoica.disentangle.linear_views import Pca
from phenoica.errors import FitError
from phenoica.schema import BATCH_KEY_DEFAULT

ALL_WELLS = "all"


class Comparator(View):
    """Base of views whose `transform` corrects all given wells together, training wells included.

    Attributes
    ----------
    batches_
        Names of the training batches, sorted.
    n_wells_
        Number of training wells; `transform` must be given that many of these batches.
    """

    test_data_used = ALL_WELLS
    _meta = ("batches_", "n_wells_")
    batch_key: str

    def _fit(self, rows: Rows, obs: pd.DataFrame | None) -> None:
        batches = column(obs, self.batch_key)
        self._check_batches(batches)
        self.batches_, self.n_wells_ = sorted(set(batches)), len(rows)
        self.n_components_ = self._fit_width(rows, obs)

    def _mapped(self, rows: Rows, obs: pd.DataFrame | None) -> Rows:
        batches = column(obs, self.batch_key)
        training = batches.isin(self.batches_).to_numpy()
        if training.sum() != self.n_wells_:
            raise FitError(
                f"view {self.name} corrects all wells together: of its {self.n_wells_} training wells {training.sum()} "
                "are among these; pass the training wells with the new ones (it cannot be applied to a new batch alone)"
            )
        self._check_batches(batches)
        Z = np.asarray(self._correct(rows, batches.to_numpy()), dtype=np.float64)
        if not np.isfinite(Z).all():
            bad = np.argwhere(~np.isfinite(Z))[0]
            raise FitError(
                f"view {self.name}: the correction is not finite in well {obs.index[bad[0]]}, column {bad[1]}; leave "
                "it out of disentangle.views"
            )
        corrected = Rows(Z)
        Z *= first_two_moments(corrected.where(training)).reciprocal_sd()
        return corrected

    def _check_batches(self, batches: pd.Series) -> None:
        counts = batches.value_counts()
        if len(counts) < 2:
            raise FitError(f"view {self.name}: one {self.batch_key} in training, so there is no batch to correct")
        if counts.min() < 2:
            alone = counts.index[counts < 2][0]
            raise FitError(f"view {self.name}: {self.batch_key} {alone} has one well; at least 2 are needed")

    def _fit_width(self, rows: Rows, obs: pd.DataFrame | None) -> int:
        """Fit what is kept of the training wells and return the width of the result."""
        raise NotImplementedError

    def _correct(self, rows: Rows, batches: np.ndarray) -> np.ndarray:
        """Return the corrected wells, (n, n_components_)."""
        raise NotImplementedError


class Combat(Comparator):
    """ComBat (Johnson, Li, Rabinovic 2007) on all wells, as scanpy computes it, without covariates.

    A feature constant over all wells becomes 0. Then unit variance on training wells.

    Parameters
    ----------
    batch_key
        obs column that names the batch.
    """

    name = "combat"

    def __init__(self, *, batch_key: str = BATCH_KEY_DEFAULT):
        self.batch_key = batch_key_option(batch_key)

    def _fit_width(self, rows: Rows, obs: pd.DataFrame | None) -> int:
        self._varying(rows)
        return rows.shape[1]

    def _varying(self, rows: Rows) -> np.ndarray:
        varies = first_two_moments(rows).reciprocal_sd() > 0
        if varies.sum() < 2:
            raise FitError(
                f"view {self.name}: {varies.sum()} of {len(varies)} features vary; ComBat needs at least 2, because it "
                "borrows strength over features"
            )
        return varies

    def _correct(self, rows: Rows, batches: np.ndarray) -> np.ndarray:
        import warnings

        import anndata
        import scanpy

        varies = self._varying(rows)
        names = [str(i) for i in range(len(rows))]
        adata = anndata.AnnData(rows.array()[:, varies], obs=pd.DataFrame({"batch": pd.Categorical(batches)}, names))
        Z = np.zeros(rows.shape)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            # 0 / 0 in scanpy's loops; whether the result is finite is checked by the caller
            warnings.simplefilter("ignore")
            Z[:, varies] = scanpy.pp.combat(adata, key="batch", inplace=False)
        return Z


class Harmony(Comparator):
    """Harmony (Korsunsky 2019) on all wells, as harmonypy computes it, on the principal components of training wells.

    Components are not whitened, as Harmony expects; then unit variance on training wells. Needs harmonypy
    (`pip install 'phenoica[harmony]'`).

    Parameters
    ----------
    n_components
        As for pca.
    batch_key
        obs column that names the batch.
    seed
        Seed of its clustering (and of the parallel analysis where n_components is "auto").

    Attributes
    ----------
    mean_, components_
        float64 (d,) and (d, k): centre and orthonormal principal axes of the training wells.
    """

    name = "harmony"
    _arrays = ("mean_", "components_")

    def __init__(
        self, *, n_components: int | str | None = None, batch_key: str = BATCH_KEY_DEFAULT, seed: int = 0
    ):  # fmt: skip
        self.n_components, self.seed = width_option(n_components), whole_number("seed", seed, 0)
        self.batch_key = batch_key_option(batch_key)

    def _fit_width(self, rows: Rows, obs: pd.DataFrame | None) -> int:
        harmonypy()  # its absence is said before hours of other fits
        pca = Pca(n_components=self.n_components, seed=self.seed)._fit_rows(rows, obs)
        self.warnings_.extend(pca.warnings_)
        self.mean_, self.components_ = pca.mean_, pca.components_ * np.sqrt(pca.variance_)
        return pca.n_components_

    def _correct(self, rows: Rows, batches: np.ndarray) -> np.ndarray:
        scores = rows.then(projection(self.mean_, self.components_), self.n_components_).array()
        found = harmonypy().run_harmony(
            scores, pd.DataFrame({"batch": batches}), "batch", verbose=False, random_state=self.seed, ncores=1
        )
        corrected = np.asarray(found.Z_corr)
        # versions before 1 give components as rows
        return corrected if corrected.shape == scores.shape else corrected.T


def harmonypy() -> Any:
    """Import harmonypy, or say how to get it.

    Raises
    ------
    FitError
        If it is not installed.
    """
    try:
        import harmonypy as module
    except ImportError as error:
        raise FitError(
            "view harmony needs harmonypy, which is not installed; `pip install 'phenoica[harmony]'`, or take harmony "
            "out of disentangle.views"
        ) from error
    return module
