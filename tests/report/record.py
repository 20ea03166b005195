"""Pages and figures made of planted data, which tests compare with those in tests/report/recorded.

    PYTHONPATH=tests python tests/report/record.py

Records them anew. Look at what changed before it is committed: `git diff` shows the texts, and the differences of
figures are named by tests/report/test_recorded_pages.py.
"""

import io
import json
import re
import tempfile
import zipfile
from html import unescape
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from papers.record import RUN
from PIL import Image
from torch import nn
from training.example_comparison import comparison

import moesaic
from moesaic.insight import TrainingHistory, collect_outputs, explain
from moesaic.insight.channel_explanation import GatedOutputs
from moesaic.insight.cluster_dispatch import DispatchTable
from moesaic.insight.explain import ForwardPass
from moesaic.report.chart import read_charts
from moesaic.report.chart_drawing import draw
from moesaic.report.comparison_charts import comparison_charts
from moesaic.report.comparison_report import write_comparison_report
from moesaic.report.embedded_images import picture_of
from moesaic.report.explanation_page import About, write_explanation
from moesaic.report.explorer_data import CheckpointPass, ShownImage
from moesaic.routing.channel_gate import ChannelGate
from moesaic.training.paired_comparison import paired_comparisons

FOLDER = Path(__file__).parent / "recorded"
PICTURES = FOLDER / "pictures.npz"
VERSION = "matplotlib"
"""Name under which the file has the version that drew the pictures: another one may place text differently."""

Grey = np.ndarray
"""A picture in grey, (height, width) of uint8."""

_CHARTS = (
    ("chowdhury2023", "figure-4"), ("chowdhury2023", "figure-5"), ("chowdhury2023", "coupling"),
    ("chen2022", "tables-1-and-3"), ("chen2022", "table-4"), ("chen2022", "figure-3"), ("wang2019", "expressive-power"),
)  # fmt: skip

_FINE = 1 / 3
"""Pictures are compared at a third of their resolution."""


def explain_patches(folder: Path) -> None:
    """Five experts on rectangular images of three classes, each with a bright patch of its own."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    moe = moesaic.PatchMoE(3, 10, experts=5, patches_per_expert=2, patch_size=4)
    model = nn.Sequential(moe, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 3))
    labels = torch.arange(36) % 3
    pixels = torch.randint(0, 90, (36, 3, 12, 16), dtype=torch.uint8, generator=generator)
    for k in range(3):
        pixels[labels == k, k, 4 * k : 4 * k + 4, 4:8] = 250
    outputs = collect_outputs(model, pixels, lambda x: x / 255)
    names = ("a class with quite a long name", "dog & co", "frog")
    groups = (torch.arange(36) > 20).long()
    explanation = explain(outputs, names, labels=labels, groups=groups, group_names=("light", "dark"), top_patches=4)
    images = [ShownImage("one.png", 1, picture_of(pixels[0])), ShownImage("two.png", None, picture_of(pixels[1]))]
    about = About(
        "wrn_pmoe", "runs/a", "36 images", notes=("A note.",), skipped=(("bad.jpg", "is empty"),), command="explain a"
    )
    write_explanation(
        folder, explanation, about, pixels=pixels, classes=labels, images=images,
        checkpoints=[CheckpointPass("epoch 1", outputs.images(0, 2), outputs)],
    )  # fmt: skip


def explain_gates(folder: Path) -> None:
    """Of three layers one is static, one random, and one follows the class; class 2 is expensive."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(45) % 3
    gates = {
        "conv1": torch.tensor([True, False]).expand(45, 2),
        "conv2": torch.rand(45, 8, generator=generator) < 0.5,
        "conv3": nn.functional.one_hot(labels, 3).bool(),
    }
    macs = 300 + 100 * labels + torch.randint(0, 20, (45,), generator=generator)
    pixels = torch.randint(0, 256, (45, 3, 8, 6), dtype=torch.uint8, generator=generator)
    probabilities = torch.softmax(torch.randn(45, 3, generator=generator) + 2 * torch.eye(3)[labels], 1)
    embedding = torch.ones(45, 6)  # no t-SNE: it takes seconds, and its last digits differ between machines

    def forward_pass(count: int) -> ForwardPass:
        routing = {
            name: ChannelGate(1, each.shape[1]).choose(torch.where(each[:count], 0.5, -0.5))
            for name, each in gates.items()
        }
        gated = GatedOutputs(embedding[:count], macs[:count], 1000, 50)
        return ForwardPass(probabilities[:count], routing, dict.fromkeys(routing), dict.fromkeys(routing, 1), gated)

    names = ("cat", "dog & co", "frog")
    explanation = explain(forward_pass(45), names, labels=labels)
    write_explanation(
        folder, explanation, About("vgg16_deepmoe", "runs/b", "45 images"), pixels=pixels, classes=labels,
        images=[ShownImage("one.png", 0, picture_of(pixels[0]))],
        checkpoints=[CheckpointPass("epoch 1", forward_pass(1), forward_pass(45))],
    )  # fmt: skip


