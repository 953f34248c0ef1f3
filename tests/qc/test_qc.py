"""Flags on wells that are spoiled on purpose, and numbers against values worked out by hand."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phenoica import config as configuration
from phenoica import schema
from phenoica.qc import flags, plate_stats, run

CONFIG = configuration.resolve({"run": "test", "source": "demo"})
CHANNELS = (1, 2, 3)
MEASURES = ("mean", "sd", "p01", "p50", "p99", "saturated", "empty", "focus")


def make_wells(n_plates=3, n_negative=16, n_query=40, seed=0, experiment="exp-1"):
    """Return obs, measures and embeddings of clean plates on which nothing is wrong."""
    rng = np.random.default_rng(seed)
    rows = []
    for p in range(1, n_plates + 1):
        places = rng.permutation(30 * 46)[: n_negative + 12 + n_query]
        for k, place in enumerate(places):
            row, column = place // 46 + 2, place % 46 + 2
            if k < n_negative:
                label, control, role = "EMPTY_control", "negative", ("fit", "reference")[k % 2]
            elif k < n_negative + 12:
                label, control, role = ("PLK1", "MTOR")[k % 2], "positive", "none"
            else:
                label, control, role = f"GENE{k % 10}", "none", "none"
            rows.append(
                (
                    f"{experiment}_{p}_{row}x{column}",
                    experiment,
                    str(p),
                    f"{experiment}_{p}",
                    f"R{row}C{column}",
                    row,
                    column,
                    1,
                    label,
                    f"{label}_guide_{k % 4}",
                    "CRISPR",
                    None,
                    "",
                    "HUVEC",
                    control,
                    role,
                )
            )
    obs = pd.DataFrame(rows, columns=list(schema.WELL_COLUMNS)).set_index(schema.WELL_ID)
    obs[schema.CONCENTRATION] = obs[schema.CONCENTRATION].astype(float)
    n = len(obs)
    obs[schema.N_TILES] = 4
    obs[schema.CELL_COUNT] = np.round(rng.normal(100, 8, n))
    centre = dict(mean=40, sd=20, p01=2, p50=30, p99=120, saturated=0.001, empty=0.01, focus=-2.5)
    measures = {f"c{c}_{m}": centre[m] * (1 + 0.04 * rng.standard_normal(n)) for c in CHANNELS for m in MEASURES}
    return obs, pd.DataFrame(measures, index=obs.index), rng.standard_normal((n, 12)).astype(np.float32)


def names(wells, i, kind):
    return flags.split(wells[kind].iloc[i])


def queries(obs, plate="exp-1_1"):
    return np.flatnonzero((obs[schema.CONTROL] == "none") & (obs[schema.PLATE_ID] == plate))


def test_robust_sd_and_zprime_by_hand():
    # deviations from the median 3: 2 1 0 1 97 -> MAD 1
    assert plate_stats.robust_sd(np.array([1, 2, 3, 4, 100.0])) == pytest.approx(1.4826)
    # medians 3 and 13, both MADs 1: 1 - 3 * 2 * 1.4826 / 10
    value, reason = plate_stats.robust_zprime(np.array([1, 2, 3, 4, 5.0]) + 10, np.array([1, 2, 3, 4, 5.0]))
    assert value == pytest.approx(1 - 0.6 * 1.4826) and reason == ""


def test_zprime_is_taken_per_positive_control():
    values = np.array([10, 11, 12, 13, 14, 50, 51, 52, 53, 54.0])
    labels = np.array(["A"] * 5 + ["B"] * 5)
    value, label, reason = plate_stats.best_zprime(values, labels, np.array([1, 2, 3, 4, 5.0]))
    assert label == "B" and not reason
    assert value == pytest.approx(1 - 6 * 1.4826 / 49)


@pytest.mark.parametrize(
    ("positive", "negative", "word"),
    [
        ([], [1, 2, 3, 4], "0 positive"),
        ([1, 2, 3, 4], [1, 2], "2 negative"),
        ([1, 2, 3, 4], [1, 2, 3, 4], "same median"),
    ],
)
def test_zprime_without_a_value_has_a_reason(positive, negative, word):
    value, reason = plate_stats.robust_zprime(np.array(positive, float), np.array(negative, float))
    assert value is None and word in reason


def test_edge_effect_by_hand():
    counts = np.array([80, 70, 60, 100, 100, 110, 90.0])
    value, reason = plate_stats.edge_effect(counts, np.array([0, 0, 0, 1, 2, 3, 4]))
    assert value == pytest.approx(-30) and not reason  # 70 against 100
    assert plate_stats.edge_effect(counts, np.ones(7))[0] is None


def test_spread_refuses_few_and_constant_values():
    assert "3 wells" in plate_stats.spread(np.array([1.0, 2, 3])).reason
    assert "one and the same value" in plate_stats.spread(np.ones(9)).reason


def test_distance_leaves_a_fit_control_out_of_its_own_centre():
    X = np.array([[0.0], [1], [2], [10], [20]])
    fit = np.array([True, True, True, True, False])
    distance, known = plate_stats.control_distance(X, np.zeros(5), fit)
    scale = 1.4826 * 1.0  # residuals from the median 1.5: 1.5 .5 .5 8.5 -> MAD 1.0
    expected = np.array([2 - 0, 2 - 1, 2 - 1, 10 - 1, 20 - 1.5]) / scale
    assert known.all() and distance == pytest.approx(expected)


def test_distance_of_fit_controls_is_exchangeable_with_other_null_wells():
    rng = np.random.default_rng(1)
    fit = np.tile(np.arange(16) < 8, 200)
    distance, _ = plate_stats.control_distance(rng.standard_normal((3200, 50)), np.repeat(np.arange(200), 16), fit)
    # leaving itself out costs one control of eight in the centre: 2 % at most, never the other way
    assert distance[~fit].mean() == pytest.approx(distance[fit].mean(), rel=0.02)
    assert distance[fit].mean() > distance[~fit].mean()


def test_clean_plates_get_no_acquisition_flag():
    obs, measures, X = make_wells()
    wells, plates = run.assess(obs, measures, X, CONFIG)
    assert wells[schema.QC_PASS].all()
    assert (plates["flags"] == "").all()
    assert list(wells[schema.WELL_ID]) == list(obs.index)


def test_planted_failures_are_flagged_and_nothing_else():
    obs, measures, X = make_wells()
    blur, bright, lost, nan, blank = queries(obs)[:5]
    measures.loc[measures.index[blur], [f"c{c}_focus" for c in CHANNELS]] -= 1.5
    measures.loc[measures.index[bright], "c2_saturated"] = 0.2
    obs.loc[obs.index[lost], schema.N_TILES] = 3
    measures.loc[measures.index[nan], "c1_focus"] = np.nan
    measures.loc[measures.index[blank], [f"c{c}_sd" for c in CHANNELS]] = 1.0
    obs.loc[obs.index[blank], schema.CELL_COUNT] = 0.0
    wells, plates = run.assess(obs, measures, X, CONFIG)
    expected = {
        blur: ["focus"],
        bright: ["saturation"],
        lost: ["missing"],
        nan: ["missing"],
        blank: ["empty"],
    }
    for i, flag in expected.items():
        assert names(wells, i, schema.QC_ACQUISITION) == flag
    assert set(np.flatnonzero(~wells[schema.QC_PASS])) == set(expected)
    assert plates.loc[0, "n_acquisition"] == 5 and plates["n_acquisition"].sum() == 5
    assert not np.isnan(plates.select_dtypes("number").to_numpy(dtype=float, na_value=0)).any()


def test_blank_images_are_empty_even_without_controls():
    obs, measures, X = make_wells(n_plates=1, n_negative=0)
    measures.loc[measures.index[2], [f"c{c}_empty" for c in CHANNELS]] = 1.0
    measures.loc[measures.index[4], "c1_empty"] = 1.0
    wells, _ = run.assess(obs, measures, X, CONFIG)
    assert list(np.flatnonzero(~wells[schema.QC_PASS])) == [2]
    assert names(wells, 2, schema.QC_ACQUISITION) == ["empty"]


def test_a_stain_blurred_in_one_channel_only_is_a_phenotype_not_a_failure():
    obs, measures, X = make_wells()
    i = queries(obs)[0]
    measures.loc[measures.index[i], "c2_focus"] -= 1.5
    assert run.assess(obs, measures, X, CONFIG)[0][schema.QC_PASS].iloc[i]


def test_toxic_perturbation_is_annotated_but_passes():
    obs, measures, X = make_wells()
    toxic = np.flatnonzero(obs[schema.PERTURBATION] == "GENE3")
    obs.loc[obs.index[toxic], schema.CELL_COUNT] = 12.0
    measures.loc[measures.index[toxic], [f"c{c}_sd" for c in CHANNELS]] *= 0.4
    X[toxic] += 9
    wells, _ = run.assess(obs, measures, X, CONFIG)
    for i in toxic:
        assert names(wells, i, schema.QC_PHENOTYPE) == ["count", "distance"]
        assert wells[schema.QC_PASS].iloc[i]


def test_a_perturbation_that_kills_every_well_is_not_called_a_failed_dispense():
    obs, measures, X = make_wells()
    dead = np.flatnonzero(obs[schema.PERTURBATION] == "GENE3")
    single = np.flatnonzero(obs[schema.PERTURBATION] == "GENE4")[:1]
    for rows in (dead, single):
        obs.loc[obs.index[rows], schema.CELL_COUNT] = 0.0
        measures.loc[measures.index[rows], [f"c{c}_sd" for c in CHANNELS]] = 1.0
        measures.loc[measures.index[rows], [f"c{c}_focus" for c in CHANNELS]] = -6.0  # no cells, no edges: not blur
    wells, _ = run.assess(obs, measures, X, CONFIG)
    assert wells[schema.QC_PASS].iloc[dead].all()
    assert all("no_cells" in names(wells, i, schema.QC_PHENOTYPE) for i in dead)
    assert names(wells, single[0], schema.QC_ACQUISITION) == ["empty"]


def spoil(obs, measures, rows, kind):
    """Make wells look empty or blurred, in place."""
    if kind == "empty":
        obs.loc[obs.index[rows], schema.CELL_COUNT] = 0.0
        measures.loc[measures.index[rows], [f"c{c}_sd" for c in CHANNELS]] = 1.0
    else:
        measures.loc[measures.index[rows], [f"c{c}_focus" for c in CHANNELS]] = -6.0


@pytest.mark.parametrize(("kind", "phenotype"), [("empty", "no_cells"), ("focus", "low_focus")])
@pytest.mark.parametrize(
    ("wells_of_it", "failed", "spared"),
    [(2, 2, False), (3, 2, False), (3, 3, True), (7, 3, False), (7, 4, True), (12, 6, False), (12, 7, True)],
)
def test_a_failure_is_a_phenotype_only_if_enough_replicates_show_it(kind, phenotype, wells_of_it, failed, spared):
    # at least half of the other wells, and at least two
    obs, measures, X = make_wells()
    all_of_it = np.flatnonzero(obs[schema.PERTURBATION] == "GENE3")
    obs.loc[obs.index[all_of_it[wells_of_it:]], schema.PERTURBATION] = "OTHER"
    rows = all_of_it[:failed]
    spoil(obs, measures, rows, kind)
    wells, _ = run.assess(obs, measures, X, CONFIG)
    for i in rows:
        assert names(wells, i, schema.QC_ACQUISITION) == ([] if spared else [kind])
        assert (phenotype in names(wells, i, schema.QC_PHENOTYPE)) == spared
        assert wells[schema.QC_PASS].iloc[i] == spared
    assert wells[schema.QC_PASS].drop(rows).all()


def test_dying_wells_are_spared_whether_they_look_empty_or_blurred():
    obs, measures, X = make_wells()
    rows = np.flatnonzero(obs[schema.PERTURBATION] == "GENE3")
    spoil(obs, measures, rows[:3], "empty")
    spoil(obs, measures, rows[3:8], "focus")
    wells, _ = run.assess(obs, measures, X, CONFIG)
    assert wells[schema.QC_PASS].all()
    assert all("no_cells" in names(wells, i, schema.QC_PHENOTYPE) for i in rows[:3])
    assert all("low_focus" in names(wells, i, schema.QC_PHENOTYPE) for i in rows[3:8])


@pytest.mark.parametrize("kind", ["empty", "focus"])
def test_negative_controls_are_never_spared(kind):
    obs, measures, X = make_wells(n_negative=40)
    rows = np.flatnonzero(obs[schema.CONTROL] == schema.NEGATIVE)[:3]
    obs.loc[obs.index[rows], schema.PERTURBATION] = "ODD_control"
    spoil(obs, measures, rows, kind)
    wells, _ = run.assess(obs, measures, X, CONFIG)
    assert all(names(wells, i, schema.QC_ACQUISITION) == [kind] for i in rows)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_acquisition_flags_depend_on_their_own_experiment_only(seed):
    rng = np.random.default_rng(seed)
    parts = [make_wells(n_plates=2, seed=k, experiment=f"exp-{k}") for k in (1, 2)]
    n = len(parts[0][0])
    for obs, measures, _ in parts:
        # a few failed wells anywhere, and whole perturbations that fail; more of them in the second experiment
        spoil(obs, measures, rng.choice(n, 6, replace=False), "empty")
        spoil(obs, measures, rng.choice(n, 6, replace=False), "focus")
    obs, measures, X = parts[1]
    for kind in ("empty", "focus"):
        whole = np.isin(obs[schema.PERTURBATION], [f"GENE{g}" for g in rng.choice(10, 4, replace=False)])
        spoil(obs, measures, np.flatnonzero(whole), kind)
    measures *= rng.uniform(0.5, 1.5, measures.shape[1])
    alone, _ = run.assess(*parts[0], CONFIG)
    both, _ = run.assess(*(f([a, b]) for f, a, b in zip((pd.concat,) * 2 + (np.concatenate,), *parts, strict=True)),
                         CONFIG)  # fmt: skip
    columns = [schema.WELL_ID, schema.QC_ACQUISITION, schema.QC_PASS]
    pd.testing.assert_frame_equal(both[columns].iloc[:n], alone[columns])


def test_another_experiment_cannot_excuse_a_failed_well():
    parts = [make_wells(n_plates=2, seed=k, experiment=f"exp-{k}") for k in (1, 2)]
    where = [np.flatnonzero(obs[schema.PERTURBATION] == "GENE4") for obs, _, _ in parts]
    for kind, at in (("empty", 0), ("focus", 1)):
        spoil(*parts[0][:2], where[0][at : at + 1], kind)
    spoil(*parts[1][:2], where[1], "empty")
    obs, measures = (pd.concat([parts[0][i], parts[1][i]]) for i in (0, 1))
    wells, _ = run.assess(obs, measures, np.concatenate([parts[0][2], parts[1][2]]), CONFIG)
    assert names(wells, where[0][0], schema.QC_ACQUISITION) == ["empty"]
    assert names(wells, where[0][1], schema.QC_ACQUISITION) == ["focus"]
    assert wells[schema.QC_PASS].iloc[len(parts[0][0]) :].all()


@pytest.mark.parametrize(("n_fit", "known"), [(8, True), (2, False)])
def test_the_distance_of_a_plate_is_from_its_fit_controls(n_fit, known):
    obs, measures, X = make_wells(n_plates=1, n_negative=10)
    negative = np.flatnonzero(obs[schema.CONTROL] == schema.NEGATIVE)
    obs.loc[obs.index[negative], schema.CONTROL_ROLE] = ["fit"] * n_fit + ["reference"] * (10 - n_fit)
    far = queries(obs)[0]
    X[far] += 50
    wells, plates = run.assess(obs, measures, X, CONFIG)
    assert ("distance" in names(wells, far, schema.QC_PHENOTYPE)) == known
    assert ("no distance limit" in plates.loc[0, "reasons"]) == (not known)


def test_plate_out_of_focus_is_seen_against_its_sister_plates():
    obs, measures, X = make_wells()
    second = obs[schema.PLATE_ID] == "exp-1_2"
    measures.loc[second.to_numpy(), [f"c{c}_focus" for c in CHANNELS]] -= 1.5
    wells, plates = run.assess(obs, measures, X, CONFIG)
    assert list(plates["flags"]) == ["", "plate_focus", ""]
    assert plates.loc[1, "focus_shift"] < -5 and plates.loc[0, "focus_shift"] > -1
    flagged = wells[schema.QC_ACQUISITION] == "plate_focus"
    assert (flagged.to_numpy() == second.to_numpy()).all()


def test_blocked_dispenser_column_is_found_and_a_toxic_well_beside_it_is_not():
    obs, measures, X = make_wells()
    first = np.flatnonzero(obs[schema.PLATE_ID] == "exp-1_1")
    blocked, toxic = first[-6:-1], first[-1]
    obs.loc[obs.index[blocked], schema.COLUMN] = 48
    obs.loc[obs.index[toxic], schema.COLUMN] = 1
    obs.loc[obs.index[[*blocked, toxic]], schema.CELL_COUNT] = 5.0
    wells, plates = run.assess(obs, measures, X, CONFIG)
    assert list(plates["flags"]) == ["dispenser", "", ""] and plates.loc[0, "blocked_columns"] == "48"
    assert set(np.flatnonzero(wells[schema.QC_ACQUISITION] == "dispenser")) == set(blocked)


@pytest.mark.parametrize(("low_here", "low_elsewhere", "found"), [(3, 0, [7]), (2, 0, []), (5, 3, [7]), (3, 30, [])])
def test_a_column_is_blocked_only_beyond_what_the_other_columns_explain(low_here, low_elsewhere, found):
    # 70 wells, one column of max(3, low_here) wells, the rest spread so that no other column has three
    here = max(3, low_here)
    column = np.r_[np.full(here, 7), 8 + np.arange(70 - here) // 2]
    count = np.full(70, 30.0)
    count[:low_here] = 2
    count[here : here + low_elsewhere] = 2
    perturbation = np.array([f"GENE{i}" for i in range(70)])
    assert plate_stats.blocked_columns(count, column, perturbation, np.zeros(70, dtype=bool)) == found


@pytest.mark.parametrize(
    ("labels", "negative", "found"),
    [
        (["PLK1"] * 5, [], []),
        (["PLK1", "PLK1", "MTOR", "PLK1", "MTOR"], [], []),
        (["PLK1", "PLK1", "MTOR", "PLK1", "SRC"], [], [7]),
        (["PLK1", "PLK1", "EMPTY_control", "PLK1", "PLK1"], [2], [7]),
        (["PLK1"] * 5, [40], []),  # a negative control elsewhere says nothing of this column
    ],
)
def test_a_column_given_to_a_toxic_control_is_no_dispenser_failure(labels, negative, found):
    column = np.r_[np.full(6, 7), 8 + np.arange(64) // 2]
    count = np.full(70, 30.0)
    count[:5] = 2
    # the sixth well of the column is not low and makes nothing mixed
    perturbation = np.array([*labels, "HCK", *(f"GENE{i}" for i in range(64))])
    control = np.isin(np.arange(70), negative)
    assert plate_stats.blocked_columns(count, column, perturbation, control) == found


def test_toxic_positive_controls_in_one_plate_column_pass():
    obs, measures, X = make_wells()
    toxic = np.flatnonzero((obs[schema.PERTURBATION] == "PLK1") & (obs[schema.PLATE_ID] == "exp-1_1"))
    obs.loc[obs.index[toxic], schema.COLUMN] = 48
    obs.loc[obs.index[toxic], schema.CELL_COUNT] = 5.0
    wells, plates = run.assess(obs, measures, X, CONFIG)
    assert wells[schema.QC_PASS].all() and (plates["flags"] == "").all()


def test_plate_without_controls_gets_reasons_instead_of_limits():
    obs, measures, X = make_wells(n_plates=1, n_negative=0)
    measures.iloc[0, measures.columns.get_loc("c1_saturated")] = 0.5
    wells, plates = run.assess(obs, measures, X, CONFIG)
    assert plates.loc[0, "flags"] == "no_limits"
    assert "no focus limit: 0 negative controls" in plates.loc[0, "reasons"]
    assert plates.loc[0, "count_control_median"] is pd.NA and plates.loc[0, "zprime_count"] is pd.NA
    assert names(wells, 0, schema.QC_ACQUISITION) == ["saturation"]  # an absolute limit needs no controls
    assert wells[schema.QC_PASS].sum() == len(wells) - 1


def test_limits_follow_the_config():
    obs, measures, X = make_wells()
    i = queries(obs)[0]
    measures.loc[measures.index[i], "c1_saturated"] = 0.2
    loose = configuration.resolve({"run": "t", "source": "demo", "qc": {"max_saturated_share": 0.5}})
    assert not run.assess(obs, measures, X, CONFIG)[0][schema.QC_PASS].iloc[i]
    assert run.assess(obs, measures, X, loose)[0][schema.QC_PASS].iloc[i]


def test_wells_are_judged_alike_in_any_order():
    obs, measures, X = make_wells()
    measures.iloc[3, measures.columns.get_loc("c1_saturated")] = 0.5
    order = np.random.default_rng(2).permutation(len(obs))
    wells, _ = run.assess(obs, measures, X, CONFIG)
    again, _ = run.assess(obs.iloc[order], measures.iloc[order], X[order], CONFIG)
    pd.testing.assert_frame_equal(again, wells.iloc[order].reset_index(drop=True))


def test_run_qc_writes_both_tables(tmp_path):
    import anndata

    obs, measures, X = make_wells(n_plates=2)
    adata = anndata.AnnData(X, obs=obs, obsm={schema.IMAGE_MEASURES: measures})
    adata.uns[schema.UNS] = dict.fromkeys(schema.UNS_KEYS, "x")
    adata.write_h5ad(tmp_path / "embeddings.h5ad")
    run.run_qc(tmp_path / "embeddings.h5ad", tmp_path / "wells.parquet", tmp_path / "plates.parquet", CONFIG)
    wells, plates = pd.read_parquet(tmp_path / "wells.parquet"), pd.read_parquet(tmp_path / "plates.parquet")
    assert list(wells.columns) == [schema.WELL_ID, *schema.QC_COLUMNS, schema.CONTROL_DISTANCE]
    assert list(plates[schema.PLATE_ID]) == ["exp-1_1", "exp-1_2"]
    assert plates["edge_effect_percent"].isna().all() and plates["reasons"].str.contains("no edge effect").all()


def test_importing_qc_loads_no_torch():
    code = "import sys, phenoica.qc.run; assert not {'torch', 'scanpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_profiles_without_images_get_no_acquisition_flag_and_no_made_up_number():
    obs, _, X = make_wells()
    far = queries(obs)[0]
    X[far] += 20
    obs = obs.drop(columns=[schema.N_TILES, schema.CELL_COUNT])
    wells, plates = run.assess(obs, None, X, CONFIG)
    assert wells[schema.QC_PASS].all() and (wells[schema.QC_ACQUISITION] == "").all()
    assert names(wells, far, schema.QC_PHENOTYPE) == ["distance"]
    assert (plates["not_measured"] == "image_measures;cell_count").all()
    assert (plates["flags"] == "").all()  # what was never measured is no fault of the plate
    for column in ("count_median", "count_control_median", "focus_shift", "zprime_count", "edge_effect_percent"):
        assert plates[column].isna().all(), column
    assert not plates["reasons"].str.contains("count|focus|edge").any()
    assert plates["zprime_distance"].notna().all()
    assert not any(c.startswith("c1_") for c in plates.columns)


def test_counts_that_profiles_bring_are_used_where_they_are_known():
    obs, _, X = make_wells()
    low, unknown = queries(obs)[:2]
    obs.loc[obs.index[[low, unknown]], schema.CELL_COUNT] = [5.0, np.nan]
    wells, plates = run.assess(obs.drop(columns=schema.N_TILES), None, X, CONFIG)
    assert names(wells, low, schema.QC_PHENOTYPE) == ["count"]
    assert names(wells, unknown, schema.QC_PHENOTYPE) == [] and wells[schema.QC_PASS].all()
    assert (plates["not_measured"] == "image_measures").all() and plates["count_median"].notna().all()


def test_the_distance_of_every_well_is_kept_and_null_where_it_is_not_known():
    obs, _, X = make_wells(n_plates=2)
    second = (obs[schema.PLATE_ID] == "exp-1_2").to_numpy()
    obs.loc[second & (obs[schema.CONTROL_ROLE] == "fit").to_numpy(), schema.CONTROL_ROLE] = "reference"
    wells, plates = run.assess(obs.drop(columns=[schema.N_TILES, schema.CELL_COUNT]), None, X, CONFIG)
    assert (
        wells.loc[~second, schema.CONTROL_DISTANCE].gt(0).all()
        and wells.loc[second, schema.CONTROL_DISTANCE].isna().all()
    )
    assert list(plates["flags"]) == ["", "no_limits"]
