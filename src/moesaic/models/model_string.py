"""Model strings, the networks of the command line: ``name:option:option=value:convert=layer+layer:experts=8``.

A bare option is ``=True``; values are numbers, true, false, strings, or whole numbers joined by ``+``, such as
``input_size=3+32+32``. An option after ``convert=`` that `convert` takes belongs to the conversion, until the next
``convert=``, ``skip=`` or ``head=``; all others belong to the network.
``skip=block+block:keep=0.5`` is a call of `moesaic.skip` in the same way.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from moesaic.routing.registry import join_router_names

__all__ = ["conversion_options", "format_model_string", "insert_router", "parse_model_string"]


def conversion_options() -> tuple[str, ...]:
    """Returns the options of `convert` that a model string may contain.

    >>> conversion_options()[:3]
    ('experts', 'patches_per_expert', 'patch_size')
    """
    from moesaic.models.convert import convert  # imports the layers, which are not needed without a conversion

    parameters = inspect.signature(convert).parameters.values()
    return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.name != "images")


def parse_model_string(text: str) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    """Returns the name, the options of the network and those of each conversion.

    >>> parse_model_string("timm/resnet18:pretrained:convert=layer4.1.conv2:experts=8")
    ('timm/resnet18', {'pretrained': True}, [{'layer': ['layer4.1.conv2'], 'experts': 8}])
    """
    name, *given = text.split(":")
    options: dict[str, Any] = {}
    conversions: list[dict[str, Any]] = []
    owner: dict[str, Any] = options
    for each in join_router_names(given):
        option, equals, value = each.partition("=")
        if not option or (equals and not value):
            raise ValueError(f"{text!r} has {each!r} where option or option=value belongs; use name:experts=4")
        if option in ("convert", "skip"):
            owner = {"layer" if option == "convert" else "skip": _layers(text, option, value)}
            conversions.append(owner)
            continue
        if option == "head":
            owner = options
        belongs = owner if owner is options or option in _options_of(owner) else options
        if option in belongs:
            raise ValueError(f"{text!r} has the option {option!r} twice; leave one out")
        belongs[option] = _value(value) if equals else True
    for conversion in conversions:
        if "experts" not in conversion and "skip" not in conversion:
            others = ", ".join(conversion_options()[1:])
            raise ValueError(
                f"{text!r} has convert={'+'.join(conversion['layer'])} without experts=, the number of experts to make "
                f"of the layer; use convert=LAYER:experts=8 (after it: {others})"
            )
    return name, options, conversions


def format_model_string(name: str, options: Mapping[str, Any], conversions: Sequence[Mapping[str, Any]] = ()) -> str:
    """Returns the model string of a network; the inverse of `parse_model_string`, without options that are None.

    >>> format_model_string("timm/resnet18", {"pretrained": True}, [{"layer": ["layer4.*.conv2"], "experts": 8}])
    'timm/resnet18:pretrained:convert=layer4.*.conv2:experts=8'
    """
    parts = [name, *(_format_option(*each) for each in options.items() if each[1] is not None)]
    for conversion in conversions:
        first = "skip" if "skip" in conversion else "layer"
        parts.append(f"{'convert' if first == 'layer' else first}={'+'.join(conversion[first])}")
        others = {option: value for option, value in conversion.items() if option != first and value is not None}
        parts += [_format_option(*each) for each in others.items()]
    return ":".join(parts)


def _format_option(option: str, value: Any) -> str:
    if value is True:
        return option
    if isinstance(value, list | tuple):
        return f"{option}={'+'.join(map(str, cast('Sequence[Any]', value)))}"
    return f"{option}={json.dumps(value) if isinstance(value, bool | int | float) else value}"


def insert_router(text: str, router: str, *, in_network: bool) -> str:
    """Returns the model string with ``router`` in every conversion without a router, and in the network if it has one.

    Args:
        text: the model string.
        router: the name of the router.
        in_network: whether the network itself takes a router.

    >>> insert_router("timm/resnet18:convert=layer4.1.conv2:experts=8", "soft", in_network=False)
    'timm/resnet18:convert=layer4.1.conv2:router=soft:experts=8'
    >>> insert_router("wrn10_2_pmoe:experts=8", "soft", in_network=True)
    'wrn10_2_pmoe:router=soft:experts=8'
    >>> insert_router("wrn10_2", "soft", in_network=False)
    'wrn10_2'
    """
    network, *conversions = text.split(":convert=")

    def with_router(part: str) -> str:
        first, colon, rest = part.partition(":")
        return part if ":router=" in part else f"{first}:router={router}{colon}{rest}"

    return ":convert=".join([with_router(network) if in_network else network, *map(with_router, conversions)])


def _options_of(conversion: dict[str, Any]) -> tuple[str, ...]:
    if "skip" not in conversion:
        return conversion_options()
    from moesaic.models.skip import skip_options

    return skip_options()


def _layers(text: str, option: str, value: str) -> list[str]:
    layers = [layer for layer in value.split("+") if layer]
    if not layers:
        what = "LAYER" if option == "convert" else "BLOCK"
        raise ValueError(
            f"{text!r} has {option} without a {what.lower()}; use {option}={what}, or {option}={what}+{what} for "
            "several"
        )
    return layers


def _value(text: str) -> float | bool | str | list[int]:
    """A number, a boolean or a list of whole numbers, else the text itself."""
    numbers = text.split("+")
    if len(numbers) > 1 and all(number.isdecimal() for number in numbers):
        return [int(number) for number in numbers]
    try:
        value: Any = json.loads(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, bool | int | float) else text
