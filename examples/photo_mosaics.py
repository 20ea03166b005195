"""Train a small routed network on mosaics of photographs, and draw which tiles its experts select.

Writes two figures: ``photo_mosaics.png``, what the trained experts select, and ``experts_settle.svg``, what they
selected before training and after some of the epochs.

A mosaic has sixteen tiles, each a crop of a photograph. Its class is "cat" if one tile shows the cat, "coffee" if one
shows the coffee cup, and "neither" otherwise; all other tiles come from seven unrelated photographs. The network is
trained with the class alone, not with the position of the deciding tile. Training tiles are cut from the left half of
each photograph and test tiles from the right half, so no test pixel was seen in training. The photographs of the cat
and of the cup are cropped to their subject first.

The class "neither" matters: without it, the network learns to select the tiles of all classes but one, and infers that
class from the absence of the others.

Expect about 99 % test accuracy, and an expert that selects the deciding tile in more than 90 % of the test mosaics.
The photographs come with scikit-image (``pip install scikit-image``) and are in the public domain or CC0. About two
minutes on one core; ``--epochs 5`` takes a third and ends lower.
"""

import argparse
import base64
import io
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
from moesaic.insight.overlays import expert_colour
from moesaic.training import Callback, Recipe, fit
from moesaic.training.trainer import Trainer

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


@dataclass(frozen=True)
class Snapshot:
    """What the experts select at one time of training."""

    epoch: int
    tiles: tuple[tuple[int, ...], ...]
    """The tile of each expert, for each of the mosaics in the figure."""
    accuracy: float
    reached: float
    """The share of test mosaics with a deciding tile in which an expert selects it."""


def take_snapshot(epoch: int, model: nn.Module, mosaics: Mosaics, images: LabelledImages) -> Snapshot:
    predicted, routing = predict(model, images)
    shown = [mosaics.labels.tolist().index(label) for label in range(len(DECIDING))]
    tiles = tuple(tuple(mosaic) for mosaic in routing.index[shown, :, 0].tolist())
    accuracy = (predicted == mosaics.labels).float().mean().item()
    return Snapshot(epoch, tiles, accuracy, agreement(routing, mosaics.deciding).reached)


class Snapshots(Callback):
    """Takes a snapshot after each of ``epochs``."""

    def __init__(self, epochs: tuple[int, ...], mosaics: Mosaics, images: LabelledImages) -> None:
        self.epochs, self.mosaics, self.images = epochs, mosaics, images
        self.epoch, self.taken = 0, list[Snapshot]()

    def on_epoch_end(self, trainer: Trainer) -> dict[str, float]:
        self.epoch += 1
        if self.epoch in self.epochs:
            self.taken.append(take_snapshot(self.epoch, trainer.model, self.mosaics, self.images))
        return {}


STYLE = """
  text { font: 17px system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: #24292f; }
  .head { font-weight: 600; } .soft { fill: #57606a; } .veil { fill: #ffffff; fill-opacity: .62; }
  .deciding { fill: none; stroke: #000; stroke-width: 2; stroke-dasharray: 3 4; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .soft { fill: #9da7b3; } .veil { fill: #0d1117; } .deciding { stroke: #fff; }
  }
"""


