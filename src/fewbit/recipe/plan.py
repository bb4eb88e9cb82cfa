"""Plans: a recipe resolved against one model, a row for every parameter and for every product without one."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp

from .._json import checked, converted, file_text, form_of, parsed
from .._registry import near_names
from ..array import Scheme, is_qarray
from ..errors import QuantError
from ..kernels.quantize import quantize
from ..ops.served import axis_within, cast, for_each
from ..ops.uses import Product, array_paths
from .recipe import recipe as as_recipe
from .resolution import Resolution, Resolved
from .rows import PLAN_ROW, PRODUCT_ROW, PlanRow, ProductRow
from .rule import Rule
from .table import plan_text, shape_text


@dataclasses.dataclass(frozen=True)
class Plan:
    """A recipe resolved against one model; printable, saved as JSON, edited there and loaded again.

    Attributes:
        rows: one for every parameter, in the order of the tree.
        recipe: the name of the recipe.
        products: one for every product without a parameter, in the order of the trace; none when no code was traced.
    """

    rows: tuple[PlanRow, ...]
    recipe: str = "recipe"
    products: tuple[ProductRow, ...] = ()

    def __iter__(self) -> Iterator[PlanRow]:
        return iter(self.rows)

    def __getitem__(self, path: str) -> PlanRow:
        for row in self.rows:
            if row.path == path:
                return row
        raise QuantError(f"the plan has no parameter {path!r}; {near_names(path, tuple(r.path for r in self.rows))}")

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
        return self.text()

    def text(self, *, width: int | None = None) -> str:
        """The table of all rows, and a line for each product without a parameter.

        Args:
            width: how many characters a line has; None takes the terminal's width, or 160 where the output is none.
        """
        lines = [plan_text(self, [(row.path, 1, row) for row in self.rows], width=width)]
        for row in self.products:
            shapes = " . ".join(map(shape_text, row.shapes))
            lines.append(f"product {row.name}  {shapes}  {row.policy or 'float'}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The JSON form: the recipe's name, the rows and the products."""
        rows = [row.to_json() for row in self.rows]
        return {"recipe": self.recipe, "rows": rows, "products": [row.to_json() for row in self.products]}

    @classmethod
    def from_json(cls, form: Mapping[str, Any]) -> Self:
        """The plan of a JSON form; an unknown or missing key raises QuantError."""
        fields = checked(form, PLAN, "a plan")
        rows, products = map(PlanRow.from_json, fields["rows"]), map(ProductRow.from_json, fields.get("products", ()))
        return cls(tuple(rows), fields.get("recipe", "recipe"), tuple(products))

    def save(self, path: str | os.PathLike) -> None:
        """Writes the JSON form to a file."""
        pathlib.Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Reads a plan that `save` wrote, perhaps edited since.

        Raises:
            QuantError: when the file cannot be read, or does not hold a plan.
        """
        where = f"plan file {os.fspath(path)}"
        form = converted(parsed(file_text(pathlib.Path(path), "plan file"), where), dict[str, Any], where)
        try:
            return cls.from_json(form)
        except QuantError as error:
            raise QuantError(f"{where}: {error}") from error


PLAN = form_of(Plan, rows=list[PLAN_ROW], recipe=str, products=list[PRODUCT_ROW])
"""The JSON schema of a plan."""


def plan(fn: Callable[..., Any] | None, params: Any, *inputs: Any, recipe: Any) -> Plan:
    """Resolves a recipe against a model: what happens to every parameter, and why.

    Args:
        fn: the function whose products decide the axes, `fn(params, *inputs)`; it is traced with shapes only. None when
            there is no code: every parameter of two or more axes is then taken for the weight of a product that contracts
            its last axis, and the plan says that this was assumed.
        params: the tree of parameters; arrays or `jax.ShapeDtypeStruct`s. Leaves that are neither have no row.
        inputs: example inputs of `fn`, likewise.
        recipe: a Recipe, or anything that `fb.recipe` takes.

    Returns:
        The plan, with a row for every parameter and, where there is code, for every product without one.

    Raises:
        QuantError: when a rule that is not optional matches nothing, when the products of a parameter contract different
            axes and its rule names none, or when a tile does not fit where it must.

    >>> def fn(params, x):
    ...     return x @ params["w"]
    >>> row = plan(fn, {"w": jnp.ones((64, 32))}, jnp.ones((1, 64)), recipe="int8").rows[0]
    >>> row.axis, row.bytes_after
    ((-2,), 2176)
    """
    resolved, leaves = as_recipe(recipe), array_paths(params)
    found = Resolution.without_code(resolved, params) if fn is None else Resolution.of(resolved, fn, params, *inputs)
    rows = tuple(_row(one, leaves[path], is_traced=fn is not None) for path, one in found.parameters.items())
    return Plan(rows, resolved.name, tuple(_product_row(p, found.product_rules[p.name]) for p in found.products))


def _product_row(product: Product, rule: Rule | None) -> ProductRow:
    """The row of one product under the rule that matches it."""
    policy, path = (None, "") if rule is None else (rule.policy, rule.path)
    return ProductRow(product.name, product.op, product.shapes, policy, path, product.source)


def _row(found: Resolved, leaf: Any, *, is_traced: bool) -> PlanRow:
    """The row of one parameter under the rule that matches it."""
    path, shape, dtype = found.path, found.shape.shape, jnp.dtype(leaf.dtype)
    before = leaf.nbytes if is_qarray(leaf) else leaf.size * dtype.itemsize
    ops = tuple(dict.fromkeys(use.op for use in found.uses))
    sites = tuple(dict.fromkeys(f"{use.op} at {use.source}" for use in found.uses if use.source))
    left = PlanRow(path, shape, dtype.name, None, (), (), ops, before, before, sites=sites)
    rule, why_not = found.rule, _why_not(leaf, found)
    if why_not is not None or rule is None:
        return dataclasses.replace(left, reason=why_not or "")
    note = "" if is_traced or rule.axis else "axis assumed: no code was traced"
    if found.axis is None:
        unused = "look-ups take single elements of it" if "take" in ops else "no product contracts it"
        return dataclasses.replace(left, sparsity=found.sparsity, reason=note if found.sparsity else unused)
    row = dataclasses.replace(
        left,
        policy=found.policy,
        axis=found.axis,
        stacked=found.stacked,
        sparsity=found.sparsity,
        casts=found.casts,
    )
    after = _planned_bytes(row)
    cast_first = f"cast to {' and '.join(found.casts)} first, as its uses do" if found.casts else ""
    larger = "" if after <= before else "takes more bytes than before: few elements share a scale"
    return dataclasses.replace(row, bytes_after=after, reason="; ".join(filter(None, (note, cast_first, larger))))


def _why_not(leaf: Any, found: Resolved) -> str | None:
    """Why a parameter stays as it is, or None."""
    rule, ops = found.rule, ", ".join(dict.fromkeys(use.op for use in found.uses))
    if is_qarray(leaf):
        return found.whole
    if rule is None:
        return "no rule matches it; " + (f"used by {ops}" if ops else "nothing uses it")
    if rule.policy is None and rule.sparsity is None:
        return f"rule {rule.path!r} leaves it"
    return found.whole


def _planned_bytes(row: PlanRow) -> int:
    """The bytes of the parameter as planned, from shapes alone."""
    x = jax.ShapeDtypeStruct(row.shape, row.dtype)
    try:
        return jax.eval_shape(lambda x: quantized_leaf(x, row), x).nbytes
    except QuantError as error:
        raise QuantError(f"{row.path} {row.shape}: {error}") from error


def quantized_leaf(x: Any, row: PlanRow) -> Any:
    """The parameter pruned, cast and quantized as its row says: each element of its stacked axes on its own."""
    x = x if row.sparsity is None else row.sparsity.pruned(x)
    if row.policy is None:
        return x
    scheme: Scheme = row.policy.weight
    axis = axis_within(row.axis, row.stacked, len(row.shape))
    q = for_each(row.stacked, lambda x: quantize(x, scheme, axis=axis), cast(x, row.casts)).astype(x.dtype)
    return q if row.policy.is_weight_only else dataclasses.replace(q, policy=row.policy)
