"""Writes the reference of the command line, docs/cli.md, from the parser of every command.

python docs/cli_reference.py
"""

import argparse
import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import tyro

from moesaic.cli.commands import COMMANDS, find_command

PAGE = Path(__file__).parent / "cli.md"
DEFAULT = re.compile(r" ?\((?:default: (?P<default>.*)|(?P<required>required)|(?P<other>[^()]*))\)$", re.DOTALL)
INTRODUCTION = """\
# Command line

Every command with all of its options, as `moesaic COMMAND --help` prints them. `moesaic --version` prints the \
version; `python -m moesaic` is the same program. Exit codes: 0 when the command did what it was asked for, 2 for bad \
input and faults such as a full disk, with one line on stderr, and 128 plus the number of the signal when it was \
interrupted. With `MOESAIC_DEBUG=1` in the environment, errors keep their traceback.

*Made from the parser by `python docs/cli_reference.py`.*

| command | what it does |
| --- | --- |
"""


def page() -> str:
    """The whole page."""
    commands = {name: command for first in COMMANDS for name, command in named_commands(first).items()}
    rows = [f"| [`{name}`](#{anchor(name)}) | {summary(command)} |\n" for name, command in commands.items()]
    return INTRODUCTION + "".join(rows) + "".join(section(name, command) for name, command in commands.items())


def named_commands(first: str) -> dict[str, type[Any]]:
    """The commands that begin with this word, by all of their words."""
    found = {first: COMMANDS[first]}
    if first == "bench":  # whose second subject has options of its own
        found["bench model"] = find_command(["bench", "model"])[0]
    return found


def anchor(name: str) -> str:
    """Of a command's section."""
    return f"moesaic-{name.replace(' ', '-')}"


def summary(command: type[Any]) -> str:
    """The first sentence of a command's description."""
    return paragraphs(command)[0]


def paragraphs(command: type[Any]) -> list[str]:
    """The description of a command."""
    return [plain(" ".join(each.split())) for each in (inspect.getdoc(command) or "").split("\n\n")]


def section(name: str, command: type[Any]) -> str:
    """The description, the usage and the options of a command."""
    positionals, options = arguments(name, command)
    usage = " ".join(["moesaic", name, *(["[OPTIONS]"] if options else []), *(spelling(each) for each in positionals)])
    lines = [f"\n## moesaic {name}\n", *(f"{each}\n" for each in paragraphs(command)), f"```text\n{usage}\n```\n"]
    return "\n".join(lines) + "\n" + "".join(entry(each) for each in (*positionals, *options))


def arguments(name: str, command: type[Any]) -> tuple[list[argparse.Action], list[argparse.Action]]:
    """Positional arguments and options of a command, without --help."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "get_parser", DeprecationWarning)
        parser = tyro.extras.get_parser(command, prog=f"moesaic {name}")
    found = [each for each in parser._actions if each.dest != "help"]
    return [each for each in found if not each.option_strings], [each for each in found if each.option_strings]


def spelling(action: argparse.Action) -> str:
    """An argument as one types it."""
    value = action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar or ())
    several = "…" if action.nargs in ("*", "+") and not action.option_strings else ""
    return " ".join(word for word in (", ".join(action.option_strings), value, several) if word)


def entry(action: argparse.Action) -> str:
    """A line of the list."""
    text = " ".join((action.help or "").split())
    found = DEFAULT.search(text)
    text = plain(text[: found.start()] if found else text)
    if found and found["default"]:
        default = {"False": "off", "True": "on"}.get(found["default"], found["default"])
        text += f" *Default: {plain(default)}.*"
    elif found and found["required"] and action.option_strings:
        text += " *Required.*"
    elif found and found["other"] == "repeatable":
        text += " *May be repeated.*"
    return f"- `{spelling(action)}`: {text}\n"


def plain(text: str) -> str:
    """The text with options as code, and without what Markdown would take for its own."""
    parts = re.split(r"(`[^`]*`|(?<![\w-])--[a-z][\w-]*)", text)
    escaped = (re.sub(r"([*\[\]<>|])", r"\\\1", part) for part in parts[::2])
    code = (f"`{part.strip('`')}`" for part in (*parts[1::2], ""))
    return "".join(text + span for text, span in zip(escaped, code, strict=True)).removesuffix("``")


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
