"""The features that could explain a score away: position, cell count, image measures, an untrained encoder.

Metadata, counts and measures of all wells come in, with a mask of the training wells; feature matrices for the probe
that also scores the views go out. Whatever is estimated (levels, means, scales) is estimated on training wells.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.disentangle.blocks import Rows
from phenoica.errors import FitError, ScoreError

POSITION_LINEAR = "position_linear"
POSITION_TREES = "position_trees"  # boosted trees on row, column and edge distance: what a linear model cannot see
CELL_COUNT = "cell_count"
TRUE_CELL_COUNT = "true_cell_count"  # also the column of the table of true factors
IMAGE_MEASURES = "image_measures"
RANDOM_ENCODER = "random_encoder"  # the encoder's architecture with random weights: what its training adds
PERMUTED = "permuted"
BASELINES = (POSITION_LINEAR, POSITION_TREES, CELL_COUNT, TRUE_CELL_COUNT, IMAGE_MEASURES, RANDOM_ENCODER, PERMUTED)


@dataclass(frozen=True, eq=False)
class Features:
    """What a probe sees: one row of the score table's `view` column.

    Attributes
    ----------
    view
        Name of the view or baseline.
    source
        float64 (n, d), a row a well; or the rows of a fitted view (`View.rows`), of which nothing is stored until
        `values` is read; or other features, whose values these are. Wells with a missing value hold NaN and are
        reported, never fitted.
    test_data_used
        One of `schema.TEST_DATA_USED`.
    draw
        Number of the random rotation, else None.
    """

    view: str
    source: np.ndarray | Rows | Features
    test_data_used: str = "none"
    draw: int | None = None

    @property
    def key(self) -> str:
        """The name with the draw, e.g. rotation_03."""
        return self.view if self.draw is None else f"{self.view}_{self.draw:02d}"

    @property
    def shape(self) -> tuple[int, int]:
        """Number of wells and of columns, (n, d)."""
        return self.source.shape

    @property
    def width(self) -> int:
        """Number of columns, d."""
        return self.shape[1]

    @functools.cached_property
    def values(self) -> np.ndarray:
        """All wells, float64 (n, d): held from the first reading until `release`."""
        if isinstance(self.source, Features):
            return self.source.values
        return self.source.array() if isinstance(self.source, Rows) else self.source

    def at(self, wells: np.ndarray) -> np.ndarray:
        """Return some wells (positions, or a bool mask), float64 (m, d), without holding the others."""
        if "values" in self.__dict__ or isinstance(self.source, np.ndarray):
            return self.values[wells]
        return self.source.at(wells) if isinstance(self.source, Features) else self.source.where(wells).array()

    def release(self) -> None:
        """Let go of `values` that can be made again."""
        self.__dict__.pop("values", None)


def in_groups(features: Sequence[Features], most: int) -> Iterator[list[Features]]:
    """Yield features in order, together as long as they hold at most `most` numbers; then they are released.

    Features whose values are another's (those of permuted labels) come right after it, for there they cost nothing.
    """
    followers = {id(f): [g for g in features if g.source is f] for f in features}
    behind = {id(g) for found in followers.values() for g in found}
    group: list[Features] = []
    held = 0
    for feature in (f for f in features if id(f) not in behind):
        size = feature.shape[0] * feature.width
        if group and held + size > most:
            yield from _released(group)
            group, held = [], 0
        group += [feature, *followers[id(feature)]]
        held += size
    yield from _released(group)


def _released(group: list[Features]) -> Iterator[list[Features]]:
    """Yield a group, and release it when it is done with."""
    yield group
    for feature in group:
        feature.release()


def position_linear(obs: pd.DataFrame, train: np.ndarray) -> np.ndarray:
    """Return 0/1 indicators of the plate rows and columns that hold training wells.

    Parameters
    ----------
    obs
        (n,) wells with row and column.
    train
        bool (n,).

    Returns
    -------
    ndarray
        float64 (n, rows + columns); a row or column that no training well has is all zero. Indicators are not rescaled:
        standardising would favour the rare ones.
    """
    blocks = []
    for name in (schema.ROW, schema.COLUMN):
        values = obs[name].to_numpy()
        blocks.append(values[:, None] == np.unique(values[train])[None, :])
    return np.hstack(blocks).astype(np.float64)


def position_trees(
    obs: pd.DataFrame, train: np.ndarray, train_labels: np.ndarray, test: np.ndarray, *, seed: int
) -> np.ndarray:
    """Return how much each test well looks like a case by its place alone, to boosted trees.

    scikit-learn's HistGradientBoostingClassifier on plate row, plate column and edge distance, classes balanced; 50
    trees of depth 3 with leaves of at least 5 wells, fixed beforehand.

    Parameters
    ----------
    obs
        (n,) wells with row, column and edge_distance.
    train, test
        Positions of the wells of a contrast.
    train_labels
        bool, true is a case; both classes present.
    seed
        Seed of the trees.

    Returns
    -------
    ndarray
        float64 (test,), log odds of a case.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier

    place = obs[[schema.ROW, schema.COLUMN, schema.EDGE_DISTANCE]].to_numpy(dtype=np.float64)
    model = HistGradientBoostingClassifier(
        max_iter=50, max_depth=3, min_samples_leaf=5, early_stopping=False, class_weight="balanced", random_state=seed
    )
    return model.fit(place[train], np.asarray(train_labels, dtype=bool)).decision_function(place[test])


