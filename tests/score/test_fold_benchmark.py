"""The stand-in of benchmarks/fold.py has the design of RxRx3-core, and the verbs run on it in their own processes."""

import importlib.util
from pathlib import Path

import pandas as pd
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
LIGHT = {
    "disentangle": {
        "views": ["raw", "pca", "rotation", "ica"], "n_components": 4, "rotation_draws": 1, "reproducibility_draws": 0,
        "label_permutations": 99,
    },
    "score": {"rotation_draws": 1, "lambda_fractions": [0.5], "relabellings": 19, "in_distribution": False},
}  # fmt: skip


@pytest.fixture
def fold(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))  # it takes its features from views.py beside it
    spec = importlib.util.spec_from_file_location("fold_benchmark", FOLDER / "fold.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_stand_in_has_the_published_design(fold):
    wells = fold.design(0.03)
    assert abs(len(wells) / (0.03 * fold.WELLS) - 1) < 0.15
    genes = wells[wells["gene"].notna()]
    counts = genes.groupby("gene")["experiment_name"].nunique()
    queries = counts[counts.index.str.startswith("GENE")]
    assert len(queries) == round(0.03 * fold.GENES) and set(queries) == {2}
    assert set(counts[["PLK1", "MTOR", *fold.CUTTING]]) == {genes["experiment_name"].nunique()}
    assert set(genes.groupby("gene")["treatment"].nunique()[queries.index]) == {fold.GUIDES}
    plates = wells.groupby(["experiment_name", "plate"])
    assert set(plates["treatment"].agg(lambda names: (names == "EMPTY_control").sum())) == {fold.EMPTY_WELLS}
    assert not plates["address"].agg(lambda places: places.duplicated().any()).any()
    compounds = wells[wells["SMILES"] != ""]
    assert set(compounds.groupby("treatment")["experiment_name"].nunique()) == {1}
    assert set(compounds.groupby("treatment")["concentration"].nunique()) == {fold.DOSES}
    assert set(compounds.groupby(["treatment", "concentration"]).size()) == {fold.REPLICATES}


def test_verbs_run_and_are_measured(fold, tmp_path, monkeypatch):
    monkeypatch.setattr(fold, "PLATES", 2)
    monkeypatch.setattr(fold, "WIDTH", 80)
    found = fold.benchmark(tmp_path, 0.001, 1, **LIGHT)
    for verb in ("disentangle", "score", "score_views"):
        assert found[f"{verb}_s"] > 0 and found[f"{verb}_cpu_s"] > 0
        assert found[f"{verb}_gib"] > 0.05  # a Python with numpy takes more
    assert found["experiments"] == 7 and found["held_out_experiments"] >= 1
    scores = pd.read_parquet(tmp_path / "share-0.001/rxrx3-core/score" / f"fold-{found['fold']}.parquet")
    assert {"raw", "pca", "rotation", "ica", "image_measures"} <= set(scores["view"])


def test_a_verb_that_fails_stops_the_benchmark(fold):
    with pytest.raises(SystemExit, match="failed"):
        fold.measured([fold.sys.executable, "-c", "raise ValueError"], 1)
