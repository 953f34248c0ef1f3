"""What a probe trained inside the held-out experiments shows beside one trained on others."""

import numpy as np
import pytest

from phenoica import schema
from phenoica.score import score
from phenoica.score.baselines import Features
from phenoica.score.contrasts import POSITIVE_CUTTING, build
from phenoica.score.fold import FoldScorer
from phenoica.score.in_distribution import LARGEST, halves_of, in_distribution_rows
from phenoica.score.penalty import Fraction

DOSES = {"name": "dose", "case": {"control": "none"}, "reference": {"control_role": "reference"}, "min_wells": 2,
         "each": ["perturbation", "concentration"], "batch_key": "plate_id"}  # fmt: skip


def scorer_of(screen, settings, *, contrasts=("standard",), fold=0, **keys):
    adata = screen(n_genes=4, lonely=True, **keys)
    obs = adata.obs.copy()
    obs[schema.CONCENTRATION] = np.where(obs[schema.CONTROL] == schema.NONE, 2.5, np.nan)
    codes = obs[schema.EXPERIMENT].str[-1].astype(int).to_numpy()
    config = settings(score={"contrasts": list(contrasts)}, disentangle={"min_fit_controls": 4})
    return FoldScorer(obs, codes % 3, fold, config)


def rows_of(scorer, values, view="raw"):
    feature = Features(view, values)
    return {(r["contrast"], r["perturbation"], r["metric"]): r
            for r in in_distribution_rows(scorer, [feature], {feature.key: Fraction(0.2, 0.2, "default")})}  # fmt: skip


def test_a_shift_that_differs_between_experiments_shows_inside_them_only(screen, settings):
    adata = screen(n_genes=2, n_plates=2, effect=0.0)
    rng = np.random.default_rng(1)
    codes = adata.obs[schema.EXPERIMENT].str[-1].astype(int).to_numpy()
    shifts = rng.choice([-1.0, 1.0], (6, adata.n_vars)) * 2
    plk1 = (adata.obs[schema.PERTURBATION] == "PLK1").to_numpy()
    adata.X = rng.standard_normal(adata.shape).astype(np.float32)
    adata.X[plk1] += shifts[codes[plk1]].astype(np.float32)
    scores = score(adata, settings(plates={"folds": 6}, disentangle={"views": ["raw"]}))
    rows = scores[(scores["fold"] == -1) & (scores["perturbation"] == "PLK1") & (scores["view"] == "raw")]
    rows = rows[(rows["contrast"] == "positive_vs_reference") & (rows["probe"] == "l1")]
    value = rows.set_index(["metric", "scope"])["value"]
    assert value["auroc", "in_distribution"] > 0.95 and value["auroc", "pooled"] < 0.8
    assert value["auroc_gap", "in_distribution"] == pytest.approx(
        value["auroc", "in_distribution"] - value["auroc", "pooled"]
    )
    gap = rows.set_index("metric").loc["auroc_gap"]
    assert gap["ci_kind"] == "t over folds" and gap["value"] > 0.2
    assert {"p_value", "q_value", "p_floor", "detectable_difference", "position_overlap"} <= set(
        scores.loc[(scores["fold"] == -1) & (scores["perturbation"] == "PLK1"), "metric"]
    )


def test_halves_are_plates_and_train_each_other(screen, settings):
    scorer = scorer_of(screen, settings)
    for contrast, part in scorer.splits:
        halves, reason = halves_of(contrast, part, scorer.obs, 0, 4, 0)
        assert set(halves) == {0, 1} and reason is None
        plates = scorer.plates[part.test]
        assert all(len(set(halves[plates == p])) == 1 for p in np.unique(plates))
        for experiment in np.unique(scorer.experiments[part.test]):
            assert len(set(halves[scorer.experiments[part.test] == experiment])) == 2


