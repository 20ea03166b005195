"""Write the measured tables and the roofline of the page on when not to route, from the committed benchmark results.

    python docs/speed.py

The page shows a table between the comments <!-- speed NAME --> and <!-- end of speed -->. Whatever is not measured
yet, or only in an older form, is said to be so.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.report.chart_style import COLOURS, INK, RC_PARAMS

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
PAGE = DOCS / "when-not-to-route.md"
PLACE = re.compile(r"<!-- speed ([\w-]+) -->.*?<!-- end of speed -->", re.DOTALL)
PASSES = {"forward": "forward", "step": "training step"}
FORMS = {"plain": "plain", "with bias": "plain, with bias", "released": "released block"}
NOISE = 1.05
"""Ratios below this are no difference."""
NOT_MEASURED = "not measured yet"

Result = dict[str, Any]


def results(name: str) -> Result | None:
    """What a benchmark wrote, if there is a file of the present form."""
    path = RESULTS / f"{name}.json"
    content = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return content if content.get("measurements") else None


def measured(content: Result | None, name: str, form: str = "plain") -> Result | None:
    """A shape in a form, if it was measured and equals the reference."""
    found = [each for each in (content or {}).get("measurements", []) if (each["name"], each["form"]) == (name, form)]
    return found[0] if found and found[0]["check"]["equal"] and found[0]["layers"] else None


def ours(measurement: Result) -> Result:
    """The row of the default backend."""
    return next((row for row in measurement["layers"] if row["picked"]), {})


def markdown(header: list[str], rows: Iterable[list[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def times(value: float | None) -> str:
    """A ratio; in bold where the dense layer is faster."""
    if value is None:
        return "–"
    return f"**{value:.2f}**" if value * NOISE < 1 else f"{value:.2f}"


def where(content: Result) -> str:
    """Description of the device."""
    machine = content["machine"]
    if content["device"] == "cuda":
        return f"{machine['gpu']}, {content['dtype']}"
    return f"{machine['processor']}, {machine['threads']} threads, {content['dtype']}"


def dashes_read(table: str) -> str:
    """What a dash in a table means, where it has some."""
    return " –: not measured." if "| – |" in table else ""


def shape_cells(shape: Result) -> list[str]:
    """A shape in the columns of `SHAPE_HEADER`."""
    patches = (shape["size"] // shape["patch_size"]) ** 2
    return [
        f"{shape['kernel_size']}×{shape['kernel_size']}",
        str(shape["channels"]),
        f"{shape['size']}×{shape['size']}",
        str(shape["batch"]),
        str(shape["experts"]),
        f"{shape['patches_per_expert']} of {patches} ({shape['patch_size']}×{shape['patch_size']})",
    ]


def few_cells(shape: Result) -> list[str]:
    """The same in three, so that what was measured is seen beside it."""
    kernel, channels, size, batch, experts, patches = shape_cells(shape)
    return [f"{kernel}, {channels} channels", f"{batch} of {size}", f"{experts}, each {patches}"]


SHAPE_HEADER = ["kernel", "channels", "map", "batch", "experts", "patches each"]


def grid_table(name: str, *, lost: bool) -> str:
    """Shapes in which the dense layer is faster, in the forward pass or in the step; or all others."""
    content = results(name)
    if content is None:
        return f"*{NOT_MEASURED}*"
    rows: list[tuple[float, list[str]]] = []
    for each in content["measurements"]:
        if each["form"] != "plain" or measured(content, each["name"]) is None:
            continue
        row = ours(each)
        ratios = [row.get(f"{what}, × dense") for what in PASSES]
        known = [ratio for ratio in ratios if ratio is not None]
        if known and (min(known) * NOISE < 1) == lost:
            cells = [*few_cells(each["shape"]), f"{each['share']:.2f}", *map(times, ratios)]
            rows.append((known[-1], cells))
    total = len({each["name"] for each in content["measurements"] if measured(content, each["name"])})
    header = ["layer", "maps", "experts", "work", *(f"{title}, × dense" for title in PASSES.values())]
    said = f"{len(rows)} of {total} shapes on {where(content)}"
    if not rows:
        return f"*{said}.*"
    table = markdown(header, [cells for _, cells in sorted(rows)])
    return f"*{said}; × dense below 1: the dense layer is faster.{dashes_read(table)}*\n\n{table}"


def named_table(name: str) -> str:
    """The two layers of the paper's networks, in every form, with everything they were measured against."""
    content = results(name)
    if content is None:
        return f"*{NOT_MEASURED}*"
    parts: list[str] = []
    memory = content["device"] == "cuda"
    for shape in ("celeba", "cifar"):
        rows: list[list[str]] = []
        found = None
        for form, title in FORMS.items():
            each = measured(content, shape, form)
            if each is None:
                continue
            found = each
            for row in each["layers"]:
                cells = [title, row["layer"]]
                for what in PASSES:
                    time, ratio = row.get(f"{what}, ms"), row.get(f"{what}, × dense")
                    cells += ["–" if time is None else f"{time:.3g} ms", times(ratio)]
                share = row.get("step, share of floor")
                cells.append("–" if share is None else f"{share:.2f}")
                if memory:
                    cells.append(times_of_memory(row.get("memory, × dense")))
                rows.append(cells)
        if found is None:
            continue
        header = ["form", "layer", "forward", "× dense", "training step", "× dense", "share of floor"]
        header += ["memory, × dense"] if memory else []
        said = dict(zip(SHAPE_HEADER, shape_cells(found["shape"]), strict=True))
        words = (
            f"{said['kernel']} kernels, {said['channels']} channels, {said['map']} maps, batch {said['batch']}, "
            f"{said['experts']} experts, {said['patches each']} patches each"
        )
        table = markdown(header, rows)
        parts.append(f"**{shape}**: {words}, on {where(content)}.{dashes_read(table)}\n\n{table}")
    return "\n\n".join(parts) or f"*{NOT_MEASURED}*"


