"""A launch plan does again what an operator did, on other tensors of the same kind."""

import gc
import weakref

import pytest
import torch
from launch_plans import arguments, assert_same, launch, mixed, record
from torch import Tensor

from moesaic.ops import plan_cache, tile_sizes
from moesaic.ops.launch_recorder import Recorder, recorder
from moesaic.ops.plan_cache import LaunchPlans


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(plan_cache, "_device_types", {"cpu"})
    monkeypatch.setattr(LaunchPlans, "_record", record)  # without the replay that other tests add


class Counted:
    """An implementation whose Python code counts its runs."""

    def __init__(self, work):
        self.work, self.runs = work, 0

    def __call__(self, *arguments):
        self.runs += 1
        return self.work(*arguments)


def test_a_replay_equals_the_code_on_other_numbers():
    work = Counted(mixed)
    planned = LaunchPlans(work)
    x, others, _ = arguments(0)
    for seed in range(5):
        x, others, _ = arguments(seed)
        assert_same(planned(x, others, 0.5), mixed(x, others, 0.5))
    assert work.runs == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda x, others, scale: (x, others, scale + 1),
        lambda x, others, scale: (x.T, others, scale),
        lambda x, others, scale: (x, [None, None], scale),
        lambda x, others, scale: (torch.cat([x, x])[::2], others, scale),
        lambda x, others, scale: (torch.zeros(17, dtype=x.dtype)[1:].view(4, 4).copy_(x), others, scale),
    ],
    ids=["number", "transposed", "None", "strided", "alignment"],
)
def test_arguments_of_another_kind_have_a_plan_of_their_own(change):
    work = Counted(mixed)
    planned = LaunchPlans(work)
    planned(*arguments(0))
    for seed in (1, 2):
        given = change(*arguments(seed)[:2], 0.5)
        assert_same(planned(*given), mixed(*given))
    assert work.runs == 2


def test_numbers_that_are_equal_may_be_of_another_type_or_sign():
    planned = LaunchPlans(lambda x, scale: x * scale)
    integers, zeros = torch.ones(2, dtype=torch.int64), torch.ones(2)
    for _ in range(2):
        assert [planned(integers, scale).dtype for scale in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]
        assert [planned(zeros, scale).signbit().any().item() for scale in (0.0, -0.0, 0)] == [False, True, False]


def test_an_empty_part_of_another_input_does_not_stand_for_it():
    def copy(x: Tensor, _: Tensor) -> Tensor:
        y = torch.zeros(3, dtype=torch.float64)
        launch(x, y)
        return y

    planned = LaunchPlans(copy)
    inputs = [torch.full((3,), value, dtype=torch.float64) for value in (1.0, 2.0)]
    for x in (*inputs, *inputs):
        assert torch.equal(planned(x, x[:0]), x)


def test_empty_outputs_have_gradients_of_their_own():
    """What autograd notes on the output of a call must not show on that of the next."""
    planned = LaunchPlans(lambda x: (torch.empty(x.shape), x.new_empty(0)))
    x = torch.ones(0, 3)
    planned(x)
    first, second = planned(x), planned(x)
    assert first[0] is not second[0]
    assert first[1] is second[1]  # a placeholder


def test_outputs_of_replays_are_their_own():
    planned = LaunchPlans(mixed)
    given = arguments(0)
    planned(*given)
    first, second = planned(*given), planned(*given)
    assert first[0].data_ptr() != second[0].data_ptr()
    first[0].zero_()
    assert_same(second, mixed(*given))


def test_an_argument_changed_in_place_is_changed_in_every_call():
    def count(x: Tensor, counter: Tensor) -> Tensor:
        counter.add_(1)
        launch(x, counter)
        return x + counter

    planned = LaunchPlans(count, mutates=True)
    x, counter = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    sums = [planned(x, counter).tolist() for _ in range(3)]
    assert sums == [[3.0] * 3, [5.0] * 3, [7.0] * 3]
    assert counter.tolist() == [6.0] * 3


