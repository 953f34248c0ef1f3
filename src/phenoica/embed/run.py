"""The streaming embed loop: one shard in, one row a well out.

Row groups are read one after the other; a bounded thread pool decodes their images and takes image measures while the
model embeds the tiles of earlier wells. A well belongs to the shard of its first image; images that lie in another
shard are read from there by row group. Bad images are quarantined with their well, and the rest goes on.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from phenoica import files, schema
from phenoica.embed.image_measures import measure, measure_names
from phenoica.errors import ImageError, TooManyBadImages
from phenoica.plates.images import decode_image
from phenoica.plates.run import ORPHAN, QUARANTINE_COLUMNS, with_files
from phenoica.plates.shards import open_shard, read_images
from phenoica.progress import Progress

if TYPE_CHECKING:
    from phenoica.openphenom.encoder import OpenPhenom

EMBEDDING = "embedding"
_LOOK_AHEAD = 2  # row groups read and decoded ahead of the model: enough to keep it fed, few enough to stay small


@dataclass
class Read:
    """The images wanted from one row group: parallel lists of row, well (index into the wells) and image position."""

    shard: int
    row_group: int
    rows: list[int] = field(default_factory=list)
    wells: list[int] = field(default_factory=list)
    images: list[int] = field(default_factory=list)


def plan_reads(wells: pd.DataFrame, unit: int) -> list[Read]:
    """Return the row groups to read for the wells of a unit, each once: the unit's own shard first, then neighbours."""
    reads: dict[tuple[bool, int, int], Read] = {}
    locations = (schema.IMAGE_SHARD, schema.IMAGE_ROW_GROUP, schema.IMAGE_ROW)
    for well, columns in enumerate(zip(*(wells[c] for c in locations), strict=True)):
        for image, (shard, group, row) in enumerate(zip(*columns, strict=True)):
            read = reads.setdefault((shard != unit, shard, group), Read(int(shard), int(group)))
            read.rows.append(int(row))
            read.wells.append(well)
            read.images.append(image)
    return [reads[key] for key in sorted(reads)]


def _decode_or_reason(data: bytes | None) -> np.ndarray | str:
    try:
        return decode_image(data)
    except ImageError as error:
        return str(error)


class WellReader:
    """Yield the decoded wells of one unit, with quarantine entries for what cannot be used.

    Parameters
    ----------
    wells
        The wells of the unit, with `schema.IMAGE_COLUMNS`.
    unit
        Number of the shard.
    shards
        All shard files, so that a neighbour's images can be fetched.
    tile_size
        Smallest usable image side in pixels.
    pool
        Threads that decode.
    """

    def __init__(
        self, wells: pd.DataFrame, unit: int, shards: Sequence[Path], tile_size: int, pool: ThreadPoolExecutor
    ):
        self.wells, self.shards, self.tile_size, self.pool = wells, shards, tile_size, pool
        self.reads = plan_reads(wells, unit)
        self.quarantine: list[dict[str, Any]] = []
        self._open: dict[int, Any] = {}

    def __iter__(self) -> Iterator[tuple[int, np.ndarray | None]]:
        """Yield (well, uint8 images (sites * channels, H, W)) once a well is complete; None if it is quarantined."""
        waiting: dict[int, dict[int, tuple[str, np.ndarray | str]]] = defaultdict(dict)
        n_images = [len(rows) for rows in self.wells[schema.IMAGE_ROW]]
        for read, decoded in self._ahead():
            for well, image, (key, future) in zip(read.wells, read.images, decoded, strict=True):
                waiting[well][image] = (key, future.result())
                if len(waiting[well]) == n_images[well]:
                    yield well, self._complete(well, waiting.pop(well))

    def _ahead(self) -> Iterator[tuple[Read, list[tuple[str, Future]]]]:
        queue: deque[tuple[Read, list[tuple[str, Future]]]] = deque()
        for read in self.reads:
            shard = self._open.get(read.shard)
            if shard is None:
                shard = self._open[read.shard] = open_shard(self.shards[read.shard])
            rows = read_images(shard, read.row_group, read.rows)
            queue.append((read, [(key, self.pool.submit(_decode_or_reason, data)) for key, data in rows]))
            if len(queue) > _LOOK_AHEAD:
                yield queue.popleft()
        yield from queue

    def _complete(self, well: int, images: dict[int, tuple[str, np.ndarray | str]]) -> np.ndarray | None:
        ordered = [images[i][1] for i in range(len(images))]
        bad = {i: reason for i, reason in enumerate(ordered) if isinstance(reason, str)}
        if not bad:
            shapes = {image.shape for image in ordered}
            if len(shapes) > 1:
                bad = {i: f"images of one well differ in size: {sorted(shapes)}" for i in range(len(ordered))}
            elif min(ordered[0].shape) < self.tile_size:
                text = f"image of {ordered[0].shape} pixels is smaller than the model's tile of {self.tile_size}"
                bad = dict.fromkeys(range(len(ordered)), text)
        for image, reason in bad.items():
            self._reject(well, image, images[image][0], reason)
        return None if bad else np.stack(ordered)

    def _reject(self, well: int, image: int, key: str, reason: str) -> None:
        row = self.wells.iloc[well]
        where = (int(row[c][image]) for c in (schema.IMAGE_SHARD, schema.IMAGE_ROW_GROUP, schema.IMAGE_ROW))
        self.quarantine.append(
            dict(zip(QUARANTINE_COLUMNS, (key, row[schema.WELL_ID], reason, *where), strict=True))
        )


