"""What a run of the papers' experiments leaves behind, as plain data: findings and charts.

`papers` fills the ledger, `report` shows it. Neither knows the other; both know these records.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

__all__ = ["Blocks", "Chart", "Claim", "Fidelity", "Finding", "Panel", "Series", "read_findings", "write_findings"]

Fidelity = Literal["print", "released", "best"]
"""As the paper prints it, as its authors' code does it, or as we recommend it."""

VERDICTS = ("holds", "partly", "fails", "not run here")


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
    """95 % confidence interval of ``measured``."""
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
    """Decides colour and marker: "cnn", "separate", "joint", "best", or any other name."""
    x: tuple[float, ...]
    y: tuple[float, ...]
    spread: tuple[float, ...] | None = None
    """Half the length of the error bars."""


@dataclass(frozen=True)
class Blocks:
    """A grid of values from 0 (black) to 1 (white)."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]
    """One row for each y."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes, with lines or with blocks."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...] = ()
    blocks: Blocks | None = None
    level: float | None = None
    """A dotted horizontal line, such as 95 % accuracy."""
    log_y: bool = False


@dataclass(frozen=True)
class Chart:
    """A figure that answers one of the paper's: panels that share their axes."""

    id: str
    """Also its file name: "figure-4"."""
    where: str
    title: str
    caption: str
    """What to see in it, in the words of someone who has not read the paper."""
    panels: tuple[Panel, ...] = field(default_factory=tuple)


def write_findings(path: Path, findings: Iterable[Finding]) -> None:
    """Write claims.json; a reader never sees half a file."""
    text = json.dumps([asdict(finding) for finding in findings], indent=1, ensure_ascii=False)
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(path)


def read_findings(path: Path) -> list[Finding]:
    """The findings of a claims.json."""
    loaded: list[Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    names = {each.name for each in fields(Finding)}
    found: list[Finding] = []
    for entry in loaded:
        if set(entry) != names:
            raise ValueError(f"{path}: a claim has the keys {sorted(entry)}; it must have {sorted(names)}")
        if entry["fidelity"] not in get_args(Fidelity):
            raise ValueError(f"{path}: fidelity={entry['fidelity']!r}; it must be one of {get_args(Fidelity)}")
        interval = entry["interval"]
        found.append(Finding(**{**entry, "interval": tuple(interval) if interval else None}))
    return found
