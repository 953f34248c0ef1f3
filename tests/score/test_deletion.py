"""The deletion curve on features whose components are known, and its areas by hand."""

import numpy as np
import pandas as pd
import pytest

from phenoica.score import deletion
from phenoica.score.baselines import Features
from phenoica.score.best_components import best_components_auroc, component_ranking
from phenoica.score.deletion import Part
from phenoica.score.metrics import auroc
from phenoica.score.names import AUROC, DECODING, DELETION_AUROC, DELETION_DECODING, DELETION_GAIN


class Fold:
    """Two training and two held-out batches; component 0 is the batch, component 1 the phenotype, the rest noise."""

    def __init__(self, seed=0, width=8):
        rng = np.random.default_rng(seed)
        self.batches = np.repeat(["a", "b", "c", "d"], 60)
        self.plates = np.repeat([f"p{i}" for i in range(12)], 20)
        self.case = np.arange(240) % 20 < 6
        self.values = rng.standard_normal((240, width))
        self.values[:, 0] = self.values[:, 0] * 0.2 + np.repeat([-2.0, 2, -1, 1], 60)
        self.values[self.case, 1] += 2.5
        self.values /= self.values[:120].std(axis=0)
        train, test = np.arange(120), np.arange(120, 240)
        self.part = Part(train, self.case[train], test, self.case[test])
        self.references = test[~self.case[test]]
        self.rotation = np.linalg.qr(rng.standard_normal((width, width)))[0]

    def curve(self, values, order, view="ica", draw=None):
        return deletion.curve(
            Features(view, values, draw=draw), order, [self.part], self.references, self.batches, self.plates,
            counts=[0, 1, 4], C=1.0,
        )  # fmt: skip


def heights(rows, metric):
    return [row["value"] for row in rows if row["metric"] == metric]


def test_dropping_the_batch_component_removes_the_batch_and_keeps_the_phenotype():
    fold = Fold()
    order = np.arange(8)[[0, 2, 3, 4, 5, 6, 7, 1]]
    own = fold.curve(fold.values, order)
    turned = fold.curve(fold.values @ fold.rotation, np.arange(8), "rotation", 0)
    for metric in (AUROC, DECODING):  # all of the information is there: the basis does not matter
        assert heights(own, metric)[0] == pytest.approx(heights(turned, metric)[0], abs=1e-9)
    assert heights(own, DECODING)[0] > 0.95 and heights(own, DECODING)[1] < 0.7
    assert heights(own, AUROC)[1] == pytest.approx(heights(own, AUROC)[0], abs=0.02)
    frame = deletion.table([{**row, "fold": 0, "n_experiments": 2} for row in own + turned])
    rows = {(r["view"], r["view_minus"], r["metric"]): r["value"] for r in deletion.area_rows(frame)}
    assert rows["ica", "rotation", DELETION_GAIN] > 0.2
    first, second = (rows[view, None, DELETION_GAIN] for view in ("ica", "rotation"))
    assert rows["ica", "rotation", DELETION_GAIN] == pytest.approx(first - second)
    assert ("pca", "rotation", DELETION_GAIN) not in rows


def test_areas_by_hand():
    points = deletion.table([
        {"view": "ica", "share_deleted": s, "metric": m, "value": v, "chance": 0.25 if m == DECODING else 0.5}
        for m, values in {AUROC: (0.8, 0.6, 0.7), DECODING: (1.0, 0.25, 0.25)}.items()
        for s, v in zip((0.0, 0.1, 0.5), values, strict=True)
    ])  # fmt: skip
    found = deletion.areas(points)
    # auroc: (0.07 + 0.26) / 0.5; decoding above chance is 1, 0, 0: 0.05 / 0.5
    assert found[DELETION_AUROC] == pytest.approx(0.66) and found[DELETION_DECODING] == pytest.approx(0.1)
    assert found[DELETION_GAIN] == pytest.approx(2 * 0.66 - 1 - 0.1)
    assert deletion.area([0.3], [4.0]) == 4


def test_a_point_without_a_value_leaves_no_area_but_a_reason():
    points = deletion.table([
        {"view": v, "share_deleted": s, "metric": m, "value": None if m == DECODING else 0.7, "chance": None,
         "reason": "one_test_batch" if m == DECODING else None}
        for v in ("ica", "rotation") for m in (AUROC, DECODING) for s in (0.0, 0.5)
    ])  # fmt: skip
    rows = {(r["view"], r["view_minus"], r["metric"]): r for r in deletion.area_rows(points)}
    assert rows["ica", "rotation", DELETION_AUROC]["value"] == 0
    for metric in (DELETION_GAIN, DELETION_DECODING):
        row = rows["ica", "rotation", metric]
        assert row["value"] is None and row["reason"] == "one_test_batch"


