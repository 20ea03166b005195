"""Training on several ranks is the training of one process: weights, losses, metrics, checkpoints."""

import copy
import json
import os
import socket
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from training.forked_ranks import needs_fork, run_ranks
from training.gated import gated
from training.squares import TASK as SQUARES
from training.squares import seeded, some_images

from moesaic import create_model
from moesaic.cli import main
from moesaic.data.image_dataset import ImageDataset, Normalize
from moesaic.layers import PatchMoE, SampleMoE, TokenMoE
from moesaic.ops.dispatch import Norm, backend
from moesaic.ops.global_batch import GlobalBatch
from moesaic.routing import SampleRouter, TokenChoice
from moesaic.training import ranks as ranks_module
from moesaic.training.callbacks import Callback
from moesaic.training.data_parallel import attached, create_parallel
from moesaic.training.fit import fit
from moesaic.training.gate_recipe import GateRecipe
from moesaic.training.global_batch_layers import spread_batch, sync_batch_norm
from moesaic.training.interruption import request_stop
from moesaic.training.optimizers import build_optimizers
from moesaic.training.recipe import Recipe
from moesaic.training.saved_predictions import PREDICTIONS, read_predictions

pytestmark = needs_fork

CPU = torch.device("cpu")


class Doubles(Normalize):
    def __call__(self, pixels: Tensor, rand: Tensor | None = None) -> Tensor:
        return super().__call__(pixels).double()


SCALE = Doubles((0.5, 0.5, 0.5), (0.3, 0.3, 0.3))


def brighter(pixels: Tensor, rand: Tensor) -> Tensor:
    return SCALE(pixels) + 0.1 * rand[:, 0, None, None, None].double()


def task(size: int, images: int = 19) -> ImageDataset:
    def enlarged(count: int, seed: int) -> Any:
        found = some_images(count, seed)
        return replace(found, pixels=found.pixels.repeat_interleave(size // 8, 2).repeat_interleave(size // 8, 3))

    changes: dict[str, Any] = {"train": enlarged(images, 0), "test": enlarged(11, 1)}
    return replace(SQUARES, train_transform=brighter, eval_transform=SCALE, normalize=SCALE, **changes)


def normed_expert() -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(16, 2))


def mixture() -> nn.Module:
    router = SampleRouter(3, experts=5, patch_size=4)  # at first noise chooses, and of ten images some get no expert
    return SampleMoE(router, [normed_expert() for _ in range(5)])


class Capped(nn.Module):
    """Units choose with noise and a capacity, and dropout follows."""

    def __init__(self) -> None:
        super().__init__()
        router = TokenChoice(3, experts=2, patch_size=4, noise="gumbel", capacity_factor=0.8)
        self.moe = PatchMoE(3, 8, experts=2, kernel_size=3, router=router, expert_norm=True)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.moe(x).mean((2, 3)))))


class Tokens(nn.Module):
    """Patches as tokens behind a class token, experts that choose among them, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 2, stride=2)
        self.class_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.moe = TokenMoE(8, experts=3, hidden_dim=6, capacity=1.5, prefix_tokens=1)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(tokens), -1, -1), tokens], 1)
        return self.head(self.drop(tokens + self.moe(tokens)).mean(1))


PLAIN = Recipe(epochs=2, batch_size=7, lr=0.005, ema_decay=0.9, clip_grad=1.0, label_smoothing=0.1)
GATES = GateRecipe(target_macs=0.6, joint_fraction=0.5, noise=0.2)
SHAPED = GateRecipe(target_macs=0.6, joint_fraction=0.5, shaping_weight=1.0)
CASES: dict[str, tuple[Any, int, Recipe]] = {
    "dense": (lambda: create_model("wrn10_1", num_classes=2), 8, PLAIN),
    "PatchMoE": (lambda: create_model("wrn10_1_pmoe", num_classes=2), 16, replace(PLAIN, grad_accum=2)),
    "expert norms": (lambda: create_model("wrn10_1_pmoe", num_classes=2, fidelity="released"), 16, PLAIN),
    "capacity": (Capped, 8, replace(PLAIN, balance_weight=0.1, optimizer="sgd")),
    "TokenMoE": (Tokens, 8, PLAIN),
    "SampleMoE": (mixture, 8, replace(PLAIN, balance_weight=0.1)),
    "gated": (gated, 16, replace(PLAIN, gates=GATES)),
    "hard gates": (partial(gated, mode="hard", center_embedding=True), 16, replace(PLAIN, gates=SHAPED)),
}


PARALLEL = {
    name: ("ddp", "fsdp") if name in ("PatchMoE", "TokenMoE", "SampleMoE", "gated") else ("ddp",) for name in CASES
}


def made(name: str) -> nn.Module:
    return seeded(CASES[name][0]).double()


def trained(name: str, parallel: Any, images: int = 19, **changes: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and results of six steps."""
    _, size, recipe = CASES[name]
    model = made(name)
    result = fit(model, task(size, images), replace(recipe, **changes), seed=3, parallel=parallel)
    times = {"seconds", "images_per_second"}
    told = [{key: value for key, value in asdict(epoch).items() if key not in times} for epoch in result.epochs]
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    return weights, json.loads(json.dumps({"epochs": told, "accuracy": result.accuracy, "metrics": result.metrics}))


