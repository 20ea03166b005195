"""A comparison for people: verdicts a newcomer understands, a table, charts, and a page that needs nothing else."""

import json
import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from training.example_comparison import comparison

from moesaic.report import write_figures
from moesaic.report.chart import read_charts, write_charts
from moesaic.report.comparison_charts import comparison_charts
from moesaic.report.comparison_report import derived_from, print_comparison, write_comparison_report
from moesaic.report.comparison_sentences import outcome, verdict, work
from moesaic.training.comparison_result import Comparison, write_comparison
from moesaic.training.paired_comparison import paired_comparisons

SIZES = (250, 500, 1000)
CNN, AHEAD = [[70.0, 70.6, 69.5], [80.1, 79.5, 80.4], [90.2, 89.6, 90.4]], [[80.0, 80.4, 79.7], [90.0] * 3, [95.0] * 3]
LEVEL = [[70.5, 69.9, 70.3], [79.6, 80.3, 80.2], [90.0, 90.1, 89.7]]


def first_verdict(found: Comparison) -> str:
    return verdict(found, paired_comparisons(found)[0])


def page_of(tmp_path, found: Comparison, **more: str) -> str:
    write_comparison_report(
        tmp_path / "report.html", found, comparison_charts(found, paired_comparisons(found)), **more
    )
    return (tmp_path / "report.html").read_text("utf-8")


def words_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page.split("</head>")[1]))


def printed(found: Comparison, width: int = 200) -> str:
    console = Console(file=StringIO(), width=width)
    print_comparison(found, console)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_verdict_says_how_many_labels_are_saved_at_which_accuracy():
    text = first_verdict(comparison(SIZES, CNN, AHEAD))
    assert re.fullmatch(r"On faces, pmoe reaches 90 % with 49 % \[\d\d, \d\d\] fewer labels than cnn\.", text)


def test_the_baseline_can_win():
    found = comparison(SIZES, AHEAD, CNN)
    assert "cnn reaches 90 % with" in first_verdict(found)
    assert "fewer labels than pmoe" in first_verdict(found)
    assert outcome(paired_comparisons(found)[0]) == "cnn saves labels"


def test_a_verdict_says_when_the_difference_is_not_significant():
    found = comparison(SIZES, CNN, LEVEL)
    assert first_verdict(found) == "On faces, cnn and pmoe are level within 0.4 points (3 trials)."
    assert outcome(paired_comparisons(found)[0]) == "level"
    said = printed(found)
    assert "the interval contains 0, so this may be chance" in said
    assert "Which network should I use? cnn: no other network is more accurate." in said
    assert "Does routing help on these images? It makes no difference of more than 0.4 points." in said


def test_a_verdict_says_what_is_certain_where_the_saving_is_not():
    # ahead, but both are where they end from the start
    found = comparison((250, 500), [[90.0, 90.1], [90.0, 90.1]], [[91.0, 91.1], [91.0, 91.1]])
    text = first_verdict(replace(found, samples=(250,), runs=tuple(run for run in found.runs if run.samples == 250)))
    assert "pmoe is 1.0 [1.0, 1.0] points more accurate than cnn with the same labels; how many labels" in text
    assert "is unknown: both are at" not in text or "try fewer" in text


def test_a_saving_without_a_limit_is_told_as_a_bound():
    found = comparison(SIZES, [[60.0, 60.2]] * 3, [[80.0, 80.4]] * 3)
    assert first_verdict(found) == (
        "On faces, pmoe with 250 labels is more accurate than cnn with 1,000: it saves at least 75 % of the labels."
    )


def test_work_names_samples_level_and_both_ratios():
    pair = paired_comparisons(comparison(SIZES, CNN, AHEAD))[0]
    assert pair.work is not None
    text = work(pair, pair.work)
    assert re.search(
        r"With 1,000 labels, pmoe takes 0\.\d+ \[.*\] times the training FLOPs of cnn to reach 89 % accuracy", text
    )


