import json
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import pytest

from phenoica import schema
from phenoica.disentangle.run import fit_fold
from phenoica.errors import SchemaError, ScoreError
from phenoica.files import write_csv, write_h5ad, write_parquet
from phenoica.score import run, score
from phenoica.score.contrasts import POSITIVE, QUERY

FOLDS = pd.DataFrame({schema.EXPERIMENT: [f"gene-{e:03d}" for e in range(4)], schema.FOLD: [0, 1, 2, 2]})


@pytest.fixture(autouse=True)
def few_wells():
    """The screens here are small; that ICA says so is tested where ICA is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ica: .* fewer than 10 k")
        yield


def write_inputs(folder, adata):
    folder.mkdir(exist_ok=True)
    obs = adata.obs[list(schema.QC_COLUMNS)].reset_index()
    write_parquet(folder / "qc.parquet", obs)
    write_csv(folder / "folds.csv", FOLDS)
    write_h5ad(folder / "embeddings.h5ad", adata)


def fold_job(folder, fold, config, truth=None, *, fit=True):
    """Run the two jobs of a fold as the workflow does."""
    inputs = folder / "embeddings.h5ad", folder / "qc.parquet", folder / "folds.csv"
    if fit:
        fit_fold(*inputs, fold, folder / f"fold-{fold}", config)
    out = folder / f"score-{fold}.parquet", folder / f"score-{fold}.json"
    run.score_fold(*inputs, folder / f"fold-{fold}", fold, *out, config, truth=truth)
    return out


def view_job(folder, fold, config):
    """Run the job of a fold's views, whose states are there."""
    inputs = folder / "embeddings.h5ad", folder / "qc.parquet", folder / "folds.csv"
    out = folder / f"views-{fold}.parquet"
    out_deletion, out_json = folder / f"deletion-{fold}.parquet", folder / f"views-{fold}.json"
    run.score_views(*inputs, folder / f"fold-{fold}", fold, out, out_deletion, out_json, config)
    return out


@pytest.fixture(scope="module")
def finished(screen, settings, truth, tmp_path_factory):
    """All folds of a screen of four experiments, scored from files."""
    folder = tmp_path_factory.mktemp("score")
    adata, config = screen(n_experiments=4, n_genes=4, lonely=True, effect=3.0), settings()
    write_inputs(folder, adata)
    write_parquet(folder / "truth.parquet", truth(adata))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ica: .* fewer than 10 k")
        done = [fold_job(folder, k, config, folder / "truth.parquet") for k in range(3)]
    tables, records = zip(*done, strict=True)
    of_views = [view_job(folder, k, config) for k in range(3)]
    outputs = [folder / name for name in ("scores.parquet", "scores.csv", "scores.txt")]
    run.summarise(tables, records, *outputs, config, view_parquets=of_views)
    return folder, adata, config, tables, records


@pytest.fixture(scope="module")
def scores(finished):
    return pd.read_parquet(finished[0] / "scores.parquet")


def pick(scores, fold=-1, view_minus=None, draw=None, **where):
    rows = scores[(scores["fold"] == fold)]
    rows = rows[rows["view_minus"].isna() if view_minus is None else rows["view_minus"] == view_minus]
    rows = rows[rows["draw"].isna() if draw is None else rows["draw"] == draw]
    where = {"metric": "auroc", "probe": "l1", "scope": "pooled", **where}
    for name, value in where.items():
        rows = rows[rows[name] == value]
    return rows


def test_the_table_has_exactly_the_schema(scores, finished):
    assert tuple(scores.columns) == schema.SCORE_COLUMNS
    assert set(scores["scope"]) <= set(schema.SCOPES) and set(scores["test_data_used"]) <= set(schema.TEST_DATA_USED)
    assert set(scores["fold"]) == {-1, 0, 1, 2}
    assert not scores.duplicated([c for c in schema.SCORE_COLUMNS if c not in ("value", "ci_low", "ci_high")]).any()
    assert (scores["value"].notna() | scores["reason"].notna()).all()
    limits = scores[scores["ci_low"].notna()]
    assert ((limits["ci_low"] <= limits["value"] + 1e-9) & (limits["value"] <= limits["ci_high"] + 1e-9)).all()
    csv = pd.read_csv(finished[0] / "scores.csv")
    assert tuple(csv.columns) == schema.SCORE_COLUMNS and len(csv) == len(scores)