def largest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def close(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    return one == pytest.approx(other, rel=1e-5) if isinstance(one, float) else one == other


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {name: trained(name, "none") for name in CASES}


@pytest.fixture(scope="module")
def of_two(alone: dict[str, Any]) -> dict[str, Any]:
    """What two ranks found, in one job: the distance from one process, and what the ranks disagree on."""

    def work() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in CASES:
            for parallel in PARALLEL[name]:
                weights, told = trained(name, parallel)
                found[f"{name} {parallel}"] = [largest(weights, alone[name][0]), close(told, alone[name][1]), told]
        found["norm"] = batch_norm_of_parts()
        found["gather"] = gathered_parts()
        found["synchronised"] = stays_synchronised()
        found["loops"] = {name: loop() for name, loop in LOOPS.items()}
        found["errors"] = refusals()
        return found

    first, second = run_ranks(2, work)
    first["other rank"] = second
    return first


@pytest.mark.parametrize(("name", "parallel"), [(name, each) for name in CASES for each in PARALLEL[name]])
def test_two_ranks_train_as_one_process(name, parallel, of_two):
    distance, same_results, told = of_two[f"{name} {parallel}"]
    assert distance < 1e-8
    assert same_results, told


def test_all_ranks_return_the_same_result(of_two):
    assert all(of_two["other rank"][f"{name} ddp"][2] == of_two[f"{name} ddp"][2] for name in CASES)


def test_batches_with_fewer_images_than_ranks_leave_some_ranks_without_any():
    jobs = (
        ("expert norms", "ddp"),
        ("SampleMoE", "ddp"),
        ("SampleMoE", "fsdp"),
        ("gated", "ddp"),
        ("hard gates", "ddp"),
    )
    few: dict[str, Any] = {"epochs": 1, "batch_size": 3, "images": 8}
    expected = {name: trained(name, "none", **few)[0] for name, _ in jobs}

    def work() -> list[float]:
        return [largest(trained(name, parallel, **few)[0], expected[name]) for name, parallel in jobs]

    assert max(max(found) for found in run_ranks(4, work)) < 1e-8


def test_ranks_train_a_network_that_has_frozen_weights():
    def work(parallel: Any) -> dict[str, Tensor]:
        model = seeded(normed_expert).double()
        model[0].weight.requires_grad_(False)
        fit(model, task(8), PLAIN, seed=3, parallel=parallel)
        return model.state_dict()

    alone = work("none")
    found = run_ranks(2, lambda: [largest(work(parallel), alone) for parallel in ("ddp", "fsdp")])
    assert max(max(each) for each in found) < 1e-8


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_optimizers_of_a_gpu_take_sharded_weights(optimizer):
    def work(parallel: Any) -> dict[str, Tensor]:
        model = seeded(normed_expert).double()
        with attached(model, create_parallel(parallel, CPU)) as run:
            optimizers = build_optimizers(run, replace(PLAIN, optimizer=optimizer), torch.device("cuda"))
            for _ in range(2):
                for parameter in run.parameters():
                    parameter.grad = torch.full_like(parameter, 0.5)
                optimizers[0].step()
        return model.state_dict()

    alone = work("none")
    assert max(run_ranks(2, lambda: largest(work("fsdp"), alone))) < 1e-12


def test_a_synchronised_network_stays_so_after_a_run(of_two):
    assert of_two["synchronised"] is True


# checkpoints


class StopAfter(Callback):
    """Asks the second rank, or the only one, to stop after a step, as a signal does."""

    def __init__(self, steps: int | None = None) -> None:
        self.steps = steps

    def on_step_end(self, trainer: Any, epoch: float, loss: Tensor) -> None:
        ranks = trainer.parallel.ranks
        if trainer.train_step.steps == self.steps and (ranks is None or ranks.rank == 1):
            request_stop()


def test_a_checkpoint_of_any_number_of_ranks_is_continued_by_any_other(tmp_path):
    name = "gated"  # it has more state than others
    _, size, recipe = CASES[name]

    def go_on(stop: int | None, parallel: Any, out: str = "run") -> dict[str, Tensor]:
        model = made(name)
        with torch.no_grad():
            if stop != 2 and out == "run":  # a checkpoint replaces the weights
                next(model.parameters()).zero_()
        fit(model, task(size, 33), recipe, seed=3, out=tmp_path / out, callbacks=[StopAfter(stop)], parallel=parallel)
        return model.state_dict()

    def stops(stop: int, parallel: Any) -> bool:
        try:
            go_on(stop, parallel)
        except KeyboardInterrupt:
            return True
        return False

    expected = go_on(None, "none", "whole")
    assert stops(2, "none")
    assert run_ranks(2, lambda: stops(3, "ddp")) == [True] * 2
    assert run_ranks(4, lambda: stops(5, "fsdp")) == [True] * 4
    assert run_ranks(2, lambda: stops(7, "fsdp")) == [True] * 2
    assert run_ranks(4, lambda: stops(8, "ddp")) == [True] * 4
    assert largest(go_on(None, "none"), expected) < 1e-8
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == sorted(
        path.name for path in (tmp_path / "whole").iterdir()
    )
    again = run_ranks(2, lambda: largest(go_on(None, "ddp"), expected))  # complete: all ranks get its weights
    assert max(again) < 1e-8


# the whole batch


def batch_norm_of_parts() -> float:
    """The largest distance of values, gradients and statistics from those of one process, for unequal parts."""
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for sizes in ([5, 2], [3, 0], [1, 1]):
        x = torch.randn(sum(sizes), 3, 4, 2, generator=generator, dtype=torch.float64)
        weight, bias = (torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(2))
        target = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        found: list[list[Tensor]] = []
        for batch in (None, GlobalBatch()):
            own = slice(None) if batch is None else slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
            leaves = [each.clone().requires_grad_() for each in (x[own], weight, bias)]
            mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
            y = Norm(*leaves[1:], mean, var, 0.1, 1e-5, True, batch).apply(leaves[0])
            (y * target[own]).sum().backward()
            grads = [each.grad for each in leaves if each.grad is not None]
            if batch is not None:
                grads[1:] = [batch.sum(each) for each in grads[1:]]
                whole = [torch.zeros_like(x), torch.zeros_like(x)]
                whole[0][own], whole[1][own] = y.detach(), grads[0]
                found.append([*(batch.sum(each) for each in whole), *grads[1:], mean, var])
            else:
                found.append([y.detach(), *grads, mean, var])
        worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(*found, strict=True)))
    return worst


