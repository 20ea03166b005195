"""What channel masks do to the expressive power of a network (Wang et al. 2019, DeepMoE, supplement A.1).

An input is N = 2^L patches; f_1 … f_M tell the features of a patch. By eq. (2) a network is a tensor A of N
axes of length M,

    h(x_1 … x_N) = Σ_{d_1…d_N} A_{d_1…d_N} · Π_i f_{d_i}(x_i),

and its expressive power is the rank of A. Networks here are those of the theorem the supplement builds on
(Cohen et al. 2016): layer 0 maps the features of every patch to r_0 channels, products pool neighbours in
twos, and so on for L layers of r_0 … r_{L−1} channels, until one patch and one number are left. Written as
tensors, with j the place in a layer and γ the channel (`ChannelNetwork`):

    φ^{1,j,γ} = Σ_α w^{1,j,γ}_α · g_α⁰ · w^{0,2j−1,α} ⊗ w^{0,2j,α},
    φ^{l,j,γ} = Σ_α w^{l,j,γ}_α · g_α^{l−1} · φ^{l−1,2j−1,α} ⊗ φ^{l−1,2j,α},        A = φ^{L,1,1}.

g^l are the gates of layer l: all 1 (dense), one mask for all inputs (static), or a mask of the input's own
(DeepMoE). Then A is a tensor for each input, of which only the entries that the input meets count: put the
network's output on input (d_1 … d_N), patch i of which shows feature d_i alone, at A_{d_1…d_N}.

**Dense.** With odd axes as rows and even ones as columns, A is a matrix of rank

    min(r_0, M)^(N/2)        (`tensor_rank`)

for almost all weights. Not less, by Cohen et al.; and not more, because the rows lie in the product of N/2
spaces that the w^{0,j,1} … w^{0,j,r_0} span. For r_0 ≤ M that is the rank of the tensor as well: it is a sum
of r_0^(N/2) products of vectors. **Here the wording is too strong**: print says n^(2^L) for a width of n
"between layers" (`printed_rank`). But N/2 = 2^(L−1), only the *first* layer's width counts (all others may
be 1), and M is a limit.

**Static masks** with n_l open channels leave a narrower network (`narrow`), so min(n_0, M)^(N/2).

**Masks of the input's own** break the products up, and the rank can be anything up to M^(N/2). For masks
that are drawn for each input alone it is that, nearly always, so at least min(m, M)^(N/2): if the features
of all inputs are made alike, the entries are numbers that only the masks decide, and a random matrix is
hardly ever singular; for almost all weights the rank is no less. Two conditions the supplement passes over:

- the masks must look at the whole input. If they look at the odd patches alone, a row of the matrix has one
  mask, and is a sum of products of one open filter for each even patch. There are as many such products as
  words of N/2 letters from m with at most n different ones (`one_sided_rank`): for m ≤ M and n < min(m, N/2)
  the rank stays below m^(N/2), though inputs with other odd patches share their masks as seldom as before
- 1 − C(m, n)^(−L) is the probability that a given *pair* to which the channels are blind (`blind_pair`) is
  told apart. It is not the probability of a rank: with m = M = 2, n = 1, L = 1 it is 1/2, and the rank is
  restored for 14 of the 16 ways to mask four inputs. `moesaic.papers.wang2019.theory.mask_collisions` has the pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from moesaic.papers.engine.theory_conditions import check_counts, require
from moesaic.papers.wang2019.theory.mask_collisions import check_open, subset_masks

__all__ = [
    "ChannelNetwork",
    "ChannelRanks",
    "MatrixRank",
    "blind_pair",
    "confused",
    "matricise",
    "measure_channel_ranks",
    "narrow",
    "numerical_rank",
    "one_sided_rank",
    "printed_rank",
    "random_channel_network",
    "tensor_rank",
]

_MOST_ENTRIES = 1 << 20


@dataclass(frozen=True, eq=False)
class ChannelNetwork:
    """The weights of a network that eq. (2) describes; made by `random_channel_network`."""

    weights: tuple[Tensor, ...]
    """(N, r_0, M), then (N/2^l, r_l, r_{l−1}) for l from 1, and (1, 1, r_{L−1}) last; float64."""

    @property
    def widths(self) -> tuple[int, ...]:
        """The channels r_0 … r_{L−1}."""
        return tuple(weight.shape[1] for weight in self.weights[:-1])

    @property
    def patches(self) -> int:
        """N = 2^L."""
        return self.weights[0].shape[0]

    @property
    def features(self) -> int:
        """M."""
        return self.weights[0].shape[2]

    def outputs(self, inputs: Tensor, gates: Sequence[Tensor] | None = None) -> Tensor:
        """The outputs h (…) of eq. (2) for features f_d(x_i) of inputs (…, N, M), and gates (…, r_l) for each layer.

        >>> network = random_channel_network((3, 2), features=4, seed=0)
        >>> network.outputs(torch.ones(5, 4, 4)).shape
        torch.Size([5])
        """
        if inputs.shape[-2:] != (self.patches, self.features):
            raise ValueError(
                f"ChannelNetwork: inputs are {tuple(inputs.shape)}; give (…, {self.patches}, {self.features}): "
                "the features of each patch"
            )
        x = torch.einsum("...im,irm->...ir", inputs.double(), self.weights[0])
        for gate, weight in zip(self._gates(gates, inputs.shape[:-2]), self.weights[1:], strict=True):
            x = x[..., 0::2, :] * x[..., 1::2, :] * gate[..., None, :]
            x = torch.einsum("...jr,jsr->...js", x, weight)
        return x[..., 0, 0]

    def tensor(self, gates: Sequence[Tensor] | None = None) -> Tensor:
        """A (M, …, M), with gates (r_l,) for all inputs, or (M, …, M, r_l) for each.

        Axes of length 1 stand for patches that the gates do not look at.

        >>> network = random_channel_network((3, 2), features=4, seed=0)
        >>> network.tensor().shape
        torch.Size([4, 4, 4, 4])
        """
        N, M = self.patches, self.features
        require(
            "ChannelNetwork.tensor",
            M**N <= _MOST_ENTRIES,
            "M^N ≤ 2²⁰",
            f"M={M}, N={N}",
            "use fewer features or layers: the rank follows the same formula",
        )
        words = torch.stack(torch.meshgrid([torch.arange(M)] * N, indexing="ij"), dim=-1)  # (M, …, M, N)
        return self.outputs(torch.eye(M, dtype=torch.float64)[words], gates)

    def _gates(self, gates: Sequence[Tensor] | None, inputs: torch.Size) -> list[Tensor]:
        if gates is None:
            return [torch.ones(width, dtype=torch.float64) for width in self.widths]
        last = tuple(gate.shape[-1] if gate.ndim else 0 for gate in gates)
        if last != self.widths:
            raise ValueError(
                f"ChannelNetwork: gates for {last} channels, the layers have {self.widths}; "
                "give one (…, channels) for each layer"
            )
        for gate in gates:
            many = zip(reversed(gate.shape[:-1]), reversed(inputs), strict=False)
            if gate.ndim - 1 > len(inputs) or any(own not in (1, given) for own, given in many):
                raise ValueError(
                    f"ChannelNetwork: gates {tuple(gate.shape)} for inputs {tuple(inputs)}; give (channels,) for one "
                    f"mask, or {(*inputs, gate.shape[-1])} for a mask of each input's own"
                )
        return [gate.double() for gate in gates]


def random_channel_network(widths: Sequence[int], features: int, *, seed: int) -> ChannelNetwork:
    """A network with Gaussian weights, so that what holds for almost all weights holds for it.

    >>> network = random_channel_network((5, 3, 2), features=4, seed=0)
    >>> network.patches, [tuple(weight.shape) for weight in network.weights]
    (8, [(8, 5, 4), (4, 3, 5), (2, 2, 3), (1, 1, 2)])
    """
    _check_network("random_channel_network", widths, features)
    generator = torch.Generator().manual_seed(seed)
    sizes, weights = [features, *widths, 1], list[Tensor]()
    for l, (before, after) in enumerate(pairwise(sizes)):
        drawn = torch.randn(2 ** (len(widths) - l), after, before, generator=generator, dtype=torch.float64)
        weights.append(drawn / math.sqrt(before))
    return ChannelNetwork(tuple(weights))


def narrow(network: ChannelNetwork, masks: Sequence[Tensor]) -> ChannelNetwork:
    """The network of the open channels alone: what a static mask (r_l,) for each layer leaves.

    >>> network = random_channel_network((3, 2), features=4, seed=0)
    >>> narrow(network, [torch.tensor([1, 0, 1]), torch.tensor([0, 1])]).widths
    (2, 1)
    """
    shapes = tuple(tuple(mask.shape) for mask in masks)
    if shapes != tuple((width,) for width in network.widths):
        raise ValueError(f"narrow: masks are {list(shapes)}; give one (channels,) for each of {network.widths}")
    opened = [mask.bool() for mask in masks]
    check_open("narrow", network.widths, [int(mask.sum()) for mask in opened])
    # a layer has its own open channels, and reads those of the layer below
    own, read = [*opened, torch.tensor([True])], [torch.ones(network.features).bool(), *opened]
    layers = zip(network.weights, own, read, strict=True)
    return ChannelNetwork(tuple(weight[:, out][:, :, below] for weight, out, below in layers))


def matricise(tensor: Tensor) -> Tensor:
    """A (M, …, M) as a matrix (M^(N/2), M^(N/2)): odd axes, counted from 1, are rows and even ones columns.

    >>> matricise(torch.arange(16).view(2, 2, 2, 2))[0].tolist()                     # A_{1 · 1 ·}
    [0, 1, 4, 5]
    """
    N = tensor.ndim
    if not N or N % 2 or len(set(tensor.shape)) != 1:
        raise ValueError(f"matricise: a tensor {tuple(tensor.shape)}; give an even number of axes of one length")
    rows = tensor.shape[0] ** (N // 2)
    return tensor.permute(*range(0, N, 2), *range(1, N, 2)).reshape(rows, rows)


@dataclass(frozen=True)
class MatrixRank:
    """A rank in the presence of rounding, and how clear it is; made by `numerical_rank`."""

    rank: int
    kept: float
    """The smallest singular value that counts, as a share of the largest; 0 where none does."""
    dropped: float
    """The largest that does not; 0 where all count."""


def numerical_rank(matrix: Tensor, *, tolerance: float | None = None) -> MatrixRank:
    """How many singular values are above ``tolerance`` times the largest; by default size × rounding error.

    >>> numerical_rank(torch.tensor([[1.0, 2.0], [2.0, 4.0]])).rank
    1
    """
    if matrix.ndim != 2 or not matrix.numel():
        raise ValueError(f"numerical_rank: a matrix has two axes and entries, got {tuple(matrix.shape)}; use matricise")
    if not matrix.isfinite().all():
        raise ValueError("numerical_rank: the matrix holds NaN or ∞; give finite numbers")
    limit = max(matrix.shape) * torch.finfo(torch.float64).eps if tolerance is None else tolerance
    require("numerical_rank", 0 <= limit < 1, "0 ≤ tolerance < 1", f"tolerance={limit}", "it is a share of the largest")
    values = cast("Tensor", torch.linalg.svdvals(matrix.double()))
    if not values[0] > 0:
        return MatrixRank(0, 0.0, 0.0)
    shares = cast("list[float]", (values / values[0]).tolist())
    rank = sum(share > limit for share in shares)
    return MatrixRank(rank, shares[rank - 1], shares[rank] if rank < len(shares) else 0.0)


def tensor_rank(channels: Sequence[int], features: int) -> int:
    """min(r_0, M)^(N/2), N = 2^L: the rank of the matricised tensor for almost all weights.

    ``channels`` are the widths of the L layers, or with static masks the numbers of open channels. Only the
    first counts.

    >>> tensor_rank((4, 4), features=6), tensor_rank((4, 1), features=6), tensor_rank((2, 4), features=6)
    (16, 16, 4)
    """
    _check_network("tensor_rank", channels, features)
    return min(channels[0], features) ** (2 ** len(channels) // 2)


def printed_rank(channels: int, layers: int) -> int:
    """n^(2^L), as the supplement prints it for L layers of n channels each: the square of `tensor_rank` for n ≤ M.

    >>> printed_rank(4, layers=2)
    256
    """
    check_counts("printed_rank", channels=channels, layers=layers)
    return channels ** (2**layers)


def one_sided_rank(widths: Sequence[int], open_channels: Sequence[int], features: int) -> int:
    """The most that n-subset masks can reach that look at the odd patches alone.

    The words of N/2 letters from m_0 with at most n_0 different ones, and no more than M^(N/2).

    >>> one_sided_rank((4, 4), (1, 4), features=6), one_sided_rank((4, 4), (2, 2), features=6)
    (4, 16)
    """
    _check_network("one_sided_rank", widths, features)
    check_open("one_sided_rank", widths, open_channels)
    letters, length = widths[0], 2 ** len(widths) // 2
    # the words with exactly j different letters: which ones, times the ways to use them all
    words = sum(
        math.comb(letters, j) * sum((-1) ** i * math.comb(j, i) * (j - i) ** length for i in range(j))
        for j in range(1, min(open_channels[0], length) + 1)
    )
    return min(words, features**length)


@dataclass(frozen=True, eq=False)
class ChannelRanks:
    """Ranks of random networks under four kinds of gates, (T,) int64 each; made by `measure_channel_ranks`."""

    dense: Tensor
    static: Tensor
    """With one random mask for all inputs."""
    one_sided: Tensor
    """With a random mask for each choice of the odd patches."""
    dynamic: Tensor
    """With a random mask for each input."""


def measure_channel_ranks(
    widths: Sequence[int], open_channels: Sequence[int], features: int, *, trials: int = 10, seed: int = 0
) -> ChannelRanks:
    """Ranks of ``trials`` random networks, dense and under masks that are uniform n-subsets.

    >>> found = measure_channel_ranks((3, 3), (2, 2), features=4, trials=3)
    >>> found.dense.tolist(), found.static.tolist(), found.one_sided.tolist(), found.dynamic.tolist()
    ([9, 9, 9], [4, 4, 4], [9, 9, 9], [16, 16, 16])
    """
    owner = "measure_channel_ranks"
    check_counts(owner, trials=trials)
    _check_network(owner, widths, features)
    check_open(owner, widths, open_channels)
    everywhere, odd = (features,) * 2 ** len(widths), (features, 1) * (2 ** len(widths) // 2)
    drawn = torch.randint(2**62, (trials, 4), generator=torch.Generator().manual_seed(seed))
    seeds = cast("list[list[int]]", drawn.tolist())
    ranks = torch.zeros(4, trials, dtype=torch.int64)
    for t, (start, *others) in enumerate(seeds):
        network = random_channel_network(widths, features, seed=start)
        ranks[0, t] = numerical_rank(matricise(network.tensor())).rank
        for kind, (shape, own) in enumerate(zip(((), odd, everywhere), others, strict=True), start=1):
            gates = subset_masks(shape, widths, open_channels, seed=own)
            ranks[kind, t] = numerical_rank(matricise(network.tensor(gates))).rank
    return ChannelRanks(*ranks)


def blind_pair(network: ChannelNetwork, pairs: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Two lists (B, N, M) of inputs with positive features, alike to every channel of the network but not the same.

    They differ in one patch, by what none of its r_0 filters sees: for these line (4) of eq. (3) is 0, under
    any mask. It takes r_0 < M.

    >>> network = random_channel_network((3, 2), features=4, seed=0)
    >>> x, other = blind_pair(network, 10, seed=0)
    >>> (x - other).abs().amax((1, 2)).tolist() == [0.5] * 10, bool(confused(network, x, other).all())
    (True, True)
    """
    check_counts("blind_pair", pairs=pairs)
    width, features = network.weights[0].shape[1:]
    require(
        "blind_pair",
        width < features,
        "r_0 < M",
        f"r_0={width}, M={features}",
        "so many channels see every feature; use fewer channels or more features",
    )
    generator = torch.Generator().manual_seed(seed)
    x = 1 + torch.rand(pairs, network.patches, features, generator=generator, dtype=torch.float64)
    directions = cast("Tensor", torch.linalg.svd(network.weights[0][0])[2])
    unseen = directions[width:]  # orthogonal to all filters
    moves = torch.randn(pairs, len(unseen), generator=generator, dtype=torch.float64) @ unseen
    other = x.clone()
    other[:, 0] += 0.5 * moves / moves.abs().amax(1, keepdim=True)
    return x, other


