"""Tensors under GGUF names: permuted, stacked and separated rows decode to the permuted, stacked and separated weights."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import QuantError, UnsupportedError
from fewbit.io.gguf.blocks import LAYOUTS, qarray_from_blocks
from fewbit.io.gguf.conversion import Conversion
from fewbit.io.gguf.metadata import architecture_fields, architecture_of
from fewbit.io.gguf.stored import Stored
from tests.io.gguf.test_blocks import random_blocks
from tests.io.gguf.test_metadata import config_of

LAYER = "model.layers.1."


def conversion(name: str, **changed) -> Conversion:
    config = config_of(name, **changed)
    architecture = architecture_of(config)
    return Conversion(architecture, config, gguf, architecture.is_permuted)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def values(tensor: Stored) -> np.ndarray:
    """What gguf decodes."""
    kind = gguf.GGMLQuantizationType[tensor.type_name]
    return gguf.dequantize(np.atleast_2d(tensor.data), kind).reshape(tensor.shape)


def quantized(name: str, *shape: int, seed: int = 0, unit: float = 1.0) -> fb.QArray:
    """A QArray of random blocks of a ggml type; of another seed, other blocks."""
    rows, halves = int(np.prod(shape[:-1])), np.array([0.5, -2.0, 0.125], np.float16)
    data = random_blocks(name, rows + seed, shape[-1] // LAYOUTS[name].length, halves)[seed:]
    if name == "MXFP4":
        data = np.where(np.arange(data.shape[1]) % 17 == 0, np.uint8(120), data)
    scale = np.asarray([unit], np.float32) if name == "NVFP4" else None
    return qarray_from_blocks(data, name, shape, scale)


def converted(name: str, tensors: dict[str, object], **changed) -> dict[str, Stored]:
    return dict(conversion(name, **changed).tensors(tensors.items()))


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head in llama.cpp's order: i, then i + half."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(rows.shape)


@pytest.mark.parametrize("form", ["float", "Q4_0", "Q5_1"])
def test_rows_of_q_and_k_are_permuted_without_quantizing_again(form):
    weights = {f"{LAYER}self_attn.{part}_proj.weight": normal(rows, 64) for part, rows in (("q", 64), ("k", 32), ("v", 32))}
    tensors: dict[str, object] = dict(weights)
    if form != "float":
        tensors = {name: quantized(form, *w.shape) for name, w in weights.items()}
    found = converted("llama", tensors)
    for part, heads in (("q", 4), ("k", 2), ("v", 0)):
        want = np.asarray(
            fb.dequantize(tensors[f"{LAYER}self_attn.{part}_proj.weight"])
            if form != "float"
            else weights[f"{LAYER}self_attn.{part}_proj.weight"]
        )
        got = values(found[f"blk.1.attn_{part}.weight"])
        np.testing.assert_array_equal(got, interleaved(want, heads) if heads else want)
    assert {t.type_name for t in found.values()} == {"F32" if form == "float" else form}


@pytest.mark.parametrize(("family", "heads"), [("mistral", 8), ("mixtral", 8), ("smollm3", 4), ("llama", 16)])
def test_heads_of_keys_that_config_json_omits_are_those_of_the_family(family, heads):
    config = config_of(family, num_attention_heads=16)
    del config["num_key_value_heads"]
    architecture = architecture_of(config)
    weight = normal(128, 64)
    found = Conversion(architecture, config, gguf, architecture.is_permuted).tensors(
        [(f"{LAYER}self_attn.k_proj.weight", weight)]
    )
    np.testing.assert_array_equal(values(dict(found)["blk.1.attn_k.weight"]), interleaved(weight, heads))
    assert architecture_fields(architecture, config)[f"{architecture.name}.attention.head_count_kv"] == heads


def test_biases_are_permuted_like_their_rows_and_float32():
    biases = {f"{LAYER}self_attn.{part}_proj.bias": normal(rows).astype(np.float16) for part, rows in (("q", 64), ("k", 32))}
    found = converted("llama", biases)
    for part, heads in (("q", 4), ("k", 2)):
        got = found[f"blk.1.attn_{part}.bias"]
        assert (got.type_name, got.shape) == ("F32", (16 * heads,))
        want = interleaved(biases[f"{LAYER}self_attn.{part}_proj.bias"].astype(np.float32), heads)
        np.testing.assert_array_equal(got.values(), want)


def test_other_families_keep_the_order_of_rows():
    w = normal(64, 64)
    found = converted("qwen2", {f"{LAYER}self_attn.q_proj.weight": w})
    np.testing.assert_array_equal(values(found["blk.1.attn_q.weight"]), w)


def test_gains_of_gemma_include_their_offset():
    names = {
        "model.norm.weight": "output_norm.weight",
        f"{LAYER}input_layernorm.weight": "blk.1.attn_norm.weight",
        f"{LAYER}post_attention_layernorm.weight": "blk.1.post_attention_norm.weight",
        f"{LAYER}pre_feedforward_layernorm.weight": "blk.1.ffn_norm.weight",
        f"{LAYER}post_feedforward_layernorm.weight": "blk.1.post_ffw_norm.weight",
        f"{LAYER}self_attn.q_norm.weight": "blk.1.attn_q_norm.weight",
    }
    gains = {name: normal(32, seed=i).astype(jnp.bfloat16) for i, name in enumerate(names)}
    found = converted("gemma3", gains)
    assert set(found) == set(names.values())
    for name, target in names.items():
        np.testing.assert_array_equal(found[target].values(), gains[name].astype(np.float32) + 1)
    other = converted("llama", {"model.norm.weight": gains["model.norm.weight"]})
    np.testing.assert_array_equal(other["output_norm.weight"].values(), gains["model.norm.weight"].astype(np.float32))


@pytest.mark.parametrize("form", ["float", "Q4_0"])
def test_the_projection_of_latents_has_two_parts(form):
    """That of values keeps its blocks; that of keys is transposed, so it is decoded. Neither number changes."""
    name = f"{LAYER}self_attn.kv_b_proj.weight"
    weight = normal(4 * 40, 32) if form == "float" else quantized(form, 4 * 40, 32)
    found = converted("deepseek-v3", {name: weight})
    keys, values_ = found["blk.1.attn_k_b.weight"], found["blk.1.attn_v_b.weight"]
    assert (keys.type_name, values_.type_name) == ("F32", "F32" if form == "float" else form)
    numbers = weight if isinstance(weight, np.ndarray) else np.asarray(fb.dequantize(weight, jnp.float32))
    by_head = numbers.reshape(4, 40, 32)
    np.testing.assert_array_equal(keys.values(), by_head[:, :16].swapaxes(1, 2))
    np.testing.assert_array_equal(values(values_), by_head[:, 16:])


def test_corrections_of_routers_have_their_name():
    found = converted("deepseek-v3", {f"{LAYER}mlp.gate.e_score_correction_bias": normal(8)})
    assert list(found) == ["blk.1.exp_probs_b.bias"]


def expert_names(block: str, parts: tuple[str, str, str]) -> list[tuple[str, int, str]]:
    return [(f"{LAYER}{block}.experts.{e}.{part}.weight", e, part) for part in parts for e in (2, 0, 3, 1)]


@pytest.mark.parametrize("scheme", [None, "Q4_0"])
@pytest.mark.parametrize(
    ("family", "block", "parts"),
    [
        ("mixtral", "block_sparse_moe", ("w1", "w2", "w3")),
        ("qwen3-moe", "mlp", ("gate_proj", "down_proj", "up_proj")),
        ("deepseek-v2", "mlp", ("gate_proj", "down_proj", "up_proj")),
    ],
)
def test_experts_are_stacked_by_their_numbers(family, block, parts, scheme):
    """In any order of the file."""
    names = expert_names(block, parts)
    weights = {name: normal(6, 32, seed=i) for i, (name, _, _) in enumerate(names)}
    tensors = dict(weights)
    if scheme:
        tensors = {name: quantized(scheme, 6, 32, seed=i) for i, name in enumerate(weights)}
    found = converted(family, tensors)
    for part, target in zip(parts, ("gate", "down", "up"), strict=True):
        got = found[f"blk.1.ffn_{target}_exps.weight"]
        own = [next(n for n, e, p in names if (e, p) == (index, part)) for index in range(4)]
        want = np.stack([np.asarray(fb.dequantize(tensors[n])) if scheme else weights[n] for n in own])
        assert got.shape == (4, 6, 32)
        np.testing.assert_array_equal(values(got), want)


def test_fused_experts_are_separated_in_halves_or_in_turns():
    w = normal(4, 12, 32)
    for q in (w, quantized("Q8_0", 4, 12, 32)):
        want = np.asarray(fb.dequantize(q)) if q is not w else w
        found = converted("qwen3-moe", {f"{LAYER}mlp.experts.gate_up_proj": q, f"{LAYER}mlp.experts.down_proj": q})
        np.testing.assert_array_equal(values(found["blk.1.ffn_gate_exps.weight"]), want[:, :6])
        np.testing.assert_array_equal(values(found["blk.1.ffn_up_exps.weight"]), want[:, 6:])
        np.testing.assert_array_equal(values(found["blk.1.ffn_down_exps.weight"]), want)
    q = quantized("MXFP4", 4, 12, 32)
    want = np.asarray(fb.dequantize(q))
    for given in (want.swapaxes(1, 2), q.swapaxes(1, 2), q):  # [E, in, out], and QArrays in both orders
        found = converted("gpt-oss", {f"{LAYER}mlp.experts.gate_up_proj": given})
        np.testing.assert_array_equal(values(found["blk.1.ffn_gate_exps.weight"]), want[:, 0::2])
        np.testing.assert_array_equal(values(found["blk.1.ffn_up_exps.weight"]), want[:, 1::2])


def test_biases_of_gpt_oss_are_separated_too():
    b, d, sinks = normal(4, 12), normal(4, 6), normal(4)
    experts = f"{LAYER}mlp.experts."
    tensors = {f"{experts}gate_up_proj_bias": b, f"{experts}down_proj_bias": d, f"{LAYER}self_attn.sinks": sinks}
    found = converted("gpt-oss", tensors)
    np.testing.assert_array_equal(found["blk.1.ffn_gate_exps.bias"].values(), b[:, 0::2])
    np.testing.assert_array_equal(found["blk.1.ffn_up_exps.bias"].values(), b[:, 1::2])
    np.testing.assert_array_equal(found["blk.1.ffn_down_exps.bias"].values(), d)
    np.testing.assert_array_equal(found["blk.1.attn_sinks.weight"].values(), sinks)


def test_a_tied_head_and_derived_buffers_are_dropped():
    tensors = {"lm_head.weight": normal(300, 64), f"{LAYER}self_attn.rotary_emb.inv_freq": normal(8)}
    assert converted("llama", tensors, tie_word_embeddings=True) == {}
    assert list(converted("llama", {"lm_head.weight": normal(300, 64)})) == ["output.weight"]


def test_routers_are_float32_and_other_matrices_keep_their_type():
    w = normal(4, 64).astype(np.float16)
    found = converted("qwen2-moe", {f"{LAYER}mlp.gate.weight": w, f"{LAYER}mlp.shared_expert.up_proj.weight": w})
    assert {name: t.type_name for name, t in found.items()} == {
        "blk.1.ffn_gate_inp.weight": "F32",
        "blk.1.ffn_up_shexp.weight": "F16",
    }


def test_the_tensor_scale_of_nvfp4_is_one_for_each_expert():
    names = expert_names("mlp", ("up_proj", "up_proj", "up_proj"))[:4]
    experts = {name: quantized("NVFP4", 6, 64, seed=e, unit=1.5**e) for name, e, _ in names}
    got = converted("qwen3-moe", experts)["blk.1.ffn_up_exps.weight"]
    assert got.tensor_scale.tolist() == [1.5**e for e in range(4)]
    q = quantized("NVFP4", 4, 6, 64, unit=0.25)
    fused = converted("qwen3-moe", {f"{LAYER}mlp.experts.down_proj": q})["blk.1.ffn_down_exps.weight"]
    assert fused.tensor_scale.tolist() == [0.25] * 4


def test_a_tensor_scale_that_llama_cpp_ignores_is_refused():
    q = quantized("NVFP4", 64, 64, unit=0.25)
    assert "blk.1.attn_v.weight" in converted("llama", {f"{LAYER}self_attn.v_proj.weight": q}, num_key_value_heads=4)
    for family, name in (("gemma2", f"{LAYER}mlp.up_proj.weight"), ("llama", "model.embed_tokens.weight")):
        with pytest.raises(
            UnsupportedError, match=r"llama\.cpp ignores the tensor scale of NVFP4 in .* keep it float, or choose mxfp4"
        ):
            converted(family, {name: q})


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({f"{LAYER}mlp.other.weight": normal(4, 4)}, UnsupportedError, "has no GGUF name in architecture llama"),
        ({f"{LAYER}mlp.experts.0.other.weight": normal(4, 4)}, UnsupportedError, "has no GGUF name"),
        ({f"{LAYER}mlp.up_proj.weight": normal(4, 4).astype(np.uint16)}, QuantError, "has dtype uint16"),
        (
            {f"{LAYER}block_sparse_moe.experts.0.w1.weight": normal(4, 4)},
            QuantError,
            "needs 4 experts, the checkpoint has 1",
        ),
        ({"model.norm.weight": normal(64).astype(np.float64)}, QuantError, "in float32, but it is F64; leave it float"),
    ],
)
def test_what_has_no_place_is_refused(tensors, error, message):
    with pytest.raises(error, match=message):
        converted("mixtral", tensors)


def test_names_are_checked_before_any_tensor_is_read():
    conversion("gpt-oss").check_names([f"{LAYER}mlp.experts.gate_up_proj_bias", f"{LAYER}self_attn.sinks", "lm_head.weight"])
    with pytest.raises(QuantError, match=r"config\.json has 2 layers, the checkpoint 1 tensors"):
        conversion("llama").check_names(["model.norm.weight"])
    with pytest.raises(UnsupportedError, match=r"'visual\.patch\.weight' has no GGUF name"):
        conversion("llama").check_names(["model.norm.weight", "visual.patch.weight"])
