from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moesaic.layers import ChannelMoE
from moesaic.ops.channel import block_gemm, narrow_conv
from moesaic.ops.channel.block_gemm import BlockMap, BlockProduct, OpenBlocks
from moesaic.ops.channel.padded_buffers import Frame, Kernel, Scratch

FREE = narrow_conv.Prices(mac=1.0, read=1.0, copy=0.0, piece=0.0, column=0.0, call=0.0, group=0.0)
PRICES = {"pairs": FREE, "rows": replace(FREE, column=1e30), "nothing": replace(FREE, copy=1e30, column=1e30)}
"""By what is copied of the weights."""


def case(ins: int, outs: int, block_in: int, block_out: int, *, reads_gated: bool, pool: bool, stride: int):
    """A layer, its product, and what of its channels is open."""
    torch.manual_seed(0)
    layer = ChannelMoE(ins, outs, 3, stride=stride, norm=False, block=block_out, block_in=block_in).double()
    scale, shift = torch.randn(outs).double(), torch.randn(outs).double()
    product = BlockProduct(
        layer.weights(), scale, shift, reads_gated=reads_gated, relu=True, pool=nn.MaxPool2d(2) if pool else None
    )

    def plainly(x):
        y = (scale[:, None, None] * F.conv2d(x, layer.conv.weight, None, stride, 1) + shift[:, None, None]).relu()
        return F.max_pool2d(y, 2) if pool else y

    return product, plainly


def some(channels: int, block: int, *numbers: int) -> OpenBlocks:
    return OpenBlocks(np.array(numbers), torch.linspace(0.5, 2, len(numbers)).double()[:, None, None], channels, block)


def behind_gates(some: OpenBlocks, y: torch.Tensor) -> torch.Tensor:
    """The open channels of a map, times their gates."""
    assert some.gates is not None
    gates = some.gates.repeat(1, some.size, 1).flatten()[: some.count(), None, None]
    return y[:, torch.from_numpy(some.numbers())] * gates


def before_gates(some: OpenBlocks, x: torch.Tensor, size: int) -> BlockMap:
    """A map of open channels in blocks of that size, before they are gated, as a layer hands it on."""
    return BlockMap(x[0].unflatten(0, (-1, size)).permute(0, 2, 3, 1), some, relu=True)


