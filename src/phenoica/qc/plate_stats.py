"""Robust numbers of one plate, as pure functions of arrays.

Cell counts, focus, intensity and embeddings of wells come in; medians, robust spreads, Z' factors, edge
effects and distances to control wells go out. Nothing here returns NaN: a number that cannot be computed is
None with a reason. Formulas: the field's (Zhang 1999 for Z', Bray 2012 for focus); robust sd = 1.4826
x median absolute deviation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAD_TO_SD = 1.4826  # 1 / the 75th percentile of the normal distribution: makes the MAD estimate its sd
MIN_CONTROLS = 4  # a median absolute deviation of fewer wells says nothing about their spread
MIN_EDGE_WELLS = 3
MIN_COLUMN_WELLS = 3  # and as many low ones
BLOCKED_SHARE = 0.5  # a low well holds less than this share of the plate's median
BLOCKED_ALPHA = 0.01  # per plate
BLOCKED_PERTURBATIONS = 3  # fewer different ones with low wells may be toxic


@dataclass(frozen=True)
class Spread:
    """Median and robust sd of some wells; `reason` is empty exactly when both may be used."""

    n: int
    median: float | None
    sd: float | None
    reason: str

    @property
    def usable(self) -> bool:
        """Whether limits may be set from this spread."""
        return not self.reason

    def z(self, values: np.ndarray) -> np.ndarray:
        """Return (values - median) / sd; only for a usable spread."""
        if not self.usable:
            raise ValueError(f"no robust z: {self.reason}")
        return (np.asarray(values, dtype=np.float64) - self.median) / self.sd


def robust_sd(values: np.ndarray) -> float:
    """Return 1.4826 x median |x - median(x)| of a non-empty, finite (n,) array."""
    values = np.asarray(values, dtype=np.float64)
    return float(MAD_TO_SD * np.median(np.abs(values - np.median(values))))


def spread(values: np.ndarray, what: str = "wells", least: int = MIN_CONTROLS) -> Spread:
    """Return the median and robust sd of an (n,) array, or the reason why there is none.

    Parameters
    ----------
    values
        (n,) finite numbers, n may be 0.
    what
        What the values are, for the reason.
    least
        The fewest values that count as a sample.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.size < least:
        return Spread(int(values.size), None, None, f"{values.size} {what}, at least {least} are needed")
    sd = robust_sd(values)
    median = float(np.median(values))
    if sd == 0:
        return Spread(int(values.size), median, None, f"more than half of the {what} have one and the same value")
    return Spread(int(values.size), median, sd, "")


def robust_zprime(positive: np.ndarray, negative: np.ndarray) -> tuple[float | None, str]:
    """Return the robust Z' factor of two samples, or None and the reason.

    Z' = 1 - 3 (s_p + s_n) / |m_p - m_n| (Zhang 1999) with medians m and robust sds s. 1 is perfect
    separation, above 0.5 a good assay, below 0 overlapping samples.

    Parameters
    ----------
    positive, negative
        (n,) and (m,) finite numbers.
    """
    p, n = spread(positive, "positive controls"), spread(negative, "negative controls")
    for sample in (p, n):
        if sample.sd is None and sample.median is None:
            return None, sample.reason
    difference = abs(p.median - n.median)
    if difference == 0:
        return None, "positive and negative controls have the same median"
    return 1.0 - 3.0 * ((p.sd or 0.0) + (n.sd or 0.0)) / difference, ""


def best_zprime(values: np.ndarray, positive_labels: np.ndarray, negative: np.ndarray) -> tuple[float | None, str, str]:
    """Return the highest robust Z' over the positive controls, its label, and a reason if there is none.

    Positive controls with different phenotypes must not be pooled: their mixture has a spread that no
    control has.

    Parameters
    ----------
    values
        (n,) values of positive control wells.
    positive_labels
        (n,) the perturbation of each.
    negative
        (m,) values of negative control wells.
    """
    best: tuple[float | None, str, str] = (None, "", "no positive controls on the plate")
    for label in sorted(set(positive_labels)):
        value, reason = robust_zprime(values[positive_labels == label], negative)
        if value is not None and (best[0] is None or value > best[0]):
            best = (value, str(label), "")
        elif value is None and best[0] is None:
            best = (None, "", reason)
    return best