def test_counts_of_deleted_components():
    assert deletion.deleted_counts(8, [0.1, 0.25, 0.5, 0.75]) == [0, 1, 2, 4, 6]
    assert deletion.deleted_counts(3, [0.1, 0.25, 0.99]) == [0, 1, 2]  # one component is left
    assert deletion.deleted_counts(1, [0.5]) == [0]


def test_caps_keep_classes_and_are_seeded():
    fold = Fold()
    small = deletion.capped(fold.part, 10, [3])
    assert small.train_labels.sum() == 10 and (~small.train_labels).sum() == 10
    assert (fold.case[small.train] == small.train_labels).all() and (fold.case[small.test] == small.test_labels).all()
    assert (small.train < 120).all() and (small.test >= 120).all()
    again = deletion.capped(fold.part, 10, [3])
    assert (again.train == small.train).all() and (again.test == small.test).all()
    assert len(deletion.capped(fold.part, 1000, [3]).train) == 120


def fold_table(fold, gain, experiments=2):
    reason = None if gain is not None else "one_test_batch"
    rows = [{"view": "ica", "view_minus": "rotation", "metric": DELETION_GAIN, "value": gain, "fold": fold,
             "n_experiments": experiments, "n_contrasts": 3, "reason": reason}]  # fmt: skip
    return deletion.table(rows)


def test_over_folds_the_gain_has_an_interval_and_says_what_is_missing():
    folds = [fold_table(k, g) for k, g in enumerate((0.1, 0.2, 0.3, None))]
    row = deletion.over_folds(folds, 0.95).query("fold == -1").iloc[0]
    # sd 0.1, three folds: 4.3027 * 0.1 * sqrt(1/3 + 1/2)
    assert row["value"] == pytest.approx(0.2) and row["ci_high"] == pytest.approx(0.2 + 0.39277, abs=1e-4)
    assert row["reason"] == "one_test_batch" and row["n_experiments"] == 6 and row["ci_kind"] == "t over folds"
    few = deletion.over_folds(folds[:1], 0.95).query("fold == -1").iloc[0]
    assert pd.isna(few["ci_low"]) and few["reason"] == "under_4_experiments"


def test_best_components_are_chosen_in_training_and_measured_on_others():
    fold = Fold()
    X, train, test = fold.values, fold.part.train, fold.part.test
    order = component_ranking(X[train], fold.part.train_labels)
    alone = [abs(auroc(fold.part.train_labels, X[train, j]) - 0.5) for j in range(8)]
    assert order.tolist() == np.argsort(-np.array(alone), kind="stable").tolist() and order[0] == 1
    found = best_components_auroc(X[train], fold.part.train_labels, X[test], fold.part.test_labels, order, 1, 1.0)
    assert found == pytest.approx(auroc(fold.part.test_labels, X[test, 1]))
    flipped = X * np.where(np.arange(8) == 1, -1.0, 1.0)  # the sign is learnt in training too
    again = best_components_auroc(
        flipped[train], fold.part.train_labels, flipped[test], fold.part.test_labels, order, 1, 1.0
    )
    assert again == pytest.approx(found)


@pytest.mark.parametrize("controls", [16, 144])
@pytest.mark.parametrize("k", [1, 4])
def test_best_components_of_relabelled_controls_score_a_half(controls, k):
    """Choosing components must not leak: the choice is made on other wells than the score."""
    rng, found = np.random.default_rng(controls + k), []
    for _ in range(50):
        X = rng.standard_normal((4 * controls, 10)) + np.repeat(rng.standard_normal((2, 10)), 2 * controls, axis=0)
        labels = np.zeros(len(X), bool)
        for plate in range(4):
            labels[plate * controls + rng.choice(controls, controls // 2, replace=False)] = True
        train, test = np.arange(2 * controls), np.arange(2 * controls, 4 * controls)
        order = component_ranking(X[train], labels[train])
        found.append(best_components_auroc(X[train], labels[train], X[test], labels[test], order, k, 1.0))
    error = np.std(found, ddof=1) / np.sqrt(50)
    assert error > 0 and abs(np.mean(found) - 0.5) <= 3 * error
