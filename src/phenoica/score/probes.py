"""Probes: the L1 logistic regression that scores a view, the L2 one that checks bases of views, and boosted trees.

Features and labels of training wells come in, weights go out, all in float64. The L1 probe minimises
mean_i(c_i log(1 + exp(-y_i (w'x_i + b)))) + lambda |w|_1 with class-balanced c_i = n / (2 n_class), free intercept b.
pca, rotation and ica of one fit differ by an orthogonal matrix, which an L2 penalty cannot see: their L2 probes must
agree, and if they do not, a basis is wrong or a solver has not converged.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phenoica.errors import ScoreError
from phenoica.score.l1_path import TOLERANCE, Problem, solve_paths
from phenoica.score.metrics import auroc

L2_DECISION_LIMIT = 1e-6
L2_AUROC_LIMIT = 1e-4


@dataclass(frozen=True)
class Probe:
    """A fitted linear probe.

    Attributes
    ----------
    weights
        (d,) float64.
    intercept
        float.
    penalty
        lambda of the L1 probe; the inverse penalty C of the L2 probe.
    lambda_max
        The smallest lambda without a non-zero weight; None for L2.
    converged
        Whether the solver has reached its tolerance.
    """

    weights: np.ndarray
    intercept: float
    penalty: float
    lambda_max: float | None
    converged: bool

    def decision(self, X: np.ndarray) -> np.ndarray:
        """Return w'x + b of every row of `X` (n, d), as float64 (n,)."""
        return np.asarray(X, dtype=np.float64) @ self.weights + self.intercept


@dataclass(frozen=True)
class L1Path:
    """L1 probes of one problem, from the largest lambda to the smallest.

    Attributes
    ----------
    fractions
        lambda / lambda_max of each probe, descending.
    probes
        As many.
    """

    fractions: tuple[float, ...]
    probes: tuple[Probe, ...]

    @property
    def non_zero(self) -> tuple[int, ...]:
        """Number of non-zero weights of each probe."""
        return tuple(int((probe.weights != 0).sum()) for probe in self.probes)

    def at(self, fraction: float) -> Probe:
        """Return the probe at one of `fractions`."""
        return self.probes[self.fractions.index(fraction)]


