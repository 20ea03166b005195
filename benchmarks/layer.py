"""PatchMoE against the dense convolution it stands for, and against routing by masks.

    python benchmarks/layer.py [--shape celeba] [--device cuda --dtype bfloat16] [--out FILE.json]

Every figure is a ratio within one run: the dense layer's median time over ours, for the forward
pass (without gradients) and for a training step (forward and backward, all gradients). All layers
of a table have the same memory format and are timed in turns. Masked is the reference backend,
which runs every expert over the whole map as the released code does.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measure import in_turns, machine, show, write
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import moesaic

RELEASED = {"gate": "softmax_all", "gate_on": "input", "expert_norm": True}


@dataclass(frozen=True)
class Shape:
    """A layer's map and routing; the dense peer has the same channels and kernel."""

    batch: int
    channels: int
    size: int
    experts: int
    patches_per_expert: int
    patch_size: int
    kernel_size: int

    def __str__(self) -> str:
        grid = self.size // self.patch_size
        return (
            f"maps {self.batch}×{self.channels}×{self.size}×{self.size}, {self.kernel_size}×{self.kernel_size} kernel, "
            f"{self.experts} experts, each {self.patches_per_expert} of {grid * grid} patches"
        )

    def dense(self) -> nn.Module:
        return nn.Conv2d(self.channels, self.channels, self.kernel_size, padding=self.kernel_size // 2)

    def routed(self, **options: Any) -> nn.Module:
        return moesaic.PatchMoE(
            self.channels,
            self.channels,
            experts=self.experts,
            patches_per_expert=self.patches_per_expert,
            patch_size=self.patch_size,
            kernel_size=self.kernel_size,
            **options,
        )


SHAPES = {
    "celeba": Shape(8, 640, 16, experts=8, patches_per_expert=2, patch_size=4, kernel_size=3),
    "cifar": Shape(8, 640, 8, experts=4, patches_per_expert=16, patch_size=1, kernel_size=1),
}
GPU_BATCH = {"celeba": 128, "cifar": 512}


FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def forward(model: nn.Module, x: Tensor) -> Callable[[], object]:
    def run() -> None:
        with torch.no_grad():
            model(x)

    return run


def step(model: nn.Module, x: Tensor) -> Callable[[], object]:
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()

    def run() -> None:
        model.zero_grad(set_to_none=True)
        x.grad = None
        y = model(x)
        y.backward(torch.ones_like(y))

    return run


def multiply_adds(model: nn.Module, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    return counter.get_total_flops() // 2


class Masked(nn.Module):
    """A routed layer on the reference backend."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    @moesaic.backend("reference")
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def compare(
    shape: Shape, memory_format: torch.memory_format, where: dict[str, Any], repetitions: int
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    x = torch.randn(shape.batch, shape.channels, shape.size, shape.size, **where)
    x = x.contiguous(memory_format=memory_format)
    models = {
        "dense convolution": shape.dense(),
        "PatchMoE": shape.routed(),
        "PatchMoE, context='patch'": shape.routed(context="patch"),
        "PatchMoE, released block": shape.routed(**RELEASED),
        "masked (reference)": Masked(shape.routed()),
    }
    models = {name: model.to(**where, memory_format=memory_format) for name, model in models.items()}
    if where["device"] == "cuda":
        torch.compiler.reset()  # each shape gets a graph of its own, not a share of one for all shapes
        models["PatchMoE, compiled"] = torch.compile(models["PatchMoE"], fullgraph=True)
    passes = in_turns({name: forward(model, x) for name, model in models.items()}, repetitions)
    steps = in_turns({name: step(model, x) for name, model in models.items()}, repetitions)
    dense = "dense convolution"
    return [
        {
            "layer": name,
            "multiply-adds": round(multiply_adds(model, x) / multiply_adds(models[dense], x), 4),
            "forward, ms": passes[name].median,
            "× dense": passes[dense].median / passes[name].median,
            "step, ms": steps[name].median,
            "× dense, step": steps[dense].median / steps[name].median,
            "quartiles, ms": {"forward": passes[name], "step": steps[name]},
        }
        for name, model in models.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="may be given several times; default: all")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="a GPU gets larger batches")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/layer-DEVICE.json")
    arguments = parser.parse_args()
    where = {"device": arguments.device, "dtype": getattr(torch, arguments.dtype)}
    results: dict[str, Any] = {
        "machine": machine(),
        "device": arguments.device,
        "dtype": arguments.dtype,
        "repetitions": arguments.repetitions,
        "shapes": {},
    }
    for name in arguments.shape or SHAPES:
        shape = SHAPES[name]
        if arguments.device == "cuda":
            shape = replace(shape, batch=GPU_BATCH[name])
        results["shapes"][name] = {"shape": asdict(shape)}
        for label, memory_format in FORMATS.items():
            rows = compare(shape, memory_format, where, arguments.repetitions)
            results["shapes"][name][label] = rows
            show(f"{name}, {label}: {shape}", [{k: v for k, v in row.items() if k != "quartiles, ms"} for row in rows])
    print("multiply-adds: share of the dense layer's; × dense: above 1 is faster than the dense layer")
    print(f"written to {write(f'layer-{arguments.device}', results, arguments.out)}")


if __name__ == "__main__":
    main()
