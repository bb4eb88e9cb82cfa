"""The rows of a plan: parameters and products."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

import jax.numpy as jnp
import msgspec

from .._json import Count, checked, form_of
from ..errors import QuantError
from ..ops.policy import POLICY, Policy
from .role import Role, as_role
from .sparsity import SPARSITY, Sparsity


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """What happens to one parameter.

    Attributes:
        path: the parameter.
        shape: its shape.
        dtype: its dtype's name.
        policy: how it is quantized; None: it is not.
        axis: the axes along which its tiles (blocks with one scale) run, negative; empty for one that is not quantized.
        stacked: the axes, negative, that a loop runs over; each element is quantized on its own.
        ops: what uses it.
        bytes_before: its bytes now.
        bytes_after: its planned bytes, scales included.
        reason: why it stays as it is, or a note about it; else empty.
        sites: where in the code it is used, an operation and its file and line each.
        sparsity: which of its weights are pruned, along which axes; None: none.
        casts: the dtypes that it is cast to before it is quantized, because its products and look-ups cast it to them.
        role: what it does in the model, by `fewbit.recipe.Role`.
        role_source: where the role comes from: "trace", "transformers: Linear", "names: llama"; empty where it is unknown.
        contracted: the contraction axes of its products, negative, even where its rule gives `axis` others; empty without a
            product, and where they are unknown.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    policy: Policy | None
    axis: tuple[int, ...]
    stacked: tuple[int, ...]
    ops: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    reason: str = ""
    sites: tuple[str, ...] = ()
    sparsity: Sparsity | None = None
    casts: tuple[str, ...] = ()
    role: Role = Role.UNKNOWN
    role_source: str = ""
    contracted: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """Its policy or its dtype, and its sparsity, in words."""
        kinds = self.policy or self.dtype, self.sparsity
        return ", ".join(str(kind) for kind in kinds if kind is not None)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        """The JSON form. It has the sparsity, the casts and the contracted axes only where there are some."""
        form: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | {"role": str(self.role)}
        for key, value in tuple(form.items()):
            if isinstance(value, tuple):
                form[key] = list(value)
            elif isinstance(value, Policy | Sparsity):
                form[key] = value.to_json()
            if key in ("sparsity", "casts", "contracted") and not value:
                del form[key]
        return form

    @classmethod
    def from_json(cls, form: Mapping[str, Any]) -> Self:
        """The row of a JSON form. Its axes may count from the front.

        Raises:
            QuantError: for an unknown or missing key, a dtype that JAX does not have, and an axis that the shape does not have.
        """
        fields = _row_fields(form, PLAN_ROW, "a plan's row")
        for key in ("axis", "stacked", "contracted"):
            fields[key] = _from_end(fields.get(key, ()), f"the row of {fields['path']!r}", key, fields["shape"])
        fields["role"] = as_role(fields.get("role", Role.UNKNOWN))
        if not _is_dtype(fields["dtype"]):
            raise QuantError(
                f"the row of {fields['path']!r} has the dtype {fields['dtype']!r}, which JAX does not have; write one "
                "such as float32"
            )
        if form.get("sparsity") is not None:
            fields["sparsity"] = Sparsity.from_json(form["sparsity"])
        return cls(**fields)


@dataclasses.dataclass(frozen=True)
class ProductRow:
    """One product (matmul or convolution) without a parameter, such as attention's.

    Attributes:
        name: the `jax.named_scope` around it, or its place in the trace, see `fewbit.ops.interpret.parameter_uses.Product`.
        op: "dot_general", "conv_general_dilated" or "ragged_dot".
        shapes: of the left and the right operand.
        policy: how it is computed; its `weight` is the scheme of the right operand. None: in floating point.
        rule: the path of the rule that matched its name; empty when none did.
        site: where in the code it is.
    """

    name: str
    op: str
    shapes: tuple[tuple[int, ...], ...]
    policy: Policy | None
    rule: str
    site: str

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        form = dataclasses.asdict(self) | {"shapes": [list(shape) for shape in self.shapes]}
        return form | {"policy": self.policy and self.policy.to_json()}

    @classmethod
    def from_json(cls, form: Mapping[str, Any]) -> Self:
        """The row of a JSON form; an unknown or missing key raises QuantError."""
        fields = _row_fields(form, PRODUCT_ROW, "a product's row")
        fields["shapes"] = tuple(map(tuple, fields["shapes"]))
        return cls(**fields)


_POLICY = str | POLICY | None
_SHAPE = list[Count]

PLAN_ROW = form_of(PlanRow, policy=_POLICY, shape=_SHAPE, bytes_before=Count, bytes_after=Count, sparsity=SPARSITY | None)
"""The JSON schema of a parameter's row."""

PRODUCT_ROW = form_of(ProductRow, policy=_POLICY, shapes=list[_SHAPE])
"""The JSON schema of a product's row."""


def _row_fields(form: Mapping[str, Any], schema: type[msgspec.Struct], what: str) -> dict[str, Any]:
    """The fields of a row from its JSON form. Lists become tuples, and the policy a Policy."""
    fields = checked(form, schema, what)
    fields |= {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
    if fields["policy"] is not None:
        fields["policy"] = Policy.from_json(fields["policy"])
    return fields


def _is_dtype(name: str) -> bool:
    """Whether a name is a dtype of JAX, those of random keys included."""
    return hasattr(getattr(jnp, name, None), "dtype") or (name.startswith("key<") and name.endswith(">"))


def _from_end(axes: tuple[int, ...], where: str, key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of a shape, negative. `where` and `key` name them in the QuantError of one that it does not have."""
    ndim = len(shape)
    if not ndim:  # a scalar, such as a random key, is quantized along no axis
        return axes
    for axis in axes:
        if not -ndim <= axis < ndim:
            raise QuantError(f"{where} has {axis} in {key}; the axes of its shape {shape} are {-ndim} to {ndim - 1}")
    if len({axis % ndim for axis in axes}) < len(axes):
        raise QuantError(f"{where} has an axis twice in {key}: {list(axes)}; write each once")
    return tuple(axis % ndim - ndim for axis in axes)
