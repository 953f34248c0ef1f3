"""Runs whose source is profiles, by the workflow as a user would start them: a tiny screen, and two real data sets.

The real ones are those of the READMEs: their configuration is read from there, so the examples are what is tested.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import anndata
import pandas as pd
import pytest
import yaml

from phenoica import schema

ROOT = Path(__file__).resolve().parents[1]


def snakemake(folder: Path, config: dict) -> str:
    """Run the whole workflow in a folder; return what it printed."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    env = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    command = [sys.executable, "-m", "snakemake", "-s", str(ROOT / "Snakefile"), "-d", str(folder), "--cores", "all"]
    result = subprocess.run([*command, "--configfile", str(path)], env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def example(run: str, readme: str = "config/README.md") -> dict:
    """Return the configuration of that name that a README shows."""
    text = (ROOT / readme).read_text()
    blocks = re.findall(r"^( *)```yaml\n(.*?)\n\1```", text, re.S | re.M)
    found = [yaml.safe_load(re.sub(f"^{indent}", "", block, flags=re.M)) for indent, block in blocks]
    return next(config for config in found if config["run"] == run)


def test_both_readmes_show_one_and_the_same_example():
    assert example("bbbc021") == example("bbbc021", "README.md")


def test_a_tiny_screen_of_profiles_reaches_every_page(profile_screen, tmp_path):
    profile_screen.frame.loc[50, [f"Cells_{j}" for j in range(6)]] = profile_screen.frame.loc[
        7, [f"Cells_{j}" for j in range(6)]
    ]
    profile_screen.write()
    printed = snakemake(tmp_path, profile_screen.config())
    root = tmp_path / "results/profiles"
    assert "No row cell_count: the profiles bring no cell count" in printed
    assert "No row image_measures: the wells are profiles" in printed
    adata = anndata.read_h5ad(root / "disentangle/disentangled.h5ad")
    schema.check(adata)
    assert adata.obsm[schema.X_ICA].shape == (62, 2) and adata.obs["qc_pass"].all()
    scores = pd.read_parquet(root / "score/scores.parquet")
    assert {"raw", "ica", "position_linear"} <= set(scores["view"])
    assert not {"cell_count", "image_measures"} & set(scores["view"])
    index = (root / "index.html").read_text()
    assert "Not measured in this run: focus, saturation" in index and "the same vector as well" in index
    assert "Profiles: none run here; 6 features a well read from profiles.csv" in index
    plates = (root / "report/plates/index.html").read_text()
    assert "Not measured in this run" in plates and "wells with a profile" in plates
    page = (root / "report/plates/W1/W1_8.0.html").read_text()
    assert "cell counts and what is made of them" in page and "Sharpness" not in page and "map-layout" in page
    assert "There is no row cell_count" in (root / "report/score.html").read_text()


@pytest.mark.slow
def test_bbbc021_weeks_and_mechanism_classes(shared, tmp_path):
    (tmp_path / "data").symlink_to(shared / "data")
    snakemake(tmp_path, example("bbbc021"))
    root = tmp_path / "results/bbbc021"
    adata = anndata.read_h5ad(root / "embed/embeddings.h5ad")
    assert adata.shape == (632, 470)
    assert adata.obs["experiment"].nunique() == 10 and adata.obs["plate_id"].nunique() == 55
    assert (adata.obs["control"] == "negative").sum() == 330
    assert adata.obs.loc[adata.obs["control"] == "none", "perturbation"].nunique() == 12
    # a known well: B04 of this plate is cytochalasin B at 10 uM, an actin disruptor
    well = adata.obs.loc["Week1_Week1_22123_B04"]
    assert (well["treatment"], well["perturbation"], well["concentration"]) == (
        "cytochalasin B",
        "Actin disruptors",
        10,
    )
    log = (root / "logs/plates.log").read_text()
    assert "2668 of 3300 keys" in log and "Cholesterol-lowering, Kinase inhibitors" in log
    scores = pd.read_parquet(root / "score/scores.parquet")
    total = scores[
        (scores["fold"] == -1) & (scores["metric"] == "auroc") & (scores["contrast"] == "query_vs_reference")
    ]
    linear = total[(total["probe"] == "l2") & (total["perturbation"] == "macro") & total["draw"].isna()]
    assert linear.set_index("view")["value"].drop("rotation", errors="ignore").gt(0.95).all()
    same = linear.set_index("view")["value"].loc[["pca", "rotation", "ica"]]
    assert same.between(0.981, 0.996).all() and same.max() - same.min() < 1e-4  # .986 to .991 within noise, saturated
    held_out = total[total["scope"] == "pooled"]
    lonely = held_out[held_out["perturbation"].isin(["Cholesterol-lowering", "Kinase inhibitors"])]
    assert lonely["value"].isna().all() and set(lonely["reason"]) == {"one_experiment"}


@pytest.mark.slow
def test_cpjump1_is_reported_as_confounded_with_position(shared, tmp_path):
    (tmp_path / "data").symlink_to(shared / "data")
    printed = snakemake(tmp_path, example("cpjump1"))
    root = tmp_path / "results/cpjump1"
    adata = anndata.read_h5ad(root / "embed/embeddings.h5ad")
    assert adata.shape == (7 * 384, 904) and adata.obs["experiment"].nunique() == 7
    assert (adata.obs["control"] == "negative").sum() == 448
    assert adata.obs["perturbation"].nunique() == 303
    warning = re.search(r"CONFOUNDED WITH POSITION: (\d+) of (\d+) query perturbations", printed)
    assert warning and int(warning[1]) > 0.9 * int(warning[2])
    assert "CONFOUNDED WITH POSITION" in (root / "report/score.html").read_text()
    hits = pd.read_csv(root / "score/hits.csv")
    confounded = hits["position_overlap"] < 0.5
    assert confounded.mean() > 0.9 and not hits.loc[confounded, "claim"].any()
    assert (hits.loc[confounded, "position_flag"] == "position_confounded").all()
    listed = pd.read_csv(root / "score/contrasts.csv")
    assert (listed["position_overlap"].dropna() < 0.5).mean() > 0.9
    assert "sit on one address on every plate" in " ".join((root / "index.html").read_text().split())
