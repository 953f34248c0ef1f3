"""mad, spherize and varimax against their definitions; the rotations of one pca against each other; memory."""

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from sklearn.decomposition import PCA
from sklearn.decomposition._factor_analysis import _ortho_rotation

from phenoica.disentangle import blocks, view
from phenoica.disentangle.blocks import Rows, first_two_moments
from phenoica.disentangle.varimax import varimax_rotation
from phenoica.errors import ConfigError, FitError

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "views.py"


@pytest.fixture
def data(make_metadata, make_planted):
    obs = make_metadata()
    return make_planted(obs)[0], obs


@pytest.fixture
def small_blocks(monkeypatch):
    """Read a few rows at a time, so that joining blocks is tested."""
    monkeypatch.setattr(blocks, "_BLOCK_NUMBERS", 1)
    real = blocks.Rows.blocks

    def few(self):
        for start in range(0, len(self), 7):
            part = self.where(np.arange(start, min(start + 7, len(self))))
            for place, block in real(part):
                yield slice(place.start + start, place.stop + start), block

    monkeypatch.setattr(blocks.Rows, "blocks", few)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_moments_of_blocks_are_those_of_the_matrix(small_blocks, dtype):
    X = (np.random.default_rng(0).standard_normal((100, 5)) * [1, 10, 1e-3, 1e4, 0] + 1e4).astype(dtype)
    found = first_two_moments(Rows(X), scatter=True)
    X = X.astype(np.float64)
    np.testing.assert_allclose(found.mean, X.mean(0), rtol=1e-14)
    size = np.sqrt(np.outer(X.var(0), X.var(0))) + 1e-12
    np.testing.assert_allclose(found.scatter / size, 100 * np.cov(X.T, ddof=0) / size, atol=1e-7)
    np.testing.assert_array_equal(found.largest, np.abs(X).max(0))
    expected = np.where(X.std(0) > 0, 1 / np.maximum(X.std(0), 1e-300), 0)
    np.testing.assert_allclose(found.reciprocal_sd(), expected, rtol=1e-9)


NAMES = ["raw", "centerscale", "mad", "spherize", "pca", "varimax", "rotation", "tvn", "pca_cs", "centerscale + pca"]


@pytest.mark.parametrize("name", NAMES)
def test_the_size_of_blocks_changes_nothing(data, name, request):
    X, obs = data
    options = {"n_components": 4} if name not in ("raw", "centerscale", "mad", "spherize") else {}
    train = (obs["experiment"] != "gene-005").to_numpy()
    whole = view(name, **options).fit(X[train], obs[train]).transform(X, obs, dtype=np.float64)
    request.getfixturevalue("small_blocks")
    parts = view(name, **options).fit(X[train], obs[train]).transform(X, obs, dtype=np.float64)
    np.testing.assert_allclose(parts, whole, atol=1e-8)


def test_chosen_rows_and_steps_compose():
    X = np.arange(40.0).reshape(10, 4)
    rows = Rows(X).then(lambda block, where: block * np.arange(10)[where, None], 4).where(np.array([7, 2, 5]))
    np.testing.assert_array_equal(rows.where(np.array([2, 0])).array(), X[[5, 7]] * [[5], [7]])
    np.testing.assert_array_equal(np.concatenate([c for _, c in rows.columns()], axis=1), rows.array())


def test_mad_is_the_robust_score_of_the_field(data):
    X, obs = data
    X = X.astype(np.float64)
    mad = stats.median_abs_deviation(X, axis=0, scale=1 / 1.4826)
    fitted = view("mad").fit(X[:400])
    mad = stats.median_abs_deviation(X[:400], axis=0, scale=1 / 1.4826)
    np.testing.assert_allclose(fitted.transform(X, dtype=float), (X - np.median(X[:400], axis=0)) / mad, atol=1e-10)
    assert fitted.test_data_used == "none" and not fitted.unit_variance and not fitted.warnings_
    # one that is not `raw` with another centre
    raw = view("raw").fit(X[:400]).transform(X, dtype=float)
    assert np.ptp(fitted.transform(X, dtype=float).std(0) / raw.std(0)) > 0.5


def test_outliers_move_raw_and_not_mad(data):
    X, obs = data
    wild = X.copy()
    wild[::50] += 1e4
    inliers = np.arange(len(X)) % 50 != 0
    mad, raw = (view(name).fit(wild).transform(X[inliers], dtype=float) for name in ("mad", "raw"))
    clean_mad, clean_raw = (view(name).fit(X).transform(X[inliers], dtype=float) for name in ("mad", "raw"))
    assert np.abs(mad.std(0) / clean_mad.std(0) - 1).max() < 0.1
    assert (raw.std(0) / clean_raw.std(0)).max() < 0.05


