"""GGUF metadata fields of a Hugging Face config.json."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from ..._json import Count, Positive, converted
from ..._registry import near_names
from ...errors import QuantError, UnsupportedError
from .architectures import ARCHITECTURES, COMMON, LAYER_NORM, Architecture, FieldRow
from .fields import Field
from .layers import nemotron_h, short_conv, state_space
from .layers.gemma4 import layer_fields, rope_factors, rotary_dim
from .layers.linear_attention import LinearHeads
from .stored import Stored, stored

_LARGEST_HEAD = 65536
_EXAONE_WITH_WINDOWS = 64
_NO_ROPE_STEP = 4  # SmolLM3 and Llama 4: llama.cpp rotates all but every fourth layer
_EXPERTS_WITHOUT_NORMS = 128  # Llama 4: llama.cpp norms queries and keys unless there are so many experts


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a config.json.

    Raises:
        UnsupportedError: for a `model_type` that is not in the table, or a value that llama.cpp cannot run.
    """
    converted(config, _Config, "config.json")
    kind = config["model_type"]
    if kind not in ARCHITECTURES:
        raise UnsupportedError(
            f"model_type {kind!r} has no GGUF conversion in fewbit; {near_names(str(kind), tuple(ARCHITECTURES))}"
        )
    architecture = ARCHITECTURES[kind]
    said = architecture.settings(config)
    for key, accepted in architecture.assumed.items():
        if key in said and said[key] not in accepted:
            raise UnsupportedError(f"llama.cpp runs {kind} only with {key} {accepted[0]!r}, config.json has {said[key]!r}")
    if architecture.has_state_spaces:
        architecture = dataclasses.replace(architecture, name=state_space.name_of_architecture(said))
    if architecture.has_single_blocks:
        architecture = dataclasses.replace(architecture, name=nemotron_h.name_of_architecture(said))
    _check_layers(architecture, said)
    return architecture


def architecture_fields(architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Field]:
    """The metadata fields of an architecture.

    Args:
        architecture: the architecture.
        config: the content of config.json.

    Returns:
        The fields, with `general.architecture`.

    Raises:
        QuantError: for a value that is missing or of another type.
        UnsupportedError: for a rope scaling that llama.cpp lacks.
    """
    said = architecture.settings(config)
    fields: dict[str, Field] = {"general.architecture": architecture.name}
    for row in (*COMMON[:-1], LAYER_NORM if architecture.has_layer_norms else COMMON[-1]):
        fields[f"{architecture.name}.{row[0]}"] = _field(row, said)
    for row in architecture.fields:
        if any(said.get(name) is not None for name in row[2]):
            fields[f"{architecture.name}.{row[0]}"] = _field(row, said)
    if architecture.name == "deepseek2":
        said["head_dim"] = _size(said, "qk_rope_head_dim")
        fields |= {f"deepseek2.{key}": value for key, value in _deepseek_fields(said).items()}
    if architecture.has_sigmoid_scores:
        fields[f"{architecture.name}.expert_gating_func"] = 2
    if architecture.stores_normalization:
        fields[f"{architecture.name}.expert_weights_norm"] = bool(said["norm_topk_prob"])
    if architecture.stores_shared_width:
        shared = fields[f"{architecture.name}.expert_shared_count"]
        assert isinstance(shared, int)
        fields[f"{architecture.name}.expert_shared_feed_forward_length"] = shared * _size(said, "moe_intermediate_size")
    if architecture.name == "gptneox":
        fields["gptneox.use_parallel_residual"] = bool(said.get("use_parallel_residual", True))
    if architecture.stores_windows and said.get("sliding_window"):
        fields[f"{architecture.name}.attention.sliding_window_pattern"] = _has_window(architecture, said)
    if architecture.has_linear_attention:
        fields |= {f"{architecture.name}.{key}": value for key, value in _linear_fields(architecture, said).items()}
    if architecture.has_kinds_of_layers:
        fields |= {f"{architecture.name}.{key}": value for key, value in layer_fields(said).items()}
    if architecture.has_short_convolutions:
        fields |= {f"{architecture.name}.{key}": value for key, value in short_conv.layer_fields(said).items()}
    if architecture.has_single_blocks:
        fields |= {f"{architecture.name}.{key}": value for key, value in nemotron_h.layer_fields(said).items()}
    if architecture.has_state_spaces:
        fields |= {f"{architecture.name}.{key}": value for key, value in state_space.layer_fields(said).items()}
    for key, value in _rope_fields(architecture, said).items():
        fields[f"{architecture.name}.rope.{key}"] = value
    if architecture.name == "phi3":
        # llama.cpp tells Phi-4 by a window of 0.
        fields["phi3.attention.sliding_window"] = int(said.get("sliding_window") or 0)
    return fields


