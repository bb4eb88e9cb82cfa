"""Attention in C++ on CPU: `cpu.cc`, called inside the program that JAX compiles."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ...array import QArray
from ..extension import device_refusal, extension
from ..platforms import on_platform
from ..qmatmul.native import LEVELS, code_values, held_scales
from ..qmatmul.problem import Operand
from ..select import AbstractBackend
from .problem import AttentionProblem, Block
from .reference import BACKENDS, attended

_FLOATS = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Cpu(AbstractBackend[AttentionProblem]):
    """C++ for the CPU, which reads a cache where it lies, and no position that nobody sees.

    Attributes:
        isa: the instruction set to take, where the machine has it: avx512, avx2, portable (on arm64: NEON); None: the best.
    """

    name: ClassVar[str] = "cpu"
    platform: ClassVar[str] = "cpu"
    isa: str | None = None

    def unsupported(self, problem: AttentionProblem) -> str | None:
        if missing := extension("fewbit.kernels.attention._cpu").missing:
            return missing
        if len(problem.keys) != 1:
            return f"keys and values stand in {len(problem.keys)} blocks; it takes one"
        if problem.q.dtype not in _FLOATS:
            return f"the queries are {problem.q.dtype}, must be one of {', '.join(_FLOATS)}"
        return _refused("keys", problem.keys[0]) or _refused("values", problem.values[0])

    def passed_over(self, problem: AttentionProblem) -> str | None:
        if not any(problem.has_layers):
            return "keys and values are no layer of a cache, and plain products can have rules in a recipe"
        return device_refusal()

    def run(self, problem: AttentionProblem, *operands: Any) -> jax.Array:
        q, (block,) = operands
        layer = None if block.layer is None else jnp.int32(block.layer)

        def reference(q: Any, keys: Any, values: Any, seen: Any, layer: Any) -> jax.Array:
            return attended(q, [Block(keys, values, seen, layer)])

        def native(*operands: Any) -> jax.Array:
            return _native(self, *operands)

        y: jax.Array = on_platform("cpu", native, reference)(q, block.keys, block.values, block.seen, layer)
        return y


def _refused(name: str, held: Operand) -> str | None:
    """Why the kernel cannot read keys or values, or None."""
    scheme = held.scheme
    if scheme is None:
        return None if held.dtype in _FLOATS else f"the {name} are {held.dtype}, must be one of {', '.join(_FLOATS)}"
    if scheme.packing.interleave or scheme.packing.high_first:
        return f"the codes of the {name} are interleaved or stand high bits first; it takes them in order, low bits first"
    return None


def _native(backend: Cpu, q: Any, keys: Any, values: Any, seen: Any, layer: Any) -> jax.Array:
    if layer is None:
        keys, values = (jax.tree.map(lambda a: a[None], held) for held in (keys, values))
    (key_buffers, key_words), (value_buffers, value_words) = (
        _buffers("key", keys),
        _buffers("value", values),
    )
    call = jax.ffi.ffi_call("fewbit_attention", jax.ShapeDtypeStruct(q.shape, q.dtype), vmap_method="sequential")
    index = jnp.zeros(1, jnp.int32) if layer is None else layer.reshape(1)
    level = np.int64(-1 if backend.isa is None else LEVELS.index(backend.isa))
    return call(q, *key_buffers, *value_buffers, seen, index, level=level, **key_words, **value_words)


def _buffers(name: str, held: Any) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """Keys or values `[L, B, K, S, h]` as the kernel takes them: arrays, and what they mean."""
    nothing, bits, kind, unit = jnp.zeros(0, jnp.float32), 0, 0, 1.0
    buffers: tuple[jax.Array, ...] = (held, nothing, nothing, nothing)
    if isinstance(held, QArray):
        kind, numbers, unit = code_values(held.scheme)
        bits, buffers = held.scheme.format.bits, (held.codes, *held_scales(held), jnp.asarray(numbers))
    words = {"bits": np.int64(bits), "codes": np.int64(kind), "unit": np.float32(unit)}
    return buffers, {f"{name}_{word}": number for word, number in words.items()}


BACKENDS.add("cpu", Cpu())
