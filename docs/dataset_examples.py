"""Draw examples of the papers' datasets: Figure 6 of Chen et al. 2022 and Figure 13 of Chowdhury et al. 2023.

    python docs/dataset_examples.py              # with photographs of scikit-image, which may be shown
    python docs/dataset_examples.py DATA_DIR     # with CIFAR-10 and backgrounds, as the experiments have them

The images are made by the functions that make the datasets. The photographs stand in for CIFAR-10's images, whose
licence is not known: a rocket for the vehicles, a cat for the animals, grass for the plants.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from theme import save_figure
from torch import Tensor

from moesaic.data.cifar10 import CIFAR10_CLASSES, cifar10_tensors
from moesaic.data.decoded_cache import DecodedCache, decode_images
from moesaic.data.file_sources import open_source
from moesaic.papers.chen2022.data.rotated_cifar import ANGLE, CROP, blur, crop_and_resize, rotate
from moesaic.papers.chowdhury2023.data.cifar_mosaics import find_backgrounds, on_backgrounds, vehicle_mosaics
from moesaic.report.chart_style import RC_PARAMS

IMAGES = Path(__file__).parent / "images"
SIDE = 32
SIGMA = 1.65
"""Standard deviation of the blur: the middle of 1.1 to 2.2."""
SEED = 1
BOXES = {
    "rocket": [(240, 60, 480, 300), (200, 100, 440, 340)],
    "chelsea": [(100, 20, 380, 300), (150, 60, 310, 220), (0, 0, 300, 300), (120, 40, 420, 300)],
    "grass": [(0, 0, 256, 256), (200, 200, 456, 456)],
}
"""Squares of the photographs: left, top, right, bottom."""
CLASSES = {"rocket": "airplane", "chelsea": "cat"}


class Images(NamedTuple):
    """Images (B, 3, 32, 32) of bytes with their classes (B,), and backgrounds (G, 3, 32, 32)."""

    pixels: Tensor
    classes: Tensor
    backgrounds: Tensor


def photographs() -> Images:
    """The photographs of scikit-image, at CIFAR-10's size."""
    from skimage import data

    def squares(name: str) -> list[Tensor]:
        whole = Image.fromarray(getattr(data, name)()).convert("RGB")
        small = [whole.crop(box).resize((SIDE, SIDE), Image.Resampling.LANCZOS) for box in BOXES[name]]
        return [torch.from_numpy(np.array(each)).permute(2, 0, 1) for each in small]

    named = [(CIFAR10_CLASSES.index(CLASSES[name]), each) for name in CLASSES for each in squares(name)]
    return Images(
        torch.stack([each for _, each in named]),
        torch.tensor([label for label, _ in named]),
        torch.stack(squares("grass")),
    )


def cifar10(data_dir: Path, cache: DecodedCache, images_per_file: int = 10_000) -> Images:
    """The first images of CIFAR-10, and the first backgrounds."""
    pixels, classes = (each[:200] for each in cifar10_tensors("train", data_dir, images_per_file))
    with open_source(find_backgrounds(data_dir)) as source:
        names = [entry.name for entry in source.entries() if entry.name.lower().endswith((".jpg", ".png"))][:20]
        backgrounds = decode_images(source, names, SIDE, cache).pixels
    return Images(pixels, classes, backgrounds)


def figure_6(images: Images) -> Figure:
    """A row for each image as it is, and rotated: the four steps from an image to its blurred form."""
    rows: list[list[Tensor]] = []
    labels: list[str] = []
    for image in (images.pixels[:1], images.pixels[-1:]):
        for label, start in (("upright", image), ("rotated", rotate(image, ANGLE))):
            edge = (SIDE - CROP) // 2
            enlarged = crop_and_resize(start)
            blurred = (blur(enlarged.float(), torch.tensor([SIGMA])) + 0.5).clamp(0, 255).to(torch.uint8)
            rows.append([start, start[..., edge : edge + CROP, edge : edge + CROP], enlarged, blurred])
            labels.append(label)
    steps = [f"rotate by {ANGLE:.0f}°\nor not", f"crop\nto {CROP}×{CROP}", f"resize\nto {SIDE}×{SIDE}", "blur\n"]
    return draw(rows, steps, labels)


def figure_13(images: Images) -> Figure:
    """Two examples of each dataset, in rows."""
    mosaics = vehicle_mosaics(images.pixels, images.classes, split="train", seed=SEED).pixels
    placed = on_backgrounds(images.pixels, images.classes, images.backgrounds, split="train", seed=SEED).pixels
    rows = [[some[i : i + 1] for some in (images.pixels, mosaics, placed)] for i in (0, 1)]
    return draw(rows, ["(a)\nCIFAR-10", "(b)\nCIFAR-Vehicles", "(c)\nCIFAR-10, noise"], ["", ""])


def draw(rows: list[list[Tensor]], titles: list[str], labels: list[str]) -> Figure:
    """A grid of images, with a title for each column and a label for each row."""
    with matplotlib.rc_context(RC_PARAMS):
        figure = Figure(figsize=(1.7 * len(titles), 1.55 * len(rows) + 0.45), layout="constrained")
        grid: Any = figure.subplots(len(rows), len(titles), squeeze=False)
        for axes, row, label in zip(grid, rows, labels, strict=True):
            for each, image in zip(axes, row, strict=True):
                each.imshow(image[0].permute(1, 2, 0).numpy(), interpolation="nearest")
                each.set_xticks([])
                each.set_yticks([])
            axes[0].set_ylabel(label)
        for each, title in zip(grid[0], titles, strict=True):
            each.set_title(title)
    return figure


if __name__ == "__main__":
    images = cifar10(Path(sys.argv[1]), DecodedCache()) if len(sys.argv) > 1 else photographs()
    save_figure(figure_6(images), IMAGES / "cifar10-rotate.svg")
    save_figure(figure_13(images), IMAGES / "cifar10-mosaics.svg")
