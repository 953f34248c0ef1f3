"""One fold of a screen of RxRx3-core's size: seconds and peak memory of disentangle, score and score-views.

    python benchmarks/fold.py --work scratch [--share 0.1]

The stand-in has the published design: 176 gene experiments of nine 1,536-well plates with PLK1, MTOR and four cutting
guides on each, 735 genes of six guides in two experiments each, and 1,674 compounds in eight doses, each in one of four
compound experiments; 222,601 wells. Features are 384 mixed Laplace sources, of which experiments, plates, rows, columns
and perturbations shift some. `--share` takes that share of experiments, genes and compounds, so that experiments keep
their size. Configuration: config/rxrx3-core.yaml. The fold is the one that holds out compound-001: with compounds,
scoring has most to do.

Every verb runs as the workflow runs it, in a process of its own on `--threads` cores (a job of the workflow has one);
its peak is VmHWM, the operating system's own. The last line printed is one JSON object: wells, experiments, and of each
verb `_s` (by the clock), `_cpu_s` (of processors, which a busy machine adds little to) and `_gib`; `fold_s` is
disentangle and then the slower of the other two, as two cores do it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pandas as pd
import yaml
from views import wells as sources

from phenoica import schema
from phenoica.config import RunPaths, resolve
from phenoica.embed.assemble import as_categories
from phenoica.files import write_csv, write_h5ad, write_parquet
from phenoica.plates.address import format_address
from phenoica.plates.folds import assign_folds
from phenoica.plates.metadata import wells_from_metadata

WELLS, WIDTH, MEASURES = 222_601, 384, 72
GENE_EXPERIMENTS, COMPOUND_EXPERIMENTS = 176, 4
GENES, GUIDES, PLATES = 735, 6, 9
COMPOUNDS, DOSES, REPLICATES, COMPOUND_PLATES = 1674, 8, 7, 48
EMPTY_WELLS, ROWS, COLUMNS = 16, 32, 48
CUTTING = ("EIF3H", "SRC", "HCK", "CYP11B1")
VERBS = ("disentangle", "score", "score-views")
MAIN = "from phenoica.cli import main; main()"
BIOLOGY, BATCH, PLATE, POSITION = 40, 24, 8, 4  # planted sources, in this order
SEED, POLL_S = 0, 0.05


def design(share: float) -> pd.DataFrame:
    """Return metadata in the published columns, a row a well."""
    rng = np.random.default_rng(SEED)
    n_genes, n_compounds = max(6, round(share * GENES)), max(2, round(share * COMPOUNDS))
    n_experiments, n_last = max(6, round(share * GENE_EXPERIMENTS)), max(1, round(share * COMPOUND_EXPERIMENTS))
    home = np.concatenate([rng.permutation(n_experiments) for _ in range(-(-n_genes // n_experiments))])[:n_genes]
    away = (home + rng.integers(1, n_experiments, n_genes)) % n_experiments
    frames = []
    for e in range(n_experiments):
        genes = np.flatnonzero((home == e) | (away == e))
        names = ["PLK1", "MTOR", *(f"GENE{g:04d}" for g in genes)]
        guides = [(name, f"{name}_guide_{i + 1}", "", np.nan) for name in names for i in range(GUIDES)]
        guides += [(name, f"{name}_guide_1", "", np.nan) for name in CUTTING]
        frames += [_plate(rng, f"gene-{e + 1:03d}", plate + 1, guides, "CRISPR") for plate in range(PLATES)]
    n_plates = max(REPLICATES, round(share * COMPOUND_EXPERIMENTS / n_last * COMPOUND_PLATES))
    for e in range(n_last):
        doses = [
            ("", f"compound {c:04d}", f"C{c}", 10.0 / 3**dose)
            for c in range(e, n_compounds, n_last) for dose in range(DOSES)
        ]  # fmt: skip
        for plate in range(n_plates):
            own = [dose for i, dose in enumerate(doses) if (plate - i) % n_plates < REPLICATES]
            frames.append(_plate(rng, f"compound-{e + 1:03d}", plate + 1, own, "COMPOUND"))
    return pd.concat(frames, ignore_index=True).head(WELLS)


def _plate(rng: np.random.Generator, experiment: str, plate: int, own: Sequence[tuple], kind: str) -> pd.DataFrame:
    wells = [("", "EMPTY_control", "", np.nan)] * EMPTY_WELLS + list(own)
    frame = pd.DataFrame(wells, columns=["gene", "treatment", "SMILES", "concentration"])
    places = rng.choice(ROWS * COLUMNS, len(wells), replace=False)
    frame["address"] = [format_address(int(p) // COLUMNS + 1, int(p) % COLUMNS + 1) for p in places]
    frame["gene"] = frame["gene"].replace("", None)
    return frame.assign(
        experiment_name=experiment, plate=str(plate), perturbation_type=kind, cell_type="HUVEC", well_type_label=None
    )


def embedding(obs: pd.DataFrame) -> np.ndarray:
    """Return float32 (n, 384) features in which perturbations, experiments, plates and places shift sources."""
    rng = np.random.default_rng([SEED, 1])
    planted = BIOLOGY + BATCH + PLATE + POSITION
    shift = np.zeros((len(obs), planted), dtype=np.float32)
    start = 0
    for column, width, size in (
        (schema.PERTURBATION, BIOLOGY, 1.0), (schema.EXPERIMENT, BATCH, 1.0), (schema.PLATE_ID, PLATE, 0.5),
    ):  # fmt: skip
        codes, names = pd.factorize(obs[column].astype(str))
        effects = size * rng.standard_normal((len(names), width)) * (rng.random((len(names), width)) < 0.2)
        effects[names == "EMPTY_control"] = 0.0
        shift[:, start : start + width] = effects[codes]
        start += width
    place = np.column_stack([obs[c] / n - 0.5 for c, n in ((schema.ROW, ROWS), (schema.COLUMN, COLUMNS))])
    shift[:, start:] = place @ rng.standard_normal((2, POSITION))
    return sources(len(obs), WIDTH, shift=shift)[0]


def stand_in(work: Path, share: float, **changes: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Write what the verbs read, as embed, qc and plates write it; return the configuration and the fold.

    `changes` are settings, by section, that differ from those of the real data set.
    """
    settings = yaml.safe_load((Path(__file__).parents[1] / "config/rxrx3-core.yaml").read_text(encoding="utf-8"))
    settings |= {section: {**settings.get(section, {}), **own} for section, own in changes.items()}
    config = resolve({**settings, "results": str(work)})
    wells = wells_from_metadata(design(share), config["plates"], config["seed"])
    paths, rng, n = RunPaths.of(config), np.random.default_rng([SEED, 2]), len(wells)
    obs = wells.assign(**{schema.N_TILES: 4, schema.MISSING_CHANNELS: "", schema.CELL_COUNT: 30.0 + rng.poisson(5, n)})
    obs = as_categories(obs).set_index(schema.WELL_ID)
    measures = pd.DataFrame(
        rng.standard_normal((n, MEASURES)), index=obs.index, columns=[f"measure_{i}" for i in range(MEASURES)]
    )
    var = pd.DataFrame(index=schema.var_names(WIDTH))
    adata = anndata.AnnData(embedding(obs), obs=obs, var=var, obsm={schema.IMAGE_MEASURES: measures})
    adata.uns[schema.UNS] = {key: "benchmark" for key in schema.UNS_KEYS}
    for path in (paths.embeddings, paths.qc_wells, paths.plates("folds.csv")):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_h5ad(paths.embeddings, adata)
    qc = {schema.QC_ACQUISITION: "", schema.QC_PHENOTYPE: "", schema.QC_PASS: True}
    write_parquet(paths.qc_wells, wells[[schema.WELL_ID]].assign(**qc))
    folds = assign_folds(wells, config)
    write_csv(paths.plates("folds.csv"), folds)
    return config, int(folds.loc[folds[schema.EXPERIMENT] == "compound-001", schema.FOLD].iloc[0])


