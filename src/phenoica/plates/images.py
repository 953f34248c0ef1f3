"""One image: JPEG 2000 bytes to a grey uint8 array, refusing whatever would have to be clipped or guessed."""

from __future__ import annotations

import imagecodecs
import numpy as np

from phenoica.errors import ImageError

_HOLE = bytes(64)


def decode_image(data: bytes | None) -> np.ndarray:
    """Decode one JPEG 2000 image.

    Parameters
    ----------
    data
        The bytes of a JP2 file or J2K code stream.

    Returns
    -------
    uint8 array (H, W)

    Raises
    ------
    ImageError
        With the reason: empty cell, a zeroed block, truncated or damaged, not JPEG 2000, not 8-bit, or more than one
        sample a pixel. Nothing is clipped or converted.

    Notes
    -----
    A block of zeros inside the file (a hole of a broken copy) decodes without any complaint, into a picture that is
    wrong in up to four fifths of its pixels. The picture does not show it: whole blocks of one grey value are common in
    sound images of dark fields. The bytes do: an arithmetic-coded stream holds no long run of zeros (11 at most, in
    headers, over constant, sparse and real images at several rates).
    """
    if not data:
        raise ImageError("empty jp2 cell; fetch the shard again")
    if _HOLE in data:
        raise ImageError(
            f"a hole: a run of {len(_HOLE)} or more zero bytes, which no compressed image holds; fetch the shard again"
        )
    try:
        image = imagecodecs.jpeg2k_decode(data, numthreads=1)
    except imagecodecs.Jpeg2kError as error:
        # the library's own words stay in the reason: a person who looks for the cause needs them
        kind = "not a JPEG 2000 image" if "not a J2K" in str(error) else "truncated or damaged JPEG 2000"
        raise ImageError(f"{kind} ({error}); fetch the shard again") from None
    if image.ndim != 2:
        raise ImageError(f"{image.shape[2]} samples a pixel; expected a grey image")
    if image.dtype != np.uint8:
        raise ImageError(f"{8 * image.dtype.itemsize}-bit pixels; expected 8-bit (rescale before import)")
    return image
