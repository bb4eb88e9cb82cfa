"""The operands of attention: queries, and blocks of keys and values."""

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from ...array.qarray import QArray
from ...array.scheme import Scheme
from ...array.validity import refuse_invalid
from ...errors import QuantError
from ...formats.format import FORMATS
from ..backend import AbstractProblem
from ..qmatmul.problem import Operand as Operand

KVValues: TypeAlias = Float[Array, "*L B K S h"] | QArray
Queries: TypeAlias = Float[Array, "B H T h"] | QArray
QUERIES = Scheme(FORMATS["int8_narrow"], {...: 1, -1: None})
"""The scheme of quantized queries: int8 from -127 to 127, one float32 scale for each head of a token."""
H = TypeVar("H")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block:
    """The keys and values of some positions, and their mask.

    Each new token attends to the positions from `first` to before `seen`.

    Attributes:
        keys: `[B, K, S, h]`, floating or quantized by a scheme that `KVPolicy` takes; with `layer`, `[L, B, K, S, h]`.
        values: likewise.
        seen: for each new token the end of the positions that it attends to.
        layer: the layer to use of a cache of all layers; kernels read it in place.
        first: for each new token the first position that it attends to (a sliding window); None: position 0.
    """

    keys: KVValues
    values: KVValues
    seen: Int[Array, " T"]
    layer: Int[Array, ""] | int | None = None
    first: Int[Array, " T"] | None = None

    def refuse_unless_it_fits(self, q: Queries) -> None:
        """Raises a QuantError where the shapes do not match. A kernel would read out of bounds."""
        for name in ("keys", "values"):
            if isinstance(value := getattr(self, name), QArray):
                refuse_invalid(value, f"the QArray of {name}")
                if isinstance(q, QArray) and value.scheme.format != QUERIES.format:
                    raise QuantError(
                        f"the queries are int8 and the {name} {value.scheme.format.name}; products of integers need "
                        f"{QUERIES.format.name}, as of kv_policy('int8')"
                    )
        keys = self.keys.shape if self.layer is None else self.keys.shape[1:]  # [B, K, S, h]
        if len(keys) != 4 or keys[0] != q.shape[0] or not keys[1] or q.shape[1] % keys[1] or keys[-1] != q.shape[-1]:
            raise QuantError(
                f"q has shape {q.shape} and the keys {keys}; the key heads must divide the heads, and the head widths and "
                "batches be the same"
            )
        if self.keys.shape != self.values.shape:
            raise QuantError(
                f"the keys have shape {self.keys.shape} and the values {self.values.shape}; they must be the same"
            )
        for name, positions in (("seen", self.seen), ("first", self.first)):
            if positions is not None and positions.shape != q.shape[2:3]:
                raise QuantError(
                    f"{name} has shape {positions.shape} and must have a number for each of {q.shape[2]} tokens"
                )

    def of_layer(self) -> "Block":
        """The same positions with the keys and values of its layer alone, `[B, K, S, h]`."""
        if self.layer is None:
            return self
        return Block(taken(self.keys, self.layer), taken(self.values, self.layer), self.seen, first=self.first)


def taken(stack: H, layer: Int[Array, ""] | int) -> H:
    """One layer of a stack of arrays or QArrays."""
    index = jnp.int32(layer)
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, keepdims=False), stack)


def seen_positions(start: Int[Array, ""] | int, count: int) -> Int[Array, " T"]:
    """The causal `seen`: each new token attends to itself and positions before it.

    Args:
        start: the position of the first new token.
        count: how many new tokens there are (T).

    Returns:
        For each new token the number of positions.

    >>> seen_positions(4, 3).tolist()
    [5, 6, 7]
    """
    return jnp.int32(start) + jnp.arange(1, count + 1, dtype=jnp.int32)


def window_start(
    seen: Int[Array, " T"], window: Int[Array, ""] | np.integer | int, *, is_chunk: bool = False
) -> Int[Array, " T"] | None:
    """The first positions of sliding windows, or of chunks.

    Args:
        seen: for each new token the end of its window, from `seen_positions`.
        window: how many positions a token attends to; 0: all.
        is_chunk: whether positions are cut into chunks of that length, and a token attends to those of its own chunk alone.

    Returns:
        For each new token the first position; None where `window` is the Python or NumPy integer 0.

    >>> window_start(seen_positions(4, 3), 3).tolist()
    [2, 3, 4]
    >>> window_start(seen_positions(4, 3), 3, is_chunk=True).tolist()
    [3, 3, 6]
    """
    if isinstance(window, int | np.integer) and window == 0:
        return None
    if is_chunk:
        last = seen - 1
        return jnp.where(window == 0, 0, last - last % jnp.maximum(jnp.int32(window), 1))
    return jnp.where(window == 0, 0, jnp.maximum(seen - jnp.int32(window), 0))


@dataclasses.dataclass(frozen=True)
class AttentionProblem(AbstractProblem):
    """What a backend needs to decide whether it supports an attention call.

    Attributes:
        q: the queries, `[B, H, T, h]`; quantized ones have the scheme `QUERIES`.
        keys: of each block.
        values: of each block.
        has_layers: for each block whether it is a layer of a cache.
        has_windows: for each block whether tokens attend to positions from `first` on only.
        has_sinks: whether each head's softmax has one more logit.
        soft_cap: the soft cap of the logits; 0: none.
    """

    operation = "attention"
    q: Operand
    keys: tuple[Operand, ...]
    values: tuple[Operand, ...]
    has_layers: tuple[bool, ...]
    has_windows: tuple[bool, ...] = (False,)
    has_sinks: bool = False
    soft_cap: float = 0.0

    @classmethod
    def of(
        cls,
        q: Queries,
        blocks: Sequence[Block],
        sinks: Float[Array, " H"] | None = None,
        soft_cap: float = 0.0,
    ) -> "AttentionProblem":
        """The problem of these operands.

        Raises:
            QuantError: when shapes do not match, the soft cap is negative, or quantized queries have another scheme than
                `QUERIES` or quantized keys or values that are not int8.
        """
        if isinstance(q, QArray):
            refuse_invalid(q, "the QArray of queries")
            if dataclasses.replace(q.scheme, calibration=QUERIES.calibration) != QUERIES:
                raise QuantError(f"the queries are {q.scheme.name}; quantize them with fewbit.kernels.attention.QUERIES")
        if not soft_cap >= 0:
            raise QuantError(f"soft_cap is {soft_cap}, must be positive, or 0 for none")
        if sinks is not None and sinks.shape != q.shape[1:2]:
            raise QuantError(f"sinks has shape {sinks.shape} and must have a number for each of {q.shape[1]} heads")
        for block in blocks:
            block.refuse_unless_it_fits(q)
        keys, values = (tuple(Operand.of(getattr(b, name)) for b in blocks) for name in ("keys", "values"))
        layers, windows = (tuple(getattr(b, name) is not None for b in blocks) for name in ("layer", "first"))
        return cls(Operand.of(q), keys, values, layers, windows, sinks is not None, soft_cap)

    def __str__(self) -> str:
        return f"q={self.q} " + ", ".join(f"keys={k} values={v}" for k, v in zip(self.keys, self.values, strict=True))
