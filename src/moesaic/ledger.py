"""What a run of the papers' experiments leaves behind, as plain data: findings and charts.

`papers` fills the ledger, `report` shows it. Neither knows the other; both know these records.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

__all__ = [
    "VERDICTS",
    "Blocks",
    "Chart",
    "Claim",
    "Counts",
    "Fidelity",
    "Finding",
    "Group",
    "Marker",
    "Panel",
    "Points",
    "Regions",
    "Series",
    "Source",
    "read_charts",
    "read_findings",
    "write_charts",
    "write_findings",
    "write_json",
    "write_whole",
]

Record = TypeVar("Record")

Fidelity = Literal["print", "released", "best"]
"""As the paper prints it, as its authors' code does it, or as we recommend it."""

Marker = Literal["o", "s", "^", "v", "D", "+", "x", "-"]
"""The shape of a point: disc, square, triangle up or down, diamond, plus, cross, bar."""

VERDICTS = ("holds", "partly", "fails", "not run here")
"""What a verdict may be, from best to worst."""


@dataclass(frozen=True)
class Source:
    """A paper, as a report introduces it."""

    id: str
    title: str
    about: str = ""
    """Its experiments in a few sentences, for someone who has not read it."""


@dataclass(frozen=True)
class Claim:
    """Something a paper says, and the rule that will decide whether it holds, written before measuring."""

    id: str
    paper: str
    where: str
    """The place in the paper: "Figure 4", "Lemma 4.1"."""
    statement: str
    published: float | str | None
    """The paper's value, in the unit the statement names; a word where the paper shows a trend."""
    rule: str
    """What is measured, and when the claim holds, holds partly or fails."""


@dataclass(frozen=True)
class Finding:
    """A claim with what was measured: one object of claims.json."""

    id: str
    paper: str
    where: str
    statement: str
    fidelity: Fidelity
    preset: str
    published: float | str | None
    measured: float | None
    interval: tuple[float, float] | None
    """95 % confidence interval of ``measured``; an end that no number bounds is infinite."""
    rule: str
    verdict: str
    """ "holds", "partly", "fails", or "not run here: " and why."""
    seconds: float

    def __post_init__(self) -> None:
        if not any(self.verdict == known or self.verdict.startswith(f"{known}: ") for known in VERDICTS):
            raise ValueError(f"Finding {self.id}: verdict={self.verdict!r}; it must start with one of {VERDICTS}")

    @property
    def decision(self) -> str:
        """The verdict without its reason."""
        return self.verdict.partition(": ")[0]


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    label: str
    role: str
    """Decides colour and marker: "cnn", "separate", "joint", "best", "expert-1" to "expert-8", or any other name."""
    x: tuple[float, ...]
    y: tuple[float, ...]
    spread: tuple[float, ...] | None = None
    """Half the length of the error bars, or half the height of the band round a line of many points."""


@dataclass(frozen=True)
class Blocks:
    """A grid of values from 0 (black) to 1 (white)."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]
    """One row for each y."""


@dataclass(frozen=True)
class Counts:
    """A table of numbers, such as how many samples of a cluster go to an expert."""

    rows: tuple[str, ...]
    """What is shared out, such as clusters; a cell is the darker the more of its row is in it."""
    columns: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    """For each row a number for each column, none negative."""


@dataclass(frozen=True)
class Group:
    """Points that look alike. The legend tells colours and markers apart, each named once."""

    label: str
    """What the colour stands for: "expert 1"."""
    role: str
    """Decides the colour, as for `Series`."""
    x: tuple[float, ...]
    y: tuple[float, ...]
    marker: Marker = "o"
    marker_label: str = ""
    """What the marker stands for: "class +1"; empty where it stands for nothing."""


@dataclass(frozen=True)
class Regions:
    """What lies behind points: who decides where, and where the decision turns."""

    x: tuple[float, ...]
    """The middles of the columns, evenly spaced."""
    y: tuple[float, ...]
    """The middles of the rows, from below, evenly spaced."""
    roles: tuple[str, ...] = ()
    """As of `Group`: colours that ``values`` points to."""
    values: tuple[tuple[int, ...], ...] = ()
    """One row for each y, of indices into ``roles``; -1: no colour. Empty: none has any."""
    scores: tuple[tuple[float, ...], ...] | None = None
    """One row for each y; the line of the decision is where they change sign."""


@dataclass(frozen=True)
class Points:
    """Groups of points in a plane, with regions behind them."""

    groups: tuple[Group, ...]
    regions: Regions | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes, with lines, with blocks, with counts or with points."""

    title: str
    x_label: str
    y_label: str
    """Axes of points have ticks only where they have labels: those of a t-SNE picture mean nothing."""
    series: tuple[Series, ...] = ()
    blocks: Blocks | None = None
    level: float | None = None
    """A dotted horizontal line, such as 95 % accuracy."""
    log_y: bool = False
    log_x: bool = False
    counts: Counts | None = None
    points: Points | None = None


