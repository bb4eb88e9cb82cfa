"""MaxText's KV cache contract: a stand-in for its `KVCache` and attention stores, reads and multiplies as they do."""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.frameworks.maxtext_kv import KVQuant, configure_kv_quant

B, S, T, H, G, D = 2, 3, 2, 4, 2, 8  # rows, tokens of the prompt, tokens after it, key heads, queries for each, head width
NAMES = ("cache_batch", "cache_sequence", "cache_heads", "cache_kv")
ORDER = (1, 2, 0, 3)  # of the axes in MaxText's caches
DIVISORS = {jnp.dtype(jnp.int8): 127.5, jnp.dtype(jnp.int4): 7.5}
KINDS = [("int8", "dkv"), ("int8", "heads_and_dkv"), ("int4", "dkv"), ("fp8", "heads_and_dkv"), ("fp8", "dkv")]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class QTensor:
    """What MaxText makes of a cache, with the fields of AQT's class that it fills in."""

    qvalue: Any
    scale: list
    scale_t: Any
    bias: list
    dequant_dtype: Any = dataclasses.field(metadata={"static": True})


def room(quant, length):
    """A cache's empty arrays: numbers, and scales of `_get_cache_scale_logical_shape` in bfloat16."""
    shared = {"dkv": (B, length, H, 1), "heads_and_dkv": (B, length, 1, 1)}[quant.axis_cfg]
    shapes = ((B, length, H, D), quant.dtype), (shared, jnp.bfloat16)
    return tuple(jnp.zeros([shape[i] for i in ORDER], dtype) for shape, dtype in shapes)


def written(quant, kv):
    return quant.quantize(jnp.transpose(kv, ORDER), tuple(NAMES[i] for i in ORDER))


def appended(quant, held, kv, at):
    return tuple(
        jax.lax.dynamic_update_index_in_dim(old, new, at, ORDER.index(1))
        for old, new in zip(held, written(quant, kv), strict=True)
    )


def read(held, dtype):
    numbers, scale = held
    divisor = DIVISORS.get(numbers.dtype)
    scale = scale.astype(jnp.float32) / jnp.float32(448) if divisor is None else scale / divisor
    tensor = QTensor(numbers, [scale], None, [], dtype)
    return jax.tree.map(lambda x: jnp.moveaxis(x, (0, 1, 2, 3), ORDER), tensor)


def weights_and_mixture(quant, query, weights, key, value, order):
    """MaxText's `qk_product` and `wv_product`, for both of its orders of the axes in a product."""
    qk, wv = quant.einsum_fn_with_rhs_qtensor(), quant.einsum_fn_with_rhs_qtensor_and_dequant()
    if quant.dtype == jnp.float8_e4m3fn:
        value.qvalue = value.qvalue.astype(jnp.bfloat16)
    if order == (0, 1, 2, 3):
        scores = qk("btkgd,bskd->bkgts", query.reshape(B, T, H, G, D), key)
        return scores, wv("bkgts,bskd->btkgd", weights, value).reshape(B, T, H * G, D)
    key, value = (jax.tree.map(lambda x: jnp.transpose(x, order), tensor) for tensor in (key, value))
    scores = qk("bkgtd,bksd->bkgts", jnp.transpose(query, order).reshape(B, H, G, T, D), key)
    mixed = wv("bkgts,bksd->bkgtd", weights, value).reshape(B, H * G, T, D)
    return scores, jnp.transpose(mixed, order)


def normal(*shape, seed):
    return jax.device_put(np.float32(np.random.default_rng(seed).standard_normal(shape)))


def decoded(tensor):
    return np.asarray(tensor.qvalue, np.float64) * np.asarray(tensor.scale[0], np.float64)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), pytest.param((0, 2, 1, 3), marks=pytest.mark.slow)], ids=["bskd", "bksd"])
