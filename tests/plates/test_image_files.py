"""Every format that a microscope writes, made in a temporary folder, and everything that is refused with a reason."""

from __future__ import annotations

import contextlib
import io

import imagecodecs
import numpy as np
import pytest
import tifffile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phenoica.errors import ImageError
from phenoica.plates.image_files import count_channels, is_jpeg2000, read_stack

GREY = "minisblack"


def picture(seed: int = 0, bits: int = 16, shape: tuple[int, ...] = (24, 24)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << bits, shape).astype(f"uint{bits}")


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("suffix", ["tif", "png", "jp2", "j2k"])
def test_a_grey_image_comes_back_whatever_its_name(tmp_path, bits, suffix):
    image = picture(bits=bits)
    data = {
        "png": lambda: imagecodecs.png_encode(image),
        "jp2": lambda: imagecodecs.jpeg2k_encode(image, reversible=True, codecformat="jp2"),
        "j2k": lambda: imagecodecs.jpeg2k_encode(image, reversible=True, codecformat="j2k"),
    }
    path = tmp_path / "image.dat"  # the content decides
    if suffix == "tif":
        tifffile.imwrite(path, image, photometric=GREY)
    else:
        path.write_bytes(data[suffix]())
    stack = read_stack(path)
    assert stack.dtype == image.dtype
    np.testing.assert_array_equal(stack, image[None])
    assert count_channels(path) == 1
    assert is_jpeg2000(path) == suffix.startswith("j")


@pytest.mark.parametrize(
    "how", [{"compression": "zlib"}, {"compression": "lzw"}, {"bigtiff": True}, {"byteorder": ">"}]
)
def test_kinds_of_tiff(tmp_path, how):
    image = picture()
    tifffile.imwrite(tmp_path / "a.tif", image, photometric=GREY, **how)
    np.testing.assert_array_equal(read_stack(tmp_path / "a.tif")[0], image)


def plain_pages(path, pages):
    with tifffile.TiffWriter(path) as writer:
        for page in pages:
            writer.write(page, photometric=GREY, contiguous=False, metadata=None)


def test_pages_without_axes_are_planes_or_channels(tmp_path):
    pages = picture(shape=(3, 24, 24))
    path = tmp_path / "pages.tif"
    plain_pages(path, pages)
    assert count_channels(path) == 3
    np.testing.assert_array_equal(read_stack(path), pages)  # the channel is known, so pages are planes
    for i in range(3):
        np.testing.assert_array_equal(read_stack(path, channel=i + 1), pages[i : i + 1])
        np.testing.assert_array_equal(read_stack(path, page=i + 1), pages[i : i + 1])
    with pytest.raises(ImageError, match="no page 4; the file has 3"):
        read_stack(path, page=4)
    with pytest.raises(ImageError, match="no channel 4; the file has 3"):
        read_stack(path, channel=4)


@pytest.mark.parametrize(("kind", "axes"), [("ome", "CZYX"), ("ome", "ZCYX"), ("imagej", "ZCYX")])
def test_axes_of_the_file_say_what_a_page_is(tmp_path, axes, kind):
    images = picture(shape=(2, 3, 24, 24))
    path = tmp_path / "a.ome.tif"
    tifffile.imwrite(path, images, photometric=GREY, metadata={"axes": axes}, **{kind: True})
    n_channels, n_planes = (2, 3) if axes == "CZYX" else (3, 2)
    assert count_channels(path) == n_channels
    by_channel = images if axes == "CZYX" else images.swapaxes(0, 1)
    for c in range(n_channels):
        stack = read_stack(path, channel=c + 1)
        assert stack.shape == (n_planes, 24, 24)
        np.testing.assert_array_equal(stack, by_channel[c])
    with pytest.raises(ImageError, match=f"holds {n_channels} channels, but its name or the list"):
        read_stack(path)


def test_one_header_for_many_pages(tmp_path):
    images = picture(shape=(3, 24, 24))
    tifffile.imwrite(tmp_path / "a.tif", images, photometric=GREY, truncate=True)
    with tifffile.TiffFile(tmp_path / "a.tif") as tif:
        assert len(tif.pages) == 1
    assert count_channels(tmp_path / "a.tif") == 3
    np.testing.assert_array_equal(read_stack(tmp_path / "a.tif", channel=2)[0], images[1])


def test_one_page_of_a_set_of_ome_files_is_one_image(tmp_path):
    """Each file of a set repeats the description of all; only the page within the file counts."""
    image = picture()
    whole = tmp_path / "whole.ome.tif"
    tifffile.imwrite(whole, picture(shape=(3, 24, 24)), photometric=GREY, metadata={"axes": "CYX"}, ome=True)
    with tifffile.TiffFile(whole) as tif:
        description = tif.ome_metadata
    part = tmp_path / "part.ome.tif"
    tifffile.imwrite(part, image, photometric=GREY, description=description.encode(), metadata=None)
    assert count_channels(part) == 1
    np.testing.assert_array_equal(read_stack(part)[0], image)


