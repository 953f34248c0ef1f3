"""Which wells are compared with which: cases and references of every contrast, and their split into training and test.

The table of wells comes in; contrasts, and for each fold the positions of their training and test wells, go out. Only
experiments (batches) that hold both sides enter a contrast, so that the batch cannot tell cases from references; only
reference controls are compared with, because the fit controls have shaped the views.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from phenoica import schema

QUERY = "query_vs_reference"
POSITIVE = "positive_vs_reference"
CUTTING = "cutting_vs_reference"
POSITIVE_CUTTING = "positive_vs_cutting"
CONTRASTS = (QUERY, POSITIVE, CUTTING, POSITIVE_CUTTING)

REASONS = {
    "no_reference": "no experiment holds both sides of the contrast, or too few reference controls",
    "one_experiment": "in one experiment only, so it cannot be tested on a held-out experiment",
    "same_fold": "all its experiments are in one fold, so none is left to train on",
    "few_train_wells": "fewer than score.min_wells wells of a side in the training experiments",
    "few_test_wells": "fewer than score.min_wells wells of a side in the test experiments",
    "missing_values": "a feature is missing in some of its wells",
    "no_weights": "the L1 probe kept no feature; its AUROC counts as 0.5",
    "one_fold": "one fold only, so there is no spread over folds",
    "zero_variance": "no spread, so no interval",
    "no_variance": "no plate holds two wells of a side, so no interval",
    "under_4_experiments": "fewer than four test experiments, so no interval over folds",
    "no_effect": "no component shows an effect, so nothing can be concentrated",
    "no_spread": "every component is in the top share, so nothing can be concentrated",
    "no_training_effect": "no component shows an effect in training, so none can be ranked highest",
    "one_batch": "training has reference controls of one batch, or one a batch, so the batch cannot be measured",
    "no_batch_effect": "no component carries the batch in training, so none can be ranked highest",
    "singleton": "fewer than two replicates on held-out plates with reference controls",
    "no_reference_on_plate": "no held-out plate holds the perturbation and reference controls",
    "no_fit_controls": "a held-out batch has no fit control, so its wells have no origin for a cosine",
    "no_same_experiment_pairs": "no replicates and references on two plates of one held-out experiment",
    "no_cross_experiment_pairs": "no replicates in two held-out experiments",
    "one_test_batch": "fewer than two batches with two plates of reference controls each, so none can be told apart",
    "few_references": "no more reference controls than batches are left to train on",
    "no_variance_in_references": "the reference controls do not differ at all",
    "few_components": "the view has fewer components",
    "no_contrast": "no contrast can be tested in this fold",
    "no_rotated_view": "neither pca, nor rotation, nor ica is among the views",
    "one_draw": "fewer than two random rotations, so no spread",
}


# reasons of single folds: in a row over folds that has a value, they speak of the folds that are not in it
OF_FOLDS = ("no_reference", "few_train_wells", "few_test_wells", "missing_values", "no_effect", "no_training_effect",
            "one_batch", "no_batch_effect", "singleton", "no_reference_on_plate", "no_fit_controls",
            "no_same_experiment_pairs", "no_cross_experiment_pairs", "one_test_batch", "few_references",
            "no_variance_in_references", "no_contrast")  # fmt: skip


@dataclass(frozen=True)
class Contrast:
    """One comparison.

    Attributes
    ----------
    name
        One of `CONTRASTS`.
    perturbation
        What the table of scores calls the cases: the gene or compound; for cutting controls the treatment (guide).
    case, reference
        Rules: pairs of an obs column and the value it must have, all of which must hold.
    """

    name: str
    perturbation: str
    case: tuple[tuple[str, str], ...]
    reference: tuple[tuple[str, str], ...]

    def masks(self, obs: pd.DataFrame, batches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which wells are cases and which are references, as two bool (n,) masks.

        Wells of batches that lack either side belong to neither.
        """
        case, reference = _match(obs, self.case), _match(obs, self.reference)
        both = np.intersect1d(batches[case], batches[reference])
        inside = np.isin(batches, both)
        return case & inside, reference & inside


def _match(obs: pd.DataFrame, rule: tuple[tuple[str, str], ...]) -> np.ndarray:
    mask = np.ones(len(obs), dtype=bool)
    for column, value in rule:
        mask &= np.asarray(obs[column], dtype=object) == value
    return mask


def build(obs: pd.DataFrame) -> list[Contrast]:
    """Return every contrast that the wells allow, sorted by contrast and perturbation.

    Parameters
    ----------
    obs
        Wells with the schema's columns.

    Returns
    -------
    list of Contrast
        Each perturbation against the reference controls (query perturbations and positive controls by perturbation,
        cutting controls by treatment), and each positive control against all cutting controls.
    """
    references = ((schema.CONTROL_ROLE, schema.REFERENCE),)
    cutting = ((schema.CONTROL, schema.CUTTING),)
    contrasts = [
        Contrast(name, value, ((schema.CONTROL, control), (column, value)), references)
        for name, control, column in (
            (QUERY, schema.NONE, schema.PERTURBATION),
            (POSITIVE, schema.POSITIVE, schema.PERTURBATION),
            (CUTTING, schema.CUTTING, schema.TREATMENT),
        )
        for value in _values(obs, control, column)
    ]
    if (obs[schema.CONTROL].astype(str) == schema.CUTTING).any():
        positive = (schema.CONTROL, schema.POSITIVE)
        contrasts += [
            Contrast(POSITIVE_CUTTING, value, (positive, (schema.PERTURBATION, value)), cutting)
            for value in _values(obs, schema.POSITIVE, schema.PERTURBATION)
        ]
    return contrasts


def _values(obs: pd.DataFrame, control: str, column: str) -> list[str]:
    return sorted(obs.loc[obs[schema.CONTROL].astype(str) == control, column].astype(str).unique())


@dataclass(frozen=True)
class Split:
    """The wells of one contrast in one fold.

    Attributes
    ----------
    train, test
        Positions of wells, int (n,).
    train_labels, test_labels
        bool, true is a case.
    reason
        A key of `REASONS` when the contrast cannot be tested in this fold, else None.
    """

    train: np.ndarray
    train_labels: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray
    reason: str | None


def split(
    contrast: Contrast, obs: pd.DataFrame, batches: np.ndarray, folds: np.ndarray, fold: int, min_wells: int
) -> Split | None:
    """Split a contrast's wells into training and test experiments.

    Parameters
    ----------
    contrast
        The comparison.
    obs
        (n,) wells.
    batches
        (n,) the batch of each well.
    folds
        (n,) int, the fold of each well's experiment.
    fold
        The fold that is held out.
    min_wells
        Cases, and references, that training and test must each have.

    Returns
    -------
    Split or None
        None when the contrast has no case in the held-out experiments, so that this fold does not ask about it.
    """
    held_out = folds == fold
    if not (_match(obs, contrast.case) & held_out).any():
        return None
    case, reference = contrast.masks(obs, batches)
    used = case | reference
    train, test = np.flatnonzero(used & ~held_out), np.flatnonzero(used & held_out)
    reason = None
    if not used.any():
        reason = "no_reference"
    elif obs.loc[used, schema.EXPERIMENT].nunique() == 1:
        reason = "one_experiment"
    elif not len(train):
        reason = "same_fold"
    elif min(case[train].sum(), reference[train].sum()) < min_wells:
        reason = "few_train_wells"
    elif min(case[test].sum(), reference[test].sum()) < min_wells:
        reason = "few_test_wells"
    return Split(train, case[train], test, case[test], reason)
