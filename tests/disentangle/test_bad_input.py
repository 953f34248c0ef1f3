"""Every view on input that is hardly enough, or not: a finite result, or an error that says what to do."""

import importlib.util
import warnings

import numpy as np
import pytest

from phenoica.disentangle import view
from phenoica.disentangle.views import VIEWS
from phenoica.errors import FitError, PhenoicaError, SchemaError

NAMES = [*VIEWS, "centerscale + ica", "raw + varimax"]
if importlib.util.find_spec("harmonypy") is None:
    warnings.warn("harmonypy is not installed: the view harmony is NOT tested on bad input", stacklevel=1)
    NAMES.remove("harmony")
LEARNED = ("pca", "ica", "rotation", "varimax", "tvn", "harmony")
CONTROLS = {"centerscale", "spherize", "tvn", "pca_cs", "centerscale + ica"}
COMPARATORS = {"combat", "harmony"}
SCALING = {"raw", "centerscale", "mad", "spherize"}  # which give a constant feature back as 0


def learned(name):
    return any(part in name for part in LEARNED)


def run(name, X, obs, k=4):
    """Fit and transform; a division by zero or overflow on the way is a failure whatever comes out."""
    options = {"n_components": k} if learned(name) else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        warnings.filterwarnings("ignore", message="ica:")
        fitted = view(name, **options).fit(X, obs)
        Z = fitted.transform(X, obs)
    assert np.isfinite(Z).all() and Z.shape == (len(X), fitted.n_components_)
    return Z


@pytest.fixture
def data(make_metadata, make_planted):
    obs = make_metadata()
    return make_planted(obs)[0], obs


@pytest.mark.parametrize("name", NAMES)
def test_a_constant_feature_changes_nothing_else(data, name):
    X, obs = data
    with_constant = X.copy()
    with_constant[:, 3] = 7.1
    Z = run(name, with_constant, obs)
    if not learned(name):
        assert (Z[:, 3] == 0).all()
        others = np.delete(np.arange(24), 3)
        without = run(name, X[:, others], obs)
        np.testing.assert_allclose(Z[:, others], without, atol=1e-4)


@pytest.mark.parametrize("value", [0.0, 0.1, -3e5])
@pytest.mark.parametrize("name", NAMES)
def test_only_constant_features(data, name, value):
    X, obs = np.full_like(data[0], value), data[1]
    if name in SCALING:
        assert not run(name, X, obs).any()
        return
    with pytest.raises(FitError, match="no feature varies among them|0 of 24 features vary"):
        run(name, X, obs)


@pytest.mark.parametrize("k", [4, None])
@pytest.mark.parametrize("name", NAMES)
def test_duplicated_features(data, name, k):
    X, obs = data
    Z = run(name, np.concatenate([X, X, X], axis=1), obs, k)
    if learned(name):
        assert Z.shape[1] == (k or 24)  # copies add no component
    else:
        np.testing.assert_allclose(Z[:, :24], Z[:, 24:48], atol=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", NAMES)
def test_a_feature_that_is_not_finite(data, name, bad):
    X, obs = data
    X = X.copy()
    X[:, 3] = bad
    with pytest.raises(SchemaError, match=rf"not finite in 576 wells, first well {obs.index[0]}, feature 3"):
        run(name, X, obs)


@pytest.mark.parametrize("name", NAMES)
def test_fewer_wells_than_features(data, name):
    X, obs = data
    few = np.flatnonzero(obs.groupby("experiment").cumcount().to_numpy() < 9)[:18]  # 9 wells of two experiments
    run(name, X[few], obs.iloc[few], 4)
    if learned(name) and name not in CONTROLS:
        with pytest.raises(FitError, match="n_components is 18, but 18 training wells with 24 features allow at most"):
            run(name, X[few], obs.iloc[few], 18)


@pytest.mark.parametrize("name", NAMES)
def test_one_experiment(data, name):
    X, obs = data
    one = (obs["experiment"] == "gene-000").to_numpy()
    if name in COMPARATORS:
        with pytest.raises(FitError, match=f"view {name}: one experiment in training"):
            run(name, X[one], obs[one])
    else:
        run(name, X[one], obs[one])


@pytest.mark.parametrize("name", NAMES)
def test_one_component_and_one_feature(data, name):
    X, obs = data
    assert run(name, X, obs, 1).shape[1] == (1 if learned(name) else 24)
    if name == "combat":
        with pytest.raises(FitError, match="1 of 1 features vary; ComBat needs at least 2"):
            run(name, X[:, :1], obs, 1)
    else:
        assert run(name, X[:, :1], obs, 1).shape[1] == 1


@pytest.mark.parametrize("name", NAMES)
def test_three_wells(data, name):
    X, obs = data
    if name in CONTROLS:
        with pytest.raises(FitError, match="3 fit controls in all training batches; 8 are needed"):
            run(name, X[:3], obs[:3], 1)
    elif name in COMPARATORS:
        with pytest.raises(FitError, match="one experiment in training"):
            run(name, X[:3], obs[:3], 1)
    else:
        assert run(name, X[:3], obs[:3], 2).shape == (3, 2 if learned(name) else 24)


@pytest.mark.parametrize("name", NAMES)
def test_no_well_one_well_and_no_feature(data, name):
    X, obs = data
    for n in (0, 1):
        with pytest.raises(FitError, match=f"{n} training wells; at least 2"):
            run(name, X[:n], obs[:n], 1)
    with pytest.raises(SchemaError, match="no feature"):
        run(name, X[:, :0], obs, 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [lambda X: X * np.float32(1e30), lambda X: X * np.float32(1e-30), lambda X: X + 1e5])
def test_huge_tiny_and_far_away_features(data, name, change):
    X, obs = data
    expected, Z = run(name, X, obs), run(name, change(X).astype(np.float32), obs)
    if name not in ("harmony", "ica", "centerscale + ica") and change(X).mean() < 1e4:
        np.testing.assert_allclose(Z, expected, atol=1e-3)  # a scale changes no view


@pytest.mark.parametrize("name", sorted(CONTROLS & set(NAMES)))
def test_no_fit_control_at_all(data, name):
    X, obs = data
    with pytest.raises(PhenoicaError, match=r"0 fit controls .*plates\.negative_controls"):
        run(name, X, obs.assign(control_role="reference"))
    with pytest.raises(SchemaError, match="control_role is missing"):
        run(name, X, obs.drop(columns="control_role"))
