"""`moesaic train`: train a network on your own images."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from tyro.conf import UseAppendAction, arg

from moesaic import torchrun_env
from moesaic.argument_checks import check_choice, check_positive
from moesaic.cli.faults import escaped
from moesaic.cli.shared import (
    CommandError,
    DataArgument,
    DatasetOptions,
    TrainableOption,
    check_folder,
    file_name,
    invocation,
    log,
    make_folder,
    normalized,
    resolve_device,
    user_errors,
)

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn

    from moesaic.data.image_dataset import ImageDataset
    from moesaic.models.conversion_receipt import ConversionReceipt
    from moesaic.models.model_cost import ModelCost
    from moesaic.models.pretrained import PretrainedConfig
    from moesaic.models.registry import ModelSpec
    from moesaic.training.fit import FitResult
    from moesaic.training.recipe import Recipe

__all__ = ["Train"]

_OF_CONVERT = ("init", "tokens_per_expert", "capacity", "top_k")
"""Options that a conversion alone has."""
_EXPERTS = 8
"""Of converted layers."""
_COMPARED = 4
"""Test images on which a converted network is compared with the original."""
_FEW_IMAGES = 1000
"""With fewer to train on, a pretrained network usually reaches more than one from scratch."""
_GOOD_ACCURACY = 90.0
"""In percent: networks that reach it need no such advice."""
_LISTED = 20
"""Classes that are listed one by one; of more, the worst."""


@dataclass(frozen=True)
class _TrainOptions(DataArgument):
    """The most used options first."""

    model: Annotated[str, arg(metavar="NAME")] = "wrn10_2_pmoe"
    """Network, such as wrn10_2_pmoe; options follow colons: timm/resnet18:convert=layer4.1.conv2:experts=8."""
    pretrained: bool = False
    """Start with timm's pretrained weights, downloaded from the hub."""
    weights: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: none)")] = None
    """File of pretrained weights: safetensors, or what torch.load(weights_only=True) reads."""
    head: Annotated[
        str | None, arg(metavar="routed|attention|mean|max", help_behavior_hint="(default: the network's)")
    ] = None
    """Head on the last feature map; routed: experts select positions of the map (--experts, --patches-per-expert)."""
    epochs: int = 50
    """Passes over the training images."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: runs/train-DATA-MODEL)")] = None
    """Output folder of the network and its metrics."""
    samples: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all)")] = None
    """Number of training images, sampled by --seed in the proportions of the classes."""
    batch_size: int = 32
    """Samples per step."""
    lr: Annotated[float | None, arg(metavar="LR", help_behavior_hint="(default: the optimizer's)")] = None
    """Peak learning rate. Fine-tuning divides the optimizer's default by 10; each head has a default of its own."""
    trainable: TrainableOption = None
    """Layers to train: all, the head alone, or the head and the N layers before it; all others are frozen."""
    layer_decay: Annotated[float | None, arg(metavar="FACTOR", help_behavior_hint="(default: none)")] = None
    """Layer-wise learning-rate decay: each layer has FACTOR times the rate of the layer after it."""
    optimizer: Annotated[str, arg(metavar="adamw|sgd|normalized_gd")] = "adamw"
    """Optimizer; normalized_gd: steps of equal length for each expert, SGD for all other weights."""
    schedule: Annotated[str, arg(metavar="cosine|step|constant")] = "cosine"
    """Learning-rate schedule."""
    warmup_epochs: Annotated[float | None, arg(metavar="N", help_behavior_hint="(default: a twentieth)")] = None
    """Epochs of linear learning-rate warmup."""
    weight_decay: Annotated[float | None, arg(metavar="WD", help_behavior_hint="(default: the optimizer's)")] = None
    """Weight decay."""
    ema_decay: Annotated[float | None, arg(metavar="DECAY", help_behavior_hint="(default: no EMA)")] = None
    """EMA decay of the weights, such as 0.999; the averaged weights are tested and saved."""
    clip_grad: Annotated[
        float | None, arg(metavar="NORM", aliases=["--grad-clip"], help_behavior_hint="(default: no clipping)")
    ] = None
    """Maximum gradient norm."""
    grad_accum: int = 1
    """Gradient accumulation steps."""
    label_smoothing: float = 0.0
    """Label smoothing."""
    stop_at_zero_error: bool = False
    """Stop after an epoch in which every training image was classified correctly."""
    precision: Annotated[str, arg(metavar="auto|float32|bfloat16|float16")] = "auto"
    """Precision of matmuls and convolutions; auto: bfloat16 on a GPU that supports it, else float32."""
    compile: bool = False
    """Compile the network with torch.compile, which takes a minute and saves time in long runs."""
    cuda_graph: bool = True
    """On a GPU, record training steps in CUDA graphs, which takes seconds and saves time in runs of many steps."""
    fidelity: Annotated[str | None, arg(metavar="best|released|print", help_behavior_hint="(default: best)")] = None
    """Variant of a wide residual network: ours, the authors' released code, or the paper as printed."""
    experts: Annotated[
        int | None, arg(metavar="E", help_behavior_hint="(default: the network's, 8 with --convert)")
    ] = None
    """Number of experts."""
    patches_per_expert: Annotated[int | None, arg(metavar="L", help_behavior_hint="(default: the network's)")] = None
    """Number of patches of an image that each expert selects."""
    patch_size: Annotated[int | None, arg(metavar="PIXELS", help_behavior_hint="(default: the network's)")] = None
    """Side of a patch on the feature map that is routed."""
    router: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: expert-choice)")] = None
    """Router: expert-choice, token-choice, soft, or module:Class of your own, which is imported."""
    convert: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="LAYER")] = ()
    """Convolutions or MLPs to convert into mixtures of experts: layer4.1.conv2, 'blocks.*.mlp', last-2; repeatable."""
    init: Annotated[str | None, arg(metavar="scratch|upcycle|split", help_behavior_hint="(default: scratch)")] = None
    """With --convert, initial weights of the experts: random, copies of the layer, or parts of the MLP."""
    tokens_per_expert: Annotated[int | None, arg(metavar="L", help_behavior_hint="(default: by --capacity)")] = None
    """With --convert of MLPs, number of tokens of an image that each expert selects."""
    capacity: Annotated[float | None, arg(metavar="FACTOR", help_behavior_hint="(default: 1)")] = None
    """With --convert of MLPs, tokens per expert as a multiple of all tokens divided by the number of experts."""
    top_k: Annotated[int | None, arg(metavar="K", help_behavior_hint="(default: 2)")] = None
    """With --convert of MLPs and --router token-choice, number of experts of each token."""
    target_macs: Annotated[float | None, arg(metavar="FRACTION", help_behavior_hint="(default: none)")] = None
    """For networks with channel gates, such as vgg16_deepmoe: target for the mean multiply-adds, as a fraction of the
    network without gates, such as 0.5."""
    gate_l1: Annotated[float | None, arg(metavar="LAMBDA", help_behavior_hint="(default: 0.1)")] = None
    """Weight λ of the gates' L1 penalty; with --target-macs, its initial value."""
    joint_fraction: Annotated[float | None, arg(metavar="FRACTION", help_behavior_hint="(default: 0.6)")] = None
    """Fraction of the epochs in which channel gates are trained before they are frozen."""
    parallel: Annotated[str, arg(metavar="ddp|fsdp")] = "ddp"
    """Under torchrun, ddp: every process has all weights; fsdp: weights and optimizer states are sharded (FSDP2)."""
    eval_every: Annotated[
        int | None, arg(metavar="N", help_behavior_hint="(default: such that tests take little time)")
    ] = None
    """Epochs from one test to the next; the last epoch is always tested."""
    snapshots: int = 0
    """Number of snapshots of the network to keep, more of them early; moesaic explain has a slider over them."""
    track: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="tensorboard|wandb|trackio")] = ()
    """Experiment tracker to log metrics to; may be repeated; needs moesaic[track]."""


