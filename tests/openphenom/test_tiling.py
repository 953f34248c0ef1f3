import numpy as np
import pytest

from phenoica.errors import ConfigError, ImageError
from phenoica.openphenom.tiling import tile_grid, tiles


def test_tiles_run_left_to_right_then_down():
    image = np.arange(2 * 4 * 6).reshape(2, 4, 6)
    cut = tiles(image, 2)
    assert cut.shape == (6, 2, 2, 2)
    for t, (row, column) in enumerate([(0, 0), (0, 2), (0, 4), (2, 0), (2, 2), (2, 4)]):
        np.testing.assert_array_equal(cut[t], image[:, row : row + 2, column : column + 2])


def test_the_remainder_is_left_out_in_equal_margins():
    image = np.arange(7 * 9).reshape(1, 7, 9)
    np.testing.assert_array_equal(tiles(image, 4)[:, 0], [image[0, 1:5, 0:4], image[0, 1:5, 4:8]])


def test_leading_axes_are_kept():
    images = np.random.default_rng(0).integers(0, 9, (3, 2, 8, 8))
    cut = tiles(images, 4)
    assert cut.shape == (3, 4, 2, 4, 4)
    np.testing.assert_array_equal(cut[1], tiles(images[1], 4))


def test_bad_input_is_refused():
    with pytest.raises(ImageError, match="7 x 3 px is smaller than the model's tile of 4 px"):
        tiles(np.zeros((1, 7, 3)), 4)
    with pytest.raises(ImageError, match="axes"):
        tiles(np.zeros((7, 7)), 4)
    with pytest.raises(ConfigError):
        tile_grid(8, 8, 0)
