"""The NETWORK argument of the commands that time a network: a model string as in `moesaic train`, or a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from moesaic.argument_checks import check_positive
from moesaic.cli.shared import load_run, log

if TYPE_CHECKING:
    from torch import nn

    from moesaic.bench.layer_benchmark import Pass
    from moesaic.models.registry import ModelSpec

__all__ = ["MAX_SIDE", "Network", "NetworkOptions"]

_CLASSES = 10
_IMAGE_SIZE = 64
_BUSY = 1.25
"""Processes that want to run, for each core."""
MAX_SIDE = 4096
"""Largest height and width of an image."""


@dataclass(frozen=True)
class Network:
    """A network and how it was made."""

    model: nn.Module
    image: tuple[int, int, int]
    spec: ModelSpec
    """As given, without what follows from the images."""
    weights: Path | None
    """Of a run."""


@dataclass(frozen=True)
class NetworkOptions:
    """Options of the commands that time a network."""

    network: Positional[Annotated[str, arg(metavar="NETWORK")]]
    """Network as in moesaic train --model, such as timm/resnet18 or wrn10_2_pmoe:experts=8, or a run directory."""
    img_size: Annotated[
        int | None, arg(metavar="INT", help_behavior_hint="(default: the network's own, otherwise 64)")
    ] = None
    """Height and width of the images."""
    batch_size: int = 8
    """Images per batch."""
    device: Annotated[str, arg(metavar="auto|cpu|cuda")] = "auto"
    """Device; auto uses a GPU if there is one, with mixed precision in bfloat16."""
    training: bool = False
    """Time only training steps (forward and backward). Default: both."""
    inference: bool = False
    """Time only forward passes in eval mode without gradients. Default: both."""
    json: bool = False
    """Print JSON rather than tables."""

    def check(self, command: str, counts: Mapping[str, int]) -> None:
        """Refuses sizes that are no positive numbers, and images that are too large."""
        given = {"--batch-size": self.batch_size, "--img-size": self.img_size, **counts}
        check_positive(command, **{name: value for name, value in given.items() if value is not None})
        if self.img_size is not None and self.img_size > MAX_SIDE:
            raise ValueError(f"--img-size={self.img_size} is more than {MAX_SIDE}; use a smaller one")

    def passes(self) -> list[Pass]:
        """What is timed."""
        if self.training == self.inference:
            return ["forward", "step"]
        return ["step"] if self.training else ["forward"]

    def warn_if_busy(self, device: str) -> None:
        """Logs that times will be unreliable if other programs use the cores."""
        if device != "cpu" or not hasattr(os, "getloadavg"):
            return
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        if load > _BUSY * cores:
            log(f"other programs use this machine (load {load:.1f} on {cores} cores): times will be unreliable")

    def build(self) -> Network:
        """Builds the network with random weights, which times do not depend on; or loads that of a run."""
        import torch

        from moesaic.models.registry import ModelSpec, model_options

        path = Path(self.network)
        if path.exists():
            checkpoint = load_run(path, "cpu", None)
            C, H, W = checkpoint.input_shape
            if self.img_size not in (None, H):
                raise ValueError(f"--img-size={self.img_size}, but this network takes {H}×{W}; leave it out")
            return Network(checkpoint.model, (C, H, W), _without_sizes(checkpoint.spec), checkpoint.path)
        asked = ModelSpec.parse(self.network)
        side = self.img_size or _own_size(asked) or _IMAGE_SIZE
        spec = asked.without_weights()
        known = {"image_size": side} if "image_size" in model_options(spec.name) else {}
        conversions = tuple({"input_size": [3, side, side], **each} for each in spec.conversions)
        arguments = {"num_classes": _CLASSES, **known, **spec.arguments}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            model = ModelSpec(spec.name, arguments, conversions).build()
        return Network(model, (3, side, side), asked, None)


def _own_size(spec: ModelSpec) -> int | None:
    """The side of the images that a network was made for."""
    from moesaic.models.timm_registry import timm_config

    given = spec.arguments.get("image_size") or spec.pretrained_config().image_size
    if given is None and spec.name.startswith("timm/"):
        return timm_config(spec.name.removeprefix("timm/")).image_size
    return given


def _without_sizes(spec: ModelSpec) -> ModelSpec:
    """The specification without what `moesaic train` finds in a dataset, and without earlier weights."""
    found = spec.without_weights()
    given = ("num_classes", "in_channels", "image_size")
    return replace(found, arguments={name: value for name, value in found.arguments.items() if name not in given})
