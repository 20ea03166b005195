"""Every network of the registry, called from many threads at once: are the outputs those of one thread?

    python benchmarks/threads.py [--threads 32] [--calls 100] [--only PATTERN] [--out FILE.json]

All threads share one model in eval mode and start together, before anything is cached. Each calls it with one of eight
inputs after the other, single images and pairs. What one thread computes comes from a copy of the model, which has
caches of its own. Networks with channel gates run as they are and frozen; about half of their channels are closed,
others for each image. Residual networks and VGG-16 have a tenth of their width, `vit_small` two of its blocks.

A call is wrong if its output differs from the expected one by more than 1e-5 of that output's largest value. Between
any two inputs of a model the outputs differ by more than 1e-2 of it, so that a thread which got the gates, the buffers
or the cached weights of another one is noticed. The script ends with status 1 if a call was wrong or failed.
"""

import argparse
import copy
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from measure import machine, show, write
from torch import Tensor, nn

import moesaic
from moesaic.models.deepmoe.network import DeepMoE

CLASSES, INPUTS = 10, 8
TOLERANCE, DIFFERENT = 1e-5, 1e-2
SWITCH_INTERVAL = 1e-4
"""Seconds after which Python lets another thread run; its default is fifty times as long."""
SIZES = {"wrn28": 4, "wrn16_8": 4, "wrn10_10": 4, "wrn": 8, "cifar_resnet": 8, "cifar_mobilenet": 8}
"""Side of the images by the beginning of a name, the smallest for the widest networks; 32 for the others."""


@dataclass
class Result:
    """What the threads found."""

    model: str
    calls: int = 0
    identical: int = 0
    """Calls whose output was the expected one to the bit."""
    wrong: int = 0
    failed: int = 0
    """Calls that raised an error."""
    largest_difference: float = 0.0
    """Of all calls, relative to the largest value of the expected output."""
    seconds: float = 0.0
    errors: dict[str, int] = field(default_factory=dict[str, int])

    def row(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "calls": self.calls,
            "identical": self.identical,
            "wrong": self.wrong,
            "failed": self.failed,
            "largest difference": f"{self.largest_difference:.1e}",
            "seconds": self.seconds,
        }


def image_size(name: str) -> int:
    return next((size for start, size in SIZES.items() if name.startswith(start)), 32)


def create(name: str) -> nn.Module:
    """A network in eval mode with the BatchNorm statistics of a batch: without them all outputs are nearly the same."""
    torch.manual_seed(0)
    size, options = image_size(name), dict[str, Any]()
    if name.startswith(("resnet", "vgg")):
        options["width"] = 0.1
    if name.endswith("_pmoe"):
        options["image_size"] = size
    if name.startswith("vit_small"):  # a dense block and, where there are such, a routed one
        options["depth"] = 2
    model: Any = moesaic.create_model(name, num_classes=CLASSES, **options)
    for gate in model.gates.values() if isinstance(model, DeepMoE) else ():
        nn.init.normal_(gate.weight)
    for module in model.modules():
        if getattr(module, "momentum", None) is not None:
            module.momentum = 1.0
    with torch.no_grad():
        model.train()(torch.randn(8, 3, size, size))
    return model.eval()


def cases(pattern: str) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Names and constructors."""
    for name in moesaic.list_models():
        if fnmatchcase(name, pattern):
            yield name, lambda name=name: create(name)
            if "deepmoe" in name:
                yield f"{name}, frozen", lambda name=name: moesaic.freeze(create(name))


def inputs(size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1 + number % 2, 3, size, size, generator=generator) for number in range(INPUTS)]


@torch.no_grad()
def expected_outputs(model: nn.Module, images: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of one thread."""
    outputs = [model(x) for x in images]
    for one, other in combinations(outputs, 2):
        if one.shape == other.shape and not _difference(one, other) > DIFFERENT:  # zeros give NaN
            raise RuntimeError("two inputs have nearly the same output, so that mixing them up would go unnoticed")
    return outputs


def call_from_threads(
    name: str, model: nn.Module, images: Sequence[Tensor], expected: Sequence[Tensor], threads: int, calls: int
) -> Result:
    """Calls the model from all threads at once and counts what came out."""
    start, result, lock = threading.Barrier(threads, timeout=600), Result(name), threading.Lock()
    errors: Counter[str] = Counter()

    @torch.no_grad()
    def run(thread: int) -> None:
        start.wait()
        for call in range(calls):
            number = (thread + call) % len(images)
            try:
                y = model(images[number])
            except Exception as error:
                with lock:
                    result.calls, result.failed = result.calls + 1, result.failed + 1
                    errors[f"{type(error).__name__}: {error}".splitlines()[0]] += 1
                continue
            difference = _difference(y, expected[number])
            with lock:
                result.calls += 1
                result.identical += torch.equal(y, expected[number])
                result.wrong += not difference <= TOLERANCE  # NaN is wrong
                result.largest_difference = max(result.largest_difference, difference)

    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(threads)))
    result.seconds = time.perf_counter() - begin
    result.errors = dict(errors.most_common(5))
    return result


def _difference(y: Tensor, expected: Tensor) -> float:
    return float((y - expected).abs().max() / expected.abs().max()) if y.shape == expected.shape else float("inf")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--calls", type=int, default=100, help="of each thread")
    parser.add_argument("--only", default="*", help="pattern of names, such as '*deepmoe*'")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/threads.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the threads are ours
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    results: list[Result] = []
    try:
        for name, make in cases(arguments.only):
            model, images = make(), inputs(image_size(name))
            expected = expected_outputs(copy.deepcopy(model), images)
            results.append(call_from_threads(name, model, images, expected, arguments.threads, arguments.calls))
            print(results[-1].row(), flush=True)
    finally:
        sys.setswitchinterval(before)
    if not results:
        parser.error(f"no registered network is called {arguments.only!r}")
    show(f"{arguments.threads} threads × {arguments.calls} calls", [result.row() for result in results])
    calls, bad = sum(result.calls for result in results), sum(result.wrong + result.failed for result in results)
    print(f"{bad} of {calls} calls on {len(results)} models differ from one thread's")
    content = {
        "machine": machine(),
        "threads": arguments.threads,
        "calls_of_each_thread": arguments.calls,
        "tolerance": TOLERANCE,
        "calls": calls,
        "wrong_or_failed": bad,
        "models": results,
    }
    print(write("threads", content, arguments.out))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
