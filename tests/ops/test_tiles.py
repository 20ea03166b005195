"""Measured tiles are kept by GPU, used from then on, and never in the way."""

import json

import pytest

from moesaic.ops import tiles


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path))
    tiles._measured.cache_clear()
    yield tmp_path
    tiles._measured.cache_clear()


def times(spent):
    """A measurement of something that runs two kernels, as long as ``spent`` says of their tiles."""

    def measure():
        return spent(tiles.tile("combine", (16, 16, 1), 64, 80), tiles.tile("collect", (128, 4), 640))

    return measure


def test_without_measurements_the_rule_applies():
    assert tiles.tile("combine", (16, 16, 1), 64, 80) == (16, 16, 1)


def test_the_fastest_tiles_are_kept_for_these_sizes_alone():
    best = tiles.CANDIDATES["combine"][2]
    found = tiles.tune(times(lambda combine, collect: 1.0 if combine == best else 2.0), tell=lambda line: None)
    assert found == {"combine 64 80": best}
    assert tiles.tile("combine", (16, 16, 1), 64, 80) == best
    assert tiles.tile("combine", (16, 16, 1), 64, 81) == (16, 16, 1)
    assert tiles.tile("collect", (128, 4), 640) == (128, 4)


def test_what_was_measured_before_stays():
    first, second = tiles.CANDIDATES["combine"][0], tiles.CANDIDATES["collect"][-1]
    tiles.tune(times(lambda combine, collect: 1.0 if combine == first else 2.0), tell=lambda line: None)
    tiles.tune(times(lambda combine, collect: 1.0 if collect == second else 2.0), tell=lambda line: None)
    kept = json.loads(tiles.tile_file().read_text("utf-8"))["tiles"]
    assert kept == {"combine 64 80": list(first), "collect 640": list(second)}


def test_a_gain_within_the_noise_is_not_kept():
    best = tiles.CANDIDATES["combine"][2]
    assert tiles.tune(times(lambda combine, collect: 0.995 if combine == best else 1.0), tell=lambda line: None) == {}
    assert not tiles.tile_file().exists()


def test_a_tile_that_does_not_fit_is_left_out():
    first, best = tiles.CANDIDATES["combine"][0], tiles.CANDIDATES["combine"][3]

    def spent(combine, collect):
        if combine == first:
            raise RuntimeError("out of resource: shared memory")
        return 1.0 if combine == best else 2.0

    assert tiles.tune(times(spent), tell=lambda line: None) == {"combine 64 80": best}


def test_a_damaged_file_is_said_and_the_rule_applies():
    tiles.tile_file().parent.mkdir(parents=True)
    tiles.tile_file().write_text('{"tiles": {"combine 64 80": "wide"', "utf-8")
    with pytest.warns(UserWarning, match="cannot be read"):
        assert tiles.tile("combine", (16, 16, 1), 64, 80) == (16, 16, 1)
