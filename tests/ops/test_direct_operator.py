"""A direct operator is its custom operator, without the dispatcher in eager mode."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from moesaic.ops import plan_cache
from moesaic.ops.direct_operator import direct_operator, joint_operator

calls: list[str] = []


@direct_operator("moesaic_test::scaled_transpose")
def scaled_transpose(x: Tensor, weight: Tensor, constants: list[Tensor | None], power: int) -> tuple[Tensor, Tensor]:
    """The transpose of x · weight · constants[0], and x for the gradient."""
    calls.append(type(x).__name__)
    y = x * weight * constants[0] ** power
    return y.transpose(0, 1), x.clone()


@scaled_transpose.register_fake
def _(x, weight, constants, power):
    return x.new_empty(x.shape[1], x.shape[0]), torch.empty_like(x)


@direct_operator("moesaic_test::scaled_transpose_backward")
def scaled_transpose_backward(
    grad: Tensor, x: Tensor, weight: Tensor, constant: Tensor, power: int
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    grad = grad.transpose(0, 1) * constant**power
    return grad * weight, (grad * x).sum(0)


@scaled_transpose_backward.register_fake
def _(grad, x, weight, constant, power):
    return torch.empty_like(x), torch.empty_like(weight)


def _setup(ctx, inputs, output):
    _, weight, constants, ctx.power = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.no_constants = None if None in constants else [None] * len(constants)
    ctx.save_for_backward(output[1], weight, constants[0])


def _backward(ctx, grad, _):
    grad_x, grad_weight = scaled_transpose_backward(grad, *ctx.saved_tensors, ctx.power)
    return grad_x, grad_weight, ctx.no_constants, None


scaled_transpose.register_autograd(_backward, setup_context=_setup)


@direct_operator("moesaic_test::count", mutates=("counter",))
def count(x: Tensor, counter: Tensor) -> Tensor:
    """Adds one to the counter, unseen by torch, as a kernel does."""
    counter.data.add_(1)
    return x + 1


@count.register_fake
def _(x, counter):
    return torch.empty_like(x)


@pytest.fixture
def inputs():
    calls.clear()
    x, weight = torch.randn(3, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    return x.requires_grad_(), weight.requires_grad_(), [torch.full((5,), 2.0, dtype=torch.float64)], 3


def with_gradients(operator, inputs):
    x, weight, constants, power = inputs
    y, _ = operator(x, weight, constants, power)
    grad = torch.arange(y.numel(), dtype=y.dtype).view(y.shape)
    return y, *torch.autograd.grad(y, (x, weight), grad)


def test_outputs_and_gradients_are_those_of_the_custom_operator(inputs):
    for mine, right in zip(
        with_gradients(scaled_transpose, inputs), with_gradients(scaled_transpose.operator, inputs), strict=True
    ):
        assert torch.equal(mine, right)


def test_gradients_are_those_of_numbers(inputs):
    x, weight, constants, power = inputs
    assert torch.autograd.gradcheck(lambda x, weight: scaled_transpose(x, weight, constants, power)[0], (x, weight))


@pytest.mark.parametrize("constants", [[torch.ones(5, dtype=torch.float64), None], None])
def test_lists_with_and_without_gaps_have_no_gradient(inputs, constants):
    x, weight, own, power = inputs
    y, _ = scaled_transpose(x, weight, own if constants is None else constants, power)
    y.sum().backward()
    assert x.grad is not None


def test_the_next_layer_may_change_the_output_in_place(inputs):
    y, _ = scaled_transpose(*inputs)
    assert not y._is_view()
    y.relu_().sum().backward()
    x, weight, constants, power = inputs
    x = x.detach().requires_grad_()
    (x * weight * constants[0] ** power).relu().sum().backward()
    assert torch.equal(inputs[0].grad, x.grad)


def test_without_gradients_nothing_is_recorded(inputs):
    with torch.no_grad():
        y, _ = scaled_transpose(*inputs)
    assert y.grad_fn is None
    assert not y._is_view()


def test_eager_calls_do_not_pass_the_dispatcher(inputs, monkeypatch):
    monkeypatch.setattr(scaled_transpose, "operator", None)
    with_gradients(scaled_transpose, inputs)
    assert calls == ["Tensor"]


def test_eager_calls_without_gradients_do_not_pass_autograd(inputs, monkeypatch):
    monkeypatch.setattr(scaled_transpose, "operator", None)
    monkeypatch.setattr(scaled_transpose, "_autograd_function", None)
    x, weight, constants, power = inputs
    with torch.no_grad():
        scaled_transpose(*inputs)
    scaled_transpose(x.detach(), weight.detach(), constants, power)
    assert calls == ["Tensor"] * 2


def test_modes_see_the_operator():
    with FakeTensorMode():
        x = torch.empty(3, 5, dtype=torch.float64)
        y, _ = scaled_transpose(x, torch.empty(5, dtype=torch.float64), [torch.empty(5, dtype=torch.float64)], 1)
    assert y.shape == (5, 3)


def test_subclasses_of_tensors_see_the_operator(inputs):
    x = torch.ones(3, 5, dtype=torch.float64).as_subclass(type("Marked", (torch.Tensor,), {}))
    y, _ = scaled_transpose(x, *inputs[1:])
    assert type(y).__name__ == "Marked"


def test_a_compiled_graph_has_the_operator(inputs):
    x, weight, constants, power = inputs

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x, weight):
        return scaled_transpose(x, weight, constants, power)[0] * 2

    y = compiled(x, weight)
    assert torch.equal(y, 2 * scaled_transpose(*inputs)[0])
    assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape


def test_checkpointing_recomputes_it(inputs):
    x, weight, constants, power = inputs
    plain = torch.autograd.grad(scaled_transpose(*inputs)[0].sum(), x)[0]
    y = checkpoint(lambda x: scaled_transpose(x, weight, constants, power)[0].sum(), x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(y, x)[0], plain)


def test_second_derivatives_are_refused(inputs):
    x = inputs[0]
    y, _ = scaled_transpose(*inputs)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        first.sum().backward()


def test_a_mutated_argument_counts_as_changed():
    counter = torch.zeros(())
    version = counter._version
    count(torch.ones(2), counter)
    assert counter == 1
    assert counter._version > version


@direct_operator("moesaic_test::matmul")
def matmul(x: Tensor, y: Tensor) -> Tensor:
    return torch.matmul(x, y)


@matmul.register_fake
def _(x, y):
    return x.new_empty(x.shape[0], y.shape[1])


@pytest.mark.parametrize("call", [matmul, matmul.operator], ids=["direct", "dispatched"])
def test_autocast_does_not_reach_what_an_operator_computes(call, monkeypatch):
    """Its plan would be another one than outside of autocast, for the same arguments."""
    monkeypatch.setattr(plan_cache, "_device_types", {"cpu"})
    torch.manual_seed(0)
    x = torch.randn(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            inside = call(x, x.T)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, x @ x.T)
    assert torch.equal(call(x, x.T), x @ x.T)


@pytest.mark.parametrize("planned", [set(), {"cpu"}], ids=["code", "plan"])
def test_outputs_without_gradient_have_none(monkeypatch, planned):
    monkeypatch.setattr(plan_cache, "_device_types", planned)
    x = torch.randn(4, 4, requires_grad=True)
    for _ in range(3):
        assert not matmul.without_gradient(x, x).requires_grad


def test_a_graph_can_have_the_matmuls_of_an_operator(monkeypatch):
    """Below autograd torch would show matmul whole, which allocates its output and is no part of a graph."""
    monkeypatch.setattr(plan_cache, "_device_types", {"cpu"})
    x = torch.randn(5, 5)
    matmul(x, x)
    (plan,) = [plan for key, plan in matmul._implementation._plans.items() if torch.Size([5, 5]) in key]
    assert plan is not None
    assert plan.captured is not None


def _counted_apart(x: Tensor, weight: Tensor, counter: Tensor) -> tuple[Tensor, Tensor]:
    calls.append("apart")
    return _scaled_alone(x, weight), count(x, counter)


def _scaled_alone(x: Tensor, weight: Tensor) -> Tensor:
    return scaled_transpose(x, weight, [x.new_ones(())], 1)[0]


@joint_operator(_counted_apart, mutates=("counter",))
def counted_scaled(x: Tensor, weight: Tensor, counter: Tensor) -> tuple[Tensor, Tensor]:
    """Both operators in one."""
    calls.append("joint")
    counter.data.add_(1)
    return (x * weight).transpose(0, 1), x + 1


def _counted_setup(ctx, inputs, output):
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:2])


def _counted_backward(ctx, grad, _):
    x, weight = ctx.saved_tensors
    grad_x, grad_weight = scaled_transpose_backward(grad, x, weight, x.new_ones(()), 1)
    return grad_x, grad_weight, None


counted_scaled.register_autograd(_counted_backward, setup_context=_counted_setup)


def counted_results():
    torch.manual_seed(3)
    x, weight = torch.randn(3, 4).requires_grad_(), torch.randn(4).requires_grad_()
    counter = torch.zeros((), dtype=torch.int64)
    versions = counter._version
    y, _ = counted_scaled(x, weight, counter)
    y.square().sum().backward()
    assert counter._version > versions
    return [y.detach(), x.grad, weight.grad, counter]


def test_a_joint_operator_is_called_apart_only_where_a_mode_watches():
    calls.clear()
    direct = counted_results()
    assert calls.count("joint") == 1
    assert "apart" not in calls
    calls.clear()
    with FlopCounterMode(display=False):
        watched = counted_results()
    assert "joint" not in calls
    assert calls.count("apart") == 1
    for one, other in zip(direct, watched, strict=True):
        assert torch.equal(one, other)
    assert direct[-1].item() == 1


def test_a_joint_operator_has_no_fake_implementation():
    with pytest.raises(TypeError, match=r"counted_scaled: its operators have fake implementations"):
        counted_scaled.register_fake(lambda *given: given)
