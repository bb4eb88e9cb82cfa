"""What every public JAX primitive does with a quantized operand: a row each; a primitive without a row fails the suite.

Rows say one of four things. `QUANTIZED`: the result is a QArray, equal to the same operation on the decoded array.
`COMPUTED`: the result is computed from the QArray, without the fallback. `DECODED`: the named fallback; the message and the
report name the primitive. `NEVER`: the primitive cannot meet a quantized operand, and why.
"""

import itertools

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import fewbit as fb
from fewbit.ops.interpret.rules import RULES

# Made by public functions of both versions, though no public module has the primitive itself.
BESIDE = {"composite", "name", "pvary", "ragged_dot_general", "reduce_scatter", "reshard", "shard_map"}


def public_primitives() -> dict[str, Primitive]:
    """Every primitive of `jax.extend.core.primitives` and `jax.lax`, by its name."""
    everything = itertools.chain(vars(jax.extend.core.primitives).values(), vars(lax).values())
    return {value.name: value for value in everything if isinstance(value, Primitive)}


PRIMITIVES = public_primitives()


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])


ROWS, COLUMNS = PartitionSpec("d"), PartitionSpec(None, "d")


def sharded(fn, out=ROWS):
    """`fn` of one shard of rows, over four devices."""
    return lambda w: jax.shard_map(fn, mesh=mesh(), in_specs=ROWS, out_specs=out, check_vma=False)(w)


@jax.custom_vjp
def with_vjp(w):
    return w @ w.T


with_vjp.defvjp(lambda w: (w @ w.T, w), lambda w, g: ((g + g.T) @ w,))


@jax.custom_jvp
def with_jvp(w):
    return w @ w.T


with_jvp.defjvp(lambda p, t: (with_jvp(*p), t[0] @ p[0].T + p[0] @ t[0].T))

X = jnp.asarray(np.random.default_rng(1).normal(size=(2, 16)), jnp.float32)
AT = jnp.array([3, 1])


def called(name, w):
    """A call as JAX's own transformations make it; no public function does."""
    primitive, jaxpr = PRIMITIVES[name], jax.make_jaxpr(lambda w: X @ w.T)(jax.ShapeDtypeStruct(w.shape, w.dtype))
    return primitive.bind(w, **primitive.get_bind_params({"call_jaxpr": jaxpr}))[0]


QUANTIZED = {
    "broadcast_in_dim": lambda w: lax.broadcast_in_dim(w, (3, 16, 16), (1, 2)),
    "concatenate": lambda w: lax.concatenate([w, w], 0),
    "convert_element_type": lambda w: lax.convert_element_type(w, jnp.bfloat16),
    "copy": lambda w: jnp.copy(w),
    "device_put": lambda w: jax.device_put(w, NamedSharding(mesh(), PartitionSpec("d"))),
    "dynamic_slice": lambda w: lax.dynamic_slice(w, (jnp.argmax(jnp.arange(3)), 0), (4, 16)),
    "name": lambda w: checkpoint_name(w, "weight"),
    "optimization_barrier": lambda w: lax.optimization_barrier(w),
    "reshape": lambda w: lax.reshape(w, (4, 4, 16)),
    "reshard": lambda w: jax.reshard(
        w, NamedSharding(jax.make_mesh((4,), ("d",), devices=jax.devices()[:4]), PartitionSpec("d"))
    ),
    "rev": lambda w: lax.rev(w, (0,)),
    "select_n": lambda w: lax.select_n(jnp.arange(3).sum() > 0, w, w),
    "sharding_constraint": lambda w: lax.with_sharding_constraint(w, NamedSharding(mesh(), PartitionSpec("d"))),
    "slice": lambda w: lax.slice(w, (0, 0), (8, 16)),
    "split": lambda w: lax.split(w, (4, 12), 0),
    "squeeze": lambda w: lax.squeeze(w.reshape(16, 1, 16), (1,)),
    "stack": lambda w: jnp.stack([w, w]),
    "stage": lambda w: lax.stage(w),
    "stop_gradient": lambda w: lax.stop_gradient(w),
    "tile": lambda w: jnp.tile(w, (2, 1)),
    "transpose": lambda w: lax.transpose(w, (1, 0)),
    "unstack": lambda w: jnp.unstack(w.reshape(2, 8, 16)),
}

