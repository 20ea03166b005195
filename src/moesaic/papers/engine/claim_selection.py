"""Selects papers by id or name, and claims by id, by the beginning of ids, by pattern, or by figure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from moesaic.argument_checks import check_choice
from moesaic.papers.engine.findings import Claim, Source

__all__ = ["select_claims", "select_papers"]

_FIGURES = re.compile(r"Figures? (\d+)(?: (?:to|and) (\d+))?")


def select_claims(command: str, claims: Sequence[Claim], patterns: Sequence[str], figures: Sequence[int]) -> list[str]:
    """Returns the ids of the claims that a pattern or a figure names; an error lists near ids.

    A pattern is an id, the beginning of ids up to a hyphen, or has wildcards.

    >>> names = {"fig4-joint": "Figure 4", "fig4-faster": "Figure 4", "fig40": "Figure 40", "order": "Figures 4 to 6"}
    >>> claims = [Claim(id, "paper", where, "", 1.0, "") for id, where in names.items()]
    >>> select_claims("claims", claims, ["fig4"], [])
    ['fig4-joint', 'fig4-faster']
    >>> select_claims("claims", claims, ["*fast*"], [5])
    ['fig4-faster', 'order']
    """
    ids = [claim.id for claim in claims]
    found: list[str] = []
    for pattern in patterns:
        matches = [id for id in ids if id == pattern] or [
            id for id in ids if fnmatchcase(id, pattern) or id.startswith(f"{pattern}-")
        ]
        if not matches:
            check_choice(command, "--claim", pattern, ids)
        found += matches
    for figure in figures:
        matches = [claim.id for claim in claims if figure in _figures(claim)]
        if not matches:
            check_choice(
                command, "--figure", figure, sorted({number for claim in claims for number in _figures(claim)})
            )
        found += matches
    return list(dict.fromkeys(found))


def select_papers(command: str, papers: Sequence[Source], given: Sequence[str]) -> tuple[str, ...]:
    """Returns the ids of papers that are given by id or by authors and year; an error lists the ids.

    >>> papers = [Source("chen2022", "Mixtures (Chen et al. 2022)"), Source("wang2019", "Gates (Wang et al. 2019)")]
    >>> select_papers("claims", papers, ["Wang et al. 2019", "chen2022", "wang2019"])
    ('wang2019', 'chen2022')
    """
    by_name = {paper.short_title.casefold(): paper.id for paper in papers}
    ids = [paper.id for paper in papers]
    found = [by_name.get(each.casefold(), each) for each in given]
    return tuple(dict.fromkeys(check_choice(command, "--paper", each, ids) for each in found))


def _figures(claim: Claim) -> range:
    """Numbers of the figures that a claim is about."""
    match = _FIGURES.fullmatch(claim.where)
    return range(0) if match is None else range(int(match[1]), int(match[2] or match[1]) + 1)
