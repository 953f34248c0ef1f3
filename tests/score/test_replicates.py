"""Replicates against hand-worked values, independent implementations, and the null of relabelled controls."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.stats import energy_distance
from sklearn.metrics import average_precision_score
from sklearn.metrics.pairwise import cosine_similarity

from phenoica import schema
from phenoica.errors import ScoreError
from phenoica.score import replicates
from phenoica.score.replicates import CROSS, SAME, mean_average_precision, replicate_tests


def test_consistency_by_hand():
    values = np.array([[1.0, 0], [0, 2], [3, 3], [0, 0], [-1, 0]])
    root = np.sqrt(0.5)
    labels = np.array([[1, 1, 1, 0, 0], [1, 0, 0, 0, 1], [1, 0, 0, 1, 0]], bool)
    np.testing.assert_allclose(replicates.mean_cosines(values, labels), [2 * root / 3, -1, 0], atol=1e-15)


def test_consistency_is_the_mean_over_pairs():
    rng = np.random.default_rng(0)
    values, labels = rng.standard_normal((30, 7)), rng.random(30) < 0.4
    inside = cosine_similarity(values[labels])
    expected = inside[np.triu_indices(len(inside), 1)].mean()
    assert replicates.mean_cosines(values, labels)[0] == pytest.approx(expected, abs=1e-12)
    with pytest.raises(ScoreError, match="two replicates"):
        replicates.mean_cosines(values, np.arange(30) == 3)


def test_energy_distance_is_that_of_scipy_in_one_dimension():
    rng = np.random.default_rng(1)
    values, labels = rng.standard_normal((40, 1)), np.arange(40) < 13
    found = replicates.energy_distances(values, np.stack([labels, ~labels]))
    expected = energy_distance(values[labels, 0], values[~labels, 0]) ** 2
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_energy_distance_by_hand_in_two_dimensions():
    # cases (0,0), (0,2); references (3,0), (3,0): 2 E|X-Y| = 3 + sqrt 13, E|X-X'| = 1, E|Y-Y'| = 0
    values = np.array([[0.0, 0], [0, 2], [3, 0], [3, 0]])
    found = replicates.energy_distances(values, np.array([True, True, False, False]))
    assert found[0] == pytest.approx(3 + np.sqrt(13) - 1)
    with pytest.raises(ScoreError, match="one class"):
        replicates.energy_distances(values, np.ones(4, bool))


def test_relabelling_keeps_the_cases_of_every_plate():
    labels, plates = np.arange(30) % 3 == 0, np.repeat(list("abc"), 10)
    drawn = replicates.relabellings(labels, plates, 200, np.random.default_rng(0))
    for plate in "abc":
        assert (drawn[:, plates == plate].sum(axis=1) == labels[plates == plate].sum()).all()
        share = labels[plates == plate].mean()
        error = np.sqrt(share * (1 - share) / len(drawn))
        assert np.abs(drawn[:, plates == plate].mean(axis=0) - share).max() < 4 * error  # every well takes its turn


def test_chosen_wells_are_on_common_plates_and_capped():
    plates = np.array(["a"] * 6 + ["b"] * 4 + ["c"] * 4)
    case = np.array([1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0], bool)
    reference = np.array([0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1], bool)
    cases, references = replicates.chosen_wells(case, reference, plates, 100, [0])
    assert cases.tolist() == [0, 1, 2] and references.tolist() == [3, 4, 5]
    fewer = replicates.chosen_wells(case, reference, plates, 2, [0])[0]
    assert len(fewer) == 2 and fewer.tolist() == replicates.chosen_wells(case, reference, plates, 2, [0])[0].tolist()


def test_centring_takes_the_fit_controls_of_the_batch_alone():
    obs = pd.DataFrame({
        schema.CONTROL_ROLE: ["fit", "fit", "reference", "none", "reference", "none"],
        schema.EXPERIMENT: ["a", "a", "a", "a", "b", "b"],
    })  # fmt: skip
    values = np.array([[1.0], [3], [9], [4], [7], [8]])
    moved = replicates.centred(values, obs, schema.EXPERIMENT)
    assert moved[:4, 0].tolist() == [-1, 1, 7, 2] and np.isnan(moved[4:]).all()


class Plates:
    """Reference controls of some experiments and plates, with plate and batch effects on them."""

    def __init__(self, rng, *, experiments=2, plates=3, controls=16, width=5, offset=1.0):
        self.experiment = np.repeat([f"e{i}" for i in range(experiments)], plates * controls)
        self.plate = np.repeat([f"p{i}" for i in range(experiments * plates)], controls)
        codes = np.unique(self.plate, return_inverse=True)[1]
        self.values = rng.standard_normal((len(codes), width))
        self.values += offset * rng.standard_normal((experiments * plates, width))[codes]

    def relabelled(self, rng, per_plate):
        labels = np.zeros(len(self.plate), bool)
        for plate in np.unique(self.plate):
            labels[rng.choice(np.flatnonzero(self.plate == plate), per_plate, replace=False)] = True
        return labels


@pytest.mark.parametrize(("controls", "per_plate"), [(16, 4), (144, 4)])
def test_p_values_of_relabelled_controls_are_uniform(controls, per_plate):
    rng = np.random.default_rng(controls)
    p = {"consistency": [], "magnitude": []}
    for draw in range(150):
        wells = Plates(rng, experiments=1, plates=2, controls=controls)
        labels = wells.relabelled(rng, per_plate)
        found = replicate_tests(wells.values, labels, wells.plate, 99, [draw])
        for name in p:
            p[name].append(found[name].p)
    for values in p.values():  # uniform on 0.01, ..., 1: the jitter makes them continuous
        jittered = np.array(values) - rng.random(150) / 100
        assert stats.kstest(jittered, "uniform").pvalue > 0.01
        assert np.mean(values) == pytest.approx(0.505, abs=3 * np.sqrt(1 / 12 / 150))


def test_a_null_without_plates_would_call_plates_a_phenotype():
    """Cases on one plate, controls on both: the plate's own look is in the null, so it does not count."""
    rng, p = np.random.default_rng(3), []
    for draw in range(40):
        wells = Plates(rng, experiments=1, plates=2, controls=16, offset=3.0)
        labels = np.zeros(32, bool)
        labels[rng.choice(16, 6, replace=False)] = True
        p.append(replicate_tests(wells.values, labels, wells.plate, 99, [draw])["magnitude"].p)
        loose = replicate_tests(wells.values, labels, np.zeros(32), 99, [draw])["magnitude"].p
        assert loose <= 0.05
    assert np.mean(np.array(p) <= 0.1) < 0.3