@dataclass(frozen=True)
class Train(DatasetOptions, _TrainOptions):
    """Train a network on images and test it.

    The network, its metrics and its settings are written to --out. The same command resumes an interrupted run, with
    the same numbers as if it had not been interrupted.
    """

    def run(self, given: Sequence[str]) -> int:
        """Runs the command; ``given`` are its arguments, which are repeated in the hint how to resume."""
        from rich.console import Console

        from moesaic.training.model_for_dataset import head_note, spec_for_dataset
        from moesaic.training.ranks import join_job, one_per_machine_first

        with user_errors("train"):
            recipe, device = self._checked()
            asked = self._spec()
            check_folder(self.out)
            ranks = join_job(device)
            dataset = one_per_machine_first(ranks, lambda: self._load(asked.pretrained_config()))
            recipe = self._pretrained_recipe(recipe, asked, dataset)
            spec, cost = spec_for_dataset(asked, dataset)
            if (note := head_note(asked, spec)) is not None:
                log(note)
            out = self.out or Path("runs") / f"train-{file_name(dataset.name)}-{_run_name(asked)}"
            if torchrun_env.rank() == 0:
                make_folder(out)
        was_complete = (out / "result.json").exists()
        if not was_complete:
            log(f"to follow the training in a browser: moesaic view {shlex.quote(str(out))}")
        try:
            found = self._train(dataset, spec, recipe, device, out)
        except KeyboardInterrupt:
            if torchrun_env.rank() == 0:
                _write_page(out, "stopped")
            again = shlex.join([*invocation(), *given])
            if (out / "model.safetensors").exists():
                log(f"\nInterrupted. The last checkpoint is in {out}. To resume:\n  {again}")
            else:
                log(f"\nInterrupted before the first checkpoint. To begin again:\n  {again}")
            return 130
        if torchrun_env.rank() == 0:
            if was_complete:
                log(f"{out} is complete, and nothing was trained; to train again, remove it or name another --out")
            say = _printer(Console())
            _show(Console(), dataset, spec, cost, found)
            say(f"\nNetwork: {out / 'model.safetensors'}")
            page = _write_page(out)
            if page is not None:
                say(f"Page: {page}")
            say("Next:")
            for line in self._next(dataset, spec, cost, found, out):
                say(f"  {line}")
        return 0

    def _next(
        self, dataset: ImageDataset, spec: ModelSpec, cost: ModelCost, found: FitResult, out: Path
    ) -> Iterator[str]:
        """The commands that follow, each with what it is for."""
        here = shlex.quote(str(out))
        if not spec.is_pretrained and len(dataset.train) < _FEW_IMAGES and found.accuracy < _GOOD_ACCURACY:
            yield (
                f"moesaic train {shlex.quote(self.data)} --model timm/mobilenetv2_100 --pretrained"
                "  # few images: start from a pretrained network"
            )
        yield f"moesaic predict {here} IMAGE…      # classes of other images"
        if cost.routed_parameters:
            shown = "patches that each expert selects" if found.cost is None else "open channels of each image"
            yield f"moesaic explain {here} IMAGE…      # {shown}"
        yield f"moesaic export {here} --format onnx  # one file for a server"

    def _checked(self) -> tuple[Recipe, str]:
        """Checks the options that do not depend on the images."""
        import torch

        from moesaic.routing.registry import import_router
        from moesaic.training.data_parallel import check_parallel
        from moesaic.training.gate_recipe import GateRecipe
        from moesaic.training.ranks import local_device
        from moesaic.training.recipe import OPTIMIZER_DEFAULTS, Recipe
        from moesaic.training.trackers import check_tracker

        check_choice("train", "--optimizer", self.optimizer, OPTIMIZER_DEFAULTS)
        defaults = OPTIMIZER_DEFAULTS[cast("Any", self.optimizer)]
        names: dict[str, Any] = {"optimizer": self.optimizer, "schedule": self.schedule, "precision": self.precision}
        recipe = Recipe(
            epochs=self.epochs,
            batch_size=self.batch_size,
            lr=defaults.lr if self.lr is None else self.lr,
            warmup_epochs=self.warmup_epochs,
            weight_decay=defaults.weight_decay if self.weight_decay is None else self.weight_decay,
            ema_decay=self.ema_decay,
            clip_grad=self.clip_grad,
            grad_accum=self.grad_accum,
            label_smoothing=self.label_smoothing,
            stop_at_zero_error=self.stop_at_zero_error,
            compile=self.compile,
            trainable=self.trainable or "all",
            layer_decay=self.layer_decay,
            gates=GateRecipe(**self._gates()) if self._gates() else None,
            **names,
        )
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"train: --seed={self.seed}; it must be from 0 to 2⁶³ − 1")
        counts = ("eval_every", "experts", "patches_per_expert", "patch_size", "tokens_per_expert", "top_k")
        given = {name: value for name in counts if (value := getattr(self, name)) is not None}
        check_positive("train", **given)
        if self.snapshots < 0:
            raise ValueError(f"train: --snapshots={self.snapshots}; it must be 0 or more")
        for name in () if self.convert else _OF_CONVERT:
            if getattr(self, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"train: {option} {getattr(self, name)} is for layers that --convert names; add it")
        if self.router is not None:
            import_router(self.router)
        for name in self.track:
            try:
                check_tracker(name)
            except (ImportError, ValueError) as error:
                raise ValueError(f"train: --track: {error}") from error
        check_choice("train", "--parallel", self.parallel, ("ddp", "fsdp"))
        if torchrun_env.in_job():
            check_parallel(recipe, cast("Any", self.parallel), torchrun_env.ranks())
        return recipe, str(local_device(torch.device(resolve_device("train", self.device))))

    def _gates(self) -> dict[str, Any]:
        """Returns the options of channel gates that were given."""
        options = {"target_macs": self.target_macs, "l1_weight": self.gate_l1, "joint_fraction": self.joint_fraction}
        return {name: value for name, value in options.items() if value is not None}

    def _load(self, config: PretrainedConfig) -> ImageDataset:
        dataset = normalized(self.load(config.image_size), config)
        return dataset if self.samples is None else dataset.subset(self.samples, self.seed)

    def _pretrained_recipe(self, recipe: Recipe, spec: ModelSpec, dataset: ImageDataset) -> Recipe:
        """The recipe with the defaults of a pretrained network."""
        from moesaic.training.head_recipe import head_recipe
        from moesaic.training.trainable_layers import default_trainable

        if not spec.is_pretrained:
            return recipe
        recipe = replace(recipe, trainable=self.trainable or default_trainable([spec], len(dataset.train)))
        if self.lr is not None:
            return recipe
        if recipe.trainable == "head":
            return head_recipe(recipe, spec.arguments.get("head"))
        return replace(recipe, lr=recipe.lr / 10)

    def _spec(self) -> ModelSpec:
        """The network as --model and the flags beside it ask for it."""
        from moesaic.models.registry import ModelSpec

        asked = ModelSpec.parse(self.model)
        mixture = {
            "experts": self.experts,
            "patches_per_expert": self.patches_per_expert,
            "patch_size": self.patch_size,
            "router": self.router,
        }
        mixture = {name: value for name, value in mixture.items() if value is not None}
        own = {"fidelity": self.fidelity, "pretrained": self.pretrained or None, "head": self.head}
        own["weights"] = None if self.weights is None else str(self.weights)
        options: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        conversions = asked.conversions
        if self.pretrained and not asked.name.startswith("timm/"):
            raise ValueError(
                f"train: --pretrained downloads timm's weights, and {asked.name} is not timm's; use --weights FILE, or "
                "a network such as --model timm/resnet18"
            )
        if self.convert:
            others = {name: value for name in _OF_CONVERT if (value := getattr(self, name)) is not None}
            conversions = (*conversions, {"layer": list(self.convert), "experts": _EXPERTS, **mixture, **others})
        else:
            options |= mixture
        return ModelSpec(asked.name, {**asked.arguments, **options}, conversions).with_seed(self.seed)

    def _train(self, dataset: ImageDataset, spec: ModelSpec, recipe: Recipe, device: str, out: Path) -> FitResult:
        import torch
        from rich.console import Console

        from moesaic import report
        from moesaic.training.checkpoint import CheckpointError
        from moesaic.training.fit import Diverged, fit
        from moesaic.training.gate_training import resolve_gate_recipe
        from moesaic.training.ranks import join_job, one_per_machine_first
        from moesaic.training.snapshots import SnapshotCallback, snapshot_epochs
        from moesaic.training.trackers import create_tracker
        from moesaic.training.train_step import CompileError
        from moesaic.training.trainable_layers import frozen_parameters

        trackers = [create_tracker(name, out) for name in self.track if torchrun_env.rank() == 0]
        snapshots = [SnapshotCallback(snapshot_epochs(recipe.epochs, self.snapshots))] if self.snapshots else []
        ranks = join_job(device)
        with user_errors("train"):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                model = one_per_machine_first(ranks, spec.build)  # which may download weights
            if spec.conversions and torchrun_env.rank() == 0:
                log(str(self._receipt(model, spec, dataset)))
            frozen_parameters(model, recipe.trainable)  # refuses what the network cannot freeze
            images = dataset
            dataset = one_per_machine_first(ranks, lambda: self._with_features(images, model, recipe, device))
            _check_gated(self.model, model, self._gates())
            resolve_gate_recipe(model, recipe)
        try:
            with report.watch_progress(Console(stderr=True)) as progress:
                progress.begin(f"{spec.name}, {len(dataset.train)} images", recipe.epochs)
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
                    eval_every=self.eval_every or _default_eval_every(dataset),
                    callbacks=snapshots,
                    parallel=cast("Any", self.parallel),
                    cuda_graph=None if self.cuda_graph else False,
                )
                progress.end()
        except (CheckpointError, Diverged, CompileError, OSError) as error:
            if isinstance(error, Diverged):
                _write_page(out, "diverged")
            message = " ".join(str(error).split())
            raise CommandError(f"moesaic train: {message.removeprefix('fit: ')}") from error
        return found

    def _receipt(self, model: nn.Module, spec: ModelSpec, dataset: ImageDataset) -> ConversionReceipt:
        """What the conversion did, on a few test images."""
        import torch

        from moesaic.models.conversion_receipt import conversion_receipt
        from moesaic.training.batches import eval_batches

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            original = replace(spec, conversions=()).build()
        images, _ = next(eval_batches(dataset, torch.device("cpu"), _COMPARED))
        return conversion_receipt(model, original, images)

    def _with_features(self, dataset: ImageDataset, model: nn.Module, recipe: Recipe, device: str) -> ImageDataset:
        """The dataset with the features of a frozen backbone, which the head learns from."""
        from moesaic.cache_dir import default_cache_dir
        from moesaic.training.backbone_features import add_features, refuses_features

        if recipe.trainable != "head":
            return dataset
        refusal = refuses_features(model, dataset)
        if refusal:
            log(f"the frozen backbone runs in every step: {refusal}")
            return dataset
        return add_features(dataset, model, cache_dir=self.cache_dir or default_cache_dir(), device=device, log=log)


