"""The CelebA layer on a CPU with its matmuls by MKL and by oneDNN, against the dense convolution.

    python benchmarks/cpu_matmuls.py [--repetitions 20] [--out FILE.json]

Times are the least CPU time of one thread, all candidates in turns: figures for a machine that other programs keep
busy, where the wall clock of several threads measures those. `benchmarks/layer.py` has the wall clock.
"""

import argparse
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from layer import CPU_BATCH, NAMED
from measure import RESULTS, machine, show, write
from torch import nn

from moesaic.bench.layer_shape import LayerOptions, routed_layer
from moesaic.ops import cpu_gemm


@contextmanager
def matmuls_by(library: str) -> Generator[None]:
    rule = cpu_gemm.is_faster_by_onednn
    cpu_gemm.is_faster_by_onednn = lambda: library == "oneDNN"
    try:
        yield
    finally:
        cpu_gemm.is_faster_by_onednn = rule


def least_milliseconds(runs: Mapping[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """Of each run, the least CPU time of this thread; each runs twice in its turn, and its second run counts.

    In the first one it meets the caches and the heap as another one left them.
    """
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(repetitions):
        for name, run in runs.items():
            run()
            start = time.thread_time()
            run()
            least[name] = min(least[name], 1e3 * (time.thread_time() - start))
    return least


def forward(module: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    module.eval()

    def run() -> None:
        with torch.no_grad():
            module(x)

    return run


def step(module: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    module.train()
    leaf, upstream = x.clone().requires_grad_(), torch.randn_like(x)

    def run() -> None:
        torch.autograd.grad(module(leaf), [leaf, *module.parameters()], upstream)

    return run


def measured(repetitions: int) -> dict[str, dict[str, float]]:
    shape = NAMED["celeba"]
    torch.manual_seed(0)
    conv = nn.Conv2d(shape.channels, shape.out_channels, shape.kernel_size, padding="same", bias=False)
    layer = routed_layer(shape, LayerOptions(bias=False))
    x = torch.randn(CPU_BATCH, shape.channels, shape.size, shape.size).contiguous(memory_format=torch.channels_last)
    for module in (conv, layer):
        module.to("cpu", memory_format=torch.channels_last)
    found: dict[str, dict[str, float]] = {}
    for what, run_of in (("forward", forward), ("step", step)):
        routed = run_of(layer, x)

        def by(library: str, routed: Callable[[], object] = routed) -> Callable[[], object]:
            def run() -> None:
                with matmuls_by(library):
                    routed()

            return run

        runs = {"dense": run_of(conv, x), "PatchMoE, oneDNN": by("oneDNN"), "PatchMoE, MKL": by("MKL")}
        found[what] = least_milliseconds(runs, repetitions)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu-matmuls.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)  # the backward pass in the thread whose time is taken
    found = measured(arguments.repetitions)
    rows = [
        {"what": what, "layer": name, "CPU ms": least, "× dense": times["dense"] / least}
        for what, times in found.items()
        for name, least in times.items()
    ]
    show(f"celeba, batch {CPU_BATCH}, one thread, float32", rows)
    chosen = "oneDNN" if cpu_gemm.is_faster_by_onednn() else "MKL"
    print(f"On this machine moesaic uses {chosen}.")
    content = {"machine": machine(), "chosen": chosen, "repetitions": arguments.repetitions, "rows": rows}
    write(arguments.out.stem, content, arguments.out)


if __name__ == "__main__":
    main()
