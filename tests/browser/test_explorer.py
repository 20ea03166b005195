"""The routing explorer in a real browser: by mouse, by keyboard, in both themes, and without any request."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser.chromium import Chromium, Page
from browser.example_pages import (
    CLASSES,
    ExamplePage,
    gate_page,
    long_page,
    loose_token_page,
    patch_page,
    sample_page,
    token_page,
)

Opened = dict[str, tuple[ExamplePage, Page]]
KINDS = {
    "patches": patch_page,
    "tokens": token_page,
    "tokens without a grid": loose_token_page,
    "samples": sample_page,
    "gates": gate_page,
}


@pytest.fixture(scope="module")
def opened(browser: Chromium, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    pages: Opened = {}
    for name, make in KINDS.items():
        example = make(tmp_path_factory.mktemp(name))
        pages[name] = (example, browser.open(example.path))
    yield pages
    for _, page in pages.values():
        page.close()


@pytest.fixture
def patches(opened: Opened) -> tuple[ExamplePage, Page]:
    """The page of patches as it was when it was opened."""
    return fresh(opened, "patches")


@pytest.fixture
def samples(opened: Opened) -> tuple[ExamplePage, Page]:
    return fresh(opened, "samples")


@pytest.fixture
def gates(opened: Opened) -> tuple[ExamplePage, Page]:
    return fresh(opened, "gates")


def fresh(opened: Opened, name: str) -> tuple[ExamplePage, Page]:
    example, page = opened[name]
    page.look()
    page.go(example.path)
    page.settle()
    return example, page


def part(name: str) -> str:
    return f'[data-part="{name}"]'


def shown(example: ExamplePage, page: Page) -> int:
    """The index of the image in the viewer."""
    return example.names.index(page.text(part("name")))


def views(page: Page) -> list[str]:
    return page.run("() => [...document.querySelectorAll('[role=tab]:not([hidden])')].map((tab) => tab.dataset.view)")


def values(page: Page, selector: str) -> list[list[float]]:
    """The numbers behind the marks of each drawing."""
    return page.run(
        """(selector) => [...document.querySelectorAll(selector)].map((drawing) =>
            [...drawing.querySelectorAll("[data-value]")].map((each) => Number(each.dataset.value)))""",
        selector,
    )


def frames(page: Page) -> set[tuple[int, int, float]]:
    """Expert, patch and gate of every frame on the image."""
    found = page.run(
        """() => [...document.querySelectorAll('[data-part="overlay"] [data-expert]')].map(
            ({ dataset }) => [Number(dataset.expert), Number(dataset.patch), Number(dataset.gate)])"""
    )
    return {(expert, patch, round(gate, 3)) for expert, patch, gate in found}


def selected(example: ExamplePage, b: int, layer: int = 0, checkpoint: int = -1) -> set[tuple[int, int, float]]:
    routing = list(example.passes[checkpoint].routing.values())[layer]
    weights, mask = routing.weights[b].detach(), routing.mask[b]
    return {(int(e), int(n), round(float(weights[n, e]), 3)) for n, e in mask.nonzero().tolist()}


def same(ours: set[tuple[int, int, float]], theirs: set[tuple[int, int, float]]) -> bool:
    """Gates are packed, so that the last digit may differ."""
    return len(ours) == len(theirs) and all(
        a[:2] == b[:2] and abs(a[2] - b[2]) < 0.0021 for a, b in zip(sorted(ours), sorted(theirs), strict=True)
    )


@pytest.mark.parametrize("name", KINDS)
def test_a_page_opens_from_a_file_without_a_complaint_or_a_request(name: str, opened: Opened):
    _, page = fresh(opened, name)
    for view in views(page):
        page.click(f"#tab-{view}")
        assert page.run("(view) => !document.getElementById(`view-${view}`).hidden", view)
        assert page.text(f"#view-{view}").strip()
    assert page.complaints == []
    assert page.requests == []
    assert page.run("() => document.querySelectorAll('.ready').length") == 1


@pytest.mark.parametrize("name", KINDS)
def test_names_of_classes_and_files_stay_text(name: str, opened: Opened):
    example, page = fresh(opened, name)
    options = page.run(f"() => [...document.querySelector('{part('which-class')}').options].map((each) => each.text)")
    assert options == list(CLASSES)
    page.choose(part("order"), "given")
    page.press("Home")
    page.run("(b) => document.getElementById(`option-${b}`).click()", 0)
    assert page.text(part("name")) == example.names[0]
    assert CLASSES[0] in page.text("#view-images")
    page.click("#tab-classes")
    scripts = page.run("() => [...document.scripts].filter((each) => !each.type).length")
    assert scripts == 1, "the page's own"
    assert page.run("() => document.querySelectorAll('[onerror], i:not([style]):not([class]) code').length") == 0


def test_frames_are_the_routing_of_the_image_in_every_layer_and_checkpoint(patches: tuple[ExamplePage, Page]):
    example, page = patches
    b = shown(example, page)
    assert same(frames(page), selected(example, b))
    page.choose(part("layer"), "1")
    assert same(frames(page), selected(example, b, layer=1))
    page.choose(part("checkpoint"), "0")
    b = shown(example, page)
    assert same(frames(page), selected(example, b, layer=1, checkpoint=0))
    best = example.passes[0].probabilities[b]
    assert CLASSES[int(best.argmax())] in page.text(part("prediction"))
    assert page.text(part("checkpoint-name")) == "epoch 1"


def test_experts_and_gates_can_be_switched_by_mouse(patches: tuple[ExamplePage, Page]):
    example, page = patches
    expected = selected(example, shown(example, page))
    page.click(f"{part('chips')} input", 1)
    assert same(frames(page), {each for each in expected if each[0] != 1})
    page.click(part("none"))
    assert frames(page) == set()
    page.click(part("all"))
    assert same(frames(page), expected)
    routing = example.passes[-1].routing["0"]
    limit = 0.5 * float(routing.gate.max())
    page.choose(part("least"), "50")
    assert {each[:2] for each in frames(page)} == {each[:2] for each in expected if each[2] >= limit}
    page.choose(part("least"), "0")
    assert same(frames(page), expected)


def test_a_patch_shows_the_most_similar_top_patches_of_its_expert(patches: tuple[ExamplePage, Page]):
    example, page = patches
    b = shown(example, page)
    page.hover(".target", 0)
    patch = page.run("() => Number(document.querySelector('.target').dataset.patch)")
    assert f"row {patch // 3 + 1}, column {patch % 3 + 1}" in page.text(part("patch"))
    experts = sorted(expert for expert, n, _ in selected(example, b) if n == patch)
    assert [f"expert {expert}" in page.text(part("patch")) for expert in experts] == [True] * len(experts)
    page.click(".target", 0)
    titles = page.run(
        "() => [...document.querySelector('.similar').querySelectorAll('.crop')].map((each) => each.title)"
    )
    routing, features = example.passes[-1].routing["0"], example.passes[-1].features["0"]
    scores = routing.scores[..., experts[0]].masked_fill(~routing.mask[..., experts[0]], -np.inf)
    top = scores.argmax(1)  # the top patch of each image
    far = {
        other: float((features[other, top[other]] - features[b, patch]).norm())
        for other in range(len(example.labels))
        if other != b
    }
    found = [example.names.index(title.split(": predicted")[0]) for title in titles]
    assert len(found) == 6
    # packed to 8 bits, so that nearly equal distances may change places
    tolerance = 0.02 * max(far.values())
    for other, limit in zip(found, sorted(far.values()), strict=False):
        assert far[other] == pytest.approx(limit, abs=tolerance)
    assert "most similar" in page.text(part("patch"))
    page.click(".similar .crop", 0)
    assert shown(example, page) == found[0]
    page.click("#tab-experts")
    page.choose(part("which-expert"), str(experts[0]))
    assert page.run("() => document.querySelectorAll('.crops.large .crop').length") == 4


def test_a_page_works_by_keyboard_alone(patches: tuple[ExamplePage, Page]):
    example, page = patches
    focused = """() => {
        const { dataset, className } = document.activeElement;
        return dataset.view ?? dataset.part ?? className;
    }"""
    page.run("() => document.querySelector('#tab-images').focus()")
    page.press("ArrowRight")
    assert page.run(focused) == "classes"
    assert page.run("() => !document.getElementById('view-classes').hidden")
    page.press("End")
    assert page.run(focused) == "experts", "where experts choose, there is no dispatch"
    page.press("Home")
    seen = []
    for _ in range(24):
        page.press("Tab")
        seen.append(page.run(focused).split()[0])
        if seen[-1] == "target":
            break
    expected = ["layer", "checkpoint", "order", "filter", "verdict", "source", "search", "reset", "thumbnail", "target"]
    assert seen == expected, "each list is one stop"
    first = page.run("() => Number(document.activeElement.dataset.patch)")
    assert f"row {first // 3 + 1}, column {first % 3 + 1}" in page.text(part("patch"))
    page.run("() => document.querySelector('.thumbnail[tabindex=\"0\"]').focus()")
    before = shown(example, page)
    page.press("ArrowRight")
    after = shown(example, page)
    assert after != before
    assert page.run("() => Number(document.activeElement.dataset.image)") == after
    assert page.run("() => document.activeElement.getAttribute('aria-selected')") == "true"
    page.press("ArrowLeft")
    assert shown(example, page) == before


def order(page: Page) -> list[int]:
    """The images of the list."""
    return page.run("() => [...document.querySelectorAll('.thumbnail')].map((each) => Number(each.dataset.image))")


def test_mistakes_come_first_and_filters_leave_what_matches(patches: tuple[ExamplePage, Page]):
    example, page = patches
    predicted = example.passes[-1].probabilities.argmax(1)
    wrong = {b for b in range(len(example.labels)) if b != 1 and int(predicted[b]) != int(example.labels[b])}
    assert set(order(page)[:2]) == {0, 1}, "the user's own images"
    others = order(page)[2:]
    assert set(others[: len(wrong - {0})]) == wrong - {0}
    page.choose(part("verdict"), "wrong")
    assert set(order(page)) == wrong
    assert page.text(part("count")) == f"{len(wrong)} of {len(example.labels)} images, {len(wrong)} wrong"
    page.choose(part("verdict"), "")
    page.choose(part("filter"), "1")
    assert set(order(page)) == {
        b for b in range(len(example.labels)) if int(predicted[b] if b == 1 else example.labels[b]) == 1
    }
    page.click(part("reset"))
    page.choose(part("source"), "1")
    assert set(order(page)) == {0, 1}
    page.click(part("reset"))
    page.choose(part("search"), "photo 7")
    assert order(page) == [7]
    page.click(part("reset"))
    assert len(order(page)) == len(example.labels)
    page.choose(part("search"), "nothing has this name")
    assert page.run(f"() => document.querySelector('{part('viewer')}').hidden")


def test_a_long_list_grows_as_it_is_scrolled_and_reaches_its_end_by_keyboard(browser: Chromium, tmp_path: Path):
    example = long_page(tmp_path)
    page = browser.open(example.path)
    page.settle()
    every = len(example.labels)
    assert len(order(page)) == 72
    assert page.run("() => document.querySelector('.thumbnail').getAttribute('aria-setsize')") == str(every)
    page.run("() => { const { children } = document.querySelector('.gallery'); children[71].scrollIntoView(); }")
    page.settle()
    page.settle()
    assert len(order(page)) == 144
    page.run("() => document.querySelector('.thumbnail[tabindex=\"0\"]').focus()")
    page.press("End")
    found = order(page)
    assert sorted(found) == list(range(every))
    assert shown(example, page) == found[-1]
    assert page.run("() => Number(document.activeElement.getAttribute('aria-posinset'))") == every
    page.choose(part("verdict"), "wrong")
    assert len(order(page)) <= 72
    assert page.complaints == []
    page.close()


def test_maps_of_a_class_are_its_selection_rates(patches: tuple[ExamplePage, Page]):
    example, page = patches
    page.click("#tab-classes")
    page.choose(part("which-class"), "2")
    found = values(page, ".maps svg[role=img]")
    mask = example.passes[-1].routing["0"].mask[example.labels == 2].double().mean(0).T
    np.testing.assert_allclose(found, mask, atol=1e-3)
    page.choose(part("map"), "difference")
    found = values(page, ".maps svg[role=img]")
    others = [example.passes[-1].routing["0"].mask[example.labels == k].double().mean(0).T for k in (0, 1)]
    np.testing.assert_allclose(found, mask - (others[0] + others[1]) / 2, atol=1e-3)


def test_tokens_are_framed_on_the_grid_and_the_class_token_stands_beside_it(opened: Opened):
    example, page = fresh(opened, "tokens")
    b = shown(example, page)
    every = selected(example, b)
    assert same(frames(page), {(e, n - 1, gate) for e, n, gate in every if n})
    found = page.run(
        """() => [...document.querySelectorAll(".prefix .to")].map(
            ({ dataset }) => [Number(dataset.expert), Number(dataset.token), Number(dataset.gate)])"""
    )
    assert same({(e, n, round(gate, 3)) for e, n, gate in found}, {each for each in every if not each[1]})
    assert "Class token" in page.text(part("assigned"))
    page.click("#tab-classes")
    page.choose(part("which-class"), "2")
    mask = example.passes[-1].routing["mlp"].mask[example.labels == 2].double().mean(0).T
    np.testing.assert_allclose(values(page, ".maps svg[role=img]"), mask[:, 1:], atol=1e-3)
    assert "Class token: expert" in page.text("#view-classes")


def test_tokens_without_a_grid_are_counted(opened: Opened):
    example, page = fresh(opened, "tokens without a grid")
    mask = example.passes[-1].routing["mlp"].mask[shown(example, page)]
    (found,) = values(page, f"{part('assigned')} table")
    assert found == mask.sum(0).tolist()
    assert frames(page) == set()


def test_the_dispatch_of_images_is_shown_over_training(samples: tuple[ExamplePage, Page]):
    example, page = samples
    b = shown(example, page)
    found = page.run("() => Object.values(document.querySelector('[data-part=assigned] tr').dataset).map(Number)")
    ((expert, _, gate),) = selected(example, b)
    assert found == pytest.approx([expert, gate], abs=0.002)
    page.click("#tab-dispatch")
    tables = np.reshape(values(page, "table.dispatch"), (4, 3, 2))
    expected = [
        [each.routing[""].mask[example.labels == k][:, 0].double().mean(0).tolist() for k in range(3)]
        for each in example.passes
    ]
    np.testing.assert_allclose(tables, [expected[-1], *expected], atol=1e-3)


def test_gates_of_an_image_stand_beside_the_mean_of_its_class(gates: tuple[ExamplePage, Page]):
    example, page = gates
    b = shown(example, page)
    strips = page.run(
        """() => [...document.querySelectorAll('.strip')].map((each) => {
            const { data } = each.getContext("2d").getImageData(0, 0, each.width, 1);
            return Array.from({ length: each.width }, (_, i) => (255 - data[4 * i]) / 244);
        })"""
    )
    masks = [each.mask.flatten(1).double() for each in example.passes[0].routing.values()]
    for layer, mask in enumerate(masks):
        share = mask.mean(0)
        order = sorted(range(len(share)), key=lambda e: (-round(float(share[e]), 4), e))
        own, mean, everyone = strips[3 * layer : 3 * layer + 3]
        np.testing.assert_allclose(own, mask[b][order], atol=0.01)
        np.testing.assert_allclose(mean, mask[example.labels == example.labels[b]].mean(0)[order], atol=0.01)
        np.testing.assert_allclose(everyone, share[order], atol=0.01)
    cost = 100 * int(example.passes[0].gated.macs[b]) / 1000
    assert f"{cost:.1f}\u00a0%" in page.text(part("cost"))


MARKS = """() => [...document.querySelectorAll("#explorer :is([data-value], [data-gate], [data-veil])")].map((each) => {
    const style = getComputedStyle(each);
    return [{ ...each.dataset }, style.fill, style.stroke, style.fillOpacity];
})"""


@pytest.mark.parametrize("name", KINDS)
def test_dark_and_light_show_the_same_data_in_the_same_colours(name: str, opened: Opened):
    _, page = fresh(opened, name)
    grounds = []
    for view in views(page):
        page.click(f"#tab-{view}")
        marks = []
        for dark in (False, True):
            page.look(dark=dark)
            page.settle()
            marks.append(page.run(MARKS))
            grounds.append(page.run("() => getComputedStyle(document.body).backgroundColor"))
        assert marks[0] == marks[1]
        page.look()
    assert grounds[0] != grounds[1]


@pytest.mark.parametrize("name", KINDS)
def test_a_phone_needs_no_sideways_scrolling(name: str, opened: Opened):
    _, page = fresh(opened, name)
    page.look(width=390, height=844)
    for view in views(page):
        page.run("(view) => document.getElementById(`tab-${view}`).click()", view)
        assert page.run("() => document.documentElement.scrollWidth") <= 390
    page.look()


def test_a_page_can_be_printed(patches: tuple[ExamplePage, Page]):
    _, page = patches
    page.look(width=794, height=1123, media="print")
    assert page.run("() => getComputedStyle(document.querySelector('.gallery')).display") == "none"
    assert page.run("() => document.querySelector('.stage').getBoundingClientRect().height") > 100
    assert page.run("() => document.documentElement.scrollWidth") <= 794


def test_large_images_keep_their_shape_and_the_square_the_network_sees(gates: tuple[ExamplePage, Page]):
    _, page = gates
    width, height = page.run(
        "() => (({ width, height }) => [width, height])(document.querySelector('.stage').getBoundingClientRect())"
    )
    assert width / height == pytest.approx(36 / 24, rel=0.02)


@pytest.mark.parametrize("name", KINDS)
def test_a_page_is_accessible(name: str, opened: Opened, axe: str):
    _, page = fresh(opened, name)
    for view in views(page):
        page.click(f"#tab-{view}")
        assert page.violations(axe) == []
    page.look(dark=True)
    assert page.violations(axe) == []
    page.look()


@pytest.mark.parametrize("name", KINDS)
def test_controls_have_names_images_have_texts_and_texts_have_contrast(name: str, opened: Opened):
    _, page = fresh(opened, name)
    for dark in (False, True):
        page.look(dark=dark)
        for view in views(page):
            page.click(f"#tab-{view}")
            faults, texts = page.faults()
            assert faults == []
            assert texts > 30
    page.look()