def _write_page(out: Path, stopped: str = "") -> Path | None:
    """Writes the page about the run; a fault is logged, for the run itself is whole."""
    from moesaic.report import write_training_page

    if not (out / "metrics.jsonl").exists():
        return None
    try:
        return write_training_page(out, stopped=stopped)
    except (OSError, ValueError) as error:
        log(f"the page about the run could not be written: {error}")
        return None


def _run_name(spec: ModelSpec) -> str:
    """Returns the network and the options that make it another one, as part of a folder's name.

    >>> from moesaic.models.registry import ModelSpec
    >>> _run_name(ModelSpec.parse("timm/resnet18:pretrained:head=routed:experts=4"))
    'timm-resnet18-head-routed-experts-4'
    """
    sources = ("pretrained", "weights")  # of the same network; a folder of a file would only lengthen the name
    options = [f"{name}-{value}" for name, value in spec.arguments.items() if name not in sources]
    for conversion in spec.conversions:
        others = (f"{name}-{value}" for name, value in conversion.items() if name not in ("layer", "skip", "seed"))
        kind, layers = ("skip", conversion["skip"]) if "skip" in conversion else ("convert", conversion["layer"])
        options += [f"{kind}-" + "-".join(layers), *others]
    return file_name("-".join([spec.name, *options]))


