import hashlib
import importlib.util
import json
import subprocess
import sys

import anndata
import numpy as np
import pandas as pd
import pytest

from phenoica import schema
from phenoica.disentangle import load_view
from phenoica.disentangle.fitting import components_of, fit_views
from phenoica.disentangle.ica import IcaWarning
from phenoica.disentangle.run import assemble, fit_fold, load_fit, training_experiments
from phenoica.errors import FitError, SchemaError


def hashes(folder):
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*.*")}


def read(stage):
    return np.asarray(anndata.read_h5ad(stage.embeddings).X)


def held_out(stage, fold):
    folds = pd.read_csv(stage.folds)
    return stage.obs["experiment"].isin(folds.loc[folds["fold"] == fold, "experiment"]).to_numpy()


def test_held_out_rows_cannot_change_a_byte(stage, make_config, tmp_path):
    config = make_config()
    fit_fold(stage.embeddings, stage.qc, stage.folds, 1, tmp_path / "a", config)
    expected = hashes(tmp_path / "a")
    files = {"components.parquet", "concentration.parquet", "effects.parquet", "fit.json"}
    assert {"ica/state.npz", "rotation_02/state.npz", *files} <= set(expected)
    X, test = read(stage), held_out(stage, 1)
    assert 0 < test.sum() < len(test)
    rng = np.random.default_rng(5)
    for replacement in (
        rng.standard_normal(X[test].shape),
        np.full(X[test].shape, 3e30),
        np.zeros(X[test].shape),
    ):
        X[test] = replacement
        stage.write(X)
        fit_fold(stage.embeddings, stage.qc, stage.folds, 1, tmp_path / "b", config)
        assert hashes(tmp_path / "b") == expected
    X[~test] *= 1.01  # the check itself notices training rows
    stage.write(X)
    fit_fold(stage.embeddings, stage.qc, stage.folds, 1, tmp_path / "b", config)
    changed = hashes(tmp_path / "b")
    assert changed["pca/state.npz"] != expected["pca/state.npz"]
    assert changed["effects.parquet"] != expected["effects.parquet"]


EVERY_VIEW = [
    "raw", "centerscale", "mad", "spherize", "pca", "rotation", "varimax", "ica", "tvn", "pca_cs", "combat",
    "centerscale + ica", "raw + varimax", *(["harmony"] if importlib.util.find_spec("harmonypy") else []),
]  # fmt: skip


def test_held_out_rows_cannot_change_a_byte_of_any_view_nor_the_width(stage, make_config, tmp_path):
    config = make_config(disentangle={"views": EVERY_VIEW, "n_components": "auto", "sweep": [2, "all"]})
    fit_fold(stage.embeddings, stage.qc, stage.folds, 1, tmp_path / "a", config)
    expected = hashes(tmp_path / "a")
    folders = {name.split("/")[0] for name in expected}
    assert {name.replace(" ", "") for name in EVERY_VIEW if name != "rotation"} < folders
    X, test = read(stage), held_out(stage, 1)
    X[test] = np.random.default_rng(5).standard_normal(X[test].shape) * 1e6
    stage.write(X)
    fit_fold(stage.embeddings, stage.qc, stage.folds, 1, tmp_path / "b", config)
    assert hashes(tmp_path / "b") == expected


def test_the_component_table_reads_mad_in_units_of_training_variance(stage, make_config):
    X, config = read(stage), make_config(disentangle={"views": ["raw", "mad"]})
    table = components_of(fit_views(X, stage.obs, config), X, stage.obs, config)
    raw, mad = (table[table["view"] == name].reset_index(drop=True) for name in ("raw", "mad"))
    for column in ("biology", "batch_omega2", "top_effect", "kurtosis"):
        np.testing.assert_allclose(mad[column], raw[column], rtol=1e-6, atol=1e-9)  # a column is a column
    assert list(mad["label"]) == list(raw["label"])