def standardised(values: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Centre and scale columns to unit population variance on training wells.

    Parameters
    ----------
    values
        float (n, d); NaN marks a missing value and stays.
    train
        bool (n,).

    Returns
    -------
    ndarray
        float64 (n, d). A column that is constant on training wells becomes 0.

    Raises
    ------
    FitError
        If a column has no value in any training well.
    """
    values = np.asarray(values, dtype=np.float64)
    values = np.where(np.isfinite(values), values, np.nan)
    known = np.isfinite(values[train])
    if not known.any(axis=0).all():
        column = int(np.flatnonzero(~known.any(axis=0))[0])
        raise FitError(f"baseline column {column} has no value in any training well; leave the column out")
    mean = np.nanmean(values[train], axis=0)
    deviation = np.nanstd(values[train], axis=0)
    flat = deviation <= 1e-9 * np.abs(values[train], where=known, out=np.zeros(known.shape)).max(axis=0)
    return np.where(flat & np.isfinite(values), 0.0, (values - mean) / np.where(flat, 1.0, deviation))


def true_cell_count(obs: pd.DataFrame, truth: pd.DataFrame) -> np.ndarray:
    """Return the true cell count of each well of `obs` (n,), from a table of true factors.

    Parameters
    ----------
    obs
        Wells, indexed by well id.
    truth
        Columns well_id and true_cell_count.

    Raises
    ------
    ScoreError
        If a column is missing, a well stands twice, or a well of `obs` has no row.
    """
    missing = [c for c in (schema.WELL_ID, TRUE_CELL_COUNT) if c not in truth.columns]
    if missing:
        raise ScoreError(f"truth: columns {', '.join(missing)} are missing; name another table or set truth to null")
    if truth[schema.WELL_ID].duplicated().any():
        twice = truth[schema.WELL_ID][truth[schema.WELL_ID].duplicated()].iloc[0]
        raise ScoreError(f"truth: well {twice} stands more than once; keep one row a well")
    counts = truth.set_index(schema.WELL_ID)[TRUE_CELL_COUNT]
    absent = obs.index[~obs.index.isin(counts.index)]
    if len(absent):
        raise ScoreError(f"truth: {len(absent)} wells have no row, first {absent[0]}; add them or set truth to null")
    return counts.reindex(obs.index).to_numpy(dtype=np.float64)


def baseline_features(
    obs: pd.DataFrame, train: np.ndarray, measures: pd.DataFrame | None, truth: pd.DataFrame | None,
    random_encoder: np.ndarray | None = None,
) -> list[Features]:  # fmt: skip
    """Return the features of every baseline these wells allow.

    Parameters
    ----------
    obs
        (n,) wells indexed by well id, with row, column and, when known, cell_count.
    train
        bool (n,).
    measures
        (n, m) image measures aligned by position, or None.
    truth
        Table of true factors, or None.
    random_encoder
        (n, d) embedding of the wells by a network of the encoder's size with random weights, or None.

    Returns
    -------
    list of Features
        position_linear; cell_count, true_cell_count, image_measures and random_encoder where their source exists. A
        count or measure of which no training well has a value is as good as none.
    """
    found = [Features(POSITION_LINEAR, position_linear(obs, train))]
    if schema.CELL_COUNT in obs.columns and np.isfinite(obs[schema.CELL_COUNT].to_numpy(np.float64)[train]).any():
        counts = obs[schema.CELL_COUNT].to_numpy(np.float64)
        found.append(Features(CELL_COUNT, standardised(counts[:, None], train)))
    if truth is not None:
        found.append(Features(TRUE_CELL_COUNT, standardised(true_cell_count(obs, truth)[:, None], train)))
    if measures is not None and measures.shape[1]:
        values = measures.to_numpy(np.float64)
        known = np.isfinite(values[train]).any(axis=0)
        found.append(Features(IMAGE_MEASURES, standardised(values[:, known], train)))
    if random_encoder is not None:
        found.append(Features(RANDOM_ENCODER, standardised(random_encoder, train)))
    return found


def absent_baselines(found: Sequence[Features], obs: pd.DataFrame, measures: pd.DataFrame | None) -> dict[str, str]:
    """Return which of the baselines every table should have are not among `found`, each with the reason.

    Parameters
    ----------
    found
        As from `baseline_features`.
    obs, measures
        What they were made of.
    """
    there = {features.view for features in found}
    reasons = {
        CELL_COUNT: "no training well has a cell count" if schema.CELL_COUNT in obs.columns
        else "the profiles bring no cell count (profiles.columns.cell_count)",
        IMAGE_MEASURES: "the wells are profiles, so there are no images to measure" if measures is None
        else "nothing was measured in the training wells",
    }  # fmt: skip
    return {name: reason for name, reason in reasons.items() if name not in there}


def permute_within(labels: np.ndarray, plates: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return `labels` (n,) shuffled among the wells of each plate, so that every plate keeps its number of cases."""
    shuffled = np.array(labels)
    for plate in np.unique(plates):
        inside = np.flatnonzero(plates == plate)
        shuffled[inside] = shuffled[rng.permutation(inside)]
    return shuffled
