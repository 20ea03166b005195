"""Claims of Chen et al. 2022, Appendix A.4, on sentences in three languages: Tables 10 and 11, Figure 8.

Rules and limits were written before any measurement. Epochs and ranges of learning rates were set on the validation
part of the first trial and not changed after the first test, although as printed the selected rate of the router is the
lowest of its range.
"""

from __future__ import annotations

from moesaic.insight import DispatchTable
from moesaic.intervals import mean
from moesaic.papers.chen2022.experiments_language import (
    CELL,
    ClaimCheck,
    ExperimentResults,
)
from moesaic.papers.engine.decision_rules import CheckResult, at_least, at_most
from moesaic.papers.engine.findings import Claim

__all__ = ["CHECKS", "NOTE", "PUBLISHED"]

PUBLISHED = DispatchTable(
    ("English", "French", "Russian"), ((1374, 3745, 2999, 31882), (23470, 3335, 13182, 13), (833, 9405, 7723, 39))
)
"""Table 11."""

NOTE = (
    "Language (Tables 10 and 11, Figure 8): tweets stand in for the paper's texts, and are far fewer: at most 5 000 of "
    "each language in place of 200 000 English, 200 000 French and 90 000 Russian ones. Vectors come from frequencies "
    "of characters and know less about sentiment than the BERT model of the paper. Trials split the same sentences "
    "anew: their test parts overlap, also with the sentences that learning rates were picked on, so that intervals are "
    "somewhat too narrow."
)
"""Remark for the report."""

_SETTING = (
    "Five trials, each with its own random split (80 % training), on at most 5 000 tweets of each language "
    "in place of the paper's 490 000 texts, and with an embedding from characters in place of BERT's. Single "
    "network and mixture train alike, equally long, and each with the learning rates that are best, of nine tries, on "
    "a fifth of the first trial's training sentences."
)
_HALFWAY = (PUBLISHED.entropy / PUBLISHED.cluster_entropy + 1) / 2
_PURE = 90.0


def _lead(experiment: ExperimentResults) -> CheckResult:
    single, mixture = experiment.results[CELL].accuracy.T
    return at_least(mean(mixture - single), 0.0)


def _mixed(experiment: ExperimentResults) -> CheckResult:
    tables = experiment.results[CELL].dispatch
    return at_most(mean([table.entropy / table.cluster_entropy for table in tables]), round(_HALFWAY, 3))


def _clustered(experiment: ExperimentResults) -> CheckResult:
    return at_least(mean(experiment.results[CELL].purity), _PURE)


def _paper_claim(id: str, where: str, statement: str, published: float | str, own: str) -> ClaimCheck:
    """A claim on the paper's texts, which are not at hand: it is never run, and points to our own on stand-ins."""
    rule = (
        "On Sentiment140, Allociné and RuReviews with embeddings of a multilingual BERT, none of which is at hand. "
        f"Holds if the rule of {own}, which is the same on stand-ins as a claim of our own, is met."
    )
    missing = f"not run here: needs the paper's texts and its BERT; {own} has stand-ins"
    described = Claim(id, "chen2022", where, statement, published, rule)
    return ClaimCheck(described, (_PAPER_TEXTS,), _no_texts, missing=missing)


def _no_texts(experiment: ExperimentResults) -> CheckResult:
    raise LookupError("no plan has cells with the paper's texts")


_PAPER_TEXTS = "language-of-the-paper"

CHECKS: tuple[ClaimCheck, ...] = (
    _paper_claim(
        "table10-language",
        "Table 10",
        "On sentiment in three languages, a mixture of four experts classifies better than a single network (lead in "
        "points).",
        2.09,
        "tweets-lead",
    ),
    _paper_claim(
        "table11-by-language",
        "Table 11",
        "Without labels of the language the router distributes sentences largely by language (dispatch entropy given "
        "languages, over the entropy of the languages: 0 by language alone, 1 independent of it).",
        round(PUBLISHED.entropy / PUBLISHED.cluster_entropy, 3),
        "tweets-by-language",
    ),
    _paper_claim(
        "fig8-languages",
        "Figure 8",
        "Embedded sentences form clusters by language (percent of sentences whose nearest neighbour speaks the same "
        "language).",
        "clusters by language",
        "tweets-clusters",
    ),
    ClaimCheck(
        Claim(
            "tweets-lead",
            "chen2022",
            "Our own",
            "On tweets in three languages, a mixture of four experts classifies better than a single network (lead in "
            "points).",
            None,
            f"Test accuracy of the mixture less that of the single network, mean over trials with Student's 95 % "
            f"interval. {_SETTING} Holds if the interval is at or above 0, fails if it is below, else undecided.",
        ),
        (CELL,),
        _lead,
    ),
    ClaimCheck(
        Claim(
            "tweets-by-language",
            "chen2022",
            "Our own",
            "Without labels of the language the router distributes tweets largely by language (dispatch entropy "
            "given languages, over the entropy of the languages: 0 by language alone, 1 independent of it).",
            None,
            f"Dispatch entropy (eq. 6.1) of test sentences with languages as clusters, over the entropy of the "
            f"languages, mean over trials with Student's 95 % interval. {_SETTING} Holds if the interval is at or "
            f"below {_HALFWAY:.3f}, halfway from the paper's table to a router that ignores languages, fails if it is "
            "above, else undecided.",
        ),
        (CELL,),
        _mixed,
    ),
    ClaimCheck(
        Claim(
            "tweets-clusters",
            "chen2022",
            "Our own",
            "Embedded tweets form clusters by language (percent of sentences whose nearest neighbour speaks the same "
            "language).",
            None,
            f"Of the test sentences' vectors, the percentage whose nearest other one (cosine) is of the same language, "
            f"mean over trials with Student's 95 % interval. {_SETTING} Holds if the interval is at or above "
            f"{_PURE:g}, fails if it is below, else undecided.",
        ),
        (CELL,),
        _clustered,
    ),
)
