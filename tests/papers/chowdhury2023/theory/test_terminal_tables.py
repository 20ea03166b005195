"""The theory's numbers come with what they mean, and fit the terminal."""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from moesaic.papers.chowdhury2023.theory.complexity_bounds import Setting
from moesaic.papers.chowdhury2023.theory.patches_per_expert_estimate import measure_patch_depth
from moesaic.papers.chowdhury2023.theory.pattern_separation import measure_separation
from moesaic.papers.chowdhury2023.theory.terminal_tables import show_complexity_table, show_separation


def bounds(width: int, setting: Setting) -> str:
    file = io.StringIO()
    show_complexity_table(setting, Console(file=file, width=width))
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_no_formula_is_cut_off(width: int):
    text = bounds(width, Setting(n=16, l=2, k=8))
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "k⁷n²l¹³p²⁴δ¹²d/ε³²" in text
    assert "n¹⁷/(k⁷l¹³) = 1.72·10¹⁰" in text


def test_a_wide_terminal_also_tells_where_a_bound_stands():
    assert "Theorems 4.2, 4.5, 4.3" in bounds(120, Setting(n=16, l=2, k=8))


def test_a_saving_that_is_none_is_told_too():
    assert "n⁸/(k⁴l⁶) = 0.00357" in bounds(120, Setting(n=16, l=14, k=20))
    assert "n⁸/(k⁴l⁶) = 3.57·10⁻⁷" in bounds(120, Setting(n=16, l=14, k=200))


def test_every_measured_constant_has_its_meaning():
    patches = torch.eye(3)[torch.tensor([[0, 2], [2, 0], [2, 1], [1, 2]])]
    labels, places = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 0])
    found, true = measure_separation(patches, labels, places), measure_patch_depth(patches, labels, places)
    file = io.StringIO()
    show_separation("four samples", found, replace(true, l=2), true, Console(file=file, width=80))
    lines = file.getvalue().splitlines()
    assert lines[0] == "four samples"
    starts = [line.split()[:2] for line in lines if line[:1].strip()][1:]
    assert starts == [["δ_d", "0"], ["δ_r", "0"], ["δ", "1"], ["l*", "1"], ["l", "2"]]
    assert "it takes 1, when one knows where it is" in " ".join(file.getvalue().split())
