"""State spaces of Granite 4 and Nemotron-H, and shared blocks, in GGUF files.

In Granite 4 a layer without heads of keys is a state space (Mamba-2). `A_log` is stored as `-exp(A_log)`, `[M, 1]` as `D` is, the
convolution as `[C, K]`, and the gain of the norm by groups, `[N, w / N]`. Joined gate and up projections of the shared feed-forward
block are separated. A model with attention in every layer has the architecture of Granite 3: the shared block is its feed-forward block, or with
experts its shared expert.

Reference: llama.cpp, conversion/granite.py and src/models/granite-hybrid.cpp (2026).
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import msgspec
import numpy as np

from ...._hybrids import GRANITE_4, layers_with_state
from ...._json import Count, Positive, converted
from ....array.qarray import QArray
from ....errors import QuantError, UnsupportedError
from ..fields import Field
from ..stored import Stored, stored

_NAME = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.(?:mamba|mixer)\.(\w+(?:\.\w+)?)")
_TARGETS = {
    "in_proj.weight": "ssm_in.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "conv1d.bias": "ssm_conv1d.bias",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}
_SHARED = re.compile(r"model\.layers\.(\d+)\.shared_mlp\.(input|output)_linear\.weight")


def name_of_architecture(config: Mapping[str, Any]) -> str:
    """The GGUF architecture, which llama.cpp's converter chooses by the layers, too.

    Args:
        config: as for `layer_fields`.

    Raises:
        QuantError: for a value that is missing or of another type.
        UnsupportedError: for a kind of layers that Granite 4 does not have.
    """
    found = converted(config, _Hybrid, "config.json")
    if found.state_spaces:
        return "granitehybrid"
    return "granitemoe" if found.experts else "granite"


def layer_fields(config: Mapping[str, Any]) -> dict[str, Field]:
    """The fields of state spaces, of attention and of the shared feed-forward block, by their keys after the architecture.

    Args:
        config: the content of config.json, with the defaults of the family.

    Raises:
        QuantError: for a value that is missing or of another type.
        UnsupportedError: for layers that llama.cpp does not run.
    """
    found = converted(config, _Hybrid, "config.json")
    if len(found.state_spaces) == found.layers:
        raise UnsupportedError("llama.cpp runs Granite 4 only with attention in some layers")
    fields: dict[str, Field] = {
        "feed_forward_length": found.hidden if found.experts else found.shared_hidden,
        "rope.scaling.finetuned": found.positions == "rope",
    }
    if found.experts:
        if not found.active:
            raise QuantError("config.json lacks 'num_experts_per_tok', which the GGUF field 'expert_used_count' needs")
        fields |= {"expert_count": found.experts, "expert_used_count": found.active}
        fields["expert_shared_feed_forward_length"] = found.shared_hidden
    if found.state_spaces:
        return fields | _state_fields(found)
    if found.experts and found.positions != "rope":
        raise UnsupportedError(
            "llama.cpp always rotates granitemoe, which Granite 4 with experts is where every layer has attention; "
            f"config.json has position_embedding_type {found.positions!r}"
        )
    return fields


def _state_fields(found: "_Hybrid") -> dict[str, Field]:
    """The fields of the sizes of state spaces, and of the layers that they are."""
    if found.head_dim not in ("auto", None, found.expand * found.width // found.heads):
        raise QuantError(f"config.json has mamba_d_head {found.head_dim}, and {found.heads} heads of another width")
    if found.expand != 2 or found.has_biases:
        raise UnsupportedError(
            "llama.cpp runs state spaces of Granite 4 only with mamba_expand 2 and without mamba_proj_bias"
        )
    return {
        "attention.head_count_kv": [0 if i in found.state_spaces else found.kv_heads for i in range(found.layers)],
        "ssm.conv_kernel": found.kernel,
        "ssm.state_size": found.state_dim,
        "ssm.group_count": found.groups,
        "ssm.inner_size": found.expand * found.width,
        "ssm.time_step_rank": found.heads,
    }


def targets(name: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The GGUF names of the parts of a tensor.

    Args:
        name: its name in the checkpoint.
        config: as for `layer_fields`.

    Returns:
        The names; empty for a tensor of neither a state space nor the shared feed-forward block.
    """
    if (found := _NAME.fullmatch(name)) and found[2] in _TARGETS:
        return (f"blk.{found[1]}.{_TARGETS[found[2]]}",)
    if found := _SHARED.fullmatch(name):
        suffix = "_shexp" if config.get("num_local_experts") else ""
        kinds = ("gate", "up") if found[2] == "input" else ("down",)
        return tuple(f"blk.{found[1]}.ffn_{kind}{suffix}.weight" for kind in kinds)
    return ()


def tensors(
    name: str, value: np.ndarray | jax.Array | QArray, config: Mapping[str, Any], what: str, ternary: str
) -> tuple[Stored, ...]:
    """The tensors of the file, one for each of `targets`.

    Args:
        name: the name in the checkpoint.
        value: the array, or a QArray of a projection.
        config: as for `layer_fields`.
        what: the name for messages.
        ternary: the ggml type of ternary tensors.

    Raises:
        QuantError: for a quantized parameter that is none of the projections.
    """
    if _SHARED.fullmatch(name):
        tensor = stored(value, what, ternary)
        half = len(tensor.data) // 2
        return (tensor.with_rows(tensor.data[:half]), tensor.with_rows(tensor.data[half:])) if "input" in name else (tensor,)
    part = name.split(".", 4)[4]
    if part in ("in_proj.weight", "out_proj.weight"):
        return (stored(value, what, ternary),)
    if isinstance(value, QArray):
        raise QuantError(f"llama.cpp needs {what} in float32; leave it float")
    array = np.asarray(value).astype(np.float32)
    if part == "A_log":
        array = -np.exp(array)
    if part in ("A_log", "D"):
        array = array[:, None]
    elif part == "conv1d.weight":
        array = array.reshape(len(array), -1)
    elif part == "norm.weight":
        array = array.reshape(int(config.get("mamba_n_groups") or config["n_groups"]), -1)
    return (stored(array, what),)


class _Hybrid(msgspec.Struct, kw_only=True):
    """The JSON schema of what is read of config.json."""

    layers: Positive = msgspec.field(name="num_hidden_layers")
    width: Positive = msgspec.field(name="hidden_size")
    hidden: Positive = msgspec.field(name="intermediate_size")
    kv_heads: Positive = msgspec.field(name="num_key_value_heads")
    shared_hidden: Positive = msgspec.field(name="shared_intermediate_size")
    experts: Count = msgspec.field(name="num_local_experts")
    active: Count | None = msgspec.field(name="num_experts_per_tok", default=None)
    kinds: list[str] | None = msgspec.field(name="layer_types", default=None)
    positions: str | None = msgspec.field(name="position_embedding_type", default=None)
    heads: Positive = msgspec.field(name="mamba_n_heads")
    groups: Positive = msgspec.field(name="mamba_n_groups")
    head_dim: Positive | str | None = msgspec.field(name="mamba_d_head", default=None)
    state_dim: Positive = msgspec.field(name="mamba_d_state")
    kernel: Positive = msgspec.field(name="mamba_d_conv")
    expand: Positive = msgspec.field(name="mamba_expand")
    has_biases: bool = msgspec.field(name="mamba_proj_bias", default=False)

    @property
    def state_spaces(self) -> tuple[int, ...]:
        """The layers that are state spaces."""
        return layers_with_state(self.kinds or ["mamba"] * self.layers, self.layers, GRANITE_4)
