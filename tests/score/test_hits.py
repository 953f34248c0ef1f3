"""A screen in which every perturbation has a known explanation, and what the list of hits makes of it."""

import numpy as np
import pandas as pd
import pytest

from phenoica import schema
from phenoica.score import score
from phenoica.score.hits import HIT_COLUMNS, hits


def planted(screen):
    """Six experiments: GENE0 and PLK1 shift a feature; GENE1 only changes the count; GENE2 sits in one corner.

    Column 5 of X follows the well's position and column 6 its cell count, as an embedding may.
    """
    adata = screen(n_experiments=6, n_genes=4, n_plates=3, effect=0.0, batch=0.0, lonely=True)
    obs, rng = adata.obs, np.random.default_rng(3)
    X = rng.standard_normal(adata.shape)
    name = obs[schema.PERTURBATION].to_numpy()
    corner = name == "GENE2"
    obs.loc[corner, schema.ROW], obs.loc[corner, schema.COLUMN], obs.loc[corner, schema.EDGE_DISTANCE] = 1, 1, 0
    elsewhere = ~corner & ((obs[schema.ROW] == 1) | (obs[schema.COLUMN] == 1)).to_numpy()
    obs.loc[elsewhere, schema.ROW] = 3
    obs.loc[elsewhere, schema.COLUMN] = 4
    X[:, 5] += 3.0 * corner  # evaporation, say
    counts = 40 + 3 * rng.standard_normal(len(obs)) - 15 * (name == "GENE1")
    obs[schema.CELL_COUNT] = counts
    X[:, 6] = (counts - 40) / 3 + 0.5 * rng.standard_normal(len(obs))
    X[np.isin(name, ["GENE0", "PLK1"]), 0] += 3.0
    adata.X = X.astype(np.float32)
    return adata


@pytest.fixture(scope="module")
def found(screen, settings):
    config = settings(plates={"folds": 6}, disentangle={"views": ["raw", "pca"]})
    scores = score(planted(screen), config)
    return scores, hits(scores, config), config


def row(table, perturbation, view="raw", contrast="query_vs_reference"):
    rows = table[(table["perturbation"] == perturbation) & (table["view"] == view) & (table["contrast"] == contrast)]
    assert len(rows) == 1
    return rows.iloc[0]


def test_a_planted_signal_is_a_hit_and_says_for_which_experiments(found):
    _, table, _ = found
    gene = row(table, "GENE0")
    assert gene["claim"] and gene["holds_for"] == "these experiments" and gene["q"] <= 0.05 and gene["ci_low"] > 0
    assert gene["effect"] > 0.3 and gene["count_flag"] == "none" and gene["position_flag"] == "none"
    control = row(table, "PLK1", contrast="positive_vs_reference")
    assert control["claim"] and control["holds_for"] == "other experiments" and control["ci_kind"] == "t over folds"
    assert 0 < control["detectable_difference"] < 0.3 and control["adjustment"] == "Holm of 2"
    nothing = row(table, "GENE3")
    assert not nothing["claim"] and nothing["reason"] == "not_significant"


def test_a_position_confounded_perturbation_supports_no_claim(found):
    _, table, _ = found
    corner = row(table, "GENE2")
    assert corner["q"] <= 0.05 and corner["ci_low"] > 0  # it looks like a hit
    assert corner["position_flag"] == "position_confounded" and corner["position_overlap"] < 0.1
    assert not corner["claim"] and corner["reason"] == "position_confounded"


def test_a_count_only_perturbation_is_exposed_by_the_count_row(found):
    scores, table, _ = found
    gene = row(table, "GENE1")
    assert gene["q"] <= 0.05 and gene["count_flag"] == "count_only" and gene["count_effect"] > 0.3
    count = scores[(scores["view"] == "cell_count") & (scores["perturbation"] == "GENE1") & (scores["fold"] == -1)
                   & (scores["metric"] == "p_value")]["value"]  # fmt: skip
    assert (count < 0.05).all() and len(count)


def test_nothing_is_left_out_of_the_list(found):
    scores, table, _ = found
    assert tuple(table.columns) == HIT_COLUMNS and set(table["view"]) == {"raw", "pca"}
    asked = scores[(scores["view"] == "raw") & (scores["perturbation"] != "macro") & (scores["probe"] == "l1")]
    asked = set(map(tuple, asked[["contrast", "perturbation"]].to_numpy()))
    listed = table[table["view"] == "raw"]
    assert set(map(tuple, listed[["contrast", "perturbation"]].to_numpy())) == asked
    lonely = row(table, "LONELY")
    assert lonely["reason"] == "one_experiment" and not lonely["claim"] and pd.isna(lonely["q"])
    assert (table["claim"] | table["reason"].notna()).all()
    assert table["holds_for"].notna().equals(table["claim"].astype(bool))


def test_a_batch_confounded_perturbation_is_exposed_by_the_within_experiment_scope(screen, settings):
    """Experiments with many cases are shifted: pooled scores tell cases from references, within experiments not."""
    adata = screen(n_experiments=8, n_genes=1, n_plates=2, effect=0.0, batch=0.0)
    obs, rng = adata.obs, np.random.default_rng(5)
    codes = obs[schema.EXPERIMENT].str[-1].astype(int).to_numpy()
    adata.X = rng.standard_normal(adata.shape).astype(np.float32)
    many = codes < 4
    adata.X[many, 0] += 6.0
    # in experiments with many cases most references, in the others most cases, are left out
    reference = (obs[schema.CONTROL_ROLE] == schema.REFERENCE).to_numpy()
    number = (
        obs.groupby([schema.PLATE_ID, schema.CONTROL_ROLE, schema.PERTURBATION], observed=True).cumcount().to_numpy()
    )
    cases = (obs[schema.PERTURBATION] == "PLK1").to_numpy()
    keep = ~((reference & many & (number >= 2)) | (cases & ~many & (number >= 1)))
    config = settings(plates={"folds": 2}, disentangle={"views": ["raw"]}, score={"lambda_fractions": [0.5]})
    folds = pd.DataFrame({"experiment": [f"gene-{e:03d}" for e in range(8)], "fold": [0, 0, 1, 1] * 2})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("phenoica.plates.folds.assign_folds", lambda obs, config: folds)
        scores = score(adata[keep].copy(), config)
    plk1 = row(hits(scores, config), "PLK1", contrast="positive_vs_reference")
    assert plk1["effect"] > 0.15 and abs(plk1["within_experiment"]) < 0.15
    assert plk1["p"] > 0.01 and not plk1["claim"]
