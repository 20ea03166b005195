"""The numbers of the papers that claims compare with, against a second transcription of the papers' tables."""

from moesaic.papers.chen2022 import claims_images, claims_language, claims_synthetic
from moesaic.papers.wang2019.vgg_widths import WIDENINGS

TABLES_1_AND_3 = {  # Chen et al. 2022: settings 1 to 4
    "single/identity-128": "68.71 60.59 74.81 74.63",
    "single/identity-512": "67.63 63.04 74.54 72.98",
    "single/cubic-128": "79.48 72.29 72.69 68.60",
    "single/cubic-512": "78.18 52.09 67.78 61.65",
    "moe/identity": "92.99±2.11 88.48±1.96 95.93±1.34 93.30±1.48",
    "moe/cubic": "99.46±0.55 98.09±1.27 99.99±0.02 98.92±1.18",
    "entropy/identity": "1.300±0.044 1.294±0.036 1.160±0.100 1.160±0.155",
    "entropy/cubic": "0.098±0.087 0.171±0.103 0.008±0.011 0.089±0.120",
    "balanced/identity": "93.81±1.02 89.20±2.20 95.12±0.58 92.50±1.55",  # Table 9
}
TABLES_7_AND_8 = {  # linear, cubic, relu, celu, gelu, tanh
    "table7": "74.81 72.69 73.45 76.91 74.01 74.76",
    "table8/s1": "68.71 79.48 72.28 81.75 79.04 81.72",
    "table8/s2": "60.59 72.29 80.12 78.99 82.01 81.03",
}


def cell(text: str) -> float | tuple[float, float]:
    numbers = [float(part) for part in text.split("±")]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else numbers[0]


def test_synthetic_results_of_chen_et_al_are_as_printed():
    printed = {name: tuple(map(cell, row.split())) for name, row in (TABLES_1_AND_3 | TABLES_7_AND_8).items()}
    assert printed == claims_synthetic.PUBLISHED


def test_image_accuracies_of_chen_et_al_are_as_printed():
    assert claims_images.PUBLISHED == {  # Table 2: single network, mixture
        ("cifar10", "cnn"): (80.68, 80.31),
        ("cifar10", "mobilenetv2"): (92.45, 92.23),
        ("cifar10", "resnet18"): (95.51, 95.32),
        ("rotate", "cnn"): (76.78, 79.60),
        ("rotate", "mobilenetv2"): (85.76, 89.85),
        ("rotate", "resnet18"): (88.23, 92.60),
    }


def test_dispatched_sentences_of_chen_et_al_are_as_printed():
    printed = {"English": "1374 3745 2999 31882", "French": "23470 3335 13182 13", "Russian": "833 9405 7723 39"}
    assert claims_language.PUBLISHED.clusters == tuple(printed)
    assert claims_language.PUBLISHED.counts == tuple(tuple(map(int, row.split())) for row in printed.values())


def test_widths_of_wang_et_al_are_as_printed_where_the_copy_has_them():
    printed = {
        "W1-High": "64 64 128 128 256 256 256 512 512 512 - - -",
        "W1-Mid": "64 64 128 128 2990 256 256 512 512 512 512 512 512",
        "W4-Low": "512 512 - - 256 256 256 512 512 512 512 512 512",
        "W13-All": "128 128 256 256 405 405 405 615 615 615 615 615 615",
    }
    assert [widening.title for widening in WIDENINGS.values()] == list(printed)
    for widening in WIDENINGS.values():
        shown = ["-" if number in widening.reconstructed else str(w) for number, w in enumerate(widening.widths, 1)]
        assert " ".join(shown) == printed[widening.title]
