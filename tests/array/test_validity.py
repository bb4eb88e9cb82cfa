"""A QArray whose leaves do not fit its scheme is refused wherever it enters; one that fits computes what it stands for."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array import misfit
from fewbit.io import write
from fewbit.kernels.attention import Block, attention, seen_positions
from tests.conformance import array_laws as laws

SHAPE = (4, 64)


def example(name: str, shape: tuple[int, ...] = SHAPE) -> fb.QArray:
    return fb.quantize(jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32), name)


def replaced(name: str, **leaves: Callable[[fb.QArray], Any]) -> fb.QArray:
    q = example(name)
    return dataclasses.replace(q, **{leaf: make(q) for leaf, make in leaves.items()})


BAD = {
    "cut scale": (lambda: replaced("nf4", scale=lambda q: q.scale[:1]), r"scale has shape \(1, 1\), expected \(4, 1\)"),
    "empty scale": (lambda: replaced("int8", scale=lambda q: q.scale[:0]), r"scale has shape \(0, 1\), expected \(4, 1\)"),
    "scale of another rank": (lambda: replaced("int8", scale=lambda q: q.scale[0]), r"scale has shape \(1,\)"),
    "cast scale": (
        lambda: replaced("int8", scale=lambda q: q.scale.astype(jnp.bfloat16)),
        "scale is bfloat16, expected float32",
    ),
    "no scale": (lambda: replaced("int8", scale=lambda q: None), "scale is a NoneType, expected an array of float32"),
    "plain scale": (
        lambda: replaced("nf4_dq", scale=lambda q: jnp.ones((4, 1))),
        "expected a QArray, as scheme nf4_dq stores",
    ),
    "nested scale": (
        lambda: replaced("nf4_dq", scale=lambda q: dataclasses.replace(q.scale, codes=q.scale.codes[:2])),
        r"scale has shape \(2, 1\), expected \(4, 1\)",
    ),
    "cut zero point": (lambda: replaced("uint4", zero_point=lambda q: q.zero_point[:2]), r"zero_point has shape \(2, 1\)"),
    "no zero point": (
        lambda: replaced("uint4", zero_point=lambda q: None),
        "zero_point is missing, and scheme uint4 has one",
    ),
    "needless zero point": (
        lambda: replaced("int4", zero_point=lambda q: q.scale),
        "zero_point is there, and scheme int4 has none",
    ),
    "no tensor scale": (lambda: replaced("nvfp4", tensor_scale=lambda q: None), "tensor_scale is missing, and scheme nvfp4"),
    "cast tensor scale": (
        lambda: replaced("nvfp4", tensor_scale=lambda q: q.tensor_scale.astype(jnp.float16)),
        "tensor_scale is float16, expected float32",
    ),
    "slack": (
        lambda: replaced("int4", slack=lambda q: 2),
        "slack is 2, which 32 bytes of 4-bit codes along axis -1 cannot have",
    ),
    "negative slack": (lambda: replaced("int8", slack=lambda q: -1), "slack is -1"),
    "codes of another width": (
        lambda: replaced("int4_g32", scheme=lambda q: fb.scheme("int8_g32")),
        r"scale has shape \(4, 2\), expected \(4, 1\) for an array of shape \(4, 32\)",
    ),
    "codes of another dtype": (
        lambda: replaced("int8", codes=lambda q: q.codes.astype(jnp.int8)),
        "codes is int8, expected uint8",
    ),
    "cut leaves": (
        lambda: jax.tree.map(lambda a: a[:, :4], example("int4_g32", (4, 256))),
        "for an array of shape \\(4, 8\\)",
    ),
}

x = jnp.ones((2, 64))
USES = {
    "dequantize": fb.dequantize,
    "dot_general": lambda q: fb.dot_general(x, q, (((1,), (1,)), ((), ()))),
    "matmul": lambda q: x @ q,
    "einsum": lambda q: fb.einsum("bi,oi->bo", x, q),
    "take": lambda q: fb.take(q, jnp.array([0]), 0),
    "conv": lambda q: fb.conv_general_dilated(jnp.ones((1, 2, 5)), q, (1,), "SAME"),
    "ragged_dot": lambda q: fb.ragged_dot(x, q, jnp.array([1, 1])),
    "explain": lambda q: fb.explain(x, q),
    "transparent": lambda q: fb.transparent(lambda q, x: x @ q.T)(q, x),
}


@pytest.mark.finding(4)
@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said(name):
    make, message = BAD[name]
    for use in ("dequantize", "take", "dot_general", "matmul"):
        with pytest.raises(fb.QuantError, match=f"is not valid: .*{message}"):
            USES[use](make())


@pytest.mark.finding(4)
@pytest.mark.parametrize("use", USES)
def test_every_entry_refuses(use):
    bad = replaced("int8", scale=lambda q: q.scale[:2])
    with pytest.raises(fb.QuantError, match=r"scale has shape \(2, 1\), expected \(4, 1\)"):
        USES[use](bad)


@pytest.mark.finding(4)
def test_attention_and_files_refuse(tmp_path):
    k = fb.quantize(jnp.ones((1, 2, 3, 4)), "int8")
    block = Block(k, dataclasses.replace(k, scale=k.scale[:, :, :1]), seen_positions(0, 1))
    with pytest.raises(fb.QuantError, match=r"the QArray of values is not valid: scale has shape \(1, 2, 1, 1\)"):
        attention(jnp.ones((1, 2, 1, 4)), [block])
    with pytest.raises(fb.QuantError, match=r"tensor 'w' is not a valid QArray: scale has shape \(1, 1\)"):
        write(tmp_path / "out", {"w": replaced("int8", scale=lambda q: q.scale[:1])})


@pytest.mark.finding(4)
@pytest.mark.parametrize(
    "use",
    [fb.dequantize, lambda q: q.T, fb.transparent(lambda w: jnp.ones(32) @ w)],
    ids=["dequantize", "transpose", "product"],
)
@pytest.mark.parametrize("axis", [1, 2])
def test_vmap_over_another_axis_than_the_first_is_refused(use, axis):
    """The scheme's axes are counted from the last, and cannot know that one of them is gone."""
    q = fb.quantize(jnp.ones((32, 32, 32)), "int4_g32", axis=0)
    with pytest.raises(
        fb.QuantError, match=r"so does jax\.vmap with in_axes=0|a tile is given on axis -3, but the array has 2 axes"
    ):
        jax.vmap(use, in_axes=axis)(q)


