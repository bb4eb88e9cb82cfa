"""The compiled product on CPUs beside NumPy in float64: every scheme, both axes contracted, any shape and instruction set."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit._tiles import tile_counts
from fewbit.array.packing import code_capacity, pack, paired
from fewbit.array.scales import CentredAbsMax
from fewbit.formats import AbstractFormat
from fewbit.kernels.buffers import FLOAT_LEVELS
from fewbit.kernels.extension import HOW_TO_BUILD, Extension, extension
from fewbit.kernels.qmatmul import Cpu, Problem
from fewbit.kernels.qmatmul.problem import Operand
from tests.conformance import array_laws as laws

BUILT = extension("fewbit.kernels.qmatmul.cpu._dequant_gemm")
pytestmark = pytest.mark.skipif(BUILT.missing is not None, reason=str(BUILT.missing))

CPU = Cpu()
HERE = (
    FLOAT_LEVELS[: FLOAT_LEVELS.index(BUILT.isa) + 1] if BUILT.isa in FLOAT_LEVELS else FLOAT_LEVELS[:1]
)  # arm64 has one of its own
ROWS, COLS = 70, 200  # no tile of a preset divides either


def contracting(axis: int):
    """The dimension numbers of x [M, K] and a matrix whose axis is contracted."""
    return (((1,), (axis,)), ((), ()))


def weight(name: str, axis: int, shape=(ROWS, COLS)) -> fb.QArray:
    """A weight of random finite codes and scales, as they are stored, with tiles along an axis."""
    rng = np.random.default_rng(0)

    def stored(holder, counts):
        if isinstance(holder, fb.Scheme):
            one = jnp.full((1, 1), 0.01, jnp.float32)
            codes = jnp.asarray(rng.integers(0, 256, counts, np.uint8))
            return fb.QArray(codes, one, one * 3, None, holder, np.dtype(np.float32))
        if isinstance(holder, AbstractFormat):
            return jnp.asarray(finite_codes(holder, rng, counts, low=0.01, high=100.0))
        return jnp.asarray(rng.uniform(0.1, 2, counts), holder)

    scheme = fb.scheme(name).along(axis, 2)
    codes = jnp.asarray(finite_codes(scheme.format, rng, shape))
    packed = pack(codes, scheme.format.bits, scheme.packing, axis=scheme.pack_axis)
    slack = code_capacity(packed.shape[scheme.pack_axis], scheme.format.bits) - shape[scheme.pack_axis]
    counts = tile_counts(shape, scheme.tiles(2))
    zero = None
    if scheme.zero_point is not None:
        zero = stored(scheme.zero_point, counts)
    tensor = jnp.full((1, 1), 0.37, jnp.float32) if scheme.tensor_scale else None
    return fb.QArray(packed, stored(scheme.scale, counts), zero, tensor, scheme, np.dtype(np.float32), slack)


def finite_codes(fmt, rng, shape, low=-np.inf, high=np.inf):
    """Random codes of the numbers of a format between two bounds."""
    values = fmt.values()
    choices = np.flatnonzero(np.isfinite(values) & (values >= low) & (values <= high))
    return rng.choice(choices, shape).astype(np.uint8)


def beyond_rounding(y: jax.Array, x: np.ndarray, q: fb.QArray, axis: int) -> float:
    """The largest error over what float32 allows: each of the K products and sums rounds by half a step at most.

    A scaled value rounds twice more, and so does a sum with an offset.
    """
    w = np.moveaxis(laws.numpy_dequantize(q).astype(np.float64), axis, 0)
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(w)
    if q.zero_point is not None:  # an offset and a scaled code may be much larger than what they leave
        magnitude = magnitude + np.abs(x).sum(1, keepdims=True) * np.abs(w).max() * 4
    allowed = (w.shape[0] + 4) * 2.0**-24 * magnitude + 1e-35
    return float(np.max(np.abs(np.asarray(y, np.float64) - x.astype(np.float64) @ w) / allowed))


def product(x: np.ndarray, q: fb.QArray, axis: int, isa: str | None = None) -> jax.Array:
    """The product by the compiled kernel."""
    problem = Problem(Operand.of(jnp.asarray(x)), Operand.of(q), contracting(axis))
    backend = dataclasses.replace(CPU, isa=isa)
    assert backend.unsupported(problem) is None
    return backend.run(problem, jnp.asarray(x), q)


def activation(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, length)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", fb.SCHEMES.names())
def test_every_scheme_along_both_axes(name):
    for axis, tiled in ((1, -1), (0, -2)):
        q = weight(name, tiled)
        x = activation(3, q.shape[axis])
        assert beyond_rounding(product(x, q, axis), x, q, axis) < 1


@pytest.mark.once
@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize(
    "name", ["nf4", "uint4", "q4_1", "int8", "fp8", "int3", "int5", "int7", "mxfp6", "mxfp6_e3m2", "ternary", "binary"]
)
def test_every_instruction_set(name, isa):
    q = weight(name, -1)
    x = activation(2, COLS)
    assert beyond_rounding(product(x, q, 1, isa), x, q, 1) < 1
    g = activation(2, ROWS)
    assert beyond_rounding(product(g, q, 0, isa), g, q, 0) < 1


@pytest.mark.once
@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("name", ["mxfp4", "mxfp6", "mxfp6_e3m2", "mxfp8", "mxint8", "nf4", "int8", "fp8"])
def test_the_largest_scales(name, isa):
    """Weights near the largest float32, whose scales leave no room for a factor that a decoder might fold into them."""
    w = 2.0**127 * jnp.clip(activation(ROWS, COLS), -1.5, 1.5)
    q = fb.quantize(w, name)
    for axis in (0, 1):
        x = 2.0**-30 * activation(2, q.shape[axis])
        assert beyond_rounding(product(x, q, axis, isa), x, q, axis) < 1


@pytest.mark.parametrize("rows", [1, 17, 64])
@pytest.mark.parametrize("name", ["nf4", "nvfp4", "q8_0", "mxfp6"])
def test_any_number_of_rows(name, rows):
    for axis in (0, 1):
        q = weight(name, -1, (1030, 330))
        x = activation(rows, q.shape[axis])
        assert beyond_rounding(product(x, q, axis), x, q, axis) < 1


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("name", ["int4", "uint4_g64", "q4_1", "int8", "fp8", "int3", "mxfp6", "ternary", "binary", "nvfp4"])
def test_tiles_along_the_outputs(name):
    """The default axis of `fb.quantize` in `x @ q`, and gradients: scales change with each place of the contraction."""
    for axis, tiled in ((0, -1), (1, -2)):
        q = weight(name, tiled)
        for rows in (1, 3, 7):
            x = activation(rows, q.shape[axis])
            assert beyond_rounding(product(x, q, axis), x, q, axis) < 1


@pytest.mark.once
def test_tiles_along_the_outputs_of_a_wide_weight():
    """Panels of 64 and of 128 outputs, several chunks, and tiles that begin within a vector or are the whole axis."""
    rng = np.random.default_rng(0)
    for name, tile in (("int4", 24), ("int8", 128), ("int3", None)):
        for axis in (0, 1):
            w = rng.standard_normal((80, 1100) if axis == 0 else (1100, 80)).astype(np.float32)
            tiles = (1, tile) if axis == 0 else (tile, 1)
            q = fb.quantize(jnp.asarray(w), fb.scheme(name).with_tiles(tiles, -1 - axis))
            for rows in (2, 9):
                x = activation(rows, 80)
                assert beyond_rounding(product(x, q, axis), x, q, axis) < 1


def test_dtypes_are_rounded_once():
    q, x = weight("nf4", -1), activation(3, COLS)
    exact = np.asarray(product(x, q, 1))
    for dtype in (jnp.bfloat16, jnp.float16):
        rounded = jnp.asarray(x, dtype)
        y = fb.dot_general(rounded, q.astype(dtype), contracting(1), backend="cpu")
        wide = fb.dot_general(rounded.astype(jnp.float32), q, contracting(1), backend="cpu")
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, wide.astype(dtype))
    assert np.isfinite(exact).all()


def in_bfloat16(x: np.ndarray, q: fb.QArray, axis: int, isa: str | None = None) -> tuple[jax.Array, np.ndarray]:
    """The product with x rounded to bfloat16, in float32, by the compiled kernel; and this x."""
    rounded = jnp.asarray(x, jnp.bfloat16)
    problem = Problem(Operand.of(rounded), Operand.of(q), contracting(axis), preferred_element_type=jnp.float32)
    return dataclasses.replace(CPU, isa=isa).run(problem, rounded, q), np.asarray(rounded, np.float32)


@pytest.mark.parametrize("name", ["nf4", "uint4", "q4_1", "int8", "fp8", "int3", "mxfp6", "mxfp4", "nvfp4", "ternary"])
def test_many_rows_in_bfloat16(name):
    """AMX multiplies 64 rows or more, 32 at a time, with weights in up to three parts; other levels in float32."""
    for axis, tiled in ((1, -1), (0, -2), (0, -1)):
        q = weight(name, tiled)
        for isa in HERE[-2:]:
            y, x = in_bfloat16(activation(97, q.shape[axis]), q, axis, isa)
            assert beyond_rounding(y, x, q, axis) < 1, isa


def test_many_rows_in_bfloat16_beside_infinity():
    """Weights next to the largest float32, infinity, and NaN have the results of the other levels; so have inputs."""
    q = fb.quantize(2.0**127 * jnp.clip(activation(ROWS, COLS), -1.5, 1.5), "mxfp8")
    y, x = in_bfloat16(2.0**-30 * activation(70, COLS), q, 1)
    assert beyond_rounding(y, x, q, 1) < 1
    codes = jnp.asarray(weight("fp8_e5m2", -1).codes).at[3, 7].set(0x7C).at[5, 9].set(0x7E)
    q, finite = dataclasses.replace(weight("fp8_e5m2", -1), codes=codes), np.abs(activation(70, COLS)) + 1
    special = finite.copy()  # which AMX leaves to AVX-512
    special[11, 2], special[12, 3] = np.inf, np.nan
    for x in (finite, special):
        y, expected = (np.asarray(in_bfloat16(x, q, 1, isa)[0]) for isa in (HERE[-1], HERE[0]))
        np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
        np.testing.assert_array_equal(np.isposinf(y), np.isposinf(expected))
        assert np.isposinf(np.delete(y[:, 3], [11, 12])).all() and np.isnan(y[:, 5]).all()


def test_many_rows_in_bfloat16_by_scales_that_are_not_finite():
    """A scale of an output multiplies its sums with AMX, but an infinite one, which makes NaN of codes that are zero."""
    q = weight("int8", -1)
    q = dataclasses.replace(q, scale=jnp.asarray(q.scale).at[3].set(np.inf).at[5].set(np.nan))
    y, expected = (np.asarray(in_bfloat16(activation(70, COLS), q, 1, isa)[0]) for isa in (HERE[-1], HERE[0]))
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    assert np.isnan(y[:, 5]).all() and np.isfinite(np.delete(y, [3, 5], axis=1)).all() and not np.isfinite(y[:, 3]).any()


def test_where_jit_is_off():
    q, x = weight("nf4", -1), jnp.asarray(activation(3, COLS))
    with jax.disable_jit():
        y = fb.dot_general(x, q, contracting(1), backend="cpu")
    np.testing.assert_array_equal(y, product(x, q, 1))


@pytest.mark.parametrize("packing", [fb.Packing(paired(32)), fb.Packing((), True), fb.Packing(paired(8, 4))], ids=str)
def test_codes_in_any_order(packing):
    scheme = dataclasses.replace(fb.scheme("q4_1"), packing=packing)
    w = activation(5, 100)
    q = fb.quantize(jnp.asarray(w), scheme)
    for axis in (0, 1):
        for rows in (2, 7):
            x = activation(rows, q.shape[axis])
            assert beyond_rounding(product(x, q, axis), x, q, axis) < 1


def test_batches_several_axes_and_either_side():
    """The dimension numbers of attention's projections, of stacked experts, and of a weight on the left."""
    w = activation(4 * 6, 32).reshape(4, 6, 32)
    q = fb.quantize(jnp.asarray(w), "int4_g16")
    values = np.asarray(fb.dequantize(q))

    def check(spec, numbers, x_shape, is_left=False):
        x = activation(int(np.prod(x_shape)), 1).reshape(x_shape)
        operands = (q, jnp.asarray(x)) if is_left else (jnp.asarray(x), q)
        y = fb.dot_general(*operands, numbers, backend="cpu")
        expected = np.einsum(spec, *((values, x) if is_left else (x, values)))
        np.testing.assert_allclose(y, expected, atol=1e-4)

    check("abk,hdk->abhd", (((2,), (2,)), ((), ())), (2, 3, 32))
    check("ahd,hdk->ak", (((1, 2), (0, 1)), ((), ())), (2, 4, 6))
    check("adh,hdk->ak", (((2, 1), (0, 1)), ((), ())), (2, 6, 4))
    check("hmk,hdk->hmd", (((2,), (2,)), ((0,), (0,))), (4, 3, 32))
    check("hdk,mk->hdm", (((2,), (1,)), ((), ())), (3, 32), is_left=True)
    with pytest.raises(
        fb.UnsupportedError, match=r"cpu: int4_g16.* cannot be viewed as a stack of matrices: it contracts axes"
    ):
        fb.dot_general(jnp.ones((2, 6)), q, (((1,), (1,)), ((), ())), backend="cpu")


