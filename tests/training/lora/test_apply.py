"""Adapters beside float and quantized weights: a table of model code, each row against the update added up in full."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import QuantError, UnsupportedError
from fewbit.models.decoder import forward, stack_layers
from fewbit.training.lora import Adapter
from tests.nets.random_decoder import SMALL, random_params, random_tokens


def normal(*shape, seed=0):
    return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[-1])))


def scanned(p, x):
    return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["stack"])[0]


def indexed(p, x):
    for i in range(3):
        x = jnp.tanh(x @ p["stack"][i])
    return x


def looped(p, x):
    def body(i, x):
        return jnp.tanh(x @ jax.lax.dynamic_index_in_dim(p["stack"], i, keepdims=False))

    return jax.lax.fori_loop(0, 3, body, x)


def attention_like(p, x):
    heads = jnp.einsum("bd,dhk->bhk", x, p["heads"])
    return jnp.einsum("bhk,hkd->bd", jnp.tanh(heads), p["out"])


def tied(p, x):
    rows = jnp.take(p["embed"], jnp.array([3, 0]), axis=0)
    return jnp.tanh(x + rows) @ p["embed"].T


def split(p, x):
    left, right = jnp.split(p["w"], 2, axis=1)
    return jnp.tanh(x @ left) * (x @ right)


def repeated(p, x):
    """Alike layers in one line, which are evaluated as one function."""
    for w in p["layers"]:
        x = jnp.tanh(x @ w.T) + x
    return x


@jax.custom_vjp
def doubled_gradient(x):
    return x


doubled_gradient.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))


def convolved(p, x, **settings):
    images = jnp.stack([x, jnp.sin(3 * x)]).reshape(1, 4, 4, 4)  # [B, rows, columns, channels]
    numbers = ("NHWC", "HWIO", "NHWC")
    return jnp.tanh(jax.lax.conv_general_dilated(images, p, dimension_numbers=numbers, **settings))


def oihw(p, x):
    return jax.lax.conv(jnp.stack([x, 2 * x]).reshape(2, 4, 4, 2), p["oihw"], (1, 1), [(1, 1), (0, 2)])


def experts_in_turn(p, x):
    """A mixture's two layers; the last row belongs to no expert."""
    sizes, rows = jnp.array([2, 0, 3]), jnp.concatenate([x, 2 * x, -x])
    hidden = jnp.tanh(jax.lax.ragged_dot(rows, p["stack"], sizes))
    return jax.lax.ragged_dot(hidden, p["stack"], jnp.array([1, 4, 0]))


def experts_of_layers(p, x):
    sizes = jnp.array([1, 1, 2])
    return jax.lax.scan(lambda c, w: (jnp.tanh(jax.lax.ragged_dot(c, w, sizes)), None), jnp.tile(x, (2, 1)), p["moe"])[0]


