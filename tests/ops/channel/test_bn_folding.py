import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moesaic.ops.channel.bn_folding import batch_norm_tensors, fold_norm
from moesaic.ops.dispatch import ChannelConv


def layers(bias: bool) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    conv, norm = nn.Conv2d(3, 5, 3, dtype=torch.float64, bias=bias), nn.BatchNorm2d(5, eps=1e-3)
    for values in (norm.weight, norm.bias, norm.running_mean):
        nn.init.normal_(values)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    return conv, norm.double().eval()


@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_folded_convolution_equals_convolution_and_batch_norm(bias, with_norm):
    conv, norm = layers(bias)
    given = ChannelConv(conv.weight, conv.bias, batch_norm_tensors(norm) if with_norm else None, 2, 1, "relu", 2, 3)
    folded = fold_norm(given)
    assert folded.norm is None
    assert (folded.stride, folded.padding, folded.activation, folded.block_out, folded.block_in) == (2, 1, "relu", 2, 3)
    x = torch.randn(2, 3, 7, 7, dtype=torch.float64)
    expected = F.conv2d(x, conv.weight, conv.bias, 2, 1)
    expected = norm(expected) if with_norm else expected
    torch.testing.assert_close(F.conv2d(x, folded.weight, folded.bias, 2, 1), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("with_norm", [True, False])
@torch.no_grad()
def test_a_folded_convolution_shares_no_memory_with_its_layer(with_norm):
    conv, norm = layers(bias=True)
    conv.to(memory_format=torch.channels_last)
    folded = fold_norm(
        ChannelConv(conv.weight, conv.bias, batch_norm_tensors(norm) if with_norm else None, 1, 1, "relu", 1, 1)
    )
    assert folded.weight.is_contiguous()
    weight, bias = folded.weight.clone(), folded.bias.clone()
    for values in (conv.weight, conv.bias, norm.weight, norm.bias, norm.running_mean, norm.running_var):
        values.zero_()
    assert torch.equal(folded.weight, weight)
    assert torch.equal(folded.bias, bias)


@torch.no_grad()
def test_16_bit_weights_are_folded_in_float32():
    conv, norm = (module.bfloat16() for module in layers(bias=True))
    folded = fold_norm(ChannelConv(conv.weight, conv.bias, batch_norm_tensors(norm), 1, 1, "relu", 1, 1))
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    shift = norm.bias.double() + (conv.bias.double() - norm.running_mean.double()) * scale
    assert folded.weight.dtype == folded.bias.dtype == torch.float32
    torch.testing.assert_close(folded.weight, (conv.weight.double() * scale[:, None, None, None]).float())
    torch.testing.assert_close(folded.bias, shift.float())
