"""Plans: a recipe resolved against one model."""

import collections
import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._json import canonical, checked, converted, file_text, form_of, parsed, write_json
from .._registry import near_names
from ..array.qarray import QArray
from ..errors import QuantError
from ..ops.interpret.parameter_uses import Product, array_paths
from .matching import Leaf, contracted_axes
from .quantize_row import quantized_leaf
from .recipe import Recipe, RecipeLike
from .recipe import recipe as as_recipe
from .resolution import Resolution, Resolved
from .role import QUANTIZED_ROLES, Role
from .roles import TensorRole
from .rows import PLAN_ROW, PRODUCT_ROW, PlanRow, ProductRow
from .rule import OPS, Rule
from .table import plan_text, shape_text

_UNKNOWN_ROLE = "role unknown, so it stays float"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A recipe resolved against one model; printable, and editable as JSON.

    Attributes:
        rows: one for every parameter, in the order of the tree.
        recipe: the name of the recipe.
        products: one for every product without a parameter, in the order of the trace; none when no code was traced.
        notes: sentences for the user, such as where the roles come from.

    Raises:
        QuantError: for two rows of one parameter or product.
    """

    rows: tuple[PlanRow, ...]
    recipe: str = "recipe"
    products: tuple[ProductRow, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        paths, names = [row.path for row in self.rows], [row.name for row in self.products]
        for what, each in ("parameter", paths), ("product", names):
            if twice := [name for name, count in collections.Counter(each).items() if count > 1]:
                raise QuantError(f"the plan has several rows of {what} {', '.join(map(repr, twice))}; leave one of each")

    def __iter__(self) -> Iterator[PlanRow]:
        return iter(self.rows)

    def __getitem__(self, path: str) -> PlanRow:
        for row in self.rows:
            if row.path == path:
                return row
        raise QuantError(f"the plan has no parameter {path!r}; {near_names(path, tuple(r.path for r in self.rows))}")

    @property
    def unknown(self) -> tuple[str, ...]:
        """The parameters that stay float because their role is unknown and no rule decides."""
        return tuple(row.path for row in self.rows if row.reason.startswith(_UNKNOWN_ROLE))

    @property
    def bytes_before(self) -> int:
        """The bytes of all parameters as they are."""
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        """The bytes of all parameters as planned."""
        return sum(row.bytes_after for row in self.rows)

    @property
    def bits_per_weight(self) -> float:
        """`8 * bytes_after` over the number of elements of all parameters."""
        return 8 * self.bytes_after / max(sum(row.size for row in self.rows), 1)

    @property
    def sha256(self) -> str:
        """The SHA-256 of its JSON form with keys in order, without the files and lines of the code: those change no weight."""
        form = self.to_json()
        for row in form["rows"]:
            del row["sites"]
        for product in form["products"]:
            del product["site"]
        return hashlib.sha256(canonical(form)).hexdigest()

    def __str__(self) -> str:
        return self.text()

    def text(self, *, width: int | None = None) -> str:
        """The table of all rows, and a line for each product without a parameter.

        Args:
            width: how many characters a line has; None takes the terminal's width, or 160 without a terminal.
        """
        lines = [plan_text(self, [(row.path, 1, row) for row in self.rows], width=width)]
        for row in self.products:
            shapes = " . ".join(map(shape_text, row.shapes))
            lines.append(f"product {row.name}  {shapes}  {row.policy or 'float'}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The JSON form; the notes only where there are any."""
        rows = [row.to_json() for row in self.rows]
        form = {"recipe": self.recipe, "rows": rows, "products": [row.to_json() for row in self.products]}
        if self.notes:
            form["notes"] = list(self.notes)
        return form

    @classmethod
    def from_json(cls, form: Mapping[str, Any]) -> Self:
        """The plan of a JSON form. Its bytes are counted again, since it may have been edited.

        Raises:
            QuantError: for an unknown or missing key, two rows of one parameter, and a row whose parameter cannot be quantized
                as it says.
        """
        fields = checked(form, PLAN, "a plan")
        rows = tuple(recounted(PlanRow.from_json(row)) for row in fields["rows"])
        products = tuple(map(ProductRow.from_json, fields.get("products", ())))
        return cls(rows, fields.get("recipe", "recipe"), products, tuple(fields.get("notes", ())))

    def save(self, path: str | os.PathLike) -> None:
        """Writes the JSON form to a file, which keeps its content until the new one is complete."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Reads a plan that `save` wrote, perhaps edited since.

        Raises:
            QuantError: when the file cannot be read, or is not a plan.
        """
        where = f"plan file {os.fspath(path)}"
        form = converted(parsed(file_text(pathlib.Path(path), "plan file"), where), dict[str, Any], where)
        try:
            return cls.from_json(form)
        except QuantError as error:
            raise QuantError(f"{where}: {error}") from error


