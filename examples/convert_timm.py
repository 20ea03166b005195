"""Convert a convolution of a timm network into a mixture of experts: what changes, and what it costs.

Random weights by default, so that nothing is downloaded; --pretrained takes timm's. The script converts one layer
twice. "check" gives every expert all patches with gate 1, so the output must be that of the network before: nothing
else has changed. "routed" gives each of the experts its share of the patches, which saves multiply-adds and changes
the output; how much says how far a pretrained network starts from where it was. Fine-tune it from there.

Expect: a relative difference near 1e-6 for "check", and of some tenths for "routed" with untrained routers. Needs
timm (``pip install 'moesaic[timm]'``). A few seconds on one core.
"""

import argparse
import copy

import torch
from torch import nn

from moesaic.models import convert, convertible_layers, count_macs, create_model


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18", help="Name of the network in timm.")
    parser.add_argument("--layer", help="Name of the convolution. Default: the last one that can be converted.")
    parser.add_argument("--experts", type=int, default=8, help="Number of experts.")
    parser.add_argument("--img-size", type=int, default=224, help="Side of the images.")
    parser.add_argument("--pretrained", action="store_true", help="Download timm's weights.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of weights and images.")
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    model = create_model(f"timm/{args.model}", num_classes=10, pretrained=args.pretrained).eval()
    for norm in model.modules():
        # timm starts the last norm of a residual branch at zero, and what is before it would have no effect
        if isinstance(norm, nn.BatchNorm2d) and not norm.weight.any():
            nn.init.ones_(norm.weight)
    layers = convertible_layers(model)
    layer, size = args.layer or layers[-1], args.img_size
    print(f"{args.model}: {len(layers)} layers can be converted; converting {layer} to {args.experts} experts")

    images = torch.randn(4, 3, size, size)
    shape = (3, size, size)
    with torch.no_grad():
        before = model(images)
        options = {"experts": args.experts, "init": "upcycle", "input_size": size}
        routed = convert(copy.deepcopy(model), layer, **options).eval()
        moe = routed.get_submodule(layer)
        maps: list[tuple[int, ...]] = []
        handle = moe.register_forward_pre_hook(lambda _, inputs: maps.append(inputs[0].shape[2:]))
        after = routed(images)
        handle.remove()
        patches = maps[0][0] * maps[0][1] // moe.patch_size**2
        everything = {"patch_size": moe.patch_size, "patches_per_expert": patches, "gate": "one"}
        check = convert(copy.deepcopy(model), layer, **options, **everything).eval()(images)

    dense, sparse = count_macs(model, shape), count_macs(routed, shape)
    found = {
        "check": ((check - before).norm() / before.norm()).item(),
        "routed": ((after - before).norm() / before.norm()).item(),
        "layer": sparse.routed_share,
        "network": sparse.macs / dense.macs,
    }
    print(f"a map of {maps[0][0]}×{maps[0][1]} in {patches} patches; each expert selects {moe.patches_per_expert}")
    print(f"check   all patches, gate 1: the logits differ by {found['check']:.1e} (relative)")
    print(f"routed  the logits differ by {found['routed']:.2f}; fine-tune before use")
    print(f"cost    {found['network']:.1%} of the network's multiply-adds")
    return found


if __name__ == "__main__":
    main()
