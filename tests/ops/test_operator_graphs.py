"""CUDA graphs of operators: where workspaces lie, when a graph is captured, and what happens where none can be."""

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launch_plans import arguments, assert_same, launch, mixed, record
from torch import Tensor

from moesaic.ops import operator_graphs, plan_cache
from moesaic.ops.launch_recorder import Recorder
from moesaic.ops.operator_graphs import CapturedOperator, Graph, GraphDriver, OutputMemory, Workspace, arrange
from moesaic.ops.plan_cache import LaunchPlans

CPU = torch.device("cpu")
BYTES = torch.uint8


def workspace(slot: int, size: int, first: int, last: int) -> Workspace:
    return Workspace(slot, size, first, last, BYTES, (size,), (1,), False)


def output(slot: int, size: int, first: int) -> OutputMemory:
    return OutputMemory(slot, size, first, lambda: torch.empty(size, dtype=BYTES), False)


@st.composite
def lives(draw):
    """Workspaces and outputs of an operator of some steps."""
    steps = draw(st.integers(1, 12))
    size = st.integers(0, 3000)
    workspaces = []
    for slot in range(draw(st.integers(0, 8))):
        first = draw(st.integers(0, steps - 1))
        workspaces.append(workspace(slot, draw(size), first, draw(st.integers(first, steps))))
    outputs = [output(100 + n, draw(size), draw(st.integers(0, steps))) for n in range(draw(st.integers(0, 3)))]
    return workspaces, outputs


