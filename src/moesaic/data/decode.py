"""Decodes an image file of any common format into a square RGB array, or into all of the image.

The largest centred square is resized with antialiasing; an image that already has the right size keeps
its pixel values. EXIF orientation is applied, transparency is composited on white, 16 bits become 8,
and of an animation the first frame is used.
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

from moesaic.argument_checks import check_positive
from moesaic.validated_json import InvalidFile, read_bytes

if TYPE_CHECKING:
    from PIL import Image

__all__ = [
    "DECODER_VERSION",
    "InvalidImage",
    "decode_image",
    "decode_whole",
    "pixel_limit",
    "read_image",
    "square_image",
]

DECODER_VERSION = 2
"""Version of the decoder: part of cache keys, to be raised when decoded pixels change."""

# formats with a signature that need no external program
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO", "MPO")
_JPEG = ("JPEG", "MPO")
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
"""As phones save photographs; Pillow does not decode them."""
_ORIENTATION = 0x0112
_TRANSPOSES = ["FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"]
"""Pillow's names of what undoes the EXIF orientations 2 to 8."""
_BLOCK_ROWS = 64
_HIGH_PRECISION = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
_MIN_DRAFT_SCALE = 2
"""A JPEG may be decoded at a reduced scale, but not below this many times the target size."""


class InvalidImage(InvalidFile):
    """A file cannot be decoded. The message continues a sentence that starts with the file name."""


def read_image(path: str | Path, size: int) -> NDArray[np.uint8]:
    """Reads an image file as uint8 (size, size, 3); errors contain the path.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Image.new("RGB", (30, 20), "red").save(f"{folder}/red.png")
    ...     image = read_image(f"{folder}/red.png", size=4)
    >>> image.shape, image[0, 0]
    ((4, 4, 3), array([255,   0,   0], dtype=uint8))
    """
    check_positive("read_image", size=size)
    content = read_bytes(path)
    try:
        with pixel_limit():
            return decode_image(content, size)
    except InvalidImage as fault:
        raise InvalidImage(f"{path} {fault}") from fault


def decode_image(content: bytes, size: int) -> NDArray[np.uint8]:
    """Decodes the content of an image file to uint8 (size, size, 3); raises `InvalidImage`.

    Call it inside `pixel_limit`.
    """
    from PIL import Image

    if not content:
        raise InvalidImage("is empty")
    with _decoding_errors(content), Image.open(io.BytesIO(content), formats=_known_formats()) as image:
        _check_pixels(image.size, Image.MAX_IMAGE_PIXELS)
        return _square(image, size)


def decode_whole(content: bytes, longest: int) -> NDArray[np.uint8]:
    """Decodes all of an image file to uint8 (H, W, 3), with at most ``longest`` pixels on its long side.

    Its largest centred square is what `decode_image` returns. Call it inside `pixel_limit`.

    >>> from PIL import Image
    >>> file = io.BytesIO()
    >>> Image.new("RGB", (40, 20), "red").save(file, "PNG")
    >>> decode_whole(file.getvalue(), 10).shape
    (5, 10, 3)
    """
    from PIL import Image

    if not content:
        raise InvalidImage("is empty")
    with _decoding_errors(content), Image.open(io.BytesIO(content), formats=_known_formats()) as image:
        _check_pixels(image.size, Image.MAX_IMAGE_PIXELS)
        image.draft(None, (longest, longest))  # a JPEG is decoded at the next larger scale
        image.load()
        decoded = _to_8_bit(image)
        W, H = decoded.size
        if max(W, H) > longest:
            size = (max(1, round(W * longest / max(W, H))), max(1, round(H * longest / max(W, H))))
            decoded = decoded.resize(size, Image.Resampling.LANCZOS, reducing_gap=2.0)
        return _finished(decoded, _orientation(image))


def square_image(image: Image.Image, size: int) -> NDArray[np.uint8]:
    """Brings an image of Pillow to uint8 (size, size, 3) as `decode_image` does the file; raises `InvalidImage`.

    A JPEG that is open but not yet loaded has the same pixels as its file: `decode_image` may read it at a reduced
    scale, which is impossible once all of it is loaded.

    >>> from PIL import Image
    >>> square_image(Image.new("L", (30, 20), 51), 4)[0, 0]
    array([51, 51, 51], dtype=uint8)
    """
    check_positive("square_image", size=size)
    file = getattr(image, "fp", None)
    with _decoding_errors(), pixel_limit():
        if image.format in _JPEG and file is not None and getattr(image, "tile", None):
            place = file.tell()
            file.seek(0)
            content = file.read()
            file.seek(place)
            return decode_image(content, size)
        _check_pixels(image.size, None)
        return _square(image.copy(), size)


