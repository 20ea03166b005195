import pytest
import torch

import moesaic
from moesaic import ops
from moesaic.ops import dispatch
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


def test_a_backend_that_registers_later_is_preferred_where_it_can_run(layer, plugged_in):
    layer(torch.randn(2, 4, 3, 3))
    assert plugged_in.calls == 1
    layer(torch.randn(1, 4, 3, 3))
    assert plugged_in.calls == 1


def test_a_requested_backend_that_cannot_run_raises_with_the_reason(layer, plugged_in):
    with moesaic.backend("loud"), pytest.raises(ValueError, match="backend 'loud' cannot run this: it is too small"):
        layer(torch.randn(1, 4, 3, 3))