def stays_synchronised() -> bool:
    model = sync_batch_norm(normed_expert())
    kind, batch = type(model[1]), model[1].global_batch
    with spread_batch(model, GlobalBatch()):
        bound = model[1].global_batch is not batch
    return bound and type(model[1]) is kind and model[1].global_batch is batch


def gathered_parts() -> list[Any]:
    batch, rank = GlobalBatch(), torch.distributed.get_rank()
    own = torch.arange(3)[:, None] if rank else torch.empty(0, 1, dtype=torch.int64)
    torch.manual_seed(5)
    with batch.part(0 if rank == 0 else 2, 2, 4):
        drawn = batch.draw(torch.zeros(2, 3), torch.rand_like)
        other = batch.draw(torch.zeros(5), torch.rand_like)  # not the samples of this rank
    return [batch.gather(own).flatten().tolist(), drawn.tolist(), other.tolist(), float(torch.rand(()))]


def test_norms_of_unequal_parts_are_those_of_the_whole(of_two):
    assert of_two["norm"] < 1e-12


def test_samples_and_random_numbers_are_those_of_the_whole_batch(of_two):
    (samples, *first), (again, *second) = of_two["gather"], of_two["other rank"]["gather"]
    assert samples == again == [0, 1, 2]
    torch.manual_seed(5)
    assert torch.tensor(first[0] + second[0]).equal(torch.rand(4, 3))
    assert first[1] != second[1]
    assert first[2] == second[2]  # generators stay in the same state