def test_what_a_fold_writes(stage, make_config, tmp_path):
    config = make_config()
    fit_fold(stage.embeddings, stage.qc, stage.folds, 0, tmp_path / "fold", config)
    views, record = load_fit(tmp_path / "fold")
    assert list(views) == [
        "raw", "centerscale", "pca", "rotation_00", "rotation_01", "rotation_02", "varimax", "ica", "tvn",
        "pca_cs",
    ]  # fmt: skip
    assert record["training_experiments"] == ["gene-001", "gene-002", "gene-004", "gene-005"]
    assert record["n_wells"] == (~held_out(stage, 0)).sum() and record["ica"]["converged"]
    table = pd.read_parquet(tmp_path / "fold" / "components.parquet")
    assert table.groupby("view").size().to_dict() == {
        "raw": 24, "centerscale": 24, "pca": 4, "rotation": 12, "varimax": 4, "ica": 4, "tvn": 4, "pca_cs": 4,
    }  # fmt: skip
    assert sorted(table.loc[table["view"] == "rotation", "draw"].unique()) == [0, 1, 2]
    effects = pd.read_parquet(tmp_path / "fold" / "effects.parquet")
    top = effects.loc[effects.groupby("component")["effect"].apply(lambda e: e.abs().idxmax())].set_index("component")
    ica = table[table["view"] == "ica"].set_index("component")
    np.testing.assert_array_equal(top.loc[ica.index, "effect"], ica["top_effect"])
    np.testing.assert_array_equal(views["ica"].pca_components_, views["pca"].components_)
    np.testing.assert_array_equal(views["rotation_01"].pca_components_, views["pca"].components_)


def test_a_fit_says_over_how_many_components_batch_is_spread(stage, make_config, tmp_path, capsys):
    fit_fold(stage.embeddings, stage.qc, stage.folds, 0, tmp_path / "fold", make_config())
    table = pd.read_parquet(tmp_path / "fold" / "components.parquet")
    frame = pd.read_parquet(tmp_path / "fold" / "concentration.parquet")
    assert frame.groupby("view").size().to_dict() == {"pca": 6, "rotation": 18, "ica": 6, "varimax": 6}
    batch = frame[(frame["quantity"] == "batch") & (frame["metric"] == "participation")].set_index("view")["value"]
    omega2 = table.loc[table["view"] == "ica", "batch_omega2"]
    assert batch["ica"] == pytest.approx(omega2.sum() ** 2 / (omega2**2).sum())
    record = load_fit(tmp_path / "fold")[1]
    said = record["concentration"]
    assert f"Batch is spread over {batch['ica']:.1f} of 4 ica components (participation number)" in said[0]
    assert f"{batch['rotation'].mean():.1f} of random rotations (mean of 3, " in said[0]
    assert "ica is more concentrated than pca and all 3 rotations" in said[0]  # one planted factor is the batch
    printed = capsys.readouterr().err
    assert all(sentence in printed for sentence in said) and len(said) == 3
    assert record["label_tests"] == {
        "permutations": 9999, "batch": "wells across batches", "position": "wells within plates", "n_reference": 64,
    }  # fmt: skip


def test_a_fit_without_ica_has_no_effects_file_and_no_claim(stage, make_config, tmp_path):
    config = make_config(disentangle={"views": ["raw", "pca"], "label_permutations": 99})
    fit_fold(stage.embeddings, stage.qc, stage.folds, 0, tmp_path / "fold", config)
    assert not (tmp_path / "fold" / "effects.parquet").exists()
    record = load_fit(tmp_path / "fold")[1]
    assert record["label_tests"]["permutations"] == 99
    assert "of 4 pca components" in record["concentration"][0] and "ica" not in record["concentration"][0]
    config = make_config(disentangle={"views": ["raw"]})
    fit_fold(stage.embeddings, stage.qc, stage.folds, 0, tmp_path / "raw", config)
    assert load_fit(tmp_path / "raw")[1]["concentration"] == []
    assert pd.read_parquet(tmp_path / "raw" / "concentration.parquet").empty


