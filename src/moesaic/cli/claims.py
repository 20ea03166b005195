"""`moesaic claims`: lists the papers' claims and the rules that decide whether they hold."""

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
    """List the papers' claims, with the rules that decide whether they hold.

    Selected claims also list the parameters that `moesaic reproduce --vary` takes.
    """

    paper: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME")] = ()
    """Paper to list, such as chen2022. Default: all papers."""
    claim: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="ID")] = ()
    """Claims to list: an id, its beginning (fig4) or a pattern (*-ahead). Default: all claims."""
    figure: Annotated[UseAppendAction[tuple[int, ...]], arg(metavar="N")] = ()
    """Figure whose claims are listed. Default: all claims."""

    def run(self, given: Sequence[str]) -> int:
        """Prints the list."""
        from rich.console import Console

        from moesaic.papers.engine.claim_selection import select_claims
        from moesaic.papers.engine.claims_table import show_claim_rules
        from moesaic.papers.reproduce import PAPERS, claim_parameters

        with user_errors("claims"):
            for paper in self.paper:
                check_choice("claims", "--paper", paper, PAPERS)
            known = [claim for paper in self.paper or PAPERS for claim in PAPERS[paper].claims]
            selected = select_claims("claims", known, self.claim, self.figure)
        console = Console()
        for paper in self.paper or PAPERS:
            claims = [claim for claim in PAPERS[paper].claims if not selected or claim.id in selected]
            if claims:
                listed = claim_parameters(PAPERS[paper], claims) if selected else {}
                show_claim_rules(f"{paper}: {PAPERS[paper].title}", claims, console, listed)
        return 0
