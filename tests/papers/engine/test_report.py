"""The report shows what was claimed, measured and decided; it is self-contained and escapes all text."""

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from papers.engine.example_findings import CHARTS, FINDINGS, PAPERS, SECOND_CHARTS, SECOND_FINDINGS, finding

from moesaic.papers.chen2022.glossary import GLOSSARY
from moesaic.papers.engine.findings import Source
from moesaic.papers.engine.glossary import used_terms
from moesaic.papers.engine.report import write_report
from moesaic.report.chart import Chart, Counts, Group, Panel, Points, Series
from moesaic.report.chart_style import ON_DARK

NASTY = """<script>alert("1")</script><img src=x onerror='alert(2)'>&amp;{{ 7 * 7 }}</style></svg>"""


class Page(HTMLParser):
    """Tags with their attributes, and the text under each heading and in each claim."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.claims: dict[str, str] = {}
        self.text = ""
        self._claim: str | None = None
        self._hidden = self._depth = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._hidden += tag in ("style", "script")
        if "data-claim" in dict(attrs):
            self._claim, self._depth = dict(attrs)["data-claim"], 0
        self._depth += tag in ("details", "li")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("style", "script")
        self._depth -= tag in ("details", "li")
        if self._depth == 0:
            self._claim = None

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        self.text += f" {data}"
        if self._claim is not None:
            self.claims[self._claim] = self.claims.get(self._claim, "") + f" {data}"


def words(text: str) -> str:
    return " ".join(text.split())


def written(folder: Path, **given: Any) -> str:
    given = {"findings": FINDINGS, "charts": (), "papers": PAPERS} | given
    write_report(folder / "report.html", **given)
    return (folder / "report.html").read_text("utf-8")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report on two papers, which both have a Figure 4 and a claim named alike."""
    folder = tmp_path_factory.mktemp("both")
    return written(folder, findings=FINDINGS + SECOND_FINDINGS, charts=CHARTS + SECOND_CHARTS)


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(
        tmp_path_factory.mktemp("report"),
        charts=CHARTS,
        notes=["Two trials instead of five."],
        command="moesaic reproduce --preset quick",
        machine="A processor, 2 cores",
    )


def test_every_claim_is_there_with_its_numbers_verdicts_and_rule(html: str):
    claims = {name: words(text) for name, text in Page(html).claims.items()}
    assert set(claims) == {each.id for each in FINDINGS}
    for each in FINDINGS:
        text = claims[each.id]
        assert each.statement in text
        assert each.rule in text
        assert each.decision in text or each.decision == "not run here"
    assert "as printed 60 52.0 (48.3 to 57.9) holds as released 60 31.2 (25.0 to 38.4) holds" in claims["samples"]
    assert "2.31 (0.40 to 4.20) partly at 300 samples, not at 1000" in claims["separate-beats-cnn"]
    part = words(Page(html).text)
    assert "Not run here: 1 claims 1 claim: needs --preset short" in part


def test_the_summary_comes_first_and_counts_the_verdicts(html: str):
    text = words(Page(html).text)
    counts = "4 claims were tested, in up to 3 forms each, with the preset quick. Of 8 verdicts, 6 hold"
    assert text.index(counts) < text.index("One square for each claim") < text.index("The rule that decides")
    assert "1 claim was not run here." in text
    assert "print as the paper's text says 3 hold 1 partly 1 not run here" in text


def test_each_claim_has_a_square_with_a_stripe_for_each_form(html: str):
    squares = re.findall(r'<a class="square" href="#([^"]+)" title="([^"]+)".*?>(.*?)</a>', html)
    assert [anchor for anchor, *_ in squares] == [
        f"claim-chowdhury2023-{name}" for name in dict.fromkeys(each.id for each in FINDINGS)
    ]
    stripes = {anchor: re.findall('<i class="([^"]+)"', inside) for anchor, _, inside in squares}
    assert stripes["claim-chowdhury2023-samples"] == ["holds", "holds", "holds"]
    assert stripes["claim-chowdhury2023-experts"] == ["not-run-here", "not-run-here"]
    label = dict(each[:2] for each in squares)["claim-chowdhury2023-samples"]
    assert label.startswith("Joint-training pMoE reaches 95 % test accuracy")
    assert label.endswith("holds")


def test_a_claim_says_in_one_line_what_the_paper_gives_and_what_was_measured(html: str):
    text = words(Page(html).claims["samples"])
    assert (
        "Paper: 60. Measured: 52.0 (48.3 to 57.9) as printed, 31.2 (25.0 to 38.4) as released, "
        "18.6 (15.2 to 22.3) with our settings."
    ) in text
    assert text.index("Paper: 60.") < text.index("The rule that decides")


