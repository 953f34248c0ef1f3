"""The workflow itself: targets, profile, configurations and directories, on tiny screens."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import anndata
import pandas as pd
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
SNAKEMAKE = [sys.executable, "-m", "snakemake", "-s", str(ROOT / "Snakefile")]


def snakemake(folder: Path, *arguments: str, path: Path | None = None, check: bool = True):
    """Run snakemake in another directory; the interpreter's own scripts come first in PATH."""
    first = [str(path)] if path else []
    env = {**os.environ, "PATH": os.pathsep.join([*first, str(Path(sys.executable).parent), os.environ["PATH"]])}
    result = subprocess.run(
        [*SNAKEMAKE, "-d", str(folder), *arguments], env=env, capture_output=True, text=True, check=False
    )
    if check:
        assert result.returncode == 0, result.stdout + result.stderr
    return result


def write_config(screen, **changes) -> Path:
    config = screen.write()
    config["results"] = "results"
    for section, values in changes.items():
        config[section] = {**config.get(section, {}), **values} if isinstance(values, dict) else values
    path = screen.folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_screen_runs_from_another_directory_and_a_second_run_does_nothing(tiny_screen):
    config = write_config(tiny_screen, disentangle={"n_components": 3, "min_fit_controls": 2})
    folder = tiny_screen.folder
    snakemake(folder, "--cores", "2", "--configfile", str(config), "--", "qc_pages")
    adata = anndata.read_h5ad(folder / "results/tiny/embed/embeddings.h5ad")
    assert adata.shape == (16, 24)
    assert (folder / "results/tiny/report/plates/gene-001/1.html").exists()
    again = snakemake(folder, "--cores", "2", "-n", "--configfile", str(config), "--", "qc_pages")
    assert "Nothing to be done" in again.stdout + again.stderr
    changed = write_config(tiny_screen, qc={"limit_mads": 7}, disentangle={"n_components": 3, "min_fit_controls": 2})
    jobs = snakemake(folder, "--cores", "2", "-n", "--configfile", str(changed), "--", "qc_pages").stdout
    assert "rule qc:" in jobs
    assert "rule embed_shard:" not in jobs


def test_default_configuration_is_found_from_another_directory(tmp_path):
    plan = snakemake(tmp_path, "--cores", "1", "-n", "results/demo/plates/units.csv")
    assert "results/demo/demo/metadata.csv" in plan.stdout


def test_no_demo_key_leaks_into_a_configuration_of_ones_own(tiny_screen):
    config = write_config(tiny_screen)
    folder = tiny_screen.folder
    snakemake(folder, "--cores", "1", "--configfile", str(config), "--", "results/tiny/config.json")
    written = yaml.safe_load((folder / "results/tiny/config.json").read_text())
    demo = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    assert written["disentangle"]["n_components"] == 128 != demo["disentangle"]["n_components"]
    assert written["licences"]["images"] == "not stated"


def test_a_mistyped_key_stops_before_any_job(tiny_screen):
    config = write_config(tiny_screen, plates={"fit_controls_share": 0.4})
    result = snakemake(tiny_screen.folder, "--cores", "1", "-n", "--configfile", str(config), check=False)
    assert result.returncode != 0
    assert "unknown key 'plates.fit_controls_share'; did you mean 'fit_control_share'?" in result.stdout + result.stderr


def test_a_missing_checkpoint_stops_before_any_job(tiny_screen):
    config = write_config(tiny_screen, embed={"checkpoint": "nowhere.safetensors"})
    result = snakemake(tiny_screen.folder, "--cores", "1", "-n", "--configfile", str(config), check=False)
    assert result.returncode != 0
    assert "nowhere.safetensors: no such checkpoint; set embed.checkpoint" in result.stdout + result.stderr


COUNTING_SHIM = """#!{python}
import pathlib, subprocess, sys, time
arguments = sys.argv[1:]
if arguments[0] != "embed":
    sys.exit(subprocess.run([{real!r}, *arguments]).returncode)
running = pathlib.Path({folder!r}) / "running"
running.mkdir(exist_ok=True)
mark = running / arguments[arguments.index("--unit") + 1]
mark.touch()
count = len(list(running.iterdir()))
with open({log!r}, "a") as f:
    f.write(f"{{count}}\\n")
time.sleep(1.5)
mark.unlink()
for option in ("--part", "--quarantine"):
    pathlib.Path(arguments[arguments.index(option) + 1]).touch()
"""


