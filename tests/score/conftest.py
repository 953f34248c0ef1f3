"""A small screen in memory: plates of wells with non-Gaussian features, batch effects and planted phenotypes.

And the null of every score: reference controls under random labels.
"""

from __future__ import annotations

import anndata
import numpy as np
import pandas as pd
import pytest

from phenoica import config, schema
from phenoica.score.l1_path import Problem
from phenoica.score.metrics import auroc
from phenoica.score.probes import fit_l1_paths

CHECKPOINT = "random weights, seed 0 (not a trained model)"


def make_screen(
    *, seed: int = 0, n_experiments: int = 6, n_plates: int = 2, n_genes: int = 6, width: int = 12, effect: float = 2.0,
    batch: float = 0.5, lonely: bool = False,
) -> anndata.AnnData:  # fmt: skip
    """Return an AnnData as embed writes it, plus qc columns in obs.

    Per plate: 24 negative controls (half fit, half reference), PLK1 and MTOR x 4 wells, 4 wells of cutting guides.
    Query gene g sits in experiments g and g + 1 (mod n), 4 wells a plate; GENE0 and PLK1 shift source 0, MTOR source
    1, other genes do nothing. `lonely` adds a gene in experiment 0 only.
    """
    rng = np.random.default_rng(seed)
    rows, shifts = [], []
    for e in range(n_experiments):
        genes = [f"GENE{g}" for g in range(n_genes) if e in (g % n_experiments, (g + 1) % n_experiments)]
        genes += ["LONELY"] if lonely and e == 0 else []
        for p in range(1, n_plates + 1):
            empty = ("EMPTY_control", "EMPTY_control", schema.NEGATIVE)
            wells = [(*empty, schema.FIT), (*empty, schema.REFERENCE)] * 12
            wells += [(n, f"{n}_guide_{i}", schema.POSITIVE, schema.NONE) for n in ("PLK1", "MTOR") for i in range(4)]
            wells += [("SRC", "SRC_guide_1", schema.CUTTING, schema.NONE)] * 2
            wells += [("HCK", "HCK_guide_1", schema.CUTTING, schema.NONE)] * 2
            wells += [(g, f"{g}_guide_{i}", schema.NONE, schema.NONE) for g in genes for i in range(4)]
            places = rng.permutation(96)[: len(wells)]
            for (name, guide, control, role), place in zip(wells, places, strict=True):
                row, column = int(place) // 12 + 1, int(place) % 12 + 1
                experiment = f"gene-{e:03d}"
                address = f"{chr(64 + row)}{column:02d}"
                rows.append({
                    schema.WELL_ID: f"{experiment}_{p}_{address}", schema.EXPERIMENT: experiment, schema.PLATE: str(p),
                    schema.PLATE_ID: f"{experiment}_{p}", schema.ADDRESS: address, schema.ROW: row,
                    schema.COLUMN: column,
                    schema.EDGE_DISTANCE: min(row - 1, 8 - row, column - 1, 12 - column), schema.PERTURBATION: name,
                    schema.TREATMENT: guide, schema.PERTURBATION_TYPE: "CRISPR", schema.CONCENTRATION: np.nan,
                    schema.SMILES: "", schema.CELL_TYPE: "HUVEC", schema.CONTROL: control, schema.CONTROL_ROLE: role,
                    schema.QC_ACQUISITION: "", schema.QC_PHENOTYPE: "", schema.QC_PASS: True,
                })  # fmt: skip
                shifts.append((effect * (name in ("GENE0", "PLK1")), effect * (name == "MTOR")))
    obs = pd.DataFrame(rows).set_index(schema.WELL_ID)
    n = len(obs)
    sources = rng.laplace(size=(n, width)) / np.sqrt(2)
    sources[:, :2] += np.array(shifts)
    codes = pd.factorize(obs[schema.EXPERIMENT])[0]
    sources[:, 2:5] += batch * rng.standard_normal((n_experiments, 3))[codes]
    X = (sources @ rng.standard_normal((width, width))).astype(np.float32)
    obs[schema.N_TILES] = 4
    obs[schema.CELL_COUNT] = 30.0 + rng.poisson(5, n) - 4.0 * (obs[schema.PERTURBATION] == "PLK1")
    adata = anndata.AnnData(X, obs=obs, var=pd.DataFrame(index=schema.var_names(width)))
    adata.obsm[schema.IMAGE_MEASURES] = pd.DataFrame(
        np.column_stack([sources[:, 0] + rng.standard_normal(n), rng.standard_normal(n), np.ones(n)]),
        index=obs.index, columns=["c1_mean", "c1_focus", "c1_empty"],
    )  # fmt: skip
    adata.uns[schema.UNS] = {key: "unknown" for key in schema.UNS_KEYS} | {"checkpoint": CHECKPOINT}
    return adata


