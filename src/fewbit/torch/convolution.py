"""Convolutions of torch with quantized kernels: `F.conv1d`, `conv2d` and `conv3d`, by fewbit in JAX."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from ..errors import QuantError
from ..ops import conv_general_dilated
from . import handover
from .qtensor import FUNCTIONS, QTensor, form_of


def _convolved(
    spatial: int,
    x: torch.Tensor,
    q: QTensor,
    bias: torch.Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> torch.Tensor:
    """`F.conv<spatial>d` with a quantized kernel; gradients reach `x` and the bias."""
    if isinstance(x, QTensor) or not isinstance(q, QTensor):
        raise QuantError(f"conv{spatial}d takes a float tensor and a QTensor; got {type(x).__name__} and {type(q).__name__}")
    if x.ndim not in (spatial + 1, spatial + 2) or q.ndim != spatial + 2 or x.shape[-spatial - 1] != q.shape[1] * groups:
        shapes = f"{tuple(x.shape)} and {tuple(q.shape)} in {groups} groups"
        raise QuantError(f"conv{spatial}d takes [batch, in, ...] and a kernel [out, in / groups, ...]; got {shapes}")
    handover.check_device(f"conv{spatial}d", q.device)
    if x.dtype not in handover.FLOATS:
        raise QuantError(f"x is {x.dtype}, and sums are made in float32; x.float()")
    steps, spread = _each(stride, spatial), _each(dilation, spatial)
    low, high = _padding(padding, tuple(q.shape[2:]), steps, spread)
    batch = x if x.ndim == spatial + 2 else x.unsqueeze(0)
    y = torch.ops.fewbit.convolution(batch, q.leaves, q.form.text, steps, low, high, spread, groups)
    y = y if x.ndim == spatial + 2 else y.squeeze(0)
    return y if bias is None else y + bias.to(y.dtype).reshape(-1, *[1] * spatial)


def _each(value: int | Sequence[int], spatial: int) -> list[int]:
    """One number for each spatial axis."""
    given = [value] if isinstance(value, int) else list(value)
    return given * spatial if len(given) == 1 else given


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
    both = [0] * len(window) if isinstance(padding, str) else _each(padding, len(window))
    return both, both


def _run(
    x: torch.Tensor, leaves: Sequence[torch.Tensor], form: str, steps: Any, low: Any, high: Any, spread: Any, groups: int
) -> torch.Tensor:
    return handover.call(_compiled(form, tuple(steps), tuple(low), tuple(high), tuple(spread), groups), (x, *leaves))


@functools.lru_cache(maxsize=1024)
def _compiled(form: str, *settings: Any) -> Callable[..., jax.Array]:
    """The compiled convolution with the kernel of a form."""

    @jax.jit
    def fn(x: jax.Array, *leaves: jax.Array) -> jax.Array:
        return _jax_convolution(form, settings, x, leaves)

    return fn


def _jax_convolution(form: str, settings: Any, x: jax.Array, leaves: Sequence[jax.Array]) -> jax.Array:
    steps, low, high, spread, groups = settings
    q = form_of(form).qarray(leaves).astype(x.dtype)
    padding = list(zip(low, high, strict=True))
    return conv_general_dilated(x, q, steps, padding, rhs_dilation=spread, feature_group_count=groups)


def _empty(x: Any, leaves: Any, form: str, steps: Any, low: Any, high: Any, spread: Any, groups: int) -> torch.Tensor:
    outputs, _, *window = form_of(form).shape
    lengths = (
        (n + a + b - d * (k - 1) - 1) // s + 1
        for n, a, b, d, k, s in zip(x.shape[2:], low, high, spread, window, steps, strict=True)
    )
    return x.new_empty((x.shape[0], outputs, *lengths))


def _run_gradient(
    g: torch.Tensor,
    x: torch.Tensor,
    leaves: Sequence[torch.Tensor],
    form: str,
    steps: Any,
    low: Any,
    high: Any,
    spread: Any,
    groups: int,
) -> torch.Tensor:
    """The gradient of `x`."""
    fn = _compiled_gradient(form, tuple(steps), tuple(low), tuple(high), tuple(spread), groups)
    return handover.call(fn, (g, x, *leaves))


@functools.lru_cache(maxsize=1024)
def _compiled_gradient(form: str, *settings: Any) -> Callable[..., jax.Array]:
    @jax.jit
    def fn(g: jax.Array, x: jax.Array, *leaves: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: _jax_convolution(form, settings, x, leaves), x)[1](g)[0]

    return fn


_SETTINGS = "str form, int[] steps, int[] low, int[] high, int[] spread, int groups"
handover.operator(f"convolution(Tensor x, Tensor[] leaves, {_SETTINGS}) -> Tensor", _run, _empty)
handover.operator(
    f"convolution_gradient(Tensor g, Tensor x, Tensor[] leaves, {_SETTINGS}) -> Tensor",
    _run_gradient,
    lambda g, x, leaves, *settings: torch.empty_like(x),
)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, leaves, *ctx.settings = inputs
    ctx.save_for_backward(x, *leaves)


def _backward(ctx: Any, g: torch.Tensor) -> Any:
    x, *leaves = ctx.saved_tensors
    of_x = torch.ops.fewbit.convolution_gradient(g, x, leaves, *ctx.settings)
    return of_x, [None] * len(leaves), *[None] * len(ctx.settings)


torch.library.register_autograd("fewbit::convolution", _backward, setup_context=_setup, lib=handover.LIBRARY)

FUNCTIONS |= {
    torch.nn.functional.conv1d: functools.partial(_convolved, 1),
    torch.nn.functional.conv2d: functools.partial(_convolved, 2),
    torch.nn.functional.conv3d: functools.partial(_convolved, 3),
}
