"""Write the demo plates: JPEG 2000 shards in the published RxRx3-core layout, the metadata and the true factors.

The wells come from `layout` and the pixels from `render`; every well has a random stream of its own, so the files do
not depend on the number of processes. Two extra experiments for pre-training an encoder go to a folder of their own.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.demo import layout
from phenoica.demo.render import render_well
from phenoica.errors import ConfigError, ShardError
from phenoica.files import atomic_dir, atomic_path, write_csv, write_parquet
from phenoica.progress import track

ROWS_A_GROUP = 100  # as published; no multiple of six, so wells straddle row groups
JP2_LEVEL = 35  # dB: about 1.9 kB an image of 128 px, root mean square error 4-5 grey levels
SITE = 1
CELL_TYPE = "HUVEC"
CHUNK = 12  # wells a process takes at a time
METADATA_COLUMNS = (
    "well_id", "experiment_name", "plate", "address", "gene", "treatment", "SMILES", "concentration",
    "perturbation_type", "cell_type", "well_type_label",
)  # fmt: skip
TRUE_CELL_COUNT = "true_cell_count"

Image = tuple[str, bytes]  # key, JPEG 2000 stream
Job = tuple[list[str], dict[str, float], int, tuple[int, ...]]  # keys, factors, size, the well's own seed
Rendered = tuple[list[Image], int]  # images, true cell count


def write_demo(
    out_dir: str | os.PathLike, *, size: int = 128, seed: int = 20260, n_shards: int = 3, workers: int = 2
) -> None:
    """Render the demo plates and write them.

    Parameters
    ----------
    out_dir
        Folder; made if missing. Receives `shards/train-0000i-of-0000N.parquet`, `metadata.csv`, `truth.parquet` and the
        same three again below `pretrain/` (one shard). An earlier demo there is replaced.
    size
        Image side in pixels: a multiple of 32, at least 64. Every size shows the same wells and cells; 512 is full
        size.
    seed
        Non-negative integer; layout and pixels follow from it alone.
    n_shards
        Number of image shards of the main experiments. Shards are cut in the middle of a well.
    workers
        Processes that render. With more than one, a script must call this below `if __name__ == "__main__":`.

    Raises
    ------
    ConfigError
        Naming the option that cannot be used.
    """
    _check(size, seed, n_shards, workers)
    out_dir = Path(out_dir)
    # one pool for both parts: starting processes costs more than a hundred wells
    with _mapper(workers) as rendered:
        _write_part(out_dir, "main", size, seed, n_shards, rendered)
        _write_part(out_dir / "pretrain", "pretrain", size, seed, 1, rendered)


def write_pretraining(
    out_dir: str | os.PathLike, *, size: int = 128, seeds: Sequence[int] = (1, 2), workers: int = 2
) -> None:
    """Render the pre-training experiments of other seeds: images alone, for an encoder that sees no demo plate.

    Parameters
    ----------
    out_dir
        Folder; made if missing. Receives one shard a seed, `pretrain-<seed>.parquet`.
    size
        Image side in pixels, as for `write_demo`.
    seeds
        One or more; each gives two experiments, named as in `pretraining_experiments`.
    workers
        Processes that render.

    Raises
    ------
    ConfigError
        Naming the option that cannot be used.
    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"pretrain.demo_seeds is {list(seeds)}; name at least one seed, each once")
    for seed in seeds:
        _check(size, seed, 1, workers)
    with _mapper(workers) as rendered:
        for seed in seeds:
            wells = _renamed(layout.design(seed, "pretrain"), seed)
            factors = layout.factors(wells, seed, "pretrain")
            done = track(rendered(_jobs(wells, factors, size, seed)), len(wells), f"pre-training plates (seed {seed})")
            images = _images(done, [])
            with atomic_path(pretraining_shard(out_dir, seed)) as temporary:
                _write_shard(temporary, images, len(wells) * layout.N_CHANNELS)
                next(images, None)  # asking once more closes the progress bar


