"""The number of components: parallel analysis against simulated noise, and what a sweep of widths shows."""

import numpy as np
import pandas as pd
import pytest

from phenoica import schema
from phenoica.config import resolve
from phenoica.disentangle import load_view, view
from phenoica.disentangle.fitting import fit_views
from phenoica.disentangle.run import fit_fold, load_fit
from phenoica.disentangle.width import noise_variances, parallel_width
from phenoica.errors import ConfigError, FitError


def simulated(X, rng, make, draws=200):
    """Return the 95th percentile of covariance eigenvalues of data without correlation, made the long way."""
    found = []
    for _ in range(draws):
        noise = make(X, rng)
        found.append(np.linalg.eigvalsh(np.cov(noise.T, ddof=0))[::-1])
    return np.quantile(found, 0.95, axis=0)[: min(X.shape[1], len(X) - 1)]


def gaussian(X, rng):
    return rng.standard_normal(X.shape) * X.std(0)


def permuted(X, rng):
    return rng.permuted(X, axis=0)


@pytest.mark.parametrize("make", [gaussian, permuted])
@pytest.mark.parametrize("n", [400, 60, 12])
def test_noise_is_that_of_made_data(make, n):
    rng = np.random.default_rng(n)
    X = rng.standard_normal((n, 20)) * np.linspace(0.5, 2, 20)
    if make is permuted:  # the columns' own variance, not that of a draw of them
        X = (X - X.mean(0)) / X.std(0) * np.linspace(0.5, 2, 20)
    expected = simulated(X, rng, make)
    found = noise_variances(X.var(0), n, seed=0)
    np.testing.assert_allclose(found, expected, rtol=0.25 if n == 12 else 0.12, atol=0.02 * expected[0])
    assert (np.diff(found) <= 0).all()


def factor_data(seed, n=1500, d=60, k=5, strength=1.0):
    rng = np.random.default_rng(seed)
    return strength * rng.standard_normal((n, k)) @ rng.standard_normal((k, d)) + rng.standard_normal((n, d))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("k", [1, 5, 12])
def test_auto_finds_the_planted_number_of_factors(seed, k):
    X = factor_data(seed, k=k)
    fitted = view("pca", n_components="auto", seed=seed).fit(X)
    # of many factors the weakest may hide behind the others' variance, which counts as noise: never one too many
    assert fitted.n_components_ == k or (k, fitted.n_components_) == (12, 11)
    k = fitted.n_components_
    assert view("ica", n_components="auto", seed=seed).fit(X).n_components_ == k
    # nothing but the width is chosen
    np.testing.assert_allclose(view("pca", n_components=k).fit(X).components_, fitted.components_, rtol=1e-9)


def test_noise_alone_has_hardly_a_component():
    found = []
    for seed in range(40):
        X = np.random.default_rng([7, seed]).standard_normal((500, 30))
        try:
            found.append(view("pca", n_components="auto").fit(X).n_components_)
        except FitError as error:
            assert "no principal component of the training wells has more variance than noise" in str(error)
            found.append(0)
    assert np.mean(np.array(found) > 0) <= 0.15  # nominal .05


def test_auto_is_a_function_of_the_seed_and_saved(tmp_path):
    X = factor_data(0)
    first = noise_variances(X.var(0), len(X), 3)
    np.testing.assert_array_equal(first, noise_variances(X.var(0), len(X), 3))
    assert (first != noise_variances(X.var(0), len(X), 4)).any()
    view("raw + ica", n_components="auto").fit(X).save(tmp_path)
    loaded = load_view(tmp_path)
    assert loaded.n_components_ == 5 and loaded.parts[1].n_components == "auto"


def test_few_wells_for_the_width_are_said():
    X = factor_data(0, n=200)
    fitted = view("pca", n_components="auto").fit(X)
    assert fitted.n_components_ == 5 and len(fitted.warnings_) == 1
    assert "parallel analysis gives 5, and 200 wells are fewer than 10 k^2 = 250" in fitted.warnings_[0]
    assert not view("pca", n_components="auto").fit(factor_data(0, n=250)).warnings_
    k, said = parallel_width(np.array([9.0, 4.0, 0.1]), np.ones(3), 40, 0)
    assert k == 2 and not said


