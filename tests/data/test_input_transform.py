"""Images of every kind become the network's input as in training."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from moesaic.data.decode import InvalidImage
from moesaic.data.image_dataset import Normalize
from moesaic.data.input_transform import InputTransform
from moesaic.data.load import load_images

SCALE = Normalize((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for label, kind in enumerate(("cat", "dog")):
        (tmp_path / "pets" / kind).mkdir(parents=True)
        for number, (width, height) in enumerate([(16, 16), (40, 30), (31, 90), (400, 300), (16, 20)]):
            ending = "jpg" if number % 2 else "png"
            picture(width, height, 10 * label + number).save(tmp_path / "pets" / kind / f"{number}.{ending}")
    return tmp_path / "pets"


def test_files_and_open_images_are_as_in_training(folder: Path, tmp_path: Path):
    dataset = load_images(folder, size=16, cache_dir=tmp_path / "cache")
    assert dataset.normalize is not None
    transform = InputTransform((3, 16, 16), dataset.normalize)
    files = sorted(folder.rglob("*.*"))
    trained = {image.numpy().tobytes() for each in (dataset.train, dataset.test) for image in each.pixels.contiguous()}
    pixels = transform.pixels(files)
    assert {image.numpy().tobytes() for image in pixels} == trained
    expected = dataset.eval_transform(pixels, torch.zeros(len(files), 3))
    assert torch.equal(transform(files), expected)
    assert torch.equal(transform([str(file) for file in files]), expected)
    for number, file in enumerate(files):
        with Image.open(file) as image:
            size = image.size
            assert torch.equal(transform(image)[0], expected[number]), file
            assert image.size == size, "the image is left as it was"


def test_a_rotated_photograph_is_upright_as_file_and_as_image(tmp_path: Path):
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(40, 30).save(tmp_path / "a.jpg", exif=exif, quality=100)
    transform = InputTransform((3, 16, 16), SCALE)
    expected = transform(tmp_path / "a.jpg")
    with Image.open(tmp_path / "a.jpg") as image:
        assert torch.equal(transform(image), expected)
        image.load()
        assert torch.allclose(transform(image), expected, atol=0.1)
    with Image.open(tmp_path / "a.jpg") as image:
        assert not torch.allclose(transform(image.convert("RGB").rotate(90)), expected, atol=0.1)


def test_tensors_are_cropped_and_resized_like_images():
    image = picture(40, 30)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    transform = InputTransform((3, 16, 16), SCALE)
    assert torch.equal(transform(pixels), transform(image))
    assert torch.equal(transform(pixels[None].expand(3, -1, -1, -1)), transform([image, pixels, image]))


def test_pixels_of_the_right_shape_keep_their_values():
    pixels = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    assert torch.equal(InputTransform((3, 8, 8), SCALE)(pixels), SCALE(pixels))
    odd = torch.randint(0, 256, (2, 5, 4, 6), dtype=torch.uint8)
    five = Normalize((0.5,) * 5, (0.2,) * 5)
    assert torch.equal(InputTransform((5, 4, 6), five)(odd), five(odd))


def test_grey_and_colour_become_what_the_network_takes():
    grey = torch.full((1, 12, 12), 51, dtype=torch.uint8)
    assert torch.equal(InputTransform((3, 8, 8), SCALE).pixels(grey), torch.full((1, 3, 8, 8), 51, dtype=torch.uint8))
    red = Image.new("RGB", (8, 8), (255, 0, 0))
    one = InputTransform((1, 8, 8), Normalize((0.5,), (0.5,)))
    assert one.pixels(red).unique().tolist() == [76]  # 0.299 · 255
    assert torch.equal(one.pixels(grey[:, :8, :8]), grey[None, :, :8, :8])


@pytest.mark.parametrize(
    ("images", "kind", "message"),
    [
        ([], ValueError, "there is no image"),
        (torch.zeros(3, 8, 8), TypeError, r"takes uint8 pixels from 0 to 255, got torch.float32; .*byte\(\)"),
        (torch.zeros(8, 8, 3, dtype=torch.uint8), ValueError, r"got \(8, 8, 3\); .*permute\(2, 0, 1\)"),
        (torch.zeros(8, 8, dtype=torch.uint8), ValueError, r"takes pixels \(C, H, W\)"),
        (np.zeros((8, 8, 3), np.uint8), TypeError, "got a ndarray; convert an array with torch.from_numpy"),
    ],
)
def test_what_is_no_image_is_refused(images, kind, message):
    with pytest.raises(kind, match=message):
        InputTransform((3, 8, 8), SCALE)(images)


def test_files_are_refused_where_the_network_takes_no_squares(tmp_path: Path):
    picture(8, 8).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="image files become squares"):
        InputTransform((3, 8, 6), SCALE)(tmp_path / "a.png")


def test_damaged_files_are_named(tmp_path: Path):
    (tmp_path / "a.png").write_bytes(b"nothing")
    with pytest.raises(InvalidImage, match=r"a\.png is not an image"):
        InputTransform((3, 8, 8), SCALE)(tmp_path / "a.png")
    picture(80, 80).save(tmp_path / "b.jpg")
    (tmp_path / "b.jpg").write_bytes((tmp_path / "b.jpg").read_bytes()[:700])
    with Image.open(tmp_path / "b.jpg") as image, pytest.raises(InvalidImage, match="is truncated"):
        InputTransform((3, 8, 8), SCALE)(image)
