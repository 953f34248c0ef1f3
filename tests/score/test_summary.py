"""Rows over folds from fold tables written by hand."""

import numpy as np
import pytest
from scipy import stats

from phenoica.report import score_page
from phenoica.report.score_cells import reason_words
from phenoica.score import presets
from phenoica.score.contrasts import POSITIVE, QUERY, REASONS
from phenoica.score.printed import _sentence, printed
from phenoica.score.rows import FOLD_COLUMNS, table
from phenoica.score.summary import over_folds


def row(fold, perturbation, view, value, *, pairs=100, reason=None, contrast=QUERY, **more):
    used = "controls" if view == "tvn" else "none"
    base = {
        "contrast": contrast, "perturbation": perturbation, "view": view, "test_data_used": used, "probe": "l1",
        "metric": "auroc", "scope": "pooled", "n_components": 8, "value": value, "n_case": 10, "n_reference": 10,
        "n_experiments": 2, "fold": fold, "reason": reason, "pairs": pairs, "variance": 0.01,
    }  # fmt: skip
    return {**base, **more}


def summary(settings, rows, test_experiments=2):
    folds = sorted({r["fold"] for r in rows})
    frames = [table([r for r in rows if r["fold"] == k], FOLD_COLUMNS) for k in folds]
    decided = [
        {"fold": k, "test_experiments": [f"e{k}{i}" for i in range(test_experiments)], "fraction_rule": "everywhere",
         "probes": {}, "encoder": {"checkpoint": "none", "encoder_saw_test_images": "no"}}
        for k in folds
    ]  # fmt: skip
    scores = over_folds(frames, decided, settings())
    return scores, printed(scores, decided, settings())


def one(scores, perturbation, view="ica", view_minus=None, fold=-1, contrast=QUERY, metric="auroc"):
    rows = scores[
        (scores["perturbation"] == perturbation) & (scores["view"] == view) & (scores["fold"] == fold)
        & (scores["contrast"] == contrast) & (scores["metric"] == metric)
    ]  # fmt: skip
    rows = rows[rows["view_minus"].isna() if view_minus is None else rows["view_minus"] == view_minus]
    assert len(rows) == 1
    return rows.iloc[0]


@pytest.fixture
def unpaired():
    """In fold 0 the hard gene B has a value of ica only: averaged apart, ica would look .2 worse than it is."""
    return [
        row(0, "A", "tvn", 0.80), row(0, "A", "ica", 0.90), row(0, "B", "ica", 0.40),
        row(0, "B", "tvn", None, reason="missing_values"),
        row(1, "A", "tvn", 0.70, pairs=300), row(1, "A", "ica", 0.90, pairs=300),
        row(1, "B", "tvn", 0.50), row(1, "B", "ica", 0.56),
    ]  # fmt: skip


def test_differences_are_paired_by_perturbation_and_fold(settings, unpaired):
    scores, _ = summary(settings, unpaired)
    assert one(scores, "macro", view_minus="tvn", fold=0)["value"] == pytest.approx(0.10)
    assert one(scores, "macro", view_minus="tvn", fold=1)["value"] == pytest.approx((0.20 + 0.06) / 2)
    total = one(scores, "macro", view_minus="tvn")
    centre = np.mean([(100 * 0.10 + 300 * 0.20) / 400, 0.06])
    half = stats.t.ppf(0.975, 1) * np.sqrt(np.var([0.10, 0.13], ddof=1) * (1 / 2 + 1))
    assert total["value"] == pytest.approx(centre)
    assert (total["ci_low"], total["ci_high"]) == (pytest.approx(centre - half), pytest.approx(centre + half))
    assert total["ci_kind"] == "t over folds" and total["test_data_used"] == "controls"
    assert not ((scores["perturbation"] == "A") & scores["view_minus"].notna()).any()  # macro and positives only


@pytest.fixture
def trained():
    """Raw is above (sign 1) or below (-1) the untrained encoder, by the values of A and B in each fold; ica ties it."""

    def make(sign=1, values=((0.10, 0.14), (0.12, 0.13))):
        rows = []
        for fold, differences in enumerate(values):
            for name, difference in zip("AB", differences, strict=True):
                rows.append(row(fold, name, "raw", 0.6 + sign * difference))
                rows.append(row(fold, name, "random_encoder", 0.6))
                rows.append(row(fold, name, "ica", 0.6 + fold / 100))
            rows.append(row(fold, "PLK1", "raw", 0.6 + sign * (0.2 + fold / 100), contrast=POSITIVE))
            rows.append(row(fold, "PLK1", "random_encoder", 0.6, contrast=POSITIVE))
        return rows

    return make


