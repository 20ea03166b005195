"""Write the tables and the figure of the page on heads, from the committed results of ``benchmarks/heads.py``.

    python docs/heads.py

The page shows a table between the comments <!-- heads NAME --> and <!-- end of heads -->.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moesaic.intervals import mean, percentage
from moesaic.report.chart_style import COLOURS, INK, RC_PARAMS

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results" / "heads.json"
PAGE = DOCS / "heads.md"
FIGURE = DOCS / "images" / "heads.svg"
PLACE = re.compile(r"<!-- heads ([\w-]+) -->.*?<!-- end of heads -->", re.DOTALL)
HEADS = {
    "mean": ("grey", "s"),
    "max": ("orange", "v"),
    "conv": ("sky", "P"),
    "attention": ("vermilion", "^"),
    "routed": ("blue", "o"),
}
"""Colour and marker of each head."""
PEERS = tuple(head for head in HEADS if head != "routed")
GRID = "#E4E4E4"
SWEEP = "dog or bird, 1 of "

Result = dict[str, Any]


def results() -> Result:
    """What the benchmark wrote."""
    return json.loads(RESULTS.read_text("utf-8"))


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def signed(value: float, digits: int = 1) -> str:
    """A number with its sign."""
    text = f"{value:+.{digits}f}".replace("-", "−")
    return text[1:] if float(f"{value:.{digits}f}") == 0 else text


def share(value: float) -> str:
    """A share as a fraction."""
    return "1" if value == 1 else f"1/{round(1 / value)}"


def accuracy_table(content: Result) -> str:
    """Mean accuracy of each head with each number of labels; the best in bold."""
    rows: list[list[str]] = []
    counts = list(next(iter(content["accuracies"].values()))) + list(next(iter(content["more"]["accuracies"].values())))
    for task in content["accuracies"]:
        found = all_counts(content, task)
        means = {head: {count: sum(found[count][head]) / len(found[count][head]) for count in found} for head in HEADS}
        best = {count: max(round(means[head][count], 1) for head in HEADS) for count in found}
        for head in HEADS:
            cells = ["" if count not in found else f"{means[head][count]:.1f}" for count in counts]
            cells = [
                f"**{cell}**" if cell and float(cell) == best[count] else cell
                for cell, count in zip(cells, counts, strict=True)
            ]
            rows.append([titled(content, task) if head == "mean" else "", head, *cells])
    return markdown(["task (share)", "head", *(f"{count} labels" for count in counts)], rows)


def all_counts(content: Result, task: str) -> dict[str, dict[str, list[float]]]:
    """Accuracies of a task with each number of labels, by head."""
    return {**content["accuracies"][task], **content["more"]["accuracies"].get(task, {})}


def titled(content: Result, task: str) -> str:
    """The task with its share."""
    return f"{task} ({share(content['shares'][task])})"


def counts_table(peer: str) -> Callable[[Result], str]:
    """The lead over a peer with each number of labels."""

    def table(content: Result) -> str:
        rows: list[list[str]] = []
        counts = list(next(iter(content["accuracies"].values())))
        counts += list(next(iter(content["more"]["accuracies"].values())))
        for task in content["accuracies"]:
            found, cells = all_counts(content, task), list[str]()
            for count in counts:
                if count not in found:
                    cells.append("")
                    continue
                trials = zip(found[count]["routed"], found[count][peer], strict=True)
                lead = mean([ours - theirs for ours, theirs in trials])
                cells.append(f"{signed(lead.value)} [{signed(lead.low)}, {signed(lead.high)}]")
            rows.append([titled(content, task), *cells])
        return markdown(["task (share)", *(f"{count} labels" for count in counts)], rows)

    return table


def leads_table(read: Callable[[Result], Sequence[Result]]) -> Callable[[Result], str]:
    """The lead over each peer with its interval, and the verdict."""

    def table(content: Result) -> str:
        leads = read(content)
        tasks = list(dict.fromkeys(row["task"] for row in leads))
        rows = [[titled(content, task), *(lead_cell(row_of(leads, task, peer)) for peer in PEERS)] for task in tasks]
        return markdown(["task (share)", *(f"against {peer}" for peer in PEERS)], rows)

    return table


def row_of(rows: Sequence[Result], task: str, peer: str) -> Result:
    """The row of a task and a peer."""
    return next(row for row in rows if (row["task"], row["peer"]) == (task, peer))


def lead_cell(row: Mapping[str, Any]) -> str:
    """A lead with its interval and verdict."""
    verdict = row["verdict"] if row["verdict"] in ("level", "undecided") else f"**{row['verdict']}**"
    return f"{signed(row['lead'])} [{signed(row['low'])}, {signed(row['high'])}] {verdict}"


def saved_table(content: Result) -> str:
    """Labels saved where a verdict was reached."""
    rows: list[list[str]] = []
    for row in (*content["leads"], *content["more"]["leads"]):
        if row["verdict"] in ("fewer labels", "more labels"):
            level = "–" if row["level"] is None else f"{row['level']:.1f} %"
            rows.append([row["task"], row["peer"], row["verdict"], level, saved(row["saved"])])
    return markdown(["task", "peer", "verdict", "at accuracy", "labels saved"], rows) if rows else "*None.*"


def saved(found: Sequence[float | None] | None) -> str:
    """A saving with its interval, in per cent."""
    if found is None or found[0] is None:
        return "no accuracy that both reach" if found is None else "never reaches it"
    low, high = ("−∞" if value is None else f"{100 * value:.0f}".replace("-", "−") for value in found[1:])
    return f"{100 * found[0]:.0f} % [{low}, {high}]".replace("-", "−")


def slopes_table(content: Result) -> str:
    """Points of lead for each halving of the share."""
    rows = [
        [row["peer"], f"{signed(row['lead'])} [{signed(row['low'])}, {signed(row['high'])}]", row["grows"]]
        for row in content["slopes"]
    ]
    return markdown(["peer", "points of lead per halving of the share", "the lead grows as the share falls"], rows)


def overall_table(content: Result) -> str:
    """Mean accuracy over tasks of a kind, over all label counts."""
    kinds: dict[str, Callable[[float], bool]] = {
        "small: 1/9 or less": lambda value: value < 0.12,
        "1/4": lambda value: 0.12 < value < 1,
        "whole: 1": lambda value: value == 1,
    }
    rows: list[list[str]] = []
    for kind, belongs in kinds.items():
        tasks = [task for task, value in content["shares"].items() if belongs(value)]
        cells = [f"{mean_accuracy(content, tasks, head):.1f}" for head in HEADS]
        rows.append([kind, str(len(tasks)), *cells])
    return markdown(["deciding share", "tasks", *HEADS], rows)


def mean_accuracy(content: Result, tasks: Sequence[str], head: str) -> float:
    """Over tasks, label counts and trials."""
    values = [value for task in tasks for found in content["accuracies"][task].values() for value in found[head]]
    return sum(values) / len(values)


def tuning_table(stage: str) -> Callable[[Result], str]:
    """Mean accuracy of each variant on the tuning tasks, best first."""

    def table(content: Result) -> str:
        rows = sorted(content["tuning"][stage], key=lambda row: -row["mean"])
        header = [name for name in rows[0] if name != "variant"]
        return markdown(
            ["variant", *header], [[row["variant"], *(f"{row[name]:.1f}" for name in header)] for row in rows]
        )

    return table


def recipe_table(content: Result) -> str:
    """Mean accuracy of each head on the tuning tasks, by recipe."""
    found: dict[str, dict[str, float]] = {}
    for row in content["tuning"]["recipe"]:
        head, recipe = row["variant"].split(", ", 1)
        found.setdefault(recipe, {})[head] = row["mean"]
    rows = [
        [recipe, *(f"{each[head]:.1f}" for head in HEADS), f"{sum(each.values()) / len(each):.1f}"]
        for recipe, each in found.items()
    ]
    return markdown(["recipe", *HEADS, "all heads"], rows)


TABLES: dict[str, Callable[[Result], str]] = {
    "accuracies": accuracy_table,
    "leads": leads_table(lambda content: content["leads"]),
    "few": leads_table(lambda content: content["few"]),
    "more": leads_table(lambda content: content["more"]["leads"]),
    "by-count-mean": counts_table("mean"),
    "by-count-attention": counts_table("attention"),
    "saved": saved_table,
    "slopes": slopes_table,
    "overall": overall_table,
    "recipe": recipe_table,
    "routed": tuning_table("routed"),
}


def with_tables(page: str) -> str:
    """The page with the tables of the committed results."""
    content = results()

    def table(place: re.Match[str]) -> str:
        return f"<!-- heads {place[1]} -->\n\n{TABLES[place[1]](content)}\n\n<!-- end of heads -->"

    return PLACE.sub(table, page)


def draw(content: Result) -> Any:
    """Accuracy against labels, one panel for each task, and the lead against the share."""
    import matplotlib
    from matplotlib.figure import Figure

    tasks = list(content["accuracies"])
    with matplotlib.rc_context(RC_PARAMS):
        figure = Figure(figsize=(11, 8), layout="constrained")
        panels = figure.subplots(3, 4).flatten()
        for axes, task in zip(panels, tasks, strict=False):
            draw_task(axes, content, task)
        for axes in (panels[0], panels[4], panels[8]):
            axes.set_ylabel("test accuracy, %")
        draw_sweep(panels[len(tasks)], content)
        for axes in panels[len(tasks) + 1 :]:
            axes.set_axis_off()
        handles, labels = panels[0].get_legend_handles_labels()
        panels[-1].legend(handles, labels, loc="center", frameon=False, title="head")
    return figure


def draw_task(axes: Any, content: Result, task: str) -> None:
    """Curves of all heads with 95 % intervals."""
    found = all_counts(content, task)
    counts = [int(count) for count in found]
    for i, (head, (colour, marker)) in enumerate(HEADS.items()):
        estimates = [percentage(found[str(count)][head]) for count in counts]
        axes.errorbar(
            [count * 1.03 ** (i - 2) for count in counts],
            [each.value for each in estimates],
            [[each.value - each.low for each in estimates], [each.high - each.value for each in estimates]],
            color=COLOURS[colour],
            marker=marker,
            markersize=3.5,
            linewidth=1.6 if head == "routed" else 1.1,
            elinewidth=0.6,
            label=head,
            zorder=4 if head == "routed" else 3,
        )
    axes.set(xscale="log", ylim=(20 if task == "four classes" else 40, 101))
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlim(4.3, 470 if counts[-1] > 100 else 118)
    axes.minorticks_off()
    axes.set_title(f"{task} ({share(content['shares'][task])})", fontsize=9)
    axes.set_xlabel("labels")
    axes.grid(True, color=GRID, linewidth=0.6)


def draw_sweep(axes: Any, content: Result) -> None:
    """The lead over each peer against the deciding share."""
    tasks = [task for task in content["shares"] if task.startswith(SWEEP)]
    places = range(len(tasks))
    for i, peer in enumerate(PEERS):
        rows = [row_of(content["leads"], task, peer) for task in tasks]
        colour, marker = HEADS[peer]
        axes.errorbar(
            [place + 0.06 * (i - 1.5) for place in places],
            [row["lead"] for row in rows],
            [[row["lead"] - row["low"] for row in rows], [row["high"] - row["lead"] for row in rows]],
            color=COLOURS[colour],
            marker=marker,
            markersize=3.5,
            linewidth=1.1,
            elinewidth=0.6,
        )
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xticks(list(places), [share(content["shares"][task]) for task in tasks])
    axes.set_title("dog or bird: lead of routed over each", fontsize=9)
    axes.set(xlabel="share of the image that decides", ylabel="points")
    axes.grid(True, color=GRID, linewidth=0.6)


def write_figure(content: Result, path: Path) -> None:
    """As an SVG that follows the theme; the same results give the same bytes."""
    from theme import save_figure

    save_figure(draw(content), path)


if __name__ == "__main__":
    write_figure(results(), FIGURE)
    PAGE.write_text(with_tables(PAGE.read_text("utf-8")), "utf-8")
