"""Measured tiles are cached by GPU and used from then on; without them the defaults apply."""

import json

import pytest

from moesaic.ops import tile_sizes


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path))
    tile_sizes.forget_tiles()
    yield tmp_path
    tile_sizes.forget_tiles()


def times(spent):
    """A measurement of something that runs two kernels, as long as ``spent`` says of their tiles."""

    def measure():
        return spent(tile_sizes.tile("scatter", (16, 16, 1), 64, 80), tile_sizes.tile("gather_backward", (128, 4), 640))

    return measure


def test_without_measurements_the_default_applies():
    assert tile_sizes.tile("scatter", (16, 16, 1), 64, 80) == (16, 16, 1)


def test_the_fastest_tiles_are_cached_for_these_sizes_alone():
    best = tile_sizes.CANDIDATES["scatter"][2]
    found = tile_sizes.tune(times(lambda scatter, gather: 1.0 if scatter == best else 2.0), log=lambda line: None)
    assert found == {"scatter 64 80": best}
    assert tile_sizes.tile("scatter", (16, 16, 1), 64, 80) == best
    assert tile_sizes.tile("scatter", (16, 16, 1), 64, 81) == (16, 16, 1)
    assert tile_sizes.tile("gather_backward", (128, 4), 640) == (128, 4)


def test_tiles_cached_before_stay():
    first, second = tile_sizes.CANDIDATES["scatter"][0], tile_sizes.CANDIDATES["gather_backward"][-1]
    tile_sizes.tune(times(lambda scatter, gather: 1.0 if scatter == first else 2.0), log=lambda line: None)
    tile_sizes.tune(times(lambda scatter, gather: 1.0 if gather == second else 2.0), log=lambda line: None)
    cached = json.loads(tile_sizes.tile_file().read_text("utf-8"))["tiles"]
    assert cached == {"scatter 64 80": list(first), "gather_backward 640": list(second)}


def test_cached_tiles_of_a_kernel_with_other_sides_are_ignored():
    best = tile_sizes.CANDIDATES["scatter"][2]
    tile_sizes.tune(times(lambda scatter, gather: 1.0 if scatter == best else 2.0), log=lambda line: None)
    assert tile_sizes.tile("scatter", (16, 16, 1, 8), 64, 80) == (16, 16, 1, 8)
    assert tile_sizes.tile("scatter", (16, 16, 1), 64, 80) == best


def test_a_gain_within_the_noise_is_not_cached():
    best = tile_sizes.CANDIDATES["scatter"][2]
    assert (
        tile_sizes.tune(times(lambda scatter, gather: 0.995 if scatter == best else 1.0), log=lambda line: None) == {}
    )
    assert not tile_sizes.tile_file().exists()


def test_a_tile_that_does_not_fit_is_skipped():
    first, best = tile_sizes.CANDIDATES["scatter"][0], tile_sizes.CANDIDATES["scatter"][3]

    def spent(scatter, gather):
        if scatter == first:
            raise RuntimeError("out of resource: shared memory")
        return 1.0 if scatter == best else 2.0

    logged: list[str] = []
    assert tile_sizes.tune(times(spent), log=logged.append) == {"scatter 64 80": best}
    assert logged[0] == f"scatter 64 80: {first} left out: RuntimeError: out of resource: shared memory"


def test_a_line_is_logged_for_each_kernel_with_the_best_tile():
    best = tile_sizes.CANDIDATES["scatter"][2]
    logged: list[str] = []
    tile_sizes.tune(times(lambda scatter, gather: 1.0 if scatter == best else 2.0), log=logged.append)
    tried = [
        len(tile_sizes.CANDIDATES["scatter"]),
        len(tile_sizes.CANDIDATES["gather_backward"]) - 1,
    ]  # the default of gather_backward is one of them
    assert logged == [
        f"scatter 64 80: {tried[0]} tiles tried; {best} in place of (16, 16, 1), 0.500 × the time",
        f"gather_backward 640: {tried[1]} tiles tried; (128, 4) stays",
    ]


def test_after_the_time_limit_no_other_tile_is_timed_and_the_best_so_far_is_cached():
    first, better = tile_sizes.CANDIDATES["scatter"][0], tile_sizes.CANDIDATES["scatter"][-1]
    seen: set[tuple[int, ...]] = set()
    now = 0.0

    def spent(scatter, gather):
        nonlocal now
        if not {scatter, gather} <= seen:  # a tile that is new is compiled
            now += 10.0
        seen.update({scatter, gather})
        return {first: 2.0, better: 1.0}.get(scatter, 4.0)

    logged: list[str] = []
    found = tile_sizes.tune(times(spent), log=logged.append, seconds=25.0, clock=lambda: now)
    assert found == {"scatter 64 80": first}  # 10 s for the rules, 10 for the first, the second begun at 20
    assert seen == {(16, 16, 1), (128, 4), *tile_sizes.CANDIDATES["scatter"][:2]}
    assert logged == [
        f"scatter 64 80: 2 tiles tried; {first} in place of (16, 16, 1), 0.500 × the time",
        "25 s are over, with tiles left to try of scatter 64 80, gather_backward 640",
    ]


