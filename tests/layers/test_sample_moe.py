import copy

import pytest
import torch
from torch import Tensor, nn

import moesaic
from moesaic import insight
from moesaic.experts import ConvExperts, LinearExperts, PatchNetExperts
from moesaic.routing import SampleRouter, importance_loss, load_balance_loss


class FixedScores(nn.Module):
    """Returns fixed scores for all samples."""

    def __init__(self, scores: list[list[float]]) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.tensor(scores))

    def forward(self, x: Tensor) -> Tensor:
        return self.scores


def constant(value: float) -> nn.Module:
    """An expert whose output is one number for every sample."""
    expert = nn.Linear(1, 1)
    with torch.no_grad():
        expert.weight.zero_()
        expert.bias.fill_(value)
    return expert


def layer_of(scores: list[list[float]], **options) -> moesaic.SampleMoE:
    experts = [constant(10.0**e) for e in range(len(scores[0]))]
    return moesaic.SampleMoE(FixedScores(scores), experts, **{"noise": None, **options})


def test_the_softmax_gate_is_the_softmax_over_all_experts():
    y = layer_of([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])(torch.zeros(2, 1))
    share = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]]).softmax(-1)
    torch.testing.assert_close(y.flatten(), torch.stack([10 * share[0, 1], share[1, 0]]))


def test_the_raw_gate_is_the_selected_score_with_noise():
    x = torch.zeros(1, 1)
    assert layer_of([[0.5, 2.0, 1.0]], gate="raw")(x).item() == pytest.approx(20)
    noisy = layer_of([[0.5, 2.0, 1.0]], gate="raw", noise="uniform")
    routing = noisy.route(x)
    extra = routing.gate - routing.scores.gather(-1, routing.index)
    assert 0 < extra.item() < 1
    torch.testing.assert_close(routing.scores, torch.tensor([[[0.5, 2.0, 1.0]]]))


def test_outputs_of_top_k_experts_are_summed_and_ties_go_to_the_lower_index():
    y = layer_of([[1.0, 1.0, 1.0, 1.0]], top_k=2, gate="raw")(torch.zeros(1, 1))
    assert y.item() == pytest.approx(1 + 10)


def test_noise_changes_the_choice_and_never_the_softmax_gate():
    layer = layer_of([[0.0, 0.0]] * 200, noise="uniform")
    routing = layer.route(torch.zeros(200, 1))
    assert routing.index.unique().numel() == 2
    assert (routing.gate == 0.5).all()


def test_noise_is_off_in_eval_by_default():
    x = torch.zeros(200, 1)
    assert (layer_of([[0.0, 0.0]] * 200, noise="uniform").eval().route(x).index == 0).all()
    noisy = layer_of([[0.0, 0.0]] * 200, noise="uniform", noise_in_eval=True).eval()
    assert noisy.route(x).index.unique().numel() == 2


def test_noise_is_reproducible_and_scaled():
    x = torch.zeros(200, 1)
    scores = [[0.0, 0.5]] * 200
    chosen = [
        layer_of(scores, noise="uniform", noise_scale=2.0, generator=torch.Generator().manual_seed(seed)).route(x).index
        for seed in (1, 1, 2)
    ]
    assert torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[0], chosen[2])
    assert (layer_of(scores, noise="uniform", noise_scale=0.4).route(x).index == 1).all()


@pytest.mark.parametrize("gate", ["softmax", "raw"])
def test_gradients_flow_to_the_router_through_the_gate(gate):
    layer = layer_of([[0.0, 2.0, 1.0]], gate=gate)
    layer(torch.zeros(1, 1)).sum().backward()
    share = torch.tensor([0.0, 2.0, 1.0]).softmax(-1)
    chosen = torch.tensor([0.0, 1.0, 0.0])
    expected = 10 * share[1] * (chosen - share) if gate == "softmax" else 10 * chosen
    torch.testing.assert_close(layer.router.scores.grad[0], expected)


