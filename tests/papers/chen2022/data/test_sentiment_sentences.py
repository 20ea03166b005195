"""Sentences come from CSV files as they stand there, and a file that cannot be right is refused with the place."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from moesaic.papers.chen2022.data.sentiment_sentences import SOURCES, SentenceSource, load_sentences, read_sentences

ENGLISH, FRENCH, RUSSIAN = SOURCES
PLAIN = SentenceSource("English", "plain.csv")


def write(folder: Path, text: str, name: str = "plain.csv") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    content = text.encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def three_languages(folder: Path, count: int = 10) -> Path:
    write(folder, "label,text\n" + "".join(f"{i % 2},text {i}\n" for i in range(count)), "sentiment140_en.csv.gz")
    write(folder, "label,text\n" + "".join(f"{i % 2},texte {i}\n" for i in range(count)), "french_tweets_fr.csv")
    rows = "".join(f"banks,{i % 3 - 1},текст {i}\n" for i in range(count))
    write(folder, f"domain,label,text\n{rows}", "sentirueval2016_ru.csv.gz")
    return folder


def test_three_languages_are_read_plain_and_packed_and_the_neutral_is_left_out(tmp_path):
    found = load_sentences(three_languages(tmp_path))
    assert found.names == ("English", "French", "Russian")
    assert np.bincount(found.languages).tolist() == [10, 10, 7]
    assert [found.texts[0], found.texts[10], found.texts[20]] == ["text 0", "texte 0", "текст 0"]
    assert found.labels[20:].tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert found.texts[21] == "текст 2"


def test_the_folder_may_be_the_one_above(tmp_path):
    three_languages(tmp_path / "sentiment")
    assert len(load_sentences(tmp_path)) == 27


def test_some_languages_can_be_asked_for_in_any_order(tmp_path):
    found = load_sentences(three_languages(tmp_path), languages=["Russian", "English"])
    assert found.names == ("Russian", "English")
    assert np.bincount(found.languages).tolist() == [7, 10]


def test_at_most_so_many_of_a_language_are_drawn_by_seed(tmp_path):
    three_languages(tmp_path)
    found, again, other = (load_sentences(tmp_path, most=8, seed=seed) for seed in (1, 1, 2))
    assert np.bincount(found.languages).tolist() == [8, 8, 7]
    assert found.texts == again.texts != other.texts
    assert found.digest == again.digest != other.digest
    assert set(found.texts) <= set(load_sentences(tmp_path).texts)


def test_a_drawn_sentence_keeps_its_label(tmp_path):
    whole, some = load_sentences(three_languages(tmp_path)), load_sentences(tmp_path, most=5)
    label = dict(zip(whole.texts, whole.labels.tolist(), strict=True))
    assert some.labels.tolist() == [label[text] for text in some.texts]


def test_repeated_and_blank_sentences_are_left_out(tmp_path):
    assert read_sentences(write(tmp_path, "label,text\n1,yes\n0,yes\n0,\n1,  \n0,no\n"), PLAIN) == {"yes": 1, "no": 0}


def test_commas_quotes_and_line_ends_inside_quotes_belong_to_the_text(tmp_path):
    path = write(tmp_path, 'label,text\n1,"one, ""two""\nthree"\n0,four\n')
    assert read_sentences(path, PLAIN) == {'one, "two"\nthree': 1, "four": 0}


def test_a_carriage_return_inside_a_text_does_not_end_its_row(tmp_path):
    assert read_sentences(write(tmp_path, "label,text\n1,one\rtwo\n0,three\n"), PLAIN) == {"one two": 1, "three": 0}


def test_files_with_windows_and_old_line_ends_and_a_mark_at_the_start_are_read(tmp_path):
    for text in ("label,text\r\n1,yes\r\n", "label,text\r1,yes\r", "\ufefflabel,text\n1,yes\n"):
        assert read_sentences(write(tmp_path, text), PLAIN) == {"yes": 1}


def test_columns_and_labels_can_be_ones_own(tmp_path):
    mine = SentenceSource("German", "plain.csv", text="review", label="stars", labels={"1": 0, "3": None, "5": 1})
    write(tmp_path, "stars,review\n5,gut\n3,naja\n1,schlecht\n")
    found = load_sentences(tmp_path, sources=[mine])
    assert (found.texts, found.labels.tolist(), found.names) == (("gut", "schlecht"), [1, 0], ("German",))


def test_a_split_is_four_fifths_and_a_fifth_and_its_own_for_each_seed_and_trial(tmp_path):
    found = load_sentences(three_languages(tmp_path, 100))
    train, test = found.split(seed=3)
    assert len(train) == round(0.8 * len(found))
    assert sorted([*train, *test]) == list(range(len(found)))
    assert train.tolist() == found.split(seed=3)[0].tolist()
    assert train.tolist() != found.split(seed=4)[0].tolist()
    assert train.tolist() != found.split(seed=3, trial=1)[0].tolist()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("label,tweet\n1,yes\n", r"plain\.csv: has no column 'text'; there is 'label', 'tweet'"),
        ("sentiment,text\n1,yes\n", "has no column 'label'; there is 'sentiment', 'text'"),
        ("", "has no column 'text'; there is none"),
        ("label,text\n1,yes\n2,no\n", "row 2 has the label '2'; for English the labels '0', '1' are known"),
        ("label,text\n1,yes\n,no\n", "row 2 has the label ''"),
        ("label,text\n1,yes\n1,no,way\n", "row 2 has 3 fields, the header 2; put quotes"),
        ('label,text\n1,yes\n1,"no\n', r"line 3 is no CSV \(unexpected end of data\)"),
    ],
    ids=["no text", "no label", "empty", "unknown label", "no label given", "a field too many", "an open quote"],
)
def test_a_file_that_cannot_be_right_is_refused_with_the_place(tmp_path, text, told):
    with pytest.raises(ValueError, match=told):
        read_sentences(write(tmp_path, text), PLAIN)


def test_a_file_in_another_encoding_is_refused_with_the_place(tmp_path):
    (tmp_path / "plain.csv").write_bytes("label,text\n1,été\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"plain\.csv: byte 13 is not UTF-8 .* save the file in that encoding"):
        read_sentences(tmp_path / "plain.csv", PLAIN)


def test_a_torn_gzip_file_is_refused_by_name(tmp_path):
    path = write(tmp_path, "label,text\n1,yes\n", "plain.csv.gz")
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(ValueError, match=r"plain\.csv\.gz: damaged gzip file .* fetch it again"):
        read_sentences(path, PLAIN)


def test_an_unknown_language_is_told_with_those_there_are(tmp_path):
    with pytest.raises(ValueError, match=r"language='Frensh' is unknown; .*did you mean 'French'"):
        load_sentences(tmp_path, languages=["Frensh"])


def test_no_language_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no language was given; use English, French, Russian"):
        load_sentences(tmp_path, languages=[])


def test_a_missing_file_is_told_with_the_places_that_were_looked_at(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no 'sentiment140_en\*\.csv\*' with English sentences in .*sentiment"):
        load_sentences(tmp_path)


def test_two_files_of_one_source_are_refused(tmp_path):
    write(three_languages(tmp_path), "label,text\n", "sentiment140_en2.csv")
    with pytest.raises(ValueError, match=r"fits sentiment140_en\.csv\.gz, sentiment140_en2\.csv"):
        load_sentences(tmp_path)
