"""Routed perceptrons of a vision transformer against other ways to route them, and against the dense MLP.

    python benchmarks/mlp.py [--device cuda] [--only ours,bmm] [--repetitions 20] [--scattermoe CHECKOUT]

128 images of 14×14 tokens, 768 → 3072 → 768 with gelu, 16 experts that take 12 tokens of each image (expert choice) and
whose outputs are summed; on a CPU a small shape, to see that everything runs. A step is forward and backward with all
gradients, the map's included, in a CUDA graph where it can be captured, and on a GPU also eager, by wall clock with a
synchronisation around each step; candidates take turns, and every figure is a ratio within one run. The router is part
of every routed step.

    ours              PatchMoE with MLPExperts, on the backend that is picked
    ours, torch       the same in plain torch
    bmm               expert choice written plainly: top-k, gather, two batched products, index_add; also compiled
    grouped           token choice by F.grouped_mm: as many rows, sorted by expert, without biases, which favours it
    transformers      Mixtral's block of the transformers library, where installed; gated, so 2/3 as wide: equal FLOPs
    scattermoe        token choice by ScatterMoE's kernels, from a checkout; as many rows, without biases
    dense             an MLP over as many rows: equal FLOPs; also compiled
    products          the six batched products of a step alone

Before anything is timed, ours, bmm, grouped and scattermoe are compared with float64 on some images, by their own
choice of tokens and with NaN in the memory that is given out.
"""

import argparse
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from measure import Timing, capture_cuda_graph, machine, show, time_interleaved, write
from torch import Tensor, nn
from torch.nn import functional as F

import moesaic
from moesaic.bench.layer_accuracy import poison
from moesaic.bench.timing import measure_roofline, peak_memory
from moesaic.experts import MLPExperts
from moesaic.ops import select_backend

MEBIBYTE = 2**20
TOLERANCE = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}
BAR, GOAL = 1.3, 1.1
ROUTED_PEERS = ("bmm", "bmm, compiled", "grouped", "transformers", "scattermoe")
EAGER_PEERS = ("grouped", "transformers", "scattermoe")
"""Which ours is to be ahead of in eager mode as well."""


@dataclass(frozen=True)
class Shape:
    """Images of side × side tokens of so many channels, and what experts take of them."""

    batch: int
    side: int
    channels: int
    hidden: int
    experts: int
    tokens: int
    """Of an image, for each expert."""

    def __str__(self) -> str:
        return (
            f"{self.batch} images of {self.side}×{self.side} tokens, {self.channels} → {self.hidden} → {self.channels} "
            f"channels, {self.experts} experts, each {self.tokens} tokens of an image"
        )

    @property
    def rows(self) -> int:
        return self.batch * self.experts * self.tokens

    @property
    def flops(self) -> int:
        """Of a step: six products."""
        return 6 * 2 * self.rows * self.channels * self.hidden

    def least_bytes(self, size: int) -> dict[str, int]:
        """What a step must move, if nothing is read or written twice; hidden values as products need them."""
        maps = 4 * self.batch * self.side**2 * self.channels * size  # x and y, and their gradients
        weights = 2 * self.experts * self.channels * self.hidden * size
        hidden = self.rows * self.hidden * size
        return {
            "maps and weights": maps + 3 * weights,  # read forward and back, and their gradients written
            "hidden": 3 * 2 * hidden,  # before and after the activation, and the gradient: written and read once
        }


SHAPES = {
    "cuda": Shape(128, 14, 768, 3072, experts=16, tokens=12),
    "cpu": Shape(2, 4, 32, 96, experts=4, tokens=3),
}


class ByBackend(nn.Module):
    """A routed layer on a backend by name."""

    def __init__(self, layer: moesaic.PatchMoE, name: str) -> None:
        super().__init__()
        self.layer, self.name = layer, name

    def forward(self, x: Tensor) -> Tensor:
        with moesaic.backend(self.name):
            return self.layer(x)


