"""A history gives back what was put in, on whatever model, and from disk too."""

import io

import numpy as np
import pytest
import torch
from torch import nn

import moesaic
from moesaic.insight import TrainingHistory, dispatch_entropy, expert_accuracy, inner_products, load_share


def small_track() -> TrainingHistory:
    history = TrainingHistory()
    for step in (0, 5, 20):
        history.add(step, {"layer 1/entropy": 1.0 / (1 + step)}, products=np.full((2, 3), step))
    history.add(20, seen=torch.tensor(7))
    return history


# Inner products and accuracies


def test_inner_products_are_the_largest_over_the_neurons_trial_by_trial():
    weights, directions = torch.randn(5, 3, 4, 6), torch.randn(2, 6)
    found = inner_products(weights, directions)
    assert found.shape == (5, 3, 2)
    for t in range(5):
        for e in range(3):
            for k in range(2):
                expected = max(abs(float(w @ directions[k])) for w in weights[t, e])
                assert float(found[t, e, k]) == pytest.approx(expected, rel=1e-5)


def test_each_trial_may_have_directions_of_its_own():
    weights, directions = torch.randn(5, 3, 4, 6), torch.randn(5, 2, 6)
    together = inner_products(weights, directions)
    for t in range(5):
        torch.testing.assert_close(together[t], inner_products(weights[t], directions[t]))


def test_inner_products_build_no_graph():
    assert not inner_products(torch.randn(1, 2, 3, requires_grad=True), torch.randn(2, 3)).requires_grad


@pytest.mark.parametrize("shape", [(3, 4), (1, 3, 5)])
def test_weights_that_do_not_fit_the_directions_are_refused(shape):
    with pytest.raises(ValueError, match="inner_products: weights have shape"):
        inner_products(torch.zeros(shape), torch.zeros(2, 4))


def test_an_experts_accuracy_is_counted_cluster_by_cluster():
    labels, clusters = torch.tensor([0, 1, 0, 1, 1]), torch.tensor([0, 0, 0, 2, 2])
    guesses = torch.stack([labels, 1 - labels, torch.ones_like(labels)])
    found = expert_accuracy(guesses, labels, clusters)
    assert found[:, [0, 2]].tolist() == [[1.0, 1.0], [0.0, 0.0], [pytest.approx(1 / 3), 1.0]]
    assert found[:, 1].isnan().all()


def test_accuracies_of_trials_are_those_of_each_alone():
    generator = torch.Generator().manual_seed(0)
    guesses = torch.randint(2, (4, 3, 20), generator=generator)
    labels, clusters = torch.randint(2, (4, 20), generator=generator), torch.randint(2, (4, 20), generator=generator)
    together = expert_accuracy(guesses, labels, clusters, count=2)
    for t in range(4):
        torch.testing.assert_close(together[t], expert_accuracy(guesses[t], labels[t], clusters[t], count=2))


@pytest.mark.parametrize(
    ("guesses", "clusters", "error", "message"),
    [
        ((2, 4), torch.zeros(3).long(), ValueError, r"guesses \(2, 4\)"),
        ((2, 3), torch.tensor([0, -1, 0]), ValueError, "clusters go from -1 to 0"),
        ((2, 3), torch.tensor([0, 5, 0]), ValueError, "from 0 to 5; they must be from 0 to 1"),
        ((2, 3), torch.zeros(3), TypeError, "clusters are torch.float32"),
    ],
)
def test_samples_that_do_not_fit_together_are_refused(guesses, clusters, error, message):
    with pytest.raises(error, match=message):
        expert_accuracy(torch.zeros(guesses), torch.zeros(3), clusters, count=2)


# Tracks


def test_what_was_added_comes_back_with_its_steps():
    line = small_track()["layer 1/entropy"]
    assert line.steps.tolist() == [0, 5, 20]
    assert line.values.tolist() == [1.0, 1 / 6, 1 / 21]
    assert small_track()["seen"].steps.tolist() == [20]


