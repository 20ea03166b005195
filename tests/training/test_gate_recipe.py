import json

import pytest

from moesaic.training.gate_recipe import GateRecipe
from moesaic.training.recipe import Recipe


def test_what_is_written_of_a_recipe_without_gates_is_what_it_was_before_there_were_any():
    assert "gates" not in Recipe(epochs=3).to_json()
    assert Recipe.from_json(Recipe(epochs=3).to_json()).gates is None


def test_a_recipe_comes_back_from_json_with_its_gates():
    recipe = Recipe(epochs=3, gates=GateRecipe(target_macs=0.5, noise=0.2))
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


def test_fields_of_later_versions_are_absent_at_their_defaults():
    assert not {"cost_weight", "shaping_weight", "gate_temperature"} & GateRecipe().to_json().keys()
    changed = GateRecipe(shaping_weight=2.0, cost_weight=1.0, target_macs=0.5)
    assert changed.to_json()["shaping_weight"] == 2.0
    assert GateRecipe.from_json(changed.cell_spec()) == changed


def test_batch_shaping_fades_by_the_end_of_the_joint_stage():
    gates = GateRecipe(shaping_weight=2.0)
    assert [gates.shaping_at(progress) for progress in (0.0, 0.25, 1.0, 1.5)] == [2.0, 1.5, 0.0, 0.0]


def test_pressure_grows_in_the_warmup_and_ends_with_the_joint_stage():
    gates = GateRecipe(warmup_fraction=0.5, joint_fraction=0.5)
    assert [gates.l1_factor(epoch, 8) for epoch in (0, 1, 2, 3.9, 4, 8)] == [0.0, 0.5, 1.0, 1.0, 0.0, 0.0]
    assert GateRecipe(warmup_fraction=0).l1_factor(0, 8) == 1


def test_the_way_to_the_target_begins_with_all_gates_open_and_arrives_before_the_joint_stage_ends():
    gates = GateRecipe(target_macs=0.25)
    way = [gates.cost_at(over / 20, 1.02) for over in range(21)]
    assert way[0] == 1.02
    assert way == sorted(way, reverse=True)
    assert way[16:] == [0.25] * 5
    assert GateRecipe().cost_at(0.5, 1.02) is None


def test_noise_falls_to_nothing_by_the_end_of_the_joint_stage():
    assert [GateRecipe(noise=0.4).noise_at(over) for over in (0, 0.5, 1, 1.5)] == [0.4, 0.2, 0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"l1_weight": -1}, ValueError, "l1_weight=-1; it must be 0 or more"),
        ({"l1_weight": "high"}, TypeError, "l1_weight='high' is a str; it must be a number"),
        ({"joint_fraction": 0}, ValueError, "joint_fraction=0; it must be above 0 and at most 1"),
        ({"warmup_fraction": 1.5}, ValueError, "warmup_fraction=1.5; it must be from 0 to 1"),
        ({"min_open": 1.0}, ValueError, "min_open=1.0; it must be from 0 to below 1"),
        ({"distill_temperature": 0}, ValueError, "distill_temperature=0; it must be above 0"),
        (
            {"target_macs": 1.2},
            ValueError,
            "target_macs=1.2; it must be a fraction of the dense network's",
        ),
        ({"target_macs": 0.5, "l1_weight": 0}, ValueError, "use any λ above 0"),
        ({"layer_weights": "costs"}, ValueError, "did you mean 'cost'"),
    ],
)
def test_settings_that_cannot_be(options, error, message):
    with pytest.raises(error, match=message):
        GateRecipe(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"embedding_weight": 0.0, "noise": 0.0, "distill_weight": 0.0, "l1_weight": 0.0},
        {"warmup_fraction": 0.0, "min_open": 0.0},
        {"warmup_fraction": 1.0, "joint_fraction": 1.0, "target_macs": 1.0},
    ],
)
def test_settings_at_the_limits_are_taken(options):
    GateRecipe(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"joint_fraction": 0.0}, {"joint_fraction": 1.01}, {"warmup_fraction": -0.01}, {"warmup_fraction": 1.01},
        {"min_open": 1.0}, {"min_open": -0.01}, {"target_macs": 0.0}, {"target_macs": 1.01},
        {"distill_temperature": 0.0}, {"embedding_weight": -0.01}, {"noise": float("inf")}, {"l1_weight": -0.01},
    ],
)  # fmt: skip
def test_settings_beyond_the_limits_are_refused(options):
    with pytest.raises(ValueError, match=f"GateRecipe: {next(iter(options))}="):
        GateRecipe(**options)


def test_a_warmup_that_lasts_until_the_target_is_due_keeps_gates_open_to_the_end():
    gates = GateRecipe(target_macs=0.5, warmup_fraction=0.9)
    assert [gates.cost_at(progress, 1.0) for progress in (0.0, 0.95, 1.0)] == [1.0, 1.0, 0.5]
