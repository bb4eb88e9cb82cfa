"""Linear attention of Qwen3-Next and Qwen3.5 as GGUF files have it.

- The projections of queries, keys and values are one tensor, and that of z another. Qwen3-Next has them in one, by heads of keys.
- In Qwen3.5 head j of values shares head `j mod N` of keys, since llama.cpp repeats keys as a whole; in a checkpoint it shares head
  `j N // M`. So what has an axis of values is reordered: rows, and the columns of the output projection by blocks.
- `A_log` is stored as `-exp(A_log)`, and the convolution as `[C, K]`.

Reference: llama.cpp, conversion/qwen.py (2026).
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ....array.qarray import QArray
from ....array.scheme import Scheme
from ....errors import QuantError
from ..blocks import LAYOUTS, type_of
from ..stored import Stored, stored

PARTS: dict[str, tuple[str, ...]] = {
    "in_proj_qkv.weight": ("attn_qkv.weight",),
    "in_proj_z.weight": ("attn_gate.weight",),
    "in_proj_qkvz.weight": ("attn_qkv.weight", "attn_gate.weight"),
    "in_proj_a.weight": ("ssm_alpha.weight",),
    "in_proj_b.weight": ("ssm_beta.weight",),
    "in_proj_ba.weight": ("ssm_ba.weight",),
    "conv1d.weight": ("ssm_conv1d.weight",),
    "dt_bias": ("ssm_dt.bias",),
    "A_log": ("ssm_a",),
    "norm.weight": ("ssm_norm.weight",),
    "out_proj.weight": ("ssm_out.weight",),
}
"""The names in a GGUF file of each parameter of `linear_attn`, after those of the layer."""

_NAME = re.compile(r"model\.layers\.(\d+)\.linear_attn\.(.+)")
_FLOAT32 = ("conv1d.weight", "dt_bias", "A_log", "norm.weight")
_SIZES = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")


def linear_part(name: str) -> tuple[str, str] | None:
    """The layer and the name in `linear_attn` of a tensor of a checkpoint. None for another tensor."""
    found = _NAME.fullmatch(name)
    return (found[1], found[2]) if found and found[2] in PARTS else None


@dataclasses.dataclass(frozen=True)
class LinearHeads:
    """The heads of linear attention.

    Attributes:
        keys: heads of keys (N).
        values: heads of values (M).
        key_dim: the width of a head of keys.
        value_dim: the width of a head of values.
        is_tiled: whether llama.cpp repeats keys as a whole.
    """

    keys: int
    values: int
    key_dim: int
    value_dim: int
    is_tiled: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], *, is_tiled: bool) -> "LinearHeads":
        """The heads of a config.json; QuantError if it lacks one of the sizes, or they do not divide."""
        sizes: list[int] = []
        for name in _SIZES:
            size = config.get(name)
            if not isinstance(size, int) or not 1 <= size < 1 << 20:
                raise QuantError(f"config.json has {name} {size!r}; expected a positive size")
            sizes.append(size)
        keys, values, key_dim, value_dim = sizes
        if values % keys:
            raise QuantError(f"config.json has {keys} linear_num_key_heads, which do not divide {values} heads of values")
        return cls(keys, values, key_dim, value_dim, is_tiled)

    @property
    def reorders(self) -> bool:
        """Whether heads of values have another order in the file."""
        return self.is_tiled and self.keys not in (1, self.values)

    def order(self, width: int, first: int = 0) -> np.ndarray:
        """The indices of an axis with `width` elements for each head of values, after `first` others, in the order of the file."""
        by_head = np.arange(self.values * width).reshape(self.keys, -1, width)
        if self.is_tiled:
            by_head = by_head.swapaxes(0, 1)
        return np.concatenate([np.arange(first), first + by_head.reshape(-1)])

    def why_not_stored(self, name: str, scheme: Scheme) -> str | None:
        """Why the columns of an output projection in a scheme of GGUF cannot be reordered. None if they can."""
        type_name = type_of(scheme)
        return None if type_name is None else self.why_not_reordered(name, LAYOUTS[type_name].length)

    def why_not_reordered(self, name: str, length: int) -> str | None:
        """Why columns in blocks of `length` cannot be reordered, as `why_not_stored`."""
        if not self.reorders or self.value_dim % length == 0:
            return None
        return (
            f"llama.cpp has the columns of {name} in another order, by heads of {self.value_dim}, which blocks of {length} do not "
            "divide; choose shorter blocks, or keep it float"
        )


def linear_tensors(
    part: str, value: np.ndarray | jax.Array | QArray, heads: LinearHeads, what: str, ternary: str
) -> tuple[Stored, ...]:
    """The tensors of a GGUF file from a parameter of `linear_attn`, for each name of `PARTS`.

    Args:
        part: its name in `linear_attn`.
        value: the parameter.
        heads: the heads.
        what: its name, for messages.
        ternary: as for `stored`.

    Raises:
        QuantError: for a parameter that GGUF cannot store without loss, or of another shape than the heads'.
    """
    keys = 2 * heads.keys * heads.key_dim
    lengths = {
        "in_proj_qkv.weight": keys + heads.values * heads.value_dim,
        "in_proj_qkvz.weight": keys + 2 * heads.values * heads.value_dim,
        "in_proj_z.weight": heads.values * heads.value_dim,
        "conv1d.weight": keys + heads.values * heads.value_dim,
        "in_proj_ba.weight": 2 * heads.values,
        **dict.fromkeys(("in_proj_a.weight", "in_proj_b.weight", "dt_bias", "A_log"), heads.values),
    }
    if part in lengths and value.shape[0] != lengths[part]:
        raise QuantError(f"{what} has shape {tuple(value.shape)}, but config.json makes {lengths[part]} rows")
    if part == "conv1d.weight":
        value = value.reshape(value.shape[0], -1)
    tensor = stored(value, what, ternary)
    if part in _FLOAT32:
        if tensor.type_name not in ("F32", "F16", "BF16"):
            raise QuantError(f"llama.cpp needs {what} in float32, but it is {tensor.type_name}; leave it float")
        x = tensor.values().astype(np.float32)
        if part == "A_log":
            x = -np.exp(x)
        if part != "norm.weight":
            x = x[heads.order(heads.value_dim, keys) if part == "conv1d.weight" else heads.order(1)]
        return (stored(x, what),)
    if part == "out_proj.weight":
        return (_with_columns(tensor, heads, what),)
    if part == "in_proj_ba.weight":
        return (tensor,)
    if part == "in_proj_qkvz.weight":
        rows = np.arange(lengths[part]).reshape(heads.keys, -1)
        n, m = heads.key_dim, heads.values // heads.keys * heads.value_dim
        parts = np.split(rows, [n, 2 * n, 2 * n + m], axis=1)
        q, k, v, z = (part_rows.reshape(-1) for part_rows in parts)
        return (tensor.with_rows(tensor.data[np.concatenate([q, k, v])]), tensor.with_rows(tensor.data[z]))
    if part == "in_proj_qkv.weight":
        return (tensor.with_rows(tensor.data[heads.order(heads.value_dim, keys)]),)
    width = heads.value_dim if part == "in_proj_z.weight" else 1
    return (tensor.with_rows(tensor.data[heads.order(width)]),)


def _with_columns(tensor: Stored, heads: LinearHeads, what: str) -> Stored:
    """The output projection, its columns in the order of the file: of bytes, by whole blocks."""
    if not heads.reorders:
        return tensor
    if tensor.width != heads.values * heads.value_dim:
        raise QuantError(f"{what} has {tensor.width} columns, but config.json makes {heads.values * heads.value_dim}")
    length = LAYOUTS[tensor.type_name].length if tensor.type_name in LAYOUTS else 1
    if reason := heads.why_not_reordered(what, length):
        raise QuantError(reason)
    by_head = tensor.data.reshape(len(tensor.data), heads.values, -1)  # [D, M, bytes of a head]
    return tensor.with_rows(by_head[:, heads.order(1)].reshape(tensor.data.shape))
