"""Cut the image of a well into the tiles that the encoder sees.

Comes in: an image of any size. Goes out: non-overlapping square tiles, row by row. This is the only place
where tiles are cut; it needs numpy alone.
"""

from __future__ import annotations

import numpy as np

from phenoica.errors import ConfigError, ImageError


def tile_grid(height: int, width: int, size: int) -> tuple[int, int]:
    """Return how many rows and columns of tiles of side `size` fit into an image.

    Raises
    ------
    ImageError
        If not a single tile fits.
    ConfigError
        If `size` is not positive.
    """
    if size < 1:
        raise ConfigError(f"a tile of {size} px cannot be cut; the tile side is the model's image size")
    if height < size or width < size:
        raise ImageError(
            f"an image of {height} x {width} px is smaller than the model's tile of {size} px; "
            "choose a model with a smaller image_size or provide larger images"
        )
    return height // size, width // size


def tiles(images: np.ndarray, size: int) -> np.ndarray:
    """Cut images into non-overlapping square tiles.

    Where the sides are no multiple of `size`, the central part of the image is cut and equal margins are left
    out (an odd remainder leaves one pixel more at the bottom and the right).

    Parameters
    ----------
    images
        (..., C, H, W), any dtype.
    size
        Side of a tile in pixels.

    Returns
    -------
    numpy.ndarray
        (..., T, C, size, size), the dtype of `images`, tiles from left to right, then from top to bottom; a
        view of `images` where numpy can make one.

    Raises
    ------
    ImageError
        If an image is smaller than a tile or has no channel axis.
    """
    images = np.asarray(images)
    if images.ndim < 3:
        raise ImageError(f"an image has the axes channel, row, column; this one has the shape {images.shape}")
    *lead, channels, height, width = images.shape
    rows, columns = tile_grid(height, width, size)
    top, left = (height - rows * size) // 2, (width - columns * size) // 2
    cut = images[..., top : top + rows * size, left : left + columns * size]
    cut = cut.reshape(*lead, channels, rows, size, columns, size)
    n = len(lead)
    order = (*range(n), n + 1, n + 3, n, n + 2, n + 4)
    return cut.transpose(order).reshape(*lead, rows * columns, channels, size, size)
