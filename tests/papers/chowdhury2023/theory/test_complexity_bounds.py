"""The bounds as printed, and what follows from them."""

from fractions import Fraction

import pytest

from moesaic.papers.chowdhury2023.theory.complexity_bounds import (
    MODELS,
    Model,
    Order,
    Setting,
    batch_complexity,
    complexity_table,
    computation,
    error_at_fixed_samples,
    expert_cost,
    iteration_complexity,
    neuron_complexity,
    own_computation,
    router_cost,
    router_samples,
    sample_complexity,
)

SETTING = Setting(n=16, l=2, k=8, p=3, delta_d=0.3, delta_r=0.5, epsilon=0.2)


@pytest.mark.parametrize(
    ("model", "samples", "neurons", "batch", "iterations"),
    [
        ("separate", "l⁸p¹²δ⁶/ε¹⁶", "l¹⁰p¹²δ⁶/ε¹⁶", "l⁴p⁶δ³/ε⁸", "l⁴p⁶δ³/ε⁸"),
        ("joint", "k⁴l⁶p¹²δ⁶/ε¹⁶", "k³n²l⁶p¹²δ⁶/ε¹⁶", "k²l⁴p⁶δ³/ε⁸", "k²l²p⁶δ³/ε⁸"),
        ("cnn", "n⁸p¹²δ⁶/ε¹⁶", "n¹⁰p¹²δ⁶/ε¹⁶", "n⁴p⁶δ³/ε⁸", "n⁴p⁶δ³/ε⁸"),
    ],
)
def test_theorems_are_as_printed(model: Model, samples: str, neurons: str, batch: str, iterations: str):
    assert str(sample_complexity(model)) == samples
    assert str(neuron_complexity(model)) == neurons
    assert str(batch_complexity(model)) == batch
    assert str(iteration_complexity(model)) == iterations


@pytest.mark.parametrize(
    ("model", "samples", "neurons", "batch", "iterations"),
    [
        ("separate", "l⁸p¹²δ⁶c¹²/ε¹⁶", "l¹⁰p¹²δ⁶c¹¹/ε¹⁶", "l⁴p⁶δ³c⁶/ε⁸", "l⁴p⁶δ³c⁶/ε⁸"),
        ("joint", "k⁴l⁶p¹²δ⁶c⁸/ε¹⁶", "k³n²l⁶p¹²δ⁶c⁸/ε¹⁶", "k²l⁴p⁶δ³c⁴/ε⁸", "k²l²p⁶δ³c⁴/ε⁸"),
    ],
)
def test_more_classes_are_as_printed_in_section_m(
    model: Model, samples: str, neurons: str, batch: str, iterations: str
):
    assert str(sample_complexity(model, 4)) == samples
    assert str(neuron_complexity(model, 4)) == neurons
    assert str(batch_complexity(model, 4)) == batch
    assert str(iteration_complexity(model, 4)) == iterations
    assert str(router_samples(4)) == "n²c²/(1−δ_d)²"


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("model", MODELS)
def test_samples_are_batch_times_iterations(model: Model, classes: int):
    if model == "cnn" and classes > 2:
        return
    assert batch_complexity(model, classes) * iteration_complexity(model, classes) == sample_complexity(model, classes)


def test_at_k_equal_to_c_joint_and_separate_bounds_have_the_same_power_of_c():
    for bound in (sample_complexity, neuron_complexity, batch_complexity, iteration_complexity):
        joint = dict(bound("joint", 3).powers)
        assert joint["k"] + joint["c"] == dict(bound("separate", 3).powers)["c"]


def test_the_cnn_is_separate_training_of_all_patches():
    everything = Setting(n=5, l=5)
    for bound in (sample_complexity, neuron_complexity, batch_complexity, iteration_complexity, computation):
        assert bound("cnn").value(everything) == pytest.approx(bound("separate").value(everything))


def test_the_savings_are_those_of_the_slides():
    by_name = {row.quantity: row.saving_formulas for row in complexity_table(SETTING)}
    assert by_name["samples"] == {"separate": "n⁸/l⁸", "joint": "n⁸/(k⁴l⁶)"}
    assert by_name["iterations"] == {"separate": "n⁴/l⁴", "joint": "n⁴/(k²l²)"}
    assert by_name["neurons"] == {"separate": "n¹⁰/l¹⁰", "joint": "n⁸/(k³l⁶)"}  # n¹⁰/(k³n²l⁶)
    assert by_name["computation, same batch and neurons"] == {"separate": "n⁵/l⁵", "joint": "n⁵/(k²l³)"}


def test_table_1_is_as_printed():
    assert [str(expert_cost(model)) for model in MODELS] == ["Bmld", "Bmld", "Bmnd"]
    assert [str(router_cost("forward")), str(router_cost("backward"))] == ["Bknd", "Bkl²d"]
    assert [str(computation(model)) for model in MODELS] == ["Bml⁵d/ε⁸", "Bmk²l³d/ε⁸", "Bmn⁵d/ε⁸"]


