"""Following parameters to the products that use them."""

import jax
import jax.numpy as jnp
import pytest

from fewbit.errors import QuantError
from fewbit.ops.interpret.parameter_uses import Use, Uses, parameter_paths, parameter_uses
from fewbit.ops.interpret.traced import Traced


def found(fn, params, *inputs) -> Uses:
    return parameter_uses(Traced.of(fn, (params, *inputs), {}), params)


def uses(fn, params, *inputs):
    return {path: [(u.op, u.axes, u.stacked) for u in us] for path, us in found(fn, params, *inputs).parameters.items()}


W = jax.ShapeDtypeStruct((8, 16), jnp.float32)
X = jax.ShapeDtypeStruct((2, 16), jnp.float32)


def test_paths_are_those_of_the_tree():
    assert list(parameter_paths({"a": {"b": [1, 2]}, "c": 3})) == ["a/b/0", "a/b/1", "c"]


def test_moves_are_followed_to_the_product():
    pieces = {
        "plain": lambda w, x: x @ w.T,
        "cast": lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16).T,
        "jit and remat": lambda w, x: jax.jit(jax.checkpoint(lambda w, x: x @ w.T))(w, x),
        "left": lambda w, x: w @ x.T,
        "einsum": lambda w, x: jnp.einsum("bi,oi->bo", x, w),
        "split": lambda w, x: jnp.concatenate([x @ part.T for part in jnp.split(w, 2)], axis=1),
        "custom_jvp": lambda w, x: jax.nn.relu(x) @ jax.lax.stop_gradient(w).T,
    }
    for name, piece in pieces.items():
        assert uses(piece, W, X)[""] == [("dot_general", (-1,), ())], name


def test_split_and_merged_axes_are_named_by_the_parameters_own():
    heads = jax.ShapeDtypeStruct((8, 4, 16), jnp.float32)  # [D, H, K]
    assert uses(lambda w, x: jnp.einsum("bd,dhk->bhk", x, w), heads, jax.ShapeDtypeStruct((2, 8), jnp.float32))[""] == [
        ("dot_general", (-3,), ())
    ]
    flat = jax.ShapeDtypeStruct((2, 64), jnp.float32)
    assert uses(lambda w, x: x @ w.reshape(8, 64).T, heads, flat)[""] == [("dot_general", (-2, -1), ())]
    whole = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    split = uses(lambda w, x: jnp.einsum("bi,hki->bhk", x, w.reshape(4, 16, 16)), whole, X)
    assert split[""] == [("dot_general", (-1,), ())]


def test_loops_name_the_axes_they_take_apart():
    stack = jax.ShapeDtypeStruct((3, 16, 16), jnp.float32)
    scan = uses(lambda w, x: jax.lax.scan(lambda c, w: (c @ w.T, None), x, w)[0], stack, X)
    assert scan[""] == [("dot_general", (-1,), (-3,))]
    for indexed in (lambda w, x: x @ w[1].T, lambda w, x: x @ w[1:2].reshape(16, 16).T):
        assert uses(indexed, stack, X)[""] == [("dot_general", (-1,), (-3,))]
    square = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    closed = uses(lambda w, x: jax.lax.fori_loop(0, 3, lambda i, c: c @ w, x), square, X)
    assert closed[""] == [("dot_general", (-2,), ())]
    condition = uses(lambda w, x: jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: c @ w, x), square, X)
    assert condition[""] == [("dot_general", (-2,), ())]
    branch = uses(lambda w, x: jax.lax.cond(x.sum() > 0, lambda w: x @ w, lambda w: x @ w.T, w), square, X)
    assert {u[1] for u in branch[""]} == {(-2,), (-1,)}


def test_a_carried_parameter_stays_one_only_where_the_loop_does_not_change_it():
    """Serving and training decode what a loop changes, so the plan has to leave it in float."""
    square = jax.ShapeDtypeStruct((16, 16), jnp.float32)

    def carried(change, loop=jax.lax.fori_loop):
        return lambda w, x: loop(0, 3, lambda i, c: (change(c[0]), c[1] + x @ c[0]), (w, x))

    def while_loop(first, last, body, carry):
        return jax.lax.while_loop(lambda c: c[0] < last, lambda c: (c[0] + 1, body(*c)), (first, carry))[1]

    for same in (lambda w: w, lambda w: jax.lax.optimization_barrier(w), jax.jit(lambda w: w), jnp.copy):
        found = uses(
            lambda w, x, same=same: x @ carried(same)(w, x)[0].T, square, X
        )  # it is the parameter after the loop, too
        assert found[""] == [("dot_general", (-2,), ()), ("dot_general", (-1,), ())]
    for change in (lambda w: w.T, lambda w: w[::-1], lambda w: w.astype(jnp.bfloat16).astype(w.dtype)):
        assert uses(carried(change), square, X)[""] == [("scan", (), ())]
        assert uses(carried(change, while_loop), square, X)[""] == [("while", (), ())]
    assert uses(carried(lambda w: w * 0.9), square, X)[""] == [("scan", (), ())]
    swapped = uses(lambda ab, x: jax.lax.fori_loop(0, 3, lambda i, c: (c[1], c[0], x @ c[0]), (*ab, x)), (square, square), X)
    assert swapped == {"0": [("scan", (), ())], "1": [("scan", (), ())]}


