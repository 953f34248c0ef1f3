import numpy as np
import pandas as pd
import pytest

from phenoica import schema
from phenoica.score import contrasts, penalty, presets
from phenoica.score.contrasts import CUTTING, POSITIVE, POSITIVE_CUTTING, QUERY


def wells(*rows):
    """Return obs from (experiment, perturbation, treatment, control, role, count)."""
    expanded = [row[:5] for row in rows for _ in range(row[5])]
    names = [schema.EXPERIMENT, schema.PERTURBATION, schema.TREATMENT, schema.CONTROL, schema.CONTROL_ROLE]
    return pd.DataFrame(expanded, columns=names)


def references(experiment, n=4):
    return [
        (experiment, "EMPTY_control", "EMPTY_control", schema.NEGATIVE, schema.REFERENCE, n),
        (experiment, "EMPTY_control", "EMPTY_control", schema.NEGATIVE, schema.FIT, n),
    ]


def gene(experiment, name, n=4, control=schema.NONE, guide="g1"):
    return (experiment, name, f"{name}_{guide}", control, schema.NONE, n)


@pytest.fixture
def obs():
    return wells(
        *[r for e in "abcd" for r in references(e)],
        gene("a", "TP53"), gene("b", "TP53"), gene("a", "SRC", guide="g2"), gene("b", "SRC", guide="g2"),
        gene("a", "LONE"), gene("c", "TWIN"), gene("d", "TWIN"), gene("a", "FEW", 1), gene("b", "FEW"),
        *[gene(e, "PLK1", 4, schema.POSITIVE) for e in "abcd"], *[gene(e, "SRC", 3, schema.CUTTING) for e in "abc"],
    )  # fmt: skip


FOLDS = {"a": 0, "b": 1, "c": 2, "d": 2}


def split_of(obs, name, perturbation, held_out):
    found = [c for c in contrasts.build(obs) if (c.name, c.perturbation) == (name, perturbation)]
    batches = obs[schema.EXPERIMENT].to_numpy()
    folds = obs[schema.EXPERIMENT].map(FOLDS).to_numpy()
    return contrasts.split(found[0], obs, batches, folds, held_out, 4)


def test_every_perturbation_and_the_cutting_contrast(obs):
    found = [(c.name, c.perturbation) for c in contrasts.build(obs)]
    assert found == [
        *[(QUERY, g) for g in ("FEW", "LONE", "SRC", "TP53", "TWIN")],
        (POSITIVE, "PLK1"), (CUTTING, "SRC_g1"), (POSITIVE_CUTTING, "PLK1"),
    ]  # fmt: skip


def test_only_reference_controls_of_experiments_with_the_perturbation(obs):
    found = split_of(obs, QUERY, "TP53", 1)
    assert found.reason is None
    assert set(obs[schema.EXPERIMENT].iloc[found.train]) == {"a"}
    assert set(obs[schema.EXPERIMENT].iloc[found.test]) == {"b"}
    both = np.concatenate([found.train, found.test])
    assert schema.FIT not in set(obs[schema.CONTROL_ROLE].iloc[both])
    assert (obs[schema.PERTURBATION].iloc[found.train] == "TP53").tolist() == found.train_labels.tolist()
    assert found.train_labels.sum() == 4 and (~found.train_labels).sum() == 4


def test_a_query_gene_and_a_cutting_guide_of_one_gene_stay_apart(obs):
    query, cutting = split_of(obs, QUERY, "SRC", 1), split_of(obs, CUTTING, "SRC_g1", 2)
    assert set(obs[schema.TREATMENT].iloc[query.test[query.test_labels]]) == {"SRC_g2"}
    assert set(obs[schema.TREATMENT].iloc[cutting.test[cutting.test_labels]]) == {"SRC_g1"}


def test_positive_against_all_cutting_wells(obs):
    found = split_of(obs, POSITIVE_CUTTING, "PLK1", 1)
    assert set(obs[schema.CONTROL].iloc[found.train]) == {schema.POSITIVE, schema.CUTTING}
    assert set(obs[schema.EXPERIMENT].iloc[found.train]) == {"a", "c"}  # d holds no cutting well
    assert found.reason == "few_test_wells"  # three cutting wells