def test_every_row_that_must_be_beaten_is_there(scores):
    views = set(scores["view"])
    assert {"raw", "centerscale", "pca", "rotation", "ica", "tvn", "pca_cs", "position_linear", "cell_count",
            "true_cell_count", "image_measures", "permuted", "position_trees"} <= views  # fmt: skip
    used = (
        scores[scores["view_minus"].isna() & (scores["metric"] == "auroc")].groupby("view")["test_data_used"].agg(set)
    )
    assert used["ica"] == {"none"} and used["tvn"] == {"controls"}
    probed = scores[(scores["view"] == "rotation") & (scores["probe"] == "l1")]["draw"].dropna()
    ranked = scores[(scores["view"] == "rotation") & (scores["metric"] == "concentration_share")]["draw"].dropna()
    assert set(probed) == {0, 1} and set(ranked) == {0, 1, 2, 3}


def test_a_planted_signal_is_found_and_nothing_else(scores):
    for view in ("raw", "pca", "ica"):
        for name in ("PLK1", "MTOR"):
            assert pick(scores, contrast=POSITIVE, perturbation=name, view=view)["value"].item() > 0.75
        assert pick(scores, contrast=QUERY, perturbation="GENE0", view=view)["value"].item() > 0.7
        for name in ("GENE1", "GENE3"):  # 16 cases in two experiments: the standard error is near .08
            assert 0.2 < pick(scores, contrast=QUERY, perturbation=name, view=view)["value"].item() < 0.8
    for view in ("position_linear", "permuted"):
        assert 0.25 < pick(scores, contrast=POSITIVE, perturbation="PLK1", view=view)["value"].item() < 0.75


def test_values_over_folds_are_pair_weighted_means(scores):
    found = pick(scores, contrast=POSITIVE, perturbation="PLK1", view="ica")
    parts = pd.concat([pick(scores, fold=k, contrast=POSITIVE, perturbation="PLK1", view="ica") for k in range(3)])
    weights = (parts["n_case"] * parts["n_reference"]).astype(float)
    assert found["value"].item() == pytest.approx((parts["value"] * weights).sum() / weights.sum())
    assert found["ci_kind"].item() == "t over folds" and found["n_experiments"].item() == 4
    few = pick(scores, contrast=QUERY, perturbation="GENE0", view="ica")
    assert few["ci_kind"].item() == "within these experiments" and few["n_experiments"].item() == 2


def test_macro_weighs_perturbations_alike_and_differences_are_paired(scores):
    genes = [pick(scores, contrast=QUERY, perturbation=f"GENE{g}", view="ica")["value"] for g in range(4)]
    tested = [g.item() for g in genes if g.notna().item()]
    macro = pick(scores, contrast=QUERY, perturbation="macro", view="ica")["value"].item()
    assert macro == pytest.approx(np.mean(tested))
    pca = pick(scores, contrast=QUERY, perturbation="macro", view="pca")["value"].item()
    less = pick(scores, contrast=QUERY, perturbation="macro", view="ica", view_minus="pca")
    assert less["value"].item() == pytest.approx(macro - pca)
    draws = [pick(scores, contrast=POSITIVE, perturbation="PLK1", view="rotation", draw=d)["value"] for d in (0, 1)]
    mean = pick(scores, contrast=POSITIVE, perturbation="PLK1", view="rotation")["value"].item()
    assert mean == pytest.approx(np.mean([d.item() for d in draws]))


def test_a_perturbation_in_one_experiment_has_a_row_with_its_reason(scores, finished):
    found = pick(scores, contrast=QUERY, perturbation="LONELY", view="ica")
    assert found["value"].isna().all() and found["reason"].tolist() == ["one_experiment"]
    same = pick(scores, contrast=QUERY, perturbation="GENE2", view="ica")  # both its experiments are in fold 2
    assert same["reason"].tolist() == ["same_fold"]
    text = (finished[0] / "scores.txt").read_text()
    assert "LONELY (in one experiment only" in text and "GENE2" in text


def test_the_l2_control_holds_and_the_text_says_so(scores, finished):
    rows = scores[(scores["contrast"] == "l2_control") & (scores["fold"] == -1)].set_index("metric")["value"]
    assert rows["holds"] == 1 and rows["max_decision_difference"] <= 1e-6 and rows["max_auroc_difference"] <= 1e-4
    text = (finished[0] / "scores.txt").read_text()
    assert "L2 control (pca+rotation+varimax+ica): holds" in text
    assert "Verdict: ICA" in text and "ica minus" in text
    assert "RED" not in text


