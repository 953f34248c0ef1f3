import hashlib
import json
import shutil
import subprocess
import sys

import anndata
import numpy as np
import pandas as pd
import pytest

from phenoica import schema
from phenoica.disentangle import load_view, view
from phenoica.disentangle.apply import load_states, state_sha256, transform_file
from phenoica.disentangle.run import assemble, fit_fold, load_fit
from phenoica.errors import ControlsError, FitError, SchemaError
from phenoica.export import pycytominer_table

VIEWS = ["raw", "centerscale", "pca", "rotation", "varimax", "ica", "tvn", "centerscale + ica", "combat"]


@pytest.fixture
def fit(stage, make_config, tmp_path):
    """A fit that trains on all experiments but gene-001 and gene-004, with those two as the new batches."""
    config = make_config(disentangle={"views": VIEWS})
    fit_fold(stage.embeddings, stage.qc, stage.folds, 1, tmp_path / "fold-1", config)
    adata = anndata.read_h5ad(stage.embeddings)
    new = adata[adata.obs["experiment"].isin(["gene-001", "gene-004"]).to_numpy()].copy()
    new.write_h5ad(tmp_path / "new.h5ad")
    return tmp_path / "fold-1", tmp_path / "new.h5ad", tmp_path / "out.h5ad"


def edit(path, change):
    adata = anndata.read_h5ad(path)
    changed = change(adata)
    (changed if isinstance(changed, anndata.AnnData) else adata).write_h5ad(path)


def test_a_whole_fit_fills_the_slots_with_what_its_views_give(fit):
    folder, new, out = fit
    with (
        pytest.warns(UserWarning, match="rotation_00, rotation_01, rotation_02, which is a random draw"),
        pytest.warns(UserWarning, match="combat, which corrects all wells together"),
    ):
        transform_file(new, folder, out)
    before, after = anndata.read_h5ad(new), anndata.read_h5ad(out)
    views, _ = load_fit(folder)
    slots = {
        "raw": "X_raw", "centerscale": "X_centerscale", "pca": "X_pca", "varimax": "X_varimax", "ica": "X_ica",
        "tvn": "X_tvn", "centerscale+ica": "X_centerscale_ica",
    }  # fmt: skip
    assert set(after.obsm) - set(before.obsm) == {*slots.values(), "X_biology", "X_batch"}
    record = after.uns[schema.UNS_TRANSFORM]
    assert set(record["views"]) == set(slots)
    for key, slot in slots.items():
        np.testing.assert_array_equal(after.obsm[slot], views[key].transform(before.X, before.obs))
        assert after.obsm[slot].dtype == np.float32
        said = record["views"][key]
        assert said["state_sha256"] == state_sha256(folder / key) and said["obsm"] == slot
        assert said["test_data_used"] == ("controls" if key[:3] in ("cen", "tvn") else "none")
    assert list(record["fit_experiments"]) == ["gene-000", "gene-002", "gene-003", "gene-005"]
    assert record["fold"] == "1" and not len(record["seen_batches"])
    np.testing.assert_array_equal(after.X, before.X)
    assert after.obs.equals(before.obs)


def test_one_view_by_the_command_line(fit):
    folder, new, out = fit
    command = [sys.executable, "-m", "phenoica.cli", "transform", str(new), "--state", str(folder / "tvn")]
    ran = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    after = anndata.read_h5ad(out)
    np.testing.assert_array_equal(after.obsm["X_tvn"], load_view(folder / "tvn").transform(after.X, after.obs))
    assert "X_ica" not in after.obsm
    edit(new, lambda adata: adata[:, 1:].copy())
    ran = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    assert ran.returncode == 1 and "Traceback" not in ran.stderr
    assert ran.stderr.startswith(f"error: {new}: X has 23 features") and "was fitted on 24" in ran.stderr


def table_of(folder):
    table = pd.read_parquet(folder / "components.parquet")
    return table[table["view"] == "ica"].set_index("component")