def test_views_in_memory_are_those_of_the_fold(stage, make_config, tmp_path):
    config = make_config()
    fit_fold(stage.embeddings, stage.qc, stage.folds, 2, tmp_path / "fold", config)
    train = ~held_out(stage, 2)
    X, obs = read(stage)[train], stage.obs[train]
    stored, _ = load_fit(tmp_path / "fold")
    for key, fitted in fit_views(X, obs, config).items():
        np.testing.assert_array_equal(fitted.transform(X, obs), stored[key].transform(X, obs))


def test_ica_without_pca_in_the_list(stage, make_config):
    config = make_config(disentangle={"views": ["ica", "raw"]})
    assert list(fit_views(read(stage), stage.obs, config)) == ["ica", "raw"]


def test_flagged_wells_leave_the_fit_only_if_asked(stage, make_config, tmp_path):
    passed = np.ones(len(stage.obs), dtype=bool)
    passed[::10] = False
    stage.write_qc(passed)
    for exclude in (False, True):
        config = make_config(qc={"exclude_flagged": exclude}, disentangle={"views": ["raw"]})
        fit_fold(stage.embeddings, stage.qc, stage.folds, 0, tmp_path / "fold", config)
        views, record = load_fit(tmp_path / "fold")
        keep = ~held_out(stage, 0) & (passed | (not exclude))
        assert record["n_wells"] == keep.sum()
        np.testing.assert_allclose(views["raw"].mean_, read(stage)[keep].astype(float).mean(0))


def test_one_training_experiment_is_said(stage, make_config, tmp_path):
    pd.DataFrame({"experiment": ["gene-000", "gene-001"], "fold": [0, 1]}).to_csv(stage.folds, index=False)
    with pytest.warns(IcaWarning, match="96 wells"):
        fit_fold(stage.embeddings, stage.qc, stage.folds, 0, tmp_path / "fold", make_config())
    assert any("batch omega2 cannot be measured" in w for w in load_fit(tmp_path / "fold")[1]["warnings"])


def test_folds_that_do_not_work_are_named(stage, make_config, tmp_path):
    assert training_experiments(stage.folds, None) == [f"gene-{i:03d}" for i in range(6)]
    with pytest.raises(FitError, match="no fold 9"):
        training_experiments(stage.folds, 9)
    pd.DataFrame({"experiment": ["gene-000"], "fold": [0]}).to_csv(stage.folds, index=False)
    with pytest.raises(FitError, match="holds every experiment"):
        training_experiments(stage.folds, 0)
    pd.DataFrame({"experiment": ["gene-000", "absent"], "fold": [0, 1]}).to_csv(stage.folds, index=False)
    with pytest.warns(UserWarning, match="experiments absent have no embedded well"), pytest.warns(IcaWarning):
        fit_fold(stage.embeddings, stage.qc, stage.folds, None, tmp_path / "fold", make_config())
    assert load_fit(tmp_path / "fold")[1]["training_experiments"] == ["gene-000"]
    with pytest.raises(SchemaError, match="none of the training experiments"):
        fit_fold(stage.embeddings, stage.qc, stage.folds, 0, tmp_path / "fold", make_config())


def test_well_without_qc_row_is_named(stage, make_config, tmp_path):
    qc = pd.read_parquet(stage.qc)
    qc.iloc[1:].to_parquet(stage.qc)
    with pytest.raises(SchemaError, match=f"1 wells have no row, first {qc['well_id'][0]}"):
        fit_fold(stage.embeddings, stage.qc, stage.folds, None, tmp_path / "fold", make_config())
    assert not (tmp_path / "fold").exists()


def test_too_many_components_leave_no_half_result(stage, make_config, tmp_path):
    with pytest.raises(FitError, match=r"at most 24; lower disentangle\.n_components"):
        fit_fold(
            stage.embeddings,
            stage.qc,
            stage.folds,
            0,
            tmp_path / "fold",
            make_config(disentangle={"n_components": 128}),
        )
    assert not (tmp_path / "fold").exists()


