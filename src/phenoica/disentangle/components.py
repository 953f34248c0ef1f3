"""What a component carries: perturbations, the batch, the position on the plate, or nothing that is known.

In go the components of training wells and their metadata, out comes a table with a row a component. Batch
and position (within batches) are omega2 and its F test on reference controls only; biology is the effect of
perturbations against reference controls of the same experiment, so a batch effect cannot pass for it. The same
functions measure held-out wells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from phenoica.errors import ControlsError
from phenoica.schema import (
    BATCH,
    BATCH_KEY_DEFAULT,
    BIOLOGY,
    COLUMN,
    CONTROL,
    CONTROL_ROLE,
    CUTTING,
    EXPERIMENT,
    MIXED,
    NEGATIVE,
    PERTURBATION,
    POSITION,
    REFERENCE,
    ROW,
    TREATMENT,
    UNEXPLAINED,
    component_names,
)


@dataclass(frozen=True)
class Effects:
    """Effects of perturbations on components, in units of the components.

    Attributes
    ----------
    perturbations
        The p perturbations that share an experiment with a reference control, sorted. A cutting control goes
        by its guide (the treatment): its gene may be a query as well.
    effect, standard_error
        float64 (p, k), mean of case minus reference within an experiment, averaged over experiments.
    degrees
        float64 (p, k), Welch-Satterthwaite degrees of freedom.
    n_case, n_experiments
        int (p,).
    """

    perturbations: np.ndarray
    effect: np.ndarray
    standard_error: np.ndarray
    degrees: np.ndarray
    n_case: np.ndarray
    n_experiments: np.ndarray

    @property
    def squared(self) -> np.ndarray:
        """effect^2 - standard_error^2, (p, k): unbiased for the squared effect, so it may be negative."""
        return self.effect**2 - self.standard_error**2

    @property
    def biology(self) -> np.ndarray:
        """Mean of `squared` over perturbations, (k,), each with weight 1; clipped at 0 after the mean."""
        return np.clip(self.squared.mean(axis=0), 0.0, None)

    @property
    def p_values(self) -> np.ndarray:
        """Two-sided Welch t test of every effect, (p, k); 1 where nothing varies."""
        from scipy import stats

        moving = self.standard_error > 0
        t = np.divide(self.effect, self.standard_error, out=np.zeros_like(self.effect), where=moving)
        return np.where(moving, 2 * stats.t.sf(np.abs(t), self.degrees), 1.0)


def omega2(values: np.ndarray, groups: np.ndarray | pd.Series) -> np.ndarray:
    """Share of a component's variance that lies between groups, unbiased.

    One-way omega2 (Hays 1963): (SS_between - (g - 1) MS_within) / (SS_total + MS_within), clipped at
    0.

    Parameters
    ----------
    values
        (n, k).
    groups
        (n,) labels, g different ones.

    Returns
    -------
    ndarray
        float64 (k,) in [0, 1]. It is 0 where it cannot be measured: one group, no well beyond one a group,
        no variance.
    """
    return variance_between(values, groups)[0]


def variance_between(
    values: np.ndarray, groups: np.ndarray | pd.Series, within: np.ndarray | pd.Series | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the share of a component's variance that lies between groups, and its F test.

    Analysis of variance. Without `within` one-way: omega2 = (SS_between - df MS_rest) / (SS_total + MS_rest)
    (Hays 1963), F = SS_between / df / MS_rest. With `within` the means of its levels are removed from the
    values and from the group indicators first, so SS_between is what groups explain beyond the levels, df the
    rank of the indicators that is left, and their n - levels - df the degrees of freedom of the rest;
    SS_total stays that of all values, so omega2 is a share of the whole variance.

    Parameters
    ----------
    values
        (n, k).
    groups
        (n,) labels, such as the plate columns of the wells.
    within
        (n,) labels, such as the batches of the wells, or None.

    Returns
    -------
    omega2 : ndarray
        float64 (k,) in [0, 1]; 0 where it cannot be measured: groups that do not differ beyond `within`, no
        degree of freedom of the rest, no variance.
    p : ndarray
        float64 (k,), upper tail of F; 1 where it cannot be measured.
    """
    from scipy import stats

    values = np.asarray(values, dtype=np.float64)
    codes, names = pd.factorize(np.asarray(groups))
    n, g = len(values), len(names)
    centred = values - values.mean(axis=0)
    whole = (centred**2).sum(axis=0)
    if within is None:
        counts, means, squares = _group_statistics(centred, codes, g)
        between, df = (counts[:, None] * means**2).sum(axis=0), g - 1
        rest, df_rest = squares.sum(axis=0), n - g
    else:
        levels, level_names = pd.factorize(np.asarray(within))
        centred = _centre(centred, levels, len(level_names))
        basis, size, _ = np.linalg.svd(_centre(np.eye(g)[codes], levels, len(level_names)), full_matrices=False)
        basis = basis[:, size > n * np.finfo(np.float64).eps * np.sqrt(n)]
        between, df = ((basis.T @ centred) ** 2).sum(axis=0), basis.shape[1]
        rest, df_rest = np.clip((centred**2).sum(axis=0) - between, 0.0, None), n - len(level_names) - df
    if df < 1 or df_rest < 1:
        return np.zeros(values.shape[1]), np.ones(values.shape[1])
    mean_square = rest / df_rest
    share = np.divide(between - df * mean_square, whole + mean_square, out=np.zeros_like(whole), where=whole > 0)
    F = np.divide(between / df, mean_square, out=np.full_like(whole, np.inf), where=mean_square > 0)
    return np.clip(share, 0.0, None), np.where(between > 0, stats.f.sf(F, df, df_rest), 1.0)


