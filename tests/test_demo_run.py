"""The whole demo run as a user meets it: scanpy opens the AnnData, the pages draw, the table has its rows.

Slow: it takes the run of this checkout (results/demo) where there is one, and makes one otherwise.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from phenoica import files, schema
from phenoica.score.contrasts import QUERY

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Folder results/demo of a finished demo run."""
    here = ROOT / "results/demo"
    if (here / "index.html").exists():
        return here
    folder = tmp_path_factory.mktemp("demo")
    env = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    command = [sys.executable, "-m", "snakemake", "-s", str(ROOT / "Snakefile"), "-d", str(folder), "--cores", "all"]
    subprocess.run(command, env=env, check=True)
    return folder / "results/demo"


def test_scanpy_works_on_the_result_at_once(run, tmp_path):
    import matplotlib

    matplotlib.use("Agg")
    import scanpy as sc

    adata = sc.read_h5ad(run / "disentangle/disentangled.h5ad")
    schema.check(adata)
    assert adata.n_obs > 1500
    sc.pp.neighbors(adata, use_rep="X_ica")
    sc.tl.umap(adata)
    assert np.isfinite(adata.obsm["X_umap"]).all()
    sc.settings.figdir = tmp_path
    sc.pl.umap(adata, color=["control", "experiment", "qc_pass"], show=False, save="_demo.png")
    assert next(tmp_path.glob("*.png")).stat().st_size > 10_000


def test_slots_of_the_design_are_there(run):
    import anndata

    adata = anndata.read_h5ad(run / "disentangle/disentangled.h5ad")
    k = adata.obsm[schema.X_ICA].shape[1]
    assert {schema.VIEW_KEYS[name] for name in ("pca", "varimax", "ica", "tvn", "pca_cs")} <= set(adata.obsm)
    assert adata.varm[schema.VARM_PCS].shape == adata.varm[schema.VARM_ICS].shape == (adata.n_vars, k)
    labels = adata.uns[schema.UNS_COMPONENTS]["label"]
    assert set(labels) <= set(schema.COMPONENT_LABELS)
    for key, label in ((schema.X_BIOLOGY, schema.BIOLOGY), (schema.X_BATCH, schema.BATCH)):
        chosen = np.flatnonzero((labels == label).to_numpy())
        np.testing.assert_array_equal(adata.obsm[key], adata.obsm[schema.X_ICA][:, chosen])
    # pca and ica of one fit are rotations of each other, and both white on the fitted wells
    pca, ica = (adata.obsm[key].astype(np.float64) for key in (schema.X_PCA, schema.X_ICA))
    rotation = pca.T @ ica / len(pca)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(k), atol=1e-4)
    assert "pretrain" not in " ".join(adata.obs[schema.EXPERIMENT].cat.categories)


def test_every_must_beat_row_stands_in_the_table(run):
    scores = pd.read_parquet(run / "score/scores.parquet")
    assert scores.columns.tolist() == list(schema.SCORE_COLUMNS)
    macro = scores[
        (scores["fold"] == -1) & (scores["contrast"] == QUERY) & (scores["perturbation"] == "macro")
        & (scores["metric"] == "auroc") & (scores["scope"] == "pooled") & scores["view_minus"].isna()
        & ((scores["probe"] == "l1") | (scores["view"] == "position_trees"))
    ]  # fmt: skip
    wanted = {
        "raw", "centerscale", "pca", "rotation", "varimax", "ica", "tvn", "pca_cs", "position_linear",
        "position_trees", "cell_count", "true_cell_count", "image_measures", "random_encoder", "permuted",
    }  # fmt: skip
    assert set(macro["view"]) == wanted
    assert macro.loc[macro["view"] == "rotation", "draw"].dropna().nunique() == 3
    assert macro["value"].between(0, 1).all()
    holds = scores[(scores["contrast"] == "l2_control") & (scores["metric"] == "holds") & (scores["fold"] == -1)]
    assert holds["value"].tolist() == [1.0]
    # what the images hold is neither nothing nor everything
    images = scores[(scores["fold"] == -1) & (scores["view"] == "image_measures") & (scores["metric"] == "auroc")]
    images = images[
        images["perturbation"].isin(["PLK1", "MTOR"]) & images["view_minus"].isna() & (images["scope"] == "pooled")
    ]
    assert images["value"].between(0.6, 0.99).all()