def measured(command: Sequence[str], threads: int) -> dict[str, float]:
    """Run a command; return its seconds, those of processors, and its peak resident memory in GiB."""
    limits = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    start, used, peak = time.perf_counter(), _processor_seconds(), 0.0
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, env=os.environ | limits, stderr=said)
        while process.poll() is None:
            peak = max(peak, _peak_gib(process.pid))
            time.sleep(POLL_S)
        seconds = time.perf_counter() - start
        if process.returncode:
            said.seek(0)
            sys.exit(f"{' '.join(command[3:])} failed:\n{said.read()}")
    return {"s": seconds, "cpu_s": _processor_seconds() - used, "gib": peak}


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _peak_gib(pid: int) -> float:
    # not getrusage, which counts the parent's memory from before the program was started
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    lines = [line.split() for line in status.splitlines() if line.startswith("VmHWM")]
    return int(lines[0][1]) / 2**20 if lines else 0.0  # a process that has just ended has no memory


def benchmark(work: Path, share: float, threads: int, **changes: Mapping[str, Any]) -> dict[str, float]:
    """Make the stand-in, run the verbs, and return what the JSON line says."""
    folder = work / f"share-{share:g}"
    config, fold = stand_in(folder, share, **changes)
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    folds = pd.read_csv(RunPaths.of(config).plates("folds.csv"))
    qc = pd.read_parquet(RunPaths.of(config).qc_wells)
    found: dict[str, Any] = {
        "share": share, "threads": threads, "wells": len(qc), "experiments": len(folds), "fold": fold,
        "held_out_experiments": int((folds[schema.FOLD] == fold).sum()),
    }  # fmt: skip
    for verb in VERBS:
        one = measured([sys.executable, "-c", MAIN, verb, "--config", str(path), "--fold", str(fold)], threads)
        print(f"{verb:<12}{one['s']:9.1f} s{one['cpu_s']:9.1f} cpu s{one['gib']:7.2f} GiB", flush=True)
        found |= {f"{verb.replace('-', '_')}_{name}": value for name, value in one.items()}
    found["fold_s"] = found["disentangle_s"] + max(found["score_s"], found["score_views_s"])
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the stand-in, 0.5 GB at share 1")
    parser.add_argument("--share", type=float, default=1.0, help="of experiments, genes and compounds")
    parser.add_argument("--threads", type=int, default=1, help="cores of each process")
    options = parser.parse_args()
    found = benchmark(options.work, options.share, options.threads)
    print(json.dumps({key: round(value, 3) for key, value in found.items()}))


if __name__ == "__main__":
    main()
