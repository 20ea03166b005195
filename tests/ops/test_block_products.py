import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moesaic.layers import ChannelMoE
from moesaic.ops import block_products, narrow_conv
from moesaic.ops.block_products import BlockProduct, OpenBlocks, PixelRows, neighbours

FREE = narrow_conv.Prices(mac=1.0, read=1.0, copy=0.0, piece=0.0, call=0.0, group=0.0)
PRICES = {"gathered": FREE, "dense": narrow_conv.Prices(1.0, 1.0, 1e30, 0.0, 0.0, 0.0)}


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
    return OpenBlocks(np.array(numbers), np.linspace(0.5, 2, len(numbers)), channels, block)


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
    x = torch.zeros(1, ins, *size).double()
    x[:, numbers_in] = torch.randn(1, len(numbers_in), *size).double()
    gates = torch.from_numpy(here.gates.repeat(block_out)[: len(numbers_out)])[:, None, None]
    expected = torch.zeros_like(plainly(x))
    expected[:, numbers_out] = plainly(x)[:, numbers_out] * gates
    opened = PixelRows.of(x[:, numbers_in])
    for _ in range(2):  # the second time as it was planned
        rows = product.run(opened, before, here)
        assert not rows.values[:, -1].any()
        torch.testing.assert_close(rows.map(), expected[:, numbers_out], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(rows.full(here), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize(("outs", "block", "opened"), [(32, 16, (1,)), (7, 1, (0, 6)), (7, 3, (0, 2))])
@torch.no_grad()
def test_a_map_without_gates_is_read_whole(outs, block, opened, pool):
    product, plainly = case(3, outs, 1, block, reads_gated=False, pool=pool, stride=1)
    x, here = torch.randn(1, 3, 8, 6).double(), some(outs, block, *opened)
    numbers = torch.from_numpy(here.numbers())
    gates = torch.from_numpy(here.gates.repeat(block)[: len(numbers)])[:, None, None]
    rows = product.run(x, None, here)
    torch.testing.assert_close(rows.map(), plainly(x)[:, numbers] * gates, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("block", [1, 16])
@torch.no_grad()
def test_large_maps_are_seen_in_parts(block, monkeypatch):
    before, here = some(32, block, 0), some(32, block, 1)
    x = PixelRows.of(torch.randn(1, block, 9, 8).double())
    product, _ = case(32, 32, block, block, reads_gated=True, pool=False, stride=1)
    whole = product.run(x, before, here).values
    monkeypatch.setattr(block_products, "SEEN", 1000)
    product, _ = case(32, 32, block, block, reads_gated=True, pool=False, stride=1)
    torch.testing.assert_close(product.run(x, before, here).values, whole, rtol=1e-10, atol=1e-10)


def test_a_kernel_sees_what_an_unfolded_map_shows():
    x = torch.randn(1, 2, 5, 4)
    for ks, stride, padding in ((3, 1, 1), (3, 2, 1), (1, 1, 0), (2, 2, 0), (5, 1, 2)):
        seen = PixelRows.of(x).values[0].index_select(0, neighbours(5, 4, ks, stride, padding))
        unfolded = F.unfold(x, ks, padding=padding, stride=stride)[0].T.reshape(-1, 2, ks * ks).transpose(1, 2)
        assert torch.equal(seen.view_as(unfolded), unfolded)
