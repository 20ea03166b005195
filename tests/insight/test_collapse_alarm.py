"""The alarm warns once, in training only, and with the numbers; the check names the layer."""

import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from moesaic.insight import CollapseAlarm, CollapseEvent, CollapseWarning, check_scores
from moesaic.layers import RoutedLayer, routing_hook
from moesaic.routing import ExpertChoice, SoftRouter, TokenChoice
from moesaic.routing_record import Routing


class Scored(RoutedLayer):
    """A routed layer that takes scores for its input and returns them."""

    def __init__(self, router: ExpertChoice | TokenChoice | SoftRouter) -> None:
        super().__init__()
        self.router = router

    def forward(self, scores: Tensor) -> Tensor:
        return self._call_routing_hooks(self.router.choose(scores)).scores


def token_choice(experts: int) -> Scored:
    return Scored(TokenChoice(1, experts=experts))


def expert_choice(experts: int, patches_per_expert: int) -> Scored:
    return Scored(ExpertChoice(1, experts=experts, patches_per_expert=patches_per_expert))


def favouring(experts: int, favoured: list[int], batch: int = 2, units: int = 8) -> Tensor:
    """Scores by which units go in turn to the favoured experts."""
    chosen = torch.tensor(favoured).repeat(batch * units)[: batch * units]
    return nn.functional.one_hot(chosen, experts).float().view(batch, units, experts)


def watch(alarm: CollapseAlarm, layer: nn.Module, *passes: Tensor) -> None:
    with alarm:
        for scores in passes:
            layer(scores)


def test_dead_experts_raise_one_warning_with_the_numbers():
    model = nn.Sequential(nn.Identity(), token_choice(4))
    with pytest.warns(CollapseWarning) as caught:
        watch(CollapseAlarm(model, every=5), model, *[favouring(4, [0, 2])] * 20)
    [warning] = caught
    message = str(warning.message)
    assert "layer '1', last 5 of 5 training passes" in message
    assert "2 of 4 experts are dead: 1 (0.00% of the load), 3 (0.00% of the load)" in message
    assert "equal share is 25.00%, the limit 2.50%" in message
    assert "balance loss" in message


def test_the_warning_carries_the_event():
    model = nn.Sequential(nn.Identity(), token_choice(4))
    with pytest.warns(CollapseWarning) as caught:
        watch(CollapseAlarm(model, every=5), model, *[favouring(4, [0, 2])] * 5)
    warning = caught[0].message
    assert isinstance(warning, CollapseWarning)
    assert warning.event == CollapseEvent("1", "dead", (1, 3), (0.5, 0.0, 0.5, 0.0), 0.0, 0.0, 0.025, 5, 5)


def test_events_are_handed_to_on_collapse_in_place_of_warnings():
    events: list[CollapseEvent] = []
    layer = expert_choice(experts=3, patches_per_expert=2)
    alike = torch.arange(16.0).view(1, 16, 1).expand(2, 16, 3)
    watch(CollapseAlarm(layer, every=2, on_collapse=events.append), layer, *[alike] * 6)
    [event] = events
    assert (event.layer, event.kind, event.experts, event.window, event.passes) == ("", "copies", (0, 1, 2), 2, 2)
    assert (event.overlap, event.limit) == pytest.approx((1.0, 0.9067), abs=1e-3)
    assert event.load == pytest.approx((1 / 3,) * 3)
    assert event.message.startswith("the layer: the experts choose the same units")


def test_each_layer_warns_for_itself():
    model = nn.Sequential(token_choice(2), token_choice(2))
    with pytest.warns(CollapseWarning) as caught:
        watch(CollapseAlarm(model, every=1), model, *[favouring(2, [0])] * 3)
    assert [str(warning.message).split(",")[0] for warning in caught] == [
        "CollapseAlarm: layer '0'",
        "CollapseAlarm: layer '1'",
    ]