def times_of_memory(value: float | None) -> str:
    """A ratio of memory, of which less is better."""
    return "–" if value is None else f"{value:.2f}"


def layer_ratio(name: str, shape: str, what: str, form: str = "plain") -> Callable[[], float | None]:
    """The dense layer's time over ours, or with "memory" our memory over the dense layer's."""

    def read() -> float | None:
        each = measured(results(name), shape, form)
        return None if each is None else ours(each).get(f"{what}, × dense")

    return read


def network_ratio(name: str, shape: str, what: str, batch: int) -> Callable[[], float | None]:
    """The fastest WRN over the fastest WRN-pMoE, each as it likes it best: compiled or not, graph or not."""

    def read() -> float | None:
        fastest: dict[str, float] = {}
        for each in (results(name) or {}).get("measurements", []):
            setting = each["setting"]
            if (setting["shape"], setting["what"], setting["batch"], setting["fidelity"]) == (
                shape,
                what,
                batch,
                "best",
            ):
                for row in each["networks"]:
                    fastest[row["network"]] = min(row["ms"], fastest.get(row["network"], row["ms"]))
        return fastest["WRN"] / fastest["WRN-pMoE"] if {"WRN", "WRN-pMoE"} <= fastest.keys() else None

    return read


def network_limit(shape: str, bar: float) -> Callable[[], str]:
    """What a network would gain if its routed layer, and what follows up to the mean, took no time, in words."""

    def read() -> str:
        for each in (results("model-cuda") or {}).get("measurements", []):
            setting, found = each["setting"], each.get("limit")
            if found and (setting["shape"], setting["what"], setting["fidelity"]) == (shape, "training step", "best"):
                return (
                    f"Were the routed layer, and BatchNorm, ReLU and mean behind it, for nothing, it would be "
                    f"{found['limit, × WRN']:.2f} times as fast; they take {found['layer, ms']:.2f} ms, and "
                    f"{bar:g} leaves them {found[f'bar {bar:g} leaves, ms']:.2f} ms."
                )
        return ""

    return read


def mlp_steps() -> dict[str, float]:
    """Milliseconds of a step of routed perceptrons and their peers, if ours are right."""
    path = RESULTS / "mlp-cuda.json"
    content = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if not content.get("equality", {}).get("ours", {}).get("equal"):
        return {}
    return {row["what"]: row["step, ms"] for row in content["steps"]}


def ahead_of_routed() -> float | None:
    """The fastest routed peer's time over ours."""
    steps = mlp_steps()
    peers = [ms for name, ms in steps.items() if name != "products" and not name.startswith(("ours", "dense"))]
    return min(peers) / steps["ours"] if peers and "ours" in steps else None


def behind_dense() -> float | None:
    """Our time over that of the fastest dense MLP of equal FLOPs."""
    steps = mlp_steps()
    dense = [ms for name, ms in steps.items() if name.startswith("dense")]
    return steps["ours"] / min(dense) if dense and "ours" in steps else None


