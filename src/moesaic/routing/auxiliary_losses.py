"""Auxiliary losses: functions of a ``Routing`` that return a scalar to add to the task's loss.

`load_balance_loss` and `importance_loss` are for routers in which units choose; under expert choice all loads are
equal by construction.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.argument_checks import check_choice
from moesaic.ops.global_batch import GlobalBatch
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
    sum_E, load_E = proxy_BNE.sum((0, 1)), routing.load.detach().to(proxy_BNE.dtype)
    units: float | Tensor = max(routing.batch * routing.units, 1)
    if batch is not None:
        *_, units = sums = batch.sum(F.pad(load_E, (0, 1), value=routing.batch * routing.units))
        load_E = sums[:-1]
    proxy_E = sum_E / units
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
    return _mean(_alternatives(routing).logsumexp(-1).square())


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
    return _mean(-(log_p.exp() * log_p).sum(-1))


def _scores_BNE(routing: Routing) -> Tensor:
    return routing.scores if routing.scores.ndim == 3 else routing.scores.logsumexp(-1)


def _alternatives(routing: Routing) -> Tensor:
    """Scores with the alternatives of one choice along the last axis."""
    return routing.scores.transpose(1, 2) if routing.chooser == "expert" else routing.scores.flatten(2)


def _mean(values: Tensor) -> Tensor:
    """The mean; 0 for an empty batch."""
    return values.sum() / max(values.numel(), 1)