PIECES = {
    "plain": (lambda p, x: x @ p["w"], "w"),
    "transposed": (lambda p, x: x @ p["square"].T, "square"),
    "left": (lambda p, x: p["square"] @ x.T, "square"),
    "both ways": (lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T, "w"),
    "heads": (attention_like, "heads|out"),
    "merged axes": (lambda p, x: x @ p["heads"].reshape(16, -1), "heads"),
    "columns": (lambda p, x: x @ p["w"][:, 8:24], "w"),
    "halves": (split, "w"),
    "experts": (lambda p, x: jnp.einsum("ebi,eio->ebo", jnp.stack([x, 2 * x, -x]), p["stack"]), "stack"),
    "scan": (scanned, "stack"),
    "indexed stack": (indexed, "stack"),
    "loop": (looped, "stack"),
    "layers": (repeated, "layers/.*"),
    "remat": (jax.checkpoint(lambda p, x: jnp.tanh(x @ p["w"])), "w"),
    "jit in scan": (lambda p, x: scanned(p, jax.jit(scanned)(p, x)), "stack"),
    "vmap": (lambda p, x: jax.vmap(lambda row: row @ p["w"])(x), "w"),
    "tied embedding": (tied, "embed"),
    "cond": (lambda p, x: jax.lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: (2 * x) @ w, p["w"]), "w"),
    "custom vjp": (lambda p, x: doubled_gradient(x @ p["w"]), "w"),
    "convolution": (lambda p, x: convolved(p["kernel"], x, window_strides=(1, 2), padding="SAME"), "kernel"),
    "dilated convolution": (
        lambda p, x: convolved(p["kernel"], x, window_strides=(1, 1), padding="VALID", rhs_dilation=(1, 2)),
        "kernel",
    ),
    "grouped convolution": (
        lambda p, x: convolved(p["grouped"], x, window_strides=(1, 1), padding="SAME", feature_group_count=2),
        "grouped",
    ),
    "channels first": (oihw, "oihw"),
    "ragged": (experts_in_turn, "stack"),
    "ragged in scan": (experts_of_layers, "moe"),
}
FLOAT = {
    "w": normal(16, 32),
    "square": normal(16, 16, seed=1),
    "heads": normal(16, 4, 8, seed=2),
    "out": normal(4, 8, 16, seed=3),
    "stack": normal(3, 16, 16, seed=4),
    "embed": normal(10, 16, seed=5),
    "kernel": normal(3, 2, 4, 8, seed=10),
    "grouped": normal(3, 3, 2, 6, seed=11),
    "oihw": normal(6, 4, 3, 3, seed=12),
    "moe": normal(2, 3, 16, 16, seed=13),
    "layers": [normal(16, 16, seed=6 + i) for i in range(4)],
}
X = normal(2, 16, seed=20)


def used(match):
    """The parameters of one piece alone, so that a plan needs no axis for the others."""
    names = match.removesuffix("/.*").split("|")
    return {name: FLOAT[name] for name in names}


def quantized(fn, params, name):
    """The tree with its weights in a scheme; a weight that is contracted along two of its axes takes the first."""
    rules = [fb.Rule("w|square|embed|kernel|grouped|oihw", name, axis=-1, optional=True), fb.Rule(".*", name, optional=True)]
    return fb.quantize_params(params, fb.plan(fn, params, X, recipe=fb.Recipe(tuple(rules))))


def random_adapters(fn, params, match, rank=2):
    """Adapters that have an effect."""
    axis = -2 if fn is PIECES["both ways"][0] else None  # one of the axes that its products contract
    adapters = fb.lora.init(jax.random.key(0), fn, params, X, match=match, rank=rank, alpha=3.0, axis=axis)
    return {
        path: dataclasses.replace(adapter, b=normal(*adapter.b.shape, seed=30 + i))
        for i, (path, adapter) in enumerate(adapters.items())
    }


def in_full(fn, params, adapters, *args):
    """The function on weights to which the update was added."""
    return fn(fb.lora.merge(params, adapters), *args)


# float32 sums of at most 64 products of numbers around 1, a few in a row.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


SLOW = {
    "float32": (
        "both ways",
        "merged axes",
        "columns",
        "jit in scan",
        "vmap",
        "left",
        "dilated convolution",
        "channels first",
        "ragged in scan",
    ),
    "nf4": tuple(set(PIECES) - {"plain", "heads", "scan", "indexed stack", "layers", "remat", "tied embedding"}),
    "int8": tuple(PIECES),
}
# What an operation makes of a quantized leaf is asked of each piece with nf4; of each kind in float32, and with int8, whose rows have one scale.
INT8 = (
    "plain",
    "left",
    "heads",
    "merged axes",
    "columns",
    "scan",
    "convolution",
    "channels first",
    "ragged",
    "tied embedding",
)


def marks(piece, held):
    if held != "nf4" and piece not in INT8:
        return [pytest.mark.slow, pytest.mark.long]
    return [pytest.mark.slow] if piece in SLOW[held] else []


