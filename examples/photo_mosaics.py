"""Train a small routed network on mosaics of photographs, and draw which tiles its experts select.

A mosaic has sixteen tiles, each a crop of a photograph. Its class is "cat" if one tile shows the cat, "coffee" if one
shows the coffee cup, and "neither" otherwise; all other tiles come from seven unrelated photographs. The network is
trained with the class alone, not with the position of the deciding tile. Training tiles are cut from the left half of
each photograph and test tiles from the right half, so no test pixel was seen in training. The photographs of the cat
and of the cup are cropped to their subject first.

The class "neither" matters: without it, the network learns to select the tiles of all classes but one, and infers that
class from the absence of the others.

The photographs come with scikit-image (``pip install scikit-image``) and are in the public domain or CC0.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import moesaic
from moesaic.data import ImageDataset, LabelledImages, Normalize
from moesaic.insight import agreement, overlay
from moesaic.training import Recipe, fit

CLASSES = ("cat", "coffee", "neither")
DECIDING = ("chelsea", "coffee")  # scikit-image's names
SUBJECT = {"chelsea": (50, 0, 390, 300), "coffee": (90, 0, 500, 400)}  # boxes around the face and around the cup
OTHERS = ("astronaut", "rocket", "retina", "hubble_deep_field", "brick", "gravel", "grass")

EXPERTS = 4
GRID = 4  # tiles per side
TILE = 16  # pixels per side at the network's input: one 4×4 patch of the last feature map
SHOWN_TILE = 64  # pixels per side in the figure
SHORTER_SIDE = 170  # pixels to which photographs are resized: a tile shows three eighths of this side
NORMALIZE = Normalize((0.45, 0.4, 0.35), (0.25, 0.25, 0.25))


@dataclass(frozen=True)
class Mosaics:
    """A batch of mosaics with their classes and deciding tiles."""

    pixels: Tensor
    """(B, 3, 256, 256) uint8."""
    labels: Tensor
    """(B,) int64."""
    deciding: Tensor
    """(B, 16) bool: the tile that decides the class, none for "neither"."""

    def network_input(self) -> LabelledImages:
        """The mosaics at the network's input size, 64×64."""
        small = F.interpolate(self.pixels.float(), size=GRID * TILE, mode="area")
        return LabelledImages(small.round().to(torch.uint8), self.labels, self.labels)


def load_photographs() -> dict[str, Tensor]:
    """The photographs as (3, H, W) uint8, by scikit-image's names."""
    from skimage import data

    def load(name: str) -> Tensor:
        photograph = Image.fromarray(getattr(data, name)()).convert("RGB")
        photograph = photograph.crop(SUBJECT.get(name, (0, 0, *photograph.size)))
        ratio = SHORTER_SIDE / min(photograph.size)
        resized = photograph.resize([round(ratio * side) for side in photograph.size], Image.Resampling.LANCZOS)
        return torch.from_numpy(np.array(resized)).permute(2, 0, 1)

    return {name: load(name) for name in (*DECIDING, *OTHERS)}


