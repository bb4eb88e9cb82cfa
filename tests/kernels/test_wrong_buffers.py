"""A native call whose buffers do not fit each other gives an error that says which; `make test-sanitize` watches the memory.

Each call is first made as Python makes it, and then once for every way to cut one of its buffers, and with random changes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.formats import AbstractFormat
from fewbit.kernels.attention import QUERIES, Block
from fewbit.kernels.attention.cpu import backend as attention_cpu
from fewbit.kernels.attention.problem import AttentionProblem
from fewbit.kernels.extension import extension
from fewbit.kernels.qmatmul.cpu.block_ffi import native_blocks
from fewbit.kernels.qmatmul.cpu.ffi import native_product
from fewbit.kernels.qmatmul.cpu.int8_ffi import native_integers
from fewbit.kernels.quantize import CpuDequantizer, CpuQuantizer, Decoding, Quantization
from fewbit.kernels.quantize.cpu import backend as quantize_cpu
from tests.conformance import array_laws as laws

MODULES = ("qmatmul.cpu._dequant_gemm", "qmatmul.cpu._int8_gemm", "quantize.cpu._quantize", "attention.cpu._attention")
MISSING = [reason for name in MODULES if (reason := extension(f"fewbit.kernels.{name}").missing)]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=str(MISSING[:1]))


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a native function."""

    target: str
    results: Any
    buffers: tuple[jax.Array, ...]
    attributes: dict[str, Any]

    def run(self) -> list[np.ndarray]:
        made = jax.ffi.ffi_call(self.target, self.results)(*self.buffers, **self.attributes)
        return [np.asarray(y) for y in jax.tree.leaves(made)]

    def with_buffer(self, at: int, buffer: jax.Array) -> "Call":
        return dataclasses.replace(self, buffers=(*self.buffers[:at], buffer, *self.buffers[at + 1 :]))


def normal(*shape: int) -> jax.Array:
    return jax.device_put(np.float32(np.random.default_rng(len(shape)).normal(size=shape)))


def stack(scheme: str, shape: tuple[int, ...], axis: int = -1) -> fb.QArray:
    """Random codes and scales, without compiling what would make them."""
    q = jax.tree.map(jnp.asarray, laws.random_qarray(fb.scheme(scheme).along(axis, len(shape)), shape))

    def stored(leaf: Any, holder: Any) -> Any:
        return leaf if leaf is None or isinstance(holder, AbstractFormat) else leaf.astype(holder)

    return dataclasses.replace(
        q, scale=stored(q.scale, q.scheme.scale), zero_point=stored(q.zero_point, q.scheme.zero_holder)
    )


def product(scheme: str, axis: int = -1, picked: Any = None, sizes: Any = None) -> None:
    """A product of three matrices of 5 rows, or of groups of rows."""
    q = stack(scheme, (3, 20, 64), axis)
    if q.tensor_scale is not None:
        q = dataclasses.replace(q, tensor_scale=jnp.ones((3, 1, 1), jnp.float32))
    x = normal(3 if picked is None and sizes is None else 1, 5, 64 if axis == -1 else 20)
    native_product(x, q, picked, contracts_cols=axis == -1, dtype=jnp.float32, sizes=sizes)


def pairs(axis: int, sizes: Any = None) -> None:
    """Products of integers with zero points on both sides and tiles of 8 along the contraction, or of groups of rows."""
    count = 3 if sizes is None else 1
    x, q = stack("int8", (count, 5, 32)), stack("uint8_g8", (3, 9, 32) if axis == -1 else (3, 32, 9), axis)
    zero = jnp.ones((count, 5, 1), jnp.uint8)
    x = dataclasses.replace(x, zero_point=zero, scheme=dataclasses.replace(x.scheme, zero_point=fb.FORMATS["int8"]))
    native_integers(x, q, contracts_cols=axis == -1, dtype=jnp.float32, sizes=sizes)


def blocks(scheme: str, axis: int = -1, picked: Any = None, sizes: Any = None) -> None:
    """Products of integers with a weight in blocks of 32, or of groups of rows."""
    q = stack(scheme, (3, 9, 96) if axis == -1 else (3, 96, 9), axis)
    x = stack("int8_g32", (3 if picked is None and sizes is None else 1, 5, 96))
    native_blocks(x, q, picked, contracts_cols=axis == -1, dtype=jnp.float32, sizes=sizes)


def attention(scheme: str | None, *, has_int8_queries: bool = False) -> None:
    """One layer of two, two sequences, three heads of keys, with a window, sinks and a soft cap."""
    shape = (2, 2, 3, 7, 8)
    held = [normal(*shape) if scheme is None else stack(scheme, shape) for _ in range(2)]
    queries = normal(2, 6, 4, 8)
    if has_int8_queries:
        queries = fb.quantize(queries, QUERIES)
    seen = jnp.array([4, 5, 6, 7], jnp.int32)
    block = Block(*held, seen, jnp.int32(1), seen - 3)
    sinks = normal(6)
    attention_cpu.Cpu().run(AttentionProblem.of(queries, [block], sinks, 2.0), queries, [block], sinks)


