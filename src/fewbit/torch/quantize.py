"""Quantizes and dequantizes torch tensors."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import torch

from .._tiles import tile_counts
from ..array import Scheme
from ..array import scheme as as_scheme
from ..array.scales import MSE, MX, AbsMax
from ..array.scales.store import ScaleStore
from ..errors import QuantError, UnsupportedError
from ..formats import E8M0, AbstractFormat
from . import on_gpu
from .hessian import product_scale
from .packing import pack, unpack
from .qtensor import QTensor
from .rounding import TINY, Rounding, flushed, over
from .scales import Holder, Tiles, check_supported, ideal_scale
from .tiles import tile_rows, untiled, valid_rows

Backend: TypeAlias = Literal["triton", "torch"]
Method: TypeAlias = Literal["naive", "optimal", "hessian"]

_CHUNK = 1 << 20
"""How many elements are quantized at a time, so that what is computed on the way stays in the cache."""


@torch.no_grad()
def quantize(
    W: torch.Tensor,
    scheme: str | Scheme | Mapping[str, Any],
    dim: int = -1,
    method: Method | None = None,
    X: torch.Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> QTensor:
    """Quantizes a tensor to the bytes that `fewbit.quantize` gives for the same numbers.

    For each tile a scale, for each element the code of the number nearest to `element / scale`, all in float32. A tile with a
    NaN or an infinity becomes NaN; an all-zero tile decodes to zeros; subnormal float32 numbers count as zero.

    Args:
        W: floating, of any shape with an axis; the tensor's device does the work.
        scheme: a Scheme, or anything that `fewbit.scheme` takes: `"mxfp4"`, `"nvfp4"`, `"int4_g64"`.
        dim: the axis that takes the place of the scheme's last one, the axis that a product contracts.
        method: how scales are chosen. None: by the scheme's calibration. "naive": from the largest magnitude alone (OCP's floor
            rule for powers of two, else absmax). "optimal": least squared error. "hessian": least error of the product
            with `X`, by a full sweep over the scales that can be stored.
        X: activations `[samples, W.shape[dim]]`, for the method "hessian" only.
        backend: "triton", or "torch" for operations of torch on any device; None takes Triton's kernels where they serve, on a
            CUDA device (`explain` says whether). One that is named is never replaced by the other.

    Returns:
        The QTensor. Its `scheme` has the calibration that the method stands for; with "hessian", which no calibration names, the
        given one.

    Raises:
        QuantError: for a tensor that is not floating or has no element, an axis it does not have, a method that is not
            known, or an `X` that the method does not use or whose length is not that of the axis.
        UnsupportedError: for a scheme that only `fewbit.quantize` knows, or one that the named backend lacks, with every reason.

    >>> import torch
    >>> q = quantize(torch.tensor([[6.0, -0.4, 0.0, 1.2]]), "mxfp4")
    >>> q.codes.tolist(), q.scale.tolist()
    ([[151, 32]], [[127]])
    >>> dequantize(q).tolist()
    [[6.0, -0.5, 0.0, 1.0]]
    """
    _check_tensor(W)
    bound = chosen(as_scheme(scheme), method).along(dim, W.ndim)
    check_supported(bound)
    tiles = bound.tiles(W.ndim)
    unit = tensor_scale(W, bound)
    if method != "hessian" and uses_triton(W.device, bound, tuple(W.shape), backend):
        _check_no_activations(X, method)
        packed, stored = on_gpu.quantized(W.detach(), bound, unit)
        return _qtensor(W, bound, packed, stored, unit)
    rows, counts = tile_rows(W.detach(), tiles), tile_counts(W.shape, tiles)
    holder = Holder.of(bound, unit, W.device)
    ideal = None
    if method == "hessian":
        naive, moments = chosen(bound, "naive"), _checked_activations(X, W.shape[bound.pack_axis])
        swept = W.detach() if uses_triton(W.device, bound, tuple(W.shape), backend, "sweep") else None
        ideal = product_scale(Tiles(flushed(rows.float()), None), counts, moments, naive, holder, swept)
    _check_no_activations(X, method)
    codes, scale = _rows_quantized(rows, valid_rows(W.shape, tiles, W.device), bound, holder, ideal)
    packed = pack(untiled(codes, W.shape, tiles), bound.format.bits, bound.pack_axis)
    return _qtensor(W, bound, packed, scale.reshape(counts), unit)


@torch.no_grad()
def dequantize(q: QTensor, dtype: torch.dtype | None = None, *, backend: Backend | None = None) -> torch.Tensor:
    """The tensor that a QTensor stands for, `decode(code) * scale`, computed in float32 and rounded once.

    With zero points it is `(decode(code) - zero) * scale`, with float offsets `decode(code) * scale + offset`.

    Args:
        q: the quantized tensor.
        dtype: the floating dtype of the result; None takes `q.dtype`.
        backend: as for `quantize`.

    Returns:
        A tensor of the shape of `q`, on its device.

    Raises:
        QuantError: for a dtype that is not floating.
        UnsupportedError: when the named backend cannot.
    """
    dtype = q.dtype if dtype is None else dtype
    if not dtype.is_floating_point:
        raise QuantError(f"dequantize gives floating numbers, not {dtype}")
    if uses_triton(q.codes.device, q.scheme, q.shape, backend, "decode"):
        return on_gpu.dequantized(q, dtype)
    tiles = q.scheme.tiles(len(q.shape))
    codes = unpack(q.codes, q.scheme.format.bits, q.shape[q.scheme.pack_axis], q.scheme.pack_axis)
    values = Rounding.of(q.scheme.format, codes.device).decode(tile_rows(codes, tiles))
    scale, zero = scale_values(q).reshape(-1, 1), q.zero_point
    if zero is not None and isinstance(q.scheme.zero_point, AbstractFormat):
        values = values - Rounding.of(q.scheme.zero_point, zero.device).decode(zero).reshape(-1, 1)
        zero = None
    values = flushed(values * scale)
    return untiled(values if zero is None else values + zero.reshape(-1, 1).float(), q.shape, tiles).to(dtype)


def scale_values(q: QTensor) -> torch.Tensor:
    """The scale of each tile, float32, with the tensor scale in it.

    Args:
        q: the quantized tensor.

    Returns:
        Float32, of the shape of `q.scale`.
    """
    unit = None if q.tensor_scale is None else q.tensor_scale
    return Holder.of(q.scheme, unit, q.scale.device).loaded(q.scale)


def chosen(scheme: Scheme, method: Method | None) -> Scheme:
    """The scheme whose calibration is what the method stands for."""
    if method is None or method == "hessian":
        return scheme
    is_power = isinstance(scheme.scale, E8M0)
    calibrations = {"naive": MX("floor") if is_power else AbsMax(), "optimal": MX("optimal") if is_power else MSE()}
    if method not in calibrations:
        raise QuantError(f"method is {method!r}, must be one of naive, optimal, hessian, or None")
    return dataclasses.replace(scheme, calibration=calibrations[method])


def tensor_scale(W: torch.Tensor, scheme: Scheme) -> torch.Tensor | None:
    """The scale that takes the largest finite magnitude to the largest product of a number and a scale; None without one."""
    if not scheme.tensor_scale:
        return None
    if W.is_cuda and on_gpu.is_installed():
        largest = flushed(on_gpu.largest_magnitude(W.detach()))
    else:
        x = flushed(W.detach().float())
        largest = torch.where(torch.isfinite(x), x.abs(), 0.0).amax()
    scale = over(largest, scheme.format.bound * ScaleStore(scheme.scale).largest)  # type: ignore[arg-type]
    return torch.where(scale < TINY, 1.0, scale)


def uses_triton(
    device: torch.device, scheme: Scheme, shape: tuple[int, ...], backend: Backend | None, work: on_gpu.Work = "quantize"
) -> bool:
    """Whether the Triton kernels are to do it; raises UnsupportedError where they are named and cannot."""
    if backend not in ("triton", "torch", None):
        raise QuantError(f"backend is {backend!r}, must be triton, torch or None")
    if backend == "torch":
        return False
    reason = on_gpu.unsupported(device, scheme, shape, work)
    if reason is not None and backend == "triton":
        raise UnsupportedError(f"{scheme.name} of shape {shape} cannot run here", {"triton": reason})
    return reason is None


def explain(W: torch.Tensor, scheme: str | Scheme | Mapping[str, Any], dim: int = -1, method: Method | None = None) -> str:
    """Says which backend `quantize` takes for a tensor, and why not the faster one.

    Args:
        W: the tensor.
        scheme: as for `quantize`.
        dim: likewise.
        method: likewise.

    Returns:
        A line of text.

    >>> import torch
    >>> explain(torch.ones(2, 64), "mxfp4")
    'torch, because triton: the tensor is on cpu; the kernels need a CUDA device'
    """
    bound = chosen(as_scheme(scheme), method).along(dim, W.ndim)
    reason = on_gpu.unsupported(W.device, bound, tuple(W.shape), "sweep" if method == "hessian" else "quantize")
    return "triton" if reason is None else f"torch, because triton: {reason}"


def _qtensor(
    W: torch.Tensor, scheme: Scheme, codes: torch.Tensor, scale: torch.Tensor, unit: torch.Tensor | None
) -> QTensor:
    """The QTensor of what was quantized."""
    unit = None if unit is None else unit.reshape((1,) * W.ndim)
    return QTensor(codes, scale, unit, scheme, tuple(W.shape), W.dtype)


def _check_no_activations(X: torch.Tensor | None, method: Method | None) -> None:
    if X is not None and method != "hessian":
        raise QuantError(f"X means nothing to method {method!r}; use method='hessian'")


def _rows_quantized(
    rows: torch.Tensor, valid: torch.Tensor | None, scheme: Scheme, holder: Holder, ideal: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and the stored scale of each tile, a few tiles at a time; `ideal` scales in place of calibrated ones."""
    rounding = Rounding.of(scheme.format, rows.device)
    count = max(1, _CHUNK // rows.shape[1])
    codes, scales = [], []
    for first in range(0, len(rows), count):
        part = slice(first, first + count)
        tiles = Tiles(flushed(rows[part].float()), None if valid is None else valid[part])
        scale = ideal_scale(tiles, scheme, holder) if ideal is None else ideal[part]
        scale = stored_scale(scale, tiles, holder, rounding)
        codes.append(encoded(tiles, scale, holder, rounding))
        scales.append(scale)
    return torch.cat(codes), torch.cat(scales)


def stored_scale(scale: torch.Tensor, tiles: Tiles, holder: Holder, rounding: Rounding) -> torch.Tensor:
    """The scales as they are stored: 1 in place of those too small to divide by, NaN for tiles that are not finite."""
    for_zero = 0.0 if rounding.table.zero is None else 1.0
    scale = torch.where(scale.abs() < TINY, for_zero, scale)
    return holder.stored(torch.where(tiles.is_finite, scale, torch.nan))


def encoded(tiles: Tiles, stored: torch.Tensor, holder: Holder, rounding: Rounding) -> torch.Tensor:
    """The code of each element under the stored scale of its tile."""
    used = holder.loaded(stored)
    divisor = torch.where(used == 0, 1.0, used)[:, None]
    return rounding.encode(flushed(tiles.x / divisor))


def _checked_activations(X: torch.Tensor | None, length: int) -> torch.Tensor:
    if X is None or X.ndim != 2 or X.shape[1] != length or len(X) == 0:
        got = None if X is None else tuple(X.shape)
        raise QuantError(f"method 'hessian' needs X of shape [samples, {length}]; got {got}")
    return X


def _check_tensor(W: torch.Tensor) -> None:
    if not W.is_floating_point():
        raise QuantError(f"W is {W.dtype}; only floating tensors are quantized")
    if W.ndim == 0 or W.numel() == 0:
        raise QuantError(f"W has shape {tuple(W.shape)}; a tensor of at least one axis and one element is expected")
