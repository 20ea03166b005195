from itertools import pairwise

import pytest
import torch
from torch import nn

from moesaic.ops.channel.bn_folding import FoldedConvs


def layers(*widths: int, **options) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    torch.manual_seed(0)
    made = []
    for before, width in pairwise(widths):
        conv, norm = nn.Conv2d(before, width, 3, padding=1, dtype=torch.float64, **options), nn.BatchNorm2d(width)
        for values in (norm.weight, norm.bias, norm.running_mean):
            nn.init.normal_(values)
        nn.init.uniform_(norm.running_var, 0.5, 2)
        made.append((conv, norm.double().eval()))
    return made


def plainly(made: list[tuple[nn.Conv2d, nn.BatchNorm2d]], x: torch.Tensor) -> torch.Tensor:
    for conv, norm in made:
        x = norm(conv(x)).relu()
    return x


@pytest.mark.parametrize("options", [{"stride": 2}, {"stride": 2, "bias": False}, {}])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("size", [(40, 40), (16, 16), (7, 3), (1, 1)])
@torch.no_grad()
def test_folded_convolutions_equal_those_with_their_batch_norm(size, batch, options):
    made, x = layers(3, 5, 6, 4, **options), torch.randn(batch, 3, *size, dtype=torch.float64)
    expected = plainly(made, x)
    torch.testing.assert_close(FoldedConvs(made)(x), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(FoldedConvs(made).mean(x), expected.mean((2, 3)), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_running_statistics_that_change_are_noticed():
    made, x = layers(3, 5), torch.randn(1, 3, 8, 8, dtype=torch.float64)
    folded = FoldedConvs(made)
    folded(x)
    made[0][1].train()(made[0][0](torch.randn(4, 3, 8, 8, dtype=torch.float64)))
    made[0][1].eval()
    torch.testing.assert_close(folded(x), plainly(made, x))


@torch.no_grad()
def test_layers_that_have_hooks_are_called():
    made, x = layers(3, 5, 4), torch.randn(1, 3, 8, 8, dtype=torch.float64)
    folded, heard = FoldedConvs(made), []
    made[1][0].register_forward_hook(lambda module, args, y: heard.append(y.shape))
    torch.testing.assert_close(folded(x), plainly(made, x), rtol=1e-10, atol=1e-10)
    assert len(heard) == 2
