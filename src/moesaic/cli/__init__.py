"""The command line; each command is a few lines over the library.

Bad input, and faults such as a full disk, end with one line on stderr and exit code 2, an interruption with 128 plus
the number of the signal. With MOESAIC_DEBUG set in the environment they keep their traceback, as everything unexpected
always does.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code.

    >>> main(["--version"])
    moesaic ...
    0
    """
    if arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until ours is there: an end without traceback
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--version"]:  # before torch and tyro are imported, which takes seconds
        sys.stdout.write(f"moesaic {sys.modules['moesaic'].__version__}\n")
        return 0
    from moesaic.cli.faults import replace_unencodable, signal_handlers
    from moesaic.cli.rank_output import end_rank, silence_other_ranks

    if arguments is not None:  # called from Python, whose signals are not ours
        return _run(given)
    replace_unencodable()
    with signal_handlers(given, process_ends=True), silence_other_ranks():
        code = _run(given)
        end_rank(code)
        return code


def _run(given: list[str]) -> int:
    from moesaic.cli.commands import run_command

    return run_command(given)
