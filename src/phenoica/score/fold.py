"""The scores of one fold: probes trained on its training experiments and measured on its held-out ones.

Features of all wells, their metadata and folds come in. Out come the rows of the fold, and apart from them everything
that the training side decided (lambda fractions, lambdas, component rankings), which no held-out well can have touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.errors import ScoreError
from phenoica.progress import track
from phenoica.score import inference, metrics
from phenoica.score.baselines import BASELINES, PERMUTED, Features, in_groups, permute_within
from phenoica.score.concentration import concentration_rows
from phenoica.score.contrasts import Contrast, Split, build, splits_of_fold
from phenoica.score.in_distribution import in_distribution_rows
from phenoica.score.intervals import delong_variance
from phenoica.score.l1_path import Problem
from phenoica.score.penalty import Fraction, choose_fractions, inner_splits
from phenoica.score.presets import parse
from phenoica.score.probe_rows import path_rows, position_tree_rows, precision_rows, sparsity_rows
from phenoica.score.probes import L1Path, Probe, fit_l1_paths, fit_l2, fit_trees, l2_control
from phenoica.score.rows import (
    ALL,
    AUROC,
    FOLD_COLUMNS,
    L1,
    L2,
    L2_CONTRAST,
    L2_METRICS,
    PAIRS,
    POOLED,
    ROTATED,
    TREES,
    VARIANCE,
    WITHIN,
    table,
)  # fmt: skip
from phenoica.score.shift import shift_rows

HELD_VALUES = 2**27  # float64 numbers of the features that are scored together: 1 GiB


@dataclass(frozen=True)
class Fit:
    """The L1 probes of one contrast on one view.

    Attributes
    ----------
    contrast, part
        The comparison, and its wells in this fold.
    train_labels, test_labels
        bool; those of `part`, permuted within plate for the view called permuted.
    fraction
        The lambda fractions chosen for the view.
    path
        Probes from the largest lambda to the smallest; None where nothing could be fitted (`reason` says why).
    reason
        A key of `contrasts.REASONS`, or None.
    """

    contrast: Contrast
    part: Split
    train_labels: np.ndarray
    test_labels: np.ndarray
    fraction: Fraction
    path: L1Path | None
    reason: str | None

    @property
    def name(self) -> str:
        """contrast/perturbation."""
        return f"{self.contrast.name}/{self.contrast.perturbation}"

    @property
    def probe(self) -> Probe:
        """The probe that is scored."""
        return self.path.at(self.fraction.fraction)

    @property
    def sparse_probe(self) -> Probe:
        """The probe whose sparsity is measured."""
        return self.path.at(self.fraction.sparse_fraction)

    def record(self) -> dict[str, Any]:
        """Return what goes into the fold's json: lambda, lambda_max, non_zero, converged, and non_zero of the path."""
        probe = self.probe
        return {
            "lambda": probe.penalty, "lambda_max": probe.lambda_max, "non_zero": int((probe.weights != 0).sum()),
            "converged": bool(probe.converged),
            "path": {"fraction": list(self.path.fractions), "non_zero": list(self.path.non_zero)},
        }  # fmt: skip


@dataclass(frozen=True)
class _Scored:
    """What one feature set gave: what training decided, rows of the L1 and the L2 probes, decisions of the latter."""

    fraction: Fraction
    records: dict[str, Any]
    l1: list[dict[str, Any]]
    l2: list[dict[str, Any]]
    decisions: list[np.ndarray]


