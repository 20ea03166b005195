import copy
import gc
import pickle
import weakref
from itertools import product

import pytest
import torch
from strategies import PickyChoice

import moesaic
from moesaic.ops.patch import cpu_inference
from moesaic.ops.patch.cpu_inference import can_run_inference


def layer(experts=3, L=2, p=2, kernel=3, seed=0, **options):
    torch.manual_seed(seed)
    made = moesaic.PatchMoE(
        5, 6, experts=experts, patches_per_expert=L, patch_size=p, kernel_size=kernel, dtype=torch.float64, **options
    )
    if made.experts.norm is not None:
        for values in (made.experts.norm.running_mean, made.experts.norm.bias, made.experts.norm.weight):
            torch.nn.init.normal_(values)
        torch.nn.init.uniform_(made.experts.norm.running_var, 0.5, 2)
    return made.eval()


def by_reference(of, x):
    with moesaic.backend("reference"):
        return of(x)


@pytest.fixture
def inference_runs(monkeypatch):
    """Counts the runs of the inference path."""
    runs: list[object] = []
    run = cpu_inference.conv_inference
    monkeypatch.setattr("moesaic.ops.torch_backend.conv_inference", lambda *given: runs.append(1) or run(*given))
    return runs


OPTIONS = list(
    product(["output", "input"], ["map", "patch"], ["concat", "sum"], [False, True], [1, 3, 5], [1, 2, 3, 4])
)[::5]  # each value meets each of the others


@torch.no_grad()
def test_every_option_equals_the_reference_however_many_images_run_at_a_time(inference_runs, monkeypatch):
    for number, (gate_on, context, combine, norm, kernel, p) in enumerate(OPTIONS):
        torch.manual_seed(number)
        rows, columns, experts = 1 + number % 4, 1 + number % 3, 1 + number % 3
        L = 1 + number % (rows * columns)
        made = layer(
            experts,
            L,
            p,
            kernel,
            gate_on=gate_on,
            context=context,
            combine=combine,
            expert_norm=norm,
            bias=number % 5 > 0,
        )
        width = kernel**2 * made.experts.out_channels
        monkeypatch.setattr(
            cpu_inference, "_CHUNK_VALUES", (1, 2, 100)[number % 3] * experts * L * p * p * max(5, width)
        )
        x = torch.randn(3, 5, rows * p, columns * p, dtype=torch.float64)
        torch.testing.assert_close(made(x), by_reference(made, x), rtol=1e-10, atol=1e-10)
    assert len(inference_runs) == len(OPTIONS)


@torch.no_grad()
def test_the_cache_is_invalidated_by_every_change_of_the_weights(inference_runs):
    made, x = layer(gate_on="input", expert_norm=True), torch.randn(2, 5, 6, 4, dtype=torch.float64)
    other = layer(gate_on="input", expert_norm=True, seed=1)

    def train():
        made.train()
        with torch.enable_grad():
            made(x).square().sum().backward()
        torch.optim.SGD(made.parameters(), lr=0.1).step()
        made.eval()

    changes = [
        lambda: made.experts.weight.mul_(2),
        lambda: made.experts.norm.running_mean.add_(1),
        lambda: made.load_state_dict(other.state_dict()),
        train,
        lambda: setattr(made.experts.norm, "eps", 0.5),
        lambda: setattr(made.experts, "bias", torch.nn.Parameter(torch.ones_like(made.experts.bias))),
    ]
    for change in changes:
        before = made(x)
        change()
        assert (made(x) - before).abs().max() > 1e-6
        torch.testing.assert_close(made(x), by_reference(made, x), rtol=1e-10, atol=1e-10)
    assert inference_runs


@torch.no_grad()
def test_maps_of_other_sizes_equal_the_reference():
    made = layer(gate_on="input", expert_norm=True)
    for rows, columns in ((2, 2), (4, 2), (2, 2)):
        x = torch.randn(1, 5, 2 * rows, 2 * columns, dtype=torch.float64)
        torch.testing.assert_close(made(x), by_reference(made, x), rtol=1e-10, atol=1e-10)


