"""t-SNE keeps neighbours together and repeats itself."""

import numpy as np

from moesaic.insight.embedding_map import tsne


def test_neighbours_stay_neighbours_and_the_map_repeats():
    rng = np.random.default_rng(0)
    group = np.arange(40) % 2
    points = rng.normal(size=(40, 6)) + 20 * group[:, None]
    found = tsne(points)
    assert found.shape == (40, 2)
    assert found.dtype == np.float64
    assert np.array_equal(found, tsne(points))
    distance = np.linalg.norm(found[:, None] - found, axis=-1) + 1e9 * np.eye(40)
    assert np.array_equal(group[distance.argmin(1)], group)


def test_the_initial_positions_are_used():
    points = np.random.default_rng(0).normal(size=(12, 4))
    start = np.random.default_rng(1).normal(size=(12, 2)).astype(np.float32)
    assert not np.array_equal(tsne(points, init=start), tsne(points))
    assert not np.array_equal(tsne(points, init=start), tsne(points, init=-start))
