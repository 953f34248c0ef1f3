import io
import json

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from phenoica import cli, schema
from phenoica.plates.folds import assign_folds
from phenoica.score.contrast_list import LIST_COLUMNS, contrast_list, listed


@pytest.fixture(scope="module")
def made(screen, settings):
    adata = screen(n_experiments=6, n_genes=4, lonely=True, n_plates=2)
    wells = adata.obs.reset_index()
    corner = wells[schema.PERTURBATION] == "GENE1"
    wells.loc[~corner & (wells[schema.ROW] == 1), schema.ROW] = 2
    wells.loc[corner, [schema.ROW, schema.COLUMN]] = 1
    wells[schema.CONCENTRATION] = np.where(wells[schema.CONTROL] == schema.NONE, 2.5, np.nan)
    doses = {"name": "dose", "case": {"control": "none"}, "reference": {"control_role": "reference"}, "min_wells": 2,
             "each": ["perturbation", "concentration"], "batch_key": "plate_id"}  # fmt: skip
    config = settings(plates={"folds": 6}, score={"contrasts": ["demo", doses]})
    folds = assign_folds(wells, config)
    return wells, folds, config, contrast_list(wells, folds, config)


def one(table, contrast, perturbation):
    return table.set_index(["contrast", "perturbation"]).loc[(contrast, perturbation)]


def test_wells_of_each_side_and_experiment(made):
    _, _, _, table = made
    assert tuple(table.columns) == LIST_COLUMNS
    gene = one(table, "query_vs_reference", "GENE0")
    assert (gene["n_case"], gene["n_reference"], gene["n_experiments"], gene["n_folds"]) == (16, 48, 2, 2)
    assert gene["per_experiment"] == "gene-000 8/24; gene-001 8/24" and pd.isna(gene["skipped"])


def test_what_position_explains_and_what_numbers_could_show(made):
    _, _, _, table = made
    assert one(table, "query_vs_reference", "GENE1")["position_overlap"] < 0.1
    assert one(table, "positive_vs_reference", "PLK1")["position_overlap"] > 0.5
    wide, narrow = one(table, "query_vs_reference", "GENE0"), one(table, "positive_vs_reference", "PLK1")
    error = np.sqrt((8 + 24 + 1) / (12 * 8 * 24))  # two folds that train on each other: no gain from the second
    assert wide["detectable_difference"] == pytest.approx((1.959964 + 0.841621) * error, rel=1e-4)
    assert narrow["detectable_difference"] < wide["detectable_difference"]


def test_what_is_skipped_and_why(made):
    _, _, _, table = made
    lonely = one(table, "query_vs_reference", "LONELY")
    assert lonely["skipped"] == "one_experiment" and "one experiment only" in lonely["why"]
    dose = one(table, "dose", "LONELY @ 2.5")
    assert pd.isna(dose["skipped"]) and "no claim beyond them" in dose["why"] and dose["batch"] == "plate_id"
    text = listed(table)
    assert "skipped, 1: LONELY (in one experiment only" in text and "CONFOUNDED" in text
    assert "guide_holdout: 2 of 2 can be tested" in text and "no claim beyond them" in text


def test_a_long_list_is_cut_in_print_and_counts_what_is_confounded(made, monkeypatch):
    monkeypatch.setattr("phenoica.score.contrast_list.MAX_LINES", 2)
    text = listed(made[3])
    assert "and 2 more, in the csv; 1 of all are confounded" in text and "GENE3" not in text.split("positive_vs")[0]


def test_the_verb_reads_metadata_alone(made, tmp_path):
    wells, folds, config, table = made
    wells.to_parquet(tmp_path / "wells.parquet")
    folds.to_csv(tmp_path / "folds.csv", index=False)
    arguments = ["contrasts", "--config", json.dumps(config), "--wells", str(tmp_path / "wells.parquet")]
    arguments += ["--folds", str(tmp_path / "folds.csv"), "--out", str(tmp_path / "c.csv")]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0 and "query_vs_reference: 4 of 5 can be tested" in result.stdout
    written = pd.read_csv(io.StringIO(table.to_csv(index=False)))
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "c.csv"), written)
    result = CliRunner().invoke(cli.app, [*arguments, "--no-position"])
    assert "position_overlap" not in result.stdout
