"""`moesaic bench`: time a routed layer against the dense layer it replaces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args

from tyro.conf import Positional, arg

from moesaic.argument_checks import check_choice, check_positive
from moesaic.cli.shared import log, resolve_device, user_errors

if TYPE_CHECKING:
    import torch

    from moesaic.bench.layer_benchmark import Pass
    from moesaic.bench.layer_shape import LayerOptions, LayerShape

__all__ = ["Bench"]

DTYPES = ("float32", "bfloat16", "float16")
MAX_ELEMENTS = 2**31
"""Largest number of elements of a benchmark tensor."""


@dataclass(frozen=True)
class Bench:
    """Time a routed layer on this machine against the dense convolution it replaces.

    moesaic bench layer --channels 640 --size 16 --experts 8 --patches-per-expert 2 --patch-size 4
    --kernel-size 3 prints the time of each backend, the backend that moesaic chooses and why, and
    whether the routed layer is faster than the dense one.

    moesaic bench model NETWORK times a whole network; moesaic bench model --help lists its options.
    """

    what: Positional[Annotated[str, arg(metavar="layer|model")]]
    """What to time: layer (a PatchMoE), or model (a whole network)."""
    channels: int = 64
    """Number of input channels."""
    out_channels: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: --channels)")] = None
    """Number of output channels."""
    size: int = 16
    """Height and width of the feature map."""
    experts: int = 8
    """Number of experts."""
    patches_per_expert: int = 2
    """Patches per image that each expert selects."""
    patch_size: int = 4
    """Height and width of a patch in pixels."""
    kernel_size: int = 3
    """Kernel size of the experts; odd."""
    batch_size: int = 8
    """Images per batch."""
    dtype: Annotated[
        str | None, arg(metavar="|".join(DTYPES), help_behavior_hint="(default: float32, on a GPU bfloat16)")
    ] = None
    """Data type of input and weights."""
    device: Annotated[str, arg(metavar="auto|cpu|cuda")] = "auto"
    """Device; auto uses a GPU if there is one."""
    training: bool = False
    """Time only training steps (forward and backward). Default: both."""
    inference: bool = False
    """Time only forward passes in eval mode without gradients. Default: both."""
    gate: Annotated[str, arg(metavar="softmax_selected|softmax_all|one")] = "softmax_selected"
    """Gate value of a selected patch."""
    gate_on: Annotated[str, arg(metavar="output|input")] = "output"
    """What the gate multiplies."""
    context: Annotated[str, arg(metavar="map|patch")] = "map"
    """Convolution context: the whole map, or each patch alone."""
    combine: Annotated[str, arg(metavar="concat|sum")] = "concat"
    """How expert outputs are combined: own channels per expert, or their sum."""
    expert_norm: bool = False
    """Add BatchNorm and ReLU before each expert and before the dense layer."""
    bias: bool = True
    """Add a bias to the experts and to the dense convolution."""
    repetitions: int = 20
    """Timed runs per layer; the median is reported."""
    tune: bool = False
    """Tune the tile sizes of the Triton kernels for this shape first, and cache the best."""
    tune_seconds: int = 120
    """Time limit of --tune in seconds; the best tile sizes so far are cached."""

    def run(self, given: Sequence[str]) -> int:
        """Checks the options, runs the benchmark and prints the table."""
        import torch

        from moesaic.bench.layer_benchmark import choose_backend, layer_times, tune_layer
        from moesaic.ops.tile_sizes import tile_file
        from moesaic.report import describe_machine, print_layer_times

        with user_errors("bench"):
            check_choice("bench", "WHAT", self.what, ("layer", "model"))
            if self.what == "model":
                raise ValueError("model must be the first word: moesaic bench model NETWORK")
            shape, options = self._shape(), self._options()
            device = resolve_device("bench", self.device)
            gpu = torch.device(device).type == "cuda"
            dtype: torch.dtype = getattr(torch, self._dtype("bfloat16" if gpu else "float32"))
            choice = choose_backend(shape, options, device, dtype)
            if self.tune and choice.name != "triton":
                raise ValueError(f"--tune needs the triton backend, but the backend is {choice.name}: {choice.why}")
        passes = self._passes()
        if self.tune:
            what: Pass = "step" if "step" in passes else "forward"
            log(f"tuning tile sizes for at most {self.tune_seconds} s (timing the {what} pass)")
            found = tune_layer(
                shape, options, device=device, dtype=dtype, what=what, log=log, seconds=self.tune_seconds
            )
            log(
                f"{len(found)} better tile sizes cached in {tile_file()}"
                if found
                else "the default tile sizes are the best"
            )
        log(f"{describe_machine(device)}: {self.repetitions} interleaved runs per layer")
        rows = layer_times(
            shape,
            options,
            device=device,
            dtype=dtype,
            passes=passes,
            formats=("channels_last",) if gpu else ("contiguous", "channels_last"),
            repetitions=self.repetitions,
        )
        title = f"{shape}, {str(dtype).removeprefix('torch.')} on {device}"
        print_layer_times(title, rows, choice, passes)
        return 0 if all(row.best(what) for row in rows for what in passes if row.picked) else 1

    def _shape(self) -> LayerShape:
        from moesaic.bench.layer_shape import LayerShape

        out_channels = self.channels if self.out_channels is None else self.out_channels
        given = {name: value for name, value in asdict(self).items() if type(value) is int}  # all of them are counts
        check_positive("bench", **{f"--{name.replace('_', '-')}": value for name, value in given.items()})
        if self.patch_size > self.size:
            raise ValueError(
                f"--patch-size={self.patch_size} is larger than the map of --size {self.size}; use at most {self.size}"
            )
        for what, numbers, smaller in (
            (
                "the feature maps",
                self.batch_size * max(self.channels, out_channels) * self.size**2,
                "--batch-size or --size",
            ),
            ("the experts", self.channels * out_channels * self.kernel_size**2, "--channels or --out-channels"),
        ):
            if numbers > MAX_ELEMENTS:
                raise ValueError(
                    f"{what} have {numbers:,} elements; the maximum is {MAX_ELEMENTS:,}: use a smaller {smaller}"
                )
        return LayerShape(
            self.batch_size,
            self.channels,
            out_channels,
            self.size,
            experts=self.experts,
            patches_per_expert=self.patches_per_expert,
            patch_size=self.patch_size,
            kernel_size=self.kernel_size,
        )

    def _options(self) -> LayerOptions:
        from moesaic.bench.layer_shape import LayerOptions
        from moesaic.ops import Combine, Context, GateOn
        from moesaic.routing.expert_choice import ExpertGate

        gate: Any = check_choice("bench", "--gate", self.gate, get_args(ExpertGate))
        gate_on: Any = check_choice("bench", "--gate-on", self.gate_on, get_args(GateOn))
        context: Any = check_choice("bench", "--context", self.context, get_args(Context))
        combine: Any = check_choice("bench", "--combine", self.combine, get_args(Combine))
        return LayerOptions(self.bias, gate, gate_on, self.expert_norm, context, combine)

    def _dtype(self, default: str) -> str:
        return default if self.dtype is None else check_choice("bench", "--dtype", self.dtype, DTYPES)

    def _passes(self) -> list[Pass]:
        if self.training == self.inference:
            return ["forward", "step"]
        return ["step"] if self.training else ["forward"]
