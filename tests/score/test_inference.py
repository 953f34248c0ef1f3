import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from phenoica.errors import ScoreError
from phenoica.score import inference, intervals
from phenoica.score.metrics import auroc
from phenoica.score.rows import FOLD_COLUMNS, table

spec = importlib.util.spec_from_file_location(
    "coverage_benchmark", Path(__file__).parents[2] / "benchmarks/coverage.py"
)
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)


@pytest.mark.parametrize("ties", [False, True])
def test_one_plate_is_the_mann_whitney_test(ties):
    rng = np.random.default_rng(0)
    labels = np.arange(50) < 17
    scores = rng.standard_normal(50) + 0.4 * labels
    scores = np.round(scores) if ties else scores
    found = inference.rank_sum(labels, scores, np.zeros(50))
    oracle = stats.mannwhitneyu(scores[labels], scores[~labels], alternative="greater", method="asymptotic")
    assert found.auroc == pytest.approx(auroc(labels, scores)) and found.pairs == 17 * 33
    assert inference.combined_p([found.auroc], [found.pairs], [found.variance], 0.0) == pytest.approx(oracle.pvalue)
    assert (found.variance < found.untied_variance) == ties


def test_stratified_variance_is_that_of_all_permutations_within_plates():
    labels = np.array([1, 0, 0, 1, 0, 0, 0], bool)
    plates = np.array([0, 0, 0, 1, 1, 1, 1])
    scores = np.array([3.0, 1, 1, 2, 5, 2, 0])  # with ties, and plates that differ
    values = []
    for a, b in itertools.product(range(3), range(3, 7)):
        arranged = np.isin(np.arange(7), [a, b])
        values.append(inference.rank_sum(arranged, scores, plates).auroc)
    found = inference.rank_sum(labels, scores, plates)
    assert np.mean(values) == pytest.approx(0.5) and np.var(values) == pytest.approx(found.variance)
    assert 10**found.log10_arrangements == pytest.approx(12) and found.pairs == 2 + 3
    # what lies between plates counts for nothing
    assert inference.rank_sum(labels, scores + 100 * plates, plates) == found


def test_plates_with_one_side_and_no_plate_at_all():
    labels, scores = np.array([1, 1, 0, 0], bool), np.arange(4.0)
    empty = inference.rank_sum(labels, scores, np.array([0, 0, 1, 1]))
    assert empty.auroc is None and empty.pairs == 0
    rows = inference.fold_rows({"reason": None}, empty, "pooled")
    assert {row["reason"] for row in rows} == {"no_case_plate"} and {row["value"] for row in rows} == {None}
    with pytest.raises(ScoreError, match="finite"):
        inference.rank_sum(labels, np.array([1, 2, np.nan, 3]), np.zeros(4))


def test_ties_everywhere_are_no_evidence():
    found = inference.rank_sum(np.arange(20) < 8, np.zeros(20), np.zeros(20))
    assert found.auroc == 0.5 and found.variance == 0
    assert inference.combined_p([found.auroc], [found.pairs], [found.variance], 0.0) == 1.0


def test_the_floor_is_the_p_of_a_perfect_separation_and_never_below_the_exact_one():
    labels = np.array([1, 1, 0, 0, 0] * 2, bool)
    plates = np.repeat([0, 1], 5)
    best = inference.rank_sum(labels, labels.astype(float) + np.arange(10) / 100, plates)
    floor = inference.p_floor([best.pairs], [best.untied_variance], [best.log10_arrangements], 0.0)
    assert best.auroc == 1.0 and floor >= 1 / 100  # ten ways in each of two plates
    assert inference.combined_p([best.auroc], [best.pairs], [best.variance], 0.0) <= floor
    many = inference.p_floor([144] * 4, [1e-3] * 4, [9.0] * 4, 1 / 3)
    assert many < 1e-6


