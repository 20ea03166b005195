from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moesaic
from moesaic.routing_record import UNASSIGNED


@given(B=st.integers(0, 3), N=st.integers(1, 5), E=st.integers(1, 4), seed=st.integers(0, 99))
def test_weights_mask_and_load_agree_with_index_and_gate(B, N, E, seed):
    scores = torch.randn(B, N, E, generator=torch.Generator().manual_seed(seed))
    by_expert = moesaic.ExpertChoice(1, E, N).choose(scores)
    by_unit = moesaic.TokenChoice(1, E, E).choose(scores)
    for b in range(B):
        for e in range(E):
            for unit, gate in zip(by_expert.index[b, e], by_expert.gate[b, e], strict=True):
                assert by_expert.weights[b, unit, e] == gate
        for n in range(N):
            for expert, gate in zip(by_unit.index[b, n], by_unit.gate[b, n], strict=True):
                assert by_unit.weights[b, n, expert] == gate
    for routing in (by_expert, by_unit):
        assert routing.mask.all()
        assert routing.weights.shape == routing.mask.shape == (B, N, E)
        assert routing.load.tolist() == [B * N] * E


def test_unassigned_places_appear_in_no_dense_view():
    scores = torch.zeros(1, 3, 2)
    index = torch.tensor([[[0, UNASSIGNED], [2, 1]]])
    gate = torch.tensor([[[0.5, 0.0], [0.25, 0.75]]])
    routing = moesaic.Routing("patch", scores, index, gate, "expert")
    assert routing.weights[0].tolist() == [[0.5, 0.0], [0.0, 0.75], [0.0, 0.25]]
    assert routing.mask[0].tolist() == [[True, False], [False, True], [False, True]]
    assert routing.load.tolist() == [1, 2]


def test_gradients_flow_from_weights_to_the_gate():
    scores = torch.randn(2, 4, 3, requires_grad=True)
    moesaic.ExpertChoice(1, 3, 2).choose(scores).weights.square().sum().backward()
    assert scores.grad.abs().sum() > 0


def test_an_unknown_chooser_is_refused():
    with pytest.raises(ValueError, match="Routing: chooser='experts' is unknown; use 'expert', 'unit' or 'soft'"):
        moesaic.Routing("patch", torch.zeros(1, 2, 1), torch.zeros(1, 1, 1).long(), torch.ones(1, 1, 1), "experts")


def test_a_detached_record_requires_no_grad():
    scores = torch.randn(2, 4, 6, requires_grad=True)
    for routing in (moesaic.SoftRouter(1, 3, 2).choose(scores), moesaic.TokenChoice(1, 6).choose(scores)):
        cut = routing.detach()
        assert not any(t.requires_grad for t in (cut.scores, cut.gate, cut.dispatch) if t is not None)
        assert torch.equal(cut.weights, routing.weights)


def test_a_soft_routing_assigns_all_units_to_all_experts():
    routing = moesaic.SoftRouter(1, 3, 2).choose(torch.randn(2, 5, 6))
    assert routing.mask.all()
    torch.testing.assert_close(routing.weights.sum(-1), torch.ones(2, 5))
    torch.testing.assert_close(routing.load.sum(), torch.tensor(10.0))


def test_a_record_is_printed_in_one_line_of_shapes():
    routing = moesaic.ExpertChoice(1, 4, 2).choose(torch.zeros(8, 49, 4), grid=(7, 7))
    assert repr(routing) == (
        "Routing(unit='patch', chooser='expert', scores=(8, 49, 4), index=(8, 4, 2), gate=(8, 4, 2), grid=(7, 7))"
    )
    soft = moesaic.SoftRouter(1, experts=2, slots_per_expert=3)(torch.zeros(1, 1, 5, 1))
    assert "dispatch=(1, 5, 2, 3)" in repr(soft)
    assert "index" not in repr(soft)


def test_padding_behind_the_prefix_is_still_padding_without_it():
    mask = torch.tensor([[True, True, False]])
    routing = moesaic.TokenChoice(1, 2).choose(torch.zeros(1, 3, 2), mask=mask)
    without = replace(routing, prefix=1).without_prefix()
    assert without.unit_mask is not None
    assert without.unit_mask.tolist() == [[True, False]]
