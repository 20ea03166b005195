"""Explanations: selected patches by class, information about the class, accuracies."""

import pytest
import torch
from torch import Tensor, nn

import moesaic
from moesaic.insight.class_routing import class_routing, information
from moesaic.insight.explain import Accuracy, ForwardPass, collect_outputs, explain
from moesaic.insight.receptive_field import receptive_field
from moesaic.models.convert import ChannelsLastPatchMoE
from moesaic.routing import SoftRouter, TokenChoice
from moesaic.routing_record import UNASSIGNED, Routing


def by_hand(index_BEL: Tensor, units: int = 4, scores: Tensor | None = None) -> Routing:
    B, E, _ = index_BEL.shape
    scores = torch.zeros(B, units, E) if scores is None else scores
    gate = torch.where(index_BEL == UNASSIGNED, 0.0, 0.5)
    return Routing("patch", scores, index_BEL, gate, "expert", grid=(2, units // 2))


def forward_pass(routing: Routing, predicted: Tensor, classes: int = 2) -> ForwardPass:
    return ForwardPass(nn.functional.one_hot(predicted, classes).float(), {"moe": routing}, {"moe": None})


def network(**options: object) -> nn.Sequential:
    torch.manual_seed(0)
    arguments = {"experts": 2, "patches_per_expert": 1, "patch_size": 4} | options
    moe = moesaic.PatchMoE(3, 4, **arguments)
    return nn.Sequential(moe, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


def unit(pixels: Tensor) -> Tensor:
    return pixels / 255


def test_maps_tell_in_which_share_of_a_class_s_images_an_expert_works_on_a_patch():
    index = torch.tensor([[[0], [1]], [[0], [2]], [[3], [1]], [[0], [1]]])
    found = class_routing(by_hand(index), torch.tensor([0, 0, 0, 1]), classes=3)
    assert found.images == (3, 1, 0)
    third = pytest.approx(1 / 3)
    assert found.selection_rate[0].tolist() == [
        [pytest.approx(2 / 3), 0, 0, third],
        [0, pytest.approx(2 / 3), third, 0],
    ]
    assert found.selection_rate[1].tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]
    assert not found.selection_rate[2].any()


def test_a_mean_gate_is_over_the_images_in_which_there_is_one():
    index = torch.tensor([[[0]], [[0]], [[1]]])
    routing = by_hand(index)
    routing.gate[:] = torch.tensor([0.2, 0.4, 0.9]).view(3, 1, 1)
    found = class_routing(routing, torch.zeros(3, dtype=torch.int64), classes=1)
    torch.testing.assert_close(found.gate[0, 0], torch.tensor([0.3, 0.9, 0, 0], dtype=torch.float64))


def test_a_place_that_depends_on_the_class_tells_it():
    labels = torch.arange(60) % 2
    found = class_routing(by_hand(labels.view(60, 1, 1) * 3), labels, classes=2)
    assert found.information.bits == pytest.approx(1)
    assert found.information.most == pytest.approx(1)
    assert found.information.significant
    assert found.expert_information[0].significant
    assert found.probe_accuracy == 1
    assert found.majority_share == 0.5


def test_a_place_that_does_not_depend_on_the_class_tells_no_more_than_chance():
    generator = torch.Generator().manual_seed(1)
    index = torch.randint(0, 4, (60, 1, 1), generator=generator)
    found = class_routing(by_hand(index), torch.arange(60) % 2, classes=2)
    assert 0 < found.information.bits < found.information.by_chance
    assert not found.information.significant
    assert found.probe_accuracy == pytest.approx(0.5, abs=0.2)


def test_what_two_experts_tell_is_kept_apart():
    labels = torch.arange(40) % 2
    index = torch.stack([labels, torch.zeros_like(labels)], 1).unsqueeze(2)
    found = class_routing(by_hand(index), labels, classes=2)
    assert [each.bits for each in found.expert_information] == [pytest.approx(1), 0]
    assert found.information.bits == pytest.approx(
        0.5
    )  # one choice of the layer is the first expert's half of the time


def test_information_does_not_count_images_without_any_choice():
    work = torch.cat([torch.eye(2).repeat(10, 1), torch.zeros(5, 2)])
    labels = torch.cat([torch.arange(20) % 2, torch.zeros(5, dtype=torch.int64)])
    assert information(work, labels, 2).bits == pytest.approx(1)
    assert information(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64), 2).bits == 0


def test_too_few_images_are_not_told_by():
    assert (
        class_routing(by_hand(torch.zeros(4, 1, 1, dtype=torch.int64)), torch.arange(4) % 2, classes=2).probe_accuracy
        is None
    )


@pytest.mark.parametrize("labels", [torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.tensor([0.0, 1.0, 0.0])])
def test_labels_that_do_not_fit_are_refused(labels: Tensor):
    with pytest.raises(ValueError, match=r"must be from 0 to 1|one whole number for each of the 3 images"):
        class_routing(by_hand(torch.zeros(3, 1, 1, dtype=torch.int64)), labels, classes=2)


def test_top_patches_are_selected_patches_with_the_highest_scores_one_per_image():
    scores = torch.tensor([[9.0, 1.0, 2.0, 0.0], [0.0, 5.0, 4.0, 0.0], [0.0, 0.0, 0.0, 3.0]]).unsqueeze(2)
    index = torch.tensor(
        [[[1, 2]], [[1, 2]], [[UNASSIGNED, UNASSIGNED]]]
    )  # 9 is highest, but no expert selected that patch
    explanation = explain(
        forward_pass(by_hand(index, scores=scores), torch.tensor([0, 1, 0])), ["a", "b"], labels=torch.tensor([1, 1, 0])
    )
    (top_patches,) = explanation.layers[0].top_patches
    assert [(each.image, each.patch, each.score, each.label) for each in top_patches] == [
        (1, 1, 5.0, 1),
        (0, 2, 2.0, 1),
    ]


def test_accuracies_are_told_for_all_for_classes_and_for_groups():
    routing = by_hand(torch.zeros(4, 1, 1, dtype=torch.int64))
    explanation = explain(
        forward_pass(routing, torch.tensor([0, 0, 1, 1])),
        ["a", "b"],
        labels=torch.tensor([0, 0, 0, 1]),
        groups=torch.tensor([2, 0, 0, 2]),
        group_names=["x", "y", "z"],
    )
    assert explanation.accuracy == Accuracy("all", 3, 4)
    assert explanation.class_accuracy == (Accuracy("a", 2, 3), Accuracy("b", 1, 1))
    assert explanation.group_accuracy == (Accuracy("x", 1, 2), Accuracy("y", 0, 0), Accuracy("z", 2, 2))


def test_without_labels_images_are_sorted_by_prediction_and_no_accuracy_is_told():
    routing = by_hand(torch.zeros(30, 1, 1, dtype=torch.int64))
    explanation = explain(forward_pass(routing, torch.tensor([0] * 5 + [1] * 25)), ["a", "b"])
    assert explanation.by == "prediction"
    assert explanation.class_images == (5, 25)
    assert explanation.accuracy is None
    assert not explanation.class_accuracy
    assert explanation.small_classes == ("a",)


def test_an_interval_holds_its_accuracy_and_narrows_with_the_images():
    few, many = Accuracy("a", 8, 10), Accuracy("a", 800, 1000)
    for score in (few, many, Accuracy("a", 0, 7), Accuracy("a", 7, 7)):
        low, high = score.interval
        assert 0 <= low <= score.percent <= high <= 100
    assert many.interval[1] - many.interval[0] < (few.interval[1] - few.interval[0]) / 5


@pytest.mark.parametrize("router", [TokenChoice(3, 2, 1, 4), SoftRouter(3, 2, 2, 4)], ids=["units choose", "soft"])
def test_every_kind_of_routing_of_patches_is_explained(router: nn.Module):
    model = network(router=router, patches_per_expert=None, context="patch")
    pixels = torch.randint(0, 256, (24, 3, 8, 8), dtype=torch.uint8)
    explanation = explain(collect_outputs(model, pixels, unit), ["a", "b"], labels=torch.arange(24) % 2)
    rate = torch.tensor(explanation.layers[0].selection_rate)
    assert rate.shape == (2, 2, 4)
    if isinstance(router, TokenChoice):
        assert torch.allclose(rate.sum(1), torch.ones(2, 4), atol=1e-4)  # each patch goes to one expert
    else:
        assert torch.allclose(rate.sum(2), torch.ones(2, 2), atol=1e-4)  # each expert gets one mixture
        assert explanation.layers[0].probe_accuracy is None


def test_routing_of_whole_images_is_explained_without_places():
    router = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 2))
    model = moesaic.SampleMoE(router, [nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 2)) for _ in range(2)])
    pixels = torch.randint(0, 256, (24, 3, 8, 8), dtype=torch.uint8)
    (layer,) = explain(collect_outputs(model, pixels, unit), ["a", "b"], labels=torch.arange(24) % 2).layers
    assert (layer.grid, layer.field, layer.unit) == (None, None, "sample")
    assert torch.tensor(layer.selection_rate).sum(1).flatten().tolist() == [pytest.approx(1)] * 2


