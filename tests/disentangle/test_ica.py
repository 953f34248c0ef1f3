import warnings

import numpy as np
import pytest
from scipy import optimize, stats

from phenoica.disentangle import view
from phenoica.disentangle.ica import IcaWarning, fit_rotation, relative_gradient


def sources(n=6000, seed=0):
    """Super-Gaussian, sub-Gaussian and skewed sources, unit variance."""
    rng = np.random.default_rng(seed)
    S = np.stack(
        [
            rng.laplace(size=n),
            rng.uniform(-1, 1, n),
            rng.exponential(size=n),
            rng.choice([-1.0, 1.0], n) + 0.2 * rng.standard_normal(n),
            rng.standard_t(5, n),
        ],
        axis=1,
    )
    return (S - S.mean(0)) / S.std(0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_planted_sources_come_back(seed):
    S = sources(seed=seed)
    X = S @ np.random.default_rng(100 + seed).standard_normal((5, 9)) + 4
    fitted = view("ica", n_components=5, seed=seed).fit(X)
    r = np.corrcoef(S.T, fitted.transform(X, dtype=float).T)[:5, 5:]
    rows, columns = optimize.linear_sum_assignment(-np.abs(r))
    assert (np.abs(r[rows, columns]) > 0.95).all()
    assert fitted.converged_ and fitted.gradient_ <= fitted.tolerance


def test_gradient_is_the_derivative_of_the_log_cosh_likelihood():
    Y = sources(2000)
    psi = np.tanh(Y)
    signs = np.sign((1 - psi**2).mean(0) - (psi * Y).mean(0))

    def loss(angle, i, j):
        turned = Y.copy()
        turned[:, i] = np.cos(angle) * Y[:, i] + np.sin(angle) * Y[:, j]
        turned[:, j] = np.cos(angle) * Y[:, j] - np.sin(angle) * Y[:, i]
        return (signs * np.log(np.cosh(turned)).mean(0)).sum()

    h = 1e-5
    slopes = [(loss(h, i, j) - loss(-h, i, j)) / (2 * h) for i in range(5) for j in range(i)]
    assert relative_gradient(Y) == pytest.approx(np.abs(slopes).max() / 2, rel=1e-6)
    assert relative_gradient(Y.astype(np.float32)) == pytest.approx(relative_gradient(Y), rel=1e-5)


def test_gradient_does_not_depend_on_sign_order_or_blocks(monkeypatch):
    Y = sources(500)
    whole = relative_gradient(Y)
    assert relative_gradient(-Y[:, ::-1]) == pytest.approx(whole)
    monkeypatch.setattr("phenoica.disentangle.ica._BLOCK_ROWS", 7)
    assert relative_gradient(Y) == pytest.approx(whole)


def test_sign_and_order_are_fixed():
    S = sources()
    Z = view("pca").fit(S).transform(S, dtype=float)
    fits = [fit_rotation(Z, seed=seed, tolerance=1e-8) for seed in (0, 7)]
    for fit in fits:
        Y = Z @ fit.rotation
        assert (stats.skew(Y, axis=0) > 0).all()
        assert (np.diff(stats.kurtosis(Y, axis=0)) <= 0).all()
        np.testing.assert_allclose(fit.rotation.T @ fit.rotation, np.eye(5), atol=1e-12)
    np.testing.assert_allclose(fits[0].rotation, fits[1].rotation, atol=1e-5)


def test_no_warning_when_converged_on_enough_wells():
    S = sources()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fit_rotation(view("pca").fit(S).transform(S, dtype=float), seed=0).warnings == ()


def test_not_converged_is_said_aloud_and_recorded(tmp_path):
    S = sources()
    X = S @ np.random.default_rng(3).standard_normal((5, 5))
    with pytest.warns(IcaWarning, match=r"not converged after 2 iterations.*ica_max_iter"):
        fitted = view("ica", max_iter=2).fit(X)
    assert not fitted.converged_ and fitted.n_iter_ == 2
    assert fitted.gradient_ == pytest.approx(relative_gradient(fitted.transform(X, dtype=float)), rel=1e-6)
    assert any("not converged" in message for message in fitted.warnings_)


def test_few_wells_are_said_aloud():
    S = sources(249)
    with pytest.warns(IcaWarning, match="249 wells for 5 components is fewer than 10 k"):
        fitted = view("ica").fit(S)
    assert any("10 k^2" in message for message in fitted.warnings_)
