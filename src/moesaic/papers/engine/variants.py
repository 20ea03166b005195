"""Variants of experiments: the cells of a claim with other parameters than the paper's.

The parameters of a cell are the fields of its dataclass, and of the dataclasses in them: ``experts`` is
``model.experts``. A paper may have letters for some, such as k for experts. A variant says what the experiment measures
with other values; it is never a verdict on the paper.

If the claim's experiment already runs through several values of a parameter, as Figure 6 does through k, other values
are added to the paper's own. Otherwise they replace the paper's value in every cell that accepts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from itertools import product
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, Union, cast, get_args, get_origin, get_type_hints

from moesaic.papers.engine.cells import Cell
from moesaic.papers.engine.paper import Plan
from moesaic.papers.engine.runner import Runner

__all__ = [
    "Experiment",
    "RefusedVariant",
    "Variant",
    "Variation",
    "VariedCell",
    "cell_parameters",
    "check_known",
    "check_values",
    "make_variants",
    "parse_variation",
]

_NOT_PARAMETERS = ("trial", "fidelity", "on_cpu")
"""Which repetition it is; what --fidelity selects; what the result does not depend on."""


Experiment: TypeAlias = tuple[Plan[Any], Mapping[str, str]]
"""The cells that a claim reads, and its paper's letters of parameters."""


class RefusedVariant(ValueError):
    """A value that an experiment cannot run with."""


@dataclass(frozen=True)
class Variation:
    """A parameter and its values, as they are spelled."""

    name: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}={','.join(self.values)}"


def parse_variation(text: str) -> Variation:
    """Parses NAME=VALUE,VALUE.

    >>> parse_variation("k=4,8,16")
    Variation(name='k', values=('4', '8', '16'))
    """
    name, _, values = text.partition("=")
    given = tuple(dict.fromkeys(value.strip() for value in values.split(",")))
    if not name.strip() or not all(given):
        raise RefusedVariant(f"--vary={text!r}; write it as NAME=VALUE,VALUE, such as k=4,8,16")
    return Variation(name.strip(), given)


@dataclass(frozen=True)
class Variant:
    """The cells that a claim reads, with other values of some parameters."""

    label: str
    """The values, such as "k=4, l=2", or "k=4,16 added"."""
    cells: Plan[Any]
    """By the names that the claim's check reads."""
    changed: frozenset[str]
    """Names of the cells that differ from the paper's."""
    adds: bool
    """Whether cells were added to the paper's own, rather than changed."""
    comparable: bool
    """Whether the claim's rule applies: not if cells that differ in the paper became equal."""


@dataclass(frozen=True)
class VariedCell:
    """A cell with other parameters; what it cannot run with is a `RefusedVariant`."""

    cell: Cell[Any]
    label: str = field(compare=False)

    @property
    def steps(self) -> int:
        return self.cell.steps

    def missing_requirement(self, runner: Runner) -> str | None:
        return self.cell.missing_requirement(runner)

    def spec(self, runner: Runner) -> dict[str, Any]:
        return self.cell.spec(runner)

    def measure(self, runner: Runner) -> dict[str, Any]:
        try:
            return self.cell.measure(runner)
        except ValueError as error:
            raise RefusedVariant(f"--vary {self.label} cannot run: {error}") from error

    def result(self, stored: dict[str, Any]) -> Any:
        return self.cell.result(stored)


def cell_parameters(cells: Iterable[Cell[Any]]) -> dict[str, list[str]]:
    """Returns the names of the parameters of the cells with the values that the cells have.

    >>> from moesaic.papers.wang2019.experiments_expressivity import MaskingCell, WidthCell
    >>> cell_parameters([MaskingCell(), WidthCell(1, 6, (2, 3))])
    {'trials': ['5'], 'layers': ['1'], 'features': ['6'], 'widths': ['2x3']}
    """
    found: dict[str, list[str]] = {}
    for cell in cells:
        for path, value in _leaves(cell):
            values = found.setdefault(path[-1], [])
            if (spelled := _spelled(value)) not in values:
                values.append(spelled)
    return found


