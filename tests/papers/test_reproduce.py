"""Re-running a paper: repeatable, resumable, nothing done twice."""

import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import pytest

from moesaic.paper_fidelity import Fidelity
from moesaic.papers import reproduce as reproduce_module
from moesaic.papers.chen2022.experiments_images import CIFAR10_DIGEST, ImageCell
from moesaic.papers.chen2022.experiments_synthetic import MixtureCell
from moesaic.papers.chen2022.trial_training import MixtureSchedule
from moesaic.papers.chen2022.two_layer_networks import Mixture
from moesaic.papers.chowdhury2023 import experiments_two_layer as chowdhury2023_cells
from moesaic.papers.chowdhury2023.experiments_two_layer import SIZES, Sizes, TwoLayerCell
from moesaic.papers.chowdhury2023.experiments_two_layer import plan as whole_plan
from moesaic.papers.engine.findings import VERDICTS, Finding
from moesaic.papers.engine.runner import Runner
from moesaic.papers.engine.time_budget import TimeBudget
from moesaic.papers.reproduce import FULL_ORDER, PAPERS, ReproduceResult, reproduce
from moesaic.training import NoProgress, ResultCache
from moesaic.training.cell_status import folder_status

TINY = Sizes(
    trials=2,
    printed_trials=2,
    fig4=(20, 40),
    fig5_l=(2, 16),
    fig5_n=(20, 40),
    fig5_trials=2,
    fig6_k=(8, 10),
    fig7_l=(6, 16),
    fixed_n=(20,),
    best=(20, 40),
    released_sweeps=False,
    own_comparison=False,
)


def shorter(preset: str, fidelity: str, plan=whole_plan):
    """The plan with two epochs and few samples."""

    def less(cell: TwoLayerCell) -> TwoLayerCell:
        schedule = replace(cell.schedule, epochs=2, router_epochs=2)
        return replace(cell, schedule=schedule, test_samples=20, samples=min(cell.samples, 40))

    cells = plan(preset, fidelity).items()
    return {name: less(cell) for name, cell in cells if not name.startswith("coupling")}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny(monkeypatch)


def make_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "quick", TINY)
    monkeypatch.setattr(reproduce_module, "PAPERS", {"chowdhury2023": replace(PAPERS["chowdhury2023"], plan=shorter)})


def without_seconds(result: ReproduceResult) -> list[dict[str, object]]:
    return [asdict(finding) | {"seconds": None} for finding in result.findings]


CLAIMS = ["fig4-joint-ahead", "fig4-faster", "fig5-polynomial", "fig6-falls", "fig7-order", "lemma4.1-routers"]


def test_all_claims_get_a_verdict_or_a_reason(tmp_path: Path):
    result = reproduce(out=tmp_path, preset="quick")
    claims = {finding.id for finding in result.findings}
    assert claims == {claim.id for claim in PAPERS["chowdhury2023"].claims}
    for finding in result.findings:
        assert finding.decision in VERDICTS
        assert finding.preset == "quick"
        if finding.verdict.startswith("not run here"):
            assert finding.measured is None
            assert finding.verdict.startswith("not run here: needs --preset short")
        else:
            assert finding.measured is not None
    not_run = {(finding.id, finding.fidelity) for finding in result.findings if finding.decision == "not run here"}
    assert ("fig6-falls", "released") in not_run
    assert ("fig6-falls", "print") not in not_run
    assert {chart.where for chart in result.charts} >= {"Figure 4", "Figure 5", "Figure 6", "Figure 7"}


def test_a_second_run_does_nothing_and_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = reproduce(out=tmp_path, claims=CLAIMS)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a finished cell was run again")

    monkeypatch.setattr(chowdhury2023_cells, "train_trials", refuse)
    second = reproduce(out=tmp_path, claims=CLAIMS)
    assert second == first


