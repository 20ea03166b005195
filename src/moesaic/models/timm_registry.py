"""timm's networks here, and ours in timm's registry, where timm is installed.

``import moesaic`` never imports timm, which takes seconds. `register_with_timm` puts our names into its
registry, so that ``timm.create_model("wrn10_10_pmoe")`` and timm's own training script find them.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from torch import nn

from moesaic.models.registry import create_model, list_models, model_options

__all__ = ["register_with_timm", "timm_model"]

_OF_WEIGHTS = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
_MAY_BE_OFF = ("drop_rate", "drop_path_rate")
"""What timm's training script always says; our networks have neither, so that 0 is all they can take."""


def timm_model(
    name: str, num_classes: int, *, in_channels: int = 3, image_size: int | None = None, **options: Any
) -> nn.Module:
    """The network that timm has of that name, as `create_model` gives it for ``"timm/<name>"``.

    ``image_size`` is what the network is built for where it must know (vision transformers), and what
    `convert` takes its trial images to be; ``pretrained=True`` and all other options are timm's.
    """
    timm = _timm("create_model")
    if not timm.is_model(name):
        known: list[str] = timm.list_models()
        near = get_close_matches(name, known, n=3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(f"create_model: timm {timm.__version__} has no model {name!r}{hint}")
    config: Any = timm.get_pretrained_cfg(name)
    if image_size is not None and getattr(config, "fixed_input_size", False):
        options["img_size"] = image_size
    try:
        model: Any = timm.create_model(name, num_classes=num_classes, in_chans=in_channels, **options)
    except TypeError as error:
        strange = next((option for option in options if f"'{option}'" in str(error)), None)
        if strange is None:
            raise
        raise TypeError(
            f"create_model: timm's {name} has no option {strange!r}, got {strange}={options[strange]!r}; leave it out "
            "(to make a mixture of one of its convolutions, use convert)"
        ) from error
    if image_size is not None and isinstance(getattr(model, "pretrained_cfg", None), dict):
        model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (in_channels, image_size, image_size)}
    return model


def register_with_timm() -> tuple[str, ...]:
    """Make the networks of `list_models` known to timm by the same names, and return those names.

    Where moesaic is imported after timm, this has happened already. A name that timm uses itself stays
    timm's. The networks take timm's ``num_classes``, ``in_chans`` and ``img_size`` beside our options; there
    are no pretrained weights.

    >>> import timm, moesaic  # doctest: +SKIP
    >>> names = moesaic.register_with_timm()  # doctest: +SKIP
    >>> model = timm.create_model("wrn10_10_pmoe", num_classes=10, img_size=32)  # doctest: +SKIP
    """
    timm = _timm("register_with_timm")
    for name in list_models():
        if not timm.is_model(name):
            # a member of this module, as timm has it of the modules whose names it lists
            globals()[name] = _entry_point(name)
            timm.models.register_model(globals()[name])
    return tuple(name for name in list_models() if getattr(timm.model_entrypoint(name), "__module__", "") == __name__)


def _entry_point(name: str) -> Callable[..., nn.Module]:
    def entry_point(
        pretrained: bool = False, num_classes: int = 1000, in_chans: int = 3, img_size: int = 32, **options: Any
    ) -> nn.Module:
        if pretrained:
            raise ValueError(f"timm: {name} of moesaic has no pretrained weights; use pretrained=False")
        options = {
            option: value
            for option, value in options.items()
            if option not in _OF_WEIGHTS and (value or option not in _MAY_BE_OFF)
        }
        if in_chans != 3:
            options["in_channels"] = in_chans
        if "image_size" in model_options(name):  # the others take images of any size
            options["image_size"] = img_size
        model: Any = create_model(name, num_classes=num_classes, **options)
        # where timm's scripts look up which images a network takes
        model.pretrained_cfg = model.default_cfg = {
            "architecture": name,
            "num_classes": num_classes,
            "input_size": (in_chans, img_size, img_size),
            "crop_pct": 1.0,
        }
        model.num_classes = num_classes
        return model

    entry_point.__name__ = entry_point.__qualname__ = name
    return entry_point


def _timm(owner: str) -> Any:
    try:
        return import_module("timm")
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        raise ModuleNotFoundError(
            f"{owner}: timm is not installed; pip install 'moesaic[timm]'", name="timm"
        ) from error
