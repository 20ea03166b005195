"""How many patches must an expert take? An estimate of l from data, without knowing where to look.

Lemma 4.1 of Chowdhury et al. 2023 wants l ≥ l*, but l* needs the class patterns and their places, and is
a worst case. What matters is how deep in the ranking of a trained router the discriminative patch lies.
`suggest_patches_per_expert` estimates that from samples and labels alone:

1. Every sample is scored by the closed-form router of its class (`closed_form_router`), trained on all
   other samples: leaving one sample out of a sum costs nothing. The class means stand in for the sums, so
   that class sizes may differ.
2. Irrelevant patches have the same scores in both classes of a pair; the samples of class s have one patch
   from elsewhere. If φ is the ratio of that patch's density to the others', the two classes' likelihoods
   of a sample with scores s_1 … s_N are in the ratio Σ_j φ(s_j)/N. So φ can be learnt by telling the
   classes apart with the logit log Σ_j φ(s_j) + constant. Here log φ is increasing and piecewise linear,
   with knots at fixed quantiles of the scores, and fitted by penalised maximum likelihood. (The other
   class's own patch ranks low for this router; it is taken for an irrelevant one.)
3. Given the scores of a sample of class s, patch j is the discriminative one with probability
   φ(s_j)/Σ_i φ(s_i). Averaged over samples, that is the chance to find it in the top l, for every l.

The suggested l is the smallest that reaches the coverage for every class. It is an estimate with no
guarantee. φ increases, so patches that outrank the discriminative one are never ruled out: where many
do in every sample, the estimate is too high, and with little evidence it goes to N. On digit mosaics
with a hundred samples or more it is mostly within two of the truth, and more often below than above.
The router that is trained on all samples is at least as good as those of the estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.papers.chowdhury2023.theory.closed_form_router import opponents
from moesaic.papers.chowdhury2023.theory.proper_routing import discriminative_ranks
from moesaic.papers.engine.theory_conditions import check_patch_indices, check_samples, require

__all__ = ["PatchDepth", "held_out_scores", "measure_patch_depth", "suggest_patches_per_expert"]

_KNOTS = (0.5, 0.8, 0.95)
_SMOOTH, _SMALL = 0.1, 0.01  # penalties on changes of log slope from segment to segment, and on log slopes


@dataclass(frozen=True, eq=False)
class PatchDepth:
    """How deep in its class's router ranking the discriminative patch lies, and the l that follows."""

    l: int
    """The smallest number of patches per expert that reaches the coverage for every class."""
    by_class: tuple[int, ...]
    """The same for each class alone."""
    within: Tensor
    """(c, N) float64: for l = 1 … N, the share of a class's samples with the patch in the top l."""
    coverage: float


def suggest_patches_per_expert(patches: Tensor, labels: Tensor, *, coverage: float = 0.95) -> PatchDepth:
    """The l with which routers find the discriminative patch in a share ``coverage`` of all samples, estimated.

    Takes samples (B, N, D) with labels (B,), two or more of each class; for how it works, and how far to
    trust it, see the module. Deterministic.

    >>> generator = torch.Generator().manual_seed(0)
    >>> patches = torch.randn(200, 9, 16, generator=generator)
    >>> labels = torch.arange(200) % 2
    >>> patches[:, 4] = 8 * torch.eye(16)[labels]                        # of nine patches, the fifth decides
    >>> suggest_patches_per_expert(patches, labels).l
    1
    """
    owner = "suggest_patches_per_expert"
    classes = check_samples(owner, patches, labels, least=2)
    _check_coverage(owner, coverage)
    against = opponents(classes)
    within = [_estimated_within(patches, labels, s, against[s]) for s in range(classes)]
    return _depth(torch.stack(within), coverage)


