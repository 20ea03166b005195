"""What each choice in WRN-pMoE's best form and in the default recipe brings: validation accuracy of variants.

    python benchmarks/wide_variants.py --data-dir DIR [--device cuda] [--only PATTERN ...] [--out FILE.json]

Two tasks: 1 000 faces, smiling or not (celeba-smiling), and 4 000 vehicles among animals (cifar-vehicles). The
images to validate on are *training* images that a run was not trained on, and seeds are not those of
`moesaic reproduce`, so its test images are untouched. With one network at a time it takes a quarter of an hour on
a GPU for two trials.

Variants are compared in pairs. In a trial all have the same images to train and to validate on, the same initial
weights as far as they have the same weights, and the same batches in the same order. ``--against NAME`` takes the
difference in validation accuracy to that variant, trial by trial, and its 95 % interval by Student's t. The rule,
which stood here before anything was measured by it: a variant does as well as the other if the interval's lower end
is above -0.5 percentage points; it takes 8 trials at least to say so. How many there are is decided beforehand, or
by the clock (``--seconds``), never by what was found; the file is written after every run.

The bias of the convolution in front of the routed layer is the only one of the released form that a BatchNorm does not
subtract. It was to go if by this rule the network does as well without it, and went:

    python benchmarks/wide_variants.py --data-dir DIR --tasks celeba-smiling --trials 40 --seconds 190
        --validation 5000 --only "best, ours" --against "best, one bias" --out benchmarks/results/wide-bias.json
"""

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from measure import machine, show, write
from torch import nn

from moesaic.data import load_images
from moesaic.data.image_dataset import ImageDataset
from moesaic.intervals import mean
from moesaic.models import WideResNetPMoE, create_model
from moesaic.training import Recipe, fit

SEED = 500
VALIDATION = 2000
MARGIN, TRIALS = 0.5, 8
"""Of the rule: percentage points that may be lost, and trials that it takes."""
TASKS = {"celeba-smiling": 1000, "cifar-vehicles": 4000}
EPOCHS = 30

OURS = Recipe(EPOCHS)
RELEASED = Recipe(
    EPOCHS, optimizer="sgd", lr=0.1, momentum=0.0, weight_decay=0.0, schedule="constant", warmup_epochs=0.0
)
DECAYED = replace(RELEASED, weight_decay=5e-4, schedule="cosine", warmup_epochs=None)
MOMENTUM = Recipe(EPOCHS, optimizer="sgd", lr=0.03, weight_decay=5e-4)


@dataclass(frozen=True)
class Variant:
    """A network and how it learns."""

    network: str
    recipe: Recipe
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    bias: bool = False
    """Whether the convolution in front of the routed layer has one."""

    def made(self, dataset: ImageDataset, width: int, seed: int) -> nn.Module:
        """The network with its initial weights."""
        sized = {"image_size": int(dataset.train.pixels.shape[2])} if "pmoe" in self.network else {}
        torch.manual_seed(seed)
        model = create_model(self.network.format(width), num_classes=dataset.num_classes, **sized, **self.options)
        if self.bias:
            assert isinstance(model, WideResNetPMoE)
            *_, front = (module for module in model.body.modules() if isinstance(module, nn.Conv2d))
            front.bias = nn.Parameter(torch.zeros(front.out_channels))
        return model


WRN, PMOE = "wrn10_{}", "wrn10_{}_pmoe"
VARIANTS = {
    "WRN, ours": Variant(WRN, OURS),
    "WRN, released recipe": Variant(WRN, RELEASED),
    "WRN, SGD with momentum": Variant(WRN, MOMENTUM),
    "best, ours": Variant(PMOE, OURS),
    "best, one bias": Variant(PMOE, OURS, bias=True),
    "best, fast routers": Variant(PMOE, replace(OURS, router_lr=1e-3)),
    "best, slow routers": Variant(PMOE, replace(OURS, router_lr=1e-5)),
    "best, SGD with momentum": Variant(PMOE, MOMENTUM),
    "best, released recipe": Variant(PMOE, RELEASED),
    "best, released recipe, cosine and decay": Variant(PMOE, DECAYED),
    "released form": Variant(PMOE, RELEASED, {"fidelity": "released"}),
    "printed form": Variant(PMOE, RELEASED, {"fidelity": "print"}),
    "best, residual": Variant(PMOE, OURS, {"residual": True}),
    "best, gate over the chosen": Variant(PMOE, OURS, {"gate": "softmax_selected"}),
    "best, gate on the output": Variant(PMOE, OURS, {"gate_on": "output", "expert_norm": False}),
    "best, 16 experts": Variant(PMOE, OURS, {"experts": 16}),
    "best, 3×3 experts": Variant(PMOE, OURS, {"kernel_size": 3}),
}


