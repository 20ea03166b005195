"""Sentences in several languages, each labelled as positive or negative, from CSV files given by path.

For the experiment of Chen et al. 2022, Appendix A.4: one classifier for sentiment in English,
French and Russian, where the language is the cluster, unknown to the router. `SOURCES`
describes three files of public tweets; other files need a `SentenceSource` of their own.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from moesaic import keyed_random
from moesaic.argument_checks import check_choice, check_positive
from moesaic.validated_json import MAX_FILE_BYTES, InvalidFile, read_bytes, read_stream

__all__ = ["SOURCES", "SentenceSource", "Sentences", "find_sentences", "load_sentences", "read_sentences"]

_TRAIN_SHARE = 0.8
_FOLDERS = (".", "sentiment")
_GZIP_MAGIC = b"\x1f\x8b"
_PLAIN: Mapping[str, int | None] = MappingProxyType({"0": 0, "1": 1})


@dataclass(frozen=True)
class SentenceSource:
    """File and format of the sentences of a language."""

    language: str
    file: str
    """Glob pattern of the file name, such as "reviews_de*.csv*"; plain or gzip."""
    text: str = "text"
    """Column of the sentences."""
    label: str = "label"
    """Column of the labels."""
    labels: Mapping[str, int | None] = field(default_factory=lambda: _PLAIN, hash=False)
    """Class of each label in the file: 0 negative, 1 positive, None neutral (left out)."""


SOURCES: tuple[SentenceSource, ...] = (
    SentenceSource("English", "sentiment140_en*.csv*"),
    SentenceSource("French", "french_tweets_fr*.csv*"),
    SentenceSource("Russian", "sentirueval2016_ru*.csv*", labels=MappingProxyType({"-1": 0, "0": None, "1": 1})),
)
"""Tweets in three languages: Sentiment140 (balanced part), French tweets, SentiRuEval 2016."""


@dataclass(frozen=True, eq=False)
class Sentences:
    """Labelled sentences; made by `load_sentences`."""

    texts: tuple[str, ...]
    labels: NDArray[np.int64]
    """(B,): 0 negative, 1 positive."""
    languages: NDArray[np.int64]
    """(B,): indices into ``names``."""
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def split(self, seed: int = 0, trial: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the indices of training and test sentences, four fifths and one fifth, at random per trial.

        >>> five = Sentences(tuple("abcde"), np.zeros(5, np.int64), np.zeros(5, np.int64), ("English",))
        >>> train, test = five.split(seed=1)
        >>> len(train), sorted([*train.tolist(), *test.tolist()])
        (4, [0, 1, 2, 3, 4])
        """
        order = _shuffled("split of sentences", len(self), seed, trial)
        border = round(_TRAIN_SHARE * len(order))
        return order[:border], order[border:]

    @property
    def digest(self) -> str:
        """Digest of the sentences, independent of where the files are."""
        content = hashlib.sha256(repr((self.names, self.texts)).encode("utf-8", "surrogatepass"))
        content.update(self.labels.tobytes())
        content.update(self.languages.tobytes())
        return content.hexdigest()[:16]


def load_sentences(
    folder: str | Path,
    *,
    languages: Sequence[str] | None = None,
    sources: Sequence[SentenceSource] = SOURCES,
    most: int | None = None,
    seed: int = 0,
) -> Sentences:
    r"""Loads the sentences of some or all sources from CSV files in ``folder`` or in ``sentiment`` below it.

    Neutral sentences are left out, and so are blank ones and those that were there before in their
    language: no sentence is in training and test alike. With ``most``, at most so many of each
    language are drawn at random by ``seed``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "small_de.csv").write_text("stars,review\n5,sehr gut\n1,nie wieder\n3,geht so\n")
    ...     german = SentenceSource("German", "small_de.csv", "review", "stars", {"1": 0, "3": None, "5": 1})
    ...     found = load_sentences(folder, sources=[german])
    >>> found.texts, found.labels.tolist()
    (('sehr gut', 'nie wieder'), [1, 0])
    """
    if most is not None:
        check_positive("load_sentences", most=most)
    known = {source.language: source for source in sources}
    names = tuple(
        check_choice("load_sentences", "language", each, known) for each in (known if languages is None else languages)
    )
    if not names:
        raise ValueError(f"load_sentences: no language was given; use {', '.join(known) or 'your own sources'}")
    texts: list[str] = []
    labels: list[int] = []
    spoken: list[int] = []
    for place, name in enumerate(names):
        found = read_sentences(find_sentences(folder, known[name]), known[name])
        picked = list(found)
        if most is not None:
            order: list[int] = _shuffled(f"most {name}", len(picked), seed, 0).tolist()
            picked = [picked[i] for i in order[:most]]
        texts += picked
        labels += [found[text] for text in picked]
        spoken += [place] * len(picked)
    return Sentences(tuple(texts), np.array(labels, np.int64), np.array(spoken, np.int64), names)


