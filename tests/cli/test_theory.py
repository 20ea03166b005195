"""`moesaic theory`: bounds, constants, settings that are refused."""

import re

import pytest

from moesaic.cli import main


def test_theory_prints_the_bounds_and_the_savings(capsys: pytest.CaptureFixture[str]):
    assert main(["theory", "--n", "16", "--l", "2", "--k", "8"]) == 0
    printed = capsys.readouterr().out
    assert "n=16, l=2, k=8" in printed
    assert "k⁴l⁶p¹²δ⁶/ε¹⁶" in printed
    assert "n⁸/(k⁴l⁶) = 16,384" in printed
    assert "n⁸/l⁸ = 1.68·10⁷" in printed


def test_theory_takes_every_letter(capsys: pytest.CaptureFixture[str]):
    letters = "--d 784 --p 8 --delta-d 0.5 --delta-r 0.2 --eps 0.05 --c 4 --m 40 --B 20"
    assert main(["theory", "--n", "16", "--l", "2", "--k", "4", *letters.split()]) == 0
    printed = capsys.readouterr().out
    for output in ("B=20", "m=40", "p=8", "δ=1.33", "c=4", "d=784", "ε=0.05", "δ_d=0.5, δ_r=0.2"):
        assert output in printed
    assert "l⁸p¹²δ⁶c¹²/ε¹⁶" in printed


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["--l", "20"], "1 ≤ l ≤ n fails: l=20, n=16"),
        (["--delta-d", "1.5"], "−1 < δ_d < 1 fails"),
        (["--eps", "0.7"], "0 < ε < 1/2 fails"),
        (["--m", "41"], "m=41, k=8"),
        (["--p", "10000000000000"], "is 10 to the power 350, which no number here holds; use a smaller p"),
        (["--eps", "1e-300"], "use a larger ε"),
        (["--data", "mnist-patch"], "(did you mean 'mnist-patches'?)"),
        (["--data", "mnist-patches", "--samples", "3"], "samples=3"),
        (["--data", "mnist-patches", "--samples", "1000000"], "--samples=1000000; it must be at most 20000"),
        (["--data", "mnist-patches", "--data-dir", "nowhere"], "are not in data_dir='nowhere'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_impossible_settings_are_one_line_that_names_the_inequality(
    capsys: pytest.CaptureFixture[str], given: list[str], complaint: str
):
    assert main(["theory", *given]) == 2
    printed, output = capsys.readouterr()
    assert printed == ""
    assert output.count("\n") == 1
    assert complaint in output


def test_theory_measures_the_data_models_constants(capsys: pytest.CaptureFixture[str]):
    assert main(["theory", "--data", "mnist-patches", "--samples", "100"]) == 0
    printed = capsys.readouterr().out
    assert "mnist-patches, 100 samples of 16 patches" in printed
    for name in ("δ_d", "δ_r", "δ", r"l\*", "l"):
        assert re.search(rf"^{name} +[\d.]+  \S", printed, re.MULTILINE), name
