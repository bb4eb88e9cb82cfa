"""QTensor: a quantized tensor as a subclass of torch.Tensor, of the same bytes as a QArray."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .._tiles import Tile, tile_counts
from ..array import QArray, Scheme, misfit
from ..array.packing import code_capacity, packed_length
from ..errors import QuantError, UnsupportedError
from ..ops import Policy
from . import handover

_aten = torch.ops.aten

FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""What functions of torch do with a QTensor among their arguments; `matmul` and its neighbours add to it when they are imported."""

_PARTS = ("codes", "scale", "zero_point", "tensor_scale")


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """What the tensors of a QTensor mean: everything about it but its numbers and its device.

    `Form.of` makes each form once, so that looking one up costs no comparison.

    Attributes:
        scheme: its tiles on the axis that was quantized.
        shape: of the tensor that it stands for.
        dtype: the name of its dtype.
        parts: which of codes, scale, zero_point and tensor_scale there are.
        scale: the form of scales that are quantized themselves; else None.
        policy: how products with it are computed; None: weight-only.
    """

    scheme: Scheme
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[str, ...]
    scale: "Form | None" = None
    policy: Policy | None = None

    @staticmethod
    def of(
        scheme: Scheme,
        shape: Sequence[int],
        dtype: torch.dtype | str,
        parts: Sequence[str],
        scale: "Form | None" = None,
        policy: Policy | None = None,
    ) -> "Form":
        """The form of these attributes."""
        return _interned(scheme, tuple(shape), str(dtype).removeprefix("torch."), tuple(parts), scale, policy)

    @property
    def slack(self) -> int:
        """How many codes the bytes of the packed axis could hold beyond its length."""
        bits, length = self.scheme.format.bits, self.shape[self.scheme.pack_axis]
        return code_capacity(packed_length(length, bits, self.scheme.packing), bits) - length

    @functools.cached_property
    def text(self) -> str:
        """Its JSON, from which `form_of` makes it again."""
        return json.dumps(self._json(), separators=(",", ":"))

    def _json(self) -> dict[str, Any]:
        form = {"scheme": self.scheme.to_json(), "shape": self.shape, "dtype": self.dtype, "parts": self.parts}
        if self.scale is not None:
            form["scale"] = self.scale._json()
        if self.policy is not None:
            form["policy"] = self.policy.to_json()
        return form

    def qarray(self, leaves: Iterable[Any]) -> QArray:
        """The QArray of this form with the given leaves, in the order of `QTensor.leaves`."""
        leaves = iter(leaves)
        found: dict[str, Any] = dict.fromkeys(_PARTS)
        for part in self.parts:
            found[part] = self.scale.qarray(leaves) if part == "scale" and self.scale is not None else next(leaves)
        static = (self.scheme, np.dtype(jnp.dtype(self.dtype)), self.slack, self.policy)
        return QArray.tree_unflatten(static, found.values())

    def qtensor(self, leaves: Iterable[torch.Tensor]) -> "QTensor":
        """The QTensor of this form with the given leaves, which are taken to fit."""
        leaves = iter(leaves)
        found: dict[str, Any] = dict.fromkeys(_PARTS)
        for part in self.parts:
            found[part] = self.scale.qtensor(leaves) if part == "scale" and self.scale is not None else next(leaves)
        return QTensor._unchecked(found, self)


@functools.lru_cache(maxsize=4096)
def form_of(text: str) -> Form:
    """The form of its JSON.

    Raises:
        QuantError: for JSON that `Form.text` does not give.
    """
    try:
        return _form(json.loads(text))
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise QuantError(f"{text:.80} is no form of a QTensor: {error!r}") from error


def _form(form: dict[str, Any]) -> Form:
    policy, scale = form.get("policy"), form.get("scale")
    parts = tuple(form["parts"])
    if form["dtype"] not in ("float64", "float32", "bfloat16", "float16") or set(parts) - set(_PARTS):
        raise QuantError(f"a QTensor has no dtype {form['dtype']!r} or parts {parts}")
    return Form.of(
        Scheme.from_json(form["scheme"]),
        tuple(map(int, form["shape"])),
        form["dtype"],
        parts,
        None if scale is None else _form(scale),
        None if policy is None else Policy.from_json(policy),
    )