def _has_window(architecture: Architecture, config: Mapping[str, Any]) -> list[bool]:
    """Whether each layer has the sliding window."""
    step = architecture.window_pattern
    kinds = config.get("layer_types") or [
        "sliding_attention" if (i + 1) % step else "full_attention" for i in range(config["num_hidden_layers"])
    ]
    return [kind == "sliding_attention" for kind in kinds]


def extra_tensors(architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Stored]:
    """The tensors that GGUF has and the checkpoint has not. They are the factors of the rotary frequencies."""
    said = architecture.settings(config)
    rope = _rope(said)
    kind = _rope_kind(rope)
    if architecture.has_kinds_of_layers:
        return {"rope_freqs.weight": rope_factors(said, rope)}
    if kind == "llama3":
        return {"rope_freqs.weight": stored(_llama3_factors(rope, said), "rope_freqs.weight")}
    if kind == "longrope":
        names = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
        return {name: stored(_factors(architecture, rope, key, said), name) for name, key in names.items()}
    return {}


def head_dim(config: Mapping[str, Any]) -> int:
    """The width of a head."""
    width = config.get("head_dim")
    if width is None:
        if not config.get("hidden_size") or not config.get("num_attention_heads"):
            raise QuantError("config.json lacks 'hidden_size' or 'num_attention_heads'")
        width = config["hidden_size"] // config["num_attention_heads"]
    if width > _LARGEST_HEAD:
        raise QuantError(f"head_dim is {width}, more than {_LARGEST_HEAD}; config.json is damaged")
    return width


def _field(row: FieldRow, config: Mapping[str, Any]) -> Field:
    key, kind, names = row
    name = next((name for name in names if config.get(name) is not None), None)
    if name is None:
        raise QuantError(f"config.json lacks {names[0]!r}, which the GGUF field {key!r} needs")
    value = config[name]
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        if kind is float:
            return float(value)
        if isinstance(value, int) and 0 <= value < 2**31:
            return value
    raise QuantError(f"config.json has {name} {value!r:.60}; expected a {kind.__name__} for the GGUF field {key!r}")


def _size(config: Mapping[str, Any], name: str) -> int:
    """A positive size that config.json must have."""
    if not config.get(name):
        raise QuantError(f"config.json lacks {name!r}, which GGUF files of {config['model_type']} need")
    return config[name]


def _deepseek_fields(config: Mapping[str, Any]) -> dict[str, Field]:
    """The fields of latent attention, and of experts.

    The cache of latent attention has one head. Experts may be chosen by groups.
    """
    rank, rotary = _size(config, "kv_lora_rank"), _size(config, "qk_rope_head_dim")
    fields: dict[str, Field] = {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.get("q_lora_rank") or 0,
        "attention.key_length": rank + rotary,
        "attention.value_length": rank,
        "attention.key_length_mla": _size(config, "qk_nope_head_dim") + rotary,
        "attention.value_length_mla": _size(config, "v_head_dim"),
        "expert_weights_norm": bool(config.get("norm_topk_prob")),
        "expert_gating_func": {"softmax": 1, "sigmoid": 2}[config["scoring_func"]],
    }
    if _is_by_groups(config):
        fields |= {"expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"]}
    return fields


def _linear_fields(architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Field]:
    """The fields of linear attention that config.json does not have as they are."""
    heads = LinearHeads.of(config, is_tiled=architecture.has_tiled_values)
    fields: dict[str, Field] = {
        "ssm.inner_size": heads.values * heads.value_dim,
        "full_attention_interval": _full_attention_interval(config),
    }
    if architecture.has_tiled_values:  # positions in images, which llama.cpp asks for
        sections = _rope(config).get("mrope_section") or [11, 11, 10]
        fields["rope.dimension_sections"] = [*sections, 0][:4]
    return fields


