"""Profiles to embeddings.h5ad: right numbers at the right well, and everything that is left out said."""

import subprocess
import sys

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest

from phenoica import schema
from phenoica.embed import profiles
from phenoica.embed.profiles import CONSTANT, FEATURE_MISSING, WELL_MISSING, identical_rows, write_profiles
from phenoica.errors import MetadataError
from phenoica.plates import tables
from phenoica.plates.run import inputs, run_profile_plates

CELLS = [f"Cells_{j}" for j in range(6)]


def embed(screen, **options):
    """Run plates and profiles; return the AnnData and quarantine.csv."""
    config, root = screen.config(**options), screen.folder / "out"
    run_profile_plates(*inputs(config), root, config)
    write_profiles(
        root / "wells.parquet", inputs(config)[0], root / "quarantine.csv", root / "e.h5ad", root / "q.csv", config
    )
    return anndata.read_h5ad(root / "e.h5ad"), pd.read_csv(root / "q.csv", keep_default_na=False)


def expected(screen, adata, columns=CELLS):
    """Return the features of the wells of adata, looked up by plate and address in the table as written."""
    frame = screen.frame.set_index(["Metadata_Plate", "Metadata_Well"])
    keys = list(zip(adata.obs["plate"], adata.obs["address"], strict=True))
    return frame.loc[keys, columns].to_numpy(np.float32)


@pytest.mark.parametrize("name", ["profiles.csv", "profiles.csv.gz", "profiles.parquet"])
def test_every_well_carries_its_own_numbers(profile_screen, name, monkeypatch):
    monkeypatch.setattr(tables, "ROWS_AT_A_TIME", 7)
    profile_screen.frame = profile_screen.frame.sample(frac=1, random_state=1, ignore_index=True)
    profile_screen.write(name=name)
    adata, quarantine = embed(profile_screen)
    schema.check(adata)
    assert adata.shape == (64, 6) and list(adata.var_names) == CELLS and quarantine.empty
    assert np.array_equal(adata.X, expected(profile_screen, adata))
    assert schema.CELL_COUNT not in adata.obs and schema.N_TILES not in adata.obs and not adata.obsm.keys()
    assert adata.uns["phenoica"]["checkpoint"].endswith(f"6 features a well read from {name}")
    assert adata.uns["phenoica"]["profiles_sha256"][0].endswith(f"  {name}")


def test_several_files_and_a_cell_count(profile_screen):
    profile_screen.frame["n"] = np.arange(64)
    profile_screen.write(profile_screen.frame.iloc[:20], "profiles-1.csv")
    profile_screen.write(profile_screen.frame.iloc[20:], "profiles-2.parquet")
    adata, _ = embed(profile_screen, columns={**profile_screen.COLUMNS, "cell_count": "n"})
    assert np.array_equal(adata.X, expected(profile_screen, adata))
    assert np.array_equal(adata.obs["cell_count"], expected(profile_screen, adata, ["n"])[:, 0])
    assert "n" not in adata.var_names


def test_rows_that_are_no_well_of_the_run_are_passed_over(profile_screen):
    frame, again = profile_screen.frame, profile_screen.frame.iloc[[0]].assign(Cells_0=99.0)
    profile_screen.write(pd.concat([frame.iloc[:10], again, frame.iloc[10:]]))
    adata, quarantine = embed(profile_screen)
    assert np.array_equal(adata.X, expected(profile_screen, adata))
    assert quarantine[["well_id", "row"]].values.tolist() == [["W1_W1_08_A01", 10]]


def test_strings_are_stored_in_the_legacy_encoding(profile_screen):
    profile_screen.write()
    embed(profile_screen)
    with h5py.File(profile_screen.folder / "out/e.h5ad") as file:
        assert file["obs/well_id"].attrs["encoding-type"] == "string-array"
        assert file["obs/experiment"].attrs["encoding-type"] == "categorical"
        assert file["obs/experiment/categories"].attrs["encoding-type"] == "string-array"
        assert file["obs/smiles/categories"].attrs["encoding-type"] in ("string-array", "array")
        assert file["X"].dtype == np.float32


def test_a_constant_feature_is_left_out_and_said(profile_screen, capsys):
    profile_screen.frame["Cells_2"] = 7.0
    profile_screen.write()
    adata, quarantine = embed(profile_screen)
    assert list(adata.var_names) == [c for c in CELLS if c != "Cells_2"]
    assert np.array_equal(adata.X, expected(profile_screen, adata, list(adata.var_names)))
    assert quarantine[["key", "reason"]].values.tolist() == [["feature Cells_2", CONSTANT]]
    assert "1 feature(s) left out: constant feature" in capsys.readouterr().err


def test_missing_values_stop_the_run_with_what_each_choice_costs(profile_screen):
    profile_screen.frame.loc[3, ["Cells_1", "Cells_2"]] = [np.nan, np.inf]
    profile_screen.frame.loc[9, "Cells_2"] = -np.inf
    profile_screen.write()
    with pytest.raises(MetadataError) as error:
        embed(profile_screen)
    text = str(error.value)
    assert "3 numbers are missing (NaN or inf), in 2 of 64 wells (first W1_W1_08_B03)" in text
    assert "2 of 6 features (most in Cells_2)" in text and "drop_wells" in text and "drop_features" in text


