"""`moesaic bench model`: what routing gains in a whole network on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from moesaic.checks import check_choice, check_positive
from moesaic.cli.shared import load_run, log, resolve_device, user_errors

if TYPE_CHECKING:
    from torch import nn

    from moesaic.bench.layer_benchmark import Pass
    from moesaic.bench.model_benchmark import Mode

__all__ = ["BenchModel"]

_CLASSES = 10
_IMAGE_SIZE = 64
MAX_SIDE = 4096
"""Largest height and width of an image."""


@dataclass(frozen=True)
class BenchModel:
    """Time a network with routed layers on this machine against the same network with dense ones.

    moesaic bench model wrn10_10_pmoe prints what its routed layers gain and the bound that their share of the work
    sets. Of a dense network, such as timm/resnet18 or a run of your own, each convertible layer is timed dense and
    routed, and the network with the layers converted that gain. Nothing is trained.
    """

    network: Positional[Annotated[str, arg(metavar="NETWORK")]]
    """Network as moesaic train spells it, such as timm/resnet18:convert=layer4.1.conv2:experts=8, or run directory."""
    img_size: Annotated[
        int | None, arg(metavar="INT", help_behavior_hint="(default: the network's own, otherwise 64)")
    ] = None
    """Height and width of the images."""
    batch_size: int = 8
    """Images per batch."""
    experts: int = 8
    """Experts of layers that are converted."""
    patches_per_expert: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: patches / experts)")] = (
        None
    )
    """Patches per image that each expert of a converted layer selects."""
    mode: Annotated[
        str | None, arg(metavar="eager|compiled|captured", help_behavior_hint="(default: all that this machine has)")
    ] = None
    """How networks run: eager, under torch.compile, or in CUDA graphs."""
    device: Annotated[str, arg(metavar="auto|cpu|cuda")] = "auto"
    """Device; auto uses a GPU if there is one, with mixed precision in bfloat16."""
    training: bool = False
    """Time only training steps (forward and backward). Default: both."""
    inference: bool = False
    """Time only forward passes in eval mode without gradients. Default: both."""
    repetitions: int = 10
    """Timed runs per network; the median is reported."""
    json: bool = False
    """Print JSON rather than tables."""

    def run(self, given: Sequence[str]) -> int:
        """Builds the network, runs the benchmark and prints the tables."""
        import torch

        from moesaic.bench.model_benchmark import benchmark_model
        from moesaic.report import describe_machine
        from moesaic.report.model_benchmark_table import benchmark_json, print_model_benchmark

        with user_errors("bench"):
            counts = {"--batch-size": self.batch_size, "--experts": self.experts, "--repetitions": self.repetitions}
            optional = {"--img-size": self.img_size, "--patches-per-expert": self.patches_per_expert}
            counts |= {name: value for name, value in optional.items() if value is not None}
            check_positive("bench", **counts)
            if self.img_size is not None and self.img_size > MAX_SIDE:
                raise ValueError(f"--img-size={self.img_size} is more than {MAX_SIDE}; use a smaller one")
            device = resolve_device("bench", self.device)
            gpu = torch.device(device).type == "cuda"
            modes, (model, image) = self._modes(gpu), self._network()
            log(f"{describe_machine(device)}: {self.repetitions} runs, routed and dense in turns")
            found = benchmark_model(
                model.to(device),
                image,
                batch_size=self.batch_size,
                experts=self.experts,
                patches_per_expert=self.patches_per_expert,
                modes=modes,
                passes=self._passes(),
                repetitions=self.repetitions,
                autocast=torch.bfloat16 if gpu else None,
                log=log,
            )
        C, H, W = image
        about = {"network": self.network, "machine": describe_machine(device), "image": [C, H, W]}
        if self.json:
            content = {**about, "batch_size": self.batch_size, **benchmark_json(found)}
            sys.stdout.write(f"{json.dumps(content, indent=1)}\n")
        else:
            title = f"{self.network}, {self.batch_size} images of {H}×{W} on {device}"
            print_model_benchmark(title, found)
        return 0

    def _network(self) -> tuple[nn.Module, tuple[int, int, int]]:
        import torch

        from moesaic.models.registry import ModelSpec, model_options

        path = Path(self.network)
        if path.exists():
            checkpoint = load_run(path, "cpu", None)
            C, H, W = checkpoint.input_shape
            if self.img_size not in (None, H):
                raise ValueError(f"--img-size={self.img_size}, but this network takes {H}×{W}; leave it out")
            return checkpoint.model, (C, H, W)
        spec = ModelSpec.parse(self.network)
        side = self.img_size or spec.pretrained_config().image_size or _IMAGE_SIZE
        known = {"image_size": side} if "image_size" in model_options(spec.name) else {}
        conversions = tuple({"input_size": [3, side, side], **each} for each in spec.conversions)
        arguments = {"num_classes": _CLASSES, **known, **spec.arguments}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return ModelSpec(spec.name, arguments, conversions).build(), (3, side, side)

    def _modes(self, gpu: bool) -> list[Mode]:
        from moesaic.bench.model_benchmark import MODES

        if self.mode is None:
            return list(MODES) if gpu else ["eager", "compiled"]
        check_choice("bench", "--mode", self.mode, MODES)
        if self.mode == "captured" and not gpu:
            raise ValueError("--mode=captured needs a GPU: CPUs have no CUDA graphs; use eager or compiled")
        return [mode for mode in MODES if mode == self.mode]

    def _passes(self) -> list[Pass]:
        if self.training == self.inference:
            return ["forward", "step"]
        return ["step"] if self.training else ["forward"]