def test_new_wells_get_the_arrays_and_descriptions_of_the_run_itself(stage, make_config, tmp_path):
    folds = pd.read_csv(stage.folds)
    folds[folds["experiment"] != "gene-005"].to_csv(stage.folds, index=False)  # a held-out experiment of the run
    config = make_config(disentangle={"views": ["pca", "ica", "tvn"]})
    fit_fold(stage.embeddings, stage.qc, stage.folds, None, tmp_path / "exploration", config)
    assemble(stage.embeddings, stage.qc, tmp_path / "exploration", tmp_path / "disentangled.h5ad", config)
    adata = anndata.read_h5ad(stage.embeddings)
    adata[(adata.obs["experiment"] == "gene-005").to_numpy()].write_h5ad(tmp_path / "new.h5ad")
    transform_file(tmp_path / "new.h5ad", tmp_path / "exploration", tmp_path / "out.h5ad")
    run, new = anndata.read_h5ad(tmp_path / "disentangled.h5ad"), anndata.read_h5ad(tmp_path / "out.h5ad")
    own = run[new.obs_names]
    assert new.n_obs == 96 and set(run.obsm) == set(new.obsm)
    for key in set(new.obsm) - {schema.IMAGE_MEASURES}:
        np.testing.assert_allclose(new.obsm[key], own.obsm[key], rtol=0, atol=1e-6)
        assert new.obsm[key].dtype == np.float32 and new.obsm[key].shape[1] in (1, 4)
    for key in ("PCs", "ICs"):
        np.testing.assert_array_equal(new.varm[key], run.varm[key])
    for key in ("X_biology_names", "X_batch_names"):
        assert len(new.uns[key]) == 1 and list(new.uns[key]) == list(run.uns[key])
    pd.testing.assert_frame_equal(new.uns["components"], run.uns["components"])
    assert new.uns["reproducibility"]["sentence"] == run.uns["reproducibility"]["sentence"]
    assert bool(new.uns["ica"]["converged"]) and list(new.uns["ica"]["seeds"]) == list(run.uns["ica"]["seeds"])
    schema.check(new)
    exported = pycytominer_table(new, "biology")
    np.testing.assert_array_equal(exported[new.uns["X_biology_names"][0]], new.obsm["X_biology"][:, 0])


def test_new_wells_do_not_change_a_label(fit):
    folder, new, out = fit

    def relabel_and_shift(adata):
        adata.X[:] = np.random.default_rng(0).standard_normal(adata.shape)  # nothing to find in these wells
        adata.obs["perturbation"] = "X"

    edit(new, relabel_and_shift)
    transform_file(new, folder, out)
    after, table = anndata.read_h5ad(out), table_of(folder)
    assert list(after.uns["components"].index) == list(table.index)
    assert list(after.uns["components"]["label"]) == list(table["label"])
    for slot, label in (("X_biology", "biology"), ("X_batch", "batch")):
        chosen = (table["label"] == label).to_numpy()
        assert chosen.sum() == 1  # of the planted factors
        np.testing.assert_array_equal(after.obsm[slot], after.obsm["X_ica"][:, chosen])
    said = after.uns[schema.UNS_TRANSFORM]["components_sha256"]
    assert said == hashlib.sha256((folder / "components.parquet").read_bytes()).hexdigest()


def test_the_ica_of_a_fit_alone_has_its_labels_and_other_views_have_none(fit):
    folder, new, out = fit
    transform_file(new, folder / "ica", out)
    after = anndata.read_h5ad(out)
    assert after.obsm["X_biology"].shape == (192, 1) and "ICs" in after.varm and "PCs" not in after.varm
    transform_file(new, folder / "pca", out)
    after = anndata.read_h5ad(out)
    assert "X_biology" not in after.obsm and "components" not in after.uns
    np.testing.assert_array_equal(after.varm["PCs"], load_view(folder / "pca").components_)
    assert after.uns[schema.UNS_TRANSFORM]["components_sha256"] == ""


def test_no_component_of_a_label_is_an_array_of_no_columns(fit):
    folder, new, out = fit
    table = pd.read_parquet(folder / "components.parquet")
    table.assign(label="unexplained").to_parquet(folder / "components.parquet")
    transform_file(new, folder / "ica", out)
    after = anndata.read_h5ad(out)
    assert after.obsm["X_biology"].shape == after.obsm["X_batch"].shape == (192, 0)
    assert len(after.uns["X_biology_names"]) == 0 and (after.uns["components"]["label"] == "unexplained").all()


