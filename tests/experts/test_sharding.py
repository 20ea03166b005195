"""Experts sharded over ranks give the results of one process, and checkpoints move between numbers of ranks."""

import copy
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from process_group import Check, run_in_process_group
from strategies import PickyChoice
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import moesaic
from moesaic.bench.expert_parallel_cost import ExpertLayer, exchanged_values
from moesaic.experts import (
    LinearExperts,
    MLPExperts,
    PatchNetExperts,
    clip_grad_norm_,
    expert_parameters,
    unshard_experts,
)

SHAPE = (3, 6, 10)  # not square, patches of 2×2: a grid of 3×5
OPTIONS: dict[str, Any] = {
    "experts": 4, "patches_per_expert": 2, "patch_size": 2, "kernel_size": 3, "gate": "softmax_all", "gate_on": "input",
    "expert_norm": True,
}  # fmt: skip


def patch_moe(out: int = 8, **options: Any) -> moesaic.PatchMoE:
    if "router" in options:
        base = {key: OPTIONS[key] for key in ("experts", "kernel_size", "gate_on", "expert_norm")}
    else:
        base = OPTIONS
    return moesaic.PatchMoE(3, out, **base | options)


def mlp_moe(combine: str, gate_on: str, **options: Any) -> moesaic.PatchMoE:
    norm, width = options.pop("norm", True), 2 if combine == "concat" else 8
    if "router" not in options:
        options |= {"patches_per_expert": 3, "patch_size": 2}
    return moesaic.PatchMoE(
        3, 8, experts=MLPExperts(4, 3, 5, width, norm=norm), combine=combine, gate_on=gate_on, **options
    )


def sample_moe(experts: nn.Module, dim: int, top_k: int = 1) -> nn.Module:
    flat = nn.Flatten() if dim == 180 else nn.Flatten(2)
    router = nn.Linear(dim, 4) if dim == 180 else moesaic.routing.SampleRouter(dim, 4)
    return nn.Sequential(flat, moesaic.SampleMoE(router, experts, top_k, noise=None))


def tokens(layer: nn.Module) -> nn.Module:
    """A layer on maps of three channels as six tokens of 30 features."""
    return nn.Sequential(nn.Flatten(), nn.Unflatten(1, (6, 30)), layer)


CASES: dict[str, Callable[[], nn.Module]] = {
    **{
        f"conv {context} {gate_on}, {combine}, norm={norm}": partial(
            patch_moe, context=context, gate_on=gate_on, combine=combine, expert_norm=norm
        )
        for context, gate_on, (combine, norm) in product(
            ("map", "patch"), ("output", "input"), (("concat", True), ("sum", False))
        )
    },
    "conv sum with norm": partial(patch_moe, combine="sum"),
    "conv without bias": partial(patch_moe, expert_norm=False, bias=False),
    "conv 1×1": partial(patch_moe, kernel_size=1, gate_on="output", gate="softmax_selected"),
    "conv 5×5 of single pixels": partial(patch_moe, patch_size=1, kernel_size=5),
    "conv padded": partial(patch_moe, patch_size=4, pad=True),
    "MLP concat output": partial(mlp_moe, "concat", "output"),
    "MLP sum input": partial(mlp_moe, "sum", "input"),
    "MLP without norm": partial(mlp_moe, "sum", "output", norm=False),
    "units choose": lambda: patch_moe(router=moesaic.TokenChoice(3, 4, 2, 2)),
    "units choose, gated output": lambda: patch_moe(router=moesaic.TokenChoice(3, 4, 1, 2), gate_on="output"),
    "units choose MLPs": lambda: mlp_moe("concat", "input", router=moesaic.TokenChoice(3, 4, 1, 2)),
    "unassigned places": lambda: patch_moe(router=PickyChoice(3, 4, 3, 2), gate_on="output"),
    "unassigned places, gated input": lambda: patch_moe(router=PickyChoice(3, 4, 3, 2)),
    "soft": lambda: moesaic.PatchMoE(
        3, 8, experts=4, kernel_size=3, context="patch", router=moesaic.SoftRouter(3, 4, 2, 2)
    ),
    "tokens": lambda: tokens(moesaic.TokenMoE(30, experts=4, hidden_dim=7, capacity=1.5, prefix_tokens=1)),
    "tokens choose": lambda: tokens(moesaic.TokenMoE(30, experts=4, router=moesaic.TokenChoice(30, 4, 2))),
    "linear experts of samples": lambda: sample_moe(LinearExperts(4, 180, 8), 180, top_k=2),
    "MLPs of samples": lambda: sample_moe(MLPExperts(4, 180, 7, 8), 180),
    "patch networks of samples": lambda: sample_moe(PatchNetExperts(4, 60, 6, 2, bias=True, init_std=0.1), 60),
    "linear patch networks": lambda: sample_moe(PatchNetExperts(4, 60, 6, 2, activation="identity"), 60, top_k=2),
}  # fmt: skip


