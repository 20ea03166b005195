"""Random bit flips in the files of runs, and SIGKILLs of commands: noticed, or without effect.

    python benchmarks/faults.py [--flips 1000] [--kills 100] [--seed 0] [--out FILE.json]

A small network is trained twice: to the end, and until an interruption. Finished cells and decoded images are cached.
Each trial copies these files, flips one bit of one of them, and uses them as a user would: the page of the run is
made, training is continued, the finished run is called again and its checkpoint loaded, the cell is asked for, the
images are decoded. A flip is

    noticed    if a message names the file, or the damaged cache is computed again
    harmless   if all results are the same as without it
    silent     otherwise: a fault of moesaic

Half of the trials choose a file and then a bit, so that small files count; the other half choose among all bits.

`kill_campaign` describes the kills; after them a command that is called again must end with the same results.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from kill_campaign import COMMANDS, kill_campaign
from measure import machine, show, write
from PIL import Image

from moesaic.data.decoded_cache import DecodedCache, decode_images
from moesaic.data.file_sources import FolderSource
from moesaic.data.image_dataset import ImageDataset, LabelledImages, Normalize
from moesaic.models.registry import ModelSpec
from moesaic.training.checkpoint import load_checkpoint
from moesaic.training.fit import fit
from moesaic.training.progress import NoProgress
from moesaic.training.recipe import Recipe
from moesaic.training.result_cache import ResultCache
from moesaic.training.run_reader import read_run
from moesaic.validated_json import InvalidFile

SPEC = ModelSpec("wrn10_1_pmoe", {"num_classes": 2, "image_size": 16})
RECIPE = Recipe(epochs=3, batch_size=8, optimizer="sgd", lr=0.05, momentum=0.9)
CELL = {"model": "wrn10_1", "samples": 100, "trial": 0}
IMAGES = ("0.png", "1.png", "2.png")


def squares(count: int, seed: int) -> LabelledImages:
    """Noise with a bright upper or lower half."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    pixels = 120 * torch.rand(count, 3, 16, 16, generator=rng)
    for image, label in enumerate(labels.tolist()):
        pixels[image, :, 8 * label : 8 * label + 8] += 100
    return LabelledImages(pixels.to(torch.uint8), labels, labels)


SCALE = Normalize((0.5,) * 3, (0.3,) * 3)
NAMES = ("up", "down")
DATASET = ImageDataset(squares(24, 0), squares(16, 1), NAMES, NAMES, SCALE, SCALE, name="squares", normalize=SCALE)


class Stop(NoProgress):
    """Interrupts a run after its second epoch."""

    epochs = 0

    def advance(self, amount: int, note: str = "") -> None:
        self.epochs += amount
        if self.epochs > 1:
            raise KeyboardInterrupt


def train(folder: Path, progress: NoProgress | None = None) -> Any:
    """Trains, continues or reads a run; returns all results but for times."""
    torch.manual_seed(0)
    model = SPEC.build()
    found = fit(model, DATASET, RECIPE, out=folder, spec=SPEC, progress=progress, checkpoint_seconds=0)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses = [(epoch.loss, epoch.train_accuracy, epoch.test_accuracy, epoch.alarms) for epoch in found.epochs]
    return losses, found.accuracy, found.class_accuracy, found.stopped, weights


def page_of(folder: Path) -> Any:
    """All that the page of a run shows, but for times."""
    run = read_run(folder)
    saved = run.predictions
    assert saved is not None
    mistakes = [tuple(vars(mistake).values()) for mistake in saved.mistakes]
    epochs = [replace(epoch, seconds=0.0, images_per_second=0.0) for epoch in run.epochs]
    return run.model, run.data, run.recipe, run.seed, epochs, (saved.epoch, saved.labels, saved.predicted, mistakes)


def use_run(folder: Path) -> Any:
    return page_of(folder), use_network(folder)


def use_network(folder: Path) -> Any:
    results = train(folder)
    checkpoint = load_checkpoint(folder)
    about = checkpoint.metadata
    with torch.no_grad():
        logits = checkpoint.model(torch.full((1, 3, 16, 16), 0.25))
    return results, logits, about.class_names, about.normalize, about.input_shape, about.spec, about.metrics


def use_cells(folder: Path) -> Any:
    found = ResultCache(folder).find("cell", CELL)
    return "computed again" if found is None else found


def use_cache(folder: Path) -> Any:
    messages: list[str] = []
    found = decode_images(FolderSource(folder.parent / "images"), IMAGES, 8, DecodedCache(folder, messages.append))
    return "computed again" if messages else (found.rows, found.pixels, found.skipped)