@contextmanager
def _decoding_errors(content: bytes = b"") -> Generator[None, None, None]:
    """Turns whatever Pillow raises on damaged files into `InvalidImage`."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except InvalidImage:
        raise
    except UnidentifiedImageError as fault:
        if content[4:8] == b"ftyp" and content[8:12] in _HEIC_BRANDS:
            raise InvalidImage("is a HEIC image, which is not read; convert it to JPEG or PNG") from fault
        raise InvalidImage("is not an image, or its format is unknown") from fault
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as fault:
        raise InvalidImage(f"is too large: {fault}") from fault
    except MemoryError as fault:
        raise InvalidImage("does not fit into memory") from fault
    except Exception as fault:  # Pillow's decoders raise exceptions of every type on damaged files
        message = f"{fault}" or type(fault).__name__
        problem = "truncated" if "truncated" in message.lower() else "damaged"
        raise InvalidImage(f"is {problem} ({message})") from fault


@contextmanager
def pixel_limit() -> Generator[None, None, None]:
    """Context in which images above Pillow's pixel limit are an error, in all threads; other warnings are silenced."""
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


def _check_pixels(size: tuple[int, int], limit: int | None) -> None:
    W, H = size
    if not W or not H:
        raise InvalidImage(f"has {W}×{H} pixels")
    if limit is not None and limit < W * H:
        raise InvalidImage(f"is too large: {W}×{H} pixels are more than {limit}")


def _square(image: Image.Image, size: int) -> NDArray[np.uint8]:
    from PIL import Image

    image.draft(None, (_MIN_DRAFT_SCALE * size, _MIN_DRAFT_SCALE * size))
    image.load()
    decoded = _to_8_bit(image)
    if decoded.size != (size, size):
        W, H = decoded.size
        side = min(W, H)
        box = ((W - side) / 2, (H - side) / 2, (W + side) / 2, (H + side) / 2)
        decoded = decoded.resize((size, size), Image.Resampling.BICUBIC, box, reducing_gap=2.0)
    # last, as the square has the fewest pixels; a centred crop commutes with the rotation
    return _finished(decoded, _orientation(image))


def _finished(decoded: Image.Image, orientation: Image.Transpose | None) -> NDArray[np.uint8]:
    """Composites transparency on white, and rotates as EXIF says."""
    from PIL import Image

    if decoded.mode == "RGBA":
        white = Image.new("RGBA", decoded.size, "white")
        decoded = Image.alpha_composite(white, decoded)
    if orientation is not None:
        decoded = decoded.transpose(orientation)
    return np.array(decoded.convert("RGB"))


def _to_8_bit(image: Image.Image) -> Image.Image:
    """The image in mode L, RGB or RGBA."""
    if image.mode in _HIGH_PRECISION:
        return _grey_to_8_bit(image)
    if image.has_transparency_data:
        return image.convert("RGBA")
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def _grey_to_8_bit(image: Image.Image) -> Image.Image:
    """Rescales 16-bit grey, or float grey in [0, 1], to 8 bits."""
    from PIL import Image

    values = np.asarray(image)
    limit = 1.0 if image.mode == "F" else 65535.0
    low, high = float(values.min()), float(values.max())
    if not 0 <= low <= high <= limit:
        raise InvalidImage(f"has values from {low:g} to {high:g}, beyond 0 to {limit:g}; save it with 8 or 16 bits")
    scaled = np.empty(values.shape, np.uint8)
    for row in range(0, len(values), _BLOCK_ROWS):  # in parts: float64 takes eight times the memory of the result
        scaled[row : row + _BLOCK_ROWS] = np.rint(values[row : row + _BLOCK_ROWS].astype(np.float64) * (255 / limit))
    return Image.fromarray(scaled)


def _orientation(image: Image.Image) -> Image.Transpose | None:
    """The transposition that EXIF asks for, of an image that is loaded: Pillow transposes a TIFF when it loads it."""
    from PIL import Image

    try:
        tag: object = image.getexif().get(_ORIENTATION)
    except Exception:  # damaged EXIF data are ignored
        return None
    return Image.Transpose[_TRANSPOSES[tag - 2]] if isinstance(tag, int) and 2 <= tag <= 8 else None
