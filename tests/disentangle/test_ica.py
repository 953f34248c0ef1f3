import warnings

import numpy as np
import pytest
from scipy import optimize, stats

from phenoica.disentangle import view
from phenoica.disentangle.ica import IcaWarning, fit_rotation, gradient_and_shape
from phenoica.errors import ConfigError


def relative_gradient(Y, contrast="adaptive"):
    return gradient_and_shape(Y, contrast=contrast).gradient


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


def mixture(n, k, seed, dtype):
    """Six kinds of non-Gaussian sources, two of each, among Gaussian ones, turned and whitened."""
    rng = np.random.default_rng(seed)
    kinds = [
        lambda: rng.laplace(size=n),
        lambda: rng.uniform(-1, 1, n),
        lambda: rng.gamma(2, size=n),
        lambda: rng.choice([-1.0, 1.0], n) + 0.6 * rng.standard_normal(n),
        lambda: rng.standard_t(5, n),
        lambda: rng.standard_normal(n) * np.where(rng.random(n) < 0.05, 3, 1),
    ]
    S = np.stack([kinds[j % 6]() if j < 12 else rng.standard_normal(n) for j in range(k)], axis=1)
    S = (S - S.mean(axis=0)) / S.std(axis=0)
    values, vectors = np.linalg.eigh(S.T @ S / n)
    turn = np.linalg.qr(rng.standard_normal((k, k)))[0]
    return (S @ (vectors / np.sqrt(values)) @ turn).astype(dtype), S[:, :12]


def matched(Z, fit, S):
    r = np.abs(S.T @ (Z @ fit.rotation)) / len(S)
    rows, columns = optimize.linear_sum_assignment(-r)
    return r[rows, columns]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("mix", [0, 1, 2])
def test_planted_sources_among_gaussian_ones_are_found_as_well_as_by_picard(mix, dtype):
    Z, S = mixture(20000, 24, mix, dtype)
    oracle = fit_rotation(Z, seed=0, solver="picard")
    assert oracle.converged
    for seed in range(5):
        fit = fit_rotation(Z, seed=seed)
        assert fit.converged and fit.gradient == relative_gradient(Z @ fit.rotation)
        assert (matched(Z, fit, S) >= matched(Z, oracle, S) - 0.005).all()


def test_warm_start_on_a_subsample_ends_at_the_same_sources(monkeypatch):
    Z, S = mixture(40000, 14, 0, np.float32)
    warm = fit_rotation(Z, seed=1)
    monkeypatch.setattr("phenoica.disentangle.orthogonal._SUBSAMPLE_SHARE", 0.0)
    cold = fit_rotation(Z, seed=1)
    assert warm.converged and cold.converged and warm.n_iter < cold.n_iter
    np.testing.assert_allclose(matched(Z, warm, S), matched(Z, cold, S), atol=2e-3)


def test_gradient_and_loss_of_the_solver_are_those_of_the_stopping_rule():
    import torch

    from phenoica.disentangle.orthogonal import Likelihood

    Z, _ = mixture(3000, 14, 0, np.float64)
    turn = np.linalg.qr(np.random.default_rng(1).standard_normal((14, 14)))[0]
    for double, accuracy in ((True, 1e-12), (False, 1e-6)):
        found = Likelihood(Z, "adaptive", double=double)(torch.from_numpy(turn))
        Y = Z @ turn
        assert found.largest == pytest.approx(relative_gradient(Y), rel=1e3 * accuracy)
        log_cosh = np.log(np.cosh(Y)).mean(axis=0) + np.log(2)
        np.testing.assert_allclose(found.log_cosh.numpy(), log_cosh, atol=accuracy)


def test_the_plain_log_cosh_contrast_turns_away_from_sub_gaussian_sources():
    S = sources(8000)[:, [0, 1]]  # Laplace and uniform
    Z = view("pca").fit(S).transform(S, dtype=float)
    adaptive = fit_rotation(Z, seed=0)
    assert adaptive.converged and (adaptive.kurtosis[0] > 2) and (adaptive.kurtosis[-1] < -1)
    plain = fit_rotation(Z, seed=0, contrast="logcosh")
    assert plain.converged and plain.gradient == relative_gradient(Z @ plain.rotation, contrast="logcosh")
    np.testing.assert_allclose(
        fit_rotation(Z, seed=0, contrast="logcosh", solver="picard").gradient, 0, atol=plain.gradient + 1e-4
    )


def test_moments_are_those_of_scipy():
    Y = sources(3001)
    found = gradient_and_shape(Y * 0.5 + 0.1)
    np.testing.assert_allclose(found.skew, stats.skew(Y), atol=1e-10)
    np.testing.assert_allclose(found.kurtosis, stats.kurtosis(Y), atol=1e-10)


@pytest.mark.parametrize(("option", "value"), [("solver", "fastica"), ("contrast", "cube"), ("device", "tpu")])
def test_unknown_options_are_refused(option, value):
    with pytest.raises(ConfigError, match=f"ica_{option} is '{value}'; known"):
        fit_rotation(sources(100), seed=0, **{option: value})
    with pytest.raises(ConfigError, match=f"ica_{option}"):
        view("ica", **{option: value})


def test_a_missing_gpu_is_said():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here, so its absence cannot be tested")
    with pytest.raises(ConfigError, match="ica_device is cuda, but there is no GPU"):
        fit_rotation(sources(2000), seed=0, device="cuda")
    assert fit_rotation(sources(2000), seed=0, device="auto").converged


@pytest.mark.parametrize("k", [1, 2])
def test_narrow_data(k):
    S = sources(500)[:, :k]
    fit = fit_rotation(view("pca").fit(S).transform(S, dtype=float), seed=0)
    assert fit.converged and fit.rotation.shape == (k, k)


def test_same_input_same_rotation():
    Z, _ = mixture(40000, 14, 3, np.float32)
    np.testing.assert_array_equal(fit_rotation(Z, seed=2).rotation, fit_rotation(Z, seed=2).rotation)


def test_gaussian_data_converge_and_hold_nothing():
    Z = np.random.default_rng(0).standard_normal((20000, 12))
    Z = view("pca").fit(Z).transform(Z, dtype=float)
    fit = fit_rotation(Z, seed=0)
    assert fit.converged and np.abs(fit.kurtosis).max() < 0.2