def _printer(console: Console) -> Callable[[str], None]:
    """Prints lines as they are, with control characters escaped."""
    return lambda line: console.print(escaped(line), markup=False, highlight=False, soft_wrap=True)


def _show(console: Console, dataset: ImageDataset, spec: ModelSpec, cost: ModelCost, found: FitResult) -> None:
    """Prints the accuracy and the cost."""
    from moesaic.report.formatting import counted

    say = _printer(console)
    often = 100 * int(dataset.test.labels.bincount().max()) / len(dataset.test)
    ended = "" if found.stopped == "all epochs" else f" ({found.stopped})"
    say(
        f"{spec.name} on {dataset.name}: {counted(len(dataset.train), 'training image')}, "
        f"{counted(len(found.epochs), 'epoch')}{ended} in {found.seconds:,.{1 if found.seconds < 10 else 0}f} s, "
        f"{found.images / max(found.seconds, 1e-9):,.0f} images/s"
    )
    say(
        f"Test accuracy: {found.accuracy:.1f} % of {counted(len(dataset.test), 'image')}; always predicting the most "
        f"frequent class would reach {often:.1f} %"
    )
    if found.accuracy <= often:
        say("note: the network is no better than always predicting one class; train for more epochs (--epochs)")
    _show_groups(console, "class", dataset.class_names, dataset.test.labels, found.class_accuracy)
    if dataset.cluster_names != dataset.class_names:
        _show_groups(console, "group", dataset.cluster_names, dataset.test.clusters, found.cluster_accuracy)
    say("")
    say(_cost(cost) if found.cost is None else _gated_cost(cost, found.cost))
    for epoch in found.epochs:
        for alarm in epoch.alarms:
            say(f"note: in epoch {epoch.number}: {alarm}")


