"""Vision transformers (Dosovitskiy et al. 2021) for small images: dense, with mixtures of experts, with skipped tokens.

- Blocks are pre-norm, and parameters have timm's names: weights of timm's ``VisionTransformer(class_token=False,
  global_pool="avg", fc_norm=False)`` load as they are.
- No class token: the classifier reads the mean of the tokens (Beyer et al. 2022), which are a map (B, C, H, W) to
  ``forward_features`` and to heads, as those of every other network here.
- Learned position embeddings, for one size of images.
- Mixtures and skipping are in every second block, from the second one on, as in V-MoE (Riquelme et al. 2021) and in
  mixtures of depths (Raposo et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypedDict, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.argument_checks import check_numbers, check_positive
from moesaic.layers import TokenMoE, TokenSkip
from moesaic.layers.token_inputs import attention_bias
from moesaic.models.feature_maps import OutIndices, take_indices
from moesaic.models.grad_checkpointing import checkpoint_segment
from moesaic.models.image_classifier import GlobalAvgPool, ImageNetwork, check_classes, new_classifier, new_pooling
from moesaic.routing.keep_choice import KeepGate
from moesaic.routing.registry import DEFAULT_ROUTER, RouterLike, build_router
from moesaic.routing.router import round_up

__all__ = ["VIT_SIZES", "Attention", "Block", "Mlp", "PatchEmbed", "ViT", "ViTMoE", "ViTSkip"]

VIT_SIZES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {"tiny": {"dim": 192, "heads": 3}, "small": {"dim": 384, "heads": 6}}
)
"""Widths by timm's names."""

_NORM_EPS = 1e-6
_INIT_STD = 0.02
"""Of initial weights and position embeddings."""


