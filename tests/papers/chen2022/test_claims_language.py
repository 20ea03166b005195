"""The language experiment: its cell on small made-up files, and its rules at their limits."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moesaic.insight import DispatchTable
from moesaic.papers.chen2022.claims_language import CHECKS, PUBLISHED
from moesaic.papers.chen2022.experiments_language import LanguageCell, LanguageResult, plan, purity
from moesaic.papers.chen2022.figures_language import charts
from moesaic.papers.engine.paper import ExperimentResults
from moesaic.papers.engine.runner import Runner
from moesaic.training import NoProgress, ResultCache

SMALL = LanguageCell(
    trials=2, epochs=3, batch=32, most=60, dims=8, rates=(0.3,), router_rates=(1.0, 10.0), single_rates=(0.3, 1.0)
)
WORDS = {
    "sentiment140_en.csv": (("good", "love", "happy"), ("bad", "hate", "tired"), "the day with my {} was {} number {}"),
    "french_tweets_fr.csv": (("bon", "aime", "joie"), ("nul", "peur", "triste"), "le jour avec ma {} était {} fois {}"),
    "sentirueval2016_ru.csv": (("рад", "люблю"), ("плохо", "грустно"), "этот день с моей {} был {} раз {}"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data") / "sentiment"
    made.mkdir()
    for name, (glad, sad, frame) in WORDS.items():
        low = "-1" if "ru" in name else "0"
        rows = [f"{low},{frame.format(sad[i % len(sad)], sad[-1], i)}\n" for i in range(40)]
        rows += [f"1,{frame.format(glad[i % len(glad)], glad[-1], i)}\n" for i in range(40)]
        (made / name).write_text("label,text\n" + "".join(rows), encoding="utf-8")
    return made.parent


def runner(out: Path, folder: Path | None, seed: int = 0) -> Runner:
    return Runner(ResultCache(out), folder, device="cpu", seed=seed, progress=NoProgress())


@pytest.fixture(scope="module")
def measured(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LanguageResult:
    return runner(tmp_path_factory.mktemp("cells"), folder).run({"language": SMALL})["language"].result


def test_a_cell_measures_both_networks_in_every_trial_and_language(measured):
    assert measured.accuracy.shape == (2, 2)
    assert measured.by_language.shape == (2, 2, 3)
    assert [table.clusters for table in measured.dispatch] == [("English", "French", "Russian")] * 2
    assert [sum(table.load) for table in measured.dispatch] == [36, 36]  # a fifth of three times 60
    assert len(measured.points) == len(measured.languages) == len(measured.chosen) == 36
    assert measured.embedding_description.startswith("Embedding: tf-idf of 2 to 4 characters")
    assert measured.rates[0][0] in SMALL.single_rates
    assert measured.rates[1][1] in SMALL.router_rates


def test_overall_accuracy_is_that_of_the_languages_together(measured):
    for accuracy, by_language, table in zip(measured.accuracy, measured.by_language, measured.dispatch, strict=True):
        sizes = [sum(row) for row in table.counts]
        np.testing.assert_allclose(by_language @ sizes / sum(sizes), accuracy)


def test_words_that_tell_the_label_are_learnt_and_alphabets_are_clusters(measured):
    assert measured.accuracy.mean() > 70
    assert (measured.purity > 90).all()


def test_a_sentence_is_not_its_own_neighbour():
    pairs = torch.eye(3).repeat_interleave(2, 0)  # three pairs of equal vectors
    assert purity(pairs, torch.tensor([0, 0, 1, 1, 2, 2])) == 100
    assert purity(pairs, torch.tensor([0, 1, 0, 1, 0, 1])) == 0


def test_networks_never_see_a_test_sentence(folder, tmp_path, monkeypatch):
    seen: list[set[tuple[float, ...]]] = []
    train, evaluate = LanguageCell._train, LanguageCell._task
    tasks = []

    def spy_on_training(cell, part, *rest):
        seen.append({tuple(vector) for vector in part.x.tolist()})
        return train(cell, part, *rest)

    def spy_on_tasks(cell, *rest):
        tasks.append(evaluate(cell, *rest))
        return tasks[-1]

    monkeypatch.setattr(LanguageCell, "_train", spy_on_training)
    monkeypatch.setattr(LanguageCell, "_task", spy_on_tasks)
    replace(SMALL, trials=1, epochs=1).measure(runner(tmp_path, folder))
    test = {tuple(vector) for vector in tasks[0].test.x.tolist()}
    tuning, final = seen[:-2], seen[-2:]
    assert [len(part) for part in tuning] == [115] * 4  # four fifths of the training sentences, and those
    assert [len(part) for part in final] == [144] * 2  # four fifths of three times 60
    assert not any(part & test for part in seen)


def test_the_drawn_sentences_go_where_the_first_table_says(measured):
    for k, row in enumerate(measured.dispatch[0].counts):
        assert np.bincount(measured.chosen[measured.languages == k], minlength=4).tolist() == list(row)


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(folder, tmp_path, measured):
    again, other = (runner(tmp_path / str(seed), folder, seed).run({"": SMALL})[""].result for seed in (0, 1))
    np.testing.assert_array_equal(again.accuracy, measured.accuracy)
    assert again.dispatch == measured.dispatch != other.dispatch


def test_the_released_form_trains_too(folder, tmp_path):
    released = replace(SMALL, bias=True, softmax_twice=True, piece=4, balance=0.1)
    found = runner(tmp_path, folder).run({"": released})[""].result
    assert np.isfinite(found.accuracy).all()


def test_what_is_measured_is_plain_json(folder, tmp_path):
    kept = replace(SMALL, trials=1, epochs=1).measure(runner(tmp_path, folder))
    json.dumps(kept, allow_nan=False)


def test_without_the_files_the_obstacle_names_them_and_the_specification_is_still_there(tmp_path):
    for folder in (None, tmp_path):
        here = runner(tmp_path, folder)
        assert "sentirueval2016_ru*.csv*, in --data-dir" in (SMALL.missing_requirement(here) or "")
        assert SMALL.spec(here)["sentences"] is None


def test_with_the_files_there_is_no_obstacle_and_the_specification_tells_them_apart(folder, tmp_path):
    here = runner(tmp_path, folder)
    assert SMALL.missing_requirement(here) is None
    json.dumps(SMALL.spec(here))
    assert SMALL.spec(here) != replace(SMALL, most=50).spec(here)
    assert SMALL.spec(here)["sentences"] is not None


def test_a_model_that_is_not_installed_is_an_obstacle(folder, tmp_path):
    assert "pip install sentence-transformers" in (
        replace(SMALL, embedding="tiny").missing_requirement(runner(tmp_path, folder)) or ""
    )


def test_steps_count_every_epoch_that_is_trained(folder, tmp_path):
    class Counting(NoProgress):
        done = 0

        def advance(self, amount: int, note: str = "") -> None:
            self.done += amount

    here = runner(tmp_path, folder)
    here.progress = Counting()
    SMALL.measure(here)
    assert here.progress.done == SMALL.steps


@pytest.mark.parametrize(
    ("wrong", "told"),
    [({"piece": 3}, "dims=8 are no whole number of pieces of 3"), ({"rates": (1.0, 2.0)}, "equally many candidates")],
)
def test_cells_that_cannot_be_are_refused(wrong, told):
    with pytest.raises(ValueError, match=told):
        replace(SMALL, **wrong)


# Rules


def experiment(result: LanguageResult) -> ExperimentResults[LanguageResult]:
    return ExperimentResults({"language": SMALL}, {"language": result}, None)


def verdict(where: str, result: LanguageResult) -> str:
    (test,) = [test for test in CHECKS if test.claim.id == where]
    return test.evaluate(experiment(result)).verdict.partition(":")[0]


@pytest.mark.parametrize(
    ("lead", "expected"), [((1.0, 1.2, 0.9), "holds"), ((-1.0, -1.2, -0.9), "fails"), ((1.0, -1.0, 0.5), "undecided")]
)
def test_table_10_is_about_the_lead_of_the_mixture(measured, lead, expected):
    accuracy = np.array([[70.0 + i, 70.0 + i + each] for i, each in enumerate(lead)])
    assert verdict("tweets-lead", replace(measured, accuracy=accuracy)) == expected


def test_table_11_holds_for_the_papers_own_table_and_fails_for_a_blind_router(measured):
    blind = DispatchTable(PUBLISHED.clusters, ((10, 10, 10, 10), (10, 10, 10, 10), (5, 5, 5, 5)))
    assert verdict("tweets-by-language", replace(measured, dispatch=(PUBLISHED,) * 3)) == "holds"
    assert verdict("tweets-by-language", replace(measured, dispatch=(blind,) * 3)) == "fails"
    assert verdict("tweets-by-language", replace(measured, dispatch=(blind, PUBLISHED, PUBLISHED))) == "undecided"


@pytest.mark.parametrize(
    ("purity", "expected"),
    [((97.0, 98.0, 97.5), "holds"), ((80.0, 81.0, 79.0), "fails"), ((80.0, 99.0, 92.0), "undecided")],
)
def test_figure_8_is_about_neighbours_of_the_same_language(measured, purity, expected):
    assert verdict("tweets-clusters", replace(measured, purity=np.array(purity))) == expected


def test_published_values_are_those_of_the_tables():
    assert {test.claim.where: test.claim.published for test in CHECKS} == {
        "Table 10": 2.09,
        "Table 11": 0.473,
        "Figure 8": "clusters by language",
        "Our own": None,
    }


def test_the_papers_own_claims_need_texts_that_are_not_at_hand():
    named = [test for test in CHECKS if test.claim.where != "Our own"]
    assert len(named) == 3
    for test in named:
        assert not test.can_run(plan("full", "print"))
        assert test.missing.startswith("not run here: needs the paper's texts")


def test_the_full_preset_has_a_cell_for_each_form_of_the_paper_and_quick_has_none():
    assert [list(plan("short", fidelity)) for fidelity in ("print", "released", "best")] == [["language"]] * 2 + [[]]
    assert plan("quick", "print") == {}
    assert plan("short", "print") != plan("short", "released")


# Charts


def test_charts_show_every_test_sentence_once_in_each_panel(measured):
    table_10, table_11, figure_8 = charts({"print": experiment(measured), "released": experiment(measured)})
    assert [chart.where for chart in (table_10, table_11, figure_8)] == ["Table 10", "Table 11", "Figure 8"]
    assert len(table_11.panels) == 3
    assert table_11.panels[1].counts.values == measured.dispatch[0].counts
    for panel in figure_8.panels:
        assert sum(len(group.x) for group in panel.points.groups) == 36
    assert [line.y for line in table_10.panels[0].series] == [tuple(each) for each in measured.accuracy.T.tolist()]
    assert measured.embedding_description in figure_8.caption


def test_there_are_no_charts_without_results():
    assert charts({"print": ExperimentResults({}, {}, None)}) == []
