"""What will be tested: every contrast with its wells, before any image is embedded.

Wells, folds and the configuration come in; a table with a row a comparison goes out (`phenoica contrasts`,
`score/contrasts.csv`): wells of each side and experiment, how well position alone would tell the sides apart, the
smallest effect such numbers could show, and what is skipped and why. Only metadata is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.progress import track
from phenoica.score import metrics
from phenoica.score.baselines import position_linear
from phenoica.score.contrasts import REASONS, Contrast, Split, build, split
from phenoica.score.intervals import MIN_EXPERIMENTS, detectable_difference, fold_correlation, joint_variance
from phenoica.score.presets import parse
from phenoica.score.probes import fit_l1
from phenoica.score.summary import CONFOUNDED

LIST_COLUMNS = (
    "contrast", "perturbation", "batch", "n_case", "n_reference", "n_experiments", "n_folds", "per_experiment",
    "position_overlap", "detectable_difference", "skipped", "why",
)  # fmt: skip
MAX_LINES = 60  # comparisons of a contrast that the text names; the csv has all
POSITION_FRACTION = 0.1  # lambda of the one-hot position model, as a share of lambda_max
MAX_POSITION_WELLS = 2000  # wells of a side that a position model sees; there is little more to learn from more


def contrast_list(
    wells: pd.DataFrame, folds: pd.DataFrame, config: Mapping[str, Any], *, position: bool = True
) -> pd.DataFrame:
    """Return the list of comparisons.

    Parameters
    ----------
    wells
        plates/wells.parquet; wells that qc.exclude_flagged will leave out are still counted.
    folds
        plates/folds.csv.
    config
        A complete configuration.
    position
        Whether to fit the position models (about a tenth of a second a comparison).

    Returns
    -------
    DataFrame
        `LIST_COLUMNS`: batch names the held-out unit; n_case and n_reference count wells in experiments with both
        sides; n_folds is how many folds can be tested; per_experiment is "name cases/references; ...".
        position_overlap is min(1, 2 (1 - A)), A the AUROC over held-out folds, by pairs, of the better of two models
        that see the position only (one-hot rows and columns, and boosted trees); under 0.5 the comparison supports no
        claim. detectable_difference is the smallest AUROC - 0.5 that the interval could show with 80 % power if
        experiments did not differ: the standard error of fold k is that of the Mann-Whitney statistic, sqrt((m + n + 1)
        / (12 m n)) for m cases and n references, folds correlate by 1 / (K - 1), t with K - 1 degrees of freedom from
        four experiments on. skipped is the reason why nothing can be tested, why its words.
    """
    fold_of = dict(zip(folds[schema.EXPERIMENT].astype(str), folds[schema.FOLD].astype(int), strict=True))
    obs = wells[wells[schema.EXPERIMENT].astype(str).isin(fold_of)].reset_index(drop=True)
    of_wells = obs[schema.EXPERIMENT].astype(str).map(fold_of).to_numpy()
    batches = obs[config["plates"]["batch_key"]].astype(str).to_numpy()
    contrasts = build(obs, parse(config["score"]["contrasts"]))
    rows = [
        _row(contrast, obs, batches, of_wells, config, position)
        for contrast in track(contrasts, len(contrasts), "contrasts", "contrast")
    ]
    return pd.DataFrame(rows, columns=list(LIST_COLUMNS))


def _row(
    contrast: Contrast, obs: pd.DataFrame, batches: np.ndarray, folds: np.ndarray, config: Mapping[str, Any],
    position: bool,
) -> dict[str, Any]:  # fmt: skip
    case, reference = contrast.masks(obs, batches)
    experiments = obs[schema.EXPERIMENT].astype(str)
    counts = pd.DataFrame({"case": case, "reference": reference}).groupby(experiments.to_numpy()).sum()
    counts = counts[(counts > 0).any(axis=1)]
    parts = [] if contrast.skipped else _parts(contrast, obs, batches, folds, config)
    usable = [part for part in parts if part.reason is None]
    reason = contrast.skipped or (None if usable else _reason(parts))
    only_within = contrast.rule.within_experiments_only
    words = [REASONS[reason]] if reason else []
    words += [REASONS["within_experiments_only"]] if only_within else []
    return {
        "contrast": contrast.name, "perturbation": contrast.perturbation,
        "batch": contrast.rule.batch_key or config["plates"]["batch_key"], "n_case": int(case.sum()),
        "n_reference": int(reference.sum()), "n_experiments": len(counts),
        "n_folds": len({int(folds[part.test[0]]) for part in usable}),
        "per_experiment": "; ".join(f"{e} {row.case}/{row.reference}" for e, row in counts.iterrows()),
        "position_overlap": _overlap(obs, usable, config["seed"]) if position and usable else None,
        "detectable_difference": _detectable(usable, experiments, only_within, config) if usable else None,
        "skipped": reason, "why": "; ".join(words) or None,
    }  # fmt: skip


def _parts(
    contrast: Contrast, obs: pd.DataFrame, batches: np.ndarray, folds: np.ndarray, config: Mapping[str, Any]
) -> list[Split]:
    """Return the training and test wells of every fold; within experiments, of both halves of its plates."""
    from phenoica.score.in_distribution import halves_of

    min_wells, parts = contrast.rule.min_wells or config["score"]["min_wells"], []
    for fold in np.unique(folds).tolist():
        part = split(contrast, obs, batches, folds, fold, config["score"]["min_wells"], config["seed"])
        if part is None or not contrast.rule.within_experiments_only:
            parts += [] if part is None else [part]
            continue
        halves, reason = halves_of(contrast, part, obs, fold, min_wells, config["seed"])
        for half in (0, 1):
            train, test = halves == 1 - half, halves == half
            labels = part.test_labels
            parts.append(Split(part.test[train], labels[train], part.test[test], labels[test], reason))
    return parts


def _reason(parts: list[Split]) -> str:
    reasons = [part.reason for part in parts]
    return max(dict.fromkeys(reasons), key=reasons.count) if reasons else "no_reference"


def _overlap(obs: pd.DataFrame, parts: list[Split], seed: int) -> float:
    """Return min(1, 2 (1 - A)) of the better position model."""
    samples = [_position_sample(part, np.random.default_rng([seed, number])) for number, part in enumerate(parts)]
    pairs = np.array([test_labels.sum() * (~test_labels).sum() for *_, test_labels in samples], dtype=np.float64)
    best = 0.0
    for model in (_one_hot, _trees):
        if best < 1.0:  # a model that is always right cannot be beaten
            values = [
                metrics.auroc(test_labels, model(obs.iloc[train], labels, obs.iloc[test]))
                for train, labels, test, test_labels in samples
            ]
            best = max(best, float(pairs @ values / pairs.sum()))
    return min(1.0, 2 * (1 - best))


def _position_sample(part: Split, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return *_sample(part.train, part.train_labels, rng), *_sample(part.test, part.test_labels, rng)


def _sample(wells: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    sides = [np.flatnonzero(labels), np.flatnonzero(~labels)]
    kept = [rng.choice(s, MAX_POSITION_WELLS, replace=False) if len(s) > MAX_POSITION_WELLS else s for s in sides]
    kept = np.sort(np.concatenate(kept))
    return wells[kept], labels[kept]


def _one_hot(train: pd.DataFrame, labels: np.ndarray, test: pd.DataFrame) -> np.ndarray:
    """Return the decisions on test wells of a linear model that sees row and column."""
    inside = np.arange(len(train) + len(test)) < len(train)
    X = position_linear(pd.concat([train, test]), inside)
    return fit_l1(X[inside], labels, POSITION_FRACTION).decision(X[~inside])


def _trees(train: pd.DataFrame, labels: np.ndarray, test: pd.DataFrame) -> np.ndarray:
    """Return the decisions on test wells of boosted trees that see row, column and distance to the edge."""
    from sklearn.ensemble import GradientBoostingClassifier

    columns = [schema.ROW, schema.COLUMN, schema.EDGE_DISTANCE]
    weights = np.where(labels, len(labels) / (2 * labels.sum()), len(labels) / (2 * (~labels).sum()))
    model = GradientBoostingClassifier(
        n_estimators=20, learning_rate=0.25, max_depth=3, min_samples_leaf=4, random_state=0
    )
    model.fit(train[columns].to_numpy(np.float64), labels, sample_weight=weights)
    return model.decision_function(test[columns].to_numpy(np.float64))


def _detectable(parts: list[Split], experiments: pd.Series, only_within: bool, config: Mapping[str, Any]) -> float:
    m = np.array([part.test_labels.sum() for part in parts], dtype=np.float64)
    n = np.array([(~part.test_labels).sum() for part in parts], dtype=np.float64)
    share = m * n / (m * n).sum()
    tested = len({e for part in parts for e in experiments.iloc[part.test]})
    over_folds = tested >= MIN_EXPERIMENTS and not only_within
    correlation = 1.0 if only_within else fold_correlation(len(parts))  # two halves of plates train on each other
    error = np.sqrt(joint_variance((m + n + 1) / (12 * m * n), share, correlation))
    freedom = len(parts) - 1 if over_folds and len(parts) > 1 else None
    return detectable_difference(float(error), freedom, config["score"]["confidence"])


def listed(table: pd.DataFrame) -> str:
    """Return the list as text: a line a comparison (the first `MAX_LINES`), then what is skipped, by reason."""
    lines = []
    for contrast, group in table.groupby("contrast", sort=False):
        tested = group[group["skipped"].isna()]
        lines.append(f"{contrast}: {len(tested)} of {len(group)} can be tested, batch {group['batch'].iloc[0]}")
        for row in tested.head(MAX_LINES).to_dict("records"):
            sides = f"{row['n_case']} cases, {row['n_reference']} references"
            text = f"  {row['perturbation']:<24}{sides:<34}{_span(row['per_experiment'])}; {row['n_folds']} folds"
            if not pd.isna(row["position_overlap"]):
                text += f"; position_overlap {row['position_overlap']:.2f}"
                text += " CONFOUNDED" if row["position_overlap"] < CONFOUNDED else ""
            detectable = row["detectable_difference"]
            # AUROC differs from 0.5 by 0.5 at most
            lines.append(f"{text}; detectable {detectable:.2f}" if detectable <= 0.5 else f"{text}; detectable none")
        if len(tested) > MAX_LINES:
            confounded = (tested["position_overlap"].astype(float) < CONFOUNDED).sum()
            lines.append(f"  and {len(tested) - MAX_LINES} more, in the csv; {confounded} of all are confounded")
        if group["batch"].iloc[0] != schema.EXPERIMENT and len(tested) and tested["why"].notna().all():
            lines.append(f"  {tested['why'].iloc[0]}")
        for reason, skipped in group[group["skipped"].notna()].groupby("skipped", sort=True):
            names = skipped["perturbation"].tolist()
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            lines.append(f"  skipped, {len(names)}: {shown} ({REASONS[reason]})")
    return "\n".join(lines) + "\n"


def _span(per_experiment: str) -> str:
    """Return the smallest and largest number of wells of a side in an experiment."""
    sides = [[int(n) for n in part.rsplit(" ", 1)[1].split("/")] for part in per_experiment.split("; ")]
    words = [f"{min(v)}" if min(v) == max(v) else f"{min(v)}-{max(v)}" for v in zip(*sides, strict=True)]
    return f"{'/'.join(words)} in each of {len(sides)} experiments"
