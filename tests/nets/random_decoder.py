"""Small decoders with random weights, and the formula of the network in float64 numpy to compare with."""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np

import fewbit as fb
from fewbit.models import (
    DecoderConfig,
    Experts,
    FullAttention,
    LatentAttention,
    LinearAttention,
    Mamba2,
    PerLayerInputs,
    SharedKeys,
    ShortConvolution,
    forward,
    params_from_paths,
    paths_of_params,
    shapes,
)
from fewbit.models.attention.rope_scaling import Linear, Proportional

SMALL = DecoderConfig(vocab=67, layers=3, width=24, heads=6, kv_heads=2, head_dim=8, hidden=40, context=32)
SMALL_GGUF = {
    "general.architecture": "llama",
    "llama.block_count": SMALL.layers,
    "llama.embedding_length": SMALL.width,
    "llama.feed_forward_length": SMALL.hidden,
    "llama.attention.head_count": SMALL.heads,
    "llama.attention.head_count_kv": SMALL.kv_heads,
    "llama.attention.key_length": SMALL.head_dim,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": SMALL.context,
}
"""The metadata of `SMALL` in a GGUF file, without a tokenizer."""
UNTIED = dataclasses.replace(SMALL, tied=False, rope="interleaved", rope_theta=500.0)
ONE_HEAD = DecoderConfig(
    vocab=11, layers=1, width=7, heads=1, kv_heads=1, head_dim=2, hidden=5, context=16, rope="interleaved"
)
CONFIGS = {"half-tied": SMALL, "interleaved-untied": UNTIED, "one-head": ONE_HEAD}
FEATURES = dataclasses.replace(
    SMALL,
    rope_scaling=Linear(2.0),
    rotary_dim=4,
    nope_layers=(1,),
    window=5,
    window_layers=(0, 1),
    window_rope_theta=50.0,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    qk_norm="head",
    norms="sandwich",
    norm_offset=1.0,
    sinks=True,
    activation="gelu_tanh",
    attention_scale=0.5,
    temperature_scale=0.3,
    temperature_length=4,
    attention_cap=2.0,
    logit_cap=9.0,
    embed_scale=3.0,
    residual_scale=0.7,
    logit_scale=0.8,
    experts=Experts(4, 2, 12, normalized=False, layers=(2,), shared_hidden=10),
)
OTHERS = dataclasses.replace(
    SMALL,
    norms="post",
    qk_norm="projection",
    fused=True,
    activation="clamped_swiglu",
    activation_limit=1.0,
    experts=Experts(3, 2, 12, bias=True, layout="interleaved", layers=(0, 1)),
)
LATENT = dataclasses.replace(
    SMALL,
    kv_heads=6,
    rope="interleaved",
    norm_eps=0.01,
    rotary_dim=2,
    qkv_bias=True,
    o_bias=True,
    attention_scale=0.5,
    experts=Experts(
        8, 3, 12, layers=(1, 2), scores="sigmoid", groups=4, active_groups=2, scale=1.5, shared_hidden=10, shared_gate=False
    ),
    latent=LatentAttention(rank=12, value_dim=6, query_rank=9),
)
LINEAR = dataclasses.replace(
    SMALL,
    layers=4,
    norm_eps=0.1,
    norm_offset=0.25,
    qk_norm="head",
    rotary_dim=4,
    attention_gate=True,
    linear=LinearAttention((0, 1, 3), key_heads=2, value_heads=4, key_dim=6, value_dim=5, kernel=3),
)
BY_KEY_HEAD = dataclasses.replace(LINEAR, linear=dataclasses.replace(LINEAR.linear, layout="by_key_head"))
MAMBA = dataclasses.replace(
    SMALL,
    layers=4,
    norm_eps=0.1,
    nope_layers=(2,),
    mamba=Mamba2((0, 1, 3), heads=4, head_dim=6, state_dim=5, groups=2, kernel=3, bias=True),
)
"""As Granite 4 has it."""
SHORT_CONV = dataclasses.replace(
    SMALL, layers=4, qk_norm="head", short_conv=ShortConvolution((0, 1, 3), channels=SMALL.width, kernel=3, bias=True)
)
"""As LFM2 has it."""
TWO_WIDTHS = dataclasses.replace(
    SMALL,
    rope_scaling=Proportional(pairs=3, factor=2.0),
    window=5,
    window_layers=(0, 2),
    window_rope_theta=50.0,
    full=FullAttention(kv_heads=3, head_dim=12, keys_are_values=True),
    layer_scale=True,
    norm_eps=0.01,
    qk_norm="head",
    value_norm=True,
    norms="sandwich",
    activation="gelu_tanh",
    attention_scale=0.3,
    experts=Experts(4, 2, 12, layers=(0, 1), beside_dense=True),
)
"""As Gemma 4 has it."""
SHARED_KEYS = dataclasses.replace(
    TWO_WIDTHS,
    layers=5,
    window_layers=(0, 2, 3),
    full=FullAttention(kv_heads=2, head_dim=12),
    experts=None,
    shared_keys=SharedKeys(2, hidden=44),
    per_layer=PerLayerInputs(vocab=67, width=10),
    embed_scale=3.0,
)
"""As the small ones of Gemma 4 have it."""
LEARNED_POSITIONS = dataclasses.replace(
    SMALL,
    kv_heads=6,
    norm_kind="layer",
    norm_bias=True,
    gated=False,
    activation="relu",
    nope_layers=(0, 1, 2),
    positions=SMALL.context + 2,
    position_offset=2,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
)
"""As OPT has it."""
BY_HEAD = dataclasses.replace(
    LEARNED_POSITIONS,
    kv_heads=2,
    tied=False,
    head_bias=True,
    norm_offset=0.25,
    activation="gelu",
    nope_layers=(),
    positions=0,
    position_offset=0,
    rotary_dim=4,
    fused=True,
    fused_by_head=True,
    parallel="two_norms",
)
"""As GPT-NeoX and the newer Falcon have it."""
PARALLEL = dataclasses.replace(
    SMALL, rope="interleaved", norm_kind="layer", parallel="one_norm", window=5, window_layers=(0, 2), nope_layers=(1,)
)
"""As Cohere 2 has it."""
SINGLE_BLOCKS = dataclasses.replace(
    SMALL,
    layers=5,
    norm_eps=0.1,
    nope_layers=(0, 1, 2, 3, 4),
    mlp_layers=(1, 3),
    gated=False,
    activation="relu2",
    mamba=Mamba2((0, 4), heads=4, head_dim=6, state_dim=5, groups=2, kernel=3),
    experts=Experts(4, 2, 12, layers=(3,), scores="sigmoid", shared_hidden=10, shared_gate=False, latent=16),
)
"""As Nemotron 3 has it."""
CORRECTED = dataclasses.replace(
    SMALL, qk_norm="rotated_head", experts=Experts(4, 2, 12, scores="corrected_softmax", correction_row=True)
)
"""The norms of Hunyuan, and the router of ERNIE 4.5."""
CHUNKS = dataclasses.replace(
    SMALL,
    layers=4,
    rope="interleaved",
    nope_layers=(3,),
    attention_gate=True,
    separate_gate=True,
    window=5,
    window_layers=(0, 1, 2),
    window_is_chunk=True,
    qk_norm="without_gain",
    temperature_scale=0.3,
    temperature_length=4,
    temperature_nope=True,
    experts=Experts(
        4,
        2,
        12,
        normalized=False,
        layers=(1, 3),
        scores="plain_sigmoid",
        scales_input=True,
        shared_hidden=10,
        shared_gate=False,
        layout="joined_in_out",
    ),
)
"""As Llama 4 has it, with the gate of Trinity."""
SUB_NORMS = dataclasses.replace(SMALL, sub_norms=True, activation="relu2", norm_eps=0.01)