CASES = [pytest.param(piece, held, marks=marks(piece, held)) for held in ("float32", "nf4", "int8") for piece in PIECES]


@pytest.mark.slow
@pytest.mark.parametrize(("piece", "held"), CASES)
def test_values_and_gradients_are_those_of_the_update_added_up(piece, held):
    fn, match = PIECES[piece]
    params = used(match) if held == "float32" else quantized(fn, used(match), held)
    adapters = random_adapters(fn, params, match)
    plain = jax.tree.map(lambda w: fb.dequantize(w) if fb.is_qarray(w) else w, params, is_leaf=fb.is_qarray)

    def differentiated(run):
        def loss(adapters):
            y = run(adapters)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(loss, has_aux=True))(adapters)

    found, y = differentiated(lambda a: fb.lora.apply(fn)(params, a, X))
    wanted, expected = differentiated(lambda a: in_full(fn, plain, a, X))
    np.testing.assert_allclose(y, expected, **CLOSE)
    assert jax.tree.structure(found) == jax.tree.structure(adapters)
    jax.tree.map(lambda f, w: np.testing.assert_allclose(f, w, **CLOSE), found, wanted)
    assert all(jnp.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(found))


@pytest.mark.slow
@pytest.mark.parametrize("piece", ["plain", "heads", "scan", "tied embedding"])
@pytest.mark.parametrize("held", ["float32", "nf4"])
def test_new_adapters_change_nothing(piece, held):
    fn, match = PIECES[piece]
    params = used(match) if held == "float32" else quantized(fn, used(match), held)
    adapters = fb.lora.init(jax.random.key(1), fn, params, X, match=match, rank=4)
    np.testing.assert_array_equal(fb.lora.apply(fn)(params, adapters, X), fb.transparent(fn)(params, X))


@pytest.mark.parametrize(
    ("piece", "shapes"),
    {
        "plain": {"w": ([16, 2], [2, 32], (-2,), ())},
        "transposed": {"square": ([16, 2], [2, 16], (-1,), ())},
        "heads": {"heads": ([16, 2], [2, 4, 8], (-3,), ()), "out": ([4, 8, 2], [2, 16], (-3, -2), ())},
        "scan": {"stack": ([3, 16, 2], [3, 2, 16], (-2,), (-3,))},
        "indexed stack": {"stack": ([3, 16, 2], [3, 2, 16], (-2,), (-3,))},
        "experts": {"stack": ([3, 16, 2], [3, 2, 16], (-2,), (-3,))},
        "tied embedding": {"embed": ([16, 2], [2, 10], (-1,), ())},
        "convolution": {"kernel": ([3, 2, 4, 2], [2, 8], (-4, -3, -2), ())},
        "grouped convolution": {"grouped": ([3, 3, 2, 2], [2, 6], (-4, -3, -2), ())},
        "channels first": {"oihw": ([4, 3, 3, 2], [2, 6], (-3, -2, -1), ())},
        "ragged": {"stack": ([3, 16, 2], [3, 2, 16], (-2,), (-3,))},
        "ragged in scan": {"moe": ([2, 3, 16, 2], [2, 3, 2, 16], (-2,), (-4, -3))},
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_axes_are_those_of_the_products(piece, shapes):
    fn, match = PIECES[piece]
    adapters = fb.lora.init(jax.random.key(0), fn, used(match), X, match=match, rank=2)
    found = {path: (list(a.a.shape), list(a.b.shape), a.inputs, a.stacked) for path, a in adapters.items()}
    assert found == shapes
    assert {path: a.shape for path, a in adapters.items()} == {path: FLOAT[path].shape for path in adapters}


def test_a_is_uniform_and_depends_on_the_path_alone():
    fn, params = PIECES["layers"][0], {"layers": [normal(256, 256)] * 2}
    x = jnp.ones((1, 256))
    both = fb.lora.init(jax.random.key(0), fn, params, x, match="layers/.*", rank=64)
    one = fb.lora.init(jax.random.key(0), fn, params, x, match="layers/1", rank=64)
    bound = np.sqrt(6 / 256)
    a = both["layers/1"].a
    np.testing.assert_array_equal(a, one["layers/1"].a)
    assert not jnp.array_equal(a, both["layers/0"].a)
    # 16384 draws: the deviation of a uniform one is bound / sqrt 3, its own error below 1 %.
    np.testing.assert_allclose(jnp.std(a), bound / np.sqrt(3), rtol=0.02)
    assert 0.99 * bound < jnp.abs(a).max() <= bound
    assert not both["layers/0"].b.any()
    assert both["layers/0"].scale == 1


def test_a_bfloat16_model_adds_in_float32():
    """The factors are cast to bfloat16, as the code casts its weights; sums are float32 and rounded once."""

    def fn(params, x):
        return x.astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)

    params, adapters = used("w"), random_adapters(PIECES["plain"][0], used("w"), "w")
    found = fb.lora.apply(fn)(params, adapters, X)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), (params, adapters, X))
    expected = in_full(PIECES["plain"][0], *narrow)
    assert found.dtype == jnp.bfloat16
    # Three roundings to 8 bits: of the base product, of x a, and of the sum.
    np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=3 * 2.0**-8 * float(jnp.abs(expected).max()))