PLAN = form_of(Plan, rows=list[PLAN_ROW], recipe=str, products=list[PRODUCT_ROW], notes=list[str])
"""The JSON schema of a plan."""


def plan(
    fn: Callable[..., Any] | None,
    params: PyTree,
    *inputs: PyTree,
    recipe: RecipeLike,
    roles: Mapping[str, TensorRole] | None = None,
) -> Plan:
    """Resolves a recipe against a model, parameter by parameter.

    Args:
        fn: the function whose products decide roles and axes, `fn(params, *inputs)`; it is traced with shapes only. None
            when there is no code: roles that `roles` lacks are then unknown, and a parameter of unknown role stays float
            unless a rule gives its path and an axis.
        params: the tree of parameters; arrays or `jax.ShapeDtypeStruct`s. Leaves that are neither have no row.
        inputs: example inputs of `fn`, likewise.
        recipe: a Recipe, or anything that `fb.recipe` takes.
        roles: the roles of parameters by path, and without `fn` their contracted axes. With `fn` they override the roles
            that the trace gives; the axes are the trace's.

    Returns:
        The plan, with a row for every parameter and, where there is code, for every product without one.

    Raises:
        QuantError: when a rule that is not optional matches or changes nothing, when the products of a parameter contract
            different axes and its rule names none, when a tile does not fit, or when `roles` has an unknown path.

    >>> def fn(params, x):
    ...     return x @ params["w"]
    >>> row = plan(fn, {"w": jnp.ones((64, 32))}, jnp.ones((1, 64)), recipe="int8").rows[0]
    >>> row.axis, row.bytes_after
    ((-2,), 2176)
    """
    resolved, leaves = as_recipe(recipe), array_paths(params)
    for path in (roles or {}).keys() - leaves.keys():
        raise QuantError(f"roles has {path!r}, which is no parameter; {near_names(path, tuple(leaves)[:400])}")
    found = Resolution.of_roles(resolved, fn, params, inputs, roles or {})
    rows = tuple(_row(one, leaves[path], is_traced=fn is not None) for path, one in found.parameters.items())
    _check_effect(resolved, {path: one.rule for path, one in found.parameters.items()}, rows)
    return Plan(rows, resolved.name, tuple(_product_row(p, found.product_rules[p.name]) for p in found.products))


def _product_row(product: Product, rule: Rule | None) -> ProductRow:
    """The row of one product under the rule that matches it."""
    row = ProductRow(product.name, product.op, product.shapes, None, "", product.source)
    if rule is None:
        return row
    return dataclasses.replace(row, policy=rule.policy, rule=rule.path)


def _check_effect(recipe: Recipe, rules: Mapping[str, Rule | None], rows: Sequence[PlanRow]) -> None:
    """Refuses a rule that is not optional and changes none of the parameters it matches.

    Parameters that are quantized already do not count: planning a quantized tree again changes nothing.
    """
    changed = [row for row in rows if row.policy is not None or row.sparsity is not None]
    effective = {id(rules[row.path]) for row in changed}
    for index, rule in enumerate(recipe.rules):
        if rule.optional or not rule.changes or id(rule) in effective:
            continue
        same = [row for row in rows if rules[row.path] is rule]
        if same and not any(row.reason.startswith("quantized already") for row in same):
            reasons = ", ".join(f"{row.path} ({row.reason})" for row in same[:8])
            raise QuantError(
                f"rule {index + 1} of recipe {recipe.name!r} ({rule}) changes nothing: it matches only {reasons}. Correct "
                "its path, "
                "or mark it optional"
            )


