"""Draw one well of cells: float factors in, six uint8 images and the true cell count out.

Cells are ellipses that share the field as a warped Voronoi tessellation; every stain is then drawn for all pixels at
once from a pixel's place inside its cell. Lengths are in pixels of a 128 px field and scaled, so another image side
shows the same cells. The module is frozen by a hash in its test and is never tuned to a score.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.ndimage import gaussian_filter

from phenoica.demo.layout import N_CHANNELS, PARAMETERS

FIELD = 128.0  # side of the field in the length unit: pixels of the default image size
MARGIN = 12.0  # cells whose centre lies this far outside still reach into the field
NUCLEUS_RADIUS = 4.9
CELL_RADIUS = 15.5
SPOTS = 4  # most nucleoli a nucleus can have

# Brightness of each stain before the camera; chosen once so that well under 1 % of pixels saturate.
STAIN_GAIN = (0.58, 0.46, 0.52, 0.60, 0.56, 0.56)
READ_NOISE, SHOT_NOISE = 0.006, 0.008
# which stain leaks into which channel, for bleed_1 .. bleed_6 (zero-based: from, to)
BLEED_PAIRS = ((4, 0), (3, 1), (5, 2), (1, 3), (2, 4), (2, 5))


@dataclass(frozen=True)
class Cells:
    """The cells of one field; every array is float32 (cells,) unless said otherwise, lengths in field units."""

    x: np.ndarray
    y: np.ndarray
    angle: np.ndarray
    length: np.ndarray  # half axes of the cell
    width: np.ndarray
    nucleus: np.ndarray  # mean radius of the nucleus
    nucleus_x: np.ndarray  # offset of the nucleus along the cell's axes
    nucleus_y: np.ndarray
    lobes: np.ndarray  # (cells, 3) amplitude of the outline's harmonics 2, 3, 4
    lobe_phase: np.ndarray  # (cells, 3)
    mitotic: np.ndarray  # bool
    stain: np.ndarray  # (cells, 6) relative brightness
    golgi_angle: np.ndarray
    spot_x: np.ndarray  # (cells, SPOTS) nucleoli in units of the nuclear radius
    spot_y: np.ndarray
    spot_size: np.ndarray  # (cells, SPOTS); 0 = no such nucleolus
    fragment: np.ndarray  # radius of a micronucleus beside the nucleus; 0 = none

    @property
    def count(self) -> int:
        """Return how many centres lie inside the field: the true cell count."""
        return int(np.sum((self.x >= 0) & (self.x < FIELD) & (self.y >= 0) & (self.y < FIELD)))


@dataclass(frozen=True)
class Pixels:
    """Where each pixel lies in its cell; float32 (side, side), lengths in field units."""

    owner: np.ndarray  # int, index of the nearest cell
    inside: np.ndarray  # 0..1, cytoplasm with a soft rim
    radius: np.ndarray  # 0 at the cell centre, 1 at its rim
    border: np.ndarray  # distance to the rim or the next cell, about
    across: np.ndarray  # coordinate across the cell's long axis
    nucleus_u: np.ndarray  # coordinates from the centre of the nucleus
    nucleus_v: np.ndarray
    outside_nucleus: np.ndarray  # distance from the nuclear outline, negative inside
    nucleus: np.ndarray  # 0..1 mask


def render_well(factors: Mapping[str, float], size: int, seed: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """Draw the six images of a well.

    Parameters
    ----------
    factors
        A row of `layout.factors`.
    size
        Image side in pixels; 128 is the native scale.
    seed
        Non-negative integers that are the well's own; two streams (cells, pixels) are made of them, so the cells are
        the same at every size.

    Returns
    -------
    images : numpy.ndarray
        uint8 (6, size, size): DNA, ER, actin, RNA, mitochondria, Golgi.
    count : int
        True number of cells with their centre in the field.
    """
    cells = place_cells(factors, np.random.default_rng([*seed, 1]))
    rng = np.random.default_rng([*seed, 2])
    scale = np.float32(size / FIELD)
    pixels = locate(cells, size, rng)
    stains = np.stack([
        _dna(cells, pixels, factors, scale, rng),
        _er(cells, pixels, factors, scale, rng),
        _actin(cells, pixels, factors, scale, rng),
        _rna(cells, pixels, factors, scale, rng),
        _mitochondria(cells, pixels, factors, scale, rng),
        _golgi(cells, pixels, factors, scale, rng),
    ])  # fmt: skip
    return _acquire(stains, factors, scale, rng), cells.count


def place_cells(factors: Mapping[str, float], rng: np.random.Generator) -> Cells:
    """Draw cells that keep a distance from each other, and the shape of each."""
    x, y = _centres(math.exp(factors["phenotype_density"]) * PARAMETERS["cells_per_field"], rng)
    n = len(x)
    mitotic = rng.random(n) < 0.03
    # crowded cells are smaller: they share the field
    spread = CELL_RADIUS * math.exp(0.7 * factors["phenotype_cell_size"] - 0.12 * factors["phenotype_density"])
    radius = spread * np.exp(0.12 * rng.normal(size=n)) * np.where(mitotic, 0.62, 1.0)
    stretch = np.where(mitotic, 1.05, np.exp(0.12 + np.abs(0.24 * rng.normal(size=n))))
    nucleus = NUCLEUS_RADIUS * np.exp(0.5 * factors["phenotype_nuclear_size"] + 0.09 * rng.normal(size=n))
    nucleus *= np.where(mitotic, 0.72, 1.0)
    irregular = factors["phenotype_nuclear_irregularity"]
    amplitude = np.array([0.10, 0.035, 0.025]) + max(irregular, -0.3) * np.array([0.05, 0.15, 0.12])
    lobes = np.clip(amplitude * np.exp(0.35 * rng.normal(size=(n, 3))), 0.0, 0.30)
    lobes[mitotic] = (0.32, 0.0, 0.05)  # a metaphase plate
    spot_r, spot_angle = 0.62 * np.sqrt(rng.random((n, SPOTS))), rng.uniform(0, 2 * np.pi, (n, SPOTS))
    wanted = 2.4 * math.exp(0.5 * factors["phenotype_nucleoli"])
    spots = rng.random((n, SPOTS)) < np.minimum(wanted / SPOTS, 1.0)
    spots[:, 0] = True
    spots[mitotic] = False  # nucleoli dissolve in mitosis
    size = 1.15 * np.exp(0.6 * factors["phenotype_nucleoli"] + 0.2 * rng.normal(size=(n, SPOTS)))
    fragment = np.where(rng.random(n) < 0.02 + 0.5 * max(irregular - 0.1, 0.0), rng.uniform(0.9, 1.7, n), 0.0)
    drawn = (
        x, y, rng.uniform(0, np.pi, n), radius * np.sqrt(stretch), radius / np.sqrt(stretch), nucleus,
        0.10 * radius * rng.normal(size=n), 0.07 * radius * rng.normal(size=n), lobes,
        rng.uniform(0, 2 * np.pi, (n, 3)), mitotic, np.exp(0.16 * rng.normal(size=(n, N_CHANNELS))),
        rng.uniform(0, 2 * np.pi, n), spot_r * np.cos(spot_angle), spot_r * np.sin(spot_angle), spots * size, fragment,
    )  # fmt: skip
    return Cells(*(a if a.dtype == bool else a.astype(np.float32) for a in drawn))


def _centres(expected: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw cell centres over the field and its margin; a centre too near to an earlier one is drawn again."""
    side = FIELD + 2 * MARGIN
    n = rng.poisson(0.35 * expected * (side / FIELD) ** 2) + round(0.65 * expected * (side / FIELD) ** 2)
    closest = 0.68 * side / np.sqrt(max(n, 1))
    tries = rng.uniform(-MARGIN, FIELD + MARGIN, (n, 12, 2))
    xy = np.empty((n, 2))
    for i in range(n):
        gaps = ((xy[:i, None] - tries[None, i]) ** 2).sum(axis=2).min(axis=0, initial=np.inf)
        far = gaps > closest**2
        xy[i] = tries[i, np.argmax(far) if far.any() else np.argmax(gaps)]
    return xy[:, 0], xy[:, 1]


