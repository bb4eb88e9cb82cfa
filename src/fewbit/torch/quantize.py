"""Quantizes and dequantizes torch tensors in JAX, or by Triton kernels."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ..array import scheme as as_scheme
from ..array.hessian import quantize_with_hessian
from ..array.scales.absmax import AbsMax
from ..array.scales.calibration import AbstractCalibration
from ..array.scales.mx import MX
from ..array.scales.search.mse import MSE
from ..array.scheme import Scheme, laid_along
from ..errors import QuantError, UnsupportedError
from ..formats.e8m0 import E8M0
from ..kernels.quantize.dispatch import dequantize as jax_dequantize
from ..kernels.quantize.dispatch import quantize as jax_quantize
from . import dlpack as handover
from . import triton
from .qtensor import (
    DTYPES,
    FUNCTIONS,
    Form,
    QTensor,
    form_of,
    from_qarray,
    in_memory_order,
    one_operator_in_graphs,
    scale_form,
)

Backend: TypeAlias = Literal["triton", "jax"]
Method: TypeAlias = Literal["naive", "optimal", "hessian"]


@torch.no_grad()
def quantize(
    W: torch.Tensor,
    scheme: str | Scheme | Mapping[str, Any],
    dim: int | tuple[int, ...] = -1,
    method: Method | None = None,
    X: torch.Tensor | None = None,
    *,
    error_weights: torch.Tensor | None = None,
    rounds: int = 0,
    backend: Backend | None = None,
) -> QTensor:
    """Quantizes a tensor to the bytes of `fewbit.quantize`, for every scheme, calibration and search.

    Each tile (block) has a scale, and each element the code of `element / scale` rounded to nearest, in float32. A tile
    with a NaN or an infinity becomes NaN; an all-zero tile decodes to zeros; subnormal float32 numbers count as zero.

    Args:
        W: floating, of any shape with an axis.
        scheme: a Scheme, or anything that `fewbit.scheme` takes: `"mxfp4"`, `"nvfp4"`, `"int4_g64"`.
        dim: the contraction axis of the product, in place of the scheme's last axis; or several.
        method: how scales are computed. None: by the scheme's calibration. "naive": from amax (OCP's floor rule for powers
            of two, else absmax). "optimal": least squared error. "hessian": least error of the product with `X`, by a full
            sweep over all scales of the scale format (`fewbit.quantize_with_hessian`).
        X: activations `[samples, W.shape[dim]]`, for the method "hessian" only.
        error_weights: the weight of each element's squared error in a scale search, broadcast to `W`: finite and not
            negative, not for the method "hessian". None: all equal.
        rounds: for "hessian", the alternating updates of codes and scale after the sweep; 0 rounds every element to nearest.
        backend: "jax" for fewbit's kernels in JAX, "triton" for Triton's on CUDA; None chooses "triton" on CUDA if it
            supports the call (see `explain`), else "jax".

    Returns:
        The QTensor. Its `scheme` has the calibration of the method; with "hessian" the given one.

    Raises:
        QuantError: for a tensor that is not floating or is empty, an axis it does not have, an unknown method, an `X` or
            error weights that the method does not use or that are not finite, or an `X` of another length than the axis.
        UnsupportedError: if the named backend, or every backend, does not support the call, with every reason.

    >>> import torch
    >>> q = quantize(torch.tensor([[6.0, -0.4, 0.0, 1.2]]), "mxfp4")
    >>> q.codes.tolist(), q.scale.tolist()
    ([[151, 32]], [[127]])
    >>> q.dequantize().tolist()
    [[6.0, -0.5, 0.0, 1.0]]
    """
    _check_arguments(method, X, error_weights, rounds)
    bound = _bound(W, scheme, dim, method)
    plain = error_weights is None and rounds == 0
    work: triton.Work = "sweep" if method == "hessian" else "quantize"
    w = W.detach() if W.dtype in handover.FLOATS else W.detach().float()
    if _chosen(W.device, bound, tuple(W.shape), backend, work, plain)[0] == "triton":
        H = None if X is None else hessian(X, bound, W.shape)
        found: Any = triton.quantized(w, bound, H)
        return found.to(W.dtype)
    x = handover.array(w)
    if X is not None:
        H = handover.array(hessian(X, bound, W.shape))
        axis = contraction_axis(bound, W.ndim)
        q = quantize_with_hessian(x, chosen(as_scheme(scheme), method), H, axis=axis, rounds=rounds)
    else:
        weights = None if error_weights is None else handover.array(error_weights.float())
        q = jax_quantize(x, chosen(as_scheme(scheme), method), axis=dim, error_weights=weights)
    return from_qarray(dataclasses.replace(q, dtype=np.dtype(jnp.dtype(str(W.dtype).removeprefix("torch.")))), W.device)


@one_operator_in_graphs("decoded(Tensor q, ScalarType? dtype=None, *, str? backend=None) -> Tensor")
@torch.no_grad()
def dequantize(q: QTensor, dtype: torch.dtype | None = None, *, backend: Backend | None = None) -> torch.Tensor:
    """Dequantizes: `decode(code) * scale`, computed in float32 and rounded once.

    With zero points `(decode(code) - zero) * scale`, with float offsets `decode(code) * scale + offset`.

    Args:
        q: the quantized tensor.
        dtype: the floating dtype of the result; None: `q.dtype`.
        backend: as for `quantize`.

    Returns:
        A plain tensor of the shape of `q`, on its device.

    Raises:
        QuantError: for a dtype that is not floating.
        UnsupportedError: if the named backend, or every backend, does not support the QTensor, with every reason.
    """
    dtype = dtype or q.dtype
    if not dtype.is_floating_point:
        raise QuantError(f"dequantize returns floating numbers, not {dtype}")
    stored, places = in_memory_order(q)
    y = torch.ops.fewbit.dequantize(stored.leaves, stored.form.text, dtype, backend or "")
    if places == tuple(range(q.ndim)):
        return y
    return y.permute(places)


def _dequantize(leaves: Sequence[torch.Tensor], form: str, dtype: torch.dtype, backend: str) -> torch.Tensor:
    """Dequantizes the leaves of a form."""
    q, kernels = form_of(form).qtensor(leaves), dtype if dtype in handover.FLOATS else torch.float32
    if _chosen(q.device, triton.scheme_for_kernels(q), tuple(q.shape), backend or None, "decode")[0] == "triton":
        return triton.dequantized(q, kernels).to(dtype)
    return handover.call(_compiled(form, str(kernels).removeprefix("torch.")), leaves).to(dtype)


def _empty(leaves: Sequence[torch.Tensor], form: str, dtype: torch.dtype, backend: str) -> torch.Tensor:
    return leaves[0].new_empty(form_of(form).shape, dtype=dtype)


handover.operator("dequantize(Tensor[] leaves, str form, ScalarType dtype, str backend) -> Tensor", _dequantize, _empty)


@functools.lru_cache(maxsize=4096)
def _compiled(form: str, dtype: str) -> Callable[..., jax.Array]:
    """The compiled dequantize function of a form."""

    @jax.jit
    def fn(*leaves: jax.Array) -> jax.Array:
        return jax_dequantize(form_of(form).qarray(leaves), dtype)

    return fn


def decoded_leaves(q: QTensor) -> tuple[str | None, str | None]:
    """The backend that dequantizes a QTensor and None, or None and the reasons against all."""
    try:
        return _chosen(q.device, triton.scheme_for_kernels(q), tuple(q.shape), None, "decode")[0], None
    except UnsupportedError as error:
        return None, "; ".join(f"{name}: {reason}" for name, reason in error.reasons.items())


def chosen(scheme: Scheme, method: Method | None) -> Scheme:
    """The scheme with the calibration of the method."""
    if method is None or method == "hessian":
        return scheme
    calibrations: dict[str, AbstractCalibration] = {"naive": AbsMax(), "optimal": MSE()}
    if isinstance(scheme.scale, E8M0):
        calibrations = {"naive": MX("floor"), "optimal": MX("optimal")}
    if method not in calibrations:
        raise QuantError(f"method is {method!r}, must be one of naive, optimal, hessian, or None")
    return dataclasses.replace(scheme, calibration=calibrations[method])


def explain(
    W: torch.Tensor, scheme: str | Scheme | Mapping[str, Any], dim: int | tuple[int, ...] = -1, method: Method | None = None
) -> str:
    """The backend that `quantize` chooses, and the reason against Triton's kernels.

    Args:
        W: the tensor.
        scheme: as for `quantize`.
        dim: likewise.
        method: likewise.

    Returns:
        A line of text.

    >>> import torch
    >>> explain(torch.ones(2, 32), "mxfp4")
    'jax, because triton: the tensor is on cpu; the kernels need a CUDA device'
    """
    bound = _bound(W, scheme, dim, method)
    name, reasons = _chosen(W.device, bound, tuple(W.shape), None, "sweep" if method == "hessian" else "quantize")
    if name == "triton":
        return triton.ABOUT
    return ", because ".join([name, *(f"{other}: {reason}" for other, reason in reasons.items())])


def contraction_axis(scheme: Scheme, ndim: int) -> int:
    """The axis with tiles of more than one element, negative; the packed axis if none or several have such tiles.

    A scheme may pack another axis than the one that a product sums over.
    """
    tiled = [axis - ndim for axis, tile in enumerate(scheme.tiles(ndim)) if tile != 1]
    return tiled[0] if len(tiled) == 1 else scheme.pack_axis


def hessian(X: torch.Tensor, scheme: Scheme, shape: Sequence[int]) -> torch.Tensor:
    """`X^T X` of each block of columns, scaled so that its largest entry is near 1.

    Args:
        X: activations `[samples, n]`.
        scheme: the scheme, with its tiles on the axes of the weight.
        shape: the shape of the weight.

    Returns:
        Float32 `[blocks, tile, tile]`, divided by a power of two; the scale of `X` changes it by rounding only.
    """
    axis = contraction_axis(scheme, len(shape))
    length = shape[axis]
    if X.ndim != 2 or X.shape[1] != length or len(X) == 0:
        raise QuantError(f"method 'hessian' needs X of shape [samples, {length}]; got {tuple(X.shape)}")
    if not torch.isfinite(X).all():
        raise QuantError("X has NaN or infinite values; it must be finite")
    tile = scheme.tiles(len(shape))[axis] or length
    blocks = -(-length // tile)
    columns = torch.nn.functional.pad(X.double(), (0, blocks * tile - length)).reshape(len(X), blocks, tile)
    columns = columns.permute(1, 2, 0)  # [blocks, tile, samples]
    H = columns @ columns.mT
    largest = H.amax((1, 2), keepdim=True)
    return torch.ldexp(H, -torch.frexp(torch.where(largest > 0, largest, 1.0)).exponent).float()


def _chosen(
    device: torch.device,
    scheme: Scheme,
    shape: tuple[int, ...],
    backend: str | None,
    work: triton.Work,
    is_plain: bool = True,
) -> tuple[str, dict[str, str]]:
    """The backend for the work, and the reasons against those that were asked before it."""
    if backend not in ("triton", "jax", None):
        raise QuantError(f"backend is {backend!r}, must be triton, jax or None")
    reasons: dict[str, str] = {}
    for name in (backend,) if backend else ("triton", "jax"):
        if name == "jax":
            reason = handover.refusal(device)
        else:
            reason = triton.unsupported(device, scheme, shape, work)
            if reason is None and not is_plain:
                reason = "the kernels do not support error_weights and rounds"
        if reason is None:
            return name, reasons
        reasons[name] = reason
    raise UnsupportedError(f"{scheme.name} of shape {shape} cannot run here", reasons)


def _bound(
    W: torch.Tensor, scheme: str | Scheme | Mapping[str, Any], dim: int | tuple[int, ...], method: Method | None
) -> Scheme:
    """The scheme with its tiles on the tensor's axes and the calibration of the method."""
    if isinstance(W, QTensor):
        raise QuantError("W is a QTensor already; only plain floating tensors are quantized")
    if str(W.dtype).removeprefix("torch.") not in DTYPES:
        raise QuantError(f"W is {W.dtype}; only plain floating tensors are quantized ({', '.join(DTYPES)})")
    if W.ndim == 0 or W.numel() == 0:
        raise QuantError(f"W has shape {tuple(W.shape)}, must have at least one axis and one element")
    return laid_along(chosen(as_scheme(scheme), method), dim, tuple(W.shape))