class Contended(dict):
    """A layer's cache, cleared after each entry: a thread with maps of another size may do so at any moment."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.clear()


@torch.no_grad()
def test_another_thread_may_clear_the_cache_at_any_moment(inference_runs, monkeypatch):
    made = layer(gate_on="input", expert_norm=True)
    monkeypatch.setattr(made.experts._prepared, "entries", Contended())
    x = torch.randn(1, 5, 4, 4, dtype=torch.float64)
    for _ in range(2):
        torch.testing.assert_close(made(x), by_reference(made, x), rtol=1e-10, atol=1e-10)
    assert len(inference_runs) == 2


@torch.no_grad()
def test_the_cache_does_not_outlive_the_layer_and_is_not_copied():
    made = layer()
    made(torch.randn(1, 5, 4, 4, dtype=torch.float64))
    copies = copy.deepcopy(made), pickle.loads(pickle.dumps(made))
    assert [len(each.experts._prepared.entries) for each in (made, *copies)] == [1, 0, 0]
    (cached,) = made.experts._prepared.entries.values()
    alive = weakref.ref(cached)
    del made, cached
    gc.collect()
    assert alive() is None


@torch.no_grad()
def test_a_moving_average_that_edits_the_data_of_weights_is_noticed(inference_runs):
    made = layer(gate_on="input", expert_norm=True).to(memory_format=torch.channels_last)
    x, other = torch.randn(2, 5, 6, 4, dtype=torch.float64), layer(gate_on="input", expert_norm=True, seed=1)
    for average, value in zip(made.parameters(), other.parameters(), strict=True):
        made(x)
        average.data.mul_(0.9).add_(value.data, alpha=0.1)
        torch.testing.assert_close(made(x), by_reference(made, x), rtol=1e-10, atol=1e-10)
    assert inference_runs


@torch.no_grad()
def test_weights_can_be_swapped_after_inference(monkeypatch):
    monkeypatch.setattr(torch.__future__, "get_swap_module_params_on_conversion", lambda: True)
    made, x = layer(), torch.randn(1, 5, 4, 4, dtype=torch.float64)
    before = made(x)
    made.float().double()
    torch.testing.assert_close(made(x), before, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_default_device_does_not_reach_the_tables_that_later_passes_read(inference_runs):
    made, x = layer(gate_on="input"), torch.randn(2, 5, 6, 6, dtype=torch.float64)
    cpu_inference._index_tables.cache_clear()
    with torch.device("meta"):
        y = made(x)
    for each in (y, made(x)):
        torch.testing.assert_close(each, by_reference(made, x), rtol=1e-10, atol=1e-10)
    assert len(inference_runs) == 2


def test_tensors_of_inference_mode_are_not_cached():
    made, x = layer(gate_on="input", expert_norm=True), torch.randn(2, 5, 4, 4, dtype=torch.float64)
    with torch.inference_mode():
        first = made(x)
    with torch.no_grad():
        torch.testing.assert_close(made(x), first)
    x.requires_grad_()
    made(x).sum().backward()
    assert x.grad.abs().sum() > 0


def test_training_does_not_use_the_inference_path(inference_runs):
    x = torch.randn(2, 5, 4, 4, dtype=torch.float64)
    layer()(x)
    frozen = layer().requires_grad_(False)
    frozen(x.clone().requires_grad_())
    with torch.no_grad():
        layer(expert_norm=True).train()(x)
        moesaic.PatchMoE(5, 6, experts=2, router=PickyChoice(5, 2, 2, 2, dtype=torch.float64), dtype=torch.float64)(x)
        moesaic.PatchMoE(5, 6, experts=2, router=moesaic.TokenChoice(5, 2, dtype=torch.float64), dtype=torch.float64)(x)
        layer().to(torch.bfloat16)(x.bfloat16())
        layer()(x[:0])
    assert not inference_runs
    frozen(x)
    assert inference_runs


def test_dtypes_that_differ_are_refused():
    made, x = layer(), torch.randn(1, 5, 4, 4, dtype=torch.float64)
    routing, experts = made.route(x), moesaic.ops.ConvWeights(made.experts.weight, None)
    with torch.no_grad():
        assert can_run_inference(x, routing, experts, None)
        assert not can_run_inference(x.float(), routing, experts, None)


@pytest.mark.parametrize("options", [{"gate_on": "output"}, {"gate_on": "input", "expert_norm": True}])
def test_the_default_device_has_no_effect(options, inference_runs):
    made = layer(**options)
    cpu_inference._index_tables.cache_clear()
    x = torch.randn(2, 5, 6, 8, dtype=torch.float64)
    with torch.device("meta"):
        trained = made(x)
        with torch.no_grad():
            y = made(x)
    assert inference_runs
    torch.testing.assert_close(y, by_reference(made, x).detach())
    torch.testing.assert_close(trained.detach(), y)
    with torch.no_grad():  # with the tables that are cached now
        assert torch.equal(made(x), y)
