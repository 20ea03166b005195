"""The command line; each command is a few lines over the library.

Bad input ends with one line on stderr and exit code 2, an interruption with 130. With MOESAIC_DEBUG set in the
environment bad input keeps its traceback, as everything unexpected always does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code.

    >>> main(["--version"])
    moesaic ...
    0
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:  # before torch and tyro are imported, which takes seconds
        sys.stdout.write(f"moesaic {sys.modules['moesaic'].__version__}\n")
        return 0
    from moesaic.cli.commands import run_command

    return run_command(given)