def test_adjusted_p_values_are_those_of_statsmodels():
    rng = np.random.default_rng(1)
    for m in (1, 5, 10, 11, 60):
        p = rng.uniform(size=m) ** 3
        p[: m // 3] = p[0]  # ties
        assert inference.holm(p) == pytest.approx(multipletests(p, method="holm")[1])
        assert inference.benjamini_hochberg(p) == pytest.approx(multipletests(p, method="fdr_bh")[1])
        q, name = inference.adjusted(p)
        assert name == ("Holm" if m <= 10 else "Benjamini-Hochberg") and (q >= p).all()


def fold_table(aurocs, wells=(20, 20), pairs=400, name="mine", arrangements=30.0):
    """Return the rows of folds of several perturbations: (fold, perturbation) -> AUROC within plates."""
    m, n = wells
    rows = []
    for (fold, perturbation), value in aurocs.items():
        base = {
            "contrast": name, "perturbation": perturbation, "view": "ica", "test_data_used": "none", "probe": "l1",
            "n_components": 8, "n_case": m, "n_reference": n, "n_experiments": 1, "fold": fold, "reason": None,
        }  # fmt: skip
        variance = (m + n + 1) / (12 * m * n)
        found = inference.RankSum(value, pairs, variance, variance, arrangements)
        rows += inference.fold_rows(base, found, "pooled")
    return table(rows, FOLD_COLUMNS)


def one(rows, metric, perturbation):
    (row,) = [r for r in rows if r["metric"] == metric and r["perturbation"] == perturbation]
    return row


def test_families_are_contrasts_and_say_how_they_were_adjusted(settings):
    rows = inference.rows_of_tests(
        fold_table({(k, p): v for k in (0, 1) for p, v in (("A", 0.9), ("B", 0.5))}), settings()
    )
    z = 400 * 2 * 0.4 - 0.5
    sd = 2 * 400 * np.sqrt(41 / (12 * 400))  # two folds train on each other: deviations add
    assert one(rows, "p_value", "A")["value"] == pytest.approx(stats.norm.sf(z / sd))
    assert one(rows, "q_value", "A")["value"] == pytest.approx(2 * stats.norm.sf(z / sd))
    assert one(rows, "q_value", "B")["ci_kind"] == "Holm of 2" and one(rows, "q_value", "A")["fold"] == -1
    assert one(rows, "p_value", "A")["n_case"] == 40 and one(rows, "p_value", "A")["n_experiments"] == 2


def test_what_cannot_be_tested_says_so_and_does_not_burden_the_others(settings):
    few = fold_table({(0, "FEW"): 1.0}, wells=(2, 2), pairs=4, arrangements=np.log10(6))
    rows = inference.rows_of_tests(
        table([*few.to_dict("records"), *fold_table({(0, "A"): 0.9}).to_dict("records")], FOLD_COLUMNS), settings()
    )
    q = one(rows, "q_value", "FEW")
    assert q["value"] is None and q["reason"] == "floor_above_threshold"
    assert one(rows, "p_floor", "FEW")["value"] >= 1 / 6
    assert one(rows, "q_value", "A")["ci_kind"] == "Holm of 1"


def null_screen(rng, n_experiments, n_perturbations, effects=()):
    """Return p values of perturbations that share the references of every experiment, folds being experiments."""
    p = []
    references = [rng.standard_normal((60, 32)) for _ in range(n_experiments)]
    plates = np.concatenate([np.arange(60) % 3, np.arange(12) % 3])
    labels = np.arange(72) >= 60
    for number in range(n_perturbations):
        X = [np.vstack([r, rng.standard_normal((12, 32))]) for r in references]
        for x in X:
            x[60:, 0] += effects[number] if number < len(effects) else 0.0
        sums = []
        for fold in range(n_experiments):
            train = [x for k, x in enumerate(X) if k != fold]
            weights = np.mean([benchmark.mean_difference(x, labels) for x in train], axis=0)
            sums.append(inference.rank_sum(labels, X[fold] @ weights, plates))
        correlation = intervals.fold_correlation(n_experiments)
        args = [f.auroc for f in sums], [f.pairs for f in sums], [f.variance for f in sums]
        p.append(inference.combined_p(*args, correlation))
    return np.array(p)


@pytest.mark.parametrize("n_experiments", [2, 4])
def test_holm_keeps_the_family_wise_error(n_experiments):
    """Eight perturbations without an effect; two folds taken as independent would exceed the level clearly."""
    rng, n = np.random.default_rng(n_experiments), 200
    wrong = np.mean([(inference.holm(null_screen(rng, n_experiments, 8)) <= 0.05).any() for _ in range(n)])
    assert wrong <= 0.05 + 2.5 * np.sqrt(0.05 * 0.95 / n)


def test_benjamini_hochberg_keeps_the_false_discovery_rate():
    rng, proportions, found = np.random.default_rng(7), [], []
    for _ in range(25):
        q = inference.benjamini_hochberg(null_screen(rng, 2, 40, effects=[2.5] * 10))
        hits = q <= 0.05
        proportions.append(hits[10:].sum() / max(1, hits.sum()))
        found.append(hits[:10].mean())
    assert np.mean(found) > 0.5  # it finds something
    assert np.mean(proportions) <= 0.05 + 2.5 * np.std(proportions, ddof=1) / np.sqrt(len(proportions))


def test_folds_that_train_on_each_other_are_not_independent():
    """With two experiments both rank sums are nearly one and the same; the correction keeps the level."""
    rng = np.random.default_rng(3)
    p = null_screen(rng, 2, 600)
    assert (p <= 0.05).mean() <= 0.05 + 2.5 * np.sqrt(0.05 * 0.95 / 600)
    naive = stats.norm.sf(stats.norm.isf(p) * np.sqrt(2))
    assert (naive <= 0.05).mean() > 0.08


@pytest.mark.parametrize("shift", [0.0, 0.3])
@pytest.mark.parametrize("n_experiments", [4, 8])
def test_intervals_cover_a_half_when_nothing_carries_over(n_experiments, shift):
    """The full size is `benchmarks/coverage.py`; 91 to 98 % there."""
    found = benchmark.coverage(n_experiments, 4, shift, 150, probe="mean_difference")
    error = np.sqrt(0.95 * 0.05 / 150)
    assert 0.91 - 2 * error <= found["coverage"] <= 1.0 and abs(found["auroc"] - 0.5) < 0.02


def test_two_experiments_are_not_taken_for_independent_evidence():
    found = benchmark.coverage(2, 2, 0.0, 200, probe="mean_difference")
    assert found["coverage"] > 0.85  # taking the folds as independent: .71 to .78


def test_the_power_note_is_the_intervals_own_formula():
    interval = intervals.t_interval([0.6, 0.7, 0.8], [1, 1, 1], 0.95)
    error = np.sqrt(0.01 * (1 / 3 + 1 / 2))
    assert interval.error == pytest.approx(error) and interval.freedom == 2
    expected = (stats.t.ppf(0.975, 2) + stats.t.ppf(0.8, 2)) * error
    assert intervals.detectable_difference(interval.error, 2, 0.95) == pytest.approx(expected)
    # a normal interval shows this difference in four of five repetitions
    delta = intervals.detectable_difference(0.1, None, 0.95)
    draws = delta + 0.1 * np.random.default_rng(0).standard_normal(20000)
    assert (draws - 1.96 * 0.1 > 0).mean() == pytest.approx(0.8, abs=0.01)