@pytest.mark.parametrize("sign", [1, -1])
def test_what_the_encoders_training_adds_is_paired_and_shown_whatever_its_sign(settings, trained, sign):
    scores, text = summary(settings, trained(sign, ((0.10, 0.14), (0.12, 0.18))))
    found = one(scores, "macro", view="raw", view_minus="random_encoder")
    half = stats.t.ppf(0.975, 1) * np.sqrt(np.var([0.12, 0.15], ddof=1) * (1 / 2 + 1))
    assert found["value"] == pytest.approx(sign * 0.135)
    assert (found["ci_low"], found["ci_high"]) == tuple(pytest.approx(sign * 0.135 + s * half) for s in (-1, 1))
    plk1 = one(scores, "PLK1", view="raw", view_minus="random_encoder", contrast=POSITIVE)
    assert plk1["value"] == pytest.approx(sign * 0.205)
    line = next(line for line in text.splitlines() if line.startswith("Encoder: "))
    start = "Encoder: raw minus random_encoder (same size, random weights): queries"
    assert line.startswith(f"{start} {sign * 0.135:+.3f} [")
    assert f"PLK1 {sign * 0.205:+.3f} [{plk1['ci_low']:+.3f}, {plk1['ci_high']:+.3f}]." in line
    query, positive = score_page.training(scores[scores["fold"] == -1])
    assert query["over"].startswith("Query perturbations") and positive["over"].startswith("Positive controls")
    assert query["value"] == f"{'+' if sign > 0 else '−'}0.135" and query["untrained"]["value"] == "0.600"
    assert query["outcome"] == "not decided" and "to" in query["range"]  # two folds: +- .23
    assert score_page.training(summary(settings, trained(sign))[0].query("fold == -1"))[0]["outcome"] == (
        "trained is higher" if sign > 0 else "trained is lower"
    )


def test_the_verdict_on_ica_leaves_the_pair_of_encoders_aside(settings, trained):
    scores, text = summary(settings, trained())
    verdict = text[text.index("Query perturbations, AUROC of ica minus") :]
    assert verdict.count("random_encoder") == 2  # a line of its own, and its place in the sentence
    assert "ICA beats no other view" in verdict and "cannot be told apart from random_encoder" in verdict
    assert [d["minus"] for d in score_page.differences(scores[scores["fold"] == -1])] == ["raw", "random_encoder"]


def test_without_an_untrained_encoder_nothing_is_said_of_training(settings, trained):
    for left_out in ("random_encoder", "raw"):
        scores, text = summary(settings, [r for r in trained() if r["view"] != left_out])
        assert "Encoder: raw" not in text and not (scores["view_minus"].notna() & (scores["view"] == "raw")).any()
        assert score_page.training(scores[scores["fold"] == -1]) == []


def test_a_pair_that_is_never_whole_has_no_difference(settings):
    scores, _ = summary(settings, [
        row(0, "A", "pca", None, reason="missing_values"), row(0, "A", "ica", 0.9),
        row(1, "A", "pca", 0.8), row(1, "A", "ica", None, reason="few_test_wells"),
    ])  # fmt: skip
    total = one(scores, "macro", view_minus="pca")
    assert np.isnan(total["value"]) and total["reason"] == "few_test_wells;missing_values"


def test_the_macro_average_weighs_perturbations_alike_over_folds(settings):
    rows = [row(0, "A", "ica", 0.9, pairs=900), row(0, "B", "ica", 0.5), row(1, "A", "ica", 0.8, pairs=100)]
    for experiments, bounded in ((1, False), (2, True)):
        total = one(summary(settings, rows, experiments)[0], "macro")
        assert total["value"] == pytest.approx(np.mean([0.89, 0.5]))  # weighing folds alike: .75
        assert np.isfinite(total["ci_low"]) == bounded


def test_few_experiments_get_the_interval_of_their_wells(settings):
    rows = [row(k, "PLK1", "ica", v, contrast=POSITIVE, n_experiments=1) for k, v in ((0, 0.7), (1, 0.6))]
    found = one(summary(settings, rows, 1)[0], "PLK1", contrast=POSITIVE)
    half = stats.norm.ppf(0.975) * 0.1  # two folds that train on each other: their errors of .1 add, halved
    assert (found["ci_low"], found["ci_high"]) == (pytest.approx(0.65 - half), pytest.approx(0.65 + half))
    assert found["ci_kind"] == "within these experiments"