@pytest.mark.parametrize("replacement", ["noise", "extreme"])
def test_the_folds_own_jobs_never_see_the_held_out_wells(run, tmp_path, replacement):
    """Fit and score fold 0 again by the command line, with everything measured on its test wells replaced."""
    import anndata

    folds = pd.read_csv(run / "plates/folds.csv")
    held_out = folds.loc[folds["fold"] == 0, "experiment"]
    adata = anndata.read_h5ad(run / "embed/embeddings.h5ad")
    rows = adata.obs["experiment"].isin(held_out).to_numpy()
    assert 0 < rows.sum() < len(rows)
    random = np.random.default_rng(0)

    def other(shape):
        values = random.standard_normal(shape)
        return values if replacement == "noise" else 1e8 * np.sign(values)

    adata.X[rows] = other((rows.sum(), adata.n_vars))
    measures = adata.obsm["image_measures"]
    measures.loc[rows] = other((rows.sum(), measures.shape[1]))
    adata.obs.loc[rows, "cell_count"] = other(rows.sum())
    adata.obsm[schema.RANDOM_ENCODER][rows] = other((rows.sum(), adata.n_vars))
    adata.write_h5ad(tmp_path / "replaced.h5ad")

    phenoica = [str(Path(sys.executable).parent / "phenoica")]
    common = ["--config", str(run / "config.json"), "--fold", "0", "--embeddings", str(tmp_path / "replaced.h5ad")]
    common += ["--qc-wells", str(run / "qc/wells.parquet"), "--folds", str(run / "plates/folds.csv")]
    states, decisions = tmp_path / "fold-0", tmp_path / "fold-0.json"
    # the workflow gives these jobs one thread; with another number sums of wide matrices round differently
    env = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")}
    subprocess.run([*phenoica, "disentangle", *common, "--out", str(states)], env=env, check=True)
    score = ["score", *common, "--states", str(states), "--truth", str(run / "demo/truth.parquet")]
    score += ["--out", str(tmp_path / "s.parquet"), "--decisions", str(decisions)]
    subprocess.run([*phenoica, *score], env=env, check=True)

    original = run / "disentangle/fold-0"
    names = sorted(p.relative_to(original) for p in original.rglob("[!.]*") if p.is_file())
    assert len(names) > 50
    assert names == sorted(p.relative_to(states) for p in states.rglob("*") if p.is_file())
    assert [n for n in names if files.sha256(original / n) != files.sha256(states / n)] == []
    assert files.sha256(run / "score/fold-0.json") == files.sha256(decisions)
    ours, theirs = pd.read_parquet(run / "score/fold-0.parquet"), pd.read_parquet(tmp_path / "s.parquet")
    assert not ours["value"].equals(theirs["value"])  # the test side did change


def test_planted_failures_are_flagged_and_no_phenotype_is_excluded(run):
    plates = pd.read_parquet(run / "qc/plates.parquet").set_index("plate_id")
    flagged = plates.index[plates["flags"] != ""].tolist()
    assert flagged == ["gene-003_2", "gene-006_1"]
    assert "dispenser" in plates.loc["gene-003_2", "flags"]
    assert "plate_focus" in plates.loc["gene-006_1", "flags"]
    wells = pd.read_parquet(run / "qc/wells.parquet")
    only_phenotype = wells[(wells["qc_phenotype"] != "") & (wells["qc_acquisition"] == "")]
    assert len(only_phenotype) > 0
    assert only_phenotype["qc_pass"].all()


def test_every_page_draws_without_network_or_errors(run):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("NO CHROMIUM: the pages of the demo run are not looked at in a browser")
    from playwright.sync_api import sync_playwright

    pages = [run / "index.html", run / "report/score.html", run / "report/plates/index.html"]
    pages += sorted((run / "report/plates").glob("*/*.html"))[:4]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        problems: list[str] = []
        page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: problems.append(str(e)))
        local = ("file:", "data:", "blob:")
        page.on("request", lambda r: None if r.url.startswith(local) else problems.append(r.url))
        for path in pages:
            page.goto(path.resolve().as_uri())
            assert page.locator("h1").count() == 1, path
            links = page.eval_on_selector_all("a[href]", "nodes => nodes.map(n => n.href)")
            missing = [link for link in links if link.startswith("file:") and not Path(link[7:].split("#")[0]).exists()]
            assert not missing, (path, missing)
        browser.close()
    assert not problems
