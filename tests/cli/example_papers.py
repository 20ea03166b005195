"""A stand-in for the papers: remembers what `moesaic reproduce` asks it for, and answers at once."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from papers.engine.example_findings import CHARTS, FINDINGS, SECOND_FINDINGS

from moesaic.papers import reproduce as real_papers
from moesaic.papers.engine.findings import Claim, Finding, Source
from moesaic.papers.engine.variant_findings import VariantFinding
from moesaic.papers.engine.variants import parse_variation
from moesaic.report.chart import Chart


@dataclass(frozen=True)
class Paper:
    id: str
    title: str
    about: str
    claims: tuple[Claim, ...]
    check_data: Callable[[Path | None], None]

    @property
    def source(self) -> Source:
        return Source(self.id, self.title, self.about)


@dataclass(frozen=True)
class ReproduceResult:
    findings: tuple[Finding, ...]
    charts: tuple[Chart, ...]
    notes: tuple[str, ...]
    variants: tuple[VariantFinding, ...] = ()


class Papers(ModuleType):
    """Stands for `moesaic.papers`: remembers what it was asked and answers at once."""

    def __init__(self) -> None:
        super().__init__("moesaic.papers.reproduce")
        claims = {
            (each.paper, each.id): Claim(each.id, each.paper, each.where, each.statement, each.published, each.rule)
            for each in (*FINDINGS, *SECOND_FINDINGS)
        }
        texts = {
            "chowdhury2023": ("Patch-level Routing", "Mosaics of digits."),
            "chen2022": ("Towards Understanding Mixture of Experts", "Samples in four clusters."),
        }
        self.PAPERS = {
            id: Paper(
                id,
                title,
                about,
                tuple(claim for (paper, _), claim in claims.items() if paper == id),
                real_papers.PAPERS[id].check_data,
            )
            for id, (title, about) in texts.items()
        }
        self.PRESETS = real_papers.PRESETS
        self.check_variations = lambda vary, **_: [parse_variation(text) for text in vary]
        self.claim_parameters = lambda paper, claims: {claim.id: "experts (k)=8" for claim in claims}
        self.asked: dict[str, Any] = {}
        self.outcome = ReproduceResult(FINDINGS, CHARTS[2:], ("five trials instead of twenty",))
        self.trouble: BaseException | None = None

    def reproduce(self, **asked: Any) -> ReproduceResult:
        self.asked = asked
        asked["progress"].begin("a cell", total=10)
        asked["progress"].advance(5)
        if self.trouble is not None:
            raise self.trouble
        asked["progress"].log("damaged cell set aside")
        for finding in self.outcome.findings:
            if finding.decision != "not run here":
                asked["on_finding"](finding)
        asked["progress"].end()
        return self.outcome