def compare_models(folder: Path) -> list[Figure]:
    sizes = (250, 500, 1000)
    first = [[70.0, 70.6, 69.5], [80.1, 79.5, 80.4], [90.2, 89.6, 90.4]]
    second = [[80.0, 80.4, 79.7], [90.0, 89.7, 90.2], [95.0, 94.8, 95.3]]
    third = [[70.5, 69.9, 70.3], [79.6, 80.3, 80.2], [90.0, 90.1, 89.7]]
    found = comparison(sizes, first, second, third, groups=("smiling, black hair", "smiling, blond"))
    charts = comparison_charts(found, paired_comparisons(found))
    write_comparison_report(folder / "report.html", found, charts, command="compare faces")
    return [draw(chart) for chart in charts]


def recorded_charts() -> dict[str, Figure]:
    """One chart of each kind from the recorded quick run, that with columns once more as a single panel."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(RUN) as archive:
        charts = read_charts(Path(archive.extract("charts.json", folder)))
    figures = {f"{chart.paper} {chart.id}": draw(chart) for chart in charts if (chart.paper, chart.id) in _CHARTS}
    some = next(chart for chart in charts if chart.columns)
    return figures | {"one panel": draw(some, 0), "legend": draw(some, "legend")}


def history() -> Figure:
    kept = TrainingHistory()
    for step in range(5):
        kept.add(step, entropy=1.0 / (1 + step), alignment=[[step, 0.5, 1.0], [0.0, step**2, 1.0]])
    return kept.plot()


def produce() -> tuple[dict[str, Grey], dict[str, str]]:
    """All pictures, and all texts: the words of pages, and the numbers beside them as JSON."""
    figures = {"history": history(), **recorded_charts()}
    figures["dispatch"] = DispatchTable(("cats", "dogs"), ((45, 10, 3), (0, 50, 7))).plot("before training")
    pictures: dict[str, Grey] = {}
    texts: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        for make in (explain_patches, explain_gates, compare_models):
            folder = Path(name) / make.__name__
            folder.mkdir()
            figures |= {f"comparison {i}": figure for i, figure in enumerate(make(folder) or ())}
            for path in sorted(folder.iterdir()):
                full = f"{make.__name__} {path.stem}"
                if path.suffix == ".png":
                    pictures[full] = in_grey(Image.open(path))
                elif path.suffix == ".html":
                    texts[f"{full}.txt"] = words(path.read_text("utf-8"))
                elif path.name == "explanation.json":
                    texts[f"{full}.json"] = rounded(json.loads(path.read_text("utf-8")))
    for name, figure in figures.items():
        file = io.BytesIO()
        figure.savefig(file, dpi=120, format="png")
        pictures[name] = in_grey(Image.open(file))
    return pictures, texts


def in_grey(image: Image.Image) -> Grey:
    small = (max(1, round(image.width * _FINE)), max(1, round(image.height * _FINE)))
    return np.asarray(image.convert("L").resize(small, Image.Resampling.BOX))


def words(page: str) -> str:
    """What a reader sees, a line for each element."""
    body = re.sub(r"<(style|script|svg)\b.*?</\1>", " ", page.split("</head>")[-1], flags=re.DOTALL)
    lines = (re.sub(r"\s+", " ", unescape(part)).strip() for part in re.split(r"<[^>]*>", body))
    return "\n".join(line for line in lines if line) + "\n"


def rounded(content: object) -> str:
    """As JSON with six digits, so that rounding in another order of sums does not show."""

    def shorter(value: object) -> object:
        if isinstance(value, dict):
            return {name: shorter(each) for name, each in value.items()}
        if isinstance(value, list):
            return [shorter(each) for each in value]
        return float(f"{value:.5g}") + 0.0 if isinstance(value, float) else value

    return json.dumps(shorter(content), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    pictures, texts = produce()
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    np.savez_compressed(PICTURES, **{VERSION: np.array(matplotlib.__version__)}, **pictures)
    for name, text in texts.items():
        (FOLDER / name.replace(" ", "-")).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
