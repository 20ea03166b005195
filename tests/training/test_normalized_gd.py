import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from strategies import no_cuda_sync
from torch import Tensor, nn

import moesaic
from moesaic.experts import MLPExperts
from moesaic.routing import SampleRouter
from moesaic.training import NormalizedGD

Expert = list[Tensor]


def experts(count: int = 3, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Expert]:
    """For each expert a matrix and a vector."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((4, 3), (4,))
    return [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(count)]


def gradients_of(step: int, dtype: torch.dtype = torch.float64) -> list[Expert]:
    """Of very different size from expert to expert; the last one's are zero in step 1."""
    found = experts(dtype=dtype, seed=100 + step)
    for e, expert in enumerate(found):
        for gradient in expert:
            gradient.mul_(0.0 if (e, step) == (2, 1) else 10.0 ** (3 * e - 3))
    return found


def as_groups(weights: list[Expert]) -> list[dict[str, Any]]:
    return [{"params": [nn.Parameter(tensor.clone()) for tensor in expert]} for expert in weights]


def train(optimizer: NormalizedGD, steps: range) -> None:
    for step in steps:
        for group, gradients in zip(optimizer.param_groups, gradients_of(step), strict=True):
            for parameter, gradient in zip(group["params"], gradients, strict=True):
                parameter.grad = gradient.clone()
        optimizer.step()


def weights_of(optimizer: NormalizedGD) -> list[Expert]:
    return [[parameter.detach().clone() for parameter in group["params"]] for group in optimizer.param_groups]


def by_hand(
    steps: int,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    norm: str = "print",
    dampening: float = 0.0,
    nesterov: bool = False,
) -> list[Expert]:
    """The update as the docstring words it, one tensor after the other."""
    weights, running = experts(), [[None, None] for _ in range(3)]
    for step in range(steps):
        for e, gradients in enumerate(gradients_of(step)):
            if norm == "print":
                n = sum(float((g**2).sum()) for g in gradients) ** 0.5
            else:
                n = sum(float((g**2).sum()) ** 0.5 for g in gradients)
            for i, g in enumerate(gradients):
                d = (g / n if n else 0 * g) + weight_decay * weights[e][i]
                if momentum:
                    before = running[e][i]
                    running[e][i] = d if before is None else momentum * before + (1 - dampening) * d
                    d = d + momentum * running[e][i] if nesterov else running[e][i]
                weights[e][i] = weights[e][i] - lr * d
    return weights


OPTIONS = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.1, 0.0, 2.0]),
        "momentum": st.sampled_from([0.0, 0.9]),
        "weight_decay": st.sampled_from([0.0, 0.01]),
        "norm": st.sampled_from(["print", "released"]),
        "dampening": st.sampled_from([0.0, 0.5]),
        "nesterov": st.booleans(),
    }
).filter(lambda options: not options["nesterov"] or (options["momentum"] and not options["dampening"]))