def edge_effect(values: np.ndarray, edge_distance: np.ndarray) -> tuple[float | None, str]:
    """Return how much the outermost ring differs from the other wells, in percent of the other wells' median.

    100 x (median of the ring - median inside) / median inside; medians, so that a few strong phenotypes do
    not count.

    Parameters
    ----------
    values
        (n,) cell counts.
    edge_distance
        (n,) integers, 0 = outermost ring.
    """
    edge = np.asarray(edge_distance) == 0
    for name, n in (("in the outermost ring", edge.sum()), ("inside it", (~edge).sum())):
        if n < MIN_EDGE_WELLS:
            return None, f"{n} wells {name}, at least {MIN_EDGE_WELLS} are needed"
    inside = float(np.median(values[~edge]))
    if inside == 0:
        return None, "the median well inside the plate holds no cells"
    return 100.0 * (float(np.median(values[edge])) - inside) / inside, ""


def channel_z(values: np.ndarray, control: np.ndarray) -> tuple[np.ndarray | None, str]:
    """Return the robust z of each well and channel against the controls; constant channels are left out.

    Parameters
    ----------
    values
        (n, channels) finite numbers.
    control
        (n,) boolean, the plate's negative controls.

    Returns
    -------
    z : array of shape (n, usable channels), or None
    reason : str
        Empty unless no channel can be used.
    """
    spreads = [spread(values[control, c], "negative controls") for c in range(values.shape[1])]
    usable = [c for c, s in enumerate(spreads) if s.usable]
    if not usable:
        return None, spreads[0].reason if spreads else "no channels"
    return np.column_stack([spreads[c].z(values[:, c]) for c in usable]), ""


