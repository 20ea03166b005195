"""Pages and figures of planted data are those that were recorded: see tests/report/record.py."""

import matplotlib
import numpy as np
import pytest
from report.record import FOLDER, PICTURES, VERSION, Grey, produce


@pytest.fixture(scope="module")
def produced() -> tuple[dict[str, Grey], dict[str, str]]:
    return produce()


def test_pages_have_the_recorded_words_and_numbers(produced):
    _, texts = produced
    recorded = {path.name: path.read_text("utf-8") for path in FOLDER.iterdir() if path.suffix in (".txt", ".json")}
    assert {name.replace(" ", "-"): text for name, text in texts.items()} == recorded


def test_figures_look_like_the_recorded_ones(produced):
    pictures, _ = produced
    with np.load(PICTURES) as archive:
        recorded = dict(archive)
    version = str(recorded.pop(VERSION))
    if version != matplotlib.__version__:
        pytest.skip(f"recorded with matplotlib {version}, which places text differently")
    assert pictures.keys() == recorded.keys()
    different = {name: difference(pictures[name], recorded[name]) for name in recorded}
    assert not {name: found for name, found in different.items() if found > 0}


def difference(ours: Grey, theirs: Grey) -> float:
    """Share of pixels whose grey differs visibly; all of them if the sizes differ."""
    if ours.shape != theirs.shape:
        return 1.0
    return float((np.abs(ours.astype(int) - theirs) > 8).mean())