def locate(cells: Cells, size: int, rng: np.random.Generator) -> Pixels:
    """Find for every pixel its cell and its place in it."""
    scale = np.float32(size / FIELD)
    at = (np.arange(size, dtype=np.float32) + np.float32(0.5)) / scale
    coarse, fine = rng.normal(size=(2, 14, 14)), rng.normal(size=(2, 34, 34))
    # cells are drawn on a bent grid, so that their outlines are no ellipses; nuclei on the straight one
    grid_x = at[None, :] + 3.0 * _smooth(coarse[0], size) + 1.5 * _smooth(fine[0], size)
    grid_y = at[:, None] + 3.0 * _smooth(coarse[1], size) + 1.5 * _smooth(fine[1], size)
    if len(cells.x) == 0:
        far, zero = np.full((size, size), 99, np.float32), np.zeros((size, size), np.float32)
        return Pixels(zero.astype(int), zero, far, zero, zero, far, far, far, zero)
    nearest, second, owner = _tessellate(cells, grid_x, grid_y, scale)
    radius = np.sqrt(nearest)
    mean = np.sqrt(cells.length * cells.width)[owner]
    border = np.minimum(0.5 * (np.sqrt(second) - radius), 1 - radius) * mean
    cos, sin = np.cos(cells.angle)[owner], np.sin(cells.angle)[owner]
    dx, dy = at[None, :] - cells.x[owner], at[:, None] - cells.y[owner]
    u, v = cos * dx + sin * dy - cells.nucleus_x[owner], cos * dy - sin * dx - cells.nucleus_y[owner]
    outside = _nuclear_distance(cells, owner, u, v)
    return Pixels(owner, _step((1 - radius) * mean, scale), radius, border, v, u, v, outside, _step(-outside, scale))