def test_the_first_chart_opens_the_page_and_is_not_repeated(html: str):
    first = CHARTS[0].panels[0].title
    assert html.index("chowdhury2023-figure-4-0-figure_1") < html.index('data-claim="samples"')
    assert html.count("chowdhury2023-figure-4-0-figure_1") == html.count('id="chowdhury2023-figure-4-0-figure_1"')
    assert f"panel 1 of {len(CHARTS[0].panels)}: {first}" in html


def test_claims_that_were_not_run_take_a_line_each_under_one_fold(html: str):
    fold = html[html.index('<details class="card unrun"') :]
    assert 'data-claim="experts"' in fold
    assert html.count('data-claim="experts"') == 1
    assert '<table class="findings">' not in fold


def test_a_claim_of_our_own_is_not_attributed_to_the_paper(tmp_path: Path):
    own = finding(fidelity="best", published=None, verdict="partly: at most sizes")
    text = words(Page(written(tmp_path, findings=[own])).text)
    assert "A claim of our own. Measured: 52.0 (48.3 to 57.9) with our settings. Partly: at most sizes" in text


def test_a_chart_stands_with_the_claims_of_its_place(html: str):
    page = html[html.index('id="chowdhury2023-figure-5"') :]
    assert page.index("chowdhury2023-figure-5-0-figure_1") < page.index("</section>")
    assert html.count("<svg") == sum(len(chart.panels) for chart in CHARTS)
    for chart in CHARTS:
        assert chart.caption in words(Page(html).text)


def test_a_chart_without_claims_is_shown_all_the_same(tmp_path: Path):
    html = written(tmp_path, findings=[finding()], charts=[replace(CHARTS[2], where="Appendix Q")])
    assert "Appendix Q" in Page(html).text
    assert html.count("<svg") == 1


def test_notes_command_and_machine_are_shown(html: str):
    text = Page(html).text
    for shown in ("Two trials instead of five.", "moesaic reproduce --preset quick", "A processor, 2 cores"):
        assert shown in text


def test_fidelities_and_verdicts_are_explained(html: str):
    text = words(Page(html).text)
    text = text[text.index("Fidelities and verdicts") :]
    for meaning in ("as the paper's text says", "as its authors' code does", "our own", "does not meet the rule"):
        assert meaning in text


def test_the_overview_leads_to_the_words_of_the_field(html: str):
    assert "every expert looks only at the patches its router picks" in words(Page(html).text)
    assert html.index('href="#paper-chowdhury2023-terms"') < html.index('<a class="square"')


def test_only_words_that_occur_are_explained(tmp_path: Path):
    text = words(Page(written(tmp_path, findings=[finding(statement="Accuracy peaks at l* = 6.")])).text)
    assert "Terms: l* l* the least l with which an expert is sure to get the discriminative patch Figure" in text
    plain = written(tmp_path, findings=[finding(statement="A blank slate, kept likely, all well.")])
    assert "Terms" not in Page(plain).text


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("Separate-training pMoE", "separate training"),
        ("the separately trained router", "separate training"),
        ("pMoE, joint training", "joint training"),
        ("Number of experts k", "k"),
        ("l\u00a0= 6", "l"),
        ("l = 6", "l"),
        ("error grows like k to the power 0.25", "exponent"),
        ("As long as l* = Ω(1), nothing", "Ω(1)"),
    ],
)
def test_a_word_is_found_in_any_of_its_forms(text: str, word: str):
    line = Series(text, "joint", (1.0,), (1.0,))
    bare = Chart("c", "p", "Figure 1", "", "", (Panel("", "", "", (line,)),))
    for where in (bare, replace(bare, caption=text, panels=()), Chart("c", "p", "", text, "", (Panel("", text, ""),))):
        assert word in used_terms([], [where])
    for panel in (
        Panel(text, "", ""),
        Panel("", "", "", counts=Counts((text,), ("",), ((1.0,),))),
        Panel("", "", "", points=Points((Group(text, "", (), ()),))),
    ):
        assert word in used_terms([], [replace(bare, panels=(panel,))])
    assert word in used_terms([finding(statement=text)], [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The dispatch entropy of nonlinear MoE falls", {"mixture", "linear and nonlinear", "dispatch entropy"}),
        ("The mixture of two CNNs on CIFAR-10-Rotate", {"mixture", "CNN", "CIFAR-10-Rotate"}),
        ("Single nonlinear models stay below", {"single network", "linear and nonlinear"}),
        ("Single (linear), 512 filters", {"single network", "linear and nonlinear", "filter"}),
        ("The load balancing loss is not the key", {"load balancing"}),
        ("An expert's inner product with the feature signal", {"expert", "inner product", "feature signal"}),
        ("router weights against center signals in settings 1 and 2", {"router", "centre signal", "setting"}),
        ("The constant M² of Lemma 5.1", {"M"}),
        ("Routing by sample, with M = 8", {"M"}),
    ],
)
def test_the_second_paper_has_words_of_its_own(text: str, words: set[str]):
    assert used_terms([finding(statement=text, paper="chen2022")], [], GLOSSARY).keys() == words


