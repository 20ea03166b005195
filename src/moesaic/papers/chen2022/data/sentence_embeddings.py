"""Sentence embeddings by a pretrained model or, by default, by character n-grams.

Character n-grams need no download: texts with common endings and short words have similar vectors, which separates
languages well and sentiment a little. A pretrained multilingual model, as in Chen et al. 2022, represents sentiment far
better.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moesaic.argument_checks import check_positive

__all__ = ["Embeddings", "embed_sentences"]

_GRAMS = (2, 4)
_RAREST = 3
"""Minimum number of training texts with an n-gram; rarer n-grams are ignored."""


class Embeddings(NamedTuple):
    """Vectors of sentences, and a description of the method."""

    values: NDArray[np.float32]
    """(B, D), each of length 1; zeros for a text without known n-grams."""
    description: str
    """Description of the method, for the report."""


def embed_sentences(
    texts: Sequence[str],
    train: Sequence[int] | NDArray[np.int64] | None = None,
    *,
    model: str | None = None,
    dims: int = 256,
    seed: int = 0,
) -> Embeddings:
    """Returns a vector for each text.

    With ``model``, the name of a sentence-transformers model, by that model, in its own number of
    dimensions. Without, by the frequencies of 2 to 4 characters in a row within words (tf-idf),
    reduced to ``dims`` dimensions by truncated SVD, of which frequencies and SVD are fitted to
    the texts at the places ``train`` alone (None: to all), so that nothing of the others is used.

    >>> texts = ["good morning", "good evening", "good night", "bonne nuit", "bonne journée", "bonne soirée"]
    >>> values, description = embed_sentences(texts, dims=2)
    >>> values.shape, bool(values[0] @ values[1] > values[0] @ values[4])
    ((6, 2), True)
    >>> description
    'Embedding: tf-idf of 2 to 4 characters in a row, fitted to 6 training texts, reduced to 2 dimensions by SVD.'
    """
    if not texts:
        raise ValueError("embed_sentences: there are 0 texts; give at least 1")
    return _characters(texts, train, dims, seed) if model is None else _pretrained(texts, model)


def _pretrained(texts: Sequence[str], model: str) -> Embeddings:
    try:
        package: Any = import_module("sentence_transformers")
    except ImportError as missing:
        raise ImportError(
            f"embed_sentences: model={model!r} needs sentence-transformers, which is not installed; "
            "pip install sentence-transformers, or leave model out for character n-grams"
        ) from missing
    encoder = package.SentenceTransformer(model)
    values: NDArray[np.float32] = np.asarray(encoder.encode(list(texts), show_progress_bar=False), dtype=np.float32)
    return Embeddings(_unit(values), f"Embedding: the pretrained model {model}, {values.shape[1]} dimensions.")


def _characters(
    texts: Sequence[str], train: Sequence[int] | NDArray[np.int64] | None, dims: int, seed: int
) -> Embeddings:
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    check_positive("embed_sentences", dims=dims)
    known = texts if train is None else [texts[i] for i in train]
    if not known:
        raise ValueError("embed_sentences: 0 training texts to count n-grams in; give at least 1")
    rarest = min(_RAREST, len(known) // 100 + 1)
    vectorizer: Any = TfidfVectorizer  # its stubs know float64 alone
    count = vectorizer(analyzer="char_wb", ngram_range=_GRAMS, min_df=rarest, sublinear_tf=True, dtype=np.float32)
    try:
        frequencies: Any = count.fit_transform(known)
    except ValueError as nothing:
        raise ValueError(f"embed_sentences: no n-gram in {len(known)} training texts ({nothing})") from nothing
    limit = min(frequencies.shape)
    if dims > limit:
        raise ValueError(
            f"embed_sentences: dims={dims}, but {len(known)} training texts with {frequencies.shape[1]} n-grams have "
            f"room for {limit}; use dims={limit} or less, or more texts"
        )
    reduce: Any = TruncatedSVD(dims, n_iter=4, random_state=seed).fit(frequencies)
    values: NDArray[np.float32] = np.asarray(reduce.transform(count.transform(texts)), dtype=np.float32)
    low, high = _GRAMS
    description = (
        f"Embedding: tf-idf of {low} to {high} characters in a row, fitted to {len(known)} training texts, "
        f"reduced to {dims} dimensions by SVD."
    )
    return Embeddings(_unit(values), description)


def _unit(values: NDArray[np.float32]) -> NDArray[np.float32]:
    length = np.linalg.norm(values, axis=1, keepdims=True)
    return (values / np.where(length > 0, length, 1)).astype(np.float32)