@pytest.mark.parametrize(
    ("perturbation", "held_out", "reason"),
    [
        ("LONE", 0, "one_experiment"), ("TWIN", 2, "same_fold"), ("FEW", 0, "few_test_wells"),
        ("FEW", 1, "few_train_wells"), ("TP53", 0, None),
    ],
)  # fmt: skip
def test_reasons(obs, perturbation, held_out, reason):
    assert split_of(obs, QUERY, perturbation, held_out).reason == reason
    assert reason is None or reason in contrasts.REASONS


def test_a_fold_without_the_perturbation_is_not_asked(obs):
    assert split_of(obs, QUERY, "TP53", 2) is None


def test_without_references_there_is_a_reason(obs):
    obs = obs[~((obs[schema.CONTROL_ROLE] == schema.REFERENCE) & obs[schema.EXPERIMENT].isin(["a", "b"]))]
    assert split_of(obs.reset_index(drop=True), QUERY, "TP53", 0).reason == "no_reference"


def inner(obs, held_out, folds=FOLDS):
    of_wells = obs[schema.EXPERIMENT].map(folds).to_numpy()
    batches = obs[schema.EXPERIMENT].to_numpy()
    return penalty.inner_splits(contrasts.build(obs), obs, batches, of_wells, held_out, 3), of_wells


def test_inner_splits_stay_inside_training_and_leave_experiments_out(obs):
    found, of_wells = inner(obs, 0)
    assert found.rule == "everywhere"
    assert found.perturbations == (f"{POSITIVE}/PLK1",)  # SRC_g1 is not in d
    assert len(found.groups) == 2  # folds 1 and 2
    for group in found.groups:
        for train, train_labels, validation, _ in group:
            assert not set(of_wells[np.concatenate([train, validation])]) & {0}
            experiments = obs[schema.EXPERIMENT].to_numpy()
            assert not set(experiments[train]) & set(experiments[validation])
            assert train_labels.any() and not train_labels.all()


def test_one_training_fold_leaves_out_experiments(obs):
    found, _ = inner(obs, 1, {"a": 0, "b": 1, "c": 0, "d": 0})
    assert len(found.groups) == 3


def test_without_everywhere_perturbations_the_widest_ones_choose(obs):
    obs = obs[obs[schema.CONTROL] != schema.POSITIVE].reset_index(drop=True)
    found, _ = inner(obs, 1, {"a": 0, "b": 1, "c": 2, "d": 3})
    assert (found.rule, found.perturbations) == ("widespread", (f"{QUERY}/TWIN", f"{CUTTING}/SRC_g1"))
    alone = obs[obs[schema.EXPERIMENT].isin(["a", "b"])].reset_index(drop=True)
    assert inner(alone, 1)[0] == penalty.InnerSplits("default", (), ())


def rule(**keys):
    base = {"name": "mine", "case": {"control": "none"}, "reference": {"control_role": "reference"}}
    return presets.parse([{**base, **keys}])


def guides(names="abcdef", n_guides=5, per=4):
    rows = [r for e in names for r in references(e)]
    rows += [gene(e, "PLK1", per, schema.POSITIVE, f"g{i}") for e in names for i in range(n_guides)]
    return wells(*rows)


def pieces(contrast, obs, folds, seed=0, min_wells=4):
    batches = obs[schema.EXPERIMENT].to_numpy()
    of_wells = obs[schema.EXPERIMENT].map(folds).to_numpy()
    return {
        k: contrasts.split(contrast, obs, batches, of_wells, k, min_wells, seed) for k in sorted(set(folds.values()))
    }