def test_own_computation_puts_each_models_batch_and_width_into_table_1():
    for model in MODELS:
        put_in = computation(model).without("B", "m") * batch_complexity(model) * neuron_complexity(model)
        assert own_computation(model).without("p", "δ") == put_in.without("p", "δ")


def test_values_are_the_formulas_with_constant_one():
    delta = 1 / (1 - 0.25)
    assert SETTING.delta == pytest.approx(delta)
    value = 8**4 * 2**6 * 3**12 * delta**6 / 0.2**16
    assert sample_complexity("joint").value(SETTING) == pytest.approx(value)
    row = complexity_table(SETTING)[0]
    assert row.values["joint"] == pytest.approx(value)
    assert row.savings == {"separate": pytest.approx(8**8), "joint": pytest.approx(16**8 / (8**4 * 2**6))}
    assert router_samples().value(SETTING) == pytest.approx(256 / 0.49)


def test_batch_and_neurons_enter_where_they_are_given():
    given = Setting(n=4, l=2, k=2, d=10, m=6, batch=5)
    assert expert_cost("joint").value(given) == 5 * 6 * 2 * 10
    assert router_cost("forward").value(given) == 5 * 2 * 4 * 10
    assert expert_cost("joint").value(Setting(n=4, l=2, k=3)) == 3 * 2  # one neuron an expert


def test_the_table_says_nothing_where_the_paper_says_nothing():
    rows = {row.quantity: row for row in complexity_table(Setting(n=16, l=2, k=4, c=4))}
    assert rows["samples"].formulas["cnn"] is None
    assert rows["samples"].savings == {"separate": None, "joint": None}
    assert rows["samples"].formulas["joint"] == "k⁴l⁶p¹²δ⁶c⁸/ε¹⁶"
    assert rows["an iteration, routers forward"].values["separate"] is None
    with pytest.raises(ValueError, match="bounds the CNN for two classes only"):
        sample_complexity("cnn", 3)


def test_the_error_at_fixed_samples_is_the_exponent_that_the_paper_names():
    joint = error_at_fixed_samples("joint")
    assert dict(joint.powers) == {"k": Fraction(1, 4), "l": Fraction(3, 8), "p": Fraction(3, 4), "δ": Fraction(3, 8)}
    # putting that error into the bound gives the same samples, whatever k and l
    few, many = Setting(n=16, l=1, k=2), Setting(n=16, l=6, k=8)
    growth = joint.value(many) / joint.value(few)
    reached = Setting(n=16, l=6, k=8, epsilon=0.1 * growth)
    assert sample_complexity("joint").value(reached) == pytest.approx(sample_complexity("joint").value(few))


@pytest.mark.parametrize(
    ("changes", "inequality"),
    [
        ({"l": 17}, "1 ≤ l ≤ n"),
        ({"l": 0}, "1 ≤ l"),
        ({"k": 0}, "1 ≤ k"),
        ({"p": 0}, "1 ≤ p"),
        ({"c": 1}, "c ≥ 2"),
        ({"delta_d": 1.0}, "−1 < δ_d < 1"),
        ({"delta_d": -1.0}, "−1 < δ_d < 1"),
        ({"delta_r": 1.0}, "0 ≤ δ_r < 1"),
        ({"delta_r": -0.1}, "0 ≤ δ_r < 1"),
        ({"epsilon": 0.0}, "0 < ε < 1/2"),
        ({"epsilon": 0.5}, "0 < ε < 1/2"),
        ({"epsilon": float("nan")}, "0 < ε < 1/2"),
        ({"m": 20}, r"m ≡ 0 \(mod k\)"),
    ],
)
def test_impossible_settings_are_refused_by_the_inequality_that_fails(changes: dict[str, float], inequality: str):
    with pytest.raises(ValueError, match=f"{inequality} fails"):
        Setting(**{"n": 16, "l": 2, "k": 8, **changes})  # pyright: ignore[reportArgumentType]


def test_words_and_halves_are_refused():
    with pytest.raises(TypeError, match="whole number"):
        Setting(n=16, l=2.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="use one of 'separate', 'joint', 'cnn'"):
        sample_complexity("moe")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="no letter"):
        Order.of(x=1)


def test_orders_print_as_products_of_powers():
    assert str(Order.of()) == "1"
    assert str(Order.of(l=-1)) == "1/l"
    assert str(Order.of(n=1, l=-1, k=-2)) == "n/(k²l)"
    assert str(Order.of(l=Fraction(1, 2))) == "l^(1/2)"
    assert Order.of(n=2) / Order.of(n=2) == Order.of()