def per_layer(scheme, w):
    """The weights of each layer quantized on their own, as a plan quantizes what a loop takes apart."""
    return jax.vmap(lambda w: fb.quantize(w, scheme))(w)


TENSOR = fb.Scheme(fb.scheme("int8").format)
PAIRS = dataclasses.replace(TENSOR, tile={-3: 2, -2: 1})
MIXED = dataclasses.replace(TENSOR, tile={-4: 1, -2: 1})


@pytest.mark.slow
@pytest.mark.parametrize("is_pair", [False, True], ids=["x", "int8 x"])
def test_scales_that_some_matrices_of_a_stack_share(is_pair):
    """One scale for each layer, or for two matrices: every leaf is read as it is, or the product is left to the reference."""
    experts, layers = jnp.asarray(activation(12, 80).reshape(2, 3, 8, 20)), jnp.asarray(activation(4, 80).reshape(4, 4, 20))
    cases = {
        "tensors of layers, experts": ("abk,abnk->abn", per_layer(TENSOR, experts)),
        "nvfp4 of layers, experts": ("abk,abnk->abn", per_layer("nvfp4", experts)),
        "tensors of layers as rows": ("mk,lnk->mln", per_layer(TENSOR, layers)),
        "nvfp4 of layers as rows": ("mk,lnk->mln", per_layer("nvfp4", layers)),
        "layers apart, experts together": ("abk,abnk->abn", fb.quantize(experts, MIXED)),
        "two and two layers": ("lk,lnk->ln", fb.quantize(layers, PAIRS)),
    }
    for name, (spec, q) in cases.items():
        x = jnp.asarray(activation(7, 20 * 6))[: {"m": 5, "l": 4, "a": 1}[spec[0]]]
        x = x.reshape(2, 3, 20) if spec[0] == "a" else x[:, :20]
        x = fb.quantize(x, "int8") if is_pair else x
        values = np.asarray(fb.dequantize(x) if is_pair else x, np.float64)
        expected = np.einsum(spec, values, np.asarray(fb.dequantize(q), np.float64))
        np.testing.assert_allclose(fb.einsum(spec, x, q), expected, atol=1e-4, err_msg=name)
    groups = fb.quantize(layers.mT, dataclasses.replace(TENSOR, tile={-3: 2, -1: 1}))
    rows, sizes = jnp.asarray(activation(4, 20)), jnp.array([1, 0, 2, 1])
    expected = np.einsum("mk,mkn->mn", rows, np.asarray(fb.dequantize(groups))[[0, 2, 2, 3]])
    np.testing.assert_allclose(fb.ragged_dot(rows, groups, sizes), expected, atol=1e-4)
    numbers = (((1,), (2,)), ((0,), (0,)))
    with pytest.raises(fb.UnsupportedError, match="2 matrices of a batch axis share their scales"):
        fb.dot_general(rows, cases["two and two layers"][1], numbers, backend="cpu")
    with pytest.raises(fb.UnsupportedError, match=r"its tensor scale varies along axes \(0,\), which are not batch axes"):
        fb.dot_general(rows, cases["nvfp4 of layers as rows"][1], (((1,), (2,)), ((), ())), backend="cpu")