def test_a_planted_pattern_is_found_where_it_is():
    model = network(experts=1, combine="sum")
    model[0].router.weight.data.fill_(1.0)  # scores are brightness
    pixels = torch.randint(0, 100, (40, 3, 8, 8), dtype=torch.uint8)
    labels = torch.arange(40) % 2
    pixels[labels == 0, :, :4, :4] += 150
    pixels[labels == 1, :, 4:, 4:] += 150
    (layer,) = explain(collect_outputs(model, pixels, unit), ["left", "right"], labels=labels, top_patches=3).layers
    assert layer.selection_rate == (((1, 0, 0, 0),), ((0, 0, 0, 1),))
    assert layer.probe_accuracy == 1
    assert all(each.patch == 3 * each.label for each in layer.top_patches[0])


def test_looking_in_parts_or_at_once_gives_the_same_and_leaves_the_model_as_it_was():
    model = network().train()
    pixels = torch.randint(0, 256, (7, 3, 8, 8), dtype=torch.uint8)
    done: list[int] = []
    parts, whole = (
        collect_outputs(model, pixels, unit, batch_size=3, progress=done.append),
        collect_outputs(model, pixels, unit),
    )
    torch.testing.assert_close(parts.probabilities, whole.probabilities)
    assert torch.equal(parts.routing["0"].index, whole.routing["0"].index)
    assert done == [3, 6, 7]
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_only_the_layers_asked_for_are_kept():
    model = nn.Sequential(moesaic.PatchMoE(3, 3, experts=1, patches_per_expert=1, patch_size=4), *network())
    pixels = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    assert list(collect_outputs(model, pixels, unit).routing) == ["0", "1"]
    assert list(collect_outputs(model, pixels, unit, layers=["1"]).routing) == ["1"]
    with pytest.raises(ValueError, match="layer='2' is unknown; use '0' or '1'"):
        collect_outputs(model, pixels, unit, layers=["2"])


