"""Which head on a frozen backbone needs fewer labels: the routed head, or mean, max, convolution or attention?

    python benchmarks/heads.py --data-dir DIR --weights FILE [--tune] [--heads NAME ...] [--cache DIR]

``docs/heads.md`` has the question, the rule (`head_verdicts`), the tasks (`head_tasks`) and the result. The features of
each trial are computed once and cached; finished runs are read from the cache too, so that an interrupted study goes
on where it stopped. Heads of a trial are trained on the same batches by the steps of `fit`, with the recipe of
``moesaic train --head``; ``tests/benchmarks/test_heads.py`` checks that `fit` finds the same.

``--tune`` runs the variants that defaults were chosen from, on tasks that are not reported.

DIR has photos/photos.zip, celeba/, mnist/ and cifar-10-batches-bin/. FILE has the weights of timm's mobilenetv2_100.
"""

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from head_tasks import REPORTED, TASKS, TUNING, Task, draw_images
from head_verdicts import verdicts
from measure import RESULTS, machine, show
from numpy.typing import NDArray
from torch import Tensor, nn

from moesaic.data.image_dataset import ImageDataset, LabelledImages, Normalize
from moesaic.layers.heads import create_head
from moesaic.models.pretrained import read_config
from moesaic.models.registry import create_model
from moesaic.training.batches import generator_seed, train_batches
from moesaic.training.head_recipe import head_recipe
from moesaic.training.recipe import Recipe
from moesaic.training.train_step import TrainStep
from moesaic.training.trainer import evaluate

COUNTS = (5, 10, 20, 50, 100)
"""Labels in all, not of each class."""
TRIALS = 10
TEST = 60
"""Test images of a trial, which no other trial has."""
MORE_COUNTS = (200, 400)
MORE_TASKS = ("dog or bird, 1 of 9", "dog or bird, 1 of 16", "food or reptile, 1 of 16")
TUNING_COUNTS, TUNING_TRIALS = (20, 100), 3
BLOCK = 4
"""Images per forward pass of the backbone."""
RECIPE = Recipe(epochs=50, batch_size=32)
"""Of ``moesaic train``, before the learning rates of a head."""

Accuracies = dict[str, dict[str, dict[str, list[float]]]]
"""By task, labels and head: the accuracy of each trial."""
Features = Callable[[Task, int], ImageDataset]
"""The features of a task and trial in place of images, with all labels."""


class ConvHead(nn.Module):
    """A 1×1 convolution, ReLU, mean over all positions and a linear layer; about as many weights as the routed head."""

    def __init__(self, in_channels: int, num_classes: int, experts: int = 8) -> None:
        super().__init__()
        hidden = experts * (num_classes + 1)
        self.conv = nn.Conv2d(in_channels, hidden, 1)
        self.classifier = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.conv(x).relu().mean((2, 3)))