def test_a_word_means_what_its_paper_says():
    meanings = [used_terms([finding(statement="the router")], [], glossary) for glossary in ((), GLOSSARY)]
    assert meanings[0].keys() == meanings[1].keys() == {"router"}
    assert "scores all patches" in meanings[0]["router"]
    assert "scores the experts" in meanings[1]["router"]


def test_the_page_loads_nothing_and_runs_its_own_script_alone(html: str):
    page = Page(html)
    policies = [attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policies
    assert policies[0] is not None
    assert policies[0].startswith("default-src 'none'")
    (script,) = re.findall("<script>(.*?)</script>", html, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policies[0].endswith(f"script-src 'sha256-{digest}'")
    for tag, attrs in page.tags:
        assert tag not in {"link", "iframe", "object", "embed", "base", "form"}
        for name, value in attrs.items():
            assert not name.startswith("on")
            if name in {"src", "href", "xlink:href", "srcset", "action"}:
                assert value is not None
                assert value.startswith(("#", "data:"))
    assert not re.search(r"url\((?!#)|@import", html)


def test_links_within_the_page_lead_somewhere(html: str):
    page = Page(html)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = {attrs["href"] for tag, attrs in page.tags if tag == "a"}
    assert links
    assert links <= {f"#{each}" for each in ids}


def full_of(text: str, folder: Path) -> str:
    """A report with ``text`` wherever a text may be."""
    found = finding(id=text, where=text, statement=text, published=text, rule=text, verdict=f"partly: {text}")
    line = Series(text, text, (1.0, 2.0), (2.0, 3.0))
    group = Group(text, text, (1.0,), (1.0,), "o", text)
    panels = (
        Panel(text, text, text, (line,)),
        Panel(text, text, text, points=Points((group,))),
    )
    chart = Chart("c", "p", text, text, text, panels, columns=2, row_titles=(text,))
    given: dict[str, Any] = {
        "papers": [Source(text, text, text)],
        "notes": [text],
        "command": text,
        "machine": text,
    }
    return written(folder, findings=[replace(found, preset=text, paper=text)], charts=[chart], **given)


def test_whatever_is_given_is_shown_as_text(tmp_path: Path):
    nasty, plain = full_of(NASTY, tmp_path), full_of("innocent", tmp_path)
    assert Page(nasty).text.count(NASTY) == Page(plain).text.count("innocent") > 10
    without_drawings = [re.sub("<svg.*?</svg>", "", html, flags=re.DOTALL) for html in (nasty, plain)]
    assert len({tuple(tag for tag, _ in Page(html).tags) for html in without_drawings}) == 1
    assert "img" not in {tag for tag, _ in Page(nasty).tags}
    assert nasty.count("<script") == 1, "the page's own"


def test_one_paper_is_the_title_and_its_experiments_are_introduced(html: str):
    page = Page(html)
    assert words(page.text).count(PAPERS[0].title) == 2  # of the window, and of the page
    assert PAPERS[0].about in page.text
    assert PAPERS[1].title not in page.text


def test_several_papers_have_a_part_each_with_title_introduction_counts_and_words(both: str):
    text = words(Page(both).text)
    assert "Which claims hold? 8 claims were tested" in text
    parts = [text[text.rindex(paper.title) :] for paper in PAPERS]
    first = parts[0][: parts[0].rindex(PAPERS[1].title)]
    second = parts[1][: parts[1].index("Fidelities and verdicts")]
    for part, paper in ((first, PAPERS[0]), (second, PAPERS[1])):
        assert paper.about in part
        assert part.index("Terms") < part.index("The rule that decides")
    assert "scores all patches of a sample" in first
    assert "scores all patches of a sample" not in second
    assert "print as the paper's text says 3 hold 1 fails" in second
    assert "52.0 (48.3 to 57.9)" in first
    assert "99.61 (99.40 to 99.80)" not in first
    assert "What do the experts learn?" in second


def test_both_fidelities_stand_side_by_side(both: str):
    assert "as printed 99.46 99.61 (99.40 to 99.80) holds as released 99.46 99.4 (99.1 to 99.7) holds" in words(
        Page(both).text
    )


def test_places_of_the_same_name_have_different_links(both: str):
    page = Page(both)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {"chowdhury2023-figure-4", "chen2022-figure-4"} <= set(ids)
    assert {attrs["href"] for tag, attrs in page.tags if tag == "a"} <= {f"#{each}" for each in ids}


def test_places_that_would_have_one_id_get_two(tmp_path: Path):
    findings = [finding(str(i), where=where) for i, where in enumerate(("Lemma 5.1", "Lemma 5-1", "Lemma 5 1"))]
    page = Page(written(tmp_path, findings=findings))
    anchors = [attrs["aria-labelledby"] for tag, attrs in page.tags if "aria-labelledby" in attrs]
    assert len(set(anchors)) == 3


def test_a_chart_with_columns_has_them_on_the_page_and_one_legend(both: str):
    start = both.index("chen2022-figure-4-0-figure_1")
    figure = both[both.rindex("<figure", 0, start) : both.index("</figure>", start)]
    assert "--columns: 4;" in figure
    assert figure.count("<svg") == 9
    assert Page(figure).text.count("feature signal 3") == 1
    regions = both[both.index("chen2022-figure-1-0-figure_1") : both.index("chen2022-figure-1-3-figure_1")]
    assert "linear experts" in Page(regions).text


def test_a_table_without_lines_has_no_empty_legend(tmp_path: Path):
    table = next(chart for chart in SECOND_CHARTS if chart.id == "table-4")
    assert written(tmp_path, charts=[table]).count("<svg") == len(table.panels)


def test_scales_put_the_paper_and_the_measurement_where_they_belong(tmp_path: Path):
    html = written(tmp_path, findings=[finding(published=100.0, measured=50.0, interval=(0.0, float("inf")))])
    (paper,) = re.findall(r'class="paper" style="left: ([\d.]+)%', html)
    (dot,) = re.findall(r'class="dot" style="left: ([\d.]+)%', html)
    ((left, width),) = re.findall(r'class="interval open-high" style="left: ([\d.]+)%; width: ([\d.]+)%', html)
    # from −8 to 108, so that the ends keep off the border
    assert float(dot) == 50
    assert float(paper) == pytest.approx(100 * 108 / 116, abs=0.01)
    assert float(left) == pytest.approx(100 * 8 / 116, abs=0.01)
    assert float(left) + float(width) == pytest.approx(100)


def test_a_scale_marks_zero_where_a_lead_may_go_either_way(tmp_path: Path):
    lead = finding(published="ahead", measured=10.0, interval=(-10.0, 30.0))
    html = written(tmp_path, findings=[lead])
    (zero,) = re.findall(r'class="zero" style="left: ([\d.]+)%', html)
    assert float(zero) == pytest.approx(100 * 13.2 / 46.4, abs=0.01)
    assert 'class="zero"' not in written(tmp_path, findings=[replace(lead, interval=(5.0, 15.0))])


def test_an_interval_without_end_goes_on_beyond_the_scale(tmp_path: Path):
    html = written(tmp_path, findings=[finding(published=1.0, measured=2.0, interval=(0.0, float("inf")))])
    assert 'class="interval open-high"' in html
    assert 'open-low"' not in html.replace(".open-low", "")


@pytest.mark.parametrize("measured", [None, 0.0])
def test_a_claim_without_numbers_to_compare_has_no_scale(tmp_path: Path, measured: float | None):
    html = written(tmp_path, findings=[finding(published="above", measured=measured, interval=None)])
    assert 'class="dot"' not in html


def test_different_rules_say_whose_they_are(tmp_path: Path):
    html = written(tmp_path, findings=[finding(rule="one"), finding(fidelity="best", rule="another")])
    assert "as printed: one with our settings: another" in words(Page(html).text)


def test_one_form_and_one_rule_need_no_mention(tmp_path: Path):
    text = words(Page(written(tmp_path, findings=[finding(rule="the only one")])).text)
    assert "1 claim was tested, with the preset quick. Of 1 verdict, 1 holds." in text
    assert "as printed: the only one" not in text


def test_a_run_without_findings_is_a_report_too(tmp_path: Path):
    assert "No claim was tested." in Page(written(tmp_path, findings=[])).text


def test_the_same_results_give_the_same_report_and_no_half_file_stays(tmp_path: Path):
    first, second = written(tmp_path, charts=CHARTS[2:]), written(tmp_path, charts=CHARTS[2:])
    assert first == second
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_a_dark_page_exchanges_ink_alone(tmp_path: Path):
    text = written(tmp_path, charts=CHARTS)
    assert set(ON_DARK) == {"ink", "line"}
    exchanged = re.findall(r"--([\w-]+): [^;]*;", text[text.index("prefers-color-scheme: dark") :].split("* {")[0])
    assert {name.removeprefix("chart-") for name in exchanged if name.startswith("chart-")} == set(ON_DARK)
    assert not [name for name in exchanged if name.endswith("-mark")]
