import hashlib
import importlib.util
import warnings

import numpy as np
import pytest
from scipy import linalg
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression

from phenoica.disentangle import load_view, view
from phenoica.disentangle.rotations import haar_rotation
from phenoica.disentangle.views import VIEWS
from phenoica.errors import ConfigError, ControlsError, FitError, SchemaError

NAMES = [*VIEWS, "centerscale + ica", "raw + pca"]
if importlib.util.find_spec("harmonypy") is None:
    warnings.warn("harmonypy is not installed: the view harmony is NOT tested (pip install harmonypy)", stacklevel=1)
    NAMES.remove("harmony")
LEARNED = ("pca", "ica", "rotation", "varimax", "tvn", "harmony")  # views with a width
WIDE = {"n_components": 4}


def options(name):
    return WIDE if any(part in name for part in LEARNED) else {}


@pytest.fixture
def data(make_metadata, make_planted):
    obs = make_metadata()
    X, factors = make_planted(obs)
    return X, obs, factors


def state_bytes(folder):
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*.*")}


@pytest.mark.parametrize("name", NAMES)
def test_unit_variance_on_training_wells(data, name):
    X, obs, _ = data
    fitted = view(name, **options(name)).fit(X, obs)
    Z = fitted.transform(X, obs, dtype=np.float64)
    assert Z.shape == (len(X), fitted.n_components_)
    if fitted.unit_variance:
        np.testing.assert_allclose(Z.var(axis=0), 1.0, atol=1e-9)
    assert fitted.transform(X, obs).dtype == np.float32
    assert fitted.name == name


@pytest.mark.parametrize("name", NAMES)
def test_save_and_load_give_the_same_numbers_and_the_same_bytes(data, name, tmp_path):
    X, obs, _ = data
    fitted = view(name, **options(name)).fit(X, obs)
    fitted.save(tmp_path / "one")
    loaded = load_view(tmp_path / "one")
    new = obs.assign(experiment="new" + obs["experiment"])
    for wells in (obs, new) if fitted.test_data_used != "all" else (obs,):
        np.testing.assert_array_equal(
            loaded.transform(X, wells, dtype=np.float64), fitted.transform(X, wells, dtype=np.float64)
        )
    assert (loaded.name, loaded.test_data_used, loaded.n_components_) == (
        name, fitted.test_data_used, fitted.n_components_,
    )  # fmt: skip
    view(name, **options(name)).fit(X.copy(), obs.copy()).save(tmp_path / "two")
    loaded.save(tmp_path / "three")
    assert state_bytes(tmp_path / "one") == state_bytes(tmp_path / "two") == state_bytes(tmp_path / "three")


def test_raw_is_the_standard_score(data):
    X, obs, _ = data
    X = X.astype(np.float64)
    np.testing.assert_allclose(view("raw").fit(X, obs).transform(X, dtype=float), (X - X.mean(0)) / X.std(0))


@pytest.mark.parametrize("shape", [(300, 12), (20, 50)])
def test_pca_agrees_with_scikit_learn(shape):
    X = np.random.default_rng(0).standard_normal(shape) * np.linspace(1, 5, shape[1]) + 3
    k = 6
    ours = view("pca", n_components=k).fit(X).transform(X, dtype=float)
    theirs = PCA(k, whiten=True, svd_solver="full").fit(X).transform(X)
    # scikit-learn whitens with n - 1
    theirs *= np.sqrt(len(X) / (len(X) - 1)) * np.sign((ours * theirs).sum(0))
    np.testing.assert_allclose(ours, theirs, atol=1e-8)


def test_sign_of_pca_does_not_depend_on_the_sign_of_the_data(data):
    X, _, _ = data
    loadings = view("pca", n_components=4).fit(X).components_
    assert (loadings[np.abs(loadings).argmax(0), range(4)] > 0).all()
    np.testing.assert_allclose(view("pca", n_components=4).fit(-X.astype(float)).components_, loadings, atol=1e-9)


def test_pca_rotation_and_ica_of_one_fit_differ_by_an_orthogonal_matrix(data):
    X, obs, _ = data
    pca = view("pca", n_components=4).fit(X, obs)
    base = pca.transform(X, obs, dtype=np.float64)
    for other in (view("rotation", pca=pca, seed=3, draw=1), view("ica", pca=pca)):
        other.fit(X, obs)
        R = other.rotation_
        np.testing.assert_allclose(R.T @ R, np.eye(4), atol=1e-10)
        np.testing.assert_allclose(other.transform(X, obs, dtype=np.float64), base @ R, atol=1e-10)
        np.testing.assert_allclose(other.transform(X, obs), pca.transform(X, obs) @ R, atol=1e-4)