def test_one_element_of_an_axis_that_a_product_sees_is_no_layer_of_a_loop():
    stack = jax.ShapeDtypeStruct((3, 16, 16), jnp.float32)
    assert uses(lambda w, x: jnp.matmul(x[:, :1], w[:, :1]), stack, X)[""] == [("dot_general", (-2,), ())]
    assert uses(lambda w, x: x @ w[0][:, :1], stack, X)[""] == [("dot_general", (-2,), (-3,))]
    assert uses(lambda w, x: jnp.matmul(x, w[:1]), stack, X)[""] == [("dot_general", (-2,), ())]


def test_look_ups_convolutions_and_the_rest_are_named():
    table = jax.ShapeDtypeStruct((50, 16), jnp.float32)
    ids = jax.ShapeDtypeStruct((3,), jnp.int32)
    assert uses(lambda w, i: w[i], table, ids)[""] == [("take", (-2,), ())]
    tied = uses(lambda w, i: w[i] @ w.T, table, ids)
    assert tied[""] == [("take", (-2,), ()), ("dot_general", (-1,), ())]
    kernel, image = jax.ShapeDtypeStruct((8, 3, 5), jnp.float32), jax.ShapeDtypeStruct((1, 3, 9), jnp.float32)
    conv = uses(lambda w, x: jax.lax.conv_general_dilated(x, w, (1,), "SAME"), kernel, image)
    assert conv[""] == [("conv_general_dilated", (-1, -2), ())]  # the window, then the input channels, along which tiles run
    assert uses(lambda w, x: x * w.sum(), W, X)[""][0][0] == "reduce_sum"
    assert uses(lambda p, x: x, {"a": W}, X) == {"a": []}
    assert isinstance(found(lambda w, x: x @ w.T, W, X).parameters[""][0], Use)
    assert "test_parameter_uses.py" in found(lambda w, x: jax.lax.dot(x, w.T), W, X).parameters[""][0].source


def test_products_without_a_parameter_are_named_by_their_scopes_or_their_place():
    def attend(q):
        with jax.named_scope("attn"):
            return jnp.einsum("bd,cd->bc", q, q) @ q @ q.T

    def net(w, x):
        @jax.jit
        def layer(x):
            with jax.named_scope("layer"):
                return jax.checkpoint(attend)(x) @ x

        x = jax.lax.scan(lambda c, _: (layer(c), None), x @ w.T @ w, None, length=2)[0]
        return jax.lax.cond(x.sum() > 0, lambda x: x @ x.T, lambda x: x[:, :4] @ x.T[:4], x)

    products = found(net, W, X).products
    names = ["layer/attn/bd,cd->bc", "layer/attn", "layer/attn#2", "layer", "#1", "#2"]
    assert [p.name for p in products][:4] == names[:4]
    assert sorted(p.name for p in products[4:]) == names[4:]
    assert products[0].shapes == ((2, 16), (2, 16))
    assert {p.op for p in products} == {"dot_general"}
    assert all("test_parameter_uses.py" in p.source for p in products)


def test_axes_that_run_beside_the_other_operands_are_told_apart():
    experts, x = jax.ShapeDtypeStruct((4, 8, 16), jnp.float32), jax.ShapeDtypeStruct((4, 2, 8), jnp.float32)
    (use,) = found(lambda w, x: jnp.einsum("ebi,eio->ebo", x, w), experts, x).parameters[""]
    assert (use.axes, use.batch, use.stacked) == ((-2,), (-3,), ())


@pytest.mark.parametrize("equation", ["bhd,hdm->bm", "bnh,nhd->bd", "bzy,zya->ba"])
def test_contracted_axes_do_not_hang_on_an_einsums_letters(equation):
    weight, x = jax.ShapeDtypeStruct((4, 16, 64), jnp.float32), jax.ShapeDtypeStruct((2, 4, 16), jnp.float32)
    assert uses(lambda w, x: jnp.einsum(equation, x, w), weight, x)[""] == [("dot_general", (-3, -2), ())]


def test_two_parameters_of_one_path_are_refused():
    params = {"a/b": W, "a": {"b": W}}
    with pytest.raises(QuantError, match="two parameters have the path 'a/b'; rename one"):
        found(lambda p, x: x @ p["a/b"].T + x @ p["a"]["b"].T, params, X)
