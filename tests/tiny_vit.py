"""A vision transformer of one routed block, for tests: patch embedding, class or register tokens, ``TokenMoE``."""

import torch
from torch import Tensor, nn

import moesaic


class TinyViT(nn.Module):
    """Images (B, 3, 24, 24) to logits (B, classes), through 3×3 tokens and ``prefix`` tokens in front of them."""

    def __init__(self, classes: int, moe: moesaic.TokenMoE, *, prefix: int = 1) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, moe.dim, 8, stride=8)
        self.prefix = nn.Parameter(torch.randn(1, prefix, moe.dim))
        self.norm = nn.LayerNorm(moe.dim)
        self.mix = nn.MultiheadAttention(moe.dim, 2, batch_first=True)
        self.mlp = moe
        self.head = nn.Linear(moe.dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).mT
        tokens = torch.cat([self.prefix.expand(len(x), -1, -1), tokens], 1)
        queries = self.norm(tokens)
        tokens = tokens + self.mix(queries, queries, queries, need_weights=False)[0]
        tokens = tokens + self.mlp(self.norm(tokens))
        return self.head(tokens.mean(1))
