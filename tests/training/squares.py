"""A small dataset with a local pattern, small networks for it, and what a run leaves behind."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.data.image_dataset import ImageDataset, LabelledImages, Normalize
from moesaic.layers import PatchMoE, SampleMoE
from moesaic.routing import SampleRouter
from moesaic.training.fit import fit
from moesaic.training.recipe import Recipe

LONG = Recipe(epochs=4, batch_size=12, optimizer="sgd", lr=0.05, momentum=0.9)
SCALE = Normalize((0.5, 0.5, 0.5), (0.3, 0.3, 0.3))


def some_images(count: int, seed: int) -> LabelledImages:
    """Noise with a bright square in the upper (label 0) or the lower half (label 1), red (cluster 0) or blue (1)."""
    generator = torch.Generator().manual_seed(seed)
    labels, clusters = torch.arange(count) % 2, torch.arange(count) // 2 % 2
    pixels = 120 * torch.rand(count, 3, 8, 8, generator=generator)
    for image, (label, cluster) in enumerate(zip(labels.tolist(), clusters.tolist(), strict=True)):
        column = int(torch.randint(0, 2, (), generator=generator))
        pixels[image, 2 * cluster, 4 * label : 4 * label + 4, 4 * column : 4 * column + 4] += 130
    return LabelledImages(pixels.to(torch.uint8), labels, clusters)


def brighter(pixels: Tensor, rand: Tensor) -> Tensor:
    return SCALE(pixels) + 0.1 * rand[:, 0, None, None, None]


TASK = ImageDataset(
    some_images(70, 0),
    some_images(40, 1),
    ("up", "down"),
    ("red", "blue"),
    brighter,
    SCALE,
    name="squares",
    normalize=SCALE,
)


def seeded(make: Any, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


class Routed(nn.Module):
    """A small network with a routed layer, statistics that run along and something random."""

    def __init__(self, router: nn.Module | None = None) -> None:
        super().__init__()
        choice: dict[str, Any] = {"patches_per_expert": 2} if router is None else {"router": router}
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.moe = PatchMoE(8, 8, experts=2, patch_size=4, kernel_size=3, **choice)
        self.last = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.moe(self.norm(self.conv(x)).relu()).relu()
        return self.head(self.drop(self.last(nn.functional.avg_pool2d(x, 4).flatten(1))))


def routed(seed: int = 0) -> nn.Module:
    return seeded(Routed, seed)


def dense(seed: int = 0) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 2)), seed)


def mixture(seed: int = 0) -> nn.Module:
    def make() -> nn.Module:
        return SampleMoE(SampleRouter(3, experts=2, patch_size=4), [dense(10 * seed + e) for e in range(2)])

    return seeded(make, seed)


def weights(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def same(first: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(first), weights(other), strict=True))


class Notes:
    """Progress that remembers; and that stops the run after so many calls, as an interruption would."""

    def __init__(self, patience: int | None = None) -> None:
        self.advanced = 0
        self.skipped = 0
        self.calls = 0
        self.notes: list[str] = []
        self.logged: list[str] = []
        self.patience = patience

    def begin(self, name: str, total: int, done: int = 0) -> None: ...

    def end(self) -> None: ...

    def advance(self, amount: int, note: str = "") -> None:
        self.advanced += amount
        self.notes.append(note)
        self.calls += 1
        if self.patience is not None and self.calls > self.patience:
            raise KeyboardInterrupt

    def skip(self, amount: int) -> None:
        self.skipped += amount
        self.advance(amount)

    def log(self, message: str) -> None:
        self.logged.append(message)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def timeless(content: Any) -> Any:
    if isinstance(content, dict):
        times = ("seconds", "images_per_second", "sha256")  # the checksum depends on them
        return {name: timeless(each) for name, each in content.items() if name not in times}
    return [timeless(each) for each in content] if isinstance(content, list) else content


def stopped_and_called_again(
    make: Any, dataset: ImageDataset, recipe: Recipe, folder: Path, patience: tuple[int, ...]
) -> nn.Module:
    """Training that is interrupted after so many calls of progress, each time but the last, and goes on."""
    for number, calls in enumerate(patience):
        model = make(7) if number else make()  # a checkpoint replaces the weights
        try:
            fit(model, dataset, recipe, seed=2, out=folder, progress=Notes(calls), checkpoint_seconds=0)
        except KeyboardInterrupt:
            assert number < len(patience) - 1, "the last time it was to end"
        else:
            assert number == len(patience) - 1, "it was to be interrupted"
            return model
    raise AssertionError


def run_files(folder: Path) -> tuple[Any, ...]:
    """All that a run left behind but for times."""
    result = json.loads((folder / "result.json").read_text())
    return sorted(each.name for each in folder.iterdir()), timeless(lines(folder)), timeless(result)
