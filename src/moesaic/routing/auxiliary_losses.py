"""Auxiliary losses: functions of a ``Routing`` that return a scalar to add to the task's loss.

`load_balance_loss` and `importance_loss` are for routers in which units choose; under expert choice all loads are
equal by construction. Padding (``routing.unit_mask``) does not count in any of them.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from moesaic.argument_checks import check_choice
from moesaic.ops.global_batch import GlobalBatch
from moesaic.routing.router import mask_scores
from moesaic.routing_record import Routing

__all__ = ["BalanceProxy", "entropy_loss", "importance_loss", "load_balance_loss", "z_loss"]

BalanceProxy = Literal["softmax", "scores"]


def load_balance_loss(routing: Routing, proxy: BalanceProxy = "softmax", batch: GlobalBatch | None = None) -> Tensor:
    """E · Σ_e f_e · P_e (Fedus et al. 2022, eq. 4): 1 when balanced, up to E when one expert takes all.

    f_e is the fraction of assignments to expert e, P_e the mean softmax probability of expert e; the gradient flows
    through P.

    With ``proxy="scores"`` P_e is the mean score, as in the released code of Chen et al. 2022. That loss has no lower
    bound, because scores can decrease together. The released code adds the router noise to it, which changes its value
    and not its gradient.

    With a ``batch`` that is spread over processes, f_e and P_e are of the whole batch, and the result is the share of
    this process: the sum over processes is the loss.

    >>> import torch
    >>> from moesaic import TokenChoice
    >>> balanced = TokenChoice(1, experts=2).choose(torch.tensor([[[9.0, 0.0], [0.0, 9.0]]]))
    >>> round(float(load_balance_loss(balanced)), 4)
    1.0
    """
    check_choice("load_balance_loss", "proxy", proxy, get_args(BalanceProxy))
    scores_BNE = _scores_BNE(routing)
    proxy_BNE = scores_BNE.softmax(-1) if proxy == "softmax" else scores_BNE
    mask_BN = routing.unit_mask
    if mask_BN is not None:
        proxy_BNE = proxy_BNE.where(mask_BN.unsqueeze(-1), 0)
    sum_E, load_E = proxy_BNE.sum((0, 1)), routing.load.detach().to(proxy_BNE.dtype)
    units = routing.batch * routing.units if mask_BN is None else mask_BN.sum()
    if batch is not None:
        sums = batch.sum(torch.cat([load_E, load_E.new_zeros(1) + units]))
        load_E, units = sums[:-1], sums[-1]
    proxy_E = sum_E / (units.clamp_min(1) if isinstance(units, Tensor) else max(units, 1))
    share_E = load_E / load_E.sum().clamp_min(1)
    return routing.experts * (share_E * proxy_E).sum()


def importance_loss(routing: Routing) -> Tensor:
    """Squared coefficient of variation of the experts' total gates (Shazeer et al. 2017, eqs. 6–7).

    >>> import torch
    >>> from moesaic import TokenChoice
    >>> balanced = TokenChoice(1, experts=2).choose(torch.tensor([[[9.0, 0.0], [0.0, 9.0]]]))
    >>> float(importance_loss(balanced))
    0.0
    """
    importance_E = routing.weights.sum((0, 1))
    mean = importance_E.mean()
    return importance_E.var(correction=0) / mean.square().clamp_min(torch.finfo(mean.dtype).tiny)


def z_loss(routing: Routing) -> Tensor:
    """Mean (log Σ exp scores)² over the axis along which the router chose (Zoph et al. 2022, eq. 5).

    It penalises large scores, for which the softmax saturates.

    >>> import torch
    >>> from moesaic import TokenChoice
    >>> round(float(z_loss(TokenChoice(1, experts=4).choose(torch.zeros(1, 9, 4)))), 4)     # (log 4)²
    1.9218
    """
    return _mean_of_choices(_alternatives(routing).logsumexp(-1).square(), routing)


def entropy_loss(routing: Routing) -> Tensor:
    """Mean entropy, in nats, of the softmax over the axis along which the router chose.

    Add it for a more confident router, subtract it for more exploration.

    >>> import torch
    >>> from moesaic import TokenChoice
    >>> round(float(entropy_loss(TokenChoice(1, experts=4).choose(torch.zeros(1, 9, 4)))), 4)  # log 4
    1.3863
    """
    log_p = _alternatives(routing).log_softmax(-1)
    log_p = log_p.clamp_min(torch.finfo(log_p.dtype).min)  # so that 0 · log 0 is 0 where a score is -inf
    return _mean_of_choices(-(log_p.exp() * log_p).sum(-1), routing)


def _scores_BNE(routing: Routing) -> Tensor:
    return routing.scores if routing.scores.ndim == 3 else routing.scores.logsumexp(-1)


def _alternatives(routing: Routing) -> Tensor:
    """Scores with the alternatives of one choice along the last axis."""
    if routing.chooser == "expert":
        return mask_scores(routing.scores, routing.unit_mask).transpose(1, 2)
    return routing.scores.flatten(2)


def _mean_of_choices(values: Tensor, routing: Routing) -> Tensor:
    """The mean over units (B, N), or over experts (B, E) where these choose; 0 if there is no choice."""
    mask_BN = routing.unit_mask
    if mask_BN is None:
        return values.sum() / max(values.numel(), 1)
    counted = (mask_BN.any(1, keepdim=True) if routing.chooser == "expert" else mask_BN).expand_as(values)
    return values.where(counted, 0).sum() / counted.sum().clamp_min(1)
