"""Attention in C++ on CPU, an FFI call to `attention.cc`."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ....array.qarray import QArray
from ...backend import AbstractBackend
from ...buffers import LEVELS, code_values, flat, scale_buffers
from ...extension import device_refusal, extension
from ..problem import AttentionProblem, Block, KVValues, Operand, Queries

_FLOATS = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Cpu(AbstractBackend[AttentionProblem]):
    """C++ for the CPU. It reads the KV cache in place and skips masked positions.

    Attributes:
        isa: the instruction set to use, if the machine has it: avx512, avx2, portable (on arm64: NEON); None: the best.
    """

    name: ClassVar[str] = "cpu"
    platform: ClassVar[str] = "cpu"
    isa: str | None = None

    def unsupported(self, problem: AttentionProblem) -> str | None:
        if missing := extension("fewbit.kernels.attention.cpu._attention").missing:
            return missing
        if len(problem.keys) != 1:
            return f"keys and values come in {len(problem.keys)} blocks; it takes one"
        if problem.q.dtype not in _FLOATS:
            return f"the queries are {problem.q.dtype}, must be one of {', '.join(_FLOATS)}"
        return _refused("keys", problem.keys[0]) or _refused("values", problem.values[0])

    def not_chosen(self, problem: AttentionProblem) -> str | None:
        if not any(problem.has_layers):
            return "keys and values are no layer of a KV cache, and a recipe can have rules for the products of plain JAX"
        return device_refusal()

    def run(self, problem: AttentionProblem, *operands: PyTree) -> jax.Array:
        q, (block,), sinks = operands
        return _attended(self, problem.soft_cap, q, block, sinks)


def _attended(backend: Cpu, soft_cap: float, q: Queries, block: Block, sinks: jax.Array | None) -> jax.Array:
    keys, values, layer = block.keys, block.values, block.layer
    if layer is None:
        keys, values = jax.tree.map(lambda a: a[None], (keys, values))  # [1, B, K, S, h]
        layer = 0
    key_buffers, key_words = _buffers("key", keys)
    value_buffers, value_words = _buffers("value", values)
    call = jax.ffi.ffi_call("fewbit_attention", jax.ShapeDtypeStruct(q.shape, q.dtype), vmap_method="sequential")
    first, sinks = flat(block.first, jnp.int32), flat(sinks, jnp.float32).astype(jnp.float32)
    queries = (q.codes, q.scale) if isinstance(q, QArray) else (q, jnp.zeros(0, jnp.float32))
    words = {"soft_cap": np.float32(soft_cap), "level": np.int64(LEVELS.index(backend.isa) if backend.isa else -1)}
    return call(
        *queries,
        *key_buffers,
        *value_buffers,
        first,
        block.seen,
        sinks,
        jnp.int32(layer).reshape(1),
        **words,
        **key_words,
        **value_words,
    )


def _refused(name: str, operand: Operand) -> str | None:
    """Why the kernel cannot read keys or values, or None."""
    scheme = operand.scheme
    if scheme is None and operand.dtype not in _FLOATS:
        return f"the {name} are {operand.dtype}, must be one of {', '.join(_FLOATS)}"
    if scheme is not None and (scheme.packing.interleave or scheme.packing.high_first):
        return f"the codes of the {name} are interleaved or high bits first; it takes them in order, low bits first"
    return None


def _buffers(name: str, values: KVValues) -> tuple[tuple[jax.Array, ...], dict[str, np.generic]]:
    """The buffers and attributes of keys or values `[L, B, K, S, h]`."""
    bits, kind, unit = 0, 0, 1.0
    if isinstance(values, QArray):
        kind, numbers, unit = code_values(values.scheme)
        bits, buffers = values.scheme.format.bits, (values.codes, *scale_buffers(values), jnp.asarray(numbers))
    else:
        nothing = jnp.zeros(0, jnp.float32)
        buffers = (values, nothing, nothing, nothing)
    return buffers, {f"{name}_bits": np.int64(bits), f"{name}_codes": np.int64(kind), f"{name}_unit": np.float32(unit)}
