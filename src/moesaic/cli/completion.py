"""`moesaic completion`: a script that completes commands and options in a shell."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from moesaic.argument_checks import check_choice
from moesaic.cli.shared import user_errors

__all__ = ["Completion"]

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class Completion:
    """Print a script that completes commands and options in bash, zsh or fish.

    bash: eval "$(moesaic completion bash)" in ~/.bashrc. zsh: moesaic completion zsh > DIR/_moesaic for a DIR in fpath.
    fish: moesaic completion fish > ~/.config/fish/completions/moesaic.fish.
    """

    shell: Positional[Annotated[str, arg(metavar="bash|zsh|fish")]]
    """Shell that the script is for."""

    def run(self, given: Sequence[str]) -> int:
        """Prints the script."""
        from moesaic.cli.commands import COMMANDS

        with user_errors("completion"):
            check_choice("completion", "SHELL", self.shell, SHELLS)
        with suppress(SystemExit):  # as tyro ends after it
            tyro.extras.subcommand_cli_from_dict(
                dict(COMMANDS), prog="moesaic", args=["--tyro-write-completion", self.shell, "-"]
            )
        return 0
