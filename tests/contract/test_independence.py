"""Invariant 3: an image's output depends on neither its batch-mates (eval mode) nor the memory format."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import BACKENDS, Case, assert_same, cases, run

import moesaic


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=cases(batch=st.integers(2, 4), router="expert") | cases(batch=st.integers(2, 4), router="unit"))
def test_the_output_of_an_image_does_not_depend_on_its_batch(backend, case: Case):
    layer, x = case.build().eval(), case.map()
    with moesaic.backend(backend), torch.no_grad():
        together = layer(x)
        alone = torch.cat([layer(image[None]) for image in x])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=cases(batch=st.integers(1, 3)))
def test_the_output_does_not_depend_on_the_memory_format(backend, case: Case):
    layer, x = case.build(), case.map()
    channels_last = run(
        layer.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last), backend
    )
    assert_same(channels_last, run(case.build(), x, backend), tolerance=1e-12)


@pytest.mark.parametrize("backend", ["torch"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_output_keeps_the_memory_format_of_the_input(backend, memory_format):
    layer = moesaic.PatchMoE(4, 4, experts=2, patches_per_expert=1, patch_size=2)
    with moesaic.backend(backend):
        y = layer(torch.randn(2, 4, 6, 6).contiguous(memory_format=memory_format))
    assert y.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unassigned_patch_does_not_affect_the_output_even_if_it_is_nan(backend):
    layer = moesaic.PatchMoE(2, 2, experts=2, patches_per_expert=1, patch_size=2, kernel_size=3, expert_norm=True)
    x = torch.randn(1, 2, 8, 8)
    routing = layer.route(x)
    free = int((~routing.mask[0].any(-1)).nonzero()[0])
    row, column = 2 * (free // 4), 2 * (free % 4)
    poisoned = x.clone()
    poisoned[:, :, row : row + 2, column : column + 2] = torch.nan

    def routed_as_before(_: torch.Tensor) -> moesaic.Routing:
        return routing

    layer.router.forward = routed_as_before
    with moesaic.backend(backend):
        layer.eval()
        torch.testing.assert_close(layer(poisoned), layer(x))
