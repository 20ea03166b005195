"""Draws the figures of the page "The idea in pictures" as SVG files that follow the reader's theme.

python docs/pictures.py
"""

from pathlib import Path

IMAGES = Path(__file__).parent / "images"
STYLE = """
  text { font: 15px system-ui, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif; fill: #24292f; }
  .head { font-size: 17px; font-weight: 600; } .soft { fill: #57606a; } .middle { text-anchor: middle; }
  .line { stroke: #8c959f; fill: none; stroke-width: 1.5; } .tip { fill: #8c959f; }
  .sky { fill: #dfe9f5; } .grass { fill: #cfe3c8; } .idle { fill: #eceff2; } .cut { stroke: #fff; stroke-width: 2; }
  .e0 { fill: #f0a830; } .e1 { fill: #6aa5ff; } .e2 { fill: #2cc79a; } .on { fill: #10151b; }
  .f0 { stroke: #E69F00; } .f1 { stroke: #0072B2; }
  .frame { fill: none; stroke-width: 4; } .cat { fill: #e0913a; } .face { fill: #3b2a17; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .soft { fill: #9da7b3; } .sky { fill: #2f4257; } .grass { fill: #33502f; }
    .idle { fill: #2a2f36; } .cut { stroke: #14171c; } .line { stroke: #7d8590; } .tip { fill: #7d8590; }
    .on { fill: #10151b; } .f1 { stroke: #6aa5ff; }
  }
"""
SIDE = 40  # of a patch