def test_a_fit_without_its_labels_is_refused(fit):
    folder, new, out = fit
    path = folder / "components.parquet"
    whole = pd.read_parquet(path)

    def refused(match):
        for state in (folder, folder / "ica"):
            with pytest.raises(
                SchemaError, match=f"parquet: {match}.*have no labels; run `phenoica disentangle` again"
            ):
                transform_file(new, state, out)
        assert not out.exists()

    path.unlink()
    refused("cannot be read")
    path.write_bytes(b"PAR1 no parquet")
    refused("cannot be read")
    for table, match in (
        (whole.drop(columns="label"), "columns label are missing"),
        (whole[whole["view"] != "ica"], "does not list ica_000 to ica_003 of this fit"),
        (whole[::-1], "does not list ica_000 to ica_003"),
        (whole.assign(label="good"), r"unknown labels \['good'\]"),
    ):
        table.to_parquet(path)
        refused(match)
    transform_file(new, folder / "pca", out)  # which has no label to lack


def test_a_fit_record_of_an_older_kind_is_refused(fit):
    folder, new, out = fit
    record = json.loads((folder / "fit.json").read_text())
    del record["reproducibility"]
    (folder / "fit.json").write_text(json.dumps(record))
    with pytest.raises(
        SchemaError, match="fit.json: says nothing of reproducibility, so its components have no labels"
    ):
        transform_file(new, folder, out)


def test_an_ica_saved_by_itself_has_no_labels_and_says_so(fit, tmp_path):
    folder, new, out = fit
    transform_file(new, folder, tmp_path / "labelled.h5ad")
    shutil.copytree(folder / "ica", tmp_path / "ica")
    with (
        pytest.warns(UserWarning, match="saved by itself and has no labels: no X_biology or X_batch"),
        pytest.warns(UserWarning, match="obsm X_ica, X_biology, X_batch; varm ICs; uns X_biology_names, .* stood in"),
    ):
        transform_file(tmp_path / "labelled.h5ad", tmp_path / "ica", out)
    after = anndata.read_h5ad(out)
    assert "X_ica" in after.obsm and "ICs" in after.varm  # and no label of the fit before
    assert not {"X_biology", "X_batch"} & set(after.obsm) and not {"components", "ica"} & set(after.uns)


def test_the_hash_is_that_of_the_state(fit, tmp_path):
    folder, _, _ = fit
    first = state_sha256(folder / "ica")
    shutil.copytree(folder / "ica", tmp_path / "copy")
    assert state_sha256(tmp_path / "copy") == first != state_sha256(folder / "pca")
    meta = json.loads((tmp_path / "copy" / "view.json").read_text())
    (tmp_path / "copy" / "view.json").write_text(json.dumps(meta))
    assert state_sha256(tmp_path / "copy") != first


def test_features_are_taken_by_name(fit):
    folder, new, out = fit
    ica = load_view(folder / "ica")
    expected = ica.transform(anndata.read_h5ad(new).X)
    order = np.random.default_rng(0).permutation(24)
    edit(new, lambda adata: adata[:, order].copy())
    transform_file(new, folder / "ica", out)
    after = anndata.read_h5ad(out)
    np.testing.assert_array_equal(after.obsm["X_ica"], expected)
    np.testing.assert_array_equal(after.varm["ICs"], ica.components_[order])

    def rename(adata):
        adata.var_names = [f"f{i}" for i in range(24)]

    edit(new, rename)
    with pytest.raises(SchemaError, match="var lacks 24 of its features, first 'openphenom_000'"):
        transform_file(new, folder / "ica", out)


