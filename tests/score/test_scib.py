"""scib-metrics on a view: what it must refuse, and, where it is installed, what it gives."""

import builtins

import numpy as np
import pandas as pd
import pytest

from phenoica import schema
from phenoica.errors import ScoreError
from phenoica.files import write_h5ad
from phenoica.score import scib


@pytest.fixture(scope="module")
def exploration(screen):
    adata = screen(n_experiments=2, n_genes=2, effect=4.0)
    adata.obsm[schema.X_PCA] = np.asarray(adata.X[:, :6], dtype=np.float32)
    adata.obsm[schema.X_BIOLOGY] = np.zeros((adata.n_obs, 0), np.float32)
    return adata


def test_wells_are_perturbations_in_two_batches(exploration):
    values, labels, batches = scib._wells(exploration, "pca", schema.EXPERIMENT)
    assert set(labels) == {"PLK1", "MTOR", "SRC", "HCK", "GENE0", "GENE1"} and set(batches) == {"gene-000", "gene-001"}
    assert values.dtype == np.float32 and len(values) == len(labels) == len(batches)


@pytest.mark.parametrize(
    ("view", "message"),
    [("umap", "unknown view"), ("tvn", "holds no view tvn"), ("biology", "no component")],
)
def test_views_that_are_not_there_are_named(exploration, view, message):
    with pytest.raises(ScoreError, match=message):
        scib._wells(exploration, view, schema.EXPERIMENT)


def test_preconditions_are_checked_before_any_work(exploration):
    one = exploration[exploration.obs[schema.EXPERIMENT] == "gene-000"].copy()
    with pytest.raises(ScoreError, match="two perturbations"):
        scib._wells(one, "raw", schema.EXPERIMENT)
    broken = exploration.copy()
    broken.obsm[schema.X_PCA][:] = np.nan
    with pytest.raises(ScoreError, match="not finite"):
        scib._wells(broken, "pca", schema.EXPERIMENT)


def test_without_the_extra_the_error_says_what_to_install(exploration, settings, monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("scib_metrics"):
            raise ImportError("No module named 'scib_metrics'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    write_h5ad(tmp_path / "d.h5ad", exploration.copy())
    with pytest.raises(ScoreError, match=r"pip install 'phenoica\[scib\]'"):
        scib.write_scib(tmp_path / "d.h5ad", "pca", tmp_path / "s.csv", settings())
    assert not (tmp_path / "s.csv").exists()


class Fake:
    """Stands for scib-metrics: every metric is the number it was given."""

    class nearest_neighbors:
        @staticmethod
        def pynndescent(values, **_):
            return None

    def __init__(self, number):
        self.number = number

    def nmi_ari_cluster_labels_kmeans(self, *_):
        return {"nmi": self.number, "ari": 0.25}

    def __getattr__(self, name):
        return lambda *_: self.number if name != "clisi_knn" else float("nan")


def test_a_metric_that_is_no_number_has_a_reason_and_an_empty_table_is_refused(exploration, settings, monkeypatch):
    monkeypatch.setattr(scib, "_scib", lambda: Fake(0.5))
    table = scib.scib_table(exploration, "pca", settings()).set_index("metric")
    assert table.loc["clisi", "reason"] == "not_finite" and pd.isna(table.loc["clisi", "value"])
    assert table.loc["silhouette_label", "value"] == 0.5 and table.loc["ari_kmeans", "value"] == 0.25
    fake = Fake(float("nan"))
    fake.nmi_ari_cluster_labels_kmeans = lambda *_: {"nmi": float("nan"), "ari": float("nan")}
    monkeypatch.setattr(scib, "_scib", lambda: fake)
    with pytest.raises(ScoreError, match="no finite number"):
        scib.scib_table(exploration, "pca", settings())


@pytest.mark.slow
def test_scib_itself(exploration, settings):
    pytest.importorskip(
        "scib_metrics", reason="SCIB-METRICS IS NOT INSTALLED (extra scib): its numbers were not tested"
    )
    table = scib.scib_table(exploration, "raw", settings()).set_index("metric")
    assert np.isfinite(table["value"].astype(float)).all()
    assert table.loc["silhouette_label", "value"] > 0.3
