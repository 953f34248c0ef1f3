"""Combat and harmony: what scanpy and harmonypy give, and that they never pass for a held-out view."""

import importlib.util
import sys

import anndata
import numpy as np
import pandas as pd
import pytest
import scanpy

from phenoica.config import resolve
from phenoica.disentangle import view
from phenoica.errors import ConfigError, FitError

needs_harmony = pytest.mark.skipif(
    importlib.util.find_spec("harmonypy") is None, reason="harmonypy is NOT installed: harmony is not tested"
)
NAMES = ["combat", pytest.param("harmony", marks=needs_harmony)]


@pytest.fixture
def shifted():
    """Two sources of biology in four batches of 100 wells, with a large shift and scale of each batch."""
    rng = np.random.default_rng(0)
    obs = pd.DataFrame({"experiment": np.repeat(list("abcd"), 100), "control_role": "none"})
    obs.index = [f"w{i}" for i in range(400)]
    case = np.tile(np.repeat([0, 1], 50), 4)
    X = rng.standard_normal((400, 12)) + 3 * case[:, None] * (np.arange(12) < 4)
    for i in range(4):
        inside = slice(100 * i, 100 * i + 100)
        X[inside] = X[inside] * rng.uniform(0.5, 2, 12) + 5 * rng.standard_normal(12)
    return X.astype(np.float32), obs, case


def options(name):
    return {"n_components": 5} if name == "harmony" else {}


def batch_share(Z, obs):
    means = pd.DataFrame(Z).groupby(obs["experiment"].to_numpy()).transform("mean").to_numpy()
    return ((means - Z.mean(0)) ** 2).sum() / ((Z - Z.mean(0)) ** 2).sum()


@pytest.mark.parametrize("name", NAMES)
def test_they_take_the_batch_out_of_wells_that_they_see(shifted, name):
    X, obs, case = shifted
    Z = view(name, **options(name)).fit(X, obs).transform(X, obs, dtype=float)
    raw = view("raw").fit(X).transform(X, dtype=float)
    assert batch_share(Z, obs) < (0.01 if name == "combat" else 0.8 * batch_share(raw, obs))
    np.testing.assert_allclose(Z.var(0), 1, atol=1e-9)
    kept = [np.abs(np.corrcoef(values.T, case)[-1, :-1]).max() for values in (Z, raw)]
    assert kept[0] > kept[1]


def test_combat_is_scanpys(shifted):
    X, obs, _ = shifted
    theirs = scanpy.pp.combat(anndata.AnnData(X.astype(float), obs=obs.copy()), "experiment", inplace=False)
    train = (obs["experiment"] < "d").to_numpy()
    fitted = view("combat").fit(X[train], obs[train])
    Z = fitted.transform(X, obs, dtype=float)
    np.testing.assert_allclose(Z, theirs / theirs[train].std(0), rtol=1e-6)
    order = np.random.default_rng(0).permutation(len(X))
    np.testing.assert_allclose(fitted.transform(X[order], obs.iloc[order], dtype=float), Z[order], atol=1e-6)


@needs_harmony
def test_harmony_is_harmonypys_on_training_components(shifted):
    import harmonypy

    X, obs, _ = shifted
    train = (obs["experiment"] < "d").to_numpy()
    fitted = view("harmony", n_components=5, seed=3).fit(X[train], obs[train])
    centred = X[train].astype(float) - X[train].mean(0, dtype=float)
    axes = np.linalg.svd(centred, full_matrices=False)[2][:5].T
    signs = np.sign((axes * fitted.components_).sum(0))
    np.testing.assert_allclose(fitted.components_, axes * signs, atol=1e-8)
    scores = (X - X[train].mean(0, dtype=float)) @ fitted.components_
    theirs = harmonypy.run_harmony(
        scores, obs[["experiment"]], "experiment", verbose=False, random_state=3, ncores=1
    ).Z_corr  # fmt: skip
    Z = fitted.transform(X, obs, dtype=float)
    np.testing.assert_allclose(Z, theirs / theirs[train].astype(float).std(0), rtol=1e-4, atol=1e-4)
    assert view("harmony", n_components="auto").fit(X[train], obs[train]).n_components_ >= 1


@pytest.mark.parametrize("name", NAMES)
def test_they_use_all_wells_and_say_so(shifted, name):
    X, obs, _ = shifted
    train = (obs["experiment"] < "d").to_numpy()
    fitted = view(name, **options(name)).fit(X[train], obs[train])
    assert fitted.test_data_used == "all"
    with pytest.raises(FitError, match=f"view {name} corrects all wells together: of its 300 training wells 0 are"):
        fitted.transform(X[~train], obs[~train])
    with pytest.raises(FitError, match="of its 300 training wells 299"):
        fitted.transform(X[1:], obs[1:])
    other = X.copy()
    other[~train] += np.random.default_rng(1).standard_normal(X[~train].shape) * 9
    assert not np.allclose(fitted.transform(X, obs)[train], fitted.transform(other, obs)[train], atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_what_they_cannot_correct_is_named(shifted, name):
    X, obs, _ = shifted
    lone = obs.copy()
    lone.iloc[7, 0] = "z"
    with pytest.raises(FitError, match="experiment z has one well; at least 2"):
        view(name, **options(name)).fit(X, lone)
    with pytest.raises(FitError, match="no batch to correct"):
        view(name, batch_key="control_role", **options(name)).fit(X, obs)
    train = (obs["experiment"] < "d").to_numpy()
    fitted = view(name, **options(name)).fit(X[train], obs[train])
    few = np.flatnonzero(train).tolist() + [399]
    with pytest.raises(FitError, match="experiment d has one well"):
        fitted.transform(X[few], obs.iloc[few])
    with pytest.raises(ConfigError, match=f"{name} reads all wells at once and cannot be part of a chain"):
        view(f"raw + {name}")


def test_a_correction_that_is_not_finite_is_named(shifted, monkeypatch):
    X, obs, _ = shifted
    monkeypatch.setattr(scanpy.pp, "combat", lambda adata, **_: np.full(adata.shape, np.nan))
    with pytest.raises(FitError, match="combat: the correction is not finite in well w0, column 0"):
        view("combat").fit(X, obs).transform(X, obs)


def test_absent_harmonypy_is_said_at_the_fit(shifted, monkeypatch):
    X, obs, _ = shifted
    monkeypatch.setitem(sys.modules, "harmonypy", None)
    with pytest.raises(FitError, match=r"pip install 'phenoica\[harmony\]'"):
        view("harmony", n_components=5).fit(X, obs)


def test_configurations_name_views_chains_and_comparators():
    def with_views(*names):
        return resolve({"run": "r", "source": "demo", "disentangle": {"views": list(names)}})

    default = resolve({"run": "r", "source": "demo"})["disentangle"]["views"]
    assert not {"combat", "harmony"} & set(default) and "varimax" in default
    for good in (["combat"], ["harmony", "ica"], ["centerscale + ica"], ["raw + varimax", "mad", "spherize"]):
        assert with_views(*good)["disentangle"]["views"] == good
    for bad in ("icaa", "raw + combat", "raw+ica", " + raw", "raw + ", "rawica", "harmony + ica"):
        with pytest.raises(ConfigError, match="disentangle.views"):
            with_views(bad)