@pytest.mark.slow
def test_derivatives_and_vmap():
    q = weight("nf4", -1)
    x = jnp.asarray(activation(3, COLS))
    w = laws.numpy_dequantize(q)

    def product(x, q=q):
        return fb.dot_general(x, q, contracting(1), backend="cpu")

    close = lambda got, expected: np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3)  # noqa: E731
    close(jax.grad(lambda x: (product(x) * 2).sum())(x), np.broadcast_to(2 * w.sum(0), x.shape))
    close(jax.jvp(product, (x,), (x,))[1], x @ w.T)
    close(jax.vmap(jax.grad(lambda row: product(row[None]).sum()))(x), np.broadcast_to(w.sum(0), x.shape))
    close(jax.vmap(product)(jnp.stack([x, 2 * x]))[1], 2 * x @ w.T)
    assert jax.vmap(product)(jnp.zeros((0, *x.shape), x.dtype)).shape == (0, x.shape[0], w.shape[0])
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), q)
    close(jax.vmap(product, (None, 0))(x, stacked)[1], x @ w.T)
    close(jax.lax.scan(lambda c, layer: (c, product(x, layer)), 0, stacked)[1][1], x @ w.T)
    by_scale = jax.grad(lambda q: product(x, q).sum(), allow_int=True)(q).scale
    close(by_scale, jax.grad(lambda q: (x @ fb.dequantize(q).T).sum(), allow_int=True)(q).scale)