def make_mosaics(photographs: dict[str, Tensor], count: int, split: str, seed: int) -> Mosaics:
    """``count`` random mosaics from the left ("train") or the right ("test") half of each photograph."""
    rng = np.random.default_rng([seed, split == "test"])

    def crop(name: str) -> Tensor:
        photograph = photographs[name]
        _, H, W = photograph.shape
        left, right = (0, W // 2) if split == "train" else (W // 2, W)
        y, x = rng.integers(H - SHOWN_TILE + 1), rng.integers(left, right - SHOWN_TILE + 1)
        tile = photograph[:, y : y + SHOWN_TILE, x : x + SHOWN_TILE]
        return tile.flip(2) if rng.random() < 0.5 else tile

    pixels = torch.empty(count, 3, GRID * SHOWN_TILE, GRID * SHOWN_TILE, dtype=torch.uint8)
    labels = torch.arange(count) % len(CLASSES)
    deciding = torch.zeros(count, GRID * GRID, dtype=torch.bool)
    for b, label in enumerate(labels.tolist()):
        names = rng.choice(OTHERS, GRID * GRID).tolist()
        if label < len(DECIDING):
            n = int(rng.integers(GRID * GRID))
            names[n], deciding[b, n] = DECIDING[label], True
        for n, name in enumerate(names):
            y, x = n // GRID * SHOWN_TILE, n % GRID * SHOWN_TILE
            pixels[b, :, y : y + SHOWN_TILE, x : x + SHOWN_TILE] = crop(name)
    return Mosaics(pixels, labels, deciding)


@torch.no_grad()
def predict(model: nn.Module, images: LabelledImages) -> tuple[Tensor, moesaic.Routing]:
    """The predicted classes, and the routing of the network's only routed layer."""
    model.eval()
    with moesaic.record_routing(model, keep="all") as records:
        predicted = torch.cat([model(NORMALIZE(part)).argmax(1) for part in images.pixels.split(250)])
    (routing,) = records.values()
    return predicted, routing


def draw(mosaics: Mosaics, model: nn.Module, selected: dict[str, float], accuracy: float) -> Figure:
    """The first mosaic of "cat" and of "coffee" with each expert's tile; beside them, how often it is the right one."""
    shown = [mosaics.labels.tolist().index(label) for label in range(len(DECIDING))]
    first = Mosaics(mosaics.pixels[shown], mosaics.labels[shown], mosaics.deciding[shown])
    predicted, routing = predict(model, first.network_input())
    titles = [f"class: {CLASSES[y]}, predicted: {CLASSES[p]}" for y, p in zip(first.labels, predicted, strict=True)]
    figure = overlay(first.pixels, routing, titles=titles)

    # Outside the overlay's axes: savefig(bbox_inches="tight") extends the figure.
    question = "Does one of sixteen tiles show the cat, the coffee cup, or neither? Each expert selects one tile."
    figure.text(0.02, 1.015, question, fontsize=12)
    setup = "Trained with the class alone,\non tiles from the left half\nof each photograph;\ntested on the right half."
    figure.text(1.06, 0.3, setup, fontsize=9, linespacing=1.5)
    figure.text(1.06, 0.22, f"Test accuracy: {accuracy:.1%}", fontsize=9, weight="bold")
    bars = figure.add_axes((1.06, 0.55, 0.3, 0.36))
    bars.set_title("Test mosaics in which an\nexpert selects the deciding tile", fontsize=9)
    bars.bar_label(
        bars.bar(selected.keys(), selected.values(), color=["lightgrey", "lightgrey", "black"]), fmt="{:.0%}"
    )
    bars.set(ylim=(0, 1.1), yticks=[])
    bars.tick_params(labelsize=9)
    bars.spines[["top", "left", "right"]].set_visible(False)
    return figure


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/photo_mosaics"), help="Output folder of the figure.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of mosaics, initial weights and sample order.")
    parser.add_argument("--epochs", type=int, default=15, help="Training epochs.")
    parser.add_argument("--samples", type=int, default=3000, help="Number of training mosaics.")
    args = parser.parse_args(argv)

    photographs = load_photographs()
    train = make_mosaics(photographs, args.samples, "train", args.seed)
    test = make_mosaics(photographs, min(args.samples, 1000), "test", args.seed)
    dataset = ImageDataset(train.network_input(), test.network_input(), CLASSES, CLASSES, NORMALIZE, NORMALIZE)
    print(f"{len(train.labels)} training mosaics, {len(test.labels)} test mosaics", flush=True)

    torch.manual_seed(args.seed)
    model = moesaic.create_model(
        "wrn10_1_pmoe",
        num_classes=len(CLASSES),
        image_size=GRID * TILE,
        experts=EXPERTS,
        patches_per_expert=1,
        patch_size=4,
    )
    _, untrained = predict(model, dataset.test)
    start = time.perf_counter()
    fit(model, dataset, Recipe(epochs=args.epochs, batch_size=32), seed=args.seed, eval_every=args.epochs)
    print(f"trained for {args.epochs} epochs in {time.perf_counter() - start:.0f} s", flush=True)
    predicted, routing = predict(model, dataset.test)

    accuracy = (predicted == test.labels).float().mean().item()
    before, after = agreement(untrained, test.deciding), agreement(routing, test.deciding)
    random = 1 - (1 - after.chance).prod().item()  # that any of the experts selects it, if all select at random
    selected = {"random": random, "untrained": before.reached, "trained": after.reached}

    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "photo_mosaics.png"
    draw(test, model, selected, accuracy).savefig(path, dpi=90, bbox_inches="tight", pad_inches=0.2)

    print(f"test accuracy {accuracy:.1%} (random {1 / len(CLASSES):.1%})")
    print(f"an expert selects the deciding tile in {after.reached:.1%} of the test mosaics that have one", end=" ")
    print(f"(untrained {before.reached:.1%}, random {random:.1%})")
    for expert, hits in enumerate(after.hit_rate.tolist()):
        print(f"    expert {expert} selects it in {hits:.0%}")
    print(f"figure: {path}")
    return {"accuracy": accuracy, **selected}


if __name__ == "__main__":
    torch.set_num_threads(1)  # so small a network gains little from more threads
    main()