def reference_omega2(Z: np.ndarray, obs: pd.DataFrame, column: str) -> np.ndarray:
    """Return `omega2` of an obs column on the reference controls among the wells, (k,).

    Raises
    ------
    ControlsError
        If there is no reference control.
    """
    return _reference_variance(Z, obs, column)[0]


def component_effects(Z: np.ndarray, obs: pd.DataFrame) -> Effects:
    """Measure the effect of every perturbation on every component.

    For perturbation p in experiment e, the difference is the mean of its wells minus the mean of the
    reference controls of e. Differences are averaged over experiments with weights n_case n_ref / (n_case +
    n_ref). The variance of a well is pooled over experiments within a perturbation, and over experiments for
    the references; a perturbation with one well an experiment borrows the references' variance. Wells are
    the replicates. Negative controls are no perturbation, each guide of the cutting controls is one; an
    experiment without reference controls contributes nothing.

    Parameters
    ----------
    Z
        (n, k) components of any wells, training or held out.
    obs
        Their metadata, aligned by position.

    Returns
    -------
    Effects
        See there.

    Raises
    ------
    ControlsError
        If no experiment has two reference controls, or none with a reference control has a case.
    """
    Z = np.asarray(Z, dtype=np.float64)
    reference = _reference_rows(obs)
    experiments = obs[EXPERIMENT].astype(str).to_numpy()
    names, codes = np.unique(experiments, return_inverse=True)
    n_ref, mean_ref, ss_ref = _group_statistics(Z[reference], codes[reference], len(names))
    df_ref = int(np.clip(n_ref - 1, 0, None).sum())
    case = (obs[CONTROL].astype(str) != NEGATIVE).to_numpy() & (n_ref[codes] > 0)
    if df_ref == 0 or not case.any():
        raise ControlsError(
            "effects need an experiment with two reference controls and one with a reference control and a "
            "case; list the negative controls in plates.negative_controls or lower plates.fit_control_share"
        )
    cutting = (obs[CONTROL].astype(str) == CUTTING).to_numpy()
    label = np.where(cutting, obs[TREATMENT].astype(str).to_numpy(), obs[PERTURBATION].astype(str).to_numpy())
    perturbations, perturbation = np.unique(label[case], return_inverse=True)
    cells, cell = np.unique(perturbation * len(names) + codes[case], return_inverse=True)
    n_case, mean_case, ss_case = _group_statistics(Z[case], cell, len(cells))
    of, where = cells // len(names), cells % len(names)

    total = _sum_by(of, len(perturbations))
    variance_ref = ss_ref.sum(axis=0) / df_ref
    df_case = total @ (n_case - 1.0)
    alone = df_case == 0
    variance_case = np.where(alone[:, None], variance_ref, (total @ ss_case) / np.where(alone, 1, df_case)[:, None])
    weight = n_case * n_ref[where] / (n_case + n_ref[where])
    weight = weight / (total @ weight)[of]
    effect = total @ (weight[:, None] * (mean_case - mean_ref[where]))
    from_case = variance_case * (total @ (weight**2 / n_case))[:, None]
    from_ref = variance_ref * (total @ (weight**2 / n_ref[where]))[:, None]
    variance = from_case + from_ref
    spread = from_case**2 / np.where(alone, df_ref, df_case)[:, None] + from_ref**2 / df_ref
    degrees = np.divide(variance**2, spread, out=np.ones_like(variance), where=spread > 0)
    return Effects(
        perturbations, effect, np.sqrt(variance), degrees,
        n_case=np.rint(total @ n_case).astype(int),
        n_experiments=np.bincount(of, minlength=len(perturbations)),
    )  # fmt: skip


