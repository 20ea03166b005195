"""Embeddings use nothing of the texts they are not fitted to, and say what they are."""

import sys
from types import ModuleType

import numpy as np
import pytest

from moesaic.papers.chen2022.data.sentence_embeddings import embed_sentences

ENGLISH = [
    f"the {thing} was {how} and I am {mood}"
    for thing in ("film", "day", "food")
    for how in ("good", "bad", "odd")
    for mood in ("happy", "tired")
]
FRENCH = [
    f"le {thing} était {how} et je suis {mood}"
    for thing in ("film", "jour", "repas")
    for how in ("bon", "nul")
    for mood in ("heureux", "fatigué", "triste")
]


def test_vectors_have_length_1_and_texts_of_a_language_lie_close():
    values, _ = embed_sentences(ENGLISH + FRENCH, dims=4)
    assert values.shape == (36, 4)
    assert values.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(values, axis=1), 1, rtol=1e-5)
    alike = values @ values.T - 2 * np.eye(36)
    assert (alike.argmax(1)[:18] < 18).all()
    assert (alike.argmax(1)[18:] >= 18).all()


def test_texts_that_are_not_for_training_change_nothing():
    train = list(range(0, 36, 2))
    texts = ENGLISH + FRENCH
    others = [text if i in train else f"something else {i}" for i, text in enumerate(texts)]
    first, second = (embed_sentences(each, train, dims=4).values for each in (texts, others))
    np.testing.assert_array_equal(first[train], second[train])
    assert not np.allclose(first[1], second[1])


def test_a_text_of_which_nothing_is_known_is_zero():
    values, _ = embed_sentences([*ENGLISH, "щщщ"], range(len(ENGLISH)), dims=2)
    assert values[-1].tolist() == [0.0, 0.0]
    assert np.isfinite(values).all()


def test_the_same_texts_give_the_same_vectors():
    np.testing.assert_array_equal(embed_sentences(ENGLISH, dims=3).values, embed_sentences(ENGLISH, dims=3).values)


def test_more_dimensions_than_there_is_room_for_are_refused_with_the_number_that_fits():
    with pytest.raises(
        ValueError, match=r"dims=99, but 18 training texts with \d+ n-grams have room for 18; use dims=18"
    ):
        embed_sentences(ENGLISH, dims=99)


@pytest.mark.parametrize(
    ("texts", "train", "told"),
    [
        ([], None, "there are 0 texts"),
        (["a", "b"], [], "0 training texts"),
        (["", " "], None, "no n-gram in 2 training"),
    ],
)
def test_texts_that_hold_nothing_are_refused(texts, train, told):
    with pytest.raises(ValueError, match=told):
        embed_sentences(texts, train, dims=1)


def test_a_named_model_that_is_not_installed_is_told_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ImportError, match="pip install sentence-transformers, or leave model out"):
        embed_sentences(["a"], model="tiny")


def test_a_named_model_is_asked_for_all_texts_and_named_in_what_is_told(monkeypatch):
    class SentenceTransformer:
        def __init__(self, name: str) -> None:
            assert name == "tiny"

        def encode(self, texts: list[str], show_progress_bar: bool) -> np.ndarray:
            return np.array([[3.0, 4.0 * len(text)] for text in texts])

    package = ModuleType("sentence_transformers")
    package.SentenceTransformer = SentenceTransformer
    monkeypatch.setitem(sys.modules, "sentence_transformers", package)
    values, told = embed_sentences(["a", "b"], model="tiny")
    np.testing.assert_allclose(values, [[0.6, 0.8], [0.6, 0.8]], rtol=1e-6)
    assert told == "Embedding: the pretrained model tiny, 2 dimensions."
