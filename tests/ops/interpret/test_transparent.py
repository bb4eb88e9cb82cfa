"""Unchanged code on quantized leaves: a table of rows, each a piece of model code, in every transformation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.ops import Decoded

SCHEMES = ("nf4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "nvfp4", "q4_1", "int3_g32")))


def normal(*shape, seed=0):
    return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[-1])))


@jax.custom_vjp
def doubled_gradient(x):
    return x


doubled_gradient.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))


def scan_over_stack(p, x):
    return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w.T), None), x, p["stack"])[0]


def scan_closed_over(p, x):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ p["w"].T), None), x, None, length=3)[0]


def scan_carrying_weights(p, x):
    return jax.lax.scan(lambda c, _: ((c[0], jnp.tanh(c[1] @ c[0].T)), None), (p["w"], x), None, length=3)[0][1]


def scan_with_remat(p, x):
    step = jax.checkpoint(lambda c, w: jnp.tanh(c @ w.T))
    return jax.lax.scan(lambda c, w: (step(c, w), None), x, p["stack"])[0]


def while_closed_over(p, x):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ p["w"].T)), (0, x))[1]


def branches(p, x):
    return jax.lax.cond(x.sum() > 0, lambda w: x @ w.T, lambda w: x @ w, p["w"])


def switched(p, x):
    return jax.lax.switch(jnp.int32(1), [lambda w: x, lambda w: x @ w.T, lambda w: -x], p["w"])


PIECES = {
    "matmul": lambda p, x: x @ p["w"].T,
    "left operand": lambda p, x: (p["w"] @ x.T).T,
    "einsum": lambda p, x: jnp.einsum("bi,oi->bo", x, p["w"]),
    "dot": lambda p, x: jnp.dot(x, p["w"]),
    "tensordot": lambda p, x: jnp.tensordot(x, p["w"], axes=[[1], [1]]),
    "heads": lambda p, x: jnp.einsum("bd,hkd->bhk", x, p["w"].reshape(4, 16, 64)).reshape(2, 64),
    "cast": lambda p, x: (x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16).T).astype(jnp.float32),
    "slice of rows": lambda p, x: jnp.pad(x @ p["w"][:32].T, ((0, 0), (0, 32))),
    "row of a stack": lambda p, x: x @ p["stack"][1].T,
    "row at a run-time index": lambda p, x: x @ p["stack"][jnp.argmax(x[0]) % 3].T,
    "take": lambda p, x: x + jnp.take(p["table"], jnp.array([1, 49]), axis=0),
    "index array": lambda p, x: x + p["table"][jnp.array([-1, 49])],
    "inner jit": lambda p, x: jax.jit(lambda w, x: x @ w.T)(p["w"], x),
    "nested jit": lambda p, x: jax.jit(lambda q, x: jax.jit(lambda w, x: x @ w.T)(q["w"], x))(p, x),
    "remat": lambda p, x: jax.checkpoint(lambda w, x: jnp.tanh(x @ w.T))(p["w"], x),
    "custom_vjp beside": lambda p, x: doubled_gradient(x @ p["w"].T),
    "silu beside": lambda p, x: jax.nn.silu(x @ p["w"].T),
    "vmap inside": lambda p, x: jax.vmap(lambda row: p["w"] @ row)(x),
    "vmap over stack": lambda p, x: jax.vmap(lambda w: x @ w.T)(p["stack"]).sum(0),
    "barrier": lambda p, x: x @ jax.lax.optimization_barrier(p["w"]).T,
    "stop_gradient": lambda p, x: x @ jax.lax.stop_gradient(p["w"]).T,
    "grad inside": lambda p, x: jax.grad(lambda x: (jnp.tanh(x @ p["w"].T) ** 2).sum())(x),
    "unused": lambda p, x: x * 2,
    "scan over stack": scan_over_stack,
    "scan closed over": scan_closed_over,
    "scan carrying weights": scan_carrying_weights,
    "scan with remat": scan_with_remat,
    "while": while_closed_over,
    "cond": branches,
    "switch": switched,
    "random and scatter": lambda p, x: (x + jax.random.normal(jax.random.key(0), x.shape)).at[0].set(1.0) @ p["w"].T,
}


@functools.cache
def quantized(name):
    params = {"w": normal(64, 64), "stack": normal(3, 64, 64, seed=1), "table": normal(50, 64, seed=2)}
    q = {key: fb.quantize(value, name) for key, value in params.items() if key != "stack"}
    q["stack"] = jax.vmap(lambda w: fb.quantize(w, name))(params["stack"])
    return q, jax.tree.map(fb.dequantize, q, is_leaf=fb.is_qarray)


@pytest.mark.slow_after(9)
@pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES)
def test_pieces_of_model_code(piece):
    q, decoded = quantized("nf4")
    x = normal(2, 64, seed=3)
    expected = jax.jit(piece)(decoded, x)
    # XLA may order a sum of 64 float32 products otherwise, and keep more than bfloat16's 8 bits between two operations.
    rtol, atol = (2**-7, 2**-7) if piece is PIECES["cast"] else (1e-5, 1e-6)
    np.testing.assert_allclose(jax.jit(fb.transparent(piece))(q, x), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", ["matmul", "heads", "take", "inner jit", "scan over stack", "while", "cond"])
def test_pieces_without_jit(name):
    q, decoded = quantized("int8")
    x = normal(2, 64, seed=3)
    np.testing.assert_allclose(fb.transparent(PIECES[name])(q, x), PIECES[name](decoded, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SCHEMES)
def test_schemes_through_a_loop_a_table_and_a_product(name):
    q, decoded = quantized(name)
    x = normal(2, 64, seed=3)

    def net(p, x):
        return scan_over_stack(p, x + p["table"][jnp.array([3, 4])]) @ p["w"].T

    def everything(net, p, x):
        gradient = jax.grad(lambda x: net(p, x).sum())(x)
        return net(p, x), gradient, jax.vmap(net, in_axes=(None, 0))(p, jnp.stack([x, 2 * x]))

    found = jax.jit(lambda p, x: everything(fb.transparent(net), p, x))(q, x)
    for got, expected in zip(found, jax.jit(lambda p, x: everything(net, p, x))(decoded, x), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_vmap_over_stacked_quantized_weights_in_both_orders():
    q, decoded = quantized("int8")
    x = normal(2, 64, seed=3)
    outside = jax.vmap(fb.transparent(lambda w, x: x @ w.T), in_axes=(0, None))(q["stack"], x)
    inside = fb.transparent(jax.vmap(lambda w, x: x @ w.T, in_axes=(0, None)))(q["stack"], x)
    expected = jnp.einsum("bi,loi->lbo", x, decoded["stack"])
    np.testing.assert_allclose(outside, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(inside, expected, rtol=1e-5, atol=1e-6)


def test_custom_vjp_keeps_its_rule():
    q, _ = quantized("int8")
    x = normal(2, 64, seed=3)
    plain = jax.grad(lambda x: fb.transparent(lambda p, x: x @ p["w"].T)(q, x).sum())(x)
    doubled = jax.grad(lambda x: fb.transparent(PIECES["custom_vjp beside"])(q, x).sum())(x)
    np.testing.assert_allclose(doubled, 2 * plain, rtol=1e-6)


def test_weights_stay_packed_through_layout_and_loops():
    """Nothing as large as the stack of weights is ever float: each layer is decoded inside the loop."""
    q, _ = quantized("nf4")
    jaxpr = jax.make_jaxpr(fb.transparent(scan_over_stack))(q, normal(2, 64))
    sizes = [v.aval.size for e in jaxpr.eqns for v in e.outvars if v.aval.dtype == jnp.float32]
    assert max(sizes, default=0) < 3 * 64 * 64


def test_outputs_that_are_weights_come_out_quantized():
    q, _ = quantized("nf4")
    out = fb.transparent(lambda p: {"t": p["w"].T, "n": 3})({"w": q["w"]})
    assert isinstance(out["t"], fb.QArray)
    assert out["t"].shape == (64, 64)
    assert out["t"].scheme == q["w"].T.scheme


def test_inner_jit_is_not_retraced_on_a_second_call():
    q, _ = quantized("int8")
    traces = []

    @jax.jit
    def layer(w, x):
        traces.append(None)
        return jnp.tanh(x @ w.T)

    run = fb.transparent(lambda p, x: layer(p["w"], layer(p["w"], x)))
    x = normal(2, 64)
    for _ in range(3):
        run(q, x)
    assert len(traces) == 1
    jaxpr = jax.make_jaxpr(run)(q, x)
    assert [e.params["name"] for e in jaxpr.eqns if e.primitive.name in ("jit", "pjit")] == ["layer", "layer"]


def test_transparent_under_jit_is_traced_once():
    q, _ = quantized("int8")
    traces = []

    def net(p, x):
        traces.append(None)
        return x @ p["w"].T

    run = jax.jit(fb.transparent(net))
    run(q, normal(2, 64))
    run(q, normal(2, 64, seed=4))
    assert len(traces) == 1


def test_two_models_and_plain_code_never_touch_each_other():
    """Qwix's interception leaks through JAX's caches (reference/qwix.md 4.1); nothing is patched here."""
    w, x = normal(64, 64), normal(2, 64, seed=1)
    q = fb.quantize(w, "int3_g32")
    matmul = jax.jit(lambda x, w: x @ w)
    before = matmul(x, w)
    coarse = fb.transparent(matmul)(x, q)
    assert jnp.array_equal(matmul(x, w), before)
    assert jnp.array_equal(x @ w, before)
    assert not jnp.allclose(coarse, before, atol=1e-3)
    assert jnp.array_equal(fb.transparent(matmul)(x, q), coarse)


def test_leaves_that_are_not_arrays_pass_through():
    q, decoded = quantized("int8")

    def net(p, x, *, activation, scale=1.0, flag=None):
        assert isinstance(scale, float)
        assert flag is True
        return activation(x @ p["w"].T) * scale

    out = fb.transparent(net)(q, normal(2, 64), activation=jnp.tanh, scale=2.0, flag=True)
    np.testing.assert_allclose(out, jnp.tanh(normal(2, 64) @ decoded["w"].T) * 2, rtol=1e-5, atol=1e-6)


def test_without_quantized_leaves_the_function_is_called_as_it_is():
    calls = []
    fb.transparent(lambda x: calls.append(type(x)))(np.ones(3))
    assert calls == [np.ndarray]


UNSUPPORTED = {
    "add": (lambda w, x: w + 1.0, "add decodes"),
    "sum": (lambda w, x: w.sum(), "reduce_sum decodes"),
    "cut tile": (lambda w, x: x[:, :32] @ w[:, 3:35].T, "cuts tiles of 64"),
    "convert to int": (lambda w, x: w.astype(jnp.int32), "a quantized array is floating point, not int32"),
    "torn reshape": (lambda w, x: w.reshape(-1, 3), "gather|reshape"),
}


@pytest.mark.parametrize(("piece", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_operations_without_a_rule_raise_or_decode_as_asked(piece, message):
    w, x = fb.quantize(normal(64, 96), "nf4_g64"), normal(96, 32)
    if piece is UNSUPPORTED["cut tile"][0]:
        x = normal(2, 96)
    with pytest.raises(fb.UnsupportedError, match=message) as caught:
        fb.transparent(piece)(w, x)
    assert "fallback='dequantize'" in str(caught.value)
    places: list[Decoded] = []
    out = fb.transparent(piece, fallback="dequantize", report=places.append)(w, x)
    np.testing.assert_allclose(out, piece(fb.dequantize(w), x), rtol=1e-5, atol=1e-6)
    assert len(places) == 1
    assert "nf4" in str(places[0])


def test_codes_that_share_a_byte_are_not_repeated():
    w = fb.quantize(normal(64, 1), "nf4")
    with pytest.raises(fb.UnsupportedError, match=r"broadcast_in_dim decodes .*codes share bytes"):
        fb.transparent(lambda w: jnp.broadcast_to(w, (64, 96)))(w)


def test_the_message_names_the_line():
    w = fb.quantize(normal(64, 64), "int8")
    with pytest.raises(fb.UnsupportedError, match=r"test_transparent\.py:\d+"):
        fb.transparent(lambda w: w * w)(w)


@pytest.mark.usefixtures("unchecked")
def test_fallback_is_checked():
    with pytest.raises(fb.QuantError, match="fallback is 'decode'"):
        fb.transparent(lambda w: w, fallback="decode")


def test_a_function_with_a_derivative_rule_takes_numbers_of_python():
    @jax.custom_vjp
    def scaled(w, x, factor, is_negative):
        return jnp.where(is_negative, -factor, factor) * (x @ w)

    def backward(saved, g):
        w, x, factor = saved
        return 7 * x.T @ g, factor * g @ w.T, None, None

    scaled.defvjp(lambda w, x, factor, is_negative: (scaled(w, x, factor, is_negative), (w, x, factor)), backward)
    w, x = fb.quantize(normal(8, 8), "int8"), normal(2, 8)
    run = fb.transparent(lambda w, x: scaled(w, x, 0.5, False).sum())
    np.testing.assert_allclose(run(w, x), 0.5 * (x @ fb.dequantize(w)).sum(), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(run, 1)(w, x), 0.5 * jnp.ones((2, 8)) @ fb.dequantize(w).T, rtol=1e-5)
    trained = fb.train(lambda w, x: scaled(w["w"], x, 0.5, False).sum(), "w8")
    np.testing.assert_allclose(jax.grad(trained)({"w": normal(8, 8)}, x)["w"], 7 * x.T @ jnp.ones((2, 8)), rtol=1e-6)


def test_while_and_scan_decode_a_carry_that_the_loop_changes():
    w, x = fb.quantize(normal(64, 64), "int8"), normal(2, 64)

    def shrinking(w, x):
        return jax.lax.fori_loop(0, 2, lambda i, c: (c[0] * 0.5, c[1] @ c[0].T), (w, x))[1]

    with pytest.raises(fb.UnsupportedError):
        fb.transparent(shrinking)(w, x)
    out = fb.transparent(shrinking, fallback="dequantize")(w, x)
    np.testing.assert_allclose(out, shrinking(fb.dequantize(w), x), rtol=1e-5, atol=1e-6)


def test_a_choice_by_rows_that_cannot_stay_quantized_is_decoded():
    q = fb.quantize(jnp.ones((8, 8)), "int4")

    def fn(w, mask):
        return jnp.where(mask[:, None], w, jnp.zeros_like(w)).sum()

    found = fb.transparent(fn, fallback="dequantize")(q, jnp.arange(8) < 3)
    np.testing.assert_allclose(found, fb.dequantize(q)[:3].sum(), rtol=1e-6)


def test_a_choice_by_a_constant_stays_quantized():
    one, other = (fb.quantize(normal(8, 8, seed=seed), "int4") for seed in range(2))
    run = fb.transparent(lambda a, b: jax.lax.select(True, a, b))
    np.testing.assert_array_equal(fb.dequantize(run(one, other)), fb.dequantize(one))


def test_a_choice_by_rows_of_bytes_stays_quantized():
    one, other = (fb.quantize(jax.random.normal(jax.random.key(seed), (8, 8)), "int8") for seed in range(2))
    mask = jnp.arange(8) < 3

    def fn(a, b, mask):
        return jnp.where(mask[:, None], a, b)

    found = fb.transparent(fn)(one, other, mask)
    assert isinstance(found, fb.QArray)
    np.testing.assert_array_equal(fb.dequantize(found), fn(fb.dequantize(one), fb.dequantize(other), mask))


@jax.custom_vjp
def recomputing(x, w):
    return jnp.sin(x @ w)


def recomputed_gradients(saved, g):
    x, w = saved
    slope = g * jnp.cos(x @ w)
    return slope @ w.T, x.T @ slope


recomputing.defvjp(lambda x, w: (jnp.sin(x @ w), (x, w)), recomputed_gradients)


def cast_tree(p, x):
    """Mixed precision as most training code writes it: all parameters, of which a recipe matches some."""
    p = jax.tree.map(lambda a: a.astype(jnp.bfloat16), p)
    for layer in (p["a"], p["b"]):
        x = (x.astype(jnp.bfloat16) @ layer["kernel"]) * layer["scale"]
    return x.astype(jnp.float32)


def transposed_tree(p, x):
    p = jax.tree.map(lambda a: a.T, p)
    for layer in (p["a"], p["b"]):
        x = (x @ layer["kernel"]) * layer["scale"].T
    return x


RECOMPUTING = {
    "recomputing custom_vjp": lambda p, x: recomputing(x, p["a"]["kernel"]),
    "gradient of it": lambda p, x: jax.grad(lambda x: recomputing(x, p["a"]["kernel"]).sum())(x),
    "gradient of checkpoint(einsum)": lambda p, x: jax.grad(
        jax.checkpoint(lambda x: jnp.einsum("xb,ba,xa->", x, p["a"]["kernel"], x))
    )(x),
    "cast of the tree": cast_tree,
    "transposed tree": transposed_tree,
}


def test_each_layer_reports_its_fallback_and_keeps_its_name():
    w = fb.quantize(normal(64, 64), "int8")

    def net(params, x):
        for i, w in enumerate(params):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w.T) + w.sum()
        return x

    places: list[Decoded] = []
    run = fb.transparent(net, fallback="dequantize", report=places.append)
    text = jax.jit(run).lower([w] * 3, normal(2, 64)).as_text(debug_info=True)
    assert [place.primitive for place in places] == ["reduce_sum"] * 3
    assert all(f"layer_{i}" in text for i in range(3))


@pytest.mark.slow_after(1)
@pytest.mark.finding(8, 23)
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("piece", RECOMPUTING.values(), ids=RECOMPUTING)
def test_equations_that_share_a_line_end(piece, wrap):
    """These recursed without end when equations of one line were evaluated as one cached function."""
    params = {name: {"kernel": normal(8, 8, seed=i), "scale": jnp.ones((1, 8))} for i, name in enumerate("ab")}
    recipe = fb.Recipe((fb.Rule(".*kernel", fb.Policy("int8"), axis=(-2,)),))
    served = fb.quantize_params(params, fb.plan(piece, params, normal(4, 8), recipe=recipe))
    decoded = jax.tree.map(lambda w: fb.dequantize(w) if fb.is_qarray(w) else w, served, is_leaf=fb.is_qarray)

    def both(fn):
        return lambda p, x: (fn(p, x), jax.grad(lambda x: (fn(p, x) ** 2).sum())(x))

    x = normal(4, 8, seed=3)
    expected = jax.jit(both(piece))(decoded, x)
    found = wrap(both(fb.transparent(piece)))(served, x)
    trained = wrap(both(fb.train(piece, recipe)))(params, x)
    # Sums of 8 float32 products in another order; bfloat16 rounds every result, up to 4, by 2**-7, where XLA does not fuse it.
    tolerance = 2.0**-4 if piece is cast_tree else 1e-5
    for got in (found, trained):
        jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=tolerance, atol=tolerance), got, expected)


IN_AND_WINDOW, OUT = (-2, -1), -3  # what a scheme's tiles and bytes run along
CONVOLUTIONS = {
    "grouped-int8": ((2, 8, 5), (6, 4, 3), {"feature_group_count": 2}, "int8", IN_AND_WINDOW),
    "grouped-nvfp4-bytes over groups": ((2, 8, 5), (6, 4, 3), {"feature_group_count": 2}, "nvfp4", OUT),
    "depthwise-int3_g32": ((2, 8, 5), (16, 1, 3), {"feature_group_count": 8}, "int3_g32", IN_AND_WINDOW),
    "groups of samples-nf4_dq-bytes over groups": ((4, 8, 5), (6, 8, 3), {"batch_group_count": 2}, "nf4_dq", OUT),
}


@pytest.mark.slow_after(1)
@pytest.mark.finding(12)
@pytest.mark.parametrize(("images", "kernel", "groups", "scheme", "axis"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_gradients_inside_of_grouped_convolutions(images, kernel, groups, scheme, axis):
    """JAX regroups the kernel by a reshape that permutes axes, and may cut any byte or tile."""
    x, q = normal(*images), fb.quantize(normal(*kernel, seed=1), scheme, axis=axis)

    def gradient(w, x):
        return jax.grad(lambda x: (jax.lax.conv_general_dilated(x, w, (1,), "SAME", **groups) ** 2).sum())(x)

    found, expected = jax.jit(fb.transparent(gradient))(q, x), jax.jit(gradient)(fb.dequantize(q), x)
    # Sums of at most 24 float32 products below 1 in another order.
    np.testing.assert_allclose(found, expected, atol=24 * 2.0**-23)