def test_what_cannot_be_explained_is_refused():
    with pytest.raises(ValueError, match="no routed layer; use a model"):
        collect_outputs(nn.Sequential(nn.Flatten(), nn.Linear(3, 2)), torch.zeros(1, 3, 1, 1, dtype=torch.uint8), unit)
    with pytest.raises(ValueError, match="there is no image; give"):
        collect_outputs(network(), torch.zeros(0, 3, 8, 8, dtype=torch.uint8), unit)
    routing = by_hand(torch.zeros(2, 1, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="3 class names for a network with 2 outputs"):
        explain(forward_pass(routing, torch.tensor([0, 1])), ["a", "b", "c"])


@pytest.mark.parametrize(
    ("before", "beyond", "whole"),
    [
        (nn.Identity(), 0, False),
        (nn.Conv2d(3, 3, 3, padding=1), 1, False),
        (nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 5, padding=2)), 3, False),
        # a stride of 2 doubles what a later kernel adds: 1 on the small map is 2 pixels, and the first adds 1 above
        (nn.Sequential(nn.Conv2d(3, 3, 3, 2, padding=1), nn.Conv2d(3, 3, 3, padding=1)), 3, False),
        (nn.Sequential(nn.InstanceNorm2d(3)), 16, True),
    ],
    ids=["none", "3×3", "3×3 and 5×5", "strided", "everything mixed"],
)
def test_the_receptive_field_is_measured(before: nn.Module, beyond: int, whole: bool):
    torch.manual_seed(0)
    strided = isinstance(before, nn.Sequential) and getattr(before[0], "stride", (1, 1)) == (2, 2)
    patch_size = 4 if strided else 8
    moe = moesaic.PatchMoE(3, 2, experts=1, patches_per_expert=1, patch_size=patch_size)
    field = receptive_field(nn.Sequential(before, moe), "1", torch.rand(3, 3, 32, 32))
    assert field is not None
    assert (field.patch_size, field.margin, field.covers_image) == ((8, 8), beyond, whole)
    assert (field.own_share == 1) is (beyond == 0)
    assert 0.3 < field.own_share <= 1


