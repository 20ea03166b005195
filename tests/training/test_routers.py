"""Networks with every router: built, trained, saved and loaded, and what files may not do."""

import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from moesaic.models import ModelSpec, applied_conversions, convert, count_macs, create_model
from moesaic.routing import ExpertChoice, Router, Routing, SoftRouter, TokenChoice, register_router
from moesaic.routing import registry as of_routers
from moesaic.training.checkpoint import CheckpointError, Metadata, load_checkpoint, save_network

CLASSES = ("cat", "dog")
MODULE = "routers_of_the_tests"


class InTurn(Router):
    """Assigns patch n to expert n mod E; the gate is a softmax, so that it learns."""

    def choose(self, scores: torch.Tensor, *, unit="patch", grid=None) -> Routing:
        B, N, E = scores.shape
        index = (torch.arange(N, device=scores.device) % E).expand(B, N).unsqueeze(-1)
        gate = scores.softmax(-1).gather(-1, index)
        return Routing(unit, scores, index, gate, "unit", grid=grid, may_drop=False)


InTurn.__module__ = MODULE


@pytest.fixture(autouse=True)
def routers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with a router of a user; names that a test registers are gone afterwards."""
    module = ModuleType(MODULE)
    module.InTurn = InTurn  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(of_routers, "_REGISTERED", dict(of_routers._BUILT_IN))


SPELLINGS: dict[str, Any] = {
    "expert-choice": "expert-choice",
    "token-choice": "token-choice",
    "soft": "soft",
    "name of a class": f"{MODULE}:InTurn",
    "class": InTurn,
    "own class": SoftRouter,
    "factory": partial(TokenChoice, top_k=2),
}
KINDS = {
    "expert-choice": ExpertChoice,
    "token-choice": TokenChoice,
    "soft": SoftRouter,
    "name of a class": InTurn,
    "class": InTurn,
    "own class": SoftRouter,
    "factory": TokenChoice,
}


def step(model: torch.nn.Module, size: int) -> None:
    x, labels = torch.randn(4, 3, size, size), torch.tensor([0, 1, 0, 1])
    loss = F.cross_entropy(model.train()(x), labels)
    loss.backward()
    assert loss.isfinite()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, f"{name} has no gradient"
        assert weight.grad.isfinite().all(), name
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 0.01 * weight.grad


def saved_and_loaded(folder: Path, model: torch.nn.Module, spec: ModelSpec, size: int, router: Any = None) -> None:
    metadata = Metadata(spec, CLASSES, CLASSES, None, (3, size, size), "pets", {})
    save_network(folder / "model.safetensors", model, metadata)
    again = load_checkpoint(folder, router=router).model
    x, model = torch.randn(3, 3, size, size), model.to(memory_format=torch.channels_last).eval()
    with torch.no_grad():
        assert torch.equal(again(x), model(x))


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("size", [16, 64])
def test_a_wide_network_is_built_trained_saved_and_loaded(spelling: str, size: int, tmp_path: Path):
    router = SPELLINGS[spelling]
    if spelling == "factory":
        register_router("top-2", router)
    model = create_model("wrn10_1_pmoe", num_classes=2, image_size=size, router=router)
    assert type(model.moe.router) is KINDS[spelling]
    step(model, size)
    spec = ModelSpec("wrn10_1_pmoe", {"num_classes": 2, "image_size": size, "router": of_routers.router_name(router)})
    saved_and_loaded(tmp_path, model, spec, size, InTurn if KINDS[spelling] is InTurn else None)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("init", ["scratch", "upcycle"])
def test_a_converted_network_is_built_trained_saved_and_loaded(spelling: str, init: Any, tmp_path: Path):
    router = SPELLINGS[spelling]
    if spelling == "factory":
        register_router("top-2", router)
    base = ModelSpec("wrn10_1", {"num_classes": 2})
    model = convert(base.build(), "body.group3.0.conv2", experts=4, input_size=16, router=router, init=init)
    layer = model.get_submodule("body.group3.0.conv2")
    assert isinstance(layer.router, KINDS[spelling])
    step(model, 16)
    spec = ModelSpec(base.name, base.arguments, applied_conversions(model))
    assert ("router" in spec.conversions[0]) == (spelling != "expert-choice")
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    saved_and_loaded(tmp_path, model, spec, 16, InTurn if KINDS[spelling] is InTurn else None)


def test_every_layer_has_a_router_of_its_own_that_depends_on_the_seed_alone():
    def converted(seed: int) -> torch.nn.Module:
        torch.rand(3)
        model = create_model("cifar_resnet18", num_classes=2)
        return convert(model, "body.[89].second.0", experts=4, input_size=32, router="soft", seed=seed)

    first, again, other = converted(0), converted(0), converted(1)
    names = ["body.8.second.0", "body.9.second.0"]
    weights = [[model.get_submodule(name).router.weight for name in names] for model in (first, again, other)]
    assert all(torch.equal(*pair) for pair in zip(weights[0], weights[1], strict=True))
    assert not torch.equal(weights[0][0], weights[0][1])
    assert not torch.equal(weights[0][0], weights[2][0])


def test_converting_with_any_router_leaves_the_global_random_numbers_alone():
    model = create_model("wrn10_1", num_classes=2)
    before = torch.get_rng_state()
    convert(model, "body.group3.0.conv2", experts=4, input_size=16, router=InTurn)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("router", ["expert-choice", "token-choice", "soft"])
def test_by_default_all_routers_let_the_experts_compute_one_map(router: str):
    model = create_model("wrn10_1_pmoe", num_classes=2, image_size=64, router=router)
    (routed,) = (layer for layer in count_macs(model, (3, 64, 64)).layers if layer.routed)
    assert 0.12 < routed.macs / routed.dense_macs < 0.24  # one of 8 experts on each patch, the router and mixing


def test_patches_per_expert_are_the_slots_of_a_soft_router():
    model = create_model("wrn10_1_pmoe", num_classes=2, image_size=64, router="soft", patches_per_expert=3)
    assert model.moe.router.slots_per_expert == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router": "token-choice", "patches_per_expert": 3}, "has no such number; leave it out"),
        ({"router": "token-choice", "gate": "one"}, "gate='one', but its router has gate='softmax_all'"),
        ({"router": "soft", "expert_norm": True}, "expert_norm=True has no meaning under SoftRouter"),
        ({"router": "hard"}, "router='hard' is unknown"),
    ],
)
def test_options_that_a_router_does_not_have_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        create_model("wrn10_1_pmoe", num_classes=2, image_size=16, **options)
    with pytest.raises(ValueError, match=message):
        convert(create_model("wrn10_1", num_classes=2), "body.group3.0.conv2", experts=4, input_size=16, **options)


def test_a_router_object_is_refused_since_each_layer_has_its_own():
    model = create_model("wrn10_1", num_classes=2)
    for given in (TokenChoice(64, 4), 3, None):
        with pytest.raises(TypeError, match="give a name, a router class, or a factory"):
            convert(model, "body.group3.0.conv2", experts=4, input_size=16, router=given)


def test_a_soft_router_refuses_a_context_beyond_the_patch():
    model = create_model("wrn10_1", num_classes=2)
    with pytest.raises(ValueError, match="context='map' has no meaning under SoftRouter"):
        convert(model, "body.group3.0.conv2", experts=4, input_size=16, router="soft", context="map")


@pytest.mark.parametrize("converted", [False, True])
def test_a_file_imports_nothing_and_says_what_to_register(converted: bool, tmp_path: Path, monkeypatch):
    """The file of a stranger may name any module; loading it must not run that."""
    (tmp_path / "harm.py").write_text("raise SystemExit('a file ran this')")
    monkeypatch.syspath_prepend(tmp_path)
    register_router("harm:Harm", InTurn)
    if converted:
        conversion = {"layer": "body.group3.0.conv2", "experts": 4, "patch_size": 2, "router": "harm:Harm"}
        spec = ModelSpec("wrn10_1", {"num_classes": 2}, (conversion,))
    else:
        spec = ModelSpec("wrn10_1_pmoe", {"num_classes": 2, "image_size": 16, "router": "harm:Harm"})
    model = spec.build()
    saved_and_loaded(tmp_path, model, spec, 16)
    monkeypatch.setattr(of_routers, "_REGISTERED", dict(of_routers._BUILT_IN))
    with pytest.raises(ValueError, match=r"never imported.*register_router\('harm:Harm', Harm\)"):
        load_checkpoint(tmp_path)
    assert "harm" not in sys.modules
    assert load_checkpoint(tmp_path, router=InTurn).spec == spec


def test_a_router_is_given_only_where_the_file_has_one_of_a_user(tmp_path: Path):
    spec = ModelSpec("wrn10_1_pmoe", {"num_classes": 2, "image_size": 16, "router": "soft"})
    save_network(
        tmp_path / "model.safetensors", spec.build(), Metadata(spec, CLASSES, CLASSES, None, (3, 16, 16), "pets", {})
    )
    with pytest.raises(CheckpointError, match="has no router that is not moesaic's; leave router out"):
        load_checkpoint(tmp_path, router=InTurn)


def test_one_class_does_not_stand_for_two_names():
    conversion = {"layer": "body.group3.0.conv2", "experts": 4, "patch_size": 2, "router": "b:B"}
    spec = ModelSpec("wrn10_1_pmoe", {"num_classes": 2, "router": "a:A"}, (conversion,))
    with pytest.raises(ValueError, match="has the routers a:A and b:B, but one was given"):
        spec.build(InTurn)


def test_a_specification_has_names_alone():
    with pytest.raises(TypeError, match="a specification has names alone"):
        ModelSpec("wrn10_1_pmoe", {"num_classes": 2, "router": InTurn}).build()


def test_a_nameless_factory_converts_but_is_not_recorded():
    model = create_model("wrn10_1", num_classes=2)
    convert(model, "body.group3.0.conv2", experts=4, input_size=16, router=lambda c, e, p: InTurn(c, e, p))
    with pytest.raises(ValueError, match="has no name to store"):
        applied_conversions(model)
