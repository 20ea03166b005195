"""The overlay shows each expert's patches, whatever the image, the grid and the router."""

import io

import matplotlib.image
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moesaic.insight import overlay
from moesaic.routing import ExpertChoice, SoftRouter, TokenChoice
from moesaic.routing_record import UNASSIGNED, Routing


def expert_choice(batch: int = 1, experts: int = 3, patches: int = 2, grid: tuple[int, int] = (2, 3)) -> Routing:
    torch.manual_seed(0)
    router = ExpertChoice(1, experts=experts, patches_per_expert=patches)
    return router.choose(torch.randn(batch, grid[0] * grid[1], experts), grid=grid)


def by_hand(index: list[list[int]], units: int, grid: tuple[int, int]) -> Routing:
    """One image; expert e takes the patches ``index[e]``."""
    index_BEL = torch.tensor([index])
    scores = torch.zeros(1, units, len(index))
    return Routing("patch", scores, index_BEL, (index_BEL != UNASSIGNED) * 0.25, "expert", grid=grid)


def rendered(figure: Figure, dpi: int = 100) -> np.ndarray:
    """The figure's pixels, (height, width, 3)."""
    file = io.BytesIO()
    figure.savefig(file, dpi=dpi, format="png")
    file.seek(0)
    return matplotlib.image.imread(file)[..., :3]


def panel(figure: Figure, axes: Axes) -> np.ndarray:
    """The pixels of one panel."""
    image = rendered(figure)
    height, width, _ = image.shape
    box = axes.get_position()
    top, bottom = round((1 - box.y1) * height), round((1 - box.y0) * height)
    return image[top:bottom, round(box.x0 * width) : round(box.x1 * width)]


def centres(figure: Figure, axes: Axes, grid: tuple[int, int]) -> np.ndarray:
    """The colour in the middle of every patch of a panel, above its number, (rows, columns, 3)."""
    pixels = panel(figure, axes)
    rows, columns = grid
    down = [int((r + 0.4) / rows * pixels.shape[0]) for r in range(rows)]
    across = [int((c + 0.5) / columns * pixels.shape[1]) for c in range(columns)]
    return pixels[np.ix_(down, across)]


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_each_image_has_a_panel_for_each_expert():
    figure = overlay(torch.rand(2, 3, 32, 48), expert_choice(batch=2))
    assert len(figure.axes) == 2 * (1 + 3)
    assert [texts(axes)[0] for axes in figure.axes if axes.texts] == ["expert 0", "expert 1", "expert 2"] * 2


def test_a_panel_shows_the_expert_s_patches_and_veils_the_others():
    routing = by_hand([[0, 5], [1, UNASSIGNED]], units=6, grid=(2, 3))
    figure = overlay(torch.zeros(1, 1, 32, 48), routing)
    _, first, second = figure.axes
    dark = centres(figure, first, (2, 3)).mean(-1) < 0.1
    assert dark.tolist() == [[True, False, False], [False, False, True]]
    dark = centres(figure, second, (2, 3)).mean(-1) < 0.1
    assert dark.tolist() == [[False, True, False], [False, False, False]]


def test_selected_patches_are_clearer_than_the_rest():
    figure = overlay(torch.zeros(1, 1, 32, 48), by_hand([[0, 5], [1, 5]], units=6, grid=(2, 3)))
    brightness = centres(figure, figure.axes[0], (2, 3)).mean(-1)
    assert (brightness < 0.1).tolist() == [[True, True, False], [False, False, True]]


def test_the_frame_lies_round_the_patch():
    figure = overlay(torch.zeros(1, 1, 32, 48), by_hand([[2]], units=6, grid=(2, 3)))
    pixels = panel(figure, figure.axes[1])
    orange = np.abs(pixels - np.array([0.9, 0.62, 0.0])).max(-1) < 0.05
    down, across = (place / length for place, length in zip(orange.nonzero(), orange.shape, strict=True))
    # the last patch of the first row
    assert (down.min(), down.max()) == (pytest.approx(0.0, abs=0.03), pytest.approx(1 / 2, abs=0.03))
    assert (across.min(), across.max()) == (pytest.approx(2 / 3, abs=0.03), pytest.approx(1.0, abs=0.03))


def test_frames_nest_where_experts_share_a_patch():
    figure = overlay(torch.zeros(1, 1, 32, 48), by_hand([[5], [5]], units=6, grid=(2, 3)))
    frames = [lines for lines in figure.axes[0].collections if lines.get_edgecolor().tolist() != [[1, 1, 1, 1]]]
    (outer,), (inner,) = (lines.get_paths() for lines in frames)
    assert frames[0].get_edgecolor().tolist() != frames[1].get_edgecolor().tolist()
    # patch 5 is the third of the second row
    assert 2 < outer.vertices[:, 0].min() < inner.vertices[:, 0].min()
    assert inner.vertices[:, 0].max() < outer.vertices[:, 0].max() < 3
    assert 1 < outer.vertices[:, 1].min() < inner.vertices[:, 1].min()
    assert inner.vertices[:, 1].max() < outer.vertices[:, 1].max() < 2


