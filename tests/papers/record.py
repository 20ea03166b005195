"""Records what tests compare the papers' experiments with, in tests/papers/recorded.

    python tests/papers/record.py specs
    python tests/papers/record.py run runs/reproduce-quick

``specs``: the digest of each cell's specification. A stored result is found by it, so a digest that changes means that
the cell has to be trained again: record anew only where that is meant. ``run``: the cells of a finished quick run, with
the verdicts and charts made from them. Record anew after a change to a rule, a chart or a cell.
"""

import hashlib
import json
import sys
import zipfile
from pathlib import Path
from typing import get_args

from moesaic.paper_fidelity import Fidelity
from moesaic.papers.engine.runner import Runner
from moesaic.papers.reproduce import PAPERS, PRESETS
from moesaic.training import NoProgress, ResultCache

FOLDER = Path(__file__).parent / "recorded"
SPECS, RUN = FOLDER / "cell-specs.json", FOLDER / "quick-run.zip"


def cell_specs(cache: Path) -> dict[str, str]:
    """The digests of the specifications of all cells of all plans."""
    runner = Runner(ResultCache(cache, print), None, device="cpu", seed=0, progress=NoProgress())
    plans = {
        f"{name} {preset} {fidelity}": paper.plan(preset, fidelity)
        for name, paper in PAPERS.items()
        for preset in PRESETS
        for fidelity in get_args(Fidelity)
    }
    return {
        f"{plan}: {name}": hashlib.sha256(json.dumps(cell.spec(runner), sort_keys=True).encode()).hexdigest()[:12]
        for plan, cells in plans.items()
        for name, cell in cells.items()
    }


def pack(run: Path) -> None:
    """Packs the cells, claims.json and charts.json of a run."""
    with zipfile.ZipFile(RUN, "w", zipfile.ZIP_LZMA) as archive:
        for path in (run / "claims.json", run / "charts.json", *sorted((run / "cells").glob("*.json"))):
            archive.writestr(zipfile.ZipInfo(str(path.relative_to(run))), path.read_bytes(), zipfile.ZIP_LZMA)


if __name__ == "__main__":
    if sys.argv[1] == "specs":
        SPECS.write_text(json.dumps(cell_specs(FOLDER), indent=0) + "\n", encoding="utf-8")
    else:
        pack(Path(sys.argv[2]))
