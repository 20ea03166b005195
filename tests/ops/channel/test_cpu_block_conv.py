from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moesaic.layers import ChannelMoE
from moesaic.ops.channel import costs, cpu_block_conv
from moesaic.ops.channel.bn_folding import fold_norm
from moesaic.ops.channel.cpu_block_conv import BlockConv, BlockMap, OpenBlocks
from moesaic.ops.channel.workspace import KernelShape, PaddedMap, Workspace

FREE = costs.UnitCosts(mac=1.0, read=1.0, copy=0.0, piece=0.0, column=0.0, call=0.0)
COSTS = {"pairs": FREE, "rows": replace(FREE, column=1e30), "nothing": replace(FREE, copy=1e30, column=1e30)}
"""Unit costs by the part of the weights that they make it cheapest to copy."""


def case(ins: int, outs: int, block_in: int, block_out: int, *, gated_input: bool, pool: bool, stride: int):
    """A block convolution, and the same computed by torch."""
    torch.manual_seed(0)
    layer = ChannelMoE(ins, outs, 3, stride=stride, bias=True, norm=False, block=block_out, block_in=block_in).double()
    conv = fold_norm(layer.weights())
    blocked = BlockConv(conv, gated_input=gated_input, relu=True, pool=nn.MaxPool2d(2) if pool else None)

    def expected_map(x):
        y = layer.conv(x).relu()
        return F.max_pool2d(y, 2) if pool else y

    return blocked, expected_map


def some(channels: int, block: int, *numbers: int) -> OpenBlocks:
    return OpenBlocks(np.array(numbers), torch.linspace(0.5, 2, len(numbers)).double()[:, None, None], channels, block)


def times_gates(some: OpenBlocks, y: torch.Tensor) -> torch.Tensor:
    """The open channels of a map, times their gates."""
    assert some.gates is not None
    gates = some.gates.repeat(1, some.size, 1).flatten()[: some.count(), None, None]
    return y[:, torch.from_numpy(some.channel_numbers())] * gates


def before_gates(some: OpenBlocks, x: torch.Tensor, size: int) -> BlockMap:
    """A compact map in blocks of that size, before its gates, as one layer passes it to the next."""
    return BlockMap(x[0].unflatten(0, (-1, size)).permute(0, 2, 3, 1), some, relu=True)