def test_balanced_experts_raise_no_alarm():
    layer = token_choice(4)
    watch(CollapseAlarm(layer, every=1, threshold=1.0), layer, favouring(4, [0, 1, 2, 3]))


def test_the_load_is_that_of_the_whole_window_and_of_nothing_before_it():
    layer = token_choice(2)
    first, second = favouring(2, [0]), favouring(2, [1])
    alarm = CollapseAlarm(layer, every=2)
    watch(alarm, layer, *[first, second] * 3)  # each pass alone would be a collapse
    with pytest.warns(CollapseWarning, match="last 2 of 8 training"):
        watch(alarm, layer, first, first)


def test_eval_passes_do_not_count():
    layer = token_choice(2)
    with CollapseAlarm(layer, every=2):
        layer.eval()
        for _ in range(5):
            layer(favouring(2, [0]))
        layer.train()
        layer(favouring(2, [0]))


def test_an_alarm_entered_again_goes_on_counting_and_does_not_repeat_itself():
    layer = token_choice(2)
    alarm, collapsed = CollapseAlarm(layer, every=2), favouring(2, [0])
    watch(alarm, layer, collapsed)
    layer(collapsed)  # not watched
    with pytest.warns(CollapseWarning):
        watch(alarm, layer, collapsed)
    watch(alarm, layer, collapsed, collapsed)


def test_an_alarm_without_an_interval_checks_when_it_is_asked_what_was_not_cleared():
    events: list[CollapseEvent] = []
    layer = token_choice(2)
    alarm = CollapseAlarm(layer, every=None, on_collapse=events.append)
    watch(alarm, layer, *[favouring(2, [0])] * 3)
    addresses = {name: tensor.data_ptr() for name, tensor in alarm.tensors().items()}
    alarm.clear()
    alarm.check()
    assert events == [], "nothing is left to check"
    watch(alarm, layer, *[favouring(2, [0])] * 2)
    alarm.check()
    assert [(event.experts, event.window) for event in events] == [((1,), 2)]
    assert {name: tensor.data_ptr() for name, tensor in alarm.tensors().items()} == addresses


def test_an_alarm_cannot_be_entered_twice_at_once():
    with CollapseAlarm(token_choice(2)) as alarm, pytest.raises(RuntimeError, match="already watching"), alarm:
        pass


def test_a_warning_made_an_error_is_raised_once():
    layer = token_choice(2)
    with warnings.catch_warnings(), CollapseAlarm(layer, every=1):
        warnings.simplefilter("error")
        with pytest.raises(CollapseWarning):
            layer(favouring(2, [0]))
        layer(favouring(2, [0]))


def test_soft_experts_die_when_their_weight_vanishes():
    layer = Scored(SoftRouter(1, experts=2))
    with pytest.warns(CollapseWarning, match=r"1 of 2 experts are dead: 1 \(0.00% of the load\)"):
        watch(CollapseAlarm(layer, every=1), layer, 10 * favouring(2, [0]))


def test_experts_that_choose_the_same_patches_raise_the_alarm():
    layer = expert_choice(experts=3, patches_per_expert=2)
    alike = torch.arange(16.0).view(1, 16, 1).expand(2, 16, 3)
    with pytest.warns(CollapseWarning) as caught:
        watch(CollapseAlarm(layer, every=2), layer, *[alike] * 6)
    [warning] = caught
    message = str(warning.message)
    assert "choose the same units: mean overlap 1.000, where random choices give 0.067" in message
    assert "the limit is 0.907" in message


def test_experts_that_choose_at_random_raise_no_alarm_however_much_they_must_overlap():
    torch.manual_seed(0)
    for patches_per_expert in (1, 2, 8, 15):
        layer = expert_choice(experts=3, patches_per_expert=patches_per_expert)
        watch(CollapseAlarm(layer, every=4), layer, *torch.randn(4, 16, 16, 3))


