"""Mixtures of Chen et al. 2022 in the manner of their released code: one network at a time, expert by expert.

A peer for `trials.py`, written for it. What it has in common with the released code is the way it computes:

- a network is a list of experts, each a convolution whose kernel is a patch, and a router that is one, too
- every expert works on every sample; those that are not its own are multiplied by 0 before and after
- the gate is the winner's score with its noise, the loss takes a softmax of probabilities (softmax twice)
- autograd finds all gradients; experts then move one after the other, each by its gradient over the sum of the norms
  of its tensors, and the router by plain gradient descent

Letters: B samples, N patches, D numbers in a patch, E experts, J filters of an expert.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.papers.chen2022.two_layer_networks import Mixtures


class Expert(nn.Module):
    """Two logits, each from half of the filters."""

    def __init__(self, filters: int, dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, filters, kernel_size=dim, stride=dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, N·D) → (B, 2)."""
        first, second = self.conv(x).pow(3).sum(dim=2).chunk(2, dim=1)
        return torch.stack([second.sum(dim=1), first.sum(dim=1)], dim=1)


class MaskedMixture(nn.Module):
    """A router, and experts that all see everything."""

    def __init__(self, experts: int, filters: int, dim: int) -> None:
        super().__init__()
        self.router = nn.Conv1d(1, experts, kernel_size=dim, stride=dim, bias=False)
        self.experts = nn.ModuleList(Expert(filters, dim) for _ in range(experts))

    @classmethod
    def like(cls, mixtures: Mixtures, trial: int) -> "MaskedMixture":
        """The same network as one of ours."""
        E, J, D = mixtures.weights.shape[1:]
        model = cls(E, J, D).to(mixtures.weights)
        assert mixtures.router is not None
        assert mixtures.bias is not None
        with torch.no_grad():
            model.router.weight.copy_(mixtures.router[trial][:, None])
            for e, expert in enumerate(model.experts):
                expert.conv.weight.copy_(mixtures.weights[trial, e][:, None])
                expert.conv.bias.copy_(mixtures.bias[trial, e])
        return model

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        """(B, 1, N·D) and (B, E) → (B, 2)."""
        scores = self.router(x).sum(dim=2) + noise
        gate, index = scores.max(dim=1)
        mask = F.one_hot(index, scores.shape[1]).to(x.dtype)
        outputs = [expert(x * mask[:, e, None, None]) for e, expert in enumerate(self.experts)]
        return torch.einsum("be,b,ebc->bc", mask, gate, torch.stack(outputs))

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """(E, J, D), (E, J) and (E, D): of the experts, their biases, and of the router."""
        convolutions = [expert.conv for expert in self.experts]
        return (
            torch.stack([conv.weight[:, 0] for conv in convolutions]).detach(),
            torch.stack([conv.bias for conv in convolutions]).detach(),
            self.router.weight[:, 0].detach(),
        )


class Training:
    """One network and its samples."""

    def __init__(self, model: MaskedMixture, patches: Tensor, labels: Tensor, rate: float, router_rate: float) -> None:
        self.model, self.labels, self.rate = model, labels, rate
        self.x = patches.flatten(1)[:, None]
        self.router_optimizer = torch.optim.SGD(model.router.parameters(), lr=router_rate)

    def step(self, noise: Tensor | None = None) -> None:
        """All samples at once; without ``noise`` it is drawn."""
        if noise is None:
            noise = torch.rand(len(self.x), len(self.model.experts), dtype=self.x.dtype, device=self.x.device)
        self.model.zero_grad()
        loss = F.cross_entropy(self.model(self.x, noise).softmax(dim=1), self.labels)
        loss.backward()
        with torch.no_grad():
            for expert in self.model.experts:
                gradients = [(p, p.grad) for p in expert.parameters() if p.grad is not None]
                norm = sum(gradient.norm().item() for _, gradient in gradients)
                for parameter, gradient in gradients:
                    if norm:
                        parameter -= self.rate * gradient / norm
        self.router_optimizer.step()
