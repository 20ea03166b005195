"""Weights in blocks hold every weight once, and zeros where the last block is short."""

import pytest
import torch

from moesaic.ops.channel.gpu_conv_operands import BlockedConv
from moesaic.ops.dispatch import ChannelConv


@pytest.mark.parametrize("gated", [True, False])
def test_a_block_has_the_weights_between_its_channels_with_adjacent_inputs(gated):
    weight, bias = torch.randn(40, 20, 3, 3), torch.randn(40)
    conv = ChannelConv(weight, bias, None, 1, 1, "relu", 16, 8)
    blocked = BlockedConv.of(conv, torch.float32, gated_input=gated, gated_output=gated)
    assert blocked.weight.shape == ((3, 3, 9, 16, 8) if gated else (1, 1, 9, 64, 32))
    rebuilt = blocked.weight.permute(0, 3, 1, 4, 2).reshape(
        blocked.weight.shape[0] * blocked.geometry.block_out, -1, 3, 3
    )
    assert torch.equal(rebuilt[:40, :20], weight)
    assert not rebuilt[40:].any()
    assert not rebuilt[:, 20:].any()
    assert torch.equal(blocked.bias, bias)


def test_weights_take_the_dtype_of_the_map_and_the_bias_at_least_float32():
    conv = ChannelConv(torch.randn(4, 4, 1, 1), torch.randn(4), None, 2, 0, "relu", 4, 4)
    blocked = BlockedConv.of(conv, torch.bfloat16, gated_input=True, gated_output=True)
    assert (blocked.weight.dtype, blocked.bias.dtype) == (torch.bfloat16, torch.float32)
    assert blocked.geometry.output_size(7, 4) == (4, 2)
