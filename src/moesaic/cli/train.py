"""`moesaic train`: a network for one's own images."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from tyro.conf import Positional, UseAppendAction, arg

from moesaic.checks import check_choice, check_positive
from moesaic.cli.shared import (
    CommandError,
    file_name,
    load_task,
    log,
    make_folder,
    program,
    resolve_device,
    user_errors,
)

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn

    from moesaic.data.datasets import ImageDataset
    from moesaic.models.model_cost import ModelCost
    from moesaic.models.registry import ModelSpec
    from moesaic.training.fit import FitResult
    from moesaic.training.recipe import Recipe

__all__ = ["Train"]

_LISTED = 20
"""Classes that are listed one by one; of more, the worst."""


@dataclass(frozen=True)
class Train:
    """Train a network on images, and say how well it does.

    The network, its metrics and what it was made with go to --out. The same command continues an interrupted run,
    to the same numbers as if it had not been.
    """

    data: Positional[Annotated[str, arg(metavar="DATA")]]
    """A folder of images with a folder for each class, a zip file of one, or a name such as cifar10."""
    model: Annotated[str, arg(metavar="NAME")] = "wrn10_2_pmoe"
    """A network: wrn10_2, wrn10_10_pmoe, vgg16_deepmoe and the like, or timm/resnet18 where timm is installed."""
    samples: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all)")] = None
    """Images to train with, drawn by --seed, with every class in its share."""
    epochs: int = 50
    """How often the network sees each image."""
    batch: int = 32
    """Images in a step, at most."""
    learning_rate: Annotated[float | None, arg(metavar="RATE", help_behavior_hint="(default: the optimizer's)")] = None
    """At its peak."""
    optimizer: Annotated[str, arg(metavar="adamw|sgd|normalized_gd")] = "adamw"
    """normalized_gd: each expert moves by steps of one length, all else by SGD."""
    schedule: Annotated[str, arg(metavar="cosine|step|constant")] = "cosine"
    """How the learning rate falls."""
    warmup: Annotated[float | None, arg(metavar="EPOCHS", help_behavior_hint="(default: a twentieth)")] = None
    """In which the learning rate grows from 0 to its peak."""
    weight_decay: Annotated[float | None, arg(metavar="RATE", help_behavior_hint="(default: the optimizer's)")] = None
    """How much weights shrink."""
    ema: Annotated[float | None, arg(metavar="SHARE", help_behavior_hint="(default: none)")] = None
    """Test and keep a running mean of the weights, of which this share stays at each step: 0.999, say."""
    clip: Annotated[float | None, arg(metavar="NORM", help_behavior_hint="(default: none)")] = None
    """The largest norm that a gradient may have."""
    accumulate: int = 1
    """Parts in which a batch is computed, one after the other: less memory."""
    label_smoothing: float = 0.0
    """The share of a label that is given to all classes."""
    stop_at_zero_error: bool = False
    """Stop after an epoch in which every image was classified right as it was trained on."""
    precision: Annotated[str, arg(metavar="auto|float32|bfloat16|float16")] = "auto"
    """In which products are computed; auto: bfloat16 on a GPU that has it, else float32."""
    compile: bool = False
    """Compile the network first, which takes a minute and saves time in long runs."""
    fidelity: Annotated[str | None, arg(metavar="best|released|print", help_behavior_hint="(default: best)")] = None
    """For wide residual networks: ours, as the paper's authors released it, or as it is printed."""
    experts: Annotated[int | None, arg(metavar="E", help_behavior_hint="(default: the network's)")] = None
    """How many experts a mixture has."""
    patches_per_expert: Annotated[int | None, arg(metavar="L", help_behavior_hint="(default: the network's)")] = None
    """How many patches of an image each expert takes."""
    patch_size: Annotated[int | None, arg(metavar="PIXELS", help_behavior_hint="(default: the network's)")] = None
    """The side of a patch on the map that is routed."""
    convert: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="LAYER")] = ()
    """Make a mixture of this convolution of the network, such as layer4.1.conv2 of timm/resnet18; may be repeated."""
    target_macs: Annotated[float | None, arg(metavar="SHARE", help_behavior_hint="(default: none)")] = None
    """For networks with channel gates, such as vgg16_deepmoe: what an image may cost on average, as a share of the
    multiply-adds of the network without gates: 0.5, say."""
    gate_strength: Annotated[float | None, arg(metavar="RATE", help_behavior_hint="(default: 0.1)")] = None
    """How hard channel gates are pressed to close (λ); with --target-macs, where it begins."""
    joint_share: Annotated[float | None, arg(metavar="SHARE", help_behavior_hint="(default: 0.6)")] = None
    """The share of the epochs in which channel gates learn, before they are frozen."""
    augment: Annotated[str, arg(metavar="none|flip|flip-crop")] = "none"
    """How images to train on are varied: not at all, mirrored at random, or mirrored and shifted."""
    size: Annotated[int | None, arg(metavar="PIXELS", help_behavior_hint="(default: that of the set, else 64)")] = None
    """The side that images are brought to."""
    data_dir: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: none)")] = None
    """Where the files of a set that is given by name lie."""
    cache_dir: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: that of the user)")] = None
    """Where decoded images are kept."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: runs/train-DATA-MODEL)")] = None
    """Where the network and its metrics go."""
    eval_every: Annotated[
        int | None, arg(metavar="EPOCHS", help_behavior_hint="(default: so that it takes little)")
    ] = None
    """Epochs from one test to the next; there is always one at the end."""
    track: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="tensorboard|wandb|trackio")] = ()
    """Send metrics there as well; needs moesaic[track]."""
    device: Annotated[str, arg(metavar="auto|cpu|cuda")] = "auto"
    """Where to compute; auto: on a GPU if there is one."""
    seed: int = 0
    """Decides the images of --samples, the initial weights and the order of the images."""

    def run(self, given: Sequence[str]) -> int:
        """Do it; ``given`` are the words of the command, to be repeated where the user is told how to continue."""
        from rich.console import Console

        with user_errors("train"):
            recipe, device = self._checked()
            dataset = self._load()
            spec, cost = self._network(dataset)
            out = self.out or Path("runs") / f"train-{file_name(dataset.name)}-{file_name(self.model)}"
            make_folder(out)
        try:
            found = self._train(dataset, spec, recipe, device, out)
        except KeyboardInterrupt:
            again = shlex.join([*program(), *given])
            if (out / "model.safetensors").exists():
                log(f"\nInterrupted. The last checkpoint is kept in {out}. To continue:\n  {again}")
            else:
                log(f"\nInterrupted before the first checkpoint. To begin again:\n  {again}")
            return 130
        _show(Console(), dataset, spec, cost, found, out)
        return 0

    def _checked(self) -> tuple[Recipe, str]:
        """What can be looked at before there are images."""
        from moesaic.training.gate_recipe import GateRecipe
        from moesaic.training.recipe import OPTIMIZER_DEFAULTS, Recipe

        usual = OPTIMIZER_DEFAULTS[
            cast("Any", check_choice("train", "--optimizer", self.optimizer, OPTIMIZER_DEFAULTS))
        ]
        words: dict[str, Any] = {"optimizer": self.optimizer, "schedule": self.schedule, "precision": self.precision}
        recipe = Recipe(
            epochs=self.epochs,
            batch=self.batch,
            learning_rate=usual.learning_rate if self.learning_rate is None else self.learning_rate,
            warmup=self.warmup,
            weight_decay=usual.weight_decay if self.weight_decay is None else self.weight_decay,
            ema=self.ema,
            clip=self.clip,
            accumulate=self.accumulate,
            label_smoothing=self.label_smoothing,
            stop_at_zero_error=self.stop_at_zero_error,
            compile=self.compile,
            gates=GateRecipe(**self._gates()) if self._gates() else None,
            **words,
        )
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"train: --seed={self.seed}; it must be from 0 to 2⁶³ − 1")
        if self.eval_every is not None:
            check_positive("train", eval_every=self.eval_every)
        if self.convert and self.experts is None:
            raise ValueError("train: --convert needs --experts, the number of experts to make of the layer")
        return recipe, resolve_device("train", self.device)

    def _gates(self) -> dict[str, Any]:
        """What was said of channel gates."""
        said = {"target_macs": self.target_macs, "strength": self.gate_strength, "joint": self.joint_share}
        return {name: value for name, value in said.items() if value is not None}

    def _load(self) -> ImageDataset:
        dataset = load_task(self)
        return dataset if self.samples is None else dataset.subset(self.samples, self.seed)

    def _network(self, dataset: ImageDataset) -> tuple[ModelSpec, ModelCost]:
        from moesaic.training.model_for_dataset import spec_for_dataset

        asked = {"patches_per_expert": self.patches_per_expert, "patch_size": self.patch_size}
        mixture = {name: value for name, value in {"experts": self.experts, **asked}.items() if value is not None}
        options: dict[str, Any] = {} if self.fidelity is None else {"fidelity": self.fidelity}
        if not self.convert:
            return spec_for_dataset(self.model, dataset, {**options, **mixture})
        conversion = {"layer": list(self.convert), "seed": self.seed, **mixture}
        return spec_for_dataset(self.model, dataset, options, conversion)

    def _train(self, dataset: ImageDataset, spec: ModelSpec, recipe: Recipe, device: str, out: Path) -> FitResult:
        import torch
        from rich.console import Console

        from moesaic import report
        from moesaic.training.checkpoint import CheckpointError
        from moesaic.training.fit import Diverged, fit
        from moesaic.training.gates import check_gate_recipe
        from moesaic.training.trackers import create_tracker
        from moesaic.training.train_step import CompileError

        try:
            trackers = [create_tracker(name, out) for name in self.track]
        except (ImportError, ValueError) as error:
            raise CommandError(f"moesaic train: --track: {error}") from error
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = spec.build()
        with user_errors("train"):
            _check_gated(self.model, model, self._gates())
            check_gate_recipe(model, recipe)
        try:
            with report.watch_progress(Console(stderr=True)) as progress:
                progress.begin(f"{self.model}, {len(dataset.train)} images", recipe.epochs)
                found = fit(
                    model,
                    dataset,
                    recipe,
                    seed=self.seed,
                    device=device,
                    out=out,
                    spec=spec,
                    progress=progress,
                    trackers=trackers,
                    eval_every=self.eval_every or _seldom(dataset),
                )
                progress.end()
        except torch.OutOfMemoryError as error:
            raise CommandError(
                f"moesaic train: {device} has too little memory for batches of {self.batch}; use a smaller --batch, or "
                "--accumulate 2, which computes each in two parts"
            ) from error
        except (CheckpointError, Diverged, CompileError, OSError) as error:
            message = " ".join(str(error).split())
            raise CommandError(f"moesaic train: {message.removeprefix('fit: ')}") from error
        return found


def _show(
    console: Console, dataset: ImageDataset, spec: ModelSpec, cost: ModelCost, found: FitResult, out: Path
) -> None:
    """How well it does, on what, for what, and what to do next."""

    def say(line: str = "") -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    often = 100 * int(dataset.test.labels.bincount().max()) / len(dataset.test)
    ended = "" if found.stopped == "all epochs" else f" ({found.stopped})"
    say(
        f"{spec.name} on {dataset.name}: {len(dataset.train)} images to train on, {len(found.epochs)} epochs{ended} in "
        f"{found.seconds:,.0f} s, {found.images / max(found.seconds, 1e-9):,.0f} images/s"
    )
    say(
        f"Test accuracy: {found.accuracy:.1f} % of {len(dataset.test)} images; always naming the most frequent class "
        f"would give {often:.1f} %"
    )
    _show_groups(console, "class", dataset.class_names, dataset.test.labels, found.class_accuracy)
    if dataset.cluster_names != dataset.class_names:
        _show_groups(console, "group", dataset.cluster_names, dataset.test.clusters, found.cluster_accuracy)
    say()
    say(_cost(cost) if found.cost is None else _gated_cost(cost, found.cost))
    for epoch in found.epochs:
        for alarm in epoch.alarms:
            say(f"note: in epoch {epoch.number}: {alarm}")
    here = shlex.quote(str(out))
    say(f"\nNetwork: {out / 'model.safetensors'}\nNext:")
    if cost.routed_parameters:
        shown = "what its experts look at" if found.cost is None else "which channels images open"
        say(f"  moesaic explain {here} IMAGE…      # {shown}")
    say(f"  moesaic export {here} --format onnx  # one file for a server")


def _show_groups(
    console: Console, kind: str, names: Sequence[str], groups: Tensor, accuracies: Sequence[float]
) -> None:
    """A table of accuracies; of many, the worst."""
    from rich.table import Table
    from rich.text import Text

    counts = [int((groups == group).sum()) for group in range(len(names))]
    rows = [row for row in zip(names, counts, accuracies, strict=True) if row[1]]
    if len(rows) > _LISTED:
        several = "classes" if kind == "class" else f"{kind}s"
        console.print(f"The worst {_LISTED // 2} of {len(rows)} {several}:", highlight=False)
        rows = sorted(rows, key=lambda row: row[2])[: _LISTED // 2]
    table = Table(kind, "test images", "accuracy", box=None, pad_edge=False, header_style="bright_black")
    table.columns[1].justify = table.columns[2].justify = "right"
    for name, count, accuracy in rows:
        table.add_row(Text(name), f"{count}", f"{accuracy:.1f} %")
    console.print(table)


def _cost(cost: ModelCost) -> str:
    parameters = f"{cost.parameters:,} parameters"
    work = f"{_short(cost.macs)} multiply-adds for an image"
    if not cost.routed_parameters:
        return f"{parameters}, {work}"
    share, part = 100 * cost.routed_parameters / cost.parameters, 100 * cost.routed_macs / cost.macs
    saved = 100 * cost.routed_macs / max(cost.routed_dense_macs, 1)
    return (
        f"{parameters}, {share:.1f} % of them in the mixture; {work}, {part:.1f} % of them in the mixture, which takes "
        f"{saved:.1f} % of what its experts would take on all patches"
    )


def _check_gated(name: str, model: nn.Module, said: Mapping[str, Any]) -> None:
    """Refuse options of channel gates for a network without."""
    from moesaic.models.deepmoe.network import DeepMoE
    from moesaic.models.registry import list_models

    if said and not isinstance(model, DeepMoE):
        options = {"target_macs": "--target-macs", "strength": "--gate-strength", "joint": "--joint-share"}
        own = f"{name}_deepmoe"
        instead = own if own in list_models() else "vgg16_deepmoe"
        raise ValueError(
            f"train: {options[next(iter(said))]} is for networks with channel gates, and {name} has none; leave it "
            f"out, or use --model {instead}"
        )


def _gated_cost(cost: ModelCost, share: float) -> str:
    return (
        f"{cost.parameters:,} parameters; {_short(round(share * cost.dense_macs))} multiply-adds for a test image on "
        f"average, {100 * share:.1f} % of the {_short(cost.dense_macs)} without gates"
    )


def _seldom(dataset: ImageDataset) -> int:
    """Epochs from one test to the next, so that all tests take about a quarter as long as training.

    A test needs no gradients: an image takes a third as long in it.
    """
    return -(-4 * len(dataset.test) // (3 * len(dataset.train)))


def _short(number: int) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
