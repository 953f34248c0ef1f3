"""Plain image measures of a well, taken in the same pass as the embedding.

Comes in: the 8-bit channels of one image. Goes out: per channel the grey-value distribution, shares of
saturated and empty area and the focus (Bray et al. 2012, J Biomol Screen 17:266), and the number of nuclei.
They carry the QC pages, and as a view of their own they show what can be seen without any encoder.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import fft, ndimage

from phenoica import schema
from phenoica.errors import ConfigError, ImageError

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
PER_CHANNEL = ("mean", "sd", *(f"p{p:02d}" for p in PERCENTILES), "saturated", "empty", "focus")

EMPTY_BLOCK_PX = 8
EMPTY_SD = 1.0  # grey values
FOCUS_TILE_PX = 128
LOWEST_RING = 2  # cycles a tile; below it the window and the illumination rule
ROUNDING_POWER = 1 / 12  # variance that rounding to whole grey values adds to a pixel
MIN_SIDE_PX = 16

# Counting works on an image binned until a nucleus is about this wide: finer detail only costs time.
BINNED_DIAMETER_PX = 8
# Nuclei must stand out from the background by this many grey values on average ...
MIN_CONTRAST = 6.0
# ... and each of their pixels by this many standard deviations of the background.
MIN_DEVIATIONS = 4.0
# The smallest object that counts, as a share of the area of a typical nucleus
MIN_AREA_SHARE = 0.2
# Objects wider than twice this many diameters are one nucleus: distances to the border end here.
LARGEST_RADIUS = 1.5
BACKGROUND_BLOCKS = 4  # blocks along a diameter on which the background is computed
SAMPLED_SIDE_PX = 128


def measure_names(channels: Sequence[int]) -> list[str]:
    """Return the names of the measures of `channels` in the order of `measure`, without the cell count."""
    return [f"c{channel}_{name}" for channel in channels for name in PER_CHANNEL]


def measure(
    images: np.ndarray, channels: Sequence[int], *, dna_channel: int | None, nucleus_diameter_px: float
) -> dict[str, float]:
    """Measure one image of a well.

    Parameters
    ----------
    images
        uint8 (C, H, W).
    channels
        Their C channel numbers; they name the measures.
    dna_channel
        The number of the channel with stained nuclei, one of `channels`; None counts nothing.
    nucleus_diameter_px
        Typical diameter of a nucleus in pixels.

    Returns
    -------
    dict
        `cell_count` (not with `dna_channel` None), and for every channel number n:

        * `cn_mean`, `cn_sd`: grey values; population standard deviation.
        * `cn_p01` ... `cn_p99`: percentiles 1, 5, 25, 50, 75, 95, 99, equal to `numpy.percentile` (linear).
        * `cn_saturated`: share of pixels at 255 (Bray 2012: at the maximum).
        * `cn_empty`: share of whole 8 x 8 px blocks with a standard deviation below 1 grey value that are not
          saturated: area that holds nothing beyond rounding, as in a black or missing image.
        * `cn_focus`: slope of log power against log spatial frequency, see `focus`.

    Raises
    ------
    ImageError
        If the images have another type or shape, or are less than 16 px wide.
    ConfigError
        If the DNA channel is not among `channels`, a channel number is repeated, or the diameter is below 2
        px.
    """
    images = np.asarray(images)
    channels = [int(c) for c in channels]
    _check(images, channels, dna_channel, nucleus_diameter_px)
    measures: dict[str, float] = {}
    if dna_channel is not None:
        measures[schema.CELL_COUNT] = float(count_nuclei(images[channels.index(dna_channel)], nucleus_diameter_px))
    slopes = focus(images)
    for channel, image, slope in zip(channels, images, slopes, strict=True):
        values = (*_grey_values(image), _empty_share(image), float(slope))
        measures.update(zip((f"c{channel}_{name}" for name in PER_CHANNEL), values, strict=True))
    return measures


def _check(images: np.ndarray, channels: list[int], dna_channel: int | None, diameter: float) -> None:
    if images.dtype != np.uint8:
        raise ImageError(f"images have the type {images.dtype}; measures take 8-bit grey values (uint8)")
    if images.ndim != 3 or len(images) != len(channels):
        raise ImageError(
            f"images have the shape {images.shape}; expected ({len(channels)}, H, W) for channels {channels}"
        )
    if min(images.shape[1:]) < MIN_SIDE_PX:
        raise ImageError(f"images are {images.shape[1]} x {images.shape[2]} px, not at least {MIN_SIDE_PX} px")
    if len(set(channels)) != len(channels):
        raise ConfigError(f"plates.channels {channels} names a channel twice")
    if dna_channel is not None and dna_channel not in channels:
        raise ConfigError(f"embed.dna_channel {dna_channel} is not among plates.channels {channels}")
    if not diameter >= 2:
        raise ConfigError(f"embed.nucleus_diameter_px is {diameter}; nuclei must be at least 2 px wide")


def _grey_values(image: np.ndarray) -> tuple[float, ...]:
    """Return mean, sd, percentiles and the saturated share of one channel, all exact from its 256 counts."""
    counts = _counts(image)
    n = image.size
    levels = np.arange(256)
    mean = float(counts @ levels) / n
    sd = float(np.sqrt(counts @ (levels - mean) ** 2 / n))
    # numpy's linear percentile lies between the two order statistics around p (n - 1) / 100
    below = np.cumsum(counts)
    position = np.array(PERCENTILES) / 100 * (n - 1)
    floor = np.floor(position)
    low = np.searchsorted(below, floor, side="right")
    high = np.searchsorted(below, np.ceil(position), side="right")
    percentiles = low + (position - floor) * (high - low)
    return (mean, sd, *map(float, percentiles), float(counts[255]) / n)


def _counts(image: np.ndarray) -> np.ndarray:
    """Return how many pixels have each of the 256 grey values.

    Two pixels are counted at a time, as one number of 16 bits: bincount spends its time on widening its input.
    """
    flat = np.ascontiguousarray(image).ravel()
    pairs = np.bincount(flat[: flat.size // 2 * 2].view(np.uint16), minlength=1 << 16).reshape(256, 256)
    return pairs.sum(0) + pairs.sum(1) + np.bincount(flat[flat.size // 2 * 2 :], minlength=256)


def _empty_share(image: np.ndarray) -> float:
    size = EMPTY_BLOCK_PX
    pixels = image.astype(np.float32)
    # sums of whole numbers below 2^24 are exact in float32
    total, squares = (_block_sums(p, size).astype(np.float64) for p in (pixels, pixels * pixels))
    n = size * size
    return float(np.mean((n * squares - total**2 < EMPTY_SD**2 * n**2) & (total < 255 * n)))


def _block_sums(pixels: np.ndarray, size: int) -> np.ndarray:
    """Sum square blocks; (H, W) -> (H // size, W // size); remainders are left out."""
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    pixels = pixels[: rows * size, : columns * size]
    # adding slices is up to ten times faster than a sum over a short axis
    lines = sum((pixels[k::size] for k in range(1, size)), pixels[::size])
    return sum((lines[:, k::size] for k in range(1, size)), lines[:, ::size])


def focus(images: np.ndarray) -> np.ndarray:
    """Return the slope of the log power spectrum of each channel: the blurrier, the more negative.

    The power log-log slope of Bray et al. 2012, here from the averaged spectrum of non-overlapping
    Hann-windowed tiles of up to 128 px (Welch; of several tiles every other one, as on a chessboard),
    averaged over rings of whole frequency from 2 cycles a tile to a quarter of the sampling rate, above which
    a blurred image holds noise alone. Least squares, every octave with the same weight. The power of rounding
    to whole grey values (1/12) is added, so the slope is finite everywhere, and 0 for an image of one grey
    value.

    Parameters
    ----------
    images
        (C, H, W), grey values.

    Returns
    -------
    numpy.ndarray
        (C,), float64.
    """
    # one channel after the other: its spectra stay in the cache
    return np.array([_slope(image) for image in images])


def _slope(image: np.ndarray) -> float:
    size = min(FOCUS_TILE_PX, *image.shape)
    rows, columns = image.shape[0] // size, image.shape[1] // size
    top, left = (image.shape[0] - rows * size) // 2, (image.shape[1] - columns * size) // 2
    cut = image[top : top + rows * size, left : left + columns * size]
    cut = cut.reshape(rows, size, columns, size).swapaxes(1, 2)
    # every other tile, as on a chessboard: half the time for the same slope
    cut = cut[np.indices((rows, columns)).sum(0) % 2 == 0].astype(np.float32)
    plan = _spectrum_plan(size)
    cut -= cut.mean(axis=(1, 2), keepdims=True)
    cut *= plan.window
    # columns above the highest ring are not needed: half of the second transform
    spectrum = fft.fft(np.ascontiguousarray(fft.rfft(cut)[..., : plan.columns]), axis=-2)
    spectrum = spectrum.view(np.float32)  # real and imaginary parts in turn
    spectrum *= spectrum
    squares = spectrum.mean(axis=0)
    power = (squares[:, ::2] + squares[:, 1::2]) / np.square(plan.window).sum()
    rings = np.bincount(plan.ring, power.ravel()) / plan.ring_size
    used = rings[LOWEST_RING : LOWEST_RING + len(plan.slope_weights)]
    return float(np.log(used + ROUNDING_POWER) @ plan.slope_weights)


class _SpectrumPlan(NamedTuple):
    """What the focus of every tile of one size shares."""

    window: np.ndarray  # (size, size) float32
    columns: int  # coefficients of each line of a real spectrum that lie in a ring
    ring: np.ndarray  # whole frequency of each coefficient in these columns, flat
    ring_size: np.ndarray  # coefficients of each ring
    slope_weights: np.ndarray  # the weighted least-squares slope is their product with log power


@functools.cache
def _spectrum_plan(size: int) -> _SpectrumPlan:
    window = np.hanning(size + 2)[1:-1].astype(np.float32)
    frequency = np.arange(LOWEST_RING, size // 4 + 1)
    columns = size // 4 + 1
    radius = np.hypot(np.fft.fftfreq(size, 1 / size)[:, None], np.arange(columns)[None])
    ring = np.rint(radius).astype(np.intp).ravel()
    weight = 1 / frequency  # rings are denser at high frequency: this gives every octave the same weight
    centred = np.log(frequency) - np.average(np.log(frequency), weights=weight)
    slope_weights = weight * centred / (weight @ centred**2)
    return _SpectrumPlan(np.outer(window, window), columns, ring, np.bincount(ring), slope_weights)


def count_nuclei(image: np.ndarray, diameter_px: float) -> int:
    """Count the nuclei of a DNA channel.

    The image is binned until a nucleus is about 8 px wide and smoothed; the background within four nuclei is
    taken off (white top-hat); Otsu's threshold on square roots, which let dim nuclei count beside bright
    ones, separates nuclei from background, unless the noise of the background asks for a higher one; objects
    that touch are parted at the maxima of the smoothed distance to their border. Nuclei that the bottom or the
    right rim cuts are left out and those at the top and the left are counted: on average that is the number of
    nuclei whose centre lies in the field (the unbiased counting frame of Gundersen 1977, J Microsc 111:219).

    Parameters
    ----------
    image
        uint8 (H, W).
    diameter_px
        Typical diameter of a nucleus in pixels.
    """
    bins = max(1, int(diameter_px // BINNED_DIAMETER_PX))
    bins = min(bins, min(image.shape) // 4)
    pixels = _block_sums(image.astype(np.float32), bins) / np.float32(bins**2)
    diameter = min(diameter_px / bins, *pixels.shape)
    smooth = _smooth(pixels, diameter / 10)
    mask = _foreground(smooth, diameter)
    if not mask.any():
        return 0
    distance = _smooth(_border_distance(mask, int(np.ceil(LARGEST_RADIUS * diameter))), diameter / 10)
    peak = (distance == _highest_near(distance, int(np.ceil(0.3 * diameter)))) & mask
    objects, _ = ndimage.label(mask)
    large = np.bincount(objects[mask]) >= MIN_AREA_SHARE * np.pi * (diameter / 2) ** 2
    peak[peak] = large[objects[peak]]
    peaks, count = ndimage.label(peak, structure=np.ones((3, 3)))
    return int(count) - np.count_nonzero(np.unique(np.concatenate([peaks[-1], peaks[:, -1]])))


def _smooth(image: np.ndarray, sigma: float) -> np.ndarray:
    """Smooth float32 (H, W) by the binomial kernel whose variance comes nearest to sigma squared; edges repeat.

    A pass of (1, 2, 1) / 4 has the variance 1/2; it needs additions alone, several times faster than the Gaussian
    that it tends to.
    """
    passes = round(2 * sigma**2)
    for _ in range(2 * passes):  # along the rows and the columns in turn
        pairs = image[1:] + image[:-1]
        summed = np.empty_like(image)
        np.add(pairs[1:], pairs[:-1], out=summed[1:-1])
        summed[0], summed[-1] = pairs[0] + 2 * image[0], pairs[-1] + 2 * image[-1]
        summed *= np.float32(0.25)
        image = summed.T
    return image


def _border_distance(mask: np.ndarray, most: int) -> np.ndarray:
    """Return the Euclidean distance of each pixel to the background in pixels, at most `most`; float32 (H, W).

    First along the rows, then for each column the lower envelope of the parabolas that stand on it (Felzenszwalb &
    Huttenlocher 2012, Theory of Computing 8:415), here by shifting whole images: nuclei are small, so few shifts
    do. Outside of the image is no background.
    """
    most = min(most, max(mask.shape))
    straight = mask * np.uint8(most)
    shift = 1
    while shift < most:  # doubling shifts reach every pixel up to `most` away
        previous = straight + np.uint8(shift)
        np.minimum(straight[:, shift:], previous[:, :-shift], out=straight[:, shift:])
        np.minimum(straight[:, :-shift], previous[:, shift:], out=straight[:, :-shift])
        shift *= 2
    standing = np.square(straight, dtype=np.uint16)
    squared = standing.copy()
    for shift in range(1, min(int(straight.max()), len(standing))):
        parabola = standing + np.uint16(shift**2)
        np.minimum(squared[shift:], parabola[:-shift], out=squared[shift:])
        np.minimum(squared[:-shift], parabola[shift:], out=squared[:-shift])
    return np.sqrt(squared, dtype=np.float32)


def _highest_near(values: np.ndarray, reach: int) -> np.ndarray:
    """Return the maximum over the square of side 2 * reach + 1 around each pixel of (H, W)."""
    for _ in range(2):  # along the rows, then the columns
        done = 0
        while done < min(reach, len(values) - 1):
            # a larger shift would step over what lies between a pixel and the edge
            shift = min(done + 1, reach - done)
            previous, values = values, values.copy(order="K")
            np.maximum(values[shift:], previous[:-shift], out=values[shift:])
            np.maximum(values[:-shift], previous[shift:], out=values[:-shift])
            done += shift
        values = values.T
    return values


def _foreground(smooth: np.ndarray, diameter: float) -> np.ndarray:
    """Return where a smoothed DNA channel holds nuclei, as bool."""
    contrast = smooth - _background(smooth, diameter)
    # Otsu alone would halve the noise of a field with few nuclei. Centre and spread of the background come
    # from the 5th and 25th percentile, as of a normal distribution; both lie in the background while nuclei
    # cover less than three quarters of the field. Some ten thousand pixels tell them as well as all.
    step = max(1, min(contrast.shape) // SAMPLED_SIDE_PX)
    sample = np.ascontiguousarray(contrast[step // 2 :: step, step // 2 :: step])
    low, quarter = np.percentile(sample, (5, 25))
    sd = (quarter - low) / (1.645 - 0.674)
    centre = quarter + 0.674 * sd
    threshold = max(_otsu(np.sqrt(np.maximum(sample, 0))) ** 2, float(centre + MIN_DEVIATIONS * sd))
    mask = contrast > threshold
    if mask.any() and contrast[mask].mean() - centre < MIN_CONTRAST:
        mask[:] = False
    return mask


def _background(smooth: np.ndarray, diameter: float) -> np.ndarray:
    """Return what is left of a smoothed DNA channel without its nuclei: an opening by four diameters; (H, W).

    It varies slowly, so it is computed on blocks of a quarter of a nucleus and stretched linearly.
    """
    block = max(1, int(diameter // BACKGROUND_BLOCKS))
    coarse = _block_sums(smooth, block) / np.float32(block**2)
    margin = min(int(np.ceil(2 * diameter / block)), min(coarse.shape) - 1)
    # Odd reflection goes on with a slope of the illumination; an even one would leave a bright rim as
    # contrast. It doubles the noise of the rim, hence one more smoothing.
    padded = np.pad(ndimage.uniform_filter(coarse, 3), margin, mode="reflect", reflect_type="odd")
    opened = _highest_near(-_highest_near(-padded, margin), margin)[margin:-margin, margin:-margin]
    columns = _stretch(opened.T, smooth.shape[1], block)
    return _stretch(np.ascontiguousarray(columns.T), smooth.shape[0], block)


def _stretch(values: np.ndarray, length: int, block: int) -> np.ndarray:
    """Interpolate means of blocks linearly along the first axis, from (n, W) to (length, W); edges are held."""
    at = np.clip((np.arange(length) - (block - 1) / 2) / block, 0, len(values) - 1).astype(np.float32)
    below = np.minimum(at.astype(np.intp), len(values) - 2)
    step = np.diff(values, axis=0)[below]
    step *= (at - below)[:, None].astype(np.float32)
    step += values[below]
    return step


def _otsu(values: np.ndarray) -> float:
    """Return the threshold of largest between-class variance (Otsu 1979), over 256 bins."""
    high = float(values.max())
    if high <= 0:
        return 0.0
    counts = np.bincount((values.ravel() * (255 / high)).astype(np.intp), minlength=256).astype(np.float64)
    weight = np.cumsum(counts)
    first = np.cumsum(counts * np.arange(256))
    rest = weight[-1] - weight
    with np.errstate(invalid="ignore", divide="ignore"):
        between = (first[-1] * weight / weight[-1] - first) ** 2 / (weight * rest)
    best = int(np.argmax(np.where((weight > 0) & (rest > 0), between, -1)))
    return (best + 1) * high / 255
