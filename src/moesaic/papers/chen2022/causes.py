"""Why claims of Chen et al. 2022 do not hold in the recorded run."""

from __future__ import annotations

from moesaic.papers.engine.findings import Cause

__all__ = ["CAUSES"]

_STEPS = (
    "Print gives no number of steps; its equations trained for 4000 are more accurate than the published value, which "
    "the code, with at most 501 steps and early stopping, reproduces (as released: {})."
)
_TEN = "The interval over ten trials, {}, has the limit of {} in it."
_ONE_RUN = (
    "The published value is that of one run, and single runs differ: {} are within what one more run may give, by the "
    "deviation over our ten trials (interval of prediction){}."
)
_GROUPS = (
    "With the eight experts and four clusters of the paper's own experiments, random initial weights leave a group "
    'empty with a probability of 0.38; the theorem\'s "with probability 1 − o(1)" takes more experts.'
)
_TWEETS = (
    "12,000 tweets, embedded by their character n-grams, stand in for 490,000 texts and a BERT model, which are not at "
    "hand."
)

_BALANCED = (
    "The code trains ten initialisations on one dataset. Means over initialisations differ from dataset to dataset, "
    "with a deviation of {} points, and the published one is within what another dataset may give (table9-dataset). "
    "The loss with softmax(h) in place of the raw score comes nearer, too: {} % (table9-why)."
)
_BALANCED_PRINT = (
    "Print gives no number of steps; its equations trained for 4000 are more accurate than the published value, with "
    "the loss as without (table1-linear-s{}); the code, with at most 501 steps, comes nearer (as released: {} %)."
)
_GROUPS_RELEASED = (
    "As printed, at the end of exploration, {}. Neither gate, norm nor size of the initial weights is the reason: with "
    "one of them as printed, 25 to 100 % of a trial's samples still go to their group (theorem4.2-why, "
    "theorem4.2-weights). The rates, relative to data ten times as large, and the time at which training stops were "
    "not ablated."
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
    Cause(
        "table3-singles",
        "released",
        "partly",
        "paper",
        _ONE_RUN.format(
            "60.59 % for 128 linear filters in setting 2, where our mean is 68.2 %,",
            ", and one of these ten has 57.4 %",
        ),
    ),
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
    Cause(
        "table8-values",
        "released",
        "partly",
        "open",
        _ONE_RUN.format(
            "60.59 % of linear networks in setting 2 and 79.04 % of gelu in setting 1 (our means are 68.2 and 82.1 %)",
            ", but 72.28 % of relu in setting 1 is not: our mean is 80.9 %, with a deviation of 2.2 points",
        ),
    ),
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
        "code",
        "One trial of 40, in setting 4, never gets to 95 %: one expert gets two clusters, 3,892 and 3,901 of their "
        "samples, and the three that leaned to one of these before training get none. With the printed gate in place "
        "of the raw score all ten get there (fig3-why).",
    ),
    Cause(
        "fig1-clusters",
        "released",
        "undecided",
        "code",
        "The code multiplies outputs by the raw score and its noise. With the printed gate, and otherwise as released, "
        "the entropy is 0.49, and 0.66 without; four times as many steps, or a loss with one softmax, do not help "
        "(fig1-why).",
    ),
    Cause(
        "fig4-router-centres",
        "released",
        "undecided",
        "open",
        "With the printed gate, and otherwise as released, the ratio is below 0.06 in seven of ten trials, and in one "
        "with the raw score; two trials with 0.47 and 0.85 keep the interval on both sides of the limit (fig4-why). "
        "What happens in these was not ablated.",
    ),
    Cause(
        "fig4-why",
        "released",
        "undecided",
        "means",
        "Ten trials, of which seven are below 0.06 and two at 0.47 and 0.85: the interval, −0.03 to 0.37, has the "
        "limit of 1/3 in it.",
    ),
    Cause(
        "theorem4.2-why",
        "released",
        "fails",
        "open",
        "Both forms send between 25 and 100 % of the samples of a trial to their group, as the code does. Rates and "
        "the time at which training stops were not ablated.",
    ),
    Cause(
        "theorem4.2-weights",
        "released",
        "fails",
        "open",
        "With the larger weights 64 % of the samples go to their group, with those of the code 65 %. Rates and the "
        "time at which training stops were not ablated.",
    ),
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
    Cause("table9-s3", "released", "fails", "code", _BALANCED.format(0.6, 95.9)),
    Cause("table9-s4", "released", "fails", "code", _BALANCED.format(0.7, 93.6)),
    Cause("table9-s3", "print", "fails", "code", _BALANCED_PRINT.format(3, 96.5)),
    Cause("table9-s4", "print", "fails", "code", _BALANCED_PRINT.format(4, 94.2)),
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
