"""Lists formats, schemes, recipes, methods and layouts.

The lists are printed from `catalogue.json`, since JAX takes seconds to import. `python -m fewbit.cli.listing` rewrites it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from .._table import Column, table
from ..array.scheme import SCHEMES, Scheme
from ..errors import QuantError
from ..formats.format import FORMATS, AbstractFormat
from ..io.containers.registry import CONTAINERS
from ..kernels.quantize.dispatch import quantize
from ..methods.named import METHODS, SCALINGS, scaled_method
from ..ops.policy import Arm, Policy
from ..recipe.recipe import RECIPES, Recipe
from ..recipe.rule import Rule
from ..workflows.plan import KEEP

CATALOGUE = Path(__file__).with_name("catalogue.json")
"""The file of the lists."""

_SHAPE = (4096, 4096)


def catalogue() -> dict[str, list[dict[str, Any]]]:
    """The records of all formats, schemes, recipes, methods and layouts."""
    recipes = [{"name": recipe.name, "description": recipe.description} for recipe in RECIPES]
    return {
        "formats": [_format_record(fmt) for fmt in FORMATS],
        "schemes": [{"name": name, **_scheme_record(SCHEMES[name])} for name in SCHEMES.names()],
        "methods": [
            {**_named(name, one), "followed by": _methods_after(name)} for name, one in (SCALINGS | METHODS).items()
        ],
        "layouts": _layouts(),
        "recipes": [*recipes, {"name": KEEP, "description": "Every tensor as stored in the file (quantize --keep)."}],
    }


def _named(name: str, one: type) -> dict[str, str]:
    """A record of a class: what its documentation begins with."""
    return {"name": name, "description": (one.__doc__ or "").partition("\n")[0]}


def _methods_after(name: str) -> list[str]:
    """The methods that may follow one and a `+`."""
    return [after for after in METHODS if _is_method(f"{name}+{after}")]


def _is_method(name: str) -> bool:
    try:
        scaled_method(name)
    except QuantError:
        return False
    return True


def _layouts() -> list[dict[str, str]]:
    """The records of all layouts of files."""
    own = {
        "fewbit": "The directory of fewbit.",
        "hf": "A directory for transformers, dequantized to bfloat16.",
        "gguf": "One file for llama.cpp.",
        "orbax": "An Orbax checkpoint.",
    }
    return [{"name": name, "description": own[name]} for name in own] + [_named(c.name, type(c)) for c in CONTAINERS]


def rules_table(recipe: Recipe) -> str:
    """The rules in order, with forward, dgrad and wgrad of each policy."""
    named = [*(("", rule) for rule in recipe.rules), *(("product ", rule) for rule in recipe.products)]
    records = [{"path": f"{kind}{rule.path}", "takes": _takes_text(rule), **_rule_record(rule)} for kind, rule in named]
    columns = [
        Column("path", "path of the parameter", kind="words"),
        Column("takes", "of role", kind="words"),
        Column("weight"),
        Column("activation"),
        Column("activation's gradient", kind="words", rank=1),
        Column("weight's gradient", kind="words", rank=2),
    ]
    return table(records, columns, title=f"{recipe.name}: {recipe.description}".removesuffix(": "))


def _takes_text(rule: Rule) -> str:
    """The roles and the operations that a rule selects."""
    return " ".join((*rule.roles, *(f"used by {op}" for op in rule.ops)))


def _rule_record(rule: Rule) -> dict[str, str]:
    """The schemes and the sparsity of a rule in words."""
    record = _policy_record(rule.policy)
    if rule.sparsity is not None:
        record["weight"] += f", {rule.sparsity}"
    return record


def _policy_record(policy: Policy | None) -> dict[str, str]:
    """The schemes of a policy in words."""
    if policy is None:
        return {"weight": "left as it is"}
    record = {"weight": policy.weight.name, "activation": _scheme_name(policy.activation)}
    if policy.delayed is not None:
        record["weight"] += f", scales from {policy.delayed.length} steps before"
    return record | {"activation's gradient": _arm_text(policy.dlhs), "weight's gradient": _arm_text(policy.drhs)}


def _scheme_name(scheme: Scheme | str | None) -> str:
    if isinstance(scheme, Scheme):
        return scheme.name
    return scheme or "float"


def _arm_text(arm: Arm) -> str:
    """The operands of a backward matmul (dgrad or wgrad), in words."""
    text, notes = f"{_scheme_name(arm.gradient)} x {_scheme_name(arm.operand)}", []
    if arm.rounding != "nearest":
        notes.append("stochastic")
    if arm.hadamard is not None:
        notes.append(f"Hadamard {arm.hadamard}")
    if notes:
        text += f" ({', '.join(notes)})"
    return text


def _format_record(fmt: AbstractFormat) -> dict[str, Any]:
    values = [float(v) for v in fmt.values()]
    return {
        "name": fmt.name,
        "bits": fmt.bits,
        "values": len({v for v in values if fmt.min <= v <= fmt.max}),  # no NaN, no infinity, no code that is never chosen
        "smallest": min((v for v in values if 0 < v < float("inf")), default=None),
        "min": float(fmt.min),
        "max": float(fmt.max),
    }


def _scheme_record(scheme: Scheme) -> dict[str, Any]:
    form = scheme.to_json()
    x = jax.ShapeDtypeStruct(_SHAPE, jnp.float32)
    return {
        "format": scheme.format.name,
        "tile": _tile_text(scheme),
        "scale": _scale_text(form["scale"]),
        "tensor scale": "float32" if scheme.tensor_scale else "",
        "zero point": _scale_text(form.get("zero_point", "")),
        "calibration": str(scheme.calibration),
        "bits per weight": round(jax.eval_shape(lambda x: quantize(x, scheme), x).bits_per_weight, 4),
    }


def _tile_text(scheme: Scheme) -> str:
    """The group size along the contraction axis; blocks of two axes as `128x128`."""
    other, along = scheme.tiles(2)
    if other is None:
        return "per-tensor"
    if other != 1:
        return f"{other}x{along}"
    if along is None:
        return "per-channel"
    return str(along)


def _scale_text(form: str | Mapping[str, object]) -> str:
    return form if isinstance(form, str) else f"{form['format']} of {form['scale']}"


if __name__ == "__main__":
    rows = {kind: ",\n  ".join(json.dumps(record) for record in found) for kind, found in catalogue().items()}
    CATALOGUE.write_text("{\n" + ",\n".join(f' "{kind}": [\n  {text}\n ]' for kind, text in rows.items()) + "\n}\n")
