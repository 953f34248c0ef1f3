"""Folds over experiments by design, from metadata alone.

Experiments that share a query perturbation fall in different folds, so that what is trained in one can be tested in
the other. The assignment is a graph colouring in DSATUR order (Brelaz 1979) with the least conflict where the colours
do not suffice.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.errors import MetadataError


def assign_folds(obs: pd.DataFrame, config: Mapping[str, Any]) -> pd.DataFrame:
    """Assign each experiment outside `holdout_experiments` to a fold.

    Parameters
    ----------
    obs
        Wells with experiment, perturbation and control.
    config
        The resolved configuration (`plates.folds`, `plates.holdout_experiments`, `seed`).

    Returns
    -------
    DataFrame
        experiment (text) and fold (int64, 0..K-1), sorted by experiment. With a single experiment it is fold 0, and
        nothing can be held out.

    Raises
    ------
    MetadataError
        If a hold-out experiment is unknown, or no experiment is left.
    """
    plates = config["plates"]
    experiments = sorted(obs[schema.EXPERIMENT].astype(str).unique())
    unknown = sorted(set(plates["holdout_experiments"]) - set(experiments))
    if unknown:
        raise MetadataError(f"plates.holdout_experiments names {', '.join(unknown)}, which the metadata does not hold")
    experiments = [e for e in experiments if e not in plates["holdout_experiments"]]
    if not experiments:
        raise MetadataError("plates.holdout_experiments leaves no experiment to fit on; hold out fewer")
    if plates["folds"] == "leave_one_out":
        folds = np.arange(len(experiments))
    else:
        n_folds = min(int(plates["folds"]), len(experiments))
        folds = color(conflicts(obs, experiments, n_folds), n_folds, config["seed"])
    return pd.DataFrame({schema.EXPERIMENT: experiments, schema.FOLD: folds.astype(np.int64)})


def conflicts(obs: pd.DataFrame, experiments: list[str], n_folds: int) -> np.ndarray:
    """Return how many query perturbations each two experiments share, as a symmetric int (E, E) matrix.

    A query perturbation is no control and present in 2..n_folds of the experiments; a commoner one is testable under
    any assignment.
    """
    position = {e: i for i, e in enumerate(experiments)}
    weights = np.zeros((len(experiments), len(experiments)), np.int64)
    query = obs[(obs[schema.CONTROL] == schema.NONE) & obs[schema.EXPERIMENT].astype(str).isin(position)]
    for present in query.groupby(schema.PERTURBATION, observed=True)[schema.EXPERIMENT].unique():
        if 2 <= len(present) <= n_folds:
            for a, b in combinations(present, 2):
                weights[position[a], position[b]] += 1
                weights[position[b], position[a]] += 1
    return weights


def color(weights: np.ndarray, n_colors: int, seed: int) -> np.ndarray:
    """Color a weighted graph with `n_colors` colors, few conflicts and balanced classes.

    The next node is the one whose colored neighbours show most different colors (then largest degree, then a seeded
    order); it takes the color of least conflicting weight, then the one used least, then the first.

    Parameters
    ----------
    weights
        Symmetric (n, n) conflict weights, zero diagonal.

    Returns
    -------
    int64 array (n,)
        A color of each node.
    """
    n = len(weights)
    colors = np.full(n, -1, np.int64)
    tie_order = np.random.default_rng(seed).permutation(n)
    degree = (weights > 0).sum(axis=1)
    class_size = np.zeros(n_colors, np.int64)
    for _ in range(n):
        free = np.flatnonzero(colors < 0)
        saturation = [len(set(colors[(weights[i] > 0) & (colors >= 0)])) for i in free]
        node = max(zip(saturation, degree[free], -tie_order[free], free, strict=True))[3]
        cost = np.array([weights[node, colors == c].sum() for c in range(n_colors)])
        best = min(range(n_colors), key=lambda c: (cost[c], class_size[c], c))
        colors[node] = best
        class_size[best] += 1
    return colors


def untestable(obs: pd.DataFrame, folds: pd.DataFrame) -> list[str]:
    """Return the perturbations that no fold can test: all their experiments fall in one fold (or outside any).

    A gene that is a query here and a control there counts once as each; a control says so behind its name.
    """
    fold_of = dict(zip(folds[schema.EXPERIMENT], folds[schema.FOLD], strict=True))
    known = obs[(obs[schema.CONTROL] != schema.NEGATIVE) & obs[schema.EXPERIMENT].astype(str).isin(fold_of)]
    fold = known[schema.EXPERIMENT].astype(str).map(fold_of)
    spread = fold.groupby([known[c].astype(str) for c in (schema.PERTURBATION, schema.CONTROL)]).nunique()
    alone = spread.index[spread < 2]
    return sorted(name if control == schema.NONE else f"{name} ({control} control)" for name, control in alone)
