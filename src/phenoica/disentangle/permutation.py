"""Permutation tests of what a component carries of batch, row and column, on reference controls.

Metadata and components of wells come in, shares of variance (omega2) and p values go out. The test works on ranks,
because then the null distribution follows from the layout of the wells alone and not from the component: one set of
permutations serves every component of every view, however heavy its tails, and is large enough for Benjamini-Hochberg
over hundreds of components. Methods: Kruskal and Wallis (1952) without strata, Mack and Skillings (1980) within
strata, both with the permutation distribution in place of chi-square, joined to the largest single group by min-p.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from phenoica.disentangle.variance import centre, variance_between
from phenoica.errors import ControlsError, SchemaError
from phenoica.schema import BATCH_KEY_DEFAULT, COLUMN, CONTROL_ROLE, PLATE_ID, REFERENCE, ROW

PERMUTATIONS = 9999
_BLOCK_VALUES = 2_000_000
_ROUNDING = 1e-9  # the same arrangement, summed in another order


class RankTest:
    """Do groups differ within strata, by ranks? The p value is that of permutations within strata.

    Values are ranked within their stratum (ties share the mean rank), ranks divided by the stratum's size plus one
    and centred. Two statistics see two kinds of effect: the share of the squared ranks that all groups together
    explain beyond the strata (many groups that differ a little), and the largest standardised sum of a single group
    (one group that differs from the rest, which an omnibus statistic of ranks dilutes). Their smaller p is tested
    against its own permutation distribution. Without ties every column has the same ranks in another order, so the
    null distribution is the same for all and is drawn once; with ties it is close. p = (1 + draws at least as
    extreme) / (1 + draws) (Phipson and Smyth 2010).

    Parameters
    ----------
    factors
        Groupings to test, each (n,) labels; all are tested on the same permutations.
    strata
        (n,) labels; values are exchangeable within a stratum if no grouping has an effect.
    permutations
        Number of draws.
    seed
        Seeds of the draws, as `numpy.random.default_rng` takes them.
    """

    def __init__(
        self, factors: Sequence[np.ndarray], strata: np.ndarray, *, permutations: int = PERMUTATIONS,
        seed: Sequence[int] = (0,),
    ):  # fmt: skip
        codes = pd.factorize(np.asarray(strata))[0]
        # wells sorted by stratum, strata of one size as one block (strata, size): ranked and permuted together
        sizes = np.bincount(codes)
        order = np.argsort(codes, kind="stable")
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self._blocks = [
            order[starts[sizes == size][:, None] + np.arange(size)] for size in np.unique(sizes) if size > 1
        ]
        self._n = len(codes)
        self._groups = [_Groups(pd.factorize(np.asarray(factor))[0], codes) for factor in factors]
        null = self._draw(permutations, seed)
        self._null = np.sort(null, axis=2)
        # of each draw: how many draws reach its more extreme statistic
        self._least = np.sort(_reach(self._null, null).min(axis=0), axis=1)

    def p_values(self, values: np.ndarray) -> np.ndarray:
        """Return the p value of every grouping and column.

        Parameters
        ----------
        values
            (n, k), aligned with the factors.

        Returns
        -------
        ndarray
            float64 (factors, k); 1 where groups cannot differ beyond strata, and for a constant column.
        """
        from scipy import stats

        values = np.asarray(values, dtype=np.float64)
        scores = np.zeros_like(values)
        for block in self._blocks:
            scores[block] = stats.rankdata(values[block], axis=1) / (block.shape[1] + 1) - 0.5
        reach = 1 + _reach(self._null, self._statistics(scores.T))
        best = reach.min(axis=0)
        # draws more extreme than this one, which counts itself; one more where only one statistic is the extreme one,
        # because a draw may be as extreme in the other
        more = np.stack(
            [np.searchsorted(least, row - 1, side="right") for least, row in zip(self._least, best, strict=True)]
        )
        return np.minimum((1 + more + (reach > best).any(axis=0)) / (1 + self._null.shape[2]), 1.0)

    def _statistics(self, scores: np.ndarray) -> np.ndarray:
        """Return both statistics of each row of scores (m, n), as (2, factors, m)."""
        whole = np.sqrt((scores**2).sum(axis=1))
        return np.stack([groups.statistics(scores, whole) for groups in self._groups], axis=1)

    def _draw(self, permutations: int, seed: Sequence[int]) -> np.ndarray:
        """Return the null distribution of the statistics, (2, factors, permutations)."""
        rng = np.random.default_rng(list(seed))
        null = np.empty((2, len(self._groups), permutations))
        step = max(1, _BLOCK_VALUES // self._n)
        for start in range(0, permutations, step):
            draws = np.zeros((min(step, permutations - start), self._n))
            for block in self._blocks:
                ranks = np.arange(1, block.shape[1] + 1) / (block.shape[1] + 1) - 0.5
                draws[:, block] = rng.permuted(np.broadcast_to(ranks, (len(draws), *block.shape)), axis=-1)
            null[:, :, start : start + len(draws)] = self._statistics(draws)
        return null


class _Groups:
    """Group indicators with the means of strata taken out, and what they explain of scores."""

    def __init__(self, groups: np.ndarray, strata: np.ndarray):
        n = len(groups)
        indicators = centre(np.eye(groups.max() + 1)[groups], strata, strata.max() + 1)
        length = np.sqrt((indicators**2).sum(axis=0))
        floor = n * np.finfo(np.float64).eps * np.sqrt(n)
        self._indicators = indicators[:, length > floor] / length[length > floor]
        # sums over groups in an orthonormal basis, so that their squares add up
        _, size, axes = np.linalg.svd(self._indicators, full_matrices=False)
        self._basis = axes[size > floor].T / size[size > floor]

    def statistics(self, scores: np.ndarray, whole: np.ndarray) -> np.ndarray:
        """Return explained share and largest |correlation| with one group, (2, m), of scores (m, n) of norm (m,)."""
        if not self._basis.size:
            return np.zeros((2, len(scores)))
        sums = np.divide(
            scores @ self._indicators, whole[:, None], out=np.zeros((len(scores), self._indicators.shape[1])),
            where=whole[:, None] > 0,
        )  # fmt: skip
        return np.stack([((sums @ self._basis) ** 2).sum(axis=1), np.abs(sums).max(axis=1)])


class ReferenceTests:
    """Batch, row and column effects of the reference controls among some wells, tested by permutation.

    *Batch*: wells are permuted across batches. Whatever differs between plates thereby counts as batch: it is
    technical, it will not be there in another batch, and calling it batch keeps it out of biology; how much of a
    component is plates within batches stands beside it (`plate`). Permuting whole plates instead would keep the two
    apart, but not where it matters: if one of 8 batches of 3 plates is far from the others, which is what a component
    of an ICA often is, no p value can fall below 1 / 253, the chance that its three plates come to lie together.
    *Row* and *column*: wells are permuted within plates, so neither batch nor plate effects count; where plates hold
    fewer than two reference controls on average, within batches.

    Parameters
    ----------
    obs
        Metadata of the wells.
    batch_key
        obs column that is the batch.
    permutations, seed
        See `RankTest`.

    Attributes
    ----------
    within_plates
        Whether row and column are tested within plates; otherwise within batches.
    n_batches, n_reference
        Batches and reference controls.
    permutations
        Number of draws.

    Raises
    ------
    ControlsError
        If there is no reference control.
    """

    def __init__(
        self, obs: pd.DataFrame, *, batch_key: str = BATCH_KEY_DEFAULT, permutations: int = PERMUTATIONS,
        seed: int = 0,
    ):  # fmt: skip
        self._rows = reference_rows(obs)
        seen = obs[self._rows]
        self._batch, batches = pd.factorize(seen[batch_key].astype(str))
        plate, plates = pd.factorize(seen[PLATE_ID].astype(str))
        self._places = [pd.factorize(seen[c])[0] for c in (ROW, COLUMN)]
        self.n_batches, self.n_reference, self.permutations = len(batches), len(seen), permutations
        self.within_plates = 2 * len(plates) <= len(seen)
        # a plate may hold several batches where the batch is no experiment
        self._plates = plate * len(batches) + self._batch
        whole = np.zeros(len(seen), dtype=int)
        self._batch_test = RankTest([self._batch], whole, permutations=permutations, seed=(seed, 0))
        self._position_test = RankTest(
            self._places, self._plates if self.within_plates else self._batch, permutations=permutations, seed=(seed, 1)
        )

    def batch(self, Z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return omega2 of the batch (one-way) and its permutation p, each float64 (k,); 0 and 1 with one batch."""
        values = self._values(Z)
        return variance_between(values, self._batch)[0], self._batch_test.p_values(values)[0]

    def plate(self, Z: np.ndarray) -> np.ndarray:
        """Return omega2 of plates beyond batches, float64 (k,): a share of the whole variance, not tested."""
        return variance_between(self._values(Z), self._plates, self._batch)[0]

    def position(self, Z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return omega2 of row and column beyond batches and its permutation p, each float64 (2, k).

        omega2 is a share of the whole variance of the reference controls, see `variance_between`. Plate means are not
        taken out of it, because with few controls a plate they would take part of the rows' variance along; an effect
        of plates that looks like one of rows is the business of the test.
        """
        values = self._values(Z)
        share = np.stack([variance_between(values, place, self._batch)[0] for place in self._places])
        return share, self._position_test.p_values(values)

    def record(self) -> dict[str, object]:
        """Return what was permuted and how often, for fit.json."""
        return {
            "permutations": self.permutations,
            "batch": "wells across batches",
            "position": f"wells within {'plates' if self.within_plates else 'batches'}",
            "n_reference": self.n_reference,
        }

    def _values(self, Z: np.ndarray) -> np.ndarray:
        return np.asarray(Z, dtype=np.float64)[self._rows]


def reference_rows(obs: pd.DataFrame) -> np.ndarray:
    """Return which wells are reference controls, bool (n,).

    Raises
    ------
    ControlsError
        If none is.
    """
    rows = (obs[CONTROL_ROLE].astype(str) == REFERENCE).to_numpy()
    if not rows.any():
        raise ControlsError(
            "no reference control among these wells; list the negative controls in "
            "plates.negative_controls or lower plates.fit_control_share"
        )
    return rows


def check_components(Z: np.ndarray, obs: pd.DataFrame) -> np.ndarray:
    """Return components as float64 (n, k), aligned with obs.

    Raises
    ------
    SchemaError
        If they are no matrix as long as obs, or not finite.
    """
    Z = np.asarray(Z, dtype=np.float64)
    if Z.ndim != 2 or len(Z) != len(obs):
        raise SchemaError(f"components have shape {Z.shape}, but there are {len(obs)} wells; give a row a well")
    bad = ~np.isfinite(Z).all(axis=1)
    if bad.any():
        raise SchemaError(
            f"components are not finite in {int(bad.sum())} wells, first well {obs.index[bad.argmax()]}; drop these "
            "wells or mend their embedding"
        )
    return Z


def _reach(null: np.ndarray, statistics: np.ndarray) -> np.ndarray:
    """Return how many draws are at least as large, int of the shape of statistics.

    Parameters
    ----------
    null
        Sorted draws (2, factors, draws).
    statistics
        (2, factors, m).
    """
    below = np.empty(statistics.shape, dtype=int)
    for place in np.ndindex(statistics.shape[:2]):
        below[place] = np.searchsorted(null[place], statistics[place] - _ROUNDING)
    return null.shape[2] - below
