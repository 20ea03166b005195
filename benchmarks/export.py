"""Exported networks in ONNX Runtime against the dense ones in ONNX Runtime.

    python benchmarks/export.py [--threads 2] [--repetitions 40] [--formats onnx pt2 aoti] [--out FILE.json]

Every network is written as `moesaic.training.export` writes it, with a dynamic batch, checked against torch, and run in
turns with its dense peer on random images, each time on the next ones (`time_sessions`):

- a PatchMoE layer: the CelebA layer (640 channels, 16×16 map, 8 experts, 2 of 16 patches of 4×4 each, 3×3 kernels) and
  a convolution of the same channels, batch 8
- WRN-pMoE-10-10 and WRN-10-10, faces of 64×64
- VGG-16 with channel gates and without, images of 32×32: the best blocks of 32 channels, or single channels with ReLU
  gates, different ones for every image; and with all gates open
- a mixture of four ResNet-18 of which a router chooses one for each image, and one of them
- a routed head and mean pooling with a linear layer, on maps of 1280×7×7

Above 1 the routed network is faster. ``pt2`` and ``aoti`` compare files of these formats in torch likewise; AOTInductor
compiles for minutes and cannot compile all of them.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from channel import CLASSES, SIZE, gated_vgg, plain_vgg
from measure import Timing, machine, quartiles, show, write
from torch import Tensor, nn

import moesaic
from moesaic.data.image_dataset import Normalize
from moesaic.models.deepmoe.network import deepmoe
from moesaic.models.resnet import ResNet
from moesaic.models.vgg import VGG16
from moesaic.training.checkpoint import Checkpoint, Metadata
from moesaic.training.export import SUFFIXES, Format, export, load_exported

IMAGES = 12

Network = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A routed network, its dense peer, and the ratio of times that it is to reach."""

    name: str
    routed: Callable[[], nn.Module]
    dense: Callable[[], nn.Module]
    peer: str
    shape: tuple[int, int, int]
    batches: tuple[int, ...]
    bar: float | None = None
    """At the first of the batches."""


def patch_layer() -> nn.Module:
    return moesaic.PatchMoE(640, 640, experts=8, patches_per_expert=2, patch_size=4, kernel_size=3)


@torch.no_grad()
def open_vgg() -> nn.Module:
    """Gates in blocks of 32 that are all open, as at the start of training."""
    return deepmoe(VGG16(CLASSES), num_classes=CLASSES, image_size=SIZE, block=32)


@torch.no_grad()
def mixture() -> nn.Module:
    router = moesaic.routing.SampleRouter(3, experts=4, patch_size=4)
    nn.init.normal_(router.weight)
    return moesaic.SampleMoE(router, [resnet() for _ in range(4)])


def resnet() -> nn.Module:
    return ResNet(18, CLASSES)


