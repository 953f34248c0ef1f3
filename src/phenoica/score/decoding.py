"""How well the batch can be told from reference controls: what a view still knows of the experiment.

Features of reference controls come in, balanced accuracy on plates that the classifier has not seen goes out, beside
its chance level. Linear discriminant analysis with one fixed shrinkage: it does not change when the view is rotated, so
pca, rotation and ica must agree as long as no component is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phenoica.score.small_probes import discriminant

SHRINKAGE = 0.1  # of the within-class covariance towards a multiple of the identity
MAX_SPLITS = 5


@dataclass(frozen=True)
class Decoding:
    """How well batches are told apart.

    Attributes
    ----------
    value
        Balanced accuracy (mean recall over batches), or None.
    chance
        1 / number of batches, or None.
    n_batches, n_wells
        Batches told apart, and reference controls of theirs.
    reason
        A key of `contrasts.REASONS` when there is no value.
    """

    value: float | None
    chance: float | None
    n_batches: int
    n_wells: int
    reason: str | None = None


def decode_batches(values: np.ndarray, batches: np.ndarray, plates: np.ndarray) -> Decoding:
    """Decode the batch of reference controls, leaving out plates.

    The plates of each batch are dealt into as many splits as the batch with the fewest plates has (two to five); each
    split is predicted by a classifier trained on the others, so a plate's own look cannot give its batch away.

    Parameters
    ----------
    values
        float (n, d) features of reference controls.
    batches, plates
        (n,). Batches of a single plate are left out.

    Returns
    -------
    Decoding
        With reason one_test_batch (fewer than two batches with two plates each), missing_values, or few_references
        (no more training wells than batches), or no_variance_in_references.
    """
    values, batches, plates = np.asarray(values, dtype=np.float64), np.asarray(batches), np.asarray(plates)
    numbers = {b: np.unique(plates[batches == b]) for b in np.unique(batches)}
    known = [b for b, own in numbers.items() if len(own) >= 2]
    inside = np.isin(batches, known)
    values, batches, plates = values[inside], batches[inside], plates[inside]
    if len(known) < 2:
        return Decoding(None, None, len(known), len(values), "one_test_batch")
    chance = 1.0 / len(known)
    if not np.isfinite(values).all():
        return Decoding(None, chance, len(known), len(values), "missing_values")
    if not np.ptp(values, axis=0).any():
        return Decoding(None, chance, len(known), len(values), "no_variance_in_references")
    n_splits = min(MAX_SPLITS, min(len(numbers[b]) for b in known))
    place = {(b, plate): i % n_splits for b in known for i, plate in enumerate(numbers[b])}
    split = np.array([place[b, plate] for b, plate in zip(batches, plates, strict=True)])
    if min((split != s).sum() for s in range(n_splits)) <= len(known):
        return Decoding(None, chance, len(known), len(values), "few_references")
    predicted = np.empty_like(batches)
    for s in range(n_splits):
        train, test = split != s, split == s
        predicted[test] = discriminant(values[train], batches[train], values[test], SHRINKAGE)
    recall = [float((predicted[batches == b] == b).mean()) for b in known]
    return Decoding(float(np.mean(recall)), chance, len(known), len(values))
