"""What one rank under torchrun costs: images per second of `fit` there and in a plain process, in turns.

    python benchmarks/one_rank.py --device cuda [--rounds 3] [--out FILE.json]

Both train WRN-10-10-pMoE on 64×64 pixels, 128 images a step, mixed precision; a process trains three epochs, and the
last one counts.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from measure import machine, show, write

import moesaic
from moesaic.data.image_dataset import ImageDataset, LabelledImages, Normalize
from moesaic.training import Recipe, fit

WAYS = {
    "plain process": [sys.executable],
    "torchrun, ddp": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"],
}


def speed(device: str, small: bool) -> float:
    """Images per second in the last epoch."""
    batch, size, steps = (8, 16, 2) if small else (128, 64, 40)
    labels = torch.arange(batch * steps) % 2
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (len(labels), 3, size, size), dtype=torch.uint8, generator=generator)
    scale = Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    few = LabelledImages(pixels[:batch], labels[:batch], labels[:batch])
    dataset = ImageDataset(LabelledImages(pixels, labels, labels), few, ("a", "b"), ("a", "b"), scale, scale)
    torch.manual_seed(0)
    model = moesaic.create_model("wrn10_1_pmoe" if small else "wrn10_10_pmoe", num_classes=2, image_size=size)
    recipe = Recipe(epochs=3, batch_size=batch)
    result = fit(model, dataset, recipe, device=device, parallel="ddp", eval_every=recipe.epochs)
    return result.epochs[-1].images_per_second


def measure(way: str, given: argparse.Namespace) -> float:
    """Images per second of a process of its own."""
    command = [*WAYS[way], __file__, "--worker", "--device", given.device, *(["--small"] if given.small else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{way} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--small", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/one-rank-DEVICE.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        print(json.dumps(speed(given.device, given.small)))
        return
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(given.rounds):
        for way in list(WAYS)[:: 1 if number % 2 else -1]:
            found[way].append(measure(way, given))
    plain = statistics.median(found["plain process"])
    rows: list[dict[str, Any]] = [
        {"process": way, "images/s": statistics.median(speeds), "of the plain one": statistics.median(speeds) / plain}
        for way, speeds in found.items()
    ]
    show(f"fit, WRN-10-10-pMoE, medians of {given.rounds} processes", rows)
    content = {"machine": machine(), "images per second": found, "rows": rows}
    print(f"written to {write(f'one-rank-{given.device}', content, given.out)}")


if __name__ == "__main__":
    main()
