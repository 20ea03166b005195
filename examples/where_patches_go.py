"""Train a small routed network on mosaics of digits, and draw which digits its experts look at.

A mosaic holds sixteen digits. One of them, a 0 or a 1, is the label; the other fifteen say nothing.
Nobody tells the network where the one is: four experts, each allowed two digits of a mosaic, have
to find it. (The experiment of Chowdhury et al. 2023, Section 5.1, in small.)
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moesaic
from moesaic.data import DigitMosaics, digit_mosaics
from moesaic.insight import agreement, overlay

EXPERTS, PATCHES_PER_EXPERT = 4, 2


def build() -> nn.Sequential:
    """A network in which a 4×4 patch of the map is one digit of the mosaic, up to the routed layer and through it."""
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=7, stride=7),  # 112×112 pixels → a 16×16 map, 4×4 to a digit
        nn.BatchNorm2d(32),
        nn.ReLU(),
        moesaic.PatchMoE(
            32,
            64,
            experts=EXPERTS,
            patches_per_expert=PATCHES_PER_EXPERT,
            patch_size=4,
            kernel_size=3,
            gate="softmax_all",
        ),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 2),
    )


def train(model: nn.Module, mosaics: DigitMosaics, epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    start = time.perf_counter()
    for epoch in range(1, epochs + 1):
        loss_sum, right = 0.0, 0
        for batch in torch.randperm(len(mosaics)).split(50):
            logits = model(mosaics.images[batch])
            loss = F.cross_entropy(logits, mosaics.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(batch)
            right += (logits.argmax(1) == mosaics.labels[batch]).sum().item()
        print(
            f"epoch {epoch:2d}/{epochs}   loss {loss_sum / len(mosaics):.3f}   "
            f"train accuracy {right / len(mosaics):6.1%}   {time.perf_counter() - start:4.1f} s",
            flush=True,
        )


@torch.no_grad()
def look(model: nn.Module, mosaics: DigitMosaics) -> tuple[Tensor, moesaic.Routing]:
    """What the model predicts, and how it routed to get there."""
    model.eval()
    with moesaic.record_routing(model, keep="all") as routing:
        predicted = torch.cat([model(images).argmax(1) for images in mosaics.images.split(250)])
    model.train()
    return predicted, routing["3"]