def _full_attention_interval(config: Mapping[str, Any]) -> int:
    """n, where every n-th layer has softmax attention.

    Raises:
        UnsupportedError: for another pattern of layers.
    """
    kinds = config.get("layer_types")
    if not kinds:
        return config["full_attention_interval"]
    interval = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    expected = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(len(kinds))]
    if list(kinds) != expected:
        raise UnsupportedError(
            f"llama.cpp has softmax attention in every n-th layer of {config['model_type']}; layer_types is another pattern"
        )
    return interval


def _is_by_groups(config: Mapping[str, Any]) -> bool:
    """Whether experts are chosen from some of their groups."""
    groups = config.get("n_group") or 1
    return groups > (config.get("topk_group") or groups) and config.get("topk_method") != "greedy"


def _check_deepseek(config: Mapping[str, Any]) -> None:
    """Refuses what llama.cpp computes in another way."""
    layers = config.get("num_hidden_layers") or 0
    if config.get("q_lora_rank") and (layers in (26, 27) or (layers == 48 and config.get("vocab_size") == 128256)):
        raise UnsupportedError(f"llama.cpp takes DeepSeek with {layers} layers for one without q_lora_rank")
    if _is_by_groups(config) and config["scoring_func"] == "softmax":
        raise UnsupportedError(
            "llama.cpp scores a group of experts by the sum of its two best; config.json has topk_method "
            "'group_limited_greedy', which takes the best"
        )
    if (config["first_k_dense_replace"] or 0) >= layers or not config.get("n_shared_experts"):
        raise UnsupportedError("llama.cpp runs DeepSeek only with routed and shared experts in some layer")


def _check_exaone(config: Mapping[str, Any]) -> None:
    """Refuses windows that llama.cpp does not have: it has them where there are 64 layers."""
    if bool(config.get("sliding_window")) != (config.get("num_hidden_layers") == _EXAONE_WITH_WINDOWS):
        raise UnsupportedError(
            f"llama.cpp has sliding windows of exaone4 where, and only where, there are {_EXAONE_WITH_WINDOWS} layers; "
            f"config.json has {config.get('num_hidden_layers')} and sliding_window {config.get('sliding_window')}"
        )


def _check_dense_first(config: Mapping[str, Any]) -> None:
    """Refuses dense layers after one with experts, in ERNIE by their last index and in EXAONE by the kind of each layer."""
    layers, last = config.get("num_hidden_layers") or 0, config.get("moe_layer_end_index", -1)
    dense = config.get("first_k_dense_replace") or 0
    first = ["dense" if i < dense else "sparse" for i in range(layers)]
    if last not in (-1, layers - 1) or (config.get("mlp_layer_types") or first) != first:
        raise UnsupportedError("llama.cpp has dense layers only before those with experts; config.json has others")


def _check_llama4(config: Mapping[str, Any]) -> None:
    """Refuses layers with experts, chunks and norms of queries and keys in another pattern than llama.cpp's."""
    layers, step = config.get("num_hidden_layers") or 0, config["interleave_moe_layer_step"]
    experts = [i for i in range(layers) if (i + 1) % step == 0]
    kinds = ["chunked_attention" if (i + 1) % _NO_ROPE_STEP else "full_attention" for i in range(layers)]
    if (config.get("moe_layers") or experts) != experts or (config.get("layer_types") or kinds) != kinds:
        raise UnsupportedError(
            "llama.cpp has experts in every n-th layer of llama4, and no chunks in every fourth; moe_layers or layer_types differ"
        )
    if config["use_qk_norm"] == (config["num_local_experts"] == _EXPERTS_WITHOUT_NORMS):
        raise UnsupportedError(
            f"llama.cpp norms queries and keys of llama4 unless it has {_EXPERTS_WITHOUT_NORMS} experts; config.json has "
            f"use_qk_norm {config['use_qk_norm']} and {config['num_local_experts']} experts"
        )


