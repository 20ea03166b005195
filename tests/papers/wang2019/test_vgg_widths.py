"""Table 1 of DeepMoE's supplement: what is printed, and what is solved for."""

import pytest

from moesaic.models.vgg import VGG16_STAGES, VGG16_WIDTHS
from moesaic.papers.wang2019.vgg_widths import WIDENINGS, conv_parameters, reconstruct, solve_width

PRINTED = {  # column by column, None where the cell is missing
    "w1_high": (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, None, None, None),
    "w1_mid": (64, 64, 128, 128, 2990, 256, 256, 512, 512, 512, 512, 512, 512),
    "w4_low": (512, 512, None, None, 256, 256, 256, 512, 512, 512, 512, 512, 512),
    "w13_all": (128, 128, 256, 256, 405, 405, 405, 615, 615, 615, 615, 615, 615),
}


@pytest.mark.parametrize("name", PRINTED)
def test_cells_are_as_printed_or_marked_as_reconstructed(name):
    column = WIDENINGS[name]
    assert len(column.widths) == sum(VGG16_STAGES) == 13
    missing = [number for number, width in enumerate(PRINTED[name], start=1) if width is None]
    assert list(column.reconstructed) == missing
    printed = [
        width if number in missing else column.widths[number - 1] for number, width in enumerate(PRINTED[name], 1)
    ]
    assert tuple(printed) == PRINTED[name]


@pytest.mark.parametrize("name", WIDENINGS)
def test_only_widened_layers_differ_from_vgg16(name):
    column = WIDENINGS[name]
    pairs = enumerate(zip(column.widths, VGG16_WIDTHS, strict=True), start=1)
    assert tuple(number for number, (wide, plain) in pairs if wide > plain) == column.widened


@pytest.mark.parametrize("name", WIDENINGS)
def test_reconstruct_derives_the_missing_cells(name):
    assert reconstruct(name) == WIDENINGS[name].widths


def test_all_columns_have_the_same_number_of_weights_within_a_thousandth():
    weights = [column.conv_parameters for column in WIDENINGS.values()]
    assert WIDENINGS["w1_mid"].conv_parameters == 24_159_168
    assert WIDENINGS["w13_all"].conv_parameters == 24_183_018
    assert max(weights) / min(weights) < 1.0011
    for each in weights:
        assert each / conv_parameters(VGG16_WIDTHS) == pytest.approx(1.643, abs=1e-3)


def test_macs_differ_by_a_factor_of_twelve():
    macs = {name: column.conv_macs() for name, column in WIDENINGS.items()}
    assert sorted(macs, key=macs.get) == ["w1_high", "w13_all", "w1_mid", "w4_low"]
    assert macs["w4_low"] / macs["w1_high"] == pytest.approx(12.3, abs=0.05)
    assert WIDENINGS["w4_low"].conv_macs(224) == 49 * macs["w4_low"]


def test_the_bounds_in_the_docstring_are_those_of_the_complete_columns():
    def solved(name: str) -> list[float]:
        missing = [None if n in WIDENINGS[name].widened[-2:] else w for n, w in enumerate(WIDENINGS[name].widths, 1)]
        totals = [WIDENINGS[each].conv_parameters for each in ("w1_mid", "w13_all")]
        return [round(solve_width(missing, total), 1) for total in (*totals, sum(totals) / 2)]

    assert solved("w1_high") == [2562.5, 2567.7, 2565.1]
    assert solved("w4_low") == [613.6, 615.0, 614.3]


@pytest.mark.parametrize("missing", [(0,), (1,), (3,), (0, 1), (1, 2, 3), (0, 3)])
def test_solve_width_recovers_a_removed_width(missing):
    widths = [37 if place in missing else width for place, width in enumerate((8, 16, 24, 32))]
    holes = [None if place in missing else width for place, width in enumerate(widths)]
    assert solve_width(holes, conv_parameters(widths)) == pytest.approx(37, rel=1e-12)


def test_unsolvable_widths_are_refused_with_the_limit():
    with pytest.raises(ValueError, match="every width is given"):
        solve_width([8, 16], 1000)
    with pytest.raises(ValueError, match=r"have 1368 weights between them.*give parameters above 1368"):
        solve_width([8, 16, None], 1368)
    with pytest.raises(ValueError, match="Conv1=0; it must be at least 1"):
        solve_width([0, None], 1000)
    with pytest.raises(ValueError, match="did you mean 'w1_high'"):
        reconstruct("w1_hi")
