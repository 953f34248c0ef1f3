"""The shift curve: held-out AUROC against the number of training experiments.

A fold's contrasts and features come in; for perturbations in many experiments the probe is trained on 1, 2, 4, ... of
the training experiments, drawn at random several times, and measured on the same held-out wells. A curve that still
rises at its end says that more experiments would help. The views stay those of the whole training side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from phenoica.score import metrics
from phenoica.score.baselines import Features
from phenoica.score.contrasts import Contrast, Split
from phenoica.score.l1_path import Problem
from phenoica.score.names import SHIFT
from phenoica.score.penalty import Fraction
from phenoica.score.probes import Probe, fit_l1_each
from phenoica.score.rows import L1, PAIRS, POOLED

if TYPE_CHECKING:
    from phenoica.score.fold import FoldScorer

MIN_EXPERIMENTS = 4  # training experiments with both sides from which a curve is worth drawing


def shift_rows(
    scorer: FoldScorer, features: Sequence[Features], fractions: Mapping[str, Fraction]
) -> list[dict[str, Any]]:
    """Return the shift curves of one fold; none where `score.shift_draws` is 0.

    Parameters
    ----------
    scorer
        The fold.
    features
        Views and baselines; those of `score.shift_views` are used.
    fractions
        The lambda fraction of each of them, by key: that of the whole training side.

    Returns
    -------
    list of dict
        Metric auroc_shift_<number of training experiments>, a row a draw (of one set of experiments for all views) and
        one with draw null, their mean. The last number is all training experiments, which needs one draw. A draw that
        holds too few wells of a side is a null with a reason.
    """
    draws, views = scorer.config["score"]["shift_draws"], scorer.config["score"]["shift_views"]
    rows: list[dict[str, Any]] = []
    if not draws:
        return rows
    asked = []  # feature, contrast and wells, training experiments, sets of training wells
    for contrast, part in scorer.splits:
        if part.reason is None and contrast.rule.is_plain:
            for size, sets in _training_sets(scorer, contrast, part, draws):
                asked += [
                    (f, contrast, part, size, sets) for f in features if f.view in views and f.draw is None
                ]  # fmt: skip
    problems, lambdas = [], []
    for feature, contrast, part, _, sets in asked:
        if _usable(feature, part):
            trained = [inside for inside in sets if _enough(scorer, contrast, part.train_labels[inside])]
            problems += [Problem(feature.values, part.train[inside], part.train_labels[inside]) for inside in trained]
            lambdas += [fractions[feature.key].fraction] * len(trained)
    probes = iter(_solve(problems, lambdas, scorer))
    for item in asked:
        rows += _rows_of(scorer, *item, probes)
    return rows


def _usable(feature: Features, part: Split) -> bool:
    return bool(np.isfinite(feature.values[np.concatenate([part.train, part.test])]).all())


def _enough(scorer: FoldScorer, contrast: Contrast, labels: np.ndarray) -> bool:
    return min(labels.sum(), (~labels).sum()) >= (contrast.rule.min_wells or scorer.min_wells)


def _training_sets(
    scorer: FoldScorer, contrast: Contrast, part: Split, draws: int
) -> list[tuple[int, list[np.ndarray]]]:
    """Return each number of training experiments with the bool masks of the training wells of its draws."""
    experiments = scorer.experiments[part.train]
    names = np.unique(experiments)
    if len(names) < MIN_EXPERIMENTS:
        return []
    seed = f"{contrast.name}/{contrast.perturbation}".encode()
    rng = np.random.default_rng([scorer.config["seed"], scorer.fold, *seed])
    sizes = [2**i for i in range(len(names).bit_length()) if 2**i < len(names)]
    sets = [(n, [np.isin(experiments, rng.choice(names, n, replace=False)) for _ in range(draws)]) for n in sizes]
    return [*sets, (len(names), [np.ones(len(experiments), dtype=bool)])]


def _rows_of(
    scorer: FoldScorer, feature: Features, contrast: Contrast, part: Split, size: int, sets: Sequence[np.ndarray],
    probes: Iterator[Probe],
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the rows of one number of training experiments; takes its probes from `probes`."""
    base = {
        "contrast": contrast.name, "perturbation": contrast.perturbation, "view": feature.view, "probe": L1,
        "test_data_used": feature.test_data_used, "n_components": feature.width, "metric": f"{SHIFT}{size}",
        "scope": POOLED, "n_case": int(part.test_labels.sum()), "n_reference": int((~part.test_labels).sum()),
        "n_experiments": len(np.unique(scorer.experiments[part.test])), "fold": scorer.fold,
        PAIRS: int(part.test_labels.sum() * (~part.test_labels).sum()),
    }  # fmt: skip
    if not _usable(feature, part):
        return [{**base, "draw": None, "reason": "missing_values"}]
    rows: list[dict[str, Any]] = []
    for draw, inside in enumerate(sets):
        if not _enough(scorer, contrast, part.train_labels[inside]):
            rows.append({**base, "draw": draw, "value": None, "reason": "few_train_wells"})
            continue
        probe = next(probes)
        value = metrics.auroc(part.test_labels, probe.decision(feature.values[part.test]))
        reason = None if probe.weights.any() else "no_weights"
        rows.append({**base, "draw": draw, "value": value, "reason": reason})
    known = [row["value"] for row in rows if row["value"] is not None]
    mean = float(np.mean(known)) if known else None
    return [*rows, {**base, "draw": None, "value": mean, "reason": None if known else "few_train_wells"}]


def _solve(problems: Sequence[Problem], lambdas: Sequence[float], scorer: FoldScorer) -> list[Probe]:
    """Fit the probe of each problem at its lambda fraction: the only place where this module trains."""
    title = f"fit probes of the shift curve of fold {scorer.fold}"
    return fit_l1_each(problems, lambdas, device=scorer.config["score"]["device"], title=title)
