"""The stacked networks of Chen et al.: what they say is what the equations say."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from moesaic import keyed_random
from moesaic.papers.chen2022.data.synthetic_clusters import ClusterPatches
from moesaic.papers.chen2022.two_layer_networks import FilterActivation, Mixture, Mixtures, activate

KEYS = keyed_random.keys(0, range(3))
SOURCE = ClusterPatches(clusters=3, patches=5, dim=7)
SIGMA = {
    "identity": lambda z: z,
    "cubic": lambda z: z**3,
    "relu": torch.nn.functional.relu,
    "celu": torch.nn.functional.celu,
    "gelu": torch.nn.functional.gelu,
    "tanh": torch.tanh,
}
each_activation = pytest.mark.parametrize("name", get_args(FilterActivation))


def networks(model: Mixture, dim: int = 7) -> Mixtures:
    """With routers that want something."""
    made = Mixtures.initial(model, KEYS, dim=dim, dtype=torch.float64)
    if made.router is None:
        return made
    return replace(made, router=keyed_random.normal(KEYS, "test/router", model.experts, dim))


@each_activation
def test_activations_and_their_slopes_are_torchs(name):
    z = torch.linspace(-3, 3, 61, dtype=torch.float64, requires_grad=True)
    expected = SIGMA[name](z)
    (slope,) = torch.autograd.grad(expected.sum(), z)
    value, found, factor = activate(name, z.detach().clone())
    torch.testing.assert_close(value, expected.detach())
    away = z.detach().abs() > 1e-9  # at 0 ReLU has no slope
    torch.testing.assert_close((factor * found)[away], slope[away])


@each_activation
@pytest.mark.parametrize("fidelity", ["print", "released"])
def test_predictions_sample_by_sample(fidelity, name):
    model = replace(Mixture.of(fidelity, name, experts=4, filters=6), init_scale=0.4)
    made = networks(model)
    data = SOURCE.draw(KEYS, 11, "test")
    patches = data.patches.double()
    noise = keyed_random.uniform(KEYS, "test/noise", 11, 4)
    for given in (None, noise):
        said, chosen = made.predict(patches, given, block=4)
        for t in range(3):
            for b in range(11):
                x = model.data_scale * patches[t, b]
                h = made.router[t] @ x.sum(0)
                wanted = h if given is None else h + given[t, b]
                m = int(wanted.argmax())
                assert int(chosen[t, b]) == m
                pre = x @ made.weights[t, m].T + (0 if made.bias is None else made.bias[t, m])
                each = SIGMA[name](pre).sum(0)
                f = each.sum() if fidelity == "print" else each[:3].sum() - each[3:].sum()
                gate = h.softmax(0)[m] if fidelity == "print" else wanted[m]
                assert float(said[t, b]) == pytest.approx(float(gate * f), rel=1e-9)


def test_a_single_network_has_no_router_and_a_gate_of_one():
    model = Mixture.single("print", filters=6)
    made = networks(model)
    patches = SOURCE.draw(KEYS, 5, "test").patches.double()
    said, chosen = made.predict(patches)
    assert made.router is None
    assert (chosen == 0).all()
    torch.testing.assert_close(said, made.expert_outputs(patches)[..., 0])


def test_initial_weights_are_as_large_as_printed_or_released():
    printed = Mixtures.initial(Mixture.of("print"), KEYS, dim=50)
    assert float(printed.weights.std()) == pytest.approx(0.01, rel=0.02)
    assert printed.bias is None
    released = Mixtures.initial(Mixture.of("released"), KEYS, dim=50)
    assert float(released.weights.std()) == pytest.approx(0.001 / math.sqrt(150), rel=0.02)
    assert released.bias is not None
    assert float(released.bias.abs().max()) <= 0.001 / math.sqrt(50)
    single = Mixtures.initial(Mixture.single("released"), KEYS, dim=50)
    assert float(single.weights.std()) == pytest.approx(1 / math.sqrt(150), rel=0.02)
    assert (printed.router == 0).all()


def test_a_trial_starts_the_same_alone_and_in_company():
    together = Mixtures.initial(Mixture.of("released"), KEYS, dim=9)
    alone = Mixtures.initial(Mixture.of("released"), keyed_random.keys(0, [2]), dim=9)
    assert torch.equal(together.weights[2], alone.weights[0])
    assert torch.equal(together.of(torch.tensor([2])).bias, alone.bias)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"experts": 0}, "experts=0"),
        ({"filters": 5, "two_logits": True}, "filters=5 cannot be halved"),
        ({"activation": "sine"}, "activation='sine'"),
        ({"init_scale": 0.0}, "init_scale=0.0; it must be positive"),
        ({"data_scale": math.inf}, "data_scale=inf"),
        ({"gate": "one"}, "gate='one'"),
    ],
)
def test_networks_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Mixture(**arguments)


def test_there_is_no_mixture_of_another_fidelity():
    with pytest.raises(ValueError, match="fidelity='best'"):
        Mixture.of("best")
