"""From shards to prepared wells: decoded, measured and cut into tiles, a bounded number of them at a time.

Row groups are read one after the other. A well whose image bytes are all read goes to a pool of threads, which decode
it, measure it and cut its tiles; how many wells are on their way is limited, so memory does not grow with the size of
a shard. A well belongs to the shard of its first image; images that lie in another shard are read from there. Bad
images are noted with their well, and the rest goes on.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.embed.image_measures import measure
from phenoica.errors import ImageError
from phenoica.openphenom.tiling import tiles
from phenoica.plates.images import decode_image
from phenoica.plates.run import QUARANTINE_COLUMNS
from phenoica.plates.shards import iter_images, open_shard

Cell = tuple[str, bytes | None]  # the key of an image and its JPEG 2000 bytes


@dataclass
class Read:
    """The images wanted from one row group: parallel lists of row, well (index into the wells) and image position."""

    shard: int
    row_group: int
    rows: list[int] = field(default_factory=list)
    wells: list[int] = field(default_factory=list)
    images: list[int] = field(default_factory=list)


def plan_reads(wells: pd.DataFrame, unit: int) -> list[Read]:
    """Return the row groups to read for the wells of a unit, each once: the unit's own shard first, then neighbours.

    Within a read, images are in the order of their rows.
    """
    reads: dict[tuple[bool, int, int], Read] = {}
    locations = (schema.IMAGE_SHARD, schema.IMAGE_ROW_GROUP, schema.IMAGE_ROW)
    images = [
        (int(shard), int(group), int(row), well, image)
        for well, columns in enumerate(zip(*(wells[c] for c in locations), strict=True))
        for image, (shard, group, row) in enumerate(zip(*columns, strict=True))
    ]
    for shard, group, row, well, image in sorted(images):
        read = reads.setdefault((shard != unit, shard, group), Read(shard, group))
        read.rows.append(row)
        read.wells.append(well)
        read.images.append(image)
    return [reads[key] for key in sorted(reads)]


@dataclass(frozen=True)
class PreparedWell:
    """One well, ready for the model, or the reasons why it is not.

    Attributes
    ----------
    well
        Index into the wells of the unit.
    tiles
        uint8 (tiles, channels, size, size); None if an image is bad.
    measures
        Image measures, averaged over sites; None if an image is bad.
    bad
        Reason by image position, for every image that is bad.
    keys
        Key of each image.
    size
        Height and width of the images in pixels; None if an image is bad.
    """

    well: int
    tiles: np.ndarray | None
    measures: dict[str, float] | None
    bad: dict[int, str]
    keys: list[str]
    size: tuple[int, int] | None = None


def prepare_well(
    well: int, cells: Sequence[Cell], tile_size: int, channels: Sequence[int], embed_config: Mapping[str, Any]
) -> PreparedWell:
    """Decode, check, measure and cut one well.

    Parameters
    ----------
    well
        Index into the wells of the unit.
    cells
        Key and bytes of each image, ordered by site, then channel.
    tile_size
        Smallest usable image side in pixels, and the side of a tile.
    channels
        Channel numbers of a site, in order.
    embed_config
        The section `embed` of the configuration.
    """
    images: list[np.ndarray] = []
    bad: dict[int, str] = {}
    for position, (_, data) in enumerate(cells):
        try:
            images.append(decode_image(data))
        except ImageError as error:
            bad[position] = str(error)
    bad = bad or _unusable(images, tile_size)
    keys = [key for key, _ in cells]
    if bad:
        return PreparedWell(well, None, None, bad, keys)
    sites = np.stack(images).reshape(-1, len(channels), *images[0].shape)
    cut = np.concatenate([tiles(site, tile_size) for site in sites])
    return PreparedWell(well, cut, well_measures(sites, channels, embed_config), {}, keys, images[0].shape)


def _unusable(images: Sequence[np.ndarray], tile_size: int) -> dict[int, str]:
    """Return a reason for every image of a well if together they cannot be cut into tiles."""
    shapes = sorted({image.shape for image in images})
    if len(shapes) > 1:
        reason = f"images of one well differ in size: {shapes}"
    elif min(shapes[0]) < tile_size:
        reason = f"image of {shapes[0]} pixels is smaller than the model's tile of {tile_size}"
    else:
        return {}
    return dict.fromkeys(range(len(images)), reason)


def well_measures(images: np.ndarray, channels: Sequence[int], embed_config: Mapping[str, Any]) -> dict[str, float]:
    """Return the image measures of a well: the mean over its sites; `cell_count` is cells a site.

    Parameters
    ----------
    images
        uint8 (sites, channels, H, W).
    channels
        Their channel numbers.
    embed_config
        The section `embed` of the configuration.
    """
    sites = [
        measure(
            site, channels, dna_channel=embed_config["dna_channel"],
            nucleus_diameter_px=embed_config["nucleus_diameter_px"],
        )
        for site in images
    ]  # fmt: skip
    return {name: float(np.mean([s[name] for s in sites])) for name in sites[0]}


class WellReader:
    """Yield every well of one unit as a `PreparedWell`; `quarantine` collects what cannot be used.

    Parameters
    ----------
    wells
        The wells of the unit, with `schema.IMAGE_COLUMNS`.
    unit
        Number of the shard.
    shards
        All shard files, so that a neighbour's images can be fetched.
    tile_size
        Side of a tile in pixels.
    config
        The resolved configuration (`plates.channels`, `embed`).
    pool
        What prepares wells.
    ahead
        Wells that may be on their way at a time.
    """

    def __init__(
        self, wells: pd.DataFrame, unit: int, shards: Sequence[Path], tile_size: int, config: Mapping[str, Any],
        pool: Executor, ahead: int,
    ):  # fmt: skip
        self.wells, self.shards, self.pool, self.ahead = wells, shards, pool, ahead
        self.reads = plan_reads(wells, unit)
        self.quarantine: list[dict[str, Any]] = []
        self._options = (tile_size, config["plates"]["channels"], config["embed"])

    def __iter__(self) -> Iterator[PreparedWell]:
        """Yield each well once, in the order in which its last image was read."""
        on_the_way: deque[Future[PreparedWell]] = deque()
        for well, cells in self._whole_wells():
            if len(on_the_way) == self.ahead:
                yield self._finished(on_the_way.popleft())
            on_the_way.append(self.pool.submit(prepare_well, well, cells, *self._options))
        while on_the_way:
            yield self._finished(on_the_way.popleft())

    def _whole_wells(self) -> Iterator[tuple[int, list[Cell]]]:
        """Yield (well, key and bytes of its images); a well that is not whole yet waits as compressed bytes."""
        waiting: dict[int, dict[int, Cell]] = defaultdict(dict)
        n_images = [len(rows) for rows in self.wells[schema.IMAGE_ROW]]
        opened: dict[int, Any] = {}
        for read in self.reads:
            if read.shard not in opened:
                opened[read.shard] = open_shard(self.shards[read.shard])
            found = iter_images(opened[read.shard], read.row_group, read.rows)
            for well, image, cell in zip(read.wells, read.images, found, strict=True):
                waiting[well][image] = cell
                if len(waiting[well]) == n_images[well]:
                    cells = waiting.pop(well)
                    yield well, [cells[i] for i in range(len(cells))]

    def _finished(self, future: Future[PreparedWell]) -> PreparedWell:
        prepared = future.result()
        row = self.wells.iloc[prepared.well]
        for image, reason in prepared.bad.items():
            where = (int(row[c][image]) for c in (schema.IMAGE_SHARD, schema.IMAGE_ROW_GROUP, schema.IMAGE_ROW))
            entry = (prepared.keys[image], row[schema.WELL_ID], reason, *where)
            self.quarantine.append(dict(zip(QUARANTINE_COLUMNS, entry, strict=True)))
        return prepared
