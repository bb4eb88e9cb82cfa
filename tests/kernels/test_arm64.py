"""The compiled kernels give on arm64 what they give here, where they are tested beside the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.kernels.attention import attention
from fewbit.kernels.extension import extension
from fewbit.kernels.qmatmul.cpu.block_ffi import native_blocks
from fewbit.kernels.qmatmul.cpu.ffi import native_product
from fewbit.kernels.qmatmul.cpu.int8_ffi import native_integers
from fewbit.kernels.quantize import dequantize, quantize
from tests.conformance import array_laws as laws
from tests.kernels import arm64
from tests.kernels.attention.cpu.test_backend import POLICIES, SHAPES, cache
from tests.kernels.attention.test_int8_queries import operands, rounding_of_weights, weights_of
from tests.kernels.qmatmul.cpu import test_block_ffi as blocks
from tests.kernels.qmatmul.cpu.test_backend import COLS, ROWS, activation, weight
from tests.kernels.quantize.cpu.test_backend import KINDS, hard
from tests.kvcache.formula import by_formula

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(arm64.missing() is not None, reason=str(arm64.missing())),
    *(
        pytest.mark.skipif(extension(f"fewbit.kernels.{name}").missing is not None, reason="the C++ extension is not built")
        for name in (
            "quantize.cpu._quantize",
            "qmatmul.cpu._dequant_gemm",
            "qmatmul.cpu._int8_gemm",
            "attention.cpu._attention",
        )
    ),
]

PROCESSORS = {"max": "i8mm", "neoverse-n1": "dotprod", "cortex-a53": "neon"}
"""The emulated processors, and the best instruction set of each for products of bytes."""


def replay(calls: arm64.Calls, source: str, folder, cpu: str = "max") -> list[np.ndarray]:
    """The results of calls of the extension of a C++ file, given again by that file on arm64."""
    path = arm64.KERNELS / source
    program = folder / "replay"
    if not program.exists():
        arm64.compiled(program, arm64.REPLAY / "replay.cc", path, define=f"REPLAYED=PyInit__{path.stem}")
    return calls.replayed(program, folder, cpu)


def as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def test_instruction_sets_for_products_of_bytes(monkeypatch, tmp_path):
    """The best of each processor, those that a call asks for, and those that FEWBIT_ISA allows; smmla is in the kernels."""
    source, order = tmp_path / "isa.cc", ("neon", "dotprod", "i8mm")
    source.write_text("""#include <cstdio>
