"""`moesaic bench`: how fast a layer is on this machine, beside the dense one that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args

from tyro.conf import Positional, arg

from moesaic.checks import check_choice, check_positive
from moesaic.cli.shared import log, resolve_device, user_errors

if TYPE_CHECKING:
    import torch

    from moesaic.bench.layer_benchmark import Pass
    from moesaic.bench.layer_shape import Form, RoutedShape

__all__ = ["Bench"]

DTYPES = ("float32", "bfloat16", "float16")
MOST_NUMBERS = 2**31
"""In a map: what a measurement may be asked to draw."""


@dataclass(frozen=True)
class Bench:
    """Time a routed layer on this machine against the dense convolution that it stands for.

    moesaic bench layer --channels 640 --size 16 --experts 8 --patches-per-expert 2 --patch-size 4
    --kernel-size 3 prints how long each backend takes, what moesaic picks here and why, and whether
    routing this layer saves time at all.
    """

    what: Positional[Annotated[str, arg(metavar="layer")]]
    """What to measure: layer, a PatchMoE."""
    channels: int = 64
    """Of the map that goes in."""
    out_channels: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: --channels)")] = None
    """Of the map that comes out."""
    size: int = 16
    """Pixels along an edge of the map."""
    experts: int = 8
    """How many."""
    patches_per_expert: int = 2
    """Patches of each map that an expert takes."""
    patch_size: int = 4
    """Pixels along an edge of a patch."""
    kernel_size: int = 3
    """Of the experts, odd."""
    batch: int = 8
    """Maps at a time."""
    dtype: Annotated[
        str | None, arg(metavar="|".join(DTYPES), help_behavior_hint="(default: float32, on a GPU bfloat16)")
    ] = None
    """What to compute in."""
    device: Annotated[str, arg(metavar="auto|cpu|cuda")] = "auto"
    """Where to run."""
    training: bool = False
    """Time training steps alone: forward and backward, with all gradients. Default: both."""
    inference: bool = False
    """Time forward passes alone, in eval mode without gradients. Default: both."""
    gate: Annotated[str, arg(metavar="softmax_selected|softmax_all|one")] = "softmax_selected"
    """What a chosen patch counts."""
    gate_on: Annotated[str, arg(metavar="output|input")] = "output"
    """What the gate scales."""
    context: Annotated[str, arg(metavar="map|patch")] = "map"
    """Whether a kernel sees beyond its patch."""
    combine: Annotated[str, arg(metavar="concat|sum")] = "concat"
    """Whether each expert has channels of its own, or their answers are added."""
    expert_norm: bool = False
    """BatchNorm and ReLU in front of each expert; the dense layer then has them too."""
    bias: bool = True
    """Whether experts, and the dense convolution, have one."""
    repetitions: int = 20
    """Of each measurement; the median counts."""
    tune: bool = False
    """First time other tile sizes of the GPU kernels for this shape, and keep the best for this machine."""
    tune_seconds: int = 120
    """How long to try other tile sizes: when they are over no new one is begun, and the best so far is kept."""

    def run(self, given: Sequence[str]) -> int:
        """Check what was asked for, measure, and print."""
        import torch

        from moesaic.bench.layer_benchmark import layer_times, picked, tune_layer
        from moesaic.ops.tile_sizes import tile_file
        from moesaic.report import describe_machine, print_layer_times

        with user_errors("bench"):
            check_choice("bench", "WHAT", self.what, ("layer",))
            shape, form = self._shape(), self._form()
            device = resolve_device("bench", self.device)
            gpu = torch.device(device).type == "cuda"
            dtype: torch.dtype = getattr(torch, self._dtype("bfloat16" if gpu else "float32"))
            choice = picked(shape, form, device, dtype)
            if self.tune and choice.name != "triton":
                raise ValueError(f"--tune is for the kernels of a GPU, but {choice.name} runs this: {choice.why}")
        passes = self._passes()
        if self.tune:
            what: Pass = "step" if "step" in passes else "forward"
            log(f"trying other tiles for at most {self.tune_seconds} s, each compiled first; a {what} is timed")
            found = tune_layer(shape, form, device=device, dtype=dtype, what=what, tell=log, seconds=self.tune_seconds)
            log(f"{len(found)} better tiles kept in {tile_file()}" if found else "no tile is better than the rules'")
        log(f"{describe_machine(device)}: each layer runs {self.repetitions} times, in turns")
        rows = layer_times(
            shape,
            form,
            device=device,
            dtype=dtype,
            passes=passes,
            formats=("channels_last",) if gpu else ("contiguous", "channels_last"),
            repetitions=self.repetitions,
        )
        title = f"{shape}, {str(dtype).removeprefix('torch.')} on {device}"
        print_layer_times(title, rows, choice, passes)
        return 0 if all(row.best(what) for row in rows for what in passes if row.picked) else 1

    def _shape(self) -> RoutedShape:
        from moesaic.bench.layer_shape import RoutedShape

        out_channels = self.channels if self.out_channels is None else self.out_channels
        counts = {
            "--channels": self.channels,
            "--out-channels": out_channels,
            "--size": self.size,
            "--experts": self.experts,
            "--patches-per-expert": self.patches_per_expert,
            "--patch-size": self.patch_size,
            "--kernel-size": self.kernel_size,
            "--batch": self.batch,
            "--repetitions": self.repetitions,
            "--tune-seconds": self.tune_seconds,
        }
        check_positive("bench", **counts)
        for what, numbers, smaller in (
            ("the maps", self.batch * max(self.channels, out_channels) * self.size**2, "--batch or --size"),
            ("the experts", self.channels * out_channels * self.kernel_size**2, "--channels or --out-channels"),
        ):
            if numbers > MOST_NUMBERS:
                raise ValueError(f"{what} have {numbers:,} numbers; at most {MOST_NUMBERS:,}: use a smaller {smaller}")
        return RoutedShape(
            self.batch,
            self.channels,
            out_channels,
            self.size,
            experts=self.experts,
            patches_per_expert=self.patches_per_expert,
            patch_size=self.patch_size,
            kernel_size=self.kernel_size,
        )

    def _form(self) -> Form:
        from moesaic.bench.layer_shape import Form
        from moesaic.ops import Combine, Context, GateOn
        from moesaic.routing.expert_choice import ExpertGate

        gate: Any = check_choice("bench", "--gate", self.gate, get_args(ExpertGate))
        gate_on: Any = check_choice("bench", "--gate-on", self.gate_on, get_args(GateOn))
        context: Any = check_choice("bench", "--context", self.context, get_args(Context))
        combine: Any = check_choice("bench", "--combine", self.combine, get_args(Combine))
        return Form(self.bias, gate, gate_on, self.expert_norm, context, combine)

    def _dtype(self, default: str) -> str:
        return default if self.dtype is None else check_choice("bench", "--dtype", self.dtype, DTYPES)

    def _passes(self) -> list[Pass]:
        if self.training == self.inference:
            return ["forward", "step"]
        return ["step"] if self.training else ["forward"]
