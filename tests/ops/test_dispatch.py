import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest
import torch

import moesaic
from moesaic import ops
from moesaic.ops import dispatch
from moesaic.ops.dispatch import PatchSelection
from moesaic.ops.torch_backend import TorchBackend


@pytest.fixture
def layer() -> moesaic.PatchMoE:
    return moesaic.PatchMoE(4, 4, experts=2, patches_per_expert=3)


@pytest.fixture
def plugged_in(monkeypatch):
    """A third backend in the registry, as a kernel author would add one."""
    monkeypatch.setattr(dispatch, "_registered", dict(dispatch._registered))

    class Loud(TorchBackend):
        name = "loud"
        calls = 0

        def refusal(self, x, routing):
            return "it is too small" if x.shape[0] < 2 else None

        def conv(self, *args):
            self.calls += 1
            return super().conv(*args)

    loud = Loud()
    ops.register_backend(loud)
    return loud


def test_backends_are_preferred_in_the_order_reference_torch_triton():
    assert ops.backends() == ["reference", "torch", "triton"]
    assert list(dispatch._registered) == ops.backends()


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"name='trition' is unknown; .* \(did you mean 'triton'\?\)"):
        moesaic.backend("trition")


def test_the_choice_ends_with_the_block_and_nests(layer):
    x = torch.randn(1, 4, 3, 3)
    routing = layer.route(x)
    with moesaic.backend("reference"):
        with moesaic.backend("torch"):
            assert ops.select_backend(x, routing).name == "torch"
        assert ops.select_backend(x, routing).name == "reference"
    assert ops.select_backend(x, routing).name == "torch"


def test_the_choice_ends_with_an_error_in_the_block(layer):
    with pytest.raises(RuntimeError), moesaic.backend("reference"):
        raise RuntimeError
    x = torch.randn(1, 4, 3, 3)
    assert ops.select_backend(x, layer.route(x)).name == "torch"


def test_a_soft_routing_is_refused_by_name(layer):
    x = torch.randn(1, 4, 3, 3)
    soft = moesaic.SoftRouter(4, 2)(x)
    with pytest.raises(
        ValueError, match="no backend can run this: reference: a soft routing has no masks; torch: a soft"
    ):
        ops.select_backend(x, soft)


def test_backend_decorates_a_function(layer):
    x = torch.randn(1, 4, 3, 3)

    @moesaic.backend("reference")
    def chosen() -> str:
        return ops.select_backend(x, layer.route(x)).name

    assert [chosen(), chosen()] == ["reference", "reference"]


def test_overlapping_blocks_of_threads_do_not_touch_each_other():
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
    seen: list[str | None] = []

    def first() -> None:
        with moesaic.backend("reference"):
            first_in.set()
            assert second_in.wait(60)
            seen.append(ops.requested_backend())
        seen.append(ops.requested_backend())
        first_out.set()

    def second() -> None:
        assert first_in.wait(60)
        with moesaic.backend("torch"):
            second_in.set()
            assert first_out.wait(60)
            seen.append(ops.requested_backend())
        seen.append(ops.requested_backend())

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(first), threads.submit(second)]:
            done.result()
    assert seen == ["reference", None, "torch", None]
    assert ops.requested_backend() is None


def test_a_new_thread_has_no_requested_backend_and_a_copied_context_has():
    with moesaic.backend("reference"), ThreadPoolExecutor(1) as threads:
        assert threads.submit(ops.requested_backend).result() is None
        assert threads.submit(copy_context().run, ops.requested_backend).result() == "reference"
        assert asyncio.run(asyncio.to_thread(ops.requested_backend)) == "reference"


def test_asyncio_tasks_that_take_turns_have_their_own_choice():
    async def task(name: str) -> list[str | None]:
        seen = []
        with moesaic.backend(name):
            for _ in range(2):
                await asyncio.sleep(0)
                seen.append(ops.requested_backend())
        await asyncio.sleep(0)
        return [*seen, ops.requested_backend()]

    async def both() -> list[list[str | None]]:
        return await asyncio.gather(task("reference"), task("torch"))

    assert asyncio.run(both()) == [["reference", "reference", None], ["torch", "torch", None]]


def test_blocks_of_one_thread_may_overlap():
    first, second = moesaic.backend("reference"), moesaic.backend("torch")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert ops.requested_backend() == "torch"
    second.__exit__(None, None, None)
    assert ops.requested_backend() is None


def test_a_decorated_function_may_run_in_several_threads_at_once():
    both = threading.Barrier(2, timeout=60)

    @moesaic.backend("reference")
    def chosen() -> str | None:
        both.wait()
        return ops.requested_backend()

    def run() -> tuple[str | None, str | None]:
        return chosen(), ops.requested_backend()

    with ThreadPoolExecutor(2) as threads:
        done = [threads.submit(run) for _ in range(2)]
        assert [each.result() for each in done] == 2 * [("reference", None)]


def test_a_backend_that_registers_later_is_preferred_where_it_can_run(layer, plugged_in):
    layer(torch.randn(2, 4, 3, 3))
    assert plugged_in.calls == 1
    layer(torch.randn(1, 4, 3, 3))
    assert plugged_in.calls == 1


def test_a_requested_backend_that_cannot_run_raises_with_the_reason(layer, plugged_in):
    with moesaic.backend("loud"), pytest.raises(ValueError, match="backend 'loud' cannot run this: it is too small"):
        layer(torch.randn(1, 4, 3, 3))


class ChoosingBackend(TorchBackend):
    """Makes the expert choice itself, or leaves it to the router."""

    name = "choosing"

    def __init__(self, chooses: bool) -> None:
        super().__init__()
        self.chooses, self.calls = chooses, 0

    def choose(
        self, x: torch.Tensor, router: torch.Tensor, patches: int, gate: str, *, detached: bool
    ) -> PatchSelection | None:
        self.calls += 1
        assert not detached
        if not self.chooses:
            return None
        E, C, p, _ = router.shape
        plain = moesaic.ExpertChoice(C, E, patches, p, gate=gate)
        plain.weight.data.copy_(router)
        routing = plain.choose(plain.scores(x), grid=(x.shape[2] // p, x.shape[3] // p))
        return PatchSelection(x, routing, router, gate, torch.empty(0))


class ReversedScores(moesaic.ExpertChoice):
    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return -super().scores(x)


@pytest.mark.parametrize("chooses", [True, False])
def test_a_backend_with_kernels_for_expert_choice_is_asked_first(monkeypatch, chooses):
    backend = ChoosingBackend(chooses)
    monkeypatch.setitem(dispatch._registered, backend.name, backend)
    router, x = moesaic.ExpertChoice(3, 2, 1, 2), torch.randn(2, 3, 4, 4)
    routing, selection = router.select(x)
    assert backend.calls == 1
    assert (selection is not None) == chooses
    assert routing.index.equal(router.choose(router.scores(x)).index)


def test_a_router_with_scores_of_its_own_chooses_itself(monkeypatch):
    backend = ChoosingBackend(True)
    monkeypatch.setitem(dispatch._registered, backend.name, backend)
    _, selection = ReversedScores(3, 2, 1, 2).select(torch.randn(2, 3, 4, 4))
    assert selection is None
    assert backend.calls == 0
