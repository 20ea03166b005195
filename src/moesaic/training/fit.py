"""Train a network on images: `fit`.

The seed decides the order of the images, their augmentation and the random numbers of layers: on a CPU, two runs
with the same seed are bit-identical, and so is a run that was stopped anywhere and resumed. On a GPU they differ by
rounding errors, and what these grow to.

Images stay uint8 in memory and are prepared many batches at a time on the device; the host waits for the loss every
few seconds only. Networks and images are channels_last. On a GPU steps are replayed from CUDA graphs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from moesaic.argument_checks import check_device, check_positive
from moesaic.data.image_dataset import ImageDataset
from moesaic.layers.recording import routed_layers
from moesaic.models.deepmoe.network import DeepMoE
from moesaic.models.registry import ModelSpec
from moesaic.ops.graph_capture import CudaGraphs
from moesaic.training.backbone_features import check_features
from moesaic.training.batches import generator_seed
from moesaic.training.callbacks import BalanceLossCallback, Callback, CollapseCallback, RoutingCallback
from moesaic.training.checkpoint import load_weights
from moesaic.training.data_parallel import OneProcess, ParallelName, attached, check_parallel, create_parallel
from moesaic.training.fit_result import Diverged, Epoch, FitResult
from moesaic.training.gate_callback import GateCallback, GatesClosed
from moesaic.training.gate_training import resolve_gate_recipe
from moesaic.training.progress import NoProgress, Progress
from moesaic.training.ranks import local_device
from moesaic.training.recipe import Recipe
from moesaic.training.run_dir import RunDir, describe_run
from moesaic.training.saved_predictions import PredictionsCallback
from moesaic.training.snapshots import SnapshotCallback
from moesaic.training.step_graphs import DeviceGraphs, graph_obstacle, is_short
from moesaic.training.trackers import Tracker
from moesaic.training.trainable_layers import freeze_layers, frozen_parameters
from moesaic.training.trainer import Trainer, evaluate

__all__ = ["Diverged", "Epoch", "FitResult", "GatesClosed", "default_callbacks", "evaluate", "fit"]

_IMAGE_MEMORY = 0.5
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
    callbacks: Sequence[Callback] = (),
    collapse_alarm: bool = True,
    test_features: bool = False,
    parallel: ParallelName = "ddp",
    cuda_graph: bool | None = None,
) -> FitResult:
    """Train the model in place, and test it; the model moves to the device.

    With ``out``, the folder gets config.json, metrics.jsonl with a line for each epoch, model.safetensors,
    predictions.safetensors with those of the last test, and result.json in the end. The same call resumes an
    interrupted run from its last checkpoint, whatever the model's weights are, and returns the result of a complete
    one.

    In a process that ``torchrun`` has started, or that has a process group, all ranks train one model, with the result
    of one process: every rank calls ``fit`` with the same arguments, and computes its part of every batch. The first
    rank writes the folder and reports progress, and all return the result.

    Args:
        model: a network from images (B, C, H, W) to logits (B, classes), with its initial weights. In the end it is
            in eval mode and has the weights that were tested: their EMA where the recipe asks for one.
        dataset: the images to train and to test on. Where it has the features of the model's backbone
            (`add_features`), ``Recipe(trainable="head")`` trains on these, in a fraction of the time; the final test
            runs the whole network on the images.
        recipe: the hyperparameters.
        seed: of all random numbers apart from the initial weights.
        device: where to compute.
        out: the folder of the run.
        spec: how the model was made, for the checkpoint: `load_checkpoint` needs it to build the model.
        progress: gets a line for each epoch, and the loss every few seconds; epochs that need not be trained are
            skipped.
        trackers: get the metrics of each epoch; see `create_tracker`.
        eval_every: epochs from one test to the next; the last epoch is always tested.
        checkpoint_seconds: seconds from one checkpoint to the next; the first one follows the first epoch. They are
            written at the end of an epoch, or within it after every hundred batches.
        teacher: a trained network for the same images, from which a network with channel gates is distilled with
            the weight ``recipe.gates.distill_weight``. It moves to the device and to eval mode.
        callbacks: your own callbacks, called after those of `default_callbacks`. Their state is saved with the
            checkpoints.
        collapse_alarm: whether to report experts that collapse, and to record the mean routing of each epoch.
        test_features: whether the final test may use features as well, where training does: many short runs on one
            backbone then never run it.
        parallel: on several ranks, ``"ddp"``: every rank has all weights; ``"fsdp"``: every rank has a part of the
            weights, gradients and optimizer states (``fully_shard``), and the model itself stays where it is;
            ``"none"``: every rank trains on its own.
        cuda_graph: whether steps are recorded in CUDA graphs and replayed from them; None: on a GPU, in runs of 50
            steps or more. A step that cannot be replayed runs eagerly, and ``progress`` says why.

    >>> from moesaic.data.image_dataset import LabelledImages, Normalize
    >>> bright, scale = torch.arange(64) % 2, Normalize((0.5,), (0.3,))
    >>> pixels = (100 * torch.rand(64, 1, 8, 8) + 100 * bright[:, None, None, None]).to(torch.uint8)
    >>> images = LabelledImages(pixels, bright, bright)
    >>> dataset = ImageDataset(images, images, ("dark", "bright"), ("dark", "bright"), scale, scale)
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    >>> fit(model, dataset, Recipe(epochs=5, batch_size=16, lr=0.01)).accuracy
    100.0

    A callback of your own:

    >>> from moesaic.training import Callback
    >>> class StepCounter(Callback):
    ...     steps = 0
    ...     def on_step_end(self, trainer, epoch, loss):
    ...         self.steps += 1
    ...     def on_epoch_end(self, trainer):
    ...         return {"steps": self.steps}
    ...     def state_dict(self):
    ...         return {"steps": self.steps}
    ...     def load_state_dict(self, state):
    ...         self.steps = state["steps"]
    >>> result = fit(model, dataset, Recipe(epochs=2, batch_size=16), callbacks=[StepCounter()])
    >>> [epoch.metrics["steps"] for epoch in result.epochs]
    [4, 8]
    """
    check_positive("fit", eval_every=eval_every)
    device = check_device("fit", device)
    _check_images(dataset)
    shared = create_parallel(parallel, device := local_device(device))
    if shared.ranks is not None:
        check_parallel(recipe, parallel, shared.ranks.size)
        if not shared.ranks.is_first:
            progress, trackers = None, ()
    progress = progress or NoProgress()
    recipe = resolve_gate_recipe(model, recipe)
    _check_teacher(recipe, teacher)
    frozen_parameters(model, recipe.trainable)  # refuses what the network cannot freeze
    if dataset.backbone and recipe.trainable == "head":
        check_features(dataset, model)
    options: dict[str, Any] = {"teacher": teacher, "collapse_alarm": collapse_alarm}
    more = [*([] if out is None else [PredictionsCallback()]), *callbacks]
    _check_names([*default_callbacks(model, recipe, **options), *more])
    config = describe_run(model, dataset, recipe, seed, device, spec, eval_every)
    named = [callback.name for callback in callbacks if not isinstance(callback, SnapshotCallback)]
    if named:  # snapshots change nothing: a run may be continued with others
        config["callbacks"] = named
    if teacher is not None:
        config["teacher"] = _fingerprint(teacher)
        OneProcess().place(teacher.eval(), device)
    if shared.ranks is not None:
        shared.ranks.check_same({name: value for name, value in config.items() if name not in ("device", "threads")})
        config["ranks"] = {"count": shared.ranks.size, "parallel": parallel}
    with ExitStack() as stack:
        run_dir = None if out is None else stack.enter_context(closing(RunDir(Path(out), config, shared.ranks)))
        shared.place(model, device)
        complete = None if run_dir is None else _load_complete(run_dir, model, shared)
        if complete is not None:
            progress.skip(recipe.epochs)
            return complete
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for tracker in trackers:
                tracker.begin(config)
                stack.callback(tracker.end)  # also after an error
            torch.manual_seed(generator_seed(seed, "fit"))
            trained = stack.enter_context(attached(model, shared))
            stack.enter_context(freeze_layers(trained, recipe.trainable))
            all_callbacks = [*default_callbacks(trained, recipe, **options), *more]
            obstacle = graph_obstacle(recipe, device, all_callbacks, 1 if shared.ranks is None else shared.ranks.size)
            trainer = Trainer(
                trained,
                _placed(dataset, device),
                recipe,
                seed,
                device,
                run_dir,
                spec,
                progress,
                trackers,
                eval_every,
                checkpoint_seconds,
                all_callbacks,
                test_features,
                shared,
                _graphs(cuda_graph, device, obstacle, is_short(recipe, len(dataset.train)), progress),
            )
            return trainer.train()


def default_callbacks(
    model: nn.Module, recipe: Recipe, *, teacher: nn.Module | None = None, collapse_alarm: bool = True
) -> list[Callback]:
    """Returns the callbacks that a model needs: of channel gates, or of routed layers.

    >>> from moesaic import create_model
    >>> model = create_model("wrn10_1_pmoe", num_classes=2)
    >>> [callback.name for callback in default_callbacks(model, Recipe(epochs=1))]
    ['CollapseCallback', 'RoutingCallback']
    """
    if isinstance(model, DeepMoE):
        return [GateCallback(model, teacher)]  # no alarm: closing channels for good is what is wanted
    callbacks: list[Callback] = []
    if not routed_layers(model):
        return callbacks
    if recipe.balance_weight:
        callbacks.append(BalanceLossCallback())
    if collapse_alarm and not recipe.compile:  # a routing hook breaks the compiled graph
        callbacks += [CollapseCallback(), RoutingCallback()]
    return callbacks


def _load_complete(run_dir: RunDir, model: nn.Module, parallel: OneProcess) -> FitResult | None:
    """Returns the result of a complete run, whose weights the model then has in eval mode; else None."""
    complete = run_dir.read_result()
    if complete is None:
        return None
    if run_dir.writes:
        load_weights(run_dir.network, model)
    if parallel.ranks is not None:
        parallel.ranks.copy_first(model)
    model.eval()
    return complete


def _graphs(
    asked: bool | None, device: torch.device, obstacle: str, short: bool, progress: Progress
) -> DeviceGraphs | None:
    """Returns the graphs of steps, or None if they run eagerly; where a user may expect graphs, a message says why."""
    if asked is False or (asked is None and (device.type != "cuda" or short)):
        return None
    if obstacle:
        progress.log(f"training runs in eager mode, without CUDA graphs: {obstacle}")
        return None
    return CudaGraphs(device)


def _check_images(dataset: ImageDataset) -> None:
    if not len(dataset.train) or not len(dataset.test):
        raise ValueError(
            f"fit: {len(dataset.train)} training images and {len(dataset.test)} test images; use at least one of each"
        )


def _check_names(callbacks: Sequence[Callback]) -> None:
    names = [callback.name for callback in callbacks]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise ValueError(
            f"fit: two callbacks have the name {twice!r}, under which their state is saved; override `name` of one"
        )


def _check_teacher(recipe: Recipe, teacher: nn.Module | None) -> None:
    """A recipe and its caller must agree on whether there is a teacher."""
    weight = 0.0 if recipe.gates is None else recipe.gates.distill_weight
    if (teacher is None) == (weight == 0):
        return
    if teacher is None:
        raise ValueError(f"fit: distill_weight={weight}, but there is no teacher; give one, or use distill_weight=0")
    raise ValueError(
        "fit: a teacher is given, but the recipe does not weigh it; use gates=GateRecipe(distill_weight=1.0), "
        "which is for networks with channel gates, or leave the teacher out"
    )


def _fingerprint(teacher: nn.Module) -> dict[str, str]:
    """Identifies a teacher by its weights."""
    digest = hashlib.sha256()
    for tensor in cast("Mapping[str, Tensor]", teacher.state_dict()).values():
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return {"class": type(teacher).__name__, "weights": digest.hexdigest()[:16]}


def _placed(dataset: ImageDataset, device: torch.device) -> ImageDataset:
    """The dataset with its images on the device, where they leave memory enough for the network."""
    if device.type == "cuda":
        splits = (dataset.train, dataset.test)
        tensors = [tensor for images in splits for tensor in (images.pixels, images.features)]
        size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        if size > _IMAGE_MEMORY * torch.cuda.mem_get_info(device)[0]:
            return dataset
    return dataset.to(device)
