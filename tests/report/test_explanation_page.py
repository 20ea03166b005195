"""The explanation page is complete and self-contained, and shows the measured numbers."""

import base64
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

import moesaic
from moesaic.insight.explain import Explanation, ForwardPass, collect_outputs, explain
from moesaic.report.embedded_images import picture_of
from moesaic.report.expert_figures import draw_class_maps, draw_top_patches, mean_images
from moesaic.report.explanation_page import About, write_explanation
from moesaic.report.explorer_data import CheckpointPass, ShownImage

NAMES = ("cat <b>", "dog & co")


def network(experts: int = 2, classes: int = 2, channels: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    moe = moesaic.PatchMoE(channels, 2 * experts, experts=experts, patches_per_expert=1, patch_size=4)
    return nn.Sequential(moe, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * experts, classes))


def found(model: nn.Module, images: int = 6, channels: int = 3) -> tuple[ForwardPass, Tensor]:
    pixels = torch.randint(0, 256, (images, channels, 8, 8), dtype=torch.uint8)
    return collect_outputs(model, pixels, lambda pixels: pixels / 255), pixels


def write(
    folder: Path, explanation: Explanation, seen: ForwardPass, pixels: Tensor, classes: Tensor, **about: object
) -> str:
    images = [
        ShownImage("<i>one</i>.png", 1, picture_of(pixels[0])),
        ShownImage("two.png", None, picture_of(pixels[1])),
    ]
    page = write_explanation(
        folder,
        explanation,
        replace(About("a model", "runs/a", "6 images"), **about),
        pixels=pixels,
        classes=classes,
        images=images,
        checkpoints=[CheckpointPass("epoch 1", seen.images(0, 2), seen)],
    )
    return page.read_text("utf-8")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("explanation")
    (folder / "layer-9-image-7.png").write_bytes(b"of before")
    (folder / "explanation.json").write_text("{}")
    seen, pixels = found(network())
    labels = torch.arange(6) % 2
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    explanation = explain(seen, NAMES, labels=labels, groups=groups, group_names=("light", "dark"), top_patches=3)
    skipped = (("bad<script>.jpg", "is empty"),)
    return folder, write(folder, explanation, seen, pixels, labels, skipped=skipped, command="moesaic explain 'a b'")


def test_the_page_embeds_its_images_and_loads_nothing(written: tuple[Path, str]):
    folder, page = written
    figures = sorted(path.name for path in folder.glob("*.png"))
    kinds = ("difference", "gate", "share", "top-patches")
    assert figures == [f"layer-0-{kind}.png" for kind in kinds], "and none of an earlier explanation"
    files = re.findall(r'id="(image|mean)-\d+" data-type="image/webp">([^<]+)<', page)
    assert [kind for kind, _ in files] == ["image", "image", "mean", "mean"]
    assert all(Image.open(io.BytesIO(base64.b64decode(text))).size == (8, 8) for _, text in files)
    assert not re.findall(r'\s(?:src|href)="', page)
    assert "Content-Security-Policy" in page
    assert not re.search(r"https?://(?!www.w3.org/2000/svg)", page)


def test_names_of_classes_and_files_are_escaped(written: tuple[Path, str]):
    _, page = written
    assert "<b>" not in page
    assert "<i>one" not in page
    assert "bad<script" not in page
    assert "cat &lt;b&gt;" in page
    assert "bad&lt;script&gt;.jpg" in page
    assert r"\u003ci>one\u003c/i>.png" in page, "in the block of data"


def test_the_page_has_accuracies_and_the_command(written: tuple[Path, str]):
    _, page = written
    text = re.sub(r"<[^>]+>", " ", page).replace("\u00a0", " ").replace("&nbsp;", " ")
    assert "light" in text
    assert "moesaic explain" in text
    assert "could not be read" in text
    assert "A patch covers 4×4 pixels of the image and depends on these pixels alone." in text
    assert "fewer than 20 images of" in text


def packed(page: str) -> dict:
    (block,) = re.findall(r'<script type="application/json" id="explorer-data">(.*?)</script>', page)
    return json.loads(block)


def numbers(field: dict) -> np.ndarray:
    steps = 2 ** field["bits"] - 1
    whole = np.frombuffer(base64.b64decode(field["data"]), "<u2" if field["bits"] == 16 else "u1")
    return field["least"] + whole / steps * (field["most"] - field["least"])


def test_the_explorer_has_the_routing_of_its_images(written: tuple[Path, str]):
    seen, _ = found(network())
    data = packed(written[1])
    assert data["images"]["name"] == ["<i>one</i>.png", "two.png"]
    assert data["images"]["label"] == [1, -1]
    (checkpoint,) = data["checkpoints"]
    assert [top[0][0] for top in checkpoint["top"]] == seen.probabilities[:2].argmax(1).tolist()
    routing, layer = seen.routing["0"], checkpoint["layers"][0]
    index = np.frombuffer(base64.b64decode(layer["index"]["data"]), "u1")
    assert index.tolist() == routing.index[:2].flatten().tolist()
    np.testing.assert_allclose(numbers(layer["gate"]), routing.gate[:2].detach().flatten(), atol=1e-4)
    rates = np.array(
        json.loads((written[0] / "explanation.json").read_text())["explanation"]["layers"][0]["selection_rate"]
    )
    np.testing.assert_allclose(numbers(layer["share"]), rates.flatten(), atol=1e-4)
    scores = routing.scores[:2].masked_fill(~routing.mask[:2], -torch.inf)
    for expert, top in enumerate(layer["top"]):
        assert [score for *_, score, _ in top] == pytest.approx(
            scores[..., expert].amax(1).sort(descending=True).values, abs=1e-3
        )


