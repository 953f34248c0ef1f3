"""Average precision, sparsity, non-zeros along the path and the place of the wells, as rows of a fold."""

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import average_precision_score

from phenoica import schema
from phenoica.score import metrics, probe_rows
from phenoica.score.baselines import POSITION_TREES, Features, position_linear, position_trees
from phenoica.score.fold import FoldScorer
from phenoica.score.probes import fit_l1


def plate_of_wells(rng, n):
    row, column = rng.integers(1, 17, n), rng.integers(1, 25, n)
    edge = np.minimum.reduce([row - 1, 16 - row, column - 1, 24 - column])
    return pd.DataFrame({schema.ROW: row, schema.COLUMN: column, schema.EDGE_DISTANCE: edge})


def test_trees_see_what_a_linear_model_of_rows_and_columns_cannot():
    """Cases in two opposite quarters of the plate: every row and every column has its half of them."""
    rng = np.random.default_rng(0)
    obs = plate_of_wells(rng, 1200)
    labels = (obs[schema.ROW] <= 8).to_numpy() == (obs[schema.COLUMN] <= 12).to_numpy()
    train, test = np.arange(600), np.arange(600, 1200)
    scores = position_trees(obs, train, labels[train], test, seed=0)
    assert metrics.auroc(labels[test], scores) > 0.95
    X = position_linear(obs, np.arange(1200) < 600)
    linear = fit_l1(X[train], labels[train], 0.1).decision(X[test])
    assert metrics.auroc(labels[test], linear) < 0.6
    assert (position_trees(obs, train, labels[train], test, seed=0) == scores).all()


@pytest.mark.parametrize("n", [32, 288])
def test_trees_of_random_labels_score_a_half(n):
    rng, found = np.random.default_rng(n), []
    for draw in range(50):
        obs, labels = plate_of_wells(rng, 2 * n), rng.permutation(2 * n) % 2 == 0
        train, test = np.arange(n), np.arange(n, 2 * n)
        found.append(metrics.auroc(labels[test], position_trees(obs, train, labels[train], test, seed=draw)))
    assert abs(np.mean(found) - 0.5) <= 3 * np.std(found, ddof=1) / np.sqrt(50)


@pytest.fixture(scope="module")
def scored(screen, settings):
    adata, config = screen(n_experiments=4, n_genes=4, lonely=True), settings()
    folds = (np.unique(adata.obs[schema.EXPERIMENT], return_inverse=True)[1] < 2).astype(int)
    rng = np.random.default_rng(0)
    values = rng.standard_normal((adata.n_obs, 8))
    values[(adata.obs[schema.PERTURBATION] == "PLK1").to_numpy(), 0] += 2
    scorer = FoldScorer(adata.obs, folds, 1, config)
    features = [Features("pca", values), Features("cell_count", values[:, :1])]
    rows, decided = scorer.score(features)
    return scorer, values, rows, decided


def pick(rows, **where):
    for name, value in where.items():
        rows = rows[rows[name] == value]
    return rows


def test_average_precision_stands_beside_its_prevalence(scored):
    scorer, values, rows, decided = scored
    contrast, part = next((c, p) for c, p in scorer.splits if c.perturbation == "PLK1" and "reference" in c.name)
    found = pick(rows, contrast=contrast.name, perturbation="PLK1", view="pca").set_index("metric")["value"]
    fraction = decided["fractions"]["pca"]["fraction"]
    scores = fit_l1(values[part.train], part.train_labels, fraction).decision(values[part.test])
    assert found["average_precision"] == pytest.approx(average_precision_score(part.test_labels, scores), abs=1e-3)
    assert found["prevalence"] == pytest.approx(part.test_labels.mean())
    assert set(pick(rows, metric="gini")["view"]) == {"pca"}  # sparsity of equal widths only


def test_position_trees_have_a_row_for_every_contrast_also_those_not_testable(scored):
    scorer, _, rows, _ = scored
    trees = pick(rows, view=POSITION_TREES)
    assert set(trees["probe"]) == {"trees"} and set(trees["test_data_used"]) == {"none"}
    pooled = pick(trees, metric="auroc", scope="pooled")
    assert len(pooled) == len(scorer.splits)
    tested = np.array([part.reason is None for _, part in scorer.splits])
    assert (pooled["value"].notna().to_numpy() == tested).all() and (
        pooled["reason"].notna().to_numpy() == ~tested
    ).all()
    assert "one_experiment" in set(pooled["reason"])
    assert pooled.loc[pooled["value"].notna(), "pairs"].gt(0).all()


def test_non_zeros_along_the_path_are_means_over_the_perturbations_of_a_contrast():
    probes = {"ica": {
        "query/A": {"path": {"fraction": [0.5, 0.1], "non_zero": [1, 4]}},
        "query/B": {"path": {"fraction": [0.5, 0.1], "non_zero": [3, 5]}},
        "other/A": {"path": {"fraction": [0.5], "non_zero": [0]}},
    }, "raw": {"query/A": {"non_zero": 3}}}  # fmt: skip
    features = [Features("ica", np.zeros((2, 6))), Features("raw", np.zeros((2, 9)))]
    rows = probe_rows.path_rows(probes, features, 2, 5)
    found = {(r["contrast"], r["metric"]): r["value"] for r in rows}
    assert found == {("query", "non_zero_at_0.5"): 2.0, ("query", "non_zero_at_0.1"): 4.5,
                     ("other", "non_zero_at_0.5"): 0.0}  # fmt: skip
    assert {(r["view"], r["n_components"], r["fold"], r["n_experiments"]) for r in rows} == {("ica", 6, 2, 5)}


def test_the_spread_of_rotations_is_their_standard_deviation():
    base = {**dict.fromkeys(schema.SCORE_COLUMNS), "fold": -1, "metric": "auroc", "view": "rotation", "probe": "l1",
            "scope": "pooled", "contrast": "c"}  # fmt: skip
    values = {"A": [0.5, 0.6, 0.7], "B": [0.5]}
    rows = [{**base, "perturbation": p, "draw": d, "value": v} for p, vs in values.items() for d, v in enumerate(vs)]
    rows.append({**base, "perturbation": "A", "draw": None, "value": 0.6})
    found = {r["perturbation"]: r for r in probe_rows.rotation_spread_rows(pd.DataFrame(rows))}
    assert found["A"]["value"] == pytest.approx(0.1) and found["A"]["draw"] is None
    assert found["B"]["value"] is None and found["B"]["reason"] == "one_draw"
