"""One element of a stack of quantized arrays, as a turn of a loop meets it: products read it where it lies.

A loop over stacked layers takes a slice of every leaf at each turn, and a kernel that is called with the slice needs it as an
array of its own: on a CPU copying it costs more than the product with one row. So the loop's body gets the whole stack and
the index. Every operation that is no product copies the slice then, as it would have been anyway.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ...array import QArray
from ...array.scheme import Scheme
from ...kernels.qmatmul import reads_packed_weights
from ...kernels.qmatmul.stacked import element, picked_product
from ...kernels.quantize import dequantize
from ..standin import StandIn, stands_in
from .rule import AbstractEvaluator, Rule


class _Rules(dict[str, Rule]):
    """Rules of a few primitives; calls keep theirs, and everything else takes the element by itself."""

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key, default if key in ("jit", "pjit", "closed_call") else _by_itself)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Turn(StandIn):
    """The index-th array of a stack.

    Attributes:
        stack: the arrays, stacked along the first axis, each with leaves of its own.
        index: which of them.
        is_transposed: whether its transpose is meant, whose axes a product takes in the other order. Static.
    """

    stack: QArray
    index: Int[Array, ""]
    is_transposed: bool = dataclasses.field(default=False, metadata={"static": True})

    rules: ClassVar[Mapping[str, Any]] = _Rules()

    @property
    def shape(self) -> tuple[int, ...]:
        lengths = self.stack.shape[1:]
        return lengths[::-1] if self.is_transposed else lengths

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.stack.dtype)

    def alone(self) -> QArray:
        """The array by itself."""
        x = element(self.stack, self.index)
        return x.T if self.is_transposed else x

    def array(self) -> jax.Array:
        return dequantize(self.alone())

    def stacked(self) -> Any:
        raise AssertionError("loops take the element by itself")


def left_in_place(x: Any) -> bool:
    """Whether a loop should take the elements of a stack as Turns: compiled kernels read them where they lie."""
    if not isinstance(x, QArray) or x.ndim != 3 or x.policy is not None or isinstance(x.scheme.scale, Scheme):
        return False
    return reads_packed_weights()


def alone(value: Any) -> Any:
    """A value, a Turn's as the QArray that it stands for."""
    return value.alone() if isinstance(value, Turn) else value


def _by_itself(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    return evaluator.equation(eqn, [alone(value) for value in values])


def _dot_general(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    lhs, rhs = values
    params = eqn.params
    if not isinstance(rhs, Turn) or stands_in(lhs) or params["out_sharding"] is not None:
        return _by_itself(evaluator, eqn, values)
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    if rhs.is_transposed:
        right, right_batch = (tuple(1 - axis for axis in axes) for axes in (right, right_batch))
    numbers = ((left, right), (left_batch, right_batch))
    settings = (numbers, params["precision"], params["preferred_element_type"])
    result = picked_product(jnp.asarray(lhs), rhs.stack, rhs.index, *settings)
    return _by_itself(evaluator, eqn, values) if result is None else [result]


def _convert_element_type(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    dtype = eqn.params["new_dtype"]
    if eqn.params["sharding"] is not None or not jnp.issubdtype(dtype, jnp.floating):
        return _by_itself(evaluator, eqn, values)
    return [dataclasses.replace(values[0], stack=values[0].stack.astype(dtype))]


def _transpose(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    swaps = tuple(eqn.params["permutation"]) == (1, 0)
    return [dataclasses.replace(values[0], is_transposed=values[0].is_transposed != swaps)]


Turn.rules.update(dot_general=_dot_general, convert_element_type=_convert_element_type, transpose=_transpose)  # type: ignore[attr-defined]
