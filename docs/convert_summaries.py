"""Apply today's rules to the committed findings whose raw trials are not stored, as far as summaries allow.

    python docs/convert_summaries.py

A finding with stored trials is computed from them (moesaic.papers.recompute). For the others, the rule is applied to
the committed value and interval; what a summary cannot tell is named in the verdict. Run it once after rules changed;
a new run of `moesaic reproduce` makes it unnecessary.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

from moesaic.fidelity import Fidelity
from moesaic.intervals import Estimate, Sample, student_quantile
from moesaic.papers.chen2022.claims_synthetic import PUBLISHED
from moesaic.papers.chowdhury2023.claims_image_rules import saving
from moesaic.papers.chowdhury2023.claims_mnist import grows
from moesaic.papers.engine.decision_rules import CheckResult, above_zero, below, same_mean
from moesaic.papers.engine.findings import Finding, read_findings, write_findings
from moesaic.papers.recompute import recompute
from moesaic.papers.reproduce import PAPERS

RESULTS = Path(__file__).parent / "papers"
RENAMED = {"tweets-lead": "table10-language", "tweets-by-language": "table11-by-language"}
RENAMED["tweets-clusters"] = "fig8-languages"
THREE_TRIALS: dict[str, Callable[[Estimate], CheckResult]] = {
    "fig12-samples": lambda found: saving(found, 0.4),
    "fig12-flops": lambda found: saving(found, 0.5),
    "table2-iterations": lambda found: below(found, 1.0),
    "table2-time": lambda found: saving(found, 0.6),
    "table2-flops": lambda found: saving(found, 0.58),
}
"""Ratios that were bootstrapped over three trials, and their rules."""
AT_T1 = ("theorem4.2-experts", "theorem4.2-router", "load-equal")


def widest(found: Estimate) -> Estimate:
    """The widest Student interval of the logarithm of a ratio whose three trials lie within a bootstrap interval.

    A bootstrap over three trials reaches from the smallest to the largest ratio of a trial. The standard deviation of
    three numbers is at most their range over √3.
    """
    half = student_quantile(2) * math.log(found.high / found.low) / 3
    return Estimate(found.value, found.value * math.exp(-half), found.value * math.exp(half))


def converted(finding: Finding) -> CheckResult:
    """The verdict of today's rule on a committed value and interval."""
    old = CheckResult(finding.verdict, finding.measured, finding.interval)
    if "mobilenetv2" in finding.id:
        return CheckResult("not run here: the mixtures did not finish in the time available")
    if finding.measured is None or finding.interval is None:
        return old
    found = Estimate(finding.measured, *finding.interval)
    if finding.id in AT_T1:
        after = f"after training {found.value:.3g} [{found.low:.3g}, {found.high:.3g}]"
        return CheckResult(f"not run here: judged where training stops early, of which no trials are stored; {after}")
    if finding.id in THREE_TRIALS:
        return THREE_TRIALS[finding.id](widest(found))
    if finding.id.startswith(("table1-linear-s", "table1-nonlinear-s")):
        kind, _, setting = finding.id.removeprefix("table1-").rpartition("-s")
        published = PUBLISHED[f"moe/{'identity' if kind == 'linear' else 'cubic'}"][int(setting) - 1]
        assert isinstance(published, tuple)
        deviation = (found.value - found.low) / student_quantile(9) * math.sqrt(10)
        return same_mean(Sample(found.value, deviation, 10), Sample(*published, 10), found)
    if finding.id == "fig10-fifth":
        return saving(found, 0.2)
    if finding.id == "fig5-polynomial":
        return grows(found, 8.0)
    if finding.id == "fig16-ahead" and finding.fidelity == "print":
        return above_zero(found)
    if finding.id == "cost-ahead":
        return replace(old, verdict="undecided: 0 is in the interval of the smallest lead")
    if finding.id in ("fig7-threshold", "fig1-clusters"):
        return replace(old, verdict=finding.verdict.replace("partly: ", "undecided: "))
    if finding.id == "fig6-order" and found.low <= 0 < found.high:
        return replace(old, verdict="fails: if it grows, then not like the power 0.25")
    verdict = finding.verdict.replace("partly: undecided, ", "undecided: ")
    verdict = verdict.replace("partly: distil, undecided, ", "undecided: distil, ")
    if "clearly ahead at" in verdict or "clearly ahead in" in verdict:
        assert finding.measured > 0, "the smallest lead is positive, so that no interval is all below 0"
        verdict = verdict.replace("partly: ", "undecided: ").replace("ahead in", "ahead at")
    return replace(old, verdict=verdict)


def main() -> None:
    """Writes each paper's claims.json anew, and lists the verdicts that changed."""
    again = {(each.paper, each.id, each.fidelity): each for each in recompute().findings}
    for paper in PAPERS.values():
        path = RESULTS / paper.id / "claims.json"
        before = {(each.id, each.fidelity): each for each in read_findings(path)}
        after: list[Finding] = []
        for check in paper.checks:
            for fidelity in get_args(Fidelity):
                if fidelity not in check.fidelities:
                    continue
                id = check.claim.id
                known = before.get((id, fidelity)) or before.get((RENAMED.get(id, ""), fidelity))
                if (paper.id, id, fidelity) in again:
                    finding = again[paper.id, id, fidelity]
                elif id in RENAMED.values():
                    finding = check.finding(CheckResult(check.missing), fidelity, "short", 0.0)
                elif known is not None:
                    result = converted(known)
                    finding = check.finding(result, fidelity, "short", known.seconds)
                else:
                    why = "not run here: a new claim, whose cells have not run yet"
                    finding = check.finding(CheckResult(why), fidelity, "short", 0.0)
                after.append(finding)
                if known is not None and known.verdict != finding.verdict:
                    sys.stdout.write(f"{paper.id} {id} {fidelity}: {known.verdict!r} -> {finding.verdict!r}\n")
        write_findings(path, after)


if __name__ == "__main__":
    main()
