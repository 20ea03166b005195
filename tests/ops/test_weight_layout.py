"""Layouts of kernels are told apart by their strides, and memory for gradients has the same."""

import torch

from moesaic.ops.weight_layout import channels_last, empty_weight_like, is_taps_first, to_taps_first

PLAIN = torch.arange(2 * 6 * 4 * 3 * 3.0).view(2, 6, 4, 3, 3)
LAST = PLAIN.movedim(2, -1).contiguous().movedim(-1, 2)
TAPS = to_taps_first(PLAIN)


def test_each_layout_is_called_by_its_name_alone():
    assert [(channels_last(each), is_taps_first(each)) for each in (PLAIN, LAST, TAPS, PLAIN[..., ::2])] == [
        (False, False), (True, False), (False, True), (False, False),
    ]  # fmt: skip
    one_tap = torch.zeros(2, 6, 4, 1, 1)  # every layout at once: plain
    assert not channels_last(one_tap)
    assert not is_taps_first(one_tap)
    assert not is_taps_first(LAST[0])


def test_taps_first_keeps_the_numbers():
    assert torch.equal(TAPS, PLAIN)
    assert TAPS.permute(0, 3, 4, 1, 2).is_contiguous()


def test_memory_is_laid_out_as_the_kernels_where_that_is_known():
    for kernels in (PLAIN, LAST, TAPS):
        assert empty_weight_like(kernels).stride() == kernels.stride()
        assert empty_weight_like(kernels, torch.float64).dtype == torch.float64
    assert empty_weight_like(PLAIN.transpose(0, 1)).is_contiguous()