def test_the_routing_works_with_losses_and_metrics():
    experts = PatchNetExperts(4, 6, 4, init_std=1.0)
    model = nn.Sequential(moesaic.SampleMoE(SampleRouter(6, 4), experts, top_k=2))
    with torch.no_grad():
        model[0].router.weight.normal_()
    with moesaic.record_routing(model) as routing:
        model(torch.randn(12, 3, 6))
    record = routing["0"]
    assert (record.unit, record.index.shape, record.gate.shape) == ("sample", (12, 1, 2), (12, 1, 2))
    assert insight.summary(record).unit == "sample"
    assert insight.dispatch_entropy(record, [0, 1] * 6) > 0
    (load_balance_loss(record) + importance_loss(record)).backward()
    assert model[0].router.weight.grad.abs().sum() > 0
    with moesaic.record_routing(model, keep="all") as joined:
        model(torch.randn(5, 3, 6))
        model(torch.randn(4, 3, 6))
    assert joined["0"].batch == 9


def test_experts_can_be_whole_networks_and_an_unused_one_has_no_gradient():
    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    layer = moesaic.SampleMoE(FixedScores([[0.0, 1.0, 5.0]] * 3 + [[7.0, 0.0, 0.0]]), [network() for _ in range(3)])
    before = copy.deepcopy(layer.experts)
    x = torch.randn(4, 3, 8, 8)
    layer(x).sum().backward()
    assert all(parameter.grad is None for parameter in layer.experts[1].parameters())
    assert all(parameter.grad is not None for parameter in layer.experts[2].parameters())
    assert torch.equal(layer.experts[1][1].running_mean, before[1][1].running_mean)
    # batch statistics are those of the expert's own samples
    before[2](x[:3])
    torch.testing.assert_close(layer.experts[2][1].running_mean, before[2][1].running_mean)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_autocast_applies_to_listed_experts_and_not_to_gates(backend):
    layer = moesaic.SampleMoE(nn.Linear(4, 3), [nn.Linear(4, 2) for _ in range(3)], top_k=3, noise=None)
    x = torch.randn(10, 4)
    expected = layer(x)
    with moesaic.backend(backend), torch.autocast("cpu", torch.bfloat16), moesaic.record_routing(layer) as routing:
        y = layer(x)
    assert (y.dtype, routing[""].gate.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_batchnorm_sees_the_samples_of_its_own_expert_on_every_backend(backend):
    experts = [nn.BatchNorm1d(2) for _ in range(2)]
    layer = moesaic.SampleMoE(FixedScores([[1.0, 0.0]] * 4 + [[0.0, 1.0]] * 3), experts, noise=None)
    x = torch.randn(7, 2)
    with moesaic.backend(backend):
        layer(x)
    torch.testing.assert_close(experts[0].running_mean, 0.1 * x[:4].mean(0))
    torch.testing.assert_close(experts[1].running_mean, 0.1 * x[4:].mean(0))


def test_a_batch_smaller_than_the_number_of_experts_runs():
    experts = [nn.Linear(4, 2) for _ in range(8)]
    assert moesaic.SampleMoE(SampleRouter(4, 8), experts)(torch.randn(1, 4)).shape == (1, 2)
    assert moesaic.SampleMoE(SampleRouter(4, 8), LinearExperts(8, 4, 2))(torch.randn(1, 4)).shape == (1, 2)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_an_empty_batch_has_an_empty_output(backend):
    for experts in ([nn.Linear(4, 2) for _ in range(3)], LinearExperts(3, 4, 2)):
        with moesaic.backend(backend):
            y = moesaic.SampleMoE(SampleRouter(4, 3), experts)(torch.randn(0, 4))
        assert y.shape == (0, 2)
        y.sum().backward()


def test_batchnorm_on_one_sample_raises_an_error_with_remedies():
    layer = moesaic.SampleMoE(FixedScores([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]), [nn.BatchNorm1d(2) for _ in range(2)])
    message = r"expert 1 got 1 sample of the batch, too few for its BatchNorm to train on; use larger batches"
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(3, 2))
    assert layer.eval()(torch.randn(3, 2)).shape == (3, 2)


def test_other_errors_inside_an_expert_are_raised_unchanged():
    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    with pytest.raises(ValueError, match=r"^no$"):
        moesaic.SampleMoE(nn.Linear(2, 1), [Picky()])(torch.randn(3, 2))


