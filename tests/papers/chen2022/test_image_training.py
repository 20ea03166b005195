"""Training on images: it learns, the seed decides everything, and single and mixture see the same."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from moesaic.data.image_dataset import ImageDataset, LabelledImages
from moesaic.layers import SampleMoE
from moesaic.models import SmallCNN
from moesaic.papers.chen2022.image_training import ImageSchedule, embed_images, evaluate_images, train_images
from moesaic.routing import SampleRouter
from moesaic.training import batches

SHORT = ImageSchedule(epochs=2, learning_rate=0.02, batch=16)


def some_images(count: int, seed: int) -> LabelledImages:
    """Bright stripes, lying (label 0) or standing (label 1), red (cluster 0) or blue (cluster 1)."""
    generator = torch.Generator().manual_seed(seed)
    labels, clusters = torch.arange(count) % 2, torch.arange(count) // 2 % 2
    stripes = (torch.arange(16) % 4 < 2).float()
    lying = stripes[:, None].expand(16, 16)
    shape = torch.where(labels[:, None, None] == 0, lying, lying.T)
    colour = torch.zeros(count, 3, 1, 1)
    colour[torch.arange(count), 2 * clusters] = 1.0
    noisy = 160 * shape[:, None] * colour + 90 * torch.rand(count, 3, 16, 16, generator=generator)
    return LabelledImages(noisy.to(torch.uint8), labels, clusters)


def centred(pixels: Tensor, rand: Tensor) -> Tensor:
    return pixels.float() / 128 - 0.5


TASK = ImageDataset(some_images(96, 0), some_images(40, 1), ("lying", "standing"), ("red", "blue"), centred, centred)


def network(seed: int = 0) -> SmallCNN:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SmallCNN(num_classes=2, filters=(4, 8), side=16)


def mixture(seed: int = 0) -> SampleMoE:
    return SampleMoE(SampleRouter(3, experts=3, patch_size=4), [network(10 * seed + e) for e in range(3)])


@pytest.mark.parametrize("make", [network, mixture])
def test_it_learns(make):
    epochs = train_images(make(), TASK, ImageSchedule(epochs=10, learning_rate=0.02, batch=16))
    assert epochs[-1].test.accuracy > 90
    assert epochs[-1].loss < 0.7 * epochs[0].loss


@pytest.mark.parametrize("make", [network, mixture])
def test_the_seed_decides_everything(make):
    first, again, other = (train_images(make(), TASK, SHORT, seed=seed) for seed in (3, 3, 4))
    assert [epoch.loss for epoch in first] == [epoch.loss for epoch in again]
    assert torch.equal(first[-1].test.correct, again[-1].test.correct)
    assert [epoch.loss for epoch in first] != [epoch.loss for epoch in other]


def seen(model: nn.Module) -> list[Tensor]:
    """The images that a model is trained on."""
    batches: list[Tensor] = []
    model.register_forward_pre_hook(lambda module, args: batches.append(args[0].clone()) if module.training else None)
    train_images(model, TASK, SHORT)
    return batches


def test_single_and_mixture_see_the_same_batches():
    single, mixed = seen(network()), seen(mixture())
    assert len(single) == len(mixed) == 12
    assert all(torch.equal(a, b) for a, b in zip(single, mixed, strict=True))


def test_every_image_is_seen_once_an_epoch_and_in_another_order_the_next():
    batches = seen(network())
    first, second = torch.cat(batches[:6]), torch.cat(batches[6:])
    assert len(first.flatten(1).unique(dim=0)) == len(TASK.train)
    assert torch.equal(first.flatten(1).sum(1).sort().values, second.flatten(1).sum(1).sort().values)
    assert not torch.equal(first, second)


def test_an_epoch_has_whole_batches_only():
    model = network()
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])) if module.training else None)
    train_images(model, TASK, replace(SHORT, epochs=1, batch=40))
    assert sizes == [40, 40]


def test_how_many_images_are_prepared_together_changes_nothing(monkeypatch):
    randomised = replace(
        TASK, train_transform=lambda pixels, rand: centred(pixels, rand) * rand[:, 0, None, None, None]
    )
    whole = train_images(network(), randomised, SHORT)
    monkeypatch.setattr(batches, "_MAX_PREPARED_IMAGES", 32)
    assert [epoch.loss for epoch in train_images(network(), randomised, SHORT)] == [epoch.loss for epoch in whole]


def test_random_numbers_are_new_in_every_epoch_but_the_same_in_every_test():
    rands: list[Tensor] = []
    tests: list[Tensor] = []

    def train_transform(pixels: Tensor, rand: Tensor) -> Tensor:
        rands.append(rand)
        return centred(pixels, rand)

    def eval_transform(pixels: Tensor, rand: Tensor) -> Tensor:
        tests.append(rand)
        return centred(pixels, rand)

    train_images(
        network(), replace(TASK, train_transform=train_transform, eval_transform=eval_transform), SHORT, seed=1
    )
    train_images(
        network(),
        replace(TASK, train_transform=train_transform, eval_transform=eval_transform),
        replace(SHORT, epochs=1),
        seed=2,
    )
    assert len({float(rand.sum()) for rand in rands}) == 3
    assert all(torch.equal(rand, tests[0]) for rand in tests)


def test_a_cosine_falls_and_a_constant_does_not():
    rates = [ImageSchedule(10, 0.1).rate(epoch) for epoch in range(10)]
    assert rates[0] == 0.1
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.003
    assert {ImageSchedule(10, 0.1, decay="constant").rate(epoch) for epoch in range(10)} == {0.1}


def test_experts_take_steps_of_the_learning_rate_and_the_router_none_at_rate_0():
    model = mixture()
    before = [torch.cat([w.detach().flatten() for w in expert.parameters()]) for expert in model.experts.children()]
    schedule = ImageSchedule(1, 0.5, router_rate=0.0, batch=96, momentum=0.0, weight_decay=0.0)
    train_images(model, TASK, schedule)
    for expert, start in zip(model.experts.children(), before, strict=True):
        moved = torch.cat([w.detach().flatten() for w in expert.parameters()]) - start
        assert float(moved.norm()) == pytest.approx(0.5, rel=1e-4)
    assert not model.router.weight.any()


def test_the_balance_loss_reaches_the_router():
    plain, balanced = mixture(), mixture()
    schedule = ImageSchedule(1, 0.0, batch=96, weight_decay=0.0)
    train_images(plain, TASK, replace(schedule, balance=0.0))
    train_images(balanced, TASK, replace(schedule, balance=10.0))
    assert not torch.equal(plain.router.weight, balanced.router.weight)


def by_colour() -> SampleMoE:
    """A mixture that sends red to expert 0 and blue to expert 1."""
    model = mixture()
    with torch.no_grad():
        model.router.weight[0, 0] = model.router.weight[1, 2] = 10.0
    return model


def test_a_test_tells_which_expert_each_image_went_to():
    found = evaluate_images(by_colour(), TASK)
    assert found.experts is not None
    assert found.experts.tolist() == TASK.test.clusters.tolist()
    assert evaluate_images(network(), TASK).experts is None


def test_a_test_leaves_the_model_in_its_mode():
    model = mixture()
    for mode in (True, False):
        model.train(mode)
        evaluate_images(model, TASK)
        embed_images(model, TASK, torch.arange(3))
        assert model.training == mode


def test_embeddings_are_the_features_in_the_expert_that_was_chosen():
    model = by_colour().eval()
    rows = torch.tensor([6, 0, 17, 31])
    experts = list(model.experts.children())
    for row, vector in zip(rows.tolist(), embed_images(model, TASK, rows), strict=True):
        x = centred(TASK.test.pixels[row : row + 1], torch.zeros(1, 3))
        assert torch.allclose(vector, experts[TASK.test.clusters[row]].features(x)[0], atol=1e-5)
    assert embed_images(network(), TASK, rows).shape == (4, 8 * 2 * 2)


def test_more_images_in_a_batch_than_there_are_is_refused():
    with pytest.raises(ValueError, match="batch_size=128, but there are 96 images to train on; use at most"):
        train_images(network(), TASK, ImageSchedule(1, 0.1))


def test_a_network_without_features_cannot_embed():
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 2))
    with pytest.raises(TypeError, match=r"Sequential has no features\(x\)"):
        embed_images(model, TASK, torch.arange(2))


def test_a_schedule_needs_epochs_and_a_known_decay():
    with pytest.raises(ValueError, match="epochs=0"):
        ImageSchedule(0, 0.1)
    with pytest.raises(ValueError, match="decay='cosin' is unknown"):
        ImageSchedule(1, 0.1, decay="cosin")  # pyright: ignore[reportArgumentType]


@pytest.mark.gpu
@pytest.mark.parametrize("make", [network, mixture])
def test_it_learns_on_a_gpu_in_bfloat16(make):
    epochs = train_images(make(), TASK, ImageSchedule(epochs=10, learning_rate=0.02, batch=16), device="cuda")
    assert epochs[-1].test.accuracy > 90