def random_params(config: DecoderConfig, seed: int = 0) -> dict[str, Any]:
    """Weights of deviation `1 / sqrt(in)`, so that every layer matters, and gains around 1."""
    draw = np.random.default_rng(seed).normal
    flat = {
        path: draw(size=s) * s[-1] ** -0.5 if len(s) > 1 and not path.endswith("bias") else 1 + 0.3 * draw(size=s)
        for path, s in shapes(config).items()
    }
    # device_put, because jnp.asarray compiles a program for each shape.
    return params_from_paths({path: jax.device_put(x.astype(np.float32)) for path, x in flat.items()}, config)


def random_tokens(config: DecoderConfig, batch: int, length: int, seed: int = 0) -> jax.Array:
    """Token ids `[batch, length]`."""
    return jax.device_put(np.random.default_rng(seed).integers(config.vocab, size=(batch, length), dtype=np.int32))


@functools.partial(jax.jit, static_argnames="config")
def compiled_logits(params: dict[str, Any], tokens: jax.Array, config: DecoderConfig) -> jax.Array:
    """The logits of a decoder, whose weights may be quantized, by one program; without jit every operation is one."""
    return fb.transparent(lambda params: forward(params, tokens, config))(params)


def logits_float64(params: dict[str, Any], tokens: Any, config: DecoderConfig) -> np.ndarray:
    """The network token by token and head by head, written from its formulas."""
    w = {path: np.asarray(a, np.float64) for path, a in paths_of_params(params, config).items()}
    return np.stack([_sequence(w, row, config) for row in np.asarray(tokens)])