class Returns(nn.Module):
    def __init__(self, output) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor):
        return self.output(x)


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (lambda x: (x, x), TypeError, "expert 0 returned a tuple; experts must return one tensor"),
        (lambda x: x.sum(), ValueError, r"expert 0 returned \(\) for 4 samples; its output must keep the batch axis"),
        (lambda x: x[:1], ValueError, r"expert 0 returned \(1, 2\) for 4 samples"),
        (lambda x: x.argmax(1), TypeError, "expert 0 returned torch.int64; gates need floating-point"),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_outputs_that_cannot_be_combined_are_refused(output, error, message, backend):
    with moesaic.backend(backend), pytest.raises(error, match=message):
        moesaic.SampleMoE(nn.Linear(2, 1), [Returns(output)])(torch.randn(4, 2))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_experts_whose_outputs_differ_in_shape_are_refused(backend):
    layer = moesaic.SampleMoE(FixedScores([[1.0, 0.0], [0.0, 1.0]]), [nn.Linear(2, 3), nn.Linear(2, 4)], noise=None)
    message = r"output of expert 0 for a sample has the shape \(3,\), that of expert 1 \(4,\)"
    with moesaic.backend(backend), pytest.raises(ValueError, match=message):
        layer(torch.randn(2, 2))


@pytest.mark.parametrize("output", [lambda x: x[:, 0], lambda x: x.view(-1, 2, 1, 1).expand(-1, 2, 3, 4)])
def test_outputs_can_have_any_shape(output):
    layer = moesaic.SampleMoE(nn.Linear(2, 3), [Returns(output) for _ in range(3)], top_k=3, noise=None)
    x = torch.randn(5, 2)
    torch.testing.assert_close(layer(x), output(x))  # the gates of all experts add up to 1


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_channels_last_is_preserved(memory_format, top_k):
    seen = []
    experts = [Returns(lambda x: seen.append(x) or 2 * x) for _ in range(3)]
    layer = moesaic.SampleMoE(SampleRouter(4, 3, 2), experts, top_k)
    y = layer(torch.randn(9, 4, 6, 6).contiguous(memory_format=memory_format))
    assert all(tensor.is_contiguous(memory_format=memory_format) for tensor in [*seen, y])


def test_listed_experts_accept_integer_samples():
    class Mean(nn.Embedding):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean(1)

    layer = moesaic.SampleMoE(Mean(10, 3), [Mean(10, 4) for _ in range(3)])
    assert layer(torch.randint(10, (6, 5))).shape == (6, 4)


def test_a_router_that_does_not_return_scores_is_refused():
    experts = [nn.Linear(4, 2) for _ in range(3)]
    message = r"router returned \(5, 2\) for 5 samples and 3 experts; it must return scores \(5, 3\)"
    with pytest.raises(ValueError, match=message):
        moesaic.SampleMoE(nn.Linear(4, 2), experts)(torch.randn(5, 4))
    with pytest.raises(ValueError, match="router returned a Routing for 5 samples"):
        moesaic.SampleMoE(moesaic.TokenChoice(4, 3), experts)(torch.randn(5, 4, 2, 2))


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda r, e: moesaic.SampleMoE(r, e, top_k=3), ValueError, "top_k=3, but there are 2 experts; use 1 to 2"),
        (lambda r, e: moesaic.SampleMoE(r, e, top_k=0), ValueError, "top_k=0; it must be at least 1"),
        (lambda r, e: moesaic.SampleMoE(r, e, gate="one"), ValueError, "gate='one' is unknown; use 'softmax' or 'raw'"),
        (lambda r, e: moesaic.SampleMoE(r, e, noise="normal"), ValueError, "noise='normal' is unknown; use 'uniform'"),
        (lambda r, e: moesaic.SampleMoE(r, []), ValueError, "experts=0; it must be at least 1"),
        (lambda r, e: moesaic.SampleMoE(r, nn.Linear(2, 2)), TypeError, "experts is one Linear; give a list of"),
        (lambda r, e: moesaic.SampleMoE(r, nn.Sequential(*e)), TypeError, "experts is one Sequential; give a list of"),
        (lambda r, e: moesaic.SampleMoE(r, ConvExperts(2, 3, 4)), TypeError, "ConvExperts run on the patches of a map"),
        (lambda r, e: moesaic.SampleMoE(r, [torch.relu]), TypeError, "expert 0 is a builtin_function_or_method"),
        (lambda r, e: moesaic.SampleMoE(torch.relu, e), TypeError, "give a module from samples to scores"),
    ],
)
def test_invalid_arguments_are_refused(build, error, message):
    with pytest.raises(error, match=message):
        build(nn.Linear(2, 2), [nn.Linear(2, 2) for _ in range(2)])