def wrn(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: moesaic.create_model(name, num_classes=2, **options)


TIMED = 5
"""Timed calls in a turn."""
IMAGE, MAP = (3, SIZE, SIZE), (1280, 7, 7)
CASES = [
    Case(
        "PatchMoE",
        patch_layer,
        lambda: nn.Conv2d(640, 640, 3, padding=1),
        "3×3 convolution",
        (640, 16, 16),
        (8, 1),
        3.5,
    ),
    Case("WRN-pMoE", wrn("wrn10_10_pmoe", image_size=64), wrn("wrn10_10"), "WRN", (3, 64, 64), (1,), 1.2),
    Case("VGG-16, 25 % open, blocks of 32", lambda: gated_vgg(32, 0.25), plain_vgg, "VGG-16", IMAGE, (1, 8), 1.5),
    Case("VGG-16, 50 % open, blocks of 32", lambda: gated_vgg(32, 0.5), plain_vgg, "VGG-16", IMAGE, (1,)),
    Case("VGG-16, 25 % open, single channels", lambda: gated_vgg(1, 0.25), plain_vgg, "VGG-16", IMAGE, (1,)),
    Case("VGG-16, all open", open_vgg, plain_vgg, "VGG-16", IMAGE, (1,)),
    Case("mixture of four ResNet-18", mixture, resnet, "ResNet-18", IMAGE, (1, 8), 1 / 1.3),
    Case(
        "routed head",
        lambda: moesaic.RoutedHead(1280, CLASSES),
        lambda: moesaic.layers.PooledHead(1280, CLASSES),
        "mean pooling and linear layer",
        MAP,
        (1,),
    ),
]


def exported(model: nn.Module, shape: tuple[int, int, int], format: Format, folder: Path, threads: int) -> Network:
    """The network from its file, after a check of its logits."""
    names = tuple(str(number) for number in range(CLASSES))
    scale = Normalize((0.0,) * shape[0], (1.0,) * shape[0])
    checkpoint = Checkpoint(folder, model.eval(), Metadata(None, names, names, scale, shape, "random", {}))
    done = export(checkpoint, folder / f"network{SUFFIXES[format]}", format)
    if format == "onnx":
        import onnxruntime

        options: Any = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        session: Any = onnxruntime.InferenceSession(str(done.path), options, providers=["CPUExecutionProvider"])

        def network(x: Tensor) -> Tensor:
            return torch.from_numpy(session.run(None, {"images": x.numpy()})[0])
    else:
        network, _ = load_exported(done.path)
    largest = max(float(each.abs().max()) for each in done.expected)
    difference = done.difference(tuple(network(images) for images in done.examples))
    assert difference <= 1e-3 * max(largest, 1.0), f"{type(model).__name__} differs by {difference}"
    return network


def in_turn(network: Network, images: list[Tensor]) -> Callable[[], object]:
    number = -1

    def run() -> None:
        nonlocal number
        number = (number + 1) % len(images)
        network(images[number])

    return run


def time_sessions(candidates: dict[str, Callable[[], None]], repetitions: int) -> dict[str, Timing]:
    """Times the candidates alternately, five calls in a turn after two that are not timed.

    The threads of a session keep spinning for a while after it has run. With those of the other session still
    spinning, two cores would have three busy threads, which no one has who runs one network. Users call one network
    many times in a row, so that all calls of a turn count.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for repetition in range(-2, repetitions):
        for name, run in candidates.items():
            run()
            run()
            for _ in range(TIMED):
                start = time.perf_counter()
                run()
                if repetition >= 0:
                    times[name].append(1e3 * (time.perf_counter() - start))
    return {name: Timing(statistics.median(each), *quartiles(each)) for name, each in times.items()}


@torch.no_grad()
def measured(case: Case, format: Format, threads: int, repetitions: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        networks = {
            kind: exported(make(), case.shape, format, Path(folder), threads)
            for kind, make in (("routed", case.routed), ("dense", case.dense))
        }
        rows: list[dict[str, Any]] = []
        for batch in case.batches:
            images = [torch.rand(batch, *case.shape) for _ in range(IMAGES)]
            found = time_sessions({kind: in_turn(network, images) for kind, network in networks.items()}, repetitions)
            routed, dense = found["routed"].median, found["dense"].median
            row = {"network": case.name, "format": format, "batch": batch, "routed, ms": routed}
            row |= {"dense": case.peer, "dense, ms": dense, "× dense": dense / routed}
            row["bar"] = f"{case.bar:.2f}" if case.bar is not None and batch == case.batches[0] else "–"
            rows.append({**row, "timings, ms": found})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--formats", nargs="+", choices=["onnx", "pt2", "aoti"], default=["onnx"])
    parser.add_argument("--only", default="", help="networks whose name contains this")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/export-cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = []
    for format in arguments.formats:
        for case in CASES:
            if arguments.only not in case.name:
                continue
            try:
                rows += measured(case, format, arguments.threads, arguments.repetitions)
            except ValueError as refusal:
                print(f"{case.name}: {refusal}")
    show("exported networks", [{k: v for k, v in row.items() if k != "timings, ms"} for row in rows])
    content = {"machine": {**machine(), "onnxruntime": _runtime()}, "networks": rows}
    print(f"written to {write('export-cpu', content, arguments.out)}")


def _runtime() -> str:
    import onnxruntime

    return str(onnxruntime.__version__)


if __name__ == "__main__":
    main()
