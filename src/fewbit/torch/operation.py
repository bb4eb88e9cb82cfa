"""Torch operators with derivatives and vmap, linear in their first tensor.

`torch.library.register_autograd` serves torch.autograd and compilers; under `torch.func` such a gradient is an error, and a
forward-mode derivative is zero (torch 2.13). So where a derivative is asked for outside of a compiler, the operator is
called by a `torch.autograd.Function`, which serves all. Without one a call takes half the time (48 us in place of 90).
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch.autograd import forward_ad

from ..errors import UnsupportedError
from .dlpack import LIBRARY
from .qtensor import form_of

Tensors: TypeAlias = tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Operation(abc.ABC):
    """The torch operator `name(Tensor x, Tensor[] tensors, str form, ...) -> Tensor`, with its settings.

    Attributes:
        settings: what follows the tensors, the JSON of a form first.
    """

    settings: tuple[Any, ...]

    name: ClassVar[str]
    merges_rows: ClassVar[bool] = False
    """Whether a new first axis of `x` can be merged with its first axis, and then be found in that of the result."""

    @property
    def is_linear(self) -> bool:
        """Whether the result is linear in `x`. Under a policy, which rounds it, it is not."""
        return form_of(self.settings[0]).policy is None

    @property
    def reads_x(self) -> bool:
        """Whether the gradient needs `x`."""
        return not self.is_linear

    @abc.abstractmethod
    def transposed(self, x: torch.Tensor | None, tensors: Tensors) -> tuple["Operation", Tensors]:
        """The operation from the gradient of the result to that of `x`, and its other tensors.

        Args:
            x: the first tensor, if `reads_x`.
            tensors: the others.

        Raises:
            UnsupportedError: if it has no gradient.
        """

    def value(self, x: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Calls the operator."""
        return getattr(torch.ops.fewbit, self.name)(x, tensors, *self.settings)

    @classmethod
    def register_gradient(cls) -> None:
        """Registers the gradient that compilers take."""
        torch.library.register_autograd(f"fewbit::{cls.name}", _backward, setup_context=cls._setup_context, lib=LIBRARY)

    @classmethod
    def _setup_context(cls, ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, tensors, *settings = inputs
        _save(ctx, cls(tuple(settings)), x, tensors)
        ctx.nothing = [None] * len(tensors), *[None] * len(settings)


class PolicyGradient(Operation):
    """The gradient of a product under a policy, whose `x` is its last tensor. It has none itself."""

    def transposed(self, x: torch.Tensor | None, tensors: Tensors) -> tuple[Operation, Tensors]:
        raise no_second_gradient()


def applied(operation: Operation, x: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result of an operation, differentiable in `x`."""
    if _is_transformed() or (not torch.compiler.is_compiling() and _has_derivative(x)):
        return _Applied.apply(operation, x, *tensors)
    return operation.value(x, tensors)


def _is_transformed() -> bool:
    """Whether this is a part of `torch.func.grad`, `vmap` and the like. torch itself asks so in `Function.apply`."""
    return torch._C._are_functorch_transforms_active()  # there is no public way to ask


def _has_derivative(x: torch.Tensor) -> bool:
    return (x.requires_grad and torch.is_grad_enabled()) or forward_ad.unpack_dual(x).tangent is not None


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(operation: Operation, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return operation.value(x, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        operation, x, *tensors = inputs
        _save(ctx, operation, x, tensors)
        ctx.save_for_forward(*tensors)
        ctx.nothing = [None] * len(tensors)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *_backward(ctx, g)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: torch.Tensor, *of_others: torch.Tensor | None) -> torch.Tensor:
        if not ctx.operation.is_linear:
            reason = "under a policy, which rounds activations, there are derivatives in reverse mode only"
            raise UnsupportedError("a forward-mode derivative", {ctx.operation.name: reason})
        return applied(ctx.operation, tangent, ctx.saved_tensors[: len(of_others)])

    @staticmethod
    def vmap(
        info: Any, axes: tuple[int | None, ...], operation: Operation, x: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        _, axis, *others = axes
        if operation.is_linear and operation.merges_rows and axis is not None and all(a is None for a in others):
            rows = x.movedim(axis, 0)
            return applied(operation, rows.flatten(0, 1), tensors).unflatten(0, rows.shape[:2]), 0

        def element(t: torch.Tensor, axis: int | None, i: int) -> torch.Tensor:
            return t if axis is None else t.select(axis, i)

        results = []
        for i in range(info.batch_size):
            own = [element(t, a, i) for t, a in zip(tensors, others, strict=True)]
            results.append(applied(operation, element(x, axis, i), own))
        return torch.stack(results), 0


def _save(ctx: Any, operation: Operation, x: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    ctx.operation = operation
    ctx.save_for_backward(*tensors, *((x,) if operation.reads_x else ()))


def _backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    """The gradient of `x`, and none of all other arguments."""
    policy = form_of(ctx.operation.settings[0]).policy
    if policy is not None and policy.dlhs.needs_key and policy.dlhs.gradient is not None:
        reason = f"it rounds or rotates gradients at random (as {policy.dlhs.gradient.name}), by a key that products of torch lack"
        raise UnsupportedError("the gradient of a product under a policy", {"policy": f"{reason}; train with it in JAX"})
    tensors, x = ctx.saved_tensors, None
    if ctx.operation.reads_x:
        *tensors, x = tensors
    operation, others = ctx.operation.transposed(x, tuple(tensors))
    return applied(operation, g, others), *ctx.nothing


def no_second_gradient() -> UnsupportedError:
    """The error of a gradient of a gradient under a policy."""
    return UnsupportedError("the gradient of a gradient", {"policy": "under a policy a product has first derivatives only"})
