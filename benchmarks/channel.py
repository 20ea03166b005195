"""Frozen DeepMoE VGG-16 against the plain one: end to end and layer by layer.

    python benchmarks/channel.py [--threads 2] [--out FILE.json]
    python benchmarks/channel.py --device cuda [--dtype bfloat16]
    python benchmarks/channel.py --costs

On a CPU, one image of 32×32 at a time in float32, and batches. Ours is `moesaic.freeze` of the whole network: embedding
network, heads and backbone. Its gates are random, such that an image opens the given share of channels, different ones
for every image: either single channels (ReLU gates, so that their number varies too) or the best blocks of 16, 32 or 64
channels. A layer of 64 channels has one block of 64, so more is open there; the share of multiply-adds says how much
remains. Images alternate, so that nothing is gained from running one twice.

Peers are the plain VGG-16 in eval mode without gradients, contiguous or channels_last, whichever is faster, and the
same with BatchNorm folded into its convolutions; and, where it is installed, the plain VGG-16 in ONNX Runtime, which
lays its weights out in advance as ours does (`benchmarks/export.py` has ours there). Networks alternate after one
image, and after six: in the first case every network finds the caches full of the others' weights, in the second of its
own.

A layer is its convolution with BatchNorm, ReLU and the pooling after it. The plain network (in the format in which it
is faster end to end) and ours alternate after one image, the clock is read between layers, and a network's layers are
scaled by one factor, so that with the rest they add up to the network's end-to-end time in the same run without clocks.

On a GPU, a batch of 256 in blocks of 32 and 64: masked, and frozen, in eager mode. ``--costs`` measures
`moesaic.ops.channel.costs.CPU_COSTS`.
"""

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from measure import Timing, machine, show, time_interleaved, write
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

import moesaic
from moesaic.models.deepmoe.frozen import FrozenDeepMoE
from moesaic.models.deepmoe.frozen_embedding import FrozenEmbedding
from moesaic.models.deepmoe.network import DeepMoE, deepmoe
from moesaic.models.vgg import VGG16
from moesaic.ops.channel.bn_folding import fold_norm
from moesaic.ops.channel.costs import CPU_COSTS
from moesaic.ops.channel.cpu_block_conv import BlockConv, BlockMap
from moesaic.ops.channel.gathered_conv import OpenChannels, gathered_conv

CLASSES, SIZE, IMAGES = 10, 32, 24
TURNS = {"one": 1, "six": 6}
"""Images per turn."""
SHARES = (0.5, 0.25)
BATCH_SIZES = (4, 16)
BAR = {0.5: 1.5, 0.25: 3.0}
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def plain_vgg() -> VGG16:
    torch.manual_seed(0)
    return VGG16(CLASSES).eval()


def folded(model: VGG16) -> VGG16:
    model = copy.deepcopy(model)
    for number in range(1, 14):
        conv, norm = model.body.get_submodule(f"conv{number}"), model.body.get_submodule(f"norm{number}")
        setattr(model.body, f"conv{number}", fuse_conv_bn_eval(conv, norm))
        setattr(model.body, f"norm{number}", nn.Identity())
    return model


def in_onnx_runtime(model: VGG16, threads: int) -> Callable[[Tensor], object] | None:
    """The network in ONNX Runtime, for any batch; None where it is not installed."""
    if find_spec("onnxruntime") is None or find_spec("onnxscript") is None:
        return None
    import onnxruntime

    batch = ({0: torch.export.Dim("batch", min=1)},)
    program: Any = torch.onnx.export(
        model, (torch.randn(2, 3, SIZE, SIZE),), dynamo=True, verbose=False, dynamic_shapes=batch
    )
    options: Any = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    content = program.model_proto.SerializeToString()
    session: Any = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: x.numpy()})


