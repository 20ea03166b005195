"""Operators of kernels in tests: each replays its plan as soon as it is recorded, and must return the same bits."""

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.ops.launch_plan import Place
from moesaic.ops.launch_recorder import Recorder, recorder
from moesaic.ops.plan_cache import LaunchPlans

record = LaunchPlans._record


def _as_list(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


def _assert_same(found: Any, expected: Any) -> None:
    assert isinstance(found, torch.Tensor) == isinstance(expected, torch.Tensor)
    for one, other in zip(_as_list(expected), _as_list(found), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)


def _assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def _record_and_replay(self: LaunchPlans, key: Any, tensors: list[torch.Tensor], arguments: tuple[Any, ...]) -> Any:
    given = [each.clone() for each in tensors] if self.mutates else []
    with Recorder(tensors) as recorded:
        result = self._implementation(*arguments)
    self._plans[key] = plan = recorded.plan(result)
    assert plan is not None, recorded.problem  # every operator of ours can be planned
    changed = [each.clone() for each in tensors] if self.mutates else []

    def start_again() -> None:
        for each, before in zip(tensors, given, strict=False):
            each.data.copy_(before)

    addresses = [each.data_ptr() for each in tensors]
    assert plan.fits(addresses)
    start_again()
    _assert_same(plan.run(tensors, addresses), result)
    _assert_equal(tensors[: len(changed)], changed)
    # the work of its graph, whose workspaces share memory
    captured = plan.captured
    assert captured is not None, recorded.uncapturable
    arena, outputs = captured.allocate()
    for each in (arena, *outputs):
        each.view(-1).view(torch.uint8).fill_(0xFF) if each.is_contiguous() else each.fill_(float("nan"))
    start_again()
    captured.work(tensors, arena, outputs, 0)
    replayed = plan.result(tensors, outputs)
    _assert_same(replayed, result)
    _assert_equal(tensors[: len(changed)], changed)
    return replayed


@pytest.fixture(autouse=True)
def replayed_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaunchPlans, "_record", _record_and_replay)


def add_doubles(source: int, target: int, count: int) -> None:
    """A kernel: adds doubles at one address to those at another."""
    pointer = ctypes.POINTER(ctypes.c_double)
    x, y = ctypes.cast(source, pointer), ctypes.cast(target, pointer)
    for i in range(count):
        y[i] += x[i]


def launch(source: Tensor, target: Tensor) -> None:
    """Launches the kernel as a cached launch does."""
    count = source.numel()
    add_doubles(source.data_ptr(), target.data_ptr(), count)

    def make(placed):
        one, other = placed
        assert isinstance(one, Place)
        assert isinstance(other, Place)

        def replay(slots, addresses, stream):
            add_doubles(addresses[one.slot] + one.byte, addresses[other.slot] + other.byte, count)

        return replay

    recording = recorder()
    if recording is not None:
        recording.add_launch(make, (source, target))


def mixed(x: Tensor, others: list[Tensor | None], scale: float) -> tuple[Tensor, ...]:
    """Allocations, views, kernels on views, and torch operators, in and out of place."""
    small = torch.empty(3, 4, dtype=torch.float64)  # for kernels alone
    workspace = torch.empty(2, 3, 4, dtype=torch.float64)
    small.zero_() if others[0] is None else small.copy_(others[0])
    launch(x[1:].T.contiguous().view(-1)[:6], small.view(-1)[6:])
    torch.mul(small, scale, out=workspace[1])
    workspace[0] = small
    launch(workspace[1], workspace[0])
    y = torch.bmm(workspace, x.expand(2, 4, 4)[:, :, :2])
    return y.permute(0, 2, 1), x.new_empty(0), workspace[1].float(), workspace.transpose(0, 1)[1].to(x.dtype, copy=True)


def arguments(seed: int, other: bool = True):
    torch.manual_seed(seed)
    x, other_ = torch.randn(4, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    return x, [other_ if other else None, None], 0.5 + seed


def assert_same(found, expected):
    for one, two in zip(found, expected, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (two.shape, two.stride(), two.dtype)
        assert torch.equal(one, two)
