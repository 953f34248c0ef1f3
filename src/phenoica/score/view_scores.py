"""The scores of whole views in one fold: replicates, decodability of the batch, best components, deletion curve.

They need a fold's views and its contrasts but no L1 probe, so they are a job of their own beside `score_fold`. What
comes in is the same; out come rows of `schema.SCORE_COLUMNS`, the points of the deletion curve, and what the training
side decided (component rankings and the contrasts of the curve), which no held-out well has touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.disentangle.components import reference_omega2
from phenoica.progress import track
from phenoica.score import deletion, names
from phenoica.score.baselines import Features
from phenoica.score.best_components import best_components_auroc, component_ranking
from phenoica.score.contrasts import Contrast, Split
from phenoica.score.decoding import decode_batches
from phenoica.score.fold import FoldScorer
from phenoica.score.intervals import MIN_EXPERIMENTS, t_interval, weighted_mean
from phenoica.score.metrics import ranking
from phenoica.score.replicates import CROSS, SAME, centred, chosen_wells, mean_average_precision, replicate_tests
from phenoica.score.rows import (
    ALL,
    IN_DISTRIBUTION,
    L2,
    MACRO,
    OVER_FOLDS,
    POOLED,
    ROTATED,
    ROTATION,
    WITHIN,
    Grouped,
    table,
)

DECODING_CONTRAST = "experiment_of_reference"  # reference controls of one experiment against those of the others
DELETION_CONTRAST = "deletion"
_KEY = ["contrast", "perturbation", "view", "test_data_used", "probe", "metric", "scope", "draw", "view_minus"]


class ViewScorer:
    """Scores the views of one fold as wholes.

    Parameters
    ----------
    scorer
        The fold's wells and contrasts; its probes are not used.
    features
        Views with all rotation draws; no baselines.
    """

    def __init__(self, scorer: FoldScorer, features: Sequence[Features]):
        self.scorer, self.features = scorer, list(features)
        self.obs, self.config, self.settings = scorer.obs, scorer.config, scorer.config["score"]
        self.test = ~scorer.train
        self.reference = (self.obs[schema.CONTROL_ROLE].astype(str) == schema.REFERENCE).to_numpy()
        rotations = [f.key for f in self.features if f.draw is not None]
        self.tested = [f for f in self.features if f.draw is None or f.draw < self.settings["rotation_draws"]]
        # a rotation changes no angle and no distance: its replicates score exactly as those of pca
        self.unrotated = [f for f in self.features if f.key not in rotations]

    def score(self) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, Any]]:
        """Return the fold's rows, the points and areas of its deletion curve, and what training decided."""
        rows: list[dict[str, Any]] = []
        for feature in track(self.unrotated, len(self.unrotated), f"replicates of fold {self.scorer.fold}", "view"):
            rows += self._replicate_rows(feature)
        chosen: dict[str, dict[str, list[int]]] = {}
        for feature in track(self.tested, len(self.tested), f"best components of fold {self.scorer.fold}", "view"):
            rows += self._decoding_rows(feature)
            found, chosen[feature.key] = self._best_rows(feature)
            rows += found
            feature.release()
        points, decided = self._deletion()
        rows += self._area_rows(points)
        decided = {"fold": self.scorer.fold, "best_components": chosen, "deletion": decided}
        return table(rows, schema.SCORE_COLUMNS), points, decided

    def _base(self, feature: Features, **known: Any) -> dict[str, Any]:
        return {
            "view": feature.view, "draw": feature.draw, "test_data_used": feature.test_data_used,
            "probe": names.NO_PROBE, "scope": POOLED, "n_components": feature.width,
            "fold": self.scorer.fold, "n_case": 0, "n_reference": 0,
            "n_experiments": len(np.unique(self.scorer.experiments[self.test])), **known,
        }  # fmt: skip

    def _perturbations(self) -> Iterator[tuple[Contrast, Split]]:
        """Yield the contrasts with reference controls, also those that no probe can test."""
        for contrast, part in self.scorer.splits:
            if self.reference[part.test[~part.test_labels]].all():
                yield contrast, part

    def _seed(self, contrast: Contrast) -> list[int]:
        """Return a seed that follows from the contrast, not from the order of the work, and is that of every view."""
        text = f"{contrast.name}/{contrast.perturbation}".encode()
        return [self.config["seed"], self.scorer.fold, *np.frombuffer(text, dtype=np.uint8).tolist()]

    def _replicate_rows(self, feature: Features) -> list[dict[str, Any]]:
        test = np.flatnonzero(self.test)
        values = centred(feature.at(test), self.obs.iloc[test], self.config["plates"]["batch_key"])
        place = {well: i for i, well in enumerate(test.tolist())}
        rows: list[dict[str, Any]] = []
        ranked: dict[str, tuple[dict[str, Any], np.ndarray, np.ndarray]] = {}
        used = max(feature.test_data_used, "controls", key=schema.TEST_DATA_USED.index)  # centred on fit controls
        for contrast, part in self._perturbations():
            case, reference = np.zeros(len(self.obs), dtype=bool), np.zeros(len(self.obs), dtype=bool)
            case[part.test[part.test_labels]] = True
            reference[part.test[~part.test_labels]] = True
            cases, references = chosen_wells(
                case, reference, self.scorer.plates, self.settings["max_replicates"], self._seed(contrast)
            )
            base = self._base(
                feature, contrast=contrast.name, perturbation=contrast.perturbation, test_data_used=used,
                n_case=len(cases), n_reference=len(references),
                n_experiments=len(np.unique(self.scorer.experiments[cases])),
            )  # fmt: skip
            wells = np.array([place[w] for w in [*cases.tolist(), *references.tolist()]], dtype=np.int64)
            reason = self._no_replicates(cases, references, values[wells])
            if reason is not None:
                rows += [{**base, "metric": name, "reason": reason} for name in names.REPLICATES]
                continue
            labels = np.arange(len(wells)) < len(cases)
            plates = self.scorer.plates[test][wells]
            found = replicate_tests(
                values[wells], labels, plates, self.settings["relabellings"], self._seed(contrast)
            )  # fmt: skip
            for name, result in found.items():
                rows.append({**base, "metric": name, "value": result.value})
                rows.append({**base, "metric": f"{name}_chance", "value": result.chance})
                rows.append({**base, "metric": f"{name}_p", "value": result.p})
            ranked[f"{contrast.name}/{contrast.perturbation}"] = (base, wells[labels], wells[~labels])
        return rows + self._precision_rows(values, test, ranked)

    def _no_replicates(self, cases: np.ndarray, references: np.ndarray, values: np.ndarray) -> str | None:
        if not len(references):
            return "no_reference_on_plate"
        if len(cases) < 2:
            return "singleton"
        # centring leaves NaN where a batch has no fit control; a view that is finite has no other way to get one
        return None if np.isfinite(values).all() else "no_fit_controls"

    def _precision_rows(
        self, values: np.ndarray, test: np.ndarray, ranked: Mapping[str, tuple[dict[str, Any], np.ndarray, np.ndarray]]
    ) -> list[dict[str, Any]]:
        """Return the mAP of all perturbations: one call of copairs for each kind of pairs."""
        if not ranked:
            return []
        references = np.unique(np.concatenate([wells for _, _, wells in ranked.values()]))
        cases = [(name, well) for name, (_, wells, _) in ranked.items() for well in wells]
        wells = np.array([*(well for _, well in cases), *references.tolist()], dtype=np.int64)
        perturbations = np.array([*(name for name, _ in cases), *[None] * len(references)], dtype=object)
        rows = []
        for kind in (SAME, CROSS):
            found = mean_average_precision(
                values[wells], perturbations, self.scorer.experiments[test][wells], self.scorer.plates[test][wells],
                kind=kind, same_plate=self.settings["same_plate_pairs"],
            )  # fmt: skip
            for name, (base, _, _) in ranked.items():
                result, metric = found[name], f"map_{kind}"
                scoped = {**base, "scope": WITHIN if kind == SAME else POOLED, "n_case": result.n_wells}
                why = None if result.value is not None else f"no_{kind}_pairs"
                parts = {"": result.value, "_chance": result.chance, "_normalised": result.normalised}
                rows += [{**scoped, "metric": metric + end, "value": v, "reason": why} for end, v in parts.items()]
                rows.append({**scoped, "metric": f"{metric}_singletons", "value": float(result.n_singletons)})
        return rows

    def _decoding_rows(self, feature: Features) -> list[dict[str, Any]]:
        rows = []
        for scope, side in ((POOLED, self.test), (IN_DISTRIBUTION, self.scorer.train)):
            wells = np.flatnonzero(side & self.reference)
            found = decode_batches(feature.at(wells), self.scorer.batches[wells], self.scorer.plates[wells])
            base = self._base(
                feature, contrast=DECODING_CONTRAST, perturbation=ALL, scope=scope, n_reference=found.n_wells,
                n_experiments=found.n_batches, reason=found.reason,
            )  # fmt: skip
            rows.append({**base, "metric": names.DECODING, "value": found.value})
            rows.append({**base, "metric": names.DECODING_CHANCE, "value": found.chance,
                         "reason": found.reason if found.chance is None else None})  # fmt: skip
        return rows

    def _best_rows(self, feature: Features) -> tuple[list[dict[str, Any]], dict[str, list[int]]]:
        rows, chosen, numbers = [], {}, self.settings["best_components"]
        for contrast, part in self.scorer.splits:
            base = self._base(
                feature, contrast=contrast.name, perturbation=contrast.perturbation, probe=L2,
                n_case=int(part.test_labels.sum()), n_reference=int((~part.test_labels).sum()),
                n_experiments=len(np.unique(self.scorer.experiments[part.test])), reason=part.reason,
            )  # fmt: skip
            X = feature.values
            if part.reason is None and not np.isfinite(X[np.r_[part.train, part.test]]).all():
                base["reason"] = "missing_values"
            if base["reason"] is None:
                order = component_ranking(X[part.train], part.train_labels)
                chosen[f"{contrast.name}/{contrast.perturbation}"] = order[: max(numbers)].tolist()
            for k in numbers:
                row = {**base, "metric": names.best_components(k)}
                if base["reason"] is None and k > len(order):
                    row["reason"] = "few_components"
                elif base["reason"] is None:
                    row["value"] = best_components_auroc(
                        X[part.train], part.train_labels, X[part.test], part.test_labels, order, k,
                        self.settings["l2_C"],
                    )  # fmt: skip
                rows.append(row)
        return rows, chosen

    def _deletion(self) -> tuple[pd.DataFrame, dict[str, Any]]:
        """Return points and areas of the curves, and the order of deletion with the contrasts it is measured on."""
        chosen = [f for f in self.features if f.view in ROTATED]
        settings, fold, train = self.settings["deletion"], self.scorer.fold, np.flatnonzero(self.scorer.train)
        parts, contrasts = self._deletion_contrasts(chosen)
        references = np.flatnonzero(self.test & self.reference)
        counts_known = len(np.unique(self.scorer.batches[train][self.reference[train]])) >= 2
        points, order_of = [], {}
        for feature in track(chosen, len(chosen), f"deletion curves of fold {fold}", "view"):
            if not counts_known:
                continue
            trained = np.flatnonzero(self.scorer.train & self.reference)
            batch = reference_omega2(
                feature.at(trained), self.obs.iloc[trained], self.config["plates"]["batch_key"]
            )  # fmt: skip
            order = ranking(batch)
            order_of[feature.key] = order.tolist()
            counts = deletion.deleted_counts(len(order), settings["shares"])
            points += deletion.curve(
                feature, order, parts, references, self.scorer.batches, self.scorer.plates, counts=counts,
                C=self.settings["l2_C"],
            )  # fmt: skip
        experiments = len(np.unique(self.scorer.experiments[self.test]))
        known = {"fold": fold, "n_experiments": experiments}
        if points:
            frame = deletion.table([{**p, **known} for p in points])
            joined = deletion.area_rows(frame)
        else:  # one training batch has no batch-bound component; no rotated view has no curve
            frame, reason = deletion.table([]), "one_batch" if chosen else "no_rotated_view"
            joined = [{"view": "ica", "view_minus": ROTATION, "metric": m, "value": None, "reason": reason}
                      for m in deletion.AREAS]  # fmt: skip
        rows = [*frame.to_dict("records"), *({**row, **known, "n_contrasts": len(parts)} for row in joined)]
        return deletion.table(rows), {"order": order_of, "contrasts": contrasts}

    def _deletion_contrasts(self, features: Sequence[Features]) -> tuple[list[deletion.Part], list[str]]:
        """Return the contrasts of the curve: those in most experiments first, at most `max_contrasts`."""
        settings = self.settings["deletion"]
        found = []
        for contrast, part in self._perturbations():
            if part.reason is None and contrast.rule.is_plain:
                wide = len(np.unique(self.scorer.experiments[part.train[part.train_labels]]))
                found.append((-wide, contrast.name, contrast.perturbation, contrast, part))
        found.sort(key=lambda item: item[:3])
        parts, labels = [], []
        for _, name, perturbation, contrast, part in found[: settings["max_contrasts"]]:
            whole = deletion.Part(part.train, part.train_labels, part.test, part.test_labels)
            small = deletion.capped(whole, settings["max_wells"], self._seed(contrast))
            if all(np.isfinite(f.at(np.r_[small.train, small.test])).all() for f in features):
                parts.append(small)
                labels.append(f"{name}/{perturbation}")
        return parts, labels

    def _area_rows(self, points: pd.DataFrame) -> list[dict[str, Any]]:
        """Return the areas of the deletion curve as rows of the table of scores."""
        rows = points[points["metric"].isin(deletion.AREAS)].to_dict("records")
        width = {f.view: f.width for f in self.features}
        return [
            {
                "contrast": DELETION_CONTRAST, "perturbation": ALL, "view": row["view"], "test_data_used": "none",
                "probe": L2, "metric": row["metric"], "scope": POOLED, "n_components": width.get(row["view"]),
                "draw": None, "view_minus": row["view_minus"], "value": row["value"], "fold": self.scorer.fold,
                "n_case": 0, "n_reference": 0, "n_experiments": row["n_experiments"], "reason": row["reason"],
            } for row in rows
        ]  # fmt: skip