def find_sentences(folder: str | Path, source: SentenceSource) -> Path:
    """Returns the file of a source; raises if there is none or more than one."""
    base = Path(folder).resolve()
    for below in _FOLDERS:
        found = sorted(path for path in (base / below).glob(source.file) if path.is_file())
        if len(found) > 1:
            raise ValueError(
                f"load_sentences: {source.file!r} for {source.language} fits {', '.join(p.name for p in found)} in "
                f"{base / below}; leave one of them there, or give a SentenceSource with a narrower pattern"
            )
        if found:
            return found[0]
    raise FileNotFoundError(
        f"load_sentences: no {source.file!r} with {source.language} sentences in {base} or in {base / _FOLDERS[1]}; "
        "put it there, leave the language out, or give a SentenceSource with your file's name"
    )


def read_sentences(path: str | Path, source: SentenceSource) -> dict[str, int]:
    """Reads sentences and labels (0 negative, 1 positive) from a CSV file, in the order of first appearance."""
    found: dict[str, int] = {}
    rows = _rows(Path(path))
    header = next(rows, None) or list[str]()
    for column in (source.text, source.label):
        if column not in header:
            there = ", ".join(map(repr, header)) or "none"
            raise InvalidFile(f"{path}: has no column {column!r}; there is {there}: name yours in a SentenceSource")
    text_at, label_at = header.index(source.text), header.index(source.label)
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise InvalidFile(
                f"{path}: row {number} has {len(row)} fields, the header {len(header)}; put quotes around a text "
                "that contains commas or line ends"
            )
        label = row[label_at].strip()
        if label not in source.labels:
            known = ", ".join(map(repr, source.labels))
            raise InvalidFile(
                f"{path}: row {number} has the label {label!r}; for {source.language} the labels {known} are known: "
                "correct the row, or say in SentenceSource(labels=...) what it means"
            )
        text, meaning = row[text_at].strip(), source.labels[label]
        if text and meaning is not None:
            found.setdefault(text, meaning)
    return found


def _rows(path: Path) -> Iterator[list[str]]:
    content = read_bytes(path)
    if content[:2] == _GZIP_MAGIC:
        try:
            content = read_stream(gzip.GzipFile(fileobj=io.BytesIO(content)), MAX_FILE_BYTES, str(path))
        except (OSError, EOFError, zlib.error) as damage:
            raise InvalidFile(f"{path}: damaged gzip file ({damage}); fetch it again") from damage
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as odd:
        raise InvalidFile(
            f"{path}: byte {odd.start} is not UTF-8 ({odd.reason}); save the file in that encoding"
        ) from odd
    if "\n" in text:
        # a tweet may hold a carriage return, which the csv module would take for the end of its row
        text = re.sub(r"\r(?!\n)", " ", text)
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    while True:
        try:
            row = next(rows, None)
        except csv.Error as fault:
            raise InvalidFile(f"{path}: line {rows.line_num} is no CSV ({fault}); look for a quote too many") from fault
        if row is None:
            return
        if row:
            yield row


def _shuffled(stream: str, size: int, seed: int, trial: int) -> NDArray[np.int64]:
    return keyed_random.permutations(keyed_random.keys(seed, [trial]), stream, size)[0].numpy()