def network(make: Callable[[], nn.Module]) -> nn.Module:
    """A routed layer after a convolution, the same on every rank."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1), make()).double()
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.3, 0.3)
    return model


def train(model: nn.Module, batches: Tensor) -> Tensor:
    """Ten steps of SGD; the last output. Steps are small enough not to amplify rounding errors."""
    whole_samples = any(isinstance(module, moesaic.SampleMoE) for module in model.modules())
    experts = expert_parameters(model)
    others = [each for each in model.parameters() if all(each is not expert for expert in experts)]
    # many tensors in one call, as by default on CUDA: torch takes no DTensors beside plain tensors there
    optimizer = torch.optim.SGD(
        [{"params": others}, {"params": experts}], lr=0.003 if whole_samples else 0.3, momentum=0.9, foreach=True
    )
    y = batches
    for x in batches:
        optimizer.zero_grad()
        y = model(x)
        (5 * y).tanh().square().mean().backward()
        optimizer.step()
    return y.detach()


def part(batch: Tensor, dim: int = 0) -> Tensor:
    """This rank's images."""
    return batch.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def full(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items()}


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def after_ten_steps(one: nn.Module, model: nn.Module, state: Callable[[], dict[str, Tensor]]) -> float:
    """The largest difference between one process and all ranks after ten steps: output, weights and statistics.

    Differences of a tensor are relative to how far training moved it.
    """
    before = copy.deepcopy(one.state_dict())
    batches = torch.randn(10, 2 * dist.get_world_size(), *SHAPE, dtype=torch.float64)
    batches = batches.to(next(one.parameters()).device)
    expected, y = train(one, batches), train(model, part(batches, 1))
    found = [(part(expected) - y).abs().max().item()]
    gathered = state()
    assert gathered.keys() == before.keys()
    for name, new in one.state_dict().items():
        moved = (new - before[name]).abs().max()
        assert moved > 1e-6, f"{name} was not trained"
        found.append(((gathered[name] - new).abs().max() / moved).item())
    return torch.tensor(found).max().item()  # NaN if one is


def ten_steps(make: Callable[[], nn.Module], mesh: DeviceMesh) -> float:
    """With DDP for all parameters but the experts'."""
    one = network(make)
    sharded = moesaic.shard_experts(copy.deepcopy(one), mesh)
    model = nn.parallel.DistributedDataParallel(sharded)
    return after_ten_steps(one, model, lambda: full(sharded.state_dict()))


