"""The null of every score: reference controls relabelled at random within their plate have nothing to tell apart.

A check for the scores, not one of them: features of wells, their metadata and folds come in; the held-out AUROC of each
random relabelling goes out. Its mean is 0.5 within three standard errors (sd of the draws / sqrt(draws)) if probe and
AUROC are calibrated and labels stay with their wells. Random labels are independent of every feature, also of features
fitted on test wells, so this cannot detect a leak; what training decides is tested by replacing the held-out wells.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.errors import ControlsError
from phenoica.score.l1_path import Problem
from phenoica.score.metrics import auroc
from phenoica.score.probes import fit_l1_paths


def null_draws(
    features: np.ndarray, obs: pd.DataFrame, train: np.ndarray, *, fraction: float, n_draws: int = 50, seed: int = 0
) -> np.ndarray:
    """Score random labels of the reference controls.

    In each draw half of a plate's reference controls (rounded down or up at random where odd) become cases; the L1
    probe is fitted on those of training experiments and scored on the held-out ones.

    Parameters
    ----------
    features
        (n, d) float, one view of all wells.
    obs
        (n,) their metadata.
    train
        bool (n,): wells of training experiments; the others are held out.
    fraction
        lambda / lambda_max of the probe.
    n_draws
        Number of relabellings.
    seed
        Seed of the labels.

    Returns
    -------
    ndarray
        float64 (n_draws,), AUROC over the held-out reference controls; 0.5 where the probe kept no feature.

    Raises
    ------
    ControlsError
        If training or test has no plate with two reference controls.
    """
    reference = np.flatnonzero((obs[schema.CONTROL_ROLE].astype(str) == schema.REFERENCE).to_numpy())
    plates = obs[schema.PLATE_ID].astype(str).to_numpy()[reference]
    train = np.asarray(train)[reference]
    for name, side in (("training", plates[train]), ("held-out", plates[~train])):
        if not len(side) or np.unique(side, return_counts=True)[1].max() < 2:
            raise ControlsError(f"the null needs a {name} plate with two reference controls; there is none")
    values, rng, drawn = np.asarray(features, dtype=np.float64)[reference], np.random.default_rng(seed), []
    while len(drawn) < n_draws:
        labels = _half_of_each_plate(plates, rng)
        if min(labels[side].sum() for side in (train, ~train)) == 0 or labels[train].all() or labels[~train].all():
            continue  # plates of one control can leave a side with one class: draw again
        drawn.append(labels)
    wells = np.flatnonzero(train)
    paths = fit_l1_paths([Problem(values, wells, labels[wells]) for labels in drawn], [fraction])
    probes = [path.probes[0] for path in paths]
    return np.array([
        auroc(labels[~train], probe.decision(values[~train])) if probe.weights.any() else 0.5
        for labels, probe in zip(drawn, probes, strict=True)
    ])  # fmt: skip


def _half_of_each_plate(plates: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    labels = np.zeros(len(plates), dtype=bool)
    for plate in np.unique(plates):
        inside = rng.permutation(np.flatnonzero(plates == plate))
        labels[inside[: (len(inside) + int(rng.integers(2))) // 2]] = True
    return labels
