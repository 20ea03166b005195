"""Features of a frozen backbone: computed once, cached, and as good as the images."""

import json
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import nn
from training.squares import SCALE, TASK

from moesaic.data.image_dataset import RandomFlipCrop
from moesaic.layers import create_head
from moesaic.models.headed_network import HeadedNetwork
from moesaic.training.backbone_features import add_features, backbone_digest
from moesaic.training.checkpoint import load_weights
from moesaic.training.fit import evaluate, fit
from moesaic.training.recipe import Recipe

PLAIN = replace(TASK, train_transform=SCALE, eval_transform=SCALE, normalize=SCALE, digest="0123")
RECIPE = Recipe(epochs=6, batch_size=16, lr=0.05, trainable="head")


class Backbone(nn.Module):
    """A convolution with BatchNorm and dropout; counts its calls."""

    calls = 0

    def __init__(self, tokens: bool = False) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.5)
        self.tokens = tokens

    def forward_features(self, x):
        type(self).calls += 1
        x = self.drop(self.norm(self.conv(x)).relu())
        return x.flatten(2).transpose(1, 2) if self.tokens else x


def network(head: str = "routed", tokens: bool = False, seed: int = 0) -> HeadedNetwork:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        options = {"experts": 4, "patches_per_expert": 8} if head == "routed" else {}
        return HeadedNetwork(Backbone(tokens), create_head(head, 8, 2, **options))


@pytest.fixture
def calls(monkeypatch):
    """How many batches ran through the backbone."""
    monkeypatch.setattr(Backbone, "calls", 0)
    return lambda: Backbone.calls


@pytest.mark.parametrize("tokens", [False, True], ids=["maps", "tokens"])
@pytest.mark.parametrize("head", ["routed", "attention", "mean", "max"])
def test_a_head_that_trains_on_features_is_the_head_that_trains_on_images(head, tokens):
    by_images, by_features = network(head, tokens), network(head, tokens)
    slow = fit(by_images, PLAIN, RECIPE)
    fast = fit(by_features, add_features(PLAIN, by_features), RECIPE)
    for (name, first), second in zip(by_images.state_dict().items(), by_features.state_dict().values(), strict=True):
        torch.testing.assert_close(first, second, msg=name, atol=1e-3, rtol=1e-3)
    assert fast.accuracy == pytest.approx(slow.accuracy, abs=3)
    assert fast.accuracy == 100 * evaluate(by_features, PLAIN).double().mean(), "of the whole network"
    assert fast.epochs[-1].loss < fast.epochs[0].loss


def test_the_backbone_runs_once_for_each_image_and_for_the_final_test(tmp_path, calls):
    model = network()
    dataset = add_features(PLAIN, model, cache_dir=tmp_path)
    assert calls() == 3 + 2  # 70 and 40 images in blocks of 32
    fit(model, dataset, RECIPE)
    assert calls() == 5 + 1
    fit(network(), dataset, RECIPE, test_features=True)
    assert calls() == 6
    again = add_features(PLAIN, network("mean"), cache_dir=tmp_path)
    assert calls() == 6, "from the cache, for another head on the same backbone"
    assert torch.equal(again.train.features, dataset.train.features)
    add_features(PLAIN, network(seed=1), cache_dir=tmp_path)
    assert calls() == 11, "another backbone"
    add_features(replace(PLAIN, digest="4567"), network(), cache_dir=tmp_path)
    assert calls() == 16, "other images"


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign", "no header", "no JSON"])
def test_damaged_features_are_computed_again(tmp_path, calls, damage):
    messages: list[str] = []
    expected = add_features(PLAIN, network(), cache_dir=tmp_path).test.features.clone()
    for path in tmp_path.glob("features-*.npy"):
        header = path.with_suffix(".json")
        if damage == "cut":
            path.write_bytes(path.read_bytes()[:-4])
        elif damage == "flipped":
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        elif damage == "foreign":
            np.save(path, np.zeros((3, 2), np.float64))
        elif damage == "no header":
            header.unlink()
        else:
            header.write_text("{")
    again = add_features(PLAIN, network(), cache_dir=tmp_path, log=messages.append)
    assert torch.equal(again.test.features, expected)
    assert calls() == 10
    assert len([line for line in messages if "are damaged; computing them again" in line]) == (
        0 if damage == "no header" else 2
    )
    add_features(PLAIN, network(), cache_dir=tmp_path)
    assert calls() == 10
    assert not list(tmp_path.glob(".*"))


