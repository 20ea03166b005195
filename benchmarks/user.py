"""What a user gets: routed layers and networks in eager mode, compiled and in `fit`, against their dense peers.

    python benchmarks/user.py --device cuda [--only layers,wrn] [--repetitions 20] [--out FILE.json]
    python benchmarks/user.py --small       # tiny sizes, on a CPU: does everything run?

Nothing is captured by hand, but for the step that the speed of `fit` is compared with. A figure is the peer's median
wall-clock time over ours, with a synchronisation around each run and both in turns: above 1, routing is faster. Rows of
`SampleMoE` are the other way round: our time over that of one network. On a GPU at full size the table says which bars
are reached.

    layers     PatchMoE against the dense convolution: forward pass and step, and the host's time to issue a step
    mlp        expert-choice MLPs on tokens against a dense MLP of equal arithmetic
    wrn        WRN-10-10-pMoE against WRN-10-10: a plain AMP loop with SGD, eager and compiled
    timm       resnet50 and convnext_tiny with converted layers against the same as they are (needs timm)
    samples    SampleMoE with four ResNet18 against one, in its first steps and later: on repeated sizes
               (`pad=True`), and in the plain loop
    channels   VGG-16 with gates in blocks of 32, a quarter open, against the plain one and BatchNorm folded
    thread     the steps above again with torch.autograd.set_multithreading_enabled(False), for both
    fit        images per second of `moesaic.training.fit`, WRN-pMoE over WRN: eager and from CUDA graphs; and those of
               WRN-pMoE as a share of what a captured step of the same batch allows
    compiled   the same with compile=True
"""

