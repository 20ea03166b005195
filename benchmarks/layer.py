"""PatchMoE against the dense convolution it stands for, against routing by masks, and against plain torch.

    python benchmarks/layer.py [--only celeba,cifar] [--grid] [--quick] [--out FILE.json]
    python benchmarks/layer.py --device cuda [--warm 12] [--no-compile]

Two shapes have names: celeba and cifar, the routed layers of the paper's networks. On a GPU a grid of shapes around
them is measured too; on a CPU only with ``--grid``, with smaller batches. Each named shape is measured in three forms:
plain without bias, plain with bias, both against the convolution with the same bias, and the released block (softmax
over all patches, gate on the input, BatchNorm and ReLU in each expert) against BatchNorm, ReLU and convolution; a shape
of the grid in the first form.

Every figure is a ratio within one run: the time of the fastest dense layer over that of another one. Dense are the
convolution, for 1×1 kernels also a linear layer over rows of pixels, and, where there is BatchNorm, the same compiled
for a GPU. On a CPU the faster of two memory formats counts, of every layer; on a GPU all are channels_last. Forward is
eval mode without gradients; a step is forward and backward, with the gradients of map, experts and router. On a GPU
both are CUDA graphs; what cannot be captured is compared with nothing. Layers take turns. "PatchMoE, torch" gathers
patches and multiplies them in plain torch. Named shapes have two more peers: the masked one, backend "reference", which
runs every expert over the whole map as the released code does, and on a GPU plain torch compiled (plain form, step
alone).

Before a shape is timed, outputs and gradients of some of its maps are compared with the reference in float64, on fresh
random inputs and with NaN in the memory that is given out. The floor is the time that the least work takes on this
machine: the larger of operations over the measured rate of large matrix products, and of bytes over the measured rate
of copies. Memory is what a step takes at most beside its map and weights and the gradient it is given.

A failure is written down with its message, and the rest goes on. When measuring has taken ``--budget`` seconds, what is
left of the grid is skipped, and the file says so. Most of a shape's time goes into compiling its kernels. With
``--warm`` so many processes first run all shapes once, beside each other, which fills the caches of compiled kernels;
they have ended before anything is timed.
"""

import argparse
import gc
import json
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from measure import RESULTS, machine, show, write

from moesaic.bench.layer_accuracy import TOLERANCE, layer_errors
from moesaic.bench.layer_benchmark import LayerTimes, Pass, choose_backend, fastest_dense, layer_times, run_once
from moesaic.bench.layer_shape import LayerOptions, LayerShape, dense_work, routed_work
from moesaic.bench.timing import Roofline, measure_roofline

PASSES: tuple[Pass, ...] = ("forward", "step")
FORMS = {
    "plain": LayerOptions(bias=False),
    "with bias": LayerOptions(bias=True),
    "released": LayerOptions(gate="softmax_all", gate_on="input", expert_norm=True),
}
COMPILED_FORMS = ("plain", "released")
NAMED = {
    "celeba": LayerShape(128, 640, 640, 16, experts=8, patches_per_expert=2, patch_size=4, kernel_size=3),
    "cifar": LayerShape(512, 640, 640, 8, experts=4, patches_per_expert=16, patch_size=1, kernel_size=1),
}
CPU_BATCH = 8
MEBIBYTE = 2**20
CHECKED_MAPS = {"cuda": 3, "cpu": 1}
CHECKED_MAPS_OF_GRID = {"cuda": 2, "cpu": 1}


def around(**values: list[Any]) -> dict[str, LayerShape]:
    """The named shapes with one thing changed at a time."""
    short = {"patches_per_expert": "l", "experts": "k", "channels": "c", "batch": "b"}
    also = {"channels": "out_channels"}
    return {
        f"{name}-{short[what]}{value}": replace(center, **{what: value, also.get(what, what): value})
        for what, each in values.items()
        for value in each
        for name, center in NAMED.items()
        if getattr(center, what) != value
    }


