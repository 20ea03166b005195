"""``NormalizedGD``: every expert moves by a step of the same length, however small its gradient is.

Chen et al. 2022, Algorithm 1: W_m ← W_m − η ∇L(W_m) / ‖∇L(W_m)‖_F for each expert m. An expert that
serves few samples has a small gradient; normalised, it learns as fast as the others, and does not
fall behind because the router has not found it yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, cast, get_args, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moesaic.argument_checks import check_choice, check_numbers

__all__ = ["GradientNorm", "NormalizedGD"]

GradientNorm = Literal["print", "released"]

_norm = cast("Callable[..., Tensor]", torch.linalg.vector_norm)
_torch: Any = torch  # what torch's own optimizers use to update many tensors at once has no public types


class NormalizedGD(Optimizer):
    """Gradient descent whose gradient is divided by its norm, expert by expert.

    A parameter group is an expert: its tensors share one norm. In a group with ``stacked=True``
    every slice along the leading axis is an expert, over all tensors of the group. ``per_expert``
    makes the groups. A group for each tensor normalises every tensor alone.

    With g the gradient of an expert's tensor and n the norm of the expert's gradient, a step is
    that of ``torch.optim.SGD`` with g / n in place of g: weight decay and momentum come after the
    normalisation and are not normalised themselves. Where n is 0, as for an expert without
    samples, g / n is 0 and only weight decay and momentum act; a tensor whose gradient is None
    stays as it is.

    A gradient and any multiple of it give the same step, so a loss scaled by ``torch.amp.GradScaler``
    needs no unscaling; its ``step`` still skips gradients that are not finite.

    Args:
        params: parameters, or groups of them, each with options of its own.
        lr: the length of a step, where there is neither weight decay nor momentum. The ``lr`` of a parameter group may
            be set to a tensor on the device of the parameters, as a step in a CUDA graph needs it.
        momentum: of the running direction.
        weight_decay: the share of the weights added to the normalised gradient.
        norm: ``"print"``: the Frobenius norm over all tensors of an expert; ``"released"``: the sum of
            the tensors' norms, which makes shorter steps, the more tensors there are.
        dampening: of the momentum, as in ``torch.optim.SGD``.
        nesterov: momentum as in ``torch.optim.SGD``.
        stacked: whether slices along the leading axis are experts.
        foreach: whether all tensors of a group are updated in few kernels; by default on CUDA.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> weight.grad = torch.tensor([30.0, 40.0])
    >>> NormalizedGD([weight], lr=0.5).step()
    >>> weight.tolist()                                             # 0.5 · (30, 40) / 50 less
    [2.700000047683716, 3.5999999046325684]
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        norm: GradientNorm = "print",
        dampening: float = 0.0,
        nesterov: bool = False,
        stacked: bool = False,
        foreach: bool | None = None,
    ) -> None:
        options: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "norm": norm,
            "dampening": dampening,
            "nesterov": nesterov,
            "stacked": stacked,
            "foreach": foreach,
        }
        super().__init__(params, options)

    @classmethod
    def per_expert(cls, experts: nn.Module | Iterable[nn.Module], lr: float, **options: Any) -> NormalizedGD:
        """An optimizer of experts, each normalised on its own.

        ``experts`` are what ``SampleMoE`` takes: a list or ``nn.ModuleList`` of modules, or stacked
        experts, whose tensors all have the experts along their first axis.

        >>> from torch import nn
        >>> optimizer = NormalizedGD.per_expert([nn.Linear(3, 2) for _ in range(4)], lr=0.01, momentum=0.9)
        >>> [len(group["params"]) for group in optimizer.param_groups]
        [2, 2, 2, 2]
        """
        if isinstance(experts, nn.Module) and not isinstance(experts, nn.ModuleList):
            if isinstance(experts, nn.Sequential) or not hasattr(experts, "__len__"):
                raise TypeError(
                    f"NormalizedGD.per_expert: experts is one {type(experts).__name__}; give a list of modules, or "
                    "stacked experts, which have a length"
                )
            _check_stack(list(experts.parameters()), len(cast("Any", experts)))
            return cls(experts.parameters(), lr, stacked=True, **options)
        groups = [{"params": list(expert.parameters())} for expert in experts]
        return cls([group for group in groups if group["params"]], lr, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add an expert, or stacked experts; its options are checked as those of the constructor."""
        _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            _check_params(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of every expert that has gradients; ``closure`` computes the loss anew and is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            if params:
                self._step(params, group)
        return loss

    def _step(self, params: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [_gradient(parameter) for parameter in params]
        foreach: bool | None = group["foreach"]
        if foreach is None:
            foreach = params[0].device.type == "cuda"
        alike = len({(tensor.device, tensor.dtype) for tensor in params + gradients}) == 1
        together = foreach and alike
        directions = _normalised(gradients, group["norm"], group["stacked"], together)
        if group["weight_decay"]:
            _add(directions, params, group["weight_decay"], together)
        if group["momentum"]:
            directions = self._with_momentum(params, directions, group, together)
        lr: float | Tensor = group["lr"]
        if isinstance(lr, Tensor):  # a graph replays the step, with the rate that the tensor then has
            steps = _torch._foreach_mul(directions, lr) if together else [direction * lr for direction in directions]
            _add(params, steps, -1, together)
        else:
            _add(params, directions, -lr, together)

    def _with_momentum(
        self, params: list[Tensor], directions: list[Tensor], group: dict[str, Any], together: bool
    ) -> list[Tensor]:
        """Where to go, given where each tensor was going; its first direction starts the momentum undampened."""
        momentum: float = group["momentum"]
        states = [self.state[parameter] for parameter in params]
        moving = [i for i, state in enumerate(states) if "momentum_buffer" in state]
        for state, direction in zip(states, directions, strict=True):
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = direction.clone()
        buffers: list[Tensor] = [state["momentum_buffer"] for state in states]
        if moving:
            moved = [buffers[i] for i in moving]
            _multiply(moved, momentum, together)
            _add(moved, [directions[i] for i in moving], 1 - group["dampening"], together)
        if not group["nesterov"]:
            return buffers
        _add(directions, buffers, momentum, together)
        return directions


def _normalised(gradients: list[Tensor], norm: GradientNorm, stacked: bool, together: bool) -> list[Tensor]:
    """Gradients over their expert's norm, as tensors of their own; 0 where the norm is 0."""
    first = gradients[0]
    # in float64, for squares of the small gradients that normalising is there for are not in float32's range
    wide = torch.float32 if first.device.type == "mps" else torch.float64
    norms: list[Tensor]
    if stacked:
        norms = [_norm(g.flatten(1), dim=1, dtype=wide) for g in gradients]
    elif together:
        norms = _torch._foreach_norm(gradients, 2, dtype=wide)
    else:
        norms = [_norm(g, dtype=wide) for g in gradients]
    parts = torch.stack([part.to(first.device) for part in norms])
    total = _norm(parts, dim=0) if norm == "print" else parts.sum(0)
    total = torch.where(total == 0, 1, total)
    if together and not stacked and first.dtype in (torch.float32, torch.float64):
        return list(_torch._foreach_div(gradients, total.to(first.dtype)))
    return [_over(g, total) for g in gradients]


def _over(gradient: Tensor, norm: Tensor) -> Tensor:
    # float16 could not hold the norm, nor its inverse
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    norm = norm.to(gradient.device, dtype).view(*norm.shape, *[1] * (gradient.ndim - norm.ndim))
    return (gradient.to(dtype) / norm).to(gradient.dtype)


def _add(tensors: list[Tensor], others: list[Tensor], times: float, together: bool) -> None:
    if together:
        _torch._foreach_add_(tensors, others, alpha=times)
        return
    for tensor, other in zip(tensors, others, strict=True):
        tensor.add_(other, alpha=times)


def _multiply(tensors: list[Tensor], by: float, together: bool) -> None:
    if together:
        _torch._foreach_mul_(tensors, by)
        return
    for tensor in tensors:
        tensor.mul_(by)


def _gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout != torch.strided:
        raise TypeError(
            f"NormalizedGD: a gradient of {tuple(parameter.shape)} is {gradient.layout}; it takes dense gradients: "
            "build the embedding with sparse=False"
        )
    return gradient


def _check_options(options: dict[str, Any]) -> None:
    rates = {name: options[name] for name in ("lr", "momentum", "weight_decay")}
    check_numbers("NormalizedGD", "0 or more", lambda value: 0 <= value < math.inf, rates)
    check_choice("NormalizedGD", "norm", options["norm"], get_args(GradientNorm))
    if options["nesterov"] and (not options["momentum"] or options["dampening"]):
        raise ValueError(
            f"NormalizedGD: nesterov=True with momentum={options['momentum']}, dampening={options['dampening']}; "
            "it needs momentum above 0 and no dampening"
        )


def _check_params(group: dict[str, Any]) -> None:
    if group["stacked"]:
        _check_stack(group["params"], None)
    for parameter in group["params"]:
        if not parameter.is_floating_point():
            raise TypeError(f"NormalizedGD: a parameter is {parameter.dtype}; it takes floating-point parameters")


def _check_stack(params: list[Tensor], experts: int | None) -> None:
    """Refuse tensors whose leading axes differ: they cannot all be the experts'."""
    sizes = {tuple(parameter.shape)[:1] for parameter in params}
    if len(sizes) > 1 or () in sizes or (experts is not None and sizes != {(experts,)}):
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in params) or "none"
        wanted = "one leading axis" if experts is None else f"a leading axis of {experts} experts"
        raise ValueError(
            f"NormalizedGD: stacked tensors must share {wanted}, got {shapes}; put others into a group of their own, "
            "with stacked=False"
        )