@dataclass(frozen=True)
class Variant:
    """A head and how it is trained."""

    head: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    recipe: Recipe = RECIPE

    def create(self, channels: int, classes: int, seed: int) -> nn.Module:
        """The head with the initial weights of a seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.head == "conv":
                return ConvHead(channels, classes)
            return create_head(cast("Any", self.head), channels, classes, **self.options)


NAMES = ("mean", "max", "conv", "attention", "routed")
FIRST = {"experts": 8, "patches_per_expert": 2}
"""Options of the routed head before they were chosen."""


def with_head_lrs(head: str) -> Recipe:
    """The recipe of ``moesaic train --head``; the head is the whole network here, so that all of it is trainable."""
    return replace(head_recipe(replace(RECIPE, trainable="head"), head), trainable="all")


HEADS = {name: Variant(name, {}, with_head_lrs(name)) for name in NAMES}


def tuning_stages() -> dict[str, dict[str, Variant]]:
    """Variants of the recipe, for all heads; then of the routed head."""
    recipes: dict[str, Variant] = {}
    for lr in (3e-4, 1e-3, 3e-3, 1e-2, 3e-2):
        recipe = replace(RECIPE, lr=lr)
        recipes |= {f"{name}, lr {lr:g}": Variant(name, FIRST if name == "routed" else {}, recipe) for name in NAMES}
    routed: dict[str, Variant] = {}
    for experts, patches, factor, lr in (
        (8, 2, 1.0, 1e-2),
        (8, 8, 0.1, 1e-2),
        (8, 8, 1.0, 3e-3),
        (8, 8, 1.0, 1e-2),
        (8, 8, 1.0, 3e-2),
        (8, 8, 1.0, 1e-1),
        (8, 8, 0.1, 3e-2),
        (8, 16, 1.0, 1e-2),
        (8, 16, 1.0, 3e-2),
        (16, 8, 1.0, 1e-2),
        (16, 16, 1.0, 3e-2),
        (4, 8, 1.0, 3e-2),
        (4, 16, 1.0, 3e-2),
        (8, 2, 0.1, 3e-2),
        (8, 4, 0.1, 3e-2),
        (8, 16, 0.1, 3e-2),
        (16, 8, 0.1, 3e-2),
        (16, 16, 0.1, 3e-2),
        (8, 8, 0.3, 3e-2),
        (8, 8, 0.1, 1e-1),
    ):
        options = {"experts": experts, "patches_per_expert": patches}
        name = f"{experts} experts, {patches} patches, router_lr {factor:g} lr, lr {lr:g}"
        routed[name] = Variant("routed", options, replace(RECIPE, lr=lr, router_lr=factor * lr))
    return {"recipe": recipes, "routed": routed}


def map_features(pixels: NDArray[np.uint8], backbone: Any, scale: Normalize) -> Tensor:
    """(B, C, H, W) float16: the last maps of the backbone."""
    found: list[Tensor] = []
    with torch.no_grad():
        for first in range(0, len(pixels), BLOCK):
            x = scale(torch.from_numpy(pixels[first : first + BLOCK])).contiguous(memory_format=torch.channels_last)
            found.append(backbone.forward_features(x).half())
    return torch.cat(found)


def as_images(features: Tensor, classes: int) -> LabelledImages:
    """Features in place of pixels, with the labels in turn."""
    labels = torch.arange(len(features)) % classes
    return LabelledImages(features.float().contiguous(memory_format=torch.channels_last), labels, labels)


def unchanged(features: Tensor, rand: Tensor) -> Tensor:
    return features


def as_dataset(train: LabelledImages, test: LabelledImages, classes: Sequence[str]) -> ImageDataset:
    return ImageDataset(train, test, tuple(classes), tuple(classes), unchanged, unchanged)


def cached_features(data_dir: Path, weights: Path, cache: Path, most: int = COUNTS[-1]) -> Features:
    """Computes the features of a trial at the first call, and reads them from the cache at others."""
    built: list[Any] = []

    def backbone() -> Any:
        if not built:
            model = create_model("timm/mobilenetv2_100", num_classes=2, weights=weights, head="mean")
            built.append(model.to(memory_format=torch.channels_last).eval())  # pyright: ignore
        return built[0]

    def part(task: Task, trial: int, name: str, images: Callable[[], NDArray[np.uint8]]) -> Tensor:
        path = cache / f"{re.sub(r'[^a-z0-9]+', '-', task.name.lower())}-{trial}-{name}.npy"
        if not path.exists():
            config = read_config(weights)
            assert config.mean is not None
            assert config.std is not None
            maps = map_features(images(), backbone(), Normalize(config.mean, config.std))
            with tempfile.NamedTemporaryFile(dir=cache, suffix=".npy", delete=False) as file:
                np.save(file, maps.permute(0, 2, 3, 1).contiguous().numpy())
            Path(file.name).replace(path)
        return torch.from_numpy(np.load(path)).permute(0, 3, 1, 2)

    def features(task: Task, trial: int) -> ImageDataset:
        fewer, classes = COUNTS[-1], len(task.classes)
        train = part(task, trial, "train", lambda: draw_images(task, trial, "train", fewer, data_dir)[0])
        test = part(task, trial, "test", lambda: draw_images(task, trial, "test", TEST, data_dir)[0])
        if most > fewer:  # the images of fewer labels come first
            rest = part(task, trial, "rest", lambda: draw_images(task, trial, "train", most, data_dir)[0][fewer:])
            train = torch.cat([train, rest])
        return as_dataset(as_images(train, classes), as_images(test, classes), task.classes)

    return features


def train_heads(dataset: ImageDataset, labels: int, variants: Mapping[str, Variant], seed: int) -> dict[str, float]:
    """Test accuracy of each head, trained with the first ``labels`` images; all see the same batches."""
    few = replace(dataset, train=dataset.train.take(torch.arange(labels)))
    device, channels, classes = torch.device("cpu"), int(few.train.pixels.shape[1]), dataset.num_classes
    found: dict[str, float] = {}
    plans = {(each.recipe.epochs, each.recipe.batch_size) for each in variants.values()}
    for epochs, batch_size in sorted(plans):
        plan = {
            name: v for name, v in variants.items() if (v.recipe.epochs, v.recipe.batch_size) == (epochs, batch_size)
        }
        sizes = next(iter(plan.values())).recipe.batch_sizes(labels)
        heads = {name: variant.create(channels, classes, seed) for name, variant in plan.items()}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator_seed(seed, "fit"))
            steps = [
                TrainStep(heads[name].to(memory_format=torch.channels_last), plan[name].recipe, device, classes)  # pyright: ignore
                for name in plan
            ]
            for epoch in range(epochs):
                for done, (x, targets) in enumerate(train_batches(few, sizes, seed, epoch, device)):
                    now = epoch + (done + 0.5) / len(sizes)
                    for step in steps:
                        step.set_learning_rates(now)
                        step.step(x, targets, now)
        found |= {name: 100 * float(evaluate(head, few).float().mean()) for name, head in heads.items()}
    return found


@dataclass
class Study:
    """Runs and their cache: accuracies by task, labels, variant and trial."""

    features: Features
    path: Path
    accuracies: Accuracies = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if self.path.exists():
            self.accuracies = json.loads(self.path.read_text("utf-8"))

    def run(self, tasks: Sequence[Task], counts: Sequence[int], trials: int, variants: Mapping[str, Variant]) -> None:
        """Run what is missing."""
        for trial in range(trials):
            for task in tasks:
                of_task = self.accuracies.setdefault(task.name, {str(count): {} for count in counts})
                missing = {
                    count: {
                        name: each for name, each in variants.items() if len(of_task[str(count)].get(name, [])) <= trial
                    }
                    for count in counts
                }
                if not any(missing.values()):
                    continue
                start = time.monotonic()
                dataset = self.features(task, trial)
                for count in counts:
                    found = train_heads(dataset, count, missing[count], seed=trial) if missing[count] else {}
                    for name, accuracy in found.items():
                        of_task[str(count)].setdefault(name, []).append(round(accuracy, 2))
                self.path.write_text(json.dumps(self.accuracies), "utf-8")
                print(f"trial {trial + 1} of {trials}, {task.name}: {time.monotonic() - start:.0f} s", flush=True)

    def mean(self, task: str, count: int, name: str, trials: int) -> float:
        return float(np.mean(self.accuracies[task][str(count)][name][:trials]))


def tune(features: Features, cache: Path, stages: Sequence[str]) -> dict[str, Any]:
    """Runs variants on the tuning tasks; mean accuracies, of each task and of all."""
    found: dict[str, Any] = {}
    for stage, variants in tuning_stages().items():
        if stages and stage not in stages:
            continue
        study = Study(features, cache / f"tuning-{stage}.json")
        study.run(TUNING, TUNING_COUNTS, TUNING_TRIALS, variants)
        rows: list[dict[str, Any]] = []
        for name in variants:
            cells = {
                f"{task.name}, {count}": study.mean(task.name, count, name, TUNING_TRIALS)
                for task in TUNING
                for count in TUNING_COUNTS
            }
            rows.append({"variant": name, "mean": round(float(np.mean(list(cells.values()))), 2), **cells})
        show(stage, rows)
        found[stage] = rows
    return found


def merged(files: Iterable[Path], tasks: Sequence[Task], counts: Sequence[int]) -> Accuracies:
    """What the runs of several processes found, for these tasks."""
    found: Accuracies = {task.name: {str(count): {} for count in counts} for task in tasks}
    for file in files:
        content: Accuracies = json.loads(file.read_text("utf-8"))
        for task in found.keys() & content.keys():
            for count in found[task]:
                found[task][count] |= content[task].get(count, {})
    return found


def complete(found: Accuracies, head: str, trials: int) -> bool:
    """Whether all trials of a head are there."""
    return all(len(runs.get(head, [])) >= trials for counts in found.values() for runs in counts.values())


def written(out: Path) -> dict[str, Any]:
    """What other parts of the study have written so far."""
    return json.loads(out.read_text("utf-8")) if out.exists() else {}


def compact(content: Any) -> str:
    """JSON with a list of numbers on one line."""
    text = json.dumps(content, indent=1, ensure_ascii=False)
    return re.sub(
        r"\[[^\[\]{}]*\]", lambda each: re.sub(r"\s+", " ", each[0]).replace("[ ", "[").replace(" ]", "]"), text
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--tune", nargs="*", metavar="STAGE", default=None, help="run the tuning tasks instead")
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=[task.name for task in REPORTED])
    parser.add_argument("--heads", nargs="*", choices=list(HEADS), default=list(HEADS), help="run these alone")
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--features", action="store_true", help="compute the features alone")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "moesaic-heads")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "heads.json")
    parser.add_argument("--more", action="store_true", help=f"run {MORE_COUNTS} labels on tasks with small objects")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.cache.mkdir(parents=True, exist_ok=True)
    counts, names = (MORE_COUNTS, MORE_TASKS) if options.more else (COUNTS, options.tasks)
    features = cached_features(options.data_dir, options.weights, options.cache, max(COUNTS[-1], counts[-1]))
    tasks = [TASKS[name] for name in names]
    if options.features:
        for trial in range(options.trials):
            for task in tasks:
                features(task, trial)
        return
    if options.tune is not None:
        tuned = tune(features, options.cache, options.tune)
        content = written(options.out)
        content["tuning"] = {**content.get("tuning", {}), **tuned}
    else:
        kind = "more" if options.more else "study"
        own = Study(features, options.cache / f"{kind}-{'+'.join(options.heads)}.json")
        own.run(tasks, counts, options.trials, {name: HEADS[name] for name in options.heads})
        found = merged(sorted(options.cache.glob(f"{kind}-*.json")), tasks, counts)
        missing = [name for name in HEADS if not complete(found, name, options.trials)]
        if missing:
            print(f"to be run for the verdicts: --heads {' '.join(map(repr, missing))}")
            return
        shares = {task.name: task.share for task in tasks}
        content, made = written(options.out), {"accuracies": found, **verdicts(found, shares)}
        if options.more:
            content["more"] = {"accuracies": found, "leads": made["leads"]}
        else:
            recipes = {name: variant.recipe.to_json() for name, variant in HEADS.items()}
            content |= {"machine": machine(), "recipes": recipes, "test images": TEST, "shares": shares, **made}
        show("routed against its peers, points over all label counts", made["leads"])
    options.out.write_text(compact(content) + "\n", "utf-8")


if __name__ == "__main__":
    main()