def _sequence(w: dict[str, np.ndarray], tokens: np.ndarray, c: DecoderConfig) -> np.ndarray:
    x = w["embed"][tokens] * c.embed_scale
    if c.positions:
        x = x + w["position_embed"][c.position_offset :][: len(tokens)]
    inputs, keys_values = _per_layer_inputs(w, tokens, x, c), {}
    for i in range(c.layers):
        layer = _unfused({path.split("/", 2)[2]: a for path, a in w.items() if path.startswith(f"layers/{i}/")}, c)
        normed, before = _of_stream(x, layer, "attn/norm", c), x
        if c.has_attention(i):
            y = _attention(normed, layer, i, c, keys_values)
            x = x + c.residual_scale * _normed(y, layer.get("attn/post_norm"), c)
        if c.parallel != "one_norm":
            normed = _of_stream(x if c.parallel == "none" else before, layer, "mlp/norm", c)
        if c.has_mlp(i):
            x = x + c.residual_scale * _normed(_mlp(x, normed, layer, i, c), layer.get("mlp/post_norm"), c)
        if c.per_layer is not None:
            y = _gated(x @ layer["per_layer/gate"].T, inputs[:, i], c) @ layer["per_layer/projection"].T
            x = x + c.residual_scale * _normed(y, layer["per_layer/post_norm"], c)
        x = x * layer.get("scale", 1.0)
    logits = _of_stream(x, w, "norm", c) @ w["embed" if c.tied else "head"].T
    logits = c.logit_scale * (logits + w.get("head_bias", 0.0))
    return c.logit_cap * np.tanh(logits / c.logit_cap) if c.logit_cap else logits


def _per_layer_inputs(w: dict[str, np.ndarray], tokens: np.ndarray, x: np.ndarray, c: DecoderConfig) -> np.ndarray:
    """What each layer gets of each token `[T, L, P]`."""
    if c.per_layer is None:
        return np.zeros(0)
    shape = (len(tokens), c.layers, c.per_layer.width)
    own = w["per_layer_embed"][tokens].reshape(shape) * np.sqrt(c.per_layer.width)
    projected = (x @ w["per_layer_projection"].T).reshape(shape) / np.sqrt(c.width)
    return (np.stack([_normed(row, w["per_layer_norm"], c) for row in projected]) + own) / np.sqrt(2)


def _of_stream(x: np.ndarray, w: dict[str, np.ndarray], name: str, c: DecoderConfig) -> np.ndarray:
    """The norm of the residual stream."""
    if c.norm_kind == "layer":
        x = x - x.mean(axis=1, keepdims=True)
    return _normed(x, w.get(name), c) + w.get(f"{name}_bias", 0.0)


def _normed(x: np.ndarray, gain: np.ndarray | None, c: DecoderConfig) -> np.ndarray:
    if gain is None:
        return x
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + c.norm_eps) * (gain + c.norm_offset)


def _unfused(layer: dict[str, np.ndarray], c: DecoderConfig) -> dict[str, np.ndarray]:
    """The parameters of a layer with a matrix for each projection."""
    found = dict(layer)
    if "attn/q+k+v" in layer and c.fused_by_head:
        for ending in ("", "_bias"):
            of_heads = np.split(layer[f"attn/q+k+v{ending}"], c.kv_heads)
            parts = [np.split(rows, [c.group * c.head_dim, (c.group + 1) * c.head_dim]) for rows in of_heads]
            found |= {f"attn/{name}{ending}": np.concatenate([p[i] for p in parts]) for i, name in enumerate("qkv")}
    elif "attn/q+k+v" in layer:
        ends = np.cumsum([c.heads * c.head_dim, c.kv_heads * c.head_dim])
        found |= dict(zip(("attn/q", "attn/k", "attn/v"), np.split(layer["attn/q+k+v"], ends), strict=True))
    if "mlp/gate+up" in layer:
        found |= dict(zip(("mlp/gate", "mlp/up"), np.split(layer["mlp/gate+up"], 2), strict=True))
    return found


