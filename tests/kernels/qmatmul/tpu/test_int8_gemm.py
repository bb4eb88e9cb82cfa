"""The TPU kernel for two quantized operands: its values in interpret mode, its lowering for TPUs, and the bytes that it moves."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.kernels.qmatmul import PallasTPU, Problem
from fewbit.kernels.qmatmul.problem import Operand
from fewbit.kernels.qmatmul.tpu.blocks import Config, bytes_moved
from fewbit.kernels.qmatmul.tpu.int8_blocks import Pair
from fewbit.kernels.qmatmul.tpu.int8_gemm import PairedProduct, paired_stacks
from fewbit.kernels.qmatmul.tpu.kernel import blocks_of

LAST, FIRST = ((((1,), (1,)), ((), ())), (((1,), (0,)), ((), ())))


@dataclasses.dataclass(frozen=True)
class OnCpu(PallasTPU):
    """The backend in interpret mode as if it were made for CPUs; several blocks along each axis of what follows."""

    name: ClassVar[str] = "pallas_on_cpu"
    platform: ClassVar[str] = "cpu"
    pairs: Config = Config(m=8, codes=256, columns=128)
    interpret: bool = True


def quantized(scheme: str, shape: tuple[int, ...], axis: int = -1) -> fb.QArray:
    """Numbers off their centre, so that zero points differ from zero."""
    rng = np.random.default_rng(shape[0])
    return fb.quantize(jnp.asarray(rng.normal(0.2, 1, shape), jnp.float32), scheme, axis=axis)


# Schemes of both sides, which way the weight is stored, and the length of the contraction: whole bytes or not, tiles short at
# the end or not, blocks that reach beyond the end. Then whether the sums are exact to the end, in int32.
CASES = [
    ("int8", "int4", FIRST, 300, True),
    ("fp8", "fp8", LAST, 301, False),
    ("uint8", "uint8", FIRST, 300, True),
    ("int8", "int4_g64", LAST, 301, False),
    ("uint8_g128", "uint4", FIRST, 300, False),
]


@pytest.mark.parametrize(
    ("left", "right", "numbers", "k", "is_exact"), [CASES[0], *(pytest.param(*c, marks=pytest.mark.slow) for c in CASES[1:])]
)
def test_values(left: str, right: str, numbers: Any, k: int, is_exact: bool):
    """The bits of the reference where all sums are whole; else within the roundings of float32 sums."""
    x = quantized(left, (11, k))
    w = quantized(right, (150, k)) if numbers == LAST else quantized(right, (k, 150), -2)
    problem = Problem(Operand.of(x), Operand.of(w), numbers)
    backend = OnCpu()
    assert backend.unsupported(problem) is None
    y, expected = backend.run(problem, x, w), fb.dot_general(x, w, numbers, backend="reference")
    if is_exact:
        np.testing.assert_array_equal(y, expected)
        return
    wide = [np.abs(np.asarray(fb.dequantize(q), np.float64)) for q in (x, w)]
    size = wide[0] @ (wide[1].T if numbers == LAST else wide[1])
    assert (np.abs(np.asarray(y) - np.asarray(expected)) <= size * 2.0**-24 * 2 * (k + 3)).all()


@pytest.mark.slow
def test_the_packed_axis_that_is_not_contracted():
    """As in the gradient of x: the codes of a byte are neighbours in the result."""
    one = dataclasses.replace(fb.scheme("int4"), tile={})
    rng = np.random.default_rng(0)
    for axis, numbers in ((-1, FIRST), (-2, LAST)):
        w = fb.quantize(jnp.asarray(rng.normal(size=(150, 141)), jnp.float32), one, axis=axis)
        x = quantized("int8", (5, 150 if numbers == FIRST else 141))
        y = OnCpu().run(Problem(Operand.of(x), Operand.of(w), numbers), x, w)
        np.testing.assert_array_equal(y, fb.dot_general(x, w, numbers, backend="reference"))


@pytest.mark.slow
def test_vmap_and_stacks():
    x, w = quantized("fp8", (2, 3, 40)), quantized("fp8", (2, 5, 40))
    product = functools.partial(fb.dot_general, dimension_numbers=(((2,), (2,)), ((0,), (0,))), backend=OnCpu())
    y = jax.vmap(functools.partial(fb.dot_general, dimension_numbers=LAST, backend=OnCpu()))(x, w)
    expected = fb.dot_general(x, w, (((2,), (2,)), ((0,), (0,))), backend="reference")
    np.testing.assert_allclose(product(x, w), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_refusals(monkeypatch: pytest.MonkeyPatch):
    def refusal(left: str, right: str, **settings: Any) -> str | None:
        sides = (Operand((4, 256), "float32", fb.scheme(name).along(-1, 2)) for name in (left, right))
        return PallasTPU().unsupported(Problem(*sides, LAST, **settings))

    assert refusal("int8", "int4_g64") is None
    assert refusal("fp8", "fp8") is None
    assert refusal("int8", "nf4") == "nf4[4,256] does not have integer codes of at most 8 bits with integer zero points"
    two = refusal("fp8", "fp8_e5m2")
    assert two == "fp8[4,256] and fp8_e5m2[4,256] have different 8-bit float formats; both must have the same"
    assert refusal("fp8", "fp8", accumulator="bfloat16") == "it sums in float32, but accumulator='bfloat16' was requested"
    assert refusal("int8", "int8", accumulator="float32") == "it sums in int32, but accumulator='float32' was requested"
    bits = "the codes are int2; codes of 4 and 8 bits in order, low bits first, are supported"
    assert refusal("int8", "int2") == bits
    assert refusal("int8", "int8_g16") == "the block size along the contraction is 16; it must be at least 32"
    old = dataclasses.make_dataclass("Chip", [("device_kind", str)])
    for kind, without in (("TPU v4", True), ("TPU v5 lite", False)):
        monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
        monkeypatch.setattr(jax, "devices", lambda kind=kind: [old(kind)])
        reason = "the device is a TPU v4, on which Mosaic has no int8 or FP8 matmul" if without else None
        assert refusal("int8", "int8") == reason


# --- what a TPU would run ---

STORED = [
    ("int8", "int8", -2, (4096, 1024)),
    ("int8", "int4_g64", -1, (1024, 4096)),
    ("fp8", "fp8", -1, (1000, 600)),
    ("uint8", "uint4_g64", -2, (4096, 1000)),
]


def abstract(left: str, right: str, axis: int, shape: tuple[int, int]) -> tuple[fb.QArray, fb.QArray]:
    q = jax.eval_shape(lambda w: fb.quantize(w, right, axis=axis), jax.ShapeDtypeStruct((1, *shape), jnp.float32))
    x = jax.eval_shape(lambda x: fb.quantize(x, left), jax.ShapeDtypeStruct((1, 16, shape[axis]), jnp.float32))
    return x, q


@pytest.mark.newest
@pytest.mark.parametrize(("left", "right", "axis", "shape"), STORED)
def test_it_is_lowered_for_tpus_from_packed_bytes(left: str, right: str, axis: int, shape: tuple[int, int]):
    x, q = abstract(left, right, axis, shape)
    product = functools.partial(paired_stacks, contracts_last=axis == -1, result=jnp.bfloat16)
    text = jax.jit(product).trace(x, q).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1
    assert "tensor<{}x{}xui8>".format(*q.codes.shape[1:]) in text
    assert "{}x{}xf".format(*shape) not in text  # no array of the unpacked size
    assert "{}x{}xi".format(*shape) not in text


@pytest.mark.parametrize(("left", "right", "axis", "shape"), STORED[:2])
def test_bytes_moved_are_the_bytes_held(left: str, right: str, axis: int, shape: tuple[int, int]):
    x, q = abstract(left, right, axis, shape)
    pair = Pair.of(x, q, contracts_last=axis == -1, result=jnp.bfloat16)
    moved = bytes_moved(blocks_of(PairedProduct(pair), x, q), pair.grid)
    again, rows = pair.grid[1], x.shape[1]
    assert moved.pop("x") == x.codes.size * again
    assert moved.pop("x_scale") == 4 * rows
    assert moved.pop("y") == 2 * rows * (q.size // x.shape[2])
    assert sum(moved.values()) == q.nbytes


def test_a_policy_takes_it_where_a_program_is_compiled_for_tpus():
    x, w = jnp.ones((4, 256)), fb.quantize(jnp.ones((128, 256)), "int4_g64")
    policy = fb.Policy("int4_g64", "int8")
    traced = jax.jit(lambda x, w: fb.dot_general(x, w, LAST, policy=policy, backend="pallas_tpu")).trace(x, w)
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 1
