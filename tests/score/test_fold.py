"""The rows of one fold from features made by formula, where each number has one right value."""

import json

import numpy as np
import pandas as pd
import pytest

from phenoica import schema
from phenoica.disentangle.components import component_effects
from phenoica.errors import ScoreError
from phenoica.score import concentration, fold, metrics
from phenoica.score.baselines import PERMUTED, POSITION_TREES, Features
from phenoica.score.contrasts import POSITIVE, REASONS
from phenoica.score.fold import FoldScorer
from phenoica.score.intervals import delong_variance
from phenoica.score.penalty import Fraction
from phenoica.score.probes import fit_l1
from phenoica.score.rows import CONCENTRATION


class Wells:
    """A screen of four experiments in two folds (two are held out), with noise as features of a view called pca."""

    def __init__(self, screen, settings, width=8):
        self.obs, self.config = screen(n_experiments=4, n_genes=4).obs, settings()
        self.experiment = self.obs[schema.EXPERIMENT].to_numpy()
        self.folds = (np.unique(self.experiment, return_inverse=True)[1] < 2).astype(int)
        self.train = self.folds != 1
        self.case = (self.obs[schema.CONTROL] != schema.NEGATIVE).to_numpy()
        self.reference = (self.obs[schema.CONTROL_ROLE] == schema.REFERENCE).to_numpy()
        self.plk1 = (self.obs[schema.PERTURBATION] == "PLK1").to_numpy()
        self.values = np.random.default_rng(0).standard_normal((len(self.obs), width))

    def drop(self, wells):
        for name in ("obs", "experiment", "folds", "train", "case", "reference", "plk1", "values"):
            setattr(self, name, getattr(self, name)[~wells])

    def score(self, *views):
        features = [Features(name, self.values) for name in views or ("pca",)]
        return FoldScorer(self.obs, self.folds, 1, self.config).score(features)


@pytest.fixture
def wells(screen, settings):
    return Wells(screen, settings)


def concentrations(rows):
    found = rows[rows["metric"].isin(CONCENTRATION)].set_index("metric")
    return found["value"], found["reason"]


def plk1_rows(rows, **where):
    rows = rows[(rows["contrast"] == POSITIVE) & (rows["perturbation"] == "PLK1") & (rows["probe"] == "l1")]
    for name, value in where.items():
        rows = rows[rows[name] == value]
    return rows


def test_components_are_ranked_in_training_and_measured_on_held_out_wells(wells):
    values, held_out = wells.values, ~wells.train
    values[wells.case & wells.train, :2] += 3.0  # training ranks 0 and 1 highest
    for component in (0, 1, 4):  # held out, a third component carries as much
        values[wells.case & held_out, component] += 3.0
    rows, decided = wells.score()
    found, _ = concentrations(rows)
    assert set(decided["ranking"]["pca"]["biology"][:2]) == {0, 1}
    assert found["concentration_share"] == pytest.approx(2 / 3, abs=0.06)  # 1 in training
    assert found["participation"] == pytest.approx(3, abs=0.3)  # 2 in training
    effects = component_effects(values[held_out], wells.obs[held_out]).biology
    counts = rows[rows["metric"] == "purity"].iloc[0]
    assert counts["n_case"] == (wells.case & held_out).sum()
    assert counts["n_reference"] == (wells.reference & held_out).sum() and counts["n_experiments"] == 2
    assert found["concentration_share"] == pytest.approx(effects[:2].sum() / effects.sum(), rel=1e-12)
    assert found["concentration_corrected"] == pytest.approx((found["concentration_share"] - 0.25) / 0.75)


def test_the_batch_of_components_is_the_experiment(wells):
    values = wells.values
    values[wells.case, 0] += 3.0
    values[:, 2] += 8.0 * (wells.experiment == "gene-003")  # a training experiment
    values[:, 5] += 3.0 * wells.obs[schema.ROW].to_numpy()
    rows, decided = wells.score()
    assert decided["ranking"]["pca"]["batch"][0] == 2
    found, _ = concentrations(rows)
    first = {name: decided["ranking"]["pca"][name][:2] for name in ("biology", "batch")}
    assert found["purity"] > 0.8
    assert found["overlap"] == len(set(first["biology"]) & set(first["batch"])) / 2 < 1
    values[:, 0] += 30.0 * (wells.experiment == "gene-003")  # now the top component is bound to the batch
    found, _ = concentrations(wells.score()[0])
    assert found["purity"] < 0.93 and found["overlap"] >= 0.5


def test_one_training_batch_has_no_purity_and_no_overlap(wells):
    wells.values[wells.case, 0] += 3.0
    wells.drop(wells.experiment == "gene-003")
    rows, decided = wells.score()
    found, reasons = concentrations(rows)
    for name in ("purity", "overlap"):
        assert np.isnan(found[name]) and reasons[name] == "one_batch"
    assert decided["ranking"]["pca"]["batch"] == []
    for name in ("concentration_share", "concentration_corrected", "participation"):
        assert np.isfinite(found[name]) and reasons[name] is None


