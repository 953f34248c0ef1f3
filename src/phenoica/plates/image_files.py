"""Image files of a microscope: TIFF, PNG and JPEG 2000 to grey arrays, refusing whatever would have to be guessed.

What comes in is a file and, where it holds several images, the page or the channel that is wanted; what goes out is a
stack of z planes, uint8 or uint16. In OME-TIFF and ImageJ files the axes say what a page is. Pages without axes are
channels if nothing else names the channel, else z planes.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import imagecodecs
import numpy as np
import tifffile

from phenoica.errors import ImageError

#: what a file of images is called; the content alone decides how it is read
SUFFIXES = (".tif", ".tiff", ".png", ".jp2", ".j2k", ".j2c", ".jpc")
MAX_PIXELS = 1 << 28  # 16,384 x 16,384: more is a damaged header, or no field of a microscope

_TIFF, _PNG, _JPEG2000 = "TIFF", "PNG", "JPEG 2000"
_SIGNATURES = (
    (b"II*\0", _TIFF), (b"MM\0*", _TIFF), (b"II+\0", _TIFF), (b"MM\0+", _TIFF), (b"\x89PNG\r\n\x1a\n", _PNG),
    (b"\0\0\0\x0cjP  \r\n\x87\n", _JPEG2000), (b"\xff\x4f\xff\x51", _JPEG2000),
)  # fmt: skip
# what tifffile and the codecs raise on damaged bytes (found by damaging files at random); never wider than one call
_DAMAGED = (ValueError, RuntimeError, LookupError, TypeError, AttributeError, ArithmeticError, struct.error)


def read_stack(path: str | os.PathLike, *, page: int | None = None, channel: int | None = None) -> np.ndarray:
    """Read the z planes of one image.

    Parameters
    ----------
    path
        TIFF (8 or 16 bit, several pages, OME, ImageJ, BigTIFF), PNG or JPEG 2000.
    page
        The page of a TIFF, counted from 1. Default: what its axes say.
    channel
        Which of the file's channels, counted from 1 in the order of the file. Default: the file holds one channel,
        and pages without axes are z planes.

    Returns
    -------
    uint8 or uint16 array (planes, H, W)

    Raises
    ------
    ImageError
        With the reason: unreadable, damaged, another format, colours, other than 8- or 16-bit whole numbers, several
        channels or time points where one is expected, no such page or channel. Nothing is clipped or converted.
    """
    path = Path(path)
    kind = _kind(path)
    if kind == _TIFF:
        return _read_tiff(path, page, channel)
    if (page or 1) != 1 or (channel or 1) != 1:
        raise ImageError(f"page {page or channel} of a {kind} file, which holds one image; correct the list")
    decode = imagecodecs.png_decode if kind == _PNG else imagecodecs.jpeg2k_decode
    with _reading(kind):
        image = decode(path.read_bytes(), **({} if kind == _PNG else {"numthreads": 1}))
    return _grey(image)[None]


def count_channels(path: str | os.PathLike) -> int:
    """Return how many channels a file holds, from its header: the pages of a TIFF without axes are channels.

    Raises
    ------
    ImageError
        As `read_stack` does.
    """
    path = Path(path)
    if _kind(path) != _TIFF:
        return 1
    with _reading(_TIFF), tifffile.TiffFile(path) as tif:
        return len({place[0] for place in _places(tif, pages_are_channels=True)})


def is_jpeg2000(path: str | os.PathLike) -> bool:
    """Return whether a file is JPEG 2000, by its first bytes."""
    return _kind(Path(path)) == _JPEG2000


def _kind(path: Path) -> str:
    with _reading("image"), path.open("rb") as handle:
        start = handle.read(12)
    if not start:
        raise ImageError("the file is empty; copy it again")
    for signature, kind in _SIGNATURES:
        if start.startswith(signature):
            return kind
    raise ImageError("neither TIFF nor PNG nor JPEG 2000; convert it")


def _read_tiff(path: Path, page: int | None, channel: int | None) -> np.ndarray:
    with _reading(_TIFF), tifffile.TiffFile(path) as tif:
        if page is not None:
            if not 1 <= page <= len(tif.pages):
                raise ImageError(f"there is no page {page}; the file has {len(tif.pages)}")
            return _grey_page(tif.pages[page - 1])[None]
        places = _places(tif, pages_are_channels=channel is not None)
        planes = _planes_of(places, channel)
        _check_page(tif.series[0].keyframe if len(tif.pages) > 1 else tif.pages[0])
        return np.stack([_grey(_plane(tif, index)) for index in planes])


Place = tuple[int, int, int | None]  # channel and z plane, counted from 0, and the place in the series; None: one page


def _places(tif: tifffile.TiffFile, *, pages_are_channels: bool) -> list[Place]:
    """Return what the pages of this file are; the pages of other files of a multi-file OME set are left out."""
    # one page is one image, whatever set of files its OME-XML belongs to; other series may have one header for all
    if len(tif.pages) == 1 and (tif.is_ome or tif.series[0].axes == "YX"):
        return [(0, 0, None)]
    if len(tif.series) != 1:
        raise ImageError(
            f"{len(tif.series)} image series, or pages of different size, in one file; export one file for each"
        )
    series = tif.series[0]
    axes, shape = _leading_axes(series)
    own = _own_pages(tif, series, int(np.prod(shape)))
    places = []
    for index, position in enumerate(np.ndindex(*shape)):
        at = dict(zip(axes, position, strict=True))
        if index in own:
            unnamed = at.get("I", at.get("Q", 0))
            c, z = (unnamed, 0) if pages_are_channels else (0, unnamed)
            places.append((at.get("C", c), at.get("Z", z), at.get("T", 0), index))
    times = {t for _, _, t, _ in places}
    if len(times) > 1:
        raise ImageError(f"{len(times)} time points in one file; export one of them")
    return [(c, z, index) for c, z, _, index in places]


def _leading_axes(series: tifffile.TiffPageSeries) -> tuple[str, tuple[int, ...]]:
    """Return the axes before Y and X, and their lengths."""
    axes = series.axes
    if "S" in axes:
        raise ImageError(f"{series.shape[axes.index('S')]} samples a pixel; expected grey images")
    if not axes.endswith("YX") or set(axes[:-2]) - set("CZTIQ") or {"I", "Q"} <= set(axes):
        raise ImageError(f"axes {axes}; expected pages of channels (C) and z planes (Z)")
    return axes[:-2], series.shape[:-2]


def _own_pages(tif: tifffile.TiffFile, series: tifffile.TiffPageSeries, n: int) -> Iterable[int]:
    pages = series.pages
    if len(pages) != n:  # one header for all pages: they lie one after the other in this file
        return range(n)
    return {i for i in range(n) if pages[i] is not None and pages[i].parent is tif}


def _planes_of(places: list[Place], channel: int | None) -> list[int | None]:
    """Return the places of the wanted channel's z planes, in order."""
    channels = sorted({c for c, _, _ in places})
    if channel is None and len(channels) > 1:
        raise ImageError(
            f"the file holds {len(channels)} channels, but its name or the list says which channel it is; "
            "name the page too, or leave the channel to the file"
        )
    if channel is not None and channel > len(channels):
        raise ImageError(f"there is no channel {channel}; the file has {len(channels)}")
    wanted = channels[0 if channel is None else channel - 1]
    return [index for c, _, index in sorted(places, key=lambda place: place[:2]) if c == wanted]