@dataclass(frozen=True)
class Subject:
    """A folder of files, and how it is used."""

    folder: Path
    use: Callable[[Path], Any]
    expected: Any

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())


def make_subjects(base: Path) -> dict[str, Subject]:
    """The folders that bits are flipped in."""
    use_network(base / "finished")
    with suppress(KeyboardInterrupt):
        train(base / "interrupted", Stop())
    assert (base / "interrupted" / "training.safetensors").exists()
    ResultCache(base / "cells").get_or_run("cell", CELL, lambda: {"accuracy": [71.5, 80.25], "groups": [1.0]})
    images = base / "images"
    images.mkdir()
    for number, name in enumerate(IMAGES):
        Image.new("RGB", (10, 8), (70 * number, 30, 9)).save(images / name)
    (images / IMAGES[1]).write_bytes(b"no image")
    use_cache(base / "cache")
    uses = {"finished": use_run, "interrupted": use_run, "cells": use_cells, "cache": use_cache}
    made: dict[str, Subject] = {}
    for name, use in uses.items():
        copy = base / "expected" / name
        shutil.copytree(base / name, copy)
        if name == "cache":  # its files are named after the folder of the images
            copy = base / name
        made[name] = Subject(base / name, use, use(copy))
    return made


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, tuple | list):
        return isinstance(b, tuple | list) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def outcome(subject: Subject, folder: Path) -> str:
    """What using the folder came to."""
    try:
        found = subject.use(folder)
    except (InvalidFile, FileNotFoundError) as error:
        return "noticed" if "\n" not in str(error) else "silent"
    if isinstance(found, str):
        return "noticed"
    return "harmless" if same(found, subject.expected) else "silent"


def campaign(flips: int, seed: int) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Outcomes by file, and each flip that was silent."""
    rng = random.Random(seed)
    counts: Counter[tuple[str, str]] = Counter()
    silent: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        subjects = make_subjects(base)
        files = [(name, path) for name, subject in subjects.items() for path in subject.files()]
        sizes = [path.stat().st_size for _, path in files]
        for number in range(flips):
            name, path = rng.choice(files) if number % 2 else rng.choices(files, sizes)[0]
            subject = subjects[name]
            trial = base / "trial" / name
            shutil.copytree(subject.folder, trial)
            if name == "cache":
                shutil.copytree(base / "images", trial.parent / "images")
                trial = subject.folder
            place = trial / path.relative_to(subject.folder)
            whole = place.read_bytes()
            bit = rng.randrange(8 * len(whole))
            flip(place, bit)
            what = outcome(subject, trial)
            if name == "cache":  # rebuilt or not, the next trial starts from the same bytes
                place.write_bytes(whole)
            shutil.rmtree(base / "trial")
            kind = path.name if name in ("finished", "interrupted") else path.suffix
            counts[f"{name}: {kind}", what] += 1
            if what == "silent":
                silent.append(f"{name}: {path.name}, bit {bit} of byte {bit // 8}")
    return counts, silent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--commands", default=",".join(COMMANDS), help="that are killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    start = time.monotonic()
    killed, faults = Counter[tuple[str, str]](), list[str]()
    commands = given.commands.split(",")
    if given.kills:  # first: a process that has computed cannot be forked safely
        with tempfile.TemporaryDirectory() as temporary:
            killed, faults = kill_campaign(given.kills, given.seed, Path(temporary), commands)
        rows = [{"command": name, **{kind: killed[name, kind] for kind in ("identical", "other")}} for name in commands]
        show(f"{killed['all', 'kills']} kills: runs that ended with the same results as without", rows)
        for each in faults:
            print(f"fault: {each}")
    counts, silent = campaign(given.flips, given.seed)
    kinds = ("noticed", "harmless", "silent")
    names = sorted({name for name, _ in counts})
    rows = [{"file": name, **{kind: counts[name, kind] for kind in kinds}} for name in names]
    total = {kind: sum(row[kind] for row in rows) for kind in kinds}
    if rows:
        show(f"{given.flips} flipped bits", [*rows, {"file": "all", **total}])
    for each in silent:
        print(f"silent: {each}")
    content = {
        "machine": machine(),
        "flips": given.flips,
        "seed": given.seed,
        "seconds": round(time.monotonic() - start, 1),
        "total": total,
        "files": rows,
        "silent": silent,
        "kills": {
            "count": killed["all", "kills"],
            "faults": faults,
            "runs": {name: {kind: killed[name, kind] for kind in ("identical", "other")} for name in commands},
        },
    }
    print(f"\n{write('faults', content, given.out)}")
    return 1 if silent or faults else 0


if __name__ == "__main__":
    sys.exit(main())
