"""The production job of embedding, images to vectors and image measures, against a plain loop; in one run.

Wells of 512 px and six channels are rendered by the demo's generator and written as a shard of JPEG 2000 images; the
model has the size of OpenPhenom-S/16 and seeded weights. Timed in turn, round by round, so that ratios hold when the
machine's speed drifts: (a) `plain_loop`, (b) `embed_shard` in float32, (c) `embed_shard` with precision auto; and the
model alone, decoding alone, image measures alone and large square matrix products. Rates come from the best round,
ratios are medians over rounds. Weights are loaded before the clock starts, since a real shard has thousands of wells.

The last line is one JSON object: `auto_vs_plain` and `float32_vs_plain` (wells/s over wells/s), `auto_share_of_peak`
and `float32_share_of_peak` (arithmetic of the model alone over that of a square product in the same type),
`decode_images_per_s` (all cores), `measures_ms_per_well` (one core), `peak_gib` (resident memory of a fresh process
that runs the job with precision auto). It needs Pillow with JPEG 2000. Five to six minutes on two cores; on a GPU the
job is copies of the same wells, and the time for all of RxRx3-core is printed.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.nn import functional

from phenoica import schema
from phenoica.config import resolve
from phenoica.demo import layout
from phenoica.demo.plates import encode_well, image_keys
from phenoica.demo.render import render_well
from phenoica.embed import run
from phenoica.embed.encoder import load_encoder
from phenoica.embed.image_measures import measure
from phenoica.openphenom import OpenPhenom, OpenPhenomConfig
from phenoica.plates.images import decode_image
from phenoica.plates.run import QUARANTINE_COLUMNS

SIZE, CHANNELS, TILES_A_WELL = 512, (1, 2, 3, 4, 5, 6), 4
NUCLEUS_PX = 40
RXRX3_CORE_TILES = 890_404
ROWS_A_GROUP = 100
MEMORY_WELLS = 36  # three row groups, so that reading ahead shows in the peak
CORES = len(os.sched_getaffinity(0))


def plain_loop(shard: Path, model: OpenPhenom) -> np.ndarray:
    """Embed a shard the plain way: Pillow, one conv call, timm's blocks, float32, batches of 8, one thing at a time.

    This is the yardstick: committed as written and never changed later, whatever the package learns.
    """
    from PIL import Image

    rows = pq.read_table(shard).column("jp2").to_pylist()
    tiles = []
    for first in range(0, len(rows), 6):
        channels = [np.asarray(Image.open(io.BytesIO(row["bytes"]))) for row in rows[first : first + 6]]
        image = np.stack(channels)
        for top in (0, 256):
            for left in (0, 256):
                tiles.append(image[:, top : top + 256, left : left + 256])
    embedded = []
    with torch.inference_mode():
        projection = model.patch_embed["proj"]
        for first in range(0, len(tiles), 8):
            pixels = torch.from_numpy(np.stack(tiles[first : first + 8])).to(model.device).float() / 255
            n, c = pixels.shape[:2]
            pixels = functional.instance_norm(pixels, eps=1e-5)
            x = functional.conv2d(pixels.reshape(n * c, 1, 256, 256), projection.weight, projection.bias, stride=16)
            x = x.flatten(2).transpose(1, 2).reshape(n, c * 256, -1)
            x = torch.cat([model.cls_token.expand(n, -1, -1), x], dim=1) + model.pos_embed[:, : 1 + c * 256]
            for block in model.blocks:
                x = block(x)
            embedded.append(x[:, 1:].mean(1).cpu().numpy())
    return np.concatenate(embedded).reshape(len(rows) // 6, 4, -1).mean(1)


# ---- the job


def render(n_wells: int) -> list[tuple[str, bytes]]:
    """Render wells of the demo at full size; key and JPEG 2000 bytes of each image."""
    wells = layout.design(20260).head(n_wells)
    factors = layout.factors(wells, 20260).to_dict("records")
    images = []
    names = [schema.EXPERIMENT, schema.PLATE, schema.ADDRESS]
    for i, (experiment, plate, address) in enumerate(wells[names].itertuples(index=False)):
        pixels, _ = render_well(factors[i], SIZE, (20260, i))
        images += zip(image_keys(experiment, plate, address), encode_well(pixels), strict=True)
    return images


def write_shard(path: Path, images: list[tuple[str, bytes]], copies: int = 1) -> pd.DataFrame:
    """Write copies of the images as one shard; return the wells as the plates stage lists them."""
    rows = [(f"copy{i}-{key}" if i else key, data) for i in range(copies) for key, data in images]
    kind = pa.schema([("__key__", pa.string()), ("jp2", pa.struct([("bytes", pa.binary()), ("path", pa.string())]))])
    table = {"__key__": [k for k, _ in rows], "jp2": [{"bytes": b, "path": None} for _, b in rows]}
    pq.write_table(pa.table(table, schema=kind), path, row_group_size=ROWS_A_GROUP, compression="none")
    at = np.arange(len(rows)).reshape(-1, len(CHANNELS))
    return pd.DataFrame({
        schema.WELL_ID: [f"well-{i}" for i in range(len(at))],
        schema.EXPERIMENT: "benchmark",
        schema.UNIT: 0,
        schema.IMAGE_SITE: list(np.ones_like(at)),
        schema.IMAGE_CHANNEL: [CHANNELS] * len(at),
        schema.IMAGE_SHARD: list(np.zeros_like(at)),
        schema.IMAGE_ROW_GROUP: list(at // ROWS_A_GROUP),
        schema.IMAGE_ROW: list(at % ROWS_A_GROUP),
    })  # fmt: skip


class Job:
    """The production job on one shard: `embed_shard` as the workflow calls it."""

    def __init__(self, folder: Path, name: str, images: list[tuple[str, bytes]], copies: int, device: str):
        self.folder, self.device = folder, device
        self.shard = folder / f"{name}.parquet"
        self.wells = write_shard(self.shard, images, copies)
        pd.DataFrame(columns=list(QUARANTINE_COLUMNS)).to_csv(folder / "bad.csv", index=False)

    def config(self, precision: str) -> dict:
        """Return the configuration of the job."""
        embed = {
            "checkpoint": str(self.folder / "model.safetensors"), "device": self.device, "precision": precision,
            "nucleus_diameter_px": NUCLEUS_PX,
        }  # fmt: skip
        plates = {"shards": [str(self.shard)], "metadata": "not read by embed"}
        return resolve({"run": "benchmark", "source": "shards", "embed": embed, "plates": plates})

    def run(self, precision: str, encoder: object | None = None) -> np.ndarray:
        """Run the job, with a loaded encoder if one is given; return the embeddings."""
        part, config = self.folder / "part.parquet", self.config(precision)
        load = (lambda *_, **__: encoder) if encoder else load_encoder
        with mock.patch.object(run, "load_encoder", load):
            run.embed_shard(
                self.wells, 0, [self.shard], self.folder / "bad.csv", part, self.folder / "q.csv", config, threads=CORES
            )
        column = pq.read_table(part).column(run.EMBEDDING).combine_chunks()
        return np.asarray(column.flatten()).reshape(len(self.wells), -1)


# ---- what is timed


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Time one call; a GPU is waited for."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - start


def model_flop(config: OpenPhenomConfig, channels: int) -> float:
    """Count the multiplications and additions of products and attention for one tile."""
    tokens = 1 + channels * config.patches
    linear = 2 * tokens * config.dim * (2 * config.mlp_dim + 4 * config.dim)
    attention = 4 * tokens**2 * config.dim
    return config.depth * (linear + attention) + 2 * channels * config.patches * config.patch_size**2 * config.dim


def matmul_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Return the best of five square products, in operations a second."""
    n = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    with torch.inference_mode():
        return 2 * n**3 / min(seconds(lambda: a @ b, device) for _ in range(6))