def test_the_table_has_a_row_for_each_number_of_labels_and_a_column_for_each_model():
    said = printed(comparison(SIZES, CNN, AHEAD))
    assert re.search(r"labels\s+cnn\s+pmoe\s+lead", said)
    assert re.search(r"1,000\s+90\.1 \[89\.0, 91\.1\]\s+95\.0 \[95\.0, 95\.0\]\s+4\.9 \[3\.9, 6\.0\]", said)
    assert "fewer labels than cnn" in said


def test_several_models_have_a_line_each_under_every_number_of_labels():
    said = printed(comparison(SIZES, CNN, AHEAD, LEVEL), width=80)
    assert re.search(r"labels\s+network\s+accuracy\s+lead over cnn", said)
    assert re.search(r"1,000\s+cnn\s+90\.1 \[.*\]\s*\n\s+pmoe\s+95\.0 \[.*\]\s+4\.9 \[3\.9, 6\.0\]\s*\n\s+third", said)


def test_names_are_no_markup_on_the_console():
    found = comparison(SIZES, CNN, AHEAD, data="[bold]faces[/bold]")
    assert "On [bold]faces[/bold], pmoe" in printed(found)


def test_charts_are_read_as_they_were_written_and_draw(tmp_path):
    found = comparison(SIZES, CNN, AHEAD, groups=("smiling, black hair", "smiling, blond"))
    charts = comparison_charts(found, paired_comparisons(found))
    write_charts(tmp_path / "charts.json", charts)
    assert read_charts(tmp_path / "charts.json") == charts
    assert {path.name for path in write_figures(tmp_path, charts)} == {
        f"{name}.{kind}" for name in ("labels", "work", "groups") for kind in ("png", "svg")
    }
    labels, work, groups = charts
    assert [line.label for line in labels.panels[0].series] == ["cnn", "pmoe"]
    assert labels.panels[0].series[0].x == SIZES
    assert labels.panels[0].series[0].y[0] == pytest.approx(sum(CNN[0]) / 3)
    assert labels.panels[0].level == 90
    assert [panel.title for panel in groups.panels] == ["smiling, black hair", "smiling, blond"]
    # to the end of training: 12 tests of 1,000 images, six operations for each of 5 million multiply-adds
    assert work.panels[0].series[0].x[-1] == pytest.approx(12 * 1000 * 6 * 5_000_000 / 1e9)
    assert work.panels[0].x_label == "training GFLOPs"
    assert work.panels[1].series[0].x[-1] == pytest.approx(24.0)


def test_the_page_begins_with_the_verdict_and_says_how_it_was_found(tmp_path):
    found = comparison(SIZES, CNN, AHEAD, notes=("3 files were skipped.",))
    page = page_of(tmp_path, found, command="moesaic compare faces --trials 3")
    assert f"<h1>{first_verdict(found)}</h1>".replace(" %", "\u00a0%") in page
    text = words_of(page)
    for words in (
        "was trained 3 times with 250, 500 and 1,000 of 2,000 labelled images of faces",
        "tested on 500 other images",
        "a processor, 2 cores, CPU",
        "epochs 12, batch size 32, lr 0.1, milestones 0.5, 0.75",
        "3 files were skipped.",
        "moesaic compare faces --trials 3",
    ):
        assert words in text
    assert "ema" not in text


def test_the_page_loads_nothing_and_has_no_scripts(tmp_path):
    page = page_of(tmp_path, comparison(SIZES, CNN, AHEAD))
    assert "default-src 'none'" in page
    assert "<script" not in page
    assert not re.search(r"""(?:src|href)=["'](?!#)""", page.replace("xlink:href", "href"))


def test_names_are_escaped_on_the_page(tmp_path):
    found = comparison(SIZES, CNN, AHEAD, data="<b>faces</b>", groups=("<i>one</i>", "two"), notes=("<u>note</u>",))
    page = page_of(tmp_path, found)
    assert "&lt;b&gt;faces&lt;/b&gt;" in page
    assert "&lt;u&gt;note&lt;/u&gt;" in page
    for markup in ("<b>", "<i>", "<u>"):
        assert markup not in page