def biology(Z: np.ndarray, obs: pd.DataFrame) -> np.ndarray:
    """Mean squared effect of perturbations on every component, corrected for noise; see `Effects.biology`.

    Returns
    -------
    ndarray
        float64 (k,), at least 0, in squared units of the components; 0 is expected where nothing has an
        effect.
    """
    return component_effects(Z, obs).biology


def component_table(
    Z: np.ndarray, obs: pd.DataFrame, *, view: str, alpha: float, min_omega2: float,
    batch_key: str = BATCH_KEY_DEFAULT, draw: int | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Describe every component of a view on training wells.

    A component carries *batch* if omega2 of the batch on reference controls is at least `min_omega2` and its F
    test passes Benjamini-Hochberg over components at level `alpha`. It carries *position* if the same holds
    for the row or for the column, measured within batches (`variance_between`) and with the tests of both in
    one family of 2 k; few wells on many rows and columns reach any omega2 by chance, hence the test. It carries
    *biology* if its perturbation effects are significant (Simes p over perturbations, Benjamini-Hochberg over
    components, level `alpha`) and at least one perturbation that passes Benjamini-Hochberg within the component
    has a squared effect, corrected for noise, of at least `min_omega2` (the component's variance is 1). The
    label is the one thing it carries, "mixed" for several, "unexplained" for none.

    Parameters
    ----------
    Z
        (n, k), unit variance per column on these wells.
    obs
        Their metadata, aligned by position.
    view
        Name of the view; components are called view_000, view_001, ...
    alpha, min_omega2
        `disentangle.label_alpha` and `disentangle.label_min_omega2`.
    batch_key
        obs column that is the batch.
    draw
        Number of the rotation draw, or None.

    Returns
    -------
    DataFrame
        A row a component: view, draw (nullable), component, index, label, batch_omega2, row_omega2,
        column_omega2 (what the label uses: on reference controls, row and column after removing batch means,
        as shares of the whole variance), batch_p, position_p (F tests, adjusted; position is the smaller of
        row and column), biology (see `Effects.biology`), perturbation_share (share of perturbations past
        Benjamini-Hochberg within the component), perturbation_p (Simes p, adjusted over components),
        top_perturbation and top_effect (largest absolute effect, signed), n_perturbations, kurtosis (excess)
        and skew (population moments of all these wells).

    Raises
    ------
    ControlsError
        If there are no reference controls.
    """
    from scipy import stats

    Z = np.asarray(Z, dtype=np.float64)
    k = Z.shape[1]
    effects = component_effects(Z, obs)
    hits, p = _hits(effects.p_values, alpha)
    top = np.abs(effects.effect).argmax(axis=0)
    batch, batch_p = _reference_variance(Z, obs, batch_key)
    place, place_p = np.stack([_reference_variance(Z, obs, c, within=batch_key) for c in (ROW, COLUMN)], axis=1)
    batch_p, place_p = adjust(batch_p), adjust(place_p.ravel()).reshape(2, k)
    strong = (hits & (effects.squared >= min_omega2)).any(axis=0) & (p <= alpha)
    carries = {
        BIOLOGY: strong,
        BATCH: (batch >= min_omega2) & (batch_p <= alpha),
        POSITION: ((place >= min_omega2) & (place_p <= alpha)).any(axis=0),
    }
    # a column that is constant on training wells (all 0) has no third or fourth moment: 0 like a Gaussian
    moments = np.zeros((2, k))
    varies = Z.std(axis=0) > 0
    moments[:, varies] = stats.kurtosis(Z[:, varies], axis=0), stats.skew(Z[:, varies], axis=0)
    table: dict[str, Any] = {
        "view": view,
        "draw": pd.array([draw] * k, dtype="Int64"),
        "component": component_names(k, view),
        "index": np.arange(k),
        "label": _labels(carries),
        "batch_omega2": batch,
        "row_omega2": place[0],
        "column_omega2": place[1],
        "batch_p": batch_p,
        "position_p": place_p.min(axis=0),
        "biology": effects.biology,
        "perturbation_share": hits.mean(axis=0),
        "perturbation_p": p,
        "top_perturbation": effects.perturbations[top].astype(object),
        "top_effect": effects.effect[top, np.arange(k)],
        "n_perturbations": len(effects.perturbations),
        "kurtosis": moments[0],
        "skew": moments[1],
    }
    return pd.DataFrame(table)


def adjust(p: np.ndarray) -> np.ndarray:
    """Benjamini-Hochberg adjusted p values along the first axis; same shape."""
    p = np.asarray(p, dtype=np.float64)
    m = len(p)
    order = np.argsort(p, axis=0)
    ranks = np.arange(1, m + 1).reshape((m,) + (1,) * (p.ndim - 1))
    scaled = np.take_along_axis(p, order, axis=0) * m / ranks
    monotone = np.minimum(np.minimum.accumulate(scaled[::-1], axis=0)[::-1], 1.0)
    out = np.empty_like(p)
    np.put_along_axis(out, order, monotone, axis=0)
    return out


def _hits(p_values: np.ndarray, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Return hits within each component (p, k), and its Simes p adjusted over components (k,)."""
    within = adjust(p_values)
    return within <= alpha, adjust(within.min(axis=0))  # the least adjusted p value is Simes' p


def _labels(carries: dict[str, np.ndarray]) -> list[str]:
    kinds = list(carries)
    labels = []
    for flags in np.stack([carries[kind] for kind in kinds], axis=1):
        found = [kind for kind, flag in zip(kinds, flags, strict=True) if flag]
        labels.append(found[0] if len(found) == 1 else MIXED if found else UNEXPLAINED)
    return labels


def _reference_variance(
    Z: np.ndarray, obs: pd.DataFrame, column: str, within: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return `variance_between` of an obs column on the reference controls, within another column if named."""
    reference = _reference_rows(obs)
    labels, levels = (None if c is None else obs[c].astype(str).to_numpy()[reference] for c in (column, within))
    return variance_between(np.asarray(Z)[reference], labels, levels)


def _reference_rows(obs: pd.DataFrame) -> np.ndarray:
    rows = (obs[CONTROL_ROLE].astype(str) == REFERENCE).to_numpy()
    if not rows.any():
        raise ControlsError(
            "no reference control among these wells; list the negative controls in "
            "plates.negative_controls or lower plates.fit_control_share"
        )
    return rows


def _sum_by(codes: np.ndarray, n_groups: int) -> Any:
    """Return the sparse (n_groups, n) matrix that sums rows of equal code."""
    from scipy import sparse

    n = len(codes)
    return sparse.csr_array((np.ones(n), (codes, np.arange(n))), shape=(n_groups, n))


def _centre(values: np.ndarray, codes: np.ndarray, n_groups: int) -> np.ndarray:
    """Return the (n, k) values minus the means of their groups."""
    return values - _group_statistics(values, codes, n_groups)[1][codes]


def _group_statistics(
    values: np.ndarray, codes: np.ndarray, n_groups: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return counts (g,), means (g, k) and sums of squares within (g, k); 0 for an empty group."""
    total = _sum_by(codes, n_groups)
    counts = np.bincount(codes, minlength=n_groups).astype(np.float64)
    means = (total @ values) / np.maximum(counts, 1)[:, None]
    return counts, means, total @ (values - means[codes]) ** 2
