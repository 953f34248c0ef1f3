"""Which wells are compared with which: cases and references of every contrast, and their split into training and test.

The table of wells and the rules of the configuration (`presets.parse`) come in; contrasts, and for each fold the
positions of their training and test wells, go out. Only batches (experiments) that hold both sides enter a contrast, so
that the batch cannot tell cases from references; the presets compare with reference controls only, because the fit
controls have shaped the views.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.score.presets import REFERENCE_CONTROLS, Match, Rule, parse

QUERY = "query_vs_reference"
POSITIVE = "positive_vs_reference"
CUTTING = "cutting_vs_reference"
POSITIVE_CUTTING = "positive_vs_cutting"
CONTRASTS = (QUERY, POSITIVE, CUTTING, POSITIVE_CUTTING)

REASONS = {
    "no_reference": "no experiment holds both sides of the contrast, or too few reference controls",
    "one_experiment": "in one experiment only, so it cannot be tested on a held-out experiment",
    "same_fold": "all its experiments are in one fold, so none is left to train on",
    "few_train_wells": "too few wells of a side in the training experiments (score.min_wells)",
    "few_test_wells": "too few wells of a side in the test experiments (score.min_wells)",
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
    "few_experiments": "both sides in fewer experiments than the contrast's min_experiments",
    "few_values": "fewer values of diffby among its cases than the contrast's min_values",
    "no_reference_wells": "no well of the data is a reference of this contrast",
    "one_value": "its training or test experiments hold one half of the values of diffby only",
    "one_plate": "no test experiment has two plates with both sides, so none can be trained on inside it",
    "extreme_values": "a held-out well lies so far from all training wells that no probe can be trained on it",
    "within_experiments_only": "trained and tested on different plates of the same experiments: no claim beyond them",
    "other_wells": "the two AUROC are not of the same wells",
    "no_case_plate": "no plate holds both cases and references, so ranks cannot be compared within plates",
    "floor_above_threshold": "cannot be tested: even a perfect separation of so few wells has a p above the threshold",
    "folds_differ": "the folds of the two runs hold different experiments, so there is no interval over folds",
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
        The rule's name; one of `CONTRASTS` for the standard ones.
    perturbation
        What the table of scores calls the cases: the values of the rule's `each` columns, joined by " @ ".
    rule
        The rule it follows.
    cases, references
        Positions of wells, int, before any condition on batches.
    skipped
        A key of `REASONS` when the whole data set cannot answer the question that the rule asks, else None.
    """

    name: str
    perturbation: str
    rule: Rule
    cases: np.ndarray = field(repr=False, compare=False)
    references: np.ndarray = field(repr=False, compare=False)
    skipped: str | None = None

    def masks(self, obs: pd.DataFrame, batches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which wells are cases and which are references, as two bool (n,) masks.

        Wells of batches (and `sameby` groups) that lack either side belong to neither.

        Parameters
        ----------
        obs
            The wells that `build` got.
        batches
            (n,) the batch of each well by `plates.batch_key`; a `batch_key` of the contrast comes first.
        """
        used = np.concatenate([self.cases, self.references])
        groups = _groups(obs, batches, self.rule, used)
        n_case = len(self.cases)
        both = np.intersect1d(groups[:n_case], groups[n_case:])
        used, is_case = used[np.isin(groups, both)], np.isin(groups, both)[:n_case].sum()
        case, reference = np.zeros(len(obs), dtype=bool), np.zeros(len(obs), dtype=bool)
        case[used[:is_case]] = True
        reference[used[is_case:]] = True
        return case, reference


def _groups(obs: pd.DataFrame, batches: np.ndarray, rule: Rule, wells: np.ndarray) -> np.ndarray:
    """Return the batch and `sameby` group of some wells, as int codes."""
    columns = [batches[wells] if rule.batch_key is None else _text(obs, rule.batch_key)[wells]]
    if rule.within_experiments_only:
        columns.append(_text(obs, schema.EXPERIMENT)[wells])  # plates of two experiments may be called alike
    columns += [_text(obs, column)[wells] for column in rule.sameby]
    codes = np.zeros(len(wells), dtype=np.int64)
    for column in columns:
        found, names = pd.factorize(column)
        codes = codes * (len(names) + 1) + found
    return codes


def _text(obs: pd.DataFrame, column: str) -> np.ndarray:
    values = obs[column]
    return values.to_numpy(object) if values.dtype == object else values.astype(str).to_numpy(object)


def _match(obs: pd.DataFrame, match: Match) -> np.ndarray:
    mask = np.ones(len(obs), dtype=bool)
    for column, values in match:
        mask &= obs[column].isin(values).to_numpy()
    return mask


def build(obs: pd.DataFrame, rules: Sequence[Rule] | None = None) -> list[Contrast]:
    """Return every contrast that the wells allow, sorted by rule and then by the values of `each`.

    Parameters
    ----------
    obs
        (n,) wells with the schema's columns.
    rules
        As from `presets.parse`; None takes the standard ones.

    Returns
    -------
    list of Contrast
        A well without a value in an `each` column is no case; a case is never a reference. Contrasts that ask for more
        experiments or values than there are carry `skipped`.
    """
    found: list[Contrast] = []
    for rule in parse(["standard"]) if rules is None else rules:
        case, reference = _match(obs, rule.case), _match(obs, rule.reference)
        references = np.flatnonzero(reference)
        for perturbation, cases in _each(obs, rule, np.flatnonzero(case)):
            others = references[~np.isin(references, cases)] if (case & reference).any() else references
            contrast = Contrast(rule.name, perturbation, rule, cases, others)
            skipped = _skipped(contrast, obs)
            found.append(Contrast(rule.name, perturbation, rule, cases, others, skipped) if skipped else contrast)
    return found


def _each(obs: pd.DataFrame, rule: Rule, cases: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the case wells of every comparison of a rule."""
    if not rule.each:
        if len(cases):
            yield "all", cases
        return
    labels = obs.iloc[cases][list(rule.each)]
    known = labels.notna().all(axis=1).to_numpy() & (labels.astype(str) != "").all(axis=1).to_numpy()
    cases, labels = cases[known], labels[known]
    groups = labels.reset_index(drop=True).groupby(list(rule.each), observed=True, sort=True).indices
    for key in sorted(groups):
        values = key if isinstance(key, tuple) else (key,)
        yield " @ ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values), cases[groups[key]]


def _skipped(contrast: Contrast, obs: pd.DataFrame) -> str | None:
    rule = contrast.rule
    if not len(contrast.references) and rule.reference != REFERENCE_CONTROLS:
        return "no_reference_wells"  # no cutting controls, say; without reference controls every row says so
    if rule.min_values > 1 and len(set(_values(obs, rule, contrast.cases))) < rule.min_values:
        return "few_values"
    if rule.min_experiments > 1:
        experiments = _text(obs, schema.EXPERIMENT)
        both = np.intersect1d(experiments[contrast.cases], experiments[contrast.references])
        if len(both) < rule.min_experiments:
            return "few_experiments"
    return None


def _values(obs: pd.DataFrame, rule: Rule, wells: np.ndarray) -> list[tuple[str, ...]]:
    """Return what the `diffby` columns hold in some wells."""
    return list(zip(*(_text(obs, column)[wells] for column in rule.diffby), strict=True))


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
    contrast: Contrast, obs: pd.DataFrame, batches: np.ndarray, folds: np.ndarray, fold: int, min_wells: int,
    seed: int = 0,
) -> Split | None:  # fmt: skip
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
        Cases, and references, that training and test must each have, unless the contrast says it itself.
    seed
        Of the drawn wells where the contrast caps them, and of the halves of `diffby` values.

    Returns
    -------
    Split or None
        None when the contrast has no case in the held-out experiments, so that this fold does not ask about it. A
        contrast whose batch is finer than the experiment has no training wells and the reason within_experiments_only.
    """
    held_out = folds == fold
    if not held_out[contrast.cases].any():
        return None
    case, reference = contrast.masks(obs, batches)
    used, min_wells = case | reference, contrast.rule.min_wells or min_wells
    rng = np.random.default_rng([seed, fold, *f"{contrast.name}/{contrast.perturbation}".encode()])
    reason = None if used.any() else "no_reference"
    if contrast.rule.within_experiments_only:
        train, test, reason = np.array([], dtype=np.int64), np.flatnonzero(used & held_out), "within_experiments_only"
    else:
        train, test = np.flatnonzero(used & ~held_out), np.flatnonzero(used & held_out)
        if used.any() and len(set(_text(obs, schema.EXPERIMENT)[np.flatnonzero(used)])) == 1:
            reason = "one_experiment"
        elif used.any() and not len(train):
            reason = "same_fold"
        if contrast.rule.diffby:
            tested = _tested_values(contrast, obs, case, fold, seed)
            train, test = train[~tested[train] | reference[train]], test[tested[test] | reference[test]]
            if reason is None and not (case[train].any() and case[test].any()):
                reason = "one_value"
    train, test = (_capped(wells, case, contrast.rule.max_wells, rng) for wells in (train, test))
    if reason is None and min(case[train].sum(), reference[train].sum()) < min_wells:
        reason = "few_train_wells"
    elif reason is None and min(case[test].sum(), reference[test].sum()) < min_wells:
        reason = "few_test_wells"
    return Split(train, case[train], test, case[test], reason)


def _tested_values(contrast: Contrast, obs: pd.DataFrame, case: np.ndarray, fold: int, seed: int) -> np.ndarray:
    """Return which cases, as a bool (n,) mask, hold `diffby` values that this fold tests: one half, in turn."""
    wells = np.flatnonzero(case)
    values = _values(obs, contrast.rule, wells)
    names = sorted(set(values))
    # not seeded by the fold: two neighbouring folds take the two halves, so every value is tested
    order = np.random.default_rng([seed, *f"{contrast.name}/{contrast.perturbation}".encode()]).permutation(len(names))
    chosen = {names[i] for i in order[fold % 2 :: 2]}
    tested = np.zeros(len(obs), dtype=bool)
    tested[wells] = [value in chosen for value in values]
    return tested


def _capped(wells: np.ndarray, case: np.ndarray, max_wells: int | None, rng: np.random.Generator) -> np.ndarray:
    """Return at most `max_wells` cases and as many references of `wells`, drawn at random, in their order."""
    if max_wells is None:
        return wells
    sides = [wells[case[wells]], wells[~case[wells]]]
    kept = [rng.choice(s, max_wells, replace=False) if len(s) > max_wells else s for s in sides]
    return np.sort(np.concatenate(kept))


def splits_of_fold(
    contrasts: Sequence[Contrast], obs: pd.DataFrame, batches: np.ndarray, folds: np.ndarray, fold: int,
    config: Mapping[str, Any],
) -> tuple[list[tuple[Contrast, Split]], list[tuple[Contrast, Split]]]:  # fmt: skip
    """Return the contrasts that a fold asks about, those over experiments and those within experiments only.

    Skipped contrasts are in neither list.
    """
    over, within = [], []
    for contrast in contrasts:
        found = None
        if contrast.skipped is None:
            found = split(contrast, obs, batches, folds, fold, config["score"]["min_wells"], config["seed"])
        if found is not None:
            (within if contrast.rule.within_experiments_only else over).append((contrast, found))
    return over, within
