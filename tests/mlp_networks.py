"""Small networks of every family whose MLPs can be converted, with random weights."""

import torch
from torch import nn
from torch.nn import functional as F

SHAPES = {"swin": (3, 16, 32), "convnext": (3, 32, 32), "convnext of convolutions": (3, 32, 32)}
FAMILIES = (
    "vit", "deit", "swin", "beit", "mixer", "convnext", "convnext of convolutions", "pairs", "sequential",
)  # fmt: skip


def shape_of(family: str) -> tuple[int, int, int]:
    """Shape of the images that a family takes."""
    return SHAPES.get(family, (3, 16, 16))


def build(timm, family: str) -> nn.Module:
    """A network of a family, in eval mode, whose layers all matter for its output."""
    models = timm.models
    vit = {"img_size": 16, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 2, "num_classes": 3}
    blocks = {"depths": (1, 1, 1, 1), "dims": (8, 8, 12, 12), "ls_init_value": 1.0, "num_classes": 3}
    make = {
        "vit": lambda: models.vision_transformer.VisionTransformer(**vit),
        "deit": lambda: models.deit.VisionTransformerDistilled(**vit, weight_init="skip"),
        "swin": lambda: models.swin_transformer.SwinTransformer(
            (16, 32), 4, num_classes=3, window_size=2, embed_dim=8, depths=(1, 1), num_heads=(1, 2)
        ),
        "beit": lambda: models.beit.Beit(**vit),
        "mixer": lambda: models.mlp_mixer.MlpMixer(
            num_classes=3, img_size=16, patch_size=4, num_blocks=2, embed_dim=12
        ),
        "convnext": lambda: models.convnext.ConvNeXt(**blocks),
        "convnext of convolutions": lambda: models.convnext.ConvNeXt(**blocks, conv_mlp=True),
        "pairs": Pairs,
        "sequential": Plain,
    }
    torch.manual_seed(0)
    model = make[family]().eval()
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.3)
        elif name.endswith("bias"):
            nn.init.normal_(weight, std=0.1)
    return model


class Intermediate(nn.Module):
    """The first half of an MLP in transformers before version 5."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(12, 24)
        self.intermediate_act_fn = nn.GELU()

    def forward(self, hidden_states):
        return self.intermediate_act_fn(self.dense(hidden_states))


class Output(nn.Module):
    """The second half, which adds the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(24, 12)
        self.dropout = nn.Dropout(0.25)

    def forward(self, hidden_states, input_tensor):
        return self.dropout(self.dense(hidden_states)) + input_tensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.intermediate = Intermediate()
        self.output = Output()

    def forward(self, x):
        return self.output(self.intermediate(self.norm(x)), x)


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 12))
        self.register_tokens = nn.Parameter(torch.zeros(1, 2, 12))
        self.projection = nn.Conv2d(3, 12, 4, stride=4)

    def forward(self, x):
        patches = self.projection(x).flatten(2).transpose(1, 2)
        first = torch.cat([self.cls_token, self.register_tokens], 1).expand(len(x), -1, -1)
        return torch.cat([first, patches], 1)


class Pairs(nn.Module):
    """A network as transformers wrote it before version 5."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.layer = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        x = self.embeddings(x)
        for layer in self.layer:
            x = layer(x)
        return {"logits": self.head(x[:, 0])}


class FunctionalMLP(nn.Module):
    """An MLP whose activation is a function."""

    def __init__(self, activation=F.silu) -> None:
        super().__init__()
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12, bias=False)
        self.activation = activation

    def forward(self, x):
        return self.down(self.activation(self.up(x)))


class Plain(nn.Module):
    """A network with plain MLPs on tokens, and one as its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 12, 4, stride=4)
        self.mlp = nn.Sequential(nn.Linear(12, 24), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(24, 12))
        self.own = FunctionalMLP()
        self.head = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 3))

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = x + self.mlp(x)
        x = x + self.own(x)
        return self.head(x.mean(1))