def test_gates_are_written_on_the_patches_that_have_them():
    routing = by_hand([[0, 5], [1, UNASSIGNED]], units=6, grid=(2, 3))
    figure = overlay(torch.zeros(1, 1, 32, 48), routing)
    _, first, second = figure.axes
    assert texts(first) == ["expert 0", "0.25", "0.25"]
    assert texts(second) == ["expert 1", "0.25"]
    assert "Patches of each expert, with gates" in [text.get_text() for text in figure.texts]


def test_numbers_are_left_out_where_they_could_not_be_read():
    figure = overlay(torch.rand(1, 3, 64, 64), expert_choice(experts=4, grid=(32, 32)))
    assert all(len(axes.texts) <= 1 for axes in figure.axes)
    assert "Patches of each expert" in [text.get_text() for text in figure.texts]


def test_an_expert_without_patches_is_called_idle():
    figure = overlay(torch.rand(1, 3, 8, 8), by_hand([[0], [UNASSIGNED]], units=4, grid=(2, 2)))
    assert [texts(axes)[0] for axes in figure.axes[1:]] == ["expert 0", "expert 1 (idle)"]


def test_no_two_of_the_first_32_experts_look_alike():
    figure = overlay(torch.rand(1, 3, 8, 8), expert_choice(experts=32, patches=1, grid=(2, 2)))
    marks = [axes.lines[0] for axes in figure.axes[1:]]
    styles = {(mark.get_color(), str(mark._dash_pattern)) for mark in marks}
    assert len(styles) == 32


def test_picked_experts_keep_their_names_and_colours():
    images, routing = torch.rand(1, 3, 8, 8), expert_choice(experts=8, grid=(2, 2))
    everyone, some = overlay(images, routing), overlay(images, routing, experts=[6, 1])
    assert [texts(axes)[0] for axes in some.axes[1:]] == ["expert 6", "expert 1"]
    assert some.axes[1].lines[0].get_color() == everyone.axes[1 + 6].lines[0].get_color()


def test_only_the_first_images_are_drawn_each_under_its_title():
    titles = [r"$\no formula$", "a cat", "never seen"]
    figure = overlay(torch.rand(3, 1, 8, 8), expert_choice(batch=3, grid=(2, 2)), max_images=2, titles=titles)
    assert [axes.get_title(loc="left") for axes in figure.axes if not axes.texts] == titles[:2]
    rendered(figure)


def test_units_that_choose_are_drawn_where_they_went():
    router = TokenChoice(1, experts=2, top_k=1)
    scores = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]])
    figure = overlay(torch.zeros(1, 1, 16, 16), router.choose(scores, grid=(2, 2)))
    dark = centres(figure, figure.axes[2], (2, 2)).mean(-1) < 0.1
    assert dark.tolist() == [[False, False], [True, False]]


