"""Neurons that switch as at initialisation."""

import math

import pytest
import torch
from torch import Tensor

from moesaic.papers.chowdhury2023.theory.activation_patterns import coupled_share, coupling


def pre_activations(weights: Tensor, patches: Tensor) -> Tensor:
    """(T, B, N, E, J) of weights (T, E, J, D) on patches (T, B, N, D)."""
    return torch.einsum("tejd,tbnd->tbnej", weights, patches)


def drawn(move: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    patches = torch.nn.functional.normalize(torch.randn(2, 5, 6, 8, generator=generator), dim=-1)
    start = 0.1 * torch.randn(2, 3, 400, 8, generator=generator)
    direction = torch.nn.functional.normalize(torch.randn(2, 3, 400, 8, generator=generator), dim=-1)
    routed = torch.rand(2, 5, 6, 3, generator=generator) < 0.4
    return pre_activations(start + move * direction, patches), pre_activations(start, patches), routed


def test_shares_count_the_neurons_that_keep_their_pattern_on_every_routed_patch():
    now, start, routed = drawn(0.05)
    found = coupling(now, start, routed)
    for t, b, e in [(0, 0, 0), (1, 4, 2), (0, 3, 1)]:
        chosen = routed[t, b, :, e]
        same = ((now[t, b, chosen, e] >= 0) == (start[t, b, chosen, e] >= 0)).all(0)
        assert found.share[t, b, e].item() == pytest.approx(same.float().mean().item())
    assert found.share.shape == (2, 5, 3)
    torch.testing.assert_close(found.mean, found.share.mean(1))
    torch.testing.assert_close(found.minimum, found.share.min(1).values)
    assert (found.minimum <= found.quantile(0.25)).all()
    assert (found.quantile(0.25) <= found.mean + 1e-6).any()


def test_nothing_moved_means_all_neurons_are_coupled():
    _, start, routed = drawn(0)
    assert (coupling(start, start, routed).share == 1).all()
    assert (coupling(start, start).drift == 0).all()


def test_all_patches_ask_for_more_than_the_routed_ones():
    now, start, routed = drawn(0.05)
    every, some = coupling(now, start), coupling(now, start, routed)
    assert (every.share <= some.share).all()
    assert (every.share < some.share).any()
    assert torch.equal(every.share, coupling(now, start, torch.ones_like(routed)).share)


def test_the_drift_is_the_largest_change_on_a_patch_that_counts():
    now, start, routed = drawn(0.05)
    found = coupling(now, start, routed)
    moved = (now - start).abs()
    for t in range(2):
        for e in range(3):
            largest = max(moved[t, b, n, e].max().item() for b in range(5) for n in range(6) if routed[t, b, n, e])
            assert found.drift[t, e].item() == pytest.approx(largest)


@pytest.mark.parametrize("move", [1e-4, 1e-3, 3e-3])
def test_the_measured_share_keeps_the_lemmas_promise(move: float):
    now, start, _ = drawn(move)
    promised = coupled_share(tau=move, sigma=0.1, patches=6)
    assert 0 < promised < 1
    assert coupling(now, start, tau=move).minimum.min().item() >= promised


def test_tau_refuses_neurons_near_zero_as_well():
    now, start, _ = drawn(0)
    near = (now.abs() < 0.02).any(-3)
    torch.testing.assert_close(coupling(now, start, tau=0.02).share, (~near).float().mean(-1))


def test_the_guaranteed_share_is_that_of_the_lemmas():
    assert coupled_share(0.001, 0.1, patches=6) == pytest.approx(1 - 2 * math.e * 0.001 * 6 / 0.1)
    assert coupled_share(1.0, 0.1, patches=6) == 0
    assert coupled_share(0.0, 0.1, patches=6) == 1


def test_bad_input_is_refused():
    now, start, routed = drawn(0)
    with pytest.raises(ValueError, match="samples, patches, experts, neurons"):
        coupling(now, start[:1])
    with pytest.raises(ValueError, match="routed is"):
        coupling(now, start, routed[:1])
    with pytest.raises(ValueError, match="σ > 0 fails"):
        coupled_share(0.1, 0.0, 3)
    with pytest.raises(ValueError, match="τ ≥ 0 fails"):
        coupling(now, start, tau=-1)
