"""Write the latency table of the page on export, from the committed benchmark results.

    python docs/latency.py

The page shows it between the comments <!-- latency --> and <!-- end of latency -->.
"""

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results" / "export-cpu.json"
PAGE = DOCS / "export.md"
PLACE = re.compile(r"<!-- latency -->.*?<!-- end of latency -->", re.DOTALL)
RUNTIMES = {"onnx": "ONNX Runtime", "pt2": "torch, `.pt2`", "aoti": "torch, `.aoti.pt2`"}


def table() -> str:
    """The table of all exported networks that were measured, with the machine; or that there is none."""
    if not RESULTS.exists():
        return "*not measured yet*"
    content = json.loads(RESULTS.read_text("utf-8"))
    machine = content["machine"]
    lines = [
        f"*{machine['processor']}, {machine['threads']} threads, ONNX Runtime {machine['onnxruntime']}, torch "
        f"{machine['torch']}; medians*",
        "",
        "| runs in | network | batch | routed | dense | × dense |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*lines, *map(_line, content["networks"])])


def _line(row: dict[str, Any]) -> str:
    ratio = f"{row['× dense']:.2f}"
    cells = [
        RUNTIMES[row["format"]],
        row["network"],
        str(row["batch"]),
        f"{row['routed, ms']:.2f} ms",
        f"{row['dense, ms']:.2f} ms ({row['dense']})",
        f"**{ratio}**" if row["× dense"] < 1 else ratio,
    ]
    return f"| {' | '.join(cells)} |"


def with_table(text: str) -> str:
    """The page with the table of the committed results."""
    return PLACE.sub(lambda _: f"<!-- latency -->\n{table()}\n<!-- end of latency -->", text)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
