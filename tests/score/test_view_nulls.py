"""The null of every view, with few and with many reference controls: labels drawn at random tell nothing apart."""

import warnings

import anndata
import numpy as np
import pandas as pd
import pytest

from phenoica import schema
from phenoica.disentangle.fitting import fit_views
from phenoica.score.metrics import auroc
from phenoica.score.run import view_features

VIEWS = (
    "raw", "mad", "centerscale", "spherize", "pca", "varimax", "rotation", "ica", "tvn", "pca_cs", "centerscale + ica",
)  # fmt: skip


def controls_only(per_plate, n_experiments=6, n_plates=2, width=10):
    """Plates of negative controls, half of them for fits, with strong shifts of experiments and plates."""
    rng = np.random.default_rng(per_plate)
    n = n_experiments * n_plates * per_plate
    experiment = np.repeat([f"gene-{e:03d}" for e in range(n_experiments)], n_plates * per_plate)
    plate = np.tile(np.repeat([str(p) for p in range(n_plates)], per_plate), n_experiments)
    obs = pd.DataFrame(
        {
            schema.EXPERIMENT: experiment, schema.PLATE: plate,
            schema.PLATE_ID: [f"{e}_{p}" for e, p in zip(experiment, plate, strict=True)],
            schema.CONTROL: schema.NEGATIVE,
            schema.CONTROL_ROLE: np.tile([schema.FIT, schema.REFERENCE], n // 2),
        },
        index=pd.Index([f"w{i}" for i in range(n)], name=schema.WELL_ID),
    )  # fmt: skip
    sources = rng.laplace(size=(n, width))
    sources += 3 * rng.standard_normal((n_experiments, width))[pd.factorize(obs[schema.EXPERIMENT])[0]]
    sources += rng.standard_normal((n_experiments * n_plates, width))[pd.factorize(obs[schema.PLATE_ID])[0]]
    return anndata.AnnData((sources @ rng.standard_normal((width, width))).astype(np.float32), obs=obs)


@pytest.fixture(scope="module")
def fitted(request, settings):
    adata = controls_only(request.param)
    train = adata.obs[schema.EXPERIMENT].isin([f"gene-{e:03d}" for e in range(4)]).to_numpy()
    config = settings(disentangle={"views": list(VIEWS), "n_components": 6, "rotation_draws": 2})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ica: .* fewer than 10 k")
        views = fit_views(np.asarray(adata.X[train]), adata.obs[train], config)
    return adata.obs, train, {f.key: f.values for f in view_features(views, np.asarray(adata.X), adata.obs)}


def within_three_errors(draws):
    return draws.std() > 0 and abs(draws.mean() - 0.5) <= 3 * draws.std(ddof=1) / np.sqrt(len(draws))


def distances(values, obs):
    """Distance of every well to the mean of the fit controls of its plate."""
    fit = (obs[schema.CONTROL_ROLE] == schema.FIT).to_numpy()
    out = np.empty(len(obs))
    for inside in obs.groupby(schema.PLATE_ID).indices.values():
        out[inside] = np.linalg.norm(values[inside] - values[inside][fit[inside]].mean(axis=0), axis=1)
    return out


@pytest.mark.parametrize("fitted", [16, 144], indirect=True)
@pytest.mark.parametrize("view", [{"rotation": "rotation_00"}.get(name, name) for name in VIEWS])
def test_probe_and_distance_score_a_half_on_relabelled_reference_controls(fitted, null_draws, half_of_each_plate, view):
    obs, train, features = fitted
    values = features[view]
    assert within_three_errors(null_draws(values, obs, train, fraction=0.2))
    reference = np.flatnonzero((obs[schema.CONTROL_ROLE] == schema.REFERENCE).to_numpy() & ~train)
    away, plates = distances(values, obs)[reference], obs[schema.PLATE_ID].to_numpy()[reference]
    rng = np.random.default_rng(0)
    assert within_three_errors(np.array([auroc(half_of_each_plate(plates, rng), away) for _ in range(50)]))


@pytest.mark.parametrize("fitted", [16], indirect=True)
@pytest.mark.parametrize("view", ["tvn", "pca_cs", "centerscale"])
def test_fit_controls_are_closer_to_themselves_so_they_may_not_be_references(fitted, view):
    """Why the controls are split: against the wells that shaped the view, an untouched control looks like a hit."""
    obs, train, features = fitted
    values = features[view]
    reference = (obs[schema.CONTROL_ROLE] == schema.REFERENCE).to_numpy()
    assert auroc(reference, distances(values, obs)) > 0.53
