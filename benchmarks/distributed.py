"""Training on 2 and 4 processes against one: the largest difference of a weight, checkpoints that move, weak scaling.

    python benchmarks/distributed.py [--steps 10] [--rounds 5] [--out FILE.json]

Networks of each kind are trained in float64 for ten steps by one process, and by gloo processes with DDP and FSDP2. A
run that is stopped in the middle on one number of ranks is continued on every other. Weak scaling compares the images
per second of two ranks with twice the batch to those of one process with one thread; its limit on this machine is what
two processes reach that know nothing of each other.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import machine, show, write
from torch import Tensor, nn

from moesaic import convert, create_model
from moesaic.data.image_dataset import ImageDataset, LabelledImages, Normalize
from moesaic.layers import SampleMoE
from moesaic.routing import SampleRouter
from moesaic.training import Callback, GateRecipe, Recipe, fit
from moesaic.training.interruption import request_stop

BATCH = 10
"""Images per step of the comparison: neither 4 nor, in the last batch, 2 divide it."""


class Doubles(Normalize):
    """Images as float64."""

    def __call__(self, pixels: Tensor, rand: Tensor | None = None) -> Tensor:
        return super().__call__(pixels).double()


SCALE = Doubles((0.5, 0.5, 0.5), (0.3, 0.3, 0.3))


def brighter(pixels: Tensor, rand: Tensor) -> Tensor:
    return SCALE(pixels) + 0.1 * rand[:, 0, None, None, None].double()


def images(count: int, size: int, seed: int) -> LabelledImages:
    pixels = torch.randint(0, 256, (count, 3, size, size), generator=torch.Generator().manual_seed(seed))
    labels = torch.arange(count) % 3
    return LabelledImages(pixels.to(torch.uint8), labels, labels)


def dataset(count: int, size: int, transform: Any = brighter, test_transform: Any = SCALE) -> ImageDataset:
    names = ("a", "b", "c")
    splits = images(count, size, 0), images(13, size, 1)
    return ImageDataset(*splits, names, names, transform, test_transform, name="noise", normalize=test_transform)


def expert() -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(16, 3))


def mixture() -> nn.Module:
    return SampleMoE(SampleRouter(3, experts=5, patch_size=4), [expert() for _ in range(5)])


def converted() -> nn.Module:
    network = create_model("resnet18", num_classes=3, width=0.125)
    convert(network, "body.5.second.0", experts=2, patches_per_expert=4, patch_size=2)
    return network


def network(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: create_model(name, num_classes=3, **options)


STEPS = Recipe(epochs=2, batch_size=BATCH, lr=0.005, ema_decay=0.9, clip_grad=1.0, label_smoothing=0.1)
BALANCED = replace(STEPS, balance_weight=0.1)
GATES = GateRecipe(target_macs=0.6, joint_fraction=0.5, noise=0.2)
CASES: dict[str, tuple[Callable[[], nn.Module], int, Recipe]] = {
    "wrn10_1": (network("wrn10_1"), 16, STEPS),
    "wrn10_1_pmoe": (network("wrn10_1_pmoe"), 16, STEPS),
    "wrn10_1_pmoe, 2 micro-batches": (network("wrn10_1_pmoe"), 16, replace(STEPS, grad_accum=2)),
    "wrn10_1_pmoe, expert norms": (network("wrn10_1_pmoe", fidelity="released"), 16, STEPS),
    "wrn10_1_pmoe, token choice": (
        network("wrn10_1_pmoe", router="token-choice"),
        16,
        BALANCED,
    ),
    "vit_tiny_patch4_32_moe": (network("vit_tiny_patch4_32_moe", depth=2, image_size=16), 16, STEPS),
    "vit_tiny_patch4_32_skip": (network("vit_tiny_patch4_32_skip", depth=2, image_size=16), 16, STEPS),
    "SampleMoE, BatchNorm in experts": (mixture, 16, BALANCED),
    "resnet18, converted": (converted, 32, STEPS),
    "vgg16_deepmoe": (network("vgg16_deepmoe", width=0.1, image_size=32), 32, replace(STEPS, gates=GATES)),
}


class StopAfter(Callback):
    """Stops a run after a step, as a signal does."""

    def __init__(self, steps: int | None = None) -> None:
        self.steps = steps

    def on_step_end(self, trainer: Any, epoch: float, loss: Tensor) -> None:
        if trainer.train_step.steps == self.steps:
            request_stop()


def train(name: str, parallel: Any, epochs: int, out: Path | None = None, stop: int | None = None) -> nn.Module | None:
    make, size, recipe = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().double()
    options: dict[str, Any] = {"out": out, "callbacks": [StopAfter(stop)], "parallel": parallel}
    try:
        fit(model, dataset(5 * BATCH - 3, size), replace(recipe, epochs=epochs), seed=3, **options)
    except KeyboardInterrupt:
        return None
    return model


def difference(model: nn.Module | None, expected: dict[str, Tensor]) -> float:
    assert model is not None
    found = model.state_dict()
    return max(float((found[name].double() - each.double()).abs().max()) for name, each in expected.items())


def on_ranks(count: int, work: Callable[[], Any]) -> list[Any]:
    """Runs ``work`` on so many forked ranks; one is this process itself, without a group."""
    if count == 1:
        return [work()]
    with tempfile.TemporaryDirectory() as folder:
        children = [_fork(rank, count, work, Path(folder)) for rank in range(count)]
        codes = [os.waitpid(child, 0)[1] for child in children]
        assert not any(codes), "a rank has failed"
        return [json.loads((Path(folder) / f"{rank}").read_text()) for rank in range(count)]


def _fork(rank: int, count: int, work: Callable[[], Any], folder: Path) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        store = f"file://{folder}/store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
        (folder / f"{rank}").write_text(json.dumps(work()))
        torch.distributed.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


JOBS = ((1, "none"), (2, "ddp"), (2, "fsdp"), (4, "ddp"), (4, "fsdp"))


def label(ranks: int, parallel: str) -> str:
    return "1 process" if ranks == 1 else f"{ranks} {parallel}"


def compare_all(epochs: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in CASES:
        alone = train(name, "none", epochs)
        assert alone is not None
        row = {"network": name}
        for ranks, parallel in JOBS[1:]:
            distance = partial(_distance, alone.state_dict(), name, parallel, epochs)
            row[label(ranks, parallel)] = f"{max(on_ranks(ranks, distance)):.1e}"
        rows.append(row)
    return rows


def _distance(expected: dict[str, Tensor], *arguments: Any) -> float:
    return difference(train(*arguments), expected)


def _stops(*arguments: Any) -> bool:
    return train(*arguments, stop=4) is None


def move_checkpoints(name: str) -> list[dict[str, Any]]:
    """The largest difference of a run that is stopped in one job and continued by another."""
    alone, rows = train(name, "none", 2), list[dict[str, Any]]()
    assert alone is not None
    for ranks, parallel in JOBS:
        row: dict[str, Any] = {"written by": label(ranks, parallel)}
        for others, other in JOBS:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "run"
                assert all(on_ranks(ranks, partial(_stops, name, parallel, 2, out)))
                found = on_ranks(others, partial(_distance, alone.state_dict(), name, other, 2, out))
            row[label(others, other)] = f"{max(found):.1e}"
        rows.append(row)
    return rows


def speed(parallel: Any, batch: int) -> float:
    """Images per second of this rank's part, in the second of two epochs."""
    scale = Normalize((0.5, 0.5, 0.5), (0.3, 0.3, 0.3))
    data = dataset(6 * batch, 32, lambda pixels, rand: scale(pixels), scale)
    model = create_model("wrn10_2_pmoe", num_classes=3)
    result = fit(model, data, Recipe(epochs=2, batch_size=batch), parallel=parallel, eval_every=2)
    return result.epochs[1].images_per_second