def _nbytes(x: Leaf) -> int:
    if isinstance(x, QArray):
        return x.nbytes
    return x.size * x.dtype.itemsize


def _row(found: Resolved, leaf: Leaf, *, is_traced: bool) -> PlanRow:
    """The row of one parameter under the rule that matches it."""
    before = _nbytes(leaf)
    ops = tuple(dict.fromkeys(use.op for use in found.uses))
    sites = tuple(dict.fromkeys(f"{use.op} at {use.source}" for use in found.uses if use.source))
    row = PlanRow(found.path, found.shape.shape, leaf.dtype.name, None, (), (), ops, before, before, "", sites)
    row = dataclasses.replace(row, role=found.role, role_source=found.role_source, sparsity=found.sparsity)
    rule, why_not = found.rule, _why_not(leaf, found, is_traced=is_traced)
    if why_not is not None or rule is None:
        return dataclasses.replace(row, reason=why_not or "")
    if found.axis is None:
        if found.sparsity is not None:
            return row
        why = "no product contracts it"
        if not is_traced:
            why = "nothing says which axis is contracted; give its rule an axis"
        elif "take" in ops:
            why = "look-ups take single elements of it"
        return dataclasses.replace(row, reason=why)
    contracted = contracted_axes(found.uses)
    row = dataclasses.replace(
        row, policy=found.policy, axis=found.axis, stacked=found.stacked, casts=found.casts, contracted=contracted
    )
    reasons, after = [], _planned_bytes(row)
    if found.casts:
        reasons.append(f"cast to {' and '.join(found.casts)} first, as its uses do")
    if after > before:
        reasons.append("takes more bytes than before: few elements share a scale")
    return dataclasses.replace(row, bytes_after=after, reason="; ".join(reasons))


def _why_not(leaf: Leaf, found: Resolved, *, is_traced: bool) -> str | None:
    """Why a parameter stays as it is, or None."""
    rule, role, uses = found.rule, found.role, found.uses
    if isinstance(leaf, QArray) or (rule is not None and rule.changes):
        return found.whole
    if rule is not None:
        return f"rule {rule.path!r} keeps it unquantized"
    is_weight = role in QUANTIZED_ROLES
    if is_traced and (is_weight or not any(use.op in OPS for use in uses)):
        if not uses:
            return "nothing uses it"
        why = "no rule matches it" if is_weight else "no product contracts it"
        return f"{why}; used by {', '.join(dict.fromkeys(use.op for use in uses))}"
    if found.whole is not None and not is_traced:
        return found.whole
    if role is Role.UNKNOWN:
        return f"{_UNKNOWN_ROLE}; a rule with its path and an axis quantizes it"
    return "no rule matches it" if is_weight else f"{role.words}; no rule names the role {role}"


def recounted(row: PlanRow) -> PlanRow:
    """The row with its planned bytes counted from its shape and policy.

    Args:
        row: the row, perhaps edited.

    Raises:
        QuantError: for a policy of what cannot be quantized, without an axis, or whose tile does not fit.
    """
    if row.policy is None and row.sparsity is None:
        return dataclasses.replace(row, bytes_after=row.bytes_before)
    # The dtype of random keys, such as key<fry>, is none of NumPy.
    if row.dtype.startswith("key<") or not jnp.issubdtype(jnp.dtype(row.dtype), jnp.floating) or not row.shape:
        raise QuantError(
            f"the plan quantizes or prunes {row.path}, which is {row.dtype} of shape {row.shape}; set its policy and "
            "sparsity to null"
        )
    if row.policy is not None and not row.axis:
        raise QuantError(
            f'the plan\'s row of {row.path} has a policy but no axis; write the contracted axis, as in "axis": [-1]'
        )
    return dataclasses.replace(row, bytes_after=_planned_bytes(row))


def _planned_bytes(row: PlanRow) -> int:
    """The planned bytes of the parameter, from shapes alone."""
    # A float64 parameter is rounded to float32 before it is quantized.
    x = jax.ShapeDtypeStruct(row.shape, {"float64": "float32"}.get(row.dtype, row.dtype))
    try:
        return _nbytes(jax.eval_shape(lambda x: quantized_leaf(x, row), x))
    except QuantError as error:
        raise QuantError(f"{row.path} {row.shape}: {error}") from error
