"""Small linear models in plain linear algebra, for scores that need thousands of them.

Features and labels of training wells come in, decisions go out. They solve the same problems as scikit-learn's
LogisticRegression and LinearDiscriminantAnalysis, to which tests compare them; there, checking the input of one small
fit takes ten times as long as the fit.
"""

from __future__ import annotations

import numpy as np

from phenoica.errors import ScoreError

MAX_STEPS = 50


def l2_logistic(X: np.ndarray, labels: np.ndarray, C: float) -> tuple[np.ndarray, float]:
    """Fit the class-balanced L2 logistic regression, the problem of `probes.fit_l2`, by Newton's method.

    Minimises sum_i(c_i log(1 + exp(-y_i (w'x_i + b)))) + |w|^2 / (2 C) with c_i = n / (2 n_class) and free intercept b.

    Parameters
    ----------
    X
        float (n, d), finite.
    labels
        bool (n,), both classes present.
    C
        Inverse penalty.

    Returns
    -------
    weights : ndarray
        float64 (d,).
    intercept : float

    Raises
    ------
    ScoreError
        If one class is missing, or the optimum is not reached in `MAX_STEPS` steps.
    """
    X, labels = np.asarray(X, dtype=np.float64), np.asarray(labels, dtype=bool)
    n, n_case = len(labels), int(labels.sum())
    if n_case in (0, n):
        raise ScoreError("a probe needs cases and references; only one class is in the training wells")
    design = np.hstack([X, np.ones((n, 1))])
    balance = np.where(labels, n / (2 * n_case), n / (2 * (n - n_case)))
    sign, ridge = np.where(labels, 1.0, -1.0), np.r_[np.full(X.shape[1], 1.0 / C), 0.0]

    def loss(w: np.ndarray) -> float:
        return float(balance @ np.logaddexp(0.0, -sign * (design @ w)) + 0.5 * ridge @ w**2)

    w = np.zeros(X.shape[1] + 1)
    value = loss(w)
    for _ in range(MAX_STEPS):
        p = 0.5 * (1.0 + np.tanh(0.5 * (design @ w)))
        gradient = design.T @ (balance * (p - labels)) + ridge * w
        curvature = (design * (balance * p * (1 - p))[:, None]).T @ design + np.diag(ridge)
        step = np.linalg.lstsq(curvature, gradient, rcond=None)[0]
        decrease = float(gradient @ step)  # twice what a full step gains, where the loss is quadratic
        if decrease <= 1e-12 * max(1.0, value):
            return w[:-1] - step[:-1], float(w[-1] - step[-1])
        scale, found = 1.0, loss(w - step)
        while found > value - 1e-4 * scale * decrease and scale > 1e-6:
            scale /= 2
            found = loss(w - scale * step)
        w, value = w - scale * step, found
    raise ScoreError(f"an L2 probe of {n} wells and {X.shape[1]} features has not converged; check the features' scale")


def discriminant(X: np.ndarray, classes: np.ndarray, X_new: np.ndarray, shrinkage: float) -> np.ndarray:
    """Return the classes of new wells by linear discriminant analysis with equal priors.

    The covariance is the mean over classes of their population covariances, shrunk by `shrinkage` towards
    (trace / d) I, which commutes with rotations of the features.

    Parameters
    ----------
    X
        float (n, d).
    classes
        (n,) labels.
    X_new
        float (m, d).
    shrinkage
        In (0, 1].

    Returns
    -------
    ndarray
        (m,) predicted labels; the first of equal scores in sorted order.
    """
    names, codes = np.unique(classes, return_inverse=True)
    counts = np.bincount(codes)
    indicator = np.eye(len(names))[codes]
    means = (indicator.T @ X) / counts[:, None]
    rest = (X - means[codes]) / np.sqrt(counts[codes] * len(names))[:, None]
    covariance = rest.T @ rest
    d = X.shape[1]
    covariance = (1 - shrinkage) * covariance + shrinkage * np.trace(covariance) / d * np.eye(d)
    directions = np.linalg.lstsq(covariance, means.T, rcond=None)[0]  # (d, classes)
    scores = X_new @ directions - 0.5 * np.einsum("cd,dc->c", means, directions)
    return names[scores.argmax(axis=1)]
