"""Routed vision transformers against the dense one: a training step of ViT-B/16 as users run it.

    python benchmarks/vit.py --device cuda [--only split] [--modes eager] [--repetitions 20] [--out FILE.json]
    python benchmarks/vit.py --small       # a tiny transformer on a CPU: does everything run?

timm's ViT-B/16 at 224, 128 images, mixed precision in bfloat16. Wall clock with a synchronisation around each run, all
networks of a mode in turns, medians; a figure is the dense network's time over this one's: above 1, routing is faster.
A step is forward, cross-entropy, backward and SGD with momentum; a second column leaves SGD out, whose time grows with
the parameters of the experts.

    experts   all MLPs by 8 experts as wide as the MLP, one for each token (expert choice): equal active arithmetic
    split     all MLPs in 8 parts of the hidden neurons, 4 for each token: half of the MLPs' multiply-adds
    half      a dense network with MLPs of half the width: the bound for split
    skip      half of the tokens in every second block (mixture of depths)

The bars are for a GPU, and this script was not run on one yet. They are judged there at full size alone.

Before anything is timed, a routed layer of each network is compared with its definition in float64, in the precision of
the benchmark, by its own choice of tokens and with NaN in the memory that is given out: outputs, and the gradients of
experts or block.
"""

import argparse
import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from measure import machine, show, time_interleaved, write
from torch import Tensor, nn
from torch.nn import functional as F

import moesaic
from moesaic.bench.layer_accuracy import poison
from moesaic.experts import MLPExperts
from moesaic.experts.mlp_experts import ACTIVATIONS
from moesaic.layers import TokenMoE, TokenSkip

Run = Callable[[], object]
MODES = ("eager", "compiled")
EXPERTS = 8
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 2e-2}
BARS: dict[tuple[str, str], float] = {
    ("experts", "eager"): 1 / 1.1,
    ("experts", "compiled"): 1 / 1.1,
    ("split", "compiled"): 1.15,
    ("skip", "compiled"): 1.2,
}
"""Dense time over the network's, at least."""


