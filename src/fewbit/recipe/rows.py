"""The rows of a plan: what happens to one parameter, and to one product without a parameter."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax.numpy as jnp

from .._json import Count, checked, form_of
from ..errors import QuantError
from ..ops import Policy
from ..ops.policy import POLICY
from .roles import Role, as_role
from .sparsity import SPARSITY, Sparsity


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """What happens to one parameter.

    Attributes:
        path: the parameter.
        shape: its shape.
        dtype: its dtype's name.
        policy: how it is quantized; None: it stays as it is.
        axis: the axes along which its tiles run, negative; empty for one that stays.
        stacked: the axes, negative, that a loop takes one element of at a time; each element is quantized on its own.
        ops: what uses it.
        bytes_before: its bytes as it is.
        bytes_after: its bytes as planned, scales included.
        reason: why it stays as it is, or what should be known about it; else empty.
        sites: where in the code it is used, an operation and its file and line each.
        sparsity: which of its weights are pruned, along which axes; None: none.
        casts: the dtypes that it is cast to before it is quantized, because its products and look-ups cast it to them; none
            quantizes the numbers as they are.
        role: what it does in the network, by `fewbit.recipe.Role`.
        role_source: what says so: "trace", "transformers: Linear", "names: llama", or empty where the role is unknown.
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

    @property
    def kind(self) -> str:
        """What it is planned as, in words: its policy or its dtype, and its sparsity."""
        kind = self.dtype if self.policy is None else str(self.policy)
        return kind if self.sparsity is None else f"{kind}, {self.sparsity}"

    @property
    def size(self) -> int:
        """How many elements it has."""
        size = 1
        for n in self.shape:
            size *= n
        return size

    def to_json(self) -> dict[str, Any]:
        """The JSON form; the sparsity and the casts only where there are some."""
        form: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | {"role": str(self.role)}
        for name in ("policy", "sparsity"):
            form[name] = None if form[name] is None else form[name].to_json()
        form = {key: value for key, value in form.items() if value or key not in ("sparsity", "casts")}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in form.items()}

    @classmethod
    def from_json(cls, form: Mapping[str, Any]) -> Self:
        """The row of a JSON form; an unknown or missing key raises QuantError."""
        fields = _row_fields(form, PLAN_ROW, "a plan's row")
        fields["role"] = as_role(fields.get("role", Role.UNKNOWN))
        if not _is_dtype(fields["dtype"]):
            raise QuantError(
                f"the row of {fields['path']!r} has the dtype {fields['dtype']!r}, which JAX does not have; write float32, say"
            )
        if form.get("sparsity") is not None:
            fields["sparsity"] = Sparsity.from_json(form["sparsity"])
        return cls(**fields)


@dataclasses.dataclass(frozen=True)
class ProductRow:
    """What happens to one product of which no operand is a parameter: attention's scores, its mean of values.

    Attributes:
        name: the names of `jax.named_scope` around it, or its place in the trace, see `fewbit.ops.uses.Product`.
        op: "dot_general", "conv_general_dilated" or "ragged_dot".
        shapes: of the left and the right operand.
        policy: how it is computed, its `weight` being the scheme of the right operand; None: in floating point.
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
        return form | {"policy": None if self.policy is None else self.policy.to_json()}

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


def _row_fields(form: Mapping[str, Any], schema: Any, what: str) -> dict[str, Any]:
    """The fields of a row from its JSON form: lists as tuples, and the policy as a Policy."""
    form = checked(form, schema, what)
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in form.items()}
    return fields | {"policy": None if form["policy"] is None else Policy.from_json(form["policy"])}


def _is_dtype(name: str) -> bool:
    """Whether a name is that of a dtype of JAX, those of random keys included."""
    return hasattr(getattr(jnp, name, None), "dtype") or (name.startswith("key<") and name.endswith(">"))