GRID = {
    "celeba-l1": replace(NAMED["celeba"], patches_per_expert=1),
    "cifar-l4": replace(NAMED["cifar"], patches_per_expert=4),
    "celeba-l4": replace(NAMED["celeba"], patches_per_expert=4),
    "cifar-l8": replace(NAMED["cifar"], patches_per_expert=8),
    "celeba-l8": replace(NAMED["celeba"], patches_per_expert=8),
    "cifar-l32": replace(NAMED["cifar"], patches_per_expert=32),
    "celeba-l16": replace(NAMED["celeba"], patches_per_expert=16),
    "cifar-l64": replace(NAMED["cifar"], patches_per_expert=64),
    **around(batch=[1, 8, 32, 128, 512], channels=[64, 256, 1024], experts=[4, 8, 16, 64]),
    "celeba-p1": replace(NAMED["celeba"], patch_size=1, patches_per_expert=32),
    "cifar-p2": replace(NAMED["cifar"], patch_size=2, patches_per_expert=4),
    "celeba-p2": replace(NAMED["celeba"], patch_size=2, patches_per_expert=8),
    "cifar-p4": replace(NAMED["cifar"], patch_size=4, patches_per_expert=1),
    "celeba-p3": replace(NAMED["celeba"], patch_size=3, size=15, patches_per_expert=3),
    "large-3x3": LayerShape(64, 128, 128, 32, experts=8, patches_per_expert=8, patch_size=4, kernel_size=3),
    "large-1x1": LayerShape(64, 256, 256, 56, experts=8, patches_per_expert=24, patch_size=4, kernel_size=1),
}
QUICK = ("celeba-l8", "celeba-c64", "cifar-l64", "cifar-p2")


@dataclass(frozen=True)
class Setting:
    """What is the same for all shapes of a run."""

    device: str
    dtype: torch.dtype
    formats: tuple[str, ...]
    repetitions: int
    compile: bool


@dataclass(frozen=True)
class Measurement:
    """A shape in a form."""

    name: str
    form: str
    shape: LayerShape

    @property
    def title(self) -> str:
        return f"{self.name}, {self.form}: {self.shape}"

    def few(self, device: str) -> LayerShape:
        """The same with as many maps as are compared with the reference."""
        maps = (CHECKED_MAPS if self.name in NAMED else CHECKED_MAPS_OF_GRID)[device]
        return replace(self.shape, batch=min(self.shape.batch, maps))

    def compiles(self, setting: Setting) -> bool:
        """Whether what torch.compile makes of the peers is timed too."""
        return setting.compile and self.name in NAMED and self.form in COMPILED_FORMS


def planned(arguments: argparse.Namespace) -> Iterator[Measurement]:
    """Named shapes first, in all forms, then the grid."""
    gpu = arguments.device == "cuda"
    shapes = {**NAMED, **GRID} if gpu or arguments.grid or arguments.only else NAMED
    chosen = arguments.only.split(",") if arguments.only else list(shapes)
    unknown = [name for name in chosen if name not in shapes]
    if unknown:
        raise SystemExit(f"--only: {', '.join(unknown)} is no shape; there are {', '.join(shapes)}")
    if arguments.quick:
        chosen = [name for name in chosen if name in NAMED or name in QUICK or arguments.only]
    for name in chosen:
        shape = shapes[name]
        if not gpu and "-b" not in name:
            shape = replace(shape, batch=CPU_BATCH)
        if not gpu and (shape.batch > 32 or name.endswith(f"-b{CPU_BATCH}")):
            continue  # takes too long, or is the named shape itself
        forms = [arguments.form] if arguments.form else list(FORMS) if name in NAMED else ["plain"]
        for form in forms:
            yield Measurement(name, form, shape)


def checked(each: Measurement, setting: Setting) -> dict[str, Any]:
    """The errors of the backends that are timed, on a few maps of the shape."""
    few = each.few(setting.device)
    choice = choose_backend(few, FORMS[each.form], setting.device, setting.dtype)
    names = list(dict.fromkeys([choice.name, "torch"]))
    limit = TOLERANCE[setting.dtype]
    seed, fastest = time.time_ns() % 2**31, torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False  # in float64 trying all algorithms takes long
    try:
        errors = layer_errors(few, FORMS[each.form], names, setting.device, setting.dtype, seed)
    finally:
        torch.backends.cudnn.benchmark = fastest
    equal = all(error <= limit for found in errors.values() for error in found.values())  # NaN is not
    return {"equal": equal, "tolerance": limit, "errors": errors, "picked": choice.name, "why": choice.why}


