"""From shards to prepared wells: decoded, measured and cut into tiles, a bounded number of them at a time.

Row groups are read one after the other. A well whose image bytes are all read goes to a pool of workers, which decode
it, measure it and cut its tiles; how many wells are on their way is limited, so memory does not grow with the size of
a shard. A well belongs to the shard of its first image; images that lie in another shard are read from there. Bad
images are noted with their well, and the rest goes on.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.embed.image_measures import measure, measure_names
from phenoica.errors import EmbeddingError, ImageError
from phenoica.openphenom.tiling import tiles
from phenoica.plates.images import decode_image
from phenoica.plates.run import DROP_WELL, QUARANTINE_COLUMNS
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
    images = [
        (int(shard), int(group), int(row), well, image)
        for well, columns in enumerate(zip(*(wells[c] for c in schema.IMAGE_LOCATION), strict=True))
        for image, (shard, group, row) in enumerate(zip(*columns, strict=True))
    ]
    for shard, group, row, well, image in sorted(images):
        read = reads.setdefault((shard != unit, shard, group), Read(shard, group))
        read.rows.append(row)
        read.wells.append(well)
        read.images.append(image)
    return [reads[key] for key in sorted(reads)]


def reading_order(wells: pd.DataFrame, unit: int) -> np.ndarray:
    """Return the wells (indices) in the order in which the last image of each is read; int64 (wells,)."""
    last = np.empty(len(wells), np.int64)
    for position, well in enumerate(well for read in plan_reads(wells, unit) for well in read.wells):
        last[well] = position
    return np.argsort(last)


@dataclass(frozen=True)
class PreparedWell:
    """One well, ready for the model, or the reasons why it is not.

    Attributes
    ----------
    well
        Index into the wells of the unit.
    tiles
        uint8 (tiles, channels, size, size); None if the well cannot be used.
    measures
        Image measures, averaged over sites; None if the well cannot be used.
    bad
        Reason by image position, for every image that is bad.
    keys
        Key of each image.
    size
        Height and width of the images in pixels; None if the well cannot be used.
    missing
        Numbers of the channels that the well does without (`plates.missing_channels: available_channels`).
    """

    well: int
    tiles: np.ndarray | None
    measures: dict[str, float] | None
    bad: dict[int, str]
    keys: list[str]
    size: tuple[int, int] | None = None
    missing: tuple[int, ...] = ()


def prepare_well(
    well: int, cells: Sequence[Cell], image_channels: Sequence[int], tile_size: int, config: Mapping[str, Any]
) -> PreparedWell:
    """Decode, check, measure and cut one well.

    A well with a bad image cannot be used, unless the configuration embeds what channels there are: then it does
    without the channels of its bad images, at all its sites.

    Parameters
    ----------
    well
        Index into the wells of the unit.
    cells
        Key and bytes of each image, ordered by site, then channel.
    image_channels
        Channel number of each image.
    tile_size
        Smallest usable image side in pixels, and the side of a tile.
    config
        The resolved configuration (`plates.channels`, `plates.missing_channels`, `embed`).
    """
    images: dict[int, np.ndarray] = {}
    bad: dict[int, str] = {}
    for position, (_, data) in enumerate(cells):
        try:
            images[position] = decode_image(data)
        except ImageError as error:
            bad[position] = str(error)
    keys, channels = [key for key, _ in cells], config["plates"]["channels"]
    lost = {image_channels[position] for position in bad}
    present = [c for c in channels if c in set(image_channels) - lost]
    if bad and (config["plates"]["missing_channels"] == DROP_WELL or not present):
        return PreparedWell(well, None, None, bad, keys)
    used = {position: image for position, image in images.items() if image_channels[position] not in lost}
    unusable = _unusable(used, tile_size)
    if unusable:
        return PreparedWell(well, None, None, bad | unusable, keys)
    without = ", ".join(map(str, sorted(lost)))
    bad = {position: f"{reason}; the well is embedded without channel {without}" for position, reason in bad.items()}
    sites = np.stack([used[position] for position in sorted(used)])
    sites = sites.reshape(-1, len(present), *sites.shape[1:])
    cut = np.concatenate([tiles(site, tile_size) for site in sites])
    measures = well_measures(sites, present, channels, config["embed"])
    return PreparedWell(well, cut, measures, bad, keys, sites.shape[2:], tuple(c for c in channels if c not in present))


def _unusable(images: Mapping[int, np.ndarray], tile_size: int) -> dict[int, str]:
    """Return a reason for every image of a well (by position) if together they cannot be cut into tiles."""
    shapes = sorted({image.shape for image in images.values()})
    if len(shapes) > 1:
        reason = f"images of one well differ in size: {shapes}"
    elif min(shapes[0]) < tile_size:
        reason = f"image of {shapes[0]} pixels is smaller than the model's tile of {tile_size}"
    else:
        return {}
    return dict.fromkeys(images, reason)


def well_measures(
    images: np.ndarray, present: Sequence[int], channels: Sequence[int], embed_config: Mapping[str, Any]
) -> dict[str, float]:
    """Return the image measures of a well: the mean over its sites; `cell_count` is cells a site.

    Parameters
    ----------
    images
        uint8 (sites, present channels, H, W).
    present
        Their channel numbers.
    channels
        All channel numbers of the run; what a missing one would have told is NaN, which QC and scores take for unknown.
    embed_config
        The section `embed` of the configuration.
    """
    dna, diameter = embed_config["dna_channel"], embed_config["nucleus_diameter_px"]
    dna = dna if dna in present else None
    sites = [measure(site, present, dna_channel=dna, nucleus_diameter_px=diameter) for site in images]
    names = (schema.CELL_COUNT, *measure_names(channels))
    return {name: float(np.mean([s.get(name, np.nan) for s in sites])) for name in names}


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
        self._options = (tile_size, config)
        self._channels = [np.asarray(v).tolist() for v in wells[schema.IMAGE_CHANNEL]]

    def __iter__(self) -> Iterator[PreparedWell]:
        """Yield each well once, in the order in which its last image was read."""
        on_the_way: deque[Future[PreparedWell]] = deque()
        for well, cells in self._whole_wells():
            if len(on_the_way) == self.ahead:
                yield self._finished(on_the_way.popleft())
            on_the_way.append(self.pool.submit(prepare_well, well, cells, self._channels[well], *self._options))
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
        try:
            prepared = future.result()
        except BrokenExecutor as error:
            raise EmbeddingError(
                "a process that decodes images was killed, most often for lack of memory; finished wells are kept: "
                "start again with fewer threads for the job"
            ) from error
        row = self.wells.iloc[prepared.well]
        for image, reason in prepared.bad.items():
            where = (int(row[c][image]) for c in schema.IMAGE_LOCATION)
            entry = (prepared.keys[image], row[schema.WELL_ID], reason, *where)
            self.quarantine.append(dict(zip(QUARANTINE_COLUMNS, entry, strict=True)))
        return prepared
