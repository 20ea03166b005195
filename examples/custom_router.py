"""Write a router, put it into a layer and compare it with the built-in ones.

The router takes, for every expert, the patches whose score is within a margin of its best, at most so many: images
with a large object get more patches than images with a small one. It is a class with one method, and layers,
backends, metrics and overlays work with it.

Expect a table: all routers are learned on the same task (a bright square of random size among noise; the class is
its size), with the patches that they process and the accuracy they reach. Here token choice, which processes every
patch, is ahead, and the own router, which processes the fewest, is behind; on other tasks it is the other way round.
About ten seconds on one core.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moesaic
from moesaic.routing.router import Router, stable_topk
from moesaic.routing_record import UNASSIGNED, Routing, Unit


class NearBest(Router):
    """Every expert takes its best patches of an image, as long as their score is within ``margin`` of the best."""

    def __init__(
        self, in_channels: int, experts: int, patch_size: int = 1, *, patches_per_expert: int = 4, margin: float = 1.0
    ) -> None:
        super().__init__(in_channels, experts, patch_size)
        self.patches_per_expert, self.margin = patches_per_expert, margin

    def choose(self, scores: Tensor, *, unit: Unit = "patch", grid: tuple[int, int] | None = None) -> Routing:
        by_expert = scores.transpose(1, 2)  # (B, E, N)
        index = stable_topk(by_expert, self.patches_per_expert)
        best = by_expert.gather(2, index)
        near = best >= best[..., :1] - self.margin
        gate = best.masked_fill(~near, -torch.inf).softmax(-1)
        return Routing(unit, scores, torch.where(near, index, UNASSIGNED), gate, chooser="expert", grid=grid)


def make_squares(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noise (B, 1, 32, 32) with a bright square of one, two or three patches' side, which is the class."""
    rng = torch.Generator().manual_seed(seed)
    images, labels = 0.7 * torch.rand(count, 1, 32, 32, generator=rng), torch.arange(count) % 3
    for image, label in zip(images, labels.tolist(), strict=True):
        side = 4 * (label + 1)
        y, x = (4 * torch.randint(0, (32 - side) // 4 + 1, (2,), generator=rng)).tolist()
        image[:, y : y + side, x : x + side] += 0.3
    return images, labels


def build(router: Router) -> nn.Sequential:
    layer = moesaic.PatchMoE(8, 24, experts=4, router=router, kernel_size=3)
    stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(stem, layer, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 3))


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> None:
    optimizer = torch.optim.Adam(model.train().parameters(), lr=5e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(50):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=600, help="Number of training images.")
    parser.add_argument("--epochs", type=int, default=6, help="Training epochs.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of images, initial weights and sample order.")
    args = parser.parse_args(argv)

    images, labels = make_squares(args.samples, args.seed)
    test_images, test_labels = make_squares(300, args.seed + 1)
    routers = {
        "NearBest": lambda: NearBest(8, experts=4, patch_size=4, patches_per_expert=9),
        "ExpertChoice": lambda: moesaic.ExpertChoice(8, experts=4, patches_per_expert=9, patch_size=4),
        "TokenChoice": lambda: moesaic.TokenChoice(8, experts=4, top_k=1, patch_size=4),
    }
    print(f"{'router':14}{'test accuracy':>15}{'patches per image and expert, of 64':>38}")
    found: dict[str, dict[str, float]] = {}
    for name, make in routers.items():
        torch.manual_seed(args.seed)
        model = build(make())
        train(model, images, labels, args.epochs)
        with torch.no_grad(), moesaic.record_routing(model) as routing:
            accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
        patches = routing["1"].load.sum().item() / len(test_images) / 4
        found[name] = {"accuracy": accuracy, "patches": patches}
        print(f"{name:14}{accuracy:15.1%}{patches:38.1f}", flush=True)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)  # so small a network gains little from more threads
    main()
