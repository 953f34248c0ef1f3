"""What a component carries: perturbations, the batch, the position on the plate, or nothing that is known.

In go the components of training wells and their metadata, out comes a table with a row a component. Batch
and position (within plates) are omega2 and its permutation test on reference controls only; biology is the effect of
perturbations against reference controls of the same experiment, so a batch effect cannot pass for it. Sizes are of
values, significance must hold of ranks, so a few far wells make no label. The same functions measure held-out wells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from phenoica.disentangle.permutation import PERMUTATIONS, ReferenceTests, check_components, reference_rows
from phenoica.disentangle.variance import adjust, group_statistics, normal_scores, omega2, sum_by
from phenoica.errors import ControlsError
from phenoica.schema import (
    BATCH,
    BATCH_KEY_DEFAULT,
    BIOLOGY,
    CONTROL,
    CUTTING,
    EXPERIMENT,
    MIXED,
    NEGATIVE,
    PERTURBATION,
    POSITION,
    TREATMENT,
    UNEXPLAINED,
    component_names,
)

_BLOCK_ROWS = 2048
_BLOCK_COMPONENTS = 128


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


def reference_omega2(Z: np.ndarray, obs: pd.DataFrame, column: str) -> np.ndarray:
    """Return `omega2` of an obs column on the reference controls among the wells, (k,).

    Raises
    ------
    ControlsError
        If there is no reference control.
    """
    rows = reference_rows(obs)
    return omega2(np.asarray(Z)[rows], obs[column].astype(str).to_numpy()[rows])


def component_effects(Z: np.ndarray, obs: pd.DataFrame) -> Effects:
    """Measure the effect of every perturbation on every component.

    For perturbation p in experiment e, the difference is the mean of its wells minus the mean of the
    reference controls of e. Differences are averaged over experiments with weights n_case n_ref / (n_case +
    n_ref). The variance of a well is pooled over experiments within a perturbation, and over experiments for
    the references; a perturbation with one well an experiment borrows the references' variance. Wells are
    the replicates, also of a gene with several guides: guides that differ widen the variance of its wells, but
    the standard error does not speak of guides that were not used. Negative controls are no perturbation, each
    guide of the cutting controls is one; an experiment without reference controls contributes nothing.

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
    reference = reference_rows(obs)
    experiments = obs[EXPERIMENT].astype(str).to_numpy()
    names, codes = np.unique(experiments, return_inverse=True)
    n_ref, mean_ref, ss_ref = group_statistics(Z[reference], codes[reference], len(names))
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
    n_case, mean_case, ss_case = group_statistics(Z[case], cell, len(cells))
    of, where = cells // len(names), cells % len(names)

    total = sum_by(of, len(perturbations))
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


def effect_p_values(Z: np.ndarray, obs: pd.DataFrame, effects: Effects) -> np.ndarray:
    """Return the p value of every effect: the larger of Welch's on values and on normal scores of ranks.

    Welch's test alone finds effects in noise with one long tail (in log-normal noise of sigma 2, and 20 components, in
    one set of five), because the mean of four wells is not normal there. Ranks within the experiment, as normal scores,
    have no tails; the effect itself stays that of the values.

    Parameters
    ----------
    Z, obs
        As for `component_effects`.
    effects
        What that returned.

    Returns
    -------
    ndarray
        float64 (p, k).
    """
    experiment = pd.factorize(obs[EXPERIMENT].astype(str))[0]
    rows = [np.flatnonzero(experiment == code) for code in range(experiment.max() + 1)]
    p = effects.p_values
    for start in range(0, p.shape[1], _BLOCK_COMPONENTS):
        block = np.array(Z[:, start : start + _BLOCK_COMPONENTS], dtype=np.float64)
        for inside in rows:
            block[inside] = normal_scores(block[inside])
        scores = component_effects(block, obs).p_values
        p[:, start : start + _BLOCK_COMPONENTS] = np.maximum(p[:, start : start + _BLOCK_COMPONENTS], scores)
    return p


