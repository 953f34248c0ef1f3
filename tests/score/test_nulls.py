import warnings

import numpy as np
import pytest

from phenoica import schema
from phenoica.disentangle.fitting import fit_views
from phenoica.score import metrics
from phenoica.score.baselines import permute_within
from phenoica.score.contrasts import build, split
from phenoica.score.probes import fit_l1
from phenoica.score.run import view_features


def within_three_errors(draws):
    error = np.std(draws, ddof=1) / np.sqrt(len(draws))
    return error > 0 and abs(np.mean(draws) - 0.5) <= 3 * error  # a score that is always 0.5 has measured nothing


def test_a_constant_half_is_no_null():
    assert not within_three_errors(np.full(50, 0.5))


VIEWS = [
    "raw", "centerscale", "mad", "spherize", "pca", "rotation", "varimax", "ica", "tvn", "pca_cs", "centerscale + ica",
    "combat",
]  # fmt: skip


@pytest.fixture(scope="module")
def fitted(screen, settings):
    """Views fitted on all but the last third of the experiments, strong batch effects, and a mask of training."""
    adata, config = screen(seed=5, batch=3.0), settings(disentangle={"views": VIEWS})
    train = adata.obs[schema.EXPERIMENT].isin([f"gene-{e:03d}" for e in range(4)]).to_numpy()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ica: .* fewer than 10 k")
        views = fit_views(np.asarray(adata.X[train], float), adata.obs[train], config)
    return adata, train, {f.key: f for f in view_features(views, np.asarray(adata.X, float), adata.obs)}


KEYS = ["rotation_00" if name == "rotation" else name for name in VIEWS]


@pytest.mark.parametrize("key", KEYS)
def test_relabelled_reference_controls_score_a_half(fitted, null_draws, key):
    adata, train, features = fitted
    draws = null_draws(features[key].values, adata.obs, train, fraction=0.2)
    assert len(draws) == 50 and draws.std() > 0
    assert within_three_errors(draws)


def test_the_null_itself_is_calibrated(fitted, null_draws):
    """One seed in some hundred exceeds three standard errors by luck; over seeds the z values must be standard."""
    adata, train, features = fitted
    z = []
    for seed in range(20):
        draws = null_draws(features["ica"].values, adata.obs, train, fraction=0.2, seed=seed)
        z.append((draws.mean() - 0.5) / (draws.std(ddof=1) / np.sqrt(len(draws))))
    assert abs(np.mean(z)) < 3 / np.sqrt(20)
    assert 0.6 < np.std(z, ddof=1) < 1.5


def test_the_null_notices_a_view_that_has_seen_the_labels(fitted, null_draws, half_of_each_plate):
    adata, train, features = fitted
    rng = np.random.default_rng(1)  # draws the labels that seed 1 draws first
    reference = (adata.obs[schema.CONTROL_ROLE] == schema.REFERENCE).to_numpy()
    plates = adata.obs[schema.PLATE_ID].astype(str).to_numpy()[reference]
    leaked = features["pca"].values.copy()
    leaked[reference, 0] += 3.0 * half_of_each_plate(plates, rng)
    assert null_draws(leaked, adata.obs, train, fraction=0.2, n_draws=1, seed=1)[0] > 0.9


def test_within_plate_permutations_have_a_macro_auroc_of_a_half(fitted):
    adata, train, features = fitted
    values, obs = features["ica"].values, adata.obs
    plates, folds = obs[schema.PLATE_ID].astype(str).to_numpy(), np.where(train, 1, 0)
    batches = obs[schema.EXPERIMENT].astype(str).to_numpy()
    parts = [split(c, obs, batches, folds, 0, 4) for c in build(obs)]
    parts = [p for p in parts if p is not None and p.reason is None]
    assert len(parts) >= 5
    rng, macros = np.random.default_rng(0), []
    for _ in range(50):
        found = []
        for part in parts:
            probe = fit_l1(values[part.train], permute_within(part.train_labels, plates[part.train], rng), 0.2)
            labels = permute_within(part.test_labels, plates[part.test], rng)
            found.append(metrics.auroc(labels, probe.decision(values[part.test])))
        macros.append(np.mean(found))
    assert within_three_errors(macros)
