"""A small screen in memory: plates of wells with non-Gaussian features, batch effects and planted phenotypes."""

from __future__ import annotations

import anndata
import numpy as np
import pandas as pd
import pytest

from phenoica import config, schema

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
