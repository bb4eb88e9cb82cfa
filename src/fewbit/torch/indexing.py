"""Indexing and splitting of QTensors."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..array.indexing import axes_of, indexed
from ..errors import QuantError, UnsupportedError
from .qtensor import DISPATCHED, VIEWS, Form, QTensor, axis_of, lengths, mapped_parts, scale_form, tiles_of

_aten = torch.ops.aten


def _elements(q: QTensor, index: object) -> QTensor:
    """`q[index]`: integers, slices, `...` and None give views of the same bytes; an array of integers, along axis 0, copies."""
    steps: list[Any] = list(index) if isinstance(index, tuple) else [index]
    steps = [_as_tensor(step, q) for step in steps]
    if torch.compiler.is_compiling():
        return _by_operators(q, steps)
    steps = [int(step) if _is_integer(step, 0) else step for step in steps]
    if all(step is None or step is ... or isinstance(step, int | np.integer | slice) for step in steps):
        return _views(q, tuple(steps))
    return _at_index_array(q, steps)


def _by_operators(q: QTensor, steps: list[Any]) -> QTensor:
    """`_elements` as operators in a graph: a compiler cannot trace how a QTensor is made."""
    axis, found = 0, q
    with torch._C.DisableTorchFunctionSubclass():
        for i, step in enumerate(steps):
            if step is ...:
                axis = found.ndim - sum(later is not None for later in steps[i + 1 :])
            elif step is None:
                found = _aten.unsqueeze.default(found, axis)
                axis += 1
            elif isinstance(step, slice):
                found = _aten.slice.Tensor(found, axis, step.start, step.stop, step.step or 1)
                axis += 1
            elif isinstance(step, int):
                found = _aten.select.int(found, axis, step)
            elif _is_integer(step, 0):  # known at run time only
                found = _aten.select.int(_aten.index.Tensor(found, [*[None] * axis, step.reshape(1)]), axis, 0)
            else:
                found = _aten.index.Tensor(found, [*[None] * axis, step])
                axis += 1
    return found


def _views(q: QTensor, steps: tuple[Any, ...]) -> QTensor:
    """The elements at integers, slices, `...` and None."""
    form, scale_shape = q.form, lengths(q.scale)
    axes = axes_of(form.scheme, form.shape, tiles_of(form, scale_shape))
    found = indexed(form.scheme, axes, scale_shape, steps, decode="q.dequantize()[..., {}]")

    def on_tiles(leaf: torch.Tensor) -> Any:
        return leaf[found.of_leaf(lengths(leaf), scale_shape)]

    parts = mapped_parts(q, on_tiles, on_tiles) | {"codes": q.codes[found.codes]}
    of_scale = scale_form(parts["scale"])
    form = Form.of(found.scheme, found.shape, form.dtype, form.parts, of_scale, form.policy)
    return QTensor._unchecked(parts, form, is_view=True)


def _at_index_array(q: QTensor, indices: Sequence[Any]) -> QTensor:
    """The elements at one array of integers along axis 0."""
    if len(indices) != 1 or not _is_integer(indices[0], 1):
        reason = "it is indexed with integers, slices, ... and None, or one array of integers along axis 0"
        raise UnsupportedError("an index with arrays cannot take a QTensor", {"QTensor": reason})
    index, form, count = indices[0], q.form, q.scale.shape[0]
    if form.scheme.pack_axis == -q.ndim or count not in (1, q.shape[0]):
        raise QuantError(f"an index array along axis 0 of {q!r} would cut tiles or bytes")

    def on_tiles(leaf: torch.Tensor) -> Any:
        return leaf if leaf.shape[0] == 1 else leaf[index]

    parts = mapped_parts(q, on_tiles, on_tiles) | {"codes": q.codes[index]}
    first, *tiles = tiles_of(form, lengths(q.scale))
    scheme = form.scheme.with_tiles((None if count == 1 else first, *tiles), form.scheme.pack_axis)
    shape, of_scale = (len(index), *q.shape[1:]), scale_form(parts["scale"])
    return QTensor._unchecked(parts, Form.of(scheme, shape, form.dtype, form.parts, of_scale, form.policy))


def _as_tensor(step: Any, q: QTensor) -> Any:
    """A list, range or NumPy array of integers as a tensor, like PyTorch; any other index unchanged."""
    if isinstance(step, np.ndarray) and step.ndim and step.dtype.kind in "iu":
        return torch.as_tensor(step.astype(np.int64), device=q.device)
    if isinstance(step, list | range) and all(isinstance(one, int) and not isinstance(one, bool) for one in step):
        return torch.as_tensor(list(step), dtype=torch.int64, device=q.device)
    return step


def _is_integer(step: object, ndim: int) -> bool:
    """Whether it is a tensor of integers with so many axes."""
    if not isinstance(step, torch.Tensor) or step.ndim != ndim:
        return False
    return not step.is_floating_point() and step.dtype not in (torch.bool, torch.uint8)


def _along(q: QTensor, dim: int, step: int | slice | None) -> QTensor:
    """One index along an axis."""
    return _views(q, (*[slice(None)] * axis_of(dim, q.ndim + (step is None)), step))


def _split(q: QTensor, sizes: Sequence[int], dim: int = 0) -> list[QTensor]:
    length = q.shape[axis_of(dim, q.ndim)]
    if any(size < 0 for size in sizes) or sum(sizes) != length:
        raise QuantError(f"split: the sizes are {list(sizes)}; they must be 0 or more and sum to {length}, the axis")
    ends = list(itertools.accumulate(sizes))
    return [_along(q, dim, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def _split_equally(q: QTensor, size: int, dim: int = 0) -> list[QTensor]:
    if size < 1:
        raise QuantError(f"split: the size is {size}, must be 1 or more")
    return [_along(q, dim, slice(begin, begin + size)) for begin in range(0, q.shape[axis_of(dim, q.ndim)], size)]


def _unbound(q: QTensor, dim: int = 0) -> list[QTensor]:
    return [_along(q, dim, i) for i in range(q.shape[axis_of(dim, q.ndim)])]


VIEWS[torch.Tensor.__getitem__] = _elements

DISPATCHED |= {
    _aten.slice.Tensor: lambda q, dim=0, start=None, end=None, step=1: _along(q, dim, slice(start, end, step)),
    _aten.select.int: _along,
    _aten.unsqueeze.default: lambda q, dim: _along(q, dim, None),
    _aten.index.Tensor: _at_index_array,
    _aten.split.Tensor: _split_equally,
    _aten.split_with_sizes.default: _split,
    _aten.unbind.int: _unbound,
}
