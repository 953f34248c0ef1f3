"""Rows of a fold's table that say more of its probes: average precision, sparsity, and the position of the wells.

What a probe gave comes in (scores of held-out wells, weights, records of its path), rows of the table of scores go out;
`fold.FoldScorer` adds them to its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from phenoica.score import metrics, names
from phenoica.score.baselines import POSITION_TREES, Features, position_trees
from phenoica.score.rows import L1, MACRO, POOLED, WITHIN

if TYPE_CHECKING:
    from phenoica.score.fold import FoldScorer


def precision_rows(base: Mapping[str, Any], labels: np.ndarray, scores: np.ndarray) -> list[dict[str, Any]]:
    """Return the average precision of a probe on held-out wells, and the prevalence of cases, which is its chance.

    Parameters
    ----------
    base
        The other columns of the row.
    labels
        bool (n,).
    scores
        float (n,); the probe's decisions.
    """
    common = {**base, "scope": POOLED}
    return [
        {**common, "metric": names.AVERAGE_PRECISION, "value": metrics.average_precision(labels, scores)},
        {**common, "metric": names.PREVALENCE, "value": float(np.mean(labels)), "reason": None},
    ]


def sparsity_rows(base: Mapping[str, Any], weights: np.ndarray) -> list[dict[str, Any]]:
    """Return Hoyer's and Gini's sparsity of a probe's weights (d,); without weights, a reason."""
    found = {names.HOYER: metrics.hoyer(weights), names.GINI: metrics.gini(weights)}
    return [
        {**base, "metric": name, "scope": POOLED, "value": value, "reason": None if value is not None else "no_weights"}
        for name, value in found.items()
    ]


def path_rows(
    probes: Mapping[str, Mapping[str, Mapping[str, Any]]], features: Sequence[Features], fold: int, n_experiments: int
) -> list[dict[str, Any]]:
    """Return the mean number of non-zero weights at every fraction of lambda_max: a row a contrast, view and fraction.

    Parameters
    ----------
    probes
        view -> contrast/perturbation -> record of the fitted probes, with path -> fraction and non_zero (lists of one
        length). Records without a path give no row.
    features
        The views, by whose keys `probes` goes.
    fold
        The fold.
    n_experiments
        Its test experiments.
    """
    rows = []
    for feature in features:
        counts: dict[tuple[str, float], list[int]] = {}
        for name, record in probes.get(feature.key, {}).items():
            path = record.get("path", {"fraction": [], "non_zero": []})
            for fraction, count in zip(path["fraction"], path["non_zero"], strict=True):
                counts.setdefault((name.split("/", 1)[0], float(fraction)), []).append(int(count))
        rows += [
            {
                "contrast": contrast, "perturbation": MACRO, "view": feature.view, "draw": feature.draw,
                "test_data_used": feature.test_data_used, "probe": L1, "metric": names.non_zero_at(fraction),
                "scope": POOLED, "n_components": feature.width, "value": float(np.mean(found)), "fold": fold,
                "n_case": 0, "n_reference": 0, "n_experiments": n_experiments, "reason": None,
            } for (contrast, fraction), found in counts.items()
        ]  # fmt: skip
    return rows


def position_tree_rows(scorer: FoldScorer) -> list[dict[str, Any]]:
    """Return the held-out AUROC of boosted trees that see only where on the plate a well is: a must-beat row.

    Parameters
    ----------
    scorer
        The fold, with its contrasts.
    """
    rows = []
    for contrast, part in scorer.splits:
        base = {
            "contrast": contrast.name, "perturbation": contrast.perturbation, "view": POSITION_TREES, "draw": None,
            "test_data_used": "none", "probe": names.TREES, "metric": names.AUROC, "n_components": 3,
            "n_case": int(part.test_labels.sum()), "n_reference": int((~part.test_labels).sum()),
            "n_experiments": len(np.unique(scorer.experiments[part.test])), "fold": scorer.fold, "reason": part.reason,
        }  # fmt: skip
        if part.reason is not None:
            rows += [{**base, "scope": scope} for scope in (POOLED, WITHIN)]
            continue
        scores = position_trees(scorer.obs, part.train, part.train_labels, part.test, seed=scorer.config["seed"])
        rows += precision_rows(base, part.test_labels, scores)
        rows += scorer._auroc_rows(base, part, part.test_labels, scores)
    return rows


def rotation_spread_rows(scores: pd.DataFrame) -> list[dict[str, Any]]:
    """Return how much the AUROC of random rotations spreads: the standard deviation over draws, for every contrast.

    Parameters
    ----------
    scores
        `schema.SCORE_COLUMNS`; the rows over folds (fold -1) of single draws are used.

    Returns
    -------
    list of dict
        Rows with metric auroc_sd, sample standard deviation (n - 1), draw null; reason one_draw below two draws.
    """
    draws = scores[
        (scores["fold"] == -1) & (scores["metric"] == names.AUROC) & scores["draw"].notna()
        & scores["view_minus"].isna() & scores["value"].notna()
    ]  # fmt: skip
    rows = []
    for _, group in draws.groupby(["contrast", "perturbation", "view", "probe", "scope"], sort=False):
        known = len(group) > 1
        rows.append({
            **group.iloc[0].to_dict(), "metric": names.AUROC_SD, "draw": None, "ci_low": None, "ci_high": None,
            "ci_kind": None, "value": float(group["value"].std(ddof=1)) if known else None,
            "reason": None if known else "one_draw",
        })  # fmt: skip
    return rows
