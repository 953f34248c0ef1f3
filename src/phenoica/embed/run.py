"""The embed loop: one shard in, one row a well out.

A thread reads the shard and fills batches of tiles, a pool of threads decodes and measures wells
(`phenoica.embed.wells`, `phenoica.embed.batches`), and the model embeds one batch while the next is made.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from phenoica import files, schema
from phenoica.embed.batches import choose_batch_tiles, one_ahead, tile_batches
from phenoica.embed.encoder import Encoder, load_encoder
from phenoica.embed.image_measures import measure_names
from phenoica.embed.wells import PreparedWell, WellReader
from phenoica.errors import TooManyBadImages
from phenoica.plates.run import ORPHAN, QUARANTINE_COLUMNS, with_files
from phenoica.progress import Progress

EMBEDDING = "embedding"
CHANNELWISE = "channelwise"
UNTRAINED = "random_embedding"
WELLS_AHEAD_PER_THREAD = 4  # wells on their way a thread: enough to keep it busy while a batch is handed over


class WellMeans:
    """Average the vectors of each well's tiles, in float64.

    Parameters
    ----------
    n_wells
        Wells of the unit.
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
        parquet: well_id, n_tiles, embedding (fixed-size list of float32), channelwise (the same, channel by channel;
        only with `embed.channelwise`), random_embedding (by random weights; only with `embed.random_baseline`), image
        measures; the encoder's description in the file's key-value metadata
        under `phenoica`.
    out_quarantine
        csv of `QUARANTINE_COLUMNS` and the file of each image.
    config
        The resolved configuration.
    threads
        Cores of the job: see `decoding_threads`.

    Raises
    ------
    TooManyBadImages
        If this unit and the plates stage alone found more bad images than `embed.max_bad_fraction` of the run's.
    CheckpointError
        If the checkpoint does not fit.
    EmbeddingError
        If the model gives values that are not finite.
    """
    embed_config, channels = config["embed"], config["plates"]["channels"]
    known_bad = bad_images(pd.read_csv(plates_quarantine))
    n_images = sum(len(rows) for rows in wells[schema.IMAGE_ROW]) + len(known_bad)
    check_bad_fraction(known_bad, n_images, embed_config["max_bad_fraction"])
    encoder = load_encoder(config, len(channels), experiments=wells[schema.EXPERIMENT].unique())
    wells = wells[wells[schema.UNIT] == unit].reset_index(drop=True)
    workers = decoding_threads(threads, on_gpu=encoder.model.device.type == "cuda")
    with ThreadPoolExecutor(workers) as pool, Progress(len(wells), f"embed shard {unit}") as progress:
        ahead = WELLS_AHEAD_PER_THREAD * workers
        reader = WellReader(wells, unit, shards, encoder.tile_size, config, pool, ahead)
        means, untrained, measures = _embed(reader, len(wells), encoder, config, progress)
    found = with_files(pd.DataFrame(reader.quarantine, columns=list(QUARANTINE_COLUMNS)), shards)
    check_bad_fraction([*known_bad, *bad_images(found)], n_images, embed_config["max_bad_fraction"])
    done = sorted(measures)
    vectors, by_channel = means.of(done), None
    if embed_config["channelwise"] and not side_by_side(embed_config):
        by_channel, vectors = vectors, vectors.reshape(len(done), len(channels), encoder.model.config.dim).mean(axis=1)
    ids = [wells[schema.WELL_ID].iloc[w] for w in done]
    rows = [measures[w] for w in done]
    description = {**encoder.describe(), "channels": list(channels), CHANNELWISE: by_channel is not None}
    description |= {"features": embed_config["features"], "width": vectors.shape[1]}
    by_random = None if untrained is None else untrained.of(done)
    write_part(out_part, ids, means.n_tiles[done], vectors, rows, description, by_channel, by_random)
    files.write_csv(out_quarantine, found)


def side_by_side(embed_config: Mapping[str, Any]) -> bool:
    """Return whether X holds the vectors of the channels side by side, not their mean."""
    return embed_config["features"] == CHANNELWISE


def decoding_threads(threads: int, on_gpu: bool) -> int:
    """Return how many threads decode and measure in a job of `threads` cores.

    On a GPU all but one: the last core feeds the model. On a CPU the model computes on every core, and a thread that
    decodes takes its share of one.
    """
    return max(1, threads - 1) if on_gpu else threads


def _embed(
    reader: WellReader, n_wells: int, encoder: Encoder, config: Mapping[str, Any], progress: Progress
) -> tuple[WellMeans, WellMeans | None, dict[int, dict[str, float]]]:
    """Run the wells of a unit through the model; return the means of their vectors, and their image measures.

    Between them stand the means of the random baseline, or None if the encoder has none.
    """
    n_channels, wide = len(config["plates"]["channels"]), side_by_side(config["embed"])
    channelwise = wide or config["embed"]["channelwise"]
    model = encoder.model

    def width(apart: bool) -> int:
        return model.config.dim * (n_channels if apart else 1)

    means = WellMeans(n_wells, width(channelwise))
    untrained = None if encoder.baseline is None else WellMeans(n_wells, width(wide))
    measures: dict[int, dict[str, float]] = {}
    batch_tiles = choose_batch_tiles(config["embed"]["batch_tiles"], model, n_channels)
    wells = _usable(reader, encoder.tile_size, measures, progress)
    batches = one_ahead(tile_batches(wells, batch_tiles, pinned=model.device.type == "cuda"))
    with contextlib.closing(batches):
        for batch in batches:
            vectors = model.embed(batch.tiles, channelwise, batch_tiles=batch_tiles)
            means.add(batch.wells, vectors.numpy())
            if untrained is not None:
                baseline = encoder.baseline.embed(batch.tiles, wide, batch_tiles=batch_tiles)
                untrained.add(batch.wells, baseline.numpy())
    return means, untrained, measures


def _usable(
    reader: Iterable[PreparedWell], tile_size: int, measures: dict[int, dict[str, float]], progress: Progress
) -> Iterator[PreparedWell]:
    """Yield the wells that have tiles; note the measures of each, count all, and say once what is cropped."""
    seen: set[tuple[int, int]] = set()
    for prepared in reader:
        progress.update()
        if prepared.tiles is None:
            continue
        if prepared.size not in seen:
            seen.add(prepared.size)
            _say_cropped(prepared.size, tile_size)
        measures[prepared.well] = prepared.measures
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


def write_part(
    path: str | Path,
    well_ids: Sequence[str],
    n_tiles: np.ndarray,
    embeddings: np.ndarray,
    measures: Sequence[Mapping[str, float]],
    description: Mapping[str, Any],
    by_channel: np.ndarray | None = None,
    by_random: np.ndarray | None = None,
) -> None:
    """Write one part; it may hold no well at all, and still has every column.

    Parameters
    ----------
    path
        The parquet file.
    well_ids, n_tiles, measures
        One entry a well.
    embeddings
        (wells, width).
    description
        `Encoder.describe`, `channels`, `features` and `width`; the same for every part of a run.
    by_channel
        (wells, channels * dim), or None to leave the column out.
    by_random
        (wells, width) of the random baseline, or None to leave the column out.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    dim, width, channels = int(description["dim"]), int(description["width"]), description["channels"]
    columns = {
        schema.WELL_ID: pa.array(list(well_ids), pa.string()),
        schema.N_TILES: pa.array(n_tiles, pa.int64()),
        EMBEDDING: _vectors(embeddings, width),
    }
    if by_channel is not None:
        columns[CHANNELWISE] = _vectors(by_channel, dim * len(channels))
    if by_random is not None:
        columns[UNTRAINED] = _vectors(by_random, width)
    for name in (schema.CELL_COUNT, *measure_names(channels)):
        columns[name] = pa.array([row[name] for row in measures], pa.float64())
    table = pa.table(columns).replace_schema_metadata({schema.UNS: json.dumps(dict(description), sort_keys=True)})
    with files.atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def _vectors(values: np.ndarray, width: int) -> Any:
    """Return (n, width) numbers as an arrow column of float32 lists of fixed size."""
    import pyarrow as pa

    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1), pa.float32(), safe=False), width)
