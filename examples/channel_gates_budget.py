"""Train channel gates to a budget of multiply-adds, and run the result with only its open channels.

A small VGG-16 with channel gates learns to tell two kinds of images apart: plain noise, and noise with a bright patch.
``GateRecipe(target_macs=0.5)`` asks for half of the multiply-adds of the network without gates, embedding network and
gates included. ``moesaic.freeze`` then makes a module for inference on a CPU that computes open channels alone.

Expect: a cost within a few percent of the target, and logits that agree to rounding. Whether gates are worth it on a
task of yours is another question: on CIFAR-10 a narrower network of the same cost was more accurate (docs/papers/
wang2019.md). About 30 seconds on one core.
"""

import argparse

import torch

import moesaic
from moesaic.data import ImageDataset, LabelledImages, Normalize
from moesaic.insight import channel_usage
from moesaic.training import GateRecipe, Recipe, fit


def make_images(count: int, seed: int) -> LabelledImages:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    pixels = torch.randint(0, 100, (count, 3, 32, 32), dtype=torch.uint8, generator=rng)
    for image in labels.nonzero()[:, 0].tolist():
        y, x = torch.randint(0, 24, (2,), generator=rng).tolist()
        pixels[image, :, y : y + 8, x : x + 8] += 150
    return LabelledImages(pixels, labels, labels)


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target-macs", type=float, default=0.5, help="Cost, as a share of the network's without gates."
    )
    parser.add_argument("--epochs", type=int, default=10, help="Training epochs.")
    parser.add_argument("--samples", type=int, default=256, help="Number of training images.")
    parser.add_argument("--width", type=float, default=0.125, help="Channels, as a share of VGG-16's.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of images, initial weights and sample order.")
    args = parser.parse_args(argv)

    names, normalize = ("plain", "patched"), Normalize((0.25,) * 3, (0.2,) * 3)
    train, test = make_images(args.samples, args.seed), make_images(200, args.seed + 1)
    dataset = ImageDataset(train, test, names, names, normalize, normalize)

    torch.manual_seed(args.seed)
    model = moesaic.create_model("vgg16_deepmoe", num_classes=2, width=args.width)
    recipe = Recipe(epochs=args.epochs, batch_size=32, gates=GateRecipe(target_macs=args.target_macs))
    result = fit(model, dataset, recipe, seed=args.seed, eval_every=args.epochs)

    x = normalize(test.pixels)
    frozen = moesaic.freeze(model)
    with torch.no_grad():
        output = model.forward_with_routing(x)
        difference = (frozen(x) - output.logits).abs().max().item()
    cost = model.macs(output.routing) / model.dense_macs
    found = {"accuracy": result.accuracy / 100, "cost": cost.mean().item(), "difference": difference}

    print(f"test accuracy {found['accuracy']:.1%}")
    print(f"cost of an image {found['cost']:.1%} of the ungated network (target {args.target_macs:.0%}; ", end="")
    print(f"cheapest {cost.min():.1%}, most expensive {cost.max():.1%})")
    usage = [channel_usage(routing) for routing in output.routing.values()]
    counts = {kind: sum(len(getattr(layer, kind)) for layer in usage) for kind in ("always_on", "dynamic", "dead")}
    print("channels: " + ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in counts.items()))
    print(f"frozen: logits differ by at most {difference:.1e}")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
