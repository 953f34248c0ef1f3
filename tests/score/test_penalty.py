import numpy as np

from phenoica.score.penalty import InnerSplits, choose_fractions


def test_fraction_is_the_best_and_the_sparse_one_is_the_largest_within_one_error():
    rng = np.random.default_rng(0)
    X, labels, group = rng.standard_normal((300, 8)), np.arange(300) % 3 == 0, np.arange(300) // 75
    X[labels, :4] += 0.5  # four weak features: a large lambda keeps too few of them
    masks = [group == g for g in range(4)]
    groups = tuple([(np.flatnonzero(~m), labels[~m], np.flatnonzero(m), labels[m])] for m in masks)
    [found] = choose_fractions([X], InnerSplits("everywhere", ("PLK1",), groups), [0.1, 0.97, 0.4])
    assert found.fractions == (0.97, 0.4, 0.1)
    best = int(np.argmax(found.auroc))
    assert found.fraction == found.fractions[best] != 0.97
    least = found.auroc[best] - found.standard_error[best]
    assert found.sparse_fraction == max(f for f, a in zip(found.fractions, found.auroc, strict=True) if a >= least)


def test_nothing_to_choose_on_is_said():
    [found] = choose_fractions([np.zeros((2, 1))], InnerSplits("default", (), ()), [0.5, 0.1, 0.02])
    assert (found.rule, found.fraction) == ("default", 0.1)