def test_under_jit_vmap_and_scan_what_is_valid_stays_so():
    stacked = fb.quantize(jnp.asarray(np.random.default_rng(1).normal(size=(3, 4, 64)), jnp.float32), "int4_g32")
    dense = fb.dequantize(stacked)
    np.testing.assert_array_equal(jax.vmap(fb.dequantize)(stacked), dense)
    _, scanned = jax.lax.scan(lambda c, q: (c, fb.dequantize(q)), None, stacked)
    np.testing.assert_array_equal(scanned, dense)
    bad = dataclasses.replace(stacked, scale=stacked.scale[..., :1])
    with pytest.raises(fb.QuantError, match=r"scale has shape \(4, 1\), expected \(4, 2\)"):
        jax.vmap(fb.dequantize)(bad)
    with pytest.raises(fb.QuantError, match=r"expected \(3, 4, 2\)"):
        jax.eval_shape(fb.dequantize, bad)


@pytest.mark.finding(4)
@pytest.mark.parametrize("name", ["int4_g32", "int8", "nvfp4", "uint4", "nf4_dq"])
def test_a_slice_of_the_leaves_is_refused_or_is_a_slice(name):
    q = example(name, (4, 128))
    dense = np.asarray(fb.dequantize(q))
    for cut in (np.s_[:2], np.s_[:, :16], np.s_[1:3, :4]):
        part = jax.tree.map(lambda a, cut=cut: a[cut], q)
        if misfit(part) is None:
            got = np.asarray(fb.dequantize(part))
            assert got.shape == part.shape
            np.testing.assert_array_equal(got, laws.numpy_dequantize(part))
            if cut == np.s_[:2]:
                np.testing.assert_array_equal(got, dense[:2])
        else:
            with pytest.raises(fb.QuantError, match="is not valid"):
                fb.dequantize(part)
