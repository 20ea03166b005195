"""The two-layer networks: their outputs against the equations, their gradients against autograd."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moesaic import keyed_random
from moesaic.papers.chowdhury2023 import two_layer_networks
from moesaic.papers.chowdhury2023.two_layer_networks import Networks, TwoLayer, error_signal, logits, standardise_

N, D, B = 7, 5, 6


def makes(classes: int) -> list[TwoLayer]:
    """Every kind and option."""
    several = [TwoLayer.cnn("print", neurons=6), TwoLayer.cnn("released")]
    for fidelity in ("print", "released"):
        several += [TwoLayer.separate(fidelity, classes=classes, patches_per_expert=3, neurons=4)]
        several += [TwoLayer.joint(fidelity, experts=3, patches_per_expert=l, neurons=2) for l in (1, 4, N)]
    several += [TwoLayer.best(2, experts=3), replace(TwoLayer.cnn("print", neurons=6), standardise=True)]
    several += [replace(several[-1], train_output=True), replace(several[1], train_output=True)]
    return several


def networks_of(model: TwoLayer, classes: int, trials: int = 3) -> Networks:
    made = Networks.initial(model, keyed_random.keys(1, range(trials)), patches=N, dim=D, classes=classes)
    routers = None if made.routers is None else torch.randn(made.routers.shape, dtype=torch.float64)
    # routers of a size that makes the gates differ
    kernels = torch.randn(made.kernels.shape, dtype=torch.float64)
    centre = torch.randn(trials, D, dtype=torch.float64) if model.standardise else None
    return replace(made, kernels=kernels, output=made.output.double(), routers=routers, centre=centre)


def by_the_equations(networks: Networks, t: int, x: Tensor) -> Tensor:
    """(O,) for one sample (N, D): eqs. 1, 3, 4, 5 and 23 as they stand, with loops."""
    model = networks.model
    if networks.centre is not None:
        x = torch.stack([(patch - networks.centre[t]) / (patch - networks.centre[t]).norm() for patch in x])
    E, J, L = model.experts, model.neurons, model.selected(N)
    kernels = networks.kernels[t]
    if model.kind == "separate":
        routers, neurons = networks.routers[t], kernels
    elif model.kind == "joint":
        routers, neurons = kernels[0, :E], kernels[0, E:].view(E, J, D)
    else:
        routers, neurons = torch.zeros(1, D, dtype=x.dtype), kernels
    f = torch.zeros(networks.output.shape[2], dtype=x.dtype)
    for s in range(E):
        g = x @ routers[s]
        chosen = sorted(range(N), key=lambda j, g=g: (-g[j].item(), j))[:L]
        norm = sum(g[j].exp() for j in chosen)
        for r in range(J):
            total = sum(
                (neurons[s, r] @ x[j]).relu() * (g[j].exp() / norm if model.kind == "joint" else 1.0) for j in chosen
            )
            divisor = {"selected": L, "patches": N, "one": 1}[model.scale]
            f = f + networks.output[t, s * J + r] * total / divisor
    return f


def loss_of(f: Tensor, label: int) -> Tensor:
    if len(f) == 1:
        y = 1 if label == 1 else -1
        return torch.log1p((-y * f[0]).exp())  # eq. 2
    return f.exp().sum().log() - f[label]  # eq. 24


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("which", range(14))
def test_outputs_and_gradients_are_those_of_the_equations(classes: int, which: int):
    torch.manual_seed(which)
    model = makes(classes)[which]
    networks = networks_of(model, classes)
    T = len(networks)
    pool = torch.randn(40, D, dtype=torch.float64)
    index = torch.randint(40, (T, B, N))
    labels = torch.randint(classes, (T, B))
    weight = torch.rand(T, B, dtype=torch.float64)

    leaves = [networks.kernels.requires_grad_(), networks.output.requires_grad_()]
    expected = torch.stack([torch.stack([by_the_equations(networks, t, pool[i]) for i in index[t]]) for t in range(T)])
    loss = sum(weight[t, i] * loss_of(expected[t, i], int(labels[t, i])) for t in range(T) for i in range(B))
    in_kernels, in_output = torch.autograd.grad(loss, leaves)

    with torch.no_grad():
        assert torch.allclose(networks.predict(pool, index), expected, atol=1e-12)
        seen = networks.select(pool, index)
        patches = pool[seen]
        if networks.centre is not None:
            standardise_(patches, networks.centre)
        pre = torch.einsum("tgbnd,tgkd->tgbnk", patches, networks.kernels)
        signal = torch.full_like(pre, torch.nan)  # every element must be written
        outputs, output_gradient = error_signal(model, pre, networks.output, labels, weight, N, signal)
        kernel_gradient = torch.einsum("tgbnk,tgbnd->tgkd", signal, patches)
    torch.testing.assert_close(outputs, expected.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(kernel_gradient, in_kernels, rtol=1e-10, atol=1e-12)
    if model.train_output:
        torch.testing.assert_close(output_gradient, in_output, rtol=1e-10, atol=1e-12)
    else:
        assert output_gradient is None


def test_the_printed_router_gradient_is_the_gate_times_the_distance_to_the_mean():
    """Eq. 26 as printed, with its double sum over chosen patches."""
    model = TwoLayer.joint("print", experts=2, patches_per_expert=4, neurons=3)
    torch.manual_seed(0)
    networks = networks_of(model, 2, trials=1)
    x, label, E, J, L = torch.randn(N, D, dtype=torch.float64), 1, 2, 3, 4
    kernels, a = networks.kernels[0, 0], networks.output[0, :, 0]
    f = by_the_equations(networks, 0, x)
    v = torch.sigmoid(-f[0])  # y = +1
    printed = torch.zeros(E, D, dtype=torch.float64)
    for s in range(E):
        g = x @ kernels[s]
        chosen = g.topk(L).indices
        G = g[chosen].softmax(0)
        for r in range(J):
            for j in range(L):
                inner = sum((x[chosen[j]] - x[chosen[i]]) * G[i] for i in range(L) if i != j)
                h = (kernels[E + s * J + r] @ x[chosen[j]]).relu()
                printed[s] += -v * a[s * J + r] / L * h * G[j] * inner
    pre = (x @ kernels.T)[None, None, None]
    signal = torch.empty_like(pre)
    one = torch.ones(1, 1, dtype=torch.float64)
    error_signal(model, pre, networks.output, torch.tensor([[label]]), one, N, signal)
    torch.testing.assert_close(signal[0, 0, 0, :, :E].T @ x, printed, rtol=1e-10, atol=1e-12)


@given(st.data())
def test_a_large_and_a_small_pool_give_the_same_outputs(data: st.DataObject):
    model = data.draw(st.sampled_from(makes(2)))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    networks = networks_of(model, 2)
    pool = torch.randn(10, D, dtype=torch.float64)
    index = torch.randint(10, (3, B, N))
    padded = torch.cat([pool, torch.randn(1000, D, dtype=torch.float64)])
    torch.testing.assert_close(networks.predict(pool, index), networks.predict(padded, index))


@pytest.mark.parametrize("pool_size", [10, 1000])
@pytest.mark.parametrize("which", range(14))
def test_networks_without_room_for_all_at_once_give_the_same_outputs(
    monkeypatch: pytest.MonkeyPatch, which: int, pool_size: int
):
    torch.manual_seed(which)
    networks = networks_of(makes(2)[which], 2, trials=5)
    pool, index = torch.randn(pool_size, D).double(), torch.randint(pool_size, (5, B, N))
    at_once = networks.predict(pool, index), networks.select(pool, index)
    blocks: list[int] = []

    def count(model: TwoLayer, pre: Tensor, output: Tensor, patches: int) -> Tensor:
        blocks.append(len(pre))
        return logits(model, pre, output, patches)

    monkeypatch.setattr(two_layer_networks, "logits", count)
    for room, expected in ((1, [1] * 5), (2 * networks.kernels[0, ..., 0].numel() * B * N * 8, [2, 2, 1])):
        blocks.clear()
        monkeypatch.setattr(two_layer_networks, "_MAX_BYTES", room)
        torch.testing.assert_close(networks.predict(pool, index), at_once[0])
        assert torch.equal(networks.select(pool, index), at_once[1])
        assert blocks == expected


@pytest.mark.parametrize("which", range(14))
def test_a_weight_of_zero_leaves_a_network_as_it_is(which: int):
    model = makes(2)[which]
    networks = networks_of(model, 2)
    pre = torch.randn(3, networks.kernels.shape[1], B, model.selected(N) if model.kind == "separate" else N,
                      networks.kernels.shape[2], dtype=torch.float64)  # fmt: skip
    signal = torch.empty_like(pre)
    weight = torch.tensor([1.0, 0.0, 1.0]).double()[:, None].expand(3, B)
    _, gradient = error_signal(model, pre, networks.output, torch.ones(3, B, dtype=torch.int64), weight, N, signal)
    assert not signal[1].any()
    assert signal[0].any()
    assert gradient is None or not gradient[1].any()


def test_initial_weights_have_the_stated_sizes():
    keys = keyed_random.keys(0, range(200))
    printed = Networks.initial(TwoLayer.joint("print"), keys, patches=16, dim=30, classes=2)
    assert printed.kernels[:, 0, 8:].std() == pytest.approx(1 / math.sqrt(40), rel=0.01)  # eq. 8
    router_std = 1 / (16**2 * math.log(16) * math.sqrt(30))  # eq. 7
    assert printed.kernels[:, 0, :8].std() == pytest.approx(router_std, rel=0.02)
    assert printed.output.std() == pytest.approx(1, rel=0.02)
    released = Networks.initial(TwoLayer.separate("released"), keys, patches=16, dim=30, classes=2)
    assert released.kernels.std() == pytest.approx(0.1, rel=0.01)
    assert released.output[0, :, 0].tolist() == [-1] * 20 + [1] * 20  # expert s belongs to class s


def test_three_classes_have_an_output_each():
    keys = keyed_random.keys(0, range(2))
    made = Networks.initial(TwoLayer.separate("released", classes=3, neurons=2), keys, patches=4, dim=5, classes=3)
    assert made.output[0].tolist() == [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]]
    assert made.predict(torch.randn(9, 5), torch.randint(9, (2, 3, 4))).shape == (2, 3, 3)


@pytest.mark.parametrize("which", range(14))
def test_responses_are_those_of_each_experts_neurons(which: int):
    torch.manual_seed(which)
    model = makes(2)[which]
    networks = networks_of(model, 2)
    pool, index = torch.randn(50, D).double(), torch.randint(50, (3, B, N))
    found = networks.neuron_responses(pool, index)
    E, J = model.experts, model.neurons
    seen = networks.select(pool, index)  # (T, G, B, N')
    assert found.shape == (3, B, seen.shape[3], E, J)
    for t, s in [(t, s) for t in range(3) for s in range(E)]:
        neurons = (
            networks.kernels[t, s] if model.kind == "separate" else networks.kernels[t, 0, -E * J :].view(E, J, D)[s]
        )
        x = pool[seen[t, s if model.kind == "separate" else 0]]
        if networks.centre is not None:
            x = (x - networks.centre[t]) / (x - networks.centre[t]).norm(dim=-1, keepdim=True)
        torch.testing.assert_close(found[t, :, :, s], x @ neurons.T)


def test_makes_are_those_of_the_paper_and_of_the_released_code():
    as_printed = {"scale": "selected", "expert_std": None, "router_std": None, "output_weights": "normal"}
    assert TwoLayer.cnn("print") == TwoLayer("cnn", 1, None, 40, **as_printed | {"scale": "patches"})
    assert TwoLayer.separate("print") == TwoLayer("separate", 2, 2, 20, **as_printed)
    assert TwoLayer.joint("print") == TwoLayer("joint", 8, 6, 5, **as_printed)
    assert TwoLayer.cnn("released") == TwoLayer("cnn", 1, None, 4, "patches", 0.1, None, "normal")
    assert TwoLayer.separate("released") == TwoLayer("separate", 2, 2, 20, "patches", 0.1, 0.1, "by_class")
    assert TwoLayer.joint("released") == TwoLayer("joint", 8, 6, 5, "patches", 0.01, 1e-4, "normal")


@pytest.mark.parametrize(
    ("neurons", "classes", "expected"),
    [(4, 2, [1, -1] * 4), (1, 2, [1, -1]), (3, 2, [1, -1] * 3), (4, 3, [0, 1, 2] * 2 + [0, 1]), (2, 4, [0, 1, 2, 3])],
)
def test_alternating_output_weights_leave_out_no_class(neurons: int, classes: int, expected: list[int]):
    model = TwoLayer.best(2, experts=2, neurons=neurons)
    made = Networks.initial(model, keyed_random.keys(0, range(2)), patches=4, dim=5, classes=classes).output
    if classes == 2:
        assert made[1, :, 0].tolist() == expected
    else:
        assert made[1].argmax(1).tolist() == expected
        assert (made.sum(2) == 1).all()


def test_the_best_network_is_joint_training_at_its_best():
    assert TwoLayer.best() == TwoLayer.joint("best")
    assert TwoLayer.best(2, experts=3) == TwoLayer.joint("best", experts=3, patches_per_expert=2)
    assert (TwoLayer.best().experts, TwoLayer.best().patches_per_expert, TwoLayer.best().neurons) == (16, 4, 4)
    assert TwoLayer.best().standardise


def test_logits_are_the_outputs():
    model = TwoLayer.joint("print", experts=3, patches_per_expert=2, neurons=2)
    networks = networks_of(model, 2)
    pool, index = torch.randn(50, D).double(), torch.randint(50, (3, B, N))
    pre = networks.pre_activations(pool, index)
    assert torch.equal(logits(model, pre, networks.output, N), networks.predict(pool, index))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TwoLayer.joint("printed"), "fidelity='printed' is unknown"),
        (lambda: TwoLayer.joint("print", experts=0), "experts=0; it must be at least 1"),
        (lambda: replace(TwoLayer.cnn("print"), experts=2), "has one expert that takes every patch"),
        (lambda: replace(TwoLayer.joint("print"), output_weights="by_class"), "needs an expert for each class"),
        (lambda: TwoLayer.joint("print", patches_per_expert=17).selected(16), "l ≤ n fails: patches_per_expert=17"),
        (
            lambda: Networks.initial(
                TwoLayer.separate("print"), keyed_random.keys(0, [0]), patches=4, dim=2, classes=3
            ),
            "k = c.*use experts=3",
        ),
        (
            lambda: Networks.initial(
                TwoLayer.best(2, experts=2, neurons=2), keyed_random.keys(0, [0]), patches=4, dim=2, classes=5
            ),
            "m ≥ c fails: 4 neurons for 5 classes",
        ),
        (
            lambda: Networks.initial(
                TwoLayer.cnn("print"), keyed_random.keys(0, [0]), patches=4, dim=2, classes=2
            ).scores(torch.zeros(1, 2), torch.zeros(1, 1, 4, dtype=torch.int64)),
            "has no routers",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