@given(lives())
def test_workspaces_that_live_at_one_time_lie_apart(case):
    workspaces, outputs = case
    found = arrange(workspaces, outputs)
    assert set(found.places) == {each.slot for each in workspaces}
    for each in workspaces:
        number, start = found.places[each.slot]
        assert start % 512 == 0
        if number < 0:
            assert start + each.bytes <= found.bytes
        else:  # the output's own values come later
            assert start + each.bytes <= outputs[number].bytes
            assert each.last < outputs[number].first
        for other in workspaces:
            at, begin = found.places[other.slot]
            together = each.first <= other.last and other.first <= each.last
            if other is not each and at == number and together and each.bytes and other.bytes:
                assert start + each.bytes <= begin or begin + other.bytes <= start
    assert found.bytes <= sum(-(-each.bytes // 512) * 512 for each in workspaces)


def test_workspaces_share_memory_with_later_ones_and_with_later_outputs():
    first, second, third = workspace(0, 1024, 0, 1), workspace(1, 1000, 2, 3), workspace(2, 512, 1, 2)
    assert arrange([first, second, third]).bytes == 1024 + 512
    assert arrange([first, second, third], [output(9, 1024, 2)]) == ({0: (0, 0), 1: (-1, 0), 2: (-1, 1024)}, 1536)
    assert arrange([first, second], [output(9, 1024, 4)]) == ({0: (0, 0), 1: (0, 0)}, 0)


class FakeDriver:
    """Graphs that count their launches; what they would do is in ``CapturedOperator.work``."""

    def __init__(self, refuses: str = ""):
        self.refuses, self.captured, self.launched, self.destroyed, self.multiplies = refuses, 0, 0, 0, []

    def capture(self, record, multiplies):
        self.multiplies.append(multiplies)
        if self.refuses == "capture":
            return None
        self.captured += 1
        record(77)
        return Graph(self.captured, self.destroy)

    def launch(self, graph):
        self.launched += 1
        return self.refuses != "launch"

    def destroy(self, executable):
        self.destroyed += 1


@pytest.fixture
def fake(monkeypatch):
    found = FakeDriver()
    monkeypatch.setattr(operator_graphs, "driver", lambda device: found)
    return found


def captured_operator(steps, multiplies=None) -> CapturedOperator:
    made = CapturedOperator(steps, 2, [], [output(1, 8, 0)], multiplies, CPU, pays=True)
    made.is_on = True  # as on a GPU
    return made


def run(operator: CapturedOperator, x: Tensor) -> Tensor | None:
    found = operator.run([x], [x.data_ptr()])
    return found if found is None else found[0]


def at_one_address(operator: CapturedOperator, held: Tensor | None = None) -> None:
    """Makes outputs lie at the same address every time, as torch's allocator of GPU memory would."""
    held = torch.empty(8, dtype=BYTES) if held is None else held
    operator._empties = [lambda: held]


def test_a_graph_is_captured_when_addresses_come_again(fake):
    streams = []
    operator = captured_operator([lambda slots, addresses, stream: streams.append(stream)])
    at_one_address(operator)
    x, other = torch.zeros(3), torch.zeros(3)
    assert run(operator, x) is None  # new inputs, which are left to the plan
    assert run(operator, x) is not None
    assert (fake.captured, streams) == (0, [0])  # step by step, on the default stream
    run(operator, x)
    assert (fake.captured, fake.launched, streams) == (1, 1, [0, 77])
    run(operator, x)
    assert (fake.captured, fake.launched, streams) == (1, 2, [0, 77])
    assert run(operator, other) is None
    run(operator, other)
    assert (fake.captured, fake.launched, streams) == (1, 2, [0, 77, 0])
    del operator
    gc.collect()
    assert fake.destroyed == 1


def test_outputs_elsewhere_have_a_graph_of_their_own(fake):
    runs = []
    operator = captured_operator([lambda slots, addresses, stream: runs.append(addresses[1])])
    x, held = torch.zeros(3), [torch.empty(8, dtype=BYTES) for _ in range(2)]
    turns = iter(range(100))
    operator._empties = [lambda: held[next(turns) % 2]]
    for _ in range(9):
        run(operator, x)
    assert fake.captured == 2
    assert fake.launched == 9 - 1 - 2
    assert set(runs) == {each.data_ptr() for each in held}


def test_settings_of_matmuls_have_graphs_of_their_own(fake):
    operator = captured_operator([lambda slots, addresses, stream: None], torch.bfloat16)
    at_one_address(operator)
    x = torch.zeros(3)
    for _ in range(4):
        run(operator, x)
    assert (fake.captured, fake.launched, fake.multiplies) == (1, 2, [torch.bfloat16])
    allowed = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = not allowed
    try:
        run(operator, x)
        assert fake.launched == 2
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed


@pytest.mark.parametrize("refuses", ["capture", "launch", "driver"])
def test_the_work_is_done_where_there_can_be_no_graph(fake, monkeypatch, refuses):
    fake.refuses = refuses
    if refuses == "driver":
        monkeypatch.setattr(operator_graphs, "driver", lambda device: None)
    runs = []
    operator = captured_operator([lambda slots, addresses, stream: runs.append(stream)])
    at_one_address(operator)
    x = torch.zeros(3)
    left = [run(operator, x) is None for _ in range(3)]
    assert left == [True, False, False]
    assert runs.count(0) == 2  # whether or not a capture was tried
    assert operator.is_on == (refuses == "launch")


def test_capturing_stops_where_graphs_are_not_replayed(fake):
    operator = captured_operator([lambda slots, addresses, stream: None])
    at_one_address(operator)
    for x in [torch.zeros(3) for _ in range(40)]:
        for _ in range(3 * operator.is_on):  # the third time from a graph, and never again
            run(operator, x)
    assert fake.captured == operator_graphs._MIN_CAPTURES
    assert not operator.is_on
    assert not operator._graphs
    assert fake.destroyed == fake.captured


def test_graphs_that_are_replayed_stay_and_their_number_is_limited(fake, monkeypatch):
    monkeypatch.setattr(operator_graphs, "_MAX_INPUT_SETS", 3)
    operator = captured_operator([lambda slots, addresses, stream: None])
    at_one_address(operator)
    for x in [torch.zeros(3) for _ in range(30)]:
        for _ in range(12):
            run(operator, x)
    assert operator.is_on
    assert fake.captured == 30
    assert len(operator._graphs) <= 3
    assert fake.captured - fake.destroyed <= 3


def test_places_of_outputs_that_never_come_again_are_forgotten(fake):
    operator = captured_operator([lambda slots, addresses, stream: None])
    x = torch.zeros(3)
    held = []
    operator._empties = [lambda: held.append(torch.empty(8, dtype=BYTES)) or held[-1]]
    for _ in range(50):
        run(operator, x)
    assert fake.captured == 0
    (places,) = operator._graphs.values()
    assert len(places) <= operator_graphs._MAX_GRAPHS_PER_INPUTS


def recorded(work, *given):
    tensors = [each for each in given if isinstance(each, Tensor)]
    with Recorder(tensors) as recorder:
        result = work(*given)
    plan = recorder.plan(result)
    assert plan is not None
    return plan, recorder, result


def in_graph(plan, tensors):
    """What a graph of the plan's work would leave in its outputs, whatever was in the memory before."""
    arena, outputs = plan.captured.allocate()
    for each in (arena, *outputs):
        each.untyped_storage().fill_(0x5A)
    plan.captured.work(tensors, arena, outputs, 0)
    return plan.result(tensors, outputs)


def test_the_work_of_a_graph_equals_the_code(monkeypatch):
    monkeypatch.setattr(LaunchPlans, "_record", record)
    x, (other, _), scale = arguments(3)
    plan, _, result = recorded(lambda x, other: mixed(x, [other, None], scale), x, other)
    assert_same(in_graph(plan, [x, other]), result)


def test_outputs_that_are_views_are_allocated_as_these():
    def work(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, pair = torch.empty(2, 3, 4, dtype=torch.float64), torch.empty(2, 5, dtype=torch.float64)
        launch(x, rows.view(-1))
        return rows.permute(0, 2, 1), pair[0], pair[1]

    x = torch.randn(24, dtype=torch.float64)
    plan, _, result = recorded(work, x)
    found = plan.result([x], plan.captured.allocate()[1])
    assert [(each.shape, each.stride()) for each in found] == [(each.shape, each.stride()) for each in result]
    assert found[0]._base is None
    assert found[1].untyped_storage().data_ptr() == found[2].untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "work", [lambda x: torch.bernoulli(x), lambda x: x.cumsum(0), lambda x: x.clone().uniform_()],
    ids=["random numbers", "an operator without a known form", "random numbers in place"],
)  # fmt: skip
def test_other_operators_have_plans_without_graphs(work):
    plan, recorder, _ = recorded(work, torch.full((3,), 0.5))
    assert plan.captured is None
    assert "in a graph" in recorder.uncapturable


def test_few_launches_have_no_graph(monkeypatch):
    """Launching the graph would take the host as long."""
    paying: list[bool] = []
    make = CapturedOperator.__init__

    def init(self, *given, pays: bool) -> None:
        paying.append(pays)
        make(self, *given, pays=pays)

    monkeypatch.setattr(CapturedOperator, "__init__", init)

    def launches(count: int, x: Tensor) -> Tensor:
        y = torch.empty(6, dtype=torch.float64)
        for _ in range(count):
            launch(x, y)
        return y

    x = torch.zeros(6, dtype=torch.float64)
    for count in (1, 2, 3):
        recorded(lambda x, count=count: launches(count, x), x)
    recorded(lambda x: x + 1, x)  # a torch operator takes longer
    assert paying == [False, False, True, True]


def test_zeros_sums_and_copies_are_part_of_a_graph():
    def work(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        zeros = torch.zeros_like(x)
        launch(x.view(-1), zeros.view(-1))
        total = (zeros + y).sum(0)
        product = torch.mm(x.T, y - x) * 2
        return total.to(torch.float32), torch.bmm(x[None], product[None]), y.T.contiguous(), x.new_zeros(2, 2) / 3

    torch.manual_seed(1)
    x, y = torch.randn(2, 5, 3, dtype=torch.float64).unbind()
    plan, _, result = recorded(work, x.clone(), y)
    given = [x.clone(), y]
    assert_same(in_graph(plan, given), result)


def test_a_plan_on_another_device_has_no_graph(fake, monkeypatch):
    monkeypatch.setattr(LaunchPlans, "_record", record)
    monkeypatch.setattr(plan_cache, "_device_types", {"cpu"})
    planned = LaunchPlans(lambda x: x + 1)
    x = torch.ones(3)
    for _ in range(4):
        assert planned(x).tolist() == [2.0] * 3
    assert fake.captured == fake.launched == 0
    (plan,) = planned._plans.values()
    plan.captured.is_on = True  # otherwise as on the default stream of a GPU
    at_one_address(plan.captured, torch.empty(3))
    for _ in range(5):
        planned(x)
    assert (fake.captured, fake.launched) == (1, 3)


def test_a_graph_does_not_keep_tensors_alive(fake):
    operator = captured_operator([lambda slots, addresses, stream: None])
    at_one_address(operator)
    x = torch.zeros(3)
    for _ in range(3):
        run(operator, x)
    assert fake.captured == 1
    reference = weakref.ref(x)
    del x
    gc.collect()
    assert reference() is None


class Library:
    """A CUDA driver on which one function fails."""

    def __init__(self, fails: str):
        self.fails, self.calls = fails, []

    def __getattr__(self, name: str):
        def call(*given: object) -> int:
            self.calls.append(name)
            if name == "cuStreamCreate":
                given[0]._obj.value = 1234
            if name == "cuStreamEndCapture":
                given[1]._obj.value = 99
            if name == "cuGraphInstantiateWithFlags":
                given[0]._obj.value = 98
            return int(name == self.fails)

        return call


@pytest.mark.gpu
@pytest.mark.parametrize(
    "fails",
    [
        "cuThreadExchangeStreamCaptureMode",
        "cuStreamBeginCapture_v2",
        "cuStreamEndCapture",
        "cuGraphInstantiateWithFlags",
    ],
)
def test_a_driver_that_fails_has_no_graph_and_leaves_nothing_open(fails):
    library = Library(fails)
    found = GraphDriver(torch.cuda.current_device(), library)
    assert found.capture(lambda stream: None, None) is None
    assert library.calls.count("cuStreamBeginCapture_v2") == (fails != "cuThreadExchangeStreamCaptureMode")
    begun = "cuStreamBeginCapture_v2" in library.calls and fails != "cuStreamBeginCapture_v2"
    assert library.calls.count("cuStreamEndCapture") == begun
    assert library.calls.count("cuThreadExchangeStreamCaptureMode") == (1 if "Exchange" in fails else 2)
    assert library.calls.count("cuGraphDestroy") == (fails == "cuGraphInstantiateWithFlags")


@pytest.mark.parametrize("error", [RuntimeError, TypeError, ValueError])
def test_work_that_raises_an_error_in_a_capture_has_no_graph(monkeypatch, error):
    """Kernels raise errors of their own; the call goes on without a graph, and the capture is ended."""
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: SimpleNamespace(cuda_stream=handle))
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: None)
    for context in ("device", "stream", "use_mem_pool"):
        monkeypatch.setattr(torch.cuda, context, lambda _: nullcontext())

    def record(stream: int) -> None:
        raise error("cannot be captured")

    library = Library("")
    assert GraphDriver(0, library).capture(record, None) is None
    assert library.calls[-4:] == [
        "cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphDestroy", "cuThreadExchangeStreamCaptureMode"
    ]  # fmt: skip


@pytest.mark.gpu
def test_graphs_of_a_layer_on_a_gpu_equal_its_launches(monkeypatch):
    import moesaic

    monkeypatch.setattr(LaunchPlans, "_record", record)
    torch.manual_seed(0)
    layer = moesaic.PatchMoE(32, 32, experts=4, patches_per_expert=3, patch_size=2, kernel_size=3).cuda()
    inputs = [torch.randn(5, 32, 12, 12, device="cuda", requires_grad=True) for _ in range(2)]
    grad = torch.randn(5, 32, 12, 12, device="cuda")

    def step(x):
        layer.zero_grad()
        x.grad = None
        y = layer(x)
        y.backward(grad)
        return [y.detach().clone(), x.grad.clone(), *(each.grad.clone() for each in layer.parameters())]

    replayed: list[int] = []
    launch_graph = GraphDriver.launch
    monkeypatch.setattr(GraphDriver, "launch", lambda self, graph: replayed.append(1) or launch_graph(self, graph))
    expected = []
    with monkeypatch.context() as without:
        without.setattr(operator_graphs, "driver", lambda device: None)
        expected = [step(x) for x in inputs]
    from moesaic.ops.triton import patch_ops

    for operator in (patch_ops.patch_route_conv, patch_ops.patch_conv_backward):
        operator._implementation._plans.clear()
        operator._implementation._guarded = {}
    for x, known in zip(inputs, expected, strict=True):
        for _ in range(10):
            for one, other in zip(step(x), known, strict=True):
                assert torch.equal(one, other)
    assert len(replayed) > 10
    side = torch.cuda.Stream()
    count = len(replayed)
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        found = step(inputs[0])
    side.synchronize()
    assert len(replayed) == count  # graphs are for the default stream
    for one, other in zip(found, expected[0], strict=True):
        assert torch.equal(one, other)