def test_weights_that_go_on_changing_do_not_change_what_was_kept():
    weight, history = torch.zeros(2), TrainingHistory()
    history.add(0, weight=weight)
    weight += 1
    history.add(1, weight=weight.bfloat16())
    assert history["weight"].values.tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_routings_of_a_models_layers_are_kept_under_their_names():
    model = nn.Sequential(*(moesaic.PatchMoE(4, 4, experts=2, patches_per_expert=1, patch_size=2) for _ in range(2)))
    kinds, history = torch.arange(6) % 3, TrainingHistory()
    with moesaic.record_routing(model) as routing:
        model(torch.randn(6, 4, 4, 4))
    history.add_routing(0, routing, kinds)
    assert list(history) == ["0/load", "0/entropy", "1/load", "1/entropy"]
    assert history["1/entropy"].values[0] == dispatch_entropy(routing["1"], kinds)
    assert history["0/load"].values[0].tolist() == load_share(routing["0"]).tolist()


def test_a_routing_without_clusters_has_a_load_only():
    layer, history = moesaic.PatchMoE(4, 4, experts=2, patches_per_expert=1, patch_size=2), TrainingHistory()
    with moesaic.record_routing(layer) as routing:
        layer(torch.randn(1, 4, 4, 4))
    history.add_routing(0, routing[""])
    assert list(history) == ["load"]


def test_a_track_survives_the_disk(tmp_path):
    history, path = small_track(), tmp_path / "history.npz"
    history.save(path)
    loaded = TrainingHistory.load(path)
    assert list(loaded) == list(history)
    for name in history:
        np.testing.assert_array_equal(loaded[name].steps, history[name].steps)
        np.testing.assert_array_equal(loaded[name].values, history[name].values)
    assert [file.name for file in tmp_path.iterdir()] == ["history.npz"]


def test_a_loaded_track_goes_on(tmp_path):
    small_track().save(tmp_path / "history.npz")
    history = TrainingHistory.load(tmp_path / "history.npz")
    history.add(30, seen=8)
    assert history["seen"].values.tolist() == [7, 8]


def test_an_empty_track_survives_the_disk(tmp_path):
    TrainingHistory().save(tmp_path / "history.npz")
    assert len(TrainingHistory.load(tmp_path / "history.npz")) == 0


def npz(**arrays) -> bytes:
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04 no archive",
        npz(weights=np.zeros(3)),
        npz(**{"steps/a": np.zeros(3, dtype=int), "values/a": np.zeros(2)}),
        npz(**{"steps/a": np.zeros(2), "values/a": np.zeros(2)}),
        npz(**{"steps/a": np.arange(2), "values/a": np.array([{}, {}], dtype=object)}),
        npz(**{"steps/a": np.zeros(2, dtype=int), "values/a": np.zeros(2)}),
    ],
    ids=["empty", "torn", "other arrays", "fewer values", "steps that are floats", "objects", "a step twice"],
)
def test_a_file_that_is_no_history_is_refused_by_name(tmp_path, content):
    path = tmp_path / "odd.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"odd\.npz: not a readable training history .* save it again"):
        TrainingHistory.load(path)


@pytest.mark.parametrize(
    ("step", "values", "error", "message"),
    [
        (20, {"seen": 1}, ValueError, "the last step is 20; steps must increase"),
        (21, {"products": np.zeros(3)}, ValueError, r"'products' has shape \(3,\) at step 21, and had \(2, 3\)"),
        (21, {"note": "text"}, TypeError, "note='text' is not a number"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_of_the_step_is_stored(step, values, error, message):
    history = small_track()
    with pytest.raises(error, match=message):
        history.add(step, fresh=1.0, **values)
    assert "fresh" not in list(history)
    assert history["products"].steps.tolist() == [0, 5, 20]


def test_a_name_that_is_not_there_is_told_with_those_that_are():
    with pytest.raises(KeyError, match="there is no metric 'entropi'; there is 'layer 1/entropy', 'products'"):
        small_track()["entropi"]


def test_a_plot_has_a_panel_for_each_expert_and_a_line_for_each_direction():
    figure = small_track().plot(["products"])
    assert [axes.get_title() for axes in figure.axes] == ["products 0", "products 1"]
    assert [len(axes.lines) for axes in figure.axes] == [3, 3]
    figure.canvas.draw()


def test_a_plot_of_nothing_is_refused():
    with pytest.raises(ValueError, match="nothing to plot"):
        TrainingHistory().plot()
