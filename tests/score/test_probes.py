import numpy as np
import pytest
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression

from phenoica.errors import ScoreError
from phenoica.score import l1_path, probes


def data(seed, n=120, d=6):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, d)) @ (np.eye(d) + 0.3 * rng.standard_normal((d, d)))
    labels = rng.random(n) < 0.25
    X[labels, 0] += 1.2
    X[:, 1] += 3.0  # needs the free intercept
    return X, labels


def objective(weights, intercept, X, labels, penalty):
    """The probe's objective written out: mean class-balanced log-loss + lambda |w|_1."""
    balance = np.where(labels, len(X) / (2 * labels.sum()), len(X) / (2 * (~labels).sum()))
    loss = np.logaddexp(0, -np.where(labels, 1, -1) * (X @ weights + intercept))
    return float((balance * loss).mean() + penalty * np.abs(weights).sum())


def slow_optimum(X, labels, penalty):
    """Minimise over w = p - q with p, q >= 0, where the L1 term is smooth."""
    d = X.shape[1]

    def split(z):
        weights, intercept = z[:d] - z[d:-1], z[-1]
        balance = np.where(labels, len(X) / (2 * labels.sum()), len(X) / (2 * (~labels).sum()))
        residual = balance * (1 / (1 + np.exp(-(X @ weights + intercept))) - labels) / len(X)
        gradient = X.T @ residual
        value = objective(weights, intercept, X, labels, 0) + penalty * z[:-1].sum()
        return value, np.concatenate([gradient + penalty, -gradient + penalty, [residual.sum()]])

    bounds = [(0, None)] * (2 * d) + [(None, None)]
    options = {"maxiter": 20000, "maxfun": 50000, "ftol": 1e-15, "gtol": 1e-10, "maxls": 50}
    found = minimize(split, np.zeros(2 * d + 1), jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return found.x[:d] - found.x[d:-1], found.x[-1]


def lambda_max(X, labels):
    """At w = 0 balanced classes weigh alike, so b = 0 and the gradient is a quarter of the difference of means."""
    return 0.25 * np.abs(X[labels].mean(axis=0) - X[~labels].mean(axis=0)).max()


@pytest.mark.parametrize("fraction", [0.5, 0.1, 0.02])
@pytest.mark.parametrize("seed", [0, 1])
def test_l1_agrees_with_an_independent_solver(seed, fraction):
    X, labels = data(seed)
    probe = probes.fit_l1(X, labels, fraction)
    weights, intercept = slow_optimum(X, labels, probe.penalty)
    assert probe.converged
    assert probe.penalty == pytest.approx(fraction * lambda_max(X, labels))
    reached = objective(probe.weights, probe.intercept, X, labels, probe.penalty)
    assert reached == pytest.approx(objective(weights, intercept, X, labels, probe.penalty), abs=2e-6)
    np.testing.assert_allclose(probe.weights, weights, atol=5e-3)
    np.testing.assert_allclose(probe.intercept, intercept, atol=1e-2)


def test_l1_agrees_with_saga():
    X, labels = data(4)
    probe = probes.fit_l1(X, labels, 0.1)
    saga = LogisticRegression(
        l1_ratio=1.0, solver="saga", C=1 / (len(X) * probe.penalty), class_weight="balanced", tol=1e-8, max_iter=50000,
        random_state=0,
    ).fit(X, labels)  # fmt: skip
    np.testing.assert_allclose(probe.weights, saga.coef_[0], atol=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_lambda_max_is_where_the_first_weight_appears(seed):
    X, labels = data(seed)
    largest = lambda_max(X, labels)
    assert probes.fit_l1(X, labels, 0.5).lambda_max == pytest.approx(largest)
    assert not slow_optimum(X, labels, 1.001 * largest)[0].round(6).any()
    assert np.count_nonzero(probes.fit_l1(X, labels, 0.999).weights) == 1
    assert np.abs(slow_optimum(X, labels, 0.98 * largest)[0]).max() > 1e-3


def test_features_without_a_difference_give_no_weights():
    X = np.tile([[1.0, 2.0]], (10, 1))
    probe = probes.fit_l1(X, np.arange(10) < 4, 0.1)
    assert not probe.weights.any() and probe.lambda_max < 1e-12


@pytest.mark.parametrize(
    ("X", "labels", "message"),
    [
        (np.ones((4, 2)), [1, 1, 1, 1], "only one class"),
        (np.full((4, 2), np.nan), [1, 0, 1, 0], "finite"),
        (np.ones((4, 0)), [1, 0, 1, 0], "features"),
    ],
)
def test_bad_input_is_named(X, labels, message):
    for fit in (probes.fit_l1, probes.fit_l2):
        with pytest.raises(ScoreError, match=message):
            fit(X, np.array(labels, bool), 0.5)


def test_l2_reaches_the_optimum_of_its_objective():
    X, labels = data(2)
    probe = probes.fit_l2(X, labels, 2.0)
    balance = np.where(labels, len(X) / (2 * labels.sum()), len(X) / (2 * (~labels).sum()))
    residual = balance * (1 / (1 + np.exp(-probe.decision(X))) - labels) / len(X)
    np.testing.assert_allclose(X.T @ residual + probe.weights / (2.0 * len(X)), 0, atol=1e-9)
    assert abs(residual.sum()) < 1e-9 and probe.converged


def rotated(seed=0, d=16):
    X, labels = data(seed, d=d)
    X = (X - X.mean(0)) @ np.linalg.inv(np.linalg.cholesky(np.cov(X.T))).T
    turn = np.linalg.qr(np.random.default_rng(seed).standard_normal((d, d)))[0]
    return {"pca": X, "ica": X @ turn}, labels


def decisions(views, labels, train):
    return {name: [probes.fit_l2(X[train], labels[train], 1.0).decision(X[~train])] for name, X in views.items()}


def test_l2_control_is_green_for_rotations_and_red_for_a_scaled_axis():
    views, labels = rotated()
    train = np.arange(len(labels)) % 2 == 0
    green = probes.l2_control(decisions(views, labels, train), [labels[~train]])
    assert green["holds"] and green["max_decision_difference"] < 1e-9 and green["max_auroc_difference"] == 0
    views["ica"] = views["ica"] * np.where(np.arange(16) == 3, 2.0, 1.0)
    red = probes.l2_control(decisions(views, labels, train), [labels[~train]])
    assert not red["holds"] and red["max_decision_difference"] > 1e-4


def test_l2_control_is_not_blinded_by_one_far_well():
    far = np.array([1e9, 0.1, 0.2])
    assert not probes.l2_control({"pca": [far], "ica": [far + [0, 1e-3, 0]]})["holds"]
    assert probes.l2_control({"pca": [far], "ica": [far + [1.0, 0, 0]]})["holds"]
    with pytest.raises(ScoreError, match="two views"):
        probes.l2_control({"pca": [far]})


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("contrast", [0, 1])
def test_l2_control_is_red_where_a_decision_is_not_finite(bad, contrast):
    good = [np.array([0.1, 0.2]), np.array([0.3, -0.4])]
    broken = [d.copy() for d in good]
    broken[contrast][1] = bad
    with np.errstate(invalid="ignore"):
        assert not probes.l2_control({"pca": good, "ica": broken})["holds"]
    assert probes.l2_control({"pca": good, "ica": good})["holds"]


def test_l1_sees_the_basis_that_l2_cannot():
    views, labels = rotated()
    weights = {name: probes.fit_l1(X, labels, 0.1).weights for name, X in views.items()}
    assert abs(np.linalg.norm(weights["pca"]) - np.linalg.norm(weights["ica"])) > 1e-3


def test_each_problem_is_solved_at_its_own_lambda():
    rng = np.random.default_rng(5)
    X = rng.standard_normal((60, 6))
    labels = np.arange(60) % 3 == 0
    X[labels, :2] += 1
    wells = [np.arange(60), np.arange(40), np.arange(10, 60)]
    tasks = [l1_path.Problem(X, w, labels[w]) for w in wells]
    found = probes.fit_l1_each(tasks, [0.5, 0.1, 0.5])
    for probe, w, fraction in zip(found, wells, (0.5, 0.1, 0.5), strict=True):
        assert probe.penalty == pytest.approx(fraction * probe.lambda_max)
        np.testing.assert_allclose(probe.weights, probes.fit_l1(X[w], labels[w], fraction).weights, atol=1e-6)
    assert probes.fit_l1_each([], []) == []
