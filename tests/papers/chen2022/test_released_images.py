"""Table 2 as released: each deviation of the authors' code against a naive loop, the cells, and the rules."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cifar_files import write_cifar10
from torch import Tensor, nn

from moesaic.data.image_dataset import ImageDataset, LabelledImages
from moesaic.models.image_classifier import ImageClassifier
from moesaic.papers.chen2022 import image_networks
from moesaic.papers.chen2022.claims_released_images import CHECKS, GPU_HOURS
from moesaic.papers.chen2022.experiments_images import ImageCell, ImageResult, ReleasedImageCell, plan
from moesaic.papers.chen2022.figures_images import charts
from moesaic.papers.chen2022.image_networks import BlackImageMoE, image_network, released_image_mixture
from moesaic.papers.chen2022.image_training import ImageSchedule, ReleasedImageSchedule, evaluate_images, train_images
from moesaic.papers.engine.decision_rules import CheckResult
from moesaic.papers.engine.paper import NEEDS_SHORT_PRESET, ExperimentResults
from moesaic.papers.engine.runner import Runner
from moesaic.training import NoProgress, ResultCache
from moesaic.training.batches import generator_seed

SCHEDULE = ReleasedImageSchedule(epochs=3, learning_rate=0.05, router_rate=0.02, batch=12)
EXPERTS = 3


class Tiny(ImageClassifier):
    """Convolution, BatchNorm, average pooling; what it is called is decided by the test."""

    def __init__(self, num_classes: int) -> None:
        body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        super().__init__(body, 4, num_classes)


def wide(pixels: Tensor, rand: Tensor) -> Tensor:
    return pixels.double() / 128 - 0.9


def some_images(count: int, seed: int) -> LabelledImages:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    pixels = torch.randint(256, (count, 3, 8, 8), generator=generator, dtype=torch.uint8)
    pixels[:, 0, 0, 0] = (200 * labels).to(torch.uint8)  # by which the naive loop knows the label
    return LabelledImages(pixels, labels, labels)


TASK = ImageDataset(some_images(36, 0), some_images(20, 1), ("a", "b"), ("a", "b"), wide, wide)


@pytest.fixture
def tiny_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_networks, "IMAGE_NETWORKS", dict.fromkeys(("resnet18", "mobilenetv2", "cnn"), Tiny))


def mixture(name: str, *, black_images: bool = True) -> BlackImageMoE:
    torch.manual_seed(5)
    return released_image_mixture(name, 2, EXPERTS, black_images=black_images).double()


class Naive:
    """Training as the authors' code does it, step by step and with nothing of this package."""

    def __init__(self, experts: list[nn.Module], runs_per_step: int, black_images: bool) -> None:
        self.experts, self.runs, self.black = experts, runs_per_step, black_images
        self.weight = torch.zeros(EXPERTS, 3, 4, 4, dtype=torch.float64, requires_grad=True)
        self.bias = torch.zeros(EXPERTS, dtype=torch.float64, requires_grad=True)
        self.momentum: dict[int, Tensor] = {}

    def outputs(self, x: Tensor, noise: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
        """The softmax of the gated outputs, the gates before the choice, and the chosen expert."""
        scores = nn.functional.conv2d(x, self.weight, self.bias, stride=4).sum((2, 3)) + noise
        gates, chosen = scores.exp() / scores.exp().sum(1, keepdim=True), scores.argmax(1)
        y = torch.zeros(len(x), 2, dtype=torch.float64)
        for e, expert in enumerate(self.experts):
            own = chosen == e
            if self.black:
                picture = x * own[:, None, None, None]
                for _ in range(self.runs):
                    out = expert(picture)
                y = y + torch.where(own[:, None], gates[:, e : e + 1] * out, 0)
            elif own.any():
                for _ in range(self.runs):
                    out = expert(x[own])
                y = y.index_add(0, own.nonzero()[:, 0], gates[own, e, None] * out)
        return y.softmax(1), gates, chosen

    def step(self, x: Tensor, labels: Tensor, noise: Tensor, rate: float) -> float:
        parameters = [each for expert in self.experts for each in expert.parameters()] + [self.weight, self.bias]
        for each in parameters:
            each.grad = None
        probabilities, gates, chosen = self.outputs(x, noise)
        loss = -probabilities.softmax(1).log()[torch.arange(len(x)), labels].mean()
        density = nn.functional.one_hot(chosen, EXPERTS).double().mean(0)
        (loss + 0.01 * EXPERTS**2 * (density * gates.mean(0)).mean()).backward()
        with torch.no_grad():
            for expert in self.experts:
                gradients = {w: w.grad for w in expert.parameters() if w.grad is not None}
                total = sum(float(g.norm()) for g in gradients.values())
                for w, g in gradients.items():
                    self.move(w, g / total if total else g, rate)
            for w in (self.weight, self.bias):
                assert w.grad is not None
                self.move(w, w.grad, SCHEDULE.router_rate)
        return loss.item()

    def move(self, w: Tensor, direction: Tensor, rate: float) -> None:
        direction = direction + 5e-4 * w
        before = self.momentum.get(id(w))
        self.momentum[id(w)] = direction if before is None else 0.9 * before + direction
        w -= rate * self.momentum[id(w)]


@pytest.mark.usefixtures("tiny_networks")
@pytest.mark.parametrize("black_images", [True, False])
@pytest.mark.parametrize(("name", "runs_per_step"), [("resnet18", 2), ("mobilenetv2", 1)])
def test_training_is_that_of_the_authors_code(name, runs_per_step, black_images):
    model = mixture(name, black_images=black_images)
    experts = [Tiny(2).double() for _ in range(EXPERTS)]
    for own, theirs in zip(experts, model.experts.children(), strict=True):
        own.load_state_dict(theirs.state_dict())
    batches: list[Tensor] = []
    outputs: list[Tensor] = []

    def record(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        if module.training:
            batches.append(args[0].clone())
            outputs.append(output.detach().clone())

    model.register_forward_hook(record)
    epochs = train_images(model, TASK, SCHEDULE, seed=7)

    naive = Naive(experts, runs_per_step, black_images)
    noise = torch.Generator().manual_seed(generator_seed(7, "noise cpu"))
    for epoch in range(3):
        rate = 0.05 * 0.5 * (1 + math.cos(math.pi * epoch / 200))
        losses = []
        for x, output in list(zip(batches, outputs, strict=True))[3 * epoch : 3 * epoch + 3]:
            drawn = torch.rand(12, 1, EXPERTS, generator=noise, dtype=torch.float64)[:, 0]
            labels = (x[:, 0, 0, 0] > 0).long()
            losses.append(naive.step(x, labels, drawn, rate))
            assert nn.functional.cross_entropy(output, labels).item() == pytest.approx(losses[-1], abs=1e-8)
        assert epochs[epoch].loss == pytest.approx(sum(losses) / 3, abs=1e-7)  # of which a float32 is recorded
    for own, theirs in zip(experts, model.experts.children(), strict=True):
        ours, expected = theirs.state_dict(), own.state_dict()
        for key in expected:
            if "num_batches" not in key:
                torch.testing.assert_close(ours[key], expected[key], rtol=0, atol=1e-8)
    torch.testing.assert_close(model.router.weight, naive.weight, rtol=0, atol=1e-8)
    torch.testing.assert_close(model.router.bias, naive.bias, rtol=0, atol=1e-8)
    assert model.router.bias.abs().sum() > 0

    for expert in experts:
        expert.eval()
    images = wide(TASK.test.pixels, torch.empty(0))
    with torch.no_grad():
        probabilities, _, chosen = naive.outputs(images, 0.0)
        torch.testing.assert_close(model.eval()(images), probabilities, rtol=0, atol=1e-8)
    tested = evaluate_images(model, TASK)
    assert tested.experts is not None
    assert tested.experts.tolist() == chosen.tolist()


@pytest.mark.usefixtures("tiny_networks")
def test_black_images_are_what_batchnorm_averages():
    model = mixture("mobilenetv2").train()
    with torch.no_grad():
        model.router.weight[1] = 1e3
        model.router.weight[0] = -1e3
    model(torch.ones(6, 3, 8, 8, dtype=torch.float64))  # all images to expert 1
    idle = next(iter(model.experts.children())).body
    bias = idle[0].bias
    torch.testing.assert_close(idle[1].running_mean, 0.1 * bias)  # what a convolution makes of black


@pytest.mark.usefixtures("tiny_networks")
def test_a_single_network_trains_as_printed_but_for_its_rate():
    torch.manual_seed(0)
    first, second = (image_network("resnet18", 2).double() for _ in range(2))
    second.load_state_dict(first.state_dict())
    assert ReleasedImageSchedule(10, 0.01).rate(9) == pytest.approx(0.01, rel=0.01)
    constant = ImageSchedule(1, 0.05, batch=12)
    one = train_images(first, TASK, replace(SCHEDULE, epochs=1))
    other = train_images(second, TASK, constant)
    assert one[0].loss == other[0].loss  # the cosine starts at one in both


@pytest.mark.usefixtures("tiny_networks")
def test_the_seed_decides_everything():
    first, again, other = (train_images(mixture("resnet18"), TASK, SCHEDULE, seed=seed) for seed in (3, 3, 4))
    assert [epoch.loss for epoch in first] == [epoch.loss for epoch in again]
    assert [epoch.loss for epoch in first] != [epoch.loss for epoch in other]


# Cells

SMALL = ReleasedImageCell(
    "rotate-sharp", "cnn", True, ReleasedImageSchedule(2, 0.01, batch=16), trial=0, images_per_file=20, on_cpu=True
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cifar10(tmp_path_factory.mktemp("data"))


class Interrupted(NoProgress):
    """Stops the run when its third epoch begins."""

    left = 2

    def advance(self, amount: int, note: str = "") -> None:
        self.left -= amount
        if self.left < 0:
            raise KeyboardInterrupt


def runner(out: Path, folder: Path, progress: NoProgress | None = None) -> Runner:
    return Runner(ResultCache(out), folder, device="cpu", seed=0, progress=progress or NoProgress())


@pytest.mark.usefixtures("tiny_networks")
def test_an_interrupted_run_goes_on_with_the_cells_that_are_missing(folder, tmp_path):
    cells = {"mixture": SMALL, "single": replace(SMALL, mixture=False)}
    with pytest.raises(KeyboardInterrupt):
        runner(tmp_path / "stopped", folder, Interrupted()).run(cells)
    assert len(list((tmp_path / "stopped").glob("*.json"))) == 1
    resumed = runner(tmp_path / "stopped", folder).run(cells)
    whole = runner(tmp_path / "whole", folder).run(cells)
    for name in cells:
        ours, theirs = resumed[name].result, whole[name].result
        np.testing.assert_array_equal(ours.losses, theirs.losses)
        np.testing.assert_array_equal(ours.accuracies, theirs.accuracies)
        np.testing.assert_array_equal(ours.blurred_accuracies, theirs.blurred_accuracies)
        assert len(ours.blurred_accuracies) == 2
    single = whole["single"].result
    assert single.dispatch.size == 0
    assert whole["mixture"].result.dispatch.sum() == 40


@pytest.mark.usefixtures("tiny_networks")
def test_blurred_test_images_are_those_of_the_printed_task(folder, tmp_path):
    """A single network trains as printed but for its rate, which in the first epoch is the same."""
    one = ReleasedImageSchedule(1, 0.01, batch=16)
    released = replace(SMALL, mixture=False, schedule=one)
    printed = ImageCell("rotate", "cnn", False, ImageSchedule(1, 0.01, batch=16), 0, images_per_file=20, on_cpu=True)
    found = runner(tmp_path, folder).run({"released": released, "printed": printed})
    ours, theirs = found["released"].result, found["printed"].result
    np.testing.assert_array_equal(ours.losses, theirs.losses)
    np.testing.assert_array_equal(ours.blurred_accuracies, theirs.accuracies)


def test_specifications_tell_the_forms_apart_and_are_plain_json(folder, tmp_path):
    here = runner(tmp_path, folder)
    printed = ImageCell("rotate-sharp", "cnn", True, ImageSchedule(2, 0.01, batch=16), 0, images_per_file=20)
    specs = [SMALL.spec(here), replace(SMALL, black_images=False).spec(here), printed.spec(here)]
    assert len({json.dumps(spec, sort_keys=True) for spec in specs}) == 3
    assert specs[0]["schedule"]["decay_epochs"] == 200
    assert "black_images" not in specs[2]
    assert "decay_epochs" not in specs[2]["schedule"]


# The plan and the rules


def test_only_the_full_plan_has_the_runs_of_the_authors_code():
    assert plan("quick", "released") == plan("short", "released") == {}
    cells = plan("full", "released")
    lengths = {"resnet18": (10, 5), "mobilenetv2": (30, 5)}
    assert len(cells) == 2 * 5 * 3
    for name, cell in cells.items():
        assert isinstance(cell, ReleasedImageCell)
        epochs, trials = lengths[cell.network]
        assert (cell.task, cell.schedule.epochs) == ("rotate-sharp", epochs)
        assert cell.trial < trials
        schedule = cell.schedule
        assert (schedule.learning_rate, schedule.router_rate, schedule.balance) == (0.01, 1e-4, 0.01)
        assert (schedule.batch, schedule.momentum, schedule.weight_decay) == (128, 0.9, 5e-4)
        assert (cell.mixture, cell.black_images) == ("/single/" not in name, "/no-black/" not in name)


def test_claims_tell_what_they_cost_where_they_do_not_run():
    for check in CHECKS:
        assert check.fidelities == ("released",)
        assert not check.can_run(plan("short", "released"))
        assert check.can_run(plan("full", "released"), "full")
        assert check.missing != NEEDS_SHORT_PRESET
        assert "GPU hours" in check.missing
    (black,) = (check for check in CHECKS if check.claim.id == "table2-released-mobilenetv2-black")
    hours = GPU_HOURS["mobilenetv2"]
    assert f"{hours['mixture'] + hours['no-black']:.1f} GPU hours" in black.missing


def run(best: float, blurred: float = 90.0) -> ImageResult:
    curve, none = np.array([50.0, best, best - 7]), np.empty(0)
    return ImageResult(best - 7, 20_000, curve, none, none, none, None, np.array([60.0, blurred - 3, blurred]))


def results(**runs: list[ImageResult]) -> ExperimentResults[ImageResult]:
    named = {
        f"images/released/resnet18/{kind.replace('_', '-')}/{trial}": each
        for kind, some in runs.items()
        for trial, each in enumerate(some)
    }
    return ExperimentResults(dict.fromkeys(named, SMALL), named, None)  # pyright: ignore[reportArgumentType]


def evaluate(id: str, **runs: list[ImageResult]) -> CheckResult:
    (check,) = (check for check in CHECKS if check.claim.id == id)
    return check.evaluate(results(**runs))


def test_the_chart_has_a_curve_for_each_kind_of_network_that_ran():
    runs = {"single": [run(88.0)] * 2, "mixture": [run(91.0), run(93.0)]}
    (chart,) = charts({"released": results(**runs)})
    (panel,) = chart.panels
    assert [(line.label, line.y[1]) for line in panel.series] == [("single network", 88.0), ("mixture of four", 92.0)]
    assert charts({"released": results()}) == []


@pytest.mark.parametrize(
    ("leads", "verdict"),
    [((4.0, 5.0, 4.5), "holds"), ((-4.0, -5.0, -4.5), "fails"), ((-4.0, 5.0, 1.0), "undecided")],
)
def test_the_best_epoch_of_each_run_decides(leads, verdict):
    found = evaluate("table2-released-resnet18", single=[run(88.0)] * 3, mixture=[run(88.0 + lead) for lead in leads])
    assert found.verdict.startswith(verdict)
    assert found.measured == pytest.approx(np.mean(leads))


@pytest.mark.parametrize(
    ("accuracies", "verdict"),
    [((88.0, 88.5, 88.2), "holds"), ((80.0, 80.5, 80.2), "fails"), ((82.0, 95.0, 88.0), "undecided")],
)
def test_accuracies_are_compared_with_the_printed_ones(accuracies, verdict):
    found = evaluate("table2-released-resnet18-single", single=[run(each) for each in accuracies])
    assert found.verdict.startswith(verdict)


@pytest.mark.parametrize(
    ("blurred", "verdict"), [((95.0, 95.1, 95.2), "holds"), ((99.0, 99.1, 99.2), "fails"), ((95.0, 99.0, 97.0), "und")]
)
def test_blur_matters_if_the_lead_is_smaller_with_it(blurred, verdict):
    found = evaluate(
        "table2-released-resnet18-blur",
        single=[run(88.0, 94.0)] * 3,
        mixture=[run(91.0, each) for each in blurred],
    )
    assert found.verdict.startswith(verdict)
    assert found.measured == pytest.approx(np.mean([3 - (each - 94) for each in blurred]))


@pytest.mark.parametrize(
    ("without", "verdict"), [((88.0, 88.1, 88.2), "holds"), ((95.0, 95.1, 95.2), "fails"), ((88.0, 95.0, 91.0), "und")]
)
def test_black_images_matter_if_the_mixture_is_worse_without(without, verdict):
    found = evaluate(
        "table2-released-resnet18-black", mixture=[run(91.0)] * 3, no_black=[run(each) for each in without]
    )
    assert found.verdict.startswith(verdict)
    assert found.measured == pytest.approx(91 - np.mean(without))
