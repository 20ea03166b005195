"""WRN-pMoE against WRN, the whole network: inference and a training step.

    python benchmarks/model.py [--shape celeba] [--batch 1] [--batch 32] [--what inference] [--out FILE.json]
    python benchmarks/model.py --device cuda [--compile] [--cuda-graph] [--dtype bfloat16 [--autocast]]

WRN-10-10 for faces of 64×64 pixels and two classes (celeba), or for images of 32×32 and ten (cifar). Inference is the
network in eval mode without gradients; a training step is forward, cross-entropy and backward, with ``--optimizer`` an
SGD step with momentum behind it. Networks take turns, and every figure is a ratio within one run: WRN's median time
over WRN-pMoE's of the same fidelity. With ``--burst`` a network runs several times in its turn: in the first of them it
finds the caches full of the others' weights, in the rest of its own.

Both get the same care. On a CPU each is timed contiguous and in channels_last, and its faster format counts; on a GPU
the format is channels_last, and what is compiled or captured in a CUDA graph is so for both.

Where a machine is free for short whiles only, ``--add`` takes a measurement in several runs: medians are over the times
of all of them.

With ``--limit`` a third network runs: WRN-pMoE that gets from the map in front of its routed layer to the vector behind
the mean over the map in no time, both ways: routed layer, BatchNorm, ReLU and mean are gone. It says what any routed
layer could reach at most in this place, how much time this one takes together with what follows up to the mean, and how
much a bar leaves for both; below zero, none is fast enough. What has gone has no weights, and an optimizer no work on
them. In form "print" the shortcut beside the layer is still computed and added.

``--kernels`` tells where the time goes: all that a run launches on a GPU, or all operations on a CPU, each with its
number and its own time in a run, the longest first. What runs beside others counts in full, and gaps are not listed.

Memory is the peak while one network runs, its weights, gradients and optimizer included, on a GPU; with
``--cuda-graph`` that of the same step before it is captured.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from measure import RESULTS, Timing, capture_cuda_graph, machine, quartiles, show, synchronize, time_interleaved, write
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.library import custom_op
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import moesaic
from moesaic.models import WideResNetPMoE
from moesaic.ops import backends

NETWORKS = {"WRN": "wrn10_10", "WRN-pMoE": "wrn10_10_pmoe"}
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
LIMIT = "WRN-pMoE, layer for nothing"
BARS = (1.0, 1.15)
"""Times WRN that WRN-pMoE is to reach: not slower, and what is asked of it on faces."""
KINDS = ("inference", "training step")
PROFILED = 5
"""Runs over which a kernel's time is taken."""
SHOWN = 12
"""Kernels of a network in the printed list; the file has all."""
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Shape:
    """Images, and how many of them."""

    size: int
    classes: int
    batches: dict[str, list[int]]
    """By device."""


SHAPES = {
    "celeba": Shape(64, 2, {"cpu": [1, 32], "cuda": [128]}),
    "cifar": Shape(32, 10, {"cpu": [1, 32], "cuda": [512]}),
}


