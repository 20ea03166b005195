"""Frozen layers do not change by a bit; layer-wise learning rates."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from training.squares import TASK

from moesaic.models.registry import ModelSpec, create_model
from moesaic.training.fit import fit
from moesaic.training.optimizers import build_optimizers
from moesaic.training.recipe import Recipe
from moesaic.training.trainable_layers import FEW_IMAGES, default_trainable, eval_frozen, frozen_parameters

RECIPE = Recipe(epochs=1, batch_size=16, lr=0.01)


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "normalized_gd"])
@pytest.mark.parametrize("trainable", ["head", "last-1"])
@pytest.mark.parametrize("name", ["wrn10_1", "wrn10_1_pmoe"])
def test_frozen_layers_do_not_change_by_a_bit(name, trainable, optimizer):
    size = {"image_size": 8} if name.endswith("pmoe") else {}
    model = create_model(name, num_classes=2, **size)
    before, frozen = state(model), frozen_parameters(model, trainable)
    fit(model, TASK, replace(RECIPE, trainable=trainable, optimizer=optimizer, weight_decay=0.1, ema_decay=0.9))
    after = state(model)
    trained = {name for name, _ in model.named_parameters()} - frozen
    assert frozen
    assert trained
    modules = {name.rpartition(".")[0] for name in trained}
    for each in before:
        moved = not torch.equal(before[each], after[each])
        of_trained_module = each.rpartition(".")[0] in modules or any(each.startswith(f"{m}.") for m in modules)
        assert moved <= of_trained_module, f"{each} is frozen, statistics of BatchNorm included"
    assert any(not torch.equal(before[each], after[each]) for each in trained)
    assert all(each.requires_grad for each in model.parameters()), "as before"


def test_layers_are_counted_from_the_classifier():
    model = create_model("wrn10_1", num_classes=2)
    everything = {name for name, _ in model.named_parameters()}
    assert frozen_parameters(model, "all") == set()
    assert frozen_parameters(model, "head") == everything - {"head.weight", "head.bias"}
    assert {name for name in everything - frozen_parameters(model, "last-2") if "group2" in name}
    with pytest.raises(ValueError, match="trainable='last-4', but WideResNet has 4 layers before its classifier"):
        frozen_parameters(model, "last-4")


def test_networks_with_channel_gates_are_trained_as_a_whole():
    model = create_model("resnet18_deepmoe", num_classes=2, width=0.1)
    with pytest.raises(ValueError, match="trainable='head', but channel gates and their network are trained together"):
        fit(model, TASK, replace(RECIPE, trainable="head"))


def test_each_layer_has_a_part_of_the_rate_of_the_next():
    model = create_model("wrn10_1_pmoe", num_classes=2)
    (optimizer,) = build_optimizers(model, replace(RECIPE, lr=1.0, layer_decay=0.5), torch.device("cpu"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    peaks = {names[id(each)]: group["peak"] for group in optimizer.param_groups for each in group["params"]}
    assert peaks.keys() == set(names.values())
    assert peaks["head.weight"] == 1
    routers = [name for name in peaks if "router" in name]
    experts = [name for name in peaks if "experts" in name]
    assert peaks[routers[0]] == peaks[experts[0]] / 10
    assert peaks["body.stem.weight"] == 0.5**4
    assert peaks["body.group2.0.conv1.weight"] == 0.5**2


def test_one_rate_for_all_is_one_group_as_ever():
    model = create_model("wrn10_1", num_classes=2)
    (optimizer,) = build_optimizers(model, RECIPE, torch.device("cpu"))
    assert len(optimizer.param_groups) == 1


def test_recipes_of_earlier_versions_are_the_same_recipes():
    assert {"trainable", "layer_decay"}.isdisjoint(RECIPE.to_json())
    tuned = replace(RECIPE, trainable="last-2", layer_decay=0.75)
    assert (tuned.to_json()["trainable"], tuned.to_json()["layer_decay"]) == ("last-2", 0.75)
    assert Recipe.from_json(tuned.to_json()) == tuned == Recipe.from_json(tuned.cell_spec())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trainable": "none"}, "trainable='none' is unknown; use 'all', 'head' or 'last-N'"),
        ({"trainable": "last-0"}, "trainable='last-0' is unknown"),
        ({"layer_decay": 0.0}, "layer_decay=0.0; it must be above 0 and at most 1"),
        ({"layer_decay": 0.5, "optimizer": "normalized_gd"}, "use adamw or sgd, or no layer_decay"),
    ],
)
def test_bad_recipes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        replace(RECIPE, **options)


@pytest.mark.parametrize(
    ("models", "images", "trainable"),
    [
        (["timm/a:pretrained"], FEW_IMAGES - 1, "head"),
        (["timm/a:pretrained"], FEW_IMAGES, "all"),
        (["timm/a:weights=f"], 100, "head"),
        (["timm/a:pretrained=false"], 100, "all"),
        (["wrn10_1", "timm/a:pretrained"], 100, "head"),
        (["timm/a:pretrained", "timm/a:pretrained:convert=b:experts=2"], 100, "all"),
    ],
)
def test_by_default_the_backbone_is_frozen_where_it_is_pretrained_and_images_are_few(models, images, trainable):
    assert default_trainable(map(ModelSpec.parse, models), images) == trainable


def test_frozen_modules_are_in_eval_mode_and_those_around_trained_ones_are_not():
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout()),
        nn.Dropout(),
        nn.Sequential(nn.BatchNorm2d(4), nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())),
    ).train()
    for parameter in (*model[0].parameters(), *model[2][0].parameters()):
        parameter.requires_grad_(False)
    eval_frozen(model)
    training = {name for name, module in model.named_modules() if module.training}
    assert training == {"", "1", "2", "2.1", "2.1.0", "2.1.1"}
    model.requires_grad_(False)
    eval_frozen(model)
    assert not any(module.training for module in model.modules())
