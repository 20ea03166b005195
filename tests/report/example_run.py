"""A made-up run: its folder, as `fit` would have left it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from moesaic.data.image_dataset import ImageDataset, LabelledImages, Normalize
from moesaic.files import json_digest
from moesaic.insight.routing_average import LayerRouting
from moesaic.training.fit_result import Epoch, FitResult
from moesaic.training.saved_predictions import PredictionsCallback

CLASSES = ("cat", "<script>alert(1)</script>", "dog & co")
SCALE = Normalize((0.5,) * 3, (0.2,) * 3)


def epochs(count: int, chooser: Any = "unit", experts: int = 3, gates: bool = False) -> list[Epoch]:
    def routing(i: int) -> LayerRouting:
        pairs = (0.5, 0.3) if chooser == "expert" else (None, None)
        return LayerRouting(chooser, tuple((e + 1 + i) / 100 for e in range(experts)), 0.9, 0.8, *pairs, 0.7)

    metrics = {"cost": 0.5, "open_share": 0.4} if gates else {}
    return [
        Epoch(
            i + 1,
            2 / (i + 1),
            50.0 + i,
            40.0 + i if i % 2 else None,
            1.5 * i,
            123.0,
            0.001 * (count - i),
            ("layer 'a<b>' is odd",) if i == 1 else (),
            metrics,
            {"net.<moe>": routing(i)} if experts else {},
        )
        for i in range(count)
    ]


def write_run(
    folder: Path,
    lines: list[Epoch] | None = None,
    *,
    classes: tuple[str, ...] = CLASSES,
    complete: bool = True,
    tested: bool = True,
) -> Path:
    """Writes the files of a run whose network takes every second image for the next class."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = epochs(4) if lines is None else lines
    count = 2 * len(classes)
    data = {"name": "p<b>ets", "train": 20, "test": count, "shape": [3, 8, 8], "classes": list(classes)}
    config = {
        "model": {"name": "wrn10_2_pmoe", "arguments": {"experts": 3}},
        "data": data,
        "recipe": {"epochs": 6, "optimizer": "adamw", "lr": 0.001, "ema_decay": None, "compile": False},
        "seed": 7,
        "device": "cpu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(epoch.to_json()) + "\n" for epoch in lines))
    if complete:
        each = (50.0,) * len(classes)
        result = FitResult(tuple(lines), 50.0, each, each, 6.0, 80, "all epochs").to_json()
        (folder / "result.json").write_text(json.dumps({**result, "sha256": json_digest(result)}))
    if tested:
        labels = torch.arange(count) % len(classes)
        guesses = torch.where(torch.arange(count) < len(classes), labels, (labels + 1) % len(classes))
        pixels = torch.arange(count * 3 * 64).view(count, 3, 8, 8).remainder(256).to(torch.uint8)
        names = tuple(f"{classes[label]}/{row}.png" for row, label in enumerate(labels.tolist()))
        images = LabelledImages(pixels, labels, labels, names=names)
        dataset = ImageDataset(images, images, classes, classes, SCALE, SCALE)
        trainer: Any = SimpleNamespace(
            dataset=dataset, epochs=lines, run_dir=SimpleNamespace(folder=folder, writes=True)
        )
        callback = PredictionsCallback()
        logits = torch.nn.functional.one_hot(guesses, len(classes)) * torch.arange(1, count + 1)[:, None]
        callback.on_test_batch(trainer, logits.float(), labels)
        callback.on_test_end(trainer)
    return folder