def test_a_transposed_weight_is_read_where_it_lies():
    q, x = weight("nf4", -1), jnp.asarray(activation(3, COLS))

    def product(x, q):
        return fb.dot_general(x, q.T, contracting(0), backend="cpu")

    compiled = jax.jit(product).lower(x, q).compile().as_text()
    assert "custom-call" in compiled
    assert " transpose(" not in compiled
    np.testing.assert_array_equal(product(x, q), fb.dot_general(x, q, contracting(1), backend="cpu"))
    unchanged = jax.make_jaxpr(jax.jit(fb.transparent(lambda x, w: x @ w.T)))(x, q).jaxpr.eqns[0].params["jaxpr"].jaxpr
    (piece,) = (eqn for eqn in unchanged.eqns if eqn.primitive.name in ("jit", "pjit"))
    assert piece.invars[1] is unchanged.invars[1]  # the codes as they are held


def test_nan_and_zero_tiles():
    w = np.array(activation(4, 128))
    w[1, 5], w[2] = np.nan, 0
    q = fb.quantize(jnp.asarray(w), "nf4")
    y = np.asarray(product(activation(2, 128), q, 1))
    assert np.isnan(y[:, 1]).all() and not np.isnan(np.delete(y, 1, 1)).any()
    assert (y[:, 2] == 0).all()
    codes = jnp.asarray(weight("fp8", -1).codes).at[3, 7].set(0x7F)
    q = dataclasses.replace(weight("fp8", -1), codes=codes)
    for rows in (1, 9):
        y = np.asarray(product(activation(rows, COLS), q, 1))
        assert np.isnan(y[:, 3]).all() and not np.isnan(np.delete(y, 3, 1)).any()


