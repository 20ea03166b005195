import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesaic import insight
from moesaic.routing import load_balance_loss
from moesaic.routing.channel_gate import ChannelGate, gate_l1
from moesaic.routing_record import UNASSIGNED


def embeddings(batch: int = 64, width: int = 16) -> torch.Tensor:
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(0))


def test_gates_start_open_for_every_image_and_channel():
    torch.manual_seed(5)  # not that of the embeddings; under some seeds one of the 2 560 gates is further from 1
    routing = ChannelGate(16, channels=40)(embeddings())
    assert routing.mask.all()
    assert (routing.weights - 1).abs().max() < 0.6


def test_the_printed_form_has_no_bias_and_starts_half_closed():
    torch.manual_seed(0)
    gate = ChannelGate(16, channels=200, bias=None)
    assert [name for name, _ in gate.named_parameters()] == ["weight"]
    assert 0.4 < gate(embeddings()).mask.float().mean() < 0.6


def test_relu_gates_are_the_positive_scores_and_the_rest_goes_to_nobody():
    routing = ChannelGate(1, channels=4).choose(torch.tensor([[0.5, -2.0, 0.0, 3.0]]))
    assert routing.unit == "channel"
    assert routing.index.tolist() == [[[0, UNASSIGNED, UNASSIGNED, 3]]]
    assert routing.weights.tolist() == [[[0.5, 0.0, 0.0, 3.0]]]
    assert routing.gate.tolist() == [[[0.5, 0.0, 0.0, 3.0]]]


def test_gates_are_a_linear_function_of_the_embedding():
    gate, e = ChannelGate(16, channels=24, block=8, dtype=torch.float64), embeddings().double()
    torch.nn.init.normal_(gate.weight)
    expected = (e @ gate.weight.T + gate.bias).relu()
    torch.testing.assert_close(gate(e).weights[:, 0], expected, rtol=0, atol=1e-12)


def test_the_last_block_may_be_shorter():
    assert ChannelGate(4, channels=33, block=16)(torch.randn(2, 4)).experts == 3


@given(
    scores=st.lists(st.lists(st.integers(-2, 2), min_size=7, max_size=7), min_size=0, max_size=4),
    keep=st.integers(1, 7),
)
def test_top_k_keeps_exactly_k_blocks_and_ties_go_to_the_lower_index(scores, keep):
    gate = ChannelGate(3, channels=7, mode="topk", keep=keep)
    routing = gate.choose(torch.tensor(scores, dtype=torch.float32).view(-1, 7))
    for row, mask in zip(scores, routing.mask[:, 0].tolist(), strict=True):
        ranked = sorted(range(7), key=lambda e: (-row[e], e))
        assert [e for e in range(7) if mask[e]] == sorted(ranked[:keep])
    assert (routing.gate > 0).all()
    assert routing.index.shape == (len(scores), 1, keep)


def test_gradients_of_top_k_are_plain():
    scores = torch.tensor([[1.0, -1.0, 2.0]], requires_grad=True)
    ChannelGate(3, channels=3, mode="topk", keep=2).choose(scores).weights.sum().backward()
    torch.testing.assert_close(scores.grad, torch.tensor([[1.0, 0.0, 2.0]]).sigmoid() * torch.tensor([[1.0, 0, 1]]))


def test_gates_are_computed_in_float32_whatever_the_embedding_is():
    gate = ChannelGate(16, channels=8)
    with torch.autocast("cpu", torch.bfloat16):
        assert gate(embeddings()).gate.dtype == torch.float32
    assert gate.bfloat16()(embeddings().bfloat16()).gate.dtype == torch.float32
    assert gate.double()(embeddings().double()).gate.dtype == torch.float64


def test_an_image_has_the_same_gates_in_every_batch():
    gate, e = ChannelGate(16, channels=40), embeddings()
    assert torch.equal(gate(e).weights[7:8], gate(e[7:8]).weights)


def test_a_score_that_is_not_a_number_is_not_hidden():
    routing = ChannelGate(1, channels=2).choose(torch.tensor([[float("nan"), 1.0]]))
    assert routing.weights.isnan().tolist() == [[[True, False]]]


def test_the_l1_of_gates_is_entrywise_and_does_not_grow_with_width_or_batch():
    scores = torch.tensor([[2.0, -1.0, 0.0, 1.0], [1.0, 1.0, 1.0, -9.0]])
    narrow = gate_l1(ChannelGate(1, channels=4).choose(scores))
    wide = gate_l1(ChannelGate(1, channels=8).choose(scores.repeat(3, 2)))
    assert narrow.item() == wide.item() == 6 / 8


def test_the_l1_presses_on_every_open_gate_alike_and_on_no_closed_one():
    scores = torch.tensor([[2.0, -1.0, 0.5, 1.0]], requires_grad=True)
    gate_l1(ChannelGate(1, channels=4).choose(scores)).backward()
    assert scores.grad.tolist() == [[0.25, 0.0, 0.25, 0.25]]


def test_the_l1_of_an_empty_batch_is_zero():
    assert gate_l1(ChannelGate(3, channels=4)(torch.zeros(0, 3))).item() == 0