@pytest.mark.parametrize(("name", "axis"), KINDS)
def test_attention_reads_what_the_cache_was_given(name, axis, order):
    quant = KVQuant(name, axis)
    keys, values = normal(B, S, H, D, seed=1), normal(B, S, H, D, seed=2)
    query, weights = normal(B, T, H * G, D, seed=3), jax.nn.softmax(normal(B, H, G, T, S, seed=4))

    @jax.jit
    def run(keys, values):
        held = [room(quant, S) for _ in "kv"]
        for i in range(S):  # token by token, as after the prompt
            held = [appended(quant, h, kv[:, i : i + 1], i) for h, kv in zip(held, (keys, values), strict=True)]
        key, value = (read(h, keys.dtype) for h in held)
        at_once = read(written(quant, keys), keys.dtype)
        return (key, value, at_once), weights_and_mixture(quant, query, weights, key, value, order)

    (key, value, at_once), (scores, mixed) = run(keys, values)
    assert jax.tree.all(jax.tree.map(np.array_equal, key, at_once))  # of a prompt at once the same numbers
    exact = np.einsum("btkgd,bskd->bkgts", query.reshape(B, T, H, G, D), decoded(key))
    np.testing.assert_allclose(scores, exact, rtol=1e-5, atol=1e-5)
    exact = np.einsum("bkgts,bskd->btkgd", weights, decoded(value)).reshape(B, T, H * G, D)
    np.testing.assert_allclose(mixed, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "axis"), KINDS)
def test_each_number_is_the_nearest_for_the_scale_that_is_read(name, axis):
    quant, kv = KVQuant(name, axis), normal(B, S, H, D, seed=5) * jnp.exp(normal(B, S, H, 1, seed=6))
    tensor = read(written(quant, kv), kv.dtype)
    step, all_numbers = np.asarray(tensor.scale[0], np.float64), quant.format.values()
    errors = np.abs(np.asarray(kv)[..., None] - all_numbers[np.isfinite(all_numbers)] * step[..., None])
    np.testing.assert_allclose(np.abs(decoded(tensor) - np.asarray(kv)), errors.min(-1), rtol=1e-4, atol=1e-6)
    numbers, scale = written(quant, kv)
    mirrored, same = written(quant, -kv)
    assert numbers.dtype == quant.dtype and scale.dtype == jnp.bfloat16
    assert np.array_equal(-numbers.astype(jnp.float32), mirrored.astype(jnp.float32)) and np.array_equal(scale, same)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_zeros_come_back_as_zeros_and_nan_as_nan(name):
    kv = normal(B, S, H, D, seed=7).at[0, 0].set(0.0).at[0, 1].set(1e-40).at[1, 2, 0, 3].set(jnp.nan).astype(jnp.bfloat16)
    found = decoded(read(written(KVQuant(name, "dkv"), kv), kv.dtype))
    assert np.all(found[0, :2] == 0)
    assert np.all(np.isnan(found[1, 2, 0])) and np.all(np.isfinite(found[1, 2, 1:]))


def test_nothing_as_large_as_the_cache_is_multiplied_by_its_scale():
    quant = KVQuant("int8", "dkv")
    key = read(written(quant, normal(B, S, H, D, seed=1).astype(jnp.bfloat16)), jnp.bfloat16)
    query = normal(B, T, H, G, D, seed=3).astype(jnp.bfloat16)
    trace = jax.make_jaxpr(lambda q, k: quant.einsum_fn_with_rhs_qtensor()("btkgd,bskd->bkgts", q, k))(query, key)
    assert [v.aval.shape for eqn in trace.eqns if eqn.primitive.name == "mul" for v in eqn.outvars] == [(B, H, G, T, S)]
    assert trace.out_avals[0].dtype == jnp.bfloat16


def test_a_prompt_attends_to_its_raw_keys():
    """Within the prompt MaxText hands the keys on as they were computed."""
    query, key = normal(B, T, H, G, D, seed=3), normal(B, S, H, D, seed=1)
    found = KVQuant().einsum_fn_with_rhs_qtensor()("btkgd,bskd->bkgts", query, key)
    np.testing.assert_allclose(found, np.einsum("btkgd,bskd->bkgts", query, key), rtol=1e-5, atol=1e-5)


