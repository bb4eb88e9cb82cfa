"""int8 activations for the quantized weights of a decoder."""

import collections
import dataclasses

import jax
import numpy as np
from jaxtyping import PyTree

from .._registry import near_names
from ..array.qarray import QArray, is_qarray
from ..array.scheme import Scheme
from ..array.scheme import scheme as as_scheme
from ..errors import QuantError
from ..formats.codebook import Codebook
from ..kernels.qmatmul.blocks import block_numbers, block_refusal
from ..kernels.qmatmul.integer_codes import is_whole
from ..kernels.qmatmul.paired import pair_refusal
from ..kernels.qmatmul.problem import Operand, Problem
from ..kvcache.policy import KVPolicy, kv_policy
from ..ops.policy import Policy

ACTIVATIONS = ("int8",)
"""What `activation_kind` takes."""


@dataclasses.dataclass(frozen=True)
class Activations:
    """The activations of a model's quantized weights.

    Attributes:
        schemes: the activation scheme of each weight whose product quantizes activations, by path.
        refusals: why the activations of the other quantized weights stay float, by path.
        rounded: the largest error of each format whose table was rounded to int8, relative to its largest number.
    """

    schemes: dict[str, str]
    refusals: dict[str, str]
    rounded: dict[str, float] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        counts = collections.Counter(self.schemes.values())
        parts = [f"{name} with {count} weight{'s' * (count > 1)}" for name, count in counts.items()]
        reasons = collections.Counter(self.refusals.values())
        parts += [f"float with {count} ({reason})" for reason, count in reasons.items()]
        parts += [f"the table of {name} rounded to int8, by {error:.4f} at most" for name, error in self.rounded.items()]
        return "; ".join(parts) or "float, since no weight is quantized"


def activation_kind(text: str | None) -> bool:
    """Whether activations are quantized to int8; None: no.

    Raises:
        QuantError: for another kind than int8.
    """
    if text is None:
        return False
    if text not in ACTIVATIONS:
        raise QuantError(f"activations {text!r} are unknown; {near_names(text, ACTIVATIONS)}")
    return True


def cache_policy(kv: str | None, per: str | None, *, int8_activations: bool = False) -> KVPolicy | None:
    """The policy of a KV cache, from the text of two options.

    They are schemes as in "int8" or "int8,int4", and what shares a scale. With int8 activations the queries of an int8 cache
    are int8, too.

    Raises:
        QuantError: for a scheme that a KV cache does not take, or a second text without the first.
    """
    if kv is None and per is not None:
        raise QuantError(f"--kv-scale {per} is about a quantized KV cache; it needs --kv, such as --kv int8")
    if kv is None:
        return None
    schemes = [scheme.strip() for scheme in kv.split(",")]
    if len(schemes) > 2:
        raise QuantError(f"--kv has {len(schemes)} formats, {kv}; it takes one, or those of keys and values, as int8,int4")
    return kv_policy(*schemes, per=per or "head", int8_queries=int8_activations and set(schemes) == {"int8"})


def with_int8_activations(params: PyTree) -> tuple[PyTree, Activations]:
    """Gives the quantized weights of a decoder int8 activations. They get policies where kernels multiply integers.

    An activation has one scale for each block of the weight along the contraction; for a per-channel weight, one for
    each token. Tables of numbers that are no integers (NF4) are rounded to int8: `Codebook.in_int8`. A weight that has a policy
    keeps it. Experts, and an embedding of a model with a separate head, stay as they are.

    Args:
        params: the pytree of a decoder, before layers are stacked.

    Returns:
        The pytree, and which activations are quantized.
    """
    schemes: dict[str, str] = {}
    refusals: dict[str, str] = {}
    rounded: dict[str, float] = {}
    has_head = "head" in params

    def given(keys: tuple[object, ...], leaf: object) -> object:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        if not isinstance(leaf, QArray) or (has_head and path == "embed"):
            return leaf
        if isinstance(leaf.policy, Policy):
            schemes[path] = "float" if leaf.policy.activation is None else leaf.policy.activation.name
            return leaf
        q, activation = with_int8_table(leaf), int8_activation(leaf)
        refusal = "experts are multiplied in groups of rows" if "experts" in path else activation_refusal(q, activation)
        if refusal is not None:
            refusals[path] = refusal
            return leaf
        schemes[path], fmt = activation.name, leaf.scheme.format
        if q is not leaf:
            rounded[fmt.name] = float(np.abs(q.scheme.format.values() - fmt.values()).max() / fmt.bound)
        return dataclasses.replace(q, policy=Policy(q.scheme, activation))

    return jax.tree_util.tree_map_with_path(given, params, is_leaf=is_qarray), Activations(schemes, refusals, rounded)


def with_int8_table(q: QArray) -> QArray:
    """The weight with its codebook rounded to int8, if kernels need it.

    Kernels need it for a table of up to 7 bits that they cannot multiply.
    """
    fmt = q.scheme.format
    if not isinstance(fmt, Codebook) or fmt.bits == 8 or block_numbers(fmt) is not None:
        return q
    return dataclasses.replace(q, scheme=dataclasses.replace(q.scheme, format=fmt.in_int8()))


def int8_activation(q: QArray, axis: int = -1) -> Scheme:
    """The int8 scheme with the blocks of a weight.

    They are those along its contraction axis; one scale for each token where it has no blocks.
    """
    tile = q.tiles[axis]
    if tile is None or tile >= q.shape[axis]:
        return as_scheme("int8")
    return as_scheme(f"int8_g{tile}")


def activation_refusal(q: QArray, activation: Scheme, axis: int = -1) -> str | None:
    """Why no kernel multiplies integers of a matrix and activations.

    The matrix is contracted along `axis`. None if one does.
    """
    x = Operand((1, q.shape[axis]), q.dtype.name, activation)
    problem = Problem(x, Operand.of(q), (((1,), (axis % 2,)), ((), ())))
    refusal = block_refusal(problem)
    if refusal is None or pair_refusal(problem) is None:
        return None
    if q.tiles[axis] is None and not is_whole(q.scheme):
        return f"the codes of {q.scheme.format.name} are not integers"
    return refusal
