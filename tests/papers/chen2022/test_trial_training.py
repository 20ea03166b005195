"""Mixtures trained at once: each is what Algorithm 1, written out sample by sample, makes of it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic import keyed_random
from moesaic.papers.chen2022 import trial_training as engine
from moesaic.papers.chen2022.data.synthetic_clusters import ClusterPatches
from moesaic.papers.chen2022.trial_training import MixtureSchedule, TrainedMixtures, train_mixtures
from moesaic.papers.chen2022.two_layer_networks import Mixture, Mixtures
from moesaic.training import NoProgress

SOURCE = ClusterPatches(clusters=3, patches=5, dim=7, sigma_p=0.5)
ACTIVATIONS = ("identity", "cubic", "relu", "celu", "gelu", "tanh")
SIGMA = {
    "identity": lambda z: z,
    "cubic": lambda z: z**3,
    "relu": F.relu,
    "celu": F.celu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
}


def outputs(model: Mixture, weights: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """(B, 2) or (B, 1) of one expert, as the equations or the released code have it."""
    pre = torch.einsum("bnd,jd->bnj", x, weights) + (0 if bias is None else bias)
    summed = SIGMA[model.activation](pre).sum(1)
    if not model.two_logits:
        return summed.sum(1, keepdim=True)
    half = model.filters // 2
    return torch.stack([summed[:, half:].sum(1), summed[:, :half].sum(1)], 1)


def written_out(model: Mixture, schedule: MixtureSchedule, samples: int, trial: int) -> dict[str, Tensor]:
    """One network by autograd and torch's optimizers: a loop over experts, every expert on every sample, masked."""
    keys = keyed_random.keys(0, [trial])
    data = SOURCE.draw(keys, samples, "train")
    x, y = data.patches[0].double() * model.data_scale, data.labels[0]
    start = Mixtures.initial(model, keys, dim=SOURCE.dim, dtype=torch.float64)
    experts = [start.weights[0, e].clone().requires_grad_() for e in range(model.experts)]
    biases = [None if start.bias is None else start.bias[0, e].clone().requires_grad_() for e in range(model.experts)]
    router = torch.zeros(model.experts, SOURCE.dim, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam(
        [p for p in (*experts, *biases) if p is not None],
        lr=schedule.learning_rate,
        weight_decay=schedule.weight_decay,
    )
    least, steps, index = float("inf"), 0, torch.zeros(samples, dtype=torch.int64)
    for step in range(schedule.steps):
        said = torch.zeros(samples, 2 if model.two_logits else 1, dtype=torch.float64)
        balance = torch.zeros(())
        if model.experts == 1:
            said = outputs(model, experts[0], biases[0], x)
        else:
            h = torch.einsum("bnd,ed->be", x, router)
            noisy = h + keyed_random.coarse_uniform(keys, step, model.experts, samples)[0].T.double()
            index = noisy.argmax(1)
            gates = h.softmax(1) if model.gate == "softmax" else noisy
            for e in range(model.experts):
                mask = (index == e).double()[:, None]
                said = said + mask * gates[:, e : e + 1] * outputs(model, experts[e], biases[e], x)
            share = F.one_hot(index, model.experts).double().mean(0)
            wanted = (noisy if schedule.balance_on == "raw" else h.softmax(1)).mean(0)
            balance = schedule.balance * (share * wanted).mean() * model.experts**2
        if model.two_logits:
            logits = said.softmax(1) if model.softmax_twice else said
            loss = F.cross_entropy(logits, y) + balance
            right = said.argmax(1) == y
        else:
            loss = F.softplus(-(2.0 * y - 1) * said[:, 0]).mean() + balance
            right = (2.0 * y - 1) * said[:, 0] > 0
        value = loss.item()
        record = value <= least
        rising = value > least + 0.02
        least = min(least, value)
        if schedule.stop == "mixture" and not record and (rising or value <= 0.314):
            break
        if schedule.stop == "single" and not record and step > 500 and rising:
            break
        parameters = [p for p in (*experts, *biases) if p is not None]
        for p in (*parameters, router):
            p.grad = None
        loss.backward()
        steps += 1
        if schedule.optimizer == "adam":
            adam.step()
            continue
        with torch.no_grad():
            for weight, bias in zip(experts, biases, strict=True):
                mine = [weight, *([] if bias is None else [bias])]
                norms = torch.stack([p.grad.norm() if p.grad is not None else torch.zeros(()) for p in mine])
                norm = norms.sum() if schedule.norm == "sum" else norms.square().sum().sqrt()
                for p in mine:
                    if norm > 0:
                        p -= schedule.learning_rate * p.grad / norm
            router -= schedule.router_learning_rate * router.grad
    return {
        "weights": torch.stack(experts).detach(),
        "bias": torch.empty(0) if biases[0] is None else torch.stack(biases).detach(),
        "router": router.detach(),
        "loss": torch.tensor(value, dtype=torch.float64),
        "wrong": (~right).sum(),
        "steps": torch.tensor(steps),
        "dispatch": index,
    }


def train(model: Mixture, schedule: MixtureSchedule, samples: int, trials=range(3), **more) -> TrainedMixtures:
    return train_mixtures(model, SOURCE, trials=trials, samples=samples, schedule=schedule, dtype=torch.float64, **more)


def check(trained: TrainedMixtures, t: int, expected: dict[str, Tensor]) -> None:
    assert int(trained.steps[t]) == int(expected["steps"])
    torch.testing.assert_close(trained.mixtures.weights[t], expected["weights"], rtol=1e-7, atol=1e-9)
    if trained.mixtures.bias is not None:
        torch.testing.assert_close(trained.mixtures.bias[t], expected["bias"], rtol=1e-7, atol=1e-9)
    if trained.mixtures.router is not None:
        torch.testing.assert_close(trained.mixtures.router[t], expected["router"], rtol=1e-7, atol=1e-9)
        assert torch.equal(trained.dispatch[t], expected["dispatch"])
    assert float(trained.losses[t]) == pytest.approx(float(expected["loss"]), rel=1e-8)
    assert int(trained.errors[t]) == int(expected["wrong"])


@pytest.mark.parametrize("balance", [False, True], ids=["free", "balanced"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("fidelity", ["print", "released"])
def test_mixtures_train_as_algorithm_1_written_out(fidelity, activation, balance, monkeypatch):
    monkeypatch.setattr(engine, "_CPU_FLOATS", 2000)  # several rounds of blocks
    # Not so large that a sure expert's gradient is nothing but rounding, which normalising would blow up
    model = replace(Mixture.of(fidelity, activation, experts=5, filters=4), init_scale=0.3, data_scale=1.5)
    schedule = replace(
        MixtureSchedule.of(fidelity, balance=balance), steps=6, learning_rate=0.05, router_learning_rate=0.7
    )
    if balance:
        schedule = replace(schedule, balance=0.3)
    trained = train(model, schedule, 331)
    for t in range(3):
        check(trained, t, written_out(model, schedule, 331, t))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("fidelity", ["print", "released"])
def test_single_networks_train_as_by_torch_with_adam(fidelity, activation, monkeypatch):
    monkeypatch.setattr(engine, "_CPU_FLOATS", 2000)
    model = Mixture.single(fidelity, activation, filters=6)
    schedule = replace(MixtureSchedule.single(fidelity, activation), steps=7)
    trained = train(model, schedule, 203)
    for t in range(3):
        check(trained, t, written_out(model, schedule, 203, t))


def test_experts_without_samples_stay_where_they_are():
    model = Mixture.of("print", experts=6, filters=4)
    trained = train(model, MixtureSchedule(steps=1, learning_rate=0.1), 3)
    start = Mixtures.initial(model, trained.keys, dim=SOURCE.dim, dtype=torch.float64)
    used = F.one_hot(trained.dispatch, 6).any(1)
    moved = (trained.mixtures.weights != start.weights).any(-1).any(-1)
    assert not used.all()
    assert torch.equal(moved, used)
    assert torch.isfinite(trained.mixtures.weights).all()


def test_a_step_of_an_expert_is_as_long_as_the_learning_rate():
    model = Mixture.of("print", experts=3, filters=4)
    trained = train(model, MixtureSchedule(steps=1, learning_rate=0.1), 100)
    start = Mixtures.initial(model, trained.keys, dim=SOURCE.dim, dtype=torch.float64)
    lengths = (trained.mixtures.weights - start.weights).flatten(2).norm(dim=2)
    torch.testing.assert_close(lengths, torch.full_like(lengths, 0.1))


@pytest.mark.parametrize("rule", ["mixture", "single"])
def test_networks_stop_by_the_released_rules_each_at_its_own_step(rule, monkeypatch):
    source = ClusterPatches.setting(3)
    if rule == "mixture":
        model, schedule = Mixture.of("released", filters=4), replace(MixtureSchedule.of("released"), steps=400)
        trained = train_mixtures(model, source, trials=range(4), samples=300, schedule=schedule)
        assert len(set(trained.steps.tolist())) > 1
        assert (trained.steps < 400).any()
        alone = train_mixtures(model, source, trials=[2], samples=300, schedule=schedule)
        assert int(alone.steps[0]) == int(trained.steps[2])
        return
    model = Mixture.single("released", "celu", filters=4)
    schedule = replace(MixtureSchedule.single("released", "celu"), steps=520, learning_rate=1.0)
    trained = train(model, schedule, 60, trials=[0])
    expected = written_out(model, schedule, 60, 0)
    assert 500 < int(trained.steps[0]) == int(expected["steps"]) < 520


@pytest.mark.parametrize("model", [Mixture.of("released"), Mixture.of("print", "identity"), Mixture.single("print")])
def test_a_trial_alone_is_the_trial_in_company(model):
    schedule = MixtureSchedule(steps=50, learning_rate=0.01, router_learning_rate=1.0)
    source = ClusterPatches.setting(1)
    several = [
        train_mixtures(model, source, trials=trials, samples=400, schedule=schedule, chunk=chunk)
        for trials, chunk in (([3], 1), ([1, 2, 3, 4], 1), ([0, 3, 5], 3))
    ]
    places = (0, 2, 1)
    alone = several[0]
    for each, place in zip(several, places, strict=True):
        torch.testing.assert_close(each.mixtures.weights[place], alone.mixtures.weights[0], rtol=1e-5, atol=1e-6)
        if model.routed:
            assert torch.equal(each.dispatch[place], alone.dispatch[0])


def test_the_watch_sees_networks_and_samples_at_the_steps_it_asked_for():
    seen: dict[tuple[int, int], Tensor] = {}

    def callback(step, mixtures, data, which):
        for t, trial in enumerate(which.tolist()):
            seen[step, trial] = mixtures.weights[t].clone()
            assert data.patches.shape[1:] == (40, 5, 7)

    model = Mixture.of("print", experts=2, filters=3)
    schedule = MixtureSchedule(steps=6)
    trained = train(model, schedule, 40, callback=callback, callback_steps=(0, 2, 6))
    assert sorted(seen) == [(step, trial) for step in (0, 2, 6) for trial in range(3)]
    start = Mixtures.initial(model, trained.keys, dim=SOURCE.dim, dtype=torch.float64)
    for t in range(3):
        assert torch.equal(seen[0, t], start.weights[t])
        assert torch.equal(seen[6, t], trained.mixtures.weights[t])
        assert not torch.equal(seen[2, t], seen[6, t])


def test_progress_counts_steps_that_were_spared():
    class Counter(NoProgress):
        total = 0

        def advance(self, amount: int, note: str = "") -> None:
            self.total += amount

    counter = Counter()
    schedule = replace(MixtureSchedule.of("released"), steps=300)
    train_mixtures(
        Mixture.of("released", filters=4),
        ClusterPatches.setting(3),
        trials=range(2),
        samples=200,
        schedule=schedule,
        progress=counter,
    )
    assert counter.total == 600


def test_blocks_hold_every_sample_once_with_its_own_expert():
    generator = torch.Generator().manual_seed(0)
    for B, E, size in ((1, 1, 4), (7, 3, 4), (64, 5, 8), (33, 8, 8)):
        for likely in (torch.ones(E), torch.eye(E)[0] + 1e-9):
            index = torch.multinomial(likely.expand(2, E), B, replacement=True, generator=generator)
            chosen = index[:, None] == torch.arange(E)[:, None]
            slots, owners = engine._blocks(chosen, index, size)
            assert slots.shape == (2, owners.shape[1] * size)
            for t in range(2):
                real = slots[t][slots[t] < B]
                assert torch.equal(real.sort().values, torch.arange(B))
                owner_of_slot = owners[t].repeat_interleave(size)[slots[t] < B]
                assert torch.equal(owner_of_slot, index[t, real])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"learning_rate": 0.0}, "learning_rate=0.0; it must be positive"),
        ({"router_learning_rate": float("inf")}, "it must be positive and finite"),
        ({"balance": -1.0}, "balance=-1.0; it must be 0 or above"),
        ({"optimizer": "sgd"}, "optimizer='sgd'"),
        ({"stop": "soon"}, "stop='soon'"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        MixtureSchedule(**change)


def test_training_nothing_is_refused():
    with pytest.raises(ValueError, match="no trials to train"):
        train(Mixture.of("print"), MixtureSchedule(), 10, trials=[])
    with pytest.raises(ValueError, match="samples=0"):
        train(Mixture.of("print"), MixtureSchedule(), 0)


@pytest.mark.gpu
@pytest.mark.parametrize("model", [Mixture.of("released"), Mixture.of("print", "identity"), Mixture.single("print")])
def test_on_a_gpu_trials_come_out_as_on_a_cpu(model):
    schedule = MixtureSchedule(steps=20, learning_rate=0.01, router_learning_rate=1.0)
    source = ClusterPatches.setting(1)
    on = {
        device: train_mixtures(
            model, source, trials=range(3), samples=500, schedule=schedule, device=device, dtype=torch.float64
        )
        for device in ("cpu", "cuda")
    }
    torch.testing.assert_close(on["cuda"].mixtures.weights.cpu(), on["cpu"].mixtures.weights, rtol=1e-7, atol=1e-9)
    assert torch.equal(on["cuda"].dispatch.cpu(), on["cpu"].dispatch)
    again = train_mixtures(
        model, source, trials=range(3), samples=500, schedule=schedule, device="cuda", dtype=torch.float64
    )
    assert torch.equal(on["cuda"].mixtures.weights, again.mixtures.weights)