def test_views_on_controls_take_the_width_of_the_one_fit(make_metadata, make_planted):
    obs = make_metadata()
    X = make_planted(obs)[0]
    config = resolve({"run": "r", "source": "demo", "disentangle": {"n_components": "auto", "rotation_draws": 3}})
    fitted = fit_views(X, obs, config)
    widths = {key: v.n_components_ for key, v in fitted.items() if key not in ("raw", "centerscale")}
    assert set(widths.values()) == {4}
    with pytest.raises(ConfigError, match="tvn: n_components auto is decided on all training wells"):
        view("tvn", n_components="auto")
    # fewer fit controls than components: every view is as narrow, and it is said
    few = obs.assign(control_role=np.where(np.arange(len(obs)) % 96 < 2, obs["control_role"], "none"))
    few.loc[few.index[192:], "control_role"] = "none"
    fewer = resolve(
        {"run": "r", "source": "demo", "disentangle": {
            "n_components": "auto", "views": ["ica", "pca_cs"], "min_fit_controls": 2, "missing_controls": "pooled"}}
    )  # fmt: skip
    assert (few["control_role"] == "fit").sum() == 4
    fitted = fit_views(X, few, fewer)
    assert {v.n_components_ for v in fitted.values()} == {3}
    assert any("3 instead of 4, as pca_cs have" in said for said in fitted["ica"].warnings_)


@pytest.fixture
def swept(stage, make_config, tmp_path):
    rng = np.random.default_rng(0)
    stage.write(read_X(stage) + rng.standard_normal((len(stage.obs), 24)))
    config = make_config(disentangle={"views": ["pca", "ica"], "sweep": [2, 4, 8, "all"]})
    fit_fold(stage.embeddings, stage.qc, stage.folds, None, tmp_path / "exploration", config)
    fit_fold(stage.embeddings, stage.qc, stage.folds, 0, tmp_path / "fold", config)
    return tmp_path, config


def read_X(stage):
    import anndata

    return np.asarray(anndata.read_h5ad(stage.embeddings).X)


@pytest.mark.filterwarnings("ignore:ica")
def test_a_sweep_shows_that_more_components_are_noise(swept, stage):
    folder, _ = swept
    assert not (folder / "fold" / "widths.parquet").exists()  # held-out scores choose no width
    table = pd.read_parquet(folder / "exploration" / "widths.parquet")
    assert list(table["width"]) == [2, 4, 8, 24] and list(table["asked"]) == ["2", "4", "8", "all"]
    assert set(table["parallel_width"]) == {4}
    assert list(table["above_noise"]) == [2, 4, 4, 4]
    assert (table["last_over_noise"][:2] > 1).all() and (table["last_over_noise"][2:] < 1).all()
    X = read_X(stage).astype(float)
    variance = np.linalg.eigvalsh(np.cov(X.T, ddof=0))[::-1]
    np.testing.assert_allclose(table["last_variance"], variance[table["width"] - 1], rtol=1e-6)
    np.testing.assert_allclose(table["amplification"], np.sqrt(variance[0] / variance[table["width"] - 1]), rtol=1e-6)
    np.testing.assert_allclose(
        table["explained_variance"], np.cumsum(variance)[table["width"] - 1] / variance.sum(), rtol=1e-6
    )
    np.testing.assert_allclose(table["noise_variance"], noise_variances(X.var(0), len(X), 0)[table["width"] - 1])
    assert list(table["enough_wells"]) == [True, True, False, False] and set(table["n_wells"]) == {len(X)}
    assert (table["ica_converged"] == (table["ica_gradient"] <= 1e-4)).all() and table["ica_converged"][:2].all()
    at_four = load_view(folder / "exploration" / "ica")
    assert table["ica_gradient"][1] == at_four.gradient_  # the same fit as the view of that width


def test_a_sweep_beyond_the_data_stops_before_any_fit(stage, make_config, tmp_path, monkeypatch):
    monkeypatch.setattr("phenoica.disentangle.width.fit_rotation", lambda *_, **__: pytest.fail("fitted"))
    config = make_config(disentangle={"views": ["raw"], "sweep": [2, 25]})
    with pytest.raises(FitError, match=r"disentangle\.sweep asks for 25 components.*at most 24"):
        fit_fold(stage.embeddings, stage.qc, stage.folds, None, tmp_path / "exploration", config)
    assert not (tmp_path / "exploration").exists()


def test_the_record_says_which_width_was_asked_for_and_taken(stage, make_config, tmp_path):
    for asked, taken in (("auto", 4), (3, 3)):
        config = make_config(disentangle={"n_components": asked, "views": ["ica"]})
        fit_fold(stage.embeddings, stage.qc, stage.folds, 0, tmp_path / "fold", config)
        record = load_fit(tmp_path / "fold")[1]
        assert (record["n_components_asked"], record["n_components"]) == (asked, taken)
        assert record["features"] == schema.var_names(24)


@pytest.mark.parametrize(
    "wrong", [{"n_components": "most"}, {"n_components": 0}, {"sweep": [0]}, {"sweep": ["auto"]}, {"sweep": [4, 4]}]
)
def test_configured_widths_are_checked(wrong):
    with pytest.raises(ConfigError, match=f"disentangle.{next(iter(wrong))}"):
        resolve({"run": "r", "source": "demo", "disentangle": wrong})