@dataclass(frozen=True)
class Setting:
    """All that two networks have in common while they are compared."""

    shape: str
    batch: int
    what: str
    fidelity: str
    device: str
    dtype: str
    autocast: bool
    compiled: bool
    cuda_graph: bool
    optimizer: bool
    backend: str | None
    burst: int
    """How often a network runs in its turn."""

    def __str__(self) -> str:
        how = [self.dtype + (" by autocast" if self.autocast else "")]
        how += ["compiled"] * self.compiled + ["CUDA graph"] * self.cuda_graph + ["with optimizer"] * self.optimizer
        how += [f"backend {self.backend}"] if self.backend else []
        how += [f"{self.burst} runs in a turn"] if self.burst > 1 else []
        return f"{self.shape}, {self.what}, batch {self.batch}, fidelity {self.fidelity}: {', '.join(how)}"

    @property
    def weights(self) -> torch.dtype:
        """What the weights are in; under autocast float32."""
        return torch.float32 if self.autocast else getattr(torch, self.dtype)

    def precision(self) -> Any:
        """The context a forward pass runs in."""
        if not self.autocast:
            return nullcontext()
        # a cast that is kept beyond a captured graph would lie in memory that the graph reuses
        return torch.autocast(self.device, getattr(torch, self.dtype), cache_enabled=not self.cuda_graph)

    def network(self, name: str, memory_format: torch.memory_format) -> nn.Module:
        shape = SHAPES[self.shape]
        options = {} if name == "WRN" else {"image_size": shape.size}
        registered = NETWORKS["WRN-pMoE" if name == LIMIT else name]
        torch.manual_seed(0)
        model = moesaic.create_model(registered, num_classes=shape.classes, fidelity=self.fidelity, **options)
        model = model.to(self.device, self.weights, memory_format=memory_format)
        if name == LIMIT:
            leave_out_layer(cast(WideResNetPMoE, model))
        return model.train(self.what == "training step")

    def images(self, memory_format: torch.memory_format) -> Tensor:
        size = SHAPES[self.shape].size
        torch.manual_seed(1)
        x = torch.randn(self.batch, 3, size, size).to(self.device, self.weights)
        return x.contiguous(memory_format=memory_format)

    def targets(self) -> Tensor:
        torch.manual_seed(2)
        return torch.randint(SHAPES[self.shape].classes, (self.batch,)).to(self.device)


def leave_out_layer(model: WideResNetPMoE) -> None:
    """Let the network go from the map in front of its routed layer to the vector behind the mean for nothing.

    All in front of the layer and behind the mean stays as it is, and so does the rest of a compiled graph.
    """
    layer, body = model.moe, cast(nn.Sequential, model.body)
    path = next(path for path, module in model.named_modules() if module is layer)
    model.set_submodule(path, nn.Identity())
    body.norm, body.relu, body.mean = nn.Identity(), nn.Identity(), ForNothing(layer.out_channels)


class ForNothing(nn.Module):
    """(B, C, H, W) to (B, channels), whatever numbers memory has there, NaN included; the gradient likewise.

    A chip may draw less power, and so run a little faster, on some of them: a limit is none the lower for that.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        return vector_for_nothing(x, self.channels)


# Custom ops, since a compiler cannot look into them: it has to compute what they are given, and fills nothing in.
@custom_op("moesaic_benchmarks::vector_for_nothing", mutates_args=())
def vector_for_nothing(x: Tensor, channels: int) -> Tensor:
    return x.new_empty(x.shape[0], channels)


@vector_for_nothing.register_fake
def _(x: Tensor, channels: int) -> Tensor:
    return x.new_empty(x.shape[0], channels)


@custom_op("moesaic_benchmarks::map_for_nothing", mutates_args=())
def map_for_nothing(gradient: Tensor, shape: list[int], strides: list[int]) -> Tensor:
    return gradient.new_empty_strided(shape, strides)


@map_for_nothing.register_fake
def _(gradient: Tensor, shape: list[int], strides: list[int]) -> Tensor:
    return gradient.new_empty_strided(shape, strides)


def keep_layout(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    """Not the map itself, which a compiler might compute a second time to have it."""
    ctx.shape, ctx.strides = list(inputs[0].shape), list(inputs[0].stride())


def gradient_for_nothing(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return map_for_nothing(gradient, ctx.shape, ctx.strides), None


vector_for_nothing.register_autograd(gradient_for_nothing, setup_context=keep_layout)


def inference(model: nn.Module, x: Tensor, setting: Setting) -> Callable[[], object]:
    def run() -> None:
        with torch.no_grad(), setting.precision():
            model(x)

    return run


def training_step(model: nn.Module, x: Tensor, setting: Setting) -> Callable[[], object]:
    targets = setting.targets()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True) if setting.optimizer else None

    def run() -> None:
        model.zero_grad(set_to_none=True)
        with setting.precision():
            scores = model(x)
        F.cross_entropy(scores.float(), targets).backward()
        if optimizer is not None:
            optimizer.step()

    return run


def candidate(
    name: str, setting: Setting, memory_format: torch.memory_format
) -> tuple[Callable[[], object], float | None]:
    """A network's run, and the MiB it needs at most on a GPU."""
    before = torch.cuda.memory_allocated() if setting.device == "cuda" else 0
    model: Any = setting.network(name, memory_format)
    if setting.compiled:
        model = torch.compile(model, dynamic=False)
    make = inference if setting.what == "inference" else training_step
    run = make(model, setting.images(memory_format), setting)
    if setting.device != "cuda":
        return run, None
    for _ in range(3):  # what is chosen or set up once is not what a step needs
        run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / MEBIBYTE
    if not setting.cuda_graph:
        return run, peak
    replay = capture_cuda_graph(run, warm_up=5)
    return lambda: (replay(), run), peak  # which holds the run: its weights and images are in memory the graph reads


