"""Channels as experts: gates for the channels of a layer, computed from an embedding of the image.

Wang et al. 2019 (DeepMoE): every convolution is a mixture whose experts are its channels, and a layer's
gates are g = ReLU(W e) for an embedding e of the image. In its `Routing` an image is one unit (N = 1)
that chooses its experts, the E blocks of channels: a channel's load is the number of images for
which it is open, and a dead channel is a dead expert.

The printed head has no bias, and half of its gates start closed. Here it has a bias with initial value 1: every gate
starts open, and the loss closes gates (`gate_l1`).

Hard gates are 0 or 1. In training they have logistic noise, to which a Gumbel softmax of two classes reduces, and the
straight-through gradient of a sigmoid (Jang et al. 2017, Maddison et al. 2017; for channels Bejnordi et al. 2020).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.argument_checks import check_choice, check_positive
from moesaic.ops import autocast_off
from moesaic.ops.global_batch import GlobalBatch
from moesaic.routing.router import batch_invariant_matmul, stable_topk
from moesaic.routing_record import UNASSIGNED, Routing
from moesaic.tensor_checks import check_tensor

__all__ = ["ChannelGate", "ChannelMode", "gate_l1", "gate_l1_of_layers", "hard_gates"]

ChannelMode = Literal["relu", "topk", "hard"]


class ChannelGate(nn.Module):
    """From an embedding (B, D) to a gate ≥ 0 for each block of channels: ``weight`` (E, D), ``bias`` (E).

    - ``mode="relu"``: the gate is ReLU of the score. The number of open channels depends on the image, and `gate_l1` in
      the loss reduces it. A closed gate gets no gradient from this image.
    - ``mode="topk"``: the ``keep`` blocks with the highest scores are open, ties go to the lower index; the gate is the
      softplus of the score, which is never 0: exactly ``keep`` blocks are open, and shapes are static. Closed blocks
      get no gradient from this image, unless ``straight_through``.
    - ``mode="hard"``: the gate is 1 where the score is above 0, else 0. In training mode every gate has the gradient of
      the sigmoid of its noisy score over ``gate.temperature``.

    A ReLU after the gates would give those of closed blocks no gradient, whatever the mode. So `ChannelMoE` and
    `deepmoe` gate after ReLU, which is the same for gates ≥ 0. Where a network calls ``torch.relu`` in its own
    ``forward`` in place of an ``nn.ReLU``, `deepmoe` cannot, and closed blocks before it have no gradient.

    Scores are computed in float32 at least, whatever the dtype of the embedding and of autocast.

    ``gate.noise`` is 0 unless training sets it: noise that is added to the scores before the selection, in training
    mode only; a tensor where it changes under a CUDA graph. It is Gaussian with this standard deviation, and logistic
    with this scale under ``"hard"``: with a scale of 1 a gate is open with the probability sigmoid(score).
    ``routing.scores`` are without noise.

    Args:
        embedding: size D of the embedding.
        channels: channels of the gated layer.
        block: consecutive channels that share a gate; the last block may be shorter.
        mode: ``"relu"``, ``"topk"`` or ``"hard"``.
        keep: open blocks under ``"topk"``.
        bias: initial bias; None for the printed form, which has no bias.
        straight_through: under ``"topk"`` and in training mode, closed blocks get the gradient that they would have if
            open, since a layer in training computes them anyway. It is an estimate, and lets blocks open that were
            never among the highest scores.

    >>> import torch
    >>> gate = ChannelGate(8, channels=64, block=16)
    >>> routing = gate(torch.randn(5, 8))
    >>> routing.weights.shape, routing.load.tolist()                         # (B, 1, blocks); all start open
    (torch.Size([5, 1, 4]), [5, 5, 5, 5])
    >>> ChannelGate(8, 64, block=16, mode="topk", keep=1)(torch.randn(5, 8)).mask.sum(-1).flatten().tolist()
    [1, 1, 1, 1, 1]
    """

    global_batch: GlobalBatch | None = None
    """The batch of which the embeddings are a part, in training on several processes."""

    def __init__(
        self,
        embedding: int,
        channels: int,
        *,
        block: int = 1,
        mode: ChannelMode = "relu",
        keep: int | None = None,
        bias: float | None = 1.0,
        straight_through: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive("ChannelGate", embedding=embedding, channels=channels, block=block)
        if block > channels:
            raise ValueError(
                f"ChannelGate: block={block} is more than the {channels} channels there are; use 1 to {channels}"
            )
        self.embedding = embedding
        self.channels = channels
        self.block = block
        self.blocks = math.ceil(channels / block)
        self.mode: ChannelMode = check_choice("ChannelGate", "mode", mode, get_args(ChannelMode))
        self.keep = self._checked(keep)
        if straight_through and mode != "topk":
            raise ValueError(
                f"ChannelGate: straight_through=True has no meaning under mode={mode!r}, where "
                f"{'open' if mode == 'relu' else 'all'} gates have gradients anyway; omit it or use mode='topk'"
            )
        self.straight_through = straight_through
        self.noise: float | Tensor = 0.0
        self.temperature = 1.0
        self._start = bias
        self.weight = nn.Parameter(torch.empty(self.blocks, embedding, device=device, dtype=dtype))
        self.bias = None if bias is None else nn.Parameter(torch.empty(self.blocks, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Small weights where there is a bias, so that all gates start open; else larger ones, so that gates differ."""
        scale = 1.0 if self._start is None else 0.1
        nn.init.normal_(self.weight, std=scale / math.sqrt(self.embedding), generator=generator)
        if self.bias is not None and self._start is not None:
            nn.init.constant_(self.bias, self._start)

    def block_sizes(self, like: Tensor) -> Tensor:
        """(E,): the number of channels of each block, of the dtype and on the device of another tensor."""
        sizes = like.new_full((self.blocks,), self.block)
        sizes[-1] = self.channels - self.block * (self.blocks - 1)
        return sizes

    def forward(self, embedding: Tensor) -> Routing:
        check_tensor("ChannelGate", embedding, "embeddings (B, D)", self.weight)
        if embedding.ndim != 2 or embedding.shape[1] != self.embedding:
            raise ValueError(
                f"ChannelGate: takes embeddings (B, {self.embedding}), got {tuple(embedding.shape)}; "
                "pool maps to vectors first, or build the gate for this width"
            )
        if not embedding.is_floating_point():
            raise TypeError(
                f"ChannelGate: takes floating-point embeddings, got {embedding.dtype}; convert with embedding.float()"
            )
        dtype = torch.promote_types(embedding.dtype, torch.float32)
        with autocast_off(embedding):
            scores = batch_invariant_matmul(embedding.to(dtype), self.weight.to(dtype).T)
            return self.choose(scores if self.bias is None else scores + self.bias.to(dtype))

    def choose(self, scores: Tensor) -> Routing:
        """Select the open blocks by their scores (B, E)."""
        noisy = self.with_noise(scores)
        index, gate = self.select(noisy)
        may_drop = self.mode != "topk"
        routing = Routing("channel", scores[:, None], index[:, None], gate[:, None], "unit", may_drop=may_drop)
        estimate = self.gradient_estimate(noisy, index)
        return routing if estimate is None else _StraightThrough(**vars(routing), estimate=estimate[:, None])

    def with_noise(self, scores: Tensor) -> Tensor:
        """The scores (B, E) by which blocks are selected: with noise in training, where it is set."""
        if not (self.training and (isinstance(self.noise, Tensor) or self.noise)):
            return scores
        random = _logistic_like if self.mode == "hard" else torch.randn_like
        noise = random(scores) if self.global_batch is None else self.global_batch.draw(scores, random)
        return scores + self.noise * noise

    def select(self, noisy: Tensor) -> tuple[Tensor, Tensor]:
        """Indices and gates (…, K) of the open blocks, from scores (…, E)."""
        if self.mode == "topk":
            assert self.keep is not None
            index = stable_topk(noisy, self.keep)
            return index, F.softplus(noisy.gather(-1, index))
        # with this comparison a score of NaN is open, so that it stays visible
        closed = noisy <= 0
        blocks = torch.arange(noisy.shape[-1], device=noisy.device)
        gate = hard_gates(noisy.detach()) if self.mode == "hard" else F.relu(noisy)
        return blocks.masked_fill(closed, UNASSIGNED), gate

    def gradient_estimate(self, noisy: Tensor, index: Tensor) -> Tensor | None:
        """Zeros (…, E) with the gradients of gates that have none of their own; None where there is no estimate.

        Args:
            noisy: the scores (…, E) by which blocks are selected.
            index: what `select` returns for them.
        """
        if not self.training:
            return None
        if self.mode == "hard":
            would = torch.sigmoid(noisy / self.temperature)
        elif self.straight_through:
            would = F.softplus(noisy).scatter(-1, index, 0.0)  # of the closed blocks
        else:
            return None
        return would - would.detach()

    def extra_repr(self) -> str:
        keep = f", keep={self.keep}" if self.mode == "topk" else ""
        bias = "" if self.bias is not None else ", bias=None"
        through = ", straight_through=True" if self.straight_through else ""
        return f"{self.embedding}, {self.channels}, block={self.block}, mode={self.mode!r}{keep}{bias}{through}"

    def _checked(self, keep: int | None) -> int | None:
        if self.mode != "topk":
            if keep is not None:
                raise ValueError(
                    f"ChannelGate: keep={keep} has no meaning under mode={self.mode!r}, where the number of open "
                    "blocks depends on the image; omit keep or use mode='topk'"
                )
            return None
        if keep is None:
            raise TypeError("ChannelGate: keep is missing; pass the number of open blocks under mode='topk'")
        check_positive("ChannelGate", keep=keep)
        if keep > self.blocks:
            raise ValueError(
                f"ChannelGate: keep={keep}, but {self.channels} channels in blocks of {self.block} are {self.blocks} "
                f"blocks; use 1 to {self.blocks}"
            )
        return keep


