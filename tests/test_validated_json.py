"""JSON of strangers: limits, one type of error, messages of one line."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.validated_json import (
    InvalidFile,
    JsonLimits,
    decode,
    parse_json,
    read_bytes,
    read_json,
    read_stream,
    refused_as,
)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        ("1" * 5000, "is not JSON"),
        ("[" * 100_000, "is not JSON|too deep"),
        ("[" * 65 + "]" * 65, "nests lists and objects 65 deep, at most 64"),
        ('{"a":' * 900 + "1" + "}" * 900, "deep"),
        ("NaN", "a number that is not finite"),
        ("[1, -Infinity]", "a number that is not finite"),
        ("1e999", "a number that is not finite"),
        ('"\\ud800"', "text that is not Unicode"),
        ('{"\\uDC00": 1}', "text that is not Unicode"),
        ("[" + "0," * 200 + "0]", "more than 100 values"),
        (" " * 20_000, "has 20000 bytes of JSON, at most 10000"),
    ],
)
def test_what_passes_a_limit_is_refused_in_one_line(text, complaint):
    small = JsonLimits(bytes=10_000, values=100) if len(text) < 100_000 and "[[[" not in str(text) else JsonLimits()
    with pytest.raises(InvalidFile) as error:
        parse_json(text, "file.json", advice="do this", limits=small if '{"a"' not in str(text) else JsonLimits())
    message = str(error.value)
    assert message.startswith("file.json: ")
    assert message.endswith("; do this")
    assert any(each in message for each in complaint.split("|"))
    assert "\n" not in message


def test_nesting_up_to_the_limit_is_read():
    assert parse_json("[" * 64 + "]" * 64, "file.json")
    assert parse_json("NaN", "file.json", nan=True) != 0
    assert parse_json('"\\ud83d\\ude00"', "file.json") == "😀"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(VALUES)
def test_json_is_read_as_it_was_written(value):
    try:
        text = json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return
    assert parse_json(text, "file.json") == value


@given(st.binary())
def test_any_bytes_are_json_or_refused(content):
    with suppress(InvalidFile):
        parse_json(content, "file.json")


@dataclass
class Cell:
    name: str
    sizes: tuple[int, ...] = ()


KINDS = [Cell, int, str, float, tuple[int, ...], tuple[str, float], Cell | None, dict[str, int]]


@given(VALUES, st.sampled_from(KINDS))
def test_any_value_is_decoded_or_refused(value, kind):
    with suppress(InvalidFile):
        decode(kind, value, "file.json", more=True)


def test_a_boolean_is_no_number():
    with pytest.raises(InvalidFile, match="expected a int"):
        decode(int, True, "x")


def test_a_fifo_a_folder_and_a_device_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path, kind in ((tmp_path / "fifo", "a FIFO"), (tmp_path, "a folder"), ("/dev/zero", "a device")):
        with pytest.raises((InvalidFile, IsADirectoryError), match=rf"is not a file but {kind}|directory"):
            read_bytes(path)
    with pytest.raises(InvalidFile, match="a FIFO; write it again"):
        read_json(tmp_path / "fifo")


class Stream:
    """Endless zeros that remember how much was asked for at a time."""

    largest = 0

    def read(self, size: int, /) -> bytes:
        self.largest = max(self.largest, size)
        return bytes(size)


def test_an_endless_stream_ends_at_the_limit_and_takes_memory_as_it_comes():
    stream = Stream()
    with pytest.raises(InvalidFile, match="has more than 5000000 bytes"):
        read_stream(stream, 5_000_000, "zeros")
    assert stream.largest <= 1 << 20


def test_a_file_that_says_nothing_about_its_size_is_read():
    assert b"Name:" in read_bytes("/proc/self/status")


@pytest.mark.parametrize(
    "error", [KeyError("x"), TypeError("x"), ValueError("x\ny"), RecursionError("x"), IndexError()]
)
def test_errors_of_any_kind_become_one(error):
    with pytest.raises(InvalidFile, match=r"^the file is odd \(") as refused, refused_as("the file is odd"):
        raise error
    assert "\n" not in str(refused.value)
