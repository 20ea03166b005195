import asyncio
import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import moesaic
from moesaic import insight
from moesaic.layers import routed_layers, routing_hook


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(
        moesaic.PatchMoE(3, 4, experts=2, patches_per_expert=1, patch_size=2),
        nn.Sequential(nn.ReLU(), moesaic.PatchMoE(4, 4, experts=4, router=moesaic.TokenChoice(4, 4))),
    )


def test_routing_is_recorded_by_module_name(model):
    with moesaic.record_routing(model) as routing:
        model(torch.randn(5, 3, 8, 8))
    assert list(routing) == ["0", "1.1"]
    assert routing["0"].grid == (4, 4)
    assert routing["1.1"].load.sum() == 5 * 64


def test_keep_last_preserves_the_autograd_graph(model):
    with moesaic.record_routing(model) as routing:
        model(torch.randn(5, 3, 8, 8))
        model(torch.randn(2, 3, 8, 8))
    assert routing["0"].batch == 2
    moesaic.routing.load_balance_loss(routing["1.1"]).backward()
    assert model[1][1].router.weight.grad.abs().sum() > 0


def test_keep_all_concatenates_detached_passes(model):
    x = torch.randn(5, 3, 8, 8)
    with moesaic.record_routing(model, keep="all") as routing:
        model(x[:2])
        model(x[2:])
    with moesaic.record_routing(model) as whole:
        model(x)
    assert torch.equal(routing["0"].index, whole["0"].index)
    assert torch.equal(routing["1.1"].mask, whole["1.1"].mask)
    assert not routing["0"].gate.requires_grad


def test_keep_all_concatenates_soft_and_dropping_routings():
    x = torch.randn(4, 3, 4, 4)
    soft = moesaic.PatchMoE(3, 4, experts=2, router=moesaic.SoftRouter(3, 2, 2))
    with moesaic.record_routing(soft, keep="all") as routing:
        soft(x[:1])
        soft(x[1:])
    torch.testing.assert_close(routing[""].dispatch, soft.route(x).dispatch)

    full = moesaic.PatchMoE(3, 4, experts=2, router=moesaic.TokenChoice(3, 2, capacity_factor=0.5))
    with moesaic.record_routing(full, keep="all") as routing:
        full.eval()(x)
        full.train()(x)
    assert routing[""].load.sum() < 2 * 4 * 16
    assert routing[""].mask.sum() == (routing[""].index >= 0).sum()


def test_keep_all_concatenates_passes_with_and_without_padding():
    layer, tokens = moesaic.TokenMoE(3, experts=2, capacity=1.0), torch.randn(2, 5, 3)
    mask = (torch.arange(5) < 3).expand(2, 5)
    with moesaic.record_routing(layer, keep="all") as routing:
        layer(tokens)
        layer(tokens, mask)
    assert torch.equal(routing[""].unit_mask, torch.cat([torch.ones(2, 5, dtype=torch.bool), mask]))
    with moesaic.record_routing(layer, keep="all") as routing:
        layer(tokens)
    assert routing[""].unit_mask is None


def test_keep_all_refuses_maps_of_two_sizes(model):
    def record_both() -> None:
        with moesaic.record_routing(model, keep="all"):
            model(torch.randn(1, 3, 8, 8))
            model(torch.randn(1, 3, 4, 4))

    with pytest.raises(ValueError, match="0 routed 16 units in one pass and 4 in another"):
        record_both()


def test_hooks_are_removed_after_the_block_even_on_error(model):
    def fail() -> None:
        with moesaic.record_routing(model):
            assert all(layer.has_routing_hooks for layer in routed_layers(model).values())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not any(layer.has_routing_hooks for layer in routed_layers(model).values())


def test_a_compiled_model_keeps_the_names_of_its_layers(model):
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    with moesaic.record_routing(compiled) as routing, torch.no_grad():
        compiled(torch.randn(2, 3, 8, 8))
    assert list(routing) == ["0", "1.1"]
    assert list(routed_layers(torch.compile(model[0]))) == [""]


def test_a_model_without_routed_layers_is_refused():
    with (
        pytest.raises(ValueError, match="Linear has no routed layer; build one"),
        moesaic.record_routing(nn.Linear(1, 1)),
    ):
        pass


def test_an_unknown_value_of_keep_is_refused(model):
    listening = moesaic.record_routing(model, "first")
    with pytest.raises(ValueError, match="keep='first' is unknown; use 'last' or 'all'"):
        listening.__enter__()


def test_a_routing_hook_is_called_for_every_layer_with_its_name(model):
    seen = []
    with routing_hook(model, lambda name, layer, routing: seen.append((name, layer, routing.experts))):
        model(torch.randn(1, 3, 8, 8))
    assert seen == [("0", model[0], 2), ("1.1", model[1][1], 4)]


