"""How much data, width, time and work suffice (Chowdhury et al. 2023, Theorems 4.2, 4.3, 4.5, Table 1, Section M).

The theorems give orders of growth, without constants and without logarithms. An `Order` is such an
expression; its value takes the constant as 1. **A value alone means nothing; ratios of two values
of the same quantity do**, and they with a caveat of the paper's own (footnote 4): the bounds are
sufficient, not necessary, so their ratio compares what the same proof technique can guarantee for
two models, not what the models need.

Letters, as in the paper: n patches in a sample, l patches per expert, k experts, p sets of
class-irrelevant patterns, δ their separation (eq. 9), ε the generalization error, c classes,
d numbers in a patch, B samples in a batch, m neurons in all experts together.

What does not fit together in print:

- *Joint training.* Theorem 4.5 follows from Lemma H.4 with v = ε²/l. The batch does: k²l⁴/ε⁸. But
  the lemma's step size η = γ³v²l³/(mk²) and its progress ηmγ³v²/l² give T = k²l³/ε⁸, a factor l more
  than printed, so N = B·T = k⁴l⁷/ε¹⁶; and its range of validity, t ≤ σγ³v²l²/(ηnk), asks for
  m = k²n²l⁸/ε¹⁶, not k³n²l⁶/ε¹⁶ (p and δ left out). The same steps do give the printed bounds for
  separate training (Lemma G.4) and the CNN (Lemma I.4). The functions return what the theorem prints.
- *Model size of joint training.* The text below Theorem 4.5 saves n¹⁰/(k³l⁶); the theorems, and the
  slides, give n¹⁰/(k³n²l⁶).
- *No patch dropped.* At k = 1, l = n the joint bound is still n² below the CNN's in samples, though
  nothing is routed: that gain comes from the softmax gate and Assumption 4.4, not from fewer patches.
- *Samples for the router.* Lemma 4.1's B_r·T_r is n²/(1−δ_d)³, Section M writes n²c²/(1−δ_d)², the
  slides n². The loss is linear, so only the sum over all samples counts, and the second is enough.
- *Proof sketch.* Steps 2 and 4 bound η from below (Ω); the lemmas bound it from above (O).
- N = B·T holds exactly in every theorem and in Section M. Section M is stated for c > 2; its factors
  are constants at c = 2, where the functions leave them out. At k = c its joint bounds have the same
  power of c as its separate ones. It has no CNN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from moesaic.papers.chowdhury2023.theory.pattern_separation import separation
from moesaic.papers.engine.theory_conditions import check_counts, require

__all__ = [
    "ComplexityRow",
    "Model",
    "Order",
    "Setting",
    "batch_complexity",
    "complexity_table",
    "computation",
    "error_at_fixed_samples",
    "expert_cost",
    "iteration_complexity",
    "neuron_complexity",
    "own_computation",
    "router_cost",
    "router_samples",
    "sample_complexity",
]

Model = Literal["separate", "joint", "cnn"]
"""pMoE with routers trained before the experts, pMoE with both trained at once, and the CNN without routers."""

MODELS: tuple[Model, ...] = get_args(Model)

_LETTERS = ("B", "m", "k", "n", "l", "p", "δ", "c", "d", "(1−δ_d)", "ε")
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The numbers that the expressions are about; impossible ones are refused.

    >>> Setting(n=16, l=20)
    Traceback (most recent call last):
    ValueError: Setting: 1 ≤ l ≤ n fails: l=20, n=16; an expert cannot take more patches than there are
    """

    n: int
    """Patches in a sample."""
    l: int
    """Patches per expert."""
    k: int = 2
    """Experts of the jointly trained model. Separate training has one for each class."""
    p: int = 1
    """Sets of class-irrelevant patterns."""
    delta_d: float = 0.0
    """Inner product of the class-discriminative patterns; for more classes the largest of any two."""
    delta_r: float = 0.0
    """Largest inner product, in size, of a class-irrelevant pattern with a discriminative one."""
    epsilon: float = 0.1
    """The generalization error to reach. The theorems say every ε > 0; their proofs need ε < 1/2."""
    c: int = 2
    """Classes."""
    d: int = 1
    """Numbers in a patch."""
    m: int | None = None
    """Neurons of all experts together, where the model's size is given; otherwise one for each expert."""
    batch: int = 1
    """B, samples in a batch, where it is given."""

    def __post_init__(self) -> None:
        check_counts("Setting", n=self.n, l=self.l, k=self.k, p=self.p, c=self.c, d=self.d, batch=self.batch)
        require(
            "Setting",
            self.l <= self.n,
            "1 ≤ l ≤ n",
            f"l={self.l}, n={self.n}",
            "an expert cannot take more patches than there are",
        )
        require("Setting", self.c >= 2, "c ≥ 2", f"c={self.c}", "one class needs no classifier")
        require(
            "Setting",
            0 < self.epsilon < 0.5,
            "0 < ε < 1/2",
            f"epsilon={self.epsilon}",
            "the proofs need an error below chance",
        )
        separation(self.delta_d, self.delta_r)
        if self.m is not None:
            check_counts("Setting", m=self.m)
            require(
                "Setting",
                self.m % self.k == 0,
                "m ≡ 0 (mod k)",
                f"m={self.m}, k={self.k}",
                f"experts have m/k neurons each; use m={max(1, round(self.m / self.k)) * self.k}",
            )

    @property
    def delta(self) -> float:
        """δ of eq. (9)."""
        return separation(self.delta_d, self.delta_r)

    @property
    def letters(self) -> dict[str, float]:
        """The value of each letter an `Order` may hold."""
        return {
            "B": self.batch,
            "m": self.k if self.m is None else self.m,
            "k": self.k,
            "n": self.n,
            "l": self.l,
            "p": self.p,
            "δ": self.delta,
            "c": self.c,
            "d": self.d,
            "(1−δ_d)": 1 - self.delta_d,
            "ε": self.epsilon,
        }