def over_folds(folds: Sequence[pd.DataFrame], confidence: float) -> pd.DataFrame:
    """Return the rows of the folds with their macro averages, then those over folds (fold -1).

    Parameters
    ----------
    folds
        As from `ViewScorer.score`, one a fold.
    confidence
        Level of the intervals.

    Returns
    -------
    DataFrame
        `schema.SCORE_COLUMNS`. AUROC of best components weigh folds by their case-reference pairs, other metrics weigh
        them alike. A p value over folds is Fisher's combination of theirs (folds hold different experiments), counts
        are summed. Perturbation "macro" is the mean over perturbations, each weighing alike; p values have none. An
        interval (t over folds, as of `intervals`) is given from four test experiments on, to values but not to
        chance levels, counts and p values. The rotation with draw null is the mean over draws.
    """
    rows = pd.concat([_with_rotation_mean(frame) for frame in folds], ignore_index=True)
    single = table(_macro(rows), schema.SCORE_COLUMNS)
    joined = _joined(rows, confidence, {})
    centres = {_id(row): row["value"] for row in _macro(table(joined, schema.SCORE_COLUMNS))}
    joined += _joined(single, confidence, centres)
    return table([*rows.to_dict("records"), *single.to_dict("records"), *joined], schema.SCORE_COLUMNS)


