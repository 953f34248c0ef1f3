import json
import shutil
import subprocess
import sys

import anndata
import numpy as np
import pytest

from phenoica import schema
from phenoica.disentangle import load_view, view
from phenoica.disentangle.apply import load_states, state_sha256, transform_file
from phenoica.disentangle.run import fit_fold, load_fit
from phenoica.errors import ControlsError, FitError, SchemaError

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
    assert set(after.obsm) - set(before.obsm) == set(slots.values())
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
    expected = load_view(folder / "ica").transform(anndata.read_h5ad(new).X)
    edit(new, lambda adata: adata[:, ::-1].copy())
    transform_file(new, folder / "ica", out)
    np.testing.assert_array_equal(anndata.read_h5ad(out).obsm["X_ica"], expected)

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
