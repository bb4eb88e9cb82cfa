"""Plans: a recipe resolved against one model, a row for every parameter and for every product without one."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp

from .._registry import near_names, refuse_unknown_fields
from ..array import Scheme, is_qarray
from ..errors import QuantError
from ..kernels.quantize import quantize
from ..ops.uses import Product, Use, array_paths, parameter_uses
from .matching import contracted_axes, matched_product_rules, matched_rules, resolved_sparsity, stacked_axes, why_whole
from .recipe import Recipe
from .recipe import recipe as as_recipe
from .roles import QUANTIZED_ROLES, Role, TensorRole, traced_roles
from .rows import PlanRow, ProductRow
from .rule import OPS, Rule

_UNKNOWN_ROLE = "role unknown, so it stays float"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A recipe resolved against one model; printable, saved as JSON, edited there and loaded again.

    Attributes:
        rows: one for every parameter, in the order of the tree.
        recipe: the name of the recipe.
        products: one for every product without a parameter, in the order of the trace; none when no code was traced.
        notes: sentences that the user should see, such as where the roles come from.
    """

    rows: tuple[PlanRow, ...]
    recipe: str = "recipe"
    products: tuple[ProductRow, ...] = ()
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[PlanRow]:
        return iter(self.rows)

    def __getitem__(self, path: str) -> PlanRow:
        for row in self.rows:
            if row.path == path:
                return row
        raise QuantError(f"the plan has no parameter {path!r}; {near_names(path, tuple(r.path for r in self.rows))}")

    @property
    def unknown(self) -> tuple[str, ...]:
        """The parameters that stay as they are because nothing says their role, and no rule decides."""
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

    def __str__(self) -> str:
        width = max([len(row.path) for row in self.rows] + [9])
        lines = [f"{'parameter':{width}}  {'shape':>16}  {'as':22} {'axis':>6} {'before':>13} {'after':>13}  why"]
        for row in self.rows:
            shape = "x".join(map(str, row.shape))
            axis = ",".join(map(str, row.axis))
            sizes = f"{row.bytes_before:>13,} {row.bytes_after:>13,}"
            lines.append(f"{row.path:{width}}  {shape:>16}  {row.kind:22} {axis:>6} {sizes}  {row.reason}".rstrip())
        quantized = sum(row.policy is not None for row in self.rows)
        lines.append(
            f"{quantized} of {len(self.rows)} parameters quantized; {self.bytes_before:,} -> {self.bytes_after:,} bytes, "
            f"{self.bits_per_weight:.3f} bits/weight"
        )
        for row in self.products:
            shapes = " . ".join("x".join(map(str, shape)) for shape in row.shapes)
            lines.append(f"product {row.name}  {shapes}  {row.policy or 'float'}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The JSON form: the recipe's name, the rows, the products, and where there are any the notes."""
        rows = [row.to_json() for row in self.rows]
        form = {"recipe": self.recipe, "rows": rows, "products": [row.to_json() for row in self.products]}
        return form | ({"notes": list(self.notes)} if self.notes else {})

    @classmethod
    def from_json(cls, form: Mapping[str, Any]) -> Self:
        """The plan of a JSON form, its bytes counted anew, since it may have been edited.

        Raises:
            QuantError: for an unknown or missing key, and for a row whose parameter cannot be quantized as it says.
        """
        refuse_unknown_fields("a plan", form, ("recipe", "rows", "products", "notes"))
        fields = {"products": [], "notes": [], **form}
        if "recipe" not in fields or not all(isinstance(fields.get(key), list) for key in ("rows", "products", "notes")):
            raise QuantError(
                f"a plan is an object with 'recipe' and lists 'rows' and 'products'; got the keys {sorted(form)}"
            )
        rows = [recounted(PlanRow.from_json(row)) for row in fields["rows"]]
        products = tuple(map(ProductRow.from_json, fields["products"]))
        return cls(tuple(rows), str(fields["recipe"]), products, tuple(map(str, fields["notes"])))

    def save(self, path: str | os.PathLike) -> None:
        """Writes the JSON form to a file."""
        pathlib.Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Reads a plan that `save` wrote, perhaps edited since.

        Raises:
            QuantError: when the file cannot be read, or does not hold a plan.
        """
        try:
            form = json.loads(pathlib.Path(path).read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise QuantError(f"plan file {os.fspath(path)} cannot be read: {error}") from error
        if not isinstance(form, dict):
            raise QuantError(f"plan file {os.fspath(path)} does not hold an object")
        return cls.from_json(form)


def plan(
    fn: Callable[..., Any] | None,
    params: Any,
    *inputs: Any,
    recipe: Any,
    roles: Mapping[str, TensorRole] | None = None,
) -> Plan:
    """Resolves a recipe against a model: what happens to every parameter, and why.

    Args:
        fn: the function whose products decide roles and axes, `fn(params, *inputs)`; it is traced with shapes only. None when
            there is no code: what `roles` does not say is then unknown, and a parameter of unknown role stays as it is unless a rule
            gives its path and an axis.
        params: the tree of parameters; arrays or `jax.ShapeDtypeStruct`s. Leaves that are neither have no row.
        inputs: example inputs of `fn`, likewise.
        recipe: a Recipe, or anything that `fb.recipe` takes.
        roles: what is known of parameters besides the trace, by path: their roles, and without code the contracted axes. Where
            there is code it overrules the role that the trace gives; the axes stay the trace's.

    Returns:
        The plan, with a row for every parameter and, where there is code, for every product without one.

    Raises:
        QuantError: when a rule that is not optional matches or changes nothing, when the products of a parameter contract
            different axes and its rule names none, when a tile does not fit where it must, or when `roles` has a path that is no
            parameter's.

    >>> def fn(params, x):
    ...     return x @ params["w"]
    >>> row = plan(fn, {"w": jnp.ones((64, 32))}, jnp.ones((1, 64)), recipe="int8").rows[0]
    >>> row.axis, row.bytes_after
    ((-2,), 2176)
    """
    recipe = as_recipe(recipe)
    leaves = array_paths(params)
    is_traced = fn is not None
    if recipe.products and not is_traced:
        raise QuantError(f"recipe {recipe.name!r} has rules for products, which only traced code has; pass fn")
    known = dict(roles or {})
    for path in known.keys() - leaves.keys():
        raise QuantError(f"roles has {path!r}, which is no parameter; {near_names(path, tuple(leaves)[:400])}")
    products: tuple[Product, ...] = ()
    if fn is None:
        known = {path: known.get(path, TensorRole(Role.UNKNOWN)) for path in leaves}
        found = {path: (one.role, one.source) for path, one in known.items()}
        uses = {path: known[path].uses(len(leaf.shape)) for path, leaf in leaves.items()}
    else:
        uses, products = parameter_uses(fn, params, *inputs)
        found = {path: (role, "trace") for path, role in traced_roles(uses).items()}
        found |= {path: (one.role, one.source) for path, one in known.items()}
    rules = matched_rules(recipe, uses, {path: role for path, (role, _) in found.items()})
    rows = []
    for path, leaf in leaves.items():
        role, source = found[path]
        row = _row(path, leaf, uses[path], rules[path], role, is_traced=is_traced)
        rows.append(dataclasses.replace(row, role=role, role_source=source))
    _check_effect(recipe, rules, rows)
    product_rules = matched_product_rules(recipe, products)
    return Plan(tuple(rows), recipe.name, tuple(_product_row(product, product_rules[product.name]) for product in products))


def _product_row(product: Product, rule: Rule | None) -> ProductRow:
    """The row of one product under the rule that matches it."""
    policy, path = (None, "") if rule is None else (rule.policy, rule.path)
    return ProductRow(product.name, product.op, product.shapes, policy, path, product.source)


def _check_effect(recipe: Recipe, rules: Mapping[str, Rule | None], rows: list[PlanRow]) -> None:
    """Refuses a rule that is not optional, and matches parameters but changes none of them.

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
                f"rule {index + 1} of recipe {recipe.name!r} ({rule}) changes nothing: it matches only {reasons}. Correct its path, "
                "or mark it optional"
            )