COMPUTED = {
    "all_gather": sharded(lambda w: X @ lax.all_gather(w, "d", tiled=True).T),
    **{name: (lambda w, name=name: called(name, w)) for name in ("closed_call", "eval_jaxpr")},
    "composite": lambda w: lax.composite(lambda w: X @ w.T, "fewbit.test")(w),
    "cond": lambda w: lax.cond(jnp.arange(3).sum() > 0, lambda w: X @ w.T, lambda w: X @ w, w),
    "custom_jvp_call": with_jvp,
    "custom_vjp_call": with_vjp,
    "conv_general_dilated": lambda w: lax.conv_general_dilated(jnp.ones((1, 16, 8)), w[:, :, None], (1,), "SAME"),
    "ragged_dot_general": lambda w: lax.ragged_dot(X, w.reshape(1, 16, 16), jnp.array([2])),
    "dot_general": lambda w: X @ w.T,
    "gather": lambda w: w[jnp.array([3, 1])],
    "jit": lambda w: jax.jit(lambda w: X @ w.T)(w),
    "ppermute": sharded(lambda w: X @ lax.ppermute(w, "d", [(i, (i + 1) % 4) for i in range(4)]).T),
    "pvary": lambda w: jax.shard_map(
        lambda x, w: x @ w.T, mesh=mesh(), in_specs=(PartitionSpec("d"), PartitionSpec()), out_specs=PartitionSpec("d")
    )(jnp.ones((4, 16)), w),
    "remat2": lambda w: jax.checkpoint(lambda w: X @ w.T)(w),
    "scan": lambda w: lax.scan(lambda x, w: (x @ w.T, None), X, jnp.stack([w, w]))[0],
    "shard_map": sharded(lambda w: X @ w.T, COLUMNS),
    "while": lambda w: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] @ w.T), (0, X))[1],
}

_UNARY = [
    "abs",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "bessel_i0e",
    "bessel_i1e",
    "cbrt",
    "ceil",
    "cos",
    "cosh",
    "cumlogsumexp",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "digamma",
    "erf",
    "erf_inv",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "is_finite",
    "lgamma",
    "log",
    "log1p",
    "log2",
    "logistic",
    "neg",
    "one_minus_square",
    "round",
    "rsqrt",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "tan",
    "tanh",
]
_BINARY = [
    "add",
    "atan2",
    "complex",
    "div",
    "eq",
    "ge",
    "gt",
    "igamma",
    "igamma_grad_a",
    "igammac",
    "le",
    "lt",
    "max",
    "min",
    "mul",
    "ne",
    "nextafter",
    "polygamma",
    "pow",
    "rem",
    "sub",
    "zeta",
]
_BOUND = ["add_any", "eq_to", "le_to", "lt_to"]  # no public function makes these of floats

