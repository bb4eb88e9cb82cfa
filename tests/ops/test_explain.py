"""`fb.explain`: the bytes that a product reads."""

import jax.numpy as jnp

import fewbit as fb


def reads(lhs, rhs) -> str:
    (line,) = [line for line in fb.explain(lhs, rhs).splitlines() if line.startswith("  reads: ")]
    return line.removeprefix("  reads: ")


def test_bytes_are_those_in_memory():
    x, q = jnp.ones((2, 64)), fb.quantize(jnp.ones((64, 64)), "q4_1", axis=-2)
    assert q.nbytes == 64 * 64 // 2 + 2 * 64 * 2 * 2  # codes; scales and minimums in float16
    assert reads(x, q) == f"float32[2,64] of 512 bytes, q4_1[64,64] of {q.nbytes:,} bytes (16,384 in float32)"
    assert reads(q.T, x.T) == f"q4_1[64,64] of {q.nbytes:,} bytes (16,384 in float32), float32[64,2] of 512 bytes"
    lhs = fb.quantize(x, "int8")
    assert reads(lhs, q).startswith(f"int8[2,64] of {2 * 64 + lhs.scale.nbytes} bytes (512 in float32), q4_1")
