import numpy as np
import pandas as pd
import pytest
from scipy import stats

from phenoica.disentangle import view
from phenoica.disentangle.components import (
    component_effects,
    component_table,
    reference_omega2,
)
from phenoica.errors import ControlsError

RULES = {"alpha": 0.05, "min_omega2": 0.1}


def test_effects_by_hand(make_metadata):
    obs = make_metadata()
    Z = np.random.default_rng(0).standard_normal((len(obs), 2)) + (obs["experiment"] == "gene-001").to_numpy()[:, None]
    found = component_effects(Z, obs)
    assert "EMPTY_control" not in found.perturbations
    reference = (obs["control_role"] == "reference").to_numpy()
    frame = pd.DataFrame(Z, index=obs.index)
    ss_ref = df_ref = 0
    for _, block in frame[reference].groupby(obs["experiment"][reference]):
        ss_ref, df_ref = ss_ref + ((block - block.mean()) ** 2).sum(), df_ref + len(block) - 1
    for i, name in enumerate(found.perturbations):
        top = weights = ss = df = 0
        case = obs["treatment" if name == "EIF3H_guide_1" else "perturbation"] == name
        for experiment in sorted(set(obs["experiment"][case])):
            here = (obs["experiment"] == experiment).to_numpy()
            a, b = frame[here & case.to_numpy()], frame[here & reference]
            w = len(a) * len(b) / (len(a) + len(b))
            top, weights = top + w * (a.mean() - b.mean()), weights + w
            ss, df = ss + ((a - a.mean()) ** 2).sum(), df + len(a) - 1
        np.testing.assert_allclose(found.effect[i], top / weights)
        assert found.n_case[i] == case.sum()
    # one experiment: the standard error is Welch's, and so is the p value
    one = (obs["experiment"] == "gene-000").to_numpy()
    single = component_effects(Z[one], obs[one])
    place = list(single.perturbations).index("PLK1")
    a = Z[one & (obs["perturbation"] == "PLK1").to_numpy()]
    welch = stats.ttest_ind(a, Z[one & reference], equal_var=False)
    np.testing.assert_allclose(single.p_values[place], welch.pvalue)
    np.testing.assert_allclose(single.effect[place] / single.standard_error[place], welch.statistic)


def test_effects_do_not_see_batch_shifts(make_metadata):
    obs = make_metadata()
    Z = np.random.default_rng(0).standard_normal((len(obs), 3))
    shift = 1e3 * pd.factorize(obs["experiment"])[0][:, None]
    np.testing.assert_allclose(component_effects(Z + shift, obs).effect, component_effects(Z, obs).effect, atol=1e-9)


def test_biology_is_unbiased(make_metadata):
    """Also when cases vary more than references and sample sizes are small."""
    obs = make_metadata(n_experiments=3, n_plates=1)
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((len(obs), 4000))
    noise[(obs["perturbation"] == "PLK1").to_numpy()] *= 3
    squared = component_effects(noise, obs).squared
    np.testing.assert_allclose(squared.mean(axis=1), 0, atol=4 * (squared.std(axis=1) / np.sqrt(4000)).max())
    noise[(obs["perturbation"] == "GENE01").to_numpy()] += 2
    found = component_effects(noise, obs)
    place = list(found.perturbations).index("GENE01")
    assert found.squared[place].mean() == pytest.approx(4, rel=0.02)
    assert found.biology.mean() == pytest.approx(4 / len(found.perturbations), rel=0.05)


def test_p_values_are_uniform_without_effect(make_metadata):
    obs = make_metadata(n_experiments=3, n_plates=1)
    p = component_effects(np.random.default_rng(1).standard_normal((len(obs), 3000)), obs).p_values
    for row in p:
        assert stats.kstest(row, "uniform").pvalue > 1e-4


def test_labels_of_planted_components(make_metadata, make_planted):
    obs = make_metadata()
    _, factors = make_planted(obs)
    mixed = factors[:, 0] + factors[:, 1]
    Z = np.column_stack([factors, mixed / mixed.std()])
    table = component_table(Z, obs, view="ica", **RULES)
    assert list(table["label"]) == ["biology", "batch", "position", "unexplained", "mixed"]
    assert table["top_perturbation"][0] == "PLK1"
    assert table["row_omega2"][2] > 0.8 and table["column_omega2"][2] < 0.1 and table["batch_omega2"][1] > 0.8
    np.testing.assert_allclose(table["kurtosis"], stats.kurtosis(Z, axis=0))
    np.testing.assert_allclose(table["skew"], stats.skew(Z, axis=0))
    assert list(table["component"][:2]) == ["ica_000", "ica_001"] and table["draw"].isna().all()