def test_rotation_is_the_mean_of_its_draws_with_the_mean_of_their_variances(settings):
    rows = [
        row(0, "PLK1", "rotation", value, contrast=POSITIVE, draw=draw, variance=variance, n_experiments=1)
        for draw, value, variance in ((0, 0.6, 0.01), (1, 0.7, 0.03))
    ]  # fmt: skip
    scores, _ = summary(settings, rows, 1)
    found = one(scores[scores["draw"].isna()], "PLK1", "rotation", contrast=POSITIVE)
    assert found["value"] == pytest.approx(0.65)
    assert found["ci_high"] == pytest.approx(0.65 + stats.norm.ppf(0.975) * np.sqrt(0.02))


@pytest.mark.parametrize(
    ("experiments", "words"),
    [((2, 2), "95% intervals over folds."), ((1, 1), "95% intervals * within these experiments."),
     ((2, 1), "95% intervals over folds, * within these experiments.")],
)  # fmt: skip
def test_the_heading_says_which_intervals_are_shown(settings, experiments, words):
    rows = [
        row(k, name, "ica", value + k / 20, contrast=POSITIVE, n_experiments=n)
        for name, value, n in (("PLK1", 0.8, experiments[0]), ("MTOR", 0.6, experiments[1])) for k in (0, 1)
    ]  # fmt: skip
    _, text = summary(settings, rows)
    assert words in text
    assert text.count("]*") == sum(n == 1 for n in experiments)


def test_without_any_interval_the_heading_says_so(settings):
    _, text = summary(settings, [row(0, "A", "ica", 0.8), row(0, "A", "pca", 0.7)])
    assert "no intervals. Encoder" in text and "intervals over folds" not in text


def test_folds_without_a_value_leave_their_reason(settings):
    rows = [
        row(0, "A", "ica", 0.8), row(1, "A", "ica", None, reason="few_test_wells"), row(2, "A", "ica", 0.7),
        row(0, "LONE", "ica", None, reason="one_experiment"),
    ]  # fmt: skip
    scores, text = summary(settings, rows)
    known = one(scores, "A")
    assert known["value"] == pytest.approx(0.75) and known["reason"] == "few_test_wells"
    assert known["n_experiments"] == 4 and known["ci_kind"] == "t over folds"
    assert "Not testable, 1: LONE (in one experiment only" in text and "few" not in text


def test_the_page_says_that_a_value_leaves_out_folds(settings):
    rows = [row(0, "A", "ica", 0.8), row(1, "A", "ica", None, reason="few_test_wells"), row(2, "A", "ica", 0.7)]
    total = summary(settings, [*rows, row(0, "LONE", "ica", None, reason="one_experiment")])[0].query("fold == -1")
    titles = presets.titles(["standard"])
    assert [r["perturbation"] for r in score_page.skipped(total, titles)] == ["LONE"]
    (table,) = score_page.perturbation_tables(total, titles)["tables"]
    assert [r["perturbation"] for r in table["rows"]] == ["A"]
    assert table["note"] == f"without some folds: {REASONS['few_test_wells']}"
    assert reason_words("few_test_wells") == REASONS["few_test_wells"]
    assert reason_words("no_weights;one_fold", has_value=True).count("without") == 0


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_one_fold_turns_the_l2_control_red(settings, broken):
    rows = []
    for k in range(3):
        rows += [row(k, "A", view, 0.7 + k / 100) for view in ("pca", "ica")]
        for metric, bad, good in (
            ("holds", 0.0, 1.0), ("max_decision_difference", 0.5, 1e-12), ("max_auroc_difference", 0.1, 0.0)
        ):  # fmt: skip
            value = bad if k == broken else good
            rows.append(row(k, "all", "pca+ica", value, contrast="l2_control", probe="l2", metric=metric, pairs=None))
    scores, text = summary(settings, rows)
    for metric, worst in (("holds", 0), ("max_decision_difference", 0.5), ("max_auroc_difference", 0.1)):
        assert one(scores, "all", "pca+ica", contrast="l2_control", metric=metric)["value"] == worst
    assert "L2 control (pca+ica): RED" in text


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        (([], ["pca"], ["rotation", "cell_count"]), "ICA beats no other view on held-out experiments. It is below"),
        ((["rotation"], ["pca"], []), "ICA does not beat pca on held-out experiments. It is above rotation."),
        ((["pca", "rotation"], ["cell_count"], []), "ICA beats every other view on held-out experiments. It is above"),
        ((["pca", "cell_count"], [], []), "ICA beats every other row (pca, cell_count) on held-out experiments."),
    ],
)
def test_the_verdict_says_what_the_intervals_say(groups, sentence):
    assert _sentence(dict(zip(("beats", "loses", "open"), groups, strict=True))).startswith(sentence)
