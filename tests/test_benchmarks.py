"""Every benchmark still runs: small, with the code it times replaced nowhere, and to its last line of JSON.

Numbers of so small a run mean nothing, so only what cannot depend on speed is looked at. benchmarks/embed.py and
benchmarks/fold.py have their tests beside those of the embedding job and of a fold, and the simulation of
benchmarks/coverage.py is also used by the tests of tests.
"""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from phenoica import schema
from phenoica.cli import app
from phenoica.config import resolve
from phenoica.demo import layout
from phenoica.demo.plates import image_keys, pretraining_experiments

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def last_line(monkeypatch, capsys):
    """Return a function that runs a benchmark's `main` with these arguments and reads its last line."""

    def run(benchmark, *arguments):
        monkeypatch.setattr(sys, "argv", [benchmark.__file__, *map(str, arguments)])
        benchmark.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def set_sizes(monkeypatch, benchmark, **sizes):
    for name, value in sizes.items():
        assert hasattr(benchmark, name), name
        monkeypatch.setattr(benchmark, name, value)


def test_every_benchmark_has_a_test():
    here = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    elsewhere = {"embed": "embed/test_benchmark.py", "fold": "score/test_fold_benchmark.py"}
    assert all((Path(__file__).parent / path).is_file() for path in elsewhere.values())
    assert {path.stem for path in BENCHMARKS.glob("*.py")} <= here | elsewhere.keys()


def test_ica(monkeypatch, last_line):
    benchmark = load("ica")
    set_sizes(monkeypatch, benchmark, SIZES=((10, 2, 1), (4000, 4, 3)))
    found = last_line(benchmark, "--small", "--mixes", 1)  # which exits where a solver does not reach the rule
    assert set(found) == {"speedup_4000x4", "memory_vs_matrix"} and found["speedup_4000x4"] > 0


def test_views(monkeypatch, last_line):
    from phenoica.disentangle import linear_views

    benchmark = load("views")
    monkeypatch.setattr(linear_views, "fit_rotation", linear_views.fit_rotation)  # `measure` replaces it: put it back
    for name in benchmark.VIEWS:
        assert benchmark.measure(name, 3000, 12, 4)["fit_s"] > 0
    found = last_line(benchmark, "--wells", 3000, "--features", 12, "--components", 4, "--views", "pca")
    assert found["wells"] == 3000 and set(found["views"]) == {"pca"}


def test_score(monkeypatch, last_line):
    import torch

    benchmark = load("score")
    set_sizes(monkeypatch, benchmark, EXPERIMENTS=10, REFERENCES=20, CASES=20, WIDTH=8, QUERIES=3, GUIDES=2)
    threads = torch.get_num_threads()
    try:
        found = last_line(benchmark, "--views", 2, "--threads", 1)
    finally:
        torch.set_num_threads(threads)
    assert found["not_converged"] == 0 and found["max_auroc_difference"] < 0.01 and found["speedup"] > 0


def test_image_measures(monkeypatch, last_line):
    benchmark = load("image_measures")
    set_sizes(monkeypatch, benchmark, WELLS=3)
    found = last_line(benchmark)
    assert set(found["by_diameter_px"]) == {"10", "28", "40"}
    assert found["measures_ms_per_well"] == max(found["by_diameter_px"].values()) > 0


def test_coverage(last_line):
    found = last_line(load("coverage"), "--nulls", 2, "--experiments", 2, 4)
    settings = [(row["experiments"], row["folds"], row["shift"]) for row in found["settings"]]
    assert settings == [(2, 2, 0.0), (2, 2, 0.3), (4, 4, 0.0), (4, 4, 0.3)]
    assert all(np.isfinite([row["coverage"], row["width"], row["auroc"]]).all() for row in found["settings"])


def test_plates(monkeypatch, last_line, tmp_path):
    benchmark = load("plates")
    set_sizes(
        monkeypatch, benchmark, N_WELLS=112, N_EXPERIMENTS=2, N_GENE_EXPERIMENTS=1, PLATES=2, N_SHARDS=2,
        IMAGES_A_SHARD=324, SMALL_SHARE=2, DIFFERENT_WELLS=2, DECODED=200, ROUNDS=1, THREADS=1, SIDE_PX=128, DIM=8,
        MODEL={**benchmark.MODEL, "image_size": 128},
    )  # fmt: skip
    seconds, gib = benchmark.measured([sys.executable, "-c", ""])
    assert seconds > 0 and gib > 0

    def in_this_process(command):  # starts of Python would take most of the time
        assert command[:3] == benchmark.COMMAND == [sys.executable, "-m", "phenoica.cli"]
        app(command[3:], standalone_mode=False)
        return 1.0, 1.0

    monkeypatch.setattr(benchmark, "measured", in_this_process)
    found = last_line(benchmark, "--work", tmp_path)
    assert set(found) == {
        "index_s", "index_gib", "parquet_to_h5ad_s", "parquet_to_h5ad_gib", "decode_vs_bare", "decode_images_per_s",
        "embed_gib_small_shard", "embed_gib_large_shard",
    }  # fmt: skip
    assert min(found.values()) > 0


