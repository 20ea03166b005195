"""timm's networks in `create_model`, and our networks in timm's registry.

``import moesaic`` never imports timm, which takes seconds. `register_with_timm` adds our names to timm's registry, so
that ``timm.create_model("wrn10_10_pmoe")`` and timm's training script find them.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from traceback import walk_tb
from typing import Any

from torch import nn

from moesaic.argument_checks import first_line
from moesaic.layers.heads import HEAD_OPTIONS, Pooling, create_head
from moesaic.models.headed_network import HeadedNetwork
from moesaic.models.layer_groups import classifier_names
from moesaic.models.pretrained import PretrainedConfig, reset_classifier
from moesaic.models.registry import create_model, list_models, model_options

__all__ = ["register_with_timm", "timm_config", "timm_model"]

_WEIGHT_OPTIONS = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
_DROP_OPTIONS = ("drop_rate", "drop_path_rate")
"""Options that timm's training script always passes; our networks have neither and accept only 0."""


def timm_model(
    name: str,
    num_classes: int,
    *,
    in_channels: int = 3,
    image_size: int | None = None,
    head: Pooling | None = None,
    **options: Any,
) -> nn.Module:
    """Creates a network of timm; `create_model` calls it for ``"timm/<name>"``.

    ``image_size`` is passed to networks with a fixed input size (vision transformers), and is the input size that
    `convert` reads; ``head`` replaces pooling and classifier by a head of ours, whose ``experts``,
    ``patches_per_expert`` and ``gate`` follow; ``pretrained=True`` and all other options are timm's.
    """
    timm, config = _known(name)
    if head is not None:
        own = {option: options.pop(option) for option in HEAD_OPTIONS if option in options}
        backbone: Any = timm_model(name, 0, in_channels=in_channels, image_size=image_size, **options)
        return HeadedNetwork(backbone, create_head(head, backbone.num_features, num_classes, **own))
    if image_size is not None and getattr(config, "fixed_input_size", False):
        options["img_size"] = image_size
    try:
        model: Any = timm.create_model(name, num_classes=num_classes, in_chans=in_channels, **options)
    except TypeError as error:
        unknown = next((option for option in options if f"'{option}'" in str(error)), None)
        if unknown is None:
            raise
        raise TypeError(
            f"create_model: timm's {name} has no option {unknown!r}, got {unknown}={options[unknown]!r}; leave it out "
            "(it takes pretrained, weights, in_channels, image_size and timm's own; experts are an option of "
            "head='routed' and of convert, on the command line convert=LAYER:experts=8)"
        ) from error
    except Exception as error:  # the hub fails in ways of its own
        if not options.get("pretrained"):
            raise
        why = first_line(error)
        raise OSError(
            f"create_model: the pretrained weights of timm's {name} cannot be downloaded ({why}); give a file that you "
            "have with weights=FILE (--weights FILE)"
        ) from error
    if options.get("pretrained") and num_classes != getattr(config, "num_classes", num_classes):
        reset_classifier(model)
    if image_size is not None and isinstance(getattr(model, "pretrained_cfg", None), dict):
        model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (in_channels, image_size, image_size)}
    return model


def timm_config(name: str) -> PretrainedConfig:
    """Returns the image size and normalisation of timm's pretrained weights, as its ``pretrained_cfg`` has them."""
    _, config = _known(name)
    size, mean, std = (getattr(config, field, None) for field in ("input_size", "mean", "std"))
    return PretrainedConfig(size[-1] if size else None, tuple(mean) if mean else None, tuple(std) if std else None)


def register_with_timm() -> tuple[str, ...]:
    """Registers the networks of `list_models` with timm under the same names, and returns the names.

    ``import moesaic`` does it if timm is already imported. Names that timm already uses remain timm's. The networks
    take timm's ``num_classes``, ``in_chans``, ``img_size``, ``global_pool``, ``features_only`` and ``out_indices``
    besides our options; they have no pretrained weights.

    >>> import timm, moesaic  # doctest: +SKIP
    >>> names = moesaic.register_with_timm()  # doctest: +SKIP
    >>> model = timm.create_model("wrn10_10_pmoe", num_classes=10, img_size=32)  # doctest: +SKIP
    """
    timm = _timm("register_with_timm")
    public = list(__all__)
    for name in list_models():
        if not timm.is_model(name):
            # timm expects an entry point to be a member of its module
            globals()[name] = _entry_point(name)
            timm.models.register_model(globals()[name])
    __all__[:] = public  # timm adds every entry point
    return tuple(name for name in list_models() if getattr(timm.model_entrypoint(name), "__module__", "") == __name__)


def _entry_point(name: str) -> Callable[..., nn.Module]:
    def entry_point(
        pretrained: bool = False,
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int = 32,
        global_pool: str | None = None,
        **options: Any,
    ) -> nn.Module:
        if pretrained:
            raise ValueError(f"timm: {name} of moesaic has no pretrained weights; use pretrained=False")
        options = {
            option: value
            for option, value in options.items()
            if option not in _WEIGHT_OPTIONS and (value or option not in _DROP_OPTIONS)
        }
        if in_chans != 3:
            options["in_channels"] = in_chans
        if "image_size" in model_options(name):  # other networks take images of any size
            options["image_size"] = img_size
        model: Any = create_model(name, num_classes=num_classes, **options)
        if global_pool is not None:
            model.reset_classifier(num_classes, global_pool)
        convs = (each for each, module in model.named_modules() if isinstance(module, nn.Conv2d))
        # timm's scripts read the input size from it
        model.pretrained_cfg = model.default_cfg = {
            "architecture": name,
            "num_classes": num_classes,
            "input_size": (in_chans, img_size, img_size),
            "crop_pct": 1.0,
            "first_conv": next(convs),
            "classifier": classifier_names(model),
        }
        return model

    entry_point.__name__ = entry_point.__qualname__ = name
    return entry_point


def _known(name: str) -> tuple[Any, Any]:
    """Returns timm and its configuration of a network; refuses unknown names."""
    timm = _timm("create_model")
    if not timm.is_model(name):
        known: list[str] = timm.list_models()
        near = get_close_matches(name, known, n=3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(f"create_model: timm {timm.__version__} has no model {name!r}{hint}")
    return timm, timm.get_pretrained_cfg(name)


def _timm(owner: str) -> Any:
    try:
        return import_module("timm")
    except ModuleNotFoundError as error:
        if error.name == "timm":
            raise ModuleNotFoundError(
                f"{owner}: timm is not installed; pip install 'moesaic[timm]'", name="timm"
            ) from error
        if (error.name or "").partition(".")[0] != "torchvision":
            raise
        raise ModuleNotFoundError(
            f"{owner}: timm needs torchvision, which is not installed; pip install torchvision", name="torchvision"
        ) from error
    except (RuntimeError, ImportError, OSError, AttributeError) as error:
        if not _is_of_torchvision(error):
            raise
        torchvision, torch = (_version_of(package) for package in ("torchvision", "torch"))
        why = first_line(error)
        raise ImportError(
            f"{owner}: timm imports torchvision {torchvision}, which does not match torch {torch} ({why}); reinstall "
            "both from one index: pip install --force-reinstall torch torchvision",
            name="torchvision",
        ) from error


def _is_of_torchvision(error: BaseException) -> bool:
    """Whether an error names torchvision, or was raised while torchvision was imported.

    Its compiled operators are made for one version of torch; with another one they are missing
    (``operator torchvision::nms does not exist``), or their library does not load.
    """
    frames = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
    return "torchvision" in str(error) or any(name.partition(".")[0] == "torchvision" for name in frames)


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(unknown version)"
