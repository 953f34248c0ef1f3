import hashlib
import inspect
import json

import numpy as np
import pandas as pd
import pytest

from phenoica.demo import layout, plates, render
from phenoica.errors import ConfigError

SEED = 20260

# The generator was fixed before phenoica computed a score on it. A change here is a change of the demo data: make it
# only for a better data set, never for a better score, and say so in the commit.
FROZEN = {
    "tables": "386e5b8b9ab356be78e30bfe66ec46504ba29fb43f5d1ded81436c2efc9a2c11",
    "design": "a8c750ea903173086747a932f750aa3cffae91abba012a06ef1b083a9bda79fd",
    "factors": "ac2d07a95cac24f2be28c8974b04df64afb13d5e1d6d09681c29058c68d74e16",
    "layout.py": "7618de7440f92563b9d16b1bdb70402f46f840a620e9447b609eb3dd44ad267e",
    "render.py": "1a8044ca800bc7fb4cda75c00c2c0ec2187293177e7e3fc541370b501215c8f4",
}


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def frame_digest(frame):
    return digest(frame.to_csv(index=False, lineterminator="\n"))


@pytest.fixture(scope="module")
def wells():
    return layout.design(SEED)


@pytest.fixture(scope="module")
def factors(wells):
    return layout.factors(wells, SEED)


def test_generator_is_frozen(wells, factors):
    tables = [
        layout.PARAMETERS, layout.CONTROL_EFFECTS, layout.QUERY_EFFECTS, layout.PRETRAIN_EFFECTS, layout.AXES,
        plates.JP2_LEVEL, render.STAIN_GAIN, render.BLEED_PAIRS,
    ]  # fmt: skip
    pretrain = layout.design(SEED, "pretrain")
    found = {
        "tables": digest(json.dumps(tables, sort_keys=True)),
        "design": frame_digest(pd.concat([wells, pretrain])),
        # + 0.0 turns -0.0 into 0.0
        "factors": frame_digest(pd.concat([factors, layout.factors(pretrain, SEED, "pretrain")]).round(3) + 0.0),
        "layout.py": digest(inspect.getsource(layout)),
        "render.py": digest(inspect.getsource(render)),
    }
    assert found == FROZEN


def test_plates_hold_the_published_controls(wells):
    for _, plate in wells.groupby(["experiment", "plate"]):
        counts = plate["treatment"].value_counts()
        assert counts["EMPTY_control"] == 16
        fixed = [f"{g}_guide_{i}" for g in ("PLK1", "MTOR") for i in range(1, 7)]
        fixed += ["EIF3H_guide_1", "SRC_guide_1", "HCK_guide_1", "CYP11B1_guide_1"]
        assert (counts[fixed] == 1).all()
        assert plate.loc[plate["treatment"].isin(fixed[-4:]), "well_type_label"].eq("cutting_control").all()
        queries = plate[plate["well_type_label"] == "query"]
        ordinary = queries[queries["effect_class"] != "batch_confounded"]
        assert (ordinary["treatment"].value_counts() == 1).all()
        assert (ordinary.groupby("perturbation")["treatment"].nunique() == 4).all()


def test_sizes(wells):
    assert wells["experiment"].nunique() == 8
    assert wells.groupby("experiment")["plate"].nunique().eq(3).all()
    assert 1600 <= len(wells) <= 1800
    genes = wells[wells["well_type_label"] == "query"].groupby("experiment")["perturbation"].nunique()
    assert genes.eq(10).all()


def test_query_genes_stand_in_two_experiments_except_a_few(wells):
    experiments = wells[wells["well_type_label"] == "query"].groupby("perturbation")["experiment"].nunique()
    assert len(experiments) == 42
    assert experiments.value_counts().to_dict() == {2: 38, 1: 4}


def test_experiments_sharing_a_gene_can_be_kept_in_different_folds(wells):
    number = wells["experiment"].str[-3:].astype(int)
    parity = (number % 2)[wells["well_type_label"] == "query"]
    both = parity.groupby(wells["perturbation"]).nunique()
    paired = wells[wells["well_type_label"] == "query"].groupby("perturbation")["experiment"].nunique() == 2
    assert both[paired[paired].index].eq(2).all()


def test_no_address_twice_and_all_on_the_plate(wells):
    assert not wells.duplicated(["experiment", "plate", "address"]).any()
    assert not wells["well_id"].duplicated().any()
    assert wells["row"].between(1, 32).all() and wells["column"].between(1, 48).all()
    letters = wells["address"].str[:-2]
    # bijective base 26, the independent way round
    value = letters.map(lambda s: sum((ord(c) - 64) * 26**i for i, c in enumerate(reversed(s))))
    assert (value == wells["row"]).all()
    assert (wells["address"].str[-2:].astype(int) == wells["column"]).all()
    corner = wells[wells["address"] == "A01"]
    assert (corner["edge_distance"] == 0).all()