class Recorded:
    """A run that writes down how long it took, in ms, each time; of several runs in a turn the mean."""

    def __init__(self, run: Callable[[], object], burst: int) -> None:
        self.run = run
        self.burst = burst
        self.times: list[float] = []

    def __call__(self) -> None:
        synchronize()
        start = time.perf_counter()
        for _ in range(self.burst):
            self.run()
        synchronize()
        self.times.append(1e3 * (time.perf_counter() - start) / self.burst)


def kernels(run: Callable[[], object], device: str) -> list[dict[str, Any]]:
    """What a run launches on a GPU, or an operation on a CPU: name, number and ms in a run, the longest first."""
    on_gpu = device == "cuda"
    run()
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        for _ in range(PROFILED):
            run()
        synchronize()
    number: defaultdict[str, int] = defaultdict(int)
    microseconds: defaultdict[str, float] = defaultdict(float)
    for event in found.events() or ():
        if (event.device_type == DeviceType.CUDA) is on_gpu:
            number[event.name] += 1
            microseconds[event.name] += event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
    longest = sorted(microseconds, key=lambda name: -microseconds[name])
    return [
        {"kernel": name, "number": number[name] / PROFILED, "ms": microseconds[name] / PROFILED / 1e3}
        for name in longest
    ]


def print_kernels(found: dict[str, list[dict[str, Any]]]) -> None:
    for name, rows in found.items():
        known = sum(row["ms"] for row in rows)
        title = f"{name}: {known:.3f} ms in {sum(row['number'] for row in rows):.0f} kernels or operations"
        show(title, [{**row, "kernel": row["kernel"][:80], "ms": f"{row['ms']:.4f}"} for row in rows[:SHOWN]])


def compare(
    setting: Setting,
    names: list[str],
    formats: list[str],
    repetitions: int,
    before: dict[str, list[float]],
    *,
    profiled: bool = False,
) -> tuple[list[dict[str, Any]], dict[str, list[float]], dict[str, list[dict[str, Any]]]]:
    """A row for each network, all times, those of before included, and if ``profiled`` each network's kernels."""
    if setting.compiled:
        torch.compiler.reset()  # a graph for this setting, not a share of one for all of them
    runs: dict[str, Recorded] = {}
    peaks: dict[str, float | None] = {}
    with moesaic.backend(setting.backend) if setting.backend else nullcontext():
        for name in names:
            for label in formats:
                key = f"{name}, {label}"
                run, peaks[key] = candidate(name, setting, FORMATS[label])
                runs[key] = Recorded(run, setting.burst)
        time_interleaved(runs, repetitions)
    times = {key: before.get(key, []) + run.times[-repetitions:] for key, run in runs.items()}
    timings = {key: Timing(statistics.median(each), *quartiles(each)) for key, each in times.items()}
    fastest = {
        name: min((f"{name}, {label}" for label in formats), key=lambda key: timings[key].median) for name in names
    }
    wrn = timings[fastest["WRN"]].median
    rows: list[dict[str, Any]] = []
    for name, key in fastest.items():
        row: dict[str, Any] = {
            "network": name,
            "format": key.rpartition(", ")[2],
            "ms": timings[key].median,
            "× WRN": wrn / timings[key].median,
        }
        if peaks[key] is not None:
            row["MiB"] = peaks[key]
        others: dict[str, Timing] = {label: timings[f"{name}, {label}"] for label in formats}
        rows.append({**row, "formats, ms": others})
    return rows, times, {name: kernels(runs[key].run, setting.device) for name, key in fastest.items() if profiled}


