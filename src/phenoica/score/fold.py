"""The scores of one fold: probes trained on its training experiments and measured on its held-out ones.

Features of all wells, their metadata and folds come in. Out come the rows of the fold, and apart from them everything
that the training side decided (lambda fractions, lambdas, component rankings), which no held-out well can have touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.disentangle.components import component_effects, reference_omega2
from phenoica.errors import ControlsError, ScoreError
from phenoica.progress import track
from phenoica.score import metrics
from phenoica.score.baselines import BASELINES, PERMUTED, Features, permute_within
from phenoica.score.contrasts import POSITIVE_CUTTING, Contrast, Split, build, split
from phenoica.score.intervals import delong_variance
from phenoica.score.probe_rows import path_rows, position_tree_rows, precision_rows, sparsity_rows
from phenoica.score.probes import MAX_INNER_GROUPS, Fraction, InnerSplits, choose_fraction, fit_l1, fit_l2, l2_control

POOLED, WITHIN = schema.SCOPES[:2]
L1, L2, NO_PROBE = "l1", "l2", "none"
AUROC, HOYER = "auroc", "hoyer"
CONCENTRATION = ("concentration_share", "concentration_corrected", "purity", "participation", "overlap")
L2_METRICS = ("max_decision_difference", "max_auroc_difference", "holds")

CONCENTRATION_CONTRAST = "all_vs_reference"  # effects of all perturbations together
L2_CONTRAST = "l2_control"
ALL = "all"  # the perturbation of these two
ROTATED = ("pca", "rotation", "ica")  # views of one fit that differ by an orthogonal matrix

# a fold's table has two more columns than the final one: pairs compared, and the AUROC's plate-stratified variance
PAIRS, VARIANCE = "pairs", "variance"
FOLD_COLUMNS = (*schema.SCORE_COLUMNS, PAIRS, VARIANCE)
_INTEGERS = ("n_components", "draw", "n_case", "n_reference", "n_experiments", "fold", PAIRS)
_FLOATS = ("value", "ci_low", "ci_high", VARIANCE)


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """Return rows as a frame with exactly `columns`: nullable integers, float64 numbers, text or None elsewhere."""
    frame = pd.DataFrame(list(rows), columns=list(columns))
    for name in frame.columns:
        if name in _INTEGERS:
            frame[name] = frame[name].astype("Int64")
        elif name in _FLOATS:
            frame[name] = frame[name].astype("float64")
        else:
            frame[name] = frame[name].astype(object).where(frame[name].notna(), None)
    return frame


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
        contrasts = build(obs)
        self.splits: list[tuple[Contrast, Split]] = []
        for contrast in contrasts:
            found = split(contrast, obs, self.batches, folds, fold, self.min_wells)
            if found is not None:
                self.splits.append((contrast, found))
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
        fractions = self._fractions(probed)
        rows, probes = [], {}
        for feature in track(probed, len(probed), f"score fold {self.fold}", "view"):
            probes[feature.key] = {}
            for contrast, part in self.splits:
                found, record = self._l1_rows(feature, contrast, part, fractions[feature.key], self._width(probed))
                rows += found
                if record is not None:
                    probes[feature.key][f"{contrast.name}/{contrast.perturbation}"] = record
        rows += position_tree_rows(self)
        rows += path_rows(probes, probed, self.fold, len(set(self.experiments[~self.train])))
        rows += self._l2_rows([f for f in probed if f.view in ROTATED])
        concentration, ranks = self._concentration_rows([f for f in features if f.view in ROTATED])
        return table(rows + concentration, FOLD_COLUMNS), self._decided(fractions, probes, ranks)

    def _fractions(self, probed: Sequence[Features]) -> dict[str, Fraction]:
        """Choose each view's lambda fraction; permuted labels take that of the view whose features they share."""
        candidates = self.config["score"]["lambda_fractions"]
        chosen: dict[str, Fraction] = {}
        of_values: dict[int, Fraction] = {}
        for feature in track(probed, len(probed), f"choose lambda of fold {self.fold}", "view"):
            if id(feature.values) not in of_values:
                of_values[id(feature.values)] = choose_fraction(
                    feature.values, _finite_parts(self.inner, feature.values), candidates
                )
            chosen[feature.key] = of_values[id(feature.values)]
        return chosen

    def _width(self, probed: Sequence[Features]) -> int | None:
        """Return the width at which sparsity is compared: that of the rotated views."""
        widths = [f.values.shape[1] for f in probed if f.view in ROTATED]
        return widths[0] if widths else None

    def _base(self, feature: Features, contrast: Contrast, part: Split) -> dict[str, Any]:
        return {
            "contrast": contrast.name, "perturbation": contrast.perturbation, "view": feature.view,
            "test_data_used": feature.test_data_used, "n_components": feature.values.shape[1], "draw": feature.draw,
            "n_case": int(part.test_labels.sum()), "n_reference": int((~part.test_labels).sum()),
            "n_experiments": len(np.unique(self.experiments[part.test])), "fold": self.fold, "reason": part.reason,
        }  # fmt: skip

    def _l1_rows(
        self, feature: Features, contrast: Contrast, part: Split, fraction: Fraction, width: int | None
    ) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        base = {**self._base(feature, contrast, part), "probe": L1, "metric": AUROC}
        nothing = [{**base, "scope": scope} for scope in (POOLED, WITHIN)]
        if part.reason is not None:
            return nothing, None
        if not np.isfinite(feature.values[part.train]).all():
            return [{**row, "reason": "missing_values"} for row in nothing], None
        train_labels, test_labels = part.train_labels, part.test_labels
        if feature.view == PERMUTED:
            train_labels, test_labels = self._permuted(contrast, part)
        X = feature.values[part.train]
        probe = fit_l1(X, train_labels, fraction.fraction)
        record = {
            "lambda": probe.penalty, "lambda_max": probe.lambda_max, "non_zero": int((probe.weights != 0).sum()),
            "converged": bool(probe.converged),
        }  # fmt: skip
        rows = self._sparsity_rows(base, feature, X, train_labels, fraction, width)
        if not np.isfinite(feature.values[part.test]).all():
            return rows + [{**row, "reason": "missing_values"} for row in nothing], record
        if not probe.weights.any():
            base["reason"] = "no_weights"
        scores = probe.decision(feature.values[part.test])
        rows += precision_rows(base, test_labels, scores)
        return rows + self._auroc_rows(base, part, test_labels, scores), record

    def _permuted(self, contrast: Contrast, part: Split) -> tuple[np.ndarray, np.ndarray]:
        """Permute labels within plate; the seed follows from the contrast, not from the order of the work."""
        name = np.frombuffer(f"{contrast.name}/{contrast.perturbation}".encode(), dtype=np.uint8)
        rng = np.random.default_rng([self.config["seed"], self.fold, *name.tolist()])
        return (
            permute_within(part.train_labels, self.plates[part.train], rng),
            permute_within(part.test_labels, self.plates[part.test], rng),
        )

    def _sparsity_rows(
        self, base: Mapping[str, Any], feature: Features, X: np.ndarray, labels: np.ndarray, fraction: Fraction,
        width: int | None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        if feature.view in BASELINES or feature.values.shape[1] != width:
            return []
        return sparsity_rows(base, fit_l1(X, labels, fraction.sparse_fraction).weights)

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

    def _l2_rows(self, rotated: Sequence[Features]) -> list[dict[str, Any]]:
        """Return the L2 probes' AUROC, and the control that they agree."""
        rows: list[dict[str, Any]] = []
        decisions: dict[str, list[np.ndarray]] = {f.key: [] for f in rotated}
        tested = [(contrast, part) for contrast, part in self.splits if part.reason is None]
        for feature in rotated:
            for contrast, part in tested:
                probe = fit_l2(feature.values[part.train], part.train_labels, self.config["score"]["l2_C"])
                scores = probe.decision(feature.values[part.test])
                decisions[feature.key].append(scores)
                base = {**self._base(feature, contrast, part), "probe": L2, "metric": AUROC}
                rows += self._auroc_rows(base, part, part.test_labels, scores)[:1]
        if len(rotated) < 2 or not tested:
            return rows
        result = l2_control(decisions, [part.test_labels for _, part in tested])
        base = {
            "contrast": L2_CONTRAST, "perturbation": ALL, "view": "+".join(dict.fromkeys(f.view for f in rotated)),
            "test_data_used": "none", "probe": L2, "scope": POOLED, "n_components": rotated[0].values.shape[1],
            "n_experiments": len(np.unique(self.experiments[~self.train])), "fold": self.fold,
        }  # fmt: skip
        return rows + [{**base, "metric": name, "value": float(result[name])} for name in L2_METRICS]

    def _concentration_rows(
        self, rotated: Sequence[Features]
    ) -> tuple[list[dict[str, Any]], dict[str, dict[str, list[int]]]]:
        """Rank components on training experiments, measure how concentrated the effects are on held-out ones."""
        rows, ranks = [], {}
        train, test = np.flatnonzero(self.train), np.flatnonzero(~self.train)
        batch_key, share = self.config["plates"]["batch_key"], self.config["score"]["concentration_share"]
        reference = (self.obs[schema.CONTROL_ROLE] == schema.REFERENCE).to_numpy()
        n_batches = len(np.unique(self.batches[train][reference[train]]))
        batch_known = 2 <= n_batches < int(reference[train].sum())
        for feature in rotated:
            Z_train, obs_train = feature.values[train], self.obs.iloc[train]
            biology = component_effects(Z_train, obs_train).biology
            batch = reference_omega2(Z_train, obs_train, batch_key) if batch_known else None
            # a ranking of zeros is the order of the components and says nothing
            by_biology = metrics.ranking(biology) if biology.any() else None
            by_batch = metrics.ranking(batch) if batch is not None and batch.any() else None
            ranks[feature.key] = {
                "biology": [] if by_biology is None else by_biology.tolist(),
                "batch": [] if by_batch is None else by_batch.tolist(),
            }
            n = feature.values.shape[1]
            count = metrics.top_count(n, share)
            try:
                effects = component_effects(feature.values[test], self.obs.iloc[test])
            except ControlsError:  # too few held-out reference controls, or no case beside them
                n_case, found = 0, {name: (None, "no_reference") for name in CONCENTRATION}
            else:
                n_case = int(effects.n_case.sum())
                tops = (None if order is None else order[:count] for order in (by_biology, by_batch))
                found = concentration(effects.biology, batch, *tops)
            base = {
                "contrast": CONCENTRATION_CONTRAST, "perturbation": ALL, "view": feature.view, "draw": feature.draw,
                "test_data_used": feature.test_data_used, "probe": NO_PROBE, "scope": POOLED, "n_components": n,
                "n_case": n_case, "fold": self.fold,
                "n_reference": int(reference[test].sum()),
                "n_experiments": len(np.unique(self.experiments[test])),
            }  # fmt: skip
            for name, (value, reason) in found.items():
                rows.append({**base, "metric": name, "value": value, "reason": reason})
        return rows, ranks

    def _decided(
        self, fractions: Mapping[str, Fraction], probes: Mapping[str, Any], ranks: Mapping[str, Any]
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
            "probes": probes,
            "ranking": ranks,
        }  # fmt: skip


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
        case, reference = (mask & train for mask in contrast.masks(obs, batches))
        if contrast.name != POSITIVE_CUTTING and case.any():
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
    """Leave out the inner splits that read a well with a missing value."""
    finite = np.isfinite(values).all(axis=1)
    groups = [[p for p in group if finite[p[0]].all() and finite[p[2]].all()] for group in inner.groups]
    groups = [group for group in groups if group]
    return InnerSplits(inner.rule if groups else "default", inner.perturbations, tuple(groups))