def quantized(scheme: str) -> None:
    x = normal(12, 65)
    problem = Quantization(x.shape, "float32", fb.scheme(scheme).along(-1, 2))
    words = quantize_cpu._words(problem)
    if words is None:
        quantize_cpu._with_chosen_scales(CpuQuantizer(), problem, x, None, None, None, None)
    else:
        unit = jnp.float32(0.01) if problem.scheme.tensor_scale else None  # given, for a search makes calls of its own
        quantize_cpu._in_one_call(CpuQuantizer(), problem, words, x, None, unit)


def decoded(scheme: str) -> None:
    q = stack(scheme, (12, 64))
    CpuDequantizer().run(Decoding(q.shape, "float32", q.scheme, q.tiles), q)


CALLS = {
    "nf4": lambda: product("nf4"),
    "q4_1, [K, N]": lambda: product("q4_1", -2),
    "uint4": lambda: product("uint4_g32"),
    "nvfp4": lambda: product("nvfp4"),
    "one of a stack": lambda: product("int8", picked=jnp.array([1], jnp.int32)),
    "groups": lambda: product("mxfp8", -2, sizes=jnp.array([1, 0, 4], jnp.int32)),
    "pairs": lambda: pairs(-1),
    "pairs, [K, N]": lambda: pairs(-2),
    "pairs in groups": lambda: pairs(-2, jnp.array([1, 0, 4], jnp.int32)),
    "blocks, q4_1": lambda: blocks("q4_1"),
    "blocks, uint8": lambda: blocks("uint8_g32"),
    "blocks, q5_1, [K, N]": lambda: blocks("q5_1", -2),
    "blocks in groups": lambda: blocks("q4_1", -2, sizes=jnp.array([1, 0, 4], jnp.int32)),
    "blocks, one of a stack": lambda: blocks("q4_1", picked=jnp.array([1], jnp.int32)),
    "attention": lambda: attention(None),
    "attention, int4": lambda: attention("int4"),
    "attention, int8 queries": lambda: attention("int8_narrow", has_int8_queries=True),
    "quantize, uint3": lambda: quantized("uint3_g32"),
    "quantize, nvfp4": lambda: quantized("nvfp4"),
    "row magnitudes": lambda: quantize_cpu._row_magnitudes(CpuQuantizer(), normal(12, 65)),
    "encode, nf4": lambda: quantized("nf4_dq"),
    "decode, q5_1": lambda: decoded("q5_1"),
    "decode, mxfp6": lambda: decoded("mxfp6"),
    "decode, uint3": lambda: decoded("uint3_g32"),
}


@pytest.fixture
def call(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Call:
    """The native call that a use of ours makes."""
    made: list[Call] = []
    real = jax.ffi.ffi_call

    def recorded(target: str, results: Any, **how: Any) -> Any:
        def run(*buffers: jax.Array, **attributes: Any) -> Any:
            made.append(Call(target, results, buffers, attributes))
            return real(target, results, **how)(*buffers, **attributes)

        return run

    monkeypatch.setattr(jax.ffi, "ffi_call", recorded)
    CALLS[request.param]()
    monkeypatch.undo()
    (only,) = made
    return only


def fails(call: Call) -> str | None:
    """The error of a call; None where it is made."""
    try:
        call.run()
    except (jax.errors.JaxRuntimeError, ValueError, TypeError) as error:
        return str(error)
    return None


QUICK = ("nf4", "groups", "pairs", "attention, int4", "quantize, uint3", "decode, uint3")
each_call = pytest.mark.parametrize(
    "call", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CALLS], indirect=True
)


@pytest.mark.slow_after(1)
@pytest.mark.finding(4)
@each_call
def test_a_cut_buffer_is_refused(call: Call):
    call.run()
    names = ("qmatmul: ", "integers: ", "attention: ", "quantize: ", "encode: ", "row magnitudes: ", "dequantize: ")
    for at, buffer in enumerate(call.buffers):
        for axis in range(buffer.ndim):
            if buffer.size:  # of an optional one that is there, an empty one stands for none, so one element is left
                cut = jax.lax.slice_in_dim(buffer, 0, buffer.shape[axis] - 1, axis=axis)
                error = fails(call.with_buffer(at, cut))
                optional = not cut.size and call.target in (
                    "fewbit_encode",
                    "fewbit_quantize",
                    "fewbit_dequantize",
                    "fewbit_integers",
                    "fewbit_integer_blocks",
                    "fewbit_qmatmul",
                )
                is_free = call.target == "fewbit_row_magnitudes" and axis == buffer.ndim - 1  # rows may have any length
                assert error is not None or optional or is_free, (at, axis, buffer.shape)
                assert error is None or any(name in error for name in names), error
    for attribute, value in call.attributes.items():
        # What describes a float dtype that holds scales has no numbers that are read, and no order is codes in order.
        if isinstance(value, np.ndarray) and value.size and attribute not in ("order", "scale_numbers", "zero_numbers"):
            cut = dataclasses.replace(call, attributes=call.attributes | {attribute: value[:0]})
            assert fails(cut) is not None, attribute
    for at, result in enumerate(jax.tree.leaves(call.results)):
        for axis in range(len(result.shape)):
            leaves = list(jax.tree.leaves(call.results))
            shape = tuple(n + (a == axis) for a, n in enumerate(result.shape))
            leaves[at] = jax.ShapeDtypeStruct(shape, result.dtype)
            if result.size:  # an empty one is left out, and may be there
                longer = dataclasses.replace(call, results=leaves[0] if len(leaves) == 1 else tuple(leaves))
                assert fails(longer) is not None, (at, axis, shape)