def _check_rotary_layers(config: Mapping[str, Any]) -> None:
    """Refuses layers without rotary embedding other than every fourth."""
    kind, rotated = config["model_type"], config.get("no_rope_layers") or []
    interval = config.get("no_rope_layer_interval")
    if not rotated and interval != _NO_ROPE_STEP:
        raise UnsupportedError(
            f"llama.cpp rotates all but every fourth layer of {kind}; no_rope_layer_interval is {interval}"
        )
    if [bool(r) for r in rotated] != [bool((i + 1) % _NO_ROPE_STEP) for i in range(len(rotated))]:
        raise UnsupportedError(f"llama.cpp rotates all but every fourth layer of {kind}; no_rope_layers is another")


def _check_windows(architecture: Architecture, config: Mapping[str, Any]) -> None:
    """Refuses another pattern of sliding windows than the built-in one."""
    name, step = architecture.name, architecture.window_pattern
    if kinds := config.get("layer_types"):
        full = [kind == "full_attention" for kind in kinds]
        expected = [step == 0 or (i + 1) % step == 0 for i in range(len(full))]
        if full != expected:
            raise UnsupportedError(f"llama.cpp has its own pattern of sliding windows for {name}; layer_types is another")
    elif config.get("sliding_window_pattern") not in (None, step, "L" * (step - 1) + "G"):
        raise UnsupportedError(
            f"every {step}th layer of {name} has no sliding window in llama.cpp; sliding_window_pattern is "
            f"{config['sliding_window_pattern']}"
        )


def _says_windows(architecture: Architecture, config: Mapping[str, Any]) -> bool:
    """Whether the file says which layers have a sliding window, or none has one."""
    return architecture.stores_windows and bool(config.get("layer_types") or not config.get("sliding_window"))


def _has_other_layers(architecture: Architecture) -> bool:
    """Whether `layer_types` says more than which layers have a window."""
    states = architecture.has_state_spaces or architecture.has_short_convolutions
    return states or architecture.has_kinds_of_layers or architecture.has_single_blocks


