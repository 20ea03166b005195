"""Batch shaping: a loss that makes gates depend on the image (Bejnordi et al. 2020).

The probabilities x_1 ≤ … ≤ x_B with which a gate is open for the images of a batch are to be distributed as
Beta(α, β), so that for some images the gate is open and for others closed. The loss is the Cramér–von Mises distance
between their empirical distribution and the Beta distribution,

    mean_i (i / (B + 1) − I(x_i; α, β))²

with the regularised incomplete beta function I. torch has none, and its derivative, the density, is infinite at 0 and 1
if α or β are below 1. As a function of the score s, with x = sigmoid(s), it is smooth:

    d/ds I(sigmoid(s); α, β) = x^α (1 − x)^β / B(α, β)

Shapes: B batch, E gates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from moesaic.ops.global_batch import GlobalBatch
from moesaic.routing_record import Routing

__all__ = ["batch_shaping_loss", "beta_cdf"]

_FRACTION_TERMS = 24
"""Terms of the continued fraction; with α and β from 0.05 to 10 its error is below 1e-9 in float64."""


def beta_cdf(scores: Tensor, alpha: float, beta: float) -> Tensor:
    """The distribution function of Beta(α, β) at sigmoid(scores), with gradients.

    >>> beta_cdf(torch.tensor([0.0, 100.0]), 0.5, 0.5).tolist()
    [0.5, 1.0]
    """
    return cast("Tensor", _BetaCDF.apply(scores, alpha, beta))


def batch_shaping_loss(
    routing: Iterable[Routing], alpha: float, beta: float, batch: GlobalBatch | None = None
) -> Tensor:
    """The Cramér–von Mises distance of each layer's gates to Beta(α, β), mean over gates, summed over layers.

    Gates are open with the probability sigmoid(score). With ``batch``, the images are a part of it: ranks of images are
    those in the whole batch, and what is returned is the mean over the images of this part.

    >>> from moesaic.routing.channel_gate import ChannelGate
    >>> gate = ChannelGate(1, channels=2, mode="hard")
    >>> alike, spread = torch.zeros(9, 2), torch.linspace(-5, 5, 9)[:, None].expand(9, 2)
    >>> bool(batch_shaping_loss([gate.choose(spread)], 0.6, 0.4) < batch_shaping_loss([gate.choose(alike)], 0.6, 0.4))
    True
    """
    layers = [layer_routing.scores[:, 0] for layer_routing in routing]
    scores = torch.cat(layers, 1)  # one call for all layers: a call has dozens of small operations
    whole = scores.detach() if batch is None else batch.gather(scores)
    # the image's rank of each gate, from 1; equal scores are ranked by their order in the batch
    ranks = whole.argsort(dim=0, stable=True).argsort(dim=0) + 1
    empirical = (ranks if batch is None else batch.own(ranks)) / (len(whole) + 1)
    distance = (empirical.to(scores.dtype) - beta_cdf(scores, alpha, beta)).square()
    sizes = [layer.shape[1] for layer in layers]
    parts = cast("tuple[Tensor, ...]", distance.split(sizes, 1))
    return torch.stack([part.sum() / max(part.numel(), 1) for part in parts]).sum()


class _BetaCDF(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, alpha: float, beta: float) -> Tensor:
        x, rest = torch.sigmoid(scores), torch.sigmoid(-scores)
        power = _power(scores, alpha, beta)
        ctx.save_for_backward(power)
        # the continued fraction converges fast below the mean; above it, I(x; α, β) = 1 − I(1 − x; β, α)
        below = x < (alpha + 1) / (alpha + beta + 2)
        first, second = below.to(x.dtype) * (alpha - beta) + beta, below.to(x.dtype) * (beta - alpha) + alpha
        part = power * _fraction(torch.where(below, x, rest), first, second) / first
        return torch.where(below, part, 1 - part)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.saved_tensors[0], None, None


def _power(scores: Tensor, alpha: float, beta: float) -> Tensor:
    """x^α (1 − x)^β / B(α, β) at x = sigmoid(scores)."""
    normaliser = math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)
    logarithm = alpha * torch.nn.functional.logsigmoid(scores) + beta * torch.nn.functional.logsigmoid(-scores)
    return torch.exp(logarithm - normaliser)


def _fraction(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The continued fraction of I(x; a, b), 1 / (1 + d_1 / (1 + d_2 / (1 + …))), from its last term to its first.

    d_2m = m (b − m) x / ((a + 2m − 1) (a + 2m)), d_2m+1 = −(a + m) (a + b + m) x / ((a + 2m) (a + 2m + 1)).
    """
    value = torch.ones_like(x)
    for m in range(_FRACTION_TERMS // 2 - 1, -1, -1):
        if m + 1 < _FRACTION_TERMS // 2:
            even = (m + 1) * (b - m - 1) * x / ((a + 2 * m + 1) * (a + 2 * m + 2))
            value = 1 + even / value
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        value = 1 + odd / value
    return 1 / value