def _check_arguments(method: Method | None, X: torch.Tensor | None, error_weights: torch.Tensor | None, rounds: int) -> None:
    if X is not None and method != "hessian":
        raise QuantError(f"X is not used by method {method!r}; pass method='hessian'")
    if X is None and method == "hessian":
        raise QuantError("method 'hessian' needs X of shape [samples, n], the activations that W is multiplied with")
    if error_weights is not None and method == "hessian":
        raise QuantError("error_weights is not used by method 'hessian', which weighs errors by X; leave it out")
    if rounds and method != "hessian":
        raise QuantError(f"rounds={rounds} is not used by method {method!r}; pass method='hessian'")


# --- embedding ---


def _embedding(
    input: torch.Tensor,  # noqa: A002 - torch's names, by which they can be passed
    weight: QTensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """`F.embedding` with a quantized table; dequantizes only the selected rows.

    `padding_idx`, `scale_grad_by_freq` and `sparse` affect only the table's gradient, which a QTensor does not have.
    """
    ids, q = input, weight
    if max_norm is not None:
        reason = "max_norm rescales rows of the table in place, which codes do not support"
        raise UnsupportedError("embedding cannot take a QTensor", {"QTensor": reason})
    if not isinstance(q, QTensor) or q.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise QuantError(f"embedding takes int32 or int64 ids and a table [rows, n], not {ids.dtype} and {tuple(q.shape)}")
    return torch.ops.fewbit.rows(ids, q.leaves, q.form.text)


def _rows(ids: torch.Tensor, leaves: Sequence[torch.Tensor], form: str) -> torch.Tensor:
    """Dequantized rows of a table."""
    from .matmul import padded_count  # it needs this file

    q, flat = form_of(form).qtensor(leaves), ids.reshape(-1)
    if flat.numel() == 0:
        return torch.empty((*ids.shape, q.shape[1]), dtype=q.dtype, device=q.device)
    if int(flat.min()) < 0 or int(flat.max()) >= q.shape[0]:
        raise IndexError(f"embedding: indices from {int(flat.min())} to {int(flat.max())}, of a table of {q.shape[0]} rows")
    flat = torch.nn.functional.pad(flat, (0, padded_count(len(flat)) - len(flat)))
    rows = dequantize(taken(q, flat))[: ids.numel()]
    return rows.reshape(*ids.shape, q.shape[1]).clone()


def _empty_rows(ids: torch.Tensor, leaves: Sequence[torch.Tensor], form: str) -> torch.Tensor:
    known = form_of(form)
    return leaves[0].new_empty((*ids.shape, known.shape[1]), dtype=getattr(torch, known.dtype))


def _batched_rows(
    info: Any, axes: tuple[Any, ...], ids: torch.Tensor, leaves: Sequence[torch.Tensor], form: str
) -> tuple[torch.Tensor, int]:
    """The rows under `torch.func.vmap`, which batches the indices alone: a QTensor is constant under it."""
    assert axes[0] is not None
    return torch.ops.fewbit.rows(ids.movedim(axes[0], 0), leaves, form), 0


handover.operator("rows(Tensor ids, Tensor[] leaves, str form) -> Tensor", _rows, _empty_rows)
torch.library.register_vmap("fewbit::rows", _batched_rows, lib=handover.LIBRARY)


def taken(q: QTensor, at: torch.Tensor) -> QTensor:
    """Selects rows (of the first axis) of a QTensor. They stay quantized, each with its own scale unless all share one.

    Args:
        q: the QTensor; its codes are not packed along the first axis.
        at: the row indices, one axis, within bounds.

    Returns:
        The QTensor.

    Raises:
        UnsupportedError: if codes are packed along the first axis.
    """
    if q.scheme.pack_axis == -q.ndim:
        reason = "its codes are packed along the row axis; quantize tables along their last axis (dim=-1)"
        raise UnsupportedError("embedding cannot take this QTensor", {"QTensor": reason})
    tiles = list(q.scheme.tiles(q.ndim))
    tile = tiles[0] or q.shape[0]
    of_tile = at if q.scale.shape[0] == q.shape[0] else at // tile

    def of(leaf: torch.Tensor | None, places: torch.Tensor) -> torch.Tensor | None:
        if leaf is None or leaf.shape[0] == 1:
            return leaf
        return taken(leaf, places) if isinstance(leaf, QTensor) else leaf[places]

    tiles[0] = 1 if q.scale.shape[0] > 1 else None
    scheme = q.scheme.with_tiles(tuple(tiles), q.scheme.pack_axis)
    parts = {"codes": q.codes[at], "scale": of(q.scale, of_tile)}
    parts |= {"zero_point": of(q.zero_point, of_tile), "tensor_scale": of(q.tensor_scale, of_tile)}
    shape = (len(at), *q.shape[1:])
    return QTensor._unchecked(parts, Form.of(scheme, shape, q.dtype, q.form.parts, scale_form(parts["scale"]), q.policy))


FUNCTIONS |= {
    torch.nn.functional.embedding: _embedding,
    torch.dequantize: dequantize,
    torch.Tensor.dequantize: dequantize,
}