def measure_patch_depth(
    patches: Tensor, labels: Tensor, discriminative: Tensor, *, coverage: float = 0.95
) -> PatchDepth:
    """The truth that `suggest_patches_per_expert` estimates, where the discriminative places (B,) are known.

    >>> patches = torch.eye(3)[torch.tensor([[0, 2], [2, 0], [2, 1], [1, 2]])]
    >>> measure_patch_depth(patches, torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 0])).l
    1
    """
    owner = "measure_patch_depth"
    classes = check_samples(owner, patches, labels, least=2)
    check_patch_indices(owner, discriminative, *patches.shape[:2])
    _check_coverage(owner, coverage)
    against = opponents(classes)
    shares: list[Tensor] = []
    for s in range(classes):
        scores, mine = held_out_scores(patches, labels, s, against[s])
        places = discriminative[(labels == s) | (labels == against[s])][mine]
        ranks = discriminative_ranks(scores[mine].unsqueeze(-1), places).squeeze(-1)
        count = torch.bincount(ranks.cpu(), minlength=patches.shape[1]).double()
        shares.append(count.cumsum(0) / count.sum())
    return _depth(torch.stack(shares), coverage)


def held_out_scores(patches: Tensor, labels: Tensor, s: int, other: int) -> tuple[Tensor, Tensor]:
    """Scores (B', N) of the samples of two classes by the router of class ``s``, each by one trained without it.

    The router is the difference of the classes' mean patch sums. Returned with (B',) booleans: which
    samples are of class ``s``. Samples of further classes are left out.
    """
    pair = (labels == s) | (labels == other)
    x, mine = patches[pair].detach().double(), labels[pair] == s
    sums = x.sum(1)
    count = torch.where(mine, mine.sum(), (~mine).sum()).double()
    means = torch.stack([sums[~mine].mean(0), sums[mine].mean(0)])
    scores = x @ (means[1] - means[0])
    # without its own sample i, the mean of a class of n moves by (mean − sum_i)/(n − 1)
    moved = (means[mine.long()] - sums) / (count - 1)[:, None]
    sign = torch.where(mine, 1.0, -1.0).double()
    return scores + sign[:, None] * (x @ moved[:, :, None]).squeeze(-1), mine


def _estimated_within(patches: Tensor, labels: Tensor, s: int, other: int) -> Tensor:
    scores, mine = (part.cpu() for part in held_out_scores(patches, labels, s, other))
    steps = _ramps(scores)
    evidence = steps @ _slopes(steps, mine)
    chance = evidence[mine].softmax(1)
    order = scores[mine].argsort(dim=1, descending=True, stable=True)
    return chance.gather(1, order).cumsum(1).mean(0)


def _ramps(scores: Tensor) -> Tensor:
    """(B', N, K + 1): how much of each segment between knots lies below a score, in standard deviations."""
    z = (scores - scores.mean()) / scores.std().clamp(min=1e-300)
    ordered = z.flatten().sort().values
    knots = ordered[[int(share * (len(ordered) - 1)) for share in _KNOTS]]
    end = torch.full((1,), torch.inf, dtype=z.dtype)
    start = torch.cat([knots[:1], knots])
    return z[..., None].clamp(min=torch.cat([-end, knots]), max=torch.cat([knots, end])) - start


def _slopes(steps: Tensor, mine: Tensor) -> Tensor:
    """(K + 1,): the slopes of log φ, all positive, by penalised maximum likelihood."""
    sign = torch.where(mine, 1.0, -1.0).double()
    segments = steps.shape[-1]
    unknown = torch.zeros(segments + 1, dtype=torch.float64, requires_grad=True)  # log slopes and the constant
    search = torch.optim.LBFGS([unknown], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        logs = unknown[:segments]
        logit = (steps @ logs.exp()).logsumexp(1) + unknown[segments]
        penalty = _SMOOTH * logs.diff().square().sum() + _SMALL * logs.square().sum()
        value = torch.nn.functional.softplus(-sign * logit).sum() + penalty
        value.backward()
        return value

    search.step(loss)  # pyright: ignore[reportArgumentType]  # it takes a closure that returns a tensor
    return unknown.detach()[:segments].exp()


def _depth(within: Tensor, coverage: float) -> PatchDepth:
    # the last share is 1 up to rounding
    by_class = tuple(int((row[:-1] < coverage).sum()) + 1 for row in within)
    return PatchDepth(l=max(by_class), by_class=by_class, within=within, coverage=coverage)


def _check_coverage(owner: str, coverage: float) -> None:
    require(owner, 0 < coverage <= 1, "0 < coverage ≤ 1", f"coverage={coverage}", "it is a share of the samples")
