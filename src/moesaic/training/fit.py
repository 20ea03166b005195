"""Train a network on images: `fit`.

The seed decides the order of the images, how each is varied and what layers draw: on a CPU, two runs of a seed are
the same to the last bit, and so is a run that was stopped anywhere and called again. On a GPU they differ by
rounding, and what rounding grows to.

Images stay bytes where they lie, are prepared many batches at a time on the device, and the host looks at the
loss every few seconds only. Networks and images are channels_last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from moesaic.checks import check_positive
from moesaic.data.datasets import ImageDataset
from moesaic.models.registry import ModelSpec
from moesaic.training.batches import generator_seed
from moesaic.training.checkpoint import load_weights
from moesaic.training.gates import check_gate_recipe
from moesaic.training.progress import NoProgress, Progress
from moesaic.training.recipe import Recipe
from moesaic.training.results import Epoch, FitResult
from moesaic.training.run_dir import RunDir, describe_run
from moesaic.training.thread_pool import check_device
from moesaic.training.trackers import Tracker
from moesaic.training.trainer import Diverged, GatesClosed, Trainer, evaluate

__all__ = ["Diverged", "Epoch", "FitResult", "GatesClosed", "evaluate", "fit"]

_HELD = 0.5
"""The share of a GPU's free memory that the images may take; larger ones stay where they are."""


def fit(
    model: nn.Module,
    dataset: ImageDataset,
    recipe: Recipe,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    out: Path | None = None,
    spec: ModelSpec | None = None,
    progress: Progress | None = None,
    trackers: Sequence[Tracker] = (),
    eval_every: int = 1,
    checkpoint_seconds: float = 30.0,
    teacher: nn.Module | None = None,
) -> FitResult:
    """Train the model in place, which moves to the device; what every epoch came to, and the test at the end.

    With ``out``, the folder gets config.json, metrics.jsonl with a line for each epoch, model.safetensors, and
    result.json when all is done. The same call continues what was stopped there, and gives the result of what was
    complete; what the model's weights were before does not count then.

    Args:
        model: a network from images (B, C, H, W) to (B, classes), with its initial weights. In the end it is in
            eval mode and has the weights that were tested, their running mean where the recipe asks for one.
        dataset: what to learn, and from what.
        recipe: how.
        seed: of everything random but the initial weights.
        device: where to compute.
        out: the folder of the run.
        spec: how the model was made, for the checkpoint: without it, `load_checkpoint` cannot make it again.
        progress: is told of each epoch, and of the loss every few seconds; where training stops early it is told
            that the epochs left are done.
        trackers: are told of each epoch as well; see `create_tracker`.
        eval_every: epochs from one test to the next; there is always one at the end.
        checkpoint_seconds: time from one checkpoint to the next, the first of which is after the first epoch. They
            are written at the end of an epoch, or within it after every hundred batches.
        teacher: a trained network for the same images, whose answers one with channel gates learns from, as much as
            ``recipe.gates.distil`` says. It moves to the device and to eval mode.

    >>> from moesaic.data.datasets import LabelledImages, Normalize
    >>> bright, scale = torch.arange(64) % 2, Normalize((0.5,), (0.3,))
    >>> pixels = (100 * torch.rand(64, 1, 8, 8) + 100 * bright[:, None, None, None]).to(torch.uint8)
    >>> images = LabelledImages(pixels, bright, bright)
    >>> dataset = ImageDataset(images, images, ("dark", "bright"), ("dark", "bright"), scale, scale)
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    >>> fit(model, dataset, Recipe(epochs=5, batch=16, learning_rate=0.01)).accuracy
    100.0
    """
    check_positive("fit", eval_every=eval_every)
    device = check_device("fit", device)
    if not len(dataset.train) or not len(dataset.test):
        raise ValueError(
            f"fit: {len(dataset.train)} training images and {len(dataset.test)} test images; use at least one of each"
        )
    progress = progress or NoProgress()
    recipe = check_gate_recipe(model, recipe)
    config = describe_run(model, dataset, recipe, seed, device, spec, eval_every)
    _check_teacher(recipe, teacher)
    if teacher is not None:
        config["teacher"] = _sketch(teacher)
        teacher.to(device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] # torch types it in part
        teacher.eval()
    with ExitStack() as until_the_end:
        folder = None if out is None else until_the_end.enter_context(closing(RunDir(Path(out), config)))
        model.to(device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] # torch types it in part
        complete = None if folder is None else folder.read_result()
        if folder is not None and complete is not None:
            load_weights(folder.network, model)
            model.eval()
            progress.skip(recipe.epochs)
            return FitResult.from_json(complete)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), _told(trackers, config):
            torch.manual_seed(generator_seed(seed, "fit"))
            run = Trainer(
                model,
                _placed(dataset, device),
                recipe,
                seed,
                device,
                folder,
                spec,
                progress,
                trackers,
                eval_every,
                checkpoint_seconds,
                teacher,
            )
            return run.train()


def _check_teacher(recipe: Recipe, teacher: nn.Module | None) -> None:
    """A recipe and its caller must agree on whether there is a teacher."""
    weight = 0.0 if recipe.gates is None else recipe.gates.distil
    if (teacher is None) == (weight == 0):
        return
    if teacher is None:
        raise ValueError(f"fit: distil={weight}, but there is no teacher to learn from; give one, or use distil=0")
    raise ValueError(
        "fit: a teacher is given, but the recipe does not say how much it counts; use gates=GateRecipe(distil=1.0), "
        "which is for networks with channel gates, or leave the teacher out"
    )


def _sketch(teacher: nn.Module) -> dict[str, str]:
    """Tells teachers apart, by their weights."""
    known = hashlib.sha256()
    for tensor in cast("Mapping[str, Tensor]", teacher.state_dict()).values():
        known.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return {"class": type(teacher).__name__, "weights": known.hexdigest()[:16]}


@contextmanager
def _told(trackers: Sequence[Tracker], config: Mapping[str, Any]) -> Generator[None]:
    """Inside, trackers are told of a run; they are told when it ends, however it does."""
    with ExitStack() as ends:
        for tracker in trackers:
            tracker.begin(config)
            ends.callback(tracker.end)
        yield


def _placed(dataset: ImageDataset, device: torch.device) -> ImageDataset:
    """The dataset with its images on the device, where they leave room enough for the network."""
    if device.type == "cuda":
        size = dataset.train.pixels.nbytes + dataset.test.pixels.nbytes
        if size > _HELD * torch.cuda.mem_get_info(device)[0]:
            return dataset
    return dataset.to(device)
