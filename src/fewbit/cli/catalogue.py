"""The commands that list what there is: formats, schemes, recipes."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer

from ..array import SCHEMES, Scheme, quantize
from ..evaluate.table import Column, table
from ..formats import FORMATS, AbstractFormat
from ..jobs.planning import KEEP
from ..recipe import RECIPES
from .app import app
from .output import console, emit_json

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

_SHAPE = (4096, 4096)


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
def recipes(json: Json = False) -> None:
    """Lists the recipes: which parameters take which scheme. A scheme's name is a recipe too, and a .json file of rules."""
    records = [{"name": name, "rules": [str(rule) for rule in RECIPES[name].rules]} for name in RECIPES.names()]
    records.append({"name": KEEP, "rules": ["every tensor as the file holds it (quantize --keep)"]})
    shown = [{"name": record["name"], "rules": "\n".join(record["rules"])} for record in records]
    _show({"recipes": records}, table(shown, [Column("name", no_wrap=True), Column("rules")]), json)


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