def limit(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What any layer can reach at most, what this one takes up to the mean, and what bars leave for that."""
    ms = {row["network"]: row["ms"] for row in rows}
    if LIMIT not in ms:
        return {}
    rest = ms[LIMIT]
    leaves = {f"bar {bar:g} leaves, ms": ms["WRN"] / bar - rest for bar in BARS}
    return {"limit, × WRN": ms["WRN"] / rest, "layer, ms": ms["WRN-pMoE"] - rest, **leaves}


def settings(arguments: argparse.Namespace) -> list[Setting]:
    dtype = arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")
    if dtype == "float32" and arguments.autocast:
        raise SystemExit("--autocast computes in the --dtype given; with float32 there is nothing to cast to")
    if arguments.cuda_graph and arguments.device != "cuda":
        raise SystemExit("--cuda-graph needs --device cuda")
    return [
        Setting(
            shape=shape,
            batch=batch,
            what=what,
            fidelity=fidelity,
            device=arguments.device,
            dtype=dtype,
            autocast=arguments.autocast,
            compiled=arguments.compile,
            cuda_graph=arguments.cuda_graph,
            optimizer=arguments.optimizer and what == "training step",
            backend=arguments.backend,
            burst=arguments.burst,
        )
        for shape in arguments.shape or SHAPES
        for what in arguments.what or KINDS
        for fidelity in arguments.fidelity or ["best"]
        for batch in arguments.batch or SHAPES[shape].batches[arguments.device]
    ]


def measured(path: Path) -> list[dict[str, Any]]:
    """What a file has."""
    return json.loads(path.read_text())["measurements"] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="may be given several times; default: all")
    parser.add_argument("--batch", type=int, action="append", help="default: 1 and 32; on a GPU 128 (cifar: 512)")
    parser.add_argument("--what", choices=KINDS, action="append", help="default: both")
    parser.add_argument("--fidelity", choices=["best", "released", "print"], action="append", help="default: best")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: float32, on a GPU bfloat16")
    parser.add_argument("--autocast", action="store_true", help="keep weights in float32 and compute in the dtype")
    parser.add_argument("--memory-format", choices=FORMATS, action="append", help="several: the faster one counts")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--cuda-graph", action="store_true", help="capture the whole pass or step")
    parser.add_argument("--optimizer", action="store_true", help="a step of SGD with momentum in each training step")
    parser.add_argument("--backend", choices=backends(), help="default: what moesaic picks")
    parser.add_argument("--burst", type=int, default=1, help="runs of a network in its turn, of which the mean counts")
    parser.add_argument(
        "--limit", action="store_true", help="WRN-pMoE whose routed layer, and all up to the mean, takes no time, too"
    )
    parser.add_argument("--kernels", action="store_true", help="where the time of each network goes, too")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--threads", type=int, help="of a CPU; default: torch's")
    parser.add_argument(
        "--add", action="store_true", help="keep what the file has, and add to times of the same setting"
    )
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/model-DEVICE.json")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.device == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")  # as cuDNN's convolutions have it by default
    formats = arguments.memory_format or (["channels_last"] if arguments.device == "cuda" else list(FORMATS))
    names = [*NETWORKS, LIMIT] if arguments.limit else list(NETWORKS)
    path = arguments.out or RESULTS / f"model-{arguments.device}.json"
    done = measured(path) if arguments.add else []
    for setting in settings(arguments):
        same = next((each for each in done if each["setting"] == asdict(setting)), None)
        if same is not None:
            done.remove(same)
        earlier = same["times, ms"] if same else {}
        rows, times, launched = compare(
            setting, names, formats, arguments.repetitions, earlier, profiled=arguments.kernels
        )
        show(str(setting), [{k: v for k, v in row.items() if k != "formats, ms"} for row in rows])
        bounds = limit(rows)
        if bounds:
            print(", ".join(f"{what} {value:.3f}" for what, value in bounds.items()))
        print_kernels(launched)
        more = {"limit": bounds, "kernels": launched}
        done.append(
            {"setting": asdict(setting), "networks": rows, "times, ms": times}
            | {name: value for name, value in more.items() if value}
        )
        synchronize()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    print("× WRN: above 1 is faster than WRN")
    content = {"machine": machine(), "device": arguments.device, "measurements": done}
    print(f"written to {write(path.stem, content, path)}")


if __name__ == "__main__":
    main()
