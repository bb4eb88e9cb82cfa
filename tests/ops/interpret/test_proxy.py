"""Operands of a kind of their own: carried through control flow, sent to their own rules, decoded elsewhere."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import UnsupportedError
from fewbit.ops.interpret.evaluator import array_of
from fewbit.ops.interpret.proxy import ArrayProxy, is_proxy


def counted_product(evaluator, eqn, values):
    x, w = values
    w.seen.append(x.shape)
    return [jax.lax.dot_general(x, w.array(), eqn.params["dimension_numbers"])]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Shifted(ArrayProxy):
    """`base + shift`, which notes the products that it meets."""

    rules: ClassVar = {"dot_general": counted_product}

    base: Any
    shift: Any
    seen: list = dataclasses.field(metadata={"static": True})

    @property
    def shape(self):
        return self.base.shape

    @property
    def dtype(self):
        return self.base.dtype

    def array(self):
        return self.base + self.shift

    def stacked(self):
        return dataclasses.replace(self, shift=jnp.broadcast_to(self.shift, (self.shape[0], 1, 1)))


@jax.custom_jvp
def bent(w, x):
    return x @ w


bent.defjvp(lambda primals, tangents: (bent(*primals), primals[1] @ tangents[0] + 3 * tangents[1] @ primals[0]))

PIECES = {
    "product": lambda w, x: x @ w[0],
    "scan": lambda w, x: jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0],
    "carried": lambda w, x: jax.lax.fori_loop(
        0, 2, lambda _, c: (c[0], c[1] + jnp.tensordot(x, c[0], ((1,), (1,))).sum(1)), (w, x)
    )[1],
    "cond": lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda w: w, lambda w: w, w)[0].sum() * x,
    "remat in jit": jax.jit(jax.checkpoint(lambda w, x: jnp.tensordot(x, w, ((1,), (1,))))),
}


def operands():
    random = np.random.default_rng(0)
    w = jnp.asarray(random.normal(size=(3, 8, 8)) / 4, jnp.float32)
    return Shifted(w, jnp.full((1, 1, 1), 0.5), []), jnp.asarray(random.normal(size=(2, 8)), jnp.float32)


@pytest.mark.parametrize("piece", PIECES)
def test_it_has_the_values_and_gradients_of_its_array(piece):
    w, x = operands()
    fn = PIECES[piece]
    run = fb.transparent(fn, fallback="dequantize")

    def loss(shift, x):
        return jnp.sum(jnp.sin(run(dataclasses.replace(w, shift=shift), x)))

    def expected(shift, x):
        return jnp.sum(jnp.sin(fn(w.base + shift, x)))

    found = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(w.shift, x)
    wanted = jax.jit(jax.value_and_grad(expected, argnums=(0, 1)))(w.shift, x)
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, rtol=1e-5, atol=1e-5), found, wanted)
    assert bool(w.seen) == (piece in ("scan", "carried", "remat in jit"))  # an index has no rule here, and decodes it


def test_derivative_rules_are_kept():
    w, x = operands()
    w = Shifted(w.base[0], w.shift[0], [])
    run = fb.transparent(bent)
    found = jax.grad(lambda shift, x: run(dataclasses.replace(w, shift=shift), x).sum(), argnums=(0, 1))(w.shift, x)
    wanted = jax.grad(lambda shift, x: bent(w.base + shift, x).sum(), argnums=(0, 1))(w.shift, x)
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, rtol=1e-5), found, wanted)


def test_without_a_rule_it_is_named():
    w, x = operands()
    with pytest.raises(UnsupportedError, match=r"test_proxy.*slice decodes Shifted"):
        fb.transparent(PIECES["product"])(w, x)
    assert is_proxy(w)
    assert not is_proxy(x)
    np.testing.assert_array_equal(array_of(w), w.base + 0.5)