def test_without_an_effect_in_training_nothing_is_ranked(wells):
    wells.values[wells.case & ~wells.train, 3] += 3.0
    wells.values[wells.train] = 0.0
    rows, decided = wells.score()
    found, reasons = concentrations(rows)
    assert decided["ranking"]["pca"] == {"biology": [], "batch": []}
    for name in CONCENTRATION:
        known = name == "participation"
        assert np.isfinite(found[name]) == known and reasons[name] == (None if known else "no_training_effect")


@pytest.mark.parametrize("left", ["one reference an experiment", "no reference", "no case"])
def test_a_held_out_fold_that_cannot_measure_effects_has_a_reason(wells, left):
    held_out = ~wells.train
    if left == "no case":
        wells.drop(wells.case & held_out)
    else:
        lost = wells.reference & held_out
        if left != "no reference":
            for experiment in ("gene-000", "gene-001"):
                lost[np.flatnonzero(lost & (wells.experiment == experiment))[0]] = False
        wells.drop(lost)
    found, reasons = concentrations(wells.score()[0])
    assert found.isna().all() and set(reasons) == {"no_reference"}


def test_readings_of_concentration_name_what_they_lack():
    biology, batch, top = np.array([3.0, 1, 0, 0]), np.array([1.0, 0, 0, 0]), np.array([0])
    known = concentration.concentration(biology, batch, top, top)
    assert known == {
        "concentration_share": (0.75, None), "concentration_corrected": (pytest.approx(2 / 3), None),
        "purity": (0.75, None), "participation": (pytest.approx(1.6), None), "overlap": (1.0, None),
    }  # fmt: skip
    assert concentration.concentration(biology, batch * 0, top, None)["overlap"] == (None, "no_batch_effect")
    assert concentration.concentration(biology, None, top, None)["purity"] == (None, "one_batch")
    assert concentration.concentration(biology, batch, None, top)["overlap"] == (None, "no_training_effect")
    assert concentration.concentration(biology * 0, batch, top, top)["concentration_corrected"] == (None, "no_effect")
    every = np.arange(4)
    assert concentration.concentration(biology, batch, every, every)["concentration_corrected"] == (None, "no_spread")
    reasons = {r for parts in (known,) for _, r in parts.values() if r}
    assert reasons | {"one_batch", "no_batch_effect", "no_training_effect"} <= set(REASONS)


def plk1_split(wells):
    used = wells.plk1 | wells.reference
    train, test = np.flatnonzero(used & wells.train), np.flatnonzero(used & ~wells.train)
    return train, wells.plk1[train], test, wells.plk1[test]


def test_auroc_takes_the_best_fraction_and_sparsity_the_sparse_one(wells, monkeypatch):
    wells.values[wells.plk1, :4] += 0.6
    monkeypatch.setattr(fold, "choose_fractions", lambda *_, **__: [Fraction(0.05, 0.8, "everywhere")])
    rows, decided = wells.score()
    train, labels, test, truth = plk1_split(wells)
    weak, strong = (fit_l1(wells.values[train], labels, f) for f in (0.05, 0.8))
    probe = decided["probes"]["pca"][f"{POSITIVE}/PLK1"]
    assert probe["lambda"] == pytest.approx(0.05 * probe["lambda_max"])
    found = plk1_rows(rows, metric="auroc", scope="pooled")["value"].item()
    assert found == pytest.approx(metrics.auroc(truth, weak.decision(wells.values[test])))
    assert found != pytest.approx(metrics.auroc(truth, strong.decision(wells.values[test])), abs=1e-3)
    assert plk1_rows(rows, metric="hoyer")["value"].item() == pytest.approx(metrics.hoyer(strong.weights))
    assert metrics.hoyer(strong.weights) > metrics.hoyer(weak.weights) + 0.1


def test_permuted_labels_are_permuted_in_training_and_in_test(wells):
    wells.values[wells.case, 0] += 20.0
    rows, decided = wells.score("pca", PERMUTED)
    name = f"{POSITIVE}/PLK1"
    true, shuffled = (decided["probes"][view][name]["lambda_max"] for view in ("pca", PERMUTED))
    assert shuffled < 0.7 * true
    assert plk1_rows(rows, metric="auroc", view="pca")["value"].min() == 1
    # the probe of shuffled labels still follows component 0, if either way: true test labels would score 0 or 1
    permuted = rows[(rows["view"] == PERMUTED) & (rows["metric"] == "auroc") & (rows["scope"] == "pooled")]
    found = permuted["value"].dropna()
    assert len(found) >= 5 and found.between(0.05, 0.95).all() and abs(found.mean() - 0.5) < 0.2
    scorer = FoldScorer(wells.obs, wells.folds, 1, wells.config)
    contrast, part = next((c, p) for c, p in scorer.splits if f"{c.name}/{c.perturbation}" == name)
    plates = wells.obs[schema.PLATE_ID].to_numpy()
    sides = ((part.train, part.train_labels), (part.test, part.test_labels))
    for labels, (where, before) in zip(scorer._permuted(contrast, part), sides, strict=True):
        assert (labels != before).any()
        for plate in np.unique(plates[where]):
            assert labels[plates[where] == plate].sum() == before[plates[where] == plate].sum()


