"""Why claims of Chen et al. 2022 do not hold in the recorded run."""

from __future__ import annotations

from moesaic.papers.engine.findings import Cause

__all__ = ["CAUSES"]

_STEPS = (
    "Print gives no number of steps; its equations trained for 4000 are more accurate than the published value, which "
    "the code, with at most 501 steps and early stopping, reproduces (as released: {})."
)
_TEN = "The interval over ten trials, {}, has the limit of {} in it."
_ONE_SET = (
    "The code trains ten initialisations on one dataset, and here every trial has its own; no run tells whether that "
    "is the difference."
)
_NOT_ABLATED = "As printed the claim holds ({}); which of the differences of the code blurs it was not ablated."
_GROUPS = (
    "With the eight experts and four clusters of the paper's own experiments, random initial weights leave a group "
    'empty with a probability of 0.38; the theorem\'s "with probability 1 − o(1)" takes more experts.'
)
_TWEETS = (
    "12,000 tweets, embedded by their character n-grams, stand in for 490,000 texts and a BERT model, which are not at "
    "hand."
)

_BALANCED = (
    "With the code's balance loss ours gains 0.96 points on average (table9-no-key); print loses 0.8 points by it in "
    "both settings. Without the loss the same code reproduces print (table1-linear-s{}); no run tells what differs."
)
_GROUPS_RELEASED = (
    "As printed, at the end of exploration, {}. The code sums norms over tensors, stops early and gates with the raw "
    "score and its noise; which of these spoils the groups was not ablated."
)