def scored_run(folder, trained, genes):
    """Write what a run of the demo leaves, with `trained` as the AUROC of raw and 0.6 as that of random weights."""
    rows = [
        {
            "contrast": "positive_vs_reference" if gene in ("PLK1", "MTOR") else "query_vs_reference",
            "perturbation": gene, "view": view, "probe": "l1", "metric": "auroc", "scope": "pooled", "fold": fold,
            "value": value + 0.01 * fold * (view == "raw"),
        }
        for gene in genes
        for view, value in (("raw", trained), ("random_encoder", 0.6), ("image_measures", 0.95))
        for fold in (0, 1, 2, -1)
    ]  # fmt: skip
    from phenoica.score.rows import table

    classes = [layout.SHAPE if gene in ("PLK1", "MTOR") else layout.TEXTURE for gene in genes]
    (folder / "score").mkdir(parents=True)
    (folder / "demo").mkdir()
    table(rows, schema.SCORE_COLUMNS).to_parquet(folder / "score/scores.parquet")
    truth = pd.DataFrame({schema.PERTURBATION: genes, layout.EFFECT_CLASS: classes})
    truth.to_parquet(folder / "demo/truth.parquet")
    return folder


def test_demo_encoder(last_line, tmp_path):
    genes = ["PLK1", "MTOR", "GENE1", "GENE2"]
    first, second = (scored_run(tmp_path / name, value, genes) for name, value in (("a", 0.8), ("b", 0.7)))
    found = last_line(load("demo_encoder"), first, second, "--beside", second)
    assert found["a"]["texture_genes"] == 2 and found["a"]["image_measures"]["macro"] == 0.95
    trained = found["a"]["trained_minus_random"]
    assert trained["difference"] == pytest.approx(0.19) and trained["low"] < 0.2 < trained["high"]
    assert found["over_runs"]["trained_minus_random"]["mean"] == pytest.approx(0.14)
    assert found["between_runs"]["macro"] == pytest.approx(0.1)


def test_pretrain_recipe(monkeypatch, last_line, tmp_path):
    """Images of noise stand where rendered ones would, so nothing is rendered."""
    benchmark, write_shard = load("pretrain_recipe"), load("plates").write_shard
    rng = np.random.default_rng(0)

    def noise(path, keys):
        import imagecodecs

        pictures = rng.integers(0, 255, (len(keys), 64, 64), dtype=np.uint8)
        write_shard(path, keys, [imagecodecs.jpeg2k_encode(p, codecformat="jp2") for p in pictures])

    wells = [
        (e, "1", f"B{i + 1:02d}") for e in pretraining_experiments([1]) for i in range(36)
    ]  # 64 are for validation
    noise(benchmark.pretraining_shard(tmp_path / "images", 1), [key for well in wells for key in image_keys(*well)])
    truth = pd.DataFrame(
        [
            {schema.EXPERIMENT: f"gene-{e:03d}", schema.PLATE: "1", schema.ADDRESS: f"{row}{i + 1:02d}",
             schema.PERTURBATION: name, layout.EFFECT_CLASS: kind, layout.EXPERIMENT_NUMBER: e}
            for e in (1, 2)
            for row, (name, kind) in zip("BCDE", (
                (layout.NEGATIVE_LABEL, layout.NULL), ("PLK1", layout.SHAPE), ("MTOR", layout.SHAPE),
                ("GENE1", layout.TEXTURE)), strict=True)
            for i in range(3)
        ]
    )  # fmt: skip
    places = truth[[schema.EXPERIMENT, schema.PLATE, schema.ADDRESS]].itertuples(index=False)
    noise(tmp_path / "selection/shards/train.parquet", [key for well in places for key in image_keys(*well)])
    truth.to_parquet(tmp_path / "selection/truth.parquet")
    config = resolve({
        "run": "r", "source": "demo",
        "embed": {"model": {"image_size": 64, "patch_size": 16, "dim": 16, "depth": 1, "heads": 2}},
        "pretrain": {"demo_seeds": [1], "batch_tiles": 4, "warmup_steps": 1, "threads": 1,
                     "decoder": {"dim": 16, "depth": 1, "heads": 2}},
    })  # fmt: skip
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    set_sizes(monkeypatch, benchmark, CONFIG=tmp_path / "config.yaml")
    arguments = ("--steps", 2, "--seeds", 0, 1, "--settings", "base", "layer scale 1", "--work", tmp_path)
    found = last_line(benchmark, *arguments)
    assert set(found) == {f"{name}, {kind}" for name in ("base", "layer scale 1") for kind in ("trained", "random")}
    for values in found.values():
        assert set(values) == {"PLK1", "MTOR", "texture", "macro", "macro_pooled"}
        assert all(0 <= mean <= 1 and np.isfinite(sd) for mean, sd in values.values())
    assert found["base, random"] == found["layer scale 1, random"]  # the same weights
    assert last_line(benchmark, *arguments) == found  # taken up, not trained again