def test_what_explain_says_with_several_devices():
    q = weight("nf4", -2)
    lines = fb.explain(jnp.ones((2, ROWS)), q).splitlines()
    assert lines.pop(1).startswith("  reads: ")
    assert lines == [
        "float32[2,70] @ nf4[70,200]: reference (plain JAX, which writes the decoded weight to memory before it multiplies)",
        "  pallas_tpu (experimental): it runs on tpu, the device is cpu",
        "  triton (experimental): it runs on cuda through jax-triton, which is not installed",
        "  cpu: JAX has 8 CPU devices, and XLA cannot split its calls over them; name it for arrays that are not sharded",
    ]
    assert "nf4[70,200]: cpu (compiled for" in fb.explain(jnp.ones((2, ROWS)), q, backend="cpu")
    with pytest.raises(fb.QuantError, match="neither operand is a QArray"):
        fb.explain(jnp.ones((2, 3)), jnp.ones((3, 2)))


def test_without_the_extension(monkeypatch):
    absent = Extension(missing=f"its C++ extension is not built here (no module); {HOW_TO_BUILD}")
    monkeypatch.setattr("fewbit.kernels.qmatmul.cpu.backend.extension", lambda module: absent)
    q, x = weight("nf4", -1), jnp.asarray(activation(2, COLS))
    assert "reference" in fb.explain(x, q.T)
    assert "cpu: its C++ extension is not built here" in fb.explain(x, q.T)
    with pytest.raises(fb.UnsupportedError, match="install a C\\+\\+17 compiler"):
        fb.dot_general(x, q, contracting(1), backend="cpu")
    assert fb.dot_general(x, q, contracting(1)).shape == (2, ROWS)