@pytest.mark.parametrize(("experts", "patches_per_expert", "units"), [(3, 4, 4), (1, 2, 4), (2, 1, 1)])
def test_experts_without_a_choice_or_without_company_are_no_copies(experts, patches_per_expert, units):
    layer = expert_choice(experts, patches_per_expert)
    alike = torch.arange(float(units)).view(1, units, 1).expand(7, units, experts)
    watch(CollapseAlarm(layer, every=1, copies=0.01), layer, alike)


def test_windows_of_empty_batches_say_nothing():
    for layer in (token_choice(2), expert_choice(2, 1)):
        watch(CollapseAlarm(layer, every=1), layer, torch.zeros(0, 4, 2))


def test_maps_of_changing_size_can_be_watched():
    layer = expert_choice(experts=2, patches_per_expert=1)
    with pytest.warns(CollapseWarning, match=r"mean overlap 1\.000"):
        watch(CollapseAlarm(layer, every=2), layer, torch.zeros(2, 9, 2), torch.zeros(2, 16, 2))


@pytest.mark.parametrize("layer", [token_choice(2), expert_choice(2, 1)], ids=["units", "experts"])
def test_only_a_look_waits_for_the_device(layer):
    # fake tensors have no numbers: whoever waits for one gets an error
    with FakeTensorMode(), CollapseAlarm(layer, every=3):
        scores = torch.zeros(2, 4, 2)
        layer(scores)
        layer(scores)
        with pytest.raises(DataDependentOutputException):
            layer(scores)


def test_a_compiled_model_is_watched_without_compiling_it_again():
    layer = token_choice(2)
    compiled = torch.compile(layer, backend="eager")
    with pytest.warns(CollapseWarning) as caught, torch._dynamo.config.patch(error_on_recompile=True):
        watch(CollapseAlarm(compiled, every=3), compiled, *[favouring(2, [0])] * 6)
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [({"every": 0}, "every=0"), ({"threshold": 2.0}, "threshold=2.0"), ({"copies": 0.0}, "copies=0.0")],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=f"CollapseAlarm: {message}.* at"):
        CollapseAlarm(token_choice(2), **options)


def test_a_model_without_routed_layers_is_refused_and_can_be_retried():
    model = nn.Sequential()
    alarm = CollapseAlarm(model)
    with pytest.raises(ValueError, match="no routed layer"), alarm:
        pass
    model.append(token_choice(2))
    with alarm:
        model(favouring(2, [0, 1]))


@pytest.mark.parametrize(("value", "counts"), [(math.nan, "1 NaN, 0 infinite"), (-math.inf, "0 NaN, 1 infinite")])
def test_scores_that_are_no_numbers_are_named_with_their_layer(value, counts):
    model = nn.Sequential(token_choice(2), token_choice(2))
    scores = torch.zeros(2, 4, 2)
    with check_scores(model):
        model(scores)
    scores[1, 3, 0] = value
    message = rf"layer '0': 1 of 16 scores are not finite \({counts}\), shape \(2, 4, 2\), first at \(1, 3, 0\)"
    with pytest.raises(FloatingPointError, match=message), check_scores(model):
        model(scores)
    model(scores)  # not watched


def test_a_model_that_is_itself_the_layer_has_no_name_to_tell():
    layer = token_choice(2)
    with pytest.raises(FloatingPointError, match="check_scores: the layer: 16 of 16"), check_scores(layer):
        layer(torch.full((2, 4, 2), math.nan))


def test_routing_is_watched_with_its_graph_intact():
    layer = expert_choice(experts=2, patches_per_expert=1)
    scores = torch.zeros(2, 4, 2)
    scores[:, 0, 0] = scores[:, 1, 1] = 1  # experts that choose the same patch would be reported
    scores.requires_grad_()
    seen: list[Routing] = []
    with (
        routing_hook(layer, lambda name, layer, routing: seen.append(routing)),
        CollapseAlarm(layer, every=1),
        check_scores(layer),
    ):
        layer(scores)
    seen[0].gate.sum().backward()
    assert scores.grad is not None
