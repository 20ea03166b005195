"""Invariant 4: routing is deterministic under ties, and permuting the patches permutes the routing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moesaic
from moesaic.routing import Router


def routers(E: int, N: int) -> list[Router]:
    return [
        *(moesaic.ExpertChoice(1, E, L, gate=g) for L in {1, N} for g in ("softmax_selected", "softmax_all", "one")),
        *(moesaic.TokenChoice(1, E, k, gate=g) for k in {1, E} for g in ("softmax_all", "softmax_selected", "one")),
        # with one expert all gates are 1, and among equals order decides who is served
        *([moesaic.TokenChoice(1, E, 1, capacity_factor=0.5, in_eval=True)] if E > 1 else []),
    ]


@given(B=st.integers(0, 3), N=st.integers(1, 6), E=st.integers(1, 4), seed=st.integers(0, 99))
def test_permuting_the_patches_permutes_the_routing(B, N, E, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(B, N, E, generator=generator, dtype=torch.float64)
    order = torch.randperm(N, generator=generator)
    for router in [*routers(E, N), moesaic.SoftRouter(1, E, 1)]:
        plain, permuted = router.eval().choose(scores), router.choose(scores[:, order])
        assert torch.equal(permuted.mask, plain.mask[:, order])
        torch.testing.assert_close(permuted.weights, plain.weights[:, order])


@given(scores=st.lists(st.integers(0, 2), min_size=6, max_size=6), L=st.integers(1, 6))
def test_ties_go_to_the_lower_patch_index(scores, L):
    routing = moesaic.ExpertChoice(1, 1, L).choose(torch.tensor(scores, dtype=torch.float32).view(1, 6, 1))
    best_first = sorted(range(6), key=lambda n: (-scores[n], n))
    assert routing.index[0, 0].tolist() == best_first[:L]


@given(scores=st.lists(st.integers(0, 2), min_size=4, max_size=4), k=st.integers(1, 4))
def test_ties_go_to_the_lower_expert_index(scores, k):
    routing = moesaic.TokenChoice(1, 4, k).choose(torch.tensor(scores, dtype=torch.float32).view(1, 1, 4))
    best_first = sorted(range(4), key=lambda e: (-scores[e], e))
    assert routing.index[0, 0].tolist() == best_first[:k]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("E", [1, 2, 3, 17])
@pytest.mark.parametrize("side", [2, 5, 7])
@pytest.mark.parametrize("B", [1, 2, 3])
def test_equal_patches_of_an_image_tie_exactly(dtype, E, side, B):
    for C, p in ((3, 2), (5, 4), (70, 1)):
        router = moesaic.ExpertChoice(C, E, 4, patch_size=p, dtype=dtype)
        tile = torch.randn(B, C, p, p, dtype=dtype)
        assert router(tile.repeat(1, 1, side, side)).index.tolist() == [[[0, 1, 2, 3]] * E] * B


@pytest.mark.parametrize("E", [1, 2, 3, 8])
def test_scores_of_an_image_are_bitwise_equal_in_every_batch(E):
    for C, p, side in ((3, 2, 5), (5, 4, 3), (70, 1, 7)):
        router = moesaic.ExpertChoice(C, E, 1, patch_size=p)
        x = torch.randn(5, C, side * p, side * p)
        together = router.scores(x)
        for size in (1, 2, 3):
            assert torch.equal(router.scores(x[:size]), together[:size])