def test_groups_have_a_table_only_where_they_differ_from_classes(tmp_path):
    assert "Accuracy within groups" not in page_of(tmp_path, comparison(SIZES, CNN, AHEAD))
    text = words_of(page_of(tmp_path, comparison(SIZES, CNN, AHEAD, groups=("black hair", "blond"))))
    assert "Accuracy within groups" in text
    assert re.search(r"blond 85\.1 \[", text)


def test_each_of_several_models_has_a_verdict(tmp_path):
    found = comparison(SIZES, CNN, AHEAD, LEVEL)
    text = words_of(page_of(tmp_path, found))
    assert "pmoe saves labels" in text
    assert "cnn and third are level within 0.4 points (3 trials)" in text
    assert "lead of third" in text
    # the headline is the verdict on two networks, and the choice among more
    assert "<h1>On faces, pmoe reaches" in page_of(tmp_path, comparison(SIZES, CNN, AHEAD))
    assert "<h1>On faces, use pmoe: it is 8.3 [" in page_of(tmp_path, found)
    behind = comparison(SIZES, CNN, LEVEL, [[60.0] * 3, [70.0] * 3, [80.0] * 3])
    assert "<h1>On faces, use cnn: no other network is more accurate.</h1>" in page_of(tmp_path, behind)


def test_of_frozen_backbones_the_time_is_told_and_not_the_operations(tmp_path):
    found = comparison(SIZES, CNN, AHEAD)
    assert "FLOP" in words_of(page_of(tmp_path, found))
    frozen = replace(found, recipe={**found.recipe, "trainable": "head"})
    text = words_of(page_of(tmp_path, frozen))
    assert "FLOP" not in text
    assert "times the training time of cnn to reach" in text
    assert "FLOP" not in printed(frozen)


def test_heads_and_their_learning_rates_are_explained_in_words(tmp_path):
    found = comparison(SIZES, CNN, AHEAD)
    head = replace(found.models[1], spelling="timm/resnet18:pretrained:head=routed")
    rates = {"routed": 0.03, "mean": 0.003}
    found = replace(found, models=(found.models[0], head), recipe={**found.recipe, "head_lrs": rates})
    text = words_of(page_of(tmp_path, found))
    assert "head=routed: a head that has experts, each of which selects a few positions of the last feature map" in text
    assert "head lrs routed 0.03; mean 0.003" in text


def test_networks_named_after_their_heads_are_explained_where_they_first_appear(tmp_path):
    found = comparison(SIZES, CNN, AHEAD)
    heads = tuple(
        replace(model, name=name, spelling=f"timm/resnet18:{name}")
        for model, name in zip(found.models, ("head=mean", "head=routed"), strict=True)
    )
    runs = tuple(replace(run, model="head=mean" if run.model == "cnn" else "head=routed") for run in found.runs)
    found = replace(found, models=heads, runs=runs)
    for text in (words_of(page_of(tmp_path, found)).partition("Which network")[0], printed(found)):
        assert "head=mean takes the mean over all positions of the last feature map." in text
        assert "head=routed has experts, each of which selects a few positions of the last feature map." in text
    assert "takes the mean" not in printed(comparison(SIZES, CNN, AHEAD))


def test_what_follows_from_the_runs_is_in_result_json_and_does_not_depend_on_seconds(tmp_path):
    found = comparison(SIZES, CNN, AHEAD)
    slower = replace(
        found,
        runs=tuple(
            replace(run, curve=tuple(replace(each, seconds=7 * each.seconds) for each in run.curve))
            for run in found.runs
        ),
    )
    write_comparison(tmp_path / "result.json", found, derived_from(found))
    content = json.loads((tmp_path / "result.json").read_text("utf-8"))
    assert content["verdicts"] == [first_verdict(found)]
    assert content["accuracies"]["cnn"][2]["value"] == pytest.approx(90.0667, abs=1e-3)
    assert content["paired_comparisons"][0]["saving"]["saver"] == "pmoe"
    assert _timeless(derived_from(slower)) == _timeless(derived_from(found))


def _timeless(content):
    if isinstance(content, dict):
        return {name: _timeless(value) for name, value in content.items() if name != "seconds"}
    return [_timeless(each) for each in content] if isinstance(content, list | tuple) else content
