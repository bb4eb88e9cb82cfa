"""A lazily sliced element of a scanned QArray.

A scan over stacked layers slices every leaf in each iteration, and a kernel that is called with the slice needs a copy of it:
on a CPU the copy costs more than a GEMV. So the loop's body gets the stack and the index. Any other operation slices first.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jaxtyping import Array, Int, PyTree

from ....array.qarray import QArray
from ....array.scheme import Scheme
from ....kernels.qmatmul.cpu.backend import reads_packed_weights
from ....kernels.qmatmul.kernel import element
from ....kernels.quantize.dispatch import dequantize
from ..evaluator import Evaluator, Rule
from ..proxy import ArrayProxy, is_proxy

_CALLS = ("jit", "pjit", "closed_call")
_RULES: dict[str, Rule] = {}  # with the product's, from `products`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScanSlice(ArrayProxy):
    """The index-th array of a stack.

    Attributes:
        stack: the arrays, stacked along the first axis of every leaf.
        index: the element.
        is_transposed: whether this is the element's transpose. Static.
    """

    stack: QArray
    index: Int[Array, ""]
    is_transposed: bool = dataclasses.field(default=False, metadata={"static": True})

    rules: ClassVar[Mapping[str, Any]] = _RULES

    @property
    def shape(self) -> tuple[int, ...]:
        lengths = self.stack.shape[1:]
        return lengths[::-1] if self.is_transposed else lengths

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.stack.dtype)

    def alone(self) -> QArray:
        """The element as a QArray."""
        x = element(self.stack, self.index)
        if self.is_transposed:
            return x.T
        return x

    def array(self) -> jax.Array:
        return dequantize(self.alone())

    def as_operand(self, primitive: str, values: Sequence[Any]) -> "QArray | ScanSlice":
        """Itself in calls, and in its own rules as the only proxy; elsewhere the element as a QArray."""
        if primitive in _CALLS or (primitive in _RULES and sum(map(is_proxy, values)) == 1):
            return self
        return self.alone()

    def stacked(self) -> Any:
        raise AssertionError("loops slice the stack first")


def is_sliced_lazily(x: object) -> bool:
    """Whether a loop should slice a stack lazily: compiled kernels can index it."""
    if not isinstance(x, QArray) or x.ndim != 3 or isinstance(x.scheme.scale, Scheme):
        return False
    return reads_packed_weights()


def alone(value: PyTree) -> PyTree:
    """A value; a ScanSlice is sliced to a QArray."""
    return value.alone() if isinstance(value, ScanSlice) else value


def sliced(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """An equation with its ScanSlices sliced to QArrays."""
    return evaluator.equation(eqn, [alone(value) for value in values])


def _convert_element_type(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    dtype = eqn.params["new_dtype"]
    if eqn.params["sharding"] is not None or not jnp.issubdtype(dtype, jnp.floating):
        return sliced(evaluator, eqn, values)
    return [dataclasses.replace(values[0], stack=values[0].stack.astype(dtype))]


def _transpose(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    swaps = tuple(eqn.params["permutation"]) == (1, 0)
    return [dataclasses.replace(values[0], is_transposed=values[0].is_transposed != swaps)]


_RULES.update(convert_element_type=_convert_element_type, transpose=_transpose)
