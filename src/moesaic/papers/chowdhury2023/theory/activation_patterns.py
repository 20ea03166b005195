"""Whether neurons keep the activation pattern they started with (Chowdhury et al. 2023, Lemmas G.1, H.1, I.1).

The proofs follow a pseudo-network, whose neurons switch on and off as at initialisation whatever
training does to their weights. It is close to the network as long as, for every sample, most neurons
of an expert have the same pattern 1[⟨w, x_j⟩ ≥ 0] now as then. `coupling` measures that share.

The lemmas differ in the patches that count. Separately trained routers are fixed, so Lemma G.1 needs
the l patches routed to the expert; jointly trained ones may route any patch later on, so Lemma H.1
takes all n, as Lemma I.1 does for the CNN. They also promise |⟨w, x_j⟩| ≥ τ on those patches.

As printed, the share of neurons that starts at least 2τ from zero is bounded in expectation; that it
holds for every sample at once needs a little more, and the constant 2e is generous (the normal
density gives 4/√(2π) ≈ 1.6).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.papers.engine.theory_conditions import check_counts, require

__all__ = ["Coupling", "coupled_share", "coupling"]


@dataclass(frozen=True, eq=False)
class Coupling:
    """How many neurons switch as at initialisation; made by `coupling`. Leading axes are those given."""

    share: Tensor
    """(…, B, E): for each sample and expert, the share of the expert's neurons that keep their pattern."""
    drift: Tensor
    """(…, E): the largest change of a pre-activation on any patch that counts. It is the τ of the lemmas: a
    neuron that starts further than this from zero keeps its pattern."""

    @property
    def mean(self) -> Tensor:
        """(…, E): the mean over samples."""
        return self.share.mean(-2)

    @property
    def minimum(self) -> Tensor:
        """(…, E): the worst sample, which the lemmas are about."""
        return self.share.amin(-2)

    def quantile(self, q: float) -> Tensor:
        """(…, E): what all but a share ``q`` of the samples reach."""
        return self.share.quantile(q, dim=-2)


def coupling(now: Tensor, start: Tensor, routed: Tensor | None = None, *, tau: float = 0.0) -> Coupling:
    """Compare pre-activations ⟨w, x_j⟩ (…, B, N, E, J) now and at the start, on the same patches.

    ``routed`` (…, B, N, E) marks the patches that count for each expert: those routed to it now for
    Lemma G.1; None, all patches, for Lemmas H.1 and I.1 (a CNN is one expert, E = 1). With ``tau``, a
    neuron counts only if its pre-activations are at least ``tau`` in size as well, as the lemmas say.

    >>> start = torch.tensor([[1.0, -1.0, 2.0], [1.0, 1.0, -1.0]]).view(1, 2, 1, 3)      # two patches, three neurons
    >>> now = torch.tensor([[1.5, 0.5, 2.0], [0.8, 1.0, -1.0]]).view(1, 2, 1, 3)
    >>> coupling(now, start).share.item(), coupling(now, start).drift.item()
    (0.666..., 1.5)
    >>> coupling(now, start, torch.tensor([False, True]).view(1, 2, 1)).share.item()     # only the second is routed
    1.0
    """
    if now.shape != start.shape or now.ndim < 4:
        raise ValueError(
            f"coupling: pre-activations are {tuple(now.shape)} now and {tuple(start.shape)} at the start; both must "
            "be (…, samples, patches, experts, neurons)"
        )
    if routed is not None and routed.shape != now.shape[:-1]:
        raise ValueError(f"coupling: routed is {tuple(routed.shape)}; it must be {tuple(now.shape[:-1])}")
    require("coupling", tau >= 0, "τ ≥ 0", f"tau={tau}", "leave it out to compare patterns alone")
    same_pattern = ((now >= 0) == (start >= 0)) & (now.abs() >= tau)
    moved = (now - start).abs()
    if routed is not None:
        same_pattern = same_pattern | ~routed[..., None]
        moved = moved.where(routed[..., None], 0)
    dtype = torch.promote_types(now.dtype, torch.float32)
    return Coupling(share=same_pattern.all(-3).to(dtype).mean(-1), drift=moved.amax((-4, -3, -1)))


def coupled_share(tau: float, sigma: float, patches: int) -> float:
    """The share that the lemmas guarantee: 1 − 2eτ·patches/σ, or 0 where that is negative and says nothing.

    ``patches`` is l for separate training (Lemma G.1) and n for joint training and the CNN (Lemmas H.1,
    I.1); ``sigma`` the standard deviation of the experts' initial weights, 1/√m in print; ``tau`` how far
    pre-activations have moved at most: O(η·t) after t steps, O(η·t/l) in joint training.

    >>> coupled_share(tau=1e-4, sigma=0.1, patches=2)
    0.989...
    """
    check_counts("coupled_share", patches=patches)
    require("coupled_share", tau >= 0, "τ ≥ 0", f"tau={tau}", "it is a distance")
    require("coupled_share", sigma > 0, "σ > 0", f"sigma={sigma}", "it is a standard deviation")
    return max(0.0, 1 - 2 * math.e * tau * patches / sigma)
