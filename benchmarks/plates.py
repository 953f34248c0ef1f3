"""The way in at the real data set's size, on a generated stand-in: index, profiles, decoding, memory of embedding.

    python benchmarks/plates.py --work scratch

The stand-in has the published shape: 222,601 wells of metadata, 1,335,606 image keys in 35 shards, 222,601 x 384
embeddings, and two shards of full size (38,160 images of 512 px) for decoding and for memory. The full-size shards
repeat a few rendered images, of about 5 kB; published ones have 13 kB, which costs both sides of the ratio alike. Every
step runs as a user runs it, in a process of its own whose peak memory is taken from the operating system. The last line
printed is one JSON object:

index_s, index_gib
    `phenoica plates` on metadata and keys (bars 60 s, 2 GiB).
parquet_to_h5ad_s, parquet_to_h5ad_gib
    `phenoica profiles` on the embeddings (bars 60 s, 3 GiB).
decode_vs_bare, decode_images_per_s
    Images a second through `read, check, decode` over those of imagecodecs alone on bytes in memory, same threads,
    median of alternating rounds (bar 0.9).
embed_gib_small_shard, embed_gib_large_shard
    Peak memory of `phenoica embed` on a twelfth of a shard and on a whole one (bar: within 10 %).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import imagecodecs
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from phenoica.demo import layout
from phenoica.demo.render import render_well
from phenoica.plates.address import format_address
from phenoica.plates.images import decode_image
from phenoica.plates.shards import KEY, iter_images, open_shard

N_WELLS, N_EXPERIMENTS, N_GENE_EXPERIMENTS, N_SHARDS, N_GENES = 222_601, 180, 176, 35, 735
PLATES, CHANNELS, DIM = 9, 6, 384
IMAGES_A_SHARD = N_WELLS * CHANNELS // N_SHARDS // CHANNELS * CHANNELS
ROW_GROUP = 100
SMALL_SHARE = 12
SIDE_PX, RATIO, DIFFERENT_WELLS = 512, 20, 12
DECODED, ROUNDS, THREADS = 3000, 5, 2
# the model of the memory measurement: small, so that images and not tokens take the time and the memory
MODEL = {"image_size": 256, "patch_size": 64, "dim": 16, "depth": 1, "heads": 2}
SEED = 0
COMMAND = [sys.executable, "-m", "phenoica.cli"]


def wells(rng: np.random.Generator) -> pd.DataFrame:
    """Return metadata in the published columns, a row a well, ordered as in the shards."""
    per_plate = np.diff(np.linspace(0, N_WELLS, N_EXPERIMENTS * PLATES + 1).astype(int))
    frames = []
    for index, n in enumerate(per_plate):
        experiment, plate = index // PLATES, index % PLATES + 1
        positions = np.sort(rng.permutation(32 * 48)[:n])
        gene = experiment < N_GENE_EXPERIMENTS
        name = f"gene-{experiment + 1:03d}" if gene else f"compound-{experiment + 1 - N_GENE_EXPERIMENTS:03d}"
        genes = [f"GENE{i:04d}" for i in rng.integers(0, N_GENES, n)]
        treatment = [f"{g}_guide_{i}" for g, i in zip(genes, rng.integers(1, 7, n), strict=True)]
        for start, label in ((0, "EMPTY_control"), (16, "PLK1_guide_1"), (20, "MTOR_guide_1")):
            for i in range(start, start + (16 if start == 0 else 4)):
                treatment[i], genes[i] = label, None if start == 0 else label.split("_")[0]
        address = [format_address(int(p) // 48 + 1, int(p) % 48 + 1) for p in positions]
        frames.append(pd.DataFrame({
            "well_id": [f"{name}_{plate}_{a}" for a in address], "experiment_name": name, "plate": str(plate),
            "address": address, "gene": genes if gene else None, "treatment": treatment,
            "SMILES": None if gene else "CC(=O)Oc1ccccc1C(=O)O |&1:3,r|", "concentration": None if gene else 2.5,
            "perturbation_type": "CRISPR" if gene else "COMPOUND", "cell_type": "HUVEC",
        }))  # fmt: skip
    return pd.concat([f.astype(object) for f in frames], ignore_index=True)


def keys_of(metadata: pd.DataFrame) -> list[str]:
    """Return the image keys of wells, channel by channel."""
    parts = zip(metadata["experiment_name"], metadata["plate"], metadata["address"], strict=True)
    return [f"{e}/Plate{p}/{a}_s1_{c}" for e, p, a in parts for c in range(1, CHANNELS + 1)]


def write_shard(path: Path, keys: list[str], images: list[bytes]) -> None:
    """Write a shard whose images repeat; nothing of it is held whole."""
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([(KEY, pa.string()), ("jp2", kind)])
    path.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(path, schema, compression="none") as writer:
        for start in range(0, len(keys), ROW_GROUP):
            here = keys[start : start + ROW_GROUP]
            cells = [{"bytes": images[(start + i) % len(images)], "path": None} for i in range(len(here))]
            writer.write_table(pa.table({KEY: here, "jp2": pa.array(cells, kind)}, schema=schema))


def rendered() -> list[bytes]:
    """Return JPEG 2000 bytes of a few rendered wells of full size, channel by channel."""
    table = layout.factors(layout.design(SEED, "pretrain"), SEED, "pretrain")
    chosen = table.iloc[:: len(table) // DIFFERENT_WELLS].to_dict("records")[:DIFFERENT_WELLS]
    wells_ = [render_well(f, SIDE_PX, (SEED, i))[0] for i, f in enumerate(chosen)]
    return [imagecodecs.jpeg2k_encode(c, level=psnr_of(c), codecformat="jp2") for w in wells_ for c in w]


def psnr_of(image: np.ndarray) -> int:
    """Return the quality, in dB, at which an image comes down to about the published 20:1."""
    for level in range(100, 20, -2):
        if len(imagecodecs.jpeg2k_encode(image, level=level, codecformat="jp2")) <= image.size / RATIO:
            return level
    return 20


def stand_in(work: Path) -> None:
    """Write what is missing of the stand-in."""
    done = work / "stand-in.json"
    if done.exists():
        return
    rng = np.random.default_rng(SEED)
    metadata = wells(rng)
    work.mkdir(parents=True, exist_ok=True)
    metadata.to_csv(work / "metadata.csv", index=False)
    keys = keys_of(metadata)
    cuts = np.linspace(0, len(keys), N_SHARDS + 1).astype(int)  # not at whole wells: wells straddle shards
    for number, (start, stop) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
        write_shard(work / f"keys/train-{number:05d}-of-{N_SHARDS:05d}.parquet", keys[start:stop], [b"\xff\x4f"])
    images = rendered()
    full = keys[: 2 * IMAGES_A_SHARD]
    write_shard(work / "large/train-00000-of-00002.parquet", full[:IMAGES_A_SHARD], images)
    write_shard(work / "large/train-00001-of-00002.parquet", full[IMAGES_A_SHARD:], images)
    write_shard(work / "small/train-00000-of-00001.parquet", full[: IMAGES_A_SHARD // SMALL_SHARE], images)
    values = rng.standard_normal((N_WELLS, DIM), dtype=np.float32)
    table = {"well_id": metadata["well_id"]} | {f"feature_{i}": values[:, i] for i in range(DIM)}
    pq.write_table(pa.table(table), work / "embeddings.parquet")
    done.write_text(json.dumps({"wells": N_WELLS, "images": len(keys)}))


def measured(command: list[str], **environment: str) -> tuple[float, float]:
    """Run a command; return its seconds and its peak memory in GiB."""
    start = time.perf_counter()
    process = subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.PIPE, text=True)
    with process.stderr:
        said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # or it would be taken for one that runs
    if status:
        sys.exit(f"{' '.join(command[:4])} ... failed:\n{said}")
    return time.perf_counter() - start, usage.ru_maxrss / 2**20


def configuration(work: Path, name: str, **sections: object) -> str:
    """Return a configuration as JSON text."""
    return json.dumps({"run": name, "results": str(work / "results"), **sections})


def index(work: Path) -> dict[str, float]:
    """Time `phenoica plates` on the keys of all shards."""
    shards = sorted(str(p) for p in (work / "keys").glob("*.parquet"))
    plates = {"shards": shards, "metadata": str(work / "metadata.csv")}
    config = configuration(work, "index", source="shards", plates=plates)
    seconds, gib = measured([*COMMAND, "plates", "--config", config])
    return {"index_s": seconds, "index_gib": gib}


def profiles(work: Path) -> dict[str, float]:
    """Time `phenoica profiles` on the published kind of embeddings; its plates stage runs before."""
    config = configuration(
        work, "profiles", source="profiles", plates={"metadata": str(work / "metadata.csv")},
        profiles={"files": [str(work / "embeddings.parquet")], "features": {"prefix": ["feature_"]}},
    )  # fmt: skip
    measured([*COMMAND, "plates", "--config", config])
    seconds, gib = measured([*COMMAND, "profiles", "--config", config])
    return {"parquet_to_h5ad_s": seconds, "parquet_to_h5ad_gib": gib}


def decoding(work: Path) -> dict[str, float]:
    """Compare reading, checking and decoding images of a shard with imagecodecs alone, in alternating rounds."""
    shard = open_shard(work / "large/train-00000-of-00002.parquet")

    def cells() -> Iterator[bytes]:
        for group in range(DECODED // ROW_GROUP):
            yield from (data for _, data in iter_images(shard, group, range(ROW_GROUP)))

    loaded = list(cells())

    def seconds(decode: Callable[[bytes], np.ndarray], source: Iterable[bytes]) -> float:
        start = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(decode, source):
                pass
        return time.perf_counter() - start

    ratios, rates = [], []
    for _ in range(ROUNDS):
        bare = seconds(lambda data: imagecodecs.jpeg2k_decode(data, numthreads=1), loaded)
        ours = seconds(decode_image, cells())
        ratios.append(bare / ours)
        rates.append(len(loaded) / ours)
    return {"decode_vs_bare": statistics.median(ratios), "decode_images_per_s": statistics.median(rates)}


def embedding(work: Path) -> dict[str, float]:
    """Take the peak memory of `phenoica embed` on a small and on a whole shard, with one model and batch size."""
    result = {}
    for name in ("small", "large"):
        plates = {"shards": [str(work / name / "*.parquet")], "metadata": str(work / "metadata.csv")}
        embed = {"model": MODEL, "precision": "float32", "batch_tiles": 64, "nucleus_diameter_px": 40}
        config = configuration(work, name, source="shards", plates=plates, embed=embed)
        measured([*COMMAND, "plates", "--config", config])
        command = [*COMMAND, "embed", "--config", config, "--unit", "0", "--threads", str(THREADS)]
        _, result[f"embed_gib_{name}_shard"] = measured(command)
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="Folder for the stand-in, about 1.6 GB, and results.")
    options = parser.parse_args()
    stand_in(options.work)
    shutil.rmtree(options.work / "results", ignore_errors=True)
    result = {}
    for part in (index, profiles, decoding, embedding):
        result |= part(options.work)
        print({k: round(v, 3) for k, v in result.items()}, file=sys.stderr)
    print(json.dumps({k: round(v, 3) for k, v in result.items()}))


if __name__ == "__main__":
    main()