def test_within_experiments_a_shift_between_them_does_not_count(wells):
    """Two held-out experiments that differ by far more than cases differ from references."""
    wells.values[wells.plk1, 0] += 20.0
    wells.values[wells.experiment == "gene-001", 0] += 100.0
    wells.values[:, 0] += 3.0 * wells.values[:, 1] + 4.0 * (wells.obs[schema.PLATE] == "2").to_numpy()
    rows, _ = wells.score()
    rows = plk1_rows(rows, metric="auroc").set_index("scope")
    pooled, within = rows.loc["pooled"], rows.loc["within_experiment"]
    assert within["value"] > 0.95 and pooled["value"] < 0.8
    assert pooled["pairs"] == 2 * within["pairs"] == 16 * 48


def test_variances_are_stratified_by_plate_and_weighted_by_squared_shares(wells):
    obs = wells.obs
    plate = obs[schema.PLATE].to_numpy()
    wells.values[wells.plk1, 0] += 1.0
    wells.values[:, 0] += 2.0 * (plate == "2") + 1.0 * (wells.experiment == "gene-001")
    lost = np.flatnonzero(wells.plk1 & (wells.experiment == "gene-000") & (plate == "1"))[:2]
    wells.drop(np.isin(np.arange(len(obs)), lost))  # unequal shares of the pairs
    rows, decided = wells.score()
    rows = plk1_rows(rows, metric="auroc").set_index("scope")
    train, labels, test, truth = plk1_split(wells)
    penalty = decided["probes"]["pca"][f"{POSITIVE}/PLK1"]
    scores = fit_l1(wells.values[train], labels, penalty["lambda"] / penalty["lambda_max"]).decision(wells.values[test])
    plates, batches = wells.obs[schema.PLATE_ID].to_numpy()[test], wells.experiment[test]
    by_plate = delong_variance(truth, scores, plates)
    assert rows.loc["pooled", "variance"] == pytest.approx(by_plate, rel=1e-6)
    assert by_plate != pytest.approx(delong_variance(truth, scores, batches), rel=0.02)
    total = 0.0
    for batch, share in (("gene-000", 6 / 14), ("gene-001", 8 / 14)):
        inside = batches == batch
        total += share**2 * delong_variance(truth[inside], scores[inside], plates[inside])
    assert rows.loc["within_experiment", "variance"] == pytest.approx(total, rel=1e-6)


def test_a_fold_without_wells_is_named(wells):
    wells.drop(~wells.train)
    with pytest.raises(ScoreError, match="fold 1 has no well to test on.*quarantine"):
        wells.score()


def test_the_path_of_every_contrast_is_kept(wells):
    wells.values[wells.plk1, :3] += 0.8
    wells.config["score"]["lambda_fractions"] = [0.9, 0.5, 0.05]
    rows, decided = wells.score()
    path = decided["probes"]["pca"][f"{POSITIVE}/PLK1"]["path"]
    train, labels, _, _ = plk1_split(wells)
    assert path["fraction"] == [0.9, 0.5, 0.05]
    assert path["non_zero"] == [
        np.count_nonzero(fit_l1(wells.values[train], labels, f).weights) for f in (0.9, 0.5, 0.05)
    ]
    assert path["non_zero"][0] < path["non_zero"][2]


def test_trees_see_what_no_line_separates(wells):
    wells.values[:, 0] = np.where(wells.plk1, 0.0, 3.0 * np.sign(wells.values[:, 0])) + 0.3 * wells.values[:, 1]
    first = wells.score()[0]
    assert set(first.loc[first["probe"] == "trees", "view"]) == {POSITION_TREES}  # where the well is, and no view
    wells.config["score"]["trees"] = True
    rows, _ = wells.score("pca", PERMUTED)
    again, _ = wells.score("pca", PERMUTED)
    trees = rows[(rows["probe"] == "trees") & (rows["contrast"] == POSITIVE) & (rows["perturbation"] == "PLK1")]
    value = trees.set_index(["view", "scope"])["value"]
    assert value["pca"].min() > 0.95 and plk1_rows(rows, metric="auroc", view="pca")["value"].max() < 0.8
    assert value[PERMUTED].between(0.2, 0.8).all()
    assert rows.equals(again)
    outside = (rows["scope"] != "in_distribution") & (rows["view"] != POSITION_TREES)
    asked = rows[(rows["metric"] == "auroc") & outside].groupby("probe")["contrast"].value_counts()
    assert asked["trees"].to_dict() == asked["l1"].to_dict()  # reasons too are rows


def test_a_fold_scored_view_by_view_is_the_fold_scored_at_once(wells, monkeypatch):
    rows, decided = wells.score("pca", "ica", "raw")
    monkeypatch.setattr("phenoica.score.fold.HELD_VALUES", 1)
    again, decided_again = wells.score("pca", "ica", "raw")
    pd.testing.assert_frame_equal(rows, again, rtol=0, atol=1e-9)
    assert json.dumps(decided["fractions"]) == json.dumps(decided_again["fractions"])
    assert decided["ranking"] == decided_again["ranking"]