class PlainChoice(nn.Module):
    """Expert choice as one would write it: the best tokens of each expert, gathered, multiplied, added back."""

    def __init__(self, layer: moesaic.PatchMoE) -> None:
        super().__init__()
        experts = layer.experts
        self.router = copied(layer.router.weight.flatten(1))
        self.weight_in, self.bias_in = copied(experts.weight_in), copied(experts.bias_in)
        self.weight_out, self.bias_out = copied(experts.weight_out), copied(experts.bias_out)
        self.tokens = layer.patches_per_expert

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and places of the best tokens, (B, E, L) each."""
        scores = F.linear(rows_of(x), self.router).float()
        return scores.transpose(1, 2).topk(self.tokens, dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        scores, index = self.choose(x)
        E, L = index.shape[1:]
        gate = scores.softmax(-1)
        first = torch.arange(B, device=x.device).view(B, 1, 1) * (H * W)
        place = (index + first).transpose(0, 1).reshape(E * B * L)
        rows = rows_of(x).flatten(0, 1)[place].view(E, B * L, C)
        hidden = F.gelu(torch.baddbmm(self.bias_in.unsqueeze(1), rows, self.weight_in.mT))
        outputs = torch.baddbmm(self.bias_out.unsqueeze(1), hidden, self.weight_out.mT)
        gated = outputs * gate.transpose(0, 1).reshape(E, B * L, 1).to(outputs.dtype)
        y = x.new_zeros(B * H * W, C).index_add(0, place, gated.flatten(0, 1))
        return y.view(B, H, W, C).permute(0, 3, 1, 2)


class TokenChoice(nn.Module):
    """Each row (R, C) goes to its best expert: sorted by expert, two grouped products, put back in order."""

    def __init__(self, layer: moesaic.PatchMoE) -> None:
        super().__init__()
        self.router = copied(layer.router.weight.flatten(1))
        self.weight_in, self.weight_out = copied(layer.experts.weight_in), copied(layer.experts.weight_out)

    def choose(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and expert of each row."""
        return F.linear(rows, self.router).float().softmax(-1).max(-1)

    def ends(self, expert: Tensor) -> Tensor:
        """Where the rows of each expert end, sorted by expert."""
        counts = torch.histc(expert.float(), bins=len(self.weight_in), min=0, max=len(self.weight_in) - 1)
        return counts.cumsum(0).int()

    def forward(self, rows: Tensor) -> Tensor:
        gate, expert = self.choose(rows)
        order = expert.argsort()
        ends = self.ends(expert)
        hidden = F.gelu(F.grouped_mm(rows[order], self.weight_in.mT, offs=ends))
        outputs = F.grouped_mm(hidden, self.weight_out.mT, offs=ends)
        gated = outputs * gate[order].unsqueeze(1).to(outputs.dtype)
        return torch.empty_like(gated).index_copy(0, order, gated)


class Mixtral(nn.Module):
    """transformers' sparse block, one expert per token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        config = importlib.import_module("transformers").MixtralConfig(
            hidden_size=shape.channels, intermediate_size=2 * shape.hidden // 3, num_local_experts=shape.experts,
            num_experts_per_tok=1, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        )  # fmt: skip
        config._experts_implementation = "grouped_mm"
        modelling = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
        self.block = modelling.MixtralSparseMoeBlock(config)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, rows: Tensor) -> Tensor:
        y = self.block(rows.unsqueeze(0))
        return (y if isinstance(y, Tensor) else y[0]).squeeze(0)


class Scattered(TokenChoice):
    """Token choice by ScatterMoE's two grouped products, called as its own MLP calls them.

    Rows of each expert are counted here: ScatterMoE's way waits for the GPU, and so cannot be part of a CUDA graph.
    """

    def __init__(self, layer: moesaic.PatchMoE, checkout: Path) -> None:
        super().__init__(layer)
        if not (checkout / "scattermoe").is_dir():
            raise FileNotFoundError(f"{checkout} has no folder scattermoe; give the root of a checkout of ScatterMoE")
        if str(checkout) not in sys.path:
            sys.path.insert(0, str(checkout))
        self.product = importlib.import_module("scattermoe.parallel_experts").parallel_linear

    def forward(self, rows: Tensor) -> Tensor:
        gate, expert = self.choose(rows)
        by_expert, order = expert.sort()
        ends = self.ends(expert)
        hidden = self.product(rows, self.weight_in.mT, 1, by_expert, order, ends, grouped_out=True)
        gates = gate.unsqueeze(1).to(rows.dtype)
        return self.product(F.gelu(hidden), self.weight_out.mT, 1, by_expert, order, ends, gates=gates, grouped_in=True)


def copied(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone())


def rows_of(x: Tensor) -> Tensor:
    """(B, C, H, W), channels_last, as tokens (B, N, C)."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def routed_layer(shape: Shape) -> moesaic.PatchMoE:
    C = shape.channels
    torch.manual_seed(0)
    experts = MLPExperts(shape.experts, C, shape.hidden, C)
    return moesaic.PatchMoE(C, C, experts=experts, patches_per_expert=shape.tokens, combine="sum")