@torch.no_grad()
def gated_vgg(block: int, share: float) -> DeepMoE:
    """A DeepMoE whose images open that share of channels, each image its own."""
    torch.manual_seed(0)
    mode: dict[str, Any] = {"mode": "relu"} if block == 1 else {"mode": "topk", "keep": share}
    model = deepmoe(VGG16(CLASSES), num_classes=CLASSES, image_size=SIZE, block=block, **mode).eval()
    embedding, _ = model.embedding(torch.randn(256, 3, SIZE, SIZE))
    for head in model.heads().values():
        nn.init.normal_(head.weight)
        nn.init.zeros_(head.bias)
        if block == 1:
            head.bias.copy_(-(embedding @ head.weight.T).quantile(1 - share, 0))
    return model


def in_order(model: Callable[[Tensor], object], images: list[Tensor], burst: int = 1) -> Callable[[], object]:
    """The next images at every call, so many of them one by one."""
    number = -1

    def run() -> None:
        nonlocal number
        with torch.no_grad():
            for _ in range(burst):
                number = (number + 1) % len(images)
                model(images[number])

    return run


@torch.no_grad()
def check(model: DeepMoE, x: Tensor, tolerance: float) -> float:
    """The share of multiply-adds, after a check of the output against the reference."""
    output = model.forward_with_routing(x)
    logits = moesaic.freeze(model)(x)
    with moesaic.backend("reference"):
        torch.testing.assert_close(logits, model(x), rtol=tolerance, atol=tolerance)
    return float(model.macs(output.routing).float().mean()) / model.dense_macs


def dense_marks(model: VGG16) -> Callable[[Tensor], dict[str, float]]:
    """Runs the network, and returns the microseconds of each layer."""

    def run(x: Tensor) -> dict[str, float]:
        spent: dict[str, float] = {}
        place, start = "rest", time.perf_counter()
        for name, layer in model.body.named_children():
            x = layer(x)
            now = time.perf_counter()
            place = name if name.startswith("conv") else "rest" if name == "mean" else place
            spent[place] = spent.get(place, 0.0) + 1e6 * (now - start)
            start = now
        model.head(x)
        spent["rest"] += 1e6 * (time.perf_counter() - start)
        return spent

    return run


def our_marks(model: FrozenDeepMoE) -> Callable[[Tensor], dict[str, float]]:
    """The same for ours: its embedding network, its layers, and the rest.

    A layer's ReLU runs when the next layer copies its map, and is counted for the layer that it belongs to.
    """
    spent: dict[str, float] = {}
    relu = 0.0

    def timed(run: Callable[..., Any], done: Callable[[float], None]) -> Callable[..., Any]:
        def measured(*given: Any, **options: Any) -> Any:
            start = time.perf_counter()
            y = run(*given, **options)
            done(1e6 * (time.perf_counter() - start))
            return y

        return measured

    def embedded(took: float) -> None:
        nonlocal relu
        spent["embedding"], relu = took, 0.0

    def written(took: float) -> None:
        nonlocal relu
        relu += took

    def layer_done(took: float) -> None:
        nonlocal relu
        if not spent:  # a layer of the embedding network
            return
        number = len(spent)
        spent[f"conv{number}"] = took - relu
        if number > 1:
            spent[f"conv{number - 1}"] += relu
        relu = 0.0

    def run(x: Tensor) -> dict[str, float]:
        spent.clear()
        layer, embedding, write_map = BlockConv.run, FrozenEmbedding.run, BlockMap.write_to
        BlockConv.run = timed(layer, layer_done)
        FrozenEmbedding.run, BlockMap.write_to = timed(embedding, embedded), timed(write_map, written)
        try:
            start = time.perf_counter()
            model(x)
            whole = 1e6 * (time.perf_counter() - start)
        finally:
            BlockConv.run, FrozenEmbedding.run, BlockMap.write_to = layer, embedding, write_map
        return {**spent, "rest": whole - sum(spent.values())}

    return run


