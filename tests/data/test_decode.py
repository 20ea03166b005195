"""All image formats decode to the same square of pixels; invalid files give the reason."""

import io
import struct
import warnings
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from moesaic.data.decode import InvalidImage, decode_image, decode_whole, pixel_limit, read_image

RED, WHITE = [255, 0, 0], [255, 255, 255]


def packed(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def decoded(content: bytes, size: int = 16) -> np.ndarray:
    with pixel_limit():
        return decode_image(content, size)


def photograph(width: int = 48, height: int = 32) -> Image.Image:
    """Smooth, and without any symmetry."""
    y, x = np.mgrid[:height, :width]
    colours = [255 * x / width, 255 * y / height, 128 + 100 * np.sin(3 * x / width + 2 * y / height)]
    return Image.fromarray(np.stack(colours, axis=-1).astype(np.uint8))


def reference(size: int = 16) -> np.ndarray:
    return np.asarray(photograph().crop((8, 0, 40, 32)).resize((size, size), Image.Resampling.BICUBIC))


def close(found: np.ndarray, expected: np.ndarray, most: float) -> bool:
    return bool(np.abs(found.astype(int) - expected.astype(int)).max() <= most)


def test_the_largest_square_in_the_middle_is_scaled_with_antialiasing():
    assert close(decoded(packed(photograph())), reference(), 1)
    stripes = Image.fromarray(np.tile(np.array([0, 255], np.uint8), (64, 32)))
    assert close(decoded(packed(stripes), 8)[1:-1, 1:-1], np.full((6, 6, 3), 127), 8)


def test_a_image_of_the_size_asked_for_keeps_its_bytes():
    content = packed(photograph(32, 32), "JPEG", quality=95)
    assert np.array_equal(decoded(content, 32), np.asarray(Image.open(io.BytesIO(content))))


def test_a_small_image_is_enlarged():
    assert decoded(packed(Image.new("RGB", (1, 5), "red")), 8).tolist() == [[RED] * 8] * 8


@pytest.mark.parametrize(
    ("kind", "options", "most"),
    [
        ("JPEG", {"quality": 98}, 8),
        ("JPEG", {"quality": 98, "progressive": True}, 8),
        ("WEBP", {"lossless": True}, 1),
        ("BMP", {}, 1),
        ("TIFF", {}, 1),
        ("PPM", {}, 1),
        ("JPEG2000", {}, 1),
    ],
)
def test_kinds_of_files_agree(kind, options, most):
    assert close(decoded(packed(photograph(), kind, **options)), reference(), most)


def test_a_large_jpeg_decoded_at_a_smaller_scale_looks_the_same():
    large = photograph(768, 512)
    plain = np.asarray(large.crop((128, 0, 640, 512)).resize((16, 16), Image.Resampling.BICUBIC))
    assert close(decoded(packed(large, "JPEG", quality=98)), plain, 4)


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_exif_orientation_is_applied(turn, kind):
    ways = [None, *(Image.Transpose[name] for name in UNDO)]
    way = ways[turn - 1]
    stored = photograph() if way is None else photograph().transpose(way)
    exif = Image.Exif()
    exif[0x0112] = turn
    options: dict[str, Any] = {"quality": 98} if kind in ("JPEG", "WEBP") else {}
    assert close(decoded(packed(stored, kind, exif=exif, **options)), reference(), 8)


@pytest.mark.parametrize("turn", [1, 3, 6, 8])
@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_the_centre_of_the_whole_image_is_the_square(turn, kind):
    ways = [None, *(Image.Transpose[name] for name in UNDO)]
    stored = photograph() if ways[turn - 1] is None else photograph().transpose(ways[turn - 1])
    exif = Image.Exif()
    exif[0x0112] = turn
    content = packed(stored, kind, quality=98, exif=exif)
    with pixel_limit():
        whole = decode_whole(content, 1000)
        assert decode_whole(content, 24).shape == (16, 24, 3)
    assert whole.shape == (32, 48, 3)
    assert close(whole[:, 8:40], decoded(content, 32), 8)


def test_a_whole_image_has_no_transparency_and_invalid_ones_are_refused():
    with pixel_limit():
        assert decode_whole(packed(Image.new("RGBA", (2, 1), (9, 9, 9, 0))), 9).tolist() == [[WHITE] * 2]
        for content in (b"", b"no image"):
            with pytest.raises(InvalidImage):
                decode_whole(content, 9)


UNDO = ["FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_90", "TRANSVERSE", "ROTATE_270"]


@pytest.mark.parametrize("exif", [b"Exif\x00\x00broken", b"Exif\x00\x00MM\x00*\x00\x00\xff\xff"])
def test_exif_that_cannot_be_read_says_nothing(exif):
    assert close(decoded(packed(photograph(), "JPEG", quality=98, exif=exif)), reference(), 8)


def test_an_orientation_that_does_not_exist_says_nothing():
    exif = Image.Exif()
    exif[0x0112] = 77
    assert close(decoded(packed(photograph(), exif=exif)), reference(), 1)


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk_is_not_inverted(kind):
    cyan_black = Image.merge("CMYK", [Image.new("L", (16, 16), value) for value in (0, 255, 255, 0)])
    assert close(decoded(packed(cyan_black, kind)), np.full((16, 16, 3), RED), 6)


def test_a_palette_is_looked_up():
    palette = Image.new("P", (16, 16), 1)
    palette.putpalette([0, 0, 255, *RED])
    assert decoded(packed(palette)).tolist() == [[RED] * 16] * 16


def test_transparent_parts_lie_on_white_whatever_colour_is_below():
    clear = Image.new("RGBA", (16, 16), (255, 0, 0, 0))
    half = Image.new("RGBA", (16, 16), (255, 0, 0, 51))
    assert decoded(packed(clear)).tolist() == [[WHITE] * 16] * 16
    assert decoded(packed(half))[0, 0].tolist() == [255, 204, 204]


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_a_transparent_entry_of_a_palette_is_white(kind):
    palette = Image.new("P", (16, 16), 1)
    palette.putpalette([0, 0, 255, 0, 0, 0])
    palette.paste(0, (0, 0, 8, 16))
    found = decoded(packed(palette, kind, transparency=1))
    assert found[0, 0].tolist() == [0, 0, 255]
    assert found[0, 15].tolist() == WHITE


def test_no_colour_bleeds_from_transparent_parts_into_others():
    edge = Image.new("RGBA", (64, 64), (0, 255, 0, 0))
    edge.paste((255, 0, 0, 255), (0, 0, 30, 64))
    found = decoded(packed(edge), 8).astype(int)
    assert (found[..., 1] == found[..., 2]).all()  # mixtures of red and white have no green of their own


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_and_not_clipped(kind):
    ramp = np.tile(np.linspace(0, 65535, 16).round().astype(np.uint16), (16, 1))
    found = decoded(packed(Image.fromarray(ramp), kind))
    assert close(found[..., 0], np.tile(np.linspace(0, 255, 16), (16, 1)), 1)
    assert (found[..., 0] == found[..., 2]).all()


def test_sixteen_bits_of_colour_are_scaled():
    row = b"\x00" + struct.pack(">3H", 65535, 32896, 0) * 16
    assert decoded(png(16, 16, bits=16, colour=2, rows=row * 16))[5, 5].tolist() == [255, 128, 0]


def png(width: int, height: int, *, bits: int = 8, colour: int = 0, rows: bytes = b"") -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + checksum

    header = struct.pack(">2I5B", width, height, bits, colour, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_floats_from_0_to_1_are_scaled_and_others_refused():
    half = np.full((16, 16), 0.5, np.float32)
    assert close(decoded(packed(Image.fromarray(half), "TIFF")), np.full((16, 16, 3), 128), 1)
    with pytest.raises(InvalidImage, match="has values from 300 to 300, beyond 0 to 1; save it with 8 or 16 bits"):
        decoded(packed(Image.fromarray(600 * half), "TIFF"))


def test_black_and_white_and_grey_have_three_equal_colours():
    for mode in ("1", "L"):
        assert decoded(packed(Image.new(mode, (20, 20), 1 if mode == "1" else 255))).tolist() == [[WHITE] * 16] * 16


def test_of_an_animation_the_first_frame_counts():
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "lime", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
        content = packed(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert decoded(content)[8, 8].tolist() == RED


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"no image at all", "is not an image, or its format is unknown"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not an image, or its format is unknown"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "is a HEIC image, which is not read; convert it to JPEG"),
        (packed(photograph(), "JPEG")[:-300], "is truncated"),
        (packed(photograph(), "JPEG")[:-50], "is truncated"),
        (packed(photograph(300, 300))[:-3000], "is (truncated|damaged)"),
        (packed(photograph(), "GIF")[:-40], "is truncated"),
        (png(100_000, 100_000), "is too large: "),
        (png(10_000, 9_000), "is too large: "),
        (png(9_000, 9_000), "is (truncated|damaged)"),
    ],
    ids=[
        "empty",
        "text",
        "postscript",
        "heic",
        "jpeg header",
        "jpeg",
        "png",
        "gif",
        "bomb",
        "above the limit",
        "below the limit",
    ],
)
def test_what_gives_no_image_gives_the_reason(content, message):
    with pytest.raises(InvalidImage, match=f"^{message}"):
        decoded(content)


def test_the_limit_of_pixels_holds_also_where_its_warning_is_ignored():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(InvalidImage, match="is too large: 10000×9000 pixels are more than"):
            decode_image(png(10_000, 9_000), 16)


def test_damage_anywhere_is_reported_and_never_another_error():
    content = packed(photograph())
    for at in range(8, len(content), max(len(content) // 60, 1)):
        damaged = content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]
        with suppress(InvalidImage):  # where only the checksum of a colour is wrong, the image may still be good
            assert decoded(damaged).shape == (16, 16, 3)


def test_a_file_is_read_by_its_path_and_named_when_it_is_bad(tmp_path: Path):
    (tmp_path / "good.png").write_bytes(packed(photograph()))
    (tmp_path / "bad.png").write_bytes(b"bad")
    assert close(read_image(tmp_path / "good.png", 16), reference(), 1)
    with pytest.raises(InvalidImage, match=r"bad\.png is not an image"):
        read_image(tmp_path / "bad.png", 16)
    with pytest.raises(ValueError, match="size=0; it must be at least 1"):
        read_image(tmp_path / "good.png", 0)