def confused(
    network: ChannelNetwork,
    inputs: Tensor,
    others: Tensor,
    gates: Sequence[Tensor] | None = None,
    other_gates: Sequence[Tensor] | None = None,
    *,
    tolerance: float = 1e-10,
) -> Tensor:
    """(…) bool: where the network has the same output on an input and on another, each with its own gates.

    Without ``other_gates`` both have the same ones. ``tolerance`` is how large a share of the outputs counts
    as rounding.

    >>> network = random_channel_network((3, 2), features=4, seed=0)
    >>> x, other = blind_pair(network, 3, seed=0)
    >>> one, two = [torch.tensor([1, 1, 0]), torch.ones(2)], [torch.tensor([0, 1, 1]), torch.ones(2)]
    >>> confused(network, x, other, one).tolist(), confused(network, x, other, one, two).tolist()
    ([True, True, True], [False, False, False])
    """
    h = network.outputs(inputs, gates)
    other = network.outputs(others, gates if other_gates is None else other_gates)
    return (h - other).abs() <= tolerance * torch.maximum(h.abs(), other.abs())


def _check_network(owner: str, widths: Sequence[int], features: int) -> None:
    require(owner, len(widths) >= 1, "1 ≤ L", "no layer", "give the channels of one layer or more")
    check_counts(owner, features=features, **{f"r_{l}": width for l, width in enumerate(widths)})
