"""Plates by formula: metadata with controls, and embeddings with planted factors."""

import json

import anndata
import numpy as np
import pandas as pd
import pytest

from phenoica import schema
from phenoica.config import resolve

UNS = {
    "version": "0.1.0",
    "config_fingerprint": "0" * 16,
    "checkpoint": "none (planted factors)",
    "checkpoint_sha256": "",
    "precision": "float32",
    "licences": "none",
    "fit_experiments": [],
    "encoder_saw_test_images": "no",
}


def metadata(n_experiments=6, n_plates=2, seed=0, genes=12):
    """Wells at random addresses: 8 fit and 8 reference controls, 4 PLK1, 4 cutting, 24 query wells a plate."""
    rng = np.random.default_rng(seed)
    rows = []
    for e in range(n_experiments):
        queries = [f"GENE{(4 * e + i) % genes:02d}" for i in range(6)]
        kinds = (
            [("EMPTY_control", schema.NEGATIVE, schema.FIT)] * 8
            + [("EMPTY_control", schema.NEGATIVE, schema.REFERENCE)] * 8
            + [("PLK1", schema.POSITIVE, schema.NONE)] * 4
            + [("EIF3H", schema.CUTTING, schema.NONE)] * 4
            + [(g, schema.NONE, schema.NONE) for g in queries for _ in range(4)]
        )
        for p in range(1, n_plates + 1):
            places = rng.permutation(8 * 12)[: len(kinds)]
            for (name, control, role), place in zip(kinds, places, strict=True):
                row, column = place // 12 + 1, place % 12 + 1
                address = f"{chr(64 + row)}{column:02d}"
                rows.append(
                    {
                        schema.WELL_ID: f"gene-{e:03d}_{p}_{address}", schema.EXPERIMENT: f"gene-{e:03d}",
                        schema.PLATE: str(p), schema.PLATE_ID: f"gene-{e:03d}_{p}", schema.ADDRESS: address,
                        schema.ROW: np.int16(row), schema.COLUMN: np.int16(column), schema.EDGE_DISTANCE: np.int16(0),
                        schema.PERTURBATION: name, schema.TREATMENT: f"{name}_guide_1",
                        schema.PERTURBATION_TYPE: "CRISPR", schema.CONCENTRATION: np.nan, schema.SMILES: None,
                        schema.CELL_TYPE: "HUVEC", schema.CONTROL: control, schema.CONTROL_ROLE: role,
                    }
                )  # fmt: skip
    return pd.DataFrame(rows).set_index(schema.WELL_ID)


def planted(obs, seed=1, d=24):
    """Unit-variance factors (PLK1, experiment, row, noise) mixed into d features; returns X float32 and the factors."""
    rng = np.random.default_rng(seed)
    n = len(obs)
    code = pd.factorize(obs[schema.EXPERIMENT])[0]
    shift = rng.permutation(np.linspace(-2, 2, code.max() + 1))
    factors = np.stack(
        [
            4.0 * (obs[schema.PERTURBATION] == "PLK1") + rng.laplace(size=n) * 0.4,
            shift[code] + rng.laplace(size=n) * 0.3,
            obs[schema.ROW] - 4.5 + rng.laplace(size=n) * 0.5,
            rng.laplace(size=n),
        ],
        axis=1,
    )
    factors = (factors - factors.mean(0)) / factors.std(0)
    X = factors @ rng.standard_normal((4, d)) + 0.05 * rng.standard_normal((n, d)) + rng.standard_normal(d)
    return X.astype(np.float32), factors


def configuration(**sections):
    sections = {key: dict(value) for key, value in sections.items()}
    sections.setdefault("disentangle", {})
    sections["disentangle"] = {"n_components": 4, "rotation_draws": 3, **sections["disentangle"]}
    return resolve({"run": "test", "source": "demo", **sections})


class Stage:
    """Files of the stages before: embeddings, qc, folds."""

    def __init__(self, folder, obs, X):
        self.embeddings, self.qc, self.folds = (folder / n for n in ("embeddings.h5ad", "qc.parquet", "folds.csv"))
        self.obs = obs
        self.write(X)
        experiments = sorted(set(obs[schema.EXPERIMENT]))
        pd.DataFrame({"experiment": experiments, "fold": [i % 3 for i in range(len(experiments))]}).to_csv(
            self.folds, index=False
        )
        self.write_qc(np.ones(len(obs), dtype=bool))

    def write(self, X):
        obs = self.obs.assign(n_tiles=np.int32(1), cell_count=30.0, smiles=pd.Categorical([None] * len(self.obs)))
        measures = pd.DataFrame({"c1_mean": np.linspace(0, 1, len(obs))}, index=obs.index)
        adata = anndata.AnnData(X.astype(np.float32), obs=obs, obsm={schema.IMAGE_MEASURES: measures})
        adata.var_names = schema.var_names(X.shape[1])
        adata.uns[schema.UNS] = json.loads(json.dumps(UNS))
        adata.write_h5ad(self.embeddings)

    def write_qc(self, passed):
        pd.DataFrame(
            {
                schema.WELL_ID: self.obs.index[::-1],
                schema.QC_ACQUISITION: np.where(passed, "", "focus")[::-1],
                schema.QC_PHENOTYPE: "",
                schema.QC_PASS: passed[::-1],
            }
        ).to_parquet(self.qc)


@pytest.fixture
def make_metadata():
    return metadata


@pytest.fixture
def make_planted():
    return planted


@pytest.fixture
def make_config():
    return configuration


@pytest.fixture
def stage(tmp_path):
    obs = metadata()
    X, _ = planted(obs)
    return Stage(tmp_path, obs, X)
