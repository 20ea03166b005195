"""Channel-gated convolutions by Triton kernels, against dense ones with masks in float64.

On a GPU compiled (``-m gpu``). Where Triton is installed and there is no GPU, in its interpreter
(``TRITON_INTERPRET=1``).
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton comes with torch on GPU machines")

from triton_cases import (
    CHANNEL_CONV_KERNELS,
    INTERPRETED,
    ONE_TYPE,
    TYPES,
    Named,
    assert_captured,
    assert_near,
    numbers,
    poison,
)

if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from moesaic.ops.channel.gpu_conv_operands import BlockedConv, Epilogue, Gating, LayerBlocks, OpenBlockLists
from moesaic.ops.dispatch import ChannelConv
from moesaic.ops.triton import channel_conv as kernels
from moesaic.ops.triton.channel_conv import channel_conv
from moesaic.ops.triton.open_channel_blocks import list_open_blocks
from moesaic.routing.channel_gate import ChannelGate
from moesaic.routing.frozen_channel_gates import FrozenHeads


@pytest.fixture(autouse=True)
def unwritten_memory_shows(monkeypatch):
    poison(monkeypatch, *CHANNEL_CONV_KERNELS)
    monkeypatch.setattr(kernels, "_precision", lambda: "ieee")


@dataclass(frozen=True)
class Case(Named):
    """A convolution, its gates, and what follows."""

    batch: int = 3
    ins: int = 20
    outs: int = 24
    height: int = 5
    width: int = 4
    kernel: int = 3
    stride: int = 1
    block_in: int = 8
    block_out: int = 16
    gated_in: bool = True
    gated_out: bool = True
    opened: str = "some"
    write_closed: bool = True
    relu: bool = True
    pool: bool = False
    residual: bool = False
    channels_last: bool = True

    __str__ = Named.__str__


CASES = [
    Case(),
    Case(opened="none"),
    Case(opened="none", write_closed=False),
    Case(opened="all", write_closed=False),
    Case(batch=1, write_closed=False, pool=True),
    Case(kernel=1, stride=2, relu=False),
    Case(stride=2, height=7, width=3, residual=True),
    Case(residual=True, pool=True, opened="none"),
    Case(ins=36, block_in=32, outs=80, block_out=32, batch=2, write_closed=False),
    Case(ins=21, block_in=5, outs=13, block_out=3, height=3),
    Case(gated_in=False, ins=3, channels_last=False, write_closed=False),
    Case(gated_out=False, residual=True, kernel=1),
    Case(gated_in=False, gated_out=False, ins=70, height=3),
    Case(height=9, width=17, ins=8, outs=16, batch=1, pool=True, write_closed=False),
]


def some_lists(case: Case, device: str, dtype: torch.dtype) -> tuple[OpenBlockLists, LayerBlocks, LayerBlocks]:
    """Lists of the input's and the output's layer, behind another layer's blocks."""
    blocks = [2, -(-case.ins // case.block_in), -(-case.outs // case.block_out)]
    acc = torch.promote_types(dtype, torch.float32)
    scores = numbers(case.batch, sum(blocks), seed=1, device=device, dtype=acc)
    scores = {"some": scores, "none": -scores.abs(), "all": scores.abs() + 0.5}[case.opened]
    starts = [0, blocks[0], blocks[0] + blocks[1]]
    layers = torch.tensor([[start, number, number] for start, number in zip(starts, blocks, strict=True)])
    lists = list_open_blocks(scores, layers.int().to(device), sum(blocks), max(blocks), "relu")
    return lists, LayerBlocks(1, starts[1], blocks[1], blocks[1]), LayerBlocks(2, starts[2], blocks[2], blocks[2])


def dense_gates(lists: OpenBlockLists, layer: LayerBlocks, block: int, channels: int) -> Tensor:
    """(B, channels, 1, 1) in float64, from lists."""
    own = slice(layer.start, layer.start + layer.blocks)
    order, gates = (each[:, own].cpu() for each in lists[:2])
    dense = torch.zeros(gates.shape, dtype=torch.float64).scatter(1, order.long(), gates.double())
    assert torch.equal((dense != 0).sum(1), lists.counts[:, layer.layer].cpu())
    return dense.repeat_interleave(block, 1)[:, :channels, None, None]


SHORT = [
    pytest.param(("cpu", dtype), marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1"))
    for dtype in (torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize("place", SHORT, ids=str)
def test_16_bit_numbers_are_summed_in_float32(place):
    case = Case(residual=True, pool=True, batch=1)
    test_a_convolution_of_open_blocks_equals_the_masked_one(case, place)


@pytest.mark.parametrize("place", TYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_convolution_of_open_blocks_equals_the_masked_one(case, place):
    device, dtype = place
    lists, ins, outs = some_lists(case, device, dtype)
    gate_in = dense_gates(lists, ins, case.block_in, case.ins)
    gate_out = dense_gates(lists, outs, case.block_out, case.outs)
    make = {"device": device, "dtype": dtype}
    weight = numbers(case.outs, case.ins, case.kernel, case.kernel, seed=2, scale=0.2, **make)
    bias = numbers(case.outs, seed=3, **make)
    x = numbers(case.batch, case.ins, case.height, case.width, seed=4, **make)
    padding = case.kernel // 2
    conv = ChannelConv(weight, bias, None, case.stride, padding, "identity", case.block_out, case.block_in)
    masked = x.cpu().double()
    if case.gated_in:  # closed channels hold anything
        masked = masked * (gate_in != 0)
        x = x.where(gate_in.to(device) != 0, torch.nan)
    if case.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    expected = F.conv2d(masked, weight.cpu().double(), bias.cpu().double(), case.stride, padding)
    expected = expected * gate_out if case.gated_out else expected
    residual = None
    if case.residual:
        residual = numbers(*expected.shape, seed=5, **make).contiguous(memory_format=torch.channels_last)
        expected = expected + residual.cpu().double()
    expected = expected.relu() if case.relu else expected
    expected = F.max_pool2d(expected, 2) if case.pool else expected

    blocked = BlockedConv.of(conv, dtype, gated_input=case.gated_in, gated_output=case.gated_out)
    gating = Gating(ins if case.gated_in else None, outs if case.gated_out else None, case.write_closed)
    needs = lists if case.gated_in or case.gated_out else None
    y = channel_conv(x, blocked, gating, needs, Epilogue(case.relu, case.pool), residual)

    assert y.shape == expected.shape
    assert y.is_contiguous(memory_format=torch.channels_last)
    if case.gated_out and not case.write_closed:
        closed = (gate_out == 0).expand_as(expected)
        assert y.cpu()[closed].isnan().all()  # not written
        y, expected = y.cpu().masked_fill(closed, 0), expected.masked_fill(closed, 0)
    assert_near([y], [expected], dtype)


@pytest.mark.parametrize("place", ONE_TYPE)
def test_an_image_has_the_same_output_whatever_its_batch(place):
    case = Case(batch=3)
    device, dtype = place
    lists, ins, outs = some_lists(case, device, dtype)
    conv = ChannelConv(
        numbers(case.outs, case.ins, 3, 3, seed=2, device=device, dtype=dtype),
        numbers(case.outs, seed=3, device=device, dtype=dtype), None, 1, 1, "identity", case.block_out, case.block_in,
    )  # fmt: skip
    blocked = BlockedConv.of(conv, dtype, gated_input=True, gated_output=True)
    x = numbers(3, case.ins, 5, 4, seed=4, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
    gating = Gating(ins, outs, write_closed=True)
    together = channel_conv(x, blocked, gating, lists, Epilogue())
    alone = OpenBlockLists(*(each[1:2] for each in lists))
    assert_near([channel_conv(x[1:2], blocked, gating, alone, Epilogue())], [together[1:2]], dtype)


@pytest.mark.parametrize("place", ONE_TYPE)
def test_pooling_keeps_what_is_not_a_number_as_torch_does(place):
    device, dtype = place
    x = numbers(2, 4, 4, 6, seed=0, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
    x[0, 1, 3, 2] = torch.nan
    weight = numbers(16, 4, 1, 1, seed=1, device=device, dtype=dtype)
    conv = ChannelConv(weight, torch.zeros_like(weight[:, 0, 0, 0]), None, 1, 0, "identity", 1, 1)
    blocked = BlockedConv.of(conv, dtype, gated_input=False, gated_output=False)
    found = channel_conv(x, blocked, Gating(None, None, write_closed=True), None, Epilogue(relu=True, pool=True))
    assert torch.equal(found.isnan(), F.max_pool2d(F.conv2d(x, weight).relu(), 2).isnan())


@pytest.mark.parametrize("place", ONE_TYPE)
@pytest.mark.parametrize(
    "options",
    [{}, {"mode": "hard"}, {"mode": "topk", "keep": 2}, {"mode": "topk", "keep": 2, "bias": None}],
    ids=str,
)
def test_lists_have_the_blocks_that_the_heads_open_also_among_equal_scores(options, place):
    device, dtype = place
    made = [ChannelGate(4, channels, block=2, **options).to(device, dtype) for channels in (10, 74, 6)]
    with torch.no_grad():
        made[1].weight[::2] = 0  # equal scores
    heads = FrozenHeads([head.eval() for head in made])
    scores = heads.scores(numbers(5, 4, seed=0, device=device, dtype=dtype) * 4)
    lists = heads.open_lists(scores)
    for layer, routing in zip(heads.layer_blocks(), heads.routings(scores), strict=True):
        own = slice(layer.start, layer.start + layer.blocks)
        order, count = lists.order[:, own].long(), lists.counts[:, layer.layer]
        assert torch.equal(order.sort(1).values, torch.arange(layer.blocks, device=device).expand_as(order))
        assert torch.equal(count, routing.mask[:, 0].sum(1).int())
        found = torch.zeros_like(routing.weights[:, 0]).scatter(1, order, lists.gates[:, own])
        torch.testing.assert_close(found, routing.weights[:, 0])
        for numbers_, length in zip(order.tolist(), count.tolist(), strict=True):
            assert numbers_[:length] == sorted(numbers_[:length])


@pytest.mark.parametrize("place", ONE_TYPE)
def test_a_score_that_is_not_a_number_stays_visible(place):
    device, dtype = place
    scores = torch.tensor([[1.0, torch.nan, -2.0]], device=device, dtype=dtype)
    for mode in ("topk", "relu", "hard"):
        layers = torch.tensor([[0, 3, 1 if mode == "topk" else 3]], dtype=torch.int32, device=device)
        lists = list_open_blocks(scores, layers, 3, 3, mode)
        count = int(lists.counts)
        assert 1 in lists.order[0, :count].tolist()
        assert lists.gates[0, :count].isnan().any()


@pytest.mark.parametrize("place", ONE_TYPE)
def test_gates_of_very_low_scores_are_not_zero(place):
    device, _ = place
    scores = torch.tensor([[-40.0, -60.0, 30.0]], device=device, dtype=torch.float32)
    layers = torch.tensor([[0, 3, 3]], dtype=torch.int32, device=device)
    found = list_open_blocks(scores, layers, 3, 3, "topk").gates
    torch.testing.assert_close(found, F.softplus(scores), rtol=1e-5, atol=0)


@pytest.mark.gpu
def test_a_convolution_is_captured_in_a_graph():
    case = Case(write_closed=False)
    lists, ins, outs = some_lists(case, "cuda", torch.float32)
    make = {"device": "cuda", "dtype": torch.float32}
    weight, bias = numbers(case.outs, case.ins, 3, 3, seed=2, **make), numbers(case.outs, seed=3, **make)
    conv = ChannelConv(weight, bias, None, 1, 1, "identity", case.block_out, case.block_in)
    blocked = BlockedConv.of(conv, torch.float32, gated_input=True, gated_output=True)
    x = numbers(3, case.ins, 5, 4, seed=4, **make).contiguous(memory_format=torch.channels_last)
    gating = Gating(ins, outs, write_closed=True)
    assert_captured(lambda: [channel_conv(x, blocked, gating, lists, Epilogue())], x)
