"""QTensor: a torch.Tensor subclass with the bytes of a QArray."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .._tiles import Tile, tile_counts
from ..array.packing import code_capacity, packed_length
from ..array.qarray import QArray
from ..array.scheme import Scheme
from ..array.validity import misfit
from ..errors import QuantError, UnsupportedError
from ..ops.policy import Policy
from . import dlpack as handover

_aten = torch.ops.aten

FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""The torch functions that take a QTensor; `matmul.py` and others register theirs on import."""

VIEWS: dict[Any, Callable[..., Any]] = {}
"""The torch functions of a QTensor alone, which is constant under `torch.func`: wrapped by it, it would lose its class."""

P = ParamSpec("P")


def one_operator_in_graphs(schema: str) -> Callable[[Callable[P, torch.Tensor]], Callable[P, torch.Tensor]]:
    """Makes a function of QTensors one operator of a compiled graph: a compiler cannot trace how QTensors are made.

    Args:
        schema: the torch schema of the operator, with the parameters of the function.

    Returns:
        A decorator.
    """

    def decorated(fn: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
        handover.LIBRARY.define(schema)
        operator = getattr(torch.ops.fewbit, schema.partition("(")[0])
        FUNCTIONS[operator] = fn

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
            if torch.compiler.is_dynamo_compiling() and any(isinstance(a, QTensor) for a in (*args, *kwargs.values())):
                return operator(*args, **kwargs)
            return fn(*args, **kwargs)

        return call

    return decorated


_PARTS = ("codes", "scale", "zero_point", "tensor_scale")

DTYPES = (
    *("float64", "float32", "bfloat16", "float16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
"""The dtypes of QTensors."""


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """The static description of a QTensor: everything but its leaves and its device.

    `Form.of` interns forms, so that a cache lookup needs no comparison.

    Attributes:
        scheme: the scheme, with its tiles on the quantized axis.
        shape: of the dequantized tensor.
        dtype: the name of its dtype.
        parts: which of codes, scale, zero_point and tensor_scale are present.
        scale: the form of quantized scales; else None.
        policy: the policy of its products; None: weight-only.

    Raises:
        QuantError: for another dtype than `DTYPES`.
    """

    scheme: Scheme
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[str, ...]
    scale: "Form | None" = None
    policy: Policy | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise QuantError(
                f"a QTensor has a floating dtype ({known}), not {self.dtype}; call q.dequantize() for a plain tensor"
            )

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
        """The unused code slots in the bytes of the packed axis."""
        bits, length = self.scheme.format.bits, self.shape[self.scheme.pack_axis]
        return code_capacity(packed_length(length, bits, self.scheme.packing), bits) - length

    @functools.cached_property
    def text(self) -> str:
        """Its JSON, the inverse of `form_of`."""
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
        static = (self.scheme, np.dtype(jnp.dtype(self.dtype)), self.slack, self.policy)
        return QArray.tree_unflatten(static, self._parts(iter(leaves), Form.qarray).values())

    def qtensor(self, leaves: Iterable[torch.Tensor]) -> "QTensor":
        """The QTensor of this form with the given leaves, which are not checked."""
        return QTensor._unchecked(self._parts(iter(leaves), Form.qtensor), self)

    def _parts(self, leaves: Iterator[Any], of_scale: Callable[["Form", Iterator[Any]], object]) -> dict[str, Any]:
        found: dict[str, Any] = dict.fromkeys(_PARTS)
        for part in self.parts:
            if part == "scale" and self.scale is not None:
                found[part] = of_scale(self.scale, leaves)
            else:
                found[part] = next(leaves)
        return found


@functools.lru_cache(maxsize=4096)
def form_of(text: str) -> Form:
    """The form of a JSON text.

    Raises:
        QuantError: for JSON that is not of `Form.text`.
    """
    try:
        return _form(json.loads(text))
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise QuantError(f"{text:.80} is no form of a QTensor: {error!r}") from error


def _form(form: dict[str, Any]) -> Form:
    policy, scale, parts = form.get("policy"), form.get("scale"), tuple(form["parts"])
    if scale is not None:
        scale = _form(scale)
    if policy is not None:
        policy = Policy.from_json(policy)
    if set(parts) - set(_PARTS):
        raise QuantError(f"a QTensor has no parts {parts}; it has {', '.join(_PARTS)}")
    shape = tuple(map(int, form["shape"]))
    return Form.of(Scheme.from_json(form["scheme"]), shape, form["dtype"], parts, scale, policy)


class QTensor(torch.Tensor):
    """A quantized tensor: packed codes, a scale for each tile (block), and their Scheme.

    It has the shape and dtype of the dequantized tensor. Matmuls (`@`, `torch.matmul`, `mm`, `mv`, `addmm`, `F.linear`),
    convolutions, `F.embedding`, transposes, slices of whole tiles, `.to`, `.detach`, `.clone` and `.copy_` work on it; it
    can be a parameter or a buffer, and supports `state_dict`, `torch.save`, `copy.deepcopy` and `torch.compile`. Every other
    operation raises UnsupportedError with its name; `q.dequantize()` returns a plain tensor. It has no gradient.

    Args:
        codes: uint8, shaped like the tensor except that the packed axis (`scheme.pack_axis`) is counted in bytes.
        scale: one element a tile, with as many axes as the tensor: uint8 codes if `scheme.scale` is a Format, a QTensor if
            it is a Scheme, else a float tensor.
        scheme: the scheme, with its tiles on the quantized axis.
        shape: the shape of the dequantized tensor.
        dtype: its floating dtype.
        zero_point: like `scale`, codes of `scheme.zero_point` or float offsets; or None.
        tensor_scale: float32, one element, with as many axes as the tensor, a factor of every scale; or None.
        policy: the policy of its products, as for a QArray; None: weight-only.

    Attributes:
        form: scheme, shape, dtype and policy in one object.
        is_view: whether it is a transpose or some elements of another QTensor, which `copy_` refuses to write.

    Raises:
        QuantError: if the parts do not match each other and the scheme.
    """

    form: Form
    is_view: bool
    _parts: dict[str, Any]
    """Codes, scale, zero point and tensor scale, shared with `.detach()` and `.data`: `copy_` into one replaces them in all."""

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
        q = cls._unchecked(parts, Form.of(scheme, shape, dtype, present, scale_form(scale), policy))
        _check(q)
        return q

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()  # __new__ does the work; this is the signature for type checkers

    @classmethod
    def _unchecked(cls, parts: dict[str, Any], form: Form, *, is_view: bool = False) -> "QTensor":
        """The QTensor of parts that are not checked."""
        dtype = getattr(torch, form.dtype)
        with torch.inference_mode(False):  # under it torch rejects views that are inference tensors of a tensor that is none
            q = torch.Tensor._make_wrapper_subclass(cls, form.shape, dtype=dtype, device=parts["codes"].device)
        q.form, q.is_view, q._parts = form, is_view, parts
        return q

    # --- properties ---

    @property
    def codes(self) -> torch.Tensor:
        """The packed codes, uint8."""
        return self._parts["codes"]

    @property
    def scale(self) -> Any:
        """The scale of each tile."""
        return self._parts["scale"]

    @property
    def zero_point(self) -> torch.Tensor | None:
        """The zero point or offset of each tile; None: without."""
        return self._parts["zero_point"]

    @property
    def tensor_scale(self) -> torch.Tensor | None:
        """The factor of every scale; None: without."""
        return self._parts["tensor_scale"]

    @property
    def scheme(self) -> Scheme:
        """Its scheme, with its tiles on the quantized axis."""
        return self.form.scheme

    @property
    def policy(self) -> Policy | None:
        """The policy of its products; None: weight-only."""
        return self.form.policy

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The plain tensors of the QTensor.

        They are codes, scale (the leaves of a quantized scale), zero point, tensor scale.
        """
        found: list[torch.Tensor] = []
        for name in self.form.parts:
            part = self._parts[name]
            found += part.leaves if isinstance(part, QTensor) else [part]
        return found

    @property
    def nbytes(self) -> int:
        """The stored bytes: packed codes, scales, zero points and tensor scale."""
        return sum(int(leaf.numel()) * leaf.element_size() for leaf in self.leaves)

    @property
    def bits_per_weight(self) -> float:
        """`8 * nbytes / numel()`."""
        return 8 * self.nbytes / self.numel()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        shape = ", ".join(map(str, self.shape))
        place = "" if self.device.type == "cpu" else f", {self.device}"
        if not all(isinstance(length, int) for length in self.codes.shape):  # a compiler's symbols
            return f"QTensor({self.scheme.name}, {_name(self.dtype)}[{shape}]{place})"
        return (
            f"QTensor({self.scheme.name}, {_name(self.dtype)}[{shape}], {self.nbytes:,} bytes, "
            f"{self.bits_per_weight:.3f} bits/weight{place})"
        )

    # --- conversions ---

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:  # type: ignore[override]
        """The plain tensor, by `fewbit.torch.dequantize`.

        Args:
            dtype: the floating dtype of the result; None: its own.

        Returns:
            A plain tensor.
        """
        from .quantize import dequantize  # it needs this class

        return dequantize(self, dtype)

    def to_qarray(self) -> QArray:
        """The QArray of the same bytes, by `fewbit.torch.to_qarray`."""
        return to_qarray(self)

    def requires_grad_(self, requires_grad: bool = True) -> "QTensor":
        """Itself; `True` raises, since codes have no gradient."""
        if requires_grad:
            raise QuantError(
                "a QTensor has no gradient: use nn.Parameter(q, requires_grad=False), and call requires_grad_(False) on the "
                "module before load_state_dict(..., assign=True)"
            )
        return self

    def share_memory_(self) -> "QTensor":
        """Itself, with its tensors moved to shared memory."""
        for leaf in self.leaves:
            leaf.share_memory_()
        return self

    # --- torch protocols ---

    def __dlpack__(self, **_: object) -> Any:
        """Raises: a QTensor has no memory of its own dtype."""
        reason = "its memory is packed codes; export q.dequantize(), or each of q.leaves"
        raise UnsupportedError("DLPack cannot take a QTensor", {"QTensor": reason})

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        """The names of its tensors, and the JSON of its form."""
        return list(self.form.parts), self.form.text

    def _stable_hash_for_caching(self) -> str:
        """The cache key of torch.compile."""
        return self.form.text

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], text: str, outer_size: object, outer_stride: object
    ) -> "QTensor":
        return QTensor._unchecked(dict.fromkeys(_PARTS) | inner, form_of(text))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in FUNCTIONS:
            if kwargs.get("out") is not None:
                name = getattr(func, "__name__", func)
                raise UnsupportedError(
                    f"{name} cannot take out= with a QTensor", {"QTensor": "its products are new tensors"}
                )
            return FUNCTIONS[func](*args, **kwargs)
        # Under torch.func a result would be wrapped and lose its class; there is no public way to ask or to suspend it.
        is_transformed = not torch.compiler.is_dynamo_compiling() and torch._C._are_functorch_transforms_active()
        with torch._C._DisableFuncTorch() if is_transformed else contextlib.nullcontext():
            if func in VIEWS:
                return VIEWS[func](*args, **kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> Any:
        if func not in DISPATCHED:
            # Under inference_mode composite operators are not decomposed before the dispatch.
            if (parts := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
                return parts
            reason = f"it has no {func}; call q.dequantize() for a plain tensor"
            raise UnsupportedError(f"{func.overloadpacket.__name__} cannot take a QTensor", {"QTensor": reason})
        return DISPATCHED[func](*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Plain tensors and JSON, which `torch.load(weights_only=True)` accepts."""
        return restored, (self.form.text, self.leaves, isinstance(self, torch.nn.Parameter))

    def __deepcopy__(self, memo: dict[int, Any]) -> "QTensor":
        copied: Any = self.clone()
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=False)
        memo[id(self)] = copied
        return copied


def restored(text: str, leaves: list[torch.Tensor], is_parameter: bool) -> torch.Tensor:
    """Unpickles and checks a QTensor.

    Args:
        text: the JSON of its form.
        leaves: its plain tensors.
        is_parameter: whether it was an `nn.Parameter`.

    Returns:
        The QTensor.

    Raises:
        QuantError: if they do not match.
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
    if form.scale is None:
        return len(form.parts)
    return len(form.parts) - 1 + _leaf_count(form.scale)


def scale_form(scale: object) -> Form | None:
    """The form of a quantized scale; None for a plain tensor."""
    return scale.form if isinstance(scale, QTensor) else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(q: QTensor) -> None:
    """Raises QuantError if the parts of a QTensor do not match. They must match each other, its scheme and its shape."""
    if len({leaf.device for leaf in q.leaves}) > 1:
        raise QuantError(
            f"the parts of a QTensor are on {', '.join(sorted({str(t.device) for t in q.leaves}))}; move all to one device"
        )
    if len(q.shape) < -q.scheme.pack_axis or q.codes.ndim != q.ndim:
        raise QuantError(f"codes of shape {tuple(q.codes.shape)} do not fit the shape {tuple(q.shape)}")
    shapes = (jax.ShapeDtypeStruct(tuple(leaf.shape), _name(leaf.dtype)) for leaf in q.leaves)
    arrays = q.form.qarray(shapes)
    if reason := misfit(arrays):
        raise QuantError(f"this is no QTensor of {q.scheme.name} and shape {tuple(q.shape)}: {reason}")
    if arrays.shape != tuple(q.shape):
        raise QuantError(f"codes of shape {tuple(q.codes.shape)} decode to shape {arrays.shape}, not {tuple(q.shape)}")


# --- conversion from and to QArrays ---


def to_qarray(q: QTensor) -> QArray:
    """The QArray of a QTensor. It has the same bytes, not copied if contiguous and 64-byte aligned.

    Args:
        q: the QTensor, on a CPU or on a GPU that JAX uses.

    Returns:
        The QArray. If it shares memory, in-place writes to `q.codes` or `q.scale` change it; `q.copy_` does not.

    Raises:
        UnsupportedError: for a tensor on a device that JAX does not use.

    >>> import torch
    >>> from fewbit.torch import quantize
    >>> to_qarray(quantize(torch.ones(4, 64), "int4_g32"))
    QArray(int4_g32, float32[4, 64], 160 bytes, 5.000 bits/weight)
    """
    handover.check_device("to_qarray", q.device)
    stored, order = in_memory_order(q)
    array = stored.form.qarray(handover.array(leaf) for leaf in stored.leaves)
    if order == tuple(range(q.ndim)):
        return array
    return array.transpose(order)


def from_qarray(q: QArray, device: torch.device | str = "cpu") -> QTensor:
    """The QTensor of a QArray. It has the same bytes, not copied if they are on `device`.

    Args:
        q: the QArray, of any scheme and policy.
        device: the device of the tensors.

    Returns:
        The QTensor. If it shares memory, its tensors must not be written in place, since JAX arrays are immutable;
        `q.copy_` and `load_state_dict` do not write in place.

    Raises:
        QuantError: for a QArray whose parts do not match.

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
    parts, policy = mapped_parts(q, change, lambda scale: _with_leaves(scale, change)), q.policy
    if policy is not None and not isinstance(policy, Policy):
        raise QuantError(f"the QArray has a policy of type {type(policy).__name__}; a QTensor takes those of fb.Policy")
    present = [name for name, part in parts.items() if part is not None]
    form = Form.of(q.scheme, q.shape, np.dtype(q.dtype).name, present, scale_form(parts["scale"]), policy)
    return QTensor._unchecked(parts, form)


def mapped_parts(
    q: QTensor | QArray, on_leaf: Callable[[Any], torch.Tensor], on_scale: Callable[[Any], QTensor]
) -> dict[str, Any]:
    """The parts of a QTensor or QArray, with functions applied.

    `on_scale` is applied to a quantized scale, and `on_leaf` to all others.
    """
    changed: dict[str, Any] = dict.fromkeys(_PARTS)
    for name in _PARTS:
        part = getattr(q, name)
        if isinstance(part, QTensor | QArray):
            changed[name] = on_scale(part)
        elif part is not None:
            changed[name] = on_leaf(part)
    return changed


# --- moves and copies, which are exact ---


def _mapped(q: QTensor, change: Callable[[torch.Tensor], torch.Tensor], form: Form | None = None) -> QTensor:
    """The QTensor of changed leaves."""
    return QTensor._unchecked(mapped_parts(q, change, lambda scale: _mapped(scale, change)), form or q.form)


def _retyped(q: QTensor, dtype: torch.dtype | None) -> Form:
    """The form of `q` with another dtype."""
    if dtype is None or dtype == q.dtype:
        return q.form
    f = q.form
    return Form.of(f.scheme, f.shape, dtype, f.parts, f.scale, f.policy)


def lengths(leaf: torch.Tensor) -> tuple[int, ...]:
    """The shape of a leaf as numbers, for which a compiler may have symbols: a form determines them."""
    return tuple(map(int, leaf.shape))


def axis_of(dim: int, ndim: int) -> int:
    """The axis of a number that may count from the end. IndexError, as of torch, for one out of range."""
    if not -ndim <= dim < ndim:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {dim})")
    return dim % ndim


def permuted(q: QTensor, order: Sequence[int]) -> QTensor:
    """Permutes the axes: views of the same bytes, and a scheme with permuted axes.

    Args:
        q: the QTensor.
        order: the axis of `q` for each axis of the result.

    Returns:
        The QTensor.

    Raises:
        IndexError: for an axis that it does not have.
    """
    order = tuple(axis_of(a, q.ndim) for a in order)
    if order == tuple(range(q.ndim)):
        return q
    parts = mapped_parts(q, lambda leaf: leaf.permute(order), lambda scale: permuted(scale, order))
    return QTensor._unchecked(parts, _moved(q.form, lengths(q.scale), order, scale_form(parts["scale"])), is_view=True)


@functools.lru_cache(maxsize=4096)
def _moved(form: Form, scales: tuple[int, ...], order: tuple[int, ...], of_scale: Form | None) -> Form:
    """The form after a permutation of the axes."""
    real, ndim = tiles_of(form, scales), len(form.shape)
    scheme = form.scheme.with_tiles(tuple(real[a] for a in order), order.index(form.scheme.pack_axis + ndim) - ndim)
    shape = tuple(form.shape[a] for a in order)
    return Form.of(scheme, shape, form.dtype, form.parts, of_scale, form.policy)


def tiles_of(form: Form, scales: tuple[int, ...]) -> list[Tile]:
    """The tile of each axis. Where the scale shape contradicts it, as in stacks, that determines the tile."""
    named = form.scheme.tiles(len(form.shape))
    return [_tile(*axis) for axis in zip(named, tile_counts(form.shape, named), scales, form.shape, strict=True)]


def _tile(named: Tile, expected: int, count: int, length: int) -> Tile:
    """The tile of an axis with `count` scales."""
    if count == expected or count not in (1, length):
        return named
    return None if count == 1 else 1


def in_memory_order(q: QTensor) -> tuple[QTensor, tuple[int, ...]]:
    """The QTensor with its axes in memory order. Also returns the position of each axis of `q` in it.

    Kernels would have to copy a transposed view; they read the contiguous original instead.
    """
    if q.codes.is_contiguous():
        return q, tuple(range(q.ndim))
    strides = q.codes.stride()
    order = sorted(range(q.ndim), key=lambda a: -strides[a])
    return permuted(q, order), tuple(order.index(a) for a in range(q.ndim))


# Their parameters have torch's names, by which they can be passed.


def _transpose(input: QTensor, dim0: int, dim1: int) -> QTensor:  # noqa: A002
    order, (a, b) = list(range(input.ndim)), (axis_of(dim, input.ndim) for dim in (dim0, dim1))
    order[a], order[b] = b, a
    return _permute(input, order)


def _t(input: QTensor) -> QTensor:  # noqa: A002
    if input.ndim > 2:
        raise QuantError(f"t() transposes matrices; got shape {tuple(input.shape)}")
    return _permute(input, range(input.ndim)[::-1])


def _permute(input: QTensor, *axes: Any, dims: Sequence[int] = ()) -> QTensor:  # noqa: A002
    """`permute(2, 0, 1)`, `permute((2, 0, 1))` or `permute(dims=...)`."""
    if len(axes) == 1 and not isinstance(axes[0], int):
        (axes,) = axes
    if not torch.compiler.is_compiling():
        return permuted(input, axes or dims)
    with torch._C.DisableTorchFunctionSubclass():  # an operator in the graph, as in `indexing.py`
        return _aten.permute.default(input, list(axes or dims))


def _to_copy(
    q: QTensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | str | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: object = None,
) -> QTensor:
    """A copy of the codes and scales on a device, with another dtype."""
    if (layout, pin_memory or None) not in ((None, None), (torch.strided, None)):
        raise UnsupportedError("a QTensor cannot be moved", {"QTensor": f"layout={layout}, pin_memory={pin_memory}"})
    return _mapped(q, lambda leaf: leaf.to(device=device, non_blocking=non_blocking, copy=True), _retyped(q, dtype))


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> QTensor:
    """Copies another QTensor into new tensors, for the target and its aliases: memory shared with JAX is not written."""
    if not isinstance(target, QTensor) or not isinstance(source, QTensor):
        kinds = ("a QTensor", "a float tensor")
        into, out_of = kinds if isinstance(target, QTensor) else kinds[::-1]
        raise QuantError(
            f"copy_ into {into} from {out_of}: convert with q.dequantize() or fewbit.torch.quantize; call "
            "fewbit.torch.quantize_ on the module before load_state_dict of quantized tensors"
        )
    if torch.compiler.is_compiling():  # a graph would write into its own alias
        raise UnsupportedError(
            "copy_ into a QTensor cannot be compiled", {"QTensor": "call it outside of the compiled function"}
        )
    if target.is_view:
        raise UnsupportedError("copy_ cannot write into a transpose or a part of a QTensor", {"QTensor": _WHOLE})
    if _retyped(source, target.dtype).text != target.form.text:
        raise QuantError(f"copy_: {source!r} does not fit {target!r}; both need the same scheme and shape")
    moved = _mapped(source, lambda leaf: leaf.to(target.device, non_blocking=non_blocking, copy=True))
    target._parts.update(moved._parts)
    return target


_WHOLE = "codes are written as a whole, by q.copy_(new); q.clone() is no view, and a float tensor takes q.dequantize()"


def _set_elements(*_: object) -> None:
    """`q[index] = value` and `x[index] = q`."""
    raise UnsupportedError("an assignment to elements cannot take a QTensor", {"QTensor": _WHOLE})


def _set_data(q: QTensor, value: torch.Tensor) -> None:
    """`q.data = value`: the tensors of another QTensor, which it then shares."""
    if not isinstance(value, QTensor) or value.form.text != q.form.text or value.device != q.device:
        kind = repr(value) if isinstance(value, QTensor) else f"a tensor {_name(value.dtype)}{list(value.shape)}"
        advice = "quantize it to the same scheme, or replace the parameter of the module"
        raise QuantError(f"q.data = value: {kind} does not fit {q!r}; {advice}")
    q._parts, q.is_view = value._parts, value.is_view


def _detached(q: QTensor) -> QTensor:
    """An alias: `copy_` into one changes both."""
    return QTensor._unchecked(q._parts, q.form, is_view=q.is_view)


def _einsum(*_: object) -> QTensor:
    reason = "multiply matrices by x @ q.T, and batches of them by torch.bmm"
    raise UnsupportedError("einsum cannot take a QTensor", {"QTensor": reason})


def _storage(*_: object) -> None:
    """`q.storage()`, which writers of safetensors files ask for. They take UnsupportedError for a tensor without elements."""
    advice = "write QTensors by torch.save or fewbit.io.write, and the plain numbers by q.dequantize()"
    raise QuantError(f"a QTensor has no storage of its own dtype, which save_pretrained and safetensors need; {advice}")


def _getter(name: str) -> Callable[..., Any]:
    """The function by which `__torch_function__` knows a property."""
    return getattr(torch.Tensor, name).__get__


FUNCTIONS |= {
    torch.einsum: _einsum,
    # Libraries recognize shared parameters by it (accelerate); torch's is 0 for all QTensors.
    torch.Tensor.data_ptr: lambda q: q.codes.data_ptr(),
    torch.Tensor.storage: _storage,
}
VIEWS |= {
    torch.Tensor.detach: _detached,
    _getter("data"): _detached,
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.Tensor.__setitem__: _set_elements,
    _getter("T"): lambda q: _permute(q, range(q.ndim)[::-1]),
    _getter("mT"): lambda q: _transpose(q, -2, -1),
    torch.Tensor.t: _t,
    torch.t: _t,
    torch.Tensor.transpose: _transpose,
    torch.transpose: _transpose,
    torch.Tensor.permute: _permute,
    torch.permute: _permute,
}

DISPATCHED: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _detached,
    _aten.alias.default: _detached,
    _aten.clone.default: lambda q, memory_format=None: _mapped(q, lambda leaf: leaf.clone()),
    _aten.empty_like.default: lambda q, dtype=None, layout=None, device=None, **_: _mapped(
        q, lambda leaf: torch.empty_like(leaf, device=device), _retyped(q, dtype)
    ),
    _aten.t.default: _t,
    _aten.transpose.int: _transpose,
    _aten.permute.default: permuted,
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy,
    _aten.is_pinned.default: lambda q, device=None: all(leaf.is_pinned() for leaf in q.leaves),
}
"""The torch dispatcher operations of a QTensor; matmuls do not get here, see `FUNCTIONS`."""