@dataclass(frozen=True)
class Order:
    """A product of powers of the paper's letters: an order of growth, its constant left out.

    >>> samples = Order.of(k=4, l=6, ε=-16)
    >>> print(samples, "|", Order.of(n=8) / samples, "|", samples ** Fraction(1, 16))
    k⁴l⁶/ε¹⁶ | n⁸ε¹⁶/(k⁴l⁶) | k^(1/4)·l^(3/8)/ε
    """

    powers: tuple[tuple[str, Fraction], ...]
    """Letters with their exponents, none of them 0, in the order of the paper's formulas; see `Order.of`."""

    @classmethod
    def of(cls, powers: Mapping[str, int | Fraction] | None = None, **more: int | Fraction) -> Order:
        """The product of each letter to its power."""
        given = {**(powers or {}), **more}
        for letter in given:
            if letter not in _LETTERS:
                raise ValueError(f"Order: {letter!r} is no letter of the paper's bounds; use {', '.join(_LETTERS)}")
        return cls(tuple((letter, Fraction(given[letter])) for letter in _LETTERS if given.get(letter)))

    def value(self, setting: Setting) -> float:
        """The expression's value with constant 1. Only ratios of values of one quantity mean something.

        >>> Order.of(n=8, l=-8).value(Setting(n=16, l=2))
        16777216.0
        >>> Order.of(n=8, p=24).value(Setting(n=16, l=2, p=10**13))
        Traceback (most recent call last):
        ValueError: theory: n⁸p²⁴ is 10 to the power 322, which no number here holds; use a smaller p
        """
        result = 1.0
        with suppress(OverflowError):
            for letter, power in self.powers:
                result *= setting.letters[letter] ** float(power)
            if 0 < result < math.inf:
                return result
        sizes = {letter: float(power) * math.log10(setting.letters[letter]) for letter, power in self.powers}
        total = sum(sizes.values())
        worst = max(sizes, key=lambda letter: math.copysign(sizes[letter], sizes[letter] * total))
        change = "smaller" if (sizes[worst] > 0) == (dict(self.powers)[worst] > 0) else "larger"
        raise ValueError(
            f"theory: {self} is 10 to the power {total:.0f}, which no number here holds; use a {change} {worst}"
        )

    def without(self, *letters: str) -> Order:
        """The same with some letters left out."""
        return Order(tuple(entry for entry in self.powers if entry[0] not in letters))

    def __mul__(self, other: Order) -> Order:
        total = dict(self.powers)
        for letter, power in other.powers:
            total[letter] = total.get(letter, Fraction(0)) + power
        return Order.of(total)

    def __truediv__(self, other: Order) -> Order:
        return self * other**-1

    def __pow__(self, exponent: int | Fraction) -> Order:
        return Order.of({letter: power * exponent for letter, power in self.powers})

    def __str__(self) -> str:
        above = _product({letter: power for letter, power in self.powers if power > 0})
        below = {letter: -power for letter, power in self.powers if power < 0}
        if not below:
            return above or "1"
        return f"{above or 1}/{_product(below)}" if len(below) == 1 else f"{above or 1}/({_product(below)})"