def test_the_same_seed_gives_the_same_findings_elsewhere_and_another_does_not(tmp_path: Path):
    first, second, other = (
        reproduce(out=tmp_path / name, claims=CLAIMS, fidelities=("print",), seed=seed)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert without_seconds(first) == without_seconds(second)
    assert first.charts == second.charts
    assert without_seconds(first) != without_seconds(other)


def test_another_seed_in_the_same_place_mixes_nothing(tmp_path: Path):
    alone = reproduce(out=tmp_path / "alone", claims=CLAIMS[:2], fidelities=("print",), seed=1)
    reproduce(out=tmp_path / "both", claims=CLAIMS[:2], fidelities=("print",), seed=0)
    after = reproduce(out=tmp_path / "both", claims=CLAIMS[:2], fidelities=("print",), seed=1)
    assert without_seconds(alone) == without_seconds(after)


def test_a_verdict_comes_before_the_cells_of_the_next_run(tmp_path: Path):
    calls: list[str] = []

    class Cells(NoProgress):
        def begin(self, name: str, total: int, done: int = 0) -> None:
            calls.append(f"cell {name}")

    def add(finding: Finding) -> None:
        calls.append(f"verdict {finding.id}")

    reproduce(out=tmp_path, claims=["fig6-falls", "fig7-order"], progress=Cells(), on_finding=add)
    verdicts = [place for place, call in enumerate(calls) if call.startswith("verdict")]
    assert len(verdicts) == 2
    assert any(call.startswith("cell") for call in calls[verdicts[0] :]), "the second claim's cells ran afterwards"
    calls.clear()
    reproduce(out=tmp_path, claims=["fig6-falls", "fig7-order"], progress=Cells(), on_finding=add)
    assert [call for call in calls if call.startswith("verdict")] != []


def test_only_what_a_claim_needs_is_run(tmp_path: Path):
    result = reproduce(out=tmp_path, claims=["fig6-falls"], fidelities=("print",))
    assert [(finding.id, finding.fidelity) for finding in result.findings] == [("fig6-falls", "print")]
    assert len(list((tmp_path / "cells").iterdir())) == len(TINY.fig6_k)
    assert [chart.where for chart in result.charts] == ["Figure 6"]


def test_cells_of_a_chart_run_with_the_claim_and_its_verdict_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    paper = reproduce_module.PAPERS["chowdhury2023"]
    checks = [
        replace(check, chart_prefixes=("fig6/",) if check.claim.id == "fig4-joint-ahead" else ())
        for check in paper.checks
    ]
    monkeypatch.setattr(reproduce_module, "PAPERS", {paper.id: replace(paper, checks=tuple(checks))})
    order: list[str] = []

    class Named(NoProgress):
        def begin(self, name: str, total: int, done: int = 0) -> None:
            order.append(name)

    reproduce(
        claims=["fig4-joint-ahead"],
        fidelities=["print"],
        out=tmp_path,
        preset="quick",
        progress=Named(),
        on_finding=lambda finding: order.append(finding.id),
    )
    last = order.index("fig4-joint-ahead")
    assert all("fig4/" in name for name in order[1:last])
    assert [name.split()[-1] for name in order[last + 1 :]] == ["fig6/N=20/10"], "the other is a cell of Figure 4"


def test_a_claim_is_checked_in_the_form_that_is_asked_for(tmp_path: Path):
    result = reproduce(claims=[("fig4-joint-ahead", "released"), "fig4-faster"], out=tmp_path, preset="quick")
    assert [(each.id, each.fidelity) for each in result.findings] == [
        ("fig4-joint-ahead", "released"),
        ("fig4-faster", "print"),
    ]
    both = reproduce(claims=[("fig4-joint-ahead", "print"), "fig4-joint-ahead"], out=tmp_path, preset="quick")
    assert [each.fidelity for each in both.findings] == ["print", "released"]


def test_cells_that_do_not_fit_in_the_time_limit_are_left_for_the_next_run(tmp_path: Path):
    """On a clock that takes ten seconds for a cell, and of which the first cell takes all but five."""
    now = [0.0]
    names: list[str] = []

    class Clocked(NoProgress):
        def begin(self, name: str, total: int, done: int = 0) -> None:
            if "/" in name:
                names.append(name)
                now[0] += 10

    def run(minutes: float) -> ReproduceResult:
        return reproduce(
            claims=["fig4-joint-ahead"],
            fidelities=["print"],
            out=tmp_path,
            preset="quick",
            progress=Clocked(),
            budget=TimeBudget(60 * minutes, clock=lambda: now[0]),
        )

    first = run(0.25)  # the second cell starts in time and ends after it
    assert len(names) == 2
    assert [each.verdict for each in first.findings] == ["not run here: did not fit in the time limit of 0.25 min"]
    assert first.notes[0].startswith("2 cells did not fit in 0.25 min: 2 take about 0.1 min")
    assert folder_status(tmp_path)[0].count("missing") == 2
    second = run(10)
    assert len(set(names)) == len(names) == 4, "finished cells do not run again"
    assert second.findings[0].decision != "not run here"
    assert not any("did not fit" in note for note in second.notes)
    assert without_seconds(second) == without_seconds(
        reproduce(claims=["fig4-joint-ahead"], fidelities=["print"], out=tmp_path / "other", preset="quick")
    )


def test_variants_that_do_not_fit_say_so(tmp_path: Path):
    result = reproduce(
        claims=["fig4-joint-ahead"],
        fidelities=["print"],
        out=tmp_path,
        preset="quick",
        vary=["neurons=3"],
        budget=TimeBudget(60, clock=iter(range(0, 10_000, 60)).__next__),
    )
    assert [each.decision for each in result.findings] == ["not run here"]
    assert {each.outcome.partition(":")[0] for each in result.variants} == {"not run here"}


def test_a_cell_starts_if_what_is_known_of_its_kind_fits():
    now = [0.0]
    budget = TimeBudget(100, clock=lambda: now[0])
    assert budget.fits("wide/pmoe/1000/0", 50), "nothing is known"
    budget.record("wide/pmoe/1000/0", 50, 40.0)
    budget.record("wide/pmoe/1000/1", 50, 60.0)
    budget.record("wide/wrn/1000/0", 50, 1.0)
    assert budget.estimate("wide/pmoe/1000/0", 50) == 40, "the same cell"
    assert budget.estimate("wide/pmoe/1000/2", 50) == 60, "the slower of two alike"
    assert budget.estimate("wide/pmoe/2000/0", 100) == 120
    assert budget.estimate("wide/vit/1000/0", 50) == 60
    assert not budget.fits("wide/pmoe/2000/0", 100)
    now[0] = 41.0
    assert not budget.fits("wide/pmoe/1000/2", 50)
    assert budget.fits("wide/wrn/1000/1", 50)
    now[0] = 100.0
    assert not budget.fits("theory", 0), "no time is left"
    assert budget.describe({"theory": 0}) == "1 cell did not fit in 1.66667 min: of 1 no like has run"


def test_the_full_preset_runs_in_the_order_of_the_campaign():
    plans = {id: {form: paper.plan("full", form) for form in get_args(Fidelity)} for id, paper in PAPERS.items()}
    for id, starts in FULL_ORDER:
        for start in starts:
            named = [check for check in PAPERS[id].checks if check.claim.id.startswith(start)]
            assert named, f"{start} names no claim of {id}"
            assert any(check.can_run(plans[id][form], "full") for check in named for form in check.fidelities)


def test_a_paper_of_which_nothing_was_asked_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    silent = replace(
        PAPERS["chowdhury2023"], id="silent", checks=(), notes=lambda preset, runner: ["a note of its own"]
    )
    monkeypatch.setattr(reproduce_module, "PAPERS", {**reproduce_module.PAPERS, "silent": silent})
    result = reproduce(out=tmp_path, claims=["fig6-falls"], fidelities=("print",))
    assert {finding.paper for finding in result.findings} == {"chowdhury2023"}
    assert {chart.paper for chart in result.charts} == {"chowdhury2023"}
    assert result.notes
    assert "a note of its own" not in result.notes


def test_variants_run_beside_the_papers_setting_and_leave_its_findings(tmp_path: Path):
    own = reproduce(out=tmp_path / "own", claims=["fig6-falls"], fidelities=("print",))
    result = reproduce(out=tmp_path / "varied", claims=["fig6-falls"], fidelities=("print",), vary=["k=9,8"])
    assert without_seconds(own) == without_seconds(result)
    assert own.variants == ()
    (variant,) = result.variants
    assert (variant.label, variant.finding) == ("k=9,8 added", result.findings[0])
    assert [(cell.name, cell.changed) for cell in variant.cells] == [
        ("fig6/N=20/8", False),
        ("fig6/N=20/9", True),
        ("fig6/N=20/10", False),
    ]
    assert all(cell.accuracy is not None and 0 <= cell.accuracy <= 100 for cell in variant.cells)
    assert variant.outcome.startswith("rule ")
    assert len(list((tmp_path / "varied" / "cells").iterdir())) == len(TINY.fig6_k) + 1, "k=8 is the paper's own"


def test_a_variant_measures_what_its_parameters_say(tmp_path: Path):
    given = {"claims": ["fig4-joint-ahead"], "fidelities": ("print",), "vary": ["k=3", "l=2"]}
    (variant,) = reproduce(out=tmp_path, **given).variants
    assert {cell.name for cell in variant.cells} == {"fig4/joint/20", "fig4/joint/40"}, "the CNN has neither"
    plan = shorter("quick", "print")
    expected = []
    for name in ("fig4/joint/20", "fig4/joint/40"):
        cell = replace(plan[name], model=replace(plan[name].model, experts=3, patches_per_expert=2))
        runner = Runner(ResultCache(tmp_path / "other"), None, device="cpu", seed=0, progress=NoProgress())
        expected.append(sum(cell.measure(runner)["accuracy"]) / TINY.printed_trials)
    assert [cell.accuracy for cell in variant.cells] == pytest.approx(expected)


def test_finished_variants_do_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = reproduce(out=tmp_path, claims=["fig6-falls"], fidelities=("print",), vary=["k=9"])

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a finished cell was run again")

    monkeypatch.setattr(chowdhury2023_cells, "train_trials", refuse)
    assert reproduce(out=tmp_path, claims=["fig6-falls"], fidelities=("print",), vary=["k=9"]) == first


def test_a_variant_that_this_machine_cannot_run_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with_mixtures(monkeypatch)
    given = {"claims": ["table2-rotate-cnn"], "preset": "short", "fidelities": ("print",)}
    (variant,) = reproduce(out=tmp_path, vary=["epochs=3"], **given).variants
    assert variant.outcome == "not run here: needs CIFAR-10's binary files under --data-dir and a GPU (--device cuda)"
    assert (variant.measured, variant.cells) == (None, ())


class Listener:
    def __init__(self) -> None:
        self.messages: list[str] = []
        self.begun: list[tuple[str, int]] = []
        self.advanced = 0
        self.open = 0

    def begin(self, name: str, total: int, done: int = 0) -> None:
        self.begun.append((name, total))
        self.open += 1

    def advance(self, amount: int, note: str = "") -> None:
        self.advanced += amount

    def end(self) -> None:
        self.open -= 1

    def log(self, message: str) -> None:
        self.messages.append(message)


def test_progress_adds_up(tmp_path: Path):
    progress = Listener()
    reproduce(out=tmp_path, claims=["fig4-joint-ahead"], fidelities=("print",), progress=progress)
    assert progress.begun[0] == ("all experiments", progress.advanced)
    assert sum(total for _, total in progress.begun[1:]) == progress.advanced
    assert progress.open == 0


MIXTURES = MixtureCell(Mixture.of("print", experts=4, filters=2), MixtureSchedule(3), 1, 2, 60, 60)


def with_mixtures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second paper: Chen et al., with small mixtures in setting 1 and the images as they are."""

    def plan(preset: str, fidelity: str) -> dict[str, object]:
        kinds = {"moe/cubic/s1": MIXTURES, "moe/identity/s1": replace(MIXTURES, samples=50)}
        return {**PAPERS["chen2022"].plan(preset, fidelity), **kinds}

    both = {**reproduce_module.PAPERS, "chen2022": replace(PAPERS["chen2022"], plan=plan)}
    monkeypatch.setattr(reproduce_module, "PAPERS", both)


def test_two_papers_share_one_bar_and_their_cells_carry_the_papers_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with_mixtures(monkeypatch)
    progress, claims = Listener(), ["fig4-joint-ahead", "table1-entropy-nonlinear", "table1-entropy-linear"]
    result = reproduce(out=tmp_path, claims=claims, fidelities=("print",), progress=progress)
    assert {(finding.paper, finding.id) for finding in result.findings} == {
        ("chowdhury2023", "fig4-joint-ahead"),
        ("chen2022", "table1-entropy-nonlinear"),
        ("chen2022", "table1-entropy-linear"),
    }
    assert all(finding.measured is not None for finding in result.findings)
    names = [name for name, _ in progress.begun]
    assert names[0] == "all experiments"
    assert names.count("all experiments") == 1
    assert {name.split()[0] for name in names[1:]} == {"chowdhury2023", "chen2022"}
    assert {"chen2022 print moe/cubic/s1", "chen2022 print moe/identity/s1"} <= set(names)
    assert progress.begun[0][1] == progress.advanced == sum(total for _, total in progress.begun[1:])
    assert progress.open == 0
    assert {path.name.partition("-")[0] for path in (tmp_path / "cells").iterdir()} == {"chowdhury2023", "chen2022"}


def test_notes_and_charts_are_of_the_papers_that_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with_mixtures(monkeypatch)
    result = reproduce(out=tmp_path, papers=["chen2022"], claims=["table1-entropy-nonlinear"], fidelities=("print",))
    assert [note for note in result.notes if note.startswith("Synthetic data")]
    assert {chart.paper for chart in result.charts} == {"chen2022"}


def cifar_in(folder: Path) -> Path:
    """Files under the names of CIFAR-10's, so that images are not what is missing."""
    folder.mkdir()
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        (folder / name).write_bytes(b"0")
    return folder


def test_what_is_in_the_way_is_the_verdict_and_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with_mixtures(monkeypatch)
    images = cifar_in(tmp_path / "images")
    claims = ["table2-rotate-cnn", "table2-why-low", "table1-nonlinear-s1"]
    for data_dir, reason in (
        (None, "not run here: needs CIFAR-10's binary files under --data-dir and a GPU (--device cuda)"),
        (images, "not run here: needs a GPU (--device cuda)"),
    ):
        result = reproduce(
            out=tmp_path / "out", claims=claims, preset="short", fidelities=("print", "released"), data_dir=data_dir
        )
        found = {(finding.id, finding.fidelity): finding for finding in result.findings}
        for claim in claims[:2]:
            assert (claim, "released") not in found, "the claim is about the printed rules"
            finding = found[claim, "print"]
            assert (finding.verdict, finding.measured, finding.seconds) == (reason, None, 0)
        assert found["table1-nonlinear-s1", "print"].measured is not None, "what can be run is run"
    assert not list((tmp_path / "out" / "cells").glob("*images*"))


def bring(out: Path, claims: tuple[str, ...]) -> None:
    """Cells of CIFAR-10 as a machine with a GPU and the images leaves them behind."""
    store = ResultCache(out / "cells")
    elsewhere = Runner(store, None, device="cuda", seed=0, progress=NoProgress())
    for name, cell in PAPERS["chen2022"].plan("short", "print").items():
        if name.startswith(claims) and isinstance(cell, ImageCell):
            spec = cell.spec(elsewhere)
            assert spec["data"] == CIFAR10_DIGEST
            accuracy = 80.0 + 4 * cell.mixture + 0.1 * cell.trial * cell.mixture
            kept = {"tested": 20_000, "accuracies": [60.0, accuracy], "losses": [1.0, 0.5]}
            store.get_or_run(f"chen2022 print {name}", spec, lambda kept=kept: kept)


def test_cells_brought_from_elsewhere_need_neither_gpu_nor_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with_mixtures(monkeypatch)
    bring(tmp_path, ("images/rotate/cnn/",))
    result = reproduce(out=tmp_path, claims=["table2-rotate-cnn", "table2-why-low"], preset="short")
    first, second = result.findings
    assert (first.id, first.verdict, first.measured) == ("table2-rotate-cnn", "holds", pytest.approx(4.1))
    # of the other claim only half of the cells are here
    assert second.verdict == "not run here: needs CIFAR-10's binary files under --data-dir and a GPU (--device cuda)"


def test_a_cell_that_is_lacking_of_those_brought_leaves_the_claim_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with_mixtures(monkeypatch)
    bring(tmp_path, ("images/rotate/cnn/single/", "images/rotate/cnn/mixture/0", "images/rotate/cnn/mixture/1"))
    (finding,) = reproduce(out=tmp_path, claims=["table2-rotate-cnn"], preset="short").findings
    assert finding.verdict == "not run here: needs CIFAR-10's binary files under --data-dir and a GPU (--device cuda)"


def test_a_damaged_cell_is_logged_and_run_again(tmp_path: Path):
    first = reproduce(out=tmp_path, claims=["fig4-joint-ahead"], fidelities=("print",))
    victim = sorted((tmp_path / "cells").iterdir())[0]
    victim.write_text(victim.read_text()[:-40])
    progress = Listener()
    again = reproduce(out=tmp_path, claims=["fig4-joint-ahead"], fidelities=("print",), progress=progress)
    assert without_seconds(again) == without_seconds(first)
    assert len(progress.messages) == 1
    assert victim.name in progress.messages[0]
    assert victim.with_name(f"{victim.name}.damaged").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "fast"}, "preset='fast' is unknown; use 'quick', 'short' or 'full'"),
        ({"papers": ["chowdhury"]}, "did you mean 'chowdhury2023'"),
        ({"claims": ["fig4-joint"]}, "did you mean 'fig4-joint-"),
        ({"fidelities": ["printed"]}, "did you mean 'print'"),
        ({"vary": ["experts"]}, "--vary='experts'; write it as NAME=VALUE,VALUE"),
        ({"vary": ["exprts=4"], "claims": ["fig6-falls"]}, r"experiments of fig6-falls; .*did you mean 'experts'"),
        ({"vary": ["l=17"], "claims": ["fig6-falls"]}, "l ≤ n fails: patches_per_expert=17"),
        ({"vary": ["k=4"], "claims": ["fig6-falls"], "fidelities": ["released"]}, "do not run with --preset quick"),
    ],
)
def test_what_is_unknown_is_refused_before_anything_runs(tmp_path: Path, arguments: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        reproduce(out=tmp_path / "out", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


# Run by the next test in a process of its own: the tiny paper, its findings as JSON, in a fork for each folder and
# moment that it is given. A fork kills itself when it is about to write a file while as many cells exist as its moment
# says: by what is done, not by the clock. Forks need no imports, and the process they come from computes nothing.
SCRIPT = """
import json, os, signal, sys
from dataclasses import asdict
from pathlib import Path
sys.path[:0] = {path!r}
import pytest
from moesaic.papers.reproduce import reproduce
from papers_tiny import CLAIMS, make_tiny

def run(out, moment):
    def die(event, arguments):
        if event == "os.link" and str(arguments[1]).endswith(".json") and len(list(out.glob("cells/*.json"))) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die)
    make_tiny(pytest.MonkeyPatch())
    result = reproduce(out=out, claims=CLAIMS)
    Path(out, "claims.json").write_text(json.dumps([asdict(f) | {{"seconds": None}} for f in result.findings]))

for line in sys.stdin:
    out, moment = json.loads(line)
    child = os.fork()
    if not child:
        code = 1
        try:
            run(Path(out), moment)
            code = 0
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_run_that_is_killed_and_repeated_ends_like_one_that_was_not(tmp_path: Path):
    (tmp_path / "papers_tiny.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    script = SCRIPT.format(path=[str(tmp_path), *sys.path])
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], env=environment, text=True, stdin=pipe, stdout=pipe) as forks:

        def start(out: str, dies_at: int = -1) -> int:
            assert forks.stdin is not None
            assert forks.stdout is not None
            print(json.dumps([str(tmp_path / out), dies_at]), file=forks.stdin, flush=True)
            return int(forks.stdout.readline())

        assert start("undisturbed") == 0
        cells = len(list((tmp_path / "undisturbed" / "cells").glob("*.json")))
        for moment in sorted(random.Random(0).sample(range(1, 3 * cells // 4), 2)):
            assert start("disturbed", moment) == -signal.SIGKILL
            assert len(list((tmp_path / "disturbed" / "cells").glob("*.json"))) == moment
        assert start("disturbed") == 0
    expected = json.loads((tmp_path / "undisturbed" / "claims.json").read_text())
    assert json.loads((tmp_path / "disturbed" / "claims.json").read_text()) == expected