@pytest.mark.parametrize("foreach", [False, True])
@given(options=OPTIONS)
def test_steps_are_those_of_a_plain_loop(foreach, options):
    optimizer = NormalizedGD(as_groups(experts()), foreach=foreach, **options)
    train(optimizer, range(4))
    torch.testing.assert_close(weights_of(optimizer), by_hand(4, **options), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("foreach", [False, True])
@given(options=OPTIONS)
def test_stacked_experts_step_as_experts_of_their_own_do(foreach, options):
    weights = experts()
    stacks = [nn.Parameter(torch.stack(tensors)) for tensors in zip(*weights, strict=True)]
    optimizer = NormalizedGD(stacks, stacked=True, foreach=foreach, **options)
    for step in range(4):
        for stack, tensors in zip(stacks, zip(*gradients_of(step), strict=True), strict=True):
            stack.grad = torch.stack(tensors)
        optimizer.step()
    found = [[stack[e].detach() for stack in stacks] for e in range(3)]
    torch.testing.assert_close(found, by_hand(4, **options), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_has_unit_length_for_every_expert_whatever_its_gradient(foreach):
    before = experts()
    optimizer = NormalizedGD(as_groups(before), lr=0.25, foreach=foreach)
    train(optimizer, range(1))
    for old, new in zip(before, weights_of(optimizer), strict=True):
        moved = torch.cat([(b - a).flatten() for a, b in zip(old, new, strict=True)])
        assert moved.norm().item() == pytest.approx(0.25, rel=1e-9)


def test_released_steps_are_shorter_by_the_sum_of_the_tensors_norms():
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    for parameter, gradient in zip(parameters, (3.0, 4.0), strict=True):
        parameter.grad = torch.tensor([gradient])
    NormalizedGD(parameters, lr=7.0, norm="released").step()
    assert [parameter.item() for parameter in parameters] == pytest.approx([-3.0, -4.0])


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
def test_an_expert_without_samples_moves_by_decay_and_momentum_alone(stacked, foreach):
    weight = nn.Parameter(torch.tensor([[2.0]]))
    weight.grad = torch.zeros(1, 1)
    NormalizedGD([weight], lr=0.5, stacked=stacked, foreach=foreach).step()
    assert weight.item() == 2.0
    NormalizedGD([weight], lr=0.5, weight_decay=0.1, stacked=stacked, foreach=foreach).step()
    assert weight.item() == pytest.approx(2.0 - 0.5 * 0.1 * 2.0)


def test_a_tensor_without_a_gradient_stays_where_it_is():
    used, idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = NormalizedGD([{"params": [used]}, {"params": [idle]}], lr=1.0, momentum=0.9, weight_decay=0.1)
    used.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(idle, torch.ones(2))
    assert idle not in optimizer.state


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("size", [1e-30, 1e-42, 1e30])
def test_gradients_too_small_or_large_to_be_squared_are_normalised_all_the_same(size, foreach):
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([size, 0.0])
    NormalizedGD([weight], lr=1.0, foreach=foreach).step()
    assert weight[0].item() == pytest.approx(-1.0, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("foreach", [False, True])
def test_low_precision_holds_norms_it_could_not_represent(dtype, foreach):
    weight = nn.Parameter(torch.zeros(64, dtype=dtype))
    weight.grad = torch.full((64,), 60_000.0, dtype=dtype)  # the norm is 480 000, beyond float16
    NormalizedGD([weight], lr=1.0, foreach=foreach).step()
    torch.testing.assert_close(weight.float(), torch.full((64,), -0.125))


def test_state_survives_saving_and_loading():
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    whole = NormalizedGD(as_groups(experts()), **options)
    train(whole, range(5))

    first = NormalizedGD(as_groups(experts()), **options)
    train(first, range(3))
    state = first.state_dict()
    # as a checkpoint holds it: tensors in safetensors, the rest as plain data
    tensors = {f"{key}.{name}": value for key, values in state["state"].items() for name, value in values.items()}
    restored = load(save(tensors))
    state["state"] = {key: {"momentum_buffer": restored[f"{key}.momentum_buffer"]} for key in state["state"]}
    second = NormalizedGD(as_groups(weights_of(first)), lr=1.0)
    second.load_state_dict(state)
    assert second.param_groups[0]["lr"] == 0.1
    train(second, range(3, 5))
    torch.testing.assert_close(weights_of(second), weights_of(whole), rtol=0, atol=0)


def test_a_closure_is_called_with_gradients_and_its_loss_returned():
    weight = nn.Parameter(torch.tensor([3.0]))
    optimizer = NormalizedGD([weight], lr=1.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 9.0
    assert weight.item() == 2.0


def test_learning_rates_follow_a_schedule():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = NormalizedGD([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):
        weight.grad = torch.tensor([5.0])
        optimizer.step()
        schedule.step()
    assert weight.item() == -1.75


def test_a_scaled_loss_gives_the_same_step_and_one_that_overflowed_none():
    weight = nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer, scaler = NormalizedGD([weight], lr=1.0), torch.amp.GradScaler("cpu")
    scaler.scale(weight @ torch.tensor([3.0, 4.0])).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(weight.detach(), torch.tensor([0.4, 0.2]))
    optimizer.zero_grad()
    scaler.scale(weight @ torch.tensor([torch.inf, 4.0])).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(weight.detach(), torch.tensor([0.4, 0.2]))


@pytest.mark.parametrize("build", ["list", "module list", "stack"])
def test_per_expert_takes_what_sample_moe_takes(build):
    torch.manual_seed(0)
    modules = [nn.Linear(4, 2) for _ in range(3)]
    made = {"list": modules, "module list": nn.ModuleList(modules), "stack": MLPExperts(3, 4, 5, 2)}[build]
    layer = moesaic.SampleMoE(SampleRouter(4, 3), made)
    optimizer = NormalizedGD.per_expert(made, lr=0.5)
    before = copy.deepcopy(layer)
    layer(torch.randn(64, 4)).square().sum().backward()
    optimizer.step()

    def moved(e: int) -> float:
        def slices(experts: nn.Module) -> list[Tensor]:
            own = isinstance(experts, nn.ModuleList)
            return [p if own else p[e] for p in (experts[e] if own else experts).parameters()]

        pairs = zip(slices(layer.experts), slices(before.experts), strict=True)
        return sum((b - a).square().sum().item() for a, b in pairs) ** 0.5

    assert [moved(e) for e in range(3)] == pytest.approx([0.5] * 3, rel=1e-4)


def test_experts_without_parameters_need_no_group():
    optimizer = NormalizedGD.per_expert([nn.Linear(2, 2), nn.Identity()], lr=0.1)
    assert len(optimizer.param_groups) == 1


def test_groups_may_have_options_of_their_own():
    shared, stack = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2, 1))
    optimizer = NormalizedGD([{"params": [shared], "lr": 2.0}, {"params": [stack], "stacked": True}], lr=1.0)
    shared.grad, stack.grad = torch.tensor([8.0]), torch.tensor([[3.0], [0.1]])
    optimizer.step()
    assert shared.item() == -2.0
    torch.testing.assert_close(stack.detach(), torch.tensor([[-1.0], [-1.0]]))


def test_tensors_of_several_dtypes_share_a_norm():
    parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, dtype=torch.float64))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float64)
    NormalizedGD(parameters, lr=1.0, foreach=True).step()
    assert [parameter.item() for parameter in parameters] == pytest.approx([-0.6, -0.8])