@dataclass(frozen=True)
class Chart:
    """A figure that answers one of the paper's: panels, which share their axes where these have the same labels."""

    id: str
    """Also its file name: "figure-4"; no two charts of a paper share it."""
    paper: str
    """The paper's id, also the name of the folder of its figures."""
    where: str
    title: str
    caption: str
    """What to see in it, in the words of someone who has not read the paper."""
    panels: tuple[Panel, ...] = field(default_factory=tuple)
    columns: int | None = None
    """How many panels stand in a row, the more the smaller; None: as many as have room at full size. With a
    number given, a page shows the legend once for all panels."""
    row_titles: tuple[str, ...] = ()
    """Titles over the rows, one for each; needs ``columns``."""


def write_findings(path: Path, findings: Iterable[Finding]) -> None:
    """Write claims.json; a reader never sees half a file."""
    write_json(path, [asdict(finding) for finding in findings])


def read_findings(path: Path) -> list[Finding]:
    """The findings of a claims.json."""
    return [_bounded(finding) for finding in _read(path, Finding)]


def write_charts(path: Path, charts: Iterable[Chart]) -> None:
    """Write charts.json, the figures as numbers; a reader never sees half a file."""
    write_json(path, [asdict(chart) for chart in charts])


def read_charts(path: Path) -> list[Chart]:
    """The charts of a charts.json."""
    return _read(path, Chart)


def write_json(path: Path, content: object) -> None:
    """Write a JSON file whole or not at all; numbers that JSON does not know (NaN, ∞) become null."""
    text = json.dumps(_known_to_json(content), indent=1, ensure_ascii=False, allow_nan=False)
    # a list of numbers on one line; strings are safe, since a line break within one is written \n
    text = _NUMBERS.sub(lambda found: re.sub(r"\s+", " ", found[0]).replace("[ ", "[").replace(" ]", "]"), text)
    write_whole(path, f"{text}\n".encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: under another name first, each program its own, and then renamed."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


_NUMBERS = re.compile(r"\[\n\s*(?:(?:[-+.\deE]+|null),\n\s*)*(?:[-+.\deE]+|null)\n\s*\]")


def _known_to_json(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, dict):
        return {key: _known_to_json(value) for key, value in cast("dict[str, Any]", content).items()}
    if isinstance(content, list | tuple):
        return [_known_to_json(value) for value in cast("list[Any]", content)]
    return content


def _bounded(finding: Finding) -> Finding:
    """Where the file has null for an end of the interval, the end is infinite."""
    if finding.interval is None:
        return finding
    low, high = finding.interval
    ends = (-math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high)
    return replace(finding, interval=ends)


def _read(path: Path, kind: type[Record]) -> list[Record]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON file ({error}); write it anew") from error
    return list(_decoded(tuple[kind, ...], loaded, str(path)))


def _decoded(kind: Any, value: Any, where: str) -> Any:
    """``value``, as JSON has it, as the ``kind`` that a record's annotation names."""
    options = get_args(kind)
    if get_origin(kind) is UnionType:
        # None first: what follows may take null for a number that is not finite
        if value is None and NoneType in options:
            return None
        accepts = [option for option in options if option is not NoneType and _fits(option, value)]
        return _decoded(accepts[0] if accepts else options[0], value, where)
    if not _fits(kind, value):
        raise ValueError(f"{where}: {value!r} where {_in_words(kind)} belongs")
    if get_origin(kind) is tuple:
        kinds = [options[0]] * len(value) if options[-1] is ... else options
        if len(kinds) != len(value):
            raise ValueError(f"{where}: {len(value)} values where {len(kinds)} belong")
        pairs = zip(kinds, value, strict=True)
        return tuple(_decoded(each, item, f"{where}[{i}]") for i, (each, item) in enumerate(pairs))
    if is_dataclass(kind):
        names = [each.name for each in fields(kind)]
        if set(value) != set(names):
            raise ValueError(f"{where}: has the keys {sorted(value)}; it must have {sorted(names)}")
        hints = get_type_hints(kind)
        made = {name: _decoded(hints[name], value[name], f"{where}.{name}") for name in names}
        return cast("type[Any]", kind)(**made)
    return math.nan if kind is float and value is None else value


def _fits(kind: Any, value: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, list)
    if is_dataclass(kind):
        return isinstance(value, dict)
    if kind is float:
        return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    return isinstance(value, kind)


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {get_args(kind)}"
    return "a list" if get_origin(kind) is tuple else "an object" if is_dataclass(kind) else f"a {kind.__name__}"