def _attention(
    y: np.ndarray, layer: dict[str, np.ndarray], i: int, c: DecoderConfig, keys_values: dict[int, dict[str, np.ndarray]]
) -> np.ndarray:
    """Attention; `keys_values` has those of the last layer of each kind."""
    kind, c = c.kind_of(i), c.kinds[c.kind_of(i)]
    if (part := c.recurrent_of(i)) is not None:
        recurrent = {LinearAttention: _linear_attention, Mamba2: _state_space, ShortConvolution: _short_convolution}
        return recurrent[type(part)](y, layer, c)
    if c.latent is not None:
        mixed = np.concatenate([_latent_head(y, layer, h, i, c) for h in range(c.heads)], axis=1)
        return mixed @ layer["attn/o"].T + layer.get("attn/o_bias", 0.0)
    flat = {
        name: y @ layer[f"attn/{name}"].T + layer.get(f"attn/{name}_bias", 0.0)
        for name in ("q", "k", "v")
        if f"attn/{name}" in layer
    }
    if "k" in flat:
        keys_values[kind] = {"k": flat["k"], "v": flat.get("v", flat["k"]), "norm": layer.get("attn/k_norm", np.ones(0))}
    flat |= keys_values[kind]
    layer = layer | {"attn/k_norm": flat["norm"]}
    gate = y @ layer["attn/gate"].T if c.separate_gate else np.zeros(0)
    if c.attention_gate and not c.separate_gate:
        flat["q"], gate = (x.reshape(len(y), -1) for x in np.split(flat["q"].reshape(len(y), c.heads, -1), 2, axis=2))
    if c.qk_norm == "projection":
        flat |= {name: _normed(flat[name], layer[f"attn/{name}_norm"], c) for name in ("q", "k")}
    mixed = np.concatenate([_head(flat, layer, h, i, c) for h in range(c.heads)], axis=1)
    mixed = _normed(mixed, layer.get("attn/sub_norm"), c)
    if c.attention_gate:
        mixed = mixed / (1 + np.exp(-gate))
    return mixed @ layer["attn/o"].T + layer.get("attn/o_bias", 0.0)


