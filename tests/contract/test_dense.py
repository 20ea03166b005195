"""Invariant 1: one expert that takes all patches with gate "one" is the dense convolution."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import BACKENDS
from torch.nn import functional as F

import moesaic


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gate_on", ["output", "input"])
@given(p=st.integers(1, 3), rows=st.integers(1, 4), columns=st.integers(1, 4), kernel=st.sampled_from([1, 3, 5]))
def test_one_expert_with_all_patches_is_the_dense_convolution(backend, gate_on, p, rows, columns, kernel):
    layer = moesaic.PatchMoE(
        3,
        4,
        experts=1,
        patches_per_expert=rows * columns,
        patch_size=p,
        kernel_size=kernel,
        gate="one",
        gate_on=gate_on,
        dtype=torch.float64,
    )
    x = torch.randn(2, 3, rows * p, columns * p, dtype=torch.float64)
    with moesaic.backend(backend):
        y = layer(x)
    dense = F.conv2d(x, layer.experts.weight[0], layer.experts.bias[0], padding=kernel // 2)
    torch.testing.assert_close(y, dense, rtol=1e-12, atol=1e-12)