def test_a_feature_without_mad_is_said(data):
    X, _ = data
    X = X.copy()
    X[: len(X) // 2 + 1, 2] = 0  # more than half of the wells
    X[:, 3] = 1
    fitted = view("mad").fit(X)
    assert not fitted.transform(X)[:, [2, 3]].any()
    assert len(fitted.warnings_) == 1 and "1 of 24 features" in fitted.warnings_[0]


def test_spherize_is_zca_cor_on_the_fit_controls(data):
    X, obs = data
    fit = (obs["control_role"] == "fit").to_numpy()
    fitted = view("spherize", regularisation=0.3).fit(X, obs)
    X = X.astype(np.float64)
    scaled = (X - X[fit].mean(0)) / X[fit].std(0, ddof=1)
    values, vectors = np.linalg.eigh(np.corrcoef(X[fit].T) + 0.3 * np.eye(24))
    expected = scaled @ (vectors / np.sqrt(values)) @ vectors.T
    np.testing.assert_allclose(fitted.transform(X, obs, dtype=float), expected / expected.std(0), atol=1e-8)
    assert fitted.test_data_used == "none"
    # nothing is read of a new batch, its controls included
    np.testing.assert_array_equal(fitted.transform(X[:5]), fitted.transform(X, obs)[:5])


def test_spherize_whitens_controls_and_keeps_features(make_metadata):
    obs = make_metadata(n_experiments=40)
    rng = np.random.default_rng(0)
    X = rng.standard_normal((len(obs), 6)) @ (np.eye(6) + 0.3 * rng.standard_normal((6, 6)))
    fit = (obs["control_role"] == "fit").to_numpy()
    Z = view("spherize", regularisation=1e-9).fit(X, obs).transform(X, obs, dtype=float)
    np.testing.assert_allclose(np.corrcoef(Z[fit].T), np.eye(6), atol=1e-6)
    resemblance = np.corrcoef(X.T, Z.T)[:6, 6:]
    assert (resemblance.argmax(1) == np.arange(6)).all() and np.diag(resemblance).min() > 0.7


def test_the_ridge_of_spherize_bounds_what_noise_is_blown_up_to(make_metadata):
    obs = make_metadata(n_experiments=2)
    X = np.random.default_rng(0).standard_normal((len(obs), 80))  # 32 fit controls, 80 features
    W = view("spherize").fit(X, obs)
    raw = view("raw").fit(X, obs)
    gain = np.linalg.svd((W.components_ / raw.scale_[:, None]) / np.abs(W.components_).max(), compute_uv=False)
    assert gain[0] / gain[gain > 0][-1] < 30
    for wrong in (0.0, -1.0, 1, "x"):
        with pytest.raises(ConfigError, match="regularisation is"):
            view("spherize", regularisation=wrong)
    with pytest.raises(FitError, match="32 fit controls in all training batches; 33 are needed"):
        view("spherize", min_fit_controls=33).fit(X, obs)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pca_varimax_rotation_and_ica_are_rotations_of_each_other_with_unit_variance(
    make_metadata, make_planted, seed, dtype
):
    obs = make_metadata()
    X = (make_planted(obs, seed=seed)[0] * 3 + 5).astype(dtype)
    pca = view("pca", n_components=4).fit(X)
    others = [view(name, pca=pca, seed=seed).fit(X) for name in ("varimax", "rotation", "ica")]
    Z = [v.transform(X) for v in (pca, *others)]
    for one in Z:
        assert one.dtype == np.float32
        np.testing.assert_allclose(one.astype(float).var(axis=0), 1, atol=1e-4)
        for two in Z:
            R = np.linalg.lstsq(one.astype(float), two.astype(float), rcond=None)[0]
            np.testing.assert_allclose(R.T @ R, np.eye(4), atol=1e-4)
            np.testing.assert_allclose(one @ R, two, atol=1e-4)
    for other in others:
        np.testing.assert_array_equal(other.components_, pca.components_ @ other.rotation_)  # composed in float64
        np.testing.assert_allclose(other.rotation_.T @ other.rotation_, np.eye(4), atol=1e-12)


def planted_loadings(seed, d=40, k=5):
    """Each feature on one factor, turned by a random rotation."""
    rng = np.random.default_rng(seed)
    simple = np.zeros((d, k))
    simple[np.arange(d), np.arange(d) % k] = rng.uniform(0.5, 2, d) * rng.choice([-1, 1], d)
    return simple, np.linalg.qr(rng.standard_normal((k, k)))[0]


@pytest.mark.parametrize("seed", range(5))
def test_varimax_finds_planted_simple_structure(seed):
    simple, turn = planted_loadings(seed)
    rotation, _, converged = varimax_rotation(simple @ turn)
    found = simple @ turn @ rotation
    assert converged and ((np.abs(found) > 1e-6).sum(axis=1) == 1).all()
    np.testing.assert_allclose(rotation.T @ rotation, np.eye(5), atol=1e-12)


def varimax_criterion(loadings):
    """Kaiser's (1958) raw varimax: the sum over columns of the variance of the squared loadings."""
    return (loadings**2).var(axis=0).sum()


@pytest.mark.parametrize("k", [2, 3, 8, 13])
@pytest.mark.parametrize("seed", range(3))
def test_varimax_reaches_the_criterion_of_scikit_learn(seed, k):
    rng = np.random.default_rng(seed)
    loadings = rng.standard_normal((60, k)) ** 3
    rows = loadings / np.linalg.norm(loadings, axis=1, keepdims=True)  # Kaiser's normalisation
    rotation, _, converged = varimax_rotation(loadings)
    theirs = _ortho_rotation(rows, method="varimax", tol=1e-12, max_iter=5000).T
    assert converged
    assert varimax_criterion(rows @ rotation) >= varimax_criterion(theirs) * (1 - 1e-3)
    assert varimax_criterion(rows @ rotation) > varimax_criterion(rows)


def test_varimax_is_stationary_deterministic_and_free_of_the_features_scale():
    loadings = np.random.default_rng(3).standard_normal((50, 6)) ** 3
    rotation, _, _ = varimax_rotation(loadings)
    rows = loadings / np.linalg.norm(loadings, axis=1, keepdims=True)
    best = varimax_criterion(rows @ rotation)
    for i in range(6):
        for j in range(i):
            turn = np.eye(6)
            turn[[i, i, j, j], [i, j, i, j]] = np.cos(1e-3), np.sin(1e-3), -np.sin(1e-3), np.cos(1e-3)
            assert varimax_criterion(rows @ rotation @ turn) <= best
    np.testing.assert_array_equal(varimax_rotation(loadings.copy())[0], rotation)
    scales = np.logspace(-4, 4, 50)[:, None]
    np.testing.assert_allclose(varimax_rotation(loadings * scales)[0], rotation, atol=1e-9)
    np.testing.assert_array_equal(varimax_rotation(np.vstack([loadings, np.zeros((3, 6))]))[0], rotation)
    assert varimax_rotation(loadings[:, :1])[0] == 1


def test_varimax_view_recovers_blocks_of_features_in_a_fixed_order_and_sign():
    rng = np.random.default_rng(0)
    factors = rng.standard_normal((3000, 4)) * [2.0, 1.8, 1.6, 1.4]
    X = np.repeat(factors, 5, axis=1) + 0.1 * rng.standard_normal((3000, 20))
    fitted = view("varimax", n_components=4).fit(X)
    Z = fitted.transform(X, dtype=float)
    np.testing.assert_allclose(np.corrcoef(Z.T, factors.T)[:4, 4:], np.eye(4), atol=0.1)
    assert (np.abs(np.corrcoef(Z.T, factors.T)[:4, 4:]).argmax(1) == range(4)).all() and fitted.converged_
    again = view("varimax", n_components=4).fit(-X)
    np.testing.assert_allclose(again.components_, fitted.components_, atol=1e-6)


def test_varimax_finds_gaussian_factors_that_neither_pca_nor_ica_can():
    factors = np.random.default_rng(0).standard_normal((3000, 4))
    X = np.repeat(factors, 5, axis=1) + 0.1 * np.random.default_rng(1).standard_normal((3000, 20))
    best = {}
    for name in ("pca", "varimax", "ica"):
        Z = view(name, n_components=4).fit(X).transform(X, dtype=float)
        best[name] = np.abs(np.corrcoef(Z.T, factors.T)[:4, 4:]).max(axis=1).min()
    assert best["varimax"] > 0.99 > 0.95 > max(best["pca"], best["ica"])


def test_truncated_pca_is_the_fit_of_that_width(data):
    X, _ = data
    full, short = view("pca").fit(X), view("pca", n_components=3).fit(X)
    cut = full.truncated(3)
    np.testing.assert_allclose(cut.components_, short.components_, rtol=1e-12)
    assert cut.n_components_ == 3 and full.n_components_ == 24 and cut.options() == short.options()
    np.testing.assert_allclose(cut.transform(X), short.transform(X), atol=1e-6)
    for wrong in (0, 25):
        with pytest.raises(FitError, match="of 24 were asked for"):
            full.truncated(wrong)


def test_fit_makes_no_float64_copy(monkeypatch):
    monkeypatch.setattr(blocks, "_BLOCK_NUMBERS", 2**14)
    n, d = 20000, 64
    X = np.random.default_rng(0).standard_normal((n, d), dtype=np.float32)
    for name in ("raw", "mad", "pca", "varimax", "rotation"):
        tracemalloc.start()
        fitted = view(name, **({"n_components": 16} if name not in ("raw", "mad") else {})).fit(X)
        in_fit = tracemalloc.get_traced_memory()[1]
        fitted.transform(X)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert in_fit < X.nbytes and peak < 1.5 * X.nbytes, name


@pytest.mark.slow
def test_the_size_of_rxrx3_core_fits_into_twice_the_matrix():
    views = "mad,spherize,tvn,centerscale + ica"
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--views", views], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1])["largest_memory_vs_matrix"] <= 2


def test_pca_oracle_on_float32(data):
    X, _ = data
    ours = view("pca", n_components=4).fit(X).transform(X, dtype=float)
    theirs = PCA(4, whiten=True, svd_solver="full").fit(X.astype(float)).transform(X.astype(float))
    theirs *= np.sqrt(len(X) / (len(X) - 1)) * np.sign((ours * theirs).sum(0))
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
