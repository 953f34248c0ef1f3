"""How concentrated the effects of perturbations are on few components of a view, and how pure those are.

Features of a fold's wells come in. Components are ranked on training experiments and measured on held-out ones; rows
and the rankings go out. The definition of Nelson et al. (2026) is not public, so several readings stand side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from phenoica import schema
from phenoica.disentangle.components import component_effects, reference_omega2
from phenoica.errors import ControlsError
from phenoica.score import metrics
from phenoica.score.baselines import Features
from phenoica.score.rows import ALL, CONCENTRATION, CONCENTRATION_CONTRAST, NO_PROBE, POOLED

if TYPE_CHECKING:
    from phenoica.score.fold import FoldScorer


def concentration_rows(
    scorer: FoldScorer, rotated: Sequence[Features]
) -> tuple[list[dict[str, Any]], dict[str, dict[str, list[int]]]]:
    """Rank components on training experiments, measure how concentrated the effects are on held-out ones.

    Parameters
    ----------
    scorer
        The fold: its wells, experiments and configuration.
    rotated
        Views of one fit that differ by a rotation, all draws of the rotation among them.

    Returns
    -------
    rows : list of dict
        A row a view and reading (`CONCENTRATION`).
    ranks : dict
        view -> biology, batch: component indices from most to least, empty where all are 0 or cannot be measured.
    """
    rows, ranks = [], {}
    train, test = np.flatnonzero(scorer.train), np.flatnonzero(~scorer.train)
    batch_key, share = scorer.config["plates"]["batch_key"], scorer.config["score"]["concentration_share"]
    reference = (scorer.obs[schema.CONTROL_ROLE] == schema.REFERENCE).to_numpy()
    n_batches = len(np.unique(scorer.batches[train][reference[train]]))
    batch_known = 2 <= n_batches < int(reference[train].sum())
    for feature in rotated:
        Z_train, obs_train = feature.at(train), scorer.obs.iloc[train]
        biology = component_effects(Z_train, obs_train).biology
        batch = reference_omega2(Z_train, obs_train, batch_key) if batch_known else None
        # a ranking of zeros is the order of the components and says nothing
        by_biology = metrics.ranking(biology) if biology.any() else None
        by_batch = metrics.ranking(batch) if batch is not None and batch.any() else None
        ranks[feature.key] = {
            "biology": [] if by_biology is None else by_biology.tolist(),
            "batch": [] if by_batch is None else by_batch.tolist(),
        }
        n = feature.width
        count = metrics.top_count(n, share)
        try:
            effects = component_effects(feature.at(test), scorer.obs.iloc[test])
        except ControlsError:  # too few held-out reference controls, or no case beside them
            n_case, found = 0, {name: (None, "no_reference") for name in CONCENTRATION}
        else:
            n_case = int(effects.n_case.sum())
            tops = (None if order is None else order[:count] for order in (by_biology, by_batch))
            found = concentration(effects.biology, batch, *tops)
        base = {
            "contrast": CONCENTRATION_CONTRAST, "perturbation": ALL, "view": feature.view, "draw": feature.draw,
            "test_data_used": feature.test_data_used, "probe": NO_PROBE, "scope": POOLED, "n_components": n,
            "n_case": n_case, "fold": scorer.fold,
            "n_reference": int(reference[test].sum()),
            "n_experiments": len(np.unique(scorer.experiments[test])),
        }  # fmt: skip
        for name, (value, reason) in found.items():
            rows.append({**base, "metric": name, "value": value, "reason": reason})
    return rows, ranks


def concentration(
    biology: np.ndarray, batch: np.ndarray | None, top_biology: np.ndarray | None, top_batch: np.ndarray | None
) -> dict[str, tuple[float | None, str | None]]:
    """Return the readings of concentration, by the names of `CONCENTRATION`.

    Parameters
    ----------
    biology
        (k,) mean squared effect of perturbations on each component, on held-out experiments.
    batch
        (k,) omega2 of the batch on training reference controls: a held-out fold can be one batch, which has none.
        None where training has one batch too.
    top_biology, top_batch
        (q,) components ranked on training experiments, None where all are 0 there.

    Returns
    -------
    dict
        A pair each: the value and None, or None and the reason (a key of `contrasts.REASONS`).
    """
    no_rank = "no_training_effect" if top_biology is None else None
    no_batch = no_rank or ("one_batch" if batch is None else None)
    share = None if no_rank else metrics.concentration_share(biology, top_biology)
    corrected = None if share is None else metrics.corrected_share(share, len(top_biology), len(biology))
    purity = None if no_batch else metrics.purity(biology, batch, top_biology)
    no_overlap = no_batch or ("no_batch_effect" if top_batch is None else None)
    values = {
        "concentration_share": (share, no_rank or "no_effect"),
        "concentration_corrected": (corrected, no_rank or ("no_effect" if share is None else "no_spread")),
        "purity": (purity, no_batch or "no_effect"),
        "participation": (metrics.participation(biology), "no_effect"),
        "overlap": (None if no_overlap else metrics.overlap(top_biology, top_batch), no_overlap),
    }
    return {name: (value, reason if value is None else None) for name, (value, reason) in values.items()}
