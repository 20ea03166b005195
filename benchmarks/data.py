"""Throughput of training batches: from the decoded-image cache, against decoding images in every epoch.

    python benchmarks/data.py [--images 4000] [--threads 2] [--out FILE.json]

The images are synthetic JPEG files of 178×218 pixels, the size of CelebA. A batch is 128 float32 images of 64×64
pixels, normalized to mean 0 and variance 1. An epoch takes each image once, in random order.

moesaic decodes the images once (`load_images`) and makes batches as training does (`train_batches`), with the given
number of threads. The peer is torch's DataLoader with as many worker processes and Pillow: open, resize, and if
requested flip and crop. Workers are started and one epoch is run before timing. Candidates are interleaved, and the
median over epochs is reported.

On a busy machine use "images per CPU second": the throughput of one thread with a core to itself.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import machine, show, time_interleaved, write
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from moesaic.data.image_dataset import Augment, ImageDataset
from moesaic.data.load import load_images
from moesaic.training.batches import train_batches

SIZE, BATCH, WIDTH, HEIGHT = 64, 128, 178, 218
BAR = 5000  # images a second


def make_images(folder: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(rng.integers(256, size=(14, 11, 3), dtype=np.uint8))
        path = folder / f"class {number % 2}" / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC).save(path, quality=90)


class DecodedImages(Dataset[tuple[Tensor, int]]):
    """Images decoded on every access, as usual for a torch Dataset."""

    def __init__(self, folder: Path, augment: Augment, scale: tuple[Tensor, Tensor]) -> None:
        self.files = sorted(folder.rglob("*.jpg"))
        self.augment, (self.mean, self.std) = augment, scale

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        file = self.files[row]
        with Image.open(file) as image:
            image = ImageOps.fit(image.convert("RGB"), (SIZE, SIZE), Image.Resampling.BICUBIC)
        if self.augment != "none" and random.random() < 0.5:
            image = ImageOps.mirror(image)
        if self.augment == "flip-crop":
            padding = SIZE // 8
            left, top = random.randint(0, 2 * padding), random.randint(0, 2 * padding)
            image = ImageOps.expand(image, padding).crop((left, top, left + SIZE, top + SIZE))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(255)
        return (pixels - self.mean) / self.std, int(file.parent.name.removeprefix("class "))


def epoch_of(dataset: ImageDataset) -> Callable[[], object]:
    sizes = [BATCH] * (len(dataset.train) // BATCH)

    def run() -> None:
        for _ in train_batches(dataset, sizes, 0, 0, torch.device("cpu")):
            pass

    return run


def peer_epoch(loader: DataLoader[Any]) -> Callable[[], object]:
    def run() -> None:
        for _ in loader:
            pass

    return run


def per_cpu_second(run: Callable[[], object], images: int, threads: int) -> float:
    torch.set_num_threads(1)
    times: list[float] = []
    for _ in range(4):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    torch.set_num_threads(threads)
    return images / statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/data-cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    candidates: dict[str, Callable[[], object]] = {}
    images: dict[str, int] = {}
    alone: dict[str, tuple[Callable[[], object], int]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder, cache = Path(place, "images"), Path(place, "cache")
        folder.mkdir()
        make_images(folder, arguments.images)
        start = time.perf_counter()
        load_images(folder, size=SIZE, cache_dir=cache)
        decoding = time.perf_counter() - start
        augments: tuple[Augment, ...] = ("none", "flip", "flip-crop")
        for augment in augments:
            dataset = load_images(folder, size=SIZE, cache_dir=cache, augment=augment)
            candidates[f"moesaic, {augment}"] = epoch_of(dataset)
            images[f"moesaic, {augment}"] = len(dataset.train) // BATCH * BATCH
            assert dataset.normalize is not None
            scale = [
                torch.tensor(numbers)[:, None, None] for numbers in (dataset.normalize.mean, dataset.normalize.std)
            ]
            peer = DataLoader(
                DecodedImages(folder, augment, (scale[0], scale[1])),
                BATCH,
                shuffle=True,
                drop_last=True,
                num_workers=arguments.threads,
                persistent_workers=True,
            )
            candidates[f"DataLoader over Pillow, {augment}"] = peer_epoch(peer)
            images[f"DataLoader over Pillow, {augment}"] = arguments.images // BATCH * BATCH
            # as a worker does it, in this process, where its time can be taken
            some = Subset(peer.dataset, range(4 * BATCH))
            alone[f"DataLoader over Pillow, {augment}"] = peer_epoch(DataLoader(some, BATCH)), 4 * BATCH
            ours = f"moesaic, {augment}"
            alone[ours] = candidates[ours], images[ours]
        cpu = {name: per_cpu_second(run, count, arguments.threads) for name, (run, count) in alone.items()}
        timings = time_interleaved(candidates, arguments.repetitions, warm_up=1)
    rate = {name: 1e3 * images[name] / timing.median for name, timing in timings.items()}
    rows = [
        {
            "batches from": name,
            "images/s": round(rate[name]),
            "× DataLoader": rate[name] / rate[f"DataLoader over Pillow, {name.partition(', ')[2]}"],
            "images per CPU second": round(cpu[name]),
            "an epoch, ms": timing,
        }
        for name, timing in timings.items()
    ]
    show(
        f"images of {SIZE}×{SIZE} pixels, batches of {BATCH}",
        [{key: value for key, value in row.items() if key != "an epoch, ms"} for row in rows],
    )
    print(f"decoded once: {arguments.images} images of {WIDTH}×{HEIGHT} pixels in {decoding:.1f} s")
    slowest = min(rate[name] for name in rate if name.startswith("moesaic"))
    print(f"the bar of {BAR} images a second is {'reached' if slowest >= BAR else 'missed'}")
    results = {
        "machine": machine(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "images": arguments.images,
        "size": SIZE,
        "batch": BATCH,
        "decoded once, images/s": round(arguments.images / decoding),
        "rows": rows,
    }
    print(f"written to {write('data-cpu', results, arguments.out)}")


if __name__ == "__main__":
    main()