def test_everything_on_the_page_is_in_the_json(written: tuple[Path, str]):
    folder, _ = written
    record = json.loads((folder / "explanation.json").read_text("utf-8"))
    (layer,) = record["explanation"]["layers"]
    assert np.array(layer["selection_rate"]).shape == (2, 2, 4)
    assert len(layer["top_patches"]) == 2
    assert record["explanation"]["group_accuracy"][1]["name"] == "dark"
    assert record["shown"][0]["label"] == NAMES[1]
    assert (folder / record["pictures"][0]["share"]).is_file()


def test_images_without_labels_are_grouped_by_prediction(tmp_path: Path):
    seen, pixels = found(network())
    page = write(tmp_path, explain(seen, NAMES), seen, pixels, seen.probabilities.argmax(1))
    assert "They are grouped by predicted class" in page
    assert 'id="accuracy"' not in page


def test_a_layer_that_routes_whole_images_has_a_table_and_no_maps(tmp_path: Path):
    router = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 2))
    seen, pixels = found(moesaic.SampleMoE(router, [nn.Sequential(nn.Flatten(), nn.Linear(192, 2)) for _ in range(2)]))
    labels = torch.arange(6) % 2
    page = write(tmp_path, explain(seen, NAMES, labels=labels), seen, pixels, labels)
    assert "load share" in page
    (layer,) = packed(page)["layers"]
    assert (layer["kind"], layer["grid"]) == ("sample", None)
    assert not list(tmp_path.glob("*.png"))


def tinted(figure: Figure) -> list[np.ndarray]:
    """The colours laid over the panels' images, (rows, columns, 4)."""
    return [np.asarray(image.get_array()) for image in figure.axes[0].images if np.ndim(image.get_array()) == 3]


def planted() -> tuple[Explanation, Tensor, Tensor]:
    model = network(experts=1)
    model[0].router.weight.data.fill_(1.0)
    pixels = torch.full((8, 3, 8, 8), 20, dtype=torch.uint8)
    labels = torch.arange(8) % 2
    pixels[labels == 0, :, :4, :4] = 250
    pixels[labels == 1, :, 4:, 4:] = 250
    return explain(collect_outputs(model, pixels, lambda x: x / 255), ("left", "right"), labels=labels), pixels, labels


def test_a_map_is_coloured_on_the_selected_patches():
    explanation, pixels, labels = planted()
    backdrops = mean_images(pixels, labels, 2)
    assert backdrops[0, 0, 0] == pytest.approx(250 / 255)
    figure = draw_class_maps(explanation.layers[0], ("left", "right"), backdrops, (4, 4), "share")
    alphas = [tint[..., 3] for tint in tinted(figure)]
    assert [alpha.argmax() for alpha in alphas] == [0, 3]
    assert all((alpha > 0).sum() == 1 for alpha in alphas)
    assert [text.get_text() for text in figure.axes[0].texts if text.get_text() == "100"] == ["100"] * 2


def test_a_difference_of_two_classes_has_one_row_and_two_colours():
    explanation, pixels, labels = planted()
    figure = draw_class_maps(
        explanation.layers[0], ("left", "right"), mean_images(pixels, labels, 2), (4, 4), "difference"
    )
    (tint,) = tinted(figure)
    assert (tint[..., 3] > 0).sum() == 2
    red_of_less, red_of_more = tint[0, 0, 0], tint[1, 1, 0]
    assert red_of_less < red_of_more
    assert {"+100", "−100"} <= {text.get_text() for text in figure.axes[0].texts}


def test_top_patches_are_shown_with_their_surroundings():
    explanation, pixels, _ = planted()
    figure = draw_top_patches(explanation.layers[0], ("left", "right"), pixels)
    crops = tinted(figure)
    assert len(crops) == 8
    assert all(crop.shape == (8, 8, 3) for crop in crops)  # 4 pixels, 2 on each side, moved into the image
    assert crops[0][:4, :4].min() == pytest.approx(250 / 255)
    names = [text.get_text() for text in figure.axes[0].texts]
    assert names.count("left") == names.count("right") == 4


@pytest.mark.parametrize(
    ("experts", "classes", "channels"), [(1, 1, 3), (20, 2, 1), (3, 30, 3)], ids=["one of each", "grey", "30 classes"]
)
def test_any_number_of_experts_and_classes_can_be_drawn(experts: int, classes: int, channels: int):
    seen, pixels = found(network(experts, classes, channels), images=2 * classes, channels=channels)
    labels = torch.arange(2 * classes) % classes
    names = [f"class {k} with a name that is long" for k in range(classes)]
    explanation = explain(seen, names, labels=labels)
    for kind in ("share", "difference", "gate"):
        figure = draw_class_maps(
            explanation.layers[0], names, mean_images(pixels, labels, classes), explanation.class_images, kind
        )
        rows = 1 if classes == 2 and kind == "difference" else min(classes, 12)
        assert len(tinted(figure)) == experts * rows
    draw_top_patches(explanation.layers[0], names, pixels).savefig(io.BytesIO(), format="png", dpi=20)
