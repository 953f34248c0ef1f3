import numpy as np
import pandas as pd
import pytest

from phenoica.disentangle import view
from phenoica.disentangle.reproducibility import measure
from phenoica.errors import FitError


def data(n_experiments=8, wells=400, d=10, n_sources=4, seed=0, shift=0.0):
    """Skewed sources, the same in every experiment, among Gaussian ones of the same variances."""
    rng = np.random.default_rng(seed)
    n = n_experiments * wells
    S = rng.standard_normal((n, d))
    S[:, :n_sources] = rng.exponential(size=(n, n_sources)) - 1
    experiments = np.repeat([f"e{i}" for i in range(n_experiments)], wells)
    S += shift * rng.standard_normal((n_experiments, d))[np.repeat(np.arange(n_experiments), wells)]
    X = (S @ rng.standard_normal((d, d))).astype(np.float32)
    return X, pd.DataFrame({"experiment": experiments}), S[:, :n_sources]


def fitted(X, k, seed=0):
    pca = view("pca", n_components=k).fit(X)
    return pca, view("ica", pca=pca, seed=seed).fit(X)


def test_planted_sources_come_back_and_gaussian_ones_do_not():
    X, obs, S = data()
    pca, ica = fitted(X, 10)
    found = measure(X, obs, pca, ica, draws=6, seed=0, alpha=0.05)
    r = np.abs(np.corrcoef(S.T, ica.transform(X).T)[:4, 4:])
    planted = np.isin(np.arange(10), r.argmax(axis=1))
    assert found.identifiable[planted].all() and not found.identifiable[~planted].any()
    assert (found.mean[planted] > 0.97).all() and found.null < 0.95
    assert set(found.order()[:4]) == set(np.flatnonzero(planted))
    assert (found.seed_mean[planted] > 0.99).all()
    assert found.disjoint > found.disjoint_null
    assert found.record()["identifiable"] == 4 and found.said == ()
    counts = found.table.groupby("kind")["draw"].nunique()
    assert counts.to_dict() == {"bootstrap": 6, "seed": 6, "gaussian": 6, "disjoint": 1, "disjoint_rotated": 20}


def test_gaussian_data_have_no_identifiable_component_beyond_the_nominal_rate():
    called = []
    for seed in range(6):
        X, obs, _ = data(n_experiments=5, wells=200, d=8, n_sources=0, seed=seed)
        pca, ica = fitted(X, 8)
        found = measure(X, obs, pca, ica, draws=5, seed=seed, alpha=0.05)
        called.append(found.identifiable)
        # every start is another one, and nothing in these data leads two of them to the same axes
        assert found.seed_mean.max() < 0.999
    assert np.mean(called) <= 0.05


def test_a_component_of_a_single_experiment_is_not_as_reproducible_as_one_of_all():
    X, obs, S = data(n_experiments=6, wells=400, d=6, n_sources=1)
    rng = np.random.default_rng(1)
    only = rng.exponential(size=len(X)) - 1
    only[obs["experiment"] != "e0"] = rng.standard_normal((obs["experiment"] != "e0").sum())
    Y = np.stack([S[:, 0], only, *rng.standard_normal((4, len(X)))], axis=1).astype(np.float32)
    pca, ica = fitted(Y, 6)
    found = measure(Y, obs, pca, ica, draws=12, seed=0, alpha=0.05)
    r = np.abs(np.corrcoef(Y[:, :2].T, ica.transform(Y).T)[:2, 2:]).argmax(axis=1)
    assert found.mean[r[0]] > 0.97 > found.mean[r[1]]
    assert found.sd[r[1]] > found.sd[r[0]]


def test_same_seed_same_numbers_and_another_seed_others():
    X, obs, _ = data(n_experiments=3, wells=100, d=5)
    pca, ica = fitted(X, 5)
    a, b, c = (measure(X, obs, pca, ica, draws=3, seed=s, alpha=0.05) for s in (0, 0, 1))
    pd.testing.assert_frame_equal(a.table, b.table)
    assert not np.allclose(a.mean, c.mean)


def test_units_and_order_of_wells_do_not_matter():
    X, obs, _ = data(n_experiments=3, wells=150, d=5)
    pca, ica = fitted(X, 5)
    a = measure(X, obs, pca, ica, draws=3, seed=0, alpha=0.05)
    pca, ica = fitted(X * 1000, 5)
    b = measure(X * 1000, obs, pca, ica, draws=3, seed=0, alpha=0.05)
    np.testing.assert_allclose(a.mean, b.mean, atol=5e-3)


def test_one_experiment_cannot_be_resampled():
    X, obs, _ = data(n_experiments=1)
    assert measure(X, obs, *fitted(X, 4), draws=3, seed=0, alpha=0.05) is None


def test_two_experiments_have_no_thirds():
    X, obs, _ = data(n_experiments=2, wells=300, d=5)
    found = measure(X, obs, *fitted(X, 5), draws=3, seed=0, alpha=0.05)
    assert found.disjoint is None and any("disjoint experiments was not measured" in text for text in found.said)


def test_bootstraps_with_too_few_wells():
    X, obs, _ = data(n_experiments=2, wells=6, d=8)
    with pytest.raises(FitError, match="no bootstrap of 2 experiments.*reproducibility_draws"):
        measure(X, obs, *fitted(X, 8), draws=1, seed=0, alpha=0.05)


def test_fits_that_do_not_converge_are_counted():
    X, obs, _ = data(n_experiments=3, wells=100, d=6)
    pca = view("pca", n_components=6).fit(X)
    with pytest.warns(UserWarning, match="not converged"):
        ica = view("ica", pca=pca, max_iter=2).fit(X)
    found = measure(X, obs, pca, ica, draws=2, seed=0, alpha=0.05)
    assert any("fits did not converge" in text for text in found.said)
