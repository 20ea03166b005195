"""A recipe says how a network learns, and refuses what makes no sense."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesaic.training.recipe import Recipe


def test_a_cosine_begins_at_the_learning_rate_and_ends_near_0():
    recipe = Recipe(epochs=10, lr=0.2, warmup_epochs=0)
    rates = [recipe.lr_at(epoch / 4) for epoch in range(41)]
    assert rates[0] == 0.2
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0, abs=1e-12)


def test_steps_fall_to_a_tenth_at_each_milestone():
    recipe = Recipe(epochs=100, lr=1.0, schedule="step", milestones=(0.3, 0.6), warmup_epochs=0)
    assert [recipe.lr_at(epoch) for epoch in (0, 29.9, 30, 59, 60, 99)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_a_constant_rate_stays():
    assert {Recipe(epochs=9, lr=0.1, schedule="constant").lr_at(epoch) for epoch in range(1, 9)} == {0.1}


@pytest.mark.parametrize("schedule", ["cosine", "step", "constant"])
def test_a_warmup_grows_from_0_to_the_learning_rate_and_the_schedule_follows(schedule):
    recipe = Recipe(epochs=20, lr=1.0, schedule=schedule, warmup_epochs=4)
    assert [recipe.lr_at(epoch) for epoch in (0, 1, 3, 4)] == [0, 0.25, 0.75, 1.0]
    assert recipe.lr_at(19.9) <= 1.0


def test_a_warmup_of_all_epochs_is_a_straight_line():
    assert [Recipe(epochs=4, lr=1.0, warmup_epochs=4).lr_at(epoch) for epoch in (0, 2, 4)] == [0, 0.5, 1.0]


@given(images=st.integers(1, 5000), batch=st.integers(1, 300), accumulate=st.integers(1, 5))
def test_every_image_has_a_place_and_batches_are_as_even_as_they_can_be(images, batch, accumulate):
    recipe = Recipe(epochs=1, batch_size=max(batch, accumulate), grad_accum=accumulate)
    sizes = recipe.batch_sizes(images)
    assert sum(sizes) == images
    assert 1 <= min(sizes) <= max(sizes) <= recipe.batch_size
    assert max(sizes) - min(sizes) <= 1
    for size in set(sizes):
        parts = recipe.micro_batch_sizes(size)
        assert sum(parts) == size
        assert len(parts) == min(accumulate, size)
        assert max(parts) - min(parts) <= 1


def test_no_batch_of_one_image_is_left_over():
    assert min(Recipe(epochs=1, batch_size=128).batch_sizes(129)) == 64


def test_precision_is_float32_on_a_cpu_unless_asked_for():
    cpu = torch.device("cpu")
    assert Recipe(epochs=1).autocast_dtype(cpu) is None
    assert Recipe(epochs=1, precision="float32").autocast_dtype(cpu) is None
    assert Recipe(epochs=1, precision="float16").autocast_dtype(cpu) is torch.float16


def test_json_keeps_a_recipe():
    recipe = Recipe(epochs=7, schedule="step", milestones=(0.2, 0.9), ema_decay=0.99, clip_grad=1.0, router_lr=0.01)
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"epochs": 0}, "epochs=0; it must be at least 1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"optimizer": "adam"}, r"optimizer='adam' is unknown.*did you mean 'adamw'"),
        ({"schedule": "cosin"}, "schedule='cosin' is unknown"),
        ({"precision": "fp8"}, "precision='fp8' is unknown"),
        ({"lr": -0.1}, "lr=-0.1; it must be 0 or more"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"momentum": 1.0}, "momentum=1.0; it must be from 0 to below 1"),
        ({"ema_decay": 1.0}, "ema_decay=1.0; it must be above 0 and below 1"),
        ({"clip_grad": 0.0}, "clip_grad=0.0; it must be above 0"),
        ({"warmup_epochs": 6}, "warmup_epochs=6 is longer than epochs=5"),
        ({"grad_accum": 200}, "grad_accum=200 micro-batches of batch_size=128; use at most 128"),
        ({"milestones": (0.5, 60)}, r"milestones\[1\]=60; it must be a fraction of the epochs"),
        ({"router_lr": -1.0}, "router_lr=-1.0; it must be 0 or more"),
        ({"balance_weight": -1.0}, "balance_weight=-1.0; it must be 0 or more"),
    ],
)
def test_values_that_make_no_sense_are_refused(options, fault):
    with pytest.raises(ValueError, match=fault):
        Recipe(**{"epochs": 5, **options})


def test_a_rate_that_is_no_number_is_refused():
    with pytest.raises(TypeError, match="lr='fast' is a str"):
        Recipe(epochs=1, lr="fast")  # pyright: ignore[reportArgumentType]


def test_without_a_number_the_warmup_takes_a_twentieth_of_the_epochs():
    assert [Recipe(epochs=40, lr=1.0).lr_at(epoch) for epoch in (0.5, 1.0, 2.0)] == [0.25, 0.5, 1.0]


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.0, "weight_decay": 0.0, "balance_weight": 0.0, "router_lr": 0.0, "momentum": 0.0},
        {"label_smoothing": 0.0, "milestones": (0.0, 1.0), "warmup_epochs": 5},
        {"grad_accum": 128, "ema_decay": 0.001, "clip_grad": 1e-6},
    ],
)
def test_values_at_the_limits_are_taken(options):
    Recipe(**{"epochs": 5, **options})


def test_images_that_fill_one_batch_are_enough_where_the_rest_is_left_out():
    recipe = Recipe(epochs=1, batch_size=4, drop_last=True)
    assert recipe.batch_sizes(4) == [4]
    assert recipe.batch_sizes(11) == [4, 4]
    with pytest.raises(ValueError, match="batch_size=4, but there are 3 images"):
        recipe.batch_sizes(3)


def test_a_cosine_is_halfway_at_the_middle_of_what_follows_the_warmup():
    assert Recipe(epochs=12, lr=2.0, warmup_epochs=4).lr_at(8) == pytest.approx(1.0)