def ten_steps_fully_sharded(mesh: DeviceMesh) -> float:
    """With FSDP2: experts over the data-parallel axis, all else over all ranks."""
    one = network(patch_moe)
    model = moesaic.shard_experts(copy.deepcopy(one), mesh, reduce_gradients=False)
    if mesh.ndim == 2:
        fully_shard(model[1].experts, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp", "ep"]._flatten("world"))
    else:
        fully_shard(model, mesh=mesh, ignored_params=set(expert_parameters(model)))
    options = StateDictOptions(full_state_dict=True)
    return after_ten_steps(one, model, lambda: get_model_state_dict(model, options=options))


def uneven_batches(mesh: DeviceMesh, make: Callable[[], nn.Module]) -> float:
    """Rank r has r + 1 images, rank 0 then none: outputs and gradients of one process."""
    one = network(make)
    model = moesaic.shard_experts(copy.deepcopy(one), mesh, uneven_batches=True)
    found = 0.0
    for first in (1, 0):
        sizes = [first, *range(2, dist.get_world_size() + 1)]
        images = torch.randn(sum(sizes), *SHAPE, dtype=torch.float64)
        own, expected = model(images.split(sizes)[dist.get_rank()]), one(images)
        found = max(found, *(own - expected.split(sizes)[dist.get_rank()]).abs().flatten().tolist(), 0)
        weight = torch.randn_like(expected)
        (own * weight.split(sizes)[dist.get_rank()]).sum().backward()
        (expected * weight).sum().backward()
        for mine, its in zip(model[1].parameters(), one[1].parameters(), strict=True):
            assert mine.grad is not None
            assert its.grad is not None
            grad, total = mine.grad, its.grad
            if isinstance(grad, DTensor):
                grad = grad.full_tensor() * dist.get_world_size()  # of the sum of the losses, as in one process
            else:
                grad = grad.clone()
                dist.all_reduce(grad)
            found = max(found, (grad - total).abs().max().item())
        model.zero_grad()
        one.zero_grad()
    return found


def full_tensors_load(mesh: DeviceMesh) -> float:
    """A one-process checkpoint loads into sharded experts, and theirs into one process; unsharding restores it."""
    one = network(patch_moe)
    state = copy.deepcopy(one.state_dict())
    fresh = moesaic.shard_experts(network(patch_moe), mesh)
    fresh.load_state_dict(state)
    found = largest_difference(state, full(fresh.state_dict()))
    gathered = get_model_state_dict(fresh, options=StateDictOptions(full_state_dict=True))
    found = max(found, largest_difference(state, gathered))
    other = moesaic.shard_experts(network(patch_moe), mesh)
    set_model_state_dict(other, dict(state), options=StateDictOptions(full_state_dict=True))
    unshard_experts(other)
    assert not any(isinstance(each, DTensor) for each in other.state_dict().values())
    x = torch.randn(2, *SHAPE, dtype=torch.float64)
    return max(found, largest_difference(state, other.state_dict()), (other(x) - one(x)).abs().max().item())


def rank_zeros_weights_count(mesh: DeviceMesh) -> float:
    torch.manual_seed(100 + dist.get_rank())
    model = network(patch_moe)
    own = {name: each.clone() for name, each in model.state_dict().items()}
    kept = [own]
    dist.broadcast_object_list(kept)
    sharded = full(moesaic.shard_experts(model, mesh).state_dict())
    return largest_difference(*({k: v for k, v in d.items() if "experts" in k} for d in (kept[0], sharded)))


def clipped(mesh: DeviceMesh) -> float:
    """The norm over plain and sharded gradients is that of one process, and both are scaled by it."""
    one = network(patch_moe)
    model = nn.parallel.DistributedDataParallel(moesaic.shard_experts(copy.deepcopy(one), mesh))
    batch = torch.randn(2 * dist.get_world_size(), *SHAPE, dtype=torch.float64)
    model(part(batch)).square().mean().backward()
    one(batch).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(one.parameters(), 0.01)
    found = [abs(clip_grad_norm_(model.parameters(), 0.01).item() - expected.item())]
    for mine, its in zip(model.parameters(), one.parameters(), strict=True):
        grad = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
        found.append((grad - its.grad).abs().max().item())
    return torch.tensor(found).max().item()  # NaN if one is


def records_and_eval(mesh: DeviceMesh) -> float:
    """Routing records are of this rank's images; eval mode and a copy of the model equal one process."""
    one = network(patch_moe).eval()
    model = copy.deepcopy(moesaic.shard_experts(copy.deepcopy(one), mesh))
    images = torch.randn(2 * dist.get_world_size(), *SHAPE, dtype=torch.float64)
    with torch.no_grad(), moesaic.record_routing(model) as routing:
        y = model(part(images).to(memory_format=torch.channels_last))
    with torch.no_grad(), moesaic.record_routing(one) as expected:
        found = (y - part(one(images))).abs().max().item()
    assert torch.equal(routing["1"].index, part(expected["1"].index))
    return found


def low_precision(mesh: DeviceMesh) -> float:
    """Under autocast, as large a difference as bfloat16 allows."""
    one = network(patch_moe).float()
    model = moesaic.shard_experts(copy.deepcopy(one), mesh)
    images = torch.randn(2 * dist.get_world_size(), *SHAPE)
    with torch.autocast("cpu", torch.bfloat16):
        expected, y = one[1](images), model[1](part(images))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(each.grad is not None and each.grad.dtype == torch.float32 for each in model[1].parameters())
    return (part(expected).float() - y.float()).abs().max().item()


def sent_values(mesh: DeviceMesh, layer: moesaic.PatchMoE, shape: ExpertLayer) -> float:
    """Values that all-to-alls send in a training step, as a multiple of what the cost model counts."""
    moesaic.shard_experts(layer.double(), mesh)
    x = torch.randn(2, *SHAPE, dtype=torch.float64, requires_grad=True)
    sent = [0]
    original = dist.all_to_all_single

    def counted(output: Tensor, values: Tensor, *arguments: Any) -> object:
        sent[0] += values.numel() * values.is_floating_point()
        return original(output, values, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted)
        layer(x).sum().backward()
    return sent[0] / (2 * len(x) * sum(exchanged_values(shape)))


def message(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no error"


def two_rank_checks() -> dict[str, Check]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    refused: dict[str, Check] = {
        "odd": lambda: message(lambda: moesaic.shard_experts(nn.Sequential(patch_moe(9, experts=3)), mesh)),
        "one": lambda: message(lambda: moesaic.shard_experts(patch_moe(8, experts=1), mesh)),
        "none": lambda: message(lambda: moesaic.shard_experts(nn.Linear(2, 2), mesh)),
        "axis": lambda: message(lambda: moesaic.shard_experts(patch_moe(), mesh, dim="experts")),
        "twice": lambda: message(lambda: moesaic.shard_experts(moesaic.shard_experts(patch_moe(), mesh), mesh)),
    }
    return {
        **{name: partial(ten_steps, make, mesh) for name, make in CASES.items()},
        "fully_shard": partial(ten_steps_fully_sharded, mesh),
        "uneven batches": partial(uneven_batches, mesh, patch_moe),
        "uneven batches, units choose": partial(
            uneven_batches, mesh, lambda: patch_moe(router=moesaic.TokenChoice(3, 4, 2, 2), gate_on="output")
        ),
        "full tensors": partial(full_tensors_load, mesh),
        "rank 0's weights": partial(rank_zeros_weights_count, mesh),
        "clip_grad_norm_": partial(clipped, mesh),
        "records and eval": partial(records_and_eval, mesh),
        "low precision": partial(low_precision, mesh),
        "sent, halo": partial(
            sent_values, mesh, patch_moe(), ExpertLayer(4, 3, 2, 2, patch_size=2, kernel_size=3, halo=True)
        ),
        "sent, gated output": partial(
            sent_values, mesh, patch_moe(gate_on="output"), ExpertLayer(4, 3, 2, 2, patch_size=2, kernel_size=3)
        ),
        "sent, MLP": partial(
            sent_values, mesh, mlp_moe("sum", "output"), ExpertLayer(4, 3, 8, 3, patch_size=2, hidden_channels=5)
        ),
        **refused,
    }


EXACT = [*CASES, "fully_shard", "uneven batches", "uneven batches, units choose", "full tensors", "rank 0's weights",
         "clip_grad_norm_", "records and eval"]  # fmt: skip


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, list[Any]]:
    return run_in_process_group(2, two_rank_checks, torch.initial_seed() % 2**32)


@pytest.mark.parametrize("name", EXACT)
def test_two_ranks_equal_one_process(two_ranks, name):
    assert max(two_ranks[name]) < 1e-8


def test_two_ranks_equal_one_process_to_the_rounding_of_bfloat16(two_ranks):
    assert 0 < max(two_ranks["low precision"]) < 0.05


@pytest.mark.parametrize("name", ["sent, halo", "sent, gated output", "sent, MLP"])
def test_ranks_send_what_the_cost_model_counts(two_ranks, name):
    assert two_ranks[name] == [1, 1]


def test_experts_that_ranks_cannot_share_are_refused(two_ranks):
    assert two_ranks["odd"][0] == (
        "shard_experts: 0.experts has 3 experts, which the 2 ranks of axis 'ep' cannot share equally; use 1 rank for "
        "that axis, or 2 or 4 experts"
    )
    assert "or 2 experts" in two_ranks["one"][0]
    assert "Linear has no stacked experts" in two_ranks["none"][0]
    assert "the mesh has the axes ep, none is 'experts'" in two_ranks["axis"][0]
    assert "experts is sharded already" in two_ranks["twice"][0]


def checkpoints_move(meshes: dict[int, DeviceMesh]) -> float:
    """From 1, 2 and 4 ranks to 1, 2 and 4 ranks, with torch.distributed.checkpoint."""
    folder: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    expected = network(patch_moe)
    found = [0.0]

    def on(ranks: int, model: nn.Module) -> nn.Module:
        return model if ranks == 1 else moesaic.shard_experts(model, meshes[ranks])

    def options(ranks: int) -> dict[str, Any]:
        return {"no_dist": True} if ranks == 1 else {"process_group": meshes[ranks].get_group()}

    for ranks in (1, 2, 4):
        if dist.get_rank() < ranks:
            saved = on(ranks, copy.deepcopy(expected))
            dcp.save(saved.state_dict(), checkpoint_id=Path(folder[0], str(ranks)), **options(ranks))
    dist.barrier()
    for source, target in product((1, 2, 4), (1, 2, 4)):
        if dist.get_rank() < target:
            state = on(target, network(patch_moe)).state_dict()
            dcp.load(state, checkpoint_id=Path(folder[0], str(source)), **options(target))
            found.append(largest_difference(expected.state_dict(), full(state)))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return torch.tensor(found).max().item()  # NaN if one is


def four_rank_checks() -> dict[str, Check]:
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    four = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    two = DeviceMesh("cpu", [0, 1], mesh_dim_names=("ep",))
    names = ("units choose", "MLP sum input", "conv map output, concat, norm=True", "linear experts of samples")
    return {
        **{f"{name}, 4": partial(ten_steps, CASES[name], four) for name in names},
        **{f"{name}, 2×2": partial(ten_steps, CASES[name], both) for name in names},
        "fully_shard, 2×2": partial(ten_steps_fully_sharded, both),
        "checkpoints": partial(checkpoints_move, {2: two, 4: four}),
    }


def test_four_ranks_equal_one_process_on_one_axis_and_on_two():
    found = run_in_process_group(4, four_rank_checks, torch.initial_seed() % 2**32)
    assert max(found.pop("checkpoints")) == 0
    assert {name: max(each) for name, each in found.items() if max(each) >= 1e-8} == {}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["conv map input, concat, norm=True", "MLP sum input", "units choose"])
def test_sharded_experts_run_over_nccl(name):
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        one = network(CASES[name]).cuda()
        mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("ep",))
        sharded = moesaic.shard_experts(copy.deepcopy(one), mesh)
        assert after_ten_steps(one, sharded, lambda: full(sharded.state_dict())) < 1e-8
    finally:
        dist.destroy_process_group()
