"""Train a small routed network on mosaics of digits, and draw which digits its experts select.

A mosaic has sixteen digits. One of them, a 0 or a 1, is the label; the other fifteen are unrelated to it. The
network is trained with the label alone, not with its position: four experts, each of which selects two digits of a
mosaic, have to find it (a small version of Chowdhury et al. 2023, Section 5.1).
"""

import argparse
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import moesaic
from moesaic.insight import agreement, overlay
from moesaic.papers.chowdhury2023.data.mnist_mosaics import DigitMosaics, digit_mosaics

EXPERTS = 4


def build() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            # 112×112 pixels become a 16×16 map, on which each digit is one 4×4 patch
            stem=nn.Sequential(nn.Conv2d(1, 32, kernel_size=7, stride=7), nn.BatchNorm2d(32), nn.ReLU()),
            routed=moesaic.PatchMoE(
                32, 64, experts=EXPERTS, patches_per_expert=2, patch_size=4, kernel_size=3, gate="softmax_all"
            ),
            head=nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2)),
        )
    )


def train(model: nn.Module, mosaics: DigitMosaics, epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    start = time.perf_counter()
    for epoch in range(1, epochs + 1):
        losses, right = [], 0
        for batch in torch.randperm(len(mosaics)).split(50):
            logits, labels = model(mosaics.images[batch]), mosaics.labels[batch]
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            right += (logits.argmax(1) == labels).sum().item()
        mean_loss, accuracy, seconds = sum(losses) / len(losses), right / len(mosaics), time.perf_counter() - start
        print(
            f"epoch {epoch:2d}   loss {mean_loss:.3f}   train accuracy {accuracy:6.1%}   {seconds:5.1f} s", flush=True
        )


@torch.no_grad()
def predict(model: nn.Module, images: Tensor) -> tuple[Tensor, moesaic.Routing]:
    """The predicted labels and the routing of the images."""
    model.eval()
    with moesaic.record_routing(model, keep="all") as records:
        predicted = torch.cat([model(part).argmax(1) for part in images.split(250)])
    model.train()
    return predicted, records["routed"]


@torch.no_grad()
def multiply_adds(layer: nn.Module) -> int:
    with FlopCounterMode(display=False) as counter:
        layer(torch.zeros(1, 32, 16, 16))
    return counter.get_total_flops() // 2


def draw(model: nn.Module, mosaics: DigitMosaics, rates: dict[str, float], selected: np.ndarray) -> Figure:
    """The first mosaic of each label with the experts' frames; beside them, what holds over all mosaics."""
    shown = [mosaics.labels.tolist().index(label) for label in (0, 1)]
    predicted, routing = predict(model, mosaics.images[shown])
    figure = overlay(mosaics.images[shown], routing, titles=[f"label {i}, predicted {predicted[i]}" for i in (0, 1)])

    # Around the page of the overlay: savefig(bbox_inches="tight") extends the figure.
    L = model.routed.patches_per_expert
    story = f"The 0 or 1 is the label, all other digits are noise. Each expert selects {L} digits."
    figure.text(0.018, 1.02, story, fontsize=12)
    bars = figure.add_axes((1.06, 0.68, 0.36, 0.23))
    bars.set_title(f"How often an expert selects the 0 or 1\n({len(mosaics)} test mosaics)", fontsize=9)
    bars.bar_label(bars.bar(rates.keys(), rates.values(), color=["lightgrey", "lightgrey", "black"]), fmt="{:.0%}")
    bars.set(ylim=(0, 1.1), yticks=[])
    bars.spines[["top", "left", "right"]].set_visible(False)

    table = figure.add_axes((1.06, 0.02, 0.36, 0.52))
    table.set_title(f"How often each expert selects a digit\n(random: {L / routing.units:.1%})", fontsize=9)
    table.imshow(selected, cmap="Greys", vmin=0, vmax=1, aspect="auto")
    for (digit, expert), share in np.ndenumerate(selected):
        ink = "white" if share > 0.5 else "black"
        table.text(expert, digit, f"{share:.0%}", ha="center", va="center", color=ink, fontsize=8)
    table.set_xticks(range(EXPERTS), [f"expert {expert}" for expert in range(EXPERTS)], fontsize=8)
    table.set_yticks(range(10), [f"a {digit}" for digit in range(10)], fontsize=8)
    return figure


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/where_patches_go"), help="output directory")
    parser.add_argument("--seed", type=int, default=0, help="of the data, the weights and the order of training")
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args(argv)

    print("Making 1000 training mosaics of 4×4 digits, and 1000 test mosaics of other digits", flush=True)
    training = digit_mosaics(1000, split="train", seed=args.seed)
    test = digit_mosaics(1000, split="test", seed=args.seed)

    torch.manual_seed(args.seed)
    model = build()
    _, routing_untrained = predict(model, test.images)
    train(model, training, args.epochs)
    predicted, routing = predict(model, test.images)

    accuracy = (predicted == test.labels).float().mean().item()
    untrained, trained = (agreement(r, test.discriminative) for r in (routing_untrained, routing))
    chance = 1 - (1 - trained.chance).prod().item()  # that any of the experts selects it, if all select at random
    selected = torch.stack([routing.mask[test.digits == digit].float().mean(0) for digit in range(10)])
    routed, dense = multiply_adds(model.routed), multiply_adds(nn.Conv2d(32, 64, kernel_size=3, padding=1))

    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "where_patches_go.png"
    rates = {"random": chance, "untrained": untrained.reached, "trained": trained.reached}
    draw(model, test, rates, selected.numpy()).savefig(path, dpi=120, bbox_inches="tight", pad_inches=0.2)

    print(f"\ntest accuracy {accuracy:.1%} (random 50%)")
    print(f"an expert selects the 0 or 1 in {trained.reached:.1%} of the test mosaics", end=" ")
    print(f"(before training {untrained.reached:.1%}, random {chance:.1%})")
    for expert, (zeros, ones) in enumerate(zip(*selected[:2].tolist(), strict=True)):
        print(f"    expert {expert} selects {zeros:4.0%} of the 0s and {ones:4.0%} of the 1s")
    print(f"the routed layer does {routed / dense:.1%} of the multiply-adds of the dense convolution it replaces")
    print(f"figure: {path}")
    return {"accuracy": accuracy, "multiply_adds": routed / dense, **rates}


if __name__ == "__main__":
    torch.set_num_threads(1)  # on so small a network more threads win little, and lose much where cores are shared
    main()
