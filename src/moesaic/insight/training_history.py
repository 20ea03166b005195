"""What happens while a model trains: numbers and arrays by name, at the steps somebody looked.

Chen et al. 2022 follow three things over training: how mixed the experts' work is (Figure 3), how
far the weights of experts and router turn towards the signals in the data (Figures 4 and 5), and
how good each expert is on each cluster (Lemma 5.2). `inner_products` and `expert_accuracy` compute
the last two from plain tensors, and a `Track` keeps them, or any other numbers, of any model.
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

from moesaic.checks import check_positive
from moesaic.files import write_atomic
from moesaic.insight.metrics import Labels, dispatch_entropy, load_share
from moesaic.routing_record import Routing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Line", "Track", "expert_accuracy", "inner_products"]

_STEPS, _VALUES = "steps/", "values/"
_COLUMNS = 4
_MOST_LABELS = 12
"""Lines of one panel that still get a name each."""


def inner_products(weights: Tensor, directions: Tensor) -> Tensor:
    """(…, E, K): how far an expert has turned to a direction, the largest |⟨w, v⟩| over its neurons w.

    ``weights`` (…, E, J, D) are those of J neurons of E experts, ``directions`` (K, D) or
    (…, K, D); leading axes, such as trials, go along. A router has one row an expert: give it
    as ``theta[..., None, :]``, or take ``theta @ directions.mT`` where the sign matters.

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
    """(…, E, K): the share of each cluster's samples that each expert would get right, were they all its own.

    ``guesses`` (…, E, B) are the classes that each expert gives to all samples, ``labels`` (…, B)
    the right ones, and ``clusters`` (…, B) go from 0 to K − 1; K is one more than the highest
    there is, or ``count``. A cluster without samples gives NaN.

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


class Line(NamedTuple):
    """One quantity over training."""

    steps: NDArray[np.int64]
    """(S,), in the order they were looked at."""
    values: NDArray[Any]
    """(S, …): a number or an array for every step."""


class Track:
    """Keeps named numbers and arrays of a training, at the steps you choose.

    Feed it with whatever you have: `add` takes numbers, arrays and tensors, `add_routing` takes what
    ``record_routing`` collected. It knows nothing of the model or the optimizer. Each name has its
    own steps and one shape. Tensors are copied to the CPU, which waits for the device: look at every
    tenth or hundredth step.

    >>> import torch, moesaic
    >>> layer = moesaic.PatchMoE(3, 4, experts=2, patches_per_expert=1, patch_size=4)
    >>> images, kinds = torch.randn(6, 3, 8, 8), torch.arange(6) % 2
    >>> track = Track()
    >>> for step in range(0, 30, 10):
    ...     with moesaic.record_routing(layer) as routing:               # and train in between
    ...         _ = layer(images)
    ...     track.add_routing(step, routing, kinds)
    ...     track.add(step, norm=layer.router.weight.norm())
    >>> list(track), track["norm"].steps.tolist(), track["load"].values.shape
    (['load', 'entropy', 'norm'], [0, 10, 20], (3, 2))
    """

    def __init__(self) -> None:
        self._steps: dict[str, list[int]] = {}
        self._values: dict[str, list[NDArray[Any]]] = {}

    def add(
        self, step: int, values: Mapping[str, ArrayLike | Tensor] | None = None, /, **more: ArrayLike | Tensor
    ) -> None:
        """Keep these values for a step; names that are no Python words go into the mapping."""
        given = {**(values or {}), **more}
        # all are looked at before any is kept: a step is never there in part
        arrays = {name: self._checked(name, step, value) for name, value in given.items()}
        for name, array in arrays.items():
            self._steps.setdefault(name, []).append(int(step))
            self._values.setdefault(name, []).append(array)

    def add_routing(self, step: int, routing: Routing | Mapping[str, Routing], clusters: Labels | None = None) -> None:
        """Keep each expert's share of the load, and with ``clusters`` the dispatch entropy (eq. 6.1).

        Names are "load" and "entropy", after the layer's name and a slash where it has one.
        """
        named = {"": routing} if isinstance(routing, Routing) else routing
        found: dict[str, ArrayLike | Tensor] = {}
        for layer, each in named.items():
            place = f"{layer}/" if layer else ""
            found[f"{place}load"] = load_share(each)
            if clusters is not None:
                found[f"{place}entropy"] = dispatch_entropy(each, clusters)
        self.add(step, found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, name: str) -> Line:
        if name not in self._steps:
            raise KeyError(
                f"Track: nothing was kept under {name!r}; there is {', '.join(map(repr, self)) or 'nothing'}"
            )
        return Line(np.array(self._steps[name], dtype=np.int64), np.stack(self._values[name]))

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything as plain arrays: "steps/NAME" (S,) and "values/NAME" (S, …)."""
        arrays: dict[str, NDArray[Any]] = {}
        for name in self:
            arrays[f"{_STEPS}{name}"], arrays[f"{_VALUES}{name}"] = self[name]
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Track:
        """The track that `to_arrays` gave.

        >>> track = Track()
        >>> track.add(0, entropy=1.2)
        >>> Track.from_arrays(track.to_arrays())["entropy"].values.tolist()
        [1.2]
        """
        track = cls()
        names = [key.removeprefix(_STEPS) for key in arrays if key.startswith(_STEPS)]
        if sorted(arrays) != sorted([*(_STEPS + name for name in names), *(_VALUES + name for name in names)]):
            raise ValueError(
                f"Track: has the arrays {sorted(arrays)}; a track has '{_STEPS}NAME' and '{_VALUES}NAME' for each name"
            )
        for name in names:
            steps, values = arrays[_STEPS + name], arrays[_VALUES + name]
            if steps.ndim != 1 or not np.issubdtype(steps.dtype, np.integer) or len(steps) != len(values):
                raise ValueError(
                    f"Track: {name!r} has steps {steps.shape} {steps.dtype} and values {values.shape}; there must be "
                    "a whole number for each value"
                )
            for step, value in zip(steps, values, strict=True):
                track.add(int(step), {name: value})
        return track

    def save(self, path: str | Path) -> None:
        """Write an npz file of plain arrays, whole or not at all."""
        content = io.BytesIO()
        np.savez_compressed(content, allow_pickle=False, **self.to_arrays())
        write_atomic(Path(path), content.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> Track:
        """Read what `save` wrote."""
        content = Path(path).read_bytes()
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                return cls.from_arrays(dict(arrays))
        except (ValueError, EOFError, AttributeError, TypeError, OSError, zipfile.BadZipFile) as damage:
            raise ValueError(f"{path}: no track that can be read ({damage}); save it anew with Track.save") from damage

    def plot(self, names: Sequence[str] | None = None) -> Figure:
        """A panel for each name (all of them, or those given), with a line for each number of its array.

        An array of two axes or more, such as `inner_products` (E, K), gets a panel for each of its
        first places: one an expert, with a line a direction.

        >>> track = Track()
        >>> for step in range(3):
        ...     track.add(step, entropy=1.0 / (1 + step), alignment=[[step, 0.0], [0.0, step]])
        >>> [axes.get_title() for axes in track.plot().axes]
        ['entropy', 'alignment 0', 'alignment 1']
        """
        from matplotlib.figure import Figure

        panels = [panel for name in (self if names is None else names) for panel in _panels(name, self[name])]
        if not panels:
            raise ValueError("Track: there is nothing to draw yet; `add` something, and ask for at least one name")
        columns = min(_COLUMNS, len(panels))
        rows = -(-len(panels) // columns)
        figure = Figure(figsize=(3 * columns, 2.4 * rows), facecolor="white", layout="constrained")
        for place, (title, steps, values) in enumerate(panels, 1):
            axes = figure.add_subplot(rows, columns, place)
            lines = axes.plot(steps, values, linewidth=1.2)
            axes.set_title(title, fontsize=9, parse_math=False)
            axes.set_xlabel("step", fontsize=8)
            axes.tick_params(labelsize=7)
            if 1 < len(lines) <= _MOST_LABELS:
                axes.legend(lines, [str(i) for i in range(len(lines))], fontsize=6, ncols=2, frameon=False)
        return figure

    def _checked(self, name: str, step: int, value: ArrayLike | Tensor) -> NDArray[Any]:
        plain = value.detach().cpu() if isinstance(value, Tensor) else value
        if isinstance(plain, Tensor):
            plain = plain.float() if plain.dtype == torch.bfloat16 else plain
            plain = plain.numpy()
        array = np.array(plain)  # a copy: a tensor of weights goes on changing
        if array.dtype.kind not in "biuf":
            raise TypeError(f"Track: {name}={value!r} is no number and no array of numbers")
        if not self._steps.get(name):
            return array
        last, shape = self._steps[name][-1], self._values[name][-1].shape
        if step <= last:
            raise ValueError(f"Track: {name!r} at step {step}, but it is known up to step {last}; steps go forward")
        if array.shape != shape:
            raise ValueError(f"Track: {name!r} has shape {array.shape} at step {step}, and had {shape} before")
        return array


def _panels(name: str, line: Line) -> Iterator[tuple[str, NDArray[np.int64], NDArray[Any]]]:
    """Title, steps and (S, lines) of every panel that a quantity takes."""
    steps, values = line
    if values.ndim <= 2:
        yield name, steps, values
        return
    flat = values.reshape(*values.shape[:2], -1)
    for i in range(flat.shape[1]):
        yield f"{name} {i}", steps, flat[:, i]
