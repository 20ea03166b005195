"""Callbacks: which ones a model gets, when their hooks are called, and that their state is saved and resumed."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn
from training.gated import TASK as GATED_TASK
from training.gated import gated
from training.squares import LONG, TASK, Notes, Routed, dense, lines, mixture, routed, same, seeded

from moesaic import context_stacks
from moesaic.routing import TokenChoice
from moesaic.training import Callback, fit, trainer
from moesaic.training.fit import default_callbacks
from moesaic.training.recipe import Recipe

TWO_STEPS = Recipe(epochs=2, batch_size=35, optimizer="sgd", lr=0.05)


def names(model: nn.Module, recipe: Recipe = LONG, **options: bool) -> list[str]:
    return [callback.name for callback in default_callbacks(model, recipe, **options)]


def test_a_model_gets_the_callbacks_of_its_layers():
    assert names(dense()) == []
    assert names(dense(), replace(LONG, balance_weight=0.1)) == []
    assert names(routed()) == ["CollapseCallback", "RoutingCallback"]
    assert names(routed(), collapse_alarm=False) == []
    assert names(routed(), replace(LONG, compile=True)) == [], "hooks would break the graph"
    assert names(mixture(), replace(LONG, balance_weight=0.1)) == [
        "BalanceLossCallback",
        "CollapseCallback",
        "RoutingCallback",
    ]
    assert names(gated(), replace(LONG, balance_weight=0.1)) == ["GateCallback"]


class Order(Callback):
    """Records the hooks that are called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_fit_start(self, trainer):
        self.calls.append("fit start")

    def on_fit_end(self, trainer):
        self.calls.append("fit end")

    def on_epoch_start(self, trainer):
        assert trainer.model.training
        self.calls.append("epoch start")

    @contextmanager
    def epoch_context(self, trainer):
        self.calls.append("enter")
        yield
        self.calls.append("exit")

    def on_step_start(self, trainer, epoch):
        self.calls.append(f"step {epoch}")

    def extra_loss(self, trainer, output, x, labels, epoch):
        assert output.shape == (len(x), 2)
        self.calls.append("loss")
        return 0.0

    def on_step_end(self, trainer, epoch, loss):
        assert loss.ndim == 0
        self.calls.append("step end")

    def on_epoch_end(self, trainer):
        self.calls.append("epoch end")
        return {}

    def on_checkpoint(self, trainer):
        self.calls.append("checkpoint")

    def on_train_end(self, trainer):
        self.calls.append("train end")

    def final_metrics(self, trainer):
        assert not trainer.model.training
        self.calls.append("final")
        return {}


def test_hooks_are_called_in_order(tmp_path):
    order = Order()
    fit(dense(), TASK, TWO_STEPS, callbacks=[order], out=tmp_path)
    steps = [["step 0.25", "loss", "step end", "step 0.75", "loss", "step end"]]
    steps += [["step 1.25", "loss", "step end", "step 1.75", "loss", "step end"]]
    epochs = [["epoch start", "enter", *each, "exit", "epoch end"] for each in steps]
    assert order.calls == ["fit start", *epochs[0], "checkpoint", *epochs[1], "train end", "final", "fit end"]


def test_a_run_that_is_stopped_ends_its_callbacks():
    order = Order()
    with pytest.raises(KeyboardInterrupt):
        fit(dense(), TASK, TWO_STEPS, callbacks=[order], progress=Notes(1))
    assert order.calls[-1] == "fit end"


class WeightPull(Callback):
    """Adds a loss that grows from step to step, and reports its weight; the state is a tensor and a number."""

    def __init__(self) -> None:
        self.weight, self.steps = torch.zeros(()), 0

    def extra_loss(self, trainer, output, x, labels, epoch):
        return self.weight * sum(parameter.square().sum() for parameter in trainer.model.parameters())

    def on_step_end(self, trainer, epoch, loss):
        self.weight, self.steps = self.weight + 0.01, self.steps + 1

    def on_epoch_end(self, trainer):
        return {"pull": float(self.weight)}

    def final_metrics(self, trainer):
        return {"steps": self.steps}

    def state_dict(self):
        return {"weight": self.weight, "steps": self.steps}

    def load_state_dict(self, state):
        self.weight, self.steps = state["weight"], state["steps"]


def test_metrics_of_a_callback_are_in_the_epochs_the_result_and_the_files(tmp_path):
    found = fit(dense(), TASK, TWO_STEPS, callbacks=[WeightPull()], out=tmp_path)
    assert [epoch.metrics["pull"] for epoch in found.epochs] == pytest.approx([0.02, 0.04])
    assert found.metrics == {"steps": 4}
    assert [line["pull"] for line in lines(tmp_path)] == pytest.approx([0.02, 0.04])
    assert fit(dense(), TASK, TWO_STEPS, callbacks=[WeightPull()], out=tmp_path) == found


class Misnamed(Callback):
    """Returns a metric under a name that the files of a run have for something else."""

    def __init__(self, hook: str, metric: str) -> None:
        setattr(self, hook, lambda trainer: {metric: 1.0})


@pytest.mark.parametrize(
    ("hook", "metric"), [("on_epoch_end", "loss"), ("on_epoch_end", "learning_rate"), ("final_metrics", "accuracy")]
)
def test_a_metric_may_not_have_the_name_of_another_value(hook, metric):
    with pytest.raises(ValueError, match=f"Misnamed returns a metric '{metric}'"):
        fit(dense(), TASK, replace(LONG, epochs=1), callbacks=[Misnamed(hook, metric)])