def draw_settling(mosaics: Mosaics, snapshots: list[Snapshot]) -> str:
    """An SVG with a column for each snapshot: the tiles that experts select, framed; all others are veiled.

    Its texts and veils follow the reader's light or dark theme. Each mosaic is in the file once.
    """
    side, gap, left, top = 208, 22, 8, 36
    unit = side / GRID
    shown = [mosaics.labels.tolist().index(label) for label in range(len(DECIDING))]
    width, rows = 2 * left + len(snapshots) * (side + gap) - gap, len(shown)
    foot = top + rows * (side + gap)
    height = foot + 84
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>Tiles that {EXPERTS} experts select, from before training to epoch {snapshots[-1].epoch}</title>",
        f"<style>{STYLE}</style><defs>",
    ]
    for row, b in enumerate(shown):
        file = io.BytesIO()
        Image.fromarray(mosaics.pixels[b].permute(1, 2, 0).numpy()).save(file, "JPEG", quality=82, optimize=True)
        data = base64.b64encode(file.getvalue()).decode()
        parts.append(f'<image id="mosaic{row}" width="{side}" height="{side}" href="data:image/jpeg;base64,{data}"/>')
    parts.append("</defs>")
    for column, snapshot in enumerate(snapshots):
        x0 = left + column * (side + gap)
        when = "before training" if not snapshot.epoch else f"after epoch {snapshot.epoch}"
        parts.append(f'<text class="head" x="{x0}" y="24">{when}</text>')
        for row, b in enumerate(shown):
            y0, taken = top + row * (side + gap), snapshot.tiles[row]
            parts.append(f'<use href="#mosaic{row}" x="{x0}" y="{y0}"/>')
            for n in range(GRID * GRID):
                x, y = x0 + n % GRID * unit, y0 + n // GRID * unit
                if n not in taken:
                    parts.append(f'<rect class="veil" x="{x:g}" y="{y:g}" width="{unit:g}" height="{unit:g}"/>')
                if mosaics.deciding[b, n]:
                    inset = f'x="{x + 18:g}" y="{y + 18:g}" width="{unit - 36:g}" height="{unit - 36:g}"'
                    parts.append(f'<rect class="deciding" {inset}/>')
                # frames of experts that select the same tile lie inside one another
                for depth, expert in enumerate(e for e, tile in enumerate(taken) if tile == n):
                    d = 2 + 5 * depth
                    frame = f'x="{x + d:g}" y="{y + d:g}" width="{unit - 2 * d:g}" height="{unit - 2 * d:g}"'
                    parts.append(f'<rect {frame} fill="none" stroke="{expert_colour(expert)}" stroke-width="4"/>')
        parts.append(f'<text x="{x0}" y="{foot + 6}">finds it in {snapshot.reached:.0%}</text>')
        parts.append(f'<text class="soft" x="{x0}" y="{foot + 30}">test accuracy {snapshot.accuracy:.1%}</text>')
    x = left
    for expert in range(EXPERTS):
        parts.append(
            f'<rect x="{x + 2}" y="{foot + 52}" width="18" height="18" fill="none" '
            f'stroke="{expert_colour(expert)}" stroke-width="4"/>'
            f'<text class="soft" x="{x + 30}" y="{foot + 67}">expert {expert}</text>'
        )
        x += 130
    parts.append(f'<rect class="deciding" x="{x + 2}" y="{foot + 52}" width="18" height="18"/>')
    parts.append(f'<text class="soft" x="{x + 30}" y="{foot + 67}">deciding tile</text></svg>')
    return "\n".join(parts) + "\n"


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
    snapshots = Snapshots(tuple(sorted({1, args.epochs // 3, args.epochs} - {0})), test, dataset.test)
    first = take_snapshot(0, model, test, dataset.test)
    start = time.perf_counter()
    recipe = Recipe(epochs=args.epochs, batch_size=32)
    fit(model, dataset, recipe, seed=args.seed, eval_every=args.epochs, callbacks=[snapshots])
    print(f"trained for {args.epochs} epochs in {time.perf_counter() - start:.0f} s", flush=True)
    predicted, routing = predict(model, dataset.test)

    accuracy = (predicted == test.labels).float().mean().item()
    before, after = agreement(untrained, test.deciding), agreement(routing, test.deciding)
    random = 1 - (1 - after.chance).prod().item()  # that any of the experts selects it, if all select at random
    selected = {"random": random, "untrained": before.reached, "trained": after.reached}

    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "photo_mosaics.png"
    draw(test, model, selected, accuracy).savefig(path, dpi=90, bbox_inches="tight", pad_inches=0.2)

    settling = args.out / "experts_settle.svg"
    settling.write_text(draw_settling(test, [first, *snapshots.taken]), "utf-8")

    print(f"test accuracy {accuracy:.1%} (random {1 / len(CLASSES):.1%})")
    print(f"an expert selects the deciding tile in {after.reached:.1%} of the test mosaics that have one", end=" ")
    print(f"(untrained {before.reached:.1%}, random {random:.1%})")
    for expert, hits in enumerate(after.hit_rate.tolist()):
        print(f"    expert {expert} selects it in {hits:.0%}")
    print(f"figures: {path}, {settling}")
    return {"accuracy": accuracy, **selected}


if __name__ == "__main__":
    torch.set_num_threads(1)  # so small a network gains little from more threads
    main()