def svg(width: int, height: int, title: str, *parts: str) -> str:
    """A whole file."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>{title}</title><style>{STYLE}</style>",
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Words that begin at x, y."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    """A rectangle."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """A horizontal or slanted arrow that points to the right."""
    return (
        f'<path class="line" d="M{x1:g},{y1:g} L{x2 - 7:g},{y2:g}"/>'
        f'<path class="tip" d="M{x2 - 9:g},{y2 - 5:g} L{x2:g},{y2:g} L{x2 - 9:g},{y2 + 5:g} z"/>'
    )


def patch(x: float, y: float, n: int) -> tuple[float, float]:
    """Where patch n of an image at x, y is."""
    return x + n % 4 * SIDE, y + n // 4 * SIDE


def picture(x: float, y: float, taken: dict[int, int] | None = None) -> str:
    """An image of 4×4 patches with a cat on patches 5, 6, 9 and 10; ``taken`` frames patches by expert."""
    parts = [rect(*patch(x, y, n), SIDE, SIDE, "cut " + ("sky" if n < 8 else "grass")) for n in range(16)]
    cx, cy = x + 2 * SIDE, y + 2 * SIDE
    parts += [
        f'<path class="cat" d="M{cx - 30},{cy - 8} l4,-28 l16,14 h20 l16,-14 l4,28 a30,30 0 1 1 -60,0 z"/>',
        *(f'<circle class="face" cx="{cx + dx}" cy="{cy}" r="4"/>' for dx in (-11, 11)),
        f'<path class="face" d="M{cx - 4},{cy + 9} h8 l-4,5 z"/>',
    ]
    for n, expert in (taken or {}).items():
        left, top = patch(x, y, n)
        parts.append(rect(left + 3, top + 3, SIDE - 6, SIDE - 6, f"frame f{expert}"))
    return "".join(parts)


def grid(x: float, y: float, filled: dict[int, int], columns: int = 4, rows: int = 4, side: float = SIDE) -> str:
    """Cells, those in ``filled`` in the colour of an expert."""
    return "".join(
        rect(
            x + n % columns * side,
            y + n // columns * side,
            side,
            side,
            "cut " + (f"e{filled[n]}" if n in filled else "idle"),
        )
        for n in range(columns * rows)
    )


def dense_and_routed() -> str:
    """What a convolution computes, and what two experts compute."""
    first, second = {5: 0, 6: 0}, {9: 1, 10: 1}
    return svg(
        760,
        240,
        "A dense convolution computes all sixteen patches; two experts compute two each",
        text(10, 24, "a convolution", "head"),
        picture(10, 40),
        arrow(178, 120, 208, 120),
        grid(214, 40, dict.fromkeys(range(16), 2)),
        text(214, 222, "16 of 16 patches computed", "soft"),
        text(410, 24, "two experts, two patches each", "head"),
        picture(410, 40, first | second),
        arrow(578, 120, 588, 120),
        grid(594, 40, first | second),
        text(594, 222, "4 expert–patch pairs", "soft"),
    )


def three_units() -> str:
    """What may be routed: patches, samples, channels."""
    parts = [text(10, 24, "patches", "head"), picture(10, 40, {5: 0, 6: 0, 9: 1, 10: 1})]
    parts += [text(10, 226, "each expert reads", "soft"), text(10, 246, "parts of the image", "soft")]
    parts += [text(260, 24, "samples", "head")]
    for i, expert in enumerate((0, 1, 0, 2)):
        y = 42 + i * 42
        parts.append(f'<g transform="translate(260,{y}) scale(0.22)">{picture(0, 0)}</g>')
        parts.append(arrow(302, y + 18, 352, 60 + expert * 58))
    for expert in range(3):
        parts.append(rect(356, 42 + expert * 58, 84, 36, f"e{expert}"))
        parts.append(text(398, 65 + expert * 58, f"network {expert}", "on middle"))
    parts += [text(260, 226, "each image goes to", "soft"), text(260, 246, "one of several networks", "soft")]
    parts += [text(520, 24, "channels", "head")]
    for row, opened in enumerate(((1, 0, 1, 1, 0, 0, 1, 0), (0, 1, 1, 0, 0, 1, 0, 0), (1, 1, 0, 0, 1, 0, 0, 1))):
        y = 48 + row * 56
        parts.append(f'<g transform="translate(520,{y}) scale(0.22)">{picture(0, 0)}</g>')
        parts.append(grid(570, y + 6, {i: 2 for i, on in enumerate(opened) if on}, columns=8, rows=1, side=22))
    parts += [text(520, 226, "each image opens some", "soft"), text(520, 246, "channels of each layer", "soft")]
    return svg(760, 260, "What is routed: patches, whole samples, or the channels of a layer", *parts)


def who_chooses() -> str:
    """The score table, and what each kind of router takes from it."""
    scores = ((9, 2, 1), (7, 4, 3), (1, 8, 2), (2, 6, 1), (3, 1, 5), (1, 2, 2))
    titles = ("expert choice", "token choice", "soft")
    notes = (
        ("each expert takes its", "two best patches:", "equal loads, some", "patches are left out"),
        ("each patch takes its", "best expert: no patch is", "left out, loads differ", ""),
        ("each expert gets a", "mixture of all patches:", "nothing is left out,", "nothing is hard"),
    )
    parts: list[str] = []
    for panel, title in enumerate(titles):
        x, y, side = 70 + panel * 250, 66, 34
        parts.append(text(x, 24, title, "head"))
        parts += [text(x + e * side + side / 2, 56, f"e{e}", "soft middle") for e in range(3)]
        for n, row in enumerate(scores):
            if panel == 0:
                parts.append(text(x - 60, y + n * side + 22, f"patch {n}", "soft"))
            for e, score in enumerate(row):
                column = sorted((each[e] for each in scores), reverse=True)
                on = score in column[:2] if panel == 0 else score == max(row) and row.index(score) == e
                opacity = score / 9 if panel == 2 else 1
                left, top = x + e * side, y + n * side
                parts.append(rect(left, top, side, side, "cut idle"))
                if on or panel == 2:
                    parts.append(f'<g opacity="{opacity:.2f}">{rect(left, top, side, side, f"cut e{e}")}</g>')
                parts.append(text(left + side / 2, top + 22, str(score), "on middle" if on and panel < 2 else "middle"))
        parts += [text(x - 10, 296 + i * 20, note, "soft") for i, note in enumerate(notes[panel])]
    return svg(760, 370, "Who chooses: experts take patches, patches take experts, or all are mixed", *parts)


def how_it_runs() -> str:
    """Gather, compute, combine."""
    parts = [text(10, 24, "score and select", "head"), picture(10, 40, {5: 0, 6: 0, 9: 1, 10: 1})]
    parts += [arrow(180, 120, 216, 120), text(222, 24, "gather", "head")]
    for expert in (0, 1):
        parts.append(grid(222, 60 + expert * 80, {0: expert, 1: expert}, columns=2, rows=1))
    parts += [text(222, 222, "selected", "soft"), text(222, 242, "pixels only", "soft")]
    parts += [arrow(312, 120, 348, 120), text(356, 24, "compute", "head")]
    for expert in (0, 1):
        parts.append(rect(356, 60 + expert * 80, 100, 40, f"e{expert}"))
        parts.append(text(406, 85 + expert * 80, f"expert {expert}", "on middle"))
    parts += [text(356, 222, "one batched", "soft"), text(356, 242, "GEMM", "soft")]
    parts += [arrow(468, 120, 504, 120), text(512, 24, "combine", "head")]
    parts += [grid(512, 40, {5: 0, 6: 0, 9: 1, 10: 1})]
    parts += [text(512, 222, "added at their places,", "soft"), text(512, 242, "times the gates", "soft")]
    return svg(700, 256, "How it runs: score and select, gather, compute, combine", *parts)


FIGURES = {
    "dense-and-routed": dense_and_routed,
    "three-units": three_units,
    "who-chooses": who_chooses,
    "how-it-runs": how_it_runs,
}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (IMAGES / f"{name}.svg").write_text(draw(), "utf-8")
