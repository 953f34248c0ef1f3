"""From camera counts to 8 bits: one fixed linear scale a channel, area averaging and JPEG 2000.

The scale comes from two percentiles of a sample of all plates and is the same for every image of the channel, so that
a bright well stays brighter than a dim one. All functions here work on arrays in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import imagecodecs
import numpy as np

from phenoica.errors import ImageError, ImageImportError

LOWEST_LEVEL, HIGHEST_LEVEL = 10, 74  # dB: what the search for a file size chooses from
STEPS_A_DB = 8


@dataclass(frozen=True)
class Scale:
    """The linear scale of one channel: `low` becomes 0 and `high` 255.

    Attributes
    ----------
    low, high
        Grey levels; not necessarily whole numbers.
    images
        How many images they were measured on.
    """

    low: float
    high: float
    images: int

    def __post_init__(self) -> None:
        """Refuse a scale that has no width."""
        if not (np.isfinite(self.low) and np.isfinite(self.high) and 0 <= self.low < self.high):
            raise ImageImportError(f"a scale from {self.low} to {self.high} has no width; low must be below high")

    def apply(self, image: np.ndarray) -> np.ndarray:
        """Return uint8: (image - low) / (high - low) * 255, rounded, and 0 and 255 outside."""
        if image.dtype.kind == "u":  # a table of all grey levels is exact and several times faster
            return self._scaled(np.arange(np.iinfo(image.dtype).max + 1))[image]
        return self._scaled(image)

    def _scaled(self, values: np.ndarray) -> np.ndarray:
        return np.clip(np.rint((values - self.low) * (255 / (self.high - self.low))), 0, 255).astype(np.uint8)


class LevelCounts:
    """How often each grey level occurs in the images added so far."""

    def __init__(self) -> None:
        self.counts = np.zeros(1 << 16, np.int64)
        self.images = 0

    def add(self, image: np.ndarray) -> None:
        """Add an image; levels that are no whole numbers (after averaging) are rounded."""
        levels = image if image.dtype.kind == "u" else np.rint(image).astype(np.uint16)
        self.counts += np.bincount(levels.ravel(), minlength=len(self.counts))
        self.images += 1

    def percentile(self, percent: float) -> float:
        """Return a percentile of all pixels, interpolated linearly between pixels (numpy's default)."""
        below = np.cumsum(self.counts)
        position = percent / 100 * (below[-1] - 1)
        first, second = np.searchsorted(below, [np.floor(position), np.ceil(position)], side="right")
        return float(first + (second - first) * (position - np.floor(position)))


def area_mean(image: np.ndarray, size: int) -> np.ndarray:
    """Return a square image averaged to `size` x `size`; every source pixel counts by the area that it covers.

    Parameters
    ----------
    image
        (side, side) of any number type.
    size
        New side; at most the old one. A whole-number factor gives plain block means.

    Returns
    -------
    float64 array (size, size)

    Raises
    ------
    ImageError
        If the image is not square or smaller than `size`.
    """
    height, width = image.shape
    if height != width:
        raise ImageError(f"image of {height} x {width} pixels is not square; crop it, or import without a size")
    if height < size:
        raise ImageError(f"image of {height} x {width} pixels is smaller than the wanted {size}; it is not enlarged")
    edges = np.arange(size + 1) * (height / size)
    return _means_between(_means_between(image.astype(np.float64), edges).T, edges).T


def _means_between(image: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the means of rows between edges, from differences of the running sum; whole grey levels stay exact."""
    sums = np.vstack([np.zeros((1, image.shape[1])), np.cumsum(image, axis=0)])
    whole = np.minimum(edges.astype(np.int64), len(image) - 1)
    up_to_edge = sums[whole] + (edges - whole)[:, None] * image[whole]
    return np.diff(up_to_edge, axis=0) / np.diff(edges)[:, None]


def project(stacks: Sequence[np.ndarray], planes: int | str | None) -> np.ndarray:
    """Return one image of z planes (planes, H, W).

    Parameters
    ----------
    stacks
        The planes, in order, from one file or several.
    planes
        "max" for the maximum projection, or the number of the plane, counted from 1; None if there is one plane only.

    Raises
    ------
    ImageError
        If planes differ in size or type, or the plane does not exist.
    ImageImportError
        If there are several planes and `planes` is None.
    """
    kinds = {(stack.shape[1:], stack.dtype) for stack in stacks}
    if len(kinds) > 1:
        raise ImageError(f"z planes differ in size or bits: {sorted(f'{s} {d}' for s, d in kinds)}")
    stack = stacks[0] if len(stacks) == 1 else np.concatenate(stacks)
    if planes == "max":
        return stack.max(axis=0)
    if isinstance(planes, int):
        if planes > len(stack):
            raise ImageError(f"there is no plane {planes}; the file has {len(stack)}")
        return stack[planes - 1]
    if len(stack) > 1:
        raise ImageImportError(f"{len(stack)} z planes; say --planes max (maximum projection) or the plane's number")
    return stack[0]


def encode(image: np.ndarray, compression: float | None) -> bytes:
    """Encode a uint8 image as JPEG 2000.

    Parameters
    ----------
    image
        uint8 (H, W).
    compression
        None for lossless; else the ratio that the file must reach: the best quality, in eighths of a decibel, whose
        file has at most 1/`compression` of the pixels' bytes. The codec takes a quality, so it is searched for.

    Raises
    ------
    ImageError
        If the ratio cannot be reached: a small image, whose header alone takes more.
    """
    if compression is None:
        return imagecodecs.jpeg2k_encode(image, codecformat="jp2", reversible=True, numthreads=1)
    budget = image.nbytes / compression
    best: bytes | None = None
    lowest, highest = LOWEST_LEVEL * STEPS_A_DB, HIGHEST_LEVEL * STEPS_A_DB
    while lowest <= highest:
        level = (lowest + highest) // 2
        data = imagecodecs.jpeg2k_encode(image, level / STEPS_A_DB, codecformat="jp2", reversible=False, numthreads=1)
        if len(data) <= budget:
            best, lowest = data, level + 1
        else:
            highest = level - 1
    if best is None:
        raise ImageError(
            f"image of {image.shape} pixels does not reach {compression:g}:1 at {LOWEST_LEVEL} dB; choose a lower ratio"
        )
    return best
