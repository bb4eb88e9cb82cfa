"""Every layout operation moves element indices, constant axes, sources and tiles as JAX itself moves an array."""

import contextlib
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex_core

from fewbit.array.axis_move import LAYOUT_PRIMITIVES, AxisMove, axis_moves
from fewbit.array.layout import Axis
from fewbit.errors import QuantError

SHAPE = (4, 1, 6)
MOVES: dict[str, Callable[[jax.Array], object]] = {
    "convert_element_type": lambda x: x.astype(jnp.float32),
    "transpose": lambda x: x.transpose(2, 0, 1),
    "reshape merges": lambda x: x.reshape(24),
    "reshape splits": lambda x: x.reshape(2, 2, 3, 2, 1),
    "reshape moves the unit axis": lambda x: x.reshape(1, 4, 6),
    "reshape regroups": lambda x: x.reshape(8, 3),
    "reshape permutes": lambda x: lax.reshape(x, (12, 2), (2, 1, 0)),
    "squeeze": lambda x: x.squeeze(1),
    "broadcast_in_dim adds": lambda x: lax.broadcast_in_dim(x, (4, 3, 1, 6), (0, 2, 3)),
    "broadcast_in_dim repeats": lambda x: lax.broadcast_in_dim(x, (4, 5, 6), (0, 1, 2)),
    "slice": lambda x: x[1:3, :, 3:],
    "slice with strides": lambda x: x[::2, :, 1::3],
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (jnp.int32(3), jnp.int32(7), jnp.int32(2)), (2, 1, 6)),
    "split": lambda x: lax.split(x, (2, 1, 3), 2),
    "rev": lambda x: lax.rev(x, (0, 1)),
}


def equation(move: Callable[[jax.Array], object], shape: tuple[int, ...]) -> jex_core.JaxprEqn:
    """The equation of the one layout operation of a function."""
    jaxpr = jax.make_jaxpr(move)(jax.ShapeDtypeStruct(shape, jnp.int32)).jaxpr
    return next(eqn for eqn in jaxpr.eqns if eqn.primitive.name in LAYOUT_PRIMITIVES and eqn.invars[0] is jaxpr.invars[0])


def moved(eqn: jex_core.JaxprEqn, x: jax.Array) -> list[np.ndarray]:
    """The results of the equation as JAX computes them."""
    out = eqn.primitive.bind(x, *starts(eqn), **eqn.params)
    return [np.asarray(part) for part in (out if eqn.primitive.multiple_results else [out])]


def starts(eqn: jex_core.JaxprEqn) -> list[jax.Array]:
    return [jnp.int32(n) for n in (3, 7, 2)[: len(eqn.invars) - 1]]