DECODED = {
    **{name: (lambda w, name=name: getattr(lax, name)(w)) for name in _UNARY},
    **{name: (lambda w, name=name: getattr(lax, name)(w, w)) for name in _BINARY},
    **{name: (lambda w, name=name: PRIMITIVES[name].bind(w, w)) for name in _BOUND},
    "all_to_all": sharded(lambda w: lax.all_to_all(w, "d", 0, 0, tiled=True)),
    "approx_top_k": lambda w: lax.approx_max_k(w, 2),
    "argmax": lambda w: lax.argmax(w, 0, jnp.int32),
    "argmin": lambda w: lax.argmin(w, 0, jnp.int32),
    "bitcast_convert_type": lambda w: lax.bitcast_convert_type(w, jnp.int32),
    "cholesky": lambda w: lax.linalg.cholesky(w, symmetrize_input=False),
    "clamp": lambda w: lax.clamp(jnp.float32(0), w, jnp.float32(1)),
    "custom_linear_solve": lambda w: lax.custom_linear_solve(lambda v: w @ v, jnp.ones(16), lambda mv, b: b),
    "dynamic_update_slice": lambda w: lax.dynamic_update_slice(w, jnp.zeros((1, 16)), (0, 0)),
    "eig": lambda w: lax.linalg.eig(w),
    "eigh": lambda w: lax.linalg.eigh(w, symmetrize_input=False),
    "fft": lambda w: lax.fft(w, "RFFT", (16,)),
    "hessenberg": lambda w: lax.linalg.hessenberg(w),
    "householder_product": lambda w: lax.linalg.householder_product(w, jnp.ones(16)),
    "integer_pow": lambda w: lax.integer_pow(w, 3),
    "lu": lambda w: lax.linalg.lu(w),
    "pad": lambda w: lax.pad(w, jnp.float32(0), ((1, 0, 0), (0, 0, 0))),
    "pmax": sharded(lambda w: lax.pmax(w, "d")),
    "pmin": sharded(lambda w: lax.pmin(w, "d")),
    "polynomial": lambda w: lax.polynomial(w, (1.0, 2.0)),
    "psum": sharded(lambda w: lax.psum(w, "d")),
    "qr": lambda w: lax.linalg.qr(w),
    "ragged_all_to_all": sharded(
        lambda w: lax.ragged_all_to_all(w, jnp.zeros((4, 16)), *[jnp.ones(4, jnp.int32)] * 4, axis_name="d")
    ),
    "random_gamma": lambda w: jax.random.gamma(jax.random.key(0), w, w.shape),
    "reduce": lambda w: lax.reduce(w, jnp.float32(0), lambda a, b: a + 2 * b, (0,)),
    "reduce_max": lambda w: lax.reduce_max(w, (0,)),
    "reduce_min": lambda w: lax.reduce_min(w, (0,)),
    "reduce_precision": lambda w: lax.reduce_precision(w, 8, 7),
    "reduce_prod": lambda w: lax.reduce_prod(w, (0,)),
    "reduce_scatter": sharded(lambda w: lax.psum_scatter(w, "d", tiled=True)),
    "reduce_sum": lambda w: lax.reduce_sum(w, (0,)),
    "reduce_window": lambda w: lax.reduce_window(w, jnp.float32(0), lambda a, b: a + 2 * b, (2, 1), (1, 1), "VALID"),
    "reduce_window_max": lambda w: lax.reduce_window(w, -jnp.inf, lax.max, (2, 1), (1, 1), "VALID"),
    "reduce_window_min": lambda w: lax.reduce_window(w, jnp.inf, lax.min, (2, 1), (1, 1), "VALID"),
    "reduce_window_sum": lambda w: lax.reduce_window(w, 0.0, lax.add, (2, 1), (1, 1), "VALID"),
    "regularized_incomplete_beta": lambda w: lax.betainc(w, w, w),
    "scatter": lambda w: w.at[AT].set(0.0),
    "scatter-add": lambda w: w.at[AT].add(1.0),
    "scatter-max": lambda w: w.at[AT].max(1.0),
    "scatter-min": lambda w: w.at[AT].min(1.0),
    "scatter-mul": lambda w: w.at[AT].mul(2.0),
    "scatter-sub": lambda w: w.at[AT].subtract(2.0),
    "schur": lambda w: lax.linalg.schur(w),
    "sort": lambda w: lax.sort(w),
    "svd": lambda w: lax.linalg.svd(w),
    "top_k": lambda w: lax.top_k(w, 2),
    "triangular_solve": lambda w: lax.linalg.triangular_solve(w, jnp.ones((16, 1)), left_side=True),
    "tridiagonal": lambda w: lax.linalg.tridiagonal(w),
    "tridiagonal_solve": lambda w: lax.linalg.tridiagonal_solve(w[0], w[1], w[2], jnp.ones((16, 1))),
}

