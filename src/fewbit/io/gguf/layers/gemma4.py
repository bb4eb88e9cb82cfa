"""Gemma 4 in GGUF files: layers of several kinds, and factors of experts.

- Heads of layers without a sliding window have a width of their own, and sizes of layers are lists.
- The frequencies of pairs that do not rotate are divided by 1e30.
- The factor of each expert is a scale of its down projection, so that a tensor scale of NVFP4 is multiplied by it.

Reference: llama.cpp, conversion/gemma.py and src/models/gemma4.cpp (2026).
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from ...._json import Count, Positive, converted
from ....errors import QuantError, UnsupportedError
from ..fields import Field
from ..stored import Stored, stored

_DOWN, _FACTORS = ".ffn_down_exps.weight", ".ffn_down_exps.scale"
_NOT_ROTATED = 1e30


def layer_fields(config: Mapping[str, Any]) -> dict[str, Field]:
    """The fields of layers, of experts and of per-layer inputs, by their keys after the architecture.

    Args:
        config: the content of config.json, with the defaults of the family.

    Raises:
        QuantError: for a value that is missing or of another type.
        UnsupportedError: for layers that llama.cpp does not run.
    """
    found = _read(config)
    windows = [kind == "sliding_attention" for kind in found.kinds]
    if any(windows) and not found.window:
        raise QuantError("config.json lacks 'sliding_window', which GGUF files of gemma4_text need")
    if found.input_width and found.input_vocab != found.vocab:
        raise UnsupportedError(
            f"llama.cpp has per-layer embeddings of {found.vocab} tokens, as many as there are; vocab_size_per_layer_input is "
            f"{found.input_vocab}"
        )
    (full_heads, full_dim), own = found.full_heads, found.layers - found.shared_layers
    kv_heads = [found.kv_heads if has_window else full_heads for has_window in windows]
    hidden = [found.hidden * (2 if found.is_wide and i >= own else 1) for i in range(found.layers)]
    fields: dict[str, Field] = {
        "attention.head_count_kv": _number_or_list(kv_heads),
        "feed_forward_length": _number_or_list(hidden),
        "attention.key_length": full_dim,
        "attention.value_length": full_dim,
        "attention.key_length_swa": found.head_dim,
        "attention.value_length_swa": found.head_dim,
        "attention.sliding_window_pattern": windows,
        "attention.shared_kv_layers": found.shared_layers,
        "embedding_length_per_layer_input": found.input_width,
        "rope.dimension_count_swa": found.head_dim,
        "final_logit_softcapping": found.logit_cap or 0.0,  # llama.cpp has 30 where there is no field
    }
    if found.has_experts:
        sizes = {"num_experts": found.experts, "top_k_experts": found.active, "moe_intermediate_size": found.expert_hidden}
        for key, (name, size) in zip(_EXPERT_KEYS, sizes.items(), strict=True):
            if size is None:
                raise QuantError(f"config.json lacks {name!r}, which the GGUF field {key!r} needs")
            fields[key] = size
    return fields


_EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")


def rotary_dim(config: Mapping[str, Any]) -> int:
    """The width of a head of the layers without a window, all of whose coordinates have a frequency."""
    _, head_dim = _read(config).full_heads
    return head_dim


def rope_factors(config: Mapping[str, Any], rope: Mapping[str, Any]) -> Stored:
    """What divides each rotary frequency of the layers without a window, `[head_dim / 2]`.

    Args:
        config: as for `layer_fields`.
        rope: the rope parameters of these layers.
    """
    count = rotary_dim(config) // 2
    share, factor = float(rope.get("partial_rotary_factor", 1.0)), float(rope.get("factor", 1.0))
    if rope.get("rope_type", "default") != "proportional":
        share = 1.0
    if not 0 < share <= 1 or not 0 < factor < _NOT_ROTATED:
        raise QuantError(f"config.json has partial_rotary_factor {share} and factor {factor} of rotary embedding")
    factors = np.full(count, _NOT_ROTATED, np.float32)
    factors[: int(share * 2 * count // 2)] = factor
    return stored(factors, "rope_freqs.weight")


def name_of_scale(name: str) -> str | None:
    """The GGUF name of a router's scale, or of the factors of experts; None for another tensor of a checkpoint."""
    for part, target in (("router.scale", "ffn_gate_inp.scale"), ("router.per_expert_scale", _FACTORS[1:])):
        if name.startswith("model.layers.") and name.endswith(f".{part}"):
            return f"blk.{name.split('.')[2]}.{target}"
    return None


def target_of_factors(name: str) -> str:
    """The tensor that is written with the factors of experts: the down projection. Another name is its own."""
    return name.removesuffix(_FACTORS) + _DOWN if name.endswith(_FACTORS) else name


