"""The batched solver against liblinear, and against what padding, scale, threads and copies must not change."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from phenoica.errors import ScoreError
from phenoica.score import l1_path
from phenoica.score.l1_path import TOLERANCE, Problem, solve_paths
from phenoica.score.metrics import auroc

FRACTIONS = (0.5, 0.25, 0.1, 0.05, 0.02)


def make(seed, n=90, width=20, strength=0.8):
    """Return features, labels: heavy tails, correlated columns far from zero, a few of which differ."""
    rng = np.random.default_rng(seed)
    X = rng.laplace(size=(n, width)) @ (np.eye(width) + 0.4 * rng.standard_normal((width, width)) / np.sqrt(width))
    labels = rng.random(n) < rng.uniform(0.2, 0.6)
    labels[:2] = True, False
    X[labels, :3] += strength
    return X + rng.standard_normal(width), labels


def problem(X, labels):
    return Problem(X, np.arange(len(X)), labels)


def objective(X, labels, weights, intercept, penalty):
    balance = np.where(labels, 0.5 / labels.sum(), 0.5 / (~labels).sum())
    loss = np.logaddexp(0, -np.where(labels, 1, -1) * (X @ weights + intercept))
    return float((balance * loss).sum() + penalty * np.abs(weights).sum())


def liblinear(X, labels, penalty):
    model = LogisticRegression(
        l1_ratio=1.0, solver="liblinear", C=1 / (len(X) * penalty), class_weight="balanced", intercept_scaling=1e4,
        tol=1e-8, max_iter=2000, random_state=0,
    ).fit(X, labels)  # fmt: skip
    return model.coef_[0], float(model.intercept_[0])


@pytest.mark.filterwarnings("ignore:Liblinear failed to converge")
def test_fifty_random_problems_agree_with_liblinear():
    rng = np.random.default_rng(0)
    settings = [(int(rng.integers(40, 200)), int(rng.integers(4, 60)), rng.choice([0.0, 0.4, 1.5])) for _ in range(50)]
    sets = [make(seed, *setting) for seed, setting in enumerate(settings)]
    halves = [np.arange(len(X)) % 2 == 0 for X, _ in sets]
    problems = [Problem(X, np.flatnonzero(h), y[h]) for (X, y), h in zip(sets, halves, strict=True)]
    for i, found in enumerate(solve_paths(problems, FRACTIONS)):
        (X, y), half, k = sets[i], halves[i], i % len(FRACTIONS)
        assert (found.gaps <= TOLERANCE).all()
        penalty = FRACTIONS[k] * found.lambda_max
        weights, intercept = liblinear(X[half], y[half], penalty)
        ours = objective(X[half], y[half], found.weights[k], found.intercepts[k], penalty)
        theirs = objective(X[half], y[half], weights, intercept, penalty)
        assert ours == pytest.approx(theirs, rel=1e-6)
        ours, theirs = X[~half] @ found.weights[k], X[~half] @ weights
        assert auroc(y[~half], ours) == pytest.approx(auroc(y[~half], theirs), abs=1e-3)


def test_the_gap_bounds_what_is_left_of_the_objective(monkeypatch):
    X, y = make(1, n=120, width=60, strength=0.3)
    optimum = solve_paths([problem(X, y)], (0.1,))[0]
    penalty = 0.1 * optimum.lambda_max
    best = objective(X, y, optimum.weights[0], optimum.intercepts[0], penalty)
    left = []
    for steps in range(5):
        monkeypatch.setattr(l1_path, "MAX_ITERATIONS", steps)
        found = solve_paths([problem(X, y)], (0.1,))[0]
        reached = objective(X, y, found.weights[0], found.intercepts[0], penalty)
        assert reached - best <= found.gaps[0] * reached + 1e-12
        left.append(found.gaps[0])
    assert left[0] > left[-1] and left[1] > TOLERANCE  # a count that runs out is not called solved


def test_a_problem_is_the_same_alone_padded_and_among_others():
    sets = [make(seed, n=100 + 7 * seed, width=12) for seed in range(4)]
    together = solve_paths([problem(*s) for s in sets], FRACTIONS)
    for s, found in zip(sets, together, strict=True):
        alone = solve_paths([problem(*s)], FRACTIONS)[0]
        np.testing.assert_allclose(found.weights, alone.weights, atol=1e-4)
        assert ((found.weights != 0) == (alone.weights != 0)).mean() > 0.98
        assert found.lambda_max == pytest.approx(alone.lambda_max, rel=1e-12)


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_units_and_origin_of_the_features_do_not_matter(factor):
    X, y = make(3)
    found = solve_paths([problem(X, y)], FRACTIONS)[0]
    other = solve_paths([problem(factor * (X + 50.0), y)], FRACTIONS)[0]
    np.testing.assert_allclose(other.weights * factor, found.weights, atol=1e-4)
    np.testing.assert_allclose(other.gaps, 0, atol=TOLERANCE)


def test_copies_of_a_feature_and_separable_classes_are_solved():
    X, y = make(4, n=40, width=80, strength=6.0)
    X = np.hstack([X, X[:, :5], np.ones((40, 1))])
    found = solve_paths([problem(X, y)], FRACTIONS)[0]
    assert (found.gaps <= TOLERANCE).all() and np.isfinite(found.weights).all()
    assert not found.weights[:, -1].any()  # a constant is the intercept's


def test_bytes_do_not_depend_on_threads(monkeypatch):
    monkeypatch.setattr(l1_path, "_MAX_PROBLEMS", 2)
    problems = [problem(*make(seed, width=10)) for seed in range(6)]
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            found.append(b"".join(s.weights.tobytes() for s in solve_paths(problems, FRACTIONS)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_batches_hold_one_width_and_similar_sizes(monkeypatch):
    monkeypatch.setattr(l1_path, "_MAX_ELEMENTS", 1000)
    sizes = [(10, 50), (10, 45), (10, 30), (5, 50), (10, 10), (10, 8)]
    problems = [Problem(np.zeros((60, d)), np.arange(n), np.zeros(n, bool)) for d, n in sizes]
    assert l1_path._chunks(problems) == [[0, 1], [2], [4, 5], [3]]


def test_a_view_wider_than_a_batch_is_still_solved(monkeypatch):
    monkeypatch.setattr(l1_path, "_MAX_ELEMENTS", 10)
    found = solve_paths([problem(*make(0)), problem(*make(1))], (0.2,))
    assert all(s.gaps[0] <= TOLERANCE for s in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_a_device_that_is_not_there_is_named():
    with pytest.raises(ScoreError, match="score.device is cuda"):
        solve_paths([problem(*make(0))], (0.5,), device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU HERE: the solver is tested on the CPU only")
def test_a_gpu_finds_the_same():
    problems = [problem(*make(seed)) for seed in range(4)]
    pairs = zip(solve_paths(problems, FRACTIONS), solve_paths(problems, FRACTIONS, device="cuda"), strict=True)
    for here, there in pairs:
        np.testing.assert_allclose(there.weights, here.weights, atol=1e-4)
        assert (there.gaps <= TOLERANCE).all()


def test_importing_the_solver_loads_no_torch():
    code = "import sys, phenoica.score.l1_path, phenoica.score.fold; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
