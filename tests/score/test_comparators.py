"""Combat and harmony through the jobs: in the table, never among what is held out."""

import importlib.util
import json
import warnings

import anndata
import numpy as np
import pandas as pd
import pytest

from phenoica import schema
from phenoica.disentangle.run import fit_fold
from phenoica.files import write_csv, write_h5ad, write_parquet
from phenoica.report import score_page
from phenoica.score import presets, run
from phenoica.score.compare import Run, compare
from phenoica.score.hits import hits
from phenoica.score.summary import is_held_out

COMPARATORS = ["combat"] + ["harmony"] * (importlib.util.find_spec("harmonypy") is not None)
if len(COMPARATORS) < 2:
    warnings.warn("harmonypy is not installed: the comparator harmony is NOT tested", stacklevel=1)


@pytest.fixture(scope="module")
def finished(screen, settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("comparators")
    adata = screen(n_experiments=4, n_genes=3, effect=3.0)
    config = settings(
        plates={"folds": 2},
        disentangle={"views": ["pca", "ica", *COMPARATORS, "centerscale + ica"]},
        score={"lambda_fractions": [0.2]},
    )
    write_parquet(folder / "qc.parquet", adata.obs[list(schema.QC_COLUMNS)].reset_index())
    folds = pd.DataFrame({"experiment": [f"gene-{e:03d}" for e in range(4)], "fold": [0, 1, 0, 1]})
    write_csv(folder / "folds.csv", folds)
    write_h5ad(folder / "embeddings.h5ad", adata)
    inputs = folder / "embeddings.h5ad", folder / "qc.parquet", folder / "folds.csv"
    done = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ica: .* fewer than 10 k")
        for k in range(2):
            fit_fold(*inputs, k, folder / f"fold-{k}", config)
            done.append((folder / f"score-{k}.parquet", folder / f"score-{k}.json"))
            run.score_fold(*inputs, folder / f"fold-{k}", k, *done[-1], config)
    out = folder / "scores.parquet", folder / "scores.csv", folder / "scores.txt"
    run.summarise(*zip(*done, strict=True), *out, config)
    return folder, config


def test_the_table_shows_them_as_having_read_all_wells(finished):
    scores = pd.read_parquet(finished[0] / "scores.parquet")
    for name in COMPARATORS:
        rows = scores[(scores["view"] == name) & (scores["metric"] == "auroc")]
        assert set(rows["test_data_used"]) == {"all"}
        assert rows["value"].notna().any() and set(rows["fold"]) == {-1, 0, 1}
    others = scores[~scores["view"].isin(COMPARATORS)]
    assert is_held_out(others).all()
    assert set(others.loc[others["view"] == "centerscale + ica", "test_data_used"]) == {"controls"}


def test_nothing_held_out_is_compared_with_them(finished):
    folder, config = finished
    scores = pd.read_parquet(folder / "scores.parquet")
    assert set(scores["view_minus"].dropna()) >= {"pca", "centerscale + ica"}
    assert not set(scores["view_minus"].dropna()) & set(COMPARATORS)
    assert set(scores.loc[scores["metric"] == "auroc_gap", "view"]) >= {"pca"}
    assert not set(scores.loc[scores["metric"] == "auroc_gap", "view"]) & set(COMPARATORS)
    assert set(hits(scores, config)["view"]) == {"pca", "ica", "centerscale + ica"}
    same = Run(config, scores, {0: frozenset({"gene-000", "gene-002"}), 1: frozenset({"gene-001", "gene-003"})})
    assert not set(compare(same, same, 0.95)["view"]) & set(COMPARATORS)
    text = (folder / "scores.txt").read_text()
    lines = [line for line in text.splitlines() if any(name in line for name in COMPARATORS)]
    assert len(lines) == 1 and lines[0].startswith("Not held out (corrected with all test wells in view)")
    total = scores[scores["fold"] == -1]
    titles = presets.titles(config["score"]["contrasts"])
    for table in (score_page.score_table(total, scope, titles) for scope in ("pooled", "within_experiment")):
        assert not {row["view"] for row in table["rows"]} & set(COMPARATORS)
    assert not {row["name"] for panel in score_page.panels(scores, titles) for row in panel["rows"]} & set(COMPARATORS)
    assert not set(score_page.perturbation_tables(total, titles)["views"]) & set(COMPARATORS)
    assert {row["view"] for row in score_page.comparator_table(total, titles)["rows"]} == set(COMPARATORS)
    assert score_page.comparator_table(total[is_held_out(total)], titles) is None


def test_the_page_says_what_they_are(finished):
    folder, config = finished
    adata = anndata.AnnData(np.zeros((2, 2), np.float32), obs=pd.DataFrame(index=["a", "b"]))
    adata.uns[schema.UNS] = dict.fromkeys(schema.UNS_KEYS, "x") | {"fit_experiments": ["gene-000"]}
    adata.write_h5ad(folder / "disentangled.h5ad")
    decisions = [folder / f"score-{k}.json" for k in range(2)]
    page = folder / "score.html"
    hits(pd.read_parquet(folder / "scores.parquet"), config).to_csv(folder / "hits.csv", index=False)
    files = [folder / name for name in ("scores.txt", "disentangled.h5ad", "score.html")]
    score_page.write(folder / "scores.parquet", folder / "hits.csv", decisions, *files, config)
    before, after = page.read_text().split('id="comparators"')
    section = after.split("<h2")[0]
    assert "not held out" in section and all(f"<td>{name}</td><td>all</td>" in section for name in COMPARATORS)


def test_their_state_holds_nothing_of_the_test_wells(finished):
    folder, _ = finished
    state = json.loads((folder / "fold-0" / "combat" / "view.json").read_text())
    assert state["fitted"]["batches_"] == ["gene-001", "gene-003"] and state["test_data_used"] == "all"
