import numpy as np
import pytest
from scipy import stats

from phenoica.disentangle.variance import adjust, basis_beyond, omega2, variance_between


def test_omega2_by_hand():
    values = np.array([[1.0], [2], [3], [5], [6], [7], [9], [9]])
    groups = np.array(list("aaabbbcc"))
    between = 3 * (2 - 5.25) ** 2 + 3 * (6 - 5.25) ** 2 + 2 * (9 - 5.25) ** 2
    within = 2 + 2 + 0
    mean_square = within / (8 - 3)
    expected = (between - 2 * mean_square) / (between + within + mean_square)
    assert omega2(values, groups)[0] == pytest.approx(expected)
    # and through F: omega2 = (g - 1)(F - 1) / ((g - 1)(F - 1) + n)
    F = stats.f_oneway(*(values[groups == g, 0] for g in "abc")).statistic
    assert omega2(values, groups)[0] == pytest.approx(2 * (F - 1) / (2 * (F - 1) + 8))


def test_omega2_is_unbiased_where_nothing_is_there_and_zero_where_it_cannot_be_measured():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((60, 2000))
    found = omega2(values, np.repeat(np.arange(6), 10))
    assert found.min() == 0 and found.mean() < 0.03
    assert (omega2(values, np.zeros(60)) == 0).all()
    assert (omega2(values, np.arange(60)) == 0).all()
    assert (omega2(np.ones((60, 1)), np.repeat(np.arange(6), 10)) == 0).all()
    values = np.repeat(np.arange(6.0), 10)[:, None]
    assert omega2(values, values[:, 0])[0] == pytest.approx(1)


def test_adjust_agrees_with_scipy():
    p = np.random.default_rng(0).uniform(size=(40, 3)) ** 2
    for column in range(3):
        np.testing.assert_allclose(adjust(p)[:, column], stats.false_discovery_control(p[:, column]))


def test_variance_between_within_nothing_is_one_way_anova():
    rng = np.random.default_rng(0)
    values, groups = rng.standard_normal((40, 3)), rng.integers(0, 5, 40)
    share, p = variance_between(values, groups)
    F = stats.f_oneway(*(values[groups == g] for g in range(5)))
    np.testing.assert_allclose(p, F.pvalue)
    np.testing.assert_allclose(share, np.clip(4 * (F.statistic - 1) / (4 * (F.statistic - 1) + 40), 0, None))
    one_level = variance_between(values, groups, np.zeros(40))
    np.testing.assert_allclose(one_level[0], share)
    np.testing.assert_allclose(one_level[1], p)


def test_variance_between_within_levels_compares_two_linear_models():
    rng = np.random.default_rng(1)
    values, groups, levels = rng.standard_normal((60, 4)), rng.integers(0, 7, 60), rng.integers(0, 4, 60)
    values += levels[:, None] + 0.2 * groups[:, None]
    levels[groups == 6], groups[levels == 3] = 3, 6  # this group is this level: nothing of it is left
    share, p = variance_between(values, groups, levels)

    def residual(*factors):
        design = np.column_stack([factor[:, None] == np.unique(factor) for factor in factors]).astype(float)
        fit, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
        return ((values - design @ fit) ** 2).sum(axis=0), rank

    (small, rank_small), (large, rank_large) = residual(levels), residual(levels, groups)
    df, mean_square = rank_large - rank_small, large / (60 - rank_large)
    assert df == 5  # six other groups, one of which the level means determine
    np.testing.assert_allclose(p, stats.f.sf((small - large) / df / mean_square, df, 60 - rank_large))
    total = ((values - values.mean(axis=0)) ** 2).sum(axis=0)
    np.testing.assert_allclose(share, np.clip((small - large - df * mean_square) / (total + mean_square), 0, None))
    assert (variance_between(values, levels, levels)[1] == 1).all()


def test_groups_nested_in_levels_take_the_short_way_to_the_same_numbers():
    rng = np.random.default_rng(2)
    groups = rng.integers(0, 9, 80)
    levels = groups // 3
    values = rng.standard_normal((80, 3)) + groups[:, None]
    basis = basis_beyond(groups, levels)
    centred = values - np.stack([values[levels == level].mean(axis=0) for level in range(3)])[levels]
    between = ((basis.T @ centred) ** 2).sum(axis=0)
    mean_square = ((centred**2).sum(axis=0) - between) / (80 - 9)
    share, p = variance_between(values, groups, levels)
    assert basis.shape[1] == 6
    np.testing.assert_allclose(p, stats.f.sf(between / 6 / mean_square, 6, 80 - 9))
    total = ((values - values.mean(axis=0)) ** 2).sum(axis=0)
    np.testing.assert_allclose(share, np.clip((between - 6 * mean_square) / (total + mean_square), 0, None))
