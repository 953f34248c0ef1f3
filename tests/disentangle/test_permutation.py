import itertools

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from phenoica.disentangle.permutation import RankTest, ReferenceTests
from phenoica.errors import ControlsError

HEAVY = {
    "Gaussian": lambda rng, size: rng.standard_normal(size),
    "t, 2 df": lambda rng, size: rng.standard_t(2, size),
    "Cauchy": lambda rng, size: rng.standard_cauchy(size),
    "log-normal": lambda rng, size: rng.lognormal(0, 2, size),
    "rounded": lambda rng, size: np.round(rng.lognormal(0, 1, size)),
    "mostly zero": lambda rng, size: rng.poisson(0.2, size).astype(float),
}


def every_arrangement(values, groups, strata):
    """Return the p value of the joint statistic over all permutations within strata, by the definition."""
    scores = pd.Series(values).groupby(strata).transform(lambda v: v.rank() / (len(v) + 1) - 0.5).to_numpy()
    within = [np.flatnonzero(strata == s) for s in np.unique(strata)]
    indicators = np.stack([(groups == g).astype(float) for g in np.unique(groups)], axis=1)
    for rows in within:
        indicators[rows] -= indicators[rows].mean(axis=0)
    indicators /= np.linalg.norm(indicators, axis=0)

    def both(s):
        fit = indicators @ np.linalg.lstsq(indicators, s, rcond=None)[0]
        return (fit @ s) / (s @ s), np.abs(indicators.T @ s).max() / np.linalg.norm(s)

    pool = []
    for orders in itertools.product(*(itertools.permutations(rows) for rows in within)):
        moved = scores.copy()
        for rows, order in zip(within, orders, strict=True):
            moved[rows] = scores[list(order)]
        pool.append(both(moved))
    pool, own = np.array(pool), np.array(both(scores))
    tail = (pool[None] >= pool[:, None] - 1e-9).mean(axis=1).min(axis=1)
    return (tail <= (pool >= own - 1e-9).mean(axis=0).min() + 1e-9).mean()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("strata", [np.zeros(6), np.array([0, 0, 0, 1, 1, 1])])
def test_p_is_that_of_all_arrangements(seed, strata):
    rng = np.random.default_rng(seed)
    groups, values = np.array([0, 1, 2, 0, 1, 2]), rng.standard_normal(6)
    expected = every_arrangement(values, groups, strata)
    found = RankTest([groups], strata, permutations=20000).p_values(values[:, None])[0, 0]
    assert found == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize("kind", HEAVY)