def test_a_step_compiles():
    torch.compiler.reset()
    optimizers = [NormalizedGD(as_groups(experts()), lr=0.1, momentum=0.9, foreach=True) for _ in range(2)]
    optimizers[1].step = torch.compile(optimizers[1].step, backend="aot_eager")
    for optimizer in optimizers:
        train(optimizer, range(3))
    torch.testing.assert_close(weights_of(optimizers[1]), weights_of(optimizers[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("stacked", [False, True])
def test_cuda_steps_are_those_of_the_cpu_and_wait_for_nothing(stacked):
    found = []
    for device in ("cpu", "cuda"):
        layer = MLPExperts(4, 8, 16, 3, dtype=torch.float64)
        layer.reset_parameters(torch.Generator().manual_seed(0))
        layer.to(device)
        optimizer = NormalizedGD(layer.parameters(), 0.1, 0.9, 1e-3, stacked=stacked)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for parameter in layer.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype).to(device)
            with no_cuda_sync():
                optimizer.step()
        found.append([parameter.detach().cpu() for parameter in layer.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"lr": -1.0}, ValueError, "lr=-1.0; it must be 0 or more"),
        ({"lr": float("nan")}, ValueError, "lr=nan; it must be 0 or more"),
        ({"lr": "0.1"}, TypeError, "lr='0.1' is a str; it must be a number"),
        ({"lr": 0.1, "momentum": -0.1}, ValueError, "momentum=-0.1; it must be 0 or more"),
        ({"lr": 0.1, "norm": "frobenius"}, ValueError, "norm='frobenius' is unknown; use 'print' or 'released'"),
        ({"lr": 0.1, "nesterov": True}, ValueError, "nesterov=True with momentum=0.0, dampening=0.0; it needs"),
        ({"lr": 0.1, "stacked": True}, ValueError, r"must share one leading axis, got \(4, 3\), \(2,\); put others"),
    ],
)
def test_impossible_options_are_refused(options, error, says):
    with pytest.raises(error, match=says):
        NormalizedGD([nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(2))], **options)


def test_what_is_no_stack_of_experts_is_refused():
    class Crooked(MLPExperts):
        def __len__(self) -> int:
            return 4

    with pytest.raises(ValueError, match=r"must share a leading axis of 4 experts, got \(3, 5, 4\)"):
        NormalizedGD.per_expert(Crooked(3, 4, 5, 2), lr=0.1)
    with pytest.raises(TypeError, match="experts is one Linear; give a list of modules, or stacked experts"):
        NormalizedGD.per_expert(nn.Linear(2, 2), lr=0.1)
    with pytest.raises(ValueError, match=r"got \(\)"):
        NormalizedGD([nn.Parameter(torch.zeros(()))], lr=0.1, stacked=True)


def test_a_group_that_is_refused_is_not_added():
    optimizer = NormalizedGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(ValueError, match=r"got \(\)"):
        optimizer.add_param_group({"params": nn.Parameter(torch.zeros(())), "stacked": True})
    with pytest.raises(ValueError, match="lr=-1; it must be 0 or more"):
        optimizer.add_param_group({"params": nn.Parameter(torch.zeros(2)), "lr": -1})
    assert len(optimizer.param_groups) == 1


def test_gradients_and_parameters_it_cannot_norm_are_refused():
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"a gradient of \(5, 2\) is torch.sparse_coo; .* sparse=False"):
        NormalizedGD(table.parameters(), lr=0.1).step()
    with pytest.raises(TypeError, match=r"a parameter is torch.complex64; it takes floating-point parameters"):
        NormalizedGD([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], lr=0.1)
