"""The weights of a fair untrained encoder (`OpenPhenom.random`), parameter by parameter.

Comes in: the name and shape of a parameter, the size of the encoder, a generator. Goes out: its values; what they are
and why is said at `OpenPhenom.random`. It needs numpy alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from phenoica.openphenom.encoder import OpenPhenomConfig


def draw(name: str, shape: tuple[int, ...], config: OpenPhenomConfig, rng: np.random.Generator) -> np.ndarray:
    """Draw one parameter of an encoder.

    Parameters
    ----------
    name, shape
        Of the parameter.
    config
        The size of the encoder.
    rng
        Of this parameter.

    Returns
    -------
    numpy.ndarray
        float32 of `shape`.
    """
    if name == "patch_embed.proj.weight":
        value = band_pass_filters(shape[0], config.patch_size, rng)[:, None]
    elif name == "cls_token":
        value = 0.02 * rng.standard_normal(shape)
    elif name.endswith("ls.gamma"):
        value = np.full(shape, config.layer_scale)
    elif len(shape) == 1:
        value = np.full(shape, float("norm" in name and name.endswith("weight")))
    else:
        value = rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
    return value.astype(np.float32)


def band_pass_filters(n: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw `n` random filters, (n, size, size) float64, each band-passed around its own frequency.

    A filter is white noise times a log-normal band (half an octave wide) around f cycles a patch, f
    log-uniform in [1, size / 2], scaled to answer with unit variance to natural images. Taken as of unit
    variance and power p / k^2 at k cycles a pixel, k from 1/256 to 1/2, these have p = 1 / (2 pi ln 128); a
    filter of norm 1 then answers with the variance p (size / f)^2.
    """
    axis = np.fft.fftfreq(size, 1 / size)
    radius = np.hypot(axis[:, None], axis[None])
    radius[0, 0] = np.inf  # no filter answers to the mean of a patch
    centre = np.exp(rng.uniform(0, np.log(size / 2), n))[:, None, None]
    band = np.exp(-0.5 * (np.log2(radius / centre) / 0.5) ** 2)
    filters = np.fft.ifft2(np.fft.fft2(rng.standard_normal((n, size, size))) * band).real
    filters /= np.linalg.norm(filters, axis=(1, 2), keepdims=True)
    return filters * centre / size * np.sqrt(2 * np.pi * np.log(128))