@pytest.mark.parametrize("n_strata", [1, 20])
def test_p_values_are_uniform_however_heavy_the_tails(kind, n_strata):
    rng = np.random.default_rng(0)
    groups, strata = rng.integers(0, 8, 160), np.repeat(np.arange(n_strata), 160 // n_strata)
    p = RankTest([groups], strata, permutations=4999).p_values(HEAVY[kind](rng, (160, 3000)))[0]
    for level in (0.01, 0.05, 0.2, 0.5):
        assert (p <= level).mean() == pytest.approx(level, abs=4 * np.sqrt(level * (1 - level) / 3000))


def test_few_draws_give_no_more_small_p_values():
    """Where one of the two statistics is beyond all draws, the smallest p of all would come twice as often."""
    rng, small = np.random.default_rng(0), []
    for seed in range(500):
        groups, values = rng.integers(0, 8, 80), rng.standard_normal((80, 20))
        small.append((RankTest([groups], np.zeros(80), permutations=19, seed=(seed,)).p_values(values) <= 0.05).mean())
    assert np.mean(small) <= 0.05 + 2.5 * np.std(small, ddof=1) / np.sqrt(500)


def test_both_kinds_of_effect_are_seen_and_a_stratum_is_not():
    rng = np.random.default_rng(0)
    groups, strata = np.tile(np.arange(40), 10), np.repeat(np.arange(10), 40)
    noise = rng.standard_normal((400, 4))
    noise[:, 1] += rng.standard_normal(40)[groups]  # every group differs a little
    noise[:, 2] += 4.0 * (groups == 7)  # one group differs much
    noise[:, 3] += 5.0 * strata
    p = RankTest([groups], strata, permutations=9999).p_values(noise)[0]
    assert (p[[1, 2]] <= 0.001).all() and (p[[0, 3]] > 0.05).all()
    omnibus = stats.kruskal(*(noise[groups == g, 2] for g in range(40))).pvalue
    assert omnibus > p[2]  # what the second statistic is for


def test_p_is_one_where_groups_cannot_differ():
    values = np.random.default_rng(0).standard_normal((12, 3))
    strata = np.repeat(np.arange(4), 3)
    for groups, within in ((np.zeros(12), np.zeros(12)), (strata, strata), (strata, np.arange(12))):
        assert (RankTest([groups], within, permutations=99).p_values(values) == 1).all()
    constant = RankTest([strata], np.zeros(12), permutations=99).p_values(np.ones((12, 1)))
    assert constant[0, 0] == 1


def test_one_seed_gives_one_p():
    values, groups = np.random.default_rng(0).standard_normal((60, 5)), np.arange(60) % 5
    make = lambda seed: RankTest([groups], np.zeros(60), permutations=199, seed=(seed,)).p_values(values)  # noqa: E731
    np.testing.assert_array_equal(make(3), make(3))
    assert (make(3) != make(4)).any()


def test_the_smallest_p_passes_benjamini_hochberg_over_128_components(make_metadata):
    obs = make_metadata(n_experiments=8, n_plates=3)
    Z = np.random.default_rng(0).standard_normal((len(obs), 128))
    Z[:, 5] += 3.0 * (obs["experiment"] == "gene-003").to_numpy()
    p = ReferenceTests(obs).batch(Z)[1]
    assert p[5] * 128 <= 0.05


def test_an_odd_batch_is_found_and_plates_stand_beside_it(make_metadata):
    """Permuting whole plates could not find it: three plates of eight batches come to lie together one time in 253."""
    obs = make_metadata(n_experiments=8, n_plates=3)
    rng = np.random.default_rng(0)
    Z = 0.5 * rng.standard_normal((len(obs), 2))
    Z[:, 0] += 3.0 * (obs["experiment"] == "gene-003")
    Z[:, 1] += rng.standard_normal(24)[pd.factorize(obs["plate_id"])[0]]
    tests = ReferenceTests(obs)
    (batch, p), plate = tests.batch(Z), tests.plate(Z)
    assert batch[0] > 0.7 and p[0] == 1e-4 and plate[0] < 0.05
    assert plate[1] > 0.4 and p[1] <= 1e-3  # plates differ, so batches do


def test_a_plate_effect_is_not_position(make_metadata):
    """Plates whose controls lie in few columns: what the plate has, the columns seem to have."""
    obs = make_metadata(n_experiments=6, n_plates=4)
    rng = np.random.default_rng(0)
    plate = pd.factorize(obs["plate_id"])[0]
    obs = obs.assign(column=1 + (plate % 6) + rng.integers(0, 3, len(obs)))
    Z = 3.0 * rng.standard_normal((24, 200))[plate] + rng.standard_normal((len(obs), 200))
    tests = ReferenceTests(obs)
    assert tests.within_plates
    share, p = tests.position(Z)
    assert share[1].mean() > 0.05  # it does look like it
    assert (p[1] <= 0.05).mean() == pytest.approx(0.05, abs=0.05)


def test_with_one_control_a_plate_position_is_tested_within_batches(make_metadata):
    obs = make_metadata(n_experiments=4, n_plates=6)
    lone = (obs["control_role"] != "reference") | (obs.groupby(["plate_id", "control_role"]).cumcount() == 0)
    tests = ReferenceTests(obs[lone])
    assert not tests.within_plates and tests.record()["position"] == "wells within batches"
    assert (tests.position(np.random.default_rng(0).standard_normal((lone.sum(), 5)))[1] < 1).any()


def test_a_batch_key_that_cuts_through_plates(make_metadata):
    obs = make_metadata()
    tests = ReferenceTests(obs, batch_key="row")
    share, p = tests.batch(
        obs["row"].to_numpy()[:, None] + 0.1 * np.random.default_rng(0).standard_normal((len(obs), 1))
    )
    assert share[0] > 0.9 and p[0] <= 0.001


def test_no_reference_control_is_named(make_metadata):
    with pytest.raises(ControlsError, match=r"plates\.negative_controls"):
        ReferenceTests(make_metadata().assign(control_role="none"))
