"""The commands that list what there is: formats, schemes, recipes."""

from json import dumps
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from rich.table import Table

from ..array import SCHEMES, Scheme
from ..errors import QuantError
from ..evaluate.table import Column, table
from ..formats import FORMATS, AbstractFormat
from ..jobs.planning import KEEP
from ..kernels.quantize import quantize
from ..ops import Arm, Policy
from ..recipe import RECIPES, Recipe, Rule
from ..recipe import recipe as as_recipe
from .app import app
from .output import console, emit_json, say

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

_SHAPE = (4096, 4096)

_KEPT = {"name": KEEP, "description": "Every tensor as the file holds it (quantize --keep)."}


@app.command()
def formats(json: Json = False) -> None:
    """Lists the formats: the sets of numbers that codes stand for."""
    records = [_format_record(fmt) for fmt in FORMATS]
    columns = [Column("name"), *(Column(key, align="right") for key in ("bits", "values", "smallest", "min", "max"))]
    _show({"formats": records}, table(records, columns), json)


@app.command()
def schemes(json: Json = False) -> None:
    """Lists the schemes: how one tensor is quantized. A suffix _g<N> sets the tile: int4_g128."""
    records = [{"name": name, **_scheme_record(SCHEMES[name])} for name in SCHEMES.names()]
    columns = [
        Column("name", no_wrap=True),
        *(Column(key) for key in ("format", "tile", "scale", "tensor scale", "zero point", "calibration")),
        Column("bits per weight", align="right"),
    ]
    _show({"schemes": records}, table(records, columns), json)


@app.command()
def recipes(
    name: Annotated[
        str | None, typer.Argument(help="A recipe's name, a scheme's name, or a .json file: print its rules.")
    ] = None,
    json: Json = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of recipe files.")] = False,
) -> None:
    """Lists the recipes, or prints the rules of one. A scheme's name is a recipe too, and a .json file of rules."""
    if schema and (name is not None or json):
        raise QuantError("--schema prints the schema of all recipes; leave out the name and --json")
    if schema:
        say(dumps(Recipe.json_schema(), indent=1))
    elif name is None:
        records = [{"name": recipe.name, "description": recipe.description} for recipe in RECIPES]
        records.append(_KEPT)
        _show({"recipes": records}, table(records, [Column("name", no_wrap=True), Column("description")]), json)
    elif name == KEEP:
        _show(_KEPT, f"{KEEP}: {_KEPT['description']}", json)
    else:
        recipe = as_recipe(name)
        _show(recipe.to_json(), _rules_table(recipe), json)


def _rules_table(recipe: Recipe) -> Table:
    """The rules in order, with the three arms of each policy."""
    named = [*(("", rule) for rule in recipe.rules), *(("product ", rule) for rule in recipe.products)]
    records = [{"path": f"{kind}{rule.path}", "takes": _takes_text(rule), **_rule_record(rule)} for kind, rule in named]
    columns = [
        Column("path", "path of the parameter", no_wrap=True),
        Column("takes", "of role"),
        *(Column(key) for key in ("weight", "activation", "activation's gradient", "weight's gradient")),
    ]
    return table(records, columns, title=f"{recipe.name}: {recipe.description}".removesuffix(": "))


def _takes_text(rule: Rule) -> str:
    """The roles that a rule names, and the uses that it asks for."""
    return " ".join((*rule.roles, *(f"used by {op}" for op in rule.ops)))


def _rule_record(rule: Rule) -> dict[str, str]:
    """The schemes and the sparsity of a rule in words."""
    record = _policy_record(rule.policy)
    return record if rule.sparsity is None else record | {"weight": f"{record['weight']}, {rule.sparsity}"}


def _policy_record(policy: Policy | None) -> dict[str, str]:
    """The schemes of a policy in words."""
    if policy is None:
        return {"weight": "left as it is"}
    record = {"weight": policy.weight.name, "activation": policy.activation.name if policy.activation else "float"}
    if policy.delayed is not None:
        record["weight"] += f", scales from {policy.delayed.length} steps before"
    return record | {"activation's gradient": _arm_text(policy.dlhs), "weight's gradient": _arm_text(policy.drhs)}


def _arm_text(arm: Arm) -> str:
    """What a backward product contracts, in words."""
    gradient = "float" if arm.gradient is None else arm.gradient.name
    operand = arm.operand.name if isinstance(arm.operand, Scheme) else arm.operand
    notes = [] if arm.rounding == "nearest" else ["stochastic"]
    notes += [] if arm.hadamard is None else [f"Hadamard {arm.hadamard}"]
    return f"{gradient} x {operand}" + (f" ({', '.join(notes)})" if notes else "")


def _show(form: Any, shown: Any, json: bool) -> None:
    if json:
        emit_json(form)
    else:
        console().print(shown)


def _format_record(fmt: AbstractFormat) -> dict[str, Any]:
    values = [float(v) for v in fmt.values()]
    positive = [v for v in values if 0 < v < float("inf")]
    return {
        "name": fmt.name,
        "bits": fmt.bits,
        "values": len(set(values) - {float("nan")}),
        "smallest": min(positive) if positive else None,
        "min": float(fmt.min),
        "max": float(fmt.max),
    }


def _scheme_record(scheme: Scheme) -> dict[str, Any]:
    form = scheme.to_json()
    x = jax.ShapeDtypeStruct(_SHAPE, jnp.float32)
    return {
        "format": scheme.format.name,
        "tile": _tile_text(scheme),
        "scale": _holder_text(form["scale"]),
        "tensor scale": "float32" if scheme.tensor_scale else "",
        "zero point": _holder_text(form.get("zero_point", "")),
        "calibration": str(scheme.calibration),
        "bits per weight": round(jax.eval_shape(lambda x: quantize(x, scheme), x).bits_per_weight, 4),
    }


def _tile_text(scheme: Scheme) -> str:
    """The tile in words, for the axis that a product contracts and the one before it."""
    other, along = scheme.tiles(2)
    if other is None:
        return "the tensor"
    row = "a row" if along is None else str(along)
    return row if other == 1 else f"{other}x{along}"


def _holder_text(holder: Any) -> str:
    return holder if isinstance(holder, str) else f"{holder['format']} of {holder['scale']}"