def decode_rate(images: list[tuple[str, bytes]]) -> float:
    """Return images a second that all cores decode."""
    with ThreadPoolExecutor(CORES) as pool:
        spent = seconds(lambda: list(pool.map(decode_image, (data for _, data in images))), torch.device("cpu"))
    return len(images) / spent


def measures_ms(images: list[tuple[str, bytes]]) -> float:
    """Return the milliseconds that the measures of a well take one core, median over wells."""
    well, spent = len(CHANNELS), []
    for first in range(0, len(images), well):
        pixels = np.stack([decode_image(data) for _, data in images[first : first + well]])
        start = time.thread_time()
        measure(pixels, CHANNELS, dna_channel=1, nucleus_diameter_px=NUCLEUS_PX)
        spent.append(time.thread_time() - start)
    return 1000 * float(np.median(spent))


def peak_gib(folder: Path, device: str) -> float:
    """Run the job in a fresh process and return its peak resident memory in GiB."""
    command = [sys.executable, __file__, "--device", device, "--memory-of", str(folder)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(printed.splitlines()[-1])["peak_gib"]


def memory_child(folder: Path, device: str) -> None:
    """Run the job from the files that are there, and print the peak memory of this process."""
    rows = pq.read_table(folder / "plain.parquet").to_pylist()
    images = [(row["__key__"], row["jp2"]["bytes"]) for row in rows]
    job = Job(folder, "memory", images, -(-MEMORY_WELLS * len(CHANNELS) // len(images)), device)
    job.run("auto")
    # VmHWM, not getrusage: the latter counts the parent's memory from before this program was started
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(json.dumps({"peak_gib": int(status["VmHWM"].split()[0]) / 2**20}))


def benchmark(folder: Path, n_wells: int, rounds: int, device: str, copies: int | None) -> dict[str, float]:
    """Print what is measured and return the last line."""
    images = render(n_wells)
    OpenPhenom.random(OpenPhenomConfig(), 0).save(folder / "model.safetensors")
    plain_job = Job(folder, "plain", images, 1, device)
    plain_model = load_encoder(plain_job.config("float32"), len(CHANNELS)).model
    on = plain_model.device
    copies = copies or (512 if on.type == "cuda" else 1)
    job = Job(folder, "job", images, copies, device)
    encoders = {name: load_encoder(job.config(name), len(CHANNELS)) for name in ("float32", "auto")}
    print(f"{on}, {CORES} cores, torch {torch.__version__}; auto is {encoders['auto'].model.precision}")

    random = torch.Generator().manual_seed(0)
    tiles = torch.randint(0, 256, (8 if on.type == "cpu" else 256, 6, 256, 256), dtype=torch.uint8, generator=random)
    for encoder in encoders.values():  # packs the weights
        encoder.model.embed(tiles[:1])
    reference = plain_loop(plain_job.shard, plain_model)
    rates: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        rates.setdefault(name, []).append(value)

    for _ in range(rounds):
        note("plain", n_wells / seconds(lambda: plain_loop(plain_job.shard, plain_model), on))
        for name, encoder in encoders.items():
            result: list[np.ndarray] = []
            spent = seconds(lambda n=name, e=encoder, r=result: r.append(job.run(n, e)), on)
            note(name, len(job.wells) / spent)
            difference = np.abs(result[0][:n_wells] - reference).max()
            print(f"  largest difference of {name} from the plain loop: {difference:.2g}", flush=True)
            n_tiles = len(tiles)
            spent = seconds(lambda e=encoder, n=n_tiles: e.model.embed(tiles, batch_tiles=n), on)
            note(f"{name} model", n_tiles / spent)
            note(f"{name} peak", matmul_flops(encoder.model.precision.dtype, on))
        note("decode", decode_rate(images))
    return report(rates, job, images, on, encoders["auto"].model.config)


def report(
    rates: dict[str, list[float]], job: Job, images: list[tuple[str, bytes]], on: torch.device, size: OpenPhenomConfig
) -> dict[str, float]:
    """Print the rates; return the ratios."""
    best = {name: max(values) for name, values in rates.items()}
    result = {}
    for name in ("float32", "auto"):
        result[f"{name}_vs_plain"] = float(np.median(np.divide(rates[name], rates["plain"])))
        flops = best[f"{name} model"] * model_flop(size, len(CHANNELS))
        result[f"{name}_share_of_peak"] = flops / best[f"{name} peak"]
        print(
            f"{name}: {best[name]:.3f} wells/s; model alone {best[f'{name} model']:.3f} tiles/s = {flops / 1e9:.0f} of "
            f"{best[f'{name} peak'] / 1e9:.0f} GFLOP/s; over plain by round: "
            + " ".join(f"{r:.2f}" for r in np.divide(rates[name], rates["plain"]))
        )
    print(f"plain loop: {best['plain']:.3f} wells/s")
    if on.type == "cuda":
        minutes = RXRX3_CORE_TILES / TILES_A_WELL / best["auto"] / 60
        print(f"projected for the {RXRX3_CORE_TILES} tiles of RxRx3-core: {minutes:.1f} minutes")
    result["decode_images_per_s"] = best["decode"]
    result["measures_ms_per_well"] = measures_ms(images)
    result["peak_gib"] = peak_gib(job.folder, job.device)
    return result


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wells", type=int, default=12, help="wells that are rendered")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of (a), (b), (c)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--copies", type=int, help="copies of the wells in (b) and (c); default 1, on a GPU 512")
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        memory_child(options.memory_of, options.device)
        return
    from PIL import features

    if not features.check("jpg_2000"):
        sys.exit("this Pillow was built without JPEG 2000; install one from PyPI for the plain loop")
    with tempfile.TemporaryDirectory() as folder:
        result = benchmark(Path(folder), options.wells, options.rounds, options.device, options.copies)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