def exploration(stage, config, tmp_path):
    fit_fold(stage.embeddings, stage.qc, stage.folds, None, tmp_path / "exploration", config)
    assemble(stage.embeddings, stage.qc, tmp_path / "exploration", tmp_path / "disentangled.h5ad", config)
    return anndata.read_h5ad(tmp_path / "disentangled.h5ad")


def test_disentangled_h5ad_has_every_slot_of_the_design(stage, make_config, tmp_path):
    adata = exploration(stage, make_config(), tmp_path)
    schema.check(adata)
    np.testing.assert_array_equal(adata.X, read(stage))
    X = adata.X.astype(float)
    X -= X.mean(0)
    for key, loadings in ((schema.X_PCA, schema.VARM_PCS), (schema.X_ICA, schema.VARM_ICS)):
        assert adata.obsm[key].shape == (len(X), 4) and adata.varm[loadings].shape == (24, 4)
        np.testing.assert_allclose(X @ adata.varm[loadings], adata.obsm[key], atol=1e-5)
    assert adata.obsm[schema.X_TVN].shape == adata.obsm[schema.X_PCA_CS].shape == (len(X), 4)
    assert list(adata.obsm[schema.IMAGE_MEASURES].columns) == ["c1_mean"]
    assert list(adata.uns[schema.UNS]["fit_experiments"]) == [f"gene-{i:03d}" for i in range(6)]
    table = adata.uns[schema.UNS_COMPONENTS]
    for key, names, label in (
        (schema.X_BIOLOGY, schema.UNS_BIOLOGY_NAMES, "biology"),
        (schema.X_BATCH, schema.UNS_BATCH_NAMES, "batch"),
    ):
        chosen = (table["label"] == label).to_numpy()
        assert chosen.sum() == 1 and list(adata.uns[names]) == list(table.index[chosen])
        np.testing.assert_array_equal(adata.obsm[key], adata.obsm[schema.X_ICA][:, chosen])
    said = load_fit(tmp_path / "exploration")[1]["concentration"]
    assert list(adata.uns[schema.UNS_CONCENTRATION]) == said and len(said) == 3
    assert "4 of 4 ica components come back" in adata.uns[schema.UNS_REPRODUCIBILITY]["sentence"]
    assert table["identifiable"].all() and (np.diff(table["reproducibility"].round(2)) <= 0).all()
    assert bool(adata.uns[schema.UNS_ICA]["converged"]) and list(adata.uns[schema.UNS_ICA]["seeds"]) == [0]
    assert (adata.obs[schema.QC_PASS]).all() and set(adata.obs[schema.QC_ACQUISITION]) == {""}


def test_views_and_chains_that_were_asked_for_get_their_slot(stage, make_config, tmp_path):
    config = make_config(disentangle={"views": ["ica", "mad", "spherize", "varimax", "centerscale + ica", "combat"]})
    adata = exploration(stage, config, tmp_path)
    for key in (schema.X_MAD, schema.X_SPHERIZE, schema.X_VARIMAX, "X_centerscale_ica"):
        assert adata.obsm[key].dtype == np.float32 and adata.obsm[key].shape[0] == len(stage.obs)
    assert "X_combat" not in adata.obsm  # which is no fitted view
    chained = load_view(tmp_path / "exploration" / "centerscale+ica")
    np.testing.assert_array_equal(adata.obsm["X_centerscale_ica"], chained.transform(adata.X, adata.obs))


def test_no_component_of_a_kind_is_an_array_of_no_columns(stage, make_config, tmp_path):
    stage.write(np.random.default_rng(0).laplace(size=(len(stage.obs), 6)))
    adata = exploration(stage, make_config(), tmp_path)
    assert adata.obsm[schema.X_BATCH].shape == (len(stage.obs), 0)
    assert len(adata.uns[schema.UNS_BATCH_NAMES]) == 0


