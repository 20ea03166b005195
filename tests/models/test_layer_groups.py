"""Layers from the input to the classifier: every parameter in one, in timm's order."""

import re
from importlib import import_module
from itertools import pairwise

import pytest
from torch import nn

from moesaic.models.layer_groups import classifier_names, layer_groups
from moesaic.models.registry import create_model, list_models


@pytest.mark.parametrize("name", [name for name in list_models() if "deepmoe" not in name and name != "cifar_cnn"])
def test_every_parameter_is_in_one_layer_and_the_classifier_is_the_last(name):
    narrow = {"width": 0.1} if name.startswith(("resnet", "vgg")) else {"depth": 3} if name.startswith("vit") else {}
    model = create_model(name, num_classes=3, **narrow)
    groups = layer_groups(model)
    assert sorted(each for group in groups for each in group) == sorted(each for each, _ in model.named_parameters())
    assert groups[-1] == ("head.weight", "head.bias")
    assert len(groups) > 3


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2_100", "test_vit", "test_convnext", "test_byobnet"])
def test_layers_of_timm_are_in_timms_order(timm, name):
    model = timm.create_model(name, num_classes=3)
    groups = layer_groups(model)
    group_parameters = import_module("timm.models").group_parameters
    ids = group_parameters(model, model.group_matcher(coarse=False), reverse=True)
    spans = [{ids[each] for each in group} for group in groups]
    assert sorted(each for group in groups for each in group) == sorted(each for each, _ in model.named_parameters())
    assert all(max(first) <= min(second) for first, second in pairwise(spans))
    assert all(re.match(r"(fc|classifier|head)\.", each) for each in groups[-1])


def test_a_head_of_ours_is_the_classifier(timm):
    model = create_model("timm/test_resnet", num_classes=3, head="routed")
    assert classifier_names(model) == ("head",)
    assert layer_groups(model)[-1] == tuple(each for each, _ in model.named_parameters() if each.startswith("head."))
    assert layer_groups(model)[-2][0].startswith("backbone.layer4")


def test_several_classifiers_and_plain_modules():
    class Distilled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

        def get_classifier(self):
            return self.first, self.second

    assert classifier_names(Distilled()) == ("first", "second")
    assert layer_groups(Distilled())[0] == ("body.weight", "body.bias")
    assert classifier_names(nn.Sequential(nn.Conv2d(1, 1, 1))) == ()
    plain = nn.Sequential(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    assert layer_groups(plain) == (("0.weight", "0.bias", "1.weight", "1.bias"), ("3.weight", "3.bias"))