def _show_groups(
    console: Console, kind: str, names: Sequence[str], groups: Tensor, accuracies: Sequence[float]
) -> None:
    """Prints a table of accuracies; of many groups, the worst."""
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
        table.add_row(Text(escaped(name)), f"{count}", f"{accuracy:.1f} %")
    console.print(table)


def _cost(cost: ModelCost) -> str:
    parameters = f"{cost.parameters:,} parameters"
    work = f"{_short(cost.macs)} multiply-adds per image"
    if not cost.routed_parameters:
        return f"{parameters}, {work}"
    share, part = 100 * cost.routed_parameters / cost.parameters, 100 * cost.routed_macs / cost.macs
    left = 100 * cost.routed_macs / max(cost.routed_dense_macs, 1)
    return (
        f"{parameters}, {share:.1f} % of them in routed layers\n"
        f"{work}, {part:.1f} % of them in routed layers: {left:.1f} % of the multiply-adds of these layers if every "
        "expert processed the whole image"
    )


def _check_gated(name: str, model: nn.Module, given: Mapping[str, Any]) -> None:
    """Refuses options of channel gates for a network without them."""
    from moesaic.models.deepmoe.network import DeepMoE
    from moesaic.models.registry import list_models

    if given and not isinstance(model, DeepMoE):
        options = {"target_macs": "--target-macs", "l1_weight": "--gate-l1", "joint_fraction": "--joint-fraction"}
        own = f"{name}_deepmoe"
        instead = own if own in list_models() else "vgg16_deepmoe"
        raise ValueError(
            f"train: {options[next(iter(given))]} is for networks with channel gates, and {name} has none; leave it "
            f"out, or use --model {instead}"
        )


def _gated_cost(cost: ModelCost, share: float) -> str:
    return (
        f"{cost.parameters:,} parameters; {_short(round(share * cost.dense_macs))} multiply-adds for a test image on "
        f"average, {100 * share:.1f} % of the {_short(cost.dense_macs)} without gates"
    )


def _default_eval_every(dataset: ImageDataset) -> int:
    """Returns the epochs from one test to the next with which tests take about a quarter of the training time.

    A test needs no gradients: an image takes a third of the time of a training step.
    """
    return -(-4 * len(dataset.test) // (3 * len(dataset.train)))


def _short(number: int) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