def least_work(name: str, shape: str, what: str) -> Callable[[], str]:
    """What the layer must do at least, in words."""

    def read() -> str:
        each = measured(results(name), shape)
        if each is None:
            return ""
        work, limits = each["least work"][what]["routed"], each["ceilings"]
        arithmetic, moving = work["flops"] / limits["flops_per_second"], work["bytes"] / limits["bytes_per_second"]
        share = ours(each).get(f"{what}, share of floor")
        bound = "arithmetic" if arithmetic > moving else "bytes"
        return (
            f"At least {work['flops'] / 1e9:,.3g} GFLOP ({1e3 * arithmetic:.3g} ms at the measured rate) and "
            f"{work['bytes'] / 1e6:,.3g} MB ({1e3 * moving:.3g} ms), so bound by {bound}"
            + (f"; {100 * share:.0f} % of that floor is reached." if share is not None else ".")
        )

    return read


@dataclass(frozen=True)
class Goal:
    """What we set out to reach. ``why`` says what keeps us from more; what is measured is read from the results."""

    name: str
    bar: float | None
    goal: float | None
    read: Callable[[], float | None]
    why: str
    least: Callable[[], str] | None = None
    lower: bool = False
    """Whether less is better."""

    def cells(self) -> list[str]:
        found = self.read()
        sign = "≤ " if self.lower else "≥ "
        limits = ["–" if limit is None else f"{sign}{limit:g}" for limit in (self.bar, self.goal)]
        why = " ".join(part for part in (self.least() if self.least else "", self.why) if part)
        return [self.name, *limits, *self._judged(found), why or "–"]

    def _judged(self, found: float | None) -> tuple[str, str]:
        if found is None:
            return "–", NOT_MEASURED
        for limit, word in ((self.goal, "goal"), (self.bar, "bar")):
            if limit is not None and (found <= limit if self.lower else found >= limit):
                return f"{found:.2f}", word
        return f"{found:.2f}", "**neither**"


GOALS = (
    Goal(
        "celeba layer on a GPU, training step, × dense",
        2,
        4,
        layer_ratio("layer-cuda", "celeba", "step"),
        "Two fifths of the time are batched products at 610 TFLOP/s, with no multiplication wasted. The rest are "
        "passes over memory: pixels are gathered twice, nine taps folded into the positions they reach, the "
        "gradient laid out for them and summed for each pixel, the map scored. These passes run at 2 to 3.5 of the "
        "3.8 TB/s that a copy has, and all but a few of the 26 launches have programs enough for every "
        "multiprocessor.",
        least_work("layer-cuda", "celeba", "step"),
    ),
    Goal(
        "cifar layer on a GPU, training step, × dense",
        1,
        1.3,
        layer_ratio("layer-cuda", "cifar", "step"),
        "Dense is the faster of cuDNN's convolution and a linear layer over rows of pixels, three products that read "
        "or write a map six times. Routed there are seven kernels: the map is scored (20 µs), multiplied where it lies "
        "(27), the gradient gated (10), and then its two products run beside each other (70 together): a quarter of "
        "the arithmetic, but pixels that several experts chose are summed from memory, and each kernel is half as "
        "fast as its bytes.",
        least_work("layer-cuda", "cifar", "step"),
    ),
    Goal(
        "celeba layer on a GPU, memory of a training step, share of the dense layer's",
        0.6,
        None,
        layer_ratio("layer-cuda", "celeba", "memory", "with bias"),
        "Both layers with bias, as they are by default; ours takes 122 MiB. Without a bias cuDNN needs no workspace: "
        "then the dense layer takes 87 MiB, 80 of which are the result and the map's gradient.",
        lower=True,
    ),
    Goal(
        "celeba layer on a CPU, forward, × dense",
        4,
        6,
        layer_ratio("layer-cpu", "celeba", "forward"),
        "",
        least_work("layer-cpu", "celeba", "forward"),
    ),
    Goal(
        "celeba layer on a CPU, training step, × dense",
        4,
        6,
        layer_ratio("layer-cpu", "celeba", "step"),
        "",
        least_work("layer-cpu", "celeba", "step"),
    ),
    Goal(
        "WRN-pMoE on a GPU, training step, celeba, × WRN",
        1.15,
        1.25,
        network_ratio("model-cuda", "celeba", "training step", 128),
        "By arithmetic 1.27 would be the limit. But the convolution that is replaced has 24 % of WRN's arithmetic and "
        "takes 11 % of its step, since it runs at 760 TFLOP/s and the others at 300. Two fifths of the routed layer's "
        "time are its three products, at 640 TFLOP/s. Half are nine passes over 0.54 GB in all, at 3 of the 4.1 TB/s "
        "that a copy has, kept apart by the norm in front of each expert, whose statistics have to be there before "
        "anything is multiplied, and whose gradient before anything flows back. The rest are small kernels and the "
        "gaps between launches. The bar took work outside of the layer too: the first convolutions, of 3 and 16 "
        "channels, and the first shortcut took both networks 1.04 ms by cuDNN and Inductor, and take 0.54 by kernels "
        "for few channels. Five runs of this and the version before gave 1.152 to 1.156. As released "
        "WRN-pMoE is 1.14 times as fast as WRN, as printed 1.08.",
        network_limit("celeba", 1.15),
    ),
    Goal(
        "WRN-pMoE on a GPU, training step, cifar, × WRN",
        1,
        1.02,
        network_ratio("model-cuda", "cifar", "training step", 512),
        "By arithmetic 1.03 would be the limit. But the routed block has no shortcut and no BatchNorm over the "
        "whole map, which cost time and hardly any arithmetic, and its map is never written.",
    ),
    Goal(
        "WRN-pMoE on a CPU, one image, celeba, × WRN",
        1.15,
        1.25,
        network_ratio("model-cpu", "celeba", "inference", 1),
        "",
    ),
    Goal(
        "WRN-pMoE on a CPU, 32 images, celeba, × WRN",
        1.15,
        1.25,
        network_ratio("model-cpu", "celeba", "inference", 32),
        "",
    ),
    Goal(
        "MLP layer on a GPU, training step, × the fastest routed peer",
        1.3,
        None,
        ahead_of_routed,
        "70 % of the step are the six products, at 700 TFLOP/s. Activation and its gradient are passes of their own "
        "over 151 MB each; inside the products they were measured slower.",
    ),
    Goal(
        "MLP layer on a GPU, training step, time over that of a dense MLP of equal FLOPs",
        None,
        1.1,
        behind_dense,
        "",
        lower=True,
    ),
)