def _id(row: Mapping[str, Any]) -> tuple:
    return tuple(None if pd.isna(row[c]) else row[c] for c in _KEY)


def _has_interval(metric: str) -> bool:
    return metric not in (*names.P_VALUES, *names.COUNTS) and not metric.endswith("_chance")


def _with_rotation_mean(frame: pd.DataFrame) -> pd.DataFrame:
    """Add, for every score of rotation draws, their mean with draw null."""
    draws = Grouped(frame[frame["draw"].notna()], [c for c in _KEY if c != "draw"])
    rows = []
    for group in draws.groups:
        known = draws.known(group)
        value = {"value": draws.value[known].mean(), "reason": None} if len(known) else {}
        rows.append({**draws.records[group[0]], "draw": None, **value})
    return pd.concat([frame, table(rows, frame.columns)], ignore_index=True) if rows else frame


def _macro(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Average every contrast of single perturbations over them, fold by fold; counts are summed."""
    single = rows[(rows["perturbation"] != ALL) & ~rows["metric"].isin(names.P_VALUES)]
    columns = Grouped(single, [c for c in _KEY if c != "perturbation"] + ["fold"])
    result = []
    for group in columns.groups:
        key, known = columns.key(group), columns.known(group)
        values = columns.value[known]
        value = None if not len(known) else values.sum() if key["metric"] in names.COUNTS else values.mean()
        n = {c: counts[known] for c, counts in columns.counts.items()}
        result.append({
            **key, "perturbation": MACRO, "value": value, "n_case": n["n_case"].sum(),
            "n_reference": n["n_reference"].max(initial=0), "n_experiments": n["n_experiments"].max(initial=0),
            "reason": None if len(known) else columns.reasons(group),
        })  # fmt: skip
    return result


def _joined(rows: pd.DataFrame, confidence: float, centres: Mapping[tuple, float]) -> list[dict[str, Any]]:
    """Return the rows over folds; `centres` are those of macro averages, which are made of perturbations over folds."""
    columns, result = Grouped(rows, _KEY), []
    for group in columns.groups:
        key, known = columns.key(group), columns.known(group)
        n = {c: int(counts[known].sum()) for c, counts in columns.counts.items()}
        row = {**key, **n, "fold": OVER_FOLDS, "reason": columns.reasons(group)}
        if len(known):
            weights = (columns.counts["n_case"] * columns.counts["n_reference"])[known].astype(np.float64)
            row |= _over_folds(row, columns.value[known], weights, confidence, centres.get(_id(row)))
        result.append(row)
    return result


def _over_folds(
    row: Mapping[str, Any], values: np.ndarray, pairs: np.ndarray, confidence: float, centre: float | None
) -> dict[str, Any]:
    """Return value, interval and reason of one score over folds."""
    metric = row["metric"]
    if metric in names.P_VALUES:
        return {"value": _fisher(values)}
    if metric in names.COUNTS:
        return {"value": float(values.sum())}
    weights = pairs if names.is_auroc(metric) and pairs.sum() > 0 else np.ones(len(values))
    if not _has_interval(metric) or row["n_experiments"] < MIN_EXPERIMENTS:
        why = "under_4_experiments" if _has_interval(metric) else None
        value = weighted_mean(values, weights) if centre is None else centre
        return {"value": value, "reason": ";".join(filter(None, [row["reason"], why])) or None}
    limits = names.bounds(metric, difference=row["view_minus"] is not None)
    found = t_interval(values, weights, confidence, bounds=limits, centre=centre)
    return {
        "value": found.value, "ci_low": found.low, "ci_high": found.high, "ci_kind": found.kind,
        "reason": ";".join(filter(None, [row["reason"], found.reason])) or None,
    }  # fmt: skip


def _fisher(p_values: np.ndarray) -> float:
    """Return Fisher's combination of independent p values."""
    from scipy.stats import combine_pvalues

    return float(combine_pvalues(p_values, method="fisher").pvalue) if len(p_values) > 1 else float(p_values[0])