@pytest.mark.finding(4)
@pytest.mark.parametrize(
    ("call", "at", "change", "message"),
    [
        ("nf4", 2, lambda a: a[:, :1], "qmatmul: rows of the scales is 1, expected 20"),
        ("nf4", 1, lambda a: a[:, :, :1], "qmatmul: columns of the codes is 1, expected 32"),
        ("uint4", 4, lambda a: a[:, :, :1], "qmatmul: columns of the zero points is 1, expected 2"),
        ("nvfp4", 6, lambda a: a[:2], "qmatmul: there must be no tensor scale, one, or one for each matrix"),
        ("groups", 9, lambda a: a - 1, "qmatmul: size of a group is -1, expected at least 0"),
        ("groups", 9, lambda a: a[:2], "qmatmul: number of groups is 2, expected 3"),
        ("pairs in groups", 6, lambda a: a - 1, "integers: size of a group is -1, expected at least 0"),
        ("blocks in groups", 10, lambda a: a[:2], "blocks of integers: number of groups is 2, expected 3"),
        ("pairs", 4, lambda a: a[:, :, :3], "integers: tiles of the scales of the codes is 3, expected 1 or 4"),
        ("attention, int4", 3, lambda a: a[:, :, :, :3], "attention: positions of the scales is 3, expected 7"),
        ("attention, int8 queries", 1, lambda a: a[:, :3], "attention: number of scales of the queries is 24, expected 48"),
        ("attention", 11, lambda a: a[:3], "attention: length of what each token sees is 3, expected 4"),
        ("decode, q5_1", 1, lambda a: a[:, :1], "dequantize: number of scales is 2, expected 24"),
    ],
    indirect=["call"],
)
def test_the_error_names_the_number(call: Call, at: int, change: Any, message: str):
    error = fails(call.with_buffer(at, change(call.buffers[at])))
    assert error is not None
    assert message in error


def changed(call: Call, rng: np.random.Generator) -> Call:
    """The call with a random change of a buffer's shape or dtype, of a number, or of a result's shape."""
    kind = rng.integers(4)
    if kind == 0:
        names = sorted(call.attributes)
        name = names[rng.integers(len(names))]
        value = np.asarray(call.attributes[name])
        odd = rng.choice([-(2**31), -2, -1, 0, 1, 2, 3, 5, 7, 9, 63, 255, 2**31 - 1])
        if value.ndim and value.size:
            value = value.copy()
            value.flat[rng.integers(value.size)] = odd
        elif not value.ndim:
            value = value.dtype.type(odd)
        fitting = bool(value) if value.dtype == np.bool_ else value
        return dataclasses.replace(call, attributes=call.attributes | {name: fitting})
    if kind == 1 and not isinstance(call.results, tuple):
        shape = tuple(int(max(0, n + rng.integers(-1, 2))) for n in call.results.shape)
        return dataclasses.replace(call, results=jax.ShapeDtypeStruct(shape, call.results.dtype))
    at = int(rng.integers(len(call.buffers)))
    buffer = call.buffers[at]
    if kind == 2:
        dtype = ("uint8", "float32", "float16", "int32")[rng.integers(4)]
        return call.with_buffer(at, jnp.zeros(buffer.shape, dtype))
    lengths = [int(max(0, n + rng.choice([-n, 1 - n, -1, 0, 0, 1]))) for n in buffer.shape]
    return call.with_buffer(at, jnp.asarray(np.resize(np.asarray(buffer), lengths)))


@pytest.mark.finding(4)
@pytest.mark.slow
@each_call
def test_random_changes_are_refused_or_computed(call: Call):
    """What is wrong gives an error; where a change leaves the call whole, it is computed. A sanitizer sees what else happens."""
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(20):
        other = changed(call, rng)
        if rng.integers(2):
            other = changed(other, rng)
        refused += fails(other) is not None
    assert refused >= 10
