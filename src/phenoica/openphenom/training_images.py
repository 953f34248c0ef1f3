"""The images an encoder is pre-trained on: wells of the experiments named for it, in a seeded order.

Comes in: shards in the published layout and the names of experiments. Goes out: batches of uint8 tiles, each a function
of the seed and the number of the step alone, so that a run that was killed goes on exactly where it was. Images of
other experiments are not even decoded.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd

from phenoica import files, schema
from phenoica.errors import ConfigError, ImageError, TooManyBadImages
from phenoica.plates.images import decode_image
from phenoica.plates.run import locate
from phenoica.plates.shards import index_frame, open_shard, read_images

CHUNK_WELLS = 32  # wells that are read and decoded together
_STREAM_SPLIT, _STREAM_ORDER, _STREAM_TILES = 1, 2, 3


class TrainingImages:
    """Wells for pre-training and, apart from them, a few wells for validation.

    Every epoch visits each training well once. Wells lie in chunks of neighbours on disk; chunks are shuffled, and the
    wells of as many chunks as `window_wells` allows are shuffled together, so that memory stays bounded and reading
    stays sequential. A small set is one window: it is decoded once and shuffled as a whole.

    Parameters
    ----------
    shards
        Shard files.
    experiments
        Names of the experiments that may be used; every one must be there.
    channels
        Channel numbers, in the model's order.
    tile
        Side of a tile in pixels; a random one is cut from a well each time.
    seed
        Of the split, the order, the cuts and the flips.
    plate_format
        Wells that a plate has room for.
    validation_wells
        Wells that are kept for validation, drawn at random.
    window_wells
        Most training wells that are decoded at the same time.
    max_bad_fraction
        Share of bad images above which reading stops; at or below it their wells are left out, and counted.

    Attributes
    ----------
    train, validation : pandas.DataFrame
        The wells of each side with the places of their images.

    Raises
    ------
    ConfigError
        If an experiment is in no shard, or too few wells remain.
    """

    def __init__(
        self, shards: Sequence[Path], experiments: Sequence[str], channels: Sequence[int], *, tile: int, seed: int,
        plate_format: int = 1536, validation_wells: int = 64, window_wells: int = 4096, max_bad_fraction: float = 0.01,
    ):  # fmt: skip
        self.shards, self.tile, self.seed = [Path(s) for s in shards], tile, seed
        self.max_bad_fraction = max_bad_fraction
        wells = _wells(self.shards, experiments, list(channels), plate_format)
        if len(wells) <= validation_wells:
            raise ConfigError(
                f"the experiments named for pre-training hold {len(wells)} whole wells, and pretrain.validation_wells "
                f"takes {validation_wells} of them away; name more experiments or keep fewer wells"
            )
        split = np.random.default_rng([seed, _STREAM_SPLIT]).permutation(len(wells))
        self.validation = wells.iloc[np.sort(split[:validation_wells])].reset_index(drop=True)
        self.train = wells.iloc[np.sort(split[validation_wells:])].reset_index(drop=True)
        self._windows = {"plate_format": plate_format, "window_wells": window_wells}
        self._window = max(1, window_wells // CHUNK_WELLS)
        self._decoded: OrderedDict[int, list[np.ndarray | None]] = OrderedDict()
        self._orders: dict[int, np.ndarray] = {}
        self._open: dict[int, object] = {}
        self._bad: dict[str, str] = {}

    def description(self) -> dict[str, int | str]:
        """Return what decides over the tiles beside the seed: validation wells, windows, and a hash.

        The hash is over the wells, the places of their images and the sizes in bytes of their shards: it changes with
        the images, though not with every byte of them.
        """
        places = pd.concat([self.train, self.validation])[[schema.WELL_ID, *schema.IMAGE_LOCATION]]
        content = [[str(p.stat().st_size) for p in self.shards], places.astype(str).to_numpy().tolist()]
        return {
            "validation_wells": len(self.validation),
            **self._windows,
            "sha256": files.sha256_of_json(content),
        }

    def batch(self, step: int, size: int) -> np.ndarray:
        """Return the tiles of a step: one random tile of each well, turned and flipped at random.

        Parameters
        ----------
        step
            Number of the step, from 0 on.
        size
            Tiles.

        Returns
        -------
        numpy.ndarray
            uint8 (size, C, tile, tile).

        Raises
        ------
        TooManyBadImages
            If more than the allowed share of images is bad, or no well is whole.
        """
        rng = np.random.default_rng([self.seed, _STREAM_TILES, step])
        return np.stack([_random_tile(self._good_image(step * size + i), self.tile, rng) for i in range(size)])

    def validation_tiles(self) -> np.ndarray:
        """Return the central tile of every validation well that can be read; uint8 (n, C, tile, tile)."""
        images = [image for image in self._read(self.validation) if image is not None]
        if not images:
            raise TooManyBadImages(f"no validation well can be used; the latest: {self._latest_bad()}")
        cut = [_cut(image, (np.array(image.shape[1:]) - self.tile) // 2, self.tile) for image in images]
        return np.stack(cut)

    def _good_image(self, position: int) -> np.ndarray:
        # the next good well of the order takes the place of a bad one; an epoch and its successor hold every well
        for p in range(position, position + 2 * len(self.train)):
            image = self._image(p)
            if image is not None:
                return image
        raise TooManyBadImages(f"no well for pre-training can be used; the latest: {self._latest_bad()}")

    def _image(self, position: int) -> np.ndarray | None:
        epoch, within = divmod(position, len(self.train))
        chunk, row = divmod(int(self._order(epoch)[within]), CHUNK_WELLS)
        if chunk not in self._decoded:
            self._decoded[chunk] = self._read(self.train.iloc[chunk * CHUNK_WELLS : (chunk + 1) * CHUNK_WELLS])
            while len(self._decoded) > 2 * self._window:
                self._decoded.popitem(last=False)
        self._decoded.move_to_end(chunk)
        return self._decoded[chunk][row]

    def _order(self, epoch: int) -> np.ndarray:
        """Return the order in which an epoch visits the training wells."""
        if epoch not in self._orders:
            rng = np.random.default_rng([self.seed, _STREAM_ORDER, epoch])
            n = len(self.train)
            chunks = rng.permutation(-(-n // CHUNK_WELLS))
            windows = [
                np.concatenate([np.arange(c * CHUNK_WELLS, min((c + 1) * CHUNK_WELLS, n)) for c in chunks[i : i + k]])
                for k in [self._window]
                for i in range(0, len(chunks), k)
            ]
            self._orders = {e: order for e, order in self._orders.items() if e >= epoch - 1}
            self._orders[epoch] = np.concatenate([rng.permutation(window) for window in windows])
        return self._orders[epoch]

    def _read(self, wells: pd.DataFrame) -> list[np.ndarray | None]:
        """Decode wells; uint8 (C, H, W) each, of the first site, or None for a bad one."""
        wanted: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for well, columns in enumerate(zip(*(wells[c] for c in schema.IMAGE_LOCATION), strict=True)):
            for image, (shard, group, row) in enumerate(zip(*columns, strict=True)):
                wanted.setdefault((int(shard), int(group)), []).append((well, image, int(row)))
        images: list[dict[int, np.ndarray]] = [{} for _ in range(len(wells))]
        with ThreadPoolExecutor(2) as pool:
            for (shard, group), entries in sorted(wanted.items()):
                if shard not in self._open:
                    self._open[shard] = open_shard(self.shards[shard])
                cells = read_images(self._open[shard], group, [row for _, _, row in entries])
                decoded = pool.map(_decode_or_reason, (data for _, data in cells))
                for (well, image, _), (key, _), result in zip(entries, cells, decoded, strict=True):
                    if isinstance(result, str):
                        self._reject(key, result)
                    else:
                        images[well][image] = result
        return [
            self._whole(well, found, len(rows))
            for well, found, rows in zip(wells[schema.WELL_ID], images, wells[schema.IMAGE_ROW], strict=True)
        ]

    def _whole(self, well: str, images: dict[int, np.ndarray], n: int) -> np.ndarray | None:
        if len(images) < n:
            return None
        shapes = {image.shape for image in images.values()}
        if len(shapes) > 1 or min(min(shapes)) < self.tile:
            self._reject(well, f"images of {sorted(shapes)} pixels; the model's tile has {self.tile}")
            return None
        return np.stack([images[i] for i in range(n)])

    def _latest_bad(self) -> str:
        what, reason = next(reversed(self._bad.items()))
        return f"{what}: {reason}"

    def _reject(self, what: str, reason: str) -> None:
        if what in self._bad:
            return
        self._bad[what] = reason
        print(f"warning: {what}: {reason}; its well is left out of pre-training", file=sys.stderr)
        total = sum(len(rows) for side in (self.train, self.validation) for rows in side[schema.IMAGE_ROW])
        if len(self._bad) > self.max_bad_fraction * total:
            raise TooManyBadImages(
                f"{len(self._bad)} of {total} images for pre-training are bad, more than embed.max_bad_fraction = "
                f"{self.max_bad_fraction:g} allows; the latest: {what}: {reason}"
            )


def _decode_or_reason(data: bytes | None) -> np.ndarray | str:
    try:
        return decode_image(data)
    except ImageError as error:
        return str(error)


def _wells(shards: Sequence[Path], experiments: Sequence[str], channels: list[int], plate_format: int) -> pd.DataFrame:
    """Return the whole wells of the named experiments with the images of their first site, in the order of shards."""
    if not experiments:
        raise ConfigError("pretrain.experiments is empty; name the experiments that an encoder may be trained on")
    images, _ = index_frame(shards, plate_format)
    experiment = images[schema.EXPERIMENT]
    absent = sorted(set(experiments) - set(experiment))
    if absent:
        raise ConfigError(
            f"pretrain.experiments: {', '.join(absent)} not found in the {len(shards)} shards; they hold "
            f"{', '.join(sorted(set(experiment))[:10])}"
        )
    images = images[experiment.isin(experiments)]
    # one site a well is enough, and keeps every well equally often in the batches
    images = images[images["site"] == images.groupby(schema.WELL_ID, observed=True)["site"].transform("min")]
    wells = pd.DataFrame({schema.WELL_ID: images[schema.WELL_ID].unique().astype(object)})
    located, _ = locate(wells, images, channels)
    incomplete = sorted(set(wells[schema.WELL_ID]) - set(located[schema.WELL_ID]))
    if incomplete:
        print(
            f"warning: {len(incomplete)} of {len(wells)} wells for pre-training lack one of the channels {channels} "
            f"and are left out: {', '.join(incomplete[:5])}{' ...' if len(incomplete) > 5 else ''}",
            file=sys.stderr,
        )
    return located


def _random_tile(image: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Cut a tile at a random place and turn it by one of the eight symmetries of a square."""
    corner = rng.integers(0, np.array(image.shape[1:]) - size + 1)
    turned = np.rot90(_cut(image, corner, size), rng.integers(4), axes=(1, 2))
    return turned[:, ::-1] if rng.integers(2) else turned


def _cut(image: np.ndarray, corner: np.ndarray, size: int) -> np.ndarray:
    return image[:, corner[0] : corner[0] + size, corner[1] : corner[1] + size]