def pretraining_shard(folder: str | os.PathLike, seed: int) -> Path:
    """Return the shard of a seed's pre-training experiments."""
    return Path(folder) / f"pretrain-{seed}.parquet"


def pretraining_experiments(seeds: Sequence[int]) -> list[str]:
    """Return the names of the experiments of `write_pretraining`: pretrain-<seed>-001, pretrain-<seed>-002, ..."""
    numbers = range(1, layout.PARAMETERS["pretrain_experiments"] + 1)
    return [f"pretrain-{seed}-{number:03d}" for seed in seeds for number in numbers]


def _renamed(wells: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Name experiments and wells after their seed, so that shards of several seeds go together."""

    def name(text: pd.Series) -> pd.Series:
        return text.str.replace(r"^pretrain-", f"pretrain-{seed}-", regex=True)

    return wells.assign(**{c: name(wells[c]) for c in (schema.EXPERIMENT, schema.WELL_ID)})


def metadata(wells: pd.DataFrame) -> pd.DataFrame:
    """Return the published 11 columns of a design.

    `gene` is empty and `treatment` is EMPTY_control for negative controls; `SMILES` and `concentration` are empty, as
    for every CRISPR well; `well_type_label` is query, negative_control, positive_control or cutting_control.
    """
    negative = wells[schema.PERTURBATION] == layout.NEGATIVE_LABEL
    frame = pd.DataFrame({
        "well_id": wells[schema.WELL_ID],
        "experiment_name": wells[schema.EXPERIMENT],
        "plate": wells[schema.PLATE],
        "address": wells[schema.ADDRESS],
        "gene": wells[schema.PERTURBATION].mask(negative),
        "treatment": wells[schema.TREATMENT],
        "SMILES": None,
        "concentration": None,
        "perturbation_type": "CRISPR",
        "cell_type": CELL_TYPE,
        "well_type_label": wells[layout.WELL_TYPE],
    })  # fmt: skip
    return frame[list(METADATA_COLUMNS)]


def encode_well(images: np.ndarray) -> list[bytes]:
    """Encode uint8 (channels, side, side) as lossy JPEG 2000 streams, one a channel."""
    import imagecodecs

    return [
        imagecodecs.jpeg2k_encode(image, level=JP2_LEVEL, codecformat="jp2", reversible=False, numthreads=1)
        for image in images
    ]


def image_keys(experiment: str, plate: str, address: str) -> list[str]:
    """Return the keys of a well's images, channels 1 to 6: gene-001/Plate1/AA02_s1_1, ..."""
    return [f"{experiment}/Plate{plate}/{address}_s{SITE}_{c + 1}" for c in range(layout.N_CHANNELS)]


def _check(size: int, seed: int, n_shards: int, workers: int) -> None:
    if size < 64 or size % 32:
        raise ConfigError(f"demo.size is {size}; use a multiple of 32 from 64 on, such as 128 or 512")
    if seed < 0:
        raise ConfigError(f"demo.seed is {seed}; it must be 0 or larger")
    if not 1 <= n_shards <= 100:
        raise ConfigError(f"demo.shards is {n_shards}; use 1 to 100")
    if workers < 1:
        raise ConfigError(f"workers is {workers}; use 1 or more")


@contextmanager
def _mapper(workers: int) -> Iterator[Callable[[list[Job]], Iterator[Rendered]]]:
    """Yield a function that maps `_render` over jobs, in order, here or in `workers` processes."""
    if workers == 1:
        yield lambda jobs: map(_render, jobs)
        return
    # spawned, not forked: a forked copy of a process with running threads can hang
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield lambda jobs: pool.imap(_render, jobs, chunksize=CHUNK)


def _render(job: Job) -> Rendered:
    """Render and encode one well; the work of a process."""
    keys, factors, size, seed = job
    images, count = render_well(factors, size, seed)
    return list(zip(keys, encode_well(images), strict=True)), count


def _write_part(
    out_dir: Path,
    part: str,
    size: int,
    seed: int,
    n_shards: int,
    rendered: Callable[[list[Job]], Iterator[Rendered]],
) -> None:
    """Write shards, metadata and truth of one part."""
    wells = layout.design(seed, part)
    factors = layout.factors(wells, seed, part)
    counts: list[int] = []
    jobs = _jobs(wells, factors, size, seed)
    done = track(rendered(jobs), len(wells), f"demo plates ({part})")
    _write_shards(out_dir / "shards", _images(done, counts), len(wells) * layout.N_CHANNELS, n_shards)
    write_csv(out_dir / "metadata.csv", metadata(wells))
    write_parquet(out_dir / "truth.parquet", truth(wells, factors, counts))


def truth(wells: pd.DataFrame, factors: pd.DataFrame, counts: list[int]) -> pd.DataFrame:
    """Join the design, the factors of `layout.factors` and the true cell counts: a row a well."""
    return pd.concat([wells.assign(**{TRUE_CELL_COUNT: np.asarray(counts, np.int64)}), factors], axis=1)


def _jobs(wells: pd.DataFrame, factors: pd.DataFrame, size: int, seed: int) -> list[Job]:
    names = [
        schema.EXPERIMENT,
        schema.PLATE,
        schema.ADDRESS,
        layout.EXPERIMENT_NUMBER,
        schema.ROW,
        schema.COLUMN,
    ]
    jobs = []
    for well, row in zip(wells[names].itertuples(index=False), factors.to_dict("records"), strict=True):
        experiment, plate, address, number, r, c = well
        own = (seed, int(number), int(plate), int(r), int(c))
        jobs.append((image_keys(experiment, plate, address), row, size, own))
    return jobs


def _images(done: Iterator[Rendered], counts: list[int]) -> Iterator[Image]:
    """Yield the images of rendered wells one by one and note each well's cell count."""
    for images, count in done:
        counts.append(count)
        yield from images


def shard_cuts(n_rows: int, n_shards: int) -> list[int]:
    """Return the row numbers where shards end; every inner cut is in the middle of a well."""
    cuts = [
        n_rows * (i + 1) // n_shards // layout.N_CHANNELS * layout.N_CHANNELS + 2 + i % 3 for i in range(n_shards - 1)
    ]
    return [*cuts, n_rows]


def _write_shards(folder: Path, images: Iterator[Image], n_rows: int, n_shards: int) -> None:
    """Write all shards into a folder that appears only when it is complete."""
    with atomic_dir(folder) as temporary:
        start = 0
        for i, stop in enumerate(shard_cuts(n_rows, n_shards)):
            _write_shard(temporary / f"train-{i:05d}-of-{n_shards:05d}.parquet", images, stop - start)
            start = stop
        if next(images, None) is not None:  # asking once more also closes the progress bar
            raise ShardError(
                f"{folder}: more images were rendered than the announced {n_rows} rows; nothing is written"
            )


def _write_shard(path: Path, images: Iterator[Image], n_rows: int) -> None:
    """Write the next `n_rows` images as one shard."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    layout_of_table = pa.schema([("__key__", pa.string()), ("jp2", column)])
    with pq.ParquetWriter(path, layout_of_table, compression="none") as writer:
        for first in range(0, n_rows, ROWS_A_GROUP):
            rows = _take(images, min(ROWS_A_GROUP, n_rows - first))
            table = {"__key__": [k for k, _ in rows], "jp2": [{"bytes": b, "path": None} for _, b in rows]}
            writer.write_table(pa.table(table, schema=layout_of_table), row_group_size=ROWS_A_GROUP)


def _take(images: Iterator[Image], n: int) -> list[Image]:
    return [next(images) for _ in range(n)]