def test_l2_probe_cannot_tell_pca_rotation_and_ica_apart(data):
    X, obs, _ = data
    pca = view("pca", n_components=4).fit(X, obs)
    y = obs["perturbation"].isin(["PLK1", "GENE01"])
    decisions = []
    for v in (pca, view("rotation", pca=pca).fit(X, obs), view("ica", pca=pca).fit(X, obs)):
        Z = v.transform(X, obs, dtype=np.float64)
        probe = LogisticRegression(C=1.0, tol=1e-12, max_iter=10000, solver="newton-cholesky").fit(Z, y)
        decisions.append(probe.decision_function(Z))
    np.testing.assert_allclose(decisions[1], decisions[0], atol=1e-6)
    np.testing.assert_allclose(decisions[2], decisions[0], atol=1e-6)


def test_haar_rotations_differ_by_draw_and_seed_and_are_uniform():
    draws = np.stack([haar_rotation(3, 0, draw) for draw in range(4000)])
    assert not np.allclose(draws[0], haar_rotation(3, 1, 0))
    np.testing.assert_array_equal(draws[5], haar_rotation(3, 0, 5))
    # an entry of a Haar matrix has mean 0, variance 1/3 and fourth moment 3/(3*5)
    np.testing.assert_allclose(draws.mean(0), 0, atol=0.05)
    np.testing.assert_allclose((draws**2).mean(0), 1 / 3, atol=0.03)
    np.testing.assert_allclose((draws**4).mean(0), 1 / 5, atol=0.03)
    assert 0.45 < (np.linalg.det(draws) > 0).mean() < 0.55


def by_hand(X, obs, width=None, standardise=False, project=False, whiten=False):
    """Centre-scale per experiment on fit controls, the long way round."""
    fit = (obs["control_role"] == "fit").to_numpy()
    X = X.astype(np.float64)
    if standardise:
        X = (X - X[fit].mean(0)) / X[fit].std(0, ddof=1)
    if project:
        X = (X - X[fit].mean(0)) @ PCA(width, svd_solver="full").fit(X[fit]).components_.T
    out = np.empty_like(X)
    for experiment in set(obs["experiment"]):
        here = (obs["experiment"] == experiment).to_numpy()
        own = X[here & fit]
        out[here] = (X[here] - own.mean(0)) / own.std(0, ddof=1)
        if whiten:
            covariance = np.cov(out[here & fit], rowvar=False) + 0.5 * np.eye(X.shape[1])
            out[here] = out[here] @ np.real(linalg.fractional_matrix_power(covariance, -0.5))
    return out


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("centerscale", {}),
        ("pca_cs", {"width": 4, "project": True}),
        ("tvn", {"width": 4, "standardise": True, "project": True, "whiten": True}),
    ],
)
def test_batch_views_by_hand(data, name, how):
    X, obs, _ = data
    train = (obs["experiment"] < "gene-004").to_numpy()
    fitted = view(name, **options(name)).fit(X[train], obs[train])
    assert fitted.test_data_used == "controls"
    expected = by_hand(X[train], obs[train], **how)
    scale = expected.std(0)
    ours = fitted.transform(X[train], obs[train], dtype=float)
    sign = np.sign((ours * expected).sum(0))
    np.testing.assert_allclose(ours, expected / scale * sign, atol=1e-8)
    if name == "centerscale":  # a new batch is centred on its own fit controls
        new = by_hand(X[~train], obs[~train]) / scale
        np.testing.assert_allclose(fitted.transform(X[~train], obs[~train], dtype=float), new, atol=1e-8)


@pytest.mark.parametrize("name", ["centerscale", "tvn", "pca_cs", "centerscale + ica"])
def test_batch_views_never_read_reference_controls_or_cases_of_a_new_batch(data, name):
    X, obs, _ = data
    train = (obs["experiment"] != "gene-005").to_numpy()
    fitted = view(name, **options(name)).fit(X[train], obs[train])
    X_new, new = X[~train], obs[~train]
    before = fitted.transform(X_new, new)
    other = X_new.copy()
    fit = (new["control_role"] == "fit").to_numpy()
    other[~fit] += 100
    np.testing.assert_array_equal(fitted.transform(other, new)[fit], before[fit])
    other = X_new.copy()
    other[fit] += 100
    assert not np.allclose(fitted.transform(other, new)[~fit], before[~fit])


