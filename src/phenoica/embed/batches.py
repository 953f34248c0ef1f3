"""From prepared wells to batches of tiles for the model: how many a batch, and how they are put together.

A batch is filled in the background while the model works on the one before, in one of two buffers (page-locked where
the model is on a GPU, so that the copy to it overlaps too).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from phenoica.embed.wells import PreparedWell

if TYPE_CHECKING:
    import torch

    from phenoica.openphenom.encoder import OpenPhenom

T = TypeVar("T")

AUTO = "auto"
# Numbers of the width `dim` that a block holds for each token at its peak: input, norm, the fused projection (7), its
# MLP half before and after GELU (8), query, key and attention output (3)
VALUES_PER_TOKEN = 20
MEMORY_SHARE = 0.5  # of what is free
# Beyond these a larger batch gains nothing, and it delays the first result.
MOST_BYTES_CPU = 768 << 20
MOST_TILES_CPU, MOST_TILES_GPU = 64, 256


def tile_bytes(model: OpenPhenom, n_channels: int) -> int:
    """Return about how much memory the forward pass of one tile takes, in bytes.

    With T = 1 + n_channels * patches tokens: 4 bytes * T * dim * 20 in the blocks, and 9 bytes a pixel (8-bit, scaled
    and standardised). Half precision takes less; it is not counted on.
    """
    size = model.config
    tokens = 1 + n_channels * size.patches
    return 4 * tokens * size.dim * VALUES_PER_TOKEN + 9 * n_channels * size.image_size**2


def choose_batch_tiles(setting: int | str, model: OpenPhenom, n_channels: int) -> int:
    """Return the tiles of a batch: `setting` if it is a number, else what fits into half of the free memory.

    `auto` divides half of the free memory by `tile_bytes`, and takes at least 1 and at most 256 tiles on a GPU, at
    most 64 tiles and 768 MiB on a CPU. The result changes an embedding by rounding alone.

    Parameters
    ----------
    setting
        `embed.batch_tiles`: a number or `auto`.
    model
        The encoder, on its device.
    n_channels
        Channels of a tile.
    """
    if setting != AUTO:
        return int(setting)
    on_gpu = model.device.type == "cuda"
    free = MEMORY_SHARE * free_memory(model.device)
    if not on_gpu:
        free = min(free, MOST_BYTES_CPU)
    most = MOST_TILES_GPU if on_gpu else MOST_TILES_CPU
    return int(np.clip(free // tile_bytes(model, n_channels), 1, most))


def free_memory(device: torch.device) -> int:
    """Return the free memory of a GPU, or the memory that the machine can give without swapping, in bytes."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available


@dataclass(frozen=True)
class TileBatch:
    """Tiles of one forward pass.

    Attributes
    ----------
    tiles
        uint8 (n, channels, size, size); a view of a buffer that is filled anew two batches later.
    wells
        Index of the well of each tile, (n,).
    group
        The group that all these wells are of.
    """

    tiles: torch.Tensor
    wells: np.ndarray
    group: int = 0


def tile_batches(
    prepared: Iterable[PreparedWell], batch_tiles: int, pinned: bool, group_of: Callable[[int], int] = lambda well: 0
) -> Iterator[TileBatch]:
    """Yield the tiles of usable wells in full batches; the last one of a group, or before other channels, as it comes.

    So what is in a batch with a well follows from its group alone, not from where reading began.

    Parameters
    ----------
    prepared
        The wells; those without tiles are passed over.
    batch_tiles
        Tiles of a full batch.
    pinned
        Use page-locked memory (for a GPU).
    group_of
        The group of a well, by its index; wells of a group come one after the other.
    """
    import torch

    buffers: dict[tuple[int, ...], list[torch.Tensor]] = {}  # two for each shape of a tile
    wells = np.empty(batch_tiles, np.intp)
    filled, group, shape = 0, 0, ()
    for item in prepared:
        if item.tiles is None:
            continue
        if filled and (group_of(item.well), item.tiles.shape[1:]) != (group, shape):
            yield TileBatch(buffers[shape][0][:filled], wells[:filled].copy(), group)
            buffers[shape].reverse()
            filled = 0
        group, shape = group_of(item.well), item.tiles.shape[1:]
        if shape not in buffers:
            size = (batch_tiles, *shape)
            buffers[shape] = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        taken = 0
        while taken < len(item.tiles):
            n = min(batch_tiles - filled, len(item.tiles) - taken)
            buffers[shape][0].numpy()[filled : filled + n] = item.tiles[taken : taken + n]
            wells[filled : filled + n] = item.well
            filled, taken = filled + n, taken + n
            if filled == batch_tiles:
                yield TileBatch(buffers[shape][0], wells.copy(), group)
                buffers[shape].reverse()
                filled = 0
    if filled:
        yield TileBatch(buffers[shape][0][:filled], wells[:filled].copy(), group)


def one_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield `items`, making the next one in a thread of its own while the caller works on the last one."""
    done = object()
    with ThreadPoolExecutor(1, thread_name_prefix="one_ahead") as background:
        future = background.submit(next, items, done)
        while (item := future.result()) is not done:
            future = background.submit(next, items, done)
            yield item
