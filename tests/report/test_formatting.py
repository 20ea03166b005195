"""Numbers, shares and names are written the same way everywhere; the limits between the ways are these."""

import math

import pytest

from moesaic.report.formatting import listed, number, percent, short_name


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-math.inf, "−∞"),
        (math.nan, "not a number"),
        (999.4, "999"),
        (1.2345, "1.23"),
        (-0.012345, "−0.0123"),
        (1.2345e-9, "0.000000001"),  # no more than nine decimals
        (100.0, "100"),
        (1000000.0, "1,000,000"),
    ],
)
def test_a_number_has_three_significant_digits(value: float, text: str):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "near", "text"),
    [
        (50.0, [50.0], "50.0"),  # equal: no digits are needed to tell them apart
        (99.46, [99.61], "99.46"),
        (100.0, [99.5], "100.0"),
        (104.75, [100.0], "104.8"),
        (105.0, [100.0], "105"),
        (0.0, [0.0], "0"),
        (-52.0, [48.0, math.inf], "−52.0"),
        (0.5, [0.1], "0.500"),
    ],
)
def test_numbers_beside_each_other_have_the_decimals_that_tell_them_apart(value: float, near: list[float], text: str):
    assert number(value, near=near) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"),
        (0.0009, "below 0.1 %"),
        (0.001, "0.1 %"),
        (0.005, "0.5 %"),
        (0.0051, "1 %"),
        (0.994, "99 %"),
        (0.995, "99.5 %"),
        (0.99999, "99.9 %"),
        (1.0, "100 %"),
    ],
)
def test_a_share_is_0_or_100_percent_only_if_it_is(share: float, text: str):
    assert percent(share) == text.replace(" %", "\u00a0%")


def test_names_are_joined_with_commas_and_one_and():
    assert [listed(names) for names in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]


def test_a_name_is_shortened_beyond_its_limit_and_not_at_it():
    assert short_name("x" * 24) == "x" * 24
    assert short_name("x" * 25) == "x" * 23 + "…"
    assert short_name("abcdef", 5) == "abcd…"