def control_distance(X: np.ndarray, plate: np.ndarray, fit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distance of every well to the fit controls of its plate.

    The root mean square over features of (x - median of the plate's fit controls) / s, where s is the
    robust sd of a feature over the fit controls of all plates, each plate centred on its own median (one
    plate alone has too few wells to scale hundreds of features). A fit control is measured against the
    *other* fit controls of its plate: against a centre that contains it, it would look closer than any
    other well.

    Parameters
    ----------
    X
        (n, d) embeddings, finite.
    plate
        (n,) plate labels.
    fit
        (n,) boolean, the fit controls.

    Returns
    -------
    distance : float64 array of shape (n,)
        0 where `known` is False.
    known : bool array of shape (n,)
        False on plates with fewer than `MIN_CONTROLS` fit controls, and everywhere if no feature varies.
    """
    X = np.asarray(X, dtype=np.float64)
    distance, known = np.zeros(len(X)), np.zeros(len(X), dtype=bool)
    plates = [np.flatnonzero(plate == p) for p in np.unique(plate)]
    plates = [rows for rows in plates if fit[rows].sum() >= MIN_CONTROLS]
    if not plates:
        return distance, known
    residuals = np.concatenate([X[rows[fit[rows]]] - np.median(X[rows[fit[rows]]], axis=0) for rows in plates])
    scale = MAD_TO_SD * np.median(np.abs(residuals), axis=0)
    varies = scale > 0
    if not varies.any():
        return distance, known
    for rows in plates:
        controls = rows[fit[rows]]
        centres = np.broadcast_to(np.median(X[controls], axis=0), (len(rows), X.shape[1])).copy()
        for i in np.flatnonzero(fit[rows]):
            centres[i] = np.median(X[controls[controls != rows[i]]], axis=0)
        z = (X[rows] - centres)[:, varies] / scale[varies]
        distance[rows] = np.sqrt(np.mean(z**2, axis=1))
        known[rows] = True
    return distance, known


def plate_focus_shift(control_focus: list[np.ndarray], experiment: np.ndarray) -> tuple[list[float | None], list[str]]:
    """Return how much sharper (+) or blurrier (-) each plate is than its sisters, in robust sd of wells.

    Per channel: the median focus of the plate's negative controls minus the median of that number over all
    plates of the experiment (with three or more, one bad plate does not move it; of two, each is measured
    against the other), divided by the typical well-to-well robust sd (median over the plates of the
    experiment); then the median over channels, because a plate out of focus is so in every channel and a
    stain is only in one.

    Parameters
    ----------
    control_focus
        For each plate the (controls, channels) focus of its negative controls.
    experiment
        (plates,) labels; plates of different experiments are not compared, optics and seeding differ
        between them.

    Returns
    -------
    shifts : list of float or None
    reasons : list of str
        Why a shift is None, else empty.
    """
    enough = np.array([len(f) >= MIN_CONTROLS for f in control_focus], dtype=bool)
    medians = [np.median(f, axis=0) if ok else None for f, ok in zip(control_focus, enough, strict=True)]
    within = [
        np.array([robust_sd(f[:, c]) for c in range(f.shape[1])]) if ok else None
        for f, ok in zip(control_focus, enough, strict=True)
    ]
    shifts: list[float | None] = []
    reasons: list[str] = []
    for p in range(len(control_focus)):
        sisters = np.flatnonzero((experiment == experiment[p]) & enough)
        others = sisters if len(sisters) > 2 else sisters[sisters != p]
        shift, reason = None, ""
        if not enough[p]:
            reason = f"{len(control_focus[p])} negative controls, at least {MIN_CONTROLS} are needed"
        elif not len(others):
            reason = "no other plate of the experiment to compare with"
        else:
            scale = np.median([within[q] for q in sisters], axis=0)
            if (scale > 0).any():
                centre = np.median([medians[q] for q in others], axis=0)
                shift = float(np.median(((medians[p] - centre)[scale > 0]) / scale[scale > 0]))
            else:
                reason = "focus does not vary between the negative controls"
        shifts.append(shift)
        reasons.append(reason)
    return shifts, reasons


def blocked_columns(count: np.ndarray, column: np.ndarray, perturbation: np.ndarray, control: np.ndarray) -> list[int]:
    """Return the plate columns that a dispenser seems to have missed.

    A well is low if it holds less than half of the plate's median cell count. A column of at least
    `MIN_COLUMN_WELLS` low wells is blocked if its own median is low and it has more low wells than the low
    share of the other columns explains: exact binomial test at `BLOCKED_ALPHA`, Bonferroni over the columns
    tested. Where a layout gives a column to one toxic perturbation or positive control, that is a phenotype:
    the low wells must hold a negative control or at least `BLOCKED_PERTURBATIONS` different perturbations.

    Parameters
    ----------
    count
        (n,) cell counts of one plate.
    column
        (n,) 1-based plate columns.
    perturbation
        (n,) labels.
    control
        (n,) boolean, the plate's negative controls.
    """
    from scipy.stats import binom

    count, column = np.asarray(count, dtype=np.float64), np.asarray(column)
    perturbation, control = np.asarray(perturbation), np.asarray(control, dtype=bool)
    if not len(count):
        return []
    limit = BLOCKED_SHARE * np.median(count)
    low = count < limit
    tested = [c for c in np.unique(column) if (column == c).sum() >= MIN_COLUMN_WELLS]
    blocked = []
    for c in tested:
        here = column == c
        mixed = control[here & low].any() or len(set(perturbation[here & low])) >= BLOCKED_PERTURBATIONS
        share = (low[~here].sum() + 1) / ((~here).sum() + 2)  # never 0: the other columns are a sample
        p = binom.sf(low[here].sum() - 1, here.sum(), share)
        many = low[here].sum() >= MIN_COLUMN_WELLS and p <= BLOCKED_ALPHA / len(tested)
        if many and mixed and np.median(count[here]) < limit:
            blocked.append(int(c))
    return blocked