def test_planes_of_a_set_of_ome_files_are_those_of_the_file(tmp_path):
    """Two files, a channel each, of two planes: each repeats the description of both."""
    images = picture(shape=(2, 2, 24, 24))
    places = "".join(
        f'<TiffData FirstC="{c}" FirstZ="{z}" FirstT="0" IFD="{z}" PlaneCount="1">'
        f'<UUID FileName="c{c}.ome.tif">urn:uuid:00000000-0000-0000-0000-00000000000{c}</UUID></TiffData>'
        for c in range(2)
        for z in range(2)
    )
    for c in range(2):
        description = (
            '<?xml version="1.0" encoding="UTF-8"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" '
            f'UUID="urn:uuid:00000000-0000-0000-0000-00000000000{c}"><Image ID="Image:0"><Pixels ID="Pixels:0" '
            'DimensionOrder="XYZCT" Type="uint16" SizeX="24" SizeY="24" SizeC="2" SizeZ="2" SizeT="1">'
            f'<Channel ID="Channel:0:0"/><Channel ID="Channel:0:1"/>{places}</Pixels></Image></OME>'
        )
        with tifffile.TiffWriter(tmp_path / f"c{c}.ome.tif") as writer:
            for z in range(2):
                text = description.encode() if z == 0 else None
                writer.write(images[c, z], photometric=GREY, description=text, contiguous=False, metadata=None)
    for c in range(2):
        assert count_channels(tmp_path / f"c{c}.ome.tif") == 1
        np.testing.assert_array_equal(read_stack(tmp_path / f"c{c}.ome.tif"), images[c])
    (tmp_path / "c0.ome.tif").unlink()  # the others of the set need not be there
    np.testing.assert_array_equal(read_stack(tmp_path / "c1.ome.tif"), images[1])


def write_tiff(image, **how):
    return lambda path: tifffile.imwrite(path, image, **how)


def write_bytes(data):
    return lambda path: path.write_bytes(data)


REFUSED = {
    "rgb tiff": (write_tiff(picture(bits=8, shape=(24, 24, 3)), photometric="rgb"), "3 samples a pixel"),
    "rgb png": (write_bytes(imagecodecs.png_encode(picture(bits=8, shape=(24, 24, 3)))), "3 samples a pixel"),
    "rgb jp2": (
        write_bytes(imagecodecs.jpeg2k_encode(picture(bits=8, shape=(24, 24, 3)), reversible=True)),
        "3 samples a pixel",
    ),
    "float": (write_tiff(np.ones((24, 24), np.float32), photometric=GREY), "float32 pixels"),
    "32 bit": (write_tiff(np.ones((24, 24), np.uint32), photometric=GREY), "uint32 pixels"),
    "signed": (write_tiff(np.ones((24, 24), np.int16), photometric=GREY), "int16 pixels"),
    "inverted": (write_tiff(picture(), photometric="miniswhite"), "interpretation MINISWHITE"),
    "palette": (
        write_tiff(picture(bits=8), photometric="palette", colormap=np.zeros((3, 256), np.uint16)),
        "interpretation PALETTE",
    ),
    "time": (write_tiff(picture(shape=(2, 24, 24)), ome=True, photometric=GREY, metadata={"axes": "TYX"}), "2 time po"),
    "empty": (write_bytes(b""), "the file is empty"),
    "jpeg": (write_bytes(imagecodecs.jpeg_encode(picture(bits=8))), "neither TIFF nor PNG nor JPEG 2000"),
    "text": (write_bytes(b"hello"), "neither TIFF nor PNG"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_with_a_reason(tmp_path, name):
    write, reason = REFUSED[name]
    write(tmp_path / "a.tif")
    with pytest.raises(ImageError, match=reason):
        read_stack(tmp_path / "a.tif")


def test_images_of_two_sizes_in_one_file(tmp_path):
    plain_pages(tmp_path / "a.tif", [picture(), picture(shape=(20, 12))])
    with pytest.raises(ImageError, match="pages of different size"):
        read_stack(tmp_path / "a.tif")


def test_a_page_of_a_png_and_a_missing_file(tmp_path):
    (tmp_path / "a.png").write_bytes(imagecodecs.png_encode(picture()))
    assert read_stack(tmp_path / "a.png", page=1).shape == (1, 24, 24)
    with pytest.raises(ImageError, match="page 2 of a PNG file"):
        read_stack(tmp_path / "a.png", page=2)
    with pytest.raises(ImageError, match="cannot be read \\(No such file"):
        read_stack(tmp_path / "b.png")


def encodings() -> dict[str, bytes]:
    image, made = picture(), {}
    for name, how in {"raw": {}, "zlib": {"compression": "zlib"}, "lzw": {"compression": "lzw"}}.items():
        target = io.BytesIO()
        tifffile.imwrite(target, image, photometric=GREY, **how)
        made[name] = target.getvalue()
    target = io.BytesIO()
    tifffile.imwrite(target, picture(shape=(3, 24, 24)), photometric=GREY, ome=True, metadata={"axes": "CYX"})
    made["ome"] = target.getvalue()
    made["png"] = imagecodecs.png_encode(image)
    made["jp2"] = imagecodecs.jpeg2k_encode(image, reversible=True, codecformat="jp2")
    return made


ENCODED = encodings()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(sorted(ENCODED)), st.booleans(), st.integers(0, 10**6),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4),
)  # fmt: skip
def test_damaged_bytes_are_refused_or_give_an_image_but_never_another_error(tmp_path, kind, cut, length, changes):
    data = bytearray(ENCODED[kind])
    if cut:
        data = data[: length % len(data)]
    else:
        for position, value in changes:
            data[position % min(len(data), 600)] = value
    path = tmp_path / "damaged"
    path.write_bytes(data)
    for channel in (None, 1):
        try:
            stack = read_stack(path, channel=channel)
        except ImageError:
            continue
        assert stack.ndim == 3 and stack.dtype in (np.uint8, np.uint16)
    with contextlib.suppress(ImageError):
        assert count_channels(path) >= 1


@pytest.mark.parametrize("kind", ["raw", "zlib", "lzw", "png", "jp2"])
def test_no_truncated_file_gives_other_pixels(tmp_path, kind):
    path = tmp_path / "cut"
    for length in range(1, len(ENCODED[kind]), 23):
        path.write_bytes(ENCODED[kind][:length])
        try:
            stack = read_stack(path)
        except ImageError:
            continue
        np.testing.assert_array_equal(stack[0], picture())