def _tessellate(
    cells: Cells, grid_x: np.ndarray, grid_y: np.ndarray, scale: np.float32
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return squared elliptical distance to the nearest and the second cell, and the nearest one's index.

    A cell only touches a window around it, which is what keeps this cheap; beyond every window the distance is 9.
    """
    nearest = np.full(grid_x.shape, 9, np.float32)
    second, owner = nearest.copy(), np.zeros(grid_x.shape, np.intp)
    for i in range(len(cells.x)):
        reach = 1.5 * cells.length[i] + 5
        rows = slice(max(int((cells.y[i] - reach) * scale), 0), max(int((cells.y[i] + reach) * scale), 0))
        columns = slice(max(int((cells.x[i] - reach) * scale), 0), max(int((cells.x[i] + reach) * scale), 0))
        window = (rows, columns)
        dx, dy = grid_x[window] - cells.x[i], grid_y[window] - cells.y[i]
        cos, sin = np.cos(cells.angle[i]), np.sin(cells.angle[i])
        distance = ((cos * dx + sin * dy) / cells.length[i]) ** 2 + ((cos * dy - sin * dx) / cells.width[i]) ** 2
        first, closer = nearest[window], distance < nearest[window]
        second[window] = np.where(closer, first, np.minimum(second[window], distance))
        nearest[window] = np.where(closer, distance, first)
        owner[window] = np.where(closer, i, owner[window])
    return nearest, second, owner


def _nuclear_distance(cells: Cells, owner: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return the distance from the nuclear outline r(angle) = R (1 + sum of harmonics 2, 3, 4), negative inside."""
    angle = np.arctan2(v, u)
    outline = np.ones_like(u)
    for k in range(3):
        # the second harmonic lies along the cell, so that nuclei are oval in its direction
        phase = 0.3 * np.sin(cells.lobe_phase[:, 0]) if k == 0 else cells.lobe_phase[:, k]
        outline += cells.lobes[:, k][owner] * np.cos((k + 2) * angle + phase[owner])
    return np.hypot(u, v) - cells.nucleus[owner] * outline


def _dna(
    cells: Cells, px: Pixels, factors: Mapping[str, float], scale: np.float32, rng: np.random.Generator
) -> np.ndarray:
    """Draw nuclei: chromatin grain, a slightly brighter rim, dark nucleoli, bright mitotic plates, micronuclei."""
    shape = px.owner.shape
    if len(cells.x) == 0:
        return np.zeros(shape, np.float32)
    grain = 0.18 * math.exp(1.8 * factors["phenotype_chromatin_texture"])
    texture = _noise(rng, shape, 0.95 * scale)
    # DNA content does not grow with size: a larger nucleus is dimmer
    content = cells.stain[:, 0] * np.where(cells.mitotic, 1.7, (NUCLEUS_RADIUS / cells.nucleus) ** 0.6).astype(
        np.float32
    )
    dome = 0.80 + 0.20 * np.sqrt(np.clip(-px.outside_nucleus / NUCLEUS_RADIUS, 0, 1))
    value = px.nucleus * content[px.owner] * dome * np.maximum(1 + grain * texture, 0.15)
    value *= 1 - 0.30 * np.minimum(_nucleoli(cells, px), 1)
    direction = cells.lobe_phase[:, 1]
    away = 1.35 * cells.nucleus + cells.fragment
    distance = np.hypot(
        px.nucleus_u - (away * np.cos(direction))[px.owner],
        px.nucleus_v - (away * np.sin(direction))[px.owner],
    )
    size = cells.fragment[px.owner]
    return value + 0.75 * _step(size - distance, scale) * (size > 0) * cells.stain[:, 0][px.owner]


def _nucleoli(cells: Cells, px: Pixels) -> np.ndarray:
    """Return the nucleoli as soft discs of height 1 inside the nuclei; float32 (side, side)."""
    image = np.zeros(px.owner.shape, np.float32)
    rows, columns = np.nonzero(px.nucleus > 0)  # nuclei cover a tenth of the field
    owner, u, v = px.owner[rows, columns], px.nucleus_u[rows, columns], px.nucleus_v[rows, columns]
    total = np.zeros(len(rows), np.float32)
    for k in range(SPOTS):
        size = cells.spot_size[:, k][owner]
        radius = cells.nucleus[owner]
        square = (u - radius * cells.spot_x[:, k][owner]) ** 2 + (v - radius * cells.spot_y[:, k][owner]) ** 2
        total += np.where(size > 0, np.exp(-((square / np.maximum(size, 0.1) ** 2) ** 1.5)), 0)
    image[rows, columns] = total * px.nucleus[rows, columns]
    return image


def _stained(cells: Cells, px: Pixels, channel: int) -> np.ndarray | np.float32:
    """Return the brightness of each pixel's cell in a channel (zero-based)."""
    return cells.stain[:, channel][px.owner] if len(cells.x) else np.float32(0)


def _er(
    cells: Cells, px: Pixels, factors: Mapping[str, float], scale: np.float32, rng: np.random.Generator
) -> np.ndarray:
    """Draw the endoplasmic reticulum: dense around the nucleus, a net towards the rim."""
    density = np.exp(-np.maximum(px.outside_nucleus, 0) / 6.0)
    contrast = 0.30 * math.exp(1.4 * factors["phenotype_er_texture"])
    net = 1 - 1.6 * np.abs(_noise(rng, px.owner.shape, 1.15 * scale))
    value = (0.22 + 0.95 * density) * np.maximum(1 + contrast * net, 0.05)
    return value * px.inside * (1 - 0.62 * px.nucleus) * _stained(cells, px, 1)


def _actin(
    cells: Cells, px: Pixels, factors: Mapping[str, float], scale: np.float32, rng: np.random.Generator
) -> np.ndarray:
    """Draw the cytoskeleton: a cortex along every border and stress fibres along the cell."""
    fibres = 0.60 * math.exp(1.9 * factors["phenotype_actin_fibres"])
    bend = _smooth(rng.normal(size=(13, 13)), px.owner.shape[0])
    patchy = np.clip(0.6 + 0.5 * _smooth(rng.normal(size=(17, 17)), px.owner.shape[0]), 0, 1.6)
    stripes = np.maximum(np.cos((2 * np.pi / 4.0) * px.across + 2.0 * bend), 0) ** 2
    cortex = np.exp(-((np.maximum(px.border, 0) / 1.3) ** 2))
    value = (
        0.20 + fibres * stripes * patchy * (0.4 + 0.6 * np.minimum(px.radius, 1)) + 0.75 * cortex * (0.5 + 0.5 * patchy)
    )
    return value * px.inside * (1 - 0.35 * px.nucleus) * _stained(cells, px, 2)


def _rna(
    cells: Cells, px: Pixels, factors: Mapping[str, float], scale: np.float32, rng: np.random.Generator
) -> np.ndarray:
    """Draw RNA: bright nucleoli, a grey nucleoplasm and a cytoplasm that fades towards the rim."""
    amount = math.exp(0.8 * factors["phenotype_rna"])
    cytoplasm = amount * (0.25 + 0.50 * np.exp(-np.maximum(px.outside_nucleus, 0) / 5.0))
    cytoplasm *= np.maximum(1 + 0.18 * _noise(rng, px.owner.shape, 1.3 * scale), 0.1)
    value = cytoplasm * px.inside * (1 - px.nucleus) + 0.42 * px.nucleus * amount**0.5
    return (value + 0.85 * _nucleoli(cells, px)) * _stained(cells, px, 3)


def _mitochondria(
    cells: Cells, px: Pixels, factors: Mapping[str, float], scale: np.float32, rng: np.random.Generator
) -> np.ndarray:
    """Draw mitochondria around the nucleus: threads that break into grains as fragmentation rises."""
    shape = px.owner.shape
    share = 1 / (1 + math.exp(-4.5 * (factors["phenotype_mito_fragmentation"] - 0.30)))
    threads = np.clip(1 - 1.9 * np.abs(_noise(rng, shape, 1.35 * scale)), 0, 1)
    grains = np.clip(1.1 * _noise(rng, shape, 0.85 * scale) - 0.75, 0, 1.6)
    ring = np.exp(-((np.maximum(px.outside_nucleus, 0) - 1.5) ** 2) / 42.0)
    value = (0.10 + (1 - share) * 1.35 * threads + share * 1.9 * grains) * ring
    return value * px.inside * (1 - 0.85 * px.nucleus) * _stained(cells, px, 4)


def _golgi(
    cells: Cells, px: Pixels, factors: Mapping[str, float], scale: np.float32, rng: np.random.Generator
) -> np.ndarray:
    """Draw the Golgi beside the nucleus, compact or dispersed, and a faint plasma membrane and nuclear envelope."""
    if len(cells.x) == 0:
        return np.zeros(px.owner.shape, np.float32)
    spread = math.exp(1.1 * factors["phenotype_golgi_spread"])
    cos, sin = np.cos(cells.golgi_angle)[px.owner], np.sin(cells.golgi_angle)[px.owner]
    along = cos * px.nucleus_u + sin * px.nucleus_v - (cells.nucleus * 1.15 + 1.0)[px.owner]
    across = cos * px.nucleus_v - sin * px.nucleus_u
    body = np.exp(-((along / (1.9 * spread)) ** 2) - (across / (3.6 * spread)) ** 2) / spread**1.2
    stacks = np.clip(0.75 + 0.55 * _noise(rng, px.owner.shape, 0.9 * scale), 0.05, 2.2)
    membrane = np.exp(-((np.maximum(px.border, 0) / 1.0) ** 2))
    envelope = np.exp(-((px.outside_nucleus / 0.9) ** 2))
    value = 1.25 * body * stacks * (1 - 0.7 * px.nucleus) + 0.15 + 0.28 * membrane + 0.22 * envelope
    return value * px.inside * _stained(cells, px, 5)


def _acquire(
    stains: np.ndarray, factors: Mapping[str, float], scale: np.float32, rng: np.random.Generator
) -> np.ndarray:
    """Put the stains through the microscope: bleed-through, lamp, background, blur, camera curve, noise, 8 bits."""
    image = (
        stains
        * np.array([STAIN_GAIN[c] * factors[f"gain_{c + 1}"] for c in range(N_CHANNELS)], np.float32)[:, None, None]
    )
    leaked = [np.float32(factors[f"bleed_{c + 1}"]) * image[source] for c, (source, _) in enumerate(BLEED_PAIRS)]
    for (_, target), leak in zip(BLEED_PAIRS, leaked, strict=True):
        image[target] += leak
    size = image.shape[-1]
    image += np.float32(factors["background"])
    matrix = _noise(rng, (size, size), np.float32(factors["background_scale"]) * scale)
    for c in range(N_CHANNELS):
        # one deposit on the plate, seen a little differently by every channel
        image[c] += np.float32(factors["background_texture"]) * np.roll(matrix, (7 * c, 11 * c), (0, 1))
    image *= _lamp(factors["illumination"], factors["illumination_angle"], size)
    sigma = factors["blur"] * scale
    image = np.stack([gaussian_filter(plane, sigma, truncate=3.0) for plane in image])
    image = np.maximum(image, 0) ** math.exp(factors["gamma"])
    noise = rng.standard_normal(image.shape, dtype=np.float32)
    image += noise * np.sqrt(READ_NOISE**2 + SHOT_NOISE**2 * 4 * image)
    return np.clip(np.rint(255 * image), 0, 255).astype(np.uint8)


def _lamp(amount: float, angle: float, size: int) -> np.ndarray:
    """Return the illumination: brightest at a point off the centre, falling off by `amount` towards the far corner."""
    at = (np.arange(size, dtype=np.float32) + 0.5) / size - 0.5
    x0, y0 = 0.35 * math.cos(angle), 0.35 * math.sin(angle)
    square = (at[None, :] - x0) ** 2 + (at[:, None] - y0) ** 2
    return (1 + amount * (0.5 - 1.6 * square)).astype(np.float32)


def _step(distance: np.ndarray, scale: np.float32) -> np.ndarray:
    """Return 1 where a distance (field units) is positive, 0 where negative, with an edge one image pixel soft."""
    return np.clip(distance * scale + np.float32(0.5), 0, 1)


@functools.cache
def _splines(knots: int, size: int) -> np.ndarray:
    """Return the uniform cubic B-spline basis: float32 (size, knots), every row sums to 1."""
    at = (np.arange(size) + 0.5) / size * (knots - 3) + 1
    far = np.abs(at[:, None] - np.arange(knots)[None, :])
    basis = np.where(far < 1, 2 / 3 - far**2 + far**3 / 2, np.maximum(2 - far, 0) ** 3 / 6)
    return basis.astype(np.float32)


def _smooth(knots: np.ndarray, size: int) -> np.ndarray:
    """Stretch a square of knots to a smooth float32 (size, size); the same knots give the same field at any size.

    einsum rather than a matrix product: its result does not depend on the number of BLAS threads.
    """
    basis = _splines(knots.shape[0], size)
    return np.einsum("il,jl->ij", np.einsum("ik,kl->il", basis, knots.astype(np.float32)), basis)


def _noise(rng: np.random.Generator, shape: tuple[int, int], sigma: float) -> np.ndarray:
    """Return Gaussian noise of unit variance with a Gaussian correlation of width `sigma` pixels; float32."""
    field = gaussian_filter(rng.standard_normal(shape, dtype=np.float32), sigma, mode="wrap", truncate=3.0)
    return field / field.std()
