import itertools

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from phenoica.errors import ScoreError
from phenoica.score import metrics


@pytest.mark.parametrize("seed", range(5))
def test_auroc_agrees_with_scikit_learn_also_with_ties(seed):
    rng = np.random.default_rng(seed)
    labels = rng.random(60) < 0.3
    labels[:2] = True, False
    for scores in (rng.standard_normal(60), rng.integers(0, 4, 60).astype(float), np.zeros(60)):
        assert metrics.auroc(labels, scores) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


def test_auroc_by_hand():
    # pairs: .4>.1 .4<.8 | .8>.1 .8=.8 -> (1 + 0 + 1 + .5) / 4
    assert metrics.auroc([True, True, False, False], [0.4, 0.8, 0.1, 0.8]) == 0.625


def test_within_groups_ignores_offsets_between_them():
    labels = np.array([1, 0, 0, 1, 0, 1], bool)
    scores = np.array([2.0, 1.0, 3.0, 102.0, 101.0, 100.0])
    groups = np.array(["a", "a", "a", "b", "b", "b"])
    value, pairs = metrics.auroc_within(labels, scores, groups)
    # a: 2 > 1, 2 < 3; b: 102 > 101, 100 < 101
    assert (value, pairs) == (0.5, 4)
    assert metrics.auroc_within(labels, scores + 1e3 * (groups == "a"), groups)[0] == 0.5
    only_a = np.array([1, 0, 0, 1, 1, 1], bool)
    assert metrics.auroc_within(only_a, scores, groups) == (0.5, 2)


@pytest.mark.parametrize(
    ("labels", "scores", "message"),
    [
        ([1, 1], [0.0, 1.0], "only one class"),
        ([1, 0], [np.nan, 1.0], "not finite"),
        ([1, 0], [0.0], "equally long"),
    ],
)
def test_auroc_names_what_is_wrong(labels, scores, message):
    with pytest.raises(ScoreError, match=message):
        metrics.auroc(np.array(labels), np.array(scores))


def test_hoyer_known_values():
    assert metrics.hoyer([0, 0, -3.0, 0]) == 1
    assert metrics.hoyer([2.0, -2, 2, -2]) == 0
    # sqrt 4 = 2; |w|_1 = 7, |w|_2 = 5: (2 - 1.4) / 1
    assert metrics.hoyer([3.0, -4, 0, 0]) == pytest.approx(0.6)
    assert metrics.hoyer(np.array([3.0, -4, 0, 0]) * 1e-200) == pytest.approx(0.6)
    assert metrics.hoyer(np.zeros(4)) is None
    assert metrics.hoyer([1.0]) is None


def test_concentration_by_hand():
    held_out, batch = np.array([4.0, 1, 3, 2]), np.array([1.0, 1, 1, 5])
    top = metrics.ranking(np.array([0.1, 5.0, 5.0, 0.2]))[:2]
    assert top.tolist() == [1, 2]  # ties keep the component order
    assert metrics.concentration_share(held_out, top) == pytest.approx(0.4)
    assert metrics.corrected_share(0.4, 2, 4) == pytest.approx(-0.2)
    assert metrics.corrected_share(1.0, 4, 4) is None
    assert metrics.purity(held_out, batch, top) == pytest.approx(4 / 6)
    assert metrics.participation(held_out) == pytest.approx(100 / 30)
    assert metrics.participation(np.ones(7)) == pytest.approx(7)
    assert metrics.overlap(top, metrics.ranking(batch)[:2]) == 0
    assert metrics.overlap([0, 3], [3, 1]) == 0.5
    assert metrics.concentration_share(np.zeros(4), top) is None
    assert metrics.purity(np.zeros(4), np.zeros(4), top) is None
    assert metrics.participation(np.zeros(4)) is None
    assert [metrics.top_count(n, 0.25) for n in (1, 4, 6, 16, 128)] == [1, 1, 2, 4, 32]


def test_effects_must_not_be_negative():
    with pytest.raises(ScoreError, match="at least 0"):
        metrics.participation(np.array([1.0, -1]))


@pytest.mark.parametrize("seed", range(3))
def test_average_precision_by_hand_and_its_chance_by_enumeration(seed):
    # ranks of cases 1 and 3 of 4: (1 + 2/3) / 2
    assert metrics.average_precision([1, 0, 1, 0], [0.9, 0.8, 0.7, 0.1]) == pytest.approx(5 / 6)
    assert metrics.average_precision([1, 0, 0, 0], np.zeros(4)) == 0.25  # no order: the prevalence
    rng = np.random.default_rng(seed)
    labels = np.r_[True, False, rng.random(50) < 0.2]
    for scores in (rng.standard_normal(52), rng.integers(0, 5, 52).astype(float)):
        assert metrics.average_precision(labels, scores) == pytest.approx(average_precision_score(labels, scores))
    n_case, n = 2 + seed, 6
    every = [
        metrics.average_precision(np.isin(np.arange(n), chosen), -np.arange(n))
        for chosen in itertools.combinations(range(n), n_case)
    ]
    assert metrics.chance_average_precision(n_case, n) == pytest.approx(np.mean(every))
    pairs = np.array([1, 2, 3]), np.array([1, 9, 3])
    single = [float(metrics.chance_average_precision(m, n)) for m, n in zip(*pairs, strict=True)]
    np.testing.assert_allclose(metrics.chance_average_precision(*pairs), single)
    assert metrics.chance_average_precision(1, 1) == 1


def test_chance_of_average_precision_is_that_of_copairs():
    from copairs.map.normalization import expected_ap

    for m, n in ((1, 5), (4, 9), (10, 200)):
        assert metrics.chance_average_precision(m, m + n) == pytest.approx(expected_ap(m, n), rel=1e-12)
    with pytest.raises(ScoreError, match="at least one positive"):
        metrics.chance_average_precision(0, 4)


def test_gini_known_values():
    assert metrics.gini([2.0, -2, 2, -2]) == pytest.approx(0)
    assert metrics.gini([0, 0, -3.0, 0]) == pytest.approx(0.75)  # 1 - 1/n
    # |w| ascending 1, 3: 1 - 2 (1/4 * 3/2 + 3/4 * 1/2) / 2
    assert metrics.gini([3.0, -1]) == pytest.approx(0.25)
    assert metrics.gini(np.array([3.0, -1]) * 1e-200) == pytest.approx(0.25)
    rng = np.random.default_rng(0)
    w = np.abs(rng.standard_normal(9))  # mean absolute difference over twice the mean
    expected = np.abs(w[:, None] - w[None, :]).mean() / (2 * w.mean())
    assert metrics.gini(w) == pytest.approx(expected, rel=1e-12)
    assert metrics.gini(np.zeros(4)) is None
    with pytest.raises(ScoreError, match="finite"):
        metrics.gini([np.nan, 1])