def check_known(variations: Sequence[Variation], claims: Mapping[str, Experiment]) -> None:
    """Raises unless each name is a parameter of some claim's experiment; the error lists the parameters."""
    names = [variation.name for variation in variations]
    for name in names:
        if names.count(name) > 1:
            raise RefusedVariant(f"--vary {name} is given {names.count(name)} times; list its values: {name}=4,8")
        if not any(letters.get(name, name) in cell_parameters(cells.values()) for cells, letters in claims.values()):
            listed: dict[str, str] = {}
            for cells, letters in claims.values():
                by_letter = {parameter: letter for letter, parameter in letters.items()}
                listed |= {each: by_letter.get(each, "") for each in cell_parameters(cells.values())}
            near = get_close_matches(name, [*listed, *listed.values()], n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            known = ", ".join(f"{each} ({letter})" if letter else each for each, letter in listed.items()) or "none"
            shown = f"{', '.join([*claims][:3])}{' …' if len(claims) > 3 else ''}"
            raise RefusedVariant(
                f"--vary {name!r} is no parameter of the experiments of {shown}; they have {known}{hint}"
            )


def check_values(variations: Sequence[Variation], claims: Sequence[tuple[Plan[Any], Mapping[str, str]]]) -> None:
    """Raises unless each value is accepted by a cell of some claim, given with its paper's letters."""
    for variation in variations:
        for text in variation.values:
            refusals: list[RefusedVariant] = []
            for cells, letters in claims:
                try:
                    _with_value(cells, variation.name, text, letters)
                    break
                except RefusedVariant as error:
                    refusals.append(error)
            else:
                raise next((error for error in refusals if error.__cause__), refusals[0])


def make_variants(cells: Plan[Any], variations: Sequence[Variation], letters: Mapping[str, str]) -> list[Variant]:
    """Returns the variants of the cells of a claim, one for each combination of values that some cell accepts."""
    known = cell_parameters(cells.values())
    own = [each for each in variations if letters.get(each.name, each.name) in known]
    swept = {each: place for each in own if (place := _swept_place(cells, letters.get(each.name, each.name)))}
    replaced = [each for each in own if each not in swept]
    variants: list[Variant] = []
    for values in product(*(each.values for each in replaced)) if own else ():
        chosen = dict(zip((each.name for each in replaced), values, strict=True))
        try:
            changed = _replaced(cells, chosen, letters)
            added = _added(changed, swept, letters)
        except RefusedVariant:  # no cell of this claim has such a network; `check_values` found one that has
            continue
        together = {**changed, **added}
        labels = [f"{name}={value}" for name, value in chosen.items()] + [f"{each} added" for each in swept]
        variants.append(
            Variant(
                ", ".join(labels),
                together,
                frozenset(name for name, cell in together.items() if name not in cells or cell != cells[name]),
                adds=bool(swept),
                comparable=len(set(changed.values())) == len(set(cells.values())),
            )
        )
    return variants


def _replaced(cells: Plan[Any], chosen: Mapping[str, str], letters: Mapping[str, str]) -> dict[str, Cell[Any]]:
    changed: dict[str, Cell[Any]] = dict(cells)
    for given, text in chosen.items():
        changed |= _with_value(changed, given, text, letters)
    return changed


def _added(cells: Plan[Any], swept: Mapping[Variation, int], letters: Mapping[str, str]) -> dict[str, Cell[Any]]:
    added: dict[str, Cell[Any]] = {}
    for values in product(*(variation.values for variation in swept)) if swept else ():
        several: dict[str, Cell[Any]] = dict(cells)
        for (variation, place), text in zip(swept.items(), values, strict=True):
            several = {
                _renamed(name, place, text): cell
                for name, cell in _with_value(several, variation.name, text, letters).items()
            }
        added |= several
    return added


def _with_value(cells: Plan[Any], given: str, text: str, letters: Mapping[str, str]) -> dict[str, Cell[Any]]:
    """Returns the cells that accept the value, with it; cells whose networks do not have it stay out."""
    accepted: dict[str, Cell[Any]] = {}
    refusal: Exception | None = None
    for name, cell in cells.items():
        try:
            if (changed := _varied(cell, letters.get(given, given), text)) is not None:
                accepted[name] = changed
        except (ValueError, TypeError) as error:
            refusal = error
    if not accepted:
        raise RefusedVariant(f"--vary {given}={text} cannot run: {refusal or 'no such parameter'}") from refusal
    return accepted


def _varied(cell: Cell[Any], parameter: str, text: str) -> Cell[Any] | None:
    """Returns the cell with another value; None if it has no such parameter."""
    # the outermost, if several have the name
    paths = sorted((path for path, _ in _leaves(cell) if path[-1] == parameter), key=len)
    return _with(cell, paths[0], text) if paths else None


def _with(record: Any, path: tuple[str, ...], text: str) -> Any:
    name, *inner = path
    if inner:
        return replace(record, **{name: _with(getattr(record, name), tuple(inner), text)})
    return replace(record, **{name: _parsed(_hints(record)[name], text, name)})


def _leaves(record: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    hints = _hints(record)
    for each in fields(record):
        value = getattr(record, each.name)
        if is_dataclass(value):
            yield from _leaves(value, (*path, each.name))
        elif each.name not in _NOT_PARAMETERS and any(map(_can_parse, _options(hints[each.name]))):
            yield (*path, each.name), value


def _hints(record: Any) -> dict[str, Any]:
    return get_type_hints(record.__class__)


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (UnionType, Union) else (kind,)


def _can_parse(kind: Any) -> bool:
    if get_origin(kind) is tuple:
        return all(each in (int, float, ...) for each in get_args(kind))
    return kind in (bool, int, float, str) or get_origin(kind) is Literal


def _parsed(kind: Any, text: str, name: str) -> Any:
    for option in _options(kind):
        try:
            return _parsed_as(option, text)
        except ValueError:
            continue
    expected = " or ".join(_described(option) for option in _options(kind))
    raise ValueError(f"{name}={text!r} is not {expected}")


def _parsed_as(kind: Any, text: str) -> Any:
    if kind is NoneType and text.lower() == "none":
        return None
    if get_origin(kind) is Literal:
        return {str(choice): choice for choice in get_args(kind)}.get(text) or _refuse(text)
    if get_origin(kind) is tuple:
        return tuple(_parsed_as(get_args(kind)[0], part) for part in text.split("x"))
    if kind is bool:
        return {"true": True, "false": False}[text.lower()] if text.lower() in ("true", "false") else _refuse(text)
    return cast("type[Any]", kind)(text) if kind in (int, float, str) else _refuse(text)


def _refuse(text: str) -> Any:
    raise ValueError(text)


def _described(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return "numbers joined by x, such as 3x3"
    names: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", NoneType: "none"}
    return names.get(kind, "text")


def _spelled(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, cast("tuple[Any, ...]", value)))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _swept_place(cells: Plan[Any], parameter: str) -> int | None:
    """Returns the part of the cells' names, counted from the end, that is the parameter's value; None for no part.

    Cells are named by what an experiment runs through: "fig6/N=300/8" has 8 experts. One value is not a sweep, and may
    be equal to a part of a name by chance.
    """
    values = {name: value for name, cell in cells.items() for path, value in _leaves(cell) if path[-1] == parameter}
    if len({_spelled(value) for value in values.values()}) < 2:
        return None
    places: set[int] = set(range(-1, -1 - max(name.count("/") + 1 for name in values), -1))
    for name, value in values.items():
        parts = [part.rpartition("=")[2] for part in name.split("/")]
        places &= {place - len(parts) for place, part in enumerate(parts) if part == _spelled(value)}
    return max(places, default=None)


def _renamed(name: str, place: int, text: str) -> str:
    parts = name.split("/")
    letter, equals, _ = parts[place].rpartition("=")
    parts[place] = f"{letter}{equals}{text}"
    return "/".join(parts)