def figures(
    row: LayerTimes, rows: list[LayerTimes], each: Measurement, setting: Setting, limits: Roofline
) -> dict[str, Any]:
    """What a row comes to, beside the dense layer and beside the floor."""
    found: dict[str, Any] = {}
    for what in PASSES:
        ours, dense = row.best(what), fastest_dense(rows, what)
        if ours is None:
            continue
        found[f"{what}, ms"] = ours
        if any(note.startswith(f"{what} is not captured") for note in row.notes):
            continue  # then it is the launches that were timed, and nothing to compare with what was captured
        if dense is not None:
            found[f"{what}, × dense"] = dense / ours
        work = least_work(each, setting, what)["dense" if row.backend is None else "routed"]
        found[f"{what}, share of floor"] = limits.min_milliseconds(work.flops, work.bytes) / ours
    if row.memory is not None:
        found["memory, MiB"] = (row.memory.peak - row.memory.held) / MEBIBYTE
        dense = [other.memory for other in rows if other.backend is None and other.memory is not None]
        if dense:
            least = min(other.peak - other.held for other in dense)
            found["memory, × dense"] = (row.memory.peak - row.memory.held) / least
    return found


def least_work(each: Measurement, setting: Setting, what: Pass) -> dict[str, Any]:
    step = what == "step"
    return {
        "dense": dense_work(each.shape, setting.dtype, step=step),
        "routed": routed_work(each.shape, FORMS[each.form], setting.dtype, step=step),
    }


def measured(each: Measurement, setting: Setting, limits: Roofline) -> dict[str, Any]:
    """All there is to know of a shape in a form; with what went wrong in place of what is missing."""
    result: dict[str, Any] = {"name": each.name, "form": each.form, "shape": asdict(each.shape)}
    result |= {"share": each.shape.share, "ceilings": limits, "repetitions": setting.repetitions}
    begun = time.perf_counter()
    result["least work"] = {what: least_work(each, setting, what) for what in PASSES}
    try:
        result["check"] = checked(each, setting)
    except Exception as error:
        result["check"] = {"equal": False, "failed": f"{type(error).__name__}: {error}"}
    result["seconds of the check"] = time.perf_counter() - begun
    try:
        rows = layer_times(
            each.shape,
            FORMS[each.form],
            device=setting.device,
            dtype=setting.dtype,
            formats=setting.formats,
            without=() if each.name in NAMED else ("reference",),
            compiled=each.compiles(setting),
            repetitions=setting.repetitions,
        )
        result["layers"] = [{**asdict(row), **figures(row, rows, each, setting, limits)} for row in rows]
    except Exception as error:
        result["layers"], result["failed"] = [], f"{type(error).__name__}: {error}"
    result["seconds"] = time.perf_counter() - begun
    return result


def ready(gpu: bool, *, worker: bool) -> None:
    """Set torch up, as it is for what is timed or for a process that only compiles."""
    if worker:
        torch.set_num_threads(1)
        torch._inductor.config.compile_threads = 1  # each process is one of many
    if gpu:
        torch.backends.cudnn.benchmark = not worker  # what it finds cannot be handed on
        torch.set_float32_matmul_precision("high")  # as cuDNN's convolutions have it by default


def warm(each: Measurement, setting: Setting) -> list[str]:
    """In a process of its own: all that is compiled for a shape, for the maps that are checked and for those timed.

    Gives what failed.
    """
    failed: list[str] = []
    for shape, compiled in ((each.few(setting.device), False), (each.shape, each.compiles(setting))):
        form, without = FORMS[each.form], ("reference",)
        ran = run_once(shape, form, device=setting.device, dtype=setting.dtype, without=without, compiled=compiled)
        failed += [f"{row}: {note}" for row, notes in ran.items() for note in notes]
    gc.collect()
    if setting.device == "cuda":
        torch.cuda.empty_cache()
    return failed


def warmed(plan: list[Measurement], setting: Setting, processes: int, seconds: float) -> None:
    """Run all shapes once in so many processes, and wait for their end; when the time is over, no shape is begun."""
    begun = time.perf_counter()
    spawned = multiprocessing.get_context("spawn")  # a fork would inherit a GPU that it cannot use
    start = partial(ready, setting.device == "cuda", worker=True)
    with ProcessPoolExecutor(min(processes, len(plan)), spawned, start) as pool:
        runs = {pool.submit(warm, each, setting): each for each in plan}
        wait(runs, seconds)
        pool.shutdown(cancel_futures=True)
    failed: list[str] = []
    for run, each in runs.items():
        if run.cancelled():
            failed.append(f"{each.name} {each.form}: no time")
        elif run.exception() is not None:
            failed.append(f"{each.name} {each.form}: {type(run.exception()).__name__}: {run.exception()}")
        else:
            failed += [f"{each.name} {each.form}, {note}" for note in run.result()]
    ran = sum(not run.cancelled() for run in runs)
    print(
        f"{ran} of {len(plan)} shapes run ahead in {time.perf_counter() - begun:.0f} s", *failed, sep="\n  ", flush=True
    )