ONE_DEVICE = """
import os, sys, hashlib
os.sched_setaffinity(0, list(sorted(os.sched_getaffinity(0)))[: int(sys.argv[1])])
import jax, jax.numpy as jnp, numpy as np, fewbit as fb
from fewbit import kvcache
rng = np.random.default_rng(0)
w = jnp.asarray(rng.normal(size=(600, 640)), jnp.float32)
digest = hashlib.sha256()
for scheme in ("nf4", "mxfp6"):
    q = fb.quantize(w, scheme)
    for m in (1, 40):
        x = jnp.asarray(rng.normal(size=(m, 640)), jnp.float32)
        digest.update(np.asarray(x @ q.T).tobytes())
        digest.update(np.asarray(jax.grad(lambda x: jnp.sin(x @ q.T).sum())(x)).tobytes())
experts = fb.quantize(w.reshape(4, 150, 640), "int8", axis=-1)
assert "fewbit_qmatmul" in jax.jit(fb.ragged_dot).lower(x[:, :150], experts, jnp.array([1, 0, 30, 2])).as_text()
digest.update(np.asarray(fb.ragged_dot(x[:, :150], experts, jnp.array([1, 0, 30, 2]))).tobytes())
x8, q8 = fb.quantize(x, "int8"), fb.quantize(w, "int8")
digest.update(np.asarray(x8 @ q8.T).tobytes())
assert fb.explain(x8, q8.T).split(":")[1][:5] == " cpu ", fb.explain(x8, q8.T)
policy = fb.Policy("int8", "int8")
assert "fewbit_integers" in jax.jit(lambda x: fb.dot_general(x, q8, (((1,), (1,)), ((), ())), policy=policy)).lower(x).as_text()
cache = kvcache.empty_quantized_cache(kvcache.kv_policy("int8"), layers=2, batch=1, heads=2, head_dim=16, max_length=1200)
for count in (1100, 1):
    k, v, queries = (jnp.asarray(rng.normal(size=(1, heads, count, 16)), jnp.float32) for heads in (2, 2, 4))
    cache = cache.written(1, k, v)
    read = jax.jit(lambda cache, queries: kvcache.attention(queries, cache.blocks(1, queries, queries)))
    assert "fewbit_attention" in read.lower(cache, queries).as_text()
    digest.update(np.asarray(read(cache, queries)).tobytes())
    cache = cache.advanced(count)
model = jax.jit(fb.transparent(lambda params, x: x @ params.T))
print("custom-call" in model.lower(q, x).compile().as_text(), fb.explain(x, q.T).split(":")[1][:5], digest.hexdigest())
"""


@pytest.mark.slow
def test_one_device_takes_it_and_threads_change_no_bit():
    def outcome(threads: int) -> str:
        command = [sys.executable, "-c", ONE_DEVICE, str(threads)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    one = outcome(1)
    assert one.startswith("True  cpu ")
    assert outcome(2) == one


ALGORITHMS = jax.lax.DotAlgorithmPreset
HONOURED = [
    *(None, "default", "high", "highest", "bfloat16_3x", ("highest", None), jax.lax.Precision.DEFAULT, "TF32_TF32_F32"),
    *(ALGORITHMS.BF16_BF16_BF16, ALGORITHMS.F32_F32_F32, jax.lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, jnp.float32)),
]
REFUSED = {
    "F64_F64_F64": "precision is 'F64_F64_F64', which sums in float64; the kernel sums in float32",
    jax.lax.DotAlgorithm(jnp.float32, jnp.float32, jnp.float64): "which sums in float64",
    "nonsense": "precision is 'nonsense', which jax.lax.dot_general does not accept",
    ("high", 3): "precision is 3, which jax.lax.dot_general does not accept",
}


