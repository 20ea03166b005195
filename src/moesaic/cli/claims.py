"""`moesaic claims`: lists the papers' claims and the rules that decide whether they hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, UseAppendAction, arg

from moesaic.checks import check_choice
from moesaic.cli.shared import user_errors

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Claims"]


@dataclass(frozen=True)
class Claims:
    """List the papers' claims, with the rules that decide whether they hold.

    Selected claims also list the parameters that `moesaic reproduce --vary` takes.
    """

    paper: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="ID")] = ()
    """Paper to list, such as chen2022. Default: all papers."""
    claim: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="ID")] = ()
    """Claims to list: an id, its beginning (fig4) or a pattern (*-ahead). Default: all claims."""
    figure: Annotated[UseAppendAction[tuple[int, ...]], arg(metavar="N")] = ()
    """Figure whose claims are listed. Default: all claims."""
    recompute: FlagCreatePairsOff[bool] = False
    """Compute verdicts from stored raw trials, without training."""

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
        if self.recompute:
            return self._recompute(console, selected)
        for paper in self.paper or PAPERS:
            claims = [claim for claim in PAPERS[paper].claims if not selected or claim.id in selected]
            if claims:
                listed = claim_parameters(PAPERS[paper], claims) if selected else {}
                show_claim_rules(f"{paper}: {PAPERS[paper].title}", claims, console, listed)
        return 0

    def _recompute(self, console: Console, selected: Collection[str]) -> int:
        """Prints the verdicts from stored trials, and the claims that have none."""
        from moesaic.papers.engine.claims_table import show_findings_table
        from moesaic.papers.recompute import recompute
        from moesaic.papers.reproduce import PAPERS

        papers = tuple(dict.fromkeys(self.paper)) or tuple(PAPERS)
        found = recompute(papers, tuple(selected) or None)
        if found.findings:
            show_findings_table(found.findings, console, [PAPERS[paper].source for paper in papers])
        for paper in papers:
            names = [f"{claim} ({fidelity})" for id, claim, fidelity in found.without_trials if id == paper]
            if names:
                console.print(
                    f"\n{paper}: no raw trials are stored for {', '.join(names)}", markup=False, highlight=False
                )
        return 0