@pytest.mark.parametrize(("profile", "most"), [([], 1), (["--workflow-profile", "none"], 4)])
def test_only_one_gpu_job_at_a_time_with_the_default_profile(tiny_screen, profile, most):
    """The second case runs without the profile and shows that the counter would notice."""
    config = write_config(tiny_screen)
    keys, images = list(tiny_screen.images), tiny_screen.images
    folder = tiny_screen.folder
    for old in (folder / "shards").iterdir():
        old.unlink()
    quarter = len(keys) // 4
    for number in range(4):
        part = {k: images[k] for k in keys[number * quarter : (number + 1) * quarter]}
        tiny_screen.write_shard(folder / f"shards/train-{number}.parquet", part)
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    shim = bin_folder / "phenoica"
    real = str(Path(sys.executable).parent / "phenoica")
    shim.write_text(
        COUNTING_SHIM.format(python=sys.executable, real=real, folder=str(folder), log=str(folder / "counts"))
    )
    shim.chmod(shim.stat().st_mode | stat.S_IXUSR)
    targets = [f"results/tiny/embed/parts/shard-{i}.parquet" for i in range(4)]
    base = ["--cores", "4", "--configfile", str(config)]
    snakemake(folder, *base, "--", "results/tiny/plates/units.csv", path=bin_folder)
    snakemake(folder, *base, "--set-threads", "embed_shard=1", *profile, "--", *targets, path=bin_folder)
    counts = [int(line) for line in (folder / "counts").read_text().split()]
    assert len(counts) == 4
    if most == 1:
        assert max(counts) == 1
    else:
        assert max(counts) > 1, "the counter does not notice jobs that run together"


def test_one_experiment_gives_pages_and_says_that_nothing_is_scored(tiny_screen):
    tiny_screen.rows = [r for r in tiny_screen.rows if r["experiment_name"] == "gene-001"]
    tiny_screen.images = {k: v for k, v in tiny_screen.images.items() if k.startswith("gene-001/")}
    config = write_config(tiny_screen)
    snakemake(tiny_screen.folder, "--cores", "2", "--configfile", str(config))
    root = tiny_screen.folder / "results/tiny"
    assert pd.read_csv(root / "plates/units.csv")["kind"].tolist() == ["shard", "shard", "experiment"]
    page = (root / "index.html").read_text()
    assert "scores need at least two experiments" in page
    assert not (root / "score").exists()


def test_an_encoder_is_trained_on_the_named_experiments_and_only_its_own_settings_train_it_again(tiny_screen):
    training = {
        "experiments": ["gene-002"], "steps": 3, "batch_tiles": 2, "warmup_steps": 1, "validation_wells": 2,
        "decoder": {"dim": 16, "depth": 1, "heads": 2},
    }  # fmt: skip
    options = {"embed": {"checkpoint": "pretrain", "random_baseline": True}, "pretrain": training}
    config, folder = write_config(tiny_screen, **options), tiny_screen.folder
    snakemake(folder, "--cores", "2", "--configfile", str(config), "--", "embeddings")
    adata = anndata.read_h5ad(folder / "results/tiny/embed/embeddings.h5ad")
    assert "for 3 steps on 1 experiment (" in adata.uns["phenoica"]["checkpoint"]
    assert adata.uns["phenoica"]["encoder_saw_test_images"] == "yes"
    assert adata.obsm["X_random_encoder"].shape == adata.shape
    assert abs(adata.obsm["X_random_encoder"] - adata.X).max() > 0.01
    plan = snakemake(folder, "--cores", "2", "-n", "--configfile", str(config), "--", "embeddings")
    assert "Nothing to be done" in plan.stdout + plan.stderr
    options["embed"]["nucleus_diameter_px"] = 12
    changed = write_config(tiny_screen, **options)
    jobs = snakemake(folder, "--cores", "2", "-n", "--configfile", str(changed), "--", "embeddings").stdout
    assert "rule embed_shard:" in jobs and "rule pretrain:" not in jobs
    options["pretrain"]["learning_rate"] = 1e-3
    changed = write_config(tiny_screen, **options)
    jobs = snakemake(folder, "--cores", "2", "-n", "--configfile", str(changed), "--", "embeddings").stdout
    assert "rule pretrain:" in jobs


def test_a_screen_without_channel_1_runs_in_every_stage(tiny_screen):
    options = {"plates": {"channels": [2, 3]}, "embed": {"dna_channel": 2}}
    config, folder = write_config(tiny_screen, **options), tiny_screen.folder
    snakemake(folder, "--cores", "2", "--configfile", str(config), "--", "results/tiny/qc/plates.parquet")
    assert (folder / "results/tiny/qc/plates.parquet").exists()