def test_missing_values_by_well_and_by_feature(profile_screen):
    profile_screen.frame.loc[3, ["Cells_1", "Cells_2"]] = [np.nan, np.inf]
    profile_screen.write()
    adata, quarantine = embed(profile_screen, missing="drop_wells")
    assert adata.shape == (63, 6) and "W1_W1_08_D01" not in adata.obs_names
    assert quarantine[["well_id", "reason", "row"]].values.tolist() == [["W1_W1_08_D01", WELL_MISSING, 3]]
    assert quarantine["file"].iloc[0].endswith("profiles.csv")
    assert np.array_equal(adata.X, expected(profile_screen, adata))
    adata, quarantine = embed(profile_screen, missing="drop_features")
    assert adata.shape == (64, 4)
    assert quarantine["key"].tolist() == ["feature Cells_1", "feature Cells_2"]
    assert set(quarantine["reason"]) == {FEATURE_MISSING}


def test_a_policy_that_would_lose_most_is_refused(profile_screen):
    profile_screen.frame.loc[:40, "Cells_1"] = np.nan
    profile_screen.write()
    with pytest.raises(MetadataError, match="drop_wells, which would lose more than half of the wells"):
        embed(profile_screen, missing="drop_wells")
    profile_screen.frame.loc[3, CELLS] = np.nan
    profile_screen.write()
    with pytest.raises(MetadataError, match="drop_features, which would lose more than half of the features"):
        embed(profile_screen, missing="drop_features")


def test_a_column_without_a_number_goes_whatever_the_policy(profile_screen):
    profile_screen.frame["Cells_5"] = np.nan
    profile_screen.write(name="profiles.parquet")
    adata, quarantine = embed(profile_screen)
    assert adata.n_vars == 5 and quarantine["reason"].tolist() == ["feature without a single number"]


def twins(screen):
    screen.frame.loc[50, CELLS] = screen.frame.loc[7, CELLS]
    screen.write()


def test_wells_of_one_vector_are_all_left_out_and_said(profile_screen, capsys):
    twins(profile_screen)
    adata, quarantine = embed(profile_screen)
    assert adata.n_obs == 62
    assert quarantine["well_id"].tolist() == ["W1_W1_08_D02", "W2_W2_8_C01"]
    assert quarantine["reason"].iloc[0] == "the same vector as well W2_W2_8_C01; both are left out"
    assert "2 wells carry a vector that another well has too: W1_W1_08_D02 = W2_W2_8_C01" in capsys.readouterr().err


def test_wells_of_one_vector_by_policy(profile_screen, capsys):
    twins(profile_screen)
    assert embed(profile_screen, duplicate_vectors="warn")[0].n_obs == 64
    assert "they are kept" in capsys.readouterr().err
    with pytest.raises(MetadataError, match="2 wells carry a vector .* set profiles.duplicate_vectors"):
        embed(profile_screen, duplicate_vectors="error")


def test_identical_rows_by_hand():
    X = np.array([[0.0, 1], [-0.0, 1], [2, 3], [2, 4], [0, 1], [2, 3]], np.float32)
    rows, columns = np.ones(6, bool), np.ones(2, bool)
    assert [g.tolist() for g in identical_rows(X, rows, columns)] == [[0, 1, 4], [2, 5]]
    rows[1] = rows[5] = False
    assert [g.tolist() for g in identical_rows(X, rows, columns)] == [[0, 4]]
    assert [g.tolist() for g in identical_rows(X, np.ones(6, bool), np.array([True, False]))] == [[0, 1, 4], [2, 3, 5]]


def test_a_shared_hash_is_no_identity(monkeypatch):
    class Zero:
        def integers(self, low, high, size, dtype):
            return np.zeros(size, dtype)

    monkeypatch.setattr(profiles.np.random, "default_rng", lambda seed: Zero())
    # weights of 1: rows whose bits have one sum share a hash
    X = np.array([[2, 1], [1, 2], [4, 5], [1, 2], [2, 1], [2, 1.5]], np.float32)
    assert [g.tolist() for g in identical_rows(X, np.ones(6, bool), np.ones(2, bool))] == [[0, 4], [1, 3]]
    assert [g.tolist() for g in identical_rows(X[:4], np.ones(4, bool), np.ones(2, bool))] == [[1, 3]]


def test_one_row_only_is_an_error(profile_screen):
    profile_screen.write(profile_screen.frame.iloc[:1])
    with pytest.raises(MetadataError, match="there is one well with a profile"):
        embed(profile_screen)


def test_a_file_that_changed_since_plates_is_noticed(profile_screen):
    profile_screen.write()
    config, root = profile_screen.config(), profile_screen.folder / "out"
    run_profile_plates(*inputs(config), root, config)
    profile_screen.write(profile_screen.frame.iloc[:40])
    with pytest.raises(MetadataError, match="has 40 rows, fewer than when its wells were listed"):
        write_profiles(
            root / "wells.parquet", inputs(config)[0], root / "quarantine.csv", root / "e", root / "q", config
        )


def test_published_embeddings_get_their_published_names(profile_screen):
    frame = profile_screen.frame.rename(columns={f"Cells_{j}": f"feature_{j + 8}" for j in range(6)})
    profile_screen.write(frame[sorted(frame.columns)])  # feature_10 before feature_8
    adata, _ = embed(profile_screen, features={"prefix": ["feature_"], "name": "openphenom"})
    assert list(adata.var_names) == schema.var_names(6)
    assert np.array_equal(adata.X, expected(profile_screen, adata))


def test_no_torch_on_this_path(profile_screen):
    profile_screen.write()
    code = (
        "import sys, json; from pathlib import Path; from phenoica.config import resolve\n"
        "import phenoica.cli as cli\n"
        f"text = {__import__('json').dumps(profile_screen.config())!r}\n"
        "cli.plates(text); cli.profiles(text); cli.qc(text)\n"
        "assert not {'torch', 'scanpy', 'timm'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