def test_an_extra_loss_changes_the_weights_and_not_the_reported_loss():
    plain, pulled = dense(), dense()
    first = fit(plain, TASK, replace(TWO_STEPS, epochs=1, batch_size=70))
    once = fit(pulled, TASK, replace(TWO_STEPS, epochs=1, batch_size=70), callbacks=[Constant()])
    assert first.epochs[0].loss == once.epochs[0].loss
    assert not same(plain, pulled)


class Constant(Callback):
    def extra_loss(self, trainer, output, x, labels, epoch):
        return output.square().mean()


def test_the_state_of_a_callback_is_saved_and_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "_LOG_SECONDS", 0.0)
    monkeypatch.setattr(trainer, "_CHECKPOINT_STEPS", 2)
    undisturbed, stopped = dense(), dense()
    whole = fit(undisturbed, TASK, LONG, callbacks=[WeightPull()])
    for patience in (4, 9, 8):  # of progress, of which there are seven calls an epoch
        with pytest.raises(KeyboardInterrupt):
            fit(
                stopped,
                TASK,
                LONG,
                callbacks=[WeightPull()],
                out=tmp_path,
                progress=Notes(patience),
                checkpoint_seconds=0,
            )
    found = fit(stopped, TASK, LONG, callbacks=[WeightPull()], out=tmp_path)
    assert same(stopped, undisturbed)
    assert [epoch.metrics for epoch in found.epochs] == [epoch.metrics for epoch in whole.epochs]
    assert found.metrics == whole.metrics


def test_a_run_with_other_callbacks_is_another_run(tmp_path):
    fit(dense(), TASK, TWO_STEPS, callbacks=[WeightPull()], out=tmp_path)
    with pytest.raises(ValueError, match=r"callbacks was \['WeightPull'\], is 'not set'"):
        fit(dense(), TASK, TWO_STEPS, out=tmp_path)


def test_two_callbacks_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two callbacks have the name 'WeightPull'"):
        fit(dense(), TASK, TWO_STEPS, callbacks=[WeightPull(), WeightPull()])


def test_a_callback_can_set_learning_rates():
    class Stop(Callback):
        def on_step_start(self, trainer, epoch):
            for optimizer in trainer.train_step.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = 0.0

    model, untouched = dense(), dense()
    fit(model, TASK, TWO_STEPS, callbacks=[Stop()])
    assert same(model, untouched)


def test_callbacks_of_your_own_come_beside_those_of_channel_gates():
    found = fit(gated(), GATED_TASK, Recipe(epochs=2, batch_size=35), callbacks=[Counter()])
    assert found.epochs[1].metrics.keys() == {"cost", "open_share", "gate_l1", "steps"}
    assert found.metrics.keys() == {"cost", "embedding_accuracy", "gates_differing", "gate_entropy"}


class Counter(Callback):
    steps = 0

    def on_step_end(self, trainer, epoch, loss):
        self.steps += 1

    def on_epoch_end(self, trainer):
        return {"steps": self.steps}


def test_the_balance_loss_is_that_of_the_batch():
    def choosing() -> nn.Module:
        return seeded(lambda: Routed(TokenChoice(8, experts=2, patch_size=4)))

    plain, balanced = choosing(), choosing()
    fit(plain, TASK, TWO_STEPS)
    fit(balanced, TASK, replace(TWO_STEPS, balance_weight=10.0))
    assert not same(plain, balanced)
    assert not balanced.moe.has_routing_hooks, "nothing is left behind"


def test_the_routing_of_each_epoch_is_recorded_and_written(tmp_path):
    found = fit(routed(), TASK, TWO_STEPS, out=tmp_path)
    for epoch, line in zip(found.epochs, lines(tmp_path), strict=True):
        (layer,) = epoch.routing.values()
        assert (layer.chooser, layer.load) == ("expert", (0.5, 0.5))
        assert 0 < layer.coverage <= 1
        assert layer.overlap is not None
        assert line["routing"]["moe"]["load"] == [0.5, 0.5]
    fit(dense(), TASK, TWO_STEPS, out=tmp_path / "dense")
    assert "routing" not in lines(tmp_path / "dense")[0]


class HooksSeen(Callback):
    """Counts the steps in which routing is recorded besides the alarm."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def extra_loss(self, trainer, output, x, labels, epoch):
        if len(context_stacks.routing_hooks) > 1:
            self.steps.append(round(epoch * len(trainer.batch_sizes) - 0.5))
        return 0.0


def test_a_few_steps_of_an_epoch_are_recorded_and_the_others_pay_nothing():
    seen = HooksSeen()
    fit(routed(), TASK, replace(TWO_STEPS, batch_size=7), callbacks=[seen])
    assert seen.steps == [1, 3, 6, 8, 11, 13, 16, 18], "four of ten in each epoch"
    assert context_stacks.routing_hooks == ()


def test_a_step_that_fails_leaves_no_hook():
    class Failing(Callback):
        def extra_loss(self, trainer, output, x, labels, epoch):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(routed(), TASK, TWO_STEPS, callbacks=[Failing()])
    assert context_stacks.routing_hooks == ()