@dataclass(frozen=True, eq=False)
class _StraightThrough(Routing):
    """A routing by channel in which closed blocks have a gradient too."""

    estimate: Tensor | None = None
    """(B, 1, E): zero everywhere, with the gradients that ``gate`` lacks."""

    @property
    def closed_gradients(self) -> bool:
        return self.estimate is not None

    @property
    def weights(self) -> Tensor:
        weights = super().weights
        return weights if self.estimate is None else weights + self.estimate

    def detach(self) -> Routing:
        return super(_StraightThrough, replace(self, estimate=None)).detach()


def hard_gates(scores: Tensor) -> Tensor:
    """1 where a score is above 0, else 0; a score of NaN stays visible.

    >>> hard_gates(torch.tensor([2.0, 0.0, -1.0, torch.nan])).tolist()
    [1.0, 0.0, 0.0, nan]
    """
    return (scores > 0).to(scores.dtype).where(scores == scores, scores)


def _logistic_like(values: Tensor) -> Tensor:
    """Random numbers of the standard logistic distribution, the difference of two of Gumbel's."""
    uniform = torch.rand_like(values).clamp(torch.finfo(values.dtype).tiny, 1 - torch.finfo(values.dtype).eps)
    return torch.logit(uniform)


def gate_l1(routing: Routing) -> Tensor:
    """The mean gate of a layer, over images and blocks: Σ |g| / (B · E).

    The entrywise 1-norm divided by the number of gates, so that the same weight λ suits layers of every width and
    blocks of every size. The loss sums it over the layers.

    >>> import torch
    >>> routing = ChannelGate(1, channels=4).choose(torch.tensor([[2.0, -1.0, 0.5, -3.0]]))
    >>> float(gate_l1(routing))
    0.625
    """
    _check_unit(routing)
    return routing.gate.abs().sum() / max(routing.batch * routing.experts, 1)


def gate_l1_of_layers(routings: Sequence[Routing]) -> Tensor:
    """(layers,): `gate_l1` of each layer, with one set of operations for neighbours of equal size.

    >>> import torch
    >>> routing = ChannelGate(1, channels=4).choose(torch.tensor([[2.0, -1.0, 0.5, -3.0]]))
    >>> gate_l1_of_layers([routing, routing]).tolist()
    [0.625, 0.625]
    """
    means: list[Tensor] = []
    for _, group in groupby(routings, lambda each: (each.unit, each.gate.shape, each.gate.dtype, each.experts)):
        neighbours = list(group)
        first = neighbours[0]
        if len(neighbours) == 1:
            means.append(gate_l1(first).unsqueeze(0))
            continue
        _check_unit(first)
        gates = torch.stack([each.gate for each in neighbours])
        means.append(gates.abs().flatten(1).sum(1) / max(first.batch * first.experts, 1))
    return torch.cat(means)


def _check_unit(routing: Routing) -> None:
    if routing.unit != "channel":
        raise ValueError(
            f"gate_l1: takes the routing of channels, got that of a {routing.unit}; for other units use "
            "moesaic.routing.load_balance_loss"
        )
