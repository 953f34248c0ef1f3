"""Wells as a table for other tools, read back the way a user would."""

import anndata
import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from phenoica import schema
from phenoica.cli import app
from phenoica.embed.profiles import write_profiles
from phenoica.errors import SchemaError
from phenoica.export import export_pycytominer, pycytominer_table
from phenoica.plates.run import inputs, run_profile_plates


def embed(config, root):
    run_profile_plates(*inputs(config), root, config)
    write_profiles(
        root / "wells.parquet", inputs(config)[0], root / "quarantine.csv", root / "e.h5ad", root / "q", config
    )
    return anndata.read_h5ad(root / "e.h5ad")


@pytest.mark.parametrize("name", ["wells.csv.gz", "wells.csv", "wells.parquet"])
def test_an_export_comes_back_as_the_same_wells_and_numbers(profile_screen, tmp_path, name):
    profile_screen.write()
    adata = embed(profile_screen.config(), tmp_path / "first")
    export_pycytominer(tmp_path / "first/e.h5ad", tmp_path / name)
    columns = {
        "experiment": "Metadata_experiment", "plate": "Metadata_Plate", "address": "Metadata_Well",
        "perturbation": "Metadata_perturbation", "treatment": "Metadata_treatment",
        "perturbation_type": "Metadata_perturbation_type", "concentration": "Metadata_concentration",
    }  # fmt: skip
    again = profile_screen.config(files=[str(tmp_path / name)], columns=columns, batch={})
    back = embed(again, tmp_path / "second")
    assert back.obs_names.tolist() == adata.obs_names.tolist()
    assert np.array_equal(back.X, adata.X) and list(back.var_names) == list(adata.var_names)
    pd.testing.assert_frame_equal(
        back.obs.drop(columns=["smiles", "cell_type"]), adata.obs.drop(columns=["smiles", "cell_type"])
    )


def with_views(profile_screen, tmp_path):
    profile_screen.write()
    adata = embed(profile_screen.config(), tmp_path)
    adata.obsm[schema.X_ICA] = np.arange(128, dtype=np.float32).reshape(64, 2)
    adata.obsm[schema.X_BIOLOGY] = adata.obsm[schema.X_ICA][:, 1:]
    adata.obsm[schema.X_BATCH] = np.empty((64, 0), np.float32)
    adata.uns[schema.UNS_BIOLOGY_NAMES] = np.array(["ica_001"], object)
    return adata


def test_metadata_come_first_then_the_components_of_a_view(profile_screen, tmp_path):
    adata = with_views(profile_screen, tmp_path)
    table = pycytominer_table(adata, "ica")
    n = sum(c.startswith("Metadata_") for c in table.columns)
    assert list(table.columns[:2]) == ["Metadata_Plate", "Metadata_Well"]
    assert all(c.startswith("Metadata_") for c in table.columns[:n])
    assert list(table.columns[n:]) == ["ica_000", "ica_001"]
    assert table["ica_001"].tolist() == list(range(1, 128, 2))
    assert set(table["Metadata_perturbation"]) == {"DMSO", "NA", "SEPT2"}
    assert list(pycytominer_table(adata, "biology").columns[n:]) == ["ica_001"]


def test_views_that_are_not_there_are_named(profile_screen, tmp_path):
    adata = with_views(profile_screen, tmp_path)
    with pytest.raises(SchemaError, match="holds no view tvn"):
        pycytominer_table(adata, "tvn")
    with pytest.raises(SchemaError, match="view batch has no component"):
        pycytominer_table(adata, "batch")
    with pytest.raises(SchemaError, match="unknown view 'umap'; known are raw, pca"):
        pycytominer_table(adata, "umap")
    with pytest.raises(SchemaError, match="unknown kind of table"):
        export_pycytominer(tmp_path / "e.h5ad", tmp_path / "x.xlsx")
    with pytest.raises(SchemaError, match="no such file"):
        export_pycytominer(tmp_path / "none.h5ad", tmp_path / "x.csv")


def test_the_verb_needs_a_format_and_finds_the_run(profile_screen, tmp_path):
    import json

    profile_screen.write()
    config = profile_screen.config()
    adata = embed(config, tmp_path / "results/profiles/embed")
    (tmp_path / "results/profiles/embed/e.h5ad").rename(tmp_path / "results/profiles/embed/embeddings.h5ad")
    arguments = ["export", "--config", json.dumps(config), "--out", str(tmp_path / "w.parquet")]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code != 0 and "--pycytominer" in str(refused.exception)
    assert CliRunner().invoke(app, [*arguments, "--pycytominer"]).exit_code == 0
    table = pd.read_parquet(tmp_path / "w.parquet")
    assert np.array_equal(table[list(adata.var_names)].to_numpy(), adata.X)
    assert table["Metadata_Plate"].tolist() == adata.obs["plate"].tolist()