def well_measures(images: np.ndarray, channels: Sequence[int], embed_config: Mapping[str, Any]) -> dict[str, float]:
    """Return the image measures of a well: the mean over its sites; `cell_count` is cells a site.

    Parameters
    ----------
    images
        uint8 (sites, channels, H, W).
    """
    sites = [
        measure(
            site, channels, dna_channel=embed_config["dna_channel"],
            nucleus_diameter_px=embed_config["nucleus_diameter_px"],
        )
        for site in images
    ]  # fmt: skip
    return {name: float(np.mean([s[name] for s in sites])) for name in sites[0]}


class TileBatcher:
    """Collect tiles of wells, embed them in full batches and average each well's tiles.

    Parameters
    ----------
    model
        The encoder.
    batch_tiles
        Tiles a forward pass.
    """

    def __init__(self, model: OpenPhenom, batch_tiles: int):
        self.model, self.batch_tiles = model, batch_tiles
        self._tiles: list[np.ndarray] = []
        self._owners: list[int] = []
        self.sums: dict[int, np.ndarray] = {}
        self.counts: dict[int, int] = defaultdict(int)

    def add(self, well: int, tiles: np.ndarray) -> None:
        """Queue the uint8 (n, C, size, size) tiles of a well."""
        self._tiles.extend(tiles)
        self._owners.extend([well] * len(tiles))
        while len(self._tiles) >= self.batch_tiles:
            self._run(self.batch_tiles)

    def flush(self) -> None:
        """Embed what is queued."""
        if self._tiles:
            self._run(len(self._tiles))

    def _run(self, n: int) -> None:
        import torch

        batch = torch.from_numpy(np.stack(self._tiles[:n]))
        embedded = self.model.embed(batch, batch_tiles=n).numpy().astype(np.float64)
        for owner, row in zip(self._owners[:n], embedded, strict=True):
            self.sums[owner] = self.sums.get(owner, 0.0) + row
            self.counts[owner] += 1
        del self._tiles[:n], self._owners[:n]


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
        parquet: well_id, n_tiles, embedding (fixed-size list of float32), image measures; the encoder's description
        in the file's key-value metadata under `phenoica`.
    out_quarantine
        csv of `QUARANTINE_COLUMNS` and the file of each image.
    config
        The resolved configuration.
    threads
        Threads that decode and measure.

    Raises
    ------
    TooManyBadImages
        If this unit and the plates stage alone found more bad images than `embed.max_bad_fraction` of the run's.
    """
    from phenoica.embed.encoder import load_encoder
    from phenoica.openphenom.tiling import tiles

    embed_config, channels = config["embed"], config["plates"]["channels"]
    known_bad = bad_images(pd.read_csv(plates_quarantine))
    n_images = sum(len(rows) for rows in wells[schema.IMAGE_ROW]) + len(known_bad)
    check_bad_fraction(known_bad, n_images, embed_config["max_bad_fraction"])
    wells = wells[wells[schema.UNIT] == unit].reset_index(drop=True)
    encoder = load_encoder(config, n_channels=len(channels))
    batcher = TileBatcher(encoder.model, embed_config["batch_tiles"])
    measures: dict[int, Future] = {}
    n_tiles = np.zeros(len(wells), np.int64)
    with ThreadPoolExecutor(threads) as pool, Progress(len(wells), f"embed shard {unit}") as progress:
        reader = WellReader(wells, unit, shards, encoder.tile_size, pool)
        for well, images in reader:
            progress.update()
            if images is None:
                continue
            sites = images.reshape(-1, len(channels), *images.shape[1:])
            measures[well] = pool.submit(well_measures, sites, channels, embed_config)
            cut = np.concatenate([np.asarray(tiles(site, encoder.tile_size)) for site in sites])
            n_tiles[well] = len(cut)
            batcher.add(well, cut)
        batcher.flush()
        done = sorted(batcher.sums)
        rows = [measures[w].result() for w in done]
    found = with_files(pd.DataFrame(reader.quarantine, columns=list(QUARANTINE_COLUMNS)), shards)
    check_bad_fraction([*known_bad, *bad_images(found)], n_images, embed_config["max_bad_fraction"])
    embeddings = np.array([batcher.sums[w] / batcher.counts[w] for w in done], np.float32)
    ids = [wells[schema.WELL_ID].iloc[w] for w in done]
    write_part(out_part, ids, n_tiles[done], embeddings, rows, channels, encoder.describe())
    files.write_csv(out_quarantine, found)


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
    channels: Sequence[int],
    description: Mapping[str, Any],
) -> None:
    """Write one part; it may hold no well at all, and still has every column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    dim = int(description["dim"])
    flat = pa.array(embeddings.reshape(-1), pa.float32())
    table = pa.table(
        {
            schema.WELL_ID: pa.array(list(well_ids), pa.string()),
            schema.N_TILES: pa.array(n_tiles, pa.int64()),
            EMBEDDING: pa.FixedSizeListArray.from_arrays(flat, dim),
            **{
                name: pa.array([row[name] for row in measures], pa.float64())
                for name in (schema.CELL_COUNT, *measure_names(channels))
            },
        }
    )
    table = table.replace_schema_metadata({schema.UNS: json.dumps(dict(description), sort_keys=True)})
    with files.atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