@pytest.mark.oracle
def test_the_numbers_fit_aqts_own_tensor():
    """What AQT decodes is what our product sees, so that MaxText's flash kernels, which decode first, see it too."""
    aqt_tensor = pytest.importorskip("aqt.jax.v2.aqt_tensor")
    quant, kv = KVQuant("int8", "dkv"), normal(B, S, H, D, seed=1)
    numbers, scale = quant.quantize(kv, NAMES)
    tensor = aqt_tensor.QTensor(
        qvalue=numbers, scale=[scale / 127.5], scale_t=None, dequant_dtype=jnp.dtype(jnp.float32), bias=[]
    )
    query = normal(B, T, H, G, D, seed=3)
    found = quant.einsum_fn_with_rhs_qtensor()("btkgd,bskd->bkgts", query, tensor)
    with jax.numpy_dtype_promotion("standard"):
        values = tensor.dequant()
    np.testing.assert_allclose(found, np.einsum("btkgd,bskd->bkgts", query, values), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(values, kv, atol=0.51 * float(jnp.max(jnp.abs(kv))) / 127)


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "axis"), KINDS)
def test_maxtexts_own_cache_takes_it(name, axis):
    kvcache = pytest.importorskip("maxtext.inference.kvcache", reason="MaxText needs Python 3.12")
    nnx, quant, keys = pytest.importorskip("flax.nnx"), KVQuant(name, axis), normal(B, S, H, D, seed=1)
    settings = {"max_prefill_length": S, "max_target_length": 2 * S, "batch": B, "key_seq_len": S, "value_seq_len": S}
    settings |= {"key_heads": H, "value_heads": H, "key_head_size": D, "value_head_size": D, "dtype": jnp.float32}
    with nnx.use_eager_sharding(False), jax.numpy_dtype_promotion("standard"):
        cache = kvcache.KVCache(**settings, kv_quant=quant, model_mode="prefill", rngs=nnx.Rngs(0))
        cache(keys, keys, jnp.ones((B, S), jnp.int32), "prefill")
        (key, value, _), _ = cache(keys[:, :1], keys[:, :1], None, "autoregressive")
    mine = read(written(quant, keys), jnp.float32)
    np.testing.assert_array_equal(decoded(key), decoded(mine))
    np.testing.assert_array_equal(decoded(value), decoded(mine))


def test_the_configuration_names_the_quantizer(unchecked):
    config = types.SimpleNamespace(quantize_kvcache=True, kv_quant_dtype="fp8", kv_quant_axis="heads_and_dkv")
    quant = configure_kv_quant(config)
    assert quant == KVQuant("fp8", "heads_and_dkv")
    assert (quant.dtype, quant.axis_cfg) == (jnp.float8_e4m3fn, "heads_and_dkv")
    config.quantize_kvcache = False
    assert configure_kv_quant(config) is None
    with pytest.raises(fb.QuantError, match="unknown kv_quant_dtype 'int44'; did you mean 'int4'"):
        KVQuant("int44")
    with pytest.raises(fb.QuantError, match="unknown axis_cfg 'kv'; did you mean 'dkv'"):
        KVQuant("int8", "kv")
    with pytest.raises(fb.QuantError, match=r"for shape \(2, 3\); heads_and_dkv needs"):
        KVQuant("int8").quantize(jnp.ones((2, 3)), ("cache_sequence", "cache_kv"))
    two = QTensor(jnp.ones((1, 2), jnp.int8), [jnp.ones((1, 1))] * 2, None, [], jnp.float32)
    with pytest.raises(fb.QuantError, match="has 2 scales and 0 biases"):
        KVQuant("int8").einsum_fn_with_rhs_qtensor()("td,sd->ts", jnp.ones((3, 2)), two)
    torn = QTensor(jnp.ones((2, 2), jnp.int8), [jnp.ones((2, 2))], None, [], jnp.float32)
    with pytest.raises(fb.QuantError, match="keeps some axes"):
        KVQuant("int8").einsum_fn_with_rhs_qtensor()("td,sd->ts", jnp.ones((3, 2)), torn)