@pytest.mark.parametrize("name", ["centerscale", "tvn", "pca_cs", "centerscale + ica"])
def test_new_batches_among_training_wells_are_read_at_their_own_place(data, name):
    X, obs, _ = data
    train = (obs["experiment"] < "gene-004").to_numpy()
    fitted = view(name, **options(name)).fit(X[train], obs[train])
    order = np.random.default_rng(0).permutation(len(X))  # training and new batches interleaved, as scores pass them
    together = np.empty((len(X), fitted.n_components_))
    together[order] = fitted.transform(X[order], obs.iloc[order], dtype=float)
    for experiment in set(obs["experiment"]):
        here = (obs["experiment"] == experiment).to_numpy()
        np.testing.assert_allclose(fitted.transform(X[here], obs[here], dtype=float), together[here], atol=1e-8)


def test_unseen_batch_without_fit_controls_is_named_or_pooled_in_every_batch_view(data):
    X, obs, _ = data
    train = (obs["experiment"] != "gene-005").to_numpy()
    bare = obs[~train].assign(control_role="none")
    for name in ("centerscale", "tvn", "pca_cs", "centerscale + ica"):
        strict = view(name, **options(name)).fit(X[train], obs[train])
        with pytest.raises(ControlsError, match=r"experiment gene-005 \(0\): 8 are needed; lower .*pooled"):
            strict.transform(X[~train], bare)
        pooled = view(name, missing_controls="pooled", **options(name)).fit(X[train], obs[train])
        assert np.isfinite(pooled.transform(X[~train], bare)).all()


def test_a_training_batch_keeps_its_statistics(data):
    X, obs, _ = data
    fitted = view("tvn", n_components=4).fit(X, obs)
    cases = (obs["control"] == "none").to_numpy()
    np.testing.assert_array_equal(fitted.transform(X[cases], obs[cases]), fitted.transform(X, obs)[cases])


def test_batch_without_fit_controls_is_named_or_pooled(data):
    X, obs, _ = data
    bare = obs.copy()
    bare.loc[bare["experiment"] == "gene-003", "control_role"] = "none"
    with pytest.raises(ControlsError, match=r"experiment gene-003 \(0\).*disentangle.min_fit_controls"):
        view("centerscale").fit(X, bare)
    pooled = view("centerscale", missing_controls="pooled").fit(X, bare)
    here = (bare["experiment"] == "gene-003").to_numpy()
    fit = (bare["control_role"] == "fit").to_numpy()
    X64 = X.astype(float)
    expected = (X64[here] - X64[fit].mean(0)) / X64[fit].std(0, ddof=1) * pooled.unit_
    np.testing.assert_allclose(pooled.transform(X[here], bare[here], dtype=float), expected)
    new = bare[here].assign(experiment="unseen")
    np.testing.assert_allclose(pooled.transform(X[here], new, dtype=float), expected)
    strict = view("centerscale").fit(X, obs)
    with pytest.raises(ControlsError, match="unseen"):
        strict.transform(X[here], new)


def test_few_fit_controls_count_as_missing(data):
    X, obs, _ = data
    with pytest.raises(ControlsError, match=r"gene-000 \(16\)"):
        view("pca_cs", n_components=2, min_fit_controls=17).fit(X, obs)


def test_constant_feature_becomes_zero_and_leaves_the_others(data):
    X, obs, _ = data
    with_constant = np.insert(X, 5, np.float32(0.1), axis=1)
    for name in ("raw", "centerscale"):
        fitted = view(name).fit(with_constant, obs)
        Z = fitted.transform(with_constant + 1, obs)
        assert (Z[:, 5] == 0).all() and np.isfinite(Z).all()
    for name in ("pca", "tvn", "pca_cs", "ica"):
        fitted = view(name, **WIDE).fit(with_constant, obs)
        assert np.isfinite(fitted.transform(with_constant, obs)).all()
        np.testing.assert_allclose(fitted.components_[5], 0, atol=1e-9)


def test_feature_constant_in_one_batch_is_scaled_by_all_training_controls(data):
    X, obs, _ = data
    X = X.astype(np.float64)
    here = (obs["experiment"] == "gene-002").to_numpy()
    fit = (obs["control_role"] == "fit").to_numpy()
    X[here & fit, 0] = 7.0
    fitted = view("centerscale").fit(X, obs)
    expected = (X[here, 0] - 7.0) / X[fit, 0].std(ddof=1) * fitted.unit_[0]
    np.testing.assert_allclose(fitted.transform(X, obs, dtype=float)[here, 0], expected)


@pytest.mark.parametrize("name", ["pca", "ica", "rotation", "centerscale + ica"])
def test_more_components_than_features(data, name):
    X, obs, _ = data
    with pytest.raises(FitError, match=r"n_components is 99.*at most 24.*disentangle\.n_components"):
        view(name, n_components=99).fit(X, obs)


