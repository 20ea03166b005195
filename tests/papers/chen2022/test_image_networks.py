"""Networks for small images: their sizes, and mixtures of them."""

import pytest
import torch

from moesaic.papers.chen2022.image_networks import IMAGE_NETWORKS, image_mixture, image_network


@pytest.mark.parametrize(
    ("name", "parameters", "width"),
    [("cnn", 121_738, 4608), ("resnet18", 11_173_962, 512), ("mobilenetv2", 2_296_922, 1280)],
)
def test_networks_have_the_known_number_of_parameters_and_features(name, parameters, width):
    network = image_network(name, num_classes=10).eval()
    assert sum(weight.numel() for weight in network.parameters()) == parameters
    with torch.no_grad():
        x = torch.randn(2, 3, 32, 32)
        features = network.features(x)
        assert features.shape == (2, width)
        assert torch.equal(network(x), network.head(features))


def test_deep_networks_end_in_4_by_4_maps():
    for name in ("resnet18", "mobilenetv2"):
        x = torch.randn(1, 3, 32, 32)
        for layer in image_network(name, num_classes=2).eval().body[:-1]:
            x = layer(x)
        assert x.shape[2:] == (4, 4)


def test_experts_have_different_weights_and_the_router_is_zero():
    mixture = image_mixture("cnn", num_classes=2, experts=3)
    first = [expert.head.weight for expert in mixture.experts.children()]
    assert len(first) == 3
    assert not torch.equal(first[0], first[1])
    assert not mixture.router.weight.any()
    assert mixture.router.weight.shape == (3, 3, 4, 4)


def test_unknown_names_are_refused_with_a_suggestion():
    assert set(IMAGE_NETWORKS) == {"cnn", "resnet18", "mobilenetv2"}
    with pytest.raises(ValueError, match=r"name='resnet' is unknown.*did you mean 'resnet18'"):
        image_network("resnet", 10)


def test_zero_classes_are_refused():
    with pytest.raises(ValueError, match="image_network: num_classes=0"):
        image_network("cnn", 0)
