"""The commands by name: parses the command line and runs the command."""

from __future__ import annotations

import dataclasses
import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Protocol

import tyro

from moesaic import torchrun_env
from moesaic.cli.advise import Advise
from moesaic.cli.bench import Bench
from moesaic.cli.bench_model import BenchModel
from moesaic.cli.cells import Cells
from moesaic.cli.claims import Claims
from moesaic.cli.compare import Compare
from moesaic.cli.completion import Completion
from moesaic.cli.explain import Explain
from moesaic.cli.export import Export
from moesaic.cli.faults import log, run_guarded
from moesaic.cli.predict import Predict
from moesaic.cli.reproduce import Reproduce
from moesaic.cli.theory import Theory
from moesaic.cli.train import Train
from moesaic.cli.view import View

__all__ = ["COMMANDS", "Command", "find_command", "run_command"]

_WIDTH = 80
_ON_MANY_RANKS = ("train",)


class Command(Protocol):
    """A command; its fields are the options."""

    def run(self, given: Sequence[str]) -> int:
        """Runs the command; ``given`` are its arguments. Returns the exit code."""
        ...


COMMANDS: dict[str, type[Any]] = {
    "train": Train,
    "compare": Compare,
    "advise": Advise,
    "view": View,
    "predict": Predict,
    "explain": Explain,
    "export": Export,
    "reproduce": Reproduce,
    "cells": Cells,
    "claims": Claims,
    "theory": Theory,
    "bench": Bench,
    "completion": Completion,
}


def run_command(given: Sequence[str]) -> int:
    """Parses the arguments, runs the command and returns its exit code; exits if there is no such command."""
    try:
        code = _run(_parse(given), given)
        sys.stdout.flush()  # here rather than at exit, where a closed pipe cannot be handled
        return code
    except BrokenPipeError:
        return _reader_left()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # as rich ends
            return _reader_left()
        raise


def _parse(given: Sequence[str]) -> Command:
    if not given or given[0] in ("-h", "--help"):
        (sys.stdout if given else sys.stderr).write(_overview())
        raise SystemExit(0 if given else 2)
    name = given[0]
    if name not in COMMANDS:
        near = get_close_matches(name, [*COMMANDS, "--help", "--version"], n=1)
        hint = f"did you mean {near[0]!r}? The" if near else "the"
        log(f"moesaic: {name!r} is not a command; {hint} commands are {', '.join(COMMANDS)}")
        raise SystemExit(2)
    command, words = find_command(given)
    prog = " ".join(["moesaic", *given[:words]])
    return tyro.cli(
        command, prog=prog, description=_description(command), args=_with_dashed_files(command, given[words:])
    )


def _with_dashed_files(command: type[Any], words: Sequence[str]) -> list[str]:
    """The arguments; files whose names begin with a dash, as a shell lists them for ``*.jpg``, as ``./-name.jpg``."""
    names = [field.name.replace("_", "-") for field in dataclasses.fields(command)]
    if "images" not in names:
        return list(words)
    options = {"-h", "--help", "--", *(f"--{name}" for name in names)}
    return [
        f"./{word}"
        if word.startswith("-") and word.partition("=")[0] not in options and os.path.lexists(word)
        else word
        for word in words
    ]


def find_command(given: Sequence[str]) -> tuple[type[Any], int]:
    """The command that arguments begin with, and by how many words they name it."""
    if tuple(given[:2]) == ("bench", "model"):
        return BenchModel, 2
    return COMMANDS[given[0]], 1


def _run(command: Command, given: Sequence[str]) -> int:
    if torchrun_env.in_job() and given[0] not in _ON_MANY_RANKS:
        log(f"moesaic {given[0]}: every rank would do the same; torchrun is for moesaic train, so start it without")
        raise SystemExit(2)
    if given[0] != "completion":
        import_module("torch")  # the slow import, before there is anything that a signal could interrupt
    return run_guarded(given[0], given, lambda: command.run(given))


def _reader_left() -> int:
    """Ends without error when the reader of a pipe has closed it, as in ``moesaic claims | head``."""
    with suppress(OSError, ValueError):  # where stdout is no file
        # what is still buffered would raise again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _overview() -> str:
    lines = ["usage: moesaic COMMAND …", "", "Mixtures of experts for vision.", "", "commands:"]
    for name, command in COMMANDS.items():
        summary = (inspect.getdoc(command) or "").partition("\n\n")[0]
        lines += textwrap.wrap(
            " ".join(summary.split()), _width(), initial_indent=f"  {name:12}", subsequent_indent=" " * 14
        )
    lines += ["", "moesaic train FOLDER trains on your images; FOLDER has one subfolder per class."]
    lines += ["moesaic COMMAND --help lists the options, moesaic --version prints the version.", ""]
    return "\n".join(lines)


def _description(command: type[Any]) -> str:
    """The docstring in lines that fit; tyro wraps only options, and leaves indented lines as they are."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    indent = "  "
    filled = (
        textwrap.fill(" ".join(each.split()), _width(), initial_indent=indent, subsequent_indent=indent)
        for each in paragraphs
    )
    return "\n\n".join(filled)


def _width() -> int:
    return min(_WIDTH, shutil.get_terminal_size().columns)