def test_a_scaled_axis_turns_the_l2_control_red(finished, tmp_path):
    folder, _, config, tables, records = finished
    broken = tmp_path / "fold-0"
    shutil.copytree(folder / "fold-0", broken)
    state = dict(np.load(broken / "ica" / "state.npz"))
    state["rotation_"] = state["rotation_"] * np.r_[2.0, np.ones(len(state["rotation_"]) - 1)]  # one axis by 2
    np.savez(broken / "ica" / "state.npz", **state)
    inputs = folder / "embeddings.h5ad", folder / "qc.parquet", folder / "folds.csv"
    run.score_fold(*inputs, broken, 0, tmp_path / "a.parquet", tmp_path / "a.json", config)
    outputs = [tmp_path / name for name in ("s.parquet", "s.csv", "s.txt")]
    tables, records = [tmp_path / "a.parquet", *tables[1:]], [tmp_path / "a.json", *records[1:]]
    run.summarise(tables, records, *outputs, config)  # the other two folds hold
    assert "): RED" in outputs[2].read_text()
    found = pd.read_parquet(outputs[0])
    holds = found[(found["contrast"] == "l2_control") & (found["metric"] == "holds")].set_index("fold")["value"]
    assert holds.to_dict() == {0: 0.0, 1: 1.0, 2: 1.0, -1: 0.0}


@pytest.fixture(scope="module")
def encoders(screen, settings):
    """A screen whose X shows what was planted; its random encoder shows noise. And the same, exchanged."""
    trained = screen(n_experiments=6, n_genes=2, effect=4.0)
    noise = np.random.default_rng(5).standard_normal(trained.shape).astype(np.float32)
    trained.obsm[schema.RANDOM_ENCODER] = noise
    exchanged = trained.copy()
    exchanged.X, exchanged.obsm[schema.RANDOM_ENCODER] = noise, trained.X.copy()
    config = settings(disentangle={"views": ["raw"]})
    return [score(adata, config) for adata in (trained, exchanged)]


@pytest.mark.parametrize(("place", "sign"), [(0, 1), (1, -1)])
def test_a_planted_difference_of_encoders_has_its_sign_and_its_interval(encoders, place, sign):
    """Also when the trained encoder is the worse one."""
    scores = encoders[place]
    where = {"perturbation": "macro", "view": "raw", "view_minus": "random_encoder"}
    positive = pick(scores, contrast=POSITIVE, **where).iloc[0]
    assert sign * positive["value"] > 0.2
    assert (positive["ci_low"] > 0) if sign > 0 else (positive["ci_high"] < 0)
    assert positive["ci_kind"] == "t over folds"
    for name in ("PLK1", "MTOR"):
        raw, untrained = (
            pick(scores, contrast=POSITIVE, perturbation=name, view=view)["value"].item()
            for view in ("raw", "random_encoder")
        )
        less = pick(scores, contrast=POSITIVE, perturbation=name, view="raw", view_minus="random_encoder")
        assert less["value"].item() == pytest.approx(raw - untrained)
    assert set(scores[scores["view"] == "random_encoder"]["test_data_used"]) == {"none"}


def test_flagged_wells_leave_the_random_encoder_too(screen, settings):
    adata = screen(n_experiments=4, n_plates=1, n_genes=2)
    adata.obsm[schema.RANDOM_ENCODER] = np.ones(adata.shape, np.float32)
    adata.obs.iloc[:5, adata.obs.columns.get_loc(schema.QC_PASS)] = False
    adata.obsm[schema.RANDOM_ENCODER][:, 0] = np.arange(adata.n_obs)
    kept = run._Wells(adata, FOLDS, settings(qc={"exclude_flagged": True})).random_encoder
    assert kept[:, 0].tolist() == list(range(5, adata.n_obs)) and kept.dtype == np.float64


def test_sparsity_and_concentration(scores):
    hoyer = scores[(scores["metric"] == "hoyer") & (scores["fold"] == 0)]
    assert set(hoyer["view"]) == {"pca", "rotation", "varimax", "ica", "tvn", "pca_cs"}  # views of one width
    assert hoyer["value"].dropna().between(0, 1).all()
    share = scores[(scores["metric"] == "concentration_share") & (scores["fold"] == -1)].set_index("view")["value"]
    assert (
        set(share.index) == {"pca", "rotation", "varimax", "ica"} and share["ica"] > 0.5
    )  # two planted sources of eight


