"""The deletion curve: what is lost, and what of the batch goes away, when batch-bound components are dropped.

The views of one fit that differ by a rotation come in (pca, ica, random rotations), with a ranking of their components
by the batch made on training experiments; held-out AUROC and the decodability of the batch after each deletion go out.
If ICA puts the batch into few components, dropping these removes the batch and leaves the phenotypes; a rotation smears
both over all components. The probe has an L2 penalty here: it cannot see the basis, so all curves start at one point
and part by what was dropped and by nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from phenoica.score.baselines import Features
from phenoica.score.decoding import decode_batches
from phenoica.score.intervals import MIN_EXPERIMENTS, t_interval
from phenoica.score.metrics import auroc
from phenoica.score.names import AUROC, DECODING, DELETION_AUROC, DELETION_DECODING, DELETION_GAIN, bounds
from phenoica.score.rows import ROTATION
from phenoica.score.small_probes import l2_logistic

COLUMNS = (
    "fold", "view", "draw", "view_minus", "metric", "n_components", "n_deleted", "share_deleted", "value", "ci_low",
    "ci_high", "ci_kind", "chance", "n_contrasts", "n_experiments", "reason",
)  # fmt: skip
AREAS = (DELETION_GAIN, DELETION_AUROC, DELETION_DECODING)
COMPARED = ("ica", "pca")  # these minus the mean of the rotations


@dataclass(frozen=True)
class Part:
    """The wells of one contrast: positions in the features, and labels (bool, true is a case)."""

    train: np.ndarray
    train_labels: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray


def capped(part: Part, max_wells: int, seed: Sequence[int]) -> Part:
    """Return the contrast with at most `max_wells` wells of each class in training and test, sampled with `seed`."""
    rng = np.random.default_rng(list(seed))

    def side(wells: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        kept = [
            np.flatnonzero(mask) if mask.sum() <= max_wells else rng.choice(np.flatnonzero(mask), max_wells, False)
            for mask in (labels, ~labels)
        ]
        kept = np.sort(np.concatenate(kept))
        return wells[kept], labels[kept]

    return Part(*side(part.train, part.train_labels), *side(part.test, part.test_labels))


def deleted_counts(k: int, shares: Sequence[float]) -> list[int]:
    """Return how many of `k` components each share deletes: rounded, unique, rising, 0 first, at least one left."""
    return sorted({0, *(min(k - 1, int(np.floor(share * k + 0.5))) for share in shares)})


def curve(
    feature: Features, order: np.ndarray, parts: Sequence[Part], references: np.ndarray, batches: np.ndarray,
    plates: np.ndarray, *, counts: Sequence[int], C: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the points of one view's curve.

    Parameters
    ----------
    feature
        The view, all wells.
    order
        int (k,), components from most to least bound to the batch on training experiments.
    parts
        Contrasts; their AUROC are averaged.
    references
        Positions of held-out reference controls.
    batches, plates
        (n,) of all wells.
    counts
        How many components to drop.
    C
        Inverse penalty of the probe.

    Returns
    -------
    list of dict
        Two rows a point, auroc and experiment_decoding, with the columns of `COLUMNS` that are known here.
    """
    k, rows = len(order), []
    sides = [(feature.at(p.train), feature.at(p.test)) for p in parts]
    controls = feature.at(references)
    for m in counts:
        kept = np.sort(order[m:])
        base = {"view": feature.view, "draw": feature.draw, "n_components": k, "n_deleted": m, "share_deleted": m / k}
        found = [
            auroc(p.test_labels, test[:, kept] @ l2_logistic(train[:, kept], p.train_labels, C)[0])
            for p, (train, test) in zip(parts, sides, strict=True)
        ]
        rows.append({
            **base, "metric": AUROC, "value": float(np.mean(found)) if found else None, "chance": 0.5,
            "n_contrasts": len(found), "reason": None if found else "no_contrast",
        })  # fmt: skip
        decoded = decode_batches(controls[:, kept], batches[references], plates[references])
        rows.append({
            **base, "metric": DECODING, "value": decoded.value, "chance": decoded.chance, "n_contrasts": len(found),
            "reason": decoded.reason,
        })  # fmt: skip
    return rows


def area(shares: Sequence[float], heights: Sequence[float]) -> float:
    """Return the mean height of a curve over its range of shares (trapezoids); the height itself for one point."""
    shares, heights = np.asarray(shares, dtype=np.float64), np.asarray(heights, dtype=np.float64)
    if len(shares) == 1:
        return float(heights[0])
    return float(np.trapezoid(heights, shares) / (shares[-1] - shares[0]))


