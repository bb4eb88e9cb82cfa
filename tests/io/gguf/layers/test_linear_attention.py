"""Heads of linear attention in llama.cpp's order, as rows and as blocks of columns, without quantizing again."""

import gguf
import numpy as np
import pytest

import fewbit as fb
from fewbit import QuantError
from fewbit.io.gguf.layers.linear_attention import PARTS, LinearHeads, linear_part, linear_tensors
from fewbit.io.gguf.stored import Stored
from tests.io.gguf.test_conversion import normal, values

CONFIG = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 32,
}
TILED, PLAIN = (LinearHeads.of(CONFIG, is_tiled=tiled) for tiled in (True, False))
HEADS = np.array([0, 3, 1, 4, 2, 5])
"""Which head of values is where in a file of Qwen3.5: head j shares head j mod 2 of keys, and 0, 1 and 2 share the first one."""
KEYS, VALUES = 12, 192


def tensors(part: str, value: object, heads: LinearHeads = TILED) -> tuple[Stored, ...]:
    return linear_tensors(part, value, heads, "the tensor", "TQ2_0")


def by_head(rows: np.ndarray) -> np.ndarray:
    """The rows of heads of values, in the order of the file."""
    return rows.reshape(6, -1, *rows.shape[1:])[HEADS].reshape(rows.shape)


@pytest.mark.parametrize("form", ["float", "Q4_0"])
def test_rows_of_values(form: str):
    weight, gate = normal(KEYS + VALUES, 64), normal(VALUES, 64, seed=1)
    for part, x, first in (("in_proj_qkv.weight", weight, KEYS), ("in_proj_z.weight", gate, 0)):
        value = x if form == "float" else fb.quantize(x, "q4_0")
        exact = x if form == "float" else np.asarray(fb.dequantize(value))
        (found,) = tensors(part, value)
        np.testing.assert_array_equal(values(found), np.concatenate([exact[:first], by_head(exact[first:])]))
        (same,) = tensors(part, value, PLAIN)
        np.testing.assert_array_equal(values(same), exact)


@pytest.mark.parametrize("form", ["float", "Q4_0", "MXFP4"])
def test_columns_of_the_output_projection(form: str):
    x = normal(8, VALUES)
    value = x if form == "float" else fb.quantize(x, form.lower())
    exact = x if form == "float" else np.asarray(fb.dequantize(value))
    (found,) = tensors("out_proj.weight", value)
    assert found.type_name == ("F32" if form == "float" else form)
    np.testing.assert_array_equal(values(found), by_head(exact.T).T)


def test_blocks_longer_than_a_head_stay_where_no_key_is_shared():
    x = normal(8, 6 * 32 * 4)
    wide = LinearHeads.of({**CONFIG, "linear_value_head_dim": 128}, is_tiled=True)
    q = fb.quantize(x, "tq2_0")
    with pytest.raises(
        QuantError, match="by heads of 128, which blocks of 256 do not divide; choose shorter blocks, or keep it"
    ):
        tensors("out_proj.weight", q, wide)
    own = LinearHeads.of({**CONFIG, "linear_value_head_dim": 128, "linear_num_key_heads": 6}, is_tiled=True)
    for heads in (own, LinearHeads.of({**CONFIG, "linear_value_head_dim": 128}, is_tiled=False)):
        np.testing.assert_array_equal(values(tensors("out_proj.weight", q, heads)[0]), np.asarray(fb.dequantize(q)))


def test_vectors_and_the_convolution_are_float32():
    A_log, dt = normal(6).astype(np.float16), normal(6, seed=1)
    np.testing.assert_array_equal(values(tensors("A_log", A_log)[0]).ravel(), -np.exp(A_log[HEADS].astype(np.float32)))
    np.testing.assert_array_equal(values(tensors("dt_bias", dt)[0]).ravel(), dt[HEADS])
    taps = normal(KEYS + VALUES, 1, 4)
    (found,) = tensors("conv1d.weight", taps)
    assert found.shape == (KEYS + VALUES, 4) and found.type_name == "F32"
    np.testing.assert_array_equal(values(found), np.concatenate([taps[:KEYS, 0], by_head(taps[KEYS:, 0])]))
    gain = normal(32)
    np.testing.assert_array_equal(values(tensors("norm.weight", gain)[0]).ravel(), gain)
    with pytest.raises(QuantError, match=r"llama\.cpp needs the tensor in float32, but it is Q4_0; leave it float"):
        tensors("norm.weight", fb.quantize(gain, "q4_0"))


def test_a_projection_by_heads_of_keys_is_separated():
    rows = np.arange(2 * (3 + 3 + 96 + 96), dtype=np.float32)[:, None] * np.ones((1, 32), np.float32)
    qkv, z = tensors("in_proj_qkvz.weight", rows, PLAIN)
    first = [*range(3), *range(198, 201), *range(3, 6), *range(201, 204), *range(6, 102), *range(204, 300)]
    assert values(qkv)[:, 0].astype(int).tolist() == first
    assert values(z)[:, 0].astype(int).tolist() == [*range(102, 198), *range(300, 396)]
    ba = normal(12, 32)
    np.testing.assert_array_equal(values(tensors("in_proj_ba.weight", ba, PLAIN)[0]), ba)


@pytest.mark.oracle
def test_names_are_those_of_the_gguf_package():
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == "qwen35")
    known = {name.replace("{bid}", "3") for name in (gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[number])}
    ours = {
        f"blk.3.{name}"
        for part, names in PARTS.items()
        if not part.startswith(("in_proj_qkvz", "in_proj_ba"))
        for name in names
    }
    assert {name.removesuffix(".weight").removesuffix(".bias") for name in ours} <= known
    assert linear_part("model.layers.3.linear_attn.A_log") == ("3", "A_log")
    assert linear_part("model.layers.3.linear_attn.in_proj.weight") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_key_heads": 4}, "4 linear_num_key_heads, which do not divide 6 heads of values"),
        ({"linear_key_head_dim": None}, "linear_key_head_dim None; expected a positive size"),
        ({"linear_value_head_dim": 0}, "linear_value_head_dim 0; expected a positive size"),
    ],
    ids=["heads", "missing", "zero"],
)
def test_sizes_that_do_not_fit(change: dict[str, object], message: str):
    with pytest.raises(QuantError, match=message):
        LinearHeads.of({**CONFIG, **change}, is_tiled=True)


def test_a_tensor_of_another_shape_than_the_heads():
    with pytest.raises(QuantError, match=r"the tensor has shape \(7, 64\), but config.json makes 204 rows"):
        tensors("in_proj_qkv.weight", normal(7, 64))
    with pytest.raises(QuantError, match=r"the tensor has 64 columns, but config\.json makes 192"):
        tensors("out_proj.weight", normal(8, 64))
