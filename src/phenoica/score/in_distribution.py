"""What a new experiment costs: the same probe trained on other plates of the held-out experiments themselves.

The wells of a fold's contrasts and features of all wells come in; rows of scope in_distribution go out. The plates of
every held-out experiment are halved at random, each half is scored by a probe trained on the other. The views are those
of the fold, which no held-out well has shaped. Training is on fewer wells than across experiments, so the gap between
the two AUROC is rather too small. Contrasts whose batch is a plate (compounds that sit in one experiment) have no other
scope: what they show holds within these experiments only, and their rows say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.score import inference, metrics
from phenoica.score.baselines import PERMUTED, Features
from phenoica.score.contrasts import Contrast, Split
from phenoica.score.intervals import delong_variance, joint_variance
from phenoica.score.l1_path import Problem
from phenoica.score.penalty import Fraction
from phenoica.score.probes import Probe, fit_l1_each
from phenoica.score.rows import AUROC, IN_DISTRIBUTION, L1, PAIRS, VARIANCE

if TYPE_CHECKING:
    from phenoica.score.fold import FoldScorer

LARGEST = 1e9  # training standard deviations above which a value is no measurement
_UNSET = -1


def in_distribution_rows(
    scorer: FoldScorer, features: Sequence[Features], fractions: Mapping[str, Fraction]
) -> list[dict[str, Any]]:
    """Return the rows of scope in_distribution of one fold.

    Parameters
    ----------
    scorer
        The fold.
    features
        Views and baselines; rotations and permuted labels are passed over.
    fractions
        The lambda fraction of each of them, by key.

    Returns
    -------
    list of dict
        AUROC of every contrast and feature set, the mean over the two halves weighted by pairs, with its plate-
        stratified variance; of contrasts within experiments only also the rank sum.
    """
    contrasts = list(scorer.within_splits)
    if scorer.config["score"]["in_distribution"]:
        contrasts += scorer.splits
    seed, halved = scorer.config["seed"], []
    for contrast, part in contrasts:
        min_wells = contrast.rule.min_wells or scorer.min_wells
        halved.append((contrast, part, *halves_of(contrast, part, scorer.obs, scorer.fold, min_wells, seed)))
    rows: list[dict[str, Any]] = []
    problems, lambdas, waiting = [], [], []
    for feature in features:
        if feature.draw is not None or feature.view == PERMUTED:
            continue
        for contrast, part, halves, reason in halved:
            used = part.test[halves != _UNSET]
            base = _base(scorer, feature, contrast, used, part.test_labels[halves != _UNSET])
            reason = reason or _unusable(feature.values[used])
            if reason is not None:
                rows.append({**base, "reason": reason})
                continue
            for half in (0, 1):
                other = halves == 1 - half
                problems.append(Problem(feature.values, part.test[other], part.test_labels[other]))
                lambdas.append(fractions[feature.key].fraction)
            waiting.append((feature, base, contrast, part, halves))
    probes = _solve(problems, lambdas, scorer)
    for number, item in enumerate(waiting):
        rows += _scored(scorer, *item, probes[2 * number : 2 * number + 2])
    return rows


def halves_of(
    contrast: Contrast, part: Split, obs: pd.DataFrame, fold: int, min_wells: int, seed: int
) -> tuple[np.ndarray, str | None]:
    """Halve the plates of each test experiment of a contrast at random.

    Parameters
    ----------
    contrast, part
        The comparison and its wells in this fold.
    obs
        (n,) wells.
    fold, seed
        Of the draw.
    min_wells
        Wells of each side that each half must have.

    Returns
    -------
    halves : ndarray
        int (test wells,): 0 or 1; -1 in experiments with one plate only.
    reason : str or None
        Why the halves cannot train each other.
    """
    experiments = obs[schema.EXPERIMENT].astype(str).to_numpy()[part.test]
    column = contrast.rule.batch_key if contrast.rule.within_experiments_only else schema.PLATE_ID
    units = obs[column].astype(str).to_numpy()[part.test]
    rng = np.random.default_rng([seed, fold, *f"{contrast.name}/{contrast.perturbation}".encode()])
    halves = np.full(len(part.test), _UNSET)
    for experiment in np.unique(experiments):
        inside = experiments == experiment
        names = np.unique(units[inside])
        if len(names) > 1:
            for position, name in enumerate(rng.permutation(names)):
                halves[inside & (units == name)] = position % 2
    if not part.test_labels.any() or part.test_labels.all():
        return halves, "no_reference"
    if (halves == _UNSET).all():
        return halves, "one_plate"
    sides = [(halves == h) & (part.test_labels == side) for h in (0, 1) for side in (True, False)]
    return halves, None if min(s.sum() for s in sides) >= min_wells else "few_train_wells"


def _base(
    scorer: FoldScorer, feature: Features, contrast: Contrast, wells: np.ndarray, labels: np.ndarray
) -> dict[str, Any]:
    return {
        "contrast": contrast.name, "perturbation": contrast.perturbation, "view": feature.view, "probe": L1,
        "test_data_used": feature.test_data_used, "n_components": feature.width, "draw": None,
        "metric": AUROC, "scope": IN_DISTRIBUTION, "n_case": int(labels.sum()), "n_reference": int((~labels).sum()),
        "n_experiments": len(np.unique(scorer.experiments[wells])), "fold": scorer.fold,
    }  # fmt: skip


def _unusable(values: np.ndarray) -> str | None:
    """Return why a probe cannot be trained on held-out wells, which no scaling of the training side has bounded."""
    if not np.isfinite(values).all():
        return "missing_values"
    return "extreme_values" if values.size and np.abs(values).max() > LARGEST else None


def _solve(problems: Sequence[Problem], lambdas: Sequence[float], scorer: FoldScorer) -> list[Probe]:
    """Fit the probe of each problem at its lambda fraction: the only place where this module trains."""
    title = f"fit probes inside experiments of fold {scorer.fold}"
    return fit_l1_each(problems, lambdas, device=scorer.config["score"]["device"], title=title)


def _scored(
    scorer: FoldScorer, feature: Features, base: Mapping[str, Any], contrast: Contrast, part: Split,
    halves: np.ndarray, probes: Sequence[Probe],
) -> list[dict[str, Any]]:  # fmt: skip
    parts = []  # pairs, AUROC, variance, rank sum
    for half, probe in enumerate(probes):
        wells, labels = part.test[halves == half], part.test_labels[halves == half]
        scores, plates = probe.decision(feature.values[wells]), scorer.plates[wells]
        pairs = int(labels.sum() * (~labels).sum())
        found = inference.rank_sum(labels, scores, plates)
        parts.append((pairs, metrics.auroc(labels, scores), delong_variance(labels, scores, plates), found))
    pairs, values, variances, sums = zip(*parts, strict=True)
    share = np.array(pairs) / sum(pairs)
    reason = None if any(probe.weights.any() for probe in probes) else "no_weights"
    if contrast.rule.within_experiments_only:
        reason = ";".join(filter(None, [reason, "within_experiments_only"]))
    row = {
        **base, "value": float(share @ values), PAIRS: sum(pairs), "reason": reason,
        VARIANCE: None if None in variances else joint_variance(variances, share, 1.0),  # they train on each other
    }  # fmt: skip
    if not contrast.rule.within_experiments_only:
        return [row]
    return [row, *inference.fold_rows({**base, "reason": reason}, _joined(sums), IN_DISTRIBUTION)]


def _joined(sums: Sequence[inference.RankSum]) -> inference.RankSum:
    """Join the rank sums of two halves that train on each other: their deviations add, as those of two folds do."""
    known = [found for found in sums if found.pairs]
    if not known:
        return inference.RankSum(None, 0, 0.0, 0.0, 0.0)
    pairs = sum(found.pairs for found in known)
    share = [found.pairs / pairs for found in known]
    return inference.RankSum(
        float(np.dot(share, [found.auroc for found in known])),
        pairs,
        joint_variance([found.variance for found in known], share, 1.0),
        joint_variance([found.untied_variance for found in known], share, 1.0),
        sum(found.log10_arrangements for found in known),
    )