def print_result(each: Measurement, result: dict[str, Any]) -> None:
    columns = ["layer", *(f"{what}, {unit}" for what in PASSES for unit in ("ms", "× dense", "share of floor"))]
    columns += ["memory, MiB", "memory, × dense"]
    rows = [{column: row.get(column, "–") for column in columns} for row in result["layers"]]
    if rows:
        show(each.title, rows)
    else:
        print(f"\n{each.title}\nFAILED: {result.get('failed')}")
    for row in result["layers"]:
        for note in row["notes"]:
            print(f"  {row['layer']}: {note}")
    check = result["check"]
    if not check["equal"]:
        print(f"  DIFFERS FROM THE REFERENCE: {check.get('failed') or check['errors']}")


def earlier(path: Path, done: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a file has of other shapes and forms than those measured now."""
    if not path.exists():
        return []
    now = [(each["name"], each["form"]) for each in done]
    old = json.loads(path.read_text()).get("measurements", [])
    return [each for each in old if (each["name"], each["form"]) not in now]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="a GPU gets larger batches")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="float32; on a GPU bfloat16")
    parser.add_argument("--only", help=f"shapes by name, with commas: {', '.join([*NAMED, *GRID])}")
    parser.add_argument("--form", choices=FORMS, help="default: all of them for named shapes, else plain")
    parser.add_argument("--grid", action="store_true", help="on a CPU too, which takes minutes")
    parser.add_argument("--quick", action="store_true", help="five repetitions, and a few shapes of the grid")
    parser.add_argument("--repetitions", type=int, help="default: 20, on a GPU 30")
    parser.add_argument("--no-compile", action="store_true", help="leave out what torch.compile makes of the peers")
    parser.add_argument("--budget", type=float, default=115.0, help="seconds after which the grid is left on a GPU")
    parser.add_argument("--warm", type=int, default=0, metavar="N", help="first compile in so many processes")
    parser.add_argument("--warm-seconds", type=float, default=180.0, help="after which they begin no other shape")
    parser.add_argument("--add", action="store_true", help="keep what the file has of other shapes and forms")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/layer-DEVICE.json")
    arguments = parser.parse_args()
    gpu = arguments.device == "cuda"
    started = time.perf_counter()
    plan = list(planned(arguments))
    ready(gpu, worker=False)
    dtype = getattr(torch, arguments.dtype or ("bfloat16" if gpu else "float32"))
    setting = Setting(
        device=arguments.device,
        dtype=dtype,
        formats=("channels_last",) if gpu else ("contiguous", "channels_last"),
        repetitions=arguments.repetitions or (5 if arguments.quick else 30 if gpu else 20),
        compile=gpu and not arguments.no_compile,
    )
    if arguments.warm:
        warmed(plan, setting, arguments.warm, arguments.warm_seconds)
    measuring = time.perf_counter()
    limits = measure_roofline(arguments.device, dtype)
    print(
        f"copies {limits.bytes_per_second / 1e9:.0f} GB/s, "
        f"matrix products {limits.flops_per_second / 1e12:.2f} TFLOP/s in {dtype}"
    )
    path = arguments.out or RESULTS / f"layer-{arguments.device}.json"
    done: list[dict[str, Any]] = []
    skipped: list[str] = []
    kept = earlier(path, [{"name": each.name, "form": each.form} for each in plan]) if arguments.add else []

    def keep() -> None:
        content = {
            "machine": machine(),
            "device": arguments.device,
            "dtype": str(dtype).removeprefix("torch."),
            "repetitions": setting.repetitions,
            "ceilings": limits,
            "skipped for want of time": skipped,
            "measurements": [*kept, *done],
        }
        write(path.stem, content, path)

    for each in plan:
        if gpu and each.name not in NAMED and time.perf_counter() - measuring > arguments.budget:
            skipped.append(each.name)
            continue
        result = measured(each, setting, limits)
        print_result(each, result)
        done.append(result)
        gc.collect()
        keep()  # each time: what is measured is not lost
    keep()
    if skipped:
        print(f"skipped after {arguments.budget:.0f} s: {', '.join(skipped)}")
    wrong = [f"{each['name']} {each['form']}" for each in done if not each["check"]["equal"]]
    print("× dense: above 1 is faster than the fastest dense layer (of memory: below 1 is less)")
    print(f"written to {path} after {time.perf_counter() - started:.0f} s")
    if wrong:
        raise SystemExit(f"not equal to the reference: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