def _check_layers(architecture: Architecture, config: Mapping[str, Any]) -> None:
    """Refuses layers that differ from those that llama.cpp has built in."""
    layers = config.get("num_hidden_layers") or 0
    name = architecture.name
    if name == "deepseek2":
        _check_deepseek(config)
    if name == "exaone4":
        _check_exaone(config)
    if name == "exaone-moe" and not (config.get("sliding_window") and config.get("num_shared_experts")):
        raise UnsupportedError("llama.cpp runs EXAONE of experts only with a sliding window and shared experts")
    if name in ("exaone-moe", "ernie4_5-moe"):
        _check_dense_first(config)
    heads = config.get("num_attention_heads")
    if architecture.has_all_heads and (config.get("num_key_value_heads") or heads) != heads:
        raise UnsupportedError(f"llama.cpp runs {name} only with as many heads of keys as of queries")
    if name == "glm4moe" and not config.get("n_shared_experts"):
        raise UnsupportedError("llama.cpp runs GLM-4.5 only with shared experts; config.json has n_shared_experts 0")
    if name == "llama4":
        _check_llama4(config)
    elif architecture.has_linear_attention:
        _full_attention_interval(config)
    elif not (_has_other_layers(architecture) or _says_windows(architecture, config)):
        _check_windows(architecture, config)
    if name in ("smollm3", "llama4"):
        _check_rotary_layers(config)
    if name == "gemma2":
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if config[key] is None:
                raise UnsupportedError(f"llama.cpp always caps the logits of gemma2; config.json has {key} null")
    if architecture.large_layers is not None:
        expected_scale = head_dim(config)
        if layers == architecture.large_layers:
            expected_scale = head_dim({**config, "head_dim": None})
        if config.get("query_pre_attn_scalar") != expected_scale:
            raise UnsupportedError(
                f"llama.cpp scales the attention of {name} by {expected_scale}; query_pre_attn_scalar is "
                f"{config.get('query_pre_attn_scalar')}"
            )


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope parameters of full attention, from either version of config.json; which comes first is as in transformers."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    given = given.get("full_attention", given)
    converted(given, _Rope, "the rope parameters of config.json")
    theta = config.get("rope_theta") or 10000.0
    if _rope_kind(given) == "dynamic" and given.get("alpha") and str(config["model_type"]).startswith("hunyuan"):
        width = head_dim(config)  # the base is scaled, and nothing else of what is given is read
        return {"rope_theta": float(given.get("rope_theta") or theta) * float(given["alpha"]) ** (width / (width - 2))}
    original = {}
    if config.get("original_max_position_embeddings") is not None:
        original["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return {"rope_theta": theta, **{key: value for key, value in given.items() if value is not None}, **original}


def _rope_kind(rope: Mapping[str, Any]) -> str:
    kind = str(rope.get("rope_type", rope.get("type", "default"))).lower()
    return {"su": "longrope"}.get(kind, kind)


def _rope_fields(architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Field]:
    """The fields below `<architecture>.rope`."""
    rope = _rope(config)
    kind = _rope_kind(rope)
    fields: dict[str, Field] = {
        "dimension_count": _rotary_dim(architecture, rope, config),
        "freq_base": float(rope["rope_theta"]),
    }
    local = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    converted(local, _Rope, "the rope parameters of config.json")
    local_base = local.get("rope_theta", config.get("rope_local_base_freq"))
    if local_base is not None:
        fields["freq_base_swa"] = float(local_base)
    accepted = {"default", "linear", "yarn"}
    if architecture.has_rope_factors:
        accepted |= {"llama3"}
    if architecture.name == "phi3":
        accepted |= {"longrope"}
    if architecture.has_kinds_of_layers:
        accepted = {"default", "linear", "proportional"}
    if kind not in accepted:
        raise UnsupportedError(
            f"llama.cpp has no rope scaling {kind!r} for {architecture.name}; it has {', '.join(sorted(accepted))}"
        )
    if kind in ("linear", "yarn"):
        fields["scaling.type"] = kind
        if not rope.get("factor"):
            raise QuantError(f"config.json has rope scaling {kind!r} without a factor")
        fields["scaling.factor"] = float(rope["factor"])
    if kind in ("yarn", "longrope"):
        original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
        fields["scaling.original_context_length"] = original
        if kind == "longrope":
            fields["scaling.type"] = "longrope"
            fields["scaling.attn_factor"] = _longrope_factor(rope, config["max_position_embeddings"], original)
    if kind == "yarn":
        fields |= _yarn_fields(architecture, rope)
        for key in ("beta_fast", "beta_slow"):
            if rope.get(key) is not None:
                fields[f"scaling.yarn_{key}"] = float(rope[key])
    return fields


def _yarn_fields(architecture: Architecture, rope: Mapping[str, Any]) -> dict[str, Field]:
    """The field of what scales DeepSeek's attention.

    Refuses a ramp and an attention factor that differ from llama.cpp's own; gpt-oss has it round its ramp nevertheless.
    """
    logarithm = math.log(max(float(rope["factor"]), 1.0))
    part, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    own, given = 0.1 * logarithm + 1, rope.get("attention_factor")
    if given is None and part and all_dims:
        given = (0.1 * part * logarithm + 1) / (0.1 * all_dims * logarithm + 1)
    fields: dict[str, Field] = {}
    if rope.get("truncate") is False and architecture.name != "gpt-oss":
        raise UnsupportedError("llama.cpp rounds the ends of yarn's ramp to whole indices; config.json has truncate false")
    if architecture.name == "deepseek2":
        if not all_dims:
            raise UnsupportedError("llama.cpp runs yarn of DeepSeek only with mscale_all_dim; config.json has none")
        own, fields = 1.0, {"scaling.yarn_log_multiplier": 0.1 * all_dims}
        given = 0.1 * logarithm + 1 if given is None else given
    if given is not None and abs(float(given) - own) > 1e-6:
        raise UnsupportedError(f"llama.cpp computes the attention factor of yarn as {own:.6f}; config.json has {given:.6f}")
    return fields


def _rotary_dim(architecture: Architecture, rope: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """The coordinates of a head that rotate."""
    if architecture.name == "minimax-m2" and config.get("rotary_dim"):
        return config["rotary_dim"]
    if architecture.has_kinds_of_layers:
        return rotary_dim(config)
    share = float(rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0)
    if share != 1 and not architecture.rotates_part:
        raise UnsupportedError(
            f"config.json has partial_rotary_factor {share}, which transformers ignores in models of {architecture.name}; "
            "remove it if the whole heads rotate"
        )
    return int(share * head_dim(config))


def _longrope_factor(rope: Mapping[str, Any], context: int, original: int) -> float:
    """The factor of attention with longrope: the one given, or that of the growth of the context."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    scale = float(rope.get("factor") or context / original)
    if scale <= 1:
        return 1.0
    if original == 1:
        raise QuantError("config.json has an original_max_position_embeddings of 1, whose logarithm is no divisor")
    return math.sqrt(1 + math.log(scale) / math.log(original))


def _llama3_factors(rope: Mapping[str, Any], config: Mapping[str, Any]) -> np.ndarray:
    """The divisor of each rotary frequency of Llama 3.1, `[head_dim / 2]`."""
    low, high = np.float64(rope.get("low_freq_factor", 1.0)), np.float64(rope.get("high_freq_factor", 4.0))
    factor = float(rope.get("factor", 8.0))
    original = float(rope.get("original_max_position_embeddings") or config["max_position_embeddings"])
    exponent = np.arange(0, head_dim(config), 2, dtype=np.float32) / head_dim(config)
    with np.errstate(all="ignore"):  # impossible numbers are refused below
        wavelength = 2 * np.pi * np.float32(rope["rope_theta"]) ** exponent
        smooth = (original / wavelength - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        short, long = wavelength < original / high, wavelength > original / low
        factors = np.select([short, long], [np.ones_like(between), np.full_like(between, factor)], between)
        factors = factors.astype(np.float32)
    if not np.isfinite(factors).all():
        raise QuantError("the rope parameters of config.json give factors that are not finite; check rope_scaling")
    return factors


def _factors(architecture: Architecture, rope: Mapping[str, Any], key: str, config: Mapping[str, Any]) -> np.ndarray:
    expected = _rotary_dim(architecture, rope, config) // 2
    values = rope.get(key)
    if not isinstance(values, list) or len(values) != expected:
        raise QuantError(f"config.json has {key} {values!r:.60}; expected {expected} numbers")
    with np.errstate(all="ignore"):
        factors = np.asarray(values, np.float64).astype(np.float32)
    if not np.isfinite(factors).all():
        raise QuantError(f"config.json has {key} with a number that float32 does not hold")
    return factors


class _Config(msgspec.Struct):
    """The JSON schema of the fields of config.json used in computations.

    Fields that are only copied are checked one by one.
    """

    model_type: str
    hidden_size: Positive | None = None
    num_attention_heads: Positive | None = None
    num_key_value_heads: Positive | None = None
    num_hidden_layers: Positive | None = None
    num_local_experts: Count | None = None
    num_experts: Count | None = None
    n_routed_experts: Count | None = None
    n_shared_experts: Count | None = None
    first_k_dense_replace: Count | None = None
    n_group: Count | None = None
    topk_group: Count | None = None
    q_lora_rank: Count | None = None
    kv_lora_rank: Positive | None = None
    qk_nope_head_dim: Positive | None = None
    qk_rope_head_dim: Positive | None = None
    v_head_dim: Positive | None = None
    norm_topk_prob: bool | None = None
    rotary_dim: Positive | None = None
    vocab_size: Count | None = None
    head_dim: Positive | None = None
    max_position_embeddings: Positive | None = None
    original_max_position_embeddings: Positive | None = None
    sliding_window: Count | None = None
    full_attention_interval: Positive | None = None
    layer_types: list[str] | None = None
    no_rope_layers: list[bool | int] | None = None
    no_rope_layer_interval: Positive | None = None
    moe_layers: list[Count] | None = None
    interleave_moe_layer_step: Positive | None = None
    intermediate_size_mlp: Positive | None = None
    use_qk_norm: bool | None = None
    rope_theta: float | None = None
    rope_local_base_freq: float | None = None
    partial_rotary_factor: float | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None


class _Rope(msgspec.Struct):
    """The JSON schema of rope parameters."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: Positive | None = None
    alpha: float | None = None
    partial_rotary_factor: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None
    mrope_section: list[Count] | None = None
    long_factor: list[float] | None = None
    short_factor: list[float] | None = None
