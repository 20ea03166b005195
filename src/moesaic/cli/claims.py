"""`moesaic claims`: what the papers say, and the rules that decide whether it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import UseAppendAction, arg

from moesaic.checks import check_choice
from moesaic.cli.shared import user_errors

__all__ = ["Claims"]


@dataclass(frozen=True)
class Claims:
    """List the papers' claims, with the rules that decide whether they hold."""

    paper: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME")] = ()
    """A paper, such as chen2022; all of them by default."""

    def run(self, given: Sequence[str]) -> int:
        """Print the list."""
        from rich.console import Console

        from moesaic.papers.engine.claims_table import print_rules
        from moesaic.papers.reproduce import PAPERS

        with user_errors("claims"):
            for paper in self.paper:
                check_choice("claims", "--paper", paper, PAPERS)
        console = Console()
        for paper in self.paper or PAPERS:
            print_rules(f"{paper}: {PAPERS[paper].title}", PAPERS[paper].claims, console)
        return 0