def test_guides_and_experiments_are_both_held_out_and_every_guide_is_tested():
    obs = guides()
    (contrast,) = contrasts.build(
        obs, rule(case={"control": "positive"}, each="perturbation", diffby="treatment", min_values=4)
    )
    tested = set()
    for part in pieces(contrast, obs, {e: i // 2 for i, e in enumerate("abcdef")}).values():
        assert part.reason is None
        train, test = part.train[part.train_labels], part.test[part.test_labels]
        for column in (schema.TREATMENT, schema.EXPERIMENT):
            assert not set(obs[column].iloc[train]) & set(obs[column].iloc[test])
        assert not set(obs[schema.EXPERIMENT].iloc[part.train]) & set(obs[schema.EXPERIMENT].iloc[part.test])
        tested |= set(obs[schema.TREATMENT].iloc[test])
    assert tested == {f"PLK1_g{i}" for i in range(5)}


def test_what_asks_for_more_than_there_is_is_skipped_with_its_reason():
    obs = guides()
    keys = {"case": {"control": "positive"}, "each": "perturbation"}
    assert contrasts.build(obs, rule(**keys, diffby="treatment", min_values=6))[0].skipped == "few_values"
    assert contrasts.build(obs, rule(**keys, min_experiments=7))[0].skipped == "few_experiments"
    assert contrasts.build(obs, rule(**keys, min_experiments=6))[0].skipped is None
    assert (
        contrasts.build(obs, rule(**{**keys, "reference": {"control": "cutting"}}))[0].skipped == "no_reference_wells"
    )
    over, within = contrasts.splits_of_fold(
        contrasts.build(obs, rule(**keys, min_experiments=7)), obs, obs[schema.EXPERIMENT].to_numpy(),
        np.zeros(len(obs), int), 0, {"score": {"min_wells": 4}, "seed": 0},
    )  # fmt: skip
    assert over == within == []


def test_each_cutting_guide_against_the_others():
    obs = wells(*[gene(e, name, 4, schema.CUTTING) for e in "ab" for name in ("SRC", "HCK", "EIF3H")])
    found = contrasts.build(obs, rule(case={"control": "cutting"}, reference={"control": "cutting"}, each="treatment"))
    assert [c.perturbation for c in found] == ["EIF3H_g1", "HCK_g1", "SRC_g1"]
    case, reference = found[0].masks(obs, obs[schema.EXPERIMENT].to_numpy())
    assert set(obs[schema.TREATMENT][case]) == {"EIF3H_g1"} and set(obs[schema.TREATMENT][reference]) == {
        "HCK_g1",
        "SRC_g1",
    }


def test_caps_are_drawn_by_the_seed_and_keep_both_sides():
    obs = guides()
    (contrast,) = contrasts.build(obs, rule(case={"control": "positive"}, each="perturbation", max_wells=7))
    folds = {e: i // 2 for i, e in enumerate("abcdef")}
    first, again, other = (pieces(contrast, obs, folds, seed)[0] for seed in (0, 0, 1))
    for part in (first, other):
        for labels in (part.train_labels, part.test_labels):
            assert (labels.sum(), (~labels).sum()) == (7, 7)
        assert part.train.tolist() == sorted(set(part.train.tolist()))
    assert first.train.tolist() == again.train.tolist() != other.train.tolist()


def test_sameby_keeps_plates_with_both_sides():
    obs = guides("ab", 1)
    obs[schema.PLATE_ID] = np.where(np.arange(len(obs)) % 2, "p1", "p2")
    obs.loc[obs[schema.CONTROL] == schema.POSITIVE, schema.PLATE_ID] = "p1"
    (contrast,) = contrasts.build(obs, rule(case={"control": "positive"}, each="perturbation", sameby="plate_id"))
    case, reference = contrast.masks(obs, obs[schema.EXPERIMENT].to_numpy())
    assert case.sum() == 8 and set(obs[schema.PLATE_ID][reference]) == {"p1"}


def test_doses_are_named_and_their_batch_is_the_plate():
    obs = guides("ab", 1)
    obs[schema.CONCENTRATION] = np.where(
        obs[schema.CONTROL] == schema.POSITIVE, np.arange(len(obs)) % 2 * 2.25 + 0.25, np.nan
    )
    obs[schema.PLATE_ID] = obs[schema.EXPERIMENT] + "_1"
    keys = {"case": {"control": "positive"}, "each": ["perturbation", "concentration"], "batch_key": "plate_id"}
    found = contrasts.build(obs, rule(**keys))
    assert [c.perturbation for c in found] == ["PLK1 @ 0.25", "PLK1 @ 2.5"]
    part = pieces(found[0], obs, {"a": 0, "b": 1})[0]
    assert part.reason == "within_experiments_only" and not len(part.train)
    assert set(obs[schema.EXPERIMENT].iloc[part.test]) == {"a"}
    obs.loc[:, schema.CONCENTRATION] = np.nan  # a well without a dose is no case of a dose
    assert contrasts.build(obs, rule(**keys)) == []
