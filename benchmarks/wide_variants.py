"""What each choice in WRN-pMoE's best form and in the default recipe brings: validation accuracy of variants.

    python benchmarks/wide_variants.py --data-dir DIR [--device cuda] [--only PATTERN ...] [--out FILE.json]

Two tasks: 1 000 faces, smiling or not (celeba-smiling), and 4 000 vehicles among animals (cifar-vehicles). The
images to validate on are *training* images that a run was not trained on, and seeds are not those of
`moesaic reproduce`, so its test images are untouched. With one network at a time it takes a quarter of an hour on
a GPU for two trials.
"""

import argparse
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from measure import machine, show, write

from moesaic.data import load_images
from moesaic.data.image_tasks import ImageTask
from moesaic.models import create_model
from moesaic.training import Recipe, fit

SEED = 500
VALIDATION = 2000
TASKS = {"celeba-smiling": 1000, "cifar-vehicles": 4000}
EPOCHS = 30

OURS = Recipe(EPOCHS)
RELEASED = Recipe(
    EPOCHS, optimizer="sgd", learning_rate=0.1, momentum=0.0, weight_decay=0.0, schedule="constant", warmup=0.0
)
DECAYED = replace(RELEASED, weight_decay=5e-4, schedule="cosine", warmup=None)
MOMENTUM = Recipe(EPOCHS, optimizer="sgd", learning_rate=0.03, weight_decay=5e-4)

VARIANTS: dict[str, tuple[str, dict[str, Any], Recipe]] = {
    "WRN, ours": ("wrn10_10", {}, OURS),
    "WRN, released recipe": ("wrn10_10", {}, RELEASED),
    "WRN, SGD with momentum": ("wrn10_10", {}, MOMENTUM),
    "best, ours": ("wrn10_10_pmoe", {}, OURS),
    "best, fast routers": ("wrn10_10_pmoe", {}, replace(OURS, router_rate=1e-3)),
    "best, slow routers": ("wrn10_10_pmoe", {}, replace(OURS, router_rate=1e-5)),
    "best, SGD with momentum": ("wrn10_10_pmoe", {}, MOMENTUM),
    "best, released recipe": ("wrn10_10_pmoe", {}, RELEASED),
    "best, released recipe, cosine and decay": ("wrn10_10_pmoe", {}, DECAYED),
    "released form": ("wrn10_10_pmoe", {"fidelity": "released"}, RELEASED),
    "printed form": ("wrn10_10_pmoe", {"fidelity": "print"}, RELEASED),
    "best, residual": ("wrn10_10_pmoe", {"residual": True}, OURS),
    "best, gate over the chosen": ("wrn10_10_pmoe", {"gate": "softmax_selected"}, OURS),
    "best, gate on the output": ("wrn10_10_pmoe", {"gate_on": "output", "expert_norm": False}, OURS),
    "best, 16 experts": ("wrn10_10_pmoe", {"experts": 16}, OURS),
    "best, 3×3 experts": ("wrn10_10_pmoe", {"kernel_size": 3}, OURS),
}


def parted(task: ImageTask, samples: int, seed: int) -> ImageTask:
    """So many images to train on, and others of the same part to validate on."""
    order = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(seed))
    train, rest = order[:samples], order[samples : samples + VALIDATION]
    return replace(task, train=task.train.take(train), test=task.train.take(rest))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="with CelebA and CIFAR-10")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--only", nargs="+", default=["*"], help="variants whose names match one of these")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/wide-variants.json")
    arguments = parser.parse_args()
    chosen = {
        name: variant for name, variant in VARIANTS.items() if any(fnmatchcase(name, one) for one in arguments.only)
    }
    rows: list[dict[str, float | str]] = [{"network": name} for name in chosen]
    for task_name in arguments.tasks:
        whole = {
            scale: load_images(task_name, data_dir=arguments.data_dir, scale=scale) for scale in ("unit", "standard")
        }
        for row, (name, options, recipe) in zip(rows, chosen.values(), strict=True):
            found: list[float] = []
            for trial in range(arguments.trials):
                task = parted(whole["unit" if recipe is RELEASED else "standard"], TASKS[task_name], SEED + trial)
                sized = {"image_size": int(task.train.pixels.shape[2])} if "pmoe" in name else {}
                torch.manual_seed(SEED + trial)
                model = create_model(name, num_classes=task.labels, **sized, **options)
                run = fit(model, task, recipe, seed=SEED + trial, device=arguments.device, test_every=recipe.epochs)
                found.append(run.accuracy)
            row[task_name], row[f"{task_name}, worst"] = sum(found) / len(found), min(found)
            print(task_name, row, flush=True)
    show(f"validation accuracy in percent after {EPOCHS} epochs, mean and worst of {arguments.trials} trials", rows)
    results = {"machine": machine(), "device": arguments.device, "trials": arguments.trials, "rows": rows}
    print(f"written to {write('wide-variants', results, arguments.out)}")


if __name__ == "__main__":
    main()
