"""The record of what `moesaic.skip` did to a model, in plain JSON, so that it can be repeated on a new one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import nn

__all__ = ["applied_skips", "record_skips"]

_RECORD = "_moesaic_skips"


def record_skips(model: nn.Module, records: Iterable[dict[str, Any]]) -> None:
    """Adds arguments of `skip` to the record of a model; copies of the model have it too."""
    model.__dict__[_RECORD] = [*model.__dict__.get(_RECORD, ()), *records]


def applied_skips(model: nn.Module) -> tuple[dict[str, Any], ...]:
    """Returns what `skip` did to a model, as entries of ``ModelSpec.conversions``; blocks are given by their names.

    Where layers were converted as well, the entries go behind those of `applied_conversions` if the layers were
    converted first, as the names of layers in a block change with it.

    >>> import moesaic
    >>> from moesaic.models import ModelSpec
    >>> model = moesaic.create_model("vit_tiny_patch4_32", num_classes=2, depth=2)
    >>> _ = moesaic.skip(model, "blocks.1", keep=0.25)
    >>> applied_skips(model)[0]["skip"], applied_skips(model)[0]["keep"]
    ('blocks.1', 0.25)
    >>> again = ModelSpec("vit_tiny_patch4_32", {"num_classes": 2, "depth": 2}, applied_skips(model)).build()
    """
    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    return tuple(
        {**record, "skip": f"{name}.{record['skip']}".lstrip(".")}
        for name, module in modules
        for record in module.__dict__.get(_RECORD, ())
    )
