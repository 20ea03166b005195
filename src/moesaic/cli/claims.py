"""`moesaic claims`: lists the papers' claims and the rules that decide whether they hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, UseAppendAction, arg

from moesaic.cli.shared import PaperOption, user_errors

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Claims"]


@dataclass(frozen=True)
class Claims:
    """List the papers' claims, with the rules that decide whether they hold.

    Selected claims also list the parameters that `moesaic reproduce --vary` takes.
    """

    paper: PaperOption = ()
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

        from moesaic.papers.engine.claim_selection import select_claims, select_papers
        from moesaic.papers.engine.terminal_tables import show_claim_rules
        from moesaic.papers.reproduce import PAPERS, claim_parameters

        with user_errors("claims"):
            papers = select_papers("claims", [paper.source for paper in PAPERS.values()], self.paper) or tuple(PAPERS)
            known = [claim for paper in papers for claim in PAPERS[paper].claims]
            selected = select_claims("claims", known, self.claim, self.figure)
        console = Console()
        if self.recompute:
            return self._recompute(console, papers, selected)
        for paper in papers:
            claims = [claim for claim in PAPERS[paper].claims if not selected or claim.id in selected]
            if claims:
                listed = claim_parameters(PAPERS[paper], claims) if selected else {}
                show_claim_rules(f"{paper}: {PAPERS[paper].title}", claims, console, listed)
        return 0

    def _recompute(self, console: Console, papers: Sequence[str], selected: Collection[str]) -> int:
        """Prints the verdicts from stored trials, and the claims that have none."""
        from moesaic.papers.engine.findings import RECORDED_PRESET
        from moesaic.papers.engine.terminal_tables import show_findings_table
        from moesaic.papers.recompute import recompute
        from moesaic.papers.reproduce import PAPERS

        found = recompute(papers, tuple(selected) or None)
        if found.findings:
            show_findings_table(found.findings, console, [PAPERS[paper].source for paper in papers])
        for paper in papers:
            names = [f"{claim} ({fidelity})" for id, claim, fidelity in found.without_trials if id == paper]
            if names:
                console.print(
                    f"\n{paper}: no raw trials are stored for {', '.join(names)}. To run them:\n"
                    f"  moesaic reproduce --paper {paper} --preset {RECORDED_PRESET} --without-trials",
                    markup=False,
                    highlight=False,
                )
        return 0