def _product(powers: Mapping[str, Fraction]) -> str:
    roots = any(power.denominator > 1 for power in powers.values())
    return ("·" if roots else "").join(letter + _exponent(power) for letter, power in powers.items())


def _exponent(power: Fraction) -> str:
    if power.denominator > 1:
        return f"^({power})"
    return "" if power == 1 else str(power).translate(_SUPERSCRIPTS)


def sample_complexity(model: Model, classes: int = 2) -> Order:
    """N: this many training samples suffice, Ω(·) (Theorems 4.2, 4.5 and 4.3; Section M for more classes).

    >>> for model in ("separate", "joint", "cnn"):
    ...     print(sample_complexity(model))
    l⁸p¹²δ⁶/ε¹⁶
    k⁴l⁶p¹²δ⁶/ε¹⁶
    n⁸p¹²δ⁶/ε¹⁶
    >>> print(sample_complexity("cnn") / sample_complexity("joint"))        # the slides' savings column
    n⁸/(k⁴l⁶)
    """
    return _look_up("sample_complexity", _SAMPLES, model) * _of_classes(model, classes, separate=12, joint=8)


def neuron_complexity(model: Model, classes: int = 2) -> Order:
    """m: this many neurons in all experts together suffice, Ω(·) (Theorems 4.2, 4.5 and 4.3; Section M).

    >>> print(neuron_complexity("joint"), "|", neuron_complexity("separate", classes=4))
    k³n²l⁶p¹²δ⁶/ε¹⁶ | l¹⁰p¹²δ⁶c¹¹/ε¹⁶
    """
    return _look_up("neuron_complexity", _NEURONS, model) * _of_classes(model, classes, separate=11, joint=8)


def batch_complexity(model: Model, classes: int = 2) -> Order:
    """B: the batch that the theorems ask for, Ω(·) (Theorems 4.2, 4.5 and 4.3; Section M).

    >>> print(batch_complexity("joint"))
    k²l⁴p⁶δ³/ε⁸
    """
    return _look_up("batch_complexity", _BATCHES, model) * _of_classes(model, classes, separate=6, joint=4)


def iteration_complexity(model: Model, classes: int = 2) -> Order:
    """T: the steps of SGD after which the error is reached, O(·) (Theorems 4.2, 4.5 and 4.3; Section M).

    Every sample is used once: T = N/B.

    >>> print(iteration_complexity("joint"))
    k²l²p⁶δ³/ε⁸
    """
    return _look_up("iteration_complexity", _ITERATIONS, model) * _of_classes(model, classes, separate=6, joint=4)


def router_samples(classes: int = 2) -> Order:
    """N_r: samples that suffice for separately trained routers, Ω(·) (Section M.1; Lemma 4.1 for two classes).

    >>> print(router_samples(), "|", router_samples(4))
    n²/(1−δ_d)² | n²c²/(1−δ_d)²
    """
    _check_classes("router_samples", classes)
    return Order.of({"n": 2, "(1−δ_d)": -2, "c": 2 if classes > 2 else 0})


