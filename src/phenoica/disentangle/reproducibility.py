"""Would a component come back on other experiments? ICA fitted again, and its components matched to those of the fit.

Training wells and their fitted pca and ica come in. Four kinds of fits are compared with it on the training wells, by
the |r| of matched components: fits to bootstraps of the training experiments, each with a starting seed of its own;
fits of the same wells from other seeds; and, as the null, bootstraps of Gaussian data of the same covariance and size,
against the fit of those data. Two fits to disjoint thirds of the experiments are compared on the third that neither
saw.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.disentangle.blocks import Rows, first_two_moments
from phenoica.disentangle.ica import IcaWarning
from phenoica.disentangle.linear_views import Ica, Pca
from phenoica.disentangle.match import match, weight_correlations
from phenoica.disentangle.rotations import haar_rotation
from phenoica.errors import FitError
from phenoica.progress import track

BOOTSTRAP, SEED, GAUSSIAN = "bootstrap", "seed", "gaussian"
DISJOINT, DISJOINT_ROTATED = "disjoint", "disjoint_rotated"
ROTATED_DRAWS = 20
_ROUNDED = 2  # decimals of the mean |r| by which components are ordered; equal ones keep their order by kurtosis


@dataclass(frozen=True)
class Reproducibility:
    """What is known of how well the components of one fit come back.

    Attributes
    ----------
    table
        A row a matched component: kind (bootstrap, seed, gaussian, disjoint or disjoint_rotated), draw, component
        (index in the fit; in the fit of the first third for the kinds disjoint), r (absolute), converged.
    mean, sd
        float64 (k,), of |r| over bootstraps.
    seed_mean
        float64 (k,), of |r| over fits from other seeds.
    alpha, null
        Share of the single |r| in the Gaussian data that exceeds `null`. A mean over draws varies less than a single
        |r|, so the comparison is on the safe side, and has to be: where some components come back, the others share a
        narrower space than those of the Gaussian data and match better by chance.
    identifiable
        bool (k,), whether `mean` is above `null`.
    disjoint, disjoint_null
        Mean |r| (MCC) between fits to disjoint thirds, and the largest of its values when one side is turned by each
        of 20 random rotations; None where there are too few experiments.
    said
        What was said aloud.
    """

    table: pd.DataFrame
    mean: np.ndarray
    sd: np.ndarray
    seed_mean: np.ndarray
    alpha: float
    null: float
    identifiable: np.ndarray
    disjoint: float | None
    disjoint_null: float | None
    said: tuple[str, ...]

    @property
    def _draws(self) -> int:
        return int(self.table.loc[self.table["kind"] == BOOTSTRAP, "draw"].nunique())

    def order(self) -> np.ndarray:
        """Return the components (k,) from most to least reproducible; those alike to .01 keep their order."""
        return np.argsort(-np.round(self.mean, _ROUNDED), kind="stable")

    def reordered(self, order: np.ndarray) -> Reproducibility:
        """Return the same numbers for components put into another order, a permutation of their indices (k,)."""
        table = self.table.copy()
        of_fit = table["kind"].isin([BOOTSTRAP, SEED])
        table.loc[of_fit, "component"] = np.argsort(order)[table.loc[of_fit, "component"]]
        arrays = {name: getattr(self, name)[order] for name in ("mean", "sd", "seed_mean", "identifiable")}
        return replace(self, table=table, **arrays)

    def sentence(self) -> str:
        """Return in words how many components come back."""
        k, draws = len(self.mean), self._draws
        text = (
            f"{int(self.identifiable.sum())} of {k} ica components come back on bootstraps of the training experiments "
            f"(mean |r| of {draws} draws above {self.null:.2f}, which {self.alpha:.0%} of the matches in Gaussian data "
            "of the same covariance exceed)"
        )
        if self.disjoint is None:
            return text + "."
        return text + (
            f"; fits to disjoint thirds of the experiments agree by {self.disjoint:.2f} on the third one, random "
            f"rotations by up to {self.disjoint_null:.2f}."
        )

    def record(self) -> dict[str, Any]:
        """Return the summary as plain values."""
        return {
            "draws": self._draws,
            "null": self.null,
            "identifiable": int(self.identifiable.sum()),
            "disjoint_mcc": self.disjoint,
            "disjoint_mcc_rotated": self.disjoint_null,
            "sentence": self.sentence(),
        }


def measure(
    X: np.ndarray, obs: pd.DataFrame, pca: Pca, ica: Ica, *, draws: int, seed: int, alpha: float
) -> Reproducibility | None:
    """Measure how well the components of an ICA fit come back.

    Parameters
    ----------
    X
        (n, d), the training wells of the fit.
    obs
        Their metadata, aligned by position.
    pca, ica
        Views fitted to these wells, ica on top of pca.
    draws
        Fits of each kind, at least 2.
    seed
        Of bootstraps, starts and Gaussian data.
    alpha
        Share of matches in Gaussian data that exceeds `Reproducibility.null`.

    Returns
    -------
    Reproducibility or None
        None with fewer than two training experiments, which cannot be resampled.

    Raises
    ------
    FitError
        If no bootstrap has more wells than components.
    """
    experiments = obs[schema.EXPERIMENT].astype(str).to_numpy()
    names = np.unique(experiments)
    if len(names) < 2:
        return None
    refit = _Refit(pca.n_components_, ica.options(), seed)
    wells = Rows(X)
    covariance = _covariance(wells)
    rows: list[pd.DataFrame] = []
    told: list[str] = []

    def add(kind: str, draw: int, r: np.ndarray, converged: bool) -> None:
        rows.append(
            pd.DataFrame({"kind": kind, "draw": draw, "component": np.arange(len(r)), "r": np.abs(r),
                          "converged": converged})
        )  # fmt: skip

    chosen = list(_bootstraps(experiments, names, draws, seed, pca.n_components_))
    if not chosen:
        raise FitError(
            f"reproducibility: no bootstrap of {len(names)} experiments has more wells than the {pca.n_components_} "
            "components; lower disentangle.n_components or set disentangle.reproducibility_draws to 0"
        )
    if len(chosen) < draws:
        told.append(f"reproducibility: {draws - len(chosen)} of {draws} bootstraps had too few wells and were left out")
    for draw, index in track(chosen, len(chosen), "reproducibility, bootstraps", "fit"):
        W, converged = refit.weights(wells.where(index), draw)
        add(BOOTSTRAP, draw, match(weight_correlations(ica.components_, W, covariance)).r, converged)
    for draw, fit in refit.from_other_seeds(wells, pca, draws):
        add(SEED, draw, match(ica.rotation_.T @ fit.rotation_).r, fit.converged_)
    for draw, r, converged in _gaussian(refit, covariance, len(wells), chosen):
        add(GAUSSIAN, draw, r, converged)
    disjoint = _disjoint(refit, wells, experiments, names, seed)
    if isinstance(disjoint, str):
        told.append(disjoint)
    else:
        for kind, draw, r, converged in disjoint:
            add(kind, draw, r, converged)
    table = pd.concat(rows, ignore_index=True)
    failed = table.drop_duplicates(["kind", "draw"])
    if not failed["converged"].all():
        told.append(f"reproducibility: {int((~failed['converged']).sum())} of {len(failed)} fits did not converge")
    return _summary(table, alpha, tuple(told))


def _summary(table: pd.DataFrame, alpha: float, told: tuple[str, ...]) -> Reproducibility:
    of = {kind: group for kind, group in table.groupby("kind")}
    single = of[BOOTSTRAP].groupby("component")["r"]
    mean = single.mean().to_numpy()
    null = float(of[GAUSSIAN]["r"].quantile(1 - alpha))
    values = [of[kind].groupby("draw")["r"].mean() if kind in of else None for kind in (DISJOINT, DISJOINT_ROTATED)]
    return Reproducibility(
        table, mean, single.std(ddof=1).fillna(0.0).to_numpy(),
        of[SEED].groupby("component")["r"].mean().to_numpy(), alpha, null, mean > null,
        *(None if value is None else float(value.max()) for value in values), told,
    )  # fmt: skip


class _Refit:
    """Fits pca and ica again, with the options of the fit that is judged and other seeds.

    Parameters
    ----------
    k
        Number of components.
    options
        Of the ica view.
    seed
        Base of the seeds.
    """

    def __init__(self, k: int, options: dict[str, Any], seed: int):
        self.k, self.options, self.seed = k, {n: v for n, v in options.items() if n != "n_components"}, seed

    def ica(self, wells: Rows, pca: Pca, draw: int) -> Ica:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", IcaWarning)  # counted in the table instead
            return Ica(**{**self.options, "seed": self.seed + draw + 1}, pca=pca)._fit_rows(wells, None)

    def weights(self, wells: Rows, draw: int) -> tuple[np.ndarray, bool]:
        """Return the (d, k) weights of a fit to wells, and whether it converged."""
        fit = self.ica(wells, Pca(n_components=self.k)._fit_rows(wells, None), draw)
        return fit.components_, fit.converged_

    def from_other_seeds(self, wells: Rows, pca: Pca, draws: int) -> Iterator[tuple[int, Ica]]:
        """Yield fits of the same wells, on the same pca, from other starts."""
        for draw in track(range(draws), draws, "reproducibility, seeds", "fit"):
            yield draw, self.ica(wells, pca, draw)


def _bootstraps(
    experiments: np.ndarray, names: np.ndarray, draws: int, seed: int, k: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the rows of experiments drawn with replacement, where these are more than the components.

    A draw of every experiment once is no other data set and is drawn again.
    """
    places = {name: np.flatnonzero(experiments == name) for name in names}
    for draw in range(draws):
        rng = np.random.default_rng([seed, draw, len(names)])
        while len(set(drawn := rng.choice(names, len(names)))) == len(names):
            pass
        index = np.concatenate([places[name] for name in drawn])
        if len(np.unique(index)) > k:
            yield draw, index