def test_the_receptive_field_of_a_layer_with_channels_last_is_that_of_its_patches():
    class ChannelsLast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.permute(0, 2, 3, 1)

    torch.manual_seed(0)
    moe = ChannelsLastPatchMoE(8, 8, experts=2, patches_per_expert=1, patch_size=4)
    model = nn.Sequential(nn.Conv2d(3, 8, 5, padding=2), ChannelsLast(), moe)
    field = receptive_field(model, "2", torch.rand(2, 3, 16, 16))
    assert field is not None
    assert (field.patch_size, field.margin, field.covers_image) == ((4, 4), 2, False)


def test_nothing_is_seen_where_nothing_of_the_image_arrives():
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 0

    moe = moesaic.PatchMoE(3, 2, experts=1, patches_per_expert=1, patch_size=2)
    assert receptive_field(nn.Sequential(Constant(), moe), "1", torch.rand(1, 3, 4, 4)) is None


def test_modules_keep_their_own_modes():
    model = nn.Sequential(nn.BatchNorm2d(3), *network()).train()
    model[0].eval()
    modes = [module.training for module in model.modules()]
    collect_outputs(model, torch.zeros(2, 3, 8, 8, dtype=torch.uint8), unit)
    assert [module.training for module in model.modules()] == modes
    receptive_field(model, "1", torch.rand(2, 3, 8, 8))
    assert [module.training for module in model.modules()] == modes


def test_logits_may_come_in_a_dictionary():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.layers(x)}

    pixels = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    model = Named()
    found, plain = collect_outputs(model, pixels, unit), collect_outputs(model.layers, pixels, unit)
    assert torch.equal(found.probabilities, plain.probabilities)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"labels": torch.tensor([0, 1])}, r"explain: labels are \(2,\) torch.int64; .* each of the 3 images"),
        ({"labels": torch.tensor([0, 1, 2])}, "explain: labels go from 0 to 2; with classes=2"),
        (
            {"labels": torch.tensor([0, 1, 0]), "groups": torch.tensor([0]), "group_names": ["x"]},
            r"explain: groups: labels are \(1,\) torch.int64",
        ),
    ],
)
def test_labels_and_groups_of_other_images_are_refused(given, message):
    routing = by_hand(torch.zeros(3, 1, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=message):
        explain(forward_pass(routing, torch.tensor([0, 1, 0])), ["a", "b"], **given)