def test_a_view_saved_by_itself_knows_no_fit(fit, tmp_path):
    _, new, out = fit
    adata = anndata.read_h5ad(new)
    adata.var_names = [f"f{i}" for i in range(24)]
    view("pca", n_components=3).fit(adata.X).save(tmp_path / "mine")
    transform_file(new, tmp_path / "mine", out)
    after = anndata.read_h5ad(out)
    assert after.obsm["X_mine"].shape == (192, 3)
    assert after.uns[schema.UNS_TRANSFORM]["fold"] == "not stated"


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda a: a.obs.drop(columns="control_role", inplace=True), SchemaError, "column control_role is missing"),
        (lambda a: a.obs.drop(columns="experiment", inplace=True), SchemaError, "column experiment is missing"),
        (lambda a: a.X.__setitem__((3, 5), np.nan), SchemaError, "not finite in 1 wells, first well gene-001_1_"),
        (lambda a: a.obs.__setitem__("control_role", "none"), ControlsError, r"gene-001 \(0\), gene-004 \(0\)"),
        (lambda a: a.obs.__setitem__("control_role", "Fit"), SchemaError, r"holds \['Fit'\]"),
        (lambda a: a[:0].copy(), SchemaError, "no well"),
        (lambda a: anndata.concat([a, a[:1]], merge="same"), SchemaError, "stands more than once"),
    ],
)
def test_what_a_file_lacks_is_named_and_nothing_is_written(fit, change, error, match):
    folder, new, out = fit
    edit(new, change)
    with pytest.raises(error, match=match):
        transform_file(new, folder, out)
    assert not out.exists()


def test_folders_that_hold_no_state_to_apply(fit, tmp_path):
    folder, new, out = fit
    with pytest.raises(SchemaError, match="neither a saved view"):
        load_states(tmp_path)
    with pytest.raises(FitError, match="combat corrects all wells together"):
        transform_file(new, folder / "combat", out)
    with pytest.raises(SchemaError, match="is the input"):
        transform_file(new, folder, new)
    with pytest.raises(SchemaError, match="no such file"):
        transform_file(tmp_path / "absent.h5ad", folder, out)
    (tmp_path / "text.h5ad").write_text("no h5ad")
    with pytest.raises(SchemaError, match="cannot be read as h5ad"):
        transform_file(tmp_path / "text.h5ad", folder, out)


def test_a_slot_that_is_there_is_replaced_aloud(fit):
    folder, new, out = fit

    def scanpy_like(adata):
        adata.obsm["X_pca"] = np.ones((adata.n_obs, 2))

    edit(new, scanpy_like)
    with pytest.warns(UserWarning, match="obsm X_pca stood in the file"):
        transform_file(new, folder / "pca", out)
    assert anndata.read_h5ad(out).obsm["X_pca"].shape[1] == 4


def test_batches_of_the_fit_are_said_to_be_no_new_ones(fit, stage):
    folder, _, out = fit
    with pytest.warns(UserWarning, match="trained on experiment gene-000, gene-002"):
        transform_file(stage.embeddings, folder / "centerscale", out)
    assert "gene-000" in anndata.read_h5ad(out).uns[schema.UNS_TRANSFORM]["seen_batches"]


def test_flagged_controls_do_not_centre_a_new_batch(stage, make_config, tmp_path):
    config = make_config(qc={"exclude_flagged": True}, disentangle={"views": ["centerscale", "pca"]})
    fit_fold(stage.embeddings, stage.qc, stage.folds, 1, tmp_path / "fold", config)
    adata = anndata.read_h5ad(stage.embeddings)
    new = adata[(adata.obs["experiment"] == "gene-001").to_numpy()].copy()
    new.write_h5ad(tmp_path / "new.h5ad")
    with pytest.raises(SchemaError, match="qc_pass is missing; the fit left flagged wells out"):
        transform_file(tmp_path / "new.h5ad", tmp_path / "fold", tmp_path / "out.h5ad")
    transform_file(tmp_path / "new.h5ad", tmp_path / "fold" / "pca", tmp_path / "out.h5ad")  # which reads no control
    fit = (new.obs["control_role"] == "fit").to_numpy()
    bad = fit & (np.cumsum(fit) <= 3)
    new.X[bad] += 50
    new.obs["qc_pass"] = ~bad
    new.write_h5ad(tmp_path / "new.h5ad")
    transform_file(tmp_path / "new.h5ad", tmp_path / "fold", tmp_path / "out.h5ad")
    after = anndata.read_h5ad(tmp_path / "out.h5ad")
    np.testing.assert_allclose(after.obsm["X_centerscale"][fit & ~bad].mean(0), 0, atol=1e-4)
    assert (after.obs["control_role"] == new.obs["control_role"]).all()
