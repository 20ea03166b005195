"""Routers by name: what may be named, and that names in files import nothing."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from moesaic.routing import ExpertChoice, Router, Routing, SoftRouter, TokenChoice, list_routers, register_router
from moesaic.routing import registry as of_routers
from moesaic.routing.registry import build_router, import_router, join_router_names, registered_router, router_name


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that a test registers are gone afterwards."""
    monkeypatch.setattr(of_routers, "_REGISTERED", dict(of_routers._BUILT_IN))


class InTurn(Router):
    """Assigns patch n to expert n mod E."""

    def choose(self, scores: torch.Tensor, *, unit="patch", grid=None) -> Routing:
        B, N, E = scores.shape
        index = (torch.arange(N) % E).expand(B, N).unsqueeze(-1)
        return Routing(unit, scores, index, torch.ones(B, N, 1), "unit", grid=grid, may_drop=False)


def test_names_stand_for_the_routers_of_moesaic():
    assert list_routers() == ["expert-choice", "token-choice", "soft"]
    made = [build_router(name, 8, 4, 2, patches_per_expert=3) for name in list_routers()]
    assert [type(each) for each in made] == [ExpertChoice, TokenChoice, SoftRouter]
    assert all((each.in_channels, each.experts, each.patch_size) == (8, 4, 2) for each in made)
    assert (made[0].patches_per_expert, made[1].top_k, made[2].slots_per_expert) == (3, 1, 3)


def by_position(channels: int, count: int, side: int) -> Router:
    return InTurn(channels, count, side)


@pytest.mark.parametrize(
    "router",
    [InTurn, by_position, lambda c, e, p: InTurn(c, e, p), partial(InTurn), f"{__name__}:InTurn"],
    ids=["class", "function", "lambda", "partial", "name"],
)
def test_classes_factories_and_imported_names_are_built_for_the_layer(router, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or of_this_module())
    made = build_router(router, 8, 4, 2, patches_per_expert=3)
    assert isinstance(made, Router)
    assert type(made).__name__ == "InTurn"
    assert (made.in_channels, made.experts, made.patch_size) == (8, 4, 2)


def of_this_module():
    """This file as a module: pytest may import it under another name."""
    from types import ModuleType

    module = ModuleType(__name__)
    module.InTurn = InTurn
    return module


def test_a_partial_keeps_what_it_was_given():
    assert build_router(partial(TokenChoice, top_k=2), 8, 4, 2).top_k == 2
    assert build_router(partial(SoftRouter, slots_per_expert=5), 8, 4, 2, patches_per_expert=3).slots_per_expert == 5
    made = build_router(partial(ExpertChoice, patches_per_expert=5, gate="one"), 8, 4, 2, patches_per_expert=3)
    assert (made.patches_per_expert, made.gate) == (5, "one")


def test_a_registered_name_is_used_and_stored():
    register_router("in-turn", InTurn)
    assert isinstance(build_router("in-turn", 8, 4, 2), InTurn)
    assert router_name(InTurn) == "in-turn"
    assert "in-turn" in list_routers()


def test_a_class_is_stored_by_its_module_and_a_nameless_factory_is_refused():
    assert router_name(InTurn) == f"{__name__}:InTurn"
    for nameless in (lambda c, e, p: InTurn(c, e, p), partial(InTurn)):
        with pytest.raises(ValueError, match=r"has no name to store; call moesaic\.routing\.register_router"):
            router_name(nameless)


def test_modules_of_the_working_directory_are_imported_for_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "routers_of_mine.py").write_text(
        "from moesaic.routing import TokenChoice\n\nclass Outer:\n    class Mine(TokenChoice): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(tmp_path))])
    before = list(sys.path)
    try:
        assert import_router("routers_of_mine:Outer.Mine").__qualname__ == "Outer.Mine"
    finally:
        sys.modules.pop("routers_of_mine", None)
    assert sys.path == before
    assert registered_router("routers_of_mine:Outer.Mine").__name__ == "Mine"


def test_looking_up_a_name_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "harmful_routers.py").write_text("raise SystemExit('this ran')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"never imported.*register_router\('harmful_routers:Harm', Harm\)"):
        registered_router("harmful_routers:Harm")
    assert "harmful_routers" not in sys.modules


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("sofd", ValueError, r"router='sofd' is unknown \(did you mean 'soft'\?\); use 'expert-choice'"),
        ("no_such_module:Mine", ImportError, "cannot be imported.*PYTHONPATH"),
        ("moesaic.routing:NoRouter", ValueError, "has no class or function 'NoRouter'"),
        ("moesaic.routing:__all__", ValueError, "has no class or function '__all__'"),
    ],
)
def test_names_without_a_router_are_refused(name: str, kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        build_router(name, 8, 4, 2)


def test_what_is_no_router_is_refused():
    with pytest.raises(TypeError, match="router=3 is a int; give a name, a router class, or a factory"):
        build_router(3, 8, 4, 2)
    with pytest.raises(TypeError, match="made a tuple; it must make a module"):
        build_router(lambda c, e, p: (c, e, p), 8, 4, 2)
    with pytest.raises(TypeError, match="router=3 is a int; give a router class"):
        register_router("three", 3)
    with pytest.raises(TypeError, match="is a TokenChoice; give a router class"):
        register_router("one", TokenChoice(8, 4))
    with pytest.raises(ValueError, match="'soft' is one of moesaic's own routers; choose another name"):
        register_router("soft", InTurn)


def test_parts_of_a_spelling_are_joined_only_around_unknown_modules():
    assert join_router_names(["router=a.b", "C", "experts=4"]) == ["router=a.b:C", "experts=4"]
    assert join_router_names(["router=a", "C", "pretrained"]) == ["router=a:C", "pretrained"]
    assert join_router_names(["router=token-choice", "pretrained"]) == ["router=token-choice", "pretrained"]
    assert join_router_names(["router=a", "experts=4"]) == ["router=a", "experts=4"]