# training loops of one's own


def loop_of(name: str, wrap: Any, ranks: int = 2) -> float:
    """The distance from one process after three steps, in a loop with torch's wrappers and equal parts."""
    rank = torch.distributed.get_rank()
    size = CASES[name][1]
    x = torch.randn(8, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(8) % 2
    states: list[dict[str, Tensor]] = []
    for spread in (False, True):
        model = made(name)
        for module in model.modules():
            if isinstance(module, SampleMoE):
                module.noise = None  # all go to the first expert: the others have no samples on any rank
        run, part = model, slice(None)
        if spread:
            run, part = wrap(sync_batch_norm(model)), slice(8 // ranks * rank, 8 // ranks * (rank + 1))
        optimizer = torch.optim.SGD(run.parameters(), 0.05)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(run(x[part]), labels[part]).backward()
            optimizer.step()
        whole = (getattr(each, "full_tensor", lambda each=each: each)() for each in run.state_dict().values())
        states.append(dict(zip(model.state_dict(), (each.detach().clone() for each in whole), strict=True)))
    return largest(*states)


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fsdp(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


LOOPS = {
    f"{name} {wrap.__name__}": lambda name=name, wrap=wrap: loop_of(name, wrap)
    for name in ("PatchMoE", "expert norms", "SampleMoE", "gated")
    for wrap in (ddp, fsdp)
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_torchs_own_wrappers_train_our_layers(loop, of_two):
    assert of_two["loops"][loop] < 1e-8


def test_an_expert_without_samples_has_a_zero_gradient_in_a_process_group_only():
    def work() -> list[list[bool]]:
        found: list[list[bool]] = []
        for pad in (False, True):
            experts = [nn.Linear(3, 2) for _ in range(2)]
            layer = SampleMoE(nn.Linear(3, 2, bias=False), experts, noise=None, pad=pad)
            with torch.no_grad():
                layer.router.weight.zero_()
            layer(torch.ones(4, 3)).sum().backward()
            weight = layer.experts[1].weight
            found.append([weight.grad is None, weight.grad is not None and not weight.grad.any()])
        return found

    assert work() == [[True, False]] * 2
    for ranks in (1, 2):  # DistributedDataParallel expects all gradients of one rank as well
        assert run_ranks(ranks, work) == [[[False, True]] * 2] * ranks


@pytest.mark.parametrize("name", ["SampleMoE", "gated"])
def test_ddp_trains_our_networks_in_a_group_of_one_process(name):
    def work() -> float:
        return loop_of(name, ddp, 1)

    assert run_ranks(1, work)[0] < 1e-8


def test_the_reference_backend_has_the_statistics_of_the_whole_batch():
    x = torch.randn(5, 4, 8, 8, dtype=torch.float64)
    layer = PatchMoE(4, 4, experts=2, patches_per_expert=2, patch_size=4, kernel_size=3, expert_norm=True).double()

    def work() -> float:
        batch, rank = GlobalBatch(), torch.distributed.get_rank()
        own = x[:3] if rank == 0 else x[3:]
        found: list[list[Tensor]] = []
        for name in ("torch", "reference"):
            model = copy.deepcopy(layer)
            with spread_batch(model, batch), backend(name):
                y = model(own)
                y.square().sum().backward()
            found.append([y.detach(), model.experts.norm.running_var, *(each.grad for each in model.parameters())])
        return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))

    assert max(run_ranks(2, work)) < 1e-10


# refusals, and what stays


def refusals() -> list[str]:
    found: list[str] = []
    rank = torch.distributed.get_rank()
    for options in ({"seed": rank}, {"parallel": "fsdp", "recipe": replace(PLAIN, optimizer="normalized_gd")}):
        options = {"recipe": PLAIN, **options}
        try:
            fit(made("dense"), task(8), options.pop("recipe"), **options)
        except ValueError as error:
            found.append(str(error))

    def fails() -> None:
        raise OSError("no such folder")

    try:
        ranks_module.join_job(CPU).run_first(fails)
    except (OSError, ranks_module.RankError) as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


def test_ranks_that_cannot_train_together_say_why(of_two):
    settings, optimizer, first = of_two["errors"]
    other_settings, _, other = of_two["other rank"]["errors"]
    assert "another rank says which" in settings
    assert "seed=1 here and 0 on rank 0" in other_settings
    assert "'normalized_gd' with parallel='fsdp'" in optimizer
    assert first == "OSError: no such folder"
    assert other == "RankError: fit: the first rank has stopped, and its message says why"


def test_the_model_is_as_before_but_for_its_weights():
    model = made("SampleMoE")
    classes = [type(module) for module in model.modules()]

    def work() -> list[bool]:
        with attached(model, create_parallel("ddp", CPU)) as run:
            changed = [type(module) for module in run.modules()] != classes
        hooks = any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
        return [changed, [type(module) for module in model.modules()] == classes, hooks, model.global_batch is None]

    assert run_ranks(2, work) == [[True, True, False, True]] * 2


def test_one_process_is_no_job():
    assert ranks_module.join_job(CPU) is None
    assert create_parallel("fsdp", CPU).ranks is None


def test_ranks_do_not_wait_for_each_other_without_their_torchrun(monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    job = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in (job | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "2"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConnectionError, match="torchrun has ended before its ranks met; start the job again"):
        ranks_module.join_job("cpu")


def test_a_rank_takes_the_gpu_of_its_place_on_the_machine_unless_one_is_named(monkeypatch):
    cuda, third = torch.device("cuda"), torch.device("cuda", 2)
    assert [ranks_module.local_device(each) for each in (CPU, cuda, third)] == [CPU, cuda, third], "outside of a job"
    job = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    found = [ranks_module.local_device(each) for each in (CPU, cuda, third)]
    assert found == [CPU, torch.device("cuda", 1), third]


def test_a_norm_with_a_forward_of_its_own_is_refused():
    class OwnNorm(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    def work() -> str:
        try:
            sync_batch_norm(nn.Sequential(OwnNorm(3)))
        except ValueError as error:
            return str(error)
        return ""

    assert all("OwnNorm has a BatchNorm of its own" in found for found in run_ranks(2, work))


def test_the_command_trains_on_ranks_that_torchrun_has_started(tmp_path, monkeypatch, capfd):
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    for kind, colour in (("cat", 0), ("dog", 2)):
        Path("pets", kind).mkdir(parents=True)
        for number in range(12):
            pixels = torch.randint(0, 120, (8, 8, 3), generator=generator, dtype=torch.uint8)
            pixels[2:6, 2:6, colour] += 120
            Image.fromarray(pixels.numpy()).save(Path("pets", kind, f"{number}.png"))
    command = ["train", "pets", "--model", "wrn10_1_pmoe", "--epochs", "2", "--img-size", "16", "--batch-size", "8"]
    command += ["--device", "cpu", "--cache-dir", "cache", "--out"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def work() -> int:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}
        return main([*command, "two"])

    assert main([*command, "one"]) == 0
    assert run_ranks(2, work, group=False) == [0, 0]
    results = [json.loads(Path(folder, "result.json").read_text()) for folder in ("one", "two")]
    losses = [[epoch["loss"] for epoch in result["epochs"]] for result in results]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    predictions = [read_predictions(Path(folder, PREDICTIONS), 2) for folder in ("one", "two")]
    assert torch.equal(predictions[0].labels, predictions[1].labels)  # of all test images, in their order
    assert Path("two", "report.html").is_file()
    assert json.loads(Path("two", "config.json").read_text())["ranks"] == {"count": 2, "parallel": "ddp"}
    assert main([*command, "two"]) == 0  # complete, also for one process