CAUSES: tuple[Cause, ...] = (
    Cause("table1-nonlinear-s1", "print", "partly", "code", _STEPS.format("99.6 %")),
    Cause("table1-nonlinear-s2", "print", "fails", "code", _STEPS.format("98.0 %")),
    Cause("table1-linear-s1", "print", "fails", "code", _STEPS.format("92.8 %")),
    Cause(
        "table1-linear-s2",
        "print",
        "fails",
        "code",
        "Print gives no number of steps; its equations trained for 4000 are 6.8 points more accurate than the "
        "published value, to which the code, with at most 501 steps and early stopping, comes nearer (as released: "
        "90.0 %, undecided).",
    ),
    Cause(
        "table1-linear-s2",
        "released",
        "undecided",
        "means",
        "Ten trials: the difference from print, −0.1 to 3.1 points, has 0 in it and is not narrow.",
    ),
    Cause("table1-linear-s3", "print", "fails", "code", _STEPS.format("95.8 %")),
    Cause("table1-linear-s4", "print", "fails", "code", _STEPS.format("93.4 %")),
    Cause("table1-entropy-nonlinear", "released", "undecided", "means", _TEN.format("0.12 to 0.31", 0.25)),
    Cause(
        "table1-entropy-linear",
        "print",
        "undecided",
        "code",
        "The printed equations trained for 4000 steps leave an entropy of 0.84; the code, with at most 501 steps, has "
        "1.15, where print has 1.16 (as released).",
    ),
    Cause(
        "table3-singles",
        "print",
        "partly",
        "code",
        "Equation 3.1 has no output weights and no bias, the code has two logits and a bias: 15 of the 16 accuracies "
        "are those of the code (as released).",
    ),
    Cause("table3-singles", "released", "partly", "open", _ONE_SET),
    Cause(
        "table3-overfits",
        "print",
        "undecided",
        "code",
        "As printed 128 and 512 filters are level in one of four settings; with the code the claim holds in all (as "
        "released).",
    ),
    Cause("table4-pure", "released", "undecided", "means", _TEN.format("95.9 to 99.4 %", 99)),
    Cause(
        "table7-values",
        "print",
        "partly",
        "paper",
        "Equation 3.1 has no output weights, so that a ReLU network predicts one class only and stays at 50 %; with "
        "the two logits of the code all six agree (as released).",
    ),
    Cause(
        "table8-values",
        "print",
        "fails",
        "code",
        "Equation 3.1 has no output weights and no bias, the code has two logits and a bias: 9 of the 12 accuracies "
        "are those of the code (as released).",
    ),
    Cause("table8-values", "released", "partly", "open", _ONE_SET),
    Cause(
        "fig3-steps",
        "print",
        "undecided",
        "paper",
        "Print leaves out that the code's data are ten times as large: its rates are 0.01 and 10 in the units of "
        "print, and with these 127 steps are enough (as released).",
    ),
    Cause(
        "fig3-steps",
        "released",
        "partly",
        "open",
        "One trial of 40 never gets to 95 %; why it does not was not looked into.",
    ),
    Cause("fig1-clusters", "released", "undecided", "open", _NOT_ABLATED.format("1.11 nats")),
    Cause("fig4-router-centres", "released", "undecided", "open", _NOT_ABLATED.format("a ratio of 0.012")),
    Cause(
        "theorem4.1-uncovered",
        "print",
        "fails",
        "paper",
        "An additive classifier, given explicitly, has 92.5 % there, more than the 87.5 % that are possible where "
        "feature and noise are alike (theory.additive_classifiers).",
    ),
    Cause(
        "theorem4.1-ensemble-gain",
        "print",
        "undecided",
        "means",
        "Five ensembles: the interval of the gain of cubic networks, 0.95 to 1.90 points, has the limit of 1 in it; "
        "linear and celu networks gain nothing. They have 2,000 training samples where the paper has 16,000.",
    ),
    Cause(
        "theorem4.2-training",
        "print",
        "partly",
        "means",
        "One trial of ten is left with one error in 16,000 samples after 4000 steps; the theorem is about large "
        "dimensions, and here, as in the paper's experiments, d = 50.",
    ),
    Cause(
        "theorem4.2-training",
        "released",
        "partly",
        "code",
        "The code stops training by its loss, with noise in the routing, before the last errors are gone; as printed, "
        "without early stopping, nine of ten trials have none.",
    ),
    Cause(
        "table9-s2",
        "released",
        "undecided",
        "means",
        "Ten trials: the difference from print, −0.0 to 3.6 points, has 0 in it and is not narrow.",
    ),
    Cause("table9-s3", "released", "fails", "open", _BALANCED.format(3)),
    Cause("table9-s4", "released", "fails", "open", _BALANCED.format(4)),
    Cause("theorem4.2-groups", "print", "partly", "paper", _GROUPS),
    Cause("theorem4.2-groups", "released", "partly", "paper", _GROUPS),
    Cause(
        "theorem4.2-experts",
        "print",
        "fails",
        "open",
        "Experts have 95 % on their own cluster on average (lemma5.2-own), so that the limit of 95 % for each lies in "
        "the middle of them; whether they get better with the dimension, as the theorem has it, was not run.",
    ),
    Cause("theorem4.2-experts", "released", "fails", "open", _GROUPS_RELEASED.format("57.5 % of experts are good")),
    Cause(
        "theorem4.2-router",
        "released",
        "fails",
        "open",
        _GROUPS_RELEASED.format("99.6 % of samples go to their group (undecided)"),
    ),
    Cause(
        "theorem4.2-router",
        "print",
        "undecided",
        "means",
        "Five of ten trials have no empty group; their interval, 98.9 to 100 %, has the limit of 99 in it.",
    ),
    Cause("load-equal", "released", "fails", "open", _GROUPS_RELEASED.format("loads are equal")),
    Cause("theorem4.2-start", "print", "undecided", "means", _TEN.format("98.99 to 99.61 %", 99)),
    Cause("lemma5.2-own", "print", "undecided", "means", _TEN.format("94.0 to 96.4 %", 95)),
    Cause(
        "table2-rotate-cnn",
        "print",
        "fails",
        "code",
        "The networks reach 93 and 97 % where the paper has 77 and 80 %: the code tests on sharp images, which cost "
        "the single network 34 points (table2-why-low) and put the mixture 19 points ahead (table2-sharp-cnn).",
    ),
    Cause(
        "table2-rotate-resnet18",
        "print",
        "fails",
        "code",
        "Both networks reach 99 % where the paper has 88 and 93 %: the code tests on sharp images, on which the single "
        "network falls to 89 % (table2-sharp-resnet18). Whether the mixture is ahead there is open.",
    ),
    Cause(
        "table2-sharp-resnet18",
        "print",
        "fails",
        "open",
        "One trial of eight epochs, after the last epoch; after the best test epoch, which the code reports, the "
        "mixture is 7 points ahead. The runs of table2-released-resnet18 would tell.",
    ),
    Cause(
        "table2-cifar10-cnn",
        "print",
        "fails",
        "open",
        "30 epochs where the paper has 200; no longer run tells whether the gap closes.",
    ),
    Cause(
        "table2-cifar10-resnet18",
        "print",
        "fails",
        "open",
        "One trial of 12 epochs where the paper has 200; no longer run tells whether the gap closes.",
    ),
    Cause(
        "fig7-entropy",
        "print",
        "fails",
        "open",
        "Two trials of eight epochs: two of four experts get nearly all images. The paper's figure is of the code, "
        "whose runs (table2-released-resnet18) record the dispatch as well.",
    ),
    Cause("tweets-lead", "print", "fails", "means", _TWEETS),
    Cause("tweets-lead", "released", "fails", "means", _TWEETS),
    Cause("tweets-by-language", "print", "undecided", "means", _TWEETS),
    Cause("tweets-by-language", "released", "fails", "means", _TWEETS),
)
