"""Mutated files against every reader of files, for a given time: the second half of ``make fuzz``.

Each target makes a small valid file; an input is that file with bits flipped, bytes replaced, cut, repeated or
inserted, or with values of its JSON replaced. A reader must return or raise `InvalidFile`, within 10 seconds and
1 GiB. Inputs that fail are kept, with the traceback, in ``.cache/fuzz``, and are run first the next time.

    python tools/fuzz_files.py --minutes 5 [--seed N] [--target zip] [--jobs 2]
"""

import argparse
import gzip
import hashlib
import io
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CORPUS = Path(__file__).resolve().parents[1] / ".cache" / "fuzz"
SECONDS = 10
MEMORY = 1 << 30
SLICE = 0.25
"""Seconds that a target runs before the next one."""


@dataclass(frozen=True)
class Target:
    """A reader of files."""

    valid: bytes
    """A file that it reads."""
    read: Callable[[bytes, Path], object]
    """Reads a file of that content; the folder is there for it to write to."""
    is_json: bool = False


# mutations

ODD_VALUES: list[Any] = json.loads(
    "[null, true, false, 0, -1, 1, 2147483648, 9223372036854775808, 1e10, 10000000000, -1000000000000000000, 0.5, -0.0,"
    '1e308, 5e-324, "", "x", "\\u001b[2J", "\\u0000", "wrn10_1", "timm/resnet18", [], {}, [[]], [null], {"a": 1},'
    '[0, 0, 0, 0], ["x", "y"], [[0, 1], [2]]]'
)
ODD_VALUES += ["A" * 5000, [0] * 50, ["x"] * 50, 10**30]
ODD_TEXTS = ("NaN", "Infinity", "1e999", "[" * 3000, "[" * 80 + "]" * 80, '"\\ud800"', "9" * 5000, "{}}", "")


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Changes a few places."""
    made = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        size = len(made)
        place = rng.randrange(size + 1)
        length = min(rng.choice((1, 2, 4, 8, 64, 512)), size)
        match rng.randrange(8):
            case 0 | 1 if place < size:
                made[place] ^= 1 << rng.randrange(8)
            case 2 if place < size:
                made[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 3:
                del made[place:]
            case 4:
                del made[place : place + length]
            case 5:
                made[place:place] = rng.randbytes(length)
            case 6:
                start = rng.randrange(size + 1)
                made[place:place] = made[start : start + length]
            case _:
                number = rng.choice((0, 1, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1))
                width = rng.choice((2, 4, 8))
                made[place : place + width] = (number % 256**width).to_bytes(width, rng.choice(("little", "big")))
    return bytes(made)


def copied(value: Any) -> Any:
    """A copy, as the next mutation changes it in place."""
    return json.loads(json.dumps(value))


def mutate_json(content: bytes, rng: random.Random) -> bytes:
    """Replaces, removes or adds values, or spells one in a way that is not plain JSON."""
    tree = [json.loads(content)]
    for _ in range(rng.choice((1, 1, 2, 4))):
        places: list[tuple[Any, Any]] = []
        level: list[Any] = [tree]
        while level:
            owner = level.pop()
            keys = list(owner) if isinstance(owner, dict) else range(len(owner))
            places += [(owner, key) for key in keys]
            level += [owner[key] for key in keys if isinstance(owner[key], dict | list)]
        owner, key = rng.choice(places)
        match rng.randrange(8):
            case 0 if isinstance(owner, dict):
                del owner[key]
            case 1 if isinstance(owner, dict):
                owner[rng.choice(("checkpoint_path", "", "x", "sha256", str(key) + "x"))] = copied(
                    rng.choice(ODD_VALUES)
                )
            case 2:
                owner[key] = "\0odd\0"
            case 3:
                other, name = rng.choice(places)
                owner[key] = copied(other[name])
            case _:
                owner[key] = copied(rng.choice(ODD_VALUES))
        if not tree:
            return b""
    return json.dumps(tree[0]).replace(json.dumps("\0odd\0"), rng.choice(ODD_TEXTS)).encode()


def mutated(target: Target, rng: random.Random) -> bytes:
    if target.is_json and rng.random() < 0.7:
        return mutate_json(target.valid, rng)
    return mutate_bytes(target.valid, rng)


# targets


def written(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def checkpoint_targets(folder: Path) -> Mapping[str, Target]:
    from safetensors.torch import save

    from moesaic.data.image_dataset import Normalize
    from moesaic.models.pretrained import load_pretrained, read_config
    from moesaic.models.registry import ModelSpec
    from moesaic.training.checkpoint import Metadata, load_checkpoint, read_tensors, save_network

    spec = ModelSpec("cifar_cnn", {"num_classes": 2})
    scale = Normalize((0.5,) * 3, (0.2,) * 3)
    metadata = Metadata(spec, ("a", "b"), ("a", "b"), scale, (3, 32, 32), "pets", {"accuracy": 9.5})
    model = spec.build()
    save_network(folder / "model.safetensors", model, metadata)
    valid = (folder / "model.safetensors").read_bytes()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    small = valid if len(valid) < 1 << 18 else valid[: 1 << 18]

    def unchecked(content: bytes, folder: Path) -> object:
        """A header of a stranger, without a checksum."""
        text = content.decode(errors="replace")
        return load_checkpoint(written(folder / "header", save(weights, metadata={"moesaic": text})))

    def pretrained(content: bytes, folder: Path) -> object:
        path = written(folder / "weights", content)
        read_config(path)
        load_pretrained(model, path)
        return None

    return {
        "header": Target(
            json.dumps(metadata.to_json()).encode(),
            lambda content, _: Metadata.from_json(parsed_object(content), "header"),
            is_json=True,
        ),
        "checkpoint-header": Target(json.dumps(metadata.to_json()).encode(), unchecked, is_json=True),
        "checkpoint": Target(valid, lambda content, at: load_checkpoint(written(at / "model.safetensors", content))),
        "tensors": Target(small, lambda content, at: read_tensors(written(at / "training.safetensors", content))),
        "pretrained": Target(valid, pretrained),
    }


def parsed_object(content: bytes) -> dict[str, Any]:
    from moesaic.validated_json import InvalidFile, parse_json

    found = parse_json(content, "header", nan=True)
    if not isinstance(found, dict):
        raise InvalidFile("no object")
    return found


def run_targets(folder: Path) -> Mapping[str, Target]:
    import torch

    from moesaic.data.image_dataset import ImageDataset, LabelledImages, Normalize
    from moesaic.files import json_digest, write_json
    from moesaic.insight.routing_average import LayerRouting
    from moesaic.leases import Holder, Leases
    from moesaic.ops import tile_sizes
    from moesaic.report.chart import Chart, Panel, Series, read_charts, write_charts
    from moesaic.report.training_page import training_page
    from moesaic.training.cell_plan import PlannedCell, SweepPlan, add_to_plan
    from moesaic.training.cell_status import folder_status
    from moesaic.training.cell_transfer import merge_cells, pack_cells
    from moesaic.training.comparison_budget import BudgetPlan, SharedTimeBudget
    from moesaic.training.comparison_result import read_comparison
    from moesaic.training.fit_result import Epoch, FitResult
    from moesaic.training.recipe import Recipe
    from moesaic.training.result_cache import ResultCache
    from moesaic.training.run_dir import RunDir
    from moesaic.training.run_reader import read_run
    from moesaic.training.saved_predictions import PREDICTIONS, PredictionsCallback
    from moesaic.validated_json import parse_json

    config = {"model": {"class": "x"}, "data": {"name": "pets"}, "recipe": Recipe(epochs=2).to_json(), "seed": 0}
    epoch = Epoch(1, 0.5, 80.0, 75.0, 2.0, 500.0, 0.1)
    result = FitResult((epoch,), 75.0, (70.0, 80.0), (70.0, 80.0), 2.0, 1000, "all epochs").to_json()
    cell_spec = {"model": "x", "samples": 3}
    cell = {"spec": cell_spec, "result": {"accuracy": [0.5]}, "seconds": 1.0}
    series = Series("a", "cnn", (1.0, 2.0), (3.0, 4.0))
    write_charts(folder / "charts.json", [Chart("c", "p", "w", "t", "c", (Panel("t", "x", "y", (series,)),))])
    comparison = json.loads(
        '{"data": "d", "digest": "x", "classes": ["a"], "groups": [], "pool": 2, "tested": 2, "guessing": 50.0, '
        '"models": [{"name": "m", "parameters": 1, "macs": 1, "routed_share": 0.0}], "samples": [2], "trials": 1, '
        '"seed": 0, "recipe": {}, "machine": "m", "notes": [], "runs": [{"model": "m", "samples": 2, "trial": 0, '
        '"accuracy": 50.0, "groups": [], "curve": [], "stopped": "", "seconds": 1.0}]}'
    )
    write_json(folder / "comparison.json", comparison)

    def a_run(name: str) -> Callable[[bytes, Path], object]:
        def read(content: bytes, at: Path) -> object:
            at = at / f"run-{name}"
            plain = {"config.json": json.dumps(config).encode(), "result.json": json.dumps(result).encode()}
            for each, whole in plain.items():
                written(at / each, content if each == name else whole)
            opened = RunDir(at, config)
            try:
                return opened.read_result()
            finally:
                opened.close()

        return read

    run_config = {
        **config,
        "data": {"name": "pets", "train": 4, "test": 4, "shape": [3, 2, 2], "classes": ["cat", "dog"]},
        "device": "cpu",
    }
    routing = {"moe": asdict(LayerRouting("unit", (0.25, 0.75), 0.5, 1.0, None, None, 0.5))}
    line = json.dumps({**epoch.to_json(), "routing": routing, "cost": 0.5}).encode() + b"\n"
    labels, guesses = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 1])
    logits = torch.nn.functional.one_hot(guesses, 2).float()
    dataset = LabelledImages(torch.zeros(4, 3, 2, 2, dtype=torch.uint8), labels, labels, names=("a", "b", "c", "d"))
    callback = PredictionsCallback()
    callback.on_test_batch(None, logits, labels)
    scale = Normalize((0.5,) * 3, (0.2,) * 3)
    two = ("cat", "dog")
    callback.on_test_end(
        SimpleNamespace(
            dataset=ImageDataset(dataset, dataset, two, two, scale, scale),
            epochs=[epoch],
            run_dir=SimpleNamespace(folder=folder, writes=True),
        )
    )
    pages = {
        "config.json": json.dumps(run_config).encode(),
        "metrics.jsonl": line,
        "result.json": json.dumps(result).encode(),
        PREDICTIONS: (folder / PREDICTIONS).read_bytes(),
    }

    def a_page(name: str) -> Target:
        def read(content: bytes, at: Path) -> object:
            at = at / f"page-{name}"
            for each, whole in pages.items():
                written(at / each, content if each == name else whole)
            return training_page(read_run(at))

        return Target(pages[name], read, is_json=name != PREDICTIONS)

    def a_cell(content: bytes, at: Path) -> object:
        cells = ResultCache(at / "cells")
        written(cells.path("cell", cell_spec), content)
        return cells.find("cell", cell_spec)

    def a_lease(content: bytes, at: Path) -> object:
        leases = Leases(at / "leases")
        written(leases.folder / "a.0.lease", content)
        lease = leases.acquire("a")
        if lease is not None:
            lease.release()
        return leases.holders(), leases.has_live()

    def a_sweep(content: bytes, at: Path) -> object:
        written(at / "sweep" / "plans" / "0123456789abcdef.json", content)
        (at / "sweep" / "cells").mkdir(exist_ok=True)
        return folder_status(at / "sweep")

    def a_budget(content: bytes, at: Path) -> object:
        budget = SharedTimeBudget(at / "budget", "asked", Leases(at / "budget"))
        written(at / "budget" / "plans" / "budget" / f"{json_digest('asked')[:16]}.json", content)
        found = budget.join()
        budget.close()
        return found

    def packed_cells(content: bytes, at: Path) -> object:
        shutil.rmtree(at / "merged", ignore_errors=True)
        return merge_cells([written(at / "cells.zip", content)], at / "merged")

    plan = SweepPlan("compare pets", (PlannedCell("wrn10_1, 8 samples, trial 1", "0123456789abcdef"),))
    ResultCache(folder / "out" / "cells").get_or_run("cell", cell_spec, lambda: {"accuracy": [0.5]})
    add_to_plan(folder / "out", "asked", plan)
    pack_cells(folder / "out", folder / "cells.zip")
    budget_plan = asdict(BudgetPlan((8, 16), 3, 20, 2, 1e9, "0123"))

    def tiles(content: bytes, at: Path) -> object:
        tile_sizes._read_cache.cache_clear()
        return tile_sizes._read_cache(str(written(at / "tiles.json", content)))

    return {
        "json": Target(json.dumps(config).encode(), lambda content, _: parse_json(content, "file.json"), is_json=True),
        "config": Target(json.dumps(config).encode(), a_run("config.json"), is_json=True),
        "result": Target(json.dumps(result).encode(), a_run("result.json"), is_json=True),
        "cell": Target(json.dumps({**cell, "digest": json_digest(cell)}).encode(), a_cell, is_json=True),
        "lease": Target(Holder.of_this_process().to_bytes(), a_lease, is_json=True),
        "sweep-plan": Target(json.dumps(asdict(plan)).encode(), a_sweep, is_json=True),
        "budget": Target(json.dumps(budget_plan).encode(), a_budget, is_json=True),
        "packed-cells": Target((folder / "cells.zip").read_bytes(), packed_cells),
        "charts": Target(
            (folder / "charts.json").read_bytes(),
            lambda content, at: read_charts(written(at / "charts.json", content)),
            is_json=True,
        ),
        "comparison": Target(
            (folder / "comparison.json").read_bytes(),
            lambda content, at: read_comparison(written(at / "result.json", content)),
            is_json=True,
        ),
        **{f"page-{Path(name).stem}": a_page(name) for name in pages},
        "tiles": Target(b'{"tiles": {"scatter 64 80": [16, 16, 1]}}', tiles, is_json=True),
    }


def image_targets(folder: Path) -> Mapping[str, Target]:
    import numpy as np
    from PIL import Image

    from moesaic.data.decode import decode_image, pixel_limit

    pixels = np.random.default_rng(0).integers(256, size=(12, 10, 3), dtype=np.uint8)

    def decoded(content: bytes, _: Path) -> object:
        with pixel_limit():
            return decode_image(content, 8)

    made: dict[str, Target] = {}
    for kind in ("png", "jpeg", "gif", "bmp", "webp", "tiff", "ppm", "ico"):
        content = io.BytesIO()
        Image.fromarray(pixels).save(content, kind)
        made[f"image-{kind}"] = Target(content.getvalue(), decoded)
    return made


def archive_targets(folder: Path) -> Mapping[str, Target]:
    import numpy as np
    from PIL import Image

    from moesaic.data.cifar10 import load_cifar10
    from moesaic.data.decoded_cache import DecodedCache, decode_images
    from moesaic.data.file_sources import FolderSource, UnreadableFile, open_source
    from moesaic.data.image_folder import load_folder
    from moesaic.data.mnist import load_digits
    from moesaic.insight.training_history import TrainingHistory
    from moesaic.validated_json import InvalidFile

    shade = io.BytesIO()
    Image.new("RGB", (4, 4), "red").save(shade, "png")
    packed: dict[int, bytes] = {}
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", method) as archive:
            for name in ("cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png"):
                archive.writestr(name, shade.getvalue())
        packed[method] = content.getvalue()

    def a_zip(content: bytes, at: Path) -> object:
        with open_source(written(at / "some.zip", content)) as source:
            for entry in source.entries():
                try:
                    source.read(entry.name)
                except UnreadableFile:
                    continue
        return None

    def a_dataset(content: bytes, at: Path) -> object:
        return load_folder(written(at / "pets.zip", content), 4, DecodedCache(at / "zip-cache"), seed=0)

    unpacked = io.BytesIO()
    with tarfile.open(fileobj=unpacked, mode="w") as tar:
        about = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
        about.size = 2 * 3073
        tar.addfile(about, io.BytesIO(bytes(about.size)))

    def cifar(content: bytes, at: Path) -> object:
        written(at / "cifar" / "cifar-10-binary.tar.gz", content)
        try:
            return load_cifar10("test", at / "cifar", 2)
        except FileNotFoundError as error:  # the archive is whole, and has other files
            raise InvalidFile(str(error)) from error

    images = bytes([0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 28, 0, 0, 0, 28]) + bytes(784)
    labels = bytes([0, 0, 8, 1, 0, 0, 0, 1, 5])

    def digits(content: bytes, at: Path) -> object:
        from moesaic.data import mnist

        mnist._idx_digits.cache_clear()
        written(at / "mnist" / "t10k-labels-idx1-ubyte", labels)
        written(at / "mnist" / "t10k-images-idx3-ubyte", content)
        return load_digits("test", at / "mnist")

    source = folder / "shades"
    source.mkdir()
    for number in range(3):
        written(source / f"{number}.png", shade.getvalue() if number != 1 else b"bad")
    names = [f"{number}.png" for number in range(3)]
    decode_images(FolderSource(source), names, 4, DecodedCache(folder / "cache"))
    pixels, header = (next((folder / "cache").glob(f"*.{kind}")) for kind in ("npy", "json"))
    whole = {path: path.read_bytes() for path in (pixels, header)}

    def cached(changed: Path) -> Callable[[bytes, Path], object]:
        def read(content: bytes, at: Path) -> object:
            for path, original in whole.items():
                written(path, content if path == changed else original)
            found = decode_images(FolderSource(source), names, 4, DecodedCache(folder / "cache"))
            assert found.rows.tolist() == [0, 2], "a damaged cache was used"
            assert found.pixels[:, 0].unique().tolist() == [255], "a damaged cache was used"
            return None

        return read

    history = TrainingHistory()
    history.add(0, entropy=np.float64(1.5))
    history.save(folder / "history.npz")
    return {
        "zip": Target(packed[zipfile.ZIP_DEFLATED], a_zip),
        "zip-stored": Target(packed[zipfile.ZIP_STORED], a_zip),
        "zip-bzip2": Target(packed[zipfile.ZIP_BZIP2], a_zip),
        "zip-lzma": Target(packed[zipfile.ZIP_LZMA], a_zip),
        "dataset-zip": Target(packed[zipfile.ZIP_DEFLATED], a_dataset),
        "tar-gz": Target(gzip.compress(unpacked.getvalue()), cifar),
        "tar": Target(unpacked.getvalue(), lambda content, at: cifar(gzip.compress(content, 1), at)),
        "idx": Target(images, digits),
        "idx-gz": Target(gzip.compress(images), digits),
        "cache-pixels": Target(whole[pixels], cached(pixels)),
        "cache-header": Target(whole[header], cached(header), is_json=True),
        "history": Target(
            (folder / "history.npz").read_bytes(),
            lambda content, at: TrainingHistory.load(written(at / "history.npz", content)),
        ),
    }


def all_targets(folder: Path) -> dict[str, Target]:
    makers = (checkpoint_targets, run_targets, image_targets, archive_targets)
    return {name: target for make in makers for name, target in make(folder).items()}


# running


class Hang(BaseException):
    """An input took too long."""


def run_one(target: Target, content: bytes, folder: Path) -> str:
    """Returns "read" or "refused", or a traceback."""
    from moesaic.validated_json import InvalidFile

    def hang(*_: object) -> None:
        raise Hang(f"more than {SECONDS} s")

    # seconds of work; on a busy machine the same may take far longer, and only what waits is left to the second timer
    timers = {signal.ITIMER_PROF: (signal.SIGPROF, SECONDS), signal.ITIMER_REAL: (signal.SIGALRM, 6 * SECONDS)}
    before = {number: signal.signal(number, hang) for number, _ in timers.values()}
    for timer, (_, seconds) in timers.items():
        signal.setitimer(timer, seconds)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.read(content, folder)
    except (InvalidFile, ImportError) as error:  # a header may name a network of timm, which may be missing here
        return "refused" if "\n" not in str(error) else f"a message of several lines: {error}"
    except KeyboardInterrupt:
        raise
    except BaseException:
        return traceback.format_exc()
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
    return "read"


def keep(name: str, content: bytes, what: str, corpus: Path) -> Path:
    corpus.mkdir(parents=True, exist_ok=True)
    path = corpus / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"
    path.write_bytes(content)
    path.with_name(f"{path.name}.txt").write_text(what)
    return path


def limit_memory() -> None:
    """A larger allocation raises MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, resource.RLIM_INFINITY))


