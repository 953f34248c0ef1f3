"""The embed loop: one shard in, one row a well out.

A thread reads the shard and fills batches of tiles, a pool of threads or processes decodes and measures wells
(`phenoica.embed.wells`, `phenoica.embed.batches`), and the model embeds one batch while the next is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from phenoica import files, schema
from phenoica.embed.batches import choose_batch_tiles, one_ahead, tile_batches
from phenoica.embed.encoder import Encoder, load_encoder
from phenoica.embed.image_measures import measure_names
from phenoica.embed.pieces import WELLS_CPU, WELLS_GPU, Pieces, made_from
from phenoica.embed.wells import PreparedWell, WellReader, reading_order
from phenoica.errors import ConfigError, ShardError, TooManyBadImages
from phenoica.plates.run import ORPHAN, QUARANTINE_COLUMNS, with_files
from phenoica.progress import Progress

EMBEDDING = "embedding"
CHANNELWISE = "channelwise"
UNTRAINED = "random_embedding"
WELLS_AHEAD_PER_WORKER = 4  # wells on their way a worker: enough to keep it busy while a batch is handed over


class WellMeans:
    """Average the vectors of each well's tiles, in float64.

    Parameters
    ----------
    n_wells
        How many wells.
    width
        Length of a vector.
    """

    def __init__(self, n_wells: int, width: int):
        self._sums = np.zeros((n_wells, width))
        self.n_tiles = np.zeros(n_wells, np.int64)

    def add(self, wells: np.ndarray, vectors: np.ndarray) -> None:
        """Add vectors (n, width) of tiles of the given wells (n,)."""
        np.add.at(self._sums, wells, vectors)
        np.add.at(self.n_tiles, wells, 1)

    def of(self, wells: Sequence[int]) -> np.ndarray:
        """Return the means of these wells, float64 (wells, width)."""
        return self._sums[wells] / self.n_tiles[wells][:, None]


def embed_shard(
    wells: pd.DataFrame,
    unit: int,
    shards: Sequence[Path],
    plates_quarantine: str | Path,
    out_part: str | Path,
    out_quarantine: str | Path,
    config: Mapping[str, Any],
    threads: int = 2,
) -> None:
    """Embed the wells of one unit and write its part and its quarantine list.

    Finished pieces are kept beside the part until it is whole: a job that was killed goes on from them, and its part is
    the same, byte for byte, as that of an unbroken run with as many threads.

    Parameters
    ----------
    wells
        All wells of the run (`phenoica.plates.run.read_wells`).
    unit
        Number of the shard whose wells are embedded.
    shards
        All shard files, in the order of their numbers.
    plates_quarantine
        quarantine.csv of the plates stage: what it found counts as bad before the first image is read.
    out_part
        parquet: well_id, n_tiles, missing_channels, embedding (fixed-size list of float32), channelwise (the same,
        channel by channel; only with `embed.channelwise`), random_embedding (by random weights; only with
        `embed.random_baseline`), image measures; the encoder's description in the file's key-value metadata under
        `phenoica`.
    out_quarantine
        csv of `QUARANTINE_COLUMNS` and the file of each image.
    config
        The resolved configuration.
    threads
        Cores of the job: see `decoding_workers`.

    Raises
    ------
    TooManyBadImages
        If this unit and the plates stage alone found more bad images than `embed.max_bad_fraction` of the run's.
    ConfigError
        If no well is of this unit.
    ShardError
        If the files are not those that the wells were located in.
    CheckpointError
        If the checkpoint does not fit.
    EmbeddingError
        If the model gives values that are not finite, or a decoding process was killed.
    """
    _check_unit(wells, unit, shards)
    embed_config, channels = config["embed"], config["plates"]["channels"]
    known_bad = bad_images(pd.read_csv(plates_quarantine))
    n_images = sum(len(rows) for rows in wells[schema.IMAGE_ROW]) + len(known_bad)
    check_bad_fraction(known_bad, n_images, embed_config["max_bad_fraction"])
    encoder = load_encoder(config, len(channels), experiments=wells[schema.EXPERIMENT].unique())
    wells = wells[wells[schema.UNIT] == unit].reset_index(drop=True)
    on_gpu = encoder.model.device.type == "cuda"
    order = reading_order(wells, unit)
    piece_of = np.empty(len(wells), np.int64)
    piece_of[order] = np.arange(len(wells)) // (WELLS_GPU if on_gpu else WELLS_CPU)
    description = _description(encoder, config)
    pieces = Pieces(out_part, made_from(wells, shards, config, description))
    left = np.flatnonzero(~np.isin(piece_of, list(pieces.done)))

    found = pieces.quarantine()

    def checked() -> pd.DataFrame:
        table = with_files(pd.DataFrame(found, columns=list(QUARANTINE_COLUMNS)), shards)
        check_bad_fraction([*known_bad, *bad_images(table)], n_images, embed_config["max_bad_fraction"])
        return table

    workers = decoding_workers(threads, on_gpu)
    with decoding_pool(workers, on_gpu) as pool, Progress(len(wells), f"embed shard {unit}") as progress:
        if len(left) < len(wells):
            print(f"embedding goes on after {len(pieces.done)} finished pieces of shard {unit}", file=sys.stderr)
            progress.update(len(wells) - len(left))
        ahead = WELLS_AHEAD_PER_WORKER * workers
        reader = WellReader(
            wells.iloc[left].reset_index(drop=True), unit, shards, encoder.tile_size, config, pool, ahead
        )
        finished = _embed(reader, piece_of[left], encoder, description, config, progress)
        with contextlib.closing(finished):
            for number, rows, quarantine in finished:
                found += quarantine
                checked()
                pieces.write(number, rows, quarantine)
    table = checked()
    _write_part(out_part, pieces.rows(int(piece_of.max()) + 1), wells, description)
    files.write_csv(out_quarantine, table)
    pieces.remove()


def _check_unit(wells: pd.DataFrame, unit: int, shards: Sequence[Path]) -> None:
    """Refuse a unit without wells, and shards that are too few or not there, before the model is loaded."""
    used = wells[wells[schema.UNIT] == unit]
    if used.empty:
        units = sorted(wells[schema.UNIT].unique())
        raise ConfigError(
            f"unit {unit}: no well is of it; wells.parquet has the units {', '.join(map(str, units[:20]))}"
            f"{', ...' if len(units) > 20 else ''} (units.csv, kind shard)"
        )
    needed = sorted({int(shard) for row in used[schema.IMAGE_SHARD] for shard in row})
    if needed[-1] >= len(shards):
        raise ShardError(
            f"unit {unit} has images in shard {needed[-1]}, and {len(shards)} shards are given; give all shard files "
            "that `phenoica plates` read, in the same order"
        )
    missing = [shards[shard] for shard in needed if not Path(shards[shard]).is_file()]
    if missing:
        raise ShardError(f"{missing[0]}: no such shard; unit {unit} has images in it")


def _description(encoder: Encoder, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a part says of itself: the encoder, the channels, and what its columns hold."""
    embed_config, channels = config["embed"], config["plates"]["channels"]
    wide = side_by_side(embed_config)
    return {
        **encoder.describe(),
        "channels": list(channels),
        CHANNELWISE: embed_config["channelwise"] and not wide,
        "features": embed_config["features"],
        "width": encoder.model.config.dim * (len(channels) if wide else 1),
    }