def test_ica_separates_what_pca_mixes(make_metadata, make_planted):
    obs = make_metadata()
    X, _ = make_planted(obs)
    labels = component_table(
        view("ica", n_components=4).fit(X, obs).transform(X, obs, dtype=float), obs, view="ica", **RULES
    )["label"]
    assert sorted(labels) == ["batch", "biology", "position", "unexplained"]


def test_labels_of_noise_are_unexplained(make_metadata):
    obs = make_metadata(n_experiments=8, n_plates=3)
    table = component_table(np.random.default_rng(0).standard_normal((len(obs), 300)), obs, view="ica", **RULES)
    assert (table["label"] == "biology").sum() == 0
    assert (table["label"] == "unexplained").mean() > 0.95


def test_batch_and_position_are_read_from_reference_controls_only(make_metadata):
    obs = make_metadata()
    Z = np.random.default_rng(0).standard_normal((len(obs), 1))
    before = reference_omega2(Z, obs, "experiment"), reference_omega2(Z, obs, "row")
    others = (obs["control_role"] != "reference").to_numpy()
    Z[others] = 10.0 * pd.factorize(obs["experiment"])[0][others, None]
    assert (reference_omega2(Z, obs, "experiment"), reference_omega2(Z, obs, "row")) == before


def big_plates(make_metadata, seed):
    """Wells of 8 experiments on 1536-well plates: 192 reference controls on 32 rows and 48 columns."""
    obs, rng = make_metadata(n_experiments=8, n_plates=3), np.random.default_rng(seed)
    return obs.assign(row=rng.integers(1, 33, len(obs)), column=rng.integers(1, 49, len(obs)))


def test_noise_on_a_large_plate_is_not_called_position(make_metadata):
    found = []
    for seed in range(10):
        obs = big_plates(make_metadata, seed)
        Z = np.random.default_rng(seed + 100).standard_normal((len(obs), 100))
        table = component_table(Z, obs, view="ica", **RULES)
        found.append(table["label"] == "position")
        # omega2 alone is what noise reaches
        assert (table[["row_omega2", "column_omega2"]].max(axis=1) >= 0.1).any()
    assert np.mean(found) <= 0.005


def test_a_batch_component_on_a_large_plate_is_batch_and_nothing_else(make_metadata):
    labels = []
    for seed in range(20):
        obs, rng = big_plates(make_metadata, seed), np.random.default_rng(seed + 100)
        shift = rng.standard_normal((8, 20))[pd.factorize(obs["experiment"])[0]]
        Z = 1.5 * shift + rng.standard_normal((len(obs), 20))
        labels += component_table(Z / Z.std(axis=0), obs, view="ica", **RULES)["label"].tolist()
    assert np.mean(np.array(labels) == "batch") >= 0.98
    assert "position" not in labels


def test_a_batch_with_a_layout_of_its_own_is_not_position(make_metadata):
    obs, rng = make_metadata(n_experiments=8, n_plates=3), np.random.default_rng(0)
    code = pd.factorize(obs["experiment"])[0]
    # every experiment has its controls on a few rows and columns, shared with one other experiment in part
    obs = obs.assign(row=3 * code + rng.integers(1, 7, len(obs)), column=5 * code + rng.integers(1, 9, len(obs)))
    Z = 2 * rng.standard_normal((8, 200))[code] + rng.standard_normal((len(obs), 200))
    table = component_table(Z / Z.std(axis=0), obs, view="ica", **RULES)
    assert (table["label"] == "batch").mean() >= 0.98
    assert table[["row_omega2", "column_omega2"]].mean().max() < 0.03