@dataclass(frozen=True)
class Options:
    """What all networks have in common."""

    device: str
    small: bool
    repetitions: int

    @property
    def batch(self) -> int:
        return 2 if self.small else 128

    @property
    def image_size(self) -> int:
        return 16 if self.small else 224

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def autocast(self) -> Any:
        return torch.autocast("cuda", torch.bfloat16) if self.device == "cuda" else nullcontext()

    def images(self, batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(batch, 3, self.image_size, self.image_size, generator=generator).to(self.device)


@dataclass(frozen=True)
class Row:
    """One network in one mode."""

    network: str
    mode: str
    step_ms: float
    gain: float
    """Dense time over this network's, of a step."""
    gain_without_optimizer: float
    bar: float | None
    parameters: int
    quartiles_ms: tuple[float, float]

    @property
    def reached(self) -> str:
        return "–" if self.bar is None else "yes" if self.gain >= self.bar else "no"


def dense(options: Options, mlp_ratio: float = 4.0) -> nn.Module:
    torch.manual_seed(0)
    if options.small:
        size = {"image_size": options.image_size, "depth": 2}
        return moesaic.create_model("vit_tiny_patch4_32", num_classes=10, mlp_ratio=mlp_ratio, **size)
    return moesaic.create_model("timm/vit_base_patch16_224", num_classes=1000, mlp_ratio=mlp_ratio)


def routed(name: str, options: Options) -> nn.Module:
    model, size = dense(options), options.image_size
    if name == "experts":
        return moesaic.convert(model, "blocks.*.mlp", experts=EXPERTS, capacity=1, input_size=size)
    if name == "split":
        halves = {"capacity": EXPERTS / 2, "init": "split"}
        return moesaic.convert(model, "blocks.*.mlp", experts=EXPERTS, input_size=size, **halves)
    return moesaic.skip(model, "every-2", keep=0.5, input_size=size)


NETWORKS: dict[str, Callable[[Options], nn.Module]] = {
    "dense": dense,
    "experts": lambda options: routed("experts", options),
    "split": lambda options: routed("split", options),
    "half": lambda options: dense(options, mlp_ratio=2.0),
    "skip": lambda options: routed("skip", options),
}


# equality ------------------------------------------------------------------------------------------------------------


def experts_in_float64(layer: TokenMoE, x: Tensor, index: Tensor, gate: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The layer by given places and gates (B, E, L), one image and expert after the other; its output and weights."""
    experts = layer.experts
    assert isinstance(experts, MLPExperts)
    weights = [weight.detach().double().requires_grad_() for weight in experts.parameters()]
    named = dict(zip((name for name, _ in experts.named_parameters()), weights, strict=True))
    y = torch.zeros(*x.shape[:2], layer.out_dim, dtype=torch.float64, device=x.device)
    for b in range(len(x)):
        for e in range(len(experts)):
            rows = x[b, index[b, e]].double()
            hidden = F.linear(rows, named["weight_in"][e], named["bias_in"][e])
            output = F.linear(ACTIVATIONS[experts.activation](hidden), named["weight_out"][e], named["bias_out"][e])
            place = torch.tensor(b, device=x.device), index[b, e]
            y = y.index_put(place, gate[b, e].double().unsqueeze(1) * output, accumulate=True)
    return y, weights


def block_in_float64(layer: TokenSkip, x: Tensor, index: Tensor, gate: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The block on given tokens with given gates (B, 1, L); its output and weights."""
    block = copy.deepcopy(layer.block).double()
    place = index[:, 0].unsqueeze(-1).expand(-1, -1, layer.dim)
    chosen = x.double().gather(1, place)
    y = chosen + gate[:, 0].double().unsqueeze(-1) * (block(chosen) - chosen)
    return x.double().scatter(1, place, y), list(block.parameters())


def tokens_of(model: nn.Module, name: str, options: Options) -> Tensor:
    """What a layer gets of two images."""
    found: list[Tensor] = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, args: found.append(args[0].detach().clone()))
    with torch.no_grad(), options.autocast():
        model(options.images(2))
    hook.remove()
    return found[0]


def relative(found: Tensor, true: Tensor) -> float:
    found, true = found.detach().double(), true.detach()
    return float((found - true).norm() / true.norm().clamp_min(1e-30))


def check(model: nn.Module, options: Options) -> dict[str, Any]:
    """The last routed layer of a network against float64."""
    kinds = {name: layer for name, layer in model.named_modules() if isinstance(layer, TokenMoE | TokenSkip)}
    name, layer = list(kinds.items())[-1]
    x = tokens_of(model, name, options)
    with torch.no_grad(), options.autocast():
        routing = layer.route(x)
    in_float64 = experts_in_float64 if isinstance(layer, TokenMoE) else block_in_float64
    true, exact = in_float64(layer, x, routing.index, routing.gate)
    weights = list((layer.experts if isinstance(layer, TokenMoE) else layer.block).parameters())
    poison(options.device)
    with options.autocast():
        y = layer(x)
    wanted = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    expected = torch.autograd.grad(true, exact, wanted.double())
    gradients = torch.autograd.grad(y, weights, wanted)
    pairs = [(y, true), *zip(gradients, expected, strict=True)]
    # a bias whose gradient is nothing but rounding, as that of attention's keys, has no relative error
    errors = [relative(a, b) for a, b in pairs if b.norm() > 1e-6 * math.sqrt(b.numel())]
    return {"layer": name, "error": max(errors), "equal": max(errors) <= TOLERANCE[options.dtype]}


# times ---------------------------------------------------------------------------------------------------------------


def training_step(model: nn.Module, called: Any, options: Options, *, optimizer: bool) -> Run:
    """A plain loop in mixed precision."""
    x = options.images(options.batch)
    targets = torch.arange(len(x), device=x.device) % 10
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def run() -> None:
        sgd.zero_grad()
        with options.autocast():
            logits = called(x)
        F.cross_entropy(logits.float(), targets).backward()
        if optimizer:
            sgd.step()

    return run


def rows_of(networks: dict[str, nn.Module], mode: str, options: Options) -> Iterator[Row]:
    """All networks of a mode in turns."""
    torch.compiler.reset()
    called = {name: torch.compile(model) if mode == "compiled" else model for name, model in networks.items()}
    times = []
    for optimizer in (True, False):
        runs = {
            name: training_step(model, called[name], options, optimizer=optimizer) for name, model in networks.items()
        }
        times.append(time_interleaved(runs, options.repetitions, warm_up=1 if options.small else 10))
    steps, backward = times
    for name, model in networks.items():
        yield Row(
            name,
            mode,
            steps[name].median,
            steps["dense"].median / steps[name].median,
            backward["dense"].median / backward[name].median,
            BARS.get((name, mode)),
            sum(weight.numel() for weight in model.parameters()),
            (steps[name].low, steps[name].high),
        )


def chosen(text: str | None, known: Any, option: str) -> list[str]:
    names = text.split(",") if text else list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"{option}: {', '.join(unknown)} is unknown; choose from {', '.join(known)}")
    return names


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", help=f"networks beside dense, with commas: {','.join(list(NETWORKS)[1:])}")
    parser.add_argument("--modes", help=f"with commas: {','.join(MODES)}; default: both, eager alone with --small")
    parser.add_argument("--small", action="store_true", help="a tiny transformer: does everything run?")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/vit-DEVICE.json")
    given = parser.parse_args(arguments)
    names = chosen(given.only, NETWORKS, "--only")
    modes = chosen(given.modes or ("eager" if given.small else None), MODES, "--modes")
    options = Options(given.device, given.small, given.repetitions)
    networks = {name: make(options).to(options.device) for name, make in NETWORKS.items() if name in {"dense", *names}}
    checks: dict[str, Any] = {}
    for name in networks.keys() & {"experts", "split", "skip"}:
        checks[name] = check(networks[name], options)
        verdict = "equal" if checks[name]["equal"] else "NOT EQUAL"
        print(f"{name}: {checks[name]['layer']} is {verdict} to float64, error {checks[name]['error']:.1e}", flush=True)
    if not all(each["equal"] for each in checks.values()):
        raise SystemExit("not equal to float64: nothing is timed")
    rows = [row for mode in modes for row in rows_of(networks, mode, options)]
    judged = options.device == "cuda" and not options.small  # the bars are for the full size on a GPU
    shown = [
        {
            "what": f"{row.network}, {row.mode}",
            "step, ms": row.step_ms,
            "× dense": row.gain,
            "without SGD": row.gain_without_optimizer,
            "parameters": f"{row.parameters / 1e6:.1f} M",
        }
        | ({"bar": row.bar or "–", "reached": row.reached} if judged else {})
        for row in rows
    ]
    show("A training step; above 1 in “× dense”: faster than the dense network", shown)
    content = {
        "machine": machine(),
        "options": asdict(options),
        "batch": options.batch,
        "image_size": options.image_size,
        "checks": checks,
        "rows": [asdict(row) | ({"reached": row.reached} if judged else {}) for row in rows],
    }
    print(f"written to {write(f'vit-{options.device}', content, given.out)}")


if __name__ == "__main__":
    main()