def test_recorders_of_two_threads_record_their_own_passes(model):
    both = threading.Barrier(2, timeout=60)

    def record(batch: int) -> dict[str, int]:
        with moesaic.record_routing(model, keep="all") as routing:
            both.wait()
            for _ in range(3):
                model(torch.randn(batch, 3, 8, 8))
            both.wait()
        return {name: each.batch for name, each in routing.items()}

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(record, (1, 5))) == [{"0": 3, "1.1": 3}, {"0": 15, "1.1": 15}]


def test_passes_of_another_thread_are_recorded_in_a_copy_of_the_context_alone(model):
    x = torch.randn(2, 3, 8, 8)
    with ThreadPoolExecutor(1) as threads, moesaic.record_routing(model) as routing:
        threads.submit(model, x).result()
        assert routing == {}
        threads.submit(copy_context().run, model, x).result()
        assert list(routing) == ["0", "1.1"]


def test_a_recorder_that_another_thread_opens_hears_nothing_of_this_one(model):
    opened, called = threading.Event(), threading.Event()

    def record() -> dict[str, moesaic.Routing]:
        with moesaic.record_routing(model) as routing:
            opened.set()
            assert called.wait(60)
        return routing

    with ThreadPoolExecutor(1) as threads:
        recorded = threads.submit(record)
        assert opened.wait(60)
        model(torch.randn(1, 3, 8, 8))
        called.set()
        assert recorded.result() == {}


def test_recorders_of_asyncio_tasks_that_take_turns_record_their_own_passes(model):
    async def record(batch: int) -> list[int]:
        with moesaic.record_routing(model, keep="all") as routing:
            for _ in range(2):
                await asyncio.sleep(0)
                model(torch.randn(batch, 3, 8, 8))
        return [each.batch for each in routing.values()]

    async def record_both() -> list[list[int]]:
        return await asyncio.gather(record(1), record(5))

    assert asyncio.run(record_both()) == [[2, 2], [10, 10]]


def test_recorders_nest_and_may_overlap(model):
    x = torch.randn(1, 3, 8, 8)
    first, second = moesaic.record_routing(model, keep="all"), moesaic.record_routing(model[1])
    outer = first.__enter__()
    model(x)
    inner = second.__enter__()
    model(x)
    first.__exit__(None, None, None)
    assert {name: routing.batch for name, routing in outer.items()} == {"0": 2, "1.1": 2}
    inner.clear()
    model(x)
    second.__exit__(None, None, None)
    assert list(inner) == ["1"]
    model(x)
    assert outer["0"].batch == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_pass_that_checkpointing_repeats_is_recorded_once(model, reentrant):
    x = torch.randn(4, 3, 8, 8, requires_grad=True)
    with moesaic.record_routing(model, keep="all") as routing:
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert {record.batch for record in routing.values()} == {4}


def test_a_recorder_inside_of_the_checkpointed_part_records_the_repeated_pass_too(model):
    balance = []

    def part(x):
        with moesaic.record_routing(model) as routing:
            y = model(x)
        balance.append(sum(record.scores.square().sum() for record in routing.values()))
        return y.sum() + balance[-1]

    x = torch.randn(4, 3, 8, 8, requires_grad=True)
    checkpoint(part, x, use_reentrant=True).backward()
    torch.testing.assert_close(balance[0], balance[1])


def test_new_recorders_do_not_recompile_a_model(model):
    torch.compiler.reset()
    graphs = []
    compiled = torch.compile(model, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    x, sizes = torch.randn(2, 3, 8, 8), []
    with torch.no_grad():
        for _ in range(4):
            with moesaic.record_routing(compiled) as routing:
                compiled(x)
                compiled(x)
            sizes.append(len(graphs))
            assert list(routing) == ["0", "1.1"]
        recorded = len(graphs)
        compiled(x)
        compiled(x)
    assert sizes == 4 * [recorded]
    assert len(graphs) == recorded + 1, "without recorder it is another graph, without hooks"


def test_the_routing_of_all_layers_in_place_of_one_names_the_layers():
    model = nn.Sequential(moesaic.PatchMoE(4, 4, experts=2, patches_per_expert=1))
    with moesaic.record_routing(model) as routing:
        with pytest.raises(KeyError, match="no routed layer '0' has run; run the model inside the block first"):
            routing["0"]
        model(torch.zeros(1, 4, 2, 2))
    with pytest.raises(AttributeError, match=r"of one layer; take one, as routing\['0'\], of '0'"):
        insight.summary(routing)
    with pytest.raises(KeyError, match="no routed layer '' has run; take one"):
        routing[""]
    assert copy.copy(routing).keys() == {"0"}
