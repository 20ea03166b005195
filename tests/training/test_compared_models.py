"""The models of a comparison: unknown ones are refused, one stands for a pair, and names tell them apart."""

import pytest

from moesaic.training.compared_models import HEADS, check_models, default_samples, expand_models, short_names

STEM = "timm/resnet18:pretrained"


@pytest.mark.parametrize(
    ("models", "expanded"),
    [
        ((STEM,), tuple(f"{STEM}:head={head}" for head in HEADS)),
        ((f"{STEM}:head=routed:experts=4",), (f"{STEM}:head=mean", f"{STEM}:head=routed:experts=4")),
        ((f"{STEM}:head=mean",), (f"{STEM}:head=mean", f"{STEM}:head=routed")),
        (
            ("wrn10_1:convert=body.group3.0.conv2:experts=4",),
            ("wrn10_1", "wrn10_1:convert=body.group3.0.conv2:experts=4"),
        ),
        (("wrn10_1_pmoe:experts=2",), ("wrn10_1", "wrn10_1_pmoe:experts=2")),
        (("wrn10_1", "wrn10_2"), ("wrn10_1", "wrn10_2")),
    ],
)
def test_one_network_stands_for_the_comparison_that_matters(models, expanded):
    assert expand_models(models) == expanded


@pytest.mark.parametrize("model", ["wrn10_1", "timm/resnet18", "wrn10_1:weights=file"])
def test_one_network_without_a_natural_peer_is_told_what_to_do(model):
    with pytest.raises(ValueError, match=r"has 1 of the at least 2 models .* 'timm/resnet18:weights=FILE'"):
        expand_models((model,))


@pytest.mark.parametrize(
    ("models", "names"),
    [
        (("a:weights=x/w.pt:head=mean", "a:weights=x/w.pt:head=max"), ["head=mean", "head=max"]),
        (("a:pretrained:head=mean", "b:pretrained:head=mean"), ["a:head=mean", "b:head=mean"]),
        (("a:pretrained", "a:pretrained:convert=c:experts=2"), ["a", "a:convert=c:experts=2"]),
        (("a:weights=x/1.pt", "a:weights=x/2.pt"), ["a:weights=1.pt", "a:weights=2.pt"]),
        (("a:weights=x/1.pt", "a:weights=y/1.pt"), ["a:weights=x/1.pt", "a:weights=y/1.pt"]),
        (("a:pretrained", "a"), ["a:pretrained", "a"]),
        (("a:pretrained:head=mean", "a:head=max"), ["a:head=mean", "a:head=max"]),
    ],
)
def test_names_tell_networks_apart_without_what_they_share(models, names):
    assert short_names(models) == names


@pytest.mark.parametrize("classes", [2, 4, 10, 102])
@pytest.mark.parametrize("images", [102, 120, 209, 640, 1249, 1250, 60_000])
def test_numbers_of_samples_fit_the_images(images, classes):
    found = default_samples(images, classes)
    assert list(found) == sorted(set(found))
    assert classes <= found[0]
    assert found[-1] <= max(0.8 * images, classes) or found == (images,)
    assert images < 1250 or found == tuple(size for size in (250, 500, 1000))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("wrn10_2pmoe", r"compare: models: name='wrn10_2pmoe' is unknown; .*did you mean 'wrn10_2_pmoe'"),
        ("wrn11_1", "depth=11; it must be 6n"),
        ("wrn10_1_pmoe:expert=3", "has no option 'expert'; it takes .*experts"),
        ("wrn10_1_pmoe:experts", "experts=True is a bool; it must be a whole number"),
        ("wrn10_1_pmoe:experts=", "has 'experts=' where option or option=value belongs"),
        ("wrn10_1_pmoe:experts=2:experts=4", "has the option 'experts' twice"),
        ("wrn10_1:convert=stem", "convert=stem without experts="),
        ("wrn10_1:convert=stem:experts=2:expert=2", "wrn10_1 has no option 'expert'; .*after convert=: experts"),
    ],
)
def test_unknown_models_are_told_before_anything_is_loaded(model, message):
    with pytest.raises(ValueError, match=message):
        check_models(("wrn10_1", model))
