"""The host's time to issue a step in eager mode on a GPU, measured on any machine: no kernel runs.

    python benchmarks/host_time.py [--only "gated VGG"] [--repetitions 200] [--out FILE.json] [--profile]

Needs Triton, of which nothing is compiled. Tensors are small and lie on a CPU, where operators are planned as on a GPU;
a launch of a kernel calls nothing, a CUDA graph calls an empty function of the C library, and dense convolutions
allocate their outputs alone. What is left is Python, torch's own dispatch, and the small arithmetic of torch's other
operators, so that rows with a peer say what ours add. Figures are lower quartiles of the thread's processor time in
microseconds. They are for comparing two versions of the code on one machine: launches, the driver and autograd's own
thread cost more on a GPU machine.

    replayed   share of the operators' calls that replayed a graph
    operators  calls of our operators in a step
"""

import argparse
import cProfile
import ctypes
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from measure import Run, forward_of, machine, show, step_of, write
from torch import Tensor, nn
from torch.nn import functional as F

import moesaic
from moesaic.experts import MLPExperts
from moesaic.models.deepmoe.network import deepmoe
from moesaic.models.vgg import VGG16
from moesaic.models.wide_resnet.pooled_head import pooled_head
from moesaic.ops import operator_graphs, plan_cache, triton_backend


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    microseconds: float
    operators: float
    replayed: float


class Counts:
    """How often operators were called, and replayed from a graph."""

    calls = 0
    replays = 0


class NoGraphs(operator_graphs.GraphDriver):
    """Graphs whose launch calls an empty function."""

    def __init__(self) -> None:
        library: Any = ctypes.CDLL(None)
        self._launch, self._default = library.labs, ctypes.c_void_p(0)

    def capture(self, record: Callable[[int], None], matmul_dtype: torch.dtype | None) -> operator_graphs.Graph | None:
        return operator_graphs.Graph(ctypes.c_void_p(0), lambda executable: None)

    def launch(self, graph: operator_graphs.Graph) -> bool:
        Counts.replays += 1
        return super().launch(graph)


class NoConv(torch.autograd.Function):
    """A convolution that computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, size: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.empty(size, dtype=x.dtype, memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *[torch.empty_like(each) for each in ctx.saved_tensors], None


def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, *_: object
) -> Tensor:
    """Stands for torch's, with its casts under autocast."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        x, weight = x.to(dtype), weight.to(dtype)
    step, pad = (each[0] if isinstance(each, tuple) else each for each in (stride, padding))
    side = (x.shape[2] + 2 * pad - weight.shape[2]) // step + 1
    y: Any = NoConv.apply(x, weight, (x.shape[0], weight.shape[0], side, side))
    return y if bias is None else y + bias.view(-1, 1, 1).to(y.dtype)