def error_at_fixed_samples(model: Model) -> Order:
    """How the error that N samples guarantee grows, at fixed N: the root of the sample complexity (Section 4.3.2).

    In the paper's words: ε scales as k^(1/4) l^(3/8). And at fixed ε, N as l⁸ in separate training.

    >>> print(error_at_fixed_samples("joint"))
    k^(1/4)·l^(3/8)·p^(3/4)·δ^(3/8)
    """
    return sample_complexity(model).without("ε") ** Fraction(1, 16)


def expert_cost(model: Model) -> Order:
    """What an iteration costs in the experts, forward and backward alike (Table 1, Section N).

    >>> print(expert_cost("joint"), "|", expert_cost("cnn"))
    Bmld | Bmnd
    """
    return _look_up("expert_cost", _EXPERT_COSTS, model)


def router_cost(direction: Literal["forward", "backward"]) -> Order:
    """What an iteration of joint training costs in the routers (Table 1, Section N).

    Section N counts l² vectors for the backward pass, as eq. (26) is written. Its inner sum is
    x_j − Σ_i G_i x_i, one vector for all j, so Bkld is enough. Separately trained routers score all
    patches as well, Bcnd; Table 1 leaves that out.

    >>> print(router_cost("forward"), "|", router_cost("backward"))
    Bknd | Bkl²d
    """
    return _look_up("router_cost", _ROUTER_COSTS, direction)


def computation(model: Model, classes: int = 2) -> Order:
    """What training to the error costs in all, at equal batch and width (Table 1): experts' cost × T.

    As in Table 1, p and δ are left out of T, which are the same for all models, and the routers out of
    the cost, which holds while kn ≤ ml and kl ≤ m. Table 1 is for two classes; for more, T is that of
    Section M.

    >>> print(computation("separate"), "|", computation("joint"), "|", computation("cnn"))
    Bml⁵d/ε⁸ | Bmk²l³d/ε⁸ | Bmn⁵d/ε⁸
    """
    return expert_cost(model) * iteration_complexity(model, classes).without("p", "δ")


def own_computation(model: Model, classes: int = 2) -> Order:
    """The same where each model has the batch and the width that its theorem asks for, as Table 1 does not.

    The CNN needs larger batches and more neurons as well, so the gap is wider than at equal ones.

    >>> print(own_computation("cnn") / own_computation("separate"))
    n¹⁹/l¹⁹
    """
    needed = batch_complexity(model, classes) * neuron_complexity(model, classes) * iteration_complexity(model, classes)
    return needed * expert_cost(model).without("B", "m")


@dataclass(frozen=True)
class ComplexityRow:
    """One quantity for the three models; made by `complexity_table`. None stands where the paper has nothing."""

    quantity: str
    where: str
    """The place in the paper."""
    formulas: Mapping[Model, str | None]
    values: Mapping[Model, float | None]
    """The formulas with constant 1: only the ratios mean something."""
    saving_formulas: Mapping[Model, str | None]
    """The CNN's formula over each pMoE's."""
    savings: Mapping[Model, float | None]
    """The CNN's value over each pMoE's: above 1 where the bound of the pMoE is lower."""


def complexity_table(setting: Setting) -> list[ComplexityRow]:
    """All complexities at a setting, with the savings of either pMoE against the CNN.

    >>> for row in complexity_table(Setting(n=16, l=2, k=8))[:2]:
    ...     print(row.quantity, row.formulas["joint"], row.savings)
    samples k⁴l⁶p¹²δ⁶/ε¹⁶ {'separate': 16777216.0, 'joint': 16384.0}
    neurons k³n²l⁶p¹²δ⁶/ε¹⁶ {'separate': 1073741824.0, 'joint': 131072.0}
    """
    c = setting.c
    theorems = "Theorems 4.2, 4.5, 4.3" if c == 2 else "Section M"
    table_1 = "Table 1" if c == 2 else "Table 1 with Section M"
    known: tuple[Model, ...] = MODELS if c == 2 else ("separate", "joint")
    return [
        _row("samples", theorems, setting, {model: sample_complexity(model, c) for model in known}),
        _row("neurons", theorems, setting, {model: neuron_complexity(model, c) for model in known}),
        _row("batch", theorems, setting, {model: batch_complexity(model, c) for model in known}),
        _row("iterations", theorems, setting, {model: iteration_complexity(model, c) for model in known}),
        _row("an iteration, experts", "Table 1", setting, {model: expert_cost(model) for model in MODELS}),
        _row("an iteration, routers forward", "Table 1", setting, {"joint": router_cost("forward")}),
        _row("an iteration, routers backward", "Table 1", setting, {"joint": router_cost("backward")}),
        _row(
            "computation, same batch and neurons", table_1, setting, {model: computation(model, c) for model in known}
        ),
        _row(
            "computation, own batch and neurons", "ours", setting, {model: own_computation(model, c) for model in known}
        ),
    ]


