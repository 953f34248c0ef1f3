from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phenoica.config import resolve
from phenoica.errors import MetadataError
from phenoica.plates.folds import assign_folds, color, conflicts, untestable


def config(**plates):
    return resolve({"run": "r", "source": "demo", "plates": plates})


def wells(presence: dict[str, list[str]]) -> pd.DataFrame:
    rows = [(e, p, "none") for p, experiments in presence.items() for e in experiments]
    return pd.DataFrame(rows, columns=["experiment", "perturbation", "control"])


def test_experiments_that_share_a_query_fall_in_different_folds():
    ring = {f"G{i}": [f"e{i}", f"e{(i + 1) % 8}"] for i in range(8)}
    obs = wells(ring)
    folds = assign_folds(obs, config(folds=4)).set_index("experiment")["fold"]
    assert all(folds[a] != folds[b] for a, b in ring.values())
    assert folds.value_counts().tolist() == [2, 2, 2, 2]
    assert untestable(obs, folds.reset_index()) == []


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_no_more_conflict_than_twice_the_best_possible(seed):
    random = np.random.default_rng(seed)
    n, k = 6, 3
    weights = np.triu(random.integers(0, 3, (n, n)), 1)
    weights = weights + weights.T

    def cost(colors):
        return sum(weights[i, j] for i in range(n) for j in range(i) if colors[i] == colors[j])

    best = min(cost(c) for c in product(range(k), repeat=n))
    found = color(weights, k, seed)
    assert set(found) <= set(range(k))
    assert cost(found) <= 2 * best + 2


def test_everywhere_perturbations_do_not_conflict():
    everywhere = {"PLK1": [f"e{i}" for i in range(6)], "G": ["e0", "e1"], "alone": ["e2"]}
    weights = conflicts(wells(everywhere), [f"e{i}" for i in range(6)], n_folds=3)
    assert weights.sum() == 2
    assert weights[0, 1] == 1


def test_fewer_experiments_than_folds_leave_one_out_and_holdout():
    obs = wells({"G": ["e0", "e1", "e2"]})
    assert sorted(assign_folds(obs, config(folds=5))["fold"]) == [0, 1, 2]
    assert sorted(assign_folds(obs, config(folds="leave_one_out"))["fold"]) == [0, 1, 2]
    held = assign_folds(obs, config(holdout_experiments=["e1"]))
    assert held["experiment"].tolist() == ["e0", "e2"]
    with pytest.raises(MetadataError, match="e9"):
        assign_folds(obs, config(holdout_experiments=["e9"]))


def test_a_perturbation_in_one_experiment_is_untestable_and_one_experiment_is_one_fold():
    obs = wells({"G": ["e0", "e1"], "single": ["e1"]})
    folds = assign_folds(obs, config())
    assert untestable(obs, folds) == ["single"]
    assert assign_folds(wells({"G": ["e0"]}), config())["fold"].tolist() == [0]


def test_a_query_is_untestable_although_its_gene_is_a_control_elsewhere():
    obs = pd.concat([
        wells({"G": ["e0", "e1"], "SRC": ["e0"]}),
        wells({"SRC": ["e0", "e1"]}).assign(control="cutting"),
        wells({"HCK": ["e1"]}).assign(control="cutting"),
    ])  # fmt: skip
    folds = pd.DataFrame({"experiment": ["e0", "e1"], "fold": [0, 1]})
    assert untestable(obs, folds) == ["HCK (cutting control)", "SRC"]


def test_same_seed_same_folds():
    obs = wells({f"G{i}": [f"e{i % 7}", f"e{(3 * i + 1) % 7}"] for i in range(12)})
    a, b = (assign_folds(obs.sample(frac=1, random_state=s), config()) for s in (0, 1))
    pd.testing.assert_frame_equal(a, b)