def component_table(
    Z: np.ndarray, obs: pd.DataFrame, *, view: str, alpha: float, min_omega2: float,
    batch_key: str = BATCH_KEY_DEFAULT, draw: int | None = None, permutations: int = PERMUTATIONS, seed: int = 0,
    tests: ReferenceTests | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Describe every component of a view on training wells.

    A component carries *batch* if omega2 of the batch on reference controls is at least `min_omega2` and its
    permutation test passes Benjamini-Hochberg over components at level `alpha`. It carries *position* if the same
    holds for the row or for the column, measured within batches and with the tests of both in one family of 2 k; few
    wells on many rows and columns reach any omega2 by chance, hence the test. What is permuted is said in
    `ReferenceTests`. It carries *biology* if its perturbation effects are significant (`effect_p_values`, Simes p
    over perturbations, Benjamini-Hochberg over components, level `alpha`) and at least one perturbation that passes
    Benjamini-Hochberg within the component has a squared effect, corrected for noise, of at least `min_omega2` (the
    component's variance is 1). The label is the one thing it carries, "mixed" for several, "unexplained" for none.

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
    permutations, seed
        `disentangle.label_permutations` and `seed`. The smallest p is 1 / (permutations + 1), so a lone effect among k
        components is found only with permutations + 1 >= k / alpha (batch) or 2 k / alpha (position).
    tests
        The tests of these wells, made beforehand to be shared by several views; None makes them from `batch_key`,
        `permutations` and `seed`, which are not read otherwise.

    Returns
    -------
    DataFrame
        A row a component: view, draw (nullable), component, index, label, batch_omega2, plate_omega2, row_omega2,
        column_omega2 (on reference controls; plate, row and column after removing batch means, as shares of the whole
        variance; the label does not use that of plates), batch_p, position_p (permutation tests, adjusted; position
        is the smaller of row and column), biology (mean squared effect of a perturbation, see `Effects.biology`),
        biology_sum (the same summed over perturbations), perturbation_share (share of perturbations past
        Benjamini-Hochberg within the component), perturbation_p (Simes p, adjusted over components),
        top_perturbation, top_effect and top_standard_error (largest absolute effect, signed), n_perturbations,
        kurtosis (excess) and skew (population moments of all these wells).

    Raises
    ------
    ControlsError
        If there are no reference controls, or none shares an experiment with a case.
    SchemaError
        If a component is not finite.
    """
    Z = check_components(Z, obs)
    k = Z.shape[1]
    if tests is None:
        tests = ReferenceTests(obs, batch_key=batch_key, permutations=permutations, seed=seed)
    effects = component_effects(Z, obs)
    hits, p = _hits(effect_p_values(Z, obs, effects), alpha)
    top = np.abs(effects.effect).argmax(axis=0)
    (batch, batch_p), (place, place_p) = tests.batch(Z), tests.position(Z)
    batch_p, place_p = adjust(batch_p), adjust(place_p.ravel()).reshape(2, k)
    carries = {
        BIOLOGY: (hits & (effects.squared >= min_omega2)).any(axis=0) & (p <= alpha),
        BATCH: (batch >= min_omega2) & (batch_p <= alpha),
        POSITION: ((place >= min_omega2) & (place_p <= alpha)).any(axis=0),
    }
    kurtosis, skew = _kurtosis_and_skew(Z)
    table: dict[str, Any] = {
        "view": view,
        "draw": pd.array([draw] * k, dtype="Int64"),
        "component": component_names(k, view),
        "index": np.arange(k),
        "label": _labels(carries),
        "batch_omega2": batch,
        "plate_omega2": tests.plate(Z),
        "row_omega2": place[0],
        "column_omega2": place[1],
        "batch_p": batch_p,
        "position_p": place_p.min(axis=0),
        "biology": effects.biology,
        "biology_sum": effects.biology * len(effects.perturbations),
        "perturbation_share": hits.mean(axis=0),
        "perturbation_p": p,
        "top_perturbation": effects.perturbations[top].astype(object),
        "top_effect": effects.effect[top, np.arange(k)],
        "top_standard_error": effects.standard_error[top, np.arange(k)],
        "n_perturbations": len(effects.perturbations),
        "kurtosis": kurtosis,
        "skew": skew,
    }
    return pd.DataFrame(table)


def effects_table(Z: np.ndarray, obs: pd.DataFrame, *, view: str) -> pd.DataFrame:
    """Return every perturbation's effect on every component, tidy.

    Parameters
    ----------
    Z, obs, view
        As for `component_table`.

    Returns
    -------
    DataFrame
        A row a component and perturbation: view, component, perturbation, effect, standard_error, degrees (see
        `Effects`), p (`effect_p_values`), q (Benjamini-Hochberg over the perturbations of the component), n_case
        (wells, the replicates), n_experiments.

    Raises
    ------
    ControlsError
        See `component_effects`.
    """
    effects = component_effects(Z, obs)
    (n, k), p = effects.effect.shape, effect_p_values(Z, obs, effects)
    return pd.DataFrame({
        "view": view,
        "component": np.repeat(np.array(component_names(k, view), dtype=object), n),
        "perturbation": np.tile(effects.perturbations.astype(object), k),
        "effect": effects.effect.T.ravel(),
        "standard_error": effects.standard_error.T.ravel(),
        "degrees": effects.degrees.T.ravel(),
        "p": p.T.ravel(),
        "q": adjust(p).T.ravel(),
        "n_case": np.tile(effects.n_case, k),
        "n_experiments": np.tile(effects.n_experiments, k),
    })  # fmt: skip


def _kurtosis_and_skew(Z: np.ndarray) -> np.ndarray:
    """Return excess kurtosis and skew, (2, k); 0, like a Gaussian's, for a constant column, which has neither.

    In blocks of rows: scipy.stats holds several copies of the whole matrix and takes ten times as long.
    """
    n, mean = len(Z), Z.mean(axis=0)
    second, third, fourth = np.zeros((3, Z.shape[1]))
    for start in range(0, n, _BLOCK_ROWS):
        centred = Z[start : start + _BLOCK_ROWS] - mean
        squared = centred**2
        second += squared.sum(axis=0) / n
        third += (squared * centred).sum(axis=0) / n
        fourth += (squared**2).sum(axis=0) / n
    varies = Z.min(axis=0) < Z.max(axis=0)
    second = np.where(varies, second, 1.0)
    return np.where(varies, [fourth / second**2 - 3, third / second**1.5], 0.0)


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