def test_a_quantized_product_keeps_its_policy():
    fn = PIECES["plain"][0]
    policy = fb.Policy("int8", activation="int8")
    params = fb.quantize_params(used("w"), fb.plan(fn, used("w"), X, recipe=fb.Recipe((fb.Rule("w", policy),))))
    adapters = random_adapters(fn, params, "w")
    update = fb.lora.merge({"w": jnp.zeros((16, 32))}, adapters)["w"]
    expected = fb.transparent(fn)(params, X) + X @ update
    np.testing.assert_allclose(fb.lora.apply(fn)(params, adapters, X), expected, **CLOSE)


def test_one_base_serves_many_adapters():
    fn, params = PIECES["scan"][0], quantized(PIECES["scan"][0], used("stack"), "nf4")
    several = [
        random_adapters(fn, params, "stack"),
        fb.lora.init(jax.random.key(5), fn, params, X, match="stack", rank=2, alpha=3.0),
    ]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *several)
    found = jax.vmap(lambda adapters: fb.lora.apply(fn)(params, adapters, X))(stacked)
    for i, adapters in enumerate(several):
        np.testing.assert_allclose(found[i], fb.lora.apply(fn)(params, adapters, X), **CLOSE)


def test_the_base_is_not_copied_for_its_layers():
    """Under scan the base stays a scanned operand in few bits: nothing of the trace holds the float stack."""
    fn, params = PIECES["scan"][0], quantized(PIECES["scan"][0], used("stack"), "nf4")
    adapters = random_adapters(fn, params, "stack")
    jaxpr = jax.make_jaxpr(jax.grad(lambda a: fb.lora.apply(fn)(params, a, X).sum()))(adapters)
    shapes = [v.aval.shape for eqn in jaxpr.eqns for v in eqn.outvars if v.aval.dtype == jnp.float32]
    assert (3, 16, 16) not in shapes