def _gaussian(
    refit: _Refit, covariance: np.ndarray, n: int, chosen: list[tuple[int, np.ndarray]]
) -> Iterator[tuple[int, np.ndarray, bool]]:
    """Yield the matches of bootstraps of one set of Gaussian data with its own fit; the same rows are drawn."""
    values, vectors = np.linalg.eigh(covariance)
    root = (vectors * np.sqrt(np.clip(values, 0.0, None))).T.astype(np.float32)
    rng = np.random.default_rng([refit.seed, n])
    wells = Rows(rng.standard_normal((n, len(root)), dtype=np.float32) @ root)
    own = _covariance(wells)
    reference, _ = refit.weights(wells, -1)
    for draw, index in track(chosen, len(chosen), "reproducibility, Gaussian data", "fit"):
        W, converged = refit.weights(wells.where(index), draw)
        yield draw, match(weight_correlations(reference, W, own)).r, converged


def _disjoint(
    refit: _Refit, wells: Rows, experiments: np.ndarray, names: np.ndarray, seed: int
) -> list[tuple[str, int, np.ndarray, bool]] | str:
    """Compare fits to two thirds of the experiments on the third one; a text where there are too few."""
    parts = np.random.default_rng([seed, len(names), 3]).permutation(names)
    groups = [np.isin(experiments, parts[i::3]) for i in range(3)]
    if len(names) < 3 or min(group.sum() for group in groups) <= refit.k:
        return (
            f"reproducibility on disjoint experiments was not measured: thirds of {len(names)} training experiments do "
            f"not have more than {refit.k} wells each"
        )
    (V, first), (W, second) = (refit.weights(wells.where(group), draw) for draw, group in enumerate(groups[:2]))
    held_out = _covariance(wells.where(groups[2]))
    done = first and second
    result = [(DISJOINT, 0, match(weight_correlations(V, W, held_out)).r, done)]
    for draw in range(ROTATED_DRAWS):
        turned = W @ haar_rotation(refit.k, seed, draw)
        result.append((DISJOINT_ROTATED, draw, match(weight_correlations(V, turned, held_out)).r, done))
    return result


def _covariance(wells: Rows) -> np.ndarray:
    return first_two_moments(wells, scatter=True).scatter / len(wells)