@pytest.mark.parametrize("axis", ["row", "column"])
def test_position_on_a_large_plate_is_found_beside_noise_and_below_a_batch(make_metadata, axis):
    obs, rng = big_plates(make_metadata, 0), np.random.default_rng(0)
    Z = rng.standard_normal((len(obs), 50))
    gradient = (obs[axis] - obs[axis].mean()).to_numpy() / obs[axis].std()
    Z[:, 7] += 2 * gradient
    Z[:, 8] += 2 * gradient + 3 * rng.standard_normal(8)[pd.factorize(obs["experiment"])[0]]
    table = component_table(Z / Z.std(axis=0), obs, view="ica", **RULES)
    assert table["label"][7] == "position" and table["label"][8] == "mixed"
    assert table[f"{axis}_omega2"][7] > 0.6 and table["position_p"][7] < 0.02
    # a share of the whole variance: the batch takes its part
    assert table[f"{axis}_omega2"][8] < table[f"{axis}_omega2"][7]


def test_position_and_batch_need_the_share_as_well_as_the_test(make_metadata):
    obs, rng = make_metadata(n_experiments=8, n_plates=3), np.random.default_rng(0)
    Z = rng.standard_normal((len(obs), 2))
    Z[:, 0] += 1.5 * (obs["row"] - 4.5) / 2.3
    Z[:, 1] += 1.5 * rng.standard_normal(8)[pd.factorize(obs["experiment"])[0]]
    for limit, labels in ((0.1, ["position", "batch"]), (0.9, ["unexplained", "unexplained"])):
        table = component_table(Z / Z.std(axis=0), obs, view="ica", alpha=0.05, min_omega2=limit)
        assert list(table["label"]) == labels
        assert table["position_p"][0] < 1e-3 and table["batch_p"][1] < 1e-3


def test_few_reference_controls_make_no_batch_by_chance(make_metadata):
    obs = make_metadata(n_experiments=8, n_plates=1)
    seen = obs[(obs["control_role"] != "reference") | (obs.groupby(["experiment", "control_role"]).cumcount() < 3)]
    Z = np.random.default_rng(0).standard_normal((len(seen), 500))
    table = component_table(Z, seen, view="ica", **RULES)
    assert (table["batch_omega2"] >= 0.1).mean() > 0.1
    assert (table["label"] == "batch").mean() < 0.01


def test_a_significant_effect_that_is_small_is_not_biology(make_metadata):
    obs = make_metadata()
    rng = np.random.default_rng(0)
    query = (obs["control"] == "none").to_numpy()
    # queries vary widely and alike in every experiment, controls hardly: the smallest effect is significant
    Z = np.where(query[:, None], 1.4, 0.1) * rng.standard_normal((len(obs), 2))
    Z[(obs["perturbation"] == "PLK1").to_numpy()] += [0.2, 0.6]
    table = component_table(Z, obs, view="ica", **RULES)
    assert (table["perturbation_p"] < 1e-6).all()
    assert list(table["label"]) == ["unexplained", "biology"]


def test_a_cutting_guide_is_not_the_query_of_the_same_gene(make_metadata):
    obs = make_metadata()
    gene = (obs["perturbation"] == "GENE03") | (obs["control"] == "cutting")
    obs.loc[gene, "perturbation"] = "SRC"
    query, cutting = ((gene & (obs["control"] == kind)).to_numpy() for kind in ("none", "cutting"))
    obs.loc[cutting, "treatment"] = [f"SRC_guide_{1 + i % 2}" for i in range(cutting.sum())]
    Z = np.zeros((len(obs), 1)) + 3.0 * query[:, None]
    Z[cutting & (obs["treatment"] == "SRC_guide_2").to_numpy()] = -1
    found = component_effects(Z, obs)
    effect = dict(zip(found.perturbations, found.effect[:, 0], strict=True))
    assert effect["SRC"] == pytest.approx(3)
    assert effect["SRC_guide_1"] == 0 and effect["SRC_guide_2"] == pytest.approx(-1)
    n_case = dict(zip(found.perturbations, found.n_case, strict=True))
    assert n_case["SRC"] == query.sum() and n_case["SRC_guide_1"] == cutting.sum() / 2


def test_one_experiment_has_no_batch(make_metadata):
    obs = make_metadata(n_experiments=1)
    table = component_table(np.random.default_rng(0).standard_normal((len(obs), 3)), obs, view="ica", **RULES)
    assert (table["batch_omega2"] == 0).all()


def test_no_reference_controls_is_an_error(make_metadata):
    obs = make_metadata().assign(control_role="fit")
    with pytest.raises(ControlsError, match="plates.negative_controls"):
        component_effects(np.ones((len(obs), 1)), obs)