@torch.no_grad()
def layer_by_layer(
    plain: VGG16, model: FrozenDeepMoE, images: dict[str, list[Tensor]], repetitions: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds of each layer of both, scaled as the docstring above says."""
    runs: dict[str, Callable[[Tensor], dict[str, float]]] = {"dense": dense_marks(plain), "ours": our_marks(model)}
    found: dict[str, dict[str, list[float]]] = {kind: {} for kind in runs}
    for repetition in range(-5, repetitions):
        for kind, run in runs.items():
            for name, each in run(images[kind][repetition % IMAGES]).items():
                if repetition >= 0:
                    found[kind].setdefault(name, []).append(each)
    end_to_end = time_interleaved(
        {"dense": in_order(plain, images["dense"]), "ours": in_order(model, images["ours"])}, repetitions
    )
    scaled: list[dict[str, float]] = []
    for kind, times in found.items():
        medians = {name: statistics.median(each) for name, each in times.items()}
        factor = 1e3 * end_to_end[kind].median / sum(medians.values())
        scaled.append({name: factor * each for name, each in medians.items()})
    return scaled[0], scaled[1]


def on_cpu(repetitions: int) -> dict[str, Any]:
    torch.manual_seed(1)
    images = [torch.randn(1, 3, SIZE, SIZE) for _ in range(IMAGES)]
    plain = plain_vgg()
    runtime = in_onnx_runtime(plain, torch.get_num_threads())
    peers: dict[str, VGG16] = {}
    timings: dict[str, Timing] = {}
    for label, memory_format in FORMATS.items():
        peers[f"VGG-16, {label}"] = copy.deepcopy(plain).to(memory_format=memory_format)
        peers[f"VGG-16, BatchNorm folded, {label}"] = folded(plain).to(memory_format=memory_format)
    formats = {name: FORMATS[name.rpartition(", ")[2]] for name in peers}
    rows: list[dict[str, Any]] = []
    details: dict[str, dict[str, Timing]] = {}
    for block in (1, 16, 32, 64):
        for share in SHARES:
            model = gated_vgg(block, share)
            macs = statistics.mean(check(model, x, 1e-4) for x in images[:4])
            runs: dict[str, Callable[[int], Callable[[], object]]] = {
                name: partial(in_order, peer, [x.contiguous(memory_format=formats[name]) for x in images])
                for name, peer in peers.items()
            }
            runs["ours"] = partial(in_order, moesaic.freeze(model), images)
            if runtime is not None:
                runs["ONNX Runtime"] = partial(in_order, runtime, images)
            row: dict[str, Any] = {
                "gates": "single channels" if block == 1 else f"blocks of {block}",
                "open": f"{share:.0%}",
                "multiply-adds": macs,
            }
            for turn, images_each in TURNS.items():
                turns = repetitions if images_each == 1 else max(repetitions // 2, 4)
                found = time_interleaved({name: run(images_each) for name, run in runs.items()}, turns)
                timings = {
                    name: Timing(*(ms / images_each for ms in vars(timing).values())) for name, timing in found.items()
                }
                best = {
                    kind: min(timings[name].median for name in peers if ("folded" in name) == kind)
                    for kind in (False, True)
                }
                ours = timings["ours"].median
                row |= {f"{turn}: ours, ms": ours, f"{turn}: VGG-16, ms": best[False]}
                row |= {f"{turn}: × VGG-16": best[False] / ours, f"{turn}: × folded": best[True] / ours}
                if runtime is not None:
                    row[f"{turn}: × ONNX Runtime"] = timings["ONNX Runtime"].median / ours
                details[f"{row['gates']}, {row['open']}, {turn}"] = timings
            rows.append(row)
    show("one image at a time, end to end", rows)
    batches = in_batches(peers, formats, runtime, repetitions)
    show("in batches, blocks of 32", batches)
    layers: dict[str, Any] = {}
    fastest = min((each.median, name) for name, each in timings.items() if name in peers and "folded" not in name)[1]
    given = {"dense": [x.contiguous(memory_format=formats[fastest]) for x in images], "ours": images}
    for block in (1, 16, 32, 64):
        table: dict[str, dict[str, Any]] = {}
        for share in SHARES:
            dense, ours = layer_by_layer(peers[fastest], moesaic.freeze(gated_vgg(block, share)), given, repetitions)
            for name, each in ours.items():
                row = table.setdefault(name, {"layer": name})
                row |= {f"{share:.0%}: dense, µs": dense.get(name, 0.0), f"{share:.0%}: ours, µs": each}
                row[f"{share:.0%}: × dense"] = dense.get(name, 0.0) / each
        layers[str(block)] = list(table.values())
        show(f"layer by layer, {'single channels' if block == 1 else f'blocks of {block}'}", layers[str(block)])
    slowest = min(
        (row[f"{share:.0%}: × dense"], f"{row['layer']} at {share:.0%}, block {block}")
        for block, table in layers.items()
        for row in table
        for share in SHARES
        if row["layer"].startswith("conv")
    )
    print(f"the layer that gains least: {slowest[1]}, {slowest[0]:.2f} × dense")
    for share, bar in BAR.items():
        for turn in TURNS:
            of = {row["gates"]: row[f"{turn}: × VGG-16"] for row in rows if row["open"] == f"{share:.0%}"}
            reached = ", ".join(f"{gates} {ratio:.2f}" for gates, ratio in of.items())
            print(f"at {share:.0%} the bar is {bar}; in turns of {turn}: {reached}")
    return {"end to end": rows, "batches": batches, "timings, ms": details, "layers, µs": layers}


def in_batches(
    peers: dict[str, VGG16],
    formats: dict[str, torch.memory_format],
    runtime: Callable[[Tensor], object] | None,
    repetitions: int,
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for share in SHARES:
        frozen = moesaic.freeze(gated_vgg(32, share))
        for batch_size in BATCH_SIZES:
            batches = [torch.randn(batch_size, 3, SIZE, SIZE) for _ in range(4)]
            runs = {
                name: in_order(peer, [x.contiguous(memory_format=formats[name]) for x in batches])
                for name, peer in peers.items()
            }
            runs["ours"] = in_order(frozen, batches)
            if runtime is not None:
                runs["ONNX Runtime"] = in_order(runtime, batches)
            found = time_interleaved(runs, max(repetitions // 4, 4))
            ours = found["ours"].median
            best = {
                folded_too: min(found[name].median for name in peers if ("folded" in name) == folded_too)
                for folded_too in (False, True)
            }
            row = {"open": f"{share:.0%}", "batch size": batch_size, "ours, ms": ours, "VGG-16, ms": best[False]}
            row |= {"× VGG-16": best[False] / ours, "× folded": best[True] / ours}
            if runtime is not None:
                row["× ONNX Runtime"] = found["ONNX Runtime"].median / ours
            rows.append(row)
    return rows


def on_gpu(repetitions: int, dtype: torch.dtype, batch: int) -> dict[str, Any]:
    where: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    x = torch.randn(batch, 3, SIZE, SIZE, **where)
    plain = plain_vgg().to(**where)
    candidates: dict[str, Callable[[], object]] = {}
    for label, memory_format in FORMATS.items():
        image = x.contiguous(memory_format=memory_format)
        for kind, peer in (("VGG-16", plain), ("VGG-16, BatchNorm folded", folded(plain))):
            network = copy.deepcopy(peer).to(memory_format=memory_format)
            candidates[f"{kind}, {label}"] = in_order(network, [image])
    macs: dict[str, float] = {}
    last = x.contiguous(memory_format=torch.channels_last)
    for share, block in itertools.product(SHARES, (32, 64)):
        model = gated_vgg(block, share).to(**where).to(memory_format=torch.channels_last)
        share_of_macs = check(model, x, 1e-2 if dtype == torch.float32 else 0.5)
        for kind, network in (("masked", model), ("frozen", moesaic.freeze(model))):
            name = f"blocks of {block}, {share:.0%}, {kind}"
            macs[name] = share_of_macs
            candidates[name] = in_order(network, [last])
    timings = time_interleaved(candidates, repetitions, warm_up=10)
    best = min(timing.median for name, timing in timings.items() if name.startswith("VGG-16, c"))
    rows = [
        {
            "network": name,
            "multiply-adds": macs.get(name, 1.0),
            "ms": timing.median,
            "× VGG-16": best / timing.median,
            "quartiles, ms": timing,
        }
        for name, timing in timings.items()
    ]
    title = f"a batch of {batch}, {str(dtype).removeprefix('torch.')}"
    show(title, [{k: v for k, v in row.items() if k != "quartiles, ms"} for row in rows])
    return {"batch": batch, "dtype": str(dtype).removeprefix("torch."), "end to end": rows}


@torch.no_grad()
def unit_costs(repetitions: int) -> dict[str, float]:
    """Nanoseconds on one core, each from a case that it dominates."""
    cores = torch.get_num_threads()

    def nanoseconds(run: Callable[[int], object]) -> float:
        turns = {"it": in_order_of_numbers(run)}
        return 1e6 * time_interleaved(turns, repetitions, warm_up=8)["it"].median

    def weights(width: int, number: int) -> list[Tensor]:
        return [torch.randn(width, width, 3, 3) for _ in range(number)]

    middle, large = weights(128, 16), weights(512, 6)  # in turns, so that they are not in the caches
    wide, small = torch.randn(1, 128, 16, 16), torch.randn(1, 512, 2, 2)
    mac = nanoseconds(lambda i: F.conv2d(wide, middle[i % 16], None, 1, 1)) * cores / (128 * 128 * 9 * 256)
    read = nanoseconds(lambda i: F.conv2d(small, large[i % 6], None, 1, 1)) * cores / (512 * 512 * 9)
    half = torch.randperm(512)[:256].sort().values
    blocks = torch.tensor([0, 2, 5, 7])
    by_block = (half[:, None] * 8 + blocks).flatten()
    single = (half[:, None] * 512 + half).flatten()
    count = 256 * 256 * 9
    copy_ = nanoseconds(lambda i: large[i % 6].view(-1, 64 * 9).index_select(0, by_block)) * cores / count
    pieces = nanoseconds(lambda i: large[i % 6].view(-1, 9).index_select(0, single)) * cores
    columns = (half // 2).unique()
    column = (
        nanoseconds(lambda i: large[i % 6].view(4608, 512).index_select(1, columns)) * cores / (4608 * len(columns))
    )
    conv = fold_norm(moesaic.ChannelMoE(32, 32, 3).eval().weights())
    some, x = OpenChannels(torch.arange(16), 32), torch.randn(1, 16, 2, 2)
    call = nanoseconds(lambda i: gathered_conv(x, conv, some, some, "gathered"))
    return {
        "mac": mac,
        "read": read,
        "copy": copy_,
        "piece": (pieces - count * copy_) / len(single),
        "column": column,
        "call": call,
    }


def in_order_of_numbers(run: Callable[[int], object]) -> Callable[[], object]:
    number = 0

    def next_() -> None:
        nonlocal number
        run(number)
        number += 1

    return next_


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="on a GPU")
    parser.add_argument("--batch", type=int, default=256, help="on a GPU")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=28)
    parser.add_argument("--costs", action="store_true", help="measure the unit costs of moesaic.ops.channel.costs")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/channel-DEVICE.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.costs:
        found = unit_costs(arguments.repetitions)
        tabulated = vars(CPU_COSTS)
        show(
            "unit costs, ns",
            [{"cost": name, "measured": value, "tabulated": tabulated[name]} for name, value in found.items()],
        )
        return
    if arguments.device == "cpu":
        results = on_cpu(arguments.repetitions)
    else:
        results = on_gpu(arguments.repetitions, getattr(torch, arguments.dtype), arguments.batch)
    name = f"channel-{arguments.device}"
    if arguments.device == "cuda" and arguments.dtype != "float32":
        name += f"-{arguments.dtype}"
    print(f"written to {write(name, {'machine': machine(), **results}, arguments.out)}")


if __name__ == "__main__":
    main()
