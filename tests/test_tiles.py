"""Tiles: maps, counts, cutting into blocks and back, for every mixture of tiles and lengths."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fewbit._tiles import (
    FrozenTileMap,
    axis_tiles,
    blocked,
    blocked_scale,
    fitting_tiles,
    from_front,
    tile_counts,
    tile_map,
    unblocked,
    valid_elements,
)
from fewbit.errors import QuantError

tiled_shapes = st.lists(st.tuples(st.integers(1, 9), st.one_of(st.none(), st.integers(1, 10))), min_size=1, max_size=4).map(
    lambda pairs: (tuple(n for n, _ in pairs), tuple(t for _, t in pairs))
)


@pytest.mark.slow
@settings(max_examples=20)
@given(tiled_shapes)
def test_blocking_and_unblocking_give_the_array_back(case):
    shape, tiles = case
    x = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    blocks, within = blocked(jnp.asarray(x), tiles)
    assert np.array_equal(unblocked(blocks, shape, tiles), x)
    # Whatever fills the last tiles is zero, and every axis of `within` is one tile long.
    assert float(blocks.sum()) == x.sum()
    reduced = blocks.max(axis=within, keepdims=True)
    counts = tile_counts(shape, tiles)
    assert reduced.size == np.prod(counts)
    # The largest element of each tile, by plain loops.
    largest = np.zeros(counts, np.float32)
    for place in np.ndindex(*shape):
        tile = tuple(0 if t is None else i // t for i, t in zip(place, tiles, strict=True))
        largest[tile] = max(largest[tile], x[place])
    assert np.array_equal(reduced.reshape(counts), largest)
    assert blocked_scale(jnp.asarray(largest), tiles).shape == reduced.shape
    valid = valid_elements(shape, tiles)
    fills = blocks.size != x.size
    assert (valid is not None) == fills
    if valid is not None:
        assert int(valid.sum()) == x.size and np.array_equal(np.asarray(blocks) > 0, valid)


@given(st.lists(st.one_of(st.none(), st.integers(1, 64)), min_size=1, max_size=5), st.sampled_from([1, None]))
def test_maps_and_tuples_say_the_same(tiles, rest):
    assert axis_tiles(tile_map(tiles, rest), len(tiles)) == tuple(tiles)


def test_maps_are_normal_hashable_and_readable():
    a = FrozenTileMap({...: 1, -1: 32, -2: 1})
    assert a == FrozenTileMap({-1: 32, ...: 1}) == {...: 1, -1: 32}
    assert hash(a) == hash(FrozenTileMap({-1: 32, ...: 1}))
    assert repr(a) == "{...: 1, -1: 32}"
    assert FrozenTileMap({-1: None, ...: None}) == {}
    assert (len(a), a.get(-3), a[...]) == (2, None, 1)


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        ({0: 4}, r"tile axis is 0; tiles are given on negative axes \(-1 is the last\)"),
        ({1: 4}, "tile axis is 1"),
        ({"-1": 4}, "tile axis is '-1'"),
        ({-1: 0}, "the tile on axis -1 is 0, must be at least 1, or None"),
        ({-1: -2}, "the tile on axis -1 is -2"),
        ({-1: 2.5}, "the tile on axis -1 is 2.5"),
        ({...: 2}, r"the tile of `...` \(all other axes\) is 2, must be 1 or None"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("unchecked")
def test_refusals(tile, message: str):
    with pytest.raises(QuantError, match=message):
        FrozenTileMap(tile)


@pytest.mark.usefixtures("unchecked")
def test_axes_are_counted_from_the_front():
    assert [from_front(axis, 3) for axis in (0, -1, np.int64(-2))] == [0, 2, 1]
    for axis, message in ((3, "axis is 3, but the array has 3 axes"), (None, "axis is None, must be an integer")):
        with pytest.raises(QuantError, match=message):
            from_front(axis, 3)


def test_a_tile_on_an_axis_that_is_not_there():
    with pytest.raises(QuantError, match="a tile is given on axis -3, but the array has 2 axes"):
        axis_tiles({-3: 4}, 2)
    assert axis_tiles({-3: None, -1: 4}, 2) == (None, 4)


def test_fitting_tiles():
    assert fitting_tiles(341) == "31, 341"
    assert fitting_tiles(7) == "7"
    assert fitting_tiles(64) == "16, 32, 64"
