from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import moesaic
from moesaic.models import ResNet
from moesaic.models.deepmoe.network import DeepMoE, deepmoe
from moesaic.models.vgg import VGG16

KINDS = {
    "single channels": {"mode": "relu"},
    "blocks": {"mode": "topk", "keep": 0.5, "block": 8},
    "short blocks": {"mode": "relu", "block": 3},
}


def build(kind: str = "blocks") -> DeepMoE:
    torch.manual_seed(0)
    model = deepmoe(VGG16(4, width=0.25), num_classes=4, **KINDS[kind]).double().eval()
    for head in model.heads().values():
        nn.init.normal_(head.weight)
        nn.init.zeros_(head.bias)
    return model


def image(number: int = 0, size: int = 32) -> torch.Tensor:
    return torch.randn(1, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def by_masks(model: DeepMoE, x: torch.Tensor) -> torch.Tensor:
    with moesaic.backend("reference"):
        return model(x)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_one_image_after_the_other_gets_what_masks_give(kind):
    model = build(kind)
    images = [image(number) for number in range(3)] + [image(3, size=40)] + [image(4)]
    found = [model(x) for x in images]
    assert model._one_image(images[0]) is not None
    for x, y in zip(images, found, strict=True):
        torch.testing.assert_close(y, by_masks(model, x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_an_image_that_opens_nothing_gets_what_masks_give(kind):
    model = build(kind)
    for name in ("body.conv1", "body.conv5", "body.conv13"):
        if KINDS[kind]["mode"] == "relu":
            model.heads()[name].weight.zero_()
            model.heads()[name].bias.fill_(-1)
    torch.testing.assert_close(model(image()), by_masks(model, image()), rtol=1e-10, atol=1e-10)


def trains(model: DeepMoE) -> None:
    model.backbone.get_submodule("body.conv3").norm.train()


def head_trains(model: DeepMoE) -> None:
    model.heads()["body.conv3"].train()


def hears(name: str):
    return lambda model: model.get_submodule(name).register_forward_hook(lambda *given: None)


LONG = {
    "BatchNorm learns": trains,
    "a head learns": head_trains,
    "a hook on the backbone": hears("backbone"),
    "a hook on a layer": hears("backbone.body.conv2"),
    "a hook on the embedding": hears("embedding"),
    "a hook on a head": hears("gates.body_conv2"),
}


@pytest.mark.parametrize("reason", LONG)
@torch.no_grad()
def test_the_long_way_is_taken_where(reason):
    model = build()
    assert model._one_image(image()) is not None
    LONG[reason](model)
    assert model._one_image(image()) is None
    assert model(image()).shape == (1, 4)


@torch.no_grad()
def test_the_short_way_is_for_one_small_image_of_the_right_kind():
    model = build()
    assert model._one_image(torch.cat([image(), image()])) is None
    assert model._one_image(image(size=40)) is None
    assert model._one_image(image().float()) is None
    assert model._one_image(image()[:, :2]) is None
    assert model._one_image(image()[0]) is None
    with moesaic.backend("reference"):
        assert model._one_image(image()) is None
    with torch.autocast("cpu"):
        assert model.float()._one_image(image().float()) is None
    with moesaic.record_routing(model) as routing:
        model(image().float())
    assert len(routing) == 13


@torch.no_grad()
def test_a_network_that_is_no_chain_goes_the_long_way():
    model = deepmoe(ResNet(18, num_classes=4, width=0.1), num_classes=4).eval()
    assert model._one_image(image().float()) is None
    assert model(image().float()).shape == (1, 4)


def other_keep(model: DeepMoE) -> None:
    for head in model.heads().values():
        head.keep = head.blocks


CHANGES = {
    "a weight of the embedding": lambda model: model.embedding.body[0].weight.mul_(-1),
    "statistics of the embedding": lambda model: model.embedding.body[1].running_mean.add_(1),
    "a head": lambda model: model.heads()["body.conv4"].bias.add_(3),
    "a weight of a layer": lambda model: model.backbone.get_submodule("body.conv4").conv.weight.mul_(2),
    "how many blocks are open": other_keep,
    "its dtype": lambda model: model.float().double(),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changes_are_noticed(change):
    model = build()
    before = model(image())
    CHANGES[change](model)
    after = model(image())
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, by_masks(model, image()), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_threads_that_run_at_once_do_not_write_to_each_others_memory():
    model, images = build("single channels"), [image(number) for number in range(4)]
    expected = [model(x) for x in images]

    def again(number: int) -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(images[(number + step) % 4]) for step in range(12)]

    with ThreadPoolExecutor(4) as threads:
        for number, found in enumerate(threads.map(again, range(4))):
            for step, y in enumerate(found):
                torch.testing.assert_close(y, expected[(number + step) % 4], rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_an_answer_stays_what_it_was_when_the_next_image_comes():
    model = build()
    first = model(image(0))
    copied = first.clone()
    model(image(1))
    assert torch.equal(first, copied)
    assert not first.is_inference()