@pytest.mark.parametrize("piece", ["plain", "transposed", "left", "heads", "experts"])
def test_no_product_makes_the_update_in_full(piece):
    fn, match = PIECES[piece]
    params = used(match)
    adapters = random_adapters(fn, params, match)
    jaxpr = jax.make_jaxpr(jax.value_and_grad(lambda a: fb.lora.apply(fn)(params, a, X).sum()))(adapters)
    products = [eqn.outvars[0].aval.size for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert len(products) >= 6  # base and two factors, forwards and backwards
    assert max(products) < min(w.size for w in params.values())


def test_dropout_needs_a_key_and_drops_what_the_factors_see():
    fn, params = PIECES["plain"][0], {"w": jnp.zeros((4096, 4))}
    adapter = Adapter(jnp.eye(4096, 1), jnp.ones((1, 4)), alpha=1.0, inputs=(-2,))
    adapter = dataclasses.replace(adapter, a=jnp.full((4096, 1), 1 / 4096))
    x = jnp.ones((1, 4096))
    dropping = fb.lora.apply(fn, dropout=0.25)
    found = dropping(params, {"w": adapter}, x, dropout_key=jax.random.key(0))
    # The mean of 4096 draws that are 4/3 in three of four cases: deviation sqrt(1/3) / 64 = 0.009.
    assert 0 < abs(float(found[0, 0]) - 1) < 0.04
    np.testing.assert_array_equal(found, dropping(params, {"w": adapter}, x, dropout_key=jax.random.key(0)))
    assert not jnp.array_equal(found, dropping(params, {"w": adapter}, x, dropout_key=jax.random.key(1)))
    for run, kwargs in ((dropping, {}), (fb.lora.apply(fn), {"dropout_key": jax.random.key(0)})):
        with pytest.raises(QuantError, match="dropout_key"):
            run(params, {"w": adapter}, x, **kwargs)
    with pytest.raises(QuantError, match="dropout is 1"):
        fb.lora.apply(fn, dropout=1.0)
    with pytest.raises(QuantError, match=r"the function takes dropout_key= and so does fb\.lora\.apply"):
        fb.lora.apply(lambda params, x, dropout_key: fn(params, x), dropout=0.5)(
            params, {}, x, dropout_key=jax.random.key(0)
        )


def test_a_key_of_either_kind_drops_the_same(unchecked):
    fn, params, x = PIECES["plain"][0], {"w": jnp.zeros((64, 4))}, jnp.ones((1, 64))
    adapters = {"w": Adapter(jnp.ones((64, 1)), jnp.ones((1, 4)), alpha=1.0, inputs=(-2,))}
    dropping = fb.lora.apply(fn, dropout=0.5)
    typed, raw = (dropping(params, adapters, x, dropout_key=of(0)) for of in (jax.random.key, jax.random.PRNGKey))
    np.testing.assert_array_equal(raw, typed)


@pytest.mark.parametrize("held", ["float32", "nf4"])
def test_dropout_in_a_scan_is_another_one_for_each_layer(held):
    """With zero weights and a = b = 1 the result of each layer tells how many elements it saw."""

    def fn(params, x):
        return jax.lax.scan(lambda c, w: (c, (c @ w)[0, 0]), x, params["stack"])[1]

    params = {"stack": jnp.zeros((6, 64, 64))}
    if held == "nf4":
        params = {"stack": jax.vmap(lambda w: fb.quantize(w, "nf4", axis=-2))(params["stack"])}
    adapters = {"stack": Adapter(jnp.ones((6, 64, 1)), jnp.ones((6, 1, 64)), 1.0, (-2,), (-3,))}
    run = jax.jit(
        jax.checkpoint(lambda key: fb.lora.apply(fn, dropout=0.5)(params, adapters, jnp.ones((1, 64)), dropout_key=key))
    )
    seen = run(jax.random.key(0))
    assert len(set(seen.tolist())) > 2
    assert jnp.all((seen > 20) & (seen < 108))


def test_an_adapter_trains_on_a_quantized_base():
    """QLoRA: the base is nf4 of a random matrix, the task is that matrix with a rank-2 update; only the adapter learns it."""
    w, update = normal(32, 16), normal(32, 2, seed=1) @ normal(2, 16, seed=2)
    params = {"w": fb.quantize(w, "nf4", axis=-2)}
    x = normal(256, 32, seed=3) * 5
    y = x @ (fb.dequantize(params["w"]) + update)
    fn = PIECES["plain"][0]
    adapters = fb.lora.init(jax.random.key(0), fn, params, x, match="w", rank=4, alpha=4.0)

    def loss(params, adapters):
        return jnp.mean((fb.lora.apply(fn)(params, adapters, x) - y) ** 2)

    @jax.jit
    def step(adapters):
        value, gradient = jax.value_and_grad(loss, argnums=1)(params, adapters)
        return jax.tree.map(lambda p, g: p - 0.3 * g, adapters, gradient), value

    first = float(loss(params, adapters))
    for _ in range(150):
        adapters, value = step(adapters)
    assert value < first / 100
    merged = fb.lora.merge(params, adapters)
    np.testing.assert_allclose(merged["w"], fb.dequantize(params["w"]) + update, atol=0.1 * float(jnp.std(update)))


def test_an_operation_without_a_rule_is_named_or_decoded():
    def fn(params, x):
        return x @ params["w"] + jnp.sum(params["w"] ** 2)

    params, adapters = used("w"), random_adapters(PIECES["plain"][0], used("w"), "w")
    with pytest.raises(UnsupportedError, match=r"test_apply.py.*float32\[16, 32\] with an adapter of rank 2"):
        fb.lora.apply(fn)(params, adapters, X)
    decoded = []
    found = fb.lora.apply(fn, fallback="dequantize", report=decoded.append)(params, adapters, X)
    np.testing.assert_allclose(found, in_full(fn, params, adapters, X), **CLOSE)
    assert decoded
    with pytest.raises(UnsupportedError, match="no dropout without a product"):
        fb.lora.apply(fn, fallback="dequantize", dropout=0.1)(params, adapters, X, dropout_key=jax.random.key(0))


def test_what_does_not_fit_is_refused():
    fn, params = PIECES["plain"][0], {"block": {"w": FLOAT["w"], "norm": jnp.ones(16)}, "w": FLOAT["w"]}
    key = jax.random.key(0)
    with pytest.raises(QuantError, match=r"'block' matches no parameter.*The nearest are .*block/w"):
        fb.lora.init(key, fn, params, X, match="block", rank=2)
    with pytest.raises(QuantError, match=r"no adapter fits: block/norm float32\[16\], not used; match the weights"):
        fb.lora.init(key, fn, params, X, match=".*norm", rank=2, without_product="skip")
    with pytest.raises(QuantError, match="is not a regular expression"):
        fb.lora.init(key, fn, params, X, match="(", rank=2)
    with pytest.raises(QuantError, match="rank is 0"):
        fb.lora.init(key, fn, params, X, match="w", rank=0)
    adapters = fb.lora.init(key, fn, params, X, match="w", rank=2)
    with pytest.raises(QuantError, match="'w', which is no parameter; did you mean 'ww'"):
        fb.lora.apply(fn)({"ww": FLOAT["w"]}, adapters, X)
    with pytest.raises(QuantError, match=r"for shape \(16, 32\), but the weight has \(16, 16\)"):
        fb.lora.apply(fn)({"w": FLOAT["square"]}, adapters, X)


def test_what_matches_without_a_product_is_said(unchecked):
    def fn(params, x):
        return jnp.take(params["table"], jnp.array([1, 2]), axis=0) + (x * jnp.tanh(params["norm"])[None]) @ params["w"]

    params = {"table": normal(5, 32), "norm": jnp.ones(16), "w": FLOAT["w"]}
    key = jax.random.key(0)
    with pytest.raises(
        QuantError,
        match=r"matches 2 parameters that no adapter fits: norm float32\[16\], used by tanh; table float32\[5, 32\], used "
        r"by take; narrow match, or pass without_product='skip'",
    ):
        fb.lora.init(key, fn, params, X, match=".*", rank=2)
    assert list(fb.lora.init(key, fn, params, X, match=".*", rank=2, without_product="skip")) == ["w"]
    with pytest.raises(QuantError, match="without_product is 'leave'; must be 'error' or 'skip'"):
        fb.lora.init(key, fn, params, X, match=".*", rank=2, without_product="leave")


@pytest.mark.parametrize("piece", ["convolution", "ragged"])
def test_products_of_bfloat16_add_in_float32(piece):
    fn, match = PIECES[piece]
    params, adapters, x = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (used(match), *narrow_inputs(fn, match)))
    found, gradient = jax.jit(jax.value_and_grad(lambda a: fb.lora.apply(fn)(params, a, x).astype(jnp.float32).sum()))(
        adapters
    )
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (params, adapters, x))
    wanted, exact = jax.jit(jax.value_and_grad(lambda a: in_full(fn, wide[0], a, wide[2]).sum()))(wide[1])
    assert jnp.abs(found - wanted) < 0.05 * (1 + jnp.abs(wanted))
    for path in adapters:
        for g, e in zip(jax.tree.leaves(gradient[path]), jax.tree.leaves(exact[path]), strict=True):
            # Two products and their sums, each rounded to 8 bits, through a derivative that is at most 1.
            assert jnp.linalg.norm(g.astype(jnp.float32) - e) < 0.05 * jnp.linalg.norm(e)