@pytest.mark.parametrize("name", ["tvn", "pca_cs"])
def test_more_components_than_fit_controls(data, name):
    X, obs, _ = data
    one = (obs["plate_id"] == "gene-000_1").to_numpy()  # 8 fit controls: 7 directions
    with pytest.raises(FitError, match="8 training fit controls with 24 features allow at most 7"):
        view(name, n_components=8).fit(X[one], obs[one])
    assert view(name).fit(X[one], obs[one]).n_components_ == 7


def test_fewer_wells_than_features():
    X = np.random.default_rng(0).standard_normal((10, 30))
    with pytest.raises(FitError, match="10 training wells with 30 features allow at most 9"):
        view("pca", n_components=10).fit(X)
    Z = view("pca").fit(X).transform(X, dtype=float)
    np.testing.assert_allclose(Z.T @ Z / 10, np.eye(9), atol=1e-10)


def test_whitening_holds_where_variances_differ_by_nine_orders():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((400, 30)) * np.logspace(0, -4.5, 30) @ np.linalg.qr(rng.standard_normal((30, 30)))[0]
    pca = view("pca").fit(X)
    Z = pca.transform(X, dtype=float)
    np.testing.assert_allclose(Z.T @ Z / 400, np.eye(30), atol=1e-5)
    np.testing.assert_allclose(Z.var(axis=0), 1, atol=1e-9)
    view("rotation", pca=pca).fit(X)
    with pytest.raises(FitError, match="at most 20"):
        view("pca", n_components=30).fit(np.concatenate([X[:, :20], X[:, :10] + X[:, 10:20]], axis=1))


def test_bad_input_is_named(data):
    X, obs, _ = data
    X = X.copy()
    fitted = view("raw").fit(X, obs)
    X[7, 3] = np.nan
    for call in (view("raw").fit, fitted.transform):
        with pytest.raises(SchemaError, match=rf"not finite in 1 wells, first well {obs.index[7]}, feature 3"):
            call(X, obs)
    X[7, 3] = 0
    with pytest.raises(SchemaError, match="fitted on 24 features, these wells have 23"):
        fitted.transform(X[:, 1:], obs)
    with pytest.raises(SchemaError, match="aligned"):
        view("raw").fit(X[1:], obs)
    with pytest.raises(FitError, match="not fitted"):
        view("pca").transform(X, obs)
    failed = view("pca", n_components=99)
    with pytest.raises(FitError, match="at most 24"):
        failed.fit(X, obs)
    for unfitted in (lambda: failed.transform(X, obs), lambda: failed.save("nowhere")):
        with pytest.raises(FitError, match="not fitted"):
            unfitted()
    with pytest.raises(SchemaError, match="control_role"):
        view("centerscale").fit(np.ones((3, 2)), obs[:3].drop(columns="control_role"))
    with pytest.raises(FitError, match="other wells"):
        view("ica", pca=view("pca", n_components=4).fit(X[:60])).fit(X)


@pytest.mark.parametrize(
    ("name", "wrong", "match"),
    [
        ("pcaa", {}, "unknown view 'pcaa'"),
        ("pca", {"components": 3}, "no option 'components'"),
        ("pca", {"n_components": 0}, "n_components is 0"),
        ("pca", {"n_components": 2.0}, "n_components is 2.0"),
        ("ica", {"tolerance": 0.0}, "tolerance is 0.0"),
        ("ica", {"max_iter": 0}, "max_iter is 0"),
        ("rotation", {"draw": -1}, "draw is -1"),
        ("tvn", {"missing_controls": "skip"}, "missing_controls is 'skip'"),
        ("tvn", {"min_fit_controls": 1}, "min_fit_controls is 1"),
        ("raw + raw + nothing", {}, "unknown view 'nothing'"),
    ],
)
def test_wrong_options_are_refused_before_work_starts(name, wrong, match):
    with pytest.raises(ConfigError, match=match):
        view(name, **wrong)


def test_damaged_state_is_named(data, tmp_path):
    X, obs, _ = data
    view("pca", n_components=2).fit(X, obs).save(tmp_path)
    (tmp_path / "state.npz").write_bytes(b"nothing")
    with pytest.raises(SchemaError, match="state.npz"):
        load_view(tmp_path)
    with pytest.raises(SchemaError, match="view.json"):
        load_view(tmp_path / "absent")


def test_chain_says_what_it_reads_of_test_batches():
    assert view("raw + pca").test_data_used == "none"
    assert view("centerscale + ica").test_data_used == "controls"