def goals_table() -> str:
    """Bars and goals, what was measured, and what keeps us from more."""
    header = ["what", "bar", "goal", "measured", "reached", "why not more"]
    return markdown(header, [goal.cells() for goal in GOALS])


def checks_table() -> str:
    """How far outputs and gradients are from the reference, at most, over all shapes that were timed."""
    rows: list[list[str]] = []
    for name in ("layer-cuda", "layer-cpu"):
        content = results(name)
        if content is None:
            continue
        for backend in ("triton", "torch"):
            found = [
                max(errors.values())
                for each in content["measurements"]
                if (errors := each["check"].get("errors", {}).get(backend))
            ]
            if found:
                limit = content["measurements"][0]["check"]["tolerance"]
                rows.append([where(content), backend, str(len(found)), f"{max(found):.1e}", f"{limit:.0e}"])
    if not rows:
        return f"*{NOT_MEASURED}*"
    return markdown(["on", "backend", "shapes and forms", "largest error", "tolerance"], rows)


def rooflines() -> str:
    """The figures that there are."""
    devices = [device for device in ("cuda", "cpu") if results(f"layer-{device}") is not None]
    alt = "Useful arithmetic a second against arithmetic for each byte, of dense and routed layers, below the roof"
    return "\n\n".join(f"![{alt}: {device}](images/roofline-{device}.svg)" for device in devices) or f"*{NOT_MEASURED}*"


TABLES: dict[str, Callable[[], str]] = {
    "goals": goals_table,
    "checks": checks_table,
    "roofline": rooflines,
    **{f"named-{device}": lambda device=device: named_table(f"layer-{device}") for device in ("cuda", "cpu")},
    **{f"lost-{device}": lambda device=device: grid_table(f"layer-{device}", lost=True) for device in ("cuda", "cpu")},
    **{f"won-{device}": lambda device=device: grid_table(f"layer-{device}", lost=False) for device in ("cuda", "cpu")},
}


def with_tables(page: str) -> str:
    """The page with the tables of the committed results."""

    def table(place: re.Match[str]) -> str:
        return f"<!-- speed {place[1]} -->\n\n{TABLES[place[1]]()}\n\n<!-- end of speed -->"

    return PLACE.sub(table, page)