def with_expert_factors(tensors: Iterable[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
    """The tensors of a file, with the factors of experts as scales of their down projections.

    Args:
        tensors: GGUF names and tensors, in any order.

    Raises:
        QuantError: for down projections of experts without factors, or with another number of them.
    """
    waiting: dict[str, dict[str, Stored]] = {}
    for name, tensor in tensors:
        if not name.endswith((_DOWN, _FACTORS)):
            yield name, tensor
            continue
        target = target_of_factors(name)
        parts = waiting.setdefault(target, {})
        parts[name] = tensor
        if len(parts) == 2:
            down, factors = parts[target], parts[target.removesuffix(_DOWN) + _FACTORS].values()
            if factors.shape != down.shape[:1]:
                raise QuantError(f"{target} has {down.shape[0]} experts, and factors of {factors.size}")
            del waiting[target]
            scale = 1.0 if down.tensor_scale is None else down.tensor_scale
            yield target, dataclasses.replace(down, tensor_scale=np.asarray(scale * factors, np.float32))
    if waiting:
        target, parts = next(iter(waiting.items()))
        missing = "their factors" if target in parts else "the experts"
        raise QuantError(f"{target} is incomplete: the checkpoint lacks {missing}")


def _number_or_list(sizes: list[int]) -> Field:
    return sizes[0] if len(set(sizes)) == 1 else sizes


class _Heads(msgspec.Struct):
    """The JSON schema of the heads in `per_layer_config`."""

    head_dim: Positive | None = None
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=None)


class _Gemma4(msgspec.Struct):
    """The JSON schema of what is read of config.json."""

    vocab: Positive = msgspec.field(name="vocab_size")
    layers: Positive = msgspec.field(name="num_hidden_layers")
    hidden: Positive = msgspec.field(name="intermediate_size")
    kv_heads: Positive = msgspec.field(name="num_key_value_heads")
    head_dim: Positive
    window: Count | None = msgspec.field(name="sliding_window", default=None)
    layer_types: list[str] | None = None
    full_head_dim: Positive = msgspec.field(name="global_head_dim", default=512)
    full_kv_heads: Positive | None = msgspec.field(name="num_global_key_value_heads", default=None)
    heads_by_layer: dict[str, _Heads] | None = msgspec.field(name="per_layer_config", default=None)
    keys_are_values: bool = msgspec.field(name="attention_k_eq_v", default=False)
    shared_layers: Count = msgspec.field(name="num_kv_shared_layers", default=0)
    is_wide: bool = msgspec.field(name="use_double_wide_mlp", default=False)
    has_experts: bool = msgspec.field(name="enable_moe_block", default=False)
    experts: Positive | None = msgspec.field(name="num_experts", default=None)
    active: Positive | None = msgspec.field(name="top_k_experts", default=None)
    expert_hidden: Positive | None = msgspec.field(name="moe_intermediate_size", default=None)
    logit_cap: float | None = msgspec.field(name="final_logit_softcapping", default=None)
    input_width: Count = msgspec.field(name="hidden_size_per_layer_input", default=0)
    input_vocab: Positive | None = msgspec.field(name="vocab_size_per_layer_input", default=None)

    @property
    def kinds(self) -> list[str]:
        """The kind of attention of each layer, of the last one full, as transformers has it."""
        step = 6
        kinds = self.layer_types or [
            "full_attention" if (i + 1) % step == 0 else "sliding_attention" for i in range(self.layers)
        ]
        return [*kinds[:-1], "full_attention"]

    @property
    def full_heads(self) -> tuple[int, int]:
        """The heads of keys of the layers without a window, and their width; newer files have them for each of these layers."""
        full = _Heads(self.full_head_dim, self.full_kv_heads if self.keys_are_values else None)
        if self.heads_by_layer is not None:
            layers = {str(i) for i, kind in enumerate(self.kinds) if kind == "full_attention"}
            full = next(iter(self.heads_by_layer.values()), full)
            if set(self.heads_by_layer) != layers or any(heads != full for heads in self.heads_by_layer.values()):
                raise UnsupportedError(
                    "llama.cpp has heads of one size in all layers without a sliding window; per_layer_config has others"
                )
        return full.kv_heads or self.kv_heads, full.head_dim or self.head_dim


def _read(config: Mapping[str, Any]) -> _Gemma4:
    found = converted(config, _Gemma4, "config.json")
    if len(found.kinds) != found.layers or found.shared_layers >= found.layers:
        raise QuantError(
            f"config.json has {found.layers} layers, {len(found.kinds)} layer_types, and num_kv_shared_layers {found.shared_layers}"
        )
    if unknown := [kind for kind in found.kinds if kind not in ("full_attention", "sliding_attention")]:
        raise UnsupportedError(f"llama.cpp has no attention of kind {unknown[0]!r} in gemma4")
    return found