class PatchEmbed(nn.Module):
    """Maps images (B, in_channels, H, W) to tokens (B, N, dim), one for each patch, row by row."""

    def __init__(self, image_size: int, patch_size: int, in_channels: int, dim: int) -> None:
        super().__init__()
        self.image_size = image_size
        self.grid_size = (image_size // patch_size, image_size // patch_size)
        self.num_patches = math.prod(self.grid_size)
        self.proj = nn.Conv2d(in_channels, dim, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[2:] != (self.image_size, self.image_size):
            raise ValueError(
                f"ViT: takes images of {self.image_size}×{self.image_size} pixels (B, C, H, W), got {tuple(x.shape)}; "
                "build it with image_size, the side of your images"
            )
        return self.proj(x).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention of tokens (B, N, C)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"ViT: heads={heads} do not divide dim={dim}; use a divisor of {dim}")
        self.num_heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns new tokens; none reads those where ``mask`` (B, N) is False."""
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        bias = None if mask is None else attention_bias(mask, q.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.proj(y.transpose(1, 2).reshape(B, N, C))


class Mlp(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """Attention and an MLP, each behind a LayerNorm and beside a residual connection.

    Args:
        dim: Features of a token.
        heads: Attention heads.
        mlp_ratio: Hidden neurons of the MLP, as a multiple of ``dim``.
        mlp: Another layer on tokens in place of the MLP, such as `TokenMoE`.

    >>> Block(8, heads=2)(torch.zeros(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(self, dim: int, heads: int, mlp_ratio: float = 4.0, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=_NORM_EPS)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=_NORM_EPS)
        self.mlp = Mlp(dim, round(mlp_ratio * dim)) if mlp is None else mlp

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns new tokens; those where ``mask`` (B, N) is False are padding that no other token reads."""
        x = x + self.attn(self.norm1(x), mask)
        mixed = {"mask": mask} if mask is not None and isinstance(self.mlp, TokenMoE) else {}
        return x + self.mlp(self.norm2(x), **mixed)


class ViTOptions(TypedDict, total=False):
    """The options of `ViT`, which `ViTMoE` and `ViTSkip` take as well."""

    dim: int
    heads: int
    depth: int
    patch_size: int
    image_size: int
    in_channels: int
    mlp_ratio: float


class ViT(ImageNetwork):
    """A vision transformer for images (B, in_channels, image_size, image_size).

    Args:
        num_classes: number of logits; 0: no classifier.
        dim: features of a token.
        heads: attention heads.
        depth: number of blocks.
        patch_size: side of the patches that become tokens; it divides ``image_size``.
        image_size: height and width of the images.
        in_channels: channels of the images.
        mlp_ratio: hidden neurons of the MLPs, as a multiple of ``dim``.

    >>> import moesaic
    >>> model = moesaic.create_model("vit_tiny_patch4_32", num_classes=10)
    >>> model(torch.zeros(2, 3, 32, 32)).shape, sum(weight.numel() for weight in model.parameters())
    (torch.Size([2, 10]), 5362378)
    """

    def __init__(
        self,
        num_classes: int,
        *,
        dim: int = 192,
        heads: int = 3,
        depth: int = 12,
        patch_size: int = 4,
        image_size: int = 32,
        in_channels: int = 3,
        mlp_ratio: float = 4.0,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        check_classes(owner, num_classes)
        sizes = {"patch_size": patch_size, "image_size": image_size, "in_channels": in_channels}
        check_positive(owner, dim=dim, heads=heads, depth=depth, **sizes)
        check_numbers(owner, "above 0", lambda value: 0 < value < math.inf, {"mlp_ratio": mlp_ratio})
        if image_size % patch_size:
            raise ValueError(
                f"{owner}: image_size={image_size} is not divisible into patches of {patch_size}×{patch_size}; use a "
                f"multiple of {patch_size}, such as {-(-image_size // patch_size) * patch_size}"
            )
        self.patch_embed = PatchEmbed(image_size, patch_size, in_channels, dim)
        self.pos_embed = nn.Parameter(torch.empty(1, self.patch_embed.num_patches, dim))
        self.blocks: nn.Sequential = nn.Sequential(*[Block(dim, heads, mlp_ratio) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim, eps=_NORM_EPS)
        self.pool: nn.Module = GlobalAvgPool()
        self.head = new_classifier(dim, num_classes)
        self.num_features = self.head_hidden_size = dim
        self.num_classes = num_classes
        modules = [*(f"blocks.{number}" for number in range(depth - 1)), "norm"]
        self.feature_info = [{"num_chs": dim, "reduction": patch_size, "module": name} for name in modules]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises linear layers and position embeddings by truncated normal numbers, as timm does."""
        nn.init.trunc_normal_(self.pos_embed, std=_INIT_STD)
        for module in cast("Iterable[nn.Module]", self.modules()):
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=_INIT_STD)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        x = self._embed(x)
        for block in self.blocks:
            x = self._run(block, x)
        return self._map(self.norm(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.pool(x)
        return x if pre_logits else self.head(x)

    def forward_intermediates(
        self, x: Tensor, indices: OutIndices = None, *, intermediates_only: bool = False
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        wanted = take_indices(len(self.feature_info), indices)
        x, maps = self._embed(x), dict[int, Tensor]()
        for number, block in enumerate(self.blocks):
            if intermediates_only and number > max(wanted):
                break
            x = self._run(block, x)
            ends = self.feature_info[number]["module"] == "norm"
            if number in wanted:
                maps[number] = self._map(self.norm(x) if ends else x)
        found = [maps[number] for number in wanted]
        return found if intermediates_only else (self._map(self.norm(x)), found)

    def prune_intermediate_layers(self, indices: OutIndices = None) -> tuple[int, ...]:
        wanted = take_indices(len(self.feature_info), indices)
        last = max(wanted)
        self.feature_info = self.feature_info[: last + 1]
        self.blocks = nn.Sequential(*list(self.blocks)[: last + 1])
        if self.feature_info[-1]["module"] != "norm":
            self.norm = nn.Identity()
        self.head, self.num_classes = nn.Identity(), 0
        return wanted

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Returns the names of the position embeddings, and of biases that are stacked by expert."""
        return {"pos_embed", *super().no_weight_decay()}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Returns timm's patterns of layers, for its layer-wise learning rates."""
        return {"stem": r"^pos_embed|patch_embed", "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))]}

    def _reset_pooling(self, global_pool: str, num_classes: int) -> None:
        self.pool = new_pooling(type(self).__name__, global_pool, num_classes).train(self.training)

    def _embed(self, x: Tensor) -> Tensor:
        return self.patch_embed(x) + self.pos_embed

    def _map(self, tokens: Tensor) -> Tensor:
        """Tokens (B, N, C) as a map (B, C, H, W)."""
        B, _, C = tokens.shape
        return tokens.transpose(1, 2).reshape(B, C, *self.patch_embed.grid_size)

    def _every_nth(self, every: int) -> range:
        """Numbers of every ``every``-th block, from block ``every`` − 1 on."""
        owner, depth = type(self).__name__, len(self.blocks)
        check_positive(owner, every=every)
        if every > depth:
            raise ValueError(f"{owner}: every={every}, but there are {depth} blocks; use at most {depth}")
        return range(every - 1, depth, every)

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint_segment([block], block, x) if self._checkpoints() else block(x)


class ViTMoE(ViT):
    """A vision transformer with mixtures of experts for the MLPs of its even blocks.

    With ``capacity=1`` the experts compute as much for an image as the MLP they replace.

    Args:
        num_classes: number of logits; 0: no classifier.
        experts: MLPs in each mixture.
        capacity: mean number of experts that process a token; of a soft router, its slots as a multiple of the tokens.
        every: mixtures are in every so many blocks; 1: in all of them.
        router: ``"expert-choice"``, ``"token-choice"``, ``"soft"``, or another one, as in `convert`.
        options: as in `ViT`; ``mlp_ratio`` is that of experts, too.

    >>> import moesaic
    >>> model = moesaic.create_model("vit_tiny_patch4_32_moe", num_classes=10, experts=4, depth=2)
    >>> model.blocks[1].mlp.experts.weight_in.shape
    torch.Size([4, 768, 192])
    """

    def __init__(
        self,
        num_classes: int,
        *,
        experts: int = 8,
        capacity: float = 1.0,
        every: int = 2,
        router: RouterLike = DEFAULT_ROUTER,
        **options: Unpack[ViTOptions],
    ) -> None:
        super().__init__(num_classes, **options)
        check_positive("ViTMoE", experts=experts)
        check_numbers("ViTMoE", "above 0", lambda value: 0 < value < math.inf, {"capacity": capacity})
        dim = self.num_features
        slots = round_up(capacity * self.patch_embed.num_patches / experts)
        for number in self._every_nth(every):
            block = self.blocks[number]
            assert isinstance(block, Block) and isinstance(block.mlp, Mlp)
            own: dict[str, Any] = {"capacity": capacity}
            if router != DEFAULT_ROUTER:
                own = {"router": build_router(router, dim, experts, 1, slots)}
            block.mlp = TokenMoE(dim, experts=experts, hidden_dim=block.mlp.fc1.out_features, **own)


class ViTSkip(ViT):
    """A vision transformer whose even blocks process the best tokens of each image; see `TokenSkip`.

    Args:
        num_classes: number of logits; 0: no classifier.
        keep: share of the tokens that such a block processes.
        gate: ``"sigmoid"`` or ``"one"``.
        every: every so many blocks skip tokens; 1: all of them.
        options: as in `ViT`.

    >>> import moesaic
    >>> from moesaic.models import count_macs
    >>> model = moesaic.create_model("vit_tiny_patch4_32_skip", num_classes=10, keep=0.25)
    >>> cost = count_macs(model, (3, 32, 32))
    >>> round(cost.macs / cost.dense_macs, 2)
    0.62
    """

    def __init__(
        self,
        num_classes: int,
        *,
        keep: float = 0.5,
        gate: KeepGate = "sigmoid",
        every: int = 2,
        **options: Unpack[ViTOptions],
    ) -> None:
        super().__init__(num_classes, **options)
        for number in self._every_nth(every):
            self.blocks[number] = TokenSkip(self.blocks[number], self.num_features, keep=keep, gate=gate)