#include "cpp/isa.h"
int main() { for (int level = -1; level < 4; ++level) std::puts(fewbit::NameOf(fewbit::ByteDotIsaOf(level))); }
""")
    program = arm64.compiled(tmp_path / "isa", source)
    for cpu, best in PROCESSORS.items():
        for limit, name in (("", "i8mm"), ("portable", "neon"), ("dotprod", "dotprod"), ("i8mm", "i8mm")):
            monkeypatch.setenv("FEWBIT_ISA", limit)
            levels = ("i8mm", "neon", "dotprod", "dotprod", "i8mm")
            expected = [min(level, name, best, key=order.index) for level in levels]
            assert arm64.emulated(program, cpu=cpu).split() == expected
    source.write_text('#include "qmatmul/cpu/int8/kernels.h"')
    assembly = arm64.compiled(tmp_path / "kernels.s", source, optimize="-S").read_text(errors="replace")
    assert "smmla" in assembly


def test_quantize_and_dequantize(monkeypatch, tmp_path):
    """The same bytes, but for the sign and the place of NaN."""
    with arm64.recorded(monkeypatch) as calls, jax.disable_jit():
        for place, scheme in enumerate(KINDS):
            axis = -1 - place % 2
            x = jnp.asarray(hard((36, 101) if axis == -1 else (101, 36), axis))
            for dtype in ("float32", "bfloat16") if place % 4 == 0 else ("float32",):
                dequantize(quantize(x.astype(dtype), scheme, axis=axis, backend="cpu"), backend="cpu")
    assert calls.count >= 2 * len(KINDS)
    for got, expected in zip(replay(calls, "quantize/cpu/quantize.cc", tmp_path), calls.results, strict=True):
        if expected.dtype != np.uint8:
            np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
            got, expected = (np.where(np.isnan(a), np.zeros_like(a), a) for a in (got, expected))
        np.testing.assert_array_equal(as_bytes(got), as_bytes(expected))


SCHEMES = (
    *("binary", "ternary", "int3", "int4_g64", "nf4", "nvfp4", "mxfp4", "q4_1", "q5_1", "uint4_g64", "mxfp6", "mxfp6_e3m2"),
    *("int7", "uint7", "int8", "q8_0", "uint8", "fp8", "fp8_e5m2"),
)


def test_products(monkeypatch, tmp_path):
    """Sums in another order: each of the K steps rounds by half a step at most, here and there."""
    weights = [weight(name, axis) for name in SCHEMES for axis in (-1, -2)]
    bounds = []
    with arm64.recorded(monkeypatch) as calls:
        for place, q in enumerate(weights):
            w = np.abs(laws.numpy_dequantize(q).astype(np.float64))
            if q.zero_point is not None:  # an offset and a scaled code may be much larger than what they leave
                w = w + 4 * w.max()
            for contracts_cols in (True, False):
                x = activation(1 + (place + contracts_cols) % 7, COLS if contracts_cols else ROWS)
                stack = jax.tree.map(lambda leaf: leaf[None], q)
                native_product(jnp.asarray(x[None]), stack, None, contracts_cols=contracts_cols, dtype=jnp.float32)
                bounds.append((x.shape[1] + 4) * 2.0**-23 * np.abs(x) @ (w.T if contracts_cols else w))
    results = replay(calls, "qmatmul/cpu/dequant_gemm.cc", tmp_path)
    for got, expected, bound in zip(results, calls.results, bounds, strict=True):
        assert np.all(np.abs(got[0] - expected[0]) <= bound + 1e-30)


def test_products_of_integers(monkeypatch, tmp_path):
    """The same bits with smmla, with sdot, and without either; for rows that no block of rows and no pair divides."""
    pairs = []
    for lhs, rhs in (("int8", "int8"), ("int8", "int4"), ("uint8", "uint4"), ("int8", "int4_g64")):
        for shape, axis in (((70, 300), -1), ((300, 70), -2)):
            pairs.append((weight(lhs, -1, (5 + len(pairs), 300)), weight(rhs, axis, shape), axis == -1))
    with arm64.recorded(monkeypatch) as calls:
        for x, w, contracts_cols in pairs:
            stacks = (jax.tree.map(lambda leaf: leaf[None], q) for q in (x, w))
            native_integers(*stacks, contracts_cols=contracts_cols, dtype=jnp.float32)
        for case, tile in (("int4_g64", 64), ("int4_g64", 32), ("q4_1", 32), ("q4_1", 64), ("q8_0", 32), ("int3_g64", 64)):
            for axis in (-1, -2):
                q = blocks.weight(*blocks.CASES[case], axis)
                x = blocks.activation(15, q.shape[axis], tile)  # so many rows take panels
                native_blocks(x, q, contracts_cols=axis == -1, dtype=jnp.float32)
    for cpu in PROCESSORS:
        for got, expected in zip(replay(calls, "qmatmul/cpu/int8_gemm.cc", tmp_path, cpu), calls.results, strict=True):
            np.testing.assert_array_equal(as_bytes(got), as_bytes(expected))


def test_attention(monkeypatch, tmp_path):
    """Sums in another order: here and there within the rounding of the formula."""
    bounds = []
    with arm64.recorded(monkeypatch) as calls, jax.disable_jit():
        for policy, shape in (*zip(POLICIES, SHAPES, strict=False), ("int8", "prompt"), ("int4", "long")):
            q, block = cache(policy, shape)
            attention(q, [block], backend="cpu")
            bounds.append(2 * by_formula(q, [block])[1])
        for shape in ("one token", "odd", "long", "prompt"):
            q, block = operands(shape)
            attention(q, [block], backend="cpu")
            # A weight between two integers goes either way.
            layer = block.of_layer()
            rounded = rounding_of_weights(weights_of(q, layer, None, 0.0), layer.values).max()
            bounds.append(2 * by_formula(fb.dequantize(q), [block])[1] + rounded)
    for got, expected, bound in zip(
        replay(calls, "attention/cpu/attention.cc", tmp_path), calls.results, bounds, strict=True
    ):
        assert np.all(np.abs(got - expected) <= bound)


@pytest.mark.long
@pytest.mark.parametrize("name", ["dequant_gemm_memory", "int8_gemm_memory"])
def test_random_products(name, tmp_path):
    """Beside plain loops in C++, which run on arm64, too."""
    program = arm64.compiled(tmp_path / name, arm64.Path(__file__).with_name(f"{name}.cc"), optimize="-O1")
    assert arm64.emulated(program).endswith(" 0 of them wrong\n")
