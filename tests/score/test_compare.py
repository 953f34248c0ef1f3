import json

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from phenoica import cli
from phenoica.errors import ScoreError
from phenoica.score import score
from phenoica.score.compare import COMPARE_COLUMNS, compare, compared, read_run


def write_run(folder, scores, config, folds):
    for name in ("score", "plates"):
        (folder / name).mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    scores.to_parquet(folder / "score/scores.parquet")
    pd.DataFrame(folds, columns=["experiment", "fold"]).to_csv(folder / "plates/folds.csv", index=False)
    return folder


FOLDS = [(f"gene-{e:03d}", e % 3) for e in range(6)]


@pytest.fixture(scope="module")
def runs(screen, settings, tmp_path_factory):
    """A run, and one whose encoder lost the planted source under noise; the other's folds are numbered otherwise."""
    folder, adata = tmp_path_factory.mktemp("runs"), screen(n_experiments=6, n_genes=4, effect=3.0)
    worse = adata.copy()
    worse.X = worse.X + np.random.default_rng(0).standard_normal(worse.shape).astype(np.float32) * 6
    config = settings(disentangle={"views": ["raw"]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "phenoica.plates.folds.assign_folds",
            lambda obs, config: pd.DataFrame(FOLDS, columns=["experiment", "fold"]),
        )
        tables = [score(a, config) for a in (adata, worse)]
    other = tables[1].copy()
    other["fold"] = other["fold"].map({-1: -1, 0: 2, 1: 0, 2: 1}).astype("Int64")
    second = {**config, "run": "worse", "embed": {**config["embed"], "layer": 3}, "seed": 5}
    moved = [(e, {0: 2, 1: 0, 2: 1}[k]) for e, k in FOLDS]
    return write_run(folder / "a", tables[0], config, FOLDS), write_run(folder / "b", other, second, moved), tables


def test_differences_are_paired_over_perturbations_and_folds_whatever_their_numbers(runs):
    first, second, (a, b) = read_run(runs[0]), read_run(runs[1]), runs[2]
    table = compare(first, second, 0.95)
    assert tuple(table.columns) == COMPARE_COLUMNS
    rows = table.set_index(["contrast", "view", "perturbation"]).sort_index()
    plk1 = rows.loc[("positive_vs_reference", "raw", "PLK1")]

    def value(scores, fold):
        found = scores[(scores["perturbation"] == "PLK1") & (scores["view"] == "raw") & (scores["fold"] == fold)
                       & (scores["metric"] == "auroc") & (scores["scope"] == "pooled") & (scores["probe"] == "l1")
                       & (scores["contrast"] == "positive_vs_reference") & scores["view_minus"].isna()]  # fmt: skip
        return found["value"].item()

    changes = [value(b, k) - value(a, k) for k in range(3)]
    assert plk1["difference"] == pytest.approx(np.mean(changes)) and plk1["difference"] < -0.05
    assert plk1["n_folds"] == 3 and plk1["ci_low"] < plk1["difference"] < plk1["ci_high"]
    half = 4.302652729749464 * np.sqrt(np.var(changes, ddof=1) * (1 / 3 + 1 / 2))
    assert plk1["ci_low"] == pytest.approx(max(-1, plk1["difference"] - half))
    macro = rows.loc[("positive_vs_reference", "raw", "macro")]
    parts = rows.loc[("positive_vs_reference", "raw")].drop("macro")
    assert macro["difference"] == pytest.approx(parts["difference"].mean()) and macro["n_perturbations"] == 2
    text = compared(table, first, second)
    assert "seed: 0 -> 5" in text and "embed.layer: absent -> 3" in text
    assert "folds that hold out the same experiments: 3 of 3 and 3" in text


def test_other_folds_give_no_interval_and_say_why(runs, tmp_path):
    a = read_run(runs[0])
    swapped = [(e, (k + (i == 0)) % 3) for i, (e, k) in enumerate(FOLDS)]
    swapped = [(e, {"gene-000": 0, "gene-001": 0, "gene-002": 1}.get(e, 2)) for e, _ in swapped]
    folder = write_run(tmp_path / "c", a.scores, dict(a.config), swapped)
    table = compare(a, read_run(folder), 0.95)
    assert set(table["reason"]) == {"folds_differ"} and table["ci_low"].isna().all() and len(table)
    assert table["difference"].abs().max() < 1e-12


def test_the_verb_writes_every_difference_and_names_a_missing_run(runs, tmp_path):
    result = CliRunner().invoke(cli.app, ["compare", str(runs[0]), str(runs[1]), "--out", str(tmp_path / "d.csv")])
    assert result.exit_code == 0 and "second minus first" in result.stdout
    assert len(pd.read_csv(tmp_path / "d.csv")) == len(compare(read_run(runs[0]), read_run(runs[1]), 0.95))
    with pytest.raises(ScoreError, match=r"config.json is missing; give the folder of a scored run"):
        read_run(tmp_path)