class QTensor(torch.Tensor):
    """A quantized tensor: packed codes, a scale for each tile, and the Scheme that says what they mean.

    It has the shape and dtype of the tensor that it stands for. Products (`@`, `torch.matmul`, `mm`, `mv`, `addmm`, `F.linear`,
    convolutions), `F.embedding`, transposes, `.to`, `.detach`, `.clone` and `.copy_` work on it; it can be a parameter or a
    buffer, and goes through `state_dict`, `torch.save`, `copy.deepcopy` and `torch.compile`. Every other operation raises
    UnsupportedError with its name; `q.dequantize()` gives a plain tensor. It has no gradient.

    Args:
        codes: uint8, shaped like the tensor but for the packed axis (`scheme.pack_axis`), whose length is that of the bytes.
        scale: one element a tile, with as many axes as the tensor: uint8 codes of `scheme.scale` where that is a Format, a
            QTensor where it is a Scheme, else a float tensor.
        scheme: what the leaves mean, its tiles on the axis that was quantized.
        shape: the shape of the tensor that this one stands for.
        dtype: its floating dtype, which `dequantize` gives.
        zero_point: like `scale`, codes of `scheme.zero_point` or float offsets; or None.
        tensor_scale: float32, one element, with as many axes as the tensor, which every scale is multiplied by; or None.
        policy: how products with it are computed, as for a QArray; None: the other operand stays in floating point.

    Attributes:
        form: what its tensors mean: scheme, shape, dtype and policy in one object.

    Raises:
        QuantError: where the parts do not fit each other and the scheme.
    """

    codes: torch.Tensor
    scale: Any
    zero_point: torch.Tensor | None
    tensor_scale: torch.Tensor | None
    form: Form

    @staticmethod
    def __new__(
        cls: type["QTensor"],
        codes: torch.Tensor,
        scale: "torch.Tensor | QTensor",
        scheme: Scheme,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        zero_point: torch.Tensor | None = None,
        tensor_scale: torch.Tensor | None = None,
        policy: Policy | None = None,
    ) -> "QTensor":
        parts: dict[str, Any] = dict(zip(_PARTS, (codes, scale, zero_point, tensor_scale), strict=True))
        present = [name for name, part in parts.items() if part is not None]
        of_scale = scale.form if isinstance(scale, QTensor) else None
        q = cls._unchecked(parts, Form.of(scheme, shape, dtype, present, of_scale, policy))
        _check(q)
        return q

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()  # all is done in __new__; type checkers would take torch.Tensor's arguments otherwise

    @classmethod
    def _unchecked(cls, parts: dict[str, Any], form: Form) -> "QTensor":
        """The QTensor of tensors that are known to fit."""
        dtype = getattr(torch, form.dtype)
        q = torch.Tensor._make_wrapper_subclass(cls, form.shape, dtype=dtype, device=parts["codes"].device)
        for name, part in parts.items():
            setattr(q, name, part)
        q.form = form
        return q

    # --- what it is ---

    @property
    def scheme(self) -> Scheme:
        """What its tensors mean, its tiles on the axis that was quantized."""
        return self.form.scheme

    @property
    def policy(self) -> Policy | None:
        """How products with it are computed; None: weight-only."""
        return self.form.policy

    @property
    def leaves(self) -> list[torch.Tensor]:
        """Its plain tensors: codes, scale (of quantized scales theirs), zero point and tensor scale, where they are there."""
        found: list[torch.Tensor] = []
        for part in (getattr(self, name) for name in _PARTS):
            found += part.leaves if isinstance(part, QTensor) else [] if part is None else [part]
        return found

    @property
    def nbytes(self) -> int:
        """The bytes that are really stored: packed codes, scales, zero points and tensor scale."""
        return sum(leaf.numel() * leaf.element_size() for leaf in self.leaves)

    @property
    def bits_per_weight(self) -> float:
        """`8 * nbytes` over the number of elements."""
        return 8 * self.nbytes / self.numel()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        shape = ", ".join(map(str, self.shape))
        place = "" if self.device.type == "cpu" else f", {self.device}"
        return (
            f"QTensor({self.scheme.name}, {_name(self.dtype)}[{shape}], {self.nbytes:,} bytes, "
            f"{self.bits_per_weight:.3f} bits/weight{place})"
        )

    # --- out of it ---

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:  # type: ignore[override]
        """The tensor that it stands for, as `fewbit.torch.dequantize` gives it.

        Args:
            dtype: the floating dtype of the result; None takes its own.

        Returns:
            A plain tensor.
        """
        from .quantize import dequantize  # it needs this class

        return dequantize(self, dtype)

    def to_qarray(self) -> QArray:
        """The QArray of the same bytes: `fewbit.torch.to_qarray`."""
        return to_qarray(self)

    def requires_grad_(self, requires_grad: bool = True) -> "QTensor":
        """Itself; a gradient is refused, since codes have none."""
        if requires_grad:
            raise QuantError(
                "a QTensor has no gradient: nn.Parameter(q, requires_grad=False) makes a parameter of it, and before "
                "load_state_dict(..., assign=True) the module needs requires_grad_(False)"
            )
        return self

    def share_memory_(self) -> "QTensor":
        """Itself, its tensors moved to memory that processes share."""
        for leaf in self.leaves:
            leaf.share_memory_()
        return self

    # --- for torch ---

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        """The names of its tensors, and what they mean, as JSON."""
        return list(self.form.parts), self.form.text

    def _stable_hash_for_caching(self) -> str:
        """What compiled programs of torch depend on."""
        return self.form.text

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], text: str, outer_size: Any, outer_stride: Any) -> "QTensor":
        return QTensor._unchecked(dict.fromkeys(_PARTS) | inner, form_of(text))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FUNCTIONS:
            return FUNCTIONS[func](*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _DISPATCHED:
            # Under inference_mode composite operators arrive whole.
            if (parts := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
                return parts
            reason = f"it has no {func}; q.dequantize() gives a plain tensor, which has everything"
            raise UnsupportedError(f"{func.overloadpacket.__name__} cannot take a QTensor", {"QTensor": reason})
        return _DISPATCHED[func](*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Plain tensors and JSON, so that `torch.load(weights_only=True)` reads it."""
        return restored, (self.form.text, self.leaves, isinstance(self, torch.nn.Parameter))

    def __deepcopy__(self, memo: dict[int, Any]) -> "QTensor":
        copied: Any = self.clone()
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=False)
        memo[id(self)] = copied
        return copied


def restored(text: str, leaves: list[torch.Tensor], is_parameter: bool) -> Any:
    """The QTensor of what its pickle holds, checked like any other.

    Args:
        text: the JSON of its form.
        leaves: its plain tensors.
        is_parameter: whether it was an `nn.Parameter`.

    Returns:
        The QTensor.

    Raises:
        QuantError: where they do not fit.
    """
    form = form_of(text)
    if not isinstance(leaves, list) or len(leaves) != _leaf_count(form):
        raise QuantError(f"a QTensor of {form.scheme.name} has {_leaf_count(form)} tensors; the file has {leaves!r:.80}")
    q = form.qtensor(leaves)
    _check(q)
    return torch.nn.Parameter(q, requires_grad=False) if is_parameter else q


torch.serialization.add_safe_globals([restored])


@functools.lru_cache(maxsize=4096)
def _interned(*fields: Any) -> Form:
    return Form(*fields)


def _leaf_count(form: Form) -> int:
    return len(form.parts) + (0 if form.scale is None else _leaf_count(form.scale) - 1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(q: QTensor) -> None:
    """Raises QuantError where the parts of a QTensor do not fit each other, its scheme and its shape."""
    if not q.dtype.is_floating_point:
        raise QuantError(f"a QTensor stands for floating numbers, not {q.dtype}")
    if len({leaf.device for leaf in q.leaves}) > 1:
        raise QuantError(
            f"the parts of a QTensor are on {', '.join(sorted({str(t.device) for t in q.leaves}))}; move all to one"
        )
    if len(q.shape) < -q.scheme.pack_axis or q.codes.ndim != q.ndim:
        raise QuantError(f"codes of shape {tuple(q.codes.shape)} do not fit the shape {tuple(q.shape)}")
    shapes = (jax.ShapeDtypeStruct(tuple(leaf.shape), _name(leaf.dtype)) for leaf in q.leaves)
    arrays = q.form.qarray(shapes)
    if reason := misfit(arrays):
        raise QuantError(f"this is no QTensor of {q.scheme.name} and shape {tuple(q.shape)}: {reason}")
    if arrays.shape != tuple(q.shape):
        raise QuantError(f"codes of shape {tuple(q.codes.shape)} stand for {arrays.shape}, not for {tuple(q.shape)}")


# --- to JAX and back ---


def to_qarray(q: QTensor) -> QArray:
    """The QArray of a QTensor: the same bytes, in the same memory where it is contiguous and aligned to 64 bytes.

    Args:
        q: the QTensor; on a CPU, or on a GPU that JAX uses too.

    Returns:
        The QArray. Where memory is shared, writing into `q.codes` or `q.scale` in place changes it; `q.copy_` does not.

    Raises:
        UnsupportedError: for a tensor on a device that JAX does not compute on.

    >>> import torch
    >>> from fewbit.torch import quantize
    >>> to_qarray(quantize(torch.ones(4, 64), "int4_g32"))
    QArray(int4_g32, float32[4, 64], 160 bytes, 5.000 bits/weight)
    """
    handover.check_device("to_qarray", q.device)
    stored, order = in_memory_order(q)
    moved = stored.form.qarray(handover.array(leaf) for leaf in stored.leaves)
    return moved if order == tuple(range(q.ndim)) else moved.transpose(order)


def from_qarray(q: QArray, device: torch.device | str = "cpu") -> QTensor:
    """The QTensor of a QArray: the same bytes, in the same memory where `device` is where they are.

    Args:
        q: the QArray, whatever its scheme and policy.
        device: where the tensors are to be.

    Returns:
        The QTensor. Where memory is shared its tensors must not be written into: JAX takes its arrays for constant.
        `q.copy_` and `load_state_dict` never do that.

    Raises:
        QuantError: for a QArray whose parts do not fit each other.

    >>> import fewbit as fb
    >>> import jax.numpy as jnp
    >>> from_qarray(fb.quantize(jnp.ones((4, 64)), "uint4_g64"))
    QTensor(uint4_g64, float32[4, 64], 148 bytes, 4.625 bits/weight)
    """
    if not isinstance(q, QArray):
        raise QuantError(f"from_qarray takes a QArray, not {type(q).__name__}")
    if reason := misfit(q):
        raise QuantError(f"this is no QArray of {q.scheme.name}: {reason}")
    return _with_leaves(q, lambda leaf: handover.tensor(leaf).to(device))


def _with_leaves(q: QArray, change: Callable[[Any], torch.Tensor]) -> QTensor:
    leaves = {
        name: None if part is None else _with_leaves(part, change) if isinstance(part, QArray) else change(part)
        for name, part in ((name, getattr(q, name)) for name in _PARTS)
    }
    policy, scale = q.policy, leaves["scale"]
    if policy is not None and not isinstance(policy, Policy):
        raise QuantError(f"the QArray has a policy of type {type(policy).__name__}; a QTensor takes those of fb.Policy")
    present = [name for name, part in leaves.items() if part is not None]
    of_scale = scale.form if isinstance(scale, QTensor) else None
    return QTensor._unchecked(leaves, Form.of(q.scheme, q.shape, np.dtype(q.dtype).name, present, of_scale, policy))


# --- operations that move or copy it, exactly ---


def _mapped(q: QTensor, change: Callable[[torch.Tensor], torch.Tensor], form: Form | None = None) -> QTensor:
    """The QTensor of changed leaves."""
    changed = {
        name: _mapped(part, change) if isinstance(part, QTensor) else None if part is None else change(part)
        for name, part in ((name, getattr(q, name)) for name in _PARTS)
    }
    return QTensor._unchecked(changed, q.form if form is None else form)


def _retyped(q: QTensor, dtype: torch.dtype | None) -> Form:
    """The form of the same codes standing for another dtype."""
    f = q.form
    return f if dtype in (None, q.dtype) else Form.of(f.scheme, f.shape, dtype, f.parts, f.scale, f.policy)  # type: ignore[arg-type]


def permuted(q: QTensor, order: Sequence[int]) -> QTensor:
    """The QTensor with its axes in another order: views of the same bytes, under a scheme whose axes are moved.

    Args:
        q: the QTensor.
        order: which of its axes each axis of the result is.

    Returns:
        The QTensor.
    """
    order = tuple(a % q.ndim for a in order)
    if order == tuple(range(q.ndim)):
        return q
    changed = {
        name: permuted(part, order) if isinstance(part, QTensor) else None if part is None else part.permute(order)
        for name, part in ((name, getattr(q, name)) for name in _PARTS)
    }
    of_scale = changed["scale"].form if isinstance(changed["scale"], QTensor) else None
    return QTensor._unchecked(changed, _moved(q.form, tuple(q.scale.shape), order, of_scale))


@functools.lru_cache(maxsize=4096)
def _moved(form: Form, scales: tuple[int, ...], order: tuple[int, ...], of_scale: Form | None) -> Form:
    """The form of a tensor whose axes are moved; a tile that its scales contradict, as stacks have it, is taken from them."""
    named, ndim = form.scheme.tiles(len(form.shape)), len(form.shape)
    real = [_tile(*axis) for axis in zip(named, tile_counts(form.shape, named), scales, form.shape, strict=True)]
    scheme = form.scheme.with_tiles(tuple(real[a] for a in order), order.index(form.scheme.pack_axis + ndim) - ndim)
    shape = tuple(form.shape[a] for a in order)
    return Form.of(scheme, shape, form.dtype, form.parts, of_scale, form.policy)


def _tile(named: Tile, expected: int, count: int, length: int) -> Tile:
    """The tile of an axis with this many scales."""
    if count == expected:
        return named
    return None if count == 1 else 1 if count == length else named


def in_memory_order(q: QTensor) -> tuple[QTensor, tuple[int, ...]]:
    """The QTensor with its axes as they are in memory, and where each axis of `q` is among them.

    A transpose is a view of strided bytes, which kernels would have to copy; its source is not.
    """
    if q.codes.is_contiguous():
        return q, tuple(range(q.ndim))
    strides = q.codes.stride()
    order = sorted(range(q.ndim), key=lambda a: -strides[a])
    return permuted(q, order), tuple(order.index(a) for a in range(q.ndim))


def _transpose(q: QTensor, first: int, second: int) -> QTensor:
    order = list(range(q.ndim))
    order[first], order[second] = order[second], order[first]
    return permuted(q, order)


def _to_copy(
    q: QTensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: Any = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> QTensor:
    """The same codes and scales on a device, standing for numbers of a dtype."""
    if (layout, pin_memory or None) not in ((None, None), (torch.strided, None)):
        raise UnsupportedError("a QTensor cannot be moved so", {"QTensor": f"layout={layout}, pin_memory={pin_memory}"})
    if dtype is not None and _name(dtype) not in ("float64", "float32", "bfloat16", "float16"):
        raise QuantError(f"a QTensor stands for floating numbers; .to({dtype}) needs q.dequantize() first")
    return _mapped(q, lambda leaf: leaf.to(device=device, non_blocking=non_blocking, copy=True), _retyped(q, dtype))


def _copy(target: Any, source: Any, non_blocking: bool = False) -> Any:
    """Takes the bytes of another QTensor. They are copied into tensors of their own: memory shared with JAX stays as it is."""
    if not isinstance(target, QTensor) or not isinstance(source, QTensor):
        what = "a float tensor takes a QTensor" if isinstance(source, QTensor) else "a QTensor takes a float tensor"
        fix = "q.dequantize() decodes and fewbit.torch.quantize encodes"
        module = "fewbit.torch.quantize_ the module before load_state_dict of quantized tensors"
        raise QuantError(f"copy_: {what}; {fix}; {module}")
    if _retyped(source, target.dtype).text != target.form.text:
        raise QuantError(f"copy_: {source!r} does not fit {target!r}; both need the same scheme and shape")
    moved = _mapped(source, lambda leaf: leaf.to(target.device, non_blocking=non_blocking, copy=True))
    for name in _PARTS:
        setattr(target, name, getattr(moved, name))
    return target


def _detached(q: QTensor) -> QTensor:
    return _mapped(q, lambda leaf: leaf.detach())


# Under inference_mode torch's own detach cannot take what a dispatched one returns.
FUNCTIONS[torch.Tensor.detach] = _detached

_DISPATCHED: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _detached,
    _aten.alias.default: lambda q: _mapped(q, lambda leaf: leaf),
    _aten.clone.default: lambda q, memory_format=None: _mapped(q, lambda leaf: leaf.clone()),
    _aten.empty_like.default: lambda q, dtype=None, layout=None, device=None, **_: _mapped(
        q, lambda leaf: torch.empty_like(leaf, device=device), _retyped(q, dtype)
    ),
    _aten.t.default: lambda q: permuted(q, range(q.ndim)[::-1]),
    _aten.transpose.int: _transpose,
    _aten.permute.default: permuted,
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy,
}
"""The operations of torch's dispatcher that a QTensor has; products never come here, see `FUNCTIONS`."""