def test_a_soft_routing_is_the_clearer_the_more_an_expert_draws_on_a_patch():
    scores_BNE = torch.tensor([[[0.0, 3.0], [1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]])
    routing = SoftRouter(1, experts=2).choose(scores_BNE, grid=(2, 2))
    figure = overlay(torch.zeros(1, 1, 16, 16), routing)
    first = centres(figure, figure.axes[1], (2, 2)).mean(-1).flatten()
    assert (np.diff(first) < 0).all()  # darker and darker, up to the black image itself
    assert first[-1] < 0.05
    assert texts(figure.axes[1]) == ["expert 0", "0.64"]  # e³ / (1 + e + e² + e³); the rest is below 1/4


@pytest.mark.parametrize(
    ("experts", "patches", "grid", "size"),
    [
        (1, 1, (1, 1), (1, 1)),
        (1, 6, (2, 3), (10, 15)),
        (8, 4, (4, 4), (28, 28)),
        (16, 2, (4, 4), (5, 7)),  # fewer pixels than would divide into patches
        (20, 1, (1, 16), (8, 128)),
        (3, 2, (7, 1), (70, 10)),
    ],
)
def test_any_number_of_experts_patches_and_pixels_can_be_drawn(experts, patches, grid, size):
    figure = overlay(torch.rand(1, 3, *size), expert_choice(1, experts, patches, grid))
    assert len(figure.axes) == 1 + experts
    assert rendered(figure, dpi=30).std() > 0
    for axes in figure.axes:
        box = axes.get_position()
        assert 0 <= box.x0 < box.x1 <= 1
        assert 0 <= box.y0 < box.y1 <= 1
    top = max(axes.get_position().y1 for axes in figure.axes)
    assert len(figure.texts) == 2
    assert all(0 <= text.get_position()[0] < 1 and top < text.get_position()[1] < 1 for text in figure.texts)


@pytest.mark.parametrize(
    "images",
    [
        torch.tensor([[[[0, 255]]]], dtype=torch.uint8),
        torch.tensor([[[[0.0, 1.0]]]]),
        torch.tensor([[[[-2.0, 3.0]]]]),
        torch.tensor([[[[0, 255]]]]),
        torch.tensor([[[[-2.0, 3.0]]]], dtype=torch.bfloat16, requires_grad=True),
        np.array([[[[0.0, 1.0]]]] * 3).transpose(1, 0, 2, 3),
        torch.tensor([[[[float("nan"), 7.0, 9.0]]]])[..., [0, 2]].expand(1, 3, 1, 2),
    ],
    ids=["bytes", "unit floats", "any floats", "integers", "bfloat16", "numpy in colour", "not a number"],
)
def test_images_of_every_kind_are_drawn_from_black_to_white(images):
    figure = overlay(images, by_hand([[0, 1]], units=2, grid=(1, 2)))
    shown = np.asarray(figure.axes[0].images[0].get_array())
    assert shown.shape == (1, 2, 3)
    assert shown[0, 0].tolist() == [0.0, 0.0, 0.0]
    assert shown[0, 1].tolist() == ([0.0] * 3 if np.isnan(np.asarray(images.tolist())).any() else [1.0] * 3)


@pytest.mark.parametrize("images", [torch.full((1, 1, 2, 2), 0.2), torch.full((1, 1, 2, 2), 51, dtype=torch.uint8)])
def test_bytes_and_floats_within_0_and_1_keep_their_brightness(images):
    figure = overlay(images, expert_choice(grid=(2, 2)))
    np.testing.assert_allclose(figure.axes[0].images[0].get_array(), 0.2, rtol=1e-6)


def test_each_image_is_stretched_for_itself():
    images = torch.tensor([[[[0.0, 10.0]]], [[[0.0, 1000.0]]]])
    figure = overlay(images, expert_choice(batch=2, patches=1, grid=(1, 2)))
    for axes in (figure.axes[0], figure.axes[4]):
        assert np.asarray(axes.images[0].get_array())[0, :, 0].tolist() == [0.0, 1.0]


def test_an_image_without_a_finite_pixel_is_black():
    images = torch.tensor([[[[float("nan"), float("inf")]]], [[[0.0, 9.0]]]])
    figure = overlay(images, expert_choice(batch=2, patches=1, grid=(1, 2)))
    assert np.asarray(figure.axes[0].images[0].get_array()).max() == 0.0


IMAGES = torch.rand(2, 3, 8, 8)


@pytest.mark.parametrize(
    ("images", "options", "message"),
    [
        (IMAGES[0], {}, r"shape \(3, 8, 8\); give \(B, C, H, W\)"),
        (torch.rand(2, 4, 8, 8), {}, "1 or 3 channels"),
        (torch.rand(5, 3, 8, 8), {}, "5 images, but 2 were routed"),
        (IMAGES, {"experts": [0, 3]}, r"experts=\[0, 3\]; use indices from 0 to 2"),
        (IMAGES, {"experts": []}, r"experts=\[\]; use indices from 0 to 2"),
        (IMAGES, {"titles": ["one"]}, "1 titles for 2 images"),
        (IMAGES, {"max_images": 0}, "max_images=0"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_the_way_out(images, options, message):
    with pytest.raises(ValueError, match=message):
        overlay(images, expert_choice(batch=2), **options)


def test_units_without_a_place_cannot_be_drawn():
    routing = TokenChoice(1, experts=3).choose(torch.zeros(2, 1, 3), unit="sample")
    with pytest.raises(ValueError, match="routing of samples has no grid"):
        overlay(IMAGES, routing)


def test_an_empty_batch_cannot_be_drawn():
    with pytest.raises(ValueError, match=r"0 images, but 0 were routed; .* at least one"):
        overlay(IMAGES[:0], expert_choice(batch=0))


def test_what_is_no_routing_is_refused_with_the_way_to_get_one():
    with pytest.raises(
        TypeError, match=r"routing is a Tensor; pass the Routing of one layer.*overlay\(images, routing"
    ):
        overlay(torch.zeros(1, 3, 8, 8), torch.zeros(1, 3, 8, 8))  # pyright: ignore[reportArgumentType]
