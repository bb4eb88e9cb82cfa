"""The tiles in which a parameter is quantized when it is served, after operations that move its elements."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import fewbit as fb
from fewbit.errors import QuantError
from fewbit.ops.qat.serving_tiles import ServingTiles

LIKE = jax.ShapeDtypeStruct((8, 64), jnp.float32)


def after(fn, scheme: str, stacked: tuple[int, ...] = ()) -> ServingTiles:
    """The tiles of the result of a function of one equation."""
    (eqn,) = jax.make_jaxpr(fn)(LIKE).eqns
    return ServingTiles.along(fb.scheme(scheme), (-1,), LIKE, stacked).after(eqn, fb.scheme(scheme))[0]


@pytest.mark.parametrize(
    ("fn", "tiles"),
    [
        (lambda w: w.T, (32, 1)),
        (lambda w: lax.rev(w, (1,)), (1, 32)),
        (lambda w: w.reshape(4, 2, 64), (1, 1, 32)),
        (lambda w: w.reshape(8, 2, 32), (1, 1, None)),
        (lambda w: lax.slice(w, (2, 32), (4, 64)), (1, 32)),
    ],
    ids=["transposed", "reversed", "rows split", "columns split", "cut"],
)
def test_tiles_move_with_the_elements(fn, tiles):
    assert after(fn, "int4_g32").tiles == tiles


@pytest.mark.parametrize(
    "fn", [lambda w: lax.rev(w, (0,)), lambda w: w.T, lambda w: w.reshape(4, 128)], ids=["reversed", "transposed", "merged"]
)
def test_quantized_scales_stay_where_they_are(fn):
    """Double quantization shares scales among tiles in the order of the array before the operation."""
    with pytest.raises(QuantError, match="its scales are quantized, in tiles of the array before the operation"):
        after(fn, "nf4_dq")


def test_the_scale_of_a_whole_tensor_is_that_of_all_its_elements():
    assert after(lambda w: w.T, "nvfp4").tiles == (16, 1)
    with pytest.raises(QuantError, match="the scale of the whole tensor is that of other elements"):
        after(lambda w: lax.slice(w, (0, 0), (4, 64)), "nvfp4")
    with pytest.raises(QuantError, match="the scale of the whole tensor is that of other elements"):
        after(lambda w: lax.rev(w, (1,)), "nvfp4", stacked=(-2,))
