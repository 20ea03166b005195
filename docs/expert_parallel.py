"""Write the measured table and the chart of the page on expert parallelism, from the committed benchmark results.

    python docs/expert_parallel.py

The page shows a table between the comments <!-- expert-parallel NAME --> and <!-- end of expert-parallel -->.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moesaic.bench.expert_parallel_cost import H100_CLUSTER, ExpertLayer, break_even_images, expert_parallel_step
from moesaic.report.chart_style import COLOURS, INK, RC_PARAMS

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results" / "expert-parallel.json"
PAGE = DOCS / "expert-parallelism.md"
FIGURE = DOCS / "images" / "expert-parallel.svg"
PLACE = re.compile(r"<!-- expert-parallel ([\w-]+) -->.*?<!-- end of expert-parallel -->", re.DOTALL)

Result = dict[str, Any]

LAYERS = {
    "3×3 convolutions, 8 experts, 640 channels": (
        ExpertLayer(8, 640, 80, patches_per_expert=2, patch_size=4, kernel_size=3, halo=True),
        16,
    ),
    "MLPs, 64 experts, 768 → 3072 → 768": (ExpertLayer(64, 768, 768, patches_per_expert=4, hidden_channels=3072), 64),
    "MLPs, 1 024 experts, 768 → 3072 → 768": (
        ExpertLayer(1024, 768, 768, patches_per_expert=1, hidden_channels=3072),
        64,
    ),
}
"""Layers of the chart, and images per GPU."""
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
TICKS = (0.2, 0.3, 0.4, 0.5, 0.7, 1, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150)
"""Milliseconds."""
LINES: dict[str, tuple[str, str, Callable[[ExpertLayer, int], int]]] = {
    "replicated, gradients exposed": ("vermilion", "s", lambda layer, gpus: 1),
    "sharded over the 8 GPUs of a node": ("blue", "o", lambda layer, gpus: 8),
    "sharded over as many GPUs as there are experts": ("green", "^", lambda layer, gpus: min(gpus, layer.experts)),
}
"""Colour, marker and number of ranks that share the experts."""


def results() -> Result:
    """What the benchmark wrote."""
    return json.loads(RESULTS.read_text("utf-8"))


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def signed(share: float) -> str:
    """A share in percent, with its sign."""
    return f"{100 * share:+.0f} %".replace("-", "−")


def steps_table(content: Result) -> str:
    """Measured and predicted milliseconds of every step, and the error of the prediction."""
    rows = [
        [
            str(run["ranks"]),
            row["layer"] + (" (held out)" if row["held out"] else ""),
            "replicated" if row["expert ranks"] == 1 else f"over {row['expert ranks']}",
            f"{row['measured, ms']:.1f}",
            f"{row['predicted, ms']:.1f}",
            signed(row["error"]),
        ]
        for run in content["runs"]
        for row in run["steps"]
    ]
    return markdown(["processes", "layer", "experts", "measured, ms", "predicted, ms", "error"], rows)


def error_sentences(content: Result) -> str:
    """The errors of the predictions, in words."""
    machine = content["machine"]
    sentences = [f"Measured with gloo on {machine['processor']}, one thread for each process."]
    for run in content["runs"]:
        for name, words in (("held out", "chosen afterwards and measured once"), ("settled on", "it was settled on")):
            errors = run[name]
            right, total = errors["faster side predicted"]
            sentences.append(
                f"With {run['ranks']} processes, on the shapes {words}, predictions are off by "
                f"{100 * errors['median error']:.0f} % in the median, {100 * errors['largest error']:.0f} % at most; "
                f"they name the faster of sharded and replicated experts in {right} of {total} comparisons."
            )
    return " ".join(sentences)


def equality_sentence(content: Result) -> str:
    """The largest difference to one process, in words."""
    largest = max(max(run["equality"].values()) for run in content["runs"])
    processes = " and ".join(str(run["ranks"]) for run in content["runs"])
    return (
        f"After ten steps of SGD in float64 on {processes} processes, no weight differs from that of one process by "
        f"more than {largest:.0e} of the way it moved (`benchmarks/expert_parallel.py`)."
    )


def break_even_table(_: Result) -> str:
    """Images per GPU below which sharded experts send less."""
    rows = [[name, f"{break_even_images(layer):,.0f}".replace(",", " ")] for name, (layer, _) in LAYERS.items()]
    return markdown(["layer", "sharded experts send less below"], [[a, f"{b} images per GPU"] for a, b in rows])


TABLES: dict[str, Callable[[Result], str]] = {
    "steps": steps_table,
    "errors": error_sentences,
    "equality": equality_sentence,
    "break-even": break_even_table,
}


def with_tables(page: str) -> str:
    """The page with the tables of the committed results."""
    content = results()

    def table(place: re.Match[str]) -> str:
        return f"<!-- expert-parallel {place[1]} -->\n\n{TABLES[place[1]](content)}\n\n<!-- end of expert-parallel -->"

    return PLACE.sub(table, page)


def draw() -> Any:
    """Predicted milliseconds of a layer's training step against the number of GPUs."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(RC_PARAMS):
        figure = Figure(figsize=(10.5, 3.9), layout="constrained")
        panels = figure.subplots(1, len(LAYERS))
        for axes, (title, (layer, images)) in zip(panels, LAYERS.items(), strict=True):
            for name, (colour, marker, shared) in LINES.items():
                costs = [
                    1e3 * expert_parallel_step(layer, images, gpus, shared(layer, gpus), H100_CLUSTER).total()
                    for gpus in GPUS
                ]
                axes.plot(GPUS, costs, color=COLOURS[colour], marker=marker, label=name)
            hidden = [
                1e3 * expert_parallel_step(layer, images, gpus, 1, H100_CLUSTER).total(overlap=1.0) for gpus in GPUS
            ]
            axes.plot(
                GPUS, hidden, color=COLOURS["vermilion"], linestyle="--", label="replicated, gradients behind the layer"
            )
            axes.set(xscale="log", yscale="log", xlabel="GPUs")
            axes.set_xticks((8, 32, 128, 1024), ("8", "32", "128", "1 024"))
            axes.minorticks_off()
            low, high = axes.get_ylim()
            ticks = [value for value in TICKS if low <= value <= high]
            axes.set_yticks(ticks, [f"{value:g}" for value in ticks])
            axes.set_title(f"{title},\n{images} images per GPU", fontsize=9)
            axes.grid(True, which="major", color="#E4E4E4", linewidth=0.6)
        panels[0].set_ylabel("predicted step of the layer, ms")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
        figure.suptitle("Replicated or sharded experts? Predicted for nodes of 8 GPUs", fontsize=10.5, color=INK)
    return figure


def write_figure(path: Path) -> Path:
    """As an SVG that follows the theme; the same model gives the same bytes."""
    from theme import save_figure

    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(draw(), path)
    return path


if __name__ == "__main__":
    write_figure(FIGURE)
    PAGE.write_text(with_tables(PAGE.read_text("utf-8")), "utf-8")