def test_a_planted_shift_is_found():
    rng = np.random.default_rng(0)
    wells = Plates(rng)
    labels = wells.relabelled(rng, 4)
    wells.values[labels] += 2.0
    found = replicate_tests(wells.values, labels, wells.plate, 199, [0])
    assert found["consistency"].p == found["magnitude"].p == 1 / 200
    assert found["consistency"].value > found["consistency"].chance
    assert found["magnitude"].value > found["magnitude"].chance


def test_identical_wells_are_ties_and_no_evidence():
    labels, plates = np.arange(8) < 3, np.zeros(8)
    found = replicate_tests(np.ones((8, 4)), labels, plates, 50, [0])
    assert found["consistency"].p == found["magnitude"].p == 1


def by_hand(values, perturbations, experiments, plates, well, kind, same_plate):
    def pairs(other):
        if kind == CROSS:
            return experiments[other] != experiments[well]
        return experiments[other] == experiments[well] and (same_plate or plates[other] != plates[well])

    n = range(len(values))
    own = [j for j in n if j != well and perturbations[j] == perturbations[well] and pairs(j)]
    controls = [j for j in n if perturbations[j] is None and pairs(j)]
    if not own or not controls:
        return None
    scores = cosine_similarity(values[[well]], values[own + controls])[0]
    return average_precision_score([1] * len(own) + [0] * len(controls), scores)


@pytest.mark.parametrize(("kind", "same_plate"), [(SAME, False), (SAME, True), (CROSS, False)])
def test_map_by_copairs_is_the_average_precision_of_scikit_learn(kind, same_plate):
    rng = np.random.default_rng(5)
    n = 90
    experiments, plates = np.repeat(["a", "b", "c"], 30), np.repeat([f"p{i}" for i in range(9)], 10)
    perturbations = rng.choice(np.array(["x", "y", None], dtype=object), n, p=[0.2, 0.2, 0.6])
    perturbations[:3] = ["alone", "x", "y"]  # no replicate anywhere
    values = rng.standard_normal((n, 4))
    found = mean_average_precision(values, perturbations, experiments, plates, kind=kind, same_plate=same_plate)
    for name in ("x", "y"):
        single = [
            by_hand(values, perturbations, experiments, plates, i, kind, same_plate)
            for i in np.flatnonzero(perturbations == name)
        ]
        known = [v for v in single if v is not None]
        assert found[name].value == pytest.approx(np.mean(known), abs=1e-6)
        assert (found[name].n_wells, found[name].n_singletons) == (len(known), len(single) - len(known))
    assert found["alone"] == replicates.MeanAveragePrecision(None, None, None, 0, 1)


def test_a_well_without_a_reference_to_rank_with_is_a_singleton():
    """Its precision would be 1 whatever the features are."""
    values = np.random.default_rng(0).standard_normal((6, 3))
    perturbations = np.array(["x", "x", "y", "y", None, None], dtype=object)
    experiments, plates = np.array(list("aabbbb")), np.array(["a1", "a2", "b1", "b2", "b1", "b2"])
    found = mean_average_precision(values, perturbations, experiments, plates, kind=SAME)
    assert found["x"].value is None and found["x"].n_singletons == 2 and found["y"].n_wells == 2


@pytest.mark.parametrize("controls", [16, 144])
@pytest.mark.parametrize("kind", [SAME, CROSS])
def test_map_of_relabelled_controls_is_at_its_chance(kind, controls):
    rng, normalised = np.random.default_rng(controls), []
    for _ in range(50):
        wells = Plates(rng, controls=controls if kind == SAME else 16, plates=2 if controls == 144 else 3)
        labels = wells.relabelled(rng, 4)
        names = np.where(labels, "x", None)
        found = mean_average_precision(wells.values, names, wells.experiment, wells.plate, kind=kind)["x"]
        normalised.append(found.normalised)
    error = np.std(normalised, ddof=1) / np.sqrt(50)
    assert error > 0 and abs(np.mean(normalised)) <= 3 * error


def test_values_that_are_not_finite_are_named():
    values = np.ones((4, 2))
    values[2] = np.nan
    with pytest.raises(ScoreError, match="1 wells"):
        replicates.energy_distances(values, np.arange(4) < 2)
    with pytest.raises(ScoreError, match="pairs must be"):
        mean_average_precision(np.ones((4, 2)), np.array(["x"] * 4), np.zeros(4), np.zeros(4), kind="all")
