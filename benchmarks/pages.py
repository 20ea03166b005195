"""Pages with many images in a real browser: size, first paint and the time of a click.

    python benchmarks/pages.py --images 1000

Writes the explanation of a small patch-level mixture on as many images of 288 × 384 pixels, smooth noise that
compresses as photographs do, and opens it in Chromium from the file. A click is measured from the event to the frame
that shows its effect, over several clicks of each kind; "nothing" is the time of a frame in which nothing changes: it
grows when other programs use the processor. "task" is the processor time of the page's main thread alone, as Chromium
counts it.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import moesaic
from moesaic.files import write_json
from moesaic.insight.explain import collect_outputs, explain
from moesaic.report import describe_machine
from moesaic.report.embedded_images import picture_of
from moesaic.report.explanation_page import About, write_explanation
from moesaic.report.explorer_data import CheckpointPass, ShownImage

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser.chromium import Chromium, Page  # noqa: E402  found by the line above

CLASSES = tuple(f"class {k}" for k in range(10))
CLICKS = {
    "open an image": "(i) => document.querySelectorAll('.thumbnail')[7 * i + 3]",
    "switch an expert": "(i) => document.querySelectorAll('[data-part=chips] input')[i % 8]",
    "keep a patch": "(i) => document.querySelectorAll('.target')[i]",
    "show classes": "() => document.getElementById('tab-classes')",
    "show experts": "() => document.getElementById('tab-experts')",
    "show images": "() => document.getElementById('tab-images')",
}
TIMED = """async (_, i) => {
    const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    await frame();
    const target = find(i);
    const begin = performance.now();
    target.click();
    await frame();
    return performance.now() - begin;
}"""
EMPTY = """async () => {
    const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    await frame();
    const begin = performance.now();
    await frame();
    return performance.now() - begin;
}"""
FILTER = """async () => {
    const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    await frame();
    const control = document.querySelector('[data-part="verdict"]');
    const begin = performance.now();
    control.value = control.value ? "" : "wrong";
    control.dispatchEvent(new Event("input", { bubbles: true }));
    await frame();
    return performance.now() - begin;
}"""
PAINT = """() => new Promise((done) => {
    const found = () => performance.getEntriesByName("first-contentful-paint")[0]?.startTime;
    const ask = () => (found() === undefined ? setTimeout(ask, 20) : done(found()));
    ask();
})"""


def photographs(count: int, seed: int) -> Tensor:
    """(B, 3, 288, 384) uint8."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.empty(count, 3, 288, 384, dtype=torch.uint8)
    for b in range(count):
        total = torch.zeros(1, 3, 288, 384)
        for size, weight in ((4, 1.0), (16, 0.5), (48, 0.25), (144, 0.15), (288, 0.1)):
            noise = torch.randn(1, 3, size, size * 4 // 3, generator=generator)
            total += weight * nn.functional.interpolate(noise, (288, 384), mode="bilinear")
        made[b] = (128 + 60 * total[0]).clamp(0, 255).to(torch.uint8)
    return made


def write_page(folder: Path, count: int, seed: int) -> Path:
    torch.manual_seed(seed)
    moe = moesaic.PatchMoE(3, 16, experts=8, patches_per_expert=8, patch_size=8)
    model = nn.Sequential(moe, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, len(CLASSES)))
    pictures = photographs(count, seed)
    pixels = nn.functional.interpolate(pictures[..., 48:-48].float(), (64, 64), mode="area").to(torch.uint8)
    labels = torch.arange(count) % len(CLASSES)
    found = collect_outputs(model, pixels, lambda x: x / 255)
    images = [ShownImage(f"photo {b}.jpg", int(labels[b]), picture_of(pictures[b])) for b in range(count)]
    return write_explanation(
        folder, explain(found, CLASSES, labels=labels), About("a network", "runs/a", f"{count:,} images"),
        pixels=pixels, classes=labels, images=images, checkpoints=[CheckpointPass("epoch 1", found, found)],
    )  # fmt: skip


def measure(page: Path, repeats: int, profile: Path) -> dict[str, Any]:
    paints: list[float] = []
    names = (*CLICKS, "filter", "nothing")
    clicks: dict[str, list[float]] = {name: [] for name in names}
    tasks: dict[str, list[float]] = {name: [] for name in names}
    with Chromium(profile) as browser:
        for _ in range(repeats):
            opened = browser.open(page)
            opened.send("Performance.enable", timeDomain="threadTicks")
            paints.append(opened.run(PAINT))
            for i in range(repeats):
                for name in names:
                    script = {"filter": FILTER, "nothing": EMPTY}.get(name)
                    script = script or TIMED.replace("find(i)", f"({CLICKS[name]})(i)")
                    before = task_ms(opened)
                    clicks[name].append(opened.run(script, None, i))
                    tasks[name].append(task_ms(opened) - before)
            opened.close()
        return {
            "browser": browser.version,
            "first_paint_ms": statistics.median(paints),
            "clicks_ms": {
                name: {
                    "median": statistics.median(clicks[name]),
                    "most": max(clicks[name]),
                    "task": round(statistics.median(tasks[name]), 1),
                }
                for name in names
            },
        }


def task_ms(page: Page) -> float:
    """Processor time of the main thread so far."""
    found = {each["name"]: each["value"] for each in page.send("Performance.getMetrics")["metrics"]}
    return 1000 * found["TaskDuration"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "pages.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begin = time.perf_counter()
        page = write_page(folder, options.images, options.seed)
        seconds, size = time.perf_counter() - begin, page.stat().st_size
        found = measure(page, options.repeats, folder / "profile")
    rows = [("size of the page", f"{size / 1e6:.1f} MB", "15 MB")]
    rows += [("first paint", f"{found['first_paint_ms']:.0f} ms", "1000 ms")]
    rows += [
        (f"click: {name}", f"{each['median']:.0f} ms (most {each['most']:.0f}, task {each['task']:.0f})", "100 ms")
        for name, each in found["clicks_ms"].items()
    ]
    print(f"{options.images:,} images, {found['browser']}, {describe_machine('cpu')}; written in {seconds:.0f} s\n")
    print(f"{'':26}{'measured':>32}{'goal':>12}")
    for what, measured, goal in rows:
        print(f"{what:26}{measured:>32}{goal:>12}")
    record = {
        "images": options.images, "page_bytes": size, "write_seconds": round(seconds, 1), **found,
        "machine": describe_machine("cpu"), "seed": options.seed,
    }  # fmt: skip
    write_json(options.out, json.loads(json.dumps(record)))


if __name__ == "__main__":
    main()