def side_by_side(embed_config: Mapping[str, Any]) -> bool:
    """Return whether X holds the vectors of the channels side by side, not their mean."""
    return embed_config["features"] == CHANNELWISE


def decoding_workers(threads: int, on_gpu: bool) -> int:
    """Return how many threads or processes decode and measure in a job of `threads` cores.

    On a GPU all but one: the last core feeds the model. On a CPU the model computes on every core, and a thread that
    decodes takes its share of one.
    """
    return max(1, threads - 1) if on_gpu else threads


def decoding_pool(workers: int, on_gpu: bool) -> Executor:
    """Return the pool that prepares wells: threads where a CPU embeds, processes where a GPU does.

    Of its 15 ms or so, a well of six images of 512 px holds Python's lock for 4 (sampled): beyond some 250 wells a
    second threads would wait for each other, and the one that launches the model's kernels with them. A CPU embeds a
    few wells a second; there threads spare the copies between processes. Processes are spawned, because a fork of one
    that uses CUDA cannot.
    """
    if on_gpu:
        return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    return ThreadPoolExecutor(workers, thread_name_prefix="decode")


def _embed(
    reader: WellReader,
    piece_of: np.ndarray,
    encoder: Encoder,
    description: Mapping[str, Any],
    config: Mapping[str, Any],
    progress: Progress,
) -> Iterator[tuple[int, pa.Table, list[dict[str, Any]]]]:
    """Run wells through the model; yield each piece once all its wells are through.

    Yields
    ------
    (int, Table, list of dict)
        The number of the piece, its rows (`_rows`) and its quarantine entries.
    """
    n_channels = len(description["channels"])
    wide = side_by_side(config["embed"])
    channelwise = wide or description[CHANNELWISE]
    model = encoder.model
    usable: dict[int, PreparedWell] = {}
    batch_tiles = choose_batch_tiles(config["embed"]["batch_tiles"], model, n_channels)
    prepared = _usable(reader, encoder.tile_size, usable, progress)
    on_gpu = model.device.type == "cuda"
    batches = one_ahead(tile_batches(prepared, batch_tiles, on_gpu, lambda well: int(piece_of[well])))
    waiting = deque(sorted(set(piece_of.tolist())))

    def begun() -> tuple[np.ndarray, WellMeans, WellMeans | None]:
        # the sums of one piece at a time, so that memory does not grow with the shard
        inside = np.flatnonzero(piece_of == waiting[0]) if waiting else piece_of[:0]
        means = WellMeans(len(inside), model.config.dim * (n_channels if channelwise else 1))
        return inside, means, None if encoder.baseline is None else WellMeans(len(inside), int(description["width"]))

    def finished() -> tuple[int, pa.Table, list[dict[str, Any]]]:
        ids = set(reader.wells[schema.WELL_ID].iloc[inside])
        wells = {i: usable.pop(w) for i, w in enumerate(inside) if w in usable}
        rows = _rows(wells, reader.wells.iloc[inside], means, untrained, description)
        # a copy: the reader, some wells ahead, goes on appending
        return waiting.popleft(), rows, [e for e in list(reader.quarantine) if e[schema.WELL_ID] in ids]

    inside, means, untrained = begun()
    with contextlib.closing(batches):
        for batch in batches:
            # a batch of a later piece means that every well of the earlier ones was read
            while waiting[0] < batch.group:
                yield finished()
                inside, means, untrained = begun()
            within = np.searchsorted(inside, batch.wells)
            vectors = model.embed(batch.tiles, channelwise, batch_tiles=batch_tiles)
            means.add(within, vectors.numpy())
            if untrained is not None:
                baseline = encoder.baseline.embed(batch.tiles, wide, batch_tiles=batch_tiles)
                untrained.add(within, baseline.numpy())
    while waiting:
        yield finished()
        inside, means, untrained = begun()