def draw_roofline(content: Result) -> Any:
    """Useful arithmetic a second against arithmetic for each byte that must be moved; the roof is what was measured."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(RC_PARAMS):
        figure = Figure(figsize=(9, 4.1), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        unit = Unit("TFLOP/s", 1e12) if content["device"] == "cuda" else Unit("GFLOP/s", 1e9)
        for axes, (what, title) in zip(panels, PASSES.items(), strict=True):
            draw_panel(axes, content, what, unit)
            axes.set_title(title, fontsize=10)
        panels[0].set_ylabel(f"useful {unit.name}")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.suptitle(f"Distance from the roof: what is lost on {where(content)}", fontsize=10.5, color=INK)
    return figure


@dataclass(frozen=True)
class Unit:
    """Of arithmetic a second."""

    name: str
    size: float


def draw_panel(axes: Any, content: Result, what: str, unit: Unit) -> None:
    """The roof, and every shape in its plain form below it: dense and routed."""
    limits = content["ceilings"]
    peak, slope = limits["flops_per_second"] / unit.size, limits["bytes_per_second"] / unit.size
    seen: list[float] = []
    for kind, colour, marker in (("dense", COLOURS["vermilion"], "s"), ("routed", COLOURS["green"], "o")):
        for named in (False, True):
            points = placed(content, what, kind, unit, named=named)
            seen += [x for x, _, _ in points]
            axes.scatter(
                [x for x, _, _ in points],
                [y for _, y, _ in points],
                s=46 if named else 18,
                marker=marker,
                color=colour,
                alpha=1 if named else 0.6,
                linewidths=0,
                label=f"{kind}, {'named' if named else 'grid'}",
                zorder=3,
            )
            for x, y, name in points if named else []:
                up = 8 if kind == "dense" else -15
                label(axes, name, (x, y), colour, xytext=(0, up), ha="center")
    knee = peak / slope
    low, high = min([*seen, knee]) / 2, max([*seen, knee]) * 2
    axes.plot([low, knee, high], [low * slope, peak, peak], color=INK, linewidth=1.2, zorder=2)
    axes.set(xscale="log", yscale="log", xlim=(low, high), xlabel="FLOP for each byte")
    axes.set_ylim(top=2.5 * peak)
    middle = (low * knee) ** 0.5
    label(
        axes, f"{limits['bytes_per_second'] / 1e9:,.0f} GB/s", (middle, middle * slope), INK, xytext=(-4, 6), ha="right"
    )
    label(axes, f"{peak:,.3g} {unit.name}", (knee, peak), INK, xytext=(-2, 6), ha="right")
    axes.grid(True, which="major", color="#E4E4E4", linewidth=0.6)


def placed(content: Result, what: str, kind: str, unit: Unit, *, named: bool) -> list[tuple[float, float, str]]:
    """FLOP for each byte, FLOP a second, and the name, of shapes that were measured and are right."""
    points: list[tuple[float, float, str]] = []
    for each in content["measurements"]:
        is_named = each["name"] in ("celeba", "cifar")
        if each["form"] != "plain" or is_named != named or measured(content, each["name"]) is None:
            continue
        rows = [row for row in each["layers"] if (row["backend"] is None if kind == "dense" else row["picked"])]
        spent = min((row[f"{what}, ms"] for row in rows if f"{what}, × dense" in row), default=None)
        if spent is not None:
            work = each["least work"][what][kind]
            points.append((work["flops"] / work["bytes"], 1e3 * work["flops"] / spent / unit.size, each["name"]))
    return points


def label(axes: Any, text: str, at: tuple[float, float], colour: str, **how: Any) -> None:
    """Words beside a point, on a rim of paper so that lines do not cross them."""
    from matplotlib.patheffects import withStroke

    rim = [withStroke(linewidth=2.5, foreground="white")]
    axes.annotate(
        text,
        at,
        textcoords="offset points",
        fontsize=8,
        color=colour,
        path_effects=rim,
        zorder=4,
        annotation_clip=False,
        **how,
    )


def write_roofline(content: Result, path: Path) -> None:
    """As an SVG that follows the theme; the same results give the same bytes."""
    from theme import save_figure

    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(draw_roofline(content), path)


if __name__ == "__main__":
    for device in ("cuda", "cpu"):
        content = results(f"layer-{device}")
        if content is not None:
            write_roofline(content, DOCS / "images" / f"roofline-{device}.svg")
    PAGE.write_text(with_tables(PAGE.read_text("utf-8")), "utf-8")
