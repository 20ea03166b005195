"""Train a routed network whose experts are shared by several processes, and save one file of weights.

    torchrun --nproc-per-node 2 examples/expert_parallel.py
    torchrun --nproc-per-node 4 examples/expert_parallel.py --expert-ranks 2

Images are noise with a bright 4×4 tile; its colour is the class, and experts have to find it. Without torchrun one
process has all experts. GPUs are used where every process has one.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import moesaic
from moesaic.experts import clip_grad_norm_, expert_parameters

EXPERTS, CLASSES = 8, 3


def build() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        moesaic.PatchMoE(
            32,
            32,
            experts=EXPERTS,
            patches_per_expert=2,
            patch_size=4,
            kernel_size=3,
            gate_on="input",
            expert_norm=True,
        ),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


def images(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noise with one tile of the colour that is the label."""
    pixels = torch.randn(count, 3, 16, 16, generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    rows, columns = torch.randint(4, (2, count), generator=generator)
    for image, label, row, column in zip(pixels, labels, rows, columns, strict=True):
        image[label, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 3
    return pixels, labels


def main(arguments: list[str] | None = None) -> float:
    """Trains and returns the accuracy of the last batches, over all ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--expert-ranks", type=int, default=None, help="Ranks that share the experts; default: all.")
    parser.add_argument("--steps", type=int, default=200, help="Training steps.")
    parser.add_argument("--batch-size", type=int, default=32, help="Images per step, over all ranks.")
    parser.add_argument("--out", type=Path, default=Path("expert_parallel.safetensors"), help="File of weights.")
    options = parser.parse_args(arguments)

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    expert_ranks = options.expert_ranks or ranks
    mesh = init_device_mesh(device.type, (ranks // expert_ranks, expert_ranks), mesh_dim_names=("dp", "ep"))

    torch.manual_seed(0)
    model = moesaic.shard_experts(build().to(device), mesh)
    network = nn.parallel.DistributedDataParallel(model)  # all but the experts
    experts = expert_parameters(model)  # a group of their own: optimizers on GPUs do not mix DTensors and plain tensors
    others = [each for each in model.parameters() if all(each is not expert for expert in experts)]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": experts}], lr=1e-2, weight_decay=0)

    generator, correct = torch.Generator().manual_seed(1), []
    for step in range(options.steps):
        pixels, labels = (part.chunk(ranks)[rank].to(device) for part in images(options.batch_size, generator))
        logits = network(pixels)
        optimizer.zero_grad()
        F.cross_entropy(logits, labels).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        share = (logits.argmax(1) == labels).float().mean()
        dist.all_reduce(share)
        correct.append(share.item() / ranks)
        if rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}: accuracy {sum(correct[-20:]) / len(correct[-20:]):.0%}")

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, options.out)
        own = model[2].experts.weight.to_local().shape[0]
        print(f"{ranks} rank{'s' * (ranks > 1)}, {own} of {EXPERTS} experts on each; weights of all: {options.out}")
    dist.barrier()
    dist.destroy_process_group()
    return sum(correct[-20:]) / len(correct[-20:])


if __name__ == "__main__":
    main()
