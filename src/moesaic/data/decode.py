"""One picture file as a square of bytes in red, green and blue, whatever kind of file it is.

The largest square in the middle is scaled to the size asked for, with antialiasing; a picture of
that size already keeps its bytes. Pictures are turned as their EXIF data say, what is transparent
lies on white, 16 bits are scaled to 8, and of an animation the first frame counts.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moesaic.checks import at_least_one

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["DECODING", "BadPicture", "decode_picture", "pixel_limit", "read_picture"]

DECODING = 1
"""Raised when pictures come out differently than before, so that none of before is taken for one of now."""

# formats whose files say what they are, and that need no other program to be read
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO", "MPO")
_ORIENTATION = 0x0112
_WIDE = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
_SHARP = 2
"""A JPEG may be decoded at a smaller scale, but not below this many times the size asked for."""


class BadPicture(ValueError):
    """A file that gives no picture; the message says why, in words that follow the file's name."""


def read_picture(path: str | Path, size: int) -> NDArray[np.uint8]:
    """(size, size, 3): the picture in a file; an error with its name if there is none.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Image.new("RGB", (30, 20), "red").save(f"{folder}/red.png")
    ...     picture = read_picture(f"{folder}/red.png", size=4)
    >>> picture.shape, picture[0, 0]
    ((4, 4, 3), array([255,   0,   0], dtype=uint8))
    """
    at_least_one("read_picture", size=size)
    content = Path(path).read_bytes()
    try:
        with pixel_limit():
            return decode_picture(content, size)
    except BadPicture as fault:
        raise BadPicture(f"{path} {fault}") from fault


def decode_picture(content: bytes, size: int) -> NDArray[np.uint8]:
    """(size, size, 3): the picture in a file's content; raises `BadPicture`. Meant to run under `pixel_limit`."""
    from PIL import Image, UnidentifiedImageError

    if not content:
        raise BadPicture("is empty")
    try:
        with Image.open(io.BytesIO(content), formats=_known_formats()) as image:
            _check_pixels(image.size, Image.MAX_IMAGE_PIXELS)
            return _square(image, size)
    except BadPicture:
        raise
    except UnidentifiedImageError as fault:
        raise BadPicture("is no picture, or one of an unknown kind") from fault
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as fault:
        raise BadPicture(f"is too large: {fault}") from fault
    except MemoryError as fault:
        raise BadPicture("is too large for the memory there is") from fault
    except Exception as fault:  # what damage makes Pillow's readers raise is of every kind
        told = f"{fault}" or type(fault).__name__
        raise BadPicture(f"is truncated ({told})" if "truncated" in told.lower() else f"is damaged ({told})") from fault


@contextmanager
def pixel_limit() -> Generator[None, None, None]:
    """Pictures above Pillow's limit of pixels are refused within, in every thread; its other warnings are not shown."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


@cache
def _known_formats() -> tuple[str, ...]:
    from PIL import Image

    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _check_pixels(size: tuple[int, int], most: int | None) -> None:
    W, H = size
    if not W or not H:
        raise BadPicture(f"has {W}×{H} pixels")
    if most is not None and most < W * H:
        raise BadPicture(f"is too large: {W}×{H} pixels are more than {most}")


def _square(image: Image.Image, size: int) -> NDArray[np.uint8]:
    from PIL import Image

    turn = _orientation(image)
    image.draft(None, (_SHARP * size, _SHARP * size))
    image.load()
    plain = _plain(image)
    if plain.size != (size, size):
        W, H = plain.size
        side = min(W, H)
        box = ((W - side) / 2, (H - side) / 2, (W + side) / 2, (H + side) / 2)
        plain = plain.resize((size, size), Image.Resampling.BICUBIC, box, reducing_gap=2.0)
    if plain.mode == "RGBA":
        white = Image.new("RGBA", plain.size, "white")
        plain = Image.alpha_composite(white, plain)
    # the square is turned last: it has the fewest pixels, and its middle stays in the middle
    if turn is not None:
        plain = plain.transpose(turn)
    return np.array(plain.convert("RGB"))


def _plain(image: Image.Image) -> Image.Image:
    """The image in grey, in colour, or in colour with transparency, of 8 bits each."""
    if image.mode in _WIDE:
        return _narrowed(image)
    if image.has_transparency_data:
        return image.convert("RGBA")
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def _narrowed(image: Image.Image) -> Image.Image:
    """Grey of 16 bits, or of floats from 0 to 1, scaled to 8 bits."""
    from PIL import Image

    values = np.asarray(image).astype(np.float64)
    most = 1.0 if image.mode == "F" else 65535.0
    low, high = float(values.min()), float(values.max())
    if not 0 <= low <= high <= most:
        raise BadPicture(f"has values from {low:g} to {high:g}, beyond 0 to {most:g}; save it with 8 or 16 bits")
    return Image.fromarray(np.rint(values * (255 / most)).astype(np.uint8))


def _orientation(image: Image.Image) -> Image.Transpose | None:
    from PIL import Image

    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    try:
        told: object = image.getexif().get(_ORIENTATION)
    except Exception:  # EXIF data that cannot be read say nothing about the picture
        return None
    return turns.get(told) if isinstance(told, int) else None
