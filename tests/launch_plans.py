"""Operators of kernels in tests: each replays its plan as soon as it is recorded, and must return the same bits."""

from typing import Any

import pytest
import torch

from moesaic.ops.launch_plan import LaunchPlans, Recorder

record = LaunchPlans._record


def _as_list(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


def _record_and_replay(self: LaunchPlans, key: Any, tensors: list[torch.Tensor], arguments: tuple[Any, ...]) -> Any:
    if self.mutates:
        return record(self, key, tensors, arguments)
    with Recorder(tensors) as recorded:
        result = self._implementation(*arguments)
    self._plans[key] = plan = recorded.plan(result)
    assert plan is not None, recorded.problem  # every operator of ours can be planned
    assert plan.fits(tensors)
    replayed = plan.run(tensors)
    assert isinstance(replayed, torch.Tensor) == isinstance(result, torch.Tensor)
    for one, other in zip(_as_list(result), _as_list(replayed), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
    return replayed


@pytest.fixture(autouse=True)
def replayed_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaunchPlans, "_record", _record_and_replay)
