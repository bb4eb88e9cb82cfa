"""`F.conv1d`, `conv2d` and `conv3d` with quantized kernels, computed in JAX."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import torch

from ..errors import QuantError
from ..ops.conv import conv_general_dilated
from . import dlpack as handover
from .matmul import autocast
from .operation import Operation, Tensors, applied, no_second_gradient
from .qtensor import FUNCTIONS, QTensor, form_of

Settings: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
"""Strides, padding before, padding after, dilations, groups."""


def _convolved(
    spatial: int,
    input: torch.Tensor,  # noqa: A002 - torch's names, by which they can be passed
    weight: QTensor,
    bias: torch.Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> torch.Tensor:
    """`F.conv<spatial>d` with a quantized kernel, differentiable in the images and the bias."""
    x, q = input, weight
    if isinstance(x, QTensor) or not isinstance(q, QTensor):
        raise QuantError(f"conv{spatial}d takes a float tensor and a QTensor; got {type(x).__name__} and {type(q).__name__}")
    if x.ndim not in (spatial + 1, spatial + 2) or q.ndim != spatial + 2 or x.shape[-spatial - 1] != q.shape[1] * groups:
        shapes = f"{tuple(x.shape)} and {tuple(q.shape)} in {groups} groups"
        raise QuantError(f"conv{spatial}d takes [batch, in, ...] and a kernel [out, in / groups, ...]; got {shapes}")
    if q.shape[0] % groups:
        raise QuantError(f"conv{spatial}d: {groups} groups do not divide the {q.shape[0]} outputs of the kernel")
    if bias is not None and bias.shape != q.shape[:1]:
        raise QuantError(
            f"conv{spatial}d: the bias has shape {tuple(bias.shape)}, must be [{q.shape[0]}], one for each output"
        )
    handover.check_device(f"conv{spatial}d", q.device)
    if x.dtype not in handover.FLOATS:
        raise QuantError(f"x is {x.dtype}, and products accumulate in float32; pass x.float()")
    x = autocast(x)
    steps, spread = _each("stride", stride, spatial, 1), _each("dilation", dilation, spatial, 1)
    low, high = _padding(padding, tuple(q.shape[2:]), steps, spread)
    padded = [n + a + b for n, a, b in zip(x.shape[-spatial:], low, high, strict=True)]
    window = [d * (k - 1) + 1 for k, d in zip(q.shape[2:], spread, strict=True)]
    if any(k > n for k, n in zip(window, padded, strict=True)):
        raise QuantError(f"conv{spatial}d: the dilated kernel {window} is larger than the padded input {padded}")
    is_batched = x.ndim == spatial + 2
    if not is_batched:
        x = x.unsqueeze(0)
    y = applied(_Convolution((q.form.text, steps, low, high, spread, groups)), x, q.leaves)
    if not is_batched:
        y = y.squeeze(0)
    if bias is not None:
        y = y + bias.to(y.dtype).reshape(-1, *[1] * spatial)
    return y


def _each(name: str, value: int | Sequence[int], spatial: int, least: int) -> list[int]:
    """One number for each spatial axis."""
    each = [value] if isinstance(value, int) else list(value)
    if len(each) == 1:
        each *= spatial
    if len(each) != spatial or min(each) < least:
        raise QuantError(f"{name} is {value}, must be {least} or more, one number or one for each of {spatial} axes")
    return each


def _padding(
    padding: str | int | Sequence[int], window: Sequence[int], steps: Sequence[int], spread: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The elements before and after each spatial axis."""
    if padding == "same":
        if any(step != 1 for step in steps):
            raise QuantError(f"padding='same' needs strides of 1, not {steps}")
        total = [d * (n - 1) for d, n in zip(spread, window, strict=True)]
        return [t // 2 for t in total], [t - t // 2 for t in total]
    if isinstance(padding, str) and padding != "valid":
        raise QuantError(f"padding is {padding!r}, must be same, valid or numbers")
    both = _each("padding", 0 if isinstance(padding, str) else padding, len(window), 0)
    return both, both


def _run(x: torch.Tensor, leaves: Sequence[torch.Tensor], form: str, *settings: Sequence[int] | int) -> torch.Tensor:
    return handover.call(_compiled(form, *map(_hashable, settings)), (x, *leaves))


def _hashable(setting: Sequence[int] | int) -> tuple[int, ...] | int:
    return setting if isinstance(setting, int) else tuple(setting)


@functools.lru_cache(maxsize=1024)
def _compiled(form: str, *settings: Any) -> Callable[..., jax.Array]:
    """The compiled convolution with the kernel of a form."""

    @jax.jit
    def fn(x: jax.Array, *leaves: jax.Array) -> jax.Array:
        return _jax_convolution(form, settings, x, leaves)

    return fn


def _jax_convolution(form: str, settings: Settings, x: jax.Array, leaves: Sequence[jax.Array]) -> jax.Array:
    steps, low, high, spread, groups = settings
    q = form_of(form).qarray(leaves).astype(x.dtype)
    padding = list(zip(low, high, strict=True))
    return conv_general_dilated(x, q, steps, padding, rhs_dilation=spread, feature_group_count=groups)


def _empty(
    x: torch.Tensor,
    leaves: Sequence[torch.Tensor],
    form: str,
    steps: Sequence[int],
    low: Sequence[int],
    high: Sequence[int],
    spread: Sequence[int],
    groups: int,
) -> torch.Tensor:
    outputs, _, *window = form_of(form).shape
    lengths = (
        (n + a + b - d * (k - 1) - 1) // s + 1
        for n, a, b, d, k, s in zip(x.shape[2:], low, high, spread, window, steps, strict=True)
    )
    return x.new_empty((x.shape[0], outputs, *lengths))


def _run_gradient(
    g: torch.Tensor, tensors: Sequence[torch.Tensor], form: str, *settings: Sequence[int] | int
) -> torch.Tensor:
    """The gradient of `x`, the last tensor."""
    *leaves, x = tensors
    return handover.call(_compiled_gradient(form, *map(_hashable, settings)), (g, x, *leaves))


@functools.lru_cache(maxsize=1024)
def _compiled_gradient(form: str, *settings: Any) -> Callable[..., jax.Array]:
    @jax.jit
    def fn(g: jax.Array, x: jax.Array, *leaves: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: _jax_convolution(form, settings, x, leaves), x)[1](g)[0]

    return fn


_SETTINGS = "str form, int[] steps, int[] low, int[] high, int[] spread, int groups"
handover.operator(f"convolution(Tensor x, Tensor[] leaves, {_SETTINGS}) -> Tensor", _run, _empty)
handover.operator(
    f"convolution_gradient(Tensor g, Tensor[] tensors, {_SETTINGS}) -> Tensor",
    _run_gradient,
    lambda g, tensors, *settings: torch.empty_like(tensors[-1]),
)


class _Convolution(Operation):
    name = "convolution"
    merges_rows = True

    @property
    def reads_x(self) -> bool:
        """True: its gradient needs the shape."""
        return True

    def transposed(self, x: torch.Tensor | None, tensors: Tensors) -> tuple[Operation, Tensors]:
        assert x is not None
        return _ConvolutionGradient(self.settings), (*tensors, x)


class _ConvolutionGradient(Operation):
    """Its last tensor is the `x` of the convolution."""

    name = "convolution_gradient"

    def transposed(self, x: torch.Tensor | None, tensors: Tensors) -> tuple[Operation, Tensors]:
        if not self.is_linear:
            raise no_second_gradient()
        return _Convolution(self.settings), tensors[:-1]


_Convolution.register_gradient()

FUNCTIONS |= {
    torch.nn.functional.conv1d: functools.partial(_convolved, 1),
    torch.nn.functional.conv2d: functools.partial(_convolved, 2),
    torch.nn.functional.conv3d: functools.partial(_convolved, 3),
}