def _row(path: str, leaf: Any, uses: tuple[Use, ...], rule: Rule | None, role: Role, *, is_traced: bool) -> PlanRow:
    """The row of one parameter under the rule that matches it."""
    shape, dtype = tuple(leaf.shape), jnp.dtype(leaf.dtype)
    before = leaf.nbytes if is_qarray(leaf) else leaf.size * dtype.itemsize
    ops = tuple(dict.fromkeys(use.op for use in uses))
    sites = tuple(dict.fromkeys(f"{use.op} at {use.source}" for use in uses if use.source))
    left = PlanRow(path, shape, dtype.name, None, (), (), ops, before, before, sites=sites)
    why_not = _why_not(leaf, uses, rule, role, is_traced=is_traced)
    if why_not is not None or rule is None:
        return dataclasses.replace(left, reason=why_not or "")
    sparsity = resolved_sparsity(path, leaf, uses, rule)
    axis = None if rule.policy is None else rule.axis or contracted_axes(path, uses)
    if axis is None:
        why = "no product contracts it" if is_traced else "nothing says which axis is contracted; give its rule an axis"
        return dataclasses.replace(left, sparsity=sparsity, reason="" if sparsity else why)
    axis = tuple(a if a < 0 else a - len(shape) for a in axis)
    row = dataclasses.replace(left, policy=rule.policy, axis=axis, stacked=stacked_axes(uses), sparsity=sparsity)
    after = _planned_bytes(row)
    larger = "" if after <= before else "takes more bytes than before: few elements share a scale"
    return dataclasses.replace(row, bytes_after=after, reason=larger)