@pytest.mark.parametrize("kind", ["noise", "extremes"])
def test_held_out_wells_cannot_touch_what_training_decides(finished, tmp_path, kind):
    _, adata, config, _, records = finished
    held_out = (adata.obs[schema.EXPERIMENT] == "gene-001").to_numpy()
    replaced, rng = adata.copy(), np.random.default_rng(0)
    noise = rng.standard_normal((held_out.sum(), adata.n_vars))
    replaced.X[held_out] = noise if kind == "noise" else np.where(noise > 0, 1e30, -1e30)
    replaced.obs.loc[held_out, schema.CELL_COUNT] = 0.0
    replaced.obsm[schema.IMAGE_MEASURES].loc[held_out] = 1e12
    write_inputs(tmp_path, replaced)
    record = fold_job(tmp_path, 1, config, finished[0] / "truth.parquet")[1]
    assert record.read_bytes() == records[1].read_bytes()
    decided = json.loads(record.read_text())
    assert decided["fractions"]["ica"]["rule"] == "everywhere"
    assert sorted(decided["ranking"]["ica"]["biology"]) == list(range(8))
    assert decided["probes"]["ica"][f"{POSITIVE}/PLK1"]["lambda"] > 0


def test_missing_values_give_a_reason(finished, tmp_path, screen):
    _, adata, config, _, _ = finished
    damaged = adata.copy()
    damaged.obs.loc[damaged.obs[schema.PERTURBATION] == "MTOR", schema.CELL_COUNT] = np.nan
    write_inputs(tmp_path, damaged)
    frame = pd.read_parquet(fold_job(tmp_path, 0, config)[0])
    rows = frame[(frame["view"] == "cell_count") & (frame["contrast"] == POSITIVE)].set_index("perturbation")
    assert set(rows.loc["MTOR", "reason"]) == {"missing_values"} and rows.loc["MTOR", "value"].isna().all()
    assert rows.loc["PLK1", "value"].notna().all()


def test_flagged_wells_leave_the_scores_when_asked(finished, tmp_path, settings):
    _, adata, _, _, _ = finished
    flagged = adata.copy()
    plk1 = (flagged.obs[schema.PERTURBATION] == "PLK1") & (flagged.obs[schema.PLATE] == "1")
    flagged.obs.loc[plk1, schema.QC_PASS] = False
    write_inputs(tmp_path, flagged)
    for exclude, count in ((False, 8), (True, 4)):
        config = settings(qc={"exclude_flagged": exclude}, disentangle={"views": ["pca"], "n_components": 4})
        frame = pd.read_parquet(fold_job(tmp_path, 0, config)[0])
        rows = frame[(frame["perturbation"] == "PLK1") & (frame["contrast"] == POSITIVE)]
        assert set(rows["n_case"]) == {count}


def test_in_memory_equals_the_jobs(finished, scores, monkeypatch):
    _, adata, config, _, _ = finished
    import phenoica.plates.folds

    monkeypatch.setattr(phenoica.plates.folds, "assign_folds", lambda obs, config: FOLDS)
    before = adata.X.copy()
    found = score(adata, config, truth=finished[0] / "truth.parquet")
    assert (before == adata.X).all()
    pd.testing.assert_frame_equal(found, run.table(scores.to_dict("records"), schema.SCORE_COLUMNS), rtol=1e-9)


def test_views_of_another_fold_are_refused(finished):
    folder, _, config, _, _ = finished
    inputs = folder / "embeddings.h5ad", folder / "qc.parquet", folder / "folds.csv"
    with pytest.raises(SchemaError, match="gene-000.*does not train on"):
        run.score_fold(*inputs, folder / "fold-1", 0, folder / "x.parquet", folder / "x.json", config)
    assert not (folder / "x.parquet").exists()


def test_summaries_need_their_records(finished, tmp_path):
    _, _, config, tables, records = finished
    out = [tmp_path / name for name in ("s.parquet", "s.csv", "s.txt")]
    with pytest.raises(ScoreError, match="one of each"):
        run.summarise(tables, records[:2], *out, config)
    with pytest.raises(ScoreError, match="one order"):
        run.summarise(tables, records[::-1], *out, config)


def test_missing_truth_and_single_experiments_are_named(screen, settings, tmp_path):
    adata = screen(n_experiments=2, n_plates=1)
    with pytest.raises(ScoreError, match="no such table"):
        score(adata, settings(), truth=tmp_path / "no.csv")
    with pytest.raises(ScoreError, match="two experiments"):
        score(adata[adata.obs[schema.EXPERIMENT] == "gene-000"].copy(), settings())
    adata.X[3, 0] = np.nan
    with pytest.raises(SchemaError, match=adata.obs_names[3]):
        score(adata, settings())


def test_importing_score_is_light():
    code = "import sys, phenoica.score; print([m for m in ('torch', 'scanpy', 'sklearn') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