def _rows(
    usable: Mapping[int, PreparedWell], frame: pd.DataFrame, means: WellMeans, untrained: WellMeans | None,
    description: Mapping[str, Any],
) -> pa.Table:  # fmt: skip
    """Return the rows of the usable wells of a piece (position in `frame` -> well) as they stand in a part."""
    dim, width, channels = int(description["dim"]), int(description["width"]), description["channels"]
    wells = list(usable)
    vectors, by_channel = means.of(wells), None
    if description[CHANNELWISE]:
        by_channel, vectors = vectors, vectors.reshape(len(wells), len(channels), dim).mean(axis=1)
    missing = [",".join(map(str, usable[w].missing)) for w in wells]
    columns = {
        schema.WELL_ID: pa.array(frame[schema.WELL_ID].iloc[wells], pa.string()),
        schema.N_TILES: pa.array(means.n_tiles[wells], pa.int64()),
        schema.MISSING_CHANNELS: pa.array(missing, pa.string()),
        EMBEDDING: _vectors(vectors, width),
    }
    if by_channel is not None:
        columns[CHANNELWISE] = _vectors(by_channel, dim * len(channels))
    if untrained is not None:
        columns[UNTRAINED] = _vectors(untrained.of(wells), width)
    for name in (schema.CELL_COUNT, *measure_names(channels)):
        columns[name] = pa.array([usable[w].measures[name] for w in wells], pa.float64())
    return pa.table(columns)


def _write_part(path: str | Path, rows: pa.Table, wells: pd.DataFrame, description: Mapping[str, Any]) -> None:
    """Write the rows in the order of the wells, with the description."""
    position = pd.Index(wells[schema.WELL_ID]).get_indexer(rows.column(schema.WELL_ID).to_pylist())
    table = rows.take(pa.array(np.argsort(position)))
    table = table.replace_schema_metadata({schema.UNS: json.dumps(dict(description), sort_keys=True)})
    with files.atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def _usable(
    reader: Iterable[PreparedWell], tile_size: int, usable: dict[int, PreparedWell], progress: Progress
) -> Iterator[PreparedWell]:
    """Yield the wells that have tiles; note each without its tiles, count all, and say once what is cropped."""
    seen: set[tuple[int, int]] = set()
    for prepared in reader:
        progress.update()
        if prepared.tiles is None:
            continue
        if prepared.size not in seen:
            seen.add(prepared.size)
            _say_cropped(prepared.size, tile_size)
        usable[prepared.well] = dataclasses.replace(prepared, tiles=None)
        yield prepared


def _say_cropped(size: tuple[int, int], tile_size: int) -> None:
    kept = [side // tile_size * tile_size for side in size]
    if kept != list(size):
        print(
            f"note: images of {size[0]} x {size[1]} px are no multiple of the {tile_size} px tile: the central "
            f"{kept[0]} x {kept[1]} px are embedded, the rest is left out (image measures see all of it)",
            file=sys.stderr,
        )


def bad_images(quarantine: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the quarantined images that are bad: not those of wells that the metadata leaves out on purpose."""
    return quarantine[quarantine["key"].notna() & (quarantine["reason"] != ORPHAN)].to_dict("records")


def check_bad_fraction(quarantine: Sequence[Mapping[str, Any]], n_images: int, max_bad_fraction: float) -> None:
    """Raise TooManyBadImages if more than the allowed share of the run's images is bad."""
    if len(quarantine) <= max_bad_fraction * n_images:
        return
    reasons = pd.Series([q["reason"] for q in quarantine]).value_counts()
    raise TooManyBadImages(
        f"{len(quarantine)} of {n_images} images are bad, more than embed.max_bad_fraction = {max_bad_fraction:g} "
        f"allows; the commonest reason ({reasons.iloc[0]} images): {reasons.index[0]}; the first: "
        f"{quarantine[0]['key']} (well {quarantine[0]['well_id']}, in {quarantine[0]['file']}). Mend the images, "
        "or raise the limit if leaving them out is right"
    )


def _vectors(values: np.ndarray, width: int) -> Any:
    """Return (n, width) numbers as an arrow column of float32 lists of fixed size."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1), pa.float32(), safe=False), width)