def _row(quantity: str, where: str, setting: Setting, orders: Mapping[Model, Order]) -> ComplexityRow:
    routed: tuple[Model, ...] = ("separate", "joint")
    ratios = {model: orders["cnn"] / orders[model] for model in routed if model in orders and "cnn" in orders}
    return ComplexityRow(
        quantity=quantity,
        where=where,
        formulas={model: str(orders[model]) if model in orders else None for model in MODELS},
        values={model: orders[model].value(setting) if model in orders else None for model in MODELS},
        saving_formulas={model: str(ratios[model]) if model in ratios else None for model in routed},
        savings={model: ratios[model].value(setting) if model in ratios else None for model in routed},
    )


_SAMPLES: dict[str, Order] = {
    "separate": Order.of(l=8, p=12, δ=6, ε=-16),
    "joint": Order.of(k=4, l=6, p=12, δ=6, ε=-16),
    "cnn": Order.of(n=8, p=12, δ=6, ε=-16),
}
_NEURONS: dict[str, Order] = {
    "separate": Order.of(l=10, p=12, δ=6, ε=-16),
    "joint": Order.of(k=3, n=2, l=6, p=12, δ=6, ε=-16),
    "cnn": Order.of(n=10, p=12, δ=6, ε=-16),
}
_BATCHES: dict[str, Order] = {
    "separate": Order.of(l=4, p=6, δ=3, ε=-8),
    "joint": Order.of(k=2, l=4, p=6, δ=3, ε=-8),
    "cnn": Order.of(n=4, p=6, δ=3, ε=-8),
}
_ITERATIONS: dict[str, Order] = {
    "separate": Order.of(l=4, p=6, δ=3, ε=-8),
    "joint": Order.of(k=2, l=2, p=6, δ=3, ε=-8),
    "cnn": Order.of(n=4, p=6, δ=3, ε=-8),
}
_EXPERT_COSTS: dict[str, Order] = {
    "separate": Order.of(B=1, m=1, l=1, d=1),
    "joint": Order.of(B=1, m=1, l=1, d=1),
    "cnn": Order.of(B=1, m=1, n=1, d=1),
}
_ROUTER_COSTS: dict[str, Order] = {
    "forward": Order.of(B=1, k=1, n=1, d=1),
    "backward": Order.of(B=1, k=1, l=2, d=1),
}


def _look_up(owner: str, orders: Mapping[str, Order], name: str) -> Order:
    if name not in orders:
        raise ValueError(f"{owner}: {name!r} is unknown; use one of {', '.join(map(repr, orders))}")
    return orders[name]


def _of_classes(model: Model, classes: int, *, separate: int, joint: int) -> Order:
    """Section M's factor in c; nothing for two classes."""
    _check_classes("complexity", classes)
    if classes == 2:
        return Order.of()
    if model == "cnn":
        raise ValueError(f"complexity: the paper bounds the CNN for two classes only, not for {classes}; use classes=2")
    return Order.of(c=separate if model == "separate" else joint)


def _check_classes(owner: str, classes: int) -> None:
    check_counts(owner, classes=classes)
    require(owner, classes >= 2, "c ≥ 2", f"classes={classes}", "one class needs no classifier")
