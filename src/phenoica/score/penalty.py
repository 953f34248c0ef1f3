"""Which lambda the L1 probe uses: chosen by inner cross-validation that sees training experiments only.

Contrasts and features of the training side come in. Out goes, for each view and fold, the fraction of lambda_max with
the best inner AUROC, and the largest fraction that one standard error cannot tell from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.score.contrasts import Contrast
from phenoica.score.l1_path import Problem
from phenoica.score.metrics import auroc
from phenoica.score.probes import L1Path, fit_l1_paths

MAX_INNER_GROUPS = 5


@dataclass(frozen=True)
class Fraction:
    """The lambda fractions of one view in one fold.

    Attributes
    ----------
    fraction
        The one with the best inner AUROC: the probe's.
    sparse_fraction
        The largest within one standard error of it: where sparsity is measured.
    rule
        everywhere, widespread or default (see `InnerSplits`).
    fractions, auroc, standard_error
        The path: per fraction the mean inner AUROC over groups and its standard error over groups; empty for default.
    """

    fraction: float
    sparse_fraction: float
    rule: str
    fractions: tuple[float, ...] = ()
    auroc: tuple[float, ...] = ()
    standard_error: tuple[float, ...] = ()


@dataclass(frozen=True)
class InnerSplits:
    """The inner cross-validation of one fold: which wells train and which validate, all inside training experiments.

    Attributes
    ----------
    rule
        everywhere: perturbations of all training experiments; widespread: there are none, so those of the most (at
        least two) training experiments; default: training has no perturbation in two experiments.
    perturbations
        Names of those used.
    groups
        For each left-out group of experiments a list of (train positions, train labels, validation positions,
        validation labels).
    """

    rule: str
    perturbations: tuple[str, ...]
    groups: tuple[list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]], ...]


def choose_fractions(
    features: Sequence[np.ndarray], inner: InnerSplits, fractions: Sequence[float], *, device: str = "cpu",
    title: str | None = None,
) -> list[Fraction]:  # fmt: skip
    """Choose the lambda fraction of each view from training experiments alone.

    Parameters
    ----------
    features
        For each view float64 (n, d), one row a well; only the positions in `inner` are read. Splits that read a well
        with a missing value are left out for that view.
    inner
        Leave-experiments-out splits inside training.
    fractions
        Candidates.
    device, title
        As in `probes.fit_l1_paths`.

    Returns
    -------
    list of Fraction
        Perturbations weigh alike within a group of left-out experiments, groups weigh alike. Equal means choose the
        larger fraction. Under the rule `default` there is nothing to choose on: the middle candidate is taken.
    """
    candidates = sorted({float(f) for f in fractions}, reverse=True)
    splits = [_finite_parts(inner, values) for values in features]
    problems = [
        Problem(values, *part[:2])
        for values, own in zip(features, splits, strict=True) for group in own.groups for part in group
    ]  # fmt: skip
    paths = iter(fit_l1_paths(problems, candidates, device=device, title=title))
    found = []
    for values, own in zip(features, splits, strict=True):
        table = [[_inner_auroc(values, part, next(paths)) for part in group] for group in own.groups]
        found.append(_chosen([np.mean(group, axis=0) for group in table], candidates, own.rule))
    return found


def _chosen(groups: Sequence[np.ndarray], candidates: Sequence[float], rule: str) -> Fraction:
    """Choose from the mean AUROC of each group of left-out experiments at each candidate."""
    if not groups:
        middle = candidates[len(candidates) // 2]
        return Fraction(middle, middle, "default")
    means = np.mean(groups, axis=0)
    errors = np.std(groups, axis=0, ddof=1) / np.sqrt(len(groups)) if len(groups) > 1 else np.zeros(len(candidates))
    best = int(np.argmax(means))
    sparse = int(np.flatnonzero(means >= means[best] - errors[best])[0])
    path = tuple(candidates), tuple(means.tolist()), tuple(errors.tolist())
    return Fraction(candidates[best], candidates[sparse], rule, *path)


def _inner_auroc(features: np.ndarray, part: tuple[np.ndarray, ...], path: L1Path) -> list[float]:
    """Return the AUROC of each probe of the path on the validation wells; 0.5 for one without weights."""
    X, labels = features[part[2]], part[3]
    return [auroc(labels, probe.decision(X)) if probe.weights.any() else 0.5 for probe in path.probes]


def inner_splits(
    contrasts: Sequence[Contrast], obs: pd.DataFrame, batches: np.ndarray, folds: np.ndarray, fold: int, min_wells: int
) -> InnerSplits:
    """Return the leave-experiments-out splits inside a fold's training experiments that choose the lambda fraction.

    Training folds are left out in turn (experiments, when there is one training fold), joined to at most
    `MAX_INNER_GROUPS` groups. Perturbations: those in every training experiment; where there is none, those in the most
    training experiments, at least two; where there is none either, nothing is split and the rule is `default`.

    Parameters
    ----------
    contrasts
        As from `build`.
    obs, batches, folds
        (n,) wells, their batch and their fold.
    fold
        The fold held out; its wells are in no split.
    min_wells
        Cases and references each inner training side must have; a validation side needs two of each.
    """
    train = folds != fold
    experiments = obs[schema.EXPERIMENT].astype(str).to_numpy()
    present: dict[str, tuple[int, np.ndarray, np.ndarray]] = {}
    for contrast in contrasts:
        if not contrast.rule.is_plain or contrast.skipped is not None:  # most contrasts are compounds, on plates
            continue
        case, reference = (mask & train for mask in contrast.masks(obs, batches))
        if case.any():
            key = f"{contrast.name}/{contrast.perturbation}"
            present[key] = (len(np.unique(experiments[case])), case, reference)
    widest = max((count for count, _, _ in present.values()), default=0)
    if widest < 2:
        return InnerSplits("default", (), ())
    rule = "everywhere" if widest == len(np.unique(experiments[train])) else "widespread"
    chosen = [key for key, (count, _, _) in present.items() if count == widest]
    groups = []
    for left_out in _inner_groups(experiments, folds, train):
        parts = []
        for key in chosen:
            _, case, reference = present[key]
            inner = np.flatnonzero((case | reference) & ~left_out)
            validation = np.flatnonzero((case | reference) & left_out)
            enough = min(case[inner].sum(), reference[inner].sum()) >= min_wells
            if enough and min(case[validation].sum(), reference[validation].sum()) >= 2:
                parts.append((inner, case[inner], validation, case[validation]))
        if parts:
            groups.append(parts)
    return InnerSplits(rule, tuple(chosen), tuple(groups)) if groups else InnerSplits("default", (), ())


def _inner_groups(experiments: np.ndarray, folds: np.ndarray, train: np.ndarray) -> list[np.ndarray]:
    """Return bool (n,) masks of the training wells left out together."""
    units = folds.astype(str) if len(np.unique(folds[train])) > 1 else experiments
    names = np.unique(units[train])
    return [train & np.isin(units, names[i::MAX_INNER_GROUPS]) for i in range(min(MAX_INNER_GROUPS, len(names)))]


def _finite_parts(inner: InnerSplits, values: np.ndarray) -> InnerSplits:
    """Return `inner` without the splits that read a well with a missing value in `values` (n, d)."""
    finite = np.isfinite(values).all(axis=1)
    groups = [[p for p in group if finite[p[0]].all() and finite[p[2]].all()] for group in inner.groups]
    groups = [group for group in groups if group]
    return InnerSplits(inner.rule if groups else "default", inner.perturbations, tuple(groups))
