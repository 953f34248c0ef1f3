import numpy as np
import pytest
from scipy import stats

from phenoica.errors import ScoreError
from phenoica.score import intervals


def test_t_interval_by_hand():
    # values .6 .7 .8, weights 1 1 2: centre .725; s^2 = .01; var = .01 (1/3 + 1/2); t(.975, 2) = 4.30265
    found = intervals.t_interval([0.6, 0.7, 0.8], [1, 1, 2], 0.95)
    half = 4.302652729749464 * np.sqrt(0.01 * 5 / 6)
    assert found.value == pytest.approx(0.725)
    assert (found.low, found.high) == (pytest.approx(0.725 - half), 1.0)
    assert found.kind == intervals.OVER_FOLDS and found.reason is None
    wide = intervals.t_interval([0.6, 0.7, 0.8], [1, 1, 2], 0.95, bounds=(-9, 9), centre=0.5)
    assert (wide.low, wide.high) == (pytest.approx(0.5 - half), pytest.approx(0.5 + half))


@pytest.mark.parametrize(("values", "reason"), [([0.7], "one_fold"), ([0.7, 0.7, 0.7], "zero_variance")])
def test_t_interval_without_spread_has_a_reason(values, reason):
    found = intervals.t_interval(values, np.ones(len(values)), 0.95)
    assert found == intervals.Interval(pytest.approx(0.7), None, None, None, reason)


def test_weights_and_values_are_checked():
    with pytest.raises(ScoreError, match="weights"):
        intervals.t_interval([0.5, 0.6], [0, 0], 0.95)
    with pytest.raises(ScoreError, match="finite"):
        intervals.weighted_mean([np.nan], [1])


def pairwise_delong(labels, scores):
    """DeLong's variance straight from all pairs, independent of ranks."""
    wins = (scores[labels][:, None] > scores[~labels][None]) + 0.5 * (scores[labels][:, None] == scores[~labels][None])
    return wins.mean(1).var(ddof=1) / labels.sum() + wins.mean(0).var(ddof=1) / (~labels).sum()


@pytest.mark.parametrize("ties", [False, True])
def test_one_plate_is_delong(ties):
    rng = np.random.default_rng(3)
    labels = np.arange(40) < 13
    scores = rng.standard_normal(40) + labels
    scores = np.round(scores) if ties else scores
    found = intervals.delong_variance(labels, scores, np.zeros(40))
    assert found == pytest.approx(pairwise_delong(labels, scores), rel=1e-12)


def test_stratified_variance_by_hand():
    labels = np.array([1, 1, 0, 0, 1, 1, 0, 0], bool)
    plates = np.array(list("aaaabbbb"))
    scores = np.array([3.0, 1, 2, 0, 8, 6, 5, 7])
    # placements of cases over the references {2, 0, 5, 7}: 2/4, 1/4 | 1, 3/4; within-plate variances 1/32 each
    # of references under the cases {3, 1, 8, 6}: 3/4, 1 | 2/4, 1/4; 1/32 each
    assert intervals.delong_variance(labels, scores, plates) == pytest.approx(2 * (2 * (2 / 32)) / 16)
    # a plate with one well of a class borrows the others' spread; with no plate of two there is nothing to borrow
    lone = np.append(plates, "c"), np.append(labels, True), np.append(scores, 4.0)
    assert intervals.delong_variance(lone[1], lone[2], lone[0]) > 0
    assert intervals.delong_variance(labels, scores, np.arange(8)) is None


def test_delong_interval_weighs_value_and_error_by_pairs():
    found = intervals.delong_interval([0.6, 0.9], [0.01, 0.04], [30, 10], 0.9)
    half = stats.norm.ppf(0.95) * (0.75 * 0.1 + 0.25 * 0.2)  # two folds train on each other: errors add
    assert found.error == pytest.approx(0.125) and found.freedom is None
    apart = intervals.delong_interval([0.6, 0.9], [0.01, 0.04], [30, 10], 0.9, correlation=0.0)
    assert apart.error == pytest.approx(np.sqrt(0.75**2 * 0.01 + 0.25**2 * 0.04))
    assert intervals.joint_variance([1, 1, 1], [1, 1, 1], intervals.fold_correlation(3)) == pytest.approx(3 + 6 / 2)
    assert found.value == pytest.approx(0.675)
    assert (found.low, found.high) == (pytest.approx(0.675 - half), pytest.approx(0.675 + half))
    assert found.kind == "within these experiments"
    assert intervals.delong_interval([0.6, 0.9], [0.01, None], [1, 1], 0.9).reason == "no_variance"
    assert intervals.delong_interval([1.0, 1.0], [0.0, 0.0], [1, 1], 0.9).reason == "zero_variance"


def test_stratified_interval_covers_when_plates_differ():
    rng, truth, hits = np.random.default_rng(0), None, 0
    offsets = np.repeat([0.0, 2.0, -1.0], 20)  # plates differ, but hold cases and references alike
    plates, labels = np.repeat([0, 1, 2], 20), np.tile(np.arange(20) < 10, 3)
    means = np.concatenate([offsets[labels] + 1.0, offsets[~labels]])
    cases, references = means[: labels.sum()], means[labels.sum() :]
    truth = stats.norm.cdf((cases[:, None] - references[None]) / np.sqrt(2)).mean()
    for _ in range(300):
        scores = offsets + labels + rng.standard_normal(60)
        wins = (scores[labels][:, None] > scores[~labels][None]).mean()
        variance = intervals.delong_variance(labels, scores, plates)
        found = intervals.delong_interval([wins], [variance], [1], 0.95)
        hits += found.low <= truth <= found.high
    assert 0.90 <= hits / 300 <= 0.98
