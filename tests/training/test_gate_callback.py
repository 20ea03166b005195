"""What the gates' callback tells the trainer, of a state that is planted."""

from types import SimpleNamespace
from typing import Any

import pytest
from training.gated import gated

from moesaic.training.gate_callback import GateCallback


def callback(**gates: Any) -> GateCallback:
    made = GateCallback(gated())
    made.gates = SimpleNamespace(**gates)  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("joint", [True, False])
def test_training_may_stop_early_once_gates_are_frozen(joint: bool):
    assert callback(joint=joint).may_stop() is not joint


def test_an_epoch_tells_cost_open_share_and_the_penalty_at_its_end():
    trainer: Any = SimpleNamespace(last_epoch_time=lambda: 1.5)
    found = callback(epoch_means=lambda: (0.75, 0.5), l1_weight_at=lambda epoch: 10 * epoch).on_epoch_end(trainer)
    assert found == {"cost": 0.75, "open_share": 0.5, "gate_l1": 15.0}
    assert callback(epoch_means=lambda: None).on_epoch_end(trainer) == {}
