import numpy as np
import pytest
from scipy import ndimage

from phenoica.embed import image_measures
from phenoica.embed.image_measures import count_nuclei, focus, measure, measure_names
from phenoica.errors import ConfigError, ImageError

DNA = {"dna_channel": 1, "nucleus_diameter_px": 10}


def discs(centres, size, diameter, *, contrast=120, background=20, noise=3.0, blur=1.0, seed=0):
    """Render discs as float (H, W): the planted nuclei."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size]
    image = np.zeros((size, size))
    for row, column in centres:
        disc = np.hypot(y - row, x - column) < diameter / 2 * rng.uniform(0.85, 1.15)
        image = np.maximum(image, contrast * rng.uniform(0.6, 1.2) * disc)
    return ndimage.gaussian_filter(background + image, blur) + rng.normal(0, noise, image.shape)


def scattered(n, size, diameter, seed, gap=1.25):
    """Draw `n` centres that are at least `gap` diameters apart and inside the image."""
    rng = np.random.default_rng(seed)
    centres = []
    while len(centres) < n:
        centre = rng.uniform(0.7 * diameter, size - 0.7 * diameter, 2)
        if all(np.hypot(*(centre - other)) > gap * diameter for other in centres):
            centres.append(centre)
    return centres


def as_uint8(image):
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)


# ---- names and grey values


def test_names_are_those_of_the_measures_in_order():
    images = np.random.default_rng(0).integers(0, 256, (3, 64, 64)).astype(np.uint8)
    measures = measure(images, [1, 5, 2], **DNA)
    assert list(measures) == ["cell_count", *measure_names([1, 5, 2])]
    assert all(type(value) is float and np.isfinite(value) for value in measures.values())
    assert measure_names([4])[:4] == ["c4_mean", "c4_sd", "c4_p01", "c4_p05"]
    assert measure_names([4])[-3:] == ["c4_saturated", "c4_empty", "c4_focus"]


@pytest.mark.parametrize("seed", range(6))
def test_grey_values_equal_numpy(seed):
    rng = np.random.default_rng(seed)
    shape = (2, *rng.integers(16, 70, 2))
    images = as_uint8(rng.gamma(0.5, 60 * (1 + seed), shape))  # zeros, gaps between levels, and saturated pixels
    measures = measure(images, [1, 2], **DNA)
    for channel, image in zip((1, 2), images, strict=True):
        got = {name: measures[f"c{channel}_{name}"] for name in image_measures.PER_CHANNEL}
        assert got["mean"] == pytest.approx(image.mean(), abs=1e-10)
        assert got["sd"] == pytest.approx(image.std(), abs=1e-10)
        assert got["saturated"] == np.mean(image == 255)
        for p in image_measures.PERCENTILES:
            assert got[f"p{p:02d}"] == pytest.approx(np.percentile(image, p), abs=1e-10)


def test_channels_are_measured_apart():
    images = np.random.default_rng(0).integers(0, 256, (2, 64, 64)).astype(np.uint8)
    images[1] //= 3
    both, swapped = measure(images, [1, 2], **DNA), measure(images[::-1], [2, 1], **DNA)
    assert both == {name: swapped[name] for name in both}
    assert both["c1_mean"] > 2 * both["c2_mean"]


def test_empty_share_by_hand():
    rng = np.random.default_rng(0)
    image = rng.integers(0, 60, (64, 48)).astype(np.uint8)  # 48 blocks of 8 px
    image[:16, :24] = 0  # 6 blocks of nothing
    image[32:40, :8] = 255  # saturated is not empty
    image[40:48, :8] = 7
    image[40, 0] = 8  # nothing beyond rounding: sd 0.12
    assert measure(image[None], [1], **DNA)["c1_empty"] == 7 / 48
    # the limit is a standard deviation of 1 grey value
    image[40:48, :8] = np.where(np.indices((8, 8)).sum(0) % 2, 10, 12)
    assert measure(image[None], [1], **DNA)["c1_empty"] == 6 / 48
    image[40:48, :8] = np.where(np.indices((8, 8)).sum(0) % 2, 10, 11)
    assert measure(image[None], [1], **DNA)["c1_empty"] == 7 / 48


def test_black_and_white_images_have_finite_measures():
    images = np.stack([np.zeros((64, 64)), np.full((64, 64), 255)]).astype(np.uint8)
    measures = measure(images, [1, 2], **DNA)
    assert np.isfinite(list(measures.values())).all()
    assert measures["cell_count"] == 0
    assert (measures["c1_empty"], measures["c1_saturated"], measures["c1_sd"]) == (1, 0, 0)
    assert (measures["c2_empty"], measures["c2_saturated"], measures["c2_p01"]) == (0, 1, 255)
    assert measures["c1_focus"] == pytest.approx(0, abs=1e-6) and measures["c2_focus"] == pytest.approx(0, abs=1e-6)


# ---- focus


@pytest.mark.parametrize("size", [128, 512])
@pytest.mark.parametrize("exponent", [0, 1, 2, 3])
def test_focus_is_the_exponent_of_the_power_spectrum(size, exponent):
    """Noise of power 1 / f^a has the slope -a."""
    rng = np.random.default_rng(exponent)
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.fftfreq(size)[None])
    frequency[0, 0] = np.inf
    spectrum = np.fft.fft2(rng.standard_normal((8, size, size))) * frequency ** (-exponent / 2)
    images = np.fft.ifft2(spectrum).real
    images *= 1000 / images.std(axis=(1, 2), keepdims=True)
    assert focus(images).mean() == pytest.approx(-exponent, abs=0.2)


def test_focus_equals_its_definition_on_an_image_blurred_in_one_direction():
    """The whole plane of one tile, with numpy's transform and numpy's least squares."""
    image = ndimage.gaussian_filter1d(np.random.default_rng(0).normal(0, 900, (128, 128)), 2, axis=1)
    window = np.outer(*2 * [np.hanning(130)[1:-1]])
    power = np.abs(np.fft.fft2((image - image.mean()) * window)) ** 2 / np.sum(window**2)
    ring = np.rint(np.hypot(*np.meshgrid(*2 * [np.fft.fftfreq(128, 1 / 128)])))
    rings = np.arange(2, 33)
    # the real transform holds the coefficients of column 0 whole and of the others half
    weight = np.where(np.arange(128) == 0, 1, 0.5)[None, :] * np.ones((128, 1))
    means = [np.average(power[ring == r], weights=weight[ring == r]) for r in rings]
    slope = np.polyfit(np.log(rings), np.log(np.array(means) + 1 / 12), 1, w=np.sqrt(1 / rings))[0]
    assert focus(image[None])[0] == pytest.approx(slope, abs=1e-4)


def test_focus_falls_with_blur():
    image = discs(scattered(25, 128, 10, 0), 128, 10, blur=0.5)
    slopes = focus(np.stack([as_uint8(ndimage.gaussian_filter(image, s)) for s in (0, 0.5, 1, 2, 3)]))
    assert (np.diff(slopes) < -0.05).all()


def test_focus_does_not_follow_contrast():
    image = ndimage.gaussian_filter(np.random.default_rng(0).standard_normal((128, 128)), 1) * 200
    dim, bright = focus(np.stack([image, 3 * image + 50]))
    assert dim == pytest.approx(bright, abs=0.02)


@pytest.mark.parametrize("shape", [(16, 16), (101, 140), (300, 257)])
def test_focus_takes_any_size(shape):
    assert np.isfinite(focus(np.random.default_rng(0).integers(0, 255, (2, *shape)).astype(np.uint8))).all()


# ---- counting


@pytest.mark.parametrize(("size", "diameter"), [(128, 10), (512, 30)])
@pytest.mark.parametrize("n", [1, 3, 10, 25, 40])
@pytest.mark.parametrize(
    "look", [{}, {"noise": 10}, {"contrast": 40}, {"background": 90}, {"blur": 2}], ids=lambda look: str(look)
)
def test_planted_nuclei_are_counted(size, diameter, n, look):
    image = discs(scattered(n, size, diameter, seed=n), size, diameter, seed=n, **look)
    assert abs(count_nuclei(as_uint8(image), diameter) - n) <= (n == 40)  # one off in the most crowded field


@pytest.mark.parametrize(("size", "diameter"), [(128, 10), (512, 30)])
def test_touching_nuclei_are_parted(size, diameter):
    for seed in range(5):
        centres = scattered(40, size, diameter, seed, gap=1.0)
        count = count_nuclei(as_uint8(discs(centres, size, diameter, seed=seed)), diameter)
        assert abs(count - 40) <= 1
    pair = [(40, 40), (40, 40 + 0.95 * diameter)]
    assert count_nuclei(as_uint8(discs(pair, size, diameter)), diameter) == 2


@pytest.mark.parametrize("gradient", [40, -40])
def test_uneven_illumination_adds_no_nuclei(gradient):
    slope = gradient * np.arange(128) / 128
    for seed in range(5):
        image = discs(scattered(20, 128, 10, seed), 128, 10, background=60, seed=seed)
        assert abs(count_nuclei(as_uint8(image + slope), 10) - 20) <= 1
        assert abs(count_nuclei(as_uint8(image + slope[:, None]), 10) - 20) <= 1


@pytest.mark.parametrize("seed", range(4))
def test_fields_without_nuclei_count_zero(seed):
    rng = np.random.default_rng(seed)
    for size, diameter in ((128, 10), (512, 30)):
        assert count_nuclei(as_uint8(rng.normal(20, 5, (size, size))), diameter) == 0
        assert count_nuclei(as_uint8(np.linspace(0, 200, size) + rng.normal(20, 3, (size, size))), diameter) == 0
        assert count_nuclei(np.full((size, size), 40 * seed, np.uint8), diameter) == 0


def test_debris_is_not_counted_and_large_nuclei_count_once():
    specks = [(r, c) for r in range(10, 120, 20) for c in range(10, 60, 20)]
    image = discs(specks, 128, 2, blur=0.5)
    large = discs([(30, 90), (90, 90)], 128, 18)
    assert count_nuclei(as_uint8(np.maximum(image, large)), 10) == 2


def test_out_of_focus_nuclei_never_multiply():
    image = discs(scattered(30, 128, 10, 1), 128, 10)
    counts = [count_nuclei(as_uint8(ndimage.gaussian_filter(image, s)), 10) for s in (0, 1, 2, 3, 4)]
    assert counts[:3] == [30, 30, 30]
    assert (np.diff(counts) <= 0).all() and counts[-1] > 15


@pytest.mark.parametrize(("size", "diameter"), [(96, 10), (320, 30)])
def test_the_rim_neither_adds_nor_hides_nuclei(size, diameter):
    """Fields cut from a larger plane hold as many nuclei as there are centres in them, on average."""
    counted = planted = 0
    margin = int(1.5 * diameter)
    for seed in range(12):
        centres = np.array(scattered(60, size + 2 * margin, diameter, seed))
        plane = as_uint8(discs(centres, size + 2 * margin, diameter, seed=seed))
        counted += count_nuclei(plane[margin:-margin, margin:-margin], diameter)
        planted += np.all((centres >= margin) & (centres < margin + size), axis=1).sum()
    assert counted == pytest.approx(planted, rel=0.05)  # counting all that the rim cuts gives 10 % more


def test_the_count_comes_from_the_dna_channel():
    dna = as_uint8(discs(scattered(12, 128, 10, 0), 128, 10))
    other = as_uint8(discs(scattered(5, 128, 10, 0), 128, 10))
    images = np.stack([other, dna])
    assert measure(images, [3, 7], dna_channel=7, nucleus_diameter_px=10)["cell_count"] == 12
    assert measure(images, [3, 7], dna_channel=3, nucleus_diameter_px=10)["cell_count"] == 5


# ---- the fast filters, against scipy's


@pytest.mark.parametrize("seed", range(30))
def test_distance_and_maximum_equal_scipy(seed):
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(2, 60, 2))
    mask = rng.random(shape) < rng.choice([0.5, 0.9, 0.99])
    mask[0, 0] = False
    most = int(rng.integers(1, 30))
    expected = np.minimum(ndimage.distance_transform_edt(mask), min(most, max(shape)))
    np.testing.assert_allclose(image_measures._border_distance(mask, most), expected, rtol=1e-6)
    values, reach = rng.random(shape).astype(np.float32), int(rng.integers(1, 20))
    # cval: outside of the image is nothing
    expected = ndimage.maximum_filter(values, 2 * reach + 1, mode="constant", cval=-np.inf)
    np.testing.assert_array_equal(image_measures._highest_near(values, reach), expected)


def test_smoothing_has_the_variance_it_is_asked_for():
    point = np.zeros((41, 41), np.float32)
    point[20, 20] = 1
    offset = np.arange(-20, 21)
    for variance in (0, 0.5, 1, 2.5):
        smooth = image_measures._smooth(point, variance**0.5)
        assert smooth.sum() == pytest.approx(1)
        for axis in (0, 1):
            assert smooth.sum(axis) @ offset**2 == pytest.approx(variance, abs=1e-5)
    level = np.full((7, 5), 3, np.float32)
    np.testing.assert_array_equal(image_measures._smooth(level, 2), level)


# ---- bad input


@pytest.mark.parametrize(
    ("images", "channels", "options", "error", "message"),
    [
        (np.zeros((1, 32, 32)), [1], {}, ImageError, "type float64"),
        (np.zeros((32, 32), np.uint8), [1], {}, ImageError, "shape"),
        (np.zeros((2, 32, 32), np.uint8), [1], {}, ImageError, r"expected \(1, H, W\)"),
        (np.zeros((1, 32, 15), np.uint8), [1], {}, ImageError, "at least 16"),
        (np.zeros((2, 32, 32), np.uint8), [1, 1], {}, ConfigError, "names a channel twice"),
        (np.zeros((1, 32, 32), np.uint8), [1], {"dna_channel": 2}, ConfigError, "dna_channel 2 is not among"),
        (np.zeros((1, 32, 32), np.uint8), [1], {"nucleus_diameter_px": 1}, ConfigError, "at least 2 px"),
        (np.zeros((1, 32, 32), np.uint8), [1], {"nucleus_diameter_px": float("nan")}, ConfigError, "is nan"),
    ],
)
def test_bad_input_is_refused(images, channels, options, error, message):
    with pytest.raises(error, match=message):
        measure(images, channels, **{**DNA, **options})


@pytest.mark.parametrize("diameter", [2, 16, 200])
def test_any_diameter_fits_the_smallest_image(diameter):
    image = np.random.default_rng(0).integers(0, 256, (1, 16, 20)).astype(np.uint8)
    assert np.isfinite(measure(image, [1], dna_channel=1, nucleus_diameter_px=diameter)["cell_count"])