@pytest.mark.parametrize("way", PRICES)
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(6, 9), (17, 16)])
@pytest.mark.parametrize(
    ("ins", "outs", "block_in", "block_out", "open_in", "open_out"),
    [
        (24, 32, 8, 16, (0, 2), (1,)),  # by blocks
        (24, 32, 8, 16, (0, 1, 2), (0, 1)),
        (24, 32, 8, 16, (0, 1, 2), (1,)),
        (12, 10, 1, 1, (0, 3, 11), (2, 3, 9)),  # by channel
        (12, 10, 1, 1, tuple(range(12)), (2, 3, 9)),
        (12, 10, 1, 1, tuple(range(12)), tuple(range(10))),
        (10, 20, 4, 16, (0, 2), (0, 1)),  # the last blocks are shorter
        (20, 32, 16, 16, (1,), (0,)),
        (32, 20, 16, 16, (1,), (1,)),
    ],
)
@torch.no_grad()
def test_a_product_of_open_blocks_is_the_convolution_with_gates(
    ins, outs, block_in, block_out, open_in, open_out, size, stride, pool, way, monkeypatch
):
    monkeypatch.setitem(narrow_conv.PRICES, "cpu", PRICES[way])
    product, plainly = case(ins, outs, block_in, block_out, reads_gated=True, pool=pool, stride=stride)
    before, here = some(ins, block_in, *open_in), some(outs, block_out, *open_out)
    numbers_in, numbers_out = torch.from_numpy(before.numbers()), torch.from_numpy(here.numbers())
    raw = torch.randn(1, len(numbers_in), *size).double()
    x = torch.zeros(1, ins, *size).double()
    x[:, numbers_in] = raw.relu()
    x[:, numbers_in] = behind_gates(before, x)
    expected = torch.zeros_like(plainly(x))
    expected[:, numbers_out] = behind_gates(here, plainly(x))
    whole_blocks = block_in if len(numbers_in) % block_in == 0 else len(numbers_in)
    scratch = Scratch(torch.float64)
    for given in (
        x[:, numbers_in],
        before_gates(before, raw, len(numbers_in)),
        before_gates(before, raw, whole_blocks),
    ):
        for _ in range(2):  # the second time as it was planned, in memory that was written to
            found = product.run(given, before, here, scratch)
            torch.testing.assert_close(found.map(), expected[:, numbers_out], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(found.full(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize(("outs", "block", "opened"), [(32, 16, (1,)), (7, 1, (0, 6)), (7, 3, (0, 2))])
@torch.no_grad()
def test_a_map_without_gates_is_read_whole(outs, block, opened, pool):
    product, plainly = case(3, outs, 1, block, reads_gated=False, pool=pool, stride=1)
    here, scratch = some(outs, block, *opened), Scratch(torch.float64)
    for size in ((8, 6), (16, 17)):
        x = torch.randn(1, 3, *size).double()
        found = product.run(x, None, here, scratch).map()
        torch.testing.assert_close(found, behind_gates(here, plainly(x)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reads_gated", [True, False])
@pytest.mark.parametrize("strips", [True, False])
@pytest.mark.parametrize("block", [1, 16])
@torch.no_grad()
def test_large_maps_are_seen_in_parts(block, strips, reads_gated, monkeypatch):
    monkeypatch.setattr(block_gemm, "LARGE_MAP", 1 if strips else 1000)
    before, here = some(32, block, 0), some(32, block, 1)
    x = torch.randn(1, block if reads_gated else 32, 9, 8).double()
    product, _ = case(32, 32, block, block, reads_gated=reads_gated, pool=False, stride=1)
    whole = product.run(x, before, here, Scratch(torch.float64)).map()
    monkeypatch.setattr(block_gemm, "SEEN", 1000)
    found = product.run(x, before, here, Scratch(torch.float64)).map()
    torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("way", ["rows", "nothing"])
@pytest.mark.parametrize("pool", [False, True])
@torch.no_grad()
def test_layers_of_many_weights_have_their_columns_in_blocks(way, pool, monkeypatch):
    monkeypatch.setattr(block_gemm, "MANY_WEIGHTS", 1)
    monkeypatch.setitem(narrow_conv.PRICES, "cpu", PRICES[way])
    product, plainly = case(10, 12, 1, 1, reads_gated=True, pool=pool, stride=1)
    scratch = Scratch(torch.float64)
    for opened_in, opened_out in (
        ((0, 3, 9), (1, 2, 7)),
        (tuple(range(10)), (0, 11)),
        (tuple(range(10)), tuple(range(12))),
    ):
        before, here = some(10, 1, *opened_in), some(12, 1, *opened_out)
        raw, x = torch.rand(1, len(opened_in), 4, 6).double(), torch.zeros(1, 10, 4, 6).double()
        x[:, list(opened_in)] = raw
        x[:, list(opened_in)] = behind_gates(before, x)
        found = product.run(before_gates(before, raw, len(opened_in)), before, here, scratch)
        torch.testing.assert_close(found.map(), behind_gates(here, plainly(x)), rtol=1e-10, atol=1e-10)
        assert found.full().shape[1] == 12


@torch.no_grad()
def test_memory_that_other_numbers_of_channels_were_in_has_zeros_around_the_map():
    product, plainly = case(12, 10, 1, 1, reads_gated=True, pool=False, stride=1)
    scratch, here = Scratch(torch.float64), some(10, 1, 2, 5)
    for numbers in ((0, 3, 11), (1, 2), tuple(range(12)), (0, 3, 11)):
        before, x = some(12, 1, *numbers), torch.zeros(1, 12, 6, 5).double()
        raw = torch.rand(1, len(numbers), 6, 5).double()
        x[:, list(numbers)] = raw
        x[:, list(numbers)] = behind_gates(before, x)
        found = product.run(before_gates(before, raw, len(numbers)), before, here, scratch)
        torch.testing.assert_close(found.map(), behind_gates(here, plainly(x)), rtol=1e-10, atol=1e-10)


def test_a_kernel_sees_what_an_unfolded_map_shows():
    x = torch.randn(1, 2, 5, 4)
    for ks, stride, padding in ((3, 1, 1), (3, 2, 1), (1, 1, 0), (2, 2, 0), (5, 1, 2)):
        kernel = Kernel(ks, stride, padding)
        frame = Frame(torch.zeros(2 * Frame.needs(5, 4, kernel)), 1, 5, 4, 2, kernel)
        frame.inside.copy_(x.permute(0, 2, 3, 1))
        unfolded = F.unfold(x, ks, padding=padding, stride=stride)[0].T.reshape(-1, 2, ks * ks).transpose(1, 2)
        assert torch.equal(frame.windows().reshape(unfolded.shape), unfolded)
