"""Do replicates of a perturbation look alike, and unlike controls? Scores without a probe, with nulls by relabelling.

Features of held-out wells come in, centred on the fit controls of their batch; consistency (mean pairwise cosine),
magnitude (energy distance, Szekely and Rizzo 2013) and mean average precision (Kalinin 2024, computed by copairs) go
out. References are reference controls on the plates of the cases. The null of consistency and magnitude relabels cases
and references within each plate: plate effects stay in it, so they cannot pass for a phenotype.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.errors import ScoreError
from phenoica.score.metrics import chance_average_precision

SAME, CROSS = "same_experiment", "cross_experiment"


def centred(values: np.ndarray, obs: pd.DataFrame, batch_key: str) -> np.ndarray:
    """Subtract from every well the mean of its batch's fit controls.

    A cosine needs an origin; this one is "no perturbation". The wells of a batch without a fit control become NaN, so
    that their scores carry a reason.

    Parameters
    ----------
    values
        float (n, d).
    obs
        (n,) metadata.
    batch_key
        obs column of the batch.

    Returns
    -------
    ndarray
        float64 (n, d).
    """
    out = np.array(values, dtype=np.float64)
    fit = (obs[schema.CONTROL_ROLE].astype(str) == schema.FIT).to_numpy()
    batches = obs[batch_key].astype(str).to_numpy()
    for batch in np.unique(batches):
        inside = batches == batch
        controls = inside & fit
        out[inside] -= out[controls].mean(axis=0) if controls.any() else np.nan
    return out


def chosen_wells(
    case: np.ndarray, reference: np.ndarray, plates: np.ndarray, max_cases: int, seed: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the cases and of the references of their plates.

    Parameters
    ----------
    case, reference
        bool (n,).
    plates
        (n,).
    max_cases
        More cases than this are sampled down, so that one frequent perturbation does not take all the time.
    seed
        Seed of the sample.

    Returns
    -------
    cases, references : ndarray
        int, sorted. Cases on plates without a reference, and references on plates without a case, are left out.
    """
    cases, references = np.flatnonzero(case), np.flatnonzero(reference)  # few of all wells, whose plates are text
    cases = cases[np.isin(plates[cases], plates[references])]
    if len(cases) > max_cases:
        cases = np.sort(np.random.default_rng(seed).choice(cases, max_cases, replace=False))
    return cases, references[np.isin(plates[references], plates[cases])]