CASES = {name: equation(move, SHAPE) for name, move in MOVES.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_move_is_the_operation_on_arrays_with_constant_axes(name: str) -> None:
    eqn = CASES[name]
    for axes in itertools.product((False, True), repeat=len(SHAPE)):
        shape = tuple(n if own else 1 for n, own in zip(SHAPE, axes, strict=True))
        part = jnp.arange(np.prod(shape), dtype=jnp.int32).reshape(shape)
        expected = moved(eqn, jnp.broadcast_to(part, SHAPE))
        for move, result in zip(axis_moves(eqn), expected, strict=True):
            try:
                got = move(part, starts(eqn))
            except QuantError:
                assert name.startswith("reshape") and axes[0] != axes[2]
                continue
            assert move.result == result.shape
            np.testing.assert_array_equal(np.broadcast_to(np.asarray(got), result.shape), result)
            behind = move(jnp.stack([part, -part], -1), starts(eqn))
            np.testing.assert_array_equal(np.asarray(behind), np.stack([got, -got], -1))


@pytest.mark.parametrize("name", CASES)
def test_sources_and_places(name: str) -> None:
    """An array that varies along one axis only varies in the result along the axes of which this axis is a source."""
    eqn = CASES[name]
    for axis, n in enumerate(SHAPE):
        along = jnp.arange(n, dtype=jnp.int32).reshape([n if a == axis else 1 for a in range(len(SHAPE))])
        for move, result in zip(axis_moves(eqn), moved(eqn, jnp.broadcast_to(along, SHAPE)), strict=True):
            varies = [a for a, m in enumerate(result.shape) if m > 1 and (np.diff(result, axis=a) != 0).any()]
            assert set(varies) <= {a for a, own in enumerate(move.sources) if axis in own}
            if axis in move.places and not move.slices and not move.flipped and n > 1:
                place = move.places[axis]
                expected = np.arange(n).reshape([n if a == place else 1 for a in range(result.ndim)])
                np.testing.assert_array_equal(result, np.broadcast_to(expected, result.shape))


def tile_ids(axes: list[Axis]) -> np.ndarray:
    """The number of each element's tile."""
    counts = [-(-axis.length // axis.tile_length) for axis in axes]
    at = np.indices([axis.length for axis in axes])
    each = [index // axis.tile_length for index, axis in zip(at, axes, strict=True)]
    return np.ravel_multi_index(each, counts)


@pytest.mark.parametrize("name", CASES)
def test_tiles_of_the_result_are_tiles_of_the_operand(name: str) -> None:
    eqn, followed = CASES[name], 0
    for tiles in itertools.product((None, 1, 2, 3), (1,), (None, 1, 2, 3, 4)):
        axes = [Axis(n, tile) for n, tile in zip(SHAPE, tiles, strict=True)]
        ids = tile_ids(axes)
        elements = np.arange(ids.size).reshape(SHAPE)
        of_tile = {i: set(elements[ids == i]) for i in np.unique(ids)}
        for move, result in zip(axis_moves(eqn), moved(eqn, jnp.asarray(elements)), strict=True):
            with contextlib.suppress(QuantError):
                after = move.tiled(axes)
                assert tuple(axis.length for axis in after) == result.shape
                own = tile_ids(after)
                for i in np.unique(own):
                    within = set(result[own == i].astype(int))
                    assert within == of_tile[ids.ravel()[min(within)]]
                followed += 1
    assert followed


def test_what_tiles_cannot_follow() -> None:
    axes = [Axis(4, 2), Axis(1, 1), Axis(6, None, 2, is_packed=True)]
    for name, message in {
        "slice": "cuts tiles of 2",
        "slice with strides": "cuts tiles of 2",
        "dynamic_slice": "run time",
        "split": "cuts tiles of 6",
    }.items():
        with pytest.raises(QuantError, match=message):
            axis_moves(CASES[name])[-1].tiled(axes)
    with pytest.raises(QuantError, match="cannot merge"):
        axis_moves(CASES["reshape merges"])[0].tiled([Axis(4, 2), Axis(1, 1), Axis(6, 2)])
    with pytest.raises(QuantError, match="short last tile"):
        axis_moves(CASES["rev"])[0].tiled([Axis(4, 3), Axis(1, 1), Axis(6, 2)])
    with pytest.raises(QuantError, match="would be repeated"):
        axis_moves(CASES["broadcast_in_dim repeats"])[0].tiled([Axis(4, 1), Axis(1, 1, 2, is_packed=True), Axis(6, 1)])


def test_identity_and_other_primitives() -> None:
    assert axis_moves(CASES["convert_element_type"])[0].is_identity
    assert not axis_moves(CASES["transpose"])[0].is_identity
    (add,) = jax.make_jaxpr(lambda x: x + x)(jnp.ones(2)).jaxpr.eqns
    assert axis_moves(add) == ()


def test_an_all_gather_keeps_the_axes_or_adds_one() -> None:
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    for is_tiled, shape in ((True, (8, 3)), (False, (2, 4, 3))):

        def gathered(x: jax.Array, is_tiled: bool = is_tiled) -> jax.Array:
            return lax.all_gather(x, "d", tiled=is_tiled)

        spec = jax.P("d")
        run = jax.shard_map(gathered, mesh=mesh, in_specs=spec, out_specs=jax.P(), check_vma=False)
        (outer,) = jax.make_jaxpr(run)(jnp.ones((8, 3))).jaxpr.eqns
        (move,) = axis_moves(outer.params["jaxpr"].eqns[0])
        assert move.result == shape
        assert move.sources == (((0,), (1,)) if is_tiled else ((), (0,), (1,)))
        assert isinstance(move, AxisMove)