def weak_scaling(rounds: int, batch: int = 32) -> dict[str, Any]:
    found: dict[str, list[float]] = {name: [] for name in ("one process", "two apart", "two ddp", "two fsdp")}
    for _ in range(rounds):  # interleaved, because other work on the machine comes and goes
        found["one process"].append(speed("none", batch))
        found["two apart"].append(sum(on_ranks(2, lambda: speed("none", batch))))
        for parallel in ("ddp", "fsdp"):
            found[f"two {parallel}"].append(min(on_ranks(2, partial(speed, parallel, 2 * batch))))
    middle = {name: statistics.median(values) for name, values in found.items()}
    ones = found["one process"]
    ratios = {name: [value / one for value, one in zip(found[name], ones, strict=True)] for name in found}
    return {
        "images per second": {name: round(value, 1) for name, value in middle.items()},
        "over one process": {name: round(statistics.median(values), 2) for name, values in ratios.items()},
        "network": "wrn10_2_pmoe, 32×32 pixels, float32",
        "images per rank and step": batch,
        "rounds": rounds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="in fives")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)  # a forked process has no threads but its own
    began = time.monotonic()
    rows = compare_all(given.steps // 5)
    show(f"Largest difference of a weight from one process after {given.steps} steps, float64", rows)
    moves = move_checkpoints("wrn10_1_pmoe, expert norms")
    show("The same after a checkpoint has moved", moves)
    scaling = weak_scaling(given.rounds)
    speeds, ratios = scaling["images per second"], scaling["over one process"]
    show("Weak scaling", [{"": name, "images/s": speeds[name], "×": ratios[name]} for name in speeds])
    content: dict[str, Any] = {"machine": machine(), "steps": given.steps, "differences": rows, "checkpoints": moves}
    content["weak scaling"] = scaling
    content["seconds"] = round(time.monotonic() - began, 1)
    print(f"\n{write('distributed', content, given.out)}")
    worst = max(float(value) for row in (*rows, *moves) for value in list(row.values())[1:])
    return 0 if worst < 1e-8 else 1


if __name__ == "__main__":
    sys.exit(main())
