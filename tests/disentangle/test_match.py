import numpy as np
import pytest

from phenoica.disentangle.match import match, weight_correlations
from phenoica.disentangle.rotations import haar_rotation, nearest_rotation
from phenoica.errors import FitError


def test_a_signed_permutation_is_undone():
    rng = np.random.default_rng(0)
    A = rng.standard_normal((200, 6))
    order, signs = rng.permutation(6), rng.choice([-1, 1], 6)
    B = (A * signs)[:, order] * 3 + 5
    found = match(np.corrcoef(A.T, B.T)[:6, 6:])
    np.testing.assert_array_equal(order[found.index], np.arange(6))
    np.testing.assert_allclose(found.r, signs, atol=1e-12)


def test_assignment_is_the_best_of_all_permutations():
    from itertools import permutations

    r = np.random.default_rng(1).uniform(-1, 1, (5, 5))
    best = max(sum(abs(r[i, p[i]]) for i in range(5)) for p in permutations(range(5)))
    assert np.abs(match(r).r).sum() == pytest.approx(best)


def test_components_without_a_partner():
    found = match(np.array([[0.1], [-0.9], [0.3]]))
    np.testing.assert_array_equal(found.index, [-1, 0, -1])
    np.testing.assert_allclose(found.r, [0, -0.9, 0])
    np.testing.assert_array_equal(match(np.array([[0.1, -0.9, 0.3]])).index, [1])


def test_weights_and_covariance_give_the_correlations_of_the_components():
    rng = np.random.default_rng(2)
    X = rng.standard_normal((500, 7)) @ rng.standard_normal((7, 7))
    V, W = rng.standard_normal((7, 3)), rng.standard_normal((7, 4))
    np.testing.assert_allclose(
        weight_correlations(V, W, np.cov(X.T)), np.corrcoef((X @ V).T, (X @ W).T)[:3, 3:], atol=1e-12
    )


def test_a_constant_component_correlates_with_nothing():
    A = np.stack([np.ones(10), np.arange(10.0)], axis=1)
    np.testing.assert_allclose(weight_correlations(np.eye(2), np.eye(2), np.cov(A.T)), [[0, 0], [0, 1]])


def test_nearest_rotation_of_a_product_solves_the_procrustes_problem():
    from scipy.linalg import orthogonal_procrustes

    rng = np.random.default_rng(3)
    A, Q = rng.standard_normal((100, 5)), haar_rotation(5, 0, 0)
    np.testing.assert_allclose(nearest_rotation(A.T @ A @ Q), Q, atol=1e-12)
    B = A @ Q + rng.standard_normal((100, 5))
    np.testing.assert_allclose(nearest_rotation(A.T @ B), orthogonal_procrustes(A, B)[0], atol=1e-12)


@pytest.mark.parametrize("r", [np.array([[np.nan]]), np.empty((0, 3)), np.ones(4)])
def test_what_cannot_be_matched_is_refused(r):
    with pytest.raises(FitError, match="cannot be matched"):
        match(r)