def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"features cannot be written to .*file .*--cache-dir"):
        add_features(PLAIN, network(), cache_dir=tmp_path / "file")


def test_features_go_with_their_images():
    dataset = add_features(PLAIN, network())
    some = dataset.subset(20, seed=3)
    assert some.backbone == dataset.backbone == backbone_digest(network())
    assert some.train.features.shape == (20, 8, 8, 8)
    rows = [int((dataset.train.pixels == each).flatten(1).all(1).nonzero()[0]) for each in some.train.pixels]
    assert torch.equal(some.train.features, dataset.train.features[rows])
    assert torch.equal(dataset.train.take(torch.arange(5, 9)).features, dataset.train.features[5:9])
    assert dataset.to("cpu").test.features is not None


def test_the_digest_is_of_everything_but_the_head():
    model = network()
    before = backbone_digest(model)
    with torch.no_grad():
        model.head.moe.experts.weight.add_(1)
        assert backbone_digest(model) == before
        model.backbone.norm.running_mean.add_(1)
        assert backbone_digest(model) != before


def test_a_network_and_its_backbone_under_a_head_of_ours_share_features():
    own = Backbone()
    own.head = nn.Linear(8, 2)  # the network's own classifier
    backbone = Backbone()
    backbone.load_state_dict(own.state_dict(), strict=False)
    under = HeadedNetwork(backbone, create_head("mean", 8, 2))
    assert backbone_digest(own) == backbone_digest(under)
    backbone.output_fmt = "NHWC"  # a head of ours gets these maps with other axes
    assert backbone_digest(own) != backbone_digest(under)
    del backbone.output_fmt
    backbone.num_prefix_tokens = 1
    assert backbone_digest(own) != backbone_digest(under)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_head_trains_in_one_thread_and_the_backbone_in_all(threads, monkeypatch):
    torch.set_num_threads(threads)  # each test gets its own back
    model, seen = network(), {"head": set(), "backbone": set()}
    dataset = add_features(PLAIN, model)
    model.head.register_forward_pre_hook(
        lambda *_: seen["head"].add(torch.get_num_threads()) if model.training else None
    )
    plain = Backbone.forward_features
    monkeypatch.setattr(
        Backbone, "forward_features", lambda *x: seen["backbone"].add(torch.get_num_threads()) or plain(*x)
    )
    fit(model, dataset, replace(RECIPE, epochs=1))
    assert seen == {"head": {1}, "backbone": {threads}}
    assert torch.get_num_threads() == threads


def test_features_of_another_backbone_are_refused():
    dataset = add_features(PLAIN, network())
    with pytest.raises(ValueError, match="fit: the features of the dataset are of another backbone than that of this"):
        fit(network(seed=1), dataset, RECIPE)
    fit(network(seed=1), dataset, replace(RECIPE, epochs=1, trainable="all"))  # which does not use them


def test_images_that_change_and_networks_without_features_are_refused():
    flips = replace(PLAIN, train_transform=RandomFlipCrop(SCALE, flip=True))
    with pytest.raises(ValueError, match="add_features: the images are augmented"):
        add_features(flips, network())
    assert not replace(PLAIN, train_transform=RandomFlipCrop(SCALE)).augmented
    with pytest.raises(ValueError, match="add_features: Linear has no forward_features and forward_head"):
        add_features(PLAIN, nn.Linear(1, 1))
    model = network()
    model.backbone.forward_features = lambda x: x.mean((2, 3))
    with pytest.raises(ValueError, match=r"returned \(32, 3\); it must be a map"):
        add_features(PLAIN, model)


def test_a_run_on_features_that_was_stopped_ends_as_one_that_was_not(tmp_path, monkeypatch):
    dataset = add_features(PLAIN, network(), cache_dir=tmp_path / "cache")
    whole = network()
    found = fit(whole, dataset, RECIPE, out=tmp_path / "whole")
    trainer = import_module("moesaic.training.trainer")
    run_steps, epochs = trainer.Trainer._run_steps, []

    def stop(self):
        epochs.append(1)
        if len(epochs) == 3:
            raise KeyboardInterrupt
        run_steps(self)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_run_steps", stop)
        with pytest.raises(KeyboardInterrupt):
            fit(network(), dataset, RECIPE, out=tmp_path / "stopped", checkpoint_seconds=0)
    again = fit(network(), dataset, RECIPE, out=tmp_path / "stopped")
    assert again.accuracy == found.accuracy
    files = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("whole", "stopped")]
    assert files[0] == files[1]
    load_weights(tmp_path / "whole", network())
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["recipe"]["trainable"] == "head"