def test_metrics_read_gates_as_experts():
    routing = ChannelGate(1, channels=3).choose(torch.tensor([[1.0, -1.0, 1.0], [1.0, -1.0, -1.0]]))
    assert insight.dead_experts(routing) == [1]
    assert routing.load.tolist() == [2, 0, 1]
    assert "3 experts" in str(insight.summary(routing))
    assert load_balance_loss(routing).isfinite()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"block": 9}, ValueError, "block=9 is more than the 8 channels there are; use 1 to 8"),
        ({"block": 0}, ValueError, "block=0; it must be at least 1"),
        ({"mode": "top"}, ValueError, "did you mean 'topk'"),
        ({"mode": "topk"}, TypeError, "keep is missing"),
        ({"mode": "topk", "keep": 5, "block": 2}, ValueError, "are 4 blocks; use 1 to 4"),
        ({"keep": 2}, ValueError, "keep=2 has no meaning under mode='relu'"),
        ({"straight_through": True}, ValueError, "straight_through=True has no meaning under mode='relu'"),
        ({"mode": "hard", "keep": 2}, ValueError, "keep=2 has no meaning under mode='hard'"),
        ({"mode": "hard", "straight_through": True}, ValueError, "under mode='hard', where all gates have gradients"),
    ],
)
def test_options_that_cannot_be(options, error, message):
    with pytest.raises(error, match=message):
        ChannelGate(4, 8, **options)


def test_embeddings_that_do_not_fit():
    with pytest.raises(ValueError, match=r"takes embeddings \(B, 4\), got \(2, 5\)"):
        ChannelGate(4, 8)(torch.zeros(2, 5))
    with pytest.raises(TypeError, match=r"got torch\.int64"):
        ChannelGate(4, 8)(torch.zeros(2, 4, dtype=torch.long))


def test_the_l1_is_that_of_channels():
    routing = ChannelGate(1, channels=2).choose(torch.ones(1, 2))
    object.__setattr__(routing, "unit", "patch")
    with pytest.raises(ValueError, match="takes the routing of channels, got that of a patch"):
        gate_l1(routing)


# while it trains


def test_straight_through_changes_no_gate_and_gives_the_blocks_that_were_not_kept_a_gradient():
    values = torch.tensor([[1.0, -1.0, 2.0], [0.0, 3.0, -2.0]])
    plain, through = values.clone().requires_grad_(), values.clone().requires_grad_()
    pull = torch.tensor([0.5, -2.0, 3.0])  # what the loss makes of each gate
    usual = ChannelGate(3, channels=3, mode="topk", keep=1).choose(plain)
    routing = ChannelGate(3, channels=3, mode="topk", keep=1, straight_through=True).choose(through)
    assert torch.equal(routing.weights, usual.weights)
    assert torch.equal(routing.mask, usual.mask)
    (routing.weights * pull).sum().backward()
    torch.testing.assert_close(through.grad, values.sigmoid() * pull)
    (usual.weights * pull).sum().backward()
    assert torch.equal(plain.grad != 0, usual.mask[:, 0])


def test_straight_through_is_for_training_alone_and_survives_being_detached():
    gate = ChannelGate(3, channels=3, mode="topk", keep=1, straight_through=True)
    scores = torch.tensor([[1.0, -1.0, 2.0]], requires_grad=True)
    assert not gate.choose(scores).detach().weights.requires_grad
    gate.eval().choose(scores).weights.sum().backward()
    assert scores.grad.count_nonzero() == 1


def test_noise_changes_the_choice_in_training_mode_alone_and_not_the_scores():
    gate = ChannelGate(16, channels=40)
    quiet = gate(embeddings())
    gate.noise = 1.0
    torch.manual_seed(0)
    noisy = gate(embeddings())
    assert torch.equal(noisy.scores, quiet.scores)
    assert 0.7 < noisy.mask.float().mean() < 0.95, "a normal number is below −1 in 16 of 100 cases"
    torch.testing.assert_close(noisy.weights, noisy.weights.relu())
    assert torch.equal(gate.eval()(embeddings()).weights, quiet.weights)


def test_hard_gates_are_steps_with_the_gradient_of_a_sigmoid_in_training():
    gate = ChannelGate(3, channels=3, mode="hard")
    gate.temperature = 0.5
    scores = torch.tensor([[1.0, -1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    routing = gate.choose(scores)
    assert routing.weights.tolist() == [[[1.0, 0.0, 0.0]]]
    assert routing.index.tolist() == [[[0, UNASSIGNED, UNASSIGNED]]]
    assert routing.gate.tolist() == [[[1.0, 0.0, 0.0]]]
    pull = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)
    (routing.weights * pull).sum().backward()
    p = (scores.detach() / 0.5).sigmoid()
    torch.testing.assert_close(scores.grad, p * (1 - p) / 0.5 * pull)
    assert not gate.eval().choose(scores).weights.requires_grad


def test_hard_gates_with_noise_are_open_with_the_probability_of_their_score():
    gate = ChannelGate(1, channels=3, mode="hard")
    gate.noise = 1.0
    torch.manual_seed(0)
    scores = torch.tensor([-1.0, 0.0, 2.0]).expand(20_000, -1)
    routing = gate.choose(scores)
    torch.testing.assert_close(routing.mask[:, 0].float().mean(0), scores[0].sigmoid(), rtol=0, atol=0.015)
    assert torch.equal(routing.scores[:, 0], scores)
    assert torch.equal(gate.eval().choose(scores).mask[:, 0], scores > 0)


def test_a_hard_gate_whose_score_is_not_a_number_is_not_hidden():
    routing = ChannelGate(1, channels=2, mode="hard").eval().choose(torch.tensor([[torch.nan, -1.0]]))
    assert routing.weights.isnan().tolist() == [[[True, False]]]


def test_noise_lets_other_blocks_into_the_top_k():
    gate = ChannelGate(16, channels=40, mode="topk", keep=5)
    gate.noise = 1.0
    torch.manual_seed(0)
    routing = gate(embeddings())
    assert (routing.mask.sum(-1) == 5).all()
    assert not torch.equal(routing.mask, gate.eval()(embeddings()).mask)
