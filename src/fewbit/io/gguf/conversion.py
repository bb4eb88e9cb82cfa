"""Tensors of a Hugging Face checkpoint as GGUF files have them.

Rows of q and k are permuted, experts stacked and separated, the offset of norms added: of bytes of rows, so that nothing is
quantized again.
"""

import dataclasses
import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import jax
import numpy as np

from ...array.qarray import QArray
from ...errors import QuantError, UnsupportedError
from ...kernels.quantize.dispatch import dequantize
from .architectures import ARCHITECTURES, Architecture
from .layers import state_space
from .layers.gemma4 import name_of_scale, target_of_factors, with_expert_factors
from .layers.linear_attention import PARTS, LinearHeads, linear_part, linear_tensors
from .stored import Stored, stacked, stored

_EXPERT = re.compile(
    r"(?:model|backbone)\.layers\.(\d+)\.(?:(?:mlp|block_sparse_moe|feed_forward|mixer)\.)?experts\.(\d+)\.(\w+)\.weight"
)
_EXPERTS = re.compile(
    r"model\.layers\.(\d+)\.(?:(?:(?:mlp|feed_forward)\.)?experts\.(?=gate_up|down)|block_sparse_moe\.(?=input_|output_))"
    r"(gate_up_proj|down_proj|input_linear|output_linear)(_bias|\.weight)?"
)
_DOWN = ("down_proj", "output_linear")
_PARTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}
_DERIVED = re.compile(
    r".*\.rotary_emb\.inv_freq|(?:gpt_neox\.layers\.\d+\.attention|transformer\.h\.\d+\.attn)\.(?:bias|masked_bias)"
)
_HEAD = "lm_head.weight"
_SHORT_CONV = ".shortconv.conv.weight"
_LATENT = ".self_attn.kv_b_proj.weight"


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The conversion of one checkpoint.

    Attributes:
        architecture: its architecture.
        config: the content of its config.json.
        package: the gguf package, whose table of names is used.
        is_permuted: whether the rows of q and k are in the order of Hugging Face and have to be permuted.
        ternary: the type of ternary tensors, "TQ2_0" or "TQ1_0".
    """

    architecture: Architecture
    config: Mapping[str, Any]
    package: ModuleType
    is_permuted: bool
    ternary: str = "TQ2_0"

    def check_names(self, names: Collection[str]) -> None:
        """Refuses a checkpoint with a tensor that has no GGUF name.

        Raises:
            UnsupportedError: naming the first of them.
            QuantError: when there are fewer tensors than layers.
        """
        if self._settings["num_hidden_layers"] > len(names):
            raise QuantError(
                f"config.json has {self._settings['num_hidden_layers']} layers, the checkpoint {len(names)} tensors"
            )
        for name in names:
            is_expert = _EXPERT.fullmatch(name) or _EXPERTS.fullmatch(name)
            is_recurrent = linear_part(name) is not None or self._state_space_targets(name)
            if not self._is_dropped(name) and not is_expert and not name.endswith(_LATENT) and not is_recurrent:
                self._name(name)

    def targets(self, name: str) -> tuple[str, ...]:
        """The names of the GGUF tensors that get parts of this tensor.

        The tensor is one of the checkpoint. Empty if it is dropped.
        """
        if self._is_dropped(name):
            return ()
        if found := _EXPERT.fullmatch(name):
            return (self._expert_target(name, *found.groups()),)
        if found := _EXPERTS.fullmatch(name):
            layer, part, suffix = found.groups()
            kinds = ("down",) if part in _DOWN else ("gate", "up")
            return tuple(f"blk.{layer}.ffn_{kind}_exps.{'bias' if suffix == '_bias' else 'weight'}" for kind in kinds)
        if found := linear_part(name):
            return tuple(f"blk.{found[0]}.{target}" for target in PARTS[found[1]])
        if found := self._state_space_targets(name):
            return found
        return (target_of_factors(self._name(name)),)

    def tensors(self, values: Iterable[tuple[str, np.ndarray | jax.Array | QArray]]) -> Iterator[tuple[str, Stored]]:
        """Converts the tensors of a checkpoint, in any order.

        Args:
            values: their names in the checkpoint, and arrays or QArrays.

        Returns:
            An iterator of GGUF names and tensors; experts of a layer come together, after the last of them.

        Raises:
            QuantError: for a tensor that GGUF cannot store without loss, or missing experts.
            UnsupportedError: for one that llama.cpp cannot run.
        """
        return with_expert_factors(self._tensors(values)) if self.architecture.has_kinds_of_layers else self._tensors(values)

    def _tensors(self, values: Iterable[tuple[str, np.ndarray | jax.Array | QArray]]) -> Iterator[tuple[str, Stored]]:
        """The tensors, factors of experts among them."""
        waiting: dict[str, dict[int, Stored]] = {}
        for name, value in values:
            if self._is_dropped(name):
                continue
            if found := _EXPERT.fullmatch(name):
                target = self._expert_target(name, *found.groups())
                experts = waiting.setdefault(target, {})
                experts[int(found[2])] = stored(value, f"tensor {name!r}", self.ternary)
                if len(experts) == self._expert_count:
                    parts = waiting.pop(target)
                    yield target, self._checked(target, stacked([parts[i] for i in sorted(parts)], f"tensor {target!r}"))
            elif found := _EXPERTS.fullmatch(name):
                for target, tensor in self._fused_experts(name, value, *found.groups()):
                    yield target, self._checked(target, tensor)
            elif name.endswith(_LATENT):
                yield from self._latent_parts(name, value)
            elif found := linear_part(name):
                parts = linear_tensors(found[1], value, self._linear_heads, f"tensor {name!r}", self.ternary)
                for target, tensor in zip(self.targets(name), parts, strict=True):
                    yield target, self._checked(target, tensor)
            elif found := self._state_space_targets(name):
                parts = state_space.tensors(name, value, self._settings, f"tensor {name!r}", self.ternary)
                for target, tensor in zip(found, parts, strict=True):
                    yield target, self._checked(target, tensor)
            else:
                target = self._name(name)
                yield target, self._checked(target, self._converted(target, stored(value, f"tensor {name!r}", self.ternary)))
        if waiting:
            target, experts = next(iter(waiting.items()))
            raise QuantError(f"{target} needs {self._expert_count} experts, the checkpoint has {len(experts)}")

    @functools.cached_property
    def _names(self) -> Any:
        """The gguf package's table of names."""
        kind = next(k for k, text in self.package.MODEL_ARCH_NAMES.items() if text == self.architecture.name)
        return self.package.get_tensor_name_map(kind, int(self._settings["num_hidden_layers"]))

    @functools.cached_property
    def _settings(self) -> dict[str, Any]:
        """The config.json, and the values of the architecture that it omits."""
        return self.architecture.settings(self.config)

    @functools.cached_property
    def _linear_heads(self) -> LinearHeads:
        """The heads of linear attention."""
        return LinearHeads.of(self._settings, is_tiled=self.architecture.has_tiled_values)

    def _state_space_targets(self, name: str) -> tuple[str, ...]:
        """The GGUF names of a tensor of a state space or of the shared feed-forward block; empty for another one."""
        return (
            state_space.targets(name, self._settings) if self.architecture.name.startswith(("granite", "nemotron_h")) else ()
        )

    @property
    def _expert_count(self) -> int:
        names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        return int(next((self._settings[name] for name in names if self._settings.get(name)), 0))

    def _is_dropped(self, name: str) -> bool:
        """Whether llama.cpp computes the tensor, or a tied head repeats the embedding."""
        said = self._settings
        is_tied = said.get("tie_embedding", said.get("tie_word_embeddings", False))  # the first in older LFM2
        return _DERIVED.fullmatch(name) is not None or (name == _HEAD and bool(is_tied))

    def _expert_target(self, name: str, layer: str, index: str, part: str) -> str:
        """The GGUF name of the tensor with all experts of a layer."""
        if part not in _PARTS:
            raise UnsupportedError(f"tensor {name!r} has no GGUF name")
        return f"blk.{layer}.ffn_{_PARTS[part]}_exps.weight"

    def _name(self, name: str) -> str:
        """The GGUF name of a tensor."""
        if target := name_of_scale(name):
            return target
        if name.endswith((".sinks", ".layer_scalar")):
            name += ".weight"
        name = name.replace("e_score_correction_bias", "e_score_correction.bias").replace(
            ".expert_bias", ".expert_bias.bias"
        )
        target = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise UnsupportedError(f"tensor {name!r} has no GGUF name in architecture {self.architecture.name}")
        return target

    def _converted(self, name: str, tensor: Stored) -> Stored:
        """One tensor that is neither an expert nor dropped."""
        if self.is_permuted and (heads := self._heads(name)):
            outputs = tensor.shape[0]
            rows = tensor.data.reshape(heads, 2, outputs // heads // 2, -1)  # bytes of an output last, also of a bias
            tensor = tensor.with_rows(rows.swapaxes(1, 2).reshape(tensor.data.shape))
        if self.architecture.is_fused_by_head and ".attn_qkv." in name:
            by_head = tensor.data.reshape(int(self._settings["num_attention_heads"]), 3, -1, *tensor.data.shape[1:])
            tensor = tensor.with_rows(by_head.swapaxes(0, 1).reshape(tensor.data.shape))
        if not _is_float32(name, tensor):
            return tensor
        if tensor.type_name not in ("F32", "F16", "BF16"):
            raise QuantError(f"llama.cpp needs {name} in float32, but it is {tensor.type_name}; leave it float")
        values = tensor.values().astype(np.float32)
        if self.architecture.norm_offset and name.endswith("norm.weight"):
            values = values + np.float32(self.architecture.norm_offset)
        if name.endswith(_SHORT_CONV):
            values = values.reshape(len(values), -1)
        if name.endswith(".exp_probs_b.bias"):
            values = values.reshape(-1)  # ERNIE's is one row
        return stored(values, name)

    def _heads(self, name: str) -> int:
        """The heads whose rows are permuted; 0: none."""
        heads = int(self._settings["num_attention_heads"])
        if re.fullmatch(r"blk\.\d+\.attn_q\.(weight|bias)", name):
            return heads
        if re.fullmatch(r"blk\.\d+\.attn_k\.(weight|bias)", name):
            return int(self._settings.get("num_key_value_heads") or heads)
        return 0

    def _latent_parts(self, name: str, value: np.ndarray | jax.Array | QArray) -> Iterator[tuple[str, Stored]]:
        """DeepSeek's `kv_b`, split into `k_b` and `v_b`. `[H (n + v), rank]` becomes `[H, rank, n]` and `[H, v, rank]`.

        The blocks of a quantized array lie along `rank`, so `k_b`, its transposed part, is stored as decoded float32 numbers.
        """
        heads, plain = int(self.config["num_attention_heads"]), int(self.config["qk_nope_head_dim"])
        keys, values = (self._name(name.replace("kv_b_proj", f"{part}_b_proj")) for part in "kv")
        tensor = stored(value, f"tensor {name!r}", self.ternary)
        rows = tensor.data.reshape(heads, -1, tensor.data.shape[-1])  # [H, n + v, bytes]
        yield values, self._checked(values, tensor.with_rows(rows[:, plain:]))
        if isinstance(value, QArray):
            value = dequantize(value, np.float32)
        by_head = np.asarray(value).reshape(heads, -1, value.shape[-1])  # [H, n + v, rank]
        yield keys, stored(by_head[:, :plain].swapaxes(1, 2), f"tensor {name!r}")

    def _fused_experts(
        self, name: str, value: np.ndarray | jax.Array | QArray, layer: str, part: str, suffix: str | None
    ) -> Iterator[tuple[str, Stored]]:
        """The experts of a layer in one tensor: gate and up together, or down."""
        if suffix == "_bias":
            rows = np.asarray(value, np.float32)  # [E, out]
            for kind, part_rows in self._separated(part, rows).items():
                yield f"blk.{layer}.ffn_{kind}_exps.bias", stored(part_rows, name)
            return
        if self.architecture.has_experts_in_out:
            value = _contracted_last(value)
        tensor = stored(value, f"tensor {name!r}", self.ternary)
        for kind, part_rows in self._separated(part, tensor.data).items():  # [E, out, bytes]
            yield f"blk.{layer}.ffn_{kind}_exps.weight", tensor.with_rows(part_rows)

    def _separated(self, part: str, rows: np.ndarray) -> dict[str, np.ndarray]:
        """The rows `[E, out, ...]` of gate and up, or of down."""
        if part in _DOWN:
            return {"down": rows}
        if self.architecture.has_interleaved_experts:
            return {"gate": rows[:, 0::2], "up": rows[:, 1::2]}
        half = rows.shape[1] // 2
        return {"gate": rows[:, :half], "up": rows[:, half:]}

    def _checked(self, name: str, tensor: Stored) -> Stored:
        """The tensor with the tensor scale that llama.cpp applies, as `with_applied_scale`."""
        architecture = self.architecture
        return with_applied_scale(name, tensor, architecture.name, is_applied=applies_scale(architecture.name, name))


_WITHOUT_SCALE = re.compile(r"blk\.\d+\.(?:inp_gate|proj|ffn_gate_up_exps)\.weight")
"""Gates and projections of per-layer inputs, and joined gates and up projections of experts."""


def applies_scale(architecture: str, name: str) -> bool:
    """Whether llama.cpp applies the tensor scale of NVFP4 in the products with a tensor of a GGUF architecture."""
    has_scales = any(one.has_tensor_scales for one in ARCHITECTURES.values() if one.name == architecture)
    return has_scales and name.startswith(("blk.", "output.")) and not _WITHOUT_SCALE.fullmatch(name)


def ignored_scale(name: str, architecture: str) -> str:
    """The message for a tensor scale that llama.cpp does not apply."""
    return f"llama.cpp ignores the tensor scale of NVFP4 in {name} of architecture {architecture}; keep it float, or choose mxfp4"


def with_applied_scale(name: str, tensor: Stored, architecture: str, *, is_applied: bool) -> Stored:
    """The tensor with one tensor scale per expert, and without a tensor scale of 1 that llama.cpp does not read.

    Raises:
        UnsupportedError: for another tensor scale that llama.cpp ignores.
    """
    if tensor.tensor_scale is None:
        return tensor
    if not is_applied:
        if (tensor.tensor_scale != 1).any():
            raise UnsupportedError(ignored_scale(name, architecture))
        return dataclasses.replace(tensor, tensor_scale=None)
    if "_exps" not in name or tensor.tensor_scale.size == len(tensor.data):
        return tensor
    return dataclasses.replace(tensor, tensor_scale=np.repeat(tensor.tensor_scale, len(tensor.data)))


def is_contracted_first(architecture: Architecture, name: str) -> bool:
    """Whether a tensor is a stack of experts `[E, in, out]`, which GGUF stores with `in` last."""
    return architecture.has_experts_in_out and _EXPERTS.fullmatch(name) is not None


def _contracted_last(value: np.ndarray | jax.Array | QArray) -> np.ndarray | jax.Array | QArray:
    """Experts `[E, in, out]` with the contraction axis `in` last.

    A QArray that is packed along its last axis has it there already.
    """
    if isinstance(value, QArray) and value.scheme.pack_axis == -1:
        return value
    return value.swapaxes(-1, -2)


def _is_float32(name: str, tensor: Stored) -> bool:
    """Whether llama.cpp needs a tensor in float32: norms, biases, routers, short convolutions and all vectors."""
    is_matrix = len(tensor.shape) > 1 and name.endswith(".weight")
    return not is_matrix or name.endswith(("_norm.weight", _SHORT_CONV)) or ".ffn_gate_inp" in name