class FoldScorer:
    """Scores features on the contrasts of one fold.

    Parameters
    ----------
    obs
        (n,) wells of experiments that are in a fold, text columns as plain strings.
    folds
        (n,) int, the fold of each well's experiment.
    fold
        The fold that is held out.
    config
        A complete configuration.

    Raises
    ------
    ScoreError
        If the fold holds no well, or every well.
    """

    def __init__(self, obs: pd.DataFrame, folds: np.ndarray, fold: int, config: Mapping[str, Any]):
        self.obs, self.folds, self.fold, self.config = obs, folds, fold, config
        self.train = folds != fold
        if self.train.all() or not self.train.any():
            side = "no well to test on" if self.train.all() else "no well to train on"
            raise ScoreError(
                f"fold {fold} has {side}: none is left, or there is one fold only; look for its wells in quarantine, "
                "leave its experiments out, or ask for more folds (plates.folds)"
            )
        self.batches = obs[config["plates"]["batch_key"]].astype(str).to_numpy()
        self.plates = obs[schema.PLATE_ID].astype(str).to_numpy()
        self.experiments = obs[schema.EXPERIMENT].astype(str).to_numpy()
        self.min_wells = config["score"]["min_wells"]
        contrasts = build(obs, parse(config["score"]["contrasts"]))
        self.splits, self.within_splits = splits_of_fold(contrasts, obs, self.batches, folds, fold, config)
        self.inner = inner_splits(contrasts, obs, self.batches, folds, fold, self.min_wells)

    def score(self, features: Sequence[Features]) -> tuple[pd.DataFrame, dict[str, Any]]:
        """Return the fold's rows and the decisions of its training side.

        Parameters
        ----------
        features
            Views, all rotation draws, and baselines. The first `score.rotation_draws` rotations are probed, all of them
            enter the concentration. A feature set called permuted is scored on permuted labels.

        Returns
        -------
        rows : DataFrame
            `FOLD_COLUMNS`.
        decided : dict
            JSON-able; see `score.run.score_fold`.
        """
        probed = [f for f in features if f.draw is None or f.draw < self.config["score"]["rotation_draws"]]
        rotated = [f for f in features if f.view in ROTATED]
        width, found, inside = self._width(probed), {}, []
        for group in in_groups(probed, HELD_VALUES):
            one_by_one, rows_inside = self._score_group(group, width)
            found |= one_by_one
            inside += rows_inside
        scored = {f.key: found[f.key] for f in probed}
        records = {key: one.records for key, one in scored.items()}
        rows = [row for one in scored.values() for row in one.l1]
        rows += position_tree_rows(self)
        rows += path_rows(records, probed, self.fold, len(set(self.experiments[~self.train])))
        rows += [row for one in scored.values() for row in one.l2]
        rows += self._l2_control_rows([f for f in probed if f.view in ROTATED], scored)
        concentrated, ranks = concentration_rows(self, rotated)
        fractions = {key: one.fraction for key, one in scored.items()}
        return table(rows + inside + concentrated, FOLD_COLUMNS), self._decided(fractions, records, ranks)

    def _score_group(
        self, group: Sequence[Features], width: int | None
    ) -> tuple[dict[str, _Scored], list[dict[str, Any]]]:
        """Score features that are held in memory together; return each one's, and the rows inside experiments."""
        fractions = self._fractions(group)
        fits = self._fit(group, fractions)
        done = {}
        for feature in track(group, len(group), f"score fold {self.fold}", "view"):
            own, l1 = fits[feature.key], []
            for fit in own:
                l1 += self._l1_rows(feature, fit, width)
                l1 += self._tree_rows(feature, fit) if self.config["score"]["trees"] else []
            l2, decisions = self._l2_rows(feature) if feature.view in ROTATED else ([], [])
            records = {fit.name: fit.record() for fit in own if fit.path}
            done[feature.key] = _Scored(fractions[feature.key], records, l1, l2, decisions)
        return done, in_distribution_rows(self, group, fractions) + shift_rows(self, group, fractions)

    def _fractions(self, probed: Sequence[Features]) -> dict[str, Fraction]:
        """Choose each view's lambda fraction; permuted labels take that of the view whose features they share."""
        of_values = {id(f.values): f.values for f in probed}
        found = choose_fractions(
            list(of_values.values()), self.inner, self.config["score"]["lambda_fractions"],
            device=self.config["score"]["device"], title=f"choose lambda of fold {self.fold}",
        )  # fmt: skip
        chosen = dict(zip(of_values, found, strict=True))
        return {f.key: chosen[id(f.values)] for f in probed}

    def _fit(self, probed: Sequence[Features], fractions: Mapping[str, Fraction]) -> dict[str, list[Fit]]:
        """Fit the L1 probes of every view and contrast at all lambdas, in one call of the solver."""
        asked, problems = [], []  # view, contrast and wells, labels, why it is not fitted
        for feature in probed:
            finite = np.isfinite(feature.values).all(axis=1)
            for contrast, part in self.splits:
                labels = part.train_labels, part.test_labels
                if feature.view == PERMUTED and part.reason is None:
                    labels = self._permuted(contrast, part)
                reason = part.reason or (None if finite[part.train].all() else "missing_values")
                asked.append((feature.key, contrast, part, *labels, reason))
                if reason is None:
                    problems.append(Problem(feature.values, part.train, labels[0]))
        used = {f for chosen in fractions.values() for f in (chosen.fraction, chosen.sparse_fraction)}
        lambdas = used.union(self.config["score"]["lambda_fractions"])
        device, title = self.config["score"]["device"], f"fit probes of fold {self.fold}"
        paths = iter(fit_l1_paths(problems, lambdas, device=device, title=title))
        fits: dict[str, list[Fit]] = {f.key: [] for f in probed}
        for key, contrast, part, train_labels, test_labels, reason in asked:
            path = next(paths) if reason is None else None
            fits[key].append(Fit(contrast, part, train_labels, test_labels, fractions[key], path, reason))
        return fits

    def _width(self, probed: Sequence[Features]) -> int | None:
        """Return the width at which sparsity is compared: that of the rotated views."""
        widths = [f.width for f in probed if f.view in ROTATED]
        return widths[0] if widths else None

    def _base(self, feature: Features, contrast: Contrast, part: Split) -> dict[str, Any]:
        return {
            "contrast": contrast.name, "perturbation": contrast.perturbation, "view": feature.view,
            "test_data_used": feature.test_data_used, "n_components": feature.width, "draw": feature.draw,
            "n_case": int(part.test_labels.sum()), "n_reference": int((~part.test_labels).sum()),
            "n_experiments": len(np.unique(self.experiments[part.test])), "fold": self.fold, "reason": part.reason,
        }  # fmt: skip

    def _l1_rows(self, feature: Features, fit: Fit, width: int | None) -> list[dict[str, Any]]:
        base = {**self._base(feature, fit.contrast, fit.part), "probe": L1, "metric": AUROC}
        nothing = [{**base, "scope": scope} for scope in (POOLED, WITHIN)]
        if fit.path is None:
            return [{**row, "reason": fit.reason} for row in nothing]
        rows = self._sparsity_rows(base, feature, fit, width)
        if not np.isfinite(feature.values[fit.part.test]).all():
            return rows + [{**row, "reason": "missing_values"} for row in nothing]
        if not fit.probe.weights.any():
            base["reason"] = "no_weights"
        scores = fit.probe.decision(feature.values[fit.part.test])
        rows += precision_rows(base, fit.test_labels, scores)
        if feature.draw is None:
            found = inference.rank_sum(fit.test_labels, scores, self.plates[fit.part.test])
            rows += inference.fold_rows(base, found, POOLED)
        return rows + self._auroc_rows(base, fit.part, fit.test_labels, scores)

    def _tree_rows(self, feature: Features, fit: Fit) -> list[dict[str, Any]]:
        """Return the AUROC of boosted trees on the same wells and labels as the L1 probe's."""
        base = {**self._base(feature, fit.contrast, fit.part), "probe": TREES, "metric": AUROC}
        finite = fit.path is not None and np.isfinite(feature.values[fit.part.test]).all()
        if not finite:
            return [{**base, "scope": scope, "reason": fit.reason or "missing_values"} for scope in (POOLED, WITHIN)]
        score = fit_trees(feature.values[fit.part.train], fit.train_labels, self.config["seed"])
        return self._auroc_rows(base, fit.part, fit.test_labels, score(feature.values[fit.part.test]))

    def _permuted(self, contrast: Contrast, part: Split) -> tuple[np.ndarray, np.ndarray]:
        """Permute labels within plate; the seed follows from the contrast, not from the order of the work."""
        name = np.frombuffer(f"{contrast.name}/{contrast.perturbation}".encode(), dtype=np.uint8)
        rng = np.random.default_rng([self.config["seed"], self.fold, *name.tolist()])
        return (
            permute_within(part.train_labels, self.plates[part.train], rng),
            permute_within(part.test_labels, self.plates[part.test], rng),
        )

    def _sparsity_rows(
        self, base: Mapping[str, Any], feature: Features, fit: Fit, width: int | None
    ) -> list[dict[str, Any]]:
        if feature.view in BASELINES or feature.width != width:
            return []
        return sparsity_rows(base, fit.sparse_probe.weights)

    def _auroc_rows(
        self, base: Mapping[str, Any], part: Split, labels: np.ndarray, scores: np.ndarray
    ) -> list[dict[str, Any]]:
        batches, plates = self.batches[part.test], self.plates[part.test]
        within, pairs = metrics.auroc_within(labels, scores, batches)
        parts = []  # share of the pairs, variance
        for batch in np.unique(batches):
            inside = batches == batch
            share = labels[inside].sum() * (~labels[inside]).sum() / pairs
            if share:
                parts.append((share, delong_variance(labels[inside], scores[inside], plates[inside])))
        known = all(v is not None for _, v in parts)
        pooled_pairs = int(labels.sum() * (~labels).sum())
        return [
            {**base, "scope": POOLED, "value": metrics.auroc(labels, scores), PAIRS: pooled_pairs,
             VARIANCE: delong_variance(labels, scores, plates)},
            {**base, "scope": WITHIN, "value": within, PAIRS: pairs,
             VARIANCE: sum(s**2 * v for s, v in parts) if known else None},
        ]  # fmt: skip

    def _l2_rows(self, feature: Features) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
        """Return the L2 probes' AUROC, and their decisions, contrast by contrast."""
        rows, decisions = [], []
        for contrast, part in self._tested():
            probe = fit_l2(feature.values[part.train], part.train_labels, self.config["score"]["l2_C"])
            scores = probe.decision(feature.values[part.test])
            decisions.append(scores)
            base = {**self._base(feature, contrast, part), "probe": L2, "metric": AUROC}
            rows += self._auroc_rows(base, part, part.test_labels, scores)[:1]
        return rows, decisions

    def _tested(self) -> list[tuple[Contrast, Split]]:
        return [(contrast, part) for contrast, part in self.splits if part.reason is None]

    def _l2_control_rows(self, rotated: Sequence[Features], scored: Mapping[str, _Scored]) -> list[dict[str, Any]]:
        """Return the control that the L2 probes of views that differ by a rotation agree."""
        labels = [part.test_labels for _, part in self._tested()]
        if len(rotated) < 2 or not labels:
            return []
        result = l2_control({f.key: scored[f.key].decisions for f in rotated}, labels)
        base = {
            "contrast": L2_CONTRAST, "perturbation": ALL, "test_data_used": "none", "probe": L2, "scope": POOLED,
            "view": "+".join(dict.fromkeys(f.view for f in rotated)), "n_components": rotated[0].width,
            "n_experiments": len(np.unique(self.experiments[~self.train])), "fold": self.fold,
        }  # fmt: skip
        return [{**base, "metric": name, "value": float(result[name])} for name in L2_METRICS]

    def _decided(
        self, fractions: Mapping[str, Fraction], records: Mapping[str, Any], ranks: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            "fold": self.fold,
            "training_experiments": sorted(set(self.experiments[self.train])),
            "test_experiments": sorted(set(self.experiments[~self.train])),
            "fraction_rule": self.inner.rule,
            "fraction_perturbations": list(self.inner.perturbations),
            "fractions": {
                key: {
                    "fraction": f.fraction, "sparse_fraction": f.sparse_fraction, "rule": f.rule,
                    "path": {"fraction": list(f.fractions), "auroc": list(f.auroc),
                             "standard_error": list(f.standard_error)},
                } for key, f in fractions.items()
            },
            "probes": records,
            "ranking": ranks,
        }  # fmt: skip