def test_holdout_experiments_are_transformed_and_not_fitted(stage, make_config, tmp_path):
    folds = pd.read_csv(stage.folds)
    folds[folds["experiment"] != "gene-005"].to_csv(stage.folds, index=False)
    adata = exploration(stage, make_config(), tmp_path)
    assert "gene-005" not in list(adata.uns[schema.UNS]["fit_experiments"])
    inside = (adata.obs["experiment"] != "gene-005").to_numpy()
    np.testing.assert_allclose(adata.obsm[schema.X_ICA][inside].var(0), 1, atol=1e-4)
    fit = (adata.obs["control_role"] == "fit").to_numpy()
    np.testing.assert_allclose(adata.obsm[schema.X_PCA_CS][~inside & fit].mean(0), 0, atol=1e-5)


def test_flagged_controls_do_not_centre_a_holdout_experiment(stage, make_config, tmp_path):
    folds = pd.read_csv(stage.folds)
    folds[folds["experiment"] != "gene-005"].to_csv(stage.folds, index=False)
    bad = (stage.obs["experiment"] == "gene-005").to_numpy() & (stage.obs["control_role"] == "fit").to_numpy()
    bad &= np.cumsum(bad) <= 3
    X = read(stage)
    X[bad] += 50
    stage.write(X)
    stage.write_qc(~bad)
    adata = exploration(stage, make_config(qc={"exclude_flagged": True}), tmp_path)
    good = (adata.obs["experiment"] == "gene-005") & (adata.obs["control_role"] == "fit") & ~bad
    np.testing.assert_allclose(adata.obsm[schema.X_PCA_CS][good.to_numpy()].mean(0), 0, atol=1e-4)
    assert (adata.obs["control_role"] == "fit").sum() == (stage.obs["control_role"] == "fit").sum()


def test_written_json_is_plain(stage, make_config, tmp_path):
    fit_fold(stage.embeddings, stage.qc, stage.folds, 0, tmp_path / "fold", make_config())
    for path in (tmp_path / "fold").rglob("*.json"):
        json.loads(path.read_text(), parse_constant=pytest.fail)


def test_import_loads_neither_torch_nor_scanpy_nor_a_solver():
    code = (
        "import sys, phenoica.disentangle, phenoica.disentangle.run\n"
        "print([m for m in ('torch', 'scanpy', 'picard', 'sklearn') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_fit_says_which_components_come_back(stage, make_config, tmp_path):
    fit_fold(stage.embeddings, stage.qc, stage.folds, 0, tmp_path / "fold", make_config())
    views, record = load_fit(tmp_path / "fold")
    table = pd.read_parquet(tmp_path / "fold" / "components.parquet")
    single = pd.read_parquet(tmp_path / "fold" / "reproducibility.parquet")
    ica = table[table["view"] == "ica"]
    mean = single[single["kind"] == "bootstrap"].groupby("component")["r"].mean()
    np.testing.assert_allclose(ica["reproducibility"], mean)
    np.testing.assert_allclose(
        ica["reproducibility_null"], single.loc[single["kind"] == "gaussian", "r"].quantile(0.95)
    )
    assert record["reproducibility"]["identifiable"] == ica["identifiable"].sum()
    assert table.loc[table["view"] != "ica", ["reproducibility", "identifiable"]].isna().all(axis=None)


def test_reproducibility_is_left_out_where_it_is_not_asked_for(stage, make_config, tmp_path):
    adata = exploration(stage, make_config(disentangle={"reproducibility_draws": 0}), tmp_path)
    assert load_fit(tmp_path / "exploration")[1]["reproducibility"] is None
    assert not (tmp_path / "exploration" / "reproducibility.parquet").exists()
    assert schema.UNS_REPRODUCIBILITY not in adata.uns
    assert not {"reproducibility", "identifiable"} & set(adata.uns[schema.UNS_COMPONENTS].columns)