def dense_mlp(shape: Shape) -> nn.Module:
    return nn.Sequential(nn.Linear(shape.channels, shape.hidden), nn.GELU(), nn.Linear(shape.hidden, shape.channels))


# equality ------------------------------------------------------------------------------------------------------------


def gradients(
    model: Callable[[Tensor], Tensor], x: Tensor, wanted: Tensor, leaves: dict[str, Tensor]
) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    y = model(x)
    found = torch.autograd.grad(y, [x, *leaves.values()], wanted)
    return {"output": y.detach(), "input": found[0], **dict(zip(leaves, found[1:], strict=True))}


def expert_choice_in_float64(leaves: dict[str, Tensor], index: Tensor) -> Callable[[Tensor], Tensor]:
    """The layer by given places (B, E, L), one image and expert after the other."""

    def run(x: Tensor) -> Tensor:
        tokens = rows_of(x)
        y = torch.zeros_like(tokens)
        for b, of_image in enumerate(index):
            for e, places in enumerate(of_image):
                rows = tokens[b, places]
                gate = (rows @ leaves["router"][e]).softmax(0)
                hidden = F.gelu(rows @ leaves["weight_in"][e].mT + leaves["bias_in"][e])
                outputs = hidden @ leaves["weight_out"][e].mT + leaves["bias_out"][e]
                y = y.index_put(
                    (torch.tensor(b, device=x.device), places), gate.unsqueeze(1) * outputs, accumulate=True
                )
        return y.view(*x.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2)

    return run


def token_choice_in_float64(leaves: dict[str, Tensor], expert: Tensor) -> Callable[[Tensor], Tensor]:
    def run(rows: Tensor) -> Tensor:
        gate = (rows @ leaves["router"].mT).softmax(-1)
        y = torch.zeros_like(rows)
        for e in range(len(leaves["weight_in"])):
            places = (expert == e).nonzero().squeeze(1)
            hidden = F.gelu(rows[places] @ leaves["weight_in"][e].mT)
            outputs = hidden @ leaves["weight_out"][e].mT
            y = y.index_put((places,), gate[places, e].unsqueeze(1) * outputs)
        return y

    return run


def errors(found: dict[str, Tensor], true: dict[str, Tensor]) -> dict[str, float]:
    return {
        name: float((found[name].double() - each).norm() / each.norm().clamp_min(1e-30)) for name, each in true.items()
    }


def expert_leaves(module: nn.Module) -> dict[str, Tensor]:
    """The parameters by the names that all candidates share; a router's of p×p kernels as rows."""
    named = {name.rpartition("experts.")[2].rpartition("layer.")[2]: each for name, each in module.named_parameters()}
    return {("router" if name.startswith("router") else name): each for name, each in named.items()}