def test_positions_do_not_go_with_treatments_but_for_the_planted_gene(wells):
    planted = wells["effect_class"] == "position_confounded"
    assert wells.loc[planted, "row"].max() <= 2 and wells.loc[planted, "column"].max() <= 4
    others = wells[~planted & ~wells["blocked"]]
    # a control guide is redrawn on each of 24 plates: its mean row is 16.5 within 4 standard errors
    for treatment, group in others.groupby("treatment"):
        error = np.sqrt((32**2 - 1) / 12 / len(group))
        assert abs(group["row"].mean() - 16.5) < 4 * error, treatment
    guide = wells[wells["treatment"] == "PLK1_guide_1"]
    assert guide["address"].nunique() >= 20


def test_batch_confounded_gene_stands_on_drifted_plates_only(wells, factors):
    gene = wells["effect_class"] == "batch_confounded"
    assert gene.sum() == 24
    drifted = wells["drifted_plate"]
    assert drifted[gene].all()
    assert wells[drifted].groupby(["experiment", "plate"]).ngroups == 2
    assert (factors.filter(like="effect_")[gene] == 0).all(axis=None)
    same = wells["experiment"].isin(wells.loc[gene, "experiment"])
    assert (
        factors.loc[drifted, "blur"].min()
        > factors.loc[same & ~drifted, "blur"].groupby(wells["experiment"]).max().min()
    )


def test_planted_accidents(wells, factors):
    blocked = wells[wells["blocked"]]
    assert len(blocked) == 8 and blocked["column"].nunique() == 1
    assert blocked.groupby(["experiment", "plate"]).ngroups == 1
    focus = wells[wells["out_of_focus"]]
    assert focus.groupby(["experiment", "plate"]).ngroups == 1 and len(focus) > 60
    assert factors.loc[wells["out_of_focus"], "blur"].min() > factors.loc[~wells["out_of_focus"], "blur"].max()


def test_effects_are_graded(factors):
    table = layout.effects()
    kinds = [table[g][0] for g in layout.gene_names()]
    assert {k: kinds.count(k) for k in ("null", "texture", "count", "shape")} == {
        "null": 10, "texture": 14, "count": 6, "shape": 10,
    }  # fmt: skip
    for gene in layout.gene_names():
        kind, effect = table[gene]
        if kind in ("null", "position_confounded", "batch_confounded"):
            assert not effect
        if kind == "texture":
            assert "density" not in effect
        if kind == "count":
            assert max(effect, key=lambda a: abs(effect[a])) == "density"
    assert not table["SRC"][1] and not table["HCK"][1]
    assert max(map(abs, table["EIF3H"][1].values())) < 0.2


def test_guides_differ_and_one_of_a_gene_is_weak():
    table = layout.guide_efficacies(SEED)
    for gene, n in {"PLK1": 6, "MTOR": 6, "DEMO12": 4}.items():
        values = np.array([table[f"{gene}_guide_{i + 1}"] for i in range(n)])
        assert (values < 0.5).sum() == 1 and len(set(values)) == n
    assert table["EMPTY_control"] == 0


def test_phenotype_is_the_sum_of_its_parts(wells, factors):
    rest = factors["phenotype_er_texture"] - factors["effect_er_texture"] - factors["batch_er_texture"]
    assert rest.std() == pytest.approx(0.08, rel=0.1)
    density = factors["phenotype_density"] - factors[["effect_density", "batch_density", "position_density"]].sum(
        axis=1
    )
    assert density[~wells["blocked"]].std() == pytest.approx(0.08, rel=0.1)
    assert density[wells["blocked"]].mean() < -2.5
    ring = wells["edge_distance"]
    thin = factors["position_density"].groupby(ring).mean()
    assert thin[0] < -0.2 and thin[1] < -0.05 and abs(thin[5]) < 0.05


def test_acquisition_differs_between_experiments_and_is_in_range(wells, factors):
    sane = ~wells["out_of_focus"] & ~wells["drifted_plate"]
    by = factors[sane].groupby(wells["experiment"])
    for name, spread in {
        "blur": 0.5,
        "background_texture": 0.03,
        "illumination": 0.15,
        "gamma": 0.25,
    }.items():
        means = by[name].mean()
        assert means.max() - means.min() > spread, name
    assert factors[[f"bleed_{c}" for c in range(1, 7)]].to_numpy().min() >= 0
    assert np.isfinite(factors.to_numpy()).all()


def test_another_seed_is_another_design():
    assert not layout.design(1)["address"].equals(layout.design(2)["address"])
    assert layout.design(1).equals(layout.design(1))


def test_pretrain_is_apart(wells):
    pretrain = layout.design(SEED, "pretrain")
    assert set(pretrain["experiment"]) == {"pretrain-001", "pretrain-002"}
    query = pretrain["well_type_label"] == "query"
    assert not set(pretrain.loc[query, "perturbation"]) & set(wells["perturbation"])
    assert not pretrain[["blocked", "out_of_focus", "drifted_plate"]].any(axis=None)


def test_wrong_part_or_seed_is_named():
    with pytest.raises(ConfigError, match="demo part 'both' is unknown"):
        layout.design(SEED, "both")
    with pytest.raises(ConfigError, match="demo.seed is -1"):
        layout.design(-1)