@pytest.mark.parametrize("copied", COSTS)
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
def test_a_block_convolution_equals_the_gated_convolution(
    ins, outs, block_in, block_out, open_in, open_out, size, stride, pool, copied, monkeypatch
):
    monkeypatch.setattr(costs, "CPU_COSTS", COSTS[copied])
    blocked, expected_map = case(ins, outs, block_in, block_out, gated_input=True, pool=pool, stride=stride)
    before, here = some(ins, block_in, *open_in), some(outs, block_out, *open_out)
    numbers_in, numbers_out = torch.from_numpy(before.channel_numbers()), torch.from_numpy(here.channel_numbers())
    raw = torch.randn(1, len(numbers_in), *size).double()
    x = torch.zeros(1, ins, *size).double()
    x[:, numbers_in] = raw.relu()
    x[:, numbers_in] = times_gates(before, x)
    expected = torch.zeros_like(expected_map(x))
    expected[:, numbers_out] = times_gates(here, expected_map(x))
    whole_blocks = block_in if len(numbers_in) % block_in == 0 else len(numbers_in)
    workspace = Workspace(torch.float64)
    for given in (
        x[:, numbers_in],
        before_gates(before, raw, len(numbers_in)),
        before_gates(before, raw, whole_blocks),
    ):
        for _ in range(2):  # the second time with a cached plan, in memory that was written to
            found = blocked.run(given, before, here, workspace)
            torch.testing.assert_close(found.compact(), expected[:, numbers_out], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(found.full(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize(("outs", "block", "opened"), [(32, 16, (1,)), (7, 1, (0, 6)), (7, 3, (0, 2))])
@torch.no_grad()
def test_a_map_without_gates_is_read_whole(outs, block, opened, pool):
    blocked, expected_map = case(3, outs, 1, block, gated_input=False, pool=pool, stride=1)
    here, workspace = some(outs, block, *opened), Workspace(torch.float64)
    for size in ((8, 6), (16, 17)):
        x = torch.randn(1, 3, *size).double()
        found = blocked.run(x, None, here, workspace).compact()
        torch.testing.assert_close(found, times_gates(here, expected_map(x)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("gated_input", [True, False])
@pytest.mark.parametrize("strips", [True, False])
@pytest.mark.parametrize("block", [1, 16])
@torch.no_grad()
def test_large_maps_are_unfolded_in_parts(block, strips, gated_input, monkeypatch):
    monkeypatch.setattr(cpu_block_conv, "LARGE_MAP", 1 if strips else 1000)
    before, here = some(32, block, 0), some(32, block, 1)
    x = torch.randn(1, block if gated_input else 32, 9, 8).double()
    blocked, _ = case(32, 32, block, block, gated_input=gated_input, pool=False, stride=1)
    whole = blocked.run(x, before, here, Workspace(torch.float64)).compact()
    monkeypatch.setattr(cpu_block_conv, "MAX_UNFOLDED", 1000)
    found = blocked.run(x, before, here, Workspace(torch.float64)).compact()
    torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("copied", ["rows", "nothing"])
@pytest.mark.parametrize("pool", [False, True])
@torch.no_grad()
def test_layers_of_many_weights_have_their_columns_in_blocks(copied, pool, monkeypatch):
    monkeypatch.setattr(cpu_block_conv, "MANY_WEIGHTS", 1)
    monkeypatch.setattr(costs, "CPU_COSTS", COSTS[copied])
    blocked, expected_map = case(10, 12, 1, 1, gated_input=True, pool=pool, stride=1)
    workspace = Workspace(torch.float64)
    for opened_in, opened_out in (
        ((0, 3, 9), (1, 2, 7)),
        (tuple(range(10)), (0, 11)),
        (tuple(range(10)), tuple(range(12))),
    ):
        before, here = some(10, 1, *opened_in), some(12, 1, *opened_out)
        raw, x = torch.rand(1, len(opened_in), 4, 6).double(), torch.zeros(1, 10, 4, 6).double()
        x[:, list(opened_in)] = raw
        x[:, list(opened_in)] = times_gates(before, x)
        found = blocked.run(before_gates(before, raw, len(opened_in)), before, here, workspace)
        torch.testing.assert_close(found.compact(), times_gates(here, expected_map(x)), rtol=1e-10, atol=1e-10)
        assert found.full().shape[1] == 12


@torch.no_grad()
def test_padding_stays_zero_when_the_number_of_channels_changes():
    blocked, expected_map = case(12, 10, 1, 1, gated_input=True, pool=False, stride=1)
    workspace, here = Workspace(torch.float64), some(10, 1, 2, 5)
    for numbers in ((0, 3, 11), (1, 2), tuple(range(12)), (0, 3, 11)):
        before, x = some(12, 1, *numbers), torch.zeros(1, 12, 6, 5).double()
        raw = torch.rand(1, len(numbers), 6, 5).double()
        x[:, list(numbers)] = raw
        x[:, list(numbers)] = times_gates(before, x)
        found = blocked.run(before_gates(before, raw, len(numbers)), before, here, workspace)
        torch.testing.assert_close(found.compact(), times_gates(here, expected_map(x)), rtol=1e-10, atol=1e-10)


def test_windows_of_a_padded_map_equal_unfold():
    x = torch.randn(1, 2, 5, 4)
    for ks, stride, padding in ((3, 1, 1), (3, 2, 1), (1, 1, 0), (2, 2, 0), (5, 1, 2)):
        kernel = KernelShape(ks, stride, padding)
        padded = PaddedMap(torch.zeros(2 * PaddedMap.values_per_channel(5, 4, kernel)), 1, 5, 4, 2, kernel)
        padded.inside.copy_(x.permute(0, 2, 3, 1))
        unfolded = F.unfold(x, ks, padding=padding, stride=stride)[0].T.reshape(-1, 2, ks * ks).transpose(1, 2)
        assert torch.equal(padded.windows().reshape(unfolded.shape), unfolded)