def test_a_default_that_beats_the_cached_tile_replaces_it():
    first = tile_sizes.CANDIDATES["scatter"][0]
    tile_sizes.tune(times(lambda scatter, gather: 1.0 if scatter == first else 2.0), log=lambda line: None)
    found = tile_sizes.tune(times(lambda scatter, gather: 2.0 if scatter == first else 1.0), log=lambda line: None)
    assert found == {"scatter 64 80": (16, 16, 1)}
    assert tile_sizes.tile("scatter", (16, 16, 1), 64, 80) == (16, 16, 1)


def test_a_measurement_that_fails_leaves_no_tile_in_use():
    best = tile_sizes.CANDIDATES["scatter"][0]
    calls = iter(range(100))

    def spent(scatter, gather):
        if next(calls) > 1 + len(
            tile_sizes.CANDIDATES["scatter"]
        ):  # gather_backward's turn, when a faster scatter is on trial
            raise RuntimeError("illegal memory access")
        return 1.0 if scatter == best else 2.0

    with pytest.raises(RuntimeError, match="illegal"):
        tile_sizes.tune(times(spent), log=lambda line: None)
    assert tile_sizes.tile("scatter", (16, 16, 1), 64, 80) == (16, 16, 1)
    assert not tile_sizes._trial


@pytest.mark.parametrize(
    "content",
    [
        '{"tiles": {"scatter 64 80": "wide"',
        '{"tiles": {"scatter 64 80": [Infinity, 16, 1]}}',
        '{"tiles": {"scatter 64 80": [16, NaN, 1]}}',
        '{"tiles": {"scatter 64 80": [16, 1.5, 1]}}',
        '{"tiles": {"scatter 64 80": [16, true, 1]}}',
        '{"tiles": {"scatter 64 80": [16, 0, 1]}}',
        '{"tiles": {"scatter 64 80": [16, 65537, 1]}}',
        '{"tiles": {"scatter 64 80": null}}',
        '{"tiles": []}',
        "[" * 100_000,
    ],
    ids=lambda content: content[:50],
)
def test_a_damaged_file_is_warned_about_and_the_default_applies(content):
    tile_sizes.tile_file().parent.mkdir(parents=True)
    tile_sizes.tile_file().write_text(content, "utf-8")
    with pytest.warns(UserWarning, match="cannot be read") as warned:
        assert tile_sizes.tile("scatter", (16, 16, 1), 64, 80) == (16, 16, 1)
    assert len(warned) == 1
    assert "\n" not in str(warned[0].message)


@pytest.mark.parametrize(
    "tiles", ["[Infinity, 16, 1]", "[1e999, 16, 1]", "[0, 16, 1]", "[-8, 16, 1]", "[true, 16, 1]", "[9999999, 1, 1]"]
)
def test_tiles_that_no_kernel_has_are_not_used(cache, tiles):
    file = tile_sizes.tile_file()
    file.parent.mkdir(parents=True)
    file.write_text(f'{{"tiles": {{"scatter 64 80": {tiles}}}}}')
    with pytest.warns(UserWarning, match="the measured tiles in .* cannot be read"):
        assert tile_sizes.tile("scatter", (16, 16, 1), 64, 80) == (16, 16, 1)


def test_a_cache_that_nests_too_deep_is_not_used(cache):
    file = tile_sizes.tile_file()
    file.parent.mkdir(parents=True)
    file.write_text('{"tiles": ' + "[" * 100_000)
    with pytest.warns(UserWarning, match="the measured tiles in .* cannot be read"):
        assert tile_sizes.tile("scatter", (16, 16, 1), 64, 80) == (16, 16, 1)


def test_a_launch_looks_up_its_tile_once(monkeypatch):
    asked = []
    monkeypatch.setattr(tile_sizes, "_cached_or_default", lambda name, default: asked.append(name) or default)
    for _ in range(3):
        assert tile_sizes.tile("scatter", (16, 16, 1), 64, 80) == (16, 16, 1)
    assert tile_sizes.tile("scatter", (16, 16, 1), 64, 81) == (16, 16, 1)
    assert asked == ["scatter 64 80", "scatter 64 81"]


def test_a_default_that_depends_on_more_than_the_sizes_is_respected():
    assert tile_sizes.tile("scatter", (16, 16, 1), 64, 80) == (16, 16, 1)
    assert tile_sizes.tile("scatter", (32, 16, 1), 64, 80) == (32, 16, 1)