def _plane(tif: tifffile.TiffFile, index: int | None) -> np.ndarray:
    if index is None:
        return tif.pages[0].asarray()
    series = tif.series[0]
    n = int(np.prod(series.shape[:-2]))
    if len(series.pages) == n:
        return series.pages[index].asarray()
    return series.asarray().reshape(n, *series.shape[-2:])[index]


def _grey_page(page: tifffile.TiffPage) -> np.ndarray:
    _check_page(page)
    return _grey(page.asarray())


def _check_page(page: tifffile.TiffPage | tifffile.TiffFrame) -> None:
    """Refuse a page by its header, before its pixels take memory."""
    if page.imagewidth * page.imagelength > MAX_PIXELS:
        raise ImageError(f"{page.imagelength} x {page.imagewidth} pixels; the header is damaged, or this is no field")
    if page.samplesperpixel > 1:
        raise ImageError(f"{page.samplesperpixel} samples a pixel; expected grey images")
    stated = page.keyframe.tags.get("PhotometricInterpretation")
    if stated is not None and stated.value != tifffile.PHOTOMETRIC.MINISBLACK:
        name = getattr(stated.value, "name", stated.value)
        raise ImageError(f"photometric interpretation {name}; expected grey images in which 0 is black")


def _grey(image: np.ndarray) -> np.ndarray:
    if image.ndim != 2:
        raise ImageError(f"{image.shape[-1]} samples a pixel; expected grey images")
    if image.dtype not in (np.uint8, np.uint16):
        raise ImageError(f"{image.dtype} pixels; expected whole numbers of 8 or 16 bits without sign (convert first)")
    return image


@contextlib.contextmanager
def _reading(kind: str) -> Iterator[None]:
    """Turn what goes wrong while a file is read into an ImageError that says it."""
    try:
        yield
    except OSError as error:
        raise ImageError(f"cannot be read ({error.strerror or error}); check the file and its permissions") from None
    except _DAMAGED as error:
        words = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ImageError(f"truncated or damaged {kind} ({words}); copy the file again") from None
