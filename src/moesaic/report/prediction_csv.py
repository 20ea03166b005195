"""Predictions as CSV: one row per image.

Spreadsheets run cells that look like formulas, and file and class names may be malicious. A path that begins
like a formula gets "./" in front, which names the same file; any other cell gets an apostrophe.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from moesaic.training.predict import Prediction, SelectedPatches

__all__ = ["PredictionCSV"]

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


class PredictionCSV:
    """Collects rows; ``encode`` returns the file.

    Columns: path, class, its probability, the probability of every class, multiply-adds, and for each layer that routes
    patches a JSON list with the patches of each expert; its header has the rows and columns of the grid of patches.

    >>> table = PredictionCSV(["cat", "dog"])
    >>> table.add("=1+1.png", Prediction((0.25, 0.75), 1200, {}))
    >>> print(table.encode().decode())
    path,class,probability,probability cat,probability dog,macs
    ./=1+1.png,dog,0.75,0.25,0.75,1200
    <BLANKLINE>
    """

    def __init__(self, classes: Sequence[str]) -> None:
        self._classes = tuple(classes)
        self._layers: dict[str, tuple[int, int]] = {}
        self._rows: list[tuple[str, Prediction]] = []

    def add(self, path: str, prediction: Prediction) -> None:
        """Adds the row of an image."""
        self._layers |= {name: selected.grid for name, selected in prediction.patches.items()}
        self._rows.append((path, prediction))

    def encode(self) -> bytes:
        """Returns the file in UTF-8; bytes of a file name that are not UTF-8 stay what they are."""
        patches = [
            f"patches {name} {rows}x{columns}".replace("  ", " ") for name, (rows, columns) in self._layers.items()
        ]
        header = ["path", "class", "probability", *(f"probability {name}" for name in self._classes), "macs", *patches]
        lines = [header]
        for path, prediction in self._rows:
            (best,) = prediction.top(1)
            lines.append(
                [
                    _inert_path(path),
                    _inert(self._classes[best]),
                    *(f"{share:.9g}" for share in (prediction.probabilities[best], *prediction.probabilities)),
                    str(prediction.macs),
                    *(_patches(prediction.patches.get(name)) for name in self._layers),
                ]
            )
        text = "".join(",".join(map(_quoted, line)) + "\n" for line in lines)
        return text.encode("utf-8", "surrogateescape")


def _quoted(cell: str) -> str:
    """Quotes a cell where a reader would end it; Python's writer leaves a lone carriage return as it is."""
    return '"' + cell.replace('"', '""') + '"' if any(mark in cell for mark in ',"\r\n') else cell


def _patches(selected: SelectedPatches | None) -> str:
    return "" if selected is None else json.dumps(selected.experts)


def _inert_path(path: str) -> str:
    return f"./{path}" if path.startswith(_FORMULA) else path


def _inert(name: str) -> str:
    """An apostrophe in front of what begins like a formula, and of an apostrophe, so that one can be taken away."""
    return f"'{name}" if name.startswith((*_FORMULA, "'")) else name