def test_code_that_reads_values_is_not_planned():
    def branch(x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1

    work = Counted(branch)
    planned = LaunchPlans(work)
    assert planned(torch.ones(2)).tolist() == [2.0, 2.0]
    assert planned(-torch.ones(2)).tolist() == [-2.0, -2.0]
    assert work.runs == 2


def test_code_that_uses_other_tensors_is_not_planned():
    outside = torch.ones(2)
    planned = LaunchPlans(lambda x: x + outside)
    planned(torch.zeros(2))
    outside = torch.full((2,), 5.0)
    assert planned(torch.zeros(2)).tolist() == [5.0, 5.0]


def test_inputs_that_are_one_tensor_need_not_be_one_the_next_time():
    planned = LaunchPlans(lambda x, y: x * 2 + y)
    x = torch.ones(3)
    assert planned(x, x).tolist() == [3.0] * 3
    assert planned(x, torch.zeros(3)).tolist() == [2.0] * 3
    assert planned(x, x).tolist() == [3.0] * 3


def test_inputs_at_one_address_need_not_be_there_the_next_time():
    """Tensors of their own, unlike in the test above, of one memory."""
    planned = LaunchPlans(lambda x, y: x * 2 + y)
    x = torch.ones(3)
    for _ in range(3):
        assert planned(x, x.detach()).tolist() == [3.0] * 3
    for _ in range(2):
        assert planned(x, torch.zeros(3)).tolist() == [2.0] * 3


def test_many_kinds_in_turns_run_no_code_again():
    work = Counted(lambda x, weight, flag: x * flag + weight)
    planned = LaunchPlans(work)
    kinds = [(torch.ones(rows, columns), torch.ones(columns), flag)
             for rows in range(1, 12) for columns in (2, 3) for flag in (1, 2, 3)]  # fmt: skip
    for turn in range(3):
        for x, weight, flag in kinds:
            assert torch.equal(planned(x * turn, weight, flag), x * turn * flag + weight)
    assert work.runs == len(kinds)


def test_where_memory_begins_is_part_of_the_kind():
    """Kernels for addresses that 16 divides read several numbers at a time."""
    work = Counted(lambda x, y: x + y)
    planned = LaunchPlans(work)
    room = [torch.ones(9, dtype=torch.float64) for _ in range(2)]
    places = [(0, 0), (1, 0), (0, 1), (1, 1)]
    for turn in range(3):
        for first, second in places:
            x, y = room[0][first : first + 8], room[1][second : second + 8]
            assert planned(x, y).tolist() == [2.0] * 8, turn
    assert work.runs == len(places)
    assert sum(map(len, planned._guarded.values())) == len(places)


def test_an_empty_output_of_inference_mode_may_be_saved_for_a_gradient():
    planned = LaunchPlans(lambda x: (x + 1, x.new_empty(0)))
    with torch.inference_mode():
        for _ in range(2):
            planned(torch.ones(2))
    weight = torch.ones(0, requires_grad=True)
    (weight * planned(torch.ones(2))[1]).sum().backward()
    assert weight.grad is not None


def test_overlapping_inputs_are_not_planned():
    planned = LaunchPlans(lambda x, y: x * 2 + y)
    both = torch.arange(4.0)
    assert planned(both[:2], both[2:]).tolist() == [2.0, 5.0]
    assert planned(both[2:], both[:2]).tolist() == [4.0, 7.0]


def test_workspaces_are_released_after_their_last_use():
    alive: list[int] = []
    made: list[weakref.ref] = []

    def look(tensor: Tensor) -> None:
        gc.collect()
        alive.append(sum(each() is not None for each in made))

        def replay(slots, addresses, stream):
            gc.collect()
            alive.append(sum(isinstance(each, Tensor) for each in slots) - 1)

        recording = recorder()
        if recording is not None:
            recording.add_launch(lambda placed: replay, (tensor,))

    def work(x: Tensor) -> Tensor:
        for _ in range(4):
            large = torch.empty(1 << 19, dtype=torch.float64)
            made.append(weakref.ref(large))
            look(large)
            del large
        return x + 1

    planned = LaunchPlans(work)
    planned(torch.ones(1))
    planned(torch.ones(1))
    assert alive == [1] * 8


def test_small_workspaces_of_kernels_share_an_allocation():
    def work(x: Tensor) -> Tensor:
        parts = [torch.empty(5, dtype=torch.float64) for _ in range(3)]
        for part in parts:
            launch(part, part)  # whatever was there
        y = torch.zeros(5, dtype=torch.float64)
        launch(x, y)
        return y

    planned = LaunchPlans(work)
    x = torch.arange(5.0, dtype=torch.float64)
    planned(x)
    (plan,) = planned._plans.values()
    assert plan is not None
    sizes: list[int] = []
    allocate = torch.empty

    def spy(*args, **kwargs):
        sizes.append(args[0])
        return allocate(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", spy)
        assert torch.equal(planned(x), x)
    assert sizes == [3 * 512]


def test_a_nested_operator_is_part_of_the_plan_around_it():
    inner = Counted(lambda x: x * 2)
    nested = LaunchPlans(inner)
    outer = LaunchPlans(lambda x: nested(x) + 1)
    for value in (1.0, 2.0):
        assert outer(torch.full((2,), value)).tolist() == [2 * value + 1] * 2
    assert inner.runs == 1
    assert not nested._plans


def test_an_error_leaves_nothing_behind():
    def work(x: Tensor) -> Tensor:
        raise ValueError("no")

    planned = LaunchPlans(work)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            planned(torch.ones(1))
    assert recorder() is None
    assert not planned._plans


def test_new_tiles_make_new_plans():
    work = Counted(lambda x: x + 1)
    planned = LaunchPlans(work)
    planned(torch.ones(1))
    tile_sizes.forget_tiles()
    planned(torch.ones(1))
    assert work.runs == 2


def test_nothing_is_planned_while_tiles_are_timed_or_a_profiler_hooks_into_launches(monkeypatch):
    work = Counted(lambda x: x + 1)
    planned = LaunchPlans(work)
    with tile_sizes._recording():
        planned(torch.ones(1))
    assert not planned._plans
    monkeypatch.setattr(plan_cache, "_bypass_conditions", [lambda: True])
    planned(torch.ones(1))
    assert not planned._plans
    assert work.runs == 2


def test_plans_are_limited_in_number(monkeypatch):
    monkeypatch.setattr(plan_cache, "_MAX_PLANS", 3)
    planned = LaunchPlans(lambda x: x + 1)
    for size in range(1, 7):
        assert planned(torch.ones(size)).tolist() == [2.0] * size
    assert len(planned._plans) == 3


def test_other_devices_run_the_code(monkeypatch):
    monkeypatch.setattr(plan_cache, "_device_types", {"cuda"})
    planned = LaunchPlans(lambda x: x + 1)
    planned(torch.ones(1))
    assert not planned._plans


def test_a_view_as_another_dtype_is_not_planned():
    with Recorder([x := torch.ones(2)]) as recorded:
        y = x.view(torch.int32) + 1
    assert recorded.plan(y) is None
    assert "dtype" in recorded.problem
