"""Scale, averaging, projection and encoding against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phenoica.errors import ImageError, ImageImportError
from phenoica.plates.image_scaling import LevelCounts, Scale, area_mean, encode, project
from phenoica.plates.images import decode_image


def picture(seed: int, bits: int, side: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << bits, (side, side)).astype(f"uint{bits}")


@given(st.lists(st.integers(0, 65535), min_size=1, max_size=60), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(levels, percent):
    counts = LevelCounts()
    image = np.array(levels, np.uint16)[None]
    counts.add(image[:, : len(levels) // 2])
    counts.add(image[:, len(levels) // 2 :])
    assert np.isclose(counts.percentile(percent), np.percentile(levels, percent), rtol=1e-9, atol=1e-6)


def test_a_scale_keeps_the_ratio_of_a_dim_and_a_bright_image():
    scale = Scale(100, 10100, 1)
    dim, bright = np.full((4, 4), 1100, np.uint16), np.full((4, 4), 4100, np.uint16)
    assert scale.apply(dim)[0, 0] == round(0.1 * 255) and scale.apply(bright)[0, 0] == round(0.4 * 255)
    assert scale.apply(np.array([[0, 100, 10100, 65535]], np.uint16)).tolist() == [[0, 0, 255, 255]]
    # the table of whole levels and the formula on averaged pixels agree
    levels = np.arange(65536, dtype=np.uint16)
    np.testing.assert_array_equal(scale.apply(levels), scale.apply(levels.astype(float)))
    for low, high in ((5, 5), (6, 5), (-1, 5), (0, float("nan"))):
        with pytest.raises(ImageImportError, match="has no width"):
            Scale(low, high, 1)


def by_area(image: np.ndarray, size: int) -> np.ndarray:
    """Return means by area, slowly: each pixel split into size x size equal parts."""
    side = len(image)
    fine = np.repeat(np.repeat(image.astype(float), size, 0), size, 1)
    return fine.reshape(size, side, size, side).mean(axis=(1, 3))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 99), st.sampled_from([8, 16]))
def test_averaging_by_area_is_exact(size, more, seed, bits):
    image = picture(seed, bits, size + more)
    np.testing.assert_allclose(area_mean(image, size), by_area(image, size), rtol=1e-10, atol=1e-9)


def test_a_whole_factor_gives_block_means_and_the_same_size_the_image():
    image = picture(0, 16, 48)
    np.testing.assert_array_equal(area_mean(image, 12), image.reshape(12, 4, 12, 4).mean(axis=(1, 3)))
    np.testing.assert_array_equal(area_mean(image, 48), image)
    with pytest.raises(ImageError, match="smaller than the wanted 49"):
        area_mean(image, 49)
    with pytest.raises(ImageError, match="48 x 24 pixels is not square"):
        area_mean(image[:, :24], 12)


def test_projection_of_planes():
    stack = np.stack([picture(i, 16, 8) for i in range(3)])
    np.testing.assert_array_equal(project([stack], "max"), stack.max(axis=0))
    np.testing.assert_array_equal(project([stack[:1], stack[1:]], "max"), stack.max(axis=0))
    np.testing.assert_array_equal(project([stack], 2), stack[1])
    np.testing.assert_array_equal(project([stack[:1]], None), stack[0])
    with pytest.raises(ImageImportError, match="3 z planes; say --planes max"):
        project([stack], None)
    with pytest.raises(ImageError, match="no plane 4; the file has 3"):
        project([stack], 4)
    with pytest.raises(ImageError, match="differ in size or bits"):
        project([stack, picture(0, 8, 8)[None]], "max")


def test_lossless_comes_back_and_a_ratio_is_reached_with_the_best_quality():
    y, x = np.mgrid[:256, :256]
    image = np.clip(60 + 50 * np.sin(x / 9) * np.cos(y / 7) + picture(0, 8, 256) / 16, 0, 255).astype(np.uint8)
    np.testing.assert_array_equal(decode_image(encode(image, None)), image)
    errors = []
    for ratio in (5, 20):
        data = encode(image, ratio)
        assert image.nbytes / len(data) >= ratio
        assert image.nbytes / len(data) < 1.15 * ratio  # and not much smaller than needed
        errors.append(np.abs(decode_image(data).astype(int) - image).mean())
    assert errors[0] < errors[1] < 8
    with pytest.raises(ImageError, match="does not reach 20:1"):
        encode(image[:16, :16].copy(), 20)