@pytest.fixture(scope="session")
def screen():
    """Return the maker of screens."""
    return make_screen


@pytest.fixture(scope="session")
def settings():
    """Return a maker of complete configurations for them."""

    def make(**sections):
        base = {
            "run": "test", "source": "demo", "plates": {"folds": 3},
            "disentangle": {"n_components": 8, "rotation_draws": 4, "min_fit_controls": 4},
            "score": {"rotation_draws": 2, "lambda_fractions": [0.5, 0.2]},
        }  # fmt: skip
        for name, value in sections.items():
            base[name] = {**base.get(name, {}), **value} if isinstance(value, dict) else value
        return config.resolve(base)

    return make


@pytest.fixture(scope="session")
def truth():
    """Return a maker of tables of true factors."""

    def make(adata):
        counts = adata.obs[schema.CELL_COUNT].to_numpy()
        return pd.DataFrame({schema.WELL_ID: adata.obs_names, "true_cell_count": counts})

    return make


def null_draws(features, obs, train, *, fraction, n_draws=50, seed=0):
    """Return the held-out AUROC of random labels of the reference controls, float64 (n_draws,).

    Controls relabelled at random within their plate have nothing to tell apart: the mean is 0.5 within three standard
    errors (sd of the draws / sqrt(draws)) if probe and AUROC are calibrated and labels stay with their wells. In each
    draw half of a plate's reference controls (rounded down or up at random where odd) become cases; the L1 probe
    (`fraction` of lambda_max) is fitted on those in `train` and scored on the others, 0.5 where it kept no feature.
    Random labels are independent of every feature, also of features fitted on test wells, so this cannot detect a leak.
    """
    reference = np.flatnonzero((obs[schema.CONTROL_ROLE].astype(str) == schema.REFERENCE).to_numpy())
    plates = obs[schema.PLATE_ID].astype(str).to_numpy()[reference]
    train = np.asarray(train)[reference]
    assert all(np.unique(plates[side], return_counts=True)[1].max(initial=0) > 1 for side in (train, ~train))
    values, rng, drawn = np.asarray(features, dtype=np.float64)[reference], np.random.default_rng(seed), []
    while len(drawn) < n_draws:
        labels = half_of_each_plate(plates, rng)
        if min(labels[side].sum() for side in (train, ~train)) == 0 or labels[train].all() or labels[~train].all():
            continue  # plates of one control can leave a side with one class: draw again
        drawn.append(labels)
    wells = np.flatnonzero(train)
    paths = fit_l1_paths([Problem(values, wells, labels[wells]) for labels in drawn], [fraction])
    probes = [path.probes[0] for path in paths]
    return np.array([
        auroc(labels[~train], probe.decision(values[~train])) if probe.weights.any() else 0.5
        for labels, probe in zip(drawn, probes, strict=True)
    ])  # fmt: skip


def half_of_each_plate(plates, rng):
    labels = np.zeros(len(plates), dtype=bool)
    for plate in np.unique(plates):
        inside = rng.permutation(np.flatnonzero(plates == plate))
        labels[inside[: (len(inside) + int(rng.integers(2))) // 2]] = True
    return labels


# tests are imported by path (importlib mode) and cannot import this file, hence functions as fixtures
@pytest.fixture(scope="session", name="null_draws")
def _null_draws():
    return null_draws


@pytest.fixture(scope="session", name="half_of_each_plate")
def _half_of_each_plate():
    return half_of_each_plate
