"""The scores of whole views: a fold in memory with known answers, then the jobs from files."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest
from scipy.stats import combine_pvalues

from phenoica import schema
from phenoica.disentangle.components import reference_omega2
from phenoica.disentangle.run import fit_fold, fit_views
from phenoica.errors import ScoreError
from phenoica.files import write_csv, write_h5ad, write_parquet
from phenoica.score import deletion, names, run, view_scores
from phenoica.score.baselines import Features
from phenoica.score.contrasts import POSITIVE, QUERY, REASONS
from phenoica.score.fold import FoldScorer
from phenoica.score.metrics import auroc
from phenoica.score.rows import table
from phenoica.score.view_scores import DECODING_CONTRAST, DELETION_CONTRAST, ViewScorer

FOLDS = pd.DataFrame({schema.EXPERIMENT: [f"gene-{e:03d}" for e in range(6)], schema.FOLD: [0, 0, 0, 1, 1, 1]})


@pytest.fixture(autouse=True)
def few_wells():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ica: .* fewer than 10 k")
        yield


@pytest.fixture(scope="module")
def fold(screen, settings):
    """Fold 1 of a screen whose PLK1 and GENE0 are strong; a gene in one experiment only is there too."""
    adata = screen(n_experiments=6, n_genes=6, effect=3.0, batch=2.0, lonely=True)
    config = settings(score={"relabellings": 49})
    folds = adata.obs[schema.EXPERIMENT].map(FOLDS.set_index(schema.EXPERIMENT)[schema.FOLD]).to_numpy()
    X, train = np.asarray(adata.X, np.float64), folds != 1
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ica: .* fewer than 10 k")
        views = fit_views(X[train], adata.obs[train], config)
    features = run.view_features(views, X, adata.obs)
    scorer = FoldScorer(adata.obs, folds, 1, config)
    return scorer, features, *ViewScorer(scorer, features).score()


def pick(rows, **where):
    for name, value in where.items():
        rows = rows[rows[name].isna() if value is None else rows[name] == value]
    return rows


def test_every_row_has_a_value_or_a_reason_in_words(fold):
    _, _, rows, points, _ = fold
    for frame in (rows, points):
        assert (frame["value"].notna() | frame["reason"].notna()).all()
        assert {r for text in frame["reason"].dropna() for r in text.split(";")} <= set(REASONS)
    assert not rows.duplicated([c for c in schema.SCORE_COLUMNS if c != "value"]).any()
    assert tuple(rows.columns) == schema.SCORE_COLUMNS and set(rows["fold"]) == {1}
    assert set(rows["scope"]) <= set(schema.SCOPES)


def test_a_planted_phenotype_is_consistent_and_strong_and_the_rest_is_not(fold):
    _, _, rows, _, _ = fold
    for view in ("raw", "centerscale", "pca", "ica", "tvn", "pca_cs"):
        strong = pick(rows, contrast=POSITIVE, perturbation="PLK1", view=view).set_index("metric")["value"]
        assert strong["consistency_p"] == strong["magnitude_p"] == 1 / 50
        assert strong["consistency"] > strong["consistency_chance"]
        assert strong["map_same_experiment_normalised"] > 0.1 and strong["map_cross_experiment_normalised"] > 0.1
        assert strong["map_same_experiment_singletons"] == 0
    p = pick(rows, contrast=QUERY, metric="consistency_p", view="ica")
    assert p.loc[p["perturbation"].isin(["GENE3", "GENE4"]), "value"].gt(1 / 50).all()  # they do nothing


def test_what_reads_fit_controls_says_so_and_a_rotation_is_not_scored_twice(fold):
    _, _, rows, _, _ = fold
    assert set(pick(rows, metric="consistency")["test_data_used"]) == {"controls"}  # centred on them
    assert set(pick(rows, metric="auroc_best_1", view="ica")["test_data_used"]) == {"none"}
    assert "rotation" not in set(pick(rows, metric="consistency")["view"])
    for metric in names.REPLICATES:  # no angle and no distance changes: one number, reached in two bases
        one, other = (pick(rows, metric=metric, view=v).sort_values("perturbation")["value"] for v in ("pca", "ica"))
        np.testing.assert_allclose(one.to_numpy(float), other.to_numpy(float), atol=1e-6)
    decoded = pick(rows, contrast=DECODING_CONTRAST, metric=names.DECODING, scope="pooled").set_index("view")["value"]
    assert decoded["pca"] == decoded["ica"] and set(decoded["rotation"]) == {decoded["pca"]}
    assert decoded["pca"] > 0.6 and decoded["centerscale"] < decoded["pca"]  # batches differ in this screen


def test_best_components_have_a_row_for_every_contrast(fold):
    scorer, features, rows, _, decided = fold
    one = pick(rows, metric="auroc_best_1", view="pca")
    assert len(one) == len(scorer.splits)
    strong = pick(one, contrast=POSITIVE, perturbation="PLK1")["value"].item()
    values = next(f for f in features if f.key == "pca").values
    chosen = decided["best_components"]["pca"][f"{POSITIVE}/PLK1"][0]
    part = next(p for c, p in scorer.splits if (c.name, c.perturbation) == (POSITIVE, "PLK1"))
    alone = values[part.test, chosen]
    assert strong == pytest.approx(max(auroc(part.test_labels, alone), auroc(part.test_labels, -alone)))


def test_the_deletion_curve_ranks_in_training_and_its_areas_are_in_the_table(fold):
    scorer, features, rows, points, decided = fold
    values = next(f for f in features if f.key == "ica").values[scorer.train]
    omega2 = reference_omega2(values, scorer.obs[scorer.train], schema.EXPERIMENT)
    assert decided["deletion"]["order"]["ica"] == np.argsort(-omega2, kind="stable").tolist()
    wide = [f"cutting_vs_reference/{g}_guide_1" for g in ("HCK", "SRC")] + [f"{POSITIVE}/{g}" for g in ("MTOR", "PLK1")]
    assert decided["deletion"]["contrasts"][:4] == wide  # in all training experiments; then those in one
    curve = pick(points, view="ica", metric="auroc")
    assert curve["n_deleted"].tolist() == [0, 1, 2, 4, 6] and curve["value"].notna().all()
    start = pick(points, metric="auroc", n_deleted=0)
    assert set(start["view"]) == {"pca", "rotation", "varimax", "ica"} and np.ptp(start["value"]) < 1e-4  # one point
    assert set(pick(points, view="rotation")["draw"].dropna()) == {0, 1, 2, 3}  # all draws, not only the probed
    areas = pick(rows, contrast=DELETION_CONTRAST, view="ica", view_minus="rotation").set_index("metric")["value"]
    for metric in deletion.AREAS:
        own = [deletion.areas(points[(points["view"] == "rotation") & (points["draw"] == d)])[metric] for d in range(4)]
        ica = deletion.areas(points[points["view"] == "ica"])[metric]
        assert areas[metric] == pytest.approx(ica - np.mean(own), abs=1e-12)


def test_a_perturbation_in_one_experiment_is_measured_though_no_probe_can_be(fold, screen, settings):
    adata = screen(n_experiments=4, n_genes=4, lonely=True, effect=3.0)
    folds = (np.unique(adata.obs[schema.EXPERIMENT], return_inverse=True)[1] >= 2).astype(int)  # LONELY in fold 0
    values = np.asarray(adata.X, np.float64)
    scorer = FoldScorer(adata.obs, folds, 0, settings(score={"relabellings": 19}))
    rows = ViewScorer(scorer, [Features("raw", values)]).score()[0]
    lonely = pick(rows, perturbation="LONELY").set_index("metric")
    assert lonely.loc["auroc_best_1", "reason"] == "one_experiment"
    assert np.isfinite(lonely.loc["consistency", "value"]) and np.isfinite(lonely.loc["magnitude_p", "value"])
    assert lonely.loc["map_cross_experiment", "reason"] == "no_cross_experiment_pairs"
    assert lonely.loc["map_cross_experiment_singletons", "value"] == lonely.loc["consistency", "n_case"] == 8
    gain = pick(rows, contrast=DELETION_CONTRAST, metric=names.DELETION_GAIN)["reason"].tolist()
    assert gain == ["no_rotated_view"]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [("one well", "singleton"), ("no reference", "no_reference_on_plate"), ("no fit control", "no_fit_controls")],
)
def test_what_cannot_be_measured_has_its_reason(screen, settings, broken, reason):
    adata = screen(n_experiments=4, n_genes=0)
    obs, held_out = adata.obs.copy(), adata.obs[schema.EXPERIMENT].isin(["gene-002", "gene-003"])
    keep = np.ones(len(obs), bool)
    if broken == "one well":
        plk1 = held_out & (obs[schema.PERTURBATION] == "PLK1")
        keep[np.flatnonzero(plk1)[1:]] = False
    else:
        role = schema.REFERENCE if broken == "no reference" else schema.FIT
        lost = held_out & (obs[schema.CONTROL_ROLE] == role)
        keep = ~lost.to_numpy()
    obs, values = obs[keep], np.asarray(adata.X, np.float64)[keep]
    folds = obs[schema.EXPERIMENT].isin(["gene-002", "gene-003"]).to_numpy().astype(int)
    scorer = FoldScorer(obs, folds, 1, settings(score={"relabellings": 19}))
    rows = ViewScorer(scorer, [Features("raw", values)]).score()[0]
    found = pick(rows, perturbation="PLK1", metric="consistency")
    assert found["value"].isna().all() and set(found["reason"]) == {reason}


def test_few_components_and_single_batches_have_reasons(screen, settings):
    adata = screen(n_experiments=2, n_genes=0)
    folds = np.unique(adata.obs[schema.EXPERIMENT], return_inverse=True)[1]
    values = np.asarray(adata.X, np.float64)[:, :3]
    scorer = FoldScorer(adata.obs, folds, 1, settings(score={"relabellings": 19}))
    rows, points, decided = ViewScorer(scorer, [Features("pca", values)]).score()
    assert set(pick(rows, metric="auroc_best_4")["reason"]) == {"few_components"}
    assert pick(rows, metric="auroc_best_2")["value"].notna().any()
    assert set(pick(rows, metric=names.DECODING)["reason"]) == {"one_test_batch"}
    gain = pick(rows, contrast=DELETION_CONTRAST, metric=names.DELETION_GAIN)
    assert gain["reason"].tolist() == ["one_batch"] and decided["deletion"]["order"] == {}
    assert points["metric"].isin(deletion.AREAS).all()


def rows_of(values, metric, fold_experiments=2, contrast="c", perturbations=("A", "B")):
    return [
        {"contrast": contrast, "perturbation": p, "view": "ica", "test_data_used": "none", "probe": "none",
         "metric": metric, "scope": "pooled", "n_components": 4, "value": v, "n_case": 2 + i, "n_reference": 10,
         "n_experiments": fold_experiments, "reason": None if v is not None else "singleton"}
        for i, (p, v) in enumerate(zip(perturbations, values, strict=True))
    ]  # fmt: skip


def joined(*folds):
    tables = [table([{**row, "fold": k} for row in rows], schema.SCORE_COLUMNS) for k, rows in enumerate(folds)]
    scores = view_scores.over_folds(tables, 0.95)
    return scores[scores["fold"] == -1].set_index("perturbation")


def test_over_folds_perturbations_weigh_alike_and_intervals_are_of_folds():
    found = joined(rows_of([0.1, 0.5], names.CONSISTENCY), rows_of([0.3, None], names.CONSISTENCY))
    assert found.loc["A", "value"] == pytest.approx(0.2) and found.loc["A", "ci_kind"] == "t over folds"
    assert found.loc["B", "value"] == 0.5 and found.loc["B", "reason"] == "singleton;under_4_experiments"
    assert found.loc["macro", "value"] == pytest.approx((0.2 + 0.5) / 2)  # of perturbations, not of folds
    # fold means .3 and .3: no spread
    assert found.loc["macro", "reason"] == "zero_variance"


def test_over_folds_p_values_are_combined_counts_summed_and_auroc_weighed_by_pairs():
    p = joined(rows_of([0.1, 0.5], names.CONSISTENCY_P), rows_of([0.2, 0.9], names.CONSISTENCY_P))
    assert p.loc["A", "value"] == pytest.approx(combine_pvalues([0.1, 0.2]).pvalue) and "macro" not in p.index
    assert p["ci_low"].isna().all()
    counts = joined(rows_of([3, 4], names.MAP_SAME_SINGLETONS), rows_of([1, 0], names.MAP_SAME_SINGLETONS))
    assert counts["value"].to_dict() == {"A": 4, "B": 4, "macro": 8}
    metric = names.best_components(2)
    first, second = rows_of([0.6, 0.6], metric), rows_of([0.8, 0.8], metric)
    first[0]["n_case"] = 6
    assert joined(first, second).loc["A", "value"] == pytest.approx((60 * 0.6 + 20 * 0.8) / 80)


@pytest.fixture(scope="module")
def jobs(screen, settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("views")
    adata = screen(n_experiments=6, n_genes=3, effect=3.0)
    config = settings(score={"relabellings": 19, "deletion": {"shares": [0.5], "max_contrasts": 2}})
    write_inputs(folder, adata)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ica: .* fewer than 10 k")
        for k in (0, 1):
            job(folder, k, config)
    return folder, adata, config


def write_inputs(folder, adata):
    folder.mkdir(exist_ok=True)
    write_parquet(folder / "qc.parquet", adata.obs[list(schema.QC_COLUMNS)].reset_index())
    write_csv(folder / "folds.csv", FOLDS)
    write_h5ad(folder / "embeddings.h5ad", adata.copy())


def job(folder, fold, config):
    inputs = folder / "embeddings.h5ad", folder / "qc.parquet", folder / "folds.csv"
    fit_fold(*inputs, fold, folder / f"fold-{fold}", config)
    out = [folder / f"views-{fold}.parquet", folder / f"deletion-{fold}.parquet", folder / f"views-{fold}.json"]
    run.score_views(*inputs, folder / f"fold-{fold}", fold, *out, config)
    return out


def test_held_out_wells_cannot_touch_what_training_decides(jobs, tmp_path):
    folder, adata, config = jobs
    held_out = (adata.obs[schema.EXPERIMENT] >= "gene-003").to_numpy()
    replaced = adata.copy()
    replaced.X[held_out] = np.random.default_rng(0).standard_normal((held_out.sum(), adata.n_vars)) * 100
    write_inputs(tmp_path, replaced)
    job(tmp_path, 1, config)
    assert (tmp_path / "views-1.json").read_bytes() == (folder / "views-1.json").read_bytes()
    assert (tmp_path / "views-1.parquet").read_bytes() != (folder / "views-1.parquet").read_bytes()
    assert json.loads((folder / "views-1.json").read_text())["deletion"]["contrasts"]


def test_the_same_job_gives_the_same_numbers(jobs, tmp_path):
    folder, adata, config = jobs
    write_inputs(tmp_path, adata)
    job(tmp_path, 0, config)
    for name in ("views-0.parquet", "deletion-0.parquet"):
        pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / name), pd.read_parquet(folder / name))


def test_the_table_of_scores_takes_them_in(jobs, tmp_path):
    folder, _, config = jobs
    inputs = folder / "embeddings.h5ad", folder / "qc.parquet", folder / "folds.csv"
    probes = [tmp_path / f"fold-{k}.parquet" for k in (0, 1)]
    for k, path in enumerate(probes):
        run.score_fold(*inputs, folder / f"fold-{k}", k, path, path.with_suffix(".json"), config)
    outputs = [tmp_path / name for name in ("s.parquet", "s.csv", "s.txt")]
    of_views = [folder / f"views-{k}.parquet" for k in (0, 1)]
    run.summarise(probes, [p.with_suffix(".json") for p in probes], *outputs, config, view_parquets=of_views)
    scores = pd.read_parquet(outputs[0])
    assert tuple(scores.columns) == schema.SCORE_COLUMNS
    assert {names.pattern(m) for m in scores["metric"]} <= set(names.ALL)  # which docs/method.md lists
    assert not scores.duplicated([c for c in schema.SCORE_COLUMNS if c not in ("value", "ci_low", "ci_high")]).any()
    assert {"auroc", "auroc_sd", "average_precision", "gini", "consistency", "map_same_experiment",
            "auroc_best_4", names.DECODING, names.DELETION_GAIN} <= set(scores["metric"])  # fmt: skip
    gain = pick(scores[scores["fold"] == -1], metric=names.DELETION_GAIN, view="ica", view_minus="rotation")
    assert gain["ci_kind"].tolist() == ["t over folds"]
    assert "position_trees" in set(scores["view"]) and "position_trees" in outputs[2].read_text()
    run.summarise_deletion([folder / f"deletion-{k}.parquet" for k in (0, 1)], tmp_path / "d.parquet", config)
    curves = pd.read_parquet(tmp_path / "d.parquet")
    assert tuple(curves.columns) == deletion.COLUMNS and set(curves["fold"]) == {-1, 0, 1}
    area = pick(curves, fold=-1, metric=names.DELETION_GAIN, view="ica", view_minus="rotation")
    assert area["value"].item() == pytest.approx(gain["value"].item())
    assert area["ci_low"].item() == pytest.approx(gain["ci_low"].item())
    with pytest.raises(ScoreError, match="views-9.parquet: no such table"):
        run.summarise(
            probes, [p.with_suffix(".json") for p in probes], *outputs, config,
            view_parquets=[folder / "views-9.parquet"],
        )  # fmt: skip
    with pytest.raises(ScoreError, match="score-views"):
        run.summarise_deletion([], tmp_path / "d.parquet", config)