def test_what_was_read_next_before_may_be_gone():
    """A thread without work prefetches what the next product read the last times, which may be freed memory by then."""
    x = jnp.ones((1, 1024))
    run = jax.jit(lambda x, q: x @ q.T)
    weights = [jnp.full((1024, 1024), float(i)) for i in range(3)]  # 0.5 MiB in int4: freed, it goes back to the system
    expected = [np.asarray(run(x, fb.quantize(w, "int4_g64"))) for w in weights]
    for _ in range(3):
        held = [fb.quantize(w, "int4_g64") for w in weights]
        for _ in range(3):
            for q, y in zip(held, expected, strict=True):
                np.testing.assert_array_equal(run(x, q), y)
        del held[1:], q
        for _ in range(3):
            np.testing.assert_array_equal(run(x, held[0]), expected[0])


@pytest.mark.finding(36)
def test_a_precision_is_honoured_where_the_sums_are_at_least_as_exact():
    """Every lax.Precision and every algorithm that sums in float32 or less: the product is the exact one, and the same bits."""
    q, x = weight("nf4", -1), activation(3, COLS)
    numbers = contracting(1)
    exact = None
    for precision in HONOURED:
        y = fb.dot_general(jnp.asarray(x), q, numbers, precision, backend="cpu")
        exact = y if exact is None else exact
        assert beyond_rounding(y, x, q, 1) < 1
        np.testing.assert_array_equal(y, exact)


@pytest.mark.finding(36)
def test_a_precision_that_asks_for_more_is_refused_with_the_reason():
    q, x = weight("int8", -1), jnp.asarray(activation(3, COLS))
    experts = fb.QArray(q.codes[None], q.scale[None], None, None, q.scheme, q.dtype)
    whole = fb.QArray(q.codes[:3], q.scale[:3], None, None, q.scheme, q.dtype)
    for precision, message in REFUSED.items():
        for product in (
            lambda p: fb.dot_general(x, q, contracting(1), p, backend="cpu"),
            lambda p: fb.dot_general(whole, q, contracting(1), p, backend="cpu"),
            lambda p: fb.ragged_dot(x, experts.swapaxes(1, 2), jnp.array([3]), p, backend="cpu"),
        ):
            with pytest.raises(fb.UnsupportedError, match=f"cpu: .*{message}"):
                product(precision)
    for y in (fb.einsum("bi,oi->bo", x, q, precision="highest"), fb.einsum("bi,oi->bo", x, q, precision="default")):
        assert y.shape == (3, ROWS)
    with pytest.raises(ValueError, match="Precision argument must be one of"):  # by JAX itself, whatever computes it
        fb.einsum("bi,oi->bo", x, q, precision="nonsense")


@pytest.mark.finding(36)
def test_the_element_type_of_the_result_is_honoured():
    q, x = weight("int8", -1), jnp.asarray(activation(3, COLS))
    wide = fb.dot_general(x, q, contracting(1), backend="cpu")
    for dtype in ("bfloat16", "float16"):
        y = fb.dot_general(x, q, contracting(1), preferred_element_type=dtype, backend="cpu")
        np.testing.assert_array_equal(y, wide.astype(dtype))  # sums in float32, rounded once
    with pytest.raises(fb.UnsupportedError, match="it multiplies float32 into int32"):
        fb.dot_general(x, q, contracting(1), preferred_element_type=jnp.int32, backend="cpu")


def test_one_zero_point_for_all_tiles():
    """A mean that serves every row, as the scheme of scales that are quantized has: read once for each tile, not beyond."""
    scheme = fb.Scheme(fb.FORMATS["int8"], {...: 1, -1: None}, zero_point="float32", calibration=CentredAbsMax())
    q = fb.quantize(jnp.asarray(activation(ROWS, COLS)), scheme)
    assert q.zero_point.shape == (1, 1)
    for axis in (0, 1):
        x = activation(3, q.shape[axis])
        assert beyond_rounding(product(x, q, axis), x, q, axis) < 1


@pytest.mark.parametrize("scheme", ["int8", "int4_g32"])
def test_products_of_codes_with_results_in_float64_are_those_of_the_reference(scheme):
    with jax.enable_x64(True):
        x, w = (
            fb.quantize(jnp.ones((4, 32), jnp.float64), "int8_g32"),
            fb.quantize(jnp.ones((32, 8), jnp.float64), scheme, axis=0),
        )
        y = x @ w
        assert y.dtype == jnp.float64
        np.testing.assert_allclose(y, np.asarray(fb.dequantize(x)) @ np.asarray(fb.dequantize(w)), rtol=1e-6)