def areas(points: pd.DataFrame) -> dict[str, float | None]:
    """Return the three areas of one view's curve.

    Parameters
    ----------
    points
        The rows of one view and draw, as from `curve`.

    Returns
    -------
    dict
        deletion_auroc: mean held-out AUROC over the curve; deletion_decoding: mean of (balanced accuracy - chance) /
        (1 - chance); deletion_gain: 2 deletion_auroc - 1 minus deletion_decoding: phenotype kept minus batch kept, both
        0 by chance and 1 at best. None where a point has no value.
    """
    found: dict[str, float | None] = {}
    for name, metric in ((DELETION_AUROC, AUROC), (DELETION_DECODING, DECODING)):
        rows = points[points["metric"] == metric].sort_values("share_deleted")
        heights = rows["value"].to_numpy(np.float64)
        if metric == DECODING:
            chance = rows["chance"].to_numpy(np.float64)
            heights = (heights - chance) / (1 - chance)
        found[name] = area(rows["share_deleted"], heights) if len(rows) and np.isfinite(heights).all() else None
    known = None not in found.values()
    found[DELETION_GAIN] = 2 * found[DELETION_AUROC] - 1 - found[DELETION_DECODING] if known else None
    return found


def area_rows(points: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the areas of one fold: of each view (rotation: the mean over draws), and of ica and pca minus rotation.

    Parameters
    ----------
    points
        All curves of a fold.

    Returns
    -------
    list of dict
        With view, view_minus, metric, value, and the reason of a missing value.
    """
    by_view: dict[str, list[dict[str, float | None]]] = {}
    for (view, _), own in points.groupby(["view", "draw"], dropna=False, sort=False):
        by_view.setdefault(view, []).append(areas(own))
    reasons = {m: _reason(points[points["metric"].isin(used)]) for m, used in _USED.items()}
    means = {
        view: {m: _mean([f[m] for f in found]) for m in AREAS} for view, found in by_view.items()
    }  # fmt: skip
    rows = [
        {"view": view, "view_minus": None, "metric": m, "value": value, "reason": reasons[m] if value is None else None}
        for view, found in means.items() for m, value in found.items()
    ]  # fmt: skip
    for view in (v for v in COMPARED if v in means and ROTATION in means):
        for m in AREAS:
            first, second = means[view][m], means[ROTATION][m]
            known = first is not None and second is not None
            rows.append({
                "view": view, "view_minus": ROTATION, "metric": m, "value": first - second if known else None,
                "reason": None if known else reasons[m],
            })  # fmt: skip
    return rows


_USED = {DELETION_GAIN: (AUROC, DECODING), DELETION_AUROC: (AUROC,), DELETION_DECODING: (DECODING,)}


def _mean(values: Sequence[float | None]) -> float | None:
    return None if not values or None in values else float(np.mean(values))


def _reason(rows: pd.DataFrame) -> str | None:
    known = sorted(set(rows.loc[rows["reason"].notna(), "reason"]))
    return ";".join(known) or None


def over_folds(folds: Sequence[pd.DataFrame], confidence: float) -> pd.DataFrame:
    """Return the table `score/deletion.parquet`: the rows of the folds, then those over folds (fold -1).

    Parameters
    ----------
    folds
        Points and areas of each fold, `COLUMNS`.
    confidence
        Level of the intervals.

    Returns
    -------
    DataFrame
        `COLUMNS`. Folds weigh alike. Areas carry a t interval over folds (Nadeau and Bengio's variance) where their
        folds have four test experiments together, points none; a fold without a value leaves its reason.
    """
    rows = pd.concat(folds, ignore_index=True)
    joined = []
    keys = ["view", "draw", "view_minus", "metric", "n_components", "n_deleted", "share_deleted"]
    for key, group in rows.groupby(keys, dropna=False, sort=False):
        known = group[group["value"].notna()]
        row: dict[str, Any] = dict(zip(keys, key, strict=True))
        experiments = int(known["n_experiments"].sum())
        row.update({
            "fold": -1, "value": known["value"].mean() if len(known) else None, "reason": _reason(group),
            "chance": known["chance"].mean(), "n_contrasts": known["n_contrasts"].sum(), "n_experiments": experiments,
        })  # fmt: skip
        if len(known) and row["metric"] in AREAS:
            row.update(_interval(row, known, experiments, confidence))
        joined.append(row)
    return table([*rows.to_dict("records"), *joined])


def _interval(row: Mapping[str, Any], known: pd.DataFrame, experiments: int, confidence: float) -> dict[str, Any]:
    if experiments < MIN_EXPERIMENTS:
        why = "under_4_experiments"
        return {"reason": ";".join(filter(None, [row["reason"], why]))}
    limits = bounds(row["metric"], difference=not pd.isna(row["view_minus"]))
    found = t_interval(known["value"].to_numpy(), np.ones(len(known)), confidence, bounds=limits)
    reason = ";".join(filter(None, [row["reason"], found.reason])) or None
    return {"ci_low": found.low, "ci_high": found.high, "ci_kind": found.kind, "reason": reason}


def table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows as a frame with exactly `COLUMNS`."""
    frame = pd.DataFrame(list(rows), columns=list(COLUMNS))
    for name in COLUMNS:
        if name in ("fold", "draw", "n_components", "n_deleted", "n_contrasts", "n_experiments"):
            frame[name] = frame[name].astype("Int64")
        elif name in ("share_deleted", "value", "ci_low", "ci_high", "chance"):
            frame[name] = frame[name].astype("float64")
        else:
            frame[name] = frame[name].astype(object).where(frame[name].notna(), None)
    return frame