def check(model: nn.Module, x: Tensor, chosen: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Output and gradients against float64, with what this candidate chose."""
    leaves = expert_leaves(model)
    exact = {key: each.detach().double().requires_grad_() for key, each in leaves.items()}
    flat = {key: each.flatten(1) if key == "router" else each for key, each in exact.items()}
    reference = (token_choice_in_float64 if isinstance(model, TokenChoice) else expert_choice_in_float64)(flat, chosen)
    wanted = torch.randn_like(x)
    true = gradients(reference, x.double(), wanted.double(), exact)
    poison(x.device.type)
    off = errors(gradients(model, x, wanted, leaves), true)
    return {"equal": all(each <= TOLERANCE[dtype] for each in off.values()), "errors": off}  # NaN is not equal


# candidates ----------------------------------------------------------------------------------------------------------


@dataclass
class Candidate:
    """What is timed: a module and what it is given; or why it is not there."""

    name: str
    model: nn.Module | None
    x: Tensor | None
    note: str = ""


def candidates(shape: Shape, where: dict[str, Any], arguments: argparse.Namespace) -> Iterator[Candidate]:
    """One after the other; those that cannot be had say why."""
    torch.manual_seed(1)
    x = torch.randn(shape.batch, shape.channels, shape.side, shape.side, **where)
    x = x.contiguous(memory_format=torch.channels_last)
    rows = rows_of(x).flatten(0, 1)[: shape.rows].contiguous()
    if len(rows) < shape.rows:
        rows = torch.randn(shape.rows, shape.channels, **where)
    layer = routed_layer(shape).to(**where)
    wants = arguments.only.split(",") if arguments.only else None

    def wanted(name: str) -> bool:
        return wants is None or name in wants or name.partition(",")[0] in wants

    def compiled(model: nn.Module) -> Any:
        return torch.compile(model, fullgraph=True, dynamic=False)

    makers: dict[str, tuple[Callable[[], Any], Tensor]] = {
        "ours": (lambda: layer, x),
        "ours, torch": (lambda: ByBackend(layer, "torch"), x),
        "bmm": (lambda: PlainChoice(layer), x),
        "bmm, compiled": (lambda: compiled(PlainChoice(layer)), x),
        "dense": (lambda: dense_mlp(shape).to(**where), rows),
        "dense, compiled": (lambda: compiled(dense_mlp(shape).to(**where)), rows),
        # last, what may not be captured: a capture that fails could leave something behind
        "grouped": (lambda: TokenChoice(layer), rows),
        "transformers": (lambda: Mixtral(shape).to(**where), rows),
        "scattermoe": (lambda: Scattered(layer, arguments.scattermoe), rows),
    }
    for name, (make, given) in makers.items():
        if not wanted(name):
            continue
        if name == "scattermoe" and arguments.scattermoe is None:
            yield Candidate(name, None, None, "no checkout given; --scattermoe PATH")
        elif "compiled" in name and not arguments.compile:
            yield Candidate(name, None, None, "not compiled here")
        else:
            try:
                yield Candidate(name, make(), given)
            except Exception as error:
                yield Candidate(name, None, None, f"{type(error).__name__}: {error}")


def products(shape: Shape, where: dict[str, Any]) -> Callable[[], object]:
    E, M, C, J = shape.experts, shape.batch * shape.tokens, shape.channels, shape.hidden
    values, grad = (torch.randn(E, M, C, **where) for _ in range(2))
    hidden, (weight_in, weight_out) = torch.randn(E, M, J, **where), (torch.randn(E, J, C, **where) for _ in range(2))

    def run() -> None:
        torch.bmm(values, weight_in.mT)
        torch.bmm(hidden, weight_out)
        torch.bmm(grad, weight_out.mT)
        torch.bmm(hidden.mT, grad)
        torch.bmm(hidden, weight_in)
        torch.bmm(hidden.mT, values)

    return run


def step(candidate: Candidate) -> Callable[[], object]:
    model, x = candidate.model, candidate.x
    assert model is not None
    assert x is not None
    x = x.detach().requires_grad_()
    leaves = [x, *model.parameters()]
    torch.manual_seed(2)
    wanted = torch.randn_like(x)

    def run() -> object:
        return torch.autograd.grad(model(x), leaves, wanted, allow_unused=True)

    return run


def prepared(candidate: Candidate, gpu: bool) -> tuple[Callable[[], object], dict[str, Any]]:
    """The step, as a graph where it can be one, and what was learnt on the way."""
    run = step(candidate)
    run()
    if not gpu:
        return run, {"graph": False, "eager": run}
    memory = peak_memory(run, lambda: None)
    found: dict[str, Any] = {"memory, MiB": (memory.peak - memory.held) / MEBIBYTE, "eager": run}
    try:
        return capture_cuda_graph(run), {**found, "graph": True}
    except Exception as error:
        torch.cuda.synchronize()
        return run, {**found, "graph": False, "note": f"no graph: {type(error).__name__}: {str(error)[:200]}"}


def checks(shape: Shape, where: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    few = min(shape.batch, 4)
    torch.manual_seed(3)
    layer = routed_layer(shape).to(**where)
    with torch.no_grad():  # a router that is sure of something, and gates that are not all the same
        layer.router.weight.mul_(3)
    x = torch.randn(few, shape.channels, shape.side, shape.side, **where).contiguous(memory_format=torch.channels_last)
    rows = rows_of(x).flatten(0, 1).contiguous()
    plain, by_token = PlainChoice(layer), TokenChoice(layer)
    by_torch = ByBackend(layer, "torch")
    with torch.no_grad():
        chosen = {"ours": layer.route(x).index, "bmm": plain.choose(x)[1], "grouped": by_token.choose(rows)[1]}
        with moesaic.backend("torch"):
            chosen["ours, torch"] = layer.route(x).index
        backend = select_backend(x, layer.route(x)).name
    given: dict[str, tuple[nn.Module, Tensor]] = {
        "ours": (layer, x), "ours, torch": (by_torch, x), "bmm": (plain, x), "grouped": (by_token, rows),
    }  # fmt: skip
    results: dict[str, Any] = {"backend picked": backend}
    if arguments.scattermoe is not None:
        try:
            given["scattermoe"], chosen["scattermoe"] = (
                (Scattered(layer, arguments.scattermoe), rows),
                chosen["grouped"],
            )
        except Exception as error:
            results["scattermoe"] = {"equal": None, "failed": f"{type(error).__name__}: {error}"}
    for name, (model, inputs) in given.items():
        if arguments.only and name.partition(",")[0] not in arguments.only.split(","):
            continue
        try:
            results[name] = check(model, inputs, chosen[name], where["dtype"])
        except Exception as error:
            results[name] = {"equal": None, "failed": f"{type(error).__name__}: {error}"}
    return results


# the table -----------------------------------------------------------------------------------------------------------


def table(
    timings: dict[str, Timing], eager: dict[str, Timing], details: dict[str, dict[str, Any]], shape: Shape, rate: float
) -> list[dict[str, Any]]:
    ours, dense = timings.get("ours"), timings.get("dense")
    rows: list[dict[str, Any]] = []
    for name, timing in sorted(timings.items(), key=lambda each: each[1].median):
        known = details[name]
        rows.append(
            {
                "what": name,
                "step, ms": timing.median,
                "this / ours": timing.median / ours.median if ours else "–",
                "this / dense": timing.median / dense.median if dense else "–",
                "eager, ms": eager[name].median,
                "eager / ours": eager[name].median / eager["ours"].median if ours else "–",
                "TFLOP/s": shape.flops / timing.median / 1e9,
                "share of floor": 1e3 * shape.flops / rate / timing.median,
                "memory, MiB": round(known["memory, MiB"]) if "memory, MiB" in known else "–",
                "graph": "yes" if known["graph"] else "no",
            }
        )
    return rows


def verdicts(timings: dict[str, Timing], eager: dict[str, Timing]) -> list[str]:
    """On the bars: those of steps in graphs, and those of eager steps."""
    if "ours" not in timings:
        return []
    ours, ours_eager = timings["ours"].median, eager["ours"].median
    lines = [
        f"ahead of {name} by {timings[name].median / ours:.2f}× (bar {BAR}×): "
        f"{'reached' if timings[name].median >= BAR * ours else 'MISSED'}"
        for name in ROUTED_PEERS
        if name in timings
    ]
    if "dense" in timings:
        ratio = ours / timings["dense"].median
        lines.append(f"{ratio:.2f}× the dense MLP's time (goal {GOAL}×): {'reached' if ratio <= GOAL else 'MISSED'}")
    lines += [
        f"eager, ahead of {name} by {eager[name].median / ours_eager:.2f}× (bar 1×): "
        f"{'reached' if eager[name].median >= ours_eager else 'MISSED'}"
        for name in EAGER_PEERS
        if name in eager
    ]
    return lines


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="a CPU gets a small shape")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="float32; on a GPU bfloat16")
    parser.add_argument("--only", help="candidates by name, with commas, as listed above; 'bmm' means compiled too")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--scattermoe", type=Path, help="a checkout of ScatterMoE")
    parser.add_argument("--no-compile", action="store_true", help="leave out what torch.compile makes of peers")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/mlp-DEVICE.json")
    arguments = parser.parse_args(given)
    gpu = arguments.device == "cuda"
    arguments.compile = gpu and not arguments.no_compile
    dtype = getattr(torch, arguments.dtype or ("bfloat16" if gpu else "float32"))
    where: dict[str, Any] = {"device": arguments.device, "dtype": dtype}
    shape = SHAPES[arguments.device]
    limits = measure_roofline(arguments.device, dtype)
    equal = checks(shape, where, arguments)
    for name, result in equal.items():
        if isinstance(result, dict):
            worst = max(result["errors"].values()) if "errors" in result else result["failed"]
            print(f"{name}: {'equal' if result['equal'] else 'NOT EQUAL'} to float64, {worst}")
    print(f"backend picked for ours: {equal['backend picked']}", flush=True)

    runs: dict[str, Callable[[], object]] = {}
    details: dict[str, dict[str, Any]] = {}
    absent: dict[str, str] = {}
    if not arguments.only or "products" in arguments.only.split(","):
        alone = products(shape, where)
        runs["products"] = capture_cuda_graph(alone) if gpu else alone
        details["products"] = {"graph": gpu, "eager": alone}
    for candidate in candidates(shape, where, arguments):
        if candidate.model is None:
            absent[candidate.name] = candidate.note
            continue
        try:
            runs[candidate.name], details[candidate.name] = prepared(candidate, gpu)
        except Exception as error:
            absent[candidate.name] = f"{type(error).__name__}: {error}"
        gc.collect()
        print(f"{candidate.name}: {'ready' if candidate.name in runs else 'failed'}", flush=True)
    timings = time_interleaved(runs, arguments.repetitions, gpu_clock=gpu)
    steps = {name: known["eager"] for name, known in details.items()}
    eager = time_interleaved(steps, arguments.repetitions) if gpu else timings

    rows = table(timings, eager, details, shape, limits.flops_per_second)
    show(f"{shape}; {dtype}, forward and backward", rows)
    for name, known in details.items():
        if "note" in known:
            print(f"{name}: {known['note']}")
    for name, why in absent.items():
        print(f"{name}: left out: {why}")
    lines = verdicts(timings, eager) if gpu else []
    print(*lines, sep="\n")
    size = dtype.itemsize
    bytes_moved = shape.least_bytes(size)
    floor = {
        "products, ms": 1e3 * shape.flops / limits.flops_per_second,
        **{f"{name}, ms": 1e3 * each / limits.bytes_per_second for name, each in bytes_moved.items()},
    }
    print("floors:", ", ".join(f"{name} {ms:.3f}" for name, ms in floor.items()))
    content = {
        "machine": machine(),
        "device": arguments.device,
        "dtype": str(dtype).removeprefix("torch."),
        "repetitions": arguments.repetitions,
        "shape": asdict(shape),
        "ceilings": limits,
        "flops": shape.flops,
        "least bytes": bytes_moved,
        "floors": floor,
        "equality": equal,
        "steps": [
            {
                **row,
                "quartiles, ms": [timings[row["what"]].low, timings[row["what"]].high],
                "eager quartiles, ms": [eager[row["what"]].low, eager[row["what"]].high],
            }
            for row in rows
        ],
        "notes": {name: known["note"] for name, known in details.items() if "note" in known},
        "left out": absent,
        "verdicts": lines,
    }  # fmt: skip
    print(f"written to {write(f'mlp-{arguments.device}', content, arguments.out)}")
    wrong = [name for name in ("ours", "ours, torch") if name in equal and not equal[name]["equal"]]
    if wrong:
        raise SystemExit(f"not equal to float64: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