def narrow_inputs(fn, match):
    return random_adapters(fn, used(match), match), X


def test_a_base_over_several_devices():
    """The base is sharded by columns; the code constrains it, and the sum is that of one device."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))

    def fn(params, x):
        return x @ jax.lax.with_sharding_constraint(params["w"], sharding)

    adapters = random_adapters(fn, used("w"), "w")
    spread = {"w": jax.device_put(FLOAT["w"], sharding)}
    found = jax.jit(fb.lora.apply(fn))(spread, adapters, X)
    np.testing.assert_allclose(found, in_full(PIECES["plain"][0], used("w"), adapters, X), **CLOSE)


@pytest.mark.slow
def test_a_llama_with_its_layers_in_a_list_or_stacked():
    params, tokens = random_params(SMALL), random_tokens(SMALL, 2, 8)

    def fn(params, tokens):
        return forward(params, tokens, SMALL)

    params = fb.quantize_params(params, fb.plan(fn, params, tokens, recipe="nf4"))
    adapters = fb.lora.init(
        jax.random.key(0), fn, params, tokens, match="layers/.*", rank=2, alpha=4.0, without_product="skip"
    )
    adapters = {path: dataclasses.replace(a, b=normal(*a.b.shape, seed=i)) for i, (path, a) in enumerate(adapters.items())}
    assert len(adapters) == 7 * SMALL.layers
    stacked = {
        path: Adapter(
            jnp.stack([adapters[path.replace("/0/", f"/{i}/")].a for i in range(SMALL.layers)]),
            jnp.stack([adapters[path.replace("/0/", f"/{i}/")].b for i in range(SMALL.layers)]),
            4.0,
            (-1,),
            (-3,),
        )
        for path in adapters
        if "/0/" in path
    }
    found = jax.jit(fb.lora.apply(fn))(params, adapters, tokens)
    np.testing.assert_allclose(
        found, jax.jit(fb.lora.apply(fn))(stack_layers(params), stacked, tokens), rtol=1e-4, atol=1e-4
    )
    expected = jax.jit(fb.transparent(fn))(fb.lora.merge(params, adapters), tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert not jnp.allclose(found, jax.jit(fb.transparent(fn))(params, tokens), atol=0.1)


@pytest.mark.finding(10)
def test_a_weight_whose_products_contract_different_axes_needs_an_axis():
    params, x = {"w": jnp.ones((8, 4))}, jnp.ones((2, 8))

    def both_ways(p, x):
        return jnp.tanh(x @ p["w"]) @ p["w"].T

    def adapters(**kwargs):
        return fb.lora.init(jax.random.key(0), both_ways, params, x, match="w", rank=2, **kwargs)

    with pytest.raises(fb.QuantError, match=r"w: its products contract different axes \(dot_general over .*; pass axis="):
        adapters()
    with pytest.raises(fb.QuantError, match=r"axis is \(0, 1\), and no product of w \(8, 4\) contracts it; they contract"):
        adapters(axis=(0, 1))
    assert adapters(axis=-1)["w"].inputs == (-1,) and adapters(axis=0)["w"].inputs == (-2,)