import argparse
import copy
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from measure import (
    Run,
    capture_cuda_graph,
    forward_of,
    machine,
    show,
    step_of,
    synchronize,
    time_interleaved,
    write,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

import moesaic
from moesaic.data.image_dataset import ImageDataset, LabelledImages, Normalize
from moesaic.experts import MLPExperts
from moesaic.models.deepmoe.network import deepmoe
from moesaic.models.resnet import ResNet
from moesaic.models.vgg import VGG16
from moesaic.routing import SampleRouter
from moesaic.training import Recipe, fit


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    figure: float
    """Peer's time over ours; of "× one" rows, our time over the peer's; of "ms" rows, milliseconds; of "of a captured
    step" rows, a share of its speed."""
    unit: str
    bar: float | None
    goal: float | None
    ours_ms: float | None = None
    peer_ms: float | None = None

    @property
    def reached(self) -> str:
        if self.bar is None:
            return "–"
        more = self.unit in ("× as fast", "of a captured step")
        better = self.figure >= self.bar if more else self.figure <= self.bar
        return "yes" if better else "no"


@dataclass(frozen=True)
class Options:
    """What all rows have in common."""

    device: str
    small: bool
    repetitions: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def pick(self, full: int, small: int) -> int:
        """A size: that of the table, or a small one."""
        return small if self.small else full

    def autocast(self) -> Any:
        return torch.autocast("cuda", torch.bfloat16) if self.device == "cuda" else nullcontext()


def ratio(what: str, ours: Run, peer: Run, options: Options, bar: float | None, goal: float | None) -> Row:
    """Ours and the peer in turns."""
    found = time_interleaved({"ours": ours, "peer": peer}, options.repetitions, warm_up=1 if options.small else 10)
    mine, theirs = found["ours"].median, found["peer"].median
    return Row(what, theirs / mine, "× as fast", bar, goal, mine, theirs)


def training_step(model: Any, x: Tensor, classes: int, options: Options) -> Run:
    """A plain AMP loop: forward, cross-entropy, backward, SGD with momentum."""
    targets = torch.arange(len(x), device=x.device) % classes
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def run() -> None:
        optimizer.zero_grad()
        with options.autocast():
            logits = model(x)
        F.cross_entropy(logits.float(), targets).backward()
        optimizer.step()

    return run


def images(batch: int, size: int, options: Options, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(batch, 3, size, size, device=options.device, dtype=dtype)
    return x.contiguous(memory_format=torch.channels_last)


def on_device(model: nn.Module, options: Options, dtype: torch.dtype = torch.float32) -> nn.Module:
    return model.to(options.device, dtype, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def issue_milliseconds(run: Run, repetitions: int) -> float:
    """The host's time to issue a run, without waiting for the device: median of runs on an empty queue."""
    times: list[float] = []
    for _ in range(repetitions):
        synchronize()
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    synchronize()
    return statistics.median(times)


@dataclass(frozen=True)
class LayerShape:
    """A routed layer on maps (B, channels, side, side)."""

    channels: int
    side: int
    patch: int
    kernel: int
    experts: int
    patches: int
    batch: int


def layers(options: Options) -> Iterator[Row]:
    """PatchMoE against the dense convolution of the same channels and kernel."""
    shapes = {
        "CelebA layer, 640 ch, 16×16": (LayerShape(640, 16, 4, 3, 8, 2, 128), (1.2, 2.0), (1.2, 2.0)),
        "512 ch, 28×28, 6 of 49": (LayerShape(512, 28, 4, 3, 8, 6, 64), None, (1.2, 2.0)),
        "256 ch, 14×14, 6 of 49": (LayerShape(256, 14, 2, 3, 8, 6, 256), None, (0.6, 1.1)),
    }
    for name, (shape, forward_bars, step_bars) in shapes.items():
        channels, batch = options.pick(shape.channels, 16), options.pick(shape.batch, 2)
        torch.manual_seed(0)
        routed = moesaic.PatchMoE(
            channels,
            channels,
            experts=shape.experts,
            patches_per_expert=shape.patches,
            patch_size=shape.patch,
            kernel_size=shape.kernel,
        )
        dense = nn.Conv2d(channels, channels, shape.kernel, padding=shape.kernel // 2)
        routed, dense = on_device(routed, options, options.dtype), on_device(dense, options, options.dtype)
        x = torch.randn(batch, channels, shape.side, shape.side, device=options.device, dtype=options.dtype)
        x = x.contiguous(memory_format=torch.channels_last)
        if forward_bars:
            yield ratio(f"{name}: forward", forward_of(routed, x), forward_of(dense, x), options, *forward_bars)
        step = step_of(routed, x)
        yield ratio(f"{name}: step", step, step_of(dense, x), options, *step_bars)
        if forward_bars:
            issued = issue_milliseconds(step, options.repetitions)
            yield Row(f"{name}: host time to issue a step", issued, "ms", 1.0, 0.5)


def mlp(options: Options) -> Iterator[Row]:
    """Expert-choice MLPs of 16 experts × 12 of 196 tokens against an MLP over as many rows."""
    channels, hidden, batch, side = options.pick(768, 16), options.pick(3072, 32), options.pick(128, 2), 14
    torch.manual_seed(0)
    experts = MLPExperts(16, channels, hidden, channels)
    routed = moesaic.PatchMoE(channels, channels, experts=experts, patches_per_expert=12, combine="sum")
    dense = nn.Sequential(nn.Linear(channels, hidden), nn.GELU(), nn.Linear(hidden, channels))
    routed, dense = on_device(routed, options, options.dtype), dense.to(options.device, options.dtype)
    x = torch.randn(batch, channels, side, side, device=options.device, dtype=options.dtype)
    rows = torch.randn(batch * 16 * 12, channels, device=options.device, dtype=options.dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    yield ratio("expert-choice MLP, 196 tokens: step", step_of(routed, x), step_of(dense, rows), options, 0.9, 1.0)


WRN_CASES = {
    "faces B=128": (64, 2, 128, 1.05),
    "CIFAR B=512": (32, 10, 512, 1.05),
    "faces B=32": (64, 2, 32, 0.92),
}


def wrn_eager(options: Options) -> Iterator[Row]:
    """The whole network in a plain AMP loop."""
    for name, (size, classes, batch, bar) in WRN_CASES.items():
        pair = _wrn_pair(size, classes, options)
        x = images(options.pick(batch, 2), size, options)
        ours, peer = (training_step(model, x, classes, options) for model in pair)
        yield ratio(f"WRN-pMoE, {name}: eager step", ours, peer, options, bar, 1.12)


def wrn(options: Options) -> Iterator[Row]:
    """The whole network in a plain AMP loop, eager and compiled."""
    yield from wrn_eager(options)
    modes = {
        "default": (("faces B=128", 1.08, 1.15),),
        "reduce-overhead": (("faces B=128", 1.15, 1.25), ("CIFAR B=512", 1.2, 1.25)),
    }
    if options.small:
        return  # compiling takes minutes
    for mode, bars in modes.items():
        for name, bar, goal in bars:
            size, classes, batch, _ = WRN_CASES[name]
            torch.compiler.reset()
            pair = [torch.compile(model, mode=mode) for model in _wrn_pair(size, classes, options)]
            ours, peer = (training_step(model, images(batch, size, options), classes, options) for model in pair)
            yield ratio(f"WRN-pMoE, {name}: torch.compile, {mode}", ours, peer, options, bar, goal)


def _wrn_pair(size: int, classes: int, options: Options) -> tuple[nn.Module, nn.Module]:
    name = "wrn10_1" if options.small else "wrn10_10"
    torch.manual_seed(0)
    routed = moesaic.create_model(f"{name}_pmoe", num_classes=classes, image_size=size)
    dense = moesaic.create_model(name, num_classes=classes)
    return on_device(routed, options).train(), on_device(dense, options).train()


def other_networks(options: Options) -> Iterator[Row]:
    """Timm's networks with converted layers."""
    if find_spec("timm") is None:
        print("timm is not installed: its rows are left out")
        return
    import timm

    cases = {
        "resnet50": ([f"layer3.{i}.conv2" for i in range(1, 6)], 8, 0.95, 1.05),
        "convnext_tiny": (["stages.2.blocks.*.mlp.fc1"], 4, 0.95, 1.1),
    }
    size, batch = 224, options.pick(128, 1)
    for name, (places, experts, bar, goal) in cases.items():
        torch.manual_seed(0)
        dense = timm.create_model(name, num_classes=10)
        routed: nn.Module = copy.deepcopy(dense)
        moesaic.convert(routed, places, experts=experts, input_size=size)
        x = images(batch, size, options)
        pair = [on_device(model, options).train() for model in (routed, dense)]
        ours, peer = (training_step(model, x, 10, options) for model in pair)
        yield ratio(f"timm {name}, {places[0]}, … converted: AMP eager step", ours, peer, options, bar, goal)


def samples(options: Options) -> Iterator[Row]:
    """Four networks of which each sample uses one, padded and in a plain loop, against one network on all samples."""
    batch, width, early, late = options.pick(512, 32), 1.0 if not options.small else 0.125, options.pick(40, 2), 200
    names = {True: "padded", False: "plain loop"}
    for benchmark in (False, True) if options.device == "cuda" else (False,):
        torch.backends.cudnn.benchmark = benchmark
        suffix = ", cudnn.benchmark" if benchmark else ""
        x = images(batch, 32, options)
        torch.manual_seed(0)
        one = on_device(ResNet(18, num_classes=10, width=width), options).train()
        runs = {"one": training_step(one, x, 10, options)}
        runs["one"]()
        for pad, name in names.items():
            if benchmark and not pad:
                continue  # cuDNN would try its algorithms for every new size: minutes for forty steps
            router = SampleRouter(3, experts=4, patch_size=4)
            experts = [ResNet(18, num_classes=10, width=width) for _ in range(4)]
            mixture = on_device(moesaic.SampleMoE(router, experts, pad=pad), options).train()
            runs[name] = training_step(mixture, x, 10, options)
            start, peer = _elapsed(runs[name], early), _elapsed(runs["one"], early)
            bars = (3.0, 1.3) if pad else (None, None)
            yield Row(f"SampleMoE of 4, {name}: first {early} steps{suffix}", start / peer, "× one", *bars, start, peer)
            for _ in range(0 if options.small else late - early):
                runs[name]()
        found = time_interleaved(runs, options.repetitions, warm_up=1 if options.small else 10)
        for pad, name in names.items():
            if name not in found:
                continue
            mine, peer = found[name].median, found["one"].median
            bars = (2.0, 1.3) if pad else (None, None)
            yield Row(f"SampleMoE of 4, {name}: later{suffix}", mine / peer, "× one", *bars, mine, peer)
    torch.backends.cudnn.benchmark = False


def _elapsed(run: Run, times: int) -> float:
    """Mean milliseconds of the next runs."""
    synchronize()
    start = time.perf_counter()
    for _ in range(times):
        run()
    synchronize()
    return 1e3 * (time.perf_counter() - start) / times


def channels(options: Options) -> Iterator[Row]:
    """Gated VGG-16 as users run it: `moesaic.freeze` for inference, the network itself for training."""
    torch.manual_seed(0)
    plain = VGG16(10)
    gated = deepmoe(VGG16(10), num_classes=10, image_size=32, block=32, mode="topk", keep=0.25)
    folded = copy.deepcopy(plain).eval()
    for number in range(1, 14):
        conv, norm = folded.body.get_submodule(f"conv{number}"), folded.body.get_submodule(f"norm{number}")
        setattr(folded.body, f"conv{number}", fuse_conv_bn_eval(conv, norm))
        setattr(folded.body, f"norm{number}", nn.Identity())
    dtype = options.dtype
    gated, plain, folded = (on_device(model, options, dtype).eval() for model in (gated, plain, folded))
    ours = moesaic.freeze(gated)
    large = options.pick(256, 2)
    for batch, bar, goal in ((large, 1.5, 2.5), (1, 1.0, 2.0)):
        x = images(batch, 32, options, dtype)
        what = f"gated VGG-16, B={batch}: inference"
        yield ratio(f"{what}, against plain", forward_of(ours, x), forward_of(plain, x), options, bar, goal)
        if batch == large:
            yield ratio(f"{what}, against folded", forward_of(ours, x), forward_of(folded, x), options, 1.2, 2.0)
    yield from gated_training(options)


def gated_training(options: Options) -> Iterator[Row]:
    """A training step of gated VGG-16."""
    torch.manual_seed(0)
    plain = VGG16(10)
    gated = deepmoe(VGG16(10), num_classes=10, image_size=32, block=32, mode="topk", keep=0.25)
    x = images(options.pick(256, 2), 32, options)
    steps = (training_step(on_device(model, options).train(), x, 10, options) for model in (gated, plain))
    yield ratio("gated VGG-16: training step", *steps, options, 0.6, 1.0)


def calling_thread(options: Options) -> Iterator[Row]:
    """Steps with the backward pass in the thread that calls it, where Python code of operators runs faster."""
    with torch.autograd.set_multithreading_enabled(False):
        for part in (layers, mlp, wrn_eager, gated_training):
            for row in part(options):
                if "forward" not in row.what:
                    yield replace(row, what=f"{row.what}, one thread", bar=None, goal=None)


def fitted(options: Options) -> Iterator[Row]:
    """Images per second in the last epoch of `fit`; graphs are what it uses by default, and the bars are for them."""
    modes: dict[str, dict[str, Any]] = {"eager": {"cuda_graph": False}}
    if options.device == "cuda":
        modes |= {"CUDA graphs": {"cuda_graph": True}}
    yield from _fit_rows(modes, options)


def fitted_compiled(options: Options) -> Iterator[Row]:
    """The same with compiled networks."""
    if not options.small:  # compiling takes minutes
        yield from _fit_rows({"compile=True": {"compile": True}}, options)


def _fit_rows(modes: dict[str, dict[str, Any]], options: Options) -> Iterator[Row]:
    cases = {"faces B=128": (64, 2, 128), "CIFAR B=512": (32, 10, 512)}
    for name, (size, classes, batch) in cases.items():
        batch = options.pick(batch, 8)
        count = batch * options.pick(40, 2)
        labels = torch.arange(count) % classes
        pixels = torch.randint(256, (count, 3, size, size), dtype=torch.uint8)
        scale = Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
        some = LabelledImages(pixels, labels, labels)
        few = LabelledImages(pixels[:batch], labels[:batch], labels[:batch])
        names = tuple(f"class {k}" for k in range(classes))
        dataset = ImageDataset(some, few, names, names, scale, scale)
        for mode, how in modes.items():
            speeds = [_fit_speed(model, dataset, batch, options, **how) for model in _wrn_pair(size, classes, options)]
            bars = (1.12, 1.2) if mode == "CUDA graphs" else (None, None)
            yield Row(f"fit, {mode}, {name}: {speeds[0]:,.0f} images/s", speeds[0] / speeds[1], "× as fast", *bars)
            if mode == "CUDA graphs":
                allowed = _captured_speed(images(batch, size, options), classes, options)
                what = f"fit, {name}: {speeds[0]:,.0f} of {allowed:,.0f} images/s"
                yield Row(what, speeds[0] / allowed, "of a captured step", 0.9, 0.97)


def _fit_speed(
    model: nn.Module,
    dataset: ImageDataset,
    batch: int,
    options: Options,
    cuda_graph: bool | None = None,
    compile: bool = False,
) -> float:
    """Images per second in the last epoch."""
    recipe = Recipe(epochs=options.pick(3, 1), batch_size=batch, compile=compile)
    found = fit(model, dataset, recipe, device=options.device, eval_every=recipe.epochs, cuda_graph=cuda_graph)
    return found.epochs[-1].images_per_second


def _captured_speed(x: Tensor, classes: int, options: Options) -> float:
    """Images per second of a plain training step of WRN-pMoE with SGD in a CUDA graph, on one batch."""
    model, _ = _wrn_pair(x.shape[-1], classes, options)
    step = capture_cuda_graph(training_step(model, x, classes, options))
    found = time_interleaved({"captured": step}, options.repetitions, warm_up=10)
    return 1e3 * len(x) / found["captured"].median


PARTS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "layers": layers,
    "mlp": mlp,
    "wrn": wrn,
    "timm": other_networks,
    "samples": samples,
    "channels": channels,
    "thread": calling_thread,
    "fit": fitted,
    "compiled": fitted_compiled,
}


def write_rows(options: Options, rows: list[Row], out: Path | None) -> Path:
    content = {"machine": machine(), "options": {**asdict(options)}, "rows": [asdict(row) for row in rows]}
    return write(f"user-{options.device}", content, out)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", help=f"parts, with commas: {','.join(PARTS)}")
    parser.add_argument("--small", action="store_true", help="tiny sizes: does everything run?")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/user-DEVICE.json")
    given = parser.parse_args(arguments)
    names = given.only.split(",") if given.only else list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise SystemExit(f"--only: {', '.join(unknown)} is not a part; choose from {', '.join(PARTS)}")
    options = Options(given.device, given.small, given.repetitions)
    rows: list[Row] = []
    failed: list[str] = []
    for name in names:
        start = time.perf_counter()
        try:
            for row in PARTS[name](options):
                rows.append(row)
                print(f"  {row.what}: {row.figure:.3f} {row.unit}", flush=True)
            synchronize()
        except Exception:  # the other parts are worth their time
            traceback.print_exc()
            failed.append(name)
        if options.device == "cuda":
            torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        write_rows(options, rows, given.out)
    if not rows:
        raise SystemExit("no part has ended")
    judged = options.device == "cuda" and not options.small  # the bars are for the full sizes on a GPU
    shown = [
        {"what": row.what, "figure": row.figure, "unit": row.unit}
        | ({"bar": row.bar or "–", "reached": row.reached} if judged else {})
        for row in rows
    ]
    show("Above 1 in “× as fast”: routing is faster; “× one” and “ms”: less is better", shown)
    print(f"written to {write_rows(options, rows, given.out)}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
