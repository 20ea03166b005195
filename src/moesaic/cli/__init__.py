"""The commands; each a few lines over the library.

Bad input ends with one line on stderr and exit code 2, an interruption with 130. With MOESAIC_DEBUG
set in the environment bad input keeps its traceback, as everything unexpected always does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import tyro

from moesaic.cli.bench import Bench
from moesaic.cli.claims import Claims
from moesaic.cli.compare import Compare
from moesaic.cli.explain import Explain
from moesaic.cli.export import Export
from moesaic.cli.predict import Predict
from moesaic.cli.reproduce import Reproduce
from moesaic.cli.shared import CommandError, log, version
from moesaic.cli.theory import Theory
from moesaic.cli.train import Train

__all__ = [
    "Bench",
    "Claims",
    "CommandError",
    "Compare",
    "Explain",
    "Export",
    "Predict",
    "Reproduce",
    "Theory",
    "Train",
    "main",
]


class Command(Protocol):
    """A command; its fields are the options."""

    def run(self, given: Sequence[str]) -> int:
        """Runs the command; ``given`` are its arguments. Returns the exit code."""
        ...


COMMANDS: dict[str, type[Any]] = {
    "train": Train,
    "compare": Compare,
    "predict": Predict,
    "explain": Explain,
    "export": Export,
    "reproduce": Reproduce,
    "claims": Claims,
    "theory": Theory,
    "bench": Bench,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code.

    >>> main(["--version"])
    moesaic ...
    0
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        sys.stdout.write(f"moesaic {version()}\n")
        return 0
    description = (
        "Mixtures of experts for vision. moesaic --version prints the version, moesaic COMMAND --help the options."
    )
    command: Command = tyro.extras.subcommand_cli_from_dict(
        dict(COMMANDS), prog="moesaic", description=description, args=given
    )
    try:
        return command.run(given)
    except CommandError as error:
        if os.environ.get("MOESAIC_DEBUG"):
            raise
        log(str(error))
        return 2
    except KeyboardInterrupt:
        return 130