def relabellings(labels: np.ndarray, plates: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """Return bool (n, wells): `labels` shuffled within each plate, n times; every plate keeps its number of cases."""
    out = np.empty((n, len(labels)), dtype=bool)
    for plate in np.unique(plates):
        inside = np.flatnonzero(plates == plate)
        order = rng.random((n, len(inside))).argsort(axis=1)
        out[:, inside] = order < int(labels[inside].sum())
    return out


def mean_cosines(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the mean cosine over all pairs of labelled wells, one number a labelling.

    Parameters
    ----------
    values
        float (n, d); a well of length 0 has cosine 0 with all others.
    labels
        bool (b, n), at least two labelled wells each.

    Returns
    -------
    ndarray
        float64 (b,), in [-1, 1].
    """
    values, labels = _finite(values), np.atleast_2d(labels).astype(np.float64)
    if (labels.sum(axis=1) < 2).any():
        raise ScoreError("consistency needs at least two replicates")
    length = np.linalg.norm(values, axis=1, keepdims=True)
    unit = np.divide(values, length, out=np.zeros_like(values), where=length > 0)
    counts = labels.sum(axis=1)
    # sum over pairs of u_i . u_j = (|sum u|^2 - sum |u|^2) / 2
    total = ((labels @ unit) ** 2).sum(axis=1) - labels @ (unit**2).sum(axis=1)
    return total / (counts * (counts - 1))


def energy_distances(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the energy distance 2 E|X - Y| - E|X - X'| - E|Y - Y'| of labelled and other wells, one a labelling.

    Euclidean distances, means over all pairs including a well with itself, so it is at least 0; in one dimension it is
    the square of `scipy.stats.energy_distance`.

    Parameters
    ----------
    values
        float (n, d).
    labels
        bool (b, n); both classes are present in each.

    Returns
    -------
    ndarray
        float64 (b,).
    """
    from scipy.spatial.distance import cdist

    values, labels = _finite(values), np.atleast_2d(labels).astype(bool)
    counts = labels.sum(axis=1, keepdims=True)
    if (counts == 0).any() or (counts == labels.shape[1]).any():
        raise ScoreError("an energy distance needs cases and references; only one class is here")
    contrast = np.where(labels, 1.0 / counts, -1.0 / (labels.shape[1] - counts))
    return np.maximum(-np.einsum("bi,bi->b", contrast @ cdist(values, values), contrast), 0.0)


@dataclass(frozen=True)
class Tested:
    """A statistic with its null by relabelling.

    Attributes
    ----------
    value
        Of the true labels.
    chance
        Mean over relabellings.
    p
        (1 + relabellings that reach the value) / (1 + relabellings).
    """

    value: float
    chance: float
    p: float


def tested(values: np.ndarray) -> Tested:
    """Return the first value with the others as its null; equal up to rounding counts as reached."""
    value, null = float(values[0]), values[1:]
    reached = int((null >= value - 1e-12 * max(1.0, abs(value))).sum())
    return Tested(value, float(null.mean()), (1 + reached) / (1 + len(null)))


def replicate_tests(
    values: np.ndarray, labels: np.ndarray, plates: np.ndarray, n: int, seed: list[int]
) -> dict[str, Tested]:
    """Return consistency and magnitude of a perturbation with their nulls.

    Parameters
    ----------
    values
        float (n, d) centred features of cases and references.
    labels
        bool (n,), true is a case; two of them at least, and a reference.
    plates
        (n,).
    n
        Relabellings within plates.
    seed
        Their seed.

    Returns
    -------
    dict
        consistency, magnitude. The p of both is exact under the null that cases and references of a plate are
        exchangeable: uniform on {1/(n + 1), ..., 1} up to ties.
    """
    labels = np.asarray(labels, dtype=bool)
    every = np.vstack([labels[None], relabellings(labels, plates, n, np.random.default_rng(seed))])
    return {
        "consistency": tested(mean_cosines(values, every)),
        "magnitude": tested(energy_distances(values, every)),
    }


@dataclass(frozen=True)
class MeanAveragePrecision:
    """mAP of one perturbation.

    Attributes
    ----------
    value
        Mean over its wells of the average precision with which a well ranks its replicates before references; None
        when no well has both.
    chance
        The same of a random order (exact, `metrics.chance_average_precision`).
    normalised
        Mean of (AP - chance) / (1 - chance): 0 by chance, 1 at best.
    n_wells, n_singletons
        Wells that enter, and wells left out because they have no replicate or no reference to be ranked with.
    """

    value: float | None
    chance: float | None
    normalised: float | None
    n_wells: int
    n_singletons: int


def mean_average_precision(
    values: np.ndarray, perturbations: np.ndarray, experiments: np.ndarray, plates: np.ndarray, *, kind: str,
    same_plate: bool = False,
) -> dict[str, MeanAveragePrecision]:  # fmt: skip
    """Return the mAP of every perturbation against reference controls, computed by copairs (Kalinin 2024).

    Positive pairs are replicates of one perturbation, negative pairs a replicate and a reference control, ranked by
    cosine. Both kinds of pairs obey the same rule, so that neither the batch nor the plate favours one of them: within
    one experiment and on different plates (`same_experiment`), or in different experiments (`cross_experiment`).

    Parameters
    ----------
    values
        float (n, d) centred features.
    perturbations
        object (n,), the name, or None for a reference control.
    experiments, plates
        (n,).
    kind
        `SAME` or `CROSS`.
    same_plate
        With `SAME`: allow pairs on one plate too. A plate effect then favours neither side much but not exactly
        neither, because a well is no replicate of itself.

    Returns
    -------
    dict
        By name.

    Raises
    ------
    ScoreError
        If a value is not finite or `kind` is unknown.
    """
    if kind not in (SAME, CROSS):
        raise ScoreError(f"pairs must be {SAME} or {CROSS}, not {kind}")
    values = _finite(values)
    case = np.array([p is not None for p in perturbations])
    meta = pd.DataFrame({
        "perturbation": [p if p is not None else "" for p in perturbations],
        # copairs' way to forbid pairs of references: every reference is a group of its own
        "reference": np.where(case, -1, np.arange(len(case))), "experiment": experiments, "plate": plates,
    })  # fmt: skip
    positives, negatives = _pair_counts(meta, case, kind, same_plate)
    kept = case & (positives > 0) & (negatives > 0)
    found = _copairs(meta, values, kept, ~case, kind, same_plate) if kept.any() else {}
    result = {}
    for name in dict.fromkeys(meta.loc[case, "perturbation"]):
        own = (meta["perturbation"] == name).to_numpy() & case
        inside = np.flatnonzero(own & kept)
        left = int(own.sum()) - len(inside)
        if not len(inside):
            result[name] = MeanAveragePrecision(None, None, None, 0, left)
            continue
        precision = np.array([found[i] for i in inside])
        chance = chance_average_precision(positives[inside], positives[inside] + negatives[inside])
        normalised = ((precision - chance) / (1 - chance)).mean()
        result[name] = MeanAveragePrecision(
            float(precision.mean()), float(chance.mean()), float(normalised), len(inside), left
        )
    return result


def _pair_counts(meta: pd.DataFrame, case: np.ndarray, kind: str, same_plate: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return how many replicates and how many references each well is ranked with, int (n,) each."""

    def count(columns: list[str], wells: np.ndarray) -> np.ndarray:
        """Return for each well how many of `wells` agree with it in all columns."""
        codes = meta.groupby(columns).ngroup().to_numpy() if columns else np.zeros(len(meta), dtype=np.int64)
        return np.bincount(codes[wells], minlength=codes.max() + 1)[codes]

    def paired(sameby: list[str], wells: np.ndarray) -> np.ndarray:
        if kind == CROSS:
            return count(sameby, wells) - count([*sameby, "experiment"], wells)
        inside = count([*sameby, "experiment"], wells)
        return inside if same_plate else inside - count([*sameby, "experiment", "plate"], wells)

    positives = paired(["perturbation"], case)
    if kind == SAME and same_plate:
        positives = positives - 1  # the well itself
    return positives, paired([], ~case)


def _copairs(
    meta: pd.DataFrame, values: np.ndarray, cases: np.ndarray, references: np.ndarray, kind: str, same_plate: bool
) -> dict[int, float]:
    """Return the average precision of each case, by position."""
    from copairs.map import average_precision

    wells = np.flatnonzero(cases | references)
    same, differ = ([], ["experiment"]) if kind == CROSS else (["experiment"], [] if same_plate else ["plate"])
    table = average_precision(
        meta.iloc[wells].assign(position=wells), values[wells],
        pos_sameby=["perturbation", "reference", *same], pos_diffby=differ,
        neg_sameby=same, neg_diffby=["perturbation", "reference", *differ], progress_bar=False,
    )  # fmt: skip
    # two perturbations are no negative pair: their wells share the reference number -1
    table = table[table["n_pos_pairs"] > 0]
    return dict(zip(table["position"].astype(int), table["average_precision"].astype(float), strict=True))


def _finite(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ScoreError(f"{(~np.isfinite(values).all(axis=1)).sum()} wells have features that are not finite")
    return values
