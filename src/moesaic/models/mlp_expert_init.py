"""Initial weights of experts from the MLP that they replace: copies of it, or parts of it.

Copies are those of Komatsuzaki et al. 2023 (sparse upcycling). Parts share out the hidden neurons (Zhang et al. 2022,
MoEfication): an MLP is the sum of its hidden neurons, so that E parts of them sum to it.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.experts import MLPExperts
from moesaic.models.mlp_candidates import MLPUnit

__all__ = ["cluster_neurons", "copy_mlp", "neurons_in_order", "split_mlp"]

_MAX_ROUNDS = 20
"""Rounds of clustering, at most."""


def copy_mlp(unit: MLPUnit, experts: MLPExperts) -> None:
    """Makes every expert a copy of the MLP."""
    neurons = torch.arange(unit.hidden_dim, device=unit.fc1.weight.device).expand(len(experts), -1)
    _fill(unit, experts, neurons, 1.0, 1.0)


def split_mlp(unit: MLPUnit, experts: MLPExperts, neurons: Tensor, scale: float = 1.0) -> None:
    """Gives each expert its hidden neurons (E, J/E), times ``scale``.

    Each has an equal part of the output's bias, so that the sum over all experts has all of it.
    """
    _fill(unit, experts, neurons.to(unit.fc1.weight.device), scale, scale / len(experts))


def _fill(unit: MLPUnit, experts: MLPExperts, neurons_EJ: Tensor, scale: float, bias_scale: float) -> None:
    with torch.no_grad():
        experts.weight_in.copy_(_matrix(unit.fc1)[neurons_EJ])
        experts.weight_out.copy_(_matrix(unit.fc2).T[neurons_EJ].transpose(1, 2) * scale)
        if experts.bias_in is None or experts.bias_out is None:
            return
        # one bias of the two may be missing, which is the same as zeros
        experts.bias_in.zero_() if unit.fc1.bias is None else experts.bias_in.copy_(unit.fc1.bias[neurons_EJ])
        experts.bias_out.zero_() if unit.fc2.bias is None else experts.bias_out.copy_(unit.fc2.bias * bias_scale)


def _matrix(layer: nn.Linear | nn.Conv2d) -> Tensor:
    return layer.weight.flatten(1)


def neurons_in_order(hidden: int, experts: int) -> Tensor:
    """Hidden neurons of each expert (E, J/E), in order.

    >>> neurons_in_order(6, 2).tolist()
    [[0, 1, 2], [3, 4, 5]]
    """
    return torch.arange(hidden, device="cpu").view(experts, -1)


def cluster_neurons(activations: Tensor, experts: int, seed: int = 0) -> Tensor:
    """Hidden neurons of each expert (E, J/E), such that those that are active together are in one expert.

    Spherical k-means of the activations (T, J) of J neurons over T tokens, with clusters of equal size: in each round
    neurons choose in the order of what they lose by their second choice, while there is room.

    >>> a, b = torch.eye(2).repeat_interleave(3, 0).T     # over six tokens: neurons of two kinds
    >>> cluster_neurons(torch.stack([a, b, b, a], 1), experts=2).tolist()
    [[0, 3], [1, 2]]
    """
    J = activations.shape[1]
    rows = activations.T.float()
    rows = F.normalize(rows - rows.mean(1, keepdim=True), dim=1)
    centers = rows[_first_centers(rows, experts, torch.Generator().manual_seed(seed))]
    owner = torch.full((J,), -1, device=rows.device)
    for _ in range(_MAX_ROUNDS):
        chosen = _balanced(rows @ centers.T)
        if torch.equal(chosen, owner):
            break
        owner = chosen
        sums = torch.zeros_like(centers).index_add_(0, owner, rows)
        centers = F.normalize(sums, dim=1)
    clusters = owner.sort(stable=True).indices.view(experts, -1)
    return clusters[clusters[:, 0].argsort()]


def _first_centers(rows: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Rows that are far from each other, drawn as k-means++ does."""
    found = [int(torch.randint(len(rows), (), generator=generator, device="cpu"))]
    distance = torch.full((len(rows),), math.inf, device=rows.device)
    while len(found) < count:
        distance = distance.minimum((1 - rows @ rows[found[-1]]).clamp_min(0))
        distance[found] = 0
        weights = distance
        if not bool(distance.sum() > 0):
            weights = torch.ones_like(distance)
            weights[found] = 0
        found.append(int(torch.multinomial(weights, 1, generator=generator)))
    return found


def _balanced(similarity_JE: Tensor) -> Tensor:
    """The cluster of each neuron (J,), with J / E neurons in each."""
    J, E = similarity_JE.shape
    best = similarity_JE.sort(1, descending=True)
    loss = best.values[:, 0] - best.values[:, min(1, E - 1)]
    preferred = cast("list[list[int]]", best.indices.tolist())
    room = [J // E] * E
    owner = [0] * J
    for j in cast("list[int]", loss.sort(descending=True, stable=True).indices.tolist()):
        owner[j] = next(e for e in preferred[j] if room[e])
        room[owner[j]] -= 1
    return torch.tensor(owner, device=similarity_JE.device)