def _checked(X: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    X, labels = np.asarray(X, dtype=np.float64), np.asarray(labels).astype(bool)
    if X.ndim != 2 or X.shape[1] == 0 or len(X) != len(labels):
        raise ScoreError(f"a probe needs features (n, d) and labels (n,), not {X.shape} and {labels.shape}")
    if not np.isfinite(X).all():
        raise ScoreError(f"a probe needs finite features; {(~np.isfinite(X).all(axis=1)).sum()} wells have others")
    if labels.all() or not labels.any():
        raise ScoreError("a probe needs cases and references; only one class is in the training wells")
    return X, labels


def fit_l1(X: np.ndarray, labels: np.ndarray, fraction: float) -> Probe:
    """Fit the L1 probe at lambda = `fraction` x lambda_max of these wells.

    Parameters
    ----------
    X
        (n, d) float, features of training wells, each scaled beforehand; the probe never rescales.
    labels
        (n,) bool, true is a case.
    fraction
        In (0, 1).

    Returns
    -------
    Probe
        All-zero weights when no feature differs between the classes (lambda_max = 0).

    Raises
    ------
    ScoreError
        On features that are not finite, or labels of one class.
    """
    X, labels = _checked(X, labels)
    return fit_l1_paths([Problem(X, np.arange(len(X)), labels)], [fraction])[0].probes[0]


def fit_l1_paths(
    problems: Sequence[Problem], fractions: Iterable[float], *, device: str = "cpu", title: str | None = None
) -> list[L1Path]:
    """Fit the L1 probes of many problems, each at several lambdas, in one call of the solver.

    Parameters
    ----------
    problems
        Feature matrix, wells and labels of each.
    fractions
        lambda / lambda_max, in (0, 1).
    device
        cpu or cuda.
    title
        What the progress line says; None for no line.

    Returns
    -------
    list of L1Path
        One a problem, in their order. A probe is converged when its duality gap is at most `l1_path.TOLERANCE` of the
        objective.

    Raises
    ------
    ScoreError
        If a problem has a feature that is not finite, or labels of one class.
    """
    finite = {id(X): np.isfinite(X).all(axis=1) for X in {id(p.features): p.features for p in problems}.values()}
    for X, wells, labels in problems:
        if not finite[id(X)][wells].all() or X.shape[1] == 0 or labels.all() or not labels.any():
            _checked(X[wells], labels)  # says what is wrong
    descending = tuple(sorted({float(f) for f in fractions}, reverse=True))
    paths = []
    for largest, weights, intercepts, gaps in solve_paths(problems, descending, device=device, title=title):
        found = zip(weights, intercepts.tolist(), descending, (gaps <= TOLERANCE).tolist(), strict=True)
        paths.append(L1Path(descending, tuple(Probe(w, b, f * largest, largest, done) for w, b, f, done in found)))
    return paths


def fit_l1_each(
    problems: Sequence[Problem], fractions: Sequence[float], *, device: str = "cpu", title: str | None = None
) -> list[Probe]:  # fmt: skip
    """Fit the L1 probes of many problems, each at its own lambda, in one call of the solver for each fraction.

    Parameters
    ----------
    problems
        Feature matrix, wells and labels of each.
    fractions
        lambda / lambda_max of each problem.
    device, title
        As in `fit_l1_paths`.

    Returns
    -------
    list of Probe
        One a problem, in their order.
    """
    found: list[Probe | None] = [None] * len(problems)
    for fraction in sorted(set(fractions), reverse=True):
        chosen = [i for i, own in enumerate(fractions) if own == fraction]
        paths = fit_l1_paths([problems[i] for i in chosen], [fraction], device=device, title=title)
        for i, path in zip(chosen, paths, strict=True):
            found[i] = path.probes[0]
    return found


def fit_l2(X: np.ndarray, labels: np.ndarray, C: float) -> Probe:
    """Fit the class-balanced L2 logistic regression, converged tightly enough to compare decisions.

    Minimises mean_i(c_i log-loss_i) + |w|^2 / (2 n C) with a free intercept by Newton's method (scikit-learn), so that
    C means what it means there.

    Parameters
    ----------
    X
        (n, d) float.
    labels
        (n,) bool.
    C
        Inverse penalty.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    X, labels = _checked(X, labels)
    model = LogisticRegression(C=C, class_weight="balanced", solver="newton-cholesky", tol=1e-11, max_iter=200)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        model.fit(X, labels)
    converged = not any(issubclass(w.category, ConvergenceWarning) for w in caught)
    return Probe(model.coef_[0].astype(np.float64), float(model.intercept_[0]), C, None, converged)


def fit_trees(X: np.ndarray, labels: np.ndarray, seed: int) -> Callable[[np.ndarray], np.ndarray]:
    """Fit class-balanced gradient-boosted trees (scikit-learn's histogram ones, 100 trees, leaves of at least 5 wells).

    Parameters
    ----------
    X
        (n, d) float.
    labels
        (n,) bool.
    seed
        Seed of the trees.

    Returns
    -------
    callable
        Its decision, float64 (m,), of a matrix (m, d).
    """
    from sklearn.ensemble import HistGradientBoostingClassifier

    X, labels = _checked(X, labels)
    model = HistGradientBoostingClassifier(
        class_weight="balanced", max_iter=100, min_samples_leaf=5, early_stopping=False, random_state=seed
    )
    return model.fit(X, labels).decision_function


def l2_control(
    decisions: Mapping[str, Sequence[np.ndarray]], labels: Sequence[np.ndarray] | None = None
) -> dict[str, Any]:
    """Compare the L2 decisions of views that differ by a rotation.

    Parameters
    ----------
    decisions
        For each view, a decision vector (n_c,) for each contrast c; the same contrasts in the same order.
    labels
        For each contrast bool (n_c,), both classes present; None compares decisions only.

    Returns
    -------
    dict
        max_decision_difference (float; relative for wells whose |decision| exceeds 1),
        max_auroc_difference (float, or None without labels), holds (bool: at most 1e-6 and 1e-4).

    Raises
    ------
    ScoreError
        With fewer than two views, or different numbers of contrasts.
    """
    views = list(decisions)
    if len(views) < 2 or len({len(decisions[v]) for v in views}) != 1:
        raise ScoreError("the L2 control compares at least two views on the same contrasts")
    largest, largest_auroc = 0.0, 0.0
    for position in range(len(decisions[views[0]])):
        table = np.stack([np.asarray(decisions[v][position], dtype=np.float64) for v in views])
        # a held-out well far outside the training cloud has a huge decision, whose rounding is not a wrong basis
        unit = np.maximum(1.0, np.abs(table).max(axis=0))
        # np.maximum keeps NaN, which is never below a limit
        largest = float(np.maximum(largest, (np.ptp(table, axis=0) / unit).max()))
        if labels is not None:
            difference = np.ptp([auroc(labels[position], row) for row in table])
            largest_auroc = float(np.maximum(largest_auroc, difference))
    return {
        "max_decision_difference": largest,
        "max_auroc_difference": None if labels is None else largest_auroc,
        "holds": bool(largest <= L2_DECISION_LIMIT and largest_auroc <= L2_AUROC_LIMIT),
    }