def fuzz(seed: int, seconds: float, only: str | None, corpus: Path, inputs: int | None = None) -> dict[str, Any]:
    """Runs inputs in turn over all targets until the time is over, or so many for each."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a disk would be the slowest part
    with tempfile.TemporaryDirectory(dir=memory) as made, tempfile.TemporaryDirectory(dir=memory) as scratch:
        targets = {name: each for name, each in all_targets(Path(made)).items() if only in (None, name)}
        for name, target in targets.items():
            if run_one(target, target.valid, Path(scratch)) != "read" and name != "tensors":
                failures.append(f"{name}: the valid file is refused")
        rngs = {name: random.Random(f"{seed} {name}") for name in targets}
        kept = {path: path.name.rpartition("-")[0] for path in sorted(corpus.glob("*")) if path.suffix != ".txt"}
        pending = [(kept[path], path.read_bytes()) for path in kept if kept[path] in targets]
        end = time.monotonic() + seconds

        def tried(name: str, content: bytes) -> None:
            what = run_one(targets[name], content, Path(scratch))
            counts[f"{name} {what if what in ('read', 'refused') else 'failed'}"] += 1
            if what not in ("read", "refused"):
                failures.append(f"{keep(name, content, what, corpus)}: {what.strip().splitlines()[-1]}")

        for name, content in pending:
            tried(name, content)
        while (time.monotonic() < end or inputs is not None) and len(failures) < 50:
            for name, target in targets.items():
                stop = time.monotonic() + SLICE
                done = 0
                while (time.monotonic() < stop) if inputs is None else (done < inputs):
                    tried(name, mutated(target, rngs[name]))
                    done += 1
            if inputs is not None:
                break
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"counts": dict(counts), "failures": failures, "peak_mib": round(peak)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, help="default: a fresh one")
    parser.add_argument("--target", help="one target alone")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    if given.worker:
        import torch

        torch.set_num_threads(1)
        logging.disable(logging.CRITICAL)  # Pillow logs some faults of files
        with tempfile.TemporaryDirectory() as folder:
            all_targets(Path(folder))  # imports all modules before memory is limited
        limit_memory()
        print(json.dumps(fuzz(seed, 60 * given.minutes, given.target, CORPUS)))
        return 0
    print(f"fuzz_files: seed {seed}, {given.jobs} processes", flush=True)
    command = [sys.executable, __file__, "--worker", "--minutes", str(given.minutes)]
    command += ["--target", given.target] if given.target else []
    # threads would each reserve an arena of 64 MiB of addresses
    environment = {**os.environ, "MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen([*command, "--seed", str(seed * 1000 + job)], stdout=subprocess.PIPE, env=environment)
        for job in range(given.jobs)
    ]
    counts: Counter[str] = Counter()
    failures: list[str] = []
    peak = 0
    for worker in workers:
        output = worker.communicate()[0]
        if worker.returncode:
            failures.append(f"a process ended with {worker.returncode}")
            continue
        found = json.loads(output)
        counts.update(found["counts"])
        failures += found["failures"]
        peak = max(peak, found["peak_mib"])
    for name in sorted({key.rpartition(" ")[0] for key in counts}):
        read, refused, failed = (counts[f"{name} {what}"] for what in ("read", "refused", "failed"))
        print(f"{name:20} {read + refused + failed:9,} inputs: {read:9,} read, {refused:9,} refused, {failed:3} failed")
    print(f"fuzz_files: {counts.total():,} inputs, {len(failures)} failures, at most {peak:,} MiB; seed {seed}")
    for failure in failures[:20]:
        print(f"  {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
