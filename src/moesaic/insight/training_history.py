"""Metrics over training: named numbers and arrays at chosen steps.

Chen et al. 2022 follow three metrics over training: the dispatch entropy (Figure 3), the inner products
of expert and router weights with the signals in the data (Figures 4 and 5), and the accuracy of each
expert on each cluster (Lemma 5.2). `inner_products` and `expert_accuracy` compute the last two from
tensors; a `TrainingHistory` stores them, or any other metric of any model.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from moesaic.argument_checks import check_positive, printable
from moesaic.files import write_atomic
from moesaic.insight.metrics import Labels, dispatch_entropy, load_share
from moesaic.routing_record import Routing
from moesaic.validated_json import MAX_FILE_BYTES, InvalidFile, read_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["MetricSeries", "TrainingHistory", "expert_accuracy", "inner_products"]

_STEPS, _VALUES = "steps/", "values/"
_COLUMNS = 4
_MAX_LABELS = 12
"""Panels with more lines have no legend."""


def inner_products(weights: Tensor, directions: Tensor) -> Tensor:
    """(…, E, K): alignment of experts with directions v: the largest |⟨w, v⟩| over the neurons w of an expert.

    ``weights`` (…, E, J, D) are those of J neurons of E experts, ``directions`` (K, D) or (…, K, D); leading axes,
    such as trials, are batch axes. A router has one row per expert: pass it as ``theta[..., None, :]``, or use
    ``theta @ directions.mT`` where the sign matters.

    >>> import torch
    >>> weights = torch.tensor([[[3.0, 0.0], [0.0, 1.0]], [[0.0, -2.0], [0.0, 0.5]]])    # two experts of two neurons
    >>> inner_products(weights, torch.eye(2)).tolist()
    [[3.0, 1.0], [0.0, 2.0]]
    """
    if weights.ndim < 3 or directions.ndim < 2 or weights.shape[-1] != directions.shape[-1]:
        raise ValueError(
            f"inner_products: weights have shape {tuple(weights.shape)} and directions {tuple(directions.shape)}; "
            "give (…, E, J, D), for one neuron an expert weights[..., None, :], and (K, D) of the same D"
        )
    check_positive("inner_products", neurons=weights.shape[-2])
    with torch.no_grad(), torch.autocast(weights.device.type, enabled=False):
        products = weights @ directions.to(weights.dtype).mT.unsqueeze(-3)
        return products.abs().amax(-2)


def expert_accuracy(guesses: Tensor, labels: Tensor, clusters: Tensor, *, count: int | None = None) -> Tensor:
    """(…, E, K): accuracy of each expert on all samples of each cluster, whatever the router does.

    ``guesses`` (…, E, B) are the predictions of each expert for all samples, ``labels`` (…, B) the true classes, and
    ``clusters`` (…, B) go from 0 to K − 1; K is the highest cluster plus one, or ``count``. A cluster without
    samples gives NaN.

    >>> import torch
    >>> guesses = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 1]])             # two experts, four samples
    >>> expert_accuracy(guesses, torch.tensor([1, 1, 0, 1]), torch.tensor([0, 0, 1, 1])).tolist()
    [[1.0, 0.5], [0.5, 1.0]]
    """
    B = labels.shape[-1]
    if guesses.ndim < 2 or guesses.shape[-1] != B or clusters.shape[-1] != B:
        raise ValueError(
            f"expert_accuracy: guesses {tuple(guesses.shape)}, labels {tuple(labels.shape)}, clusters "
            f"{tuple(clusters.shape)}; give (…, E, B), (…, B) and (…, B) of the same B"
        )
    if clusters.is_floating_point() or clusters.dtype == torch.bool:
        raise TypeError(f"expert_accuracy: clusters are {clusters.dtype}; they are whole numbers: use clusters.long()")
    lowest, highest = (int(clusters.min()), int(clusters.max())) if clusters.numel() else (0, -1)
    K = highest + 1 if count is None else count
    if lowest < 0 or highest >= K:
        raise ValueError(f"expert_accuracy: clusters go from {lowest} to {highest}; they must be from 0 to {K - 1}")
    member = torch.nn.functional.one_hot(clusters.long(), K).float()
    right = (guesses == labels.unsqueeze(-2)).float()
    return right @ member / member.sum(-2, keepdim=True)


class MetricSeries(NamedTuple):
    """One metric over training."""

    steps: NDArray[np.int64]
    """(S,), ascending."""
    values: NDArray[Any]
    """(S, …): a number or an array for each step."""


class TrainingHistory:
    """Stores named numbers and arrays of a training run at chosen steps.

    `add` takes numbers, arrays and tensors, `add_routing` takes the result of ``record_routing``. Each name has its
    own steps and one shape. Tensors are copied to the CPU, which synchronises with the device: record every tenth or
    hundredth step.

    >>> import torch, moesaic
    >>> layer = moesaic.PatchMoE(3, 4, experts=2, patches_per_expert=1, patch_size=4)
    >>> images, clusters = torch.randn(6, 3, 8, 8), torch.arange(6) % 2
    >>> history = TrainingHistory()
    >>> for step in range(0, 30, 10):
    ...     with moesaic.record_routing(layer) as routing:               # and train in between
    ...         _ = layer(images)
    ...     history.add_routing(step, routing, clusters)
    ...     history.add(step, norm=layer.router.weight.norm())
    >>> list(history), history["norm"].steps.tolist(), history["load"].values.shape
    (['load', 'entropy', 'norm'], [0, 10, 20], (3, 2))
    """

    def __init__(self) -> None:
        self._steps: dict[str, list[int]] = {}
        self._values: dict[str, list[NDArray[Any]]] = {}

    def add(
        self, step: int, values: Mapping[str, ArrayLike | Tensor] | None = None, /, **more: ArrayLike | Tensor
    ) -> None:
        """Adds values of a step; names that are not Python identifiers go into the mapping."""
        # all values are checked before any is stored, so that no step is incomplete
        arrays = {name: self._checked(name, step, value) for name, value in {**(values or {}), **more}.items()}
        for name, array in arrays.items():
            self._steps.setdefault(name, []).append(int(step))
            self._values.setdefault(name, []).append(array)

    def add_routing(self, step: int, routing: Routing | Mapping[str, Routing], clusters: Labels | None = None) -> None:
        """Adds the load share of each expert, and with ``clusters`` the dispatch entropy (eq. 6.1).

        The names are "load" and "entropy", prefixed by the name of the layer and a slash if there is one.
        """
        named = {"": routing} if isinstance(routing, Routing) else routing
        found: dict[str, ArrayLike | Tensor] = {}
        for layer, each in named.items():
            prefix = f"{layer}/" if layer else ""
            found[f"{prefix}load"] = load_share(each)
            if clusters is not None:
                found[f"{prefix}entropy"] = dispatch_entropy(each, clusters)
        self.add(step, found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, name: str) -> MetricSeries:
        if name not in self._steps:
            raise KeyError(
                f"TrainingHistory: there is no metric {name!r}; there is {', '.join(map(repr, self)) or 'nothing'}"
            )
        return MetricSeries(np.array(self._steps[name], dtype=np.int64), np.stack(self._values[name]))

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Returns all metrics as arrays: "steps/NAME" (S,) and "values/NAME" (S, …)."""
        arrays: dict[str, NDArray[Any]] = {}
        for name in self:
            arrays[f"{_STEPS}{name}"], arrays[f"{_VALUES}{name}"] = self[name]
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> TrainingHistory:
        """Restores the history from the result of `to_arrays`.

        >>> history = TrainingHistory()
        >>> history.add(0, entropy=1.2)
        >>> TrainingHistory.from_arrays(history.to_arrays())["entropy"].values.tolist()
        [1.2]
        """
        history = cls()
        names = [key.removeprefix(_STEPS) for key in arrays if key.startswith(_STEPS)]
        if sorted(arrays) != sorted([*(_STEPS + name for name in names), *(_VALUES + name for name in names)]):
            raise ValueError(
                f"TrainingHistory: has the arrays {sorted(arrays)}; expected '{_STEPS}NAME' and "
                f"'{_VALUES}NAME' for each name"
            )
        for name in names:
            steps, values = arrays[_STEPS + name], arrays[_VALUES + name]
            if steps.ndim != 1 or not np.issubdtype(steps.dtype, np.integer) or len(steps) != len(values):
                raise ValueError(
                    f"TrainingHistory: {name!r} has steps {steps.shape} {steps.dtype} and values {values.shape}; "
                    "expected an integer step for each value"
                )
            for step, value in zip(steps, values, strict=True):
                history.add(int(step), {name: value})
        return history

    def save(self, path: str | Path) -> None:
        """Writes an npz file atomically."""
        content = io.BytesIO()
        np.savez_compressed(content, allow_pickle=False, **self.to_arrays())
        write_atomic(Path(path), content.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> TrainingHistory:
        """Reads a file written by `save`."""
        content = read_bytes(path)
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                unpacked = sum(member.file_size for member in archive.infolist())
            if unpacked > MAX_FILE_BYTES:
                raise InvalidFile(f"it unpacks to {unpacked} bytes, at most {MAX_FILE_BYTES} are read")
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                return cls.from_arrays(dict(arrays))
        except Exception as damage:  # zipfile, zlib and numpy's parser of headers have exceptions of their own
            raise InvalidFile(
                f"{path}: not a readable training history ({printable(str(damage))}); save it again with "
                "TrainingHistory.save"
            ) from damage

    def plot(self, names: Sequence[str] | None = None) -> Figure:
        """Draws a panel for each name, with a line for each element of its array.

        An array of two axes or more, such as `inner_products` (E, K), gets a panel for each index of its first axis:
        one per expert, with one line per direction.

        >>> history = TrainingHistory()
        >>> for step in range(3):
        ...     history.add(step, entropy=1.0 / (1 + step), alignment=[[step, 0.0], [0.0, step]])
        >>> [axes.get_title() for axes in history.plot().axes]
        ['entropy', 'alignment 0', 'alignment 1']
        """
        from matplotlib.figure import Figure

        panels = [panel for name in (self if names is None else names) for panel in _panels(name, self[name])]
        if not panels:
            raise ValueError("TrainingHistory: there is nothing to plot; add values, and give at least one name")
        columns = min(_COLUMNS, len(panels))
        rows = -(-len(panels) // columns)
        figure = Figure(figsize=(3 * columns, 2.4 * rows), facecolor="white", layout="constrained")
        for place, (title, steps, values) in enumerate(panels, 1):
            axes = figure.add_subplot(rows, columns, place)
            lines = axes.plot(steps, values, linewidth=1.2)
            axes.set_title(title, fontsize=9, parse_math=False)
            axes.set_xlabel("step", fontsize=8)
            axes.tick_params(labelsize=7)
            if 1 < len(lines) <= _MAX_LABELS:
                axes.legend(lines, [str(i) for i in range(len(lines))], fontsize=6, ncols=2, frameon=False)
        return figure

    def _checked(self, name: str, step: int, value: ArrayLike | Tensor) -> NDArray[Any]:
        if isinstance(value, Tensor):
            value = value.detach().to("cpu", torch.float32 if value.dtype == torch.bfloat16 else None).numpy()
        array = np.array(value)  # a copy, as weights change in place
        if array.dtype.kind not in "biuf":
            raise TypeError(f"TrainingHistory: {name}={value!r} is not a number or an array of numbers")
        if not self._steps.get(name):
            return array
        last, shape = self._steps[name][-1], self._values[name][-1].shape
        if step <= last:
            raise ValueError(
                f"TrainingHistory: {name!r} at step {step}, but the last step is {last}; steps must increase"
            )
        if array.shape != shape:
            raise ValueError(
                f"TrainingHistory: {name!r} has shape {array.shape} at step {step}, and had {shape} before"
            )
        return array


def _panels(name: str, line: MetricSeries) -> Iterator[tuple[str, NDArray[np.int64], NDArray[Any]]]:
    """Title, steps and (S, lines) of each panel of a metric."""
    steps, values = line
    if values.ndim <= 2:
        yield name, steps, values
        return
    flat = values.reshape(*values.shape[:2], -1)
    for i in range(flat.shape[1]):
        yield f"{name} {i}", steps, flat[:, i]