def _linear_attention(y: np.ndarray, layer: dict[str, np.ndarray], c: DecoderConfig) -> np.ndarray:
    """Linear attention, token by token, with a state for each head of values."""
    part, T = c.linear, len(y)
    assert part is not None
    N, M, n, m = part.key_heads, part.value_heads, part.key_dim, part.value_dim
    if part.layout == "by_key_head":
        by_head = (y @ layer["attn/qkvz"].T).reshape(T, N, -1)
        parts = np.split(by_head, np.cumsum([n, n, M // N * m]), axis=2)
        q, k, v, z = (x.reshape(T, -1) for x in parts)
        qkv = np.concatenate([q, k, v], axis=1)
        b, a = (x.reshape(T, M) for x in np.split((y @ layer["attn/ba"].T).reshape(T, N, -1), 2, axis=2))
    else:
        qkv, z, b, a = (y @ layer[f"attn/{name}"].T for name in ("qkv", "z", "beta", "alpha"))
    taps = layer["attn/conv1d"][:, 0]
    padded = np.concatenate([np.zeros((part.kernel - 1, part.channels)), qkv])
    qkv = sum(padded[i : i + T] * taps[:, i] for i in range(part.kernel))
    qkv = qkv / (1 + np.exp(-qkv))
    q, k, v = np.split(qkv, [N * n, 2 * N * n], axis=1)
    q, k = (x.reshape(T, N, n) / np.sqrt((x.reshape(T, N, n) ** 2).sum(axis=2, keepdims=True) + 1e-6) for x in (q, k))
    v, z, out = v.reshape(T, M, m), z.reshape(T, M, m), np.zeros((T, M, m))
    for head in range(M):
        state, shared = np.zeros((n, m)), head * N // M
        for t in range(T):
            decay = np.exp(layer["attn/A_log"][head]) * np.logaddexp(0, a[t, head] + layer["attn/dt_bias"][head])
            state = state * np.exp(-decay)
            error = (v[t, head] - k[t, shared] @ state) / (1 + np.exp(-b[t, head]))
            state = state + np.outer(k[t, shared], error)
            out[t, head] = q[t, shared] @ state / np.sqrt(n)
    normed = out / np.sqrt((out**2).mean(axis=2, keepdims=True) + c.norm_eps) * layer["attn/out_norm"]
    return (normed * z / (1 + np.exp(-z))).reshape(T, -1) @ layer["attn/out"].T


def _state_space(y: np.ndarray, layer: dict[str, np.ndarray], c: DecoderConfig) -> np.ndarray:
    """A state space layer of Mamba-2, token by token, with a state for each head."""
    part, T = c.mamba, len(y)
    assert part is not None
    M, N, n, width = part.heads, part.groups, part.state_dim, part.width
    projected = y @ layer["attn/in"].T + layer.get("attn/in_bias", 0)
    z, xbc, dt = np.split(projected, [width, width + part.channels], axis=1)
    padded = np.concatenate([np.zeros((part.kernel - 1, part.channels)), xbc])
    xbc = sum(padded[i : i + T] * layer["attn/conv1d"][:, 0, i] for i in range(part.kernel)) + layer["attn/conv1d_bias"]
    xbc = xbc / (1 + np.exp(-xbc))
    x, b, read = np.split(xbc, [width, width + N * n], axis=1)
    x, b, read = x.reshape(T, M, -1), b.reshape(T, N, n), read.reshape(T, N, n)
    out = np.zeros(x.shape)
    for head in range(M):
        state, group = np.zeros((n, part.head_dim)), head * N // M
        for t in range(T):
            step = np.logaddexp(0, dt[t, head] + layer["attn/dt_bias"][head])
            state = state * np.exp(-np.exp(layer["attn/A_log"][head]) * step) + step * np.outer(b[t, group], x[t, head])
            out[t, head] = read[t, group] @ state + layer["attn/D"][head] * x[t, head]
    gated = (out.reshape(T, -1) * z / (1 + np.exp(-z))).reshape(T, N, -1)
    normed = (gated / np.sqrt((gated**2).mean(axis=2, keepdims=True) + c.norm_eps)).reshape(T, -1) * layer["attn/out_norm"]
    return normed @ layer["attn/out"].T + layer.get("attn/out_bias", 0)


def _short_convolution(y: np.ndarray, layer: dict[str, np.ndarray], c: DecoderConfig) -> np.ndarray:
    """A gated short convolution."""
    part, T = c.short_conv, len(y)
    assert part is not None
    before, after, x = np.split(y @ layer["attn/in"].T + layer.get("attn/in_bias", 0), 3, axis=1)
    padded = np.concatenate([np.zeros((part.kernel - 1, part.channels)), before * x])
    mixed = sum(padded[i : i + T] * layer["attn/conv1d"][:, 0, i] for i in range(part.kernel)) + layer["attn/conv1d_bias"]
    return (after * mixed) @ layer["attn/out"].T + layer.get("attn/out_bias", 0)


def _head(flat: dict[str, np.ndarray], layer: dict[str, np.ndarray], h: int, i: int, c: DecoderConfig) -> np.ndarray:
    """One query head over the key head that it shares."""

    def columns(name: str, head: int) -> np.ndarray:
        x = flat[name][:, head * c.head_dim : (head + 1) * c.head_dim]
        if name == "v":
            return _normed(x, np.ones(1) - c.norm_offset, c) if c.value_norm else x
        if c.qk_norm == "head":
            x = _normed(x, layer[f"attn/{name}_norm"], c)
        x = _turned(x, i, c)
        if c.qk_norm == "without_gain" and i not in c.nope_layers:
            return _normed(x, np.ones(1) - c.norm_offset, c)
        return _normed(x, layer[f"attn/{name}_norm"], c) if c.qk_norm == "rotated_head" else x

    shared = h // (c.heads // c.kv_heads)
    return _attended(columns("q", h), columns("k", shared), columns("v", shared), layer, h, i, c)


def _latent_head(y: np.ndarray, layer: dict[str, np.ndarray], h: int, i: int, c: DecoderConfig) -> np.ndarray:
    """One head of multi-head latent attention."""
    assert c.latent is not None
    plain, norm = c.head_dim - c.rotary_dim, dataclasses.replace(c, norm_eps=c.latent.norm_eps)
    queries = _normed(y @ layer["attn/q_a"].T + layer["attn/q_a_bias"], layer["attn/q_a_norm"], norm) @ layer["attn/q_b"].T
    q = queries[:, h * c.head_dim : (h + 1) * c.head_dim]
    both = y @ layer["attn/kv_a"].T + layer["attn/kv_a_bias"]
    latent = _normed(both[:, : c.latent.rank], layer["attn/kv_a_norm"], norm)
    from_latent = layer["attn/kv_b"].reshape(c.heads, plain + c.latent.value_dim, c.latent.rank)[h]
    q = np.concatenate([q[:, :plain], _turned(q[:, plain:], i, c)], axis=1)
    k = np.concatenate([latent @ from_latent[:plain].T, _turned(both[:, c.latent.rank :], i, c)], axis=1)
    return _attended(q, k, latent @ from_latent[plain:].T, layer, h, i, c)


def _attended(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, layer: dict[str, np.ndarray], h: int, i: int, c: DecoderConfig
) -> np.ndarray:
    """The attention of one head."""
    out, window = np.zeros((len(q), v.shape[1])), c.window_of(i) or len(q)
    for t in range(len(q)):
        first = t - t % window if c.window_is_chunk else max(t + 1 - window, 0)
        periods = (t + c.temperature_nope) // c.temperature_length
        growth = 1 + c.temperature_scale * np.log(1 + periods)
        if c.temperature_nope and i not in c.nope_layers:
            growth = 1.0
        logits = k[first : t + 1] @ q[t] * growth * (c.attention_scale or c.head_dim**-0.5)
        if c.attention_cap:
            logits = c.attention_cap * np.tanh(logits / c.attention_cap)
        weights = np.exp(logits)
        total = weights.sum() + (np.exp(layer["attn/sinks"][h]) if c.sinks else 0.0)
        out[t] = (weights / total) @ v[first : t + 1]
    return out


def _turned(x: np.ndarray, i: int, c: DecoderConfig) -> np.ndarray:
    """Each pair of coordinates as a complex number, times `exp(i position frequency)`."""
    if i in c.nope_layers:
        return x
    x, rest = x[:, : c.rotated], x[:, c.rotated :]
    half = c.rotated // 2
    first, second = (x[:, :half], x[:, half:]) if c.rope == "half" else (x[:, 0::2], x[:, 1::2])
    is_local = bool(c.window_rope_theta) and c.window_of(i) > 0
    frequency = (c.window_rope_theta if is_local else c.rope_theta) ** (-2 * np.arange(half) / c.rotated)
    if c.rope_scaling is not None and not is_local:
        frequency = frequency / c.rope_scaling.factor
        if isinstance(c.rope_scaling, Proportional):
            frequency[c.rope_scaling.pairs :] = 0
    z = (first + 1j * second) * np.exp(1j * np.arange(len(x))[:, None] * frequency)
    pairs = (z.real, z.imag)
    turned = np.concatenate(pairs, axis=1) if c.rope == "half" else np.stack(pairs, axis=2).reshape(x.shape)
    return np.concatenate([turned, rest], axis=1)


def _mlp(x: np.ndarray, y: np.ndarray, layer: dict[str, np.ndarray], i: int, c: DecoderConfig) -> np.ndarray:
    """The feed-forward block of the normed stream `y`."""
    experts = c.experts_of(i)
    if experts is None:
        return _block(y, layer, "mlp", c)
    if experts.beside_dense:
        dense = _normed(_block(y, layer, "mlp", c), layer["mlp/out_norm"], c)
        routed = _normed(x, layer["moe/router_norm"], c) / np.sqrt(c.width)
        moe = {path.replace("moe/", "mlp/"): a for path, a in layer.items() if path.startswith("moe/")}
        mixed = _experts(_normed(x, moe["mlp/norm"], c), routed, moe, c, experts)
        return dense + _normed(mixed, moe["mlp/out_norm"], c)
    return _experts(y, y, layer, c, experts)


def _experts(
    y: np.ndarray, routed: np.ndarray, layer: dict[str, np.ndarray], c: DecoderConfig, experts: Experts
) -> np.ndarray:
    """The experts of `y` that the router chooses by `routed`."""
    logits = routed @ layer["mlp/router"].T + layer.get("mlp/router_bias", 0.0)
    weights = 1 / (1 + np.exp(-logits))
    if experts.scores not in ("sigmoid", "plain_sigmoid"):
        weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    choice = logits
    if experts.has_correction:
        correction = layer["mlp/router_correction_bias"].reshape(1, -1)
        choice = np.stack([_in_groups(row, experts) for row in weights + correction])
    weights = np.where(choice >= np.sort(choice, axis=1)[:, [-experts.active]], weights, 0.0)
    if experts.normalized:
        weights = weights / weights.sum(axis=1, keepdims=True)
    weights = weights * experts.scale * layer.get("mlp/router_scale", 1.0)
    read = y @ layer["mlp/latent_in"].T if experts.latent else y
    before, after = (weights, np.ones_like(weights)) if experts.scales_input else (np.ones_like(weights), weights)
    blocks = [_expert(layer, e, experts) for e in range(experts.count)]
    out = sum(after[:, [e]] * _block(before[:, [e]] * read, block, "mlp", c) for e, block in enumerate(blocks))
    if experts.latent:
        out = out @ layer["mlp/latent_out"].T
    if experts.shared_hidden:
        shared = {path.replace("/shared", ""): a for path, a in layer.items() if "/shared/" in path}
        gate = 1 / (1 + np.exp(-(y @ layer["mlp/shared_expert_gate"].T))) if experts.shared_gate else 1.0
        out = out + _block(y, shared, "mlp", c) * gate
    return out


def _in_groups(scores: np.ndarray, experts: Experts) -> np.ndarray:
    """The scores of one token, -inf outside of the groups whose two largest have the largest sum."""
    groups = np.split(scores, experts.groups)
    sums = [sum(sorted(group)[-2:]) for group in groups]
    best = sorted(range(experts.groups), key=lambda g: sums[g])[-experts.active_groups :]
    return np.concatenate([group if g in best else np.full_like(group, -np.inf) for g, group in enumerate(groups)])


def _expert(layer: dict[str, np.ndarray], e: int, experts: Experts) -> dict[str, np.ndarray]:
    """One expert as a feed-forward block."""
    if experts.layout == "separate":
        return {f"mlp/{path.rsplit('/', 1)[1]}": a for path, a in layer.items() if f"/experts/{e}/" in path}
    both, down = layer["mlp/experts/gate+up"][e].T, layer["mlp/experts/down"][e].T
    if experts.layout == "joined_in_out":
        gate, up = np.split(both, 2)
        return {"mlp/gate": gate, "mlp/up": up, "mlp/down": down}
    bias = layer["mlp/experts/gate+up_bias"][e]
    return {
        "mlp/gate": both[0::2],
        "mlp/up": both[1::2],
        "mlp/gate_bias": bias[0::2],
        "mlp/up_bias": bias[1::2],
        "mlp/down": down,
        "mlp/down_bias": layer["mlp/experts/down_bias"][e],
    }


def _block(y: np.ndarray, layer: dict[str, np.ndarray], part: str, c: DecoderConfig) -> np.ndarray:
    names = ("gate", "up") if c.gated else ("up",)
    gate, *up = (y @ layer[f"{part}/{name}"].T + layer.get(f"{part}/{name}_bias", 0.0) for name in names)
    hidden = _normed(_gated(gate, *up or [np.ones(1)], c), layer.get(f"{part}/sub_norm"), c)
    return hidden @ layer[f"{part}/down"].T + layer.get(f"{part}/down_bias", 0.0)


def _gated(gate: np.ndarray, up: np.ndarray, c: DecoderConfig) -> np.ndarray:
    if c.activation == "gelu_tanh":
        return gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    if c.activation == "gelu":
        return gate / 2 * (1 + np.vectorize(math.erf)(gate / np.sqrt(2))) * up
    if c.activation == "relu":
        return np.maximum(gate, 0) * up
    if c.activation == "relu2":
        return np.maximum(gate, 0) ** 2 * up
    if c.activation == "silu":
        return gate / (1 + np.exp(-gate)) * up
    gate, up = np.minimum(gate, c.activation_limit), np.clip(up, -c.activation_limit, c.activation_limit)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