def _why_not(leaf: Any, uses: tuple[Use, ...], rule: Rule | None, role: Role, *, is_traced: bool) -> str | None:
    """Why a parameter stays as it is, or None."""
    whole = why_whole(leaf)
    if is_qarray(leaf) or (rule is not None and rule.changes):
        return whole
    if rule is not None:
        return f"rule {rule.path!r} leaves it"
    if is_traced and (role in QUANTIZED_ROLES or not any(use.op in OPS for use in uses)):
        why = "no rule matches it" if role in QUANTIZED_ROLES else "no product contracts it"
        return f"{why}; used by {', '.join(dict.fromkeys(use.op for use in uses))}" if uses else "nothing uses it"
    if whole is not None and not is_traced:
        return whole
    if role is Role.UNKNOWN:
        return f"{_UNKNOWN_ROLE}; a rule with its path and an axis quantizes it"
    return "no rule matches it" if role in QUANTIZED_ROLES else f"{role.words}; no rule names the role {role}"


def recounted(row: PlanRow) -> PlanRow:
    """The row with its bytes as planned counted from its shape and policy.

    Args:
        row: the row, perhaps edited.

    Raises:
        QuantError: for a policy of what cannot be quantized, without an axis, or whose tile does not fit.
    """
    if row.policy is None and row.sparsity is None:
        return dataclasses.replace(row, bytes_after=row.bytes_before)
    if not jnp.issubdtype(jnp.dtype(row.dtype), jnp.floating) or not row.shape:
        raise QuantError(
            f"the plan {'prunes' if row.policy is None else 'quantizes'} {row.path}, which is {row.dtype} of shape {row.shape}; "
            "set its policy to null"
        )
    if row.policy is not None and not row.axis:
        raise QuantError(
            f'the plan\'s row of {row.path} has a policy but no axis; write the contracted axis, as in "axis": [-1]'
        )
    return dataclasses.replace(row, bytes_after=_planned_bytes(row))


def _planned_bytes(row: PlanRow) -> int:
    """The bytes of the parameter as planned, from shapes alone."""
    # A float64 parameter is rounded to float32 before it is quantized.
    x = jax.ShapeDtypeStruct(row.shape, jnp.float32 if row.dtype == "float64" else row.dtype)
    try:
        after = jax.eval_shape(lambda x: quantized_leaf(x, row), x)
        return after.nbytes if is_qarray(after) else after.size * after.dtype.itemsize
    except QuantError as error:
        raise QuantError(f"{row.path} {row.shape}: {error}") from error


def quantized_leaf(x: Any, row: PlanRow) -> Any:
    """The parameter pruned and quantized as its row says: each element of its stacked axes on its own."""
    x = x if row.sparsity is None else row.sparsity.pruned(x)
    if row.policy is None:
        return x
    scheme: Scheme = row.policy.weight
    leading = len(row.stacked)
    if row.stacked != tuple(range(-len(row.shape), -len(row.shape) + leading)):
        raise QuantError(f"{row.path}: a loop runs over its axes {row.stacked}; only leading axes can be stacked")

    def one(x: Any) -> Any:
        return quantize(x, scheme, axis=row.axis)

    for _ in range(leading):
        one = jax.vmap(one)
    q = one(x)
    return q if row.policy.is_weight_only else dataclasses.replace(q, policy=row.policy)