def without_gpu() -> None:
    """Makes operators run as on a GPU, but for what is on the device."""
    from moesaic.ops.triton.cached_launch import CachedKernel

    def first_launch(self: Any, key: Any, *_: Any) -> tuple[Any, ...]:
        self._launches[key] = launch = (lambda *_: None, None, None, ())
        return launch

    def call(self: Any, *given: Any) -> Any:
        Counts.calls += 1
        return replay(self, *given)

    def captured(self: Any, *given: Any, pays: bool) -> None:
        made(self, *given, pays=pays)
        self.is_on = pays

    refusal = triton_backend.kernel_refusal
    replay, made = plan_cache.LaunchPlans.call, operator_graphs.CapturedOperator.__init__
    driver = NoGraphs()
    patches: list[tuple[Any, str, Any]] = [
        (CachedKernel, "_first_launch", first_launch),
        (plan_cache.LaunchPlans, "call", call),
        (operator_graphs.CapturedOperator, "__init__", captured),
        (operator_graphs, "driver", lambda device: driver),
        (triton_backend, "kernel_refusal", lambda x: refusal(x) and None),
        (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
        # torch's allocator on a GPU gives the same addresses in every step, that of a CPU does not
        (Tensor, "data_ptr", Tensor.storage_offset),
        (F, "conv2d", conv2d),
    ]
    for owner, name, replacement in patches:
        setattr(owner, name, replacement)
    plan_cache.plan_on("cpu")


def channels_last(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype).contiguous(memory_format=torch.channels_last)


def training_step(model: nn.Module, x: Tensor, classes: int) -> Run:
    """A plain AMP loop without the optimizer, which is torch's."""
    targets = torch.arange(len(x)) % classes

    def run() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
        F.cross_entropy(logits.float(), targets).backward()

    return run


class WideResNetEnd(nn.Module):
    """The routed layer, BatchNorm, ReLU and mean at the end of WRN-10-1-pMoE for faces."""

    def __init__(self) -> None:
        super().__init__()
        network: Any = moesaic.create_model("wrn10_1_pmoe", num_classes=2, image_size=64)
        self.moe, self.norm = network.moe, network.body.norm

    def forward(self, x: Tensor) -> Tensor:
        return pooled_head(self.moe, x, self.norm)


def cases() -> Iterator[tuple[str, Run]]:
    """What is measured."""
    torch.manual_seed(0)
    half = torch.bfloat16
    layer = moesaic.PatchMoE(64, 64, experts=8, patches_per_expert=2, patch_size=4, kernel_size=3).to(half)
    layer = layer.to(memory_format=torch.channels_last)
    x = channels_last(2, 64, 16, 16, dtype=half)
    yield "PatchMoE (CelebA layer): forward", forward_of(layer, x)
    yield "PatchMoE (CelebA layer): step", step_of(layer, x)
    network = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 64, 3, padding=1, bias=False))
    converted = moesaic.convert(network, "1", experts=8, input_size=14).to(memory_format=torch.channels_last)[1]
    for each, what in (
        (converted, "converted 3×3 convolution"),
        (nn.Conv2d(16, 64, 3, padding=1, bias=False), "3×3 convolution"),
    ):
        yield f"{what}, autocast: step", autocast_step(each, channels_last(2, 16, 14, 14))
    experts = MLPExperts(4, 16, 32, 16)
    mlp = moesaic.PatchMoE(16, 16, experts=experts, patches_per_expert=3, combine="sum").to(half)
    yield "expert-choice MLP as PatchMoE: step", step_of(mlp, channels_last(2, 16, 7, 7, dtype=half))
    router = moesaic.ExpertChoice(16, experts=4, patches_per_expert=12)
    tokens = moesaic.TokenMoE(16, experts=MLPExperts(4, 16, 32, 16), router=router).to(half)
    yield "expert-choice MLP as TokenMoE: step", step_of(tokens, torch.zeros(2, 49, 16, dtype=half))
    end = WideResNetEnd().to(memory_format=torch.channels_last).train()
    yield "end of WRN-pMoE, autocast: step", autocast_step(end, channels_last(2, 64, 16, 16))
    for size, what in ((64, "faces"), (32, "CIFAR")):
        for name in ("wrn10_1_pmoe", "wrn10_1"):
            options = {"image_size": size} if name.endswith("pmoe") else {}
            model = moesaic.create_model(name, num_classes=2, **options).to(memory_format=torch.channels_last)
            yield f"{name}, {what}: training step", training_step(model.train(), channels_last(2, 3, size, size), 2)
    gated = deepmoe(VGG16(10, width=0.125), num_classes=10, image_size=32, block=8, mode="topk", keep=0.25)
    for name, model in {"gated VGG-16": gated, "VGG-16": VGG16(10, width=0.125)}.items():
        model = model.to(memory_format=torch.channels_last).train()
        yield f"{name}: training step", training_step(model, channels_last(2, 3, 32, 32), 10)


def autocast_step(model: nn.Module, x: Tensor) -> Run:
    """Forward and backward of a layer under autocast, with all gradients."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    grad = torch.ones_like(forward())

    def run() -> None:
        model.zero_grad(set_to_none=True)
        x.grad = None
        forward().backward(grad)

    return run


def measured(what: str, run: Run, repetitions: int) -> Row:
    """Time of a run, once plans and graphs are there."""
    for _ in range(20):
        run()
    Counts.calls = Counts.replays = 0
    times: list[float] = []
    for _ in range(repetitions):
        start = time.thread_time()
        run()
        times.append(1e6 * (time.thread_time() - start))
    share = Counts.replays / max(Counts.calls, 1)
    return Row(what, statistics.quantiles(times)[0], Counts.calls / repetitions, share)


def profiled(run: Run, repetitions: int) -> None:
    """Prints where the time of a run goes, per function."""
    for _ in range(20):
        run()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(repetitions):
        run()
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="Cases whose name has this in it.")
    parser.add_argument("--repetitions", type=int, default=200, help="Runs of each case.")
    parser.add_argument("--out", type=Path, help="JSON file; default: none is written.")
    parser.add_argument("--profile", action="store_true", help="Print a profile of each case instead.")
    options = parser.parse_args()
    if find_spec("triton") is None:
        parser.error("Triton is not installed, and plans are made of launches of its kernels; pip install triton")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # what no kernel writes may be denormal numbers, on which a CPU is slow
    without_gpu()
    rows: list[Row] = []
    for what, run in cases():
        if options.only in what:
            if options.profile:
                print(what)
                profiled(run, options.repetitions)
            else:
                rows.append(measured(what, run, options.repetitions))
                print(rows[-1], flush=True)
    if rows:
        show("host time of a step without its kernels", [asdict(row) for row in rows])
        if options.out:
            write("host-time", {"machine": machine(), "rows": rows}, options.out)


if __name__ == "__main__":
    main()