_INTEGERS = "it takes integers or booleans"
_COMPLEX = "it takes complex numbers"
_KEYS = "it takes random keys or their bits"
_NOTHING = "it takes no array"
_REFS = "it takes references, and a QArray is written to none"
_POOLED = "only the derivative of a pooling makes it, of what the pooling has decoded"

NEVER = {
    **dict.fromkeys(["after_all", "axis_index", "create_token", "empty2", "iota", "rng_bit_generator"], _NOTHING),
    **dict.fromkeys(
        ["and", "clz", "mulhi", "not", "or", "population_count", "reduce_and", "reduce_or", "reduce_xor", "xor"], _INTEGERS
    ),
    **dict.fromkeys(["shift_left", "shift_right_arithmetic", "shift_right_logical"], _INTEGERS),
    **dict.fromkeys(["conj", "imag", "real"], _COMPLEX),
    **dict.fromkeys(["random_bits", "random_fold_in", "random_seed", "random_split", "threefry2x32"], _KEYS),
    **dict.fromkeys(["get", "swap"], _REFS),
    **dict.fromkeys(["select_and_gather_add", "select_and_scatter", "select_and_scatter_add"], _POOLED),
    "call": "no public function makes it, and JAX itself none in a trace",
    "custom_lin": "only linearizing makes it, and transposing what was linearized takes it out again",
    "dce_sink": "it gives no result, so a trace keeps it only for its effect",
    "rng_uniform": "it takes scalars, and a QArray has an axis",
}

ALL = {**QUANTIZED, **COMPUTED, **DECODED, **NEVER}


def rows(table):
    """The rows whose primitive this version of JAX has."""
    return pytest.mark.parametrize("name", [name for name in table if name in PRIMITIVES or name in BESIDE])


@pytest.fixture(scope="module")
def w():
    return fb.quantize(jnp.asarray(np.random.default_rng(0).normal(size=(16, 16)), jnp.float32), "int8")


def test_every_public_primitive_has_one_row():
    assert not sorted(set(PRIMITIVES) - set(ALL)), "add a row that says what transparent does with these"
    assert len(ALL) == len(QUANTIZED) + len(COMPUTED) + len(DECODED) + len(NEVER)


def test_every_rule_has_a_row_that_says_so():
    older = {"pjit", "core_call", "checkpoint", "expand_dims", "copy_p"}  # names of JAX versions between those tested
    assert set(RULES) - older <= {*QUANTIZED, *COMPUTED, "shard_map"}
    assert not set(RULES) & {*DECODED, *NEVER}


@pytest.mark.slow_after(7)
@rows(QUANTIZED)
def test_what_stays_quantized(name, w):
    found, expected = fb.transparent(QUANTIZED[name])(w), QUANTIZED[name](fb.dequantize(w))
    for got, want in zip(jax.tree.leaves(found, is_leaf=fb.is_qarray), jax.tree.leaves(expected), strict=True):
        assert fb.is_qarray(got)
        np.testing.assert_array_equal(fb.dequantize(got), want)


@pytest.mark.slow_after(4)
@rows(COMPUTED)
def test_what_is_computed(name, w):
    piece = COMPUTED[name]
    np.testing.assert_allclose(fb.transparent(piece)(w), piece(fb.dequantize(w)), rtol=1e-5, atol=1e-5)


@rows(DECODED)
def test_what_decodes(name, w):
    with pytest.raises(fb.UnsupportedError, match=rf"test_primitives\.py:\d+.*: {name} decodes QArray\(int8.*\(.+\)"):
        jax.eval_shape(fb.transparent(DECODED[name]), w)
    places = []
    found = jax.eval_shape(fb.transparent(DECODED[name], fallback="dequantize", report=places.append), w)
    assert name in {place.primitive for place in places}
    assert found == jax.eval_shape(DECODED[name], fb.dequantize(w))


@rows(NEVER)
def test_what_never_meets_a_quantized_array_says_why(name):
    assert len(NEVER[name]) > 10