def test_what_cannot_be_halved_has_a_row_with_its_reason(screen, settings):
    scorer = scorer_of(screen, settings, n_plates=1)
    values = np.random.default_rng(0).standard_normal((len(scorer.obs), 5))
    assert {r["reason"] for r in rows_of(scorer, values).values()} == {"one_plate"}
    scorer = scorer_of(screen, settings)
    values = np.random.default_rng(0).standard_normal((len(scorer.obs), 5))
    case = np.flatnonzero((scorer.obs[schema.PERTURBATION] == "PLK1").to_numpy() & ~scorer.train)
    for value, reason in ((np.nan, "missing_values"), (10 * LARGEST, "extreme_values")):
        damaged = values.copy()
        damaged[case[0], 2] = value
        found = rows_of(scorer, damaged)
        assert found["positive_vs_reference", "PLK1", "auroc"]["reason"] == reason
        assert found["positive_vs_reference", "MTOR", "auroc"]["value"] is not None


def test_a_perturbation_of_one_experiment_is_tested_inside_it_and_its_row_says_so(screen, settings):
    scorer = scorer_of(screen, settings, contrasts=["standard", DOSES], n_plates=4)
    assert {c.name for c, _ in scorer.within_splits} == {"dose"} and "dose" not in {c.name for c, _ in scorer.splits}
    rng = np.random.default_rng(0)
    values = rng.standard_normal((len(scorer.obs), 5))
    values[(scorer.obs[schema.PERTURBATION] == "LONELY").to_numpy(), 0] += 4
    found = rows_of(scorer, values)
    # nothing was planted in the others, and no well is scored by a probe that has seen it
    others = [r["value"] for (c, p, m), r in found.items() if m == "auroc" and p != "LONELY @ 2.5"]
    assert len(others) > 4 and abs(np.mean(others) - 0.5) < 0.12
    lonely = found["dose", "LONELY @ 2.5", "auroc"]
    assert lonely["value"] > 0.95 and lonely["reason"] == "within_experiments_only" and lonely["n_experiments"] == 1
    assert found["dose", "LONELY @ 2.5", "rank_sum"]["pairs"] > 0
    assert ("query_vs_reference", "LONELY", "rank_sum") not in found  # over experiments there is a test already


def test_contrasts_inside_experiments_reach_the_table_and_are_the_only_ones_when_switched_off(screen, settings):
    adata = screen(n_experiments=4, n_genes=2, n_plates=4, lonely=True, effect=4.0)
    adata.obs[schema.CONCENTRATION] = np.where(adata.obs[schema.CONTROL] == schema.NONE, 2.5, np.nan)
    keys = {"contrasts": ["standard", DOSES], "in_distribution": False}
    scores = score(adata, settings(score=keys, disentangle={"views": ["raw"]}))
    inside = scores[(scores["scope"] == "in_distribution") & (scores["fold"] == -1) & (scores["view"] == "raw")]
    inside = inside[inside["probe"] == "l1"]
    assert set(inside["contrast"]) == {"dose"}
    assert set(scores.loc[scores["contrast"] == "dose", "scope"]) == {"in_distribution"}
    q = inside[(inside["metric"] == "q_value") & (inside["perturbation"] == "GENE0 @ 2.5")]["value"].item()
    assert q < 0.05
    assert inside.loc[inside["metric"] == "auroc", "reason"].str.contains("within_experiments_only").all()


def test_one_class_only_is_a_reason(screen, settings):
    adata = screen(n_genes=2)
    references = (adata.obs[schema.CONTROL_ROLE] == schema.REFERENCE) & (adata.obs[schema.EXPERIMENT] == "gene-000")
    obs = adata.obs.copy()
    obs.loc[references, schema.CONTROL_ROLE] = schema.NONE
    codes = obs[schema.EXPERIMENT].str[-1].astype(int).to_numpy()
    scorer = FoldScorer(obs, codes, 0, settings())
    found = rows_of(scorer, np.random.default_rng(0).standard_normal((len(obs), 3)))
    against_references = [r for (contrast, *_), r in found.items() if contrast != POSITIVE_CUTTING]
    assert {r["reason"] for r in against_references} == {"no_reference"}
    assert build(obs)  # and nothing is dropped from the list
