"""How far one, two or four components alone tell a perturbation from controls.

Features of training and held-out wells come in; the components are chosen on training wells and the AUROC is measured
on held-out ones. A view that gives a phenotype a component of its own needs one where a rotated view needs many.
"""

from __future__ import annotations

import numpy as np

from phenoica.score.metrics import auroc
from phenoica.score.small_probes import l2_logistic


def component_ranking(X: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the components (d,) from the most to the least telling on these wells.

    By |AUROC - 1/2| of each component alone, which heavy tails do not mislead; ties keep the component order.

    Parameters
    ----------
    X
        float (n, d), training wells.
    labels
        bool (n,), both classes present.
    """
    from scipy.stats import rankdata

    labels = np.asarray(labels, dtype=bool)
    n_case, n_reference = int(labels.sum()), int((~labels).sum())
    ranks = rankdata(X, axis=0)
    alone = (ranks[labels].sum(axis=0) - n_case * (n_case + 1) / 2) / (n_case * n_reference)
    return np.argsort(-np.abs(alone - 0.5), kind="stable")


def best_components_auroc(
    X_train: np.ndarray, labels: np.ndarray, X_test: np.ndarray, test_labels: np.ndarray, order: np.ndarray, k: int,
    C: float,
) -> float:  # fmt: skip
    """Return the held-out AUROC of an L2 logistic regression on the first `k` components of `order`.

    Parameters
    ----------
    X_train, X_test
        float (n, d).
    labels, test_labels
        bool (n,).
    order
        int (d,), as from `component_ranking` on the training wells.
    k
        Number of components, at most d.
    C
        Inverse penalty.
    """
    kept = order[:k]
    weights, _ = l2_logistic(X_train[:, kept], labels, C)
    return auroc(test_labels, X_test[:, kept] @ weights)
