"""int8 activations by weights in blocks on CPUs: the bits of the reference, at every instruction set and number of rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.packing import Packing, paired
from fewbit.kernels.buffers import INTEGER_LEVELS as LEVELS
from fewbit.kernels.extension import extension
from fewbit.kernels.qmatmul.blocks import block_product
from fewbit.kernels.qmatmul.cpu.block_ffi import native_blocks
from fewbit.kernels.qmatmul.cpu.int8_ffi import native_integers
from tests.conformance import array_laws as laws
from tests.kernels.unfused import unfused

BUILT = extension("fewbit.kernels.qmatmul.cpu._int8_gemm")
pytestmark = pytest.mark.skipif(BUILT.missing is not None, reason=str(BUILT.missing))

HERE = LEVELS[: LEVELS.index(BUILT.isa) + 1] if BUILT.isa in LEVELS else LEVELS[:1]  # arm64 has one of its own
FUSED = HERE[1:]  # a product and a sum are rounded at once
GGML = Packing(interleave=paired(32))
LAST = (((1,), (1,)), ((), ()))
# Each has the width of codes of another case, with another size of blocks, zero points or a table.
LONG = dict.fromkeys(("uint8_g32", "ternary", "uint2_g32", "uint3_g32", "q5_0", "int7"), pytest.mark.long)
QUICK = ("uint4_g64", "q4_1", "nvfp4", "q5_1")
# Neither vectors nor rows of registers divide the shapes; the last block is short where the format allows it.
CASES = {
    "int4_g64": ("int4_g64", 21, 328, None),
    "uint4_g64": ("uint4_g64", 5, 200, None),
    "q4_1": ("q4_1", 67, 96, None),
    "q4_0 as ggml packs": ("q4_0", 18, 224, GGML),
    "mxfp4": ("mxfp4", 16, 1056, None),
    "nvfp4": ("nvfp4", 33, 112, None),
    "nvfp4_16x16": ("nvfp4_16x16", 33, 112, None),
    "q8_0": ("q8_0", 9, 160, None),
    "uint8_g32": ("uint8_g32", 17, 100, None),
    "binary": ("binary", 5, 100, None),
    "ternary": ("ternary", 19, 200, None),
    "tq2_0": ("tq2_0", 3, 512, None),
    "uint2_g32": ("uint2_g32", 20, 136, None),
    "int3_g64": ("int3_g64", 33, 200, None),
    "uint3_g32": ("uint3_g32", 17, 72, None),
    "q5_0": ("q5_0", 16, 224, None),
    "q5_1": ("q5_1", 37, 160, None),
    "int6_g32": ("int6_g32", 18, 360, None),
    "mxfp6": ("mxfp6", 35, 224, None),
    "uint7_g16": ("uint7_g16", 21, 168, None),
    "int7": ("int7", 4, 200, None),
    "iq4_nl": ("iq4_nl", 34, 96, None),
}


def weight(name: str, rows: int, length: int, packing: Packing | None, axis: int = -1) -> fb.QArray:
    """A stack of one matrix, [N, K] or for axis -2 [K, N], with random codes, every code among them."""
    scheme = fb.scheme(name)
    if packing is not None:
        scheme = dataclasses.replace(scheme, packing=packing)
    rng = np.random.default_rng(rows)
    shape = (1, rows, length) if axis == -1 else (1, length, rows)
    q = fb.quantize(jnp.asarray(rng.normal(0.1, 1, shape), jnp.float32), scheme, axis=axis, backend="reference")
    if q.slack or name in ("q8_0", "ternary", "tq2_0"):  # whose formats have fewer numbers than codes
        return q
    return dataclasses.replace(q, codes=jnp.asarray(rng.integers(0, 256, q.codes.shape, np.uint8)))


def activation(rows: int, length: int, tile: int | None) -> fb.QArray:
    x = np.random.default_rng(rows).normal(size=(1, rows, length)) * np.arange(1, rows + 1)[:, None]
    return fb.quantize(jnp.asarray(x, jnp.float32), "int8" if tile is None else f"int8_g{tile}", backend="reference")


@functools.partial(jax.jit, static_argnames="contracts_cols")
def at_every_level(x: fb.QArray, q: fb.QArray, *, contracts_cols: bool) -> dict[str, jax.Array]:
    """The product at each instruction set, all in one program."""
    return {isa: native_blocks(x, q, contracts_cols=contracts_cols, dtype=jnp.float32, isa=isa) for isa in HERE}


LAYOUTS = pytest.mark.parametrize("axis", [-1, -2], ids=["[N, K]", "[K, N]"])


@pytest.mark.slow_after(1)
@LAYOUTS
@pytest.mark.parametrize("case", [pytest.param(n, marks=[] if n in QUICK else LONG.get(n, pytest.mark.slow)) for n in CASES])
def test_the_bits_of_the_reference(case: str, axis: int):
    q = weight(*CASES[case], axis)
    for tile in (q.tiles[axis], None):
        check_bits(activation(11, q.shape[axis], tile), q, axis)


@pytest.mark.slow_after(2)
@pytest.mark.once
@LAYOUTS
@pytest.mark.parametrize(
    ("case", "tile"),
    [
        ("int4_g64", 16),
        ("q4_1", 64),
        ("nvfp4", 32),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("q4_0 as ggml packs", 64),
                ("mxfp4", 16),
                ("nvfp4_16x16", 64),
                ("q8_0", 16),
                ("uint8_g32", 64),
                ("ternary", 64),
                ("int3_g64", 32),
                ("q5_1", 16),
                ("int7", 32),
            )
        ),
    ],
)
def test_blocks_of_two_sizes(case: str, tile: int, axis: int):
    q = weight(*CASES[case], axis)
    check_bits(activation(11, q.shape[axis], tile), q, axis)


def check_bits(x: fb.QArray, q: fb.QArray, axis: int) -> None:
    """Checks the product by 11 rows (more than are decoded for at once), by 3 and by 33 against the reference at every instruction set."""
    contracts_cols = axis == -1
    expected = unfused(lambda x, q: block_product(x, q, contracts_cols=contracts_cols))(x, q)
    y = jax.tree.map(np.asarray, at_every_level(x, q, contracts_cols=contracts_cols))
    if BUILT.isa in LEVELS:
        np.testing.assert_array_equal(y["portable"], expected)
    for isa in FUSED:
        np.testing.assert_array_equal(y[isa], y[FUSED[0]], isa)
    # One rounding less for each block.
    values = laws.numpy_dequantize(q)
    size = np.abs(laws.numpy_dequantize(x)) @ np.abs(values.swapaxes(1, 2) if axis == -1 else values)
    for isa in HERE:
        assert np.all(np.abs(y[isa] - expected) <= 2.0**-20 * size), isa
    few = jax.tree.map(lambda leaf: leaf if leaf.shape[1] == 1 else np.asarray(leaf)[:, :3], x)
    for isa, found in at_every_level(few, q, contracts_cols=contracts_cols).items():
        np.testing.assert_array_equal(found, y[isa][:, :3])
    many = jax.tree.map(lambda leaf: jax.device_put(np.concatenate([leaf, leaf, leaf], axis=1)), x)  # so many take panels
    np.testing.assert_array_equal(
        native_blocks(many, q, contracts_cols=contracts_cols, dtype=jnp.float32), np.tile(y[HERE[-1]], (1, 3, 1))
    )


@pytest.mark.once
@pytest.mark.parametrize("name", ["q4_1", pytest.param("q5_1", marks=pytest.mark.slow)])
def test_both_layouts_have_the_same_bits(name: str):
    w = jnp.asarray(np.random.default_rng(4).normal(size=(2100, 96)), jnp.float32)  # wide enough for the widest chunks
    rows, columns = fb.quantize(w, name), fb.quantize(w.T, name, axis=-2)
    for count in (1, 30):
        x = activation(count, 96, 32)
        by_rows, by_columns = (
            at_every_level(x, q[None], contracts_cols=is_rows) for q, is_rows in ((rows, True), (columns, False))
        )
        for isa in HERE:
            np.testing.assert_array_equal(by_rows[isa], by_columns[isa], isa)


@LAYOUTS
@pytest.mark.parametrize("case", ["int4_g64", pytest.param("uint4_g64", marks=pytest.mark.slow), "q8_0"])
def test_the_bits_of_panels(case: str, axis: int):
    q, contracts_cols = weight(*CASES[case], axis), axis == -1
    for tile in (q.tiles[axis], None):
        x = activation(7, q.shape[axis], tile)
        for isa, found in at_every_level(x, q, contracts_cols=contracts_cols).items():
            panels = native_integers(x, q, contracts_cols=contracts_cols, dtype=jnp.float32, isa=isa)
            np.testing.assert_array_equal(found, panels, isa)


@pytest.mark.slow
@LAYOUTS
def test_extreme_codes_and_results_of_16_bits(axis: int):
    """-128 times the largest integers of every format: nothing saturates on the way."""
    contracts_cols = axis == -1
    for case in ("int4_g64", "mxfp4", "uint8_g32"):
        q = weight(*CASES[case], axis)
        q = dataclasses.replace(q, codes=jnp.full_like(q.codes, {"mxfp4": 0x77, "int4_g64": 0x88}.get(case, 0xFF)))
        x = activation(2, q.shape[axis], q.tiles[axis])
        x = dataclasses.replace(x, codes=jnp.full_like(x.codes, 0x80))
        expected = unfused(lambda x, q: block_product(x, q, contracts_cols=contracts_cols))(x, q)
        levels = at_every_level(x, q, contracts_cols=contracts_cols)
        for y in levels.values():
            np.testing.assert_allclose(y, expected, rtol=2.0**-20, atol=2.0**-20 * np.abs(expected).max())
        for dtype in (jnp.bfloat16, jnp.float16):
            np.testing.assert_array_equal(
                native_blocks(x, q, contracts_cols=contracts_cols, dtype=dtype),
                levels[HERE[-1]].astype(dtype),
            )


@pytest.mark.parametrize(
    ("name", "activations"),
    [
        ("q4_1", "int8_g32"),
        *(pytest.param(*p, marks=pytest.mark.slow) for p in (("nvfp4", "int8_g16"), ("int4_g64", "int8"))),
    ],
)
@LAYOUTS
def test_a_policy_takes_the_kernel(name: str, activations: str, axis: int):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=(n, 128)), jnp.float32) for n in (2, 24))
    numbers, policy = LAST, fb.Policy(name, activations)
    if axis == -2:
        w, numbers = w.T, (((1,), (0,)), ((), ()))
    product = jax.jit(lambda x, w: fb.dot_general(x, w, numbers, policy=policy, backend="cpu"))
    assert "fewbit_integer_blocks" in product.lower(x, w).as_text()
    expected = fb.dot_general(x, w, numbers, policy=policy, backend="reference")
    np.testing.assert_allclose(product(x, w), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.once
@pytest.mark.parametrize("name", ["nvfp4", pytest.param("q4_1", marks=pytest.mark.slow)])
def test_one_matrix_of_a_stack(name):
    rng = np.random.default_rng(2)
    q = fb.quantize(jnp.asarray(rng.normal(size=(3, 20, 64)), jnp.float32), name)
    if q.tensor_scale is not None:
        q = dataclasses.replace(q, tensor_scale=q.tensor_scale * jnp.arange(1.0, 4.0).reshape(3, 1, 1))
    x = activation(2, 64, q.tiles[2])
    for index, taken in ((0, 0), (2, 2), (-1, 0), (7, 2)):  # beyond the stack: the nearest
        one = jax.tree.map(lambda leaf: leaf[taken : taken + 1], q)  # noqa: B023
        expected = native_blocks(x, one, dtype=jnp.float32)
        np.testing.assert_array_equal(native_blocks(x, q, jnp.int32(index), dtype=jnp.float32), expected)


@pytest.mark.once
def test_a_batch_of_matrices_with_their_own_tensor_scales():
    rng = np.random.default_rng(1)
    stack = [fb.quantize(jnp.asarray(rng.normal(size=(1, 20, 64)) * s, jnp.float32), "nvfp4") for s in (1, 7)]
    q = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *stack)
    x = fb.quantize(jnp.asarray(rng.normal(size=(2, 3, 64)), jnp.float32), "int8_g16")
    y = native_blocks(x, q, dtype=jnp.float32)
    for b, one in enumerate(stack):
        alone = native_blocks(jax.tree.map(lambda leaf: leaf[b : b + 1], x), one, dtype=jnp.float32)  # noqa: B023
        np.testing.assert_array_equal(y[b : b + 1], alone)