Found = dict[str, dict[str, list[float]]]
"""Of each dataset and each variant, the accuracies of its trials."""


def parted(dataset: ImageDataset, samples: int, validation: int, seed: int) -> ImageDataset:
    """So many images to train on, and others of the same part to validate on."""
    order = torch.randperm(len(dataset.train), generator=torch.Generator().manual_seed(seed))
    train, rest = order[:samples], order[samples : samples + validation]
    return replace(dataset, train=dataset.train.take(train), test=dataset.train.take(rest))


def compared(found: list[float], others: list[float]) -> dict[str, float | str]:
    """The difference to the others over the trials that both have, and what the rule says."""
    pairs = list(zip(found, others, strict=False))
    difference = mean([ours - theirs for ours, theirs in pairs])
    verdict = "yes" if difference.low > -MARGIN else "no"
    return {
        "trials": len(pairs),
        "difference": difference.value,
        "low": difference.low,
        "high": difference.high,
        "as well": verdict if len(pairs) >= TRIALS else "too few trials",
    }


def summary(found: Found, against: str | None) -> dict[str, Any]:
    """What is written: means over the trials so far, each trial, and the comparison if one was asked for."""
    names = next(iter(found.values()))
    rows: list[dict[str, float | str]] = [{"network": name} for name in names]
    for dataset, accuracies in found.items():
        for row, each in zip(rows, accuracies.values(), strict=True):
            if each:
                row[dataset], row[f"{dataset}, worst"] = sum(each) / len(each), min(each)
    content: dict[str, Any] = {"rows": rows, "accuracies": found}
    if against is not None:
        content["against"] = [
            {"network": name, "dataset": dataset} | compared(each, accuracies[against])
            for dataset, accuracies in found.items()
            for name, each in accuracies.items()
            if name != against and min(len(each), len(accuracies[against])) > 1
        ]
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="with CelebA and CIFAR-10")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="after the first, no trial begins that would end later"
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--only", nargs="+", default=["*"], help="variants whose names match one of these")
    parser.add_argument(
        "--against", choices=list(VARIANTS), metavar="NAME", help="the variant that the others are compared with"
    )
    parser.add_argument("--validation", type=int, default=VALIDATION, help="images to validate on")
    parser.add_argument("--samples", type=int, help="images to train on; default: as many as the dataset has here")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--width", type=int, default=10, help="of the networks")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/wide-variants.json")
    arguments = parser.parse_args()
    began = time.monotonic()
    chosen = {
        name: variant
        for name, variant in VARIANTS.items()
        if name == arguments.against or any(fnmatchcase(name, one) for one in arguments.only)
    }
    settings = ("device", "trials", "epochs", "width", "validation")
    samples = {task_name: arguments.samples or TASKS[task_name] for task_name in arguments.tasks}
    asked = {"machine": machine(), "samples": samples} | {name: getattr(arguments, name) for name in settings}
    found: Found = {}
    results: dict[str, Any] = {}
    for task_name in arguments.tasks:
        whole = {
            scale: load_images(task_name, data_dir=arguments.data_dir, normalize=scale)
            for scale in ("unit", "standard")
        }
        found[task_name] = {name: [] for name in chosen}
        took = 0.0
        for trial in range(arguments.trials):
            start = time.monotonic()
            if trial and start + took > began + arguments.seconds:
                break
            for name, variant in chosen.items():
                scaled = whole["unit" if variant.recipe is RELEASED else "standard"]
                dataset = parted(scaled, samples[task_name], arguments.validation, SEED + trial)
                model = variant.made(dataset, arguments.width, SEED + trial)
                recipe = replace(variant.recipe, epochs=arguments.epochs)
                run = fit(model, dataset, recipe, seed=SEED + trial, device=arguments.device, eval_every=recipe.epochs)
                found[task_name][name].append(run.accuracy)
                print(f"{task_name}, trial {trial + 1}, {name}: {run.accuracy:.2f} %", flush=True)
                results = asked | summary(found, arguments.against)
                write("wide-variants", results, arguments.out)
            took = time.monotonic() - start
    show(f"validation accuracy in percent after {arguments.epochs} epochs, mean and worst trial", results["rows"])
    if results.get("against"):
        show(f"against {arguments.against!r}, in percentage points", results["against"])
    print(f"written to {write('wide-variants', results, arguments.out)}")


if __name__ == "__main__":
    main()
