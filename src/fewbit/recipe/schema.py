"""The JSON schema of recipes, for editors and for programs that write recipes without Python."""

import dataclasses
from typing import Any

from ..formats import AbstractFormat
from ..formats.serial import KINDS
from .roles import Role

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def recipe_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of what `Recipe.to_json` gives and `fb.recipe` reads.

    Names of schemes, formats and calibrations are strings there, since registries grow; `fb.recipe` checks them.

    Returns:
        The schema, a new object each time.

    >>> sorted(recipe_schema()["properties"])
    ['description', 'name', 'products', 'rules']
    """
    rules = {"type": "array", "items": {"$ref": "#/$defs/rule"}}
    properties = {
        "name": _text("What to call the recipe in reports."),
        "description": _text("One line: what it does, and whose numbers it gives."),
        "rules": {**rules, "minItems": 1, "description": "Each parameter follows the first rule that matches its path."},
        "products": {
            **rules,
            "description": "The same for products without a parameter; paths match their names in the plan.",
        },
    }
    definitions = {
        "rule": _rule(),
        "policy": _policy(),
        "arm": _arm(),
        "delayed": _delayed(),
        "sparsity": _sparsity(),
        "scheme": _scheme(),
        "holder": _either(
            _text("A format's name, float32, bfloat16 or float16."), _ref("custom_format"), _ref("scheme_fields")
        ),
        "scheme_fields": _scheme_fields(),
        "packing": _packing(),
        "format": _either(_text("A format's name: `fewbit formats` lists them."), _ref("custom_format")),
        "custom_format": _either(*(_format_of(kind, cls) for kind, cls in KINDS.items())),
    }
    recipe = _object("A recipe of fewbit.", properties, required=("rules",))
    return {"$schema": _DRAFT, "title": "fewbit recipe", **recipe, "$defs": definitions}


def _rule() -> dict[str, Any]:
    properties = {
        "path": _text("A regular expression that matches the whole path of a parameter, or the whole name of a product."),
        "policy": _either(_text("A scheme's name, weight-only."), _ref("policy"), {"type": "null"}),
        "ops": {
            "type": "array",
            "items": {"enum": ["dot_general", "take", "conv_general_dilated", "ragged_dot"]},
            "description": "Match only what one of these uses; empty: all.",
        },
        "axis": _axes(),
        "optional": _flag("Whether it is fine that the rule matches nothing."),
        "sparsity": _either(_ref("sparsity"), {"type": "null"}),
        "roles": {
            "type": "array",
            "items": {"enum": [str(role) for role in Role]},
            "description": "Match only parameters of these roles; empty: matmul, embedding, convolution, experts.",
        },
    }
    return _object("Which parameters (or products), and what happens to them.", properties, required=("path", "policy"))


def _policy() -> dict[str, Any]:
    properties = {
        "weight": _ref("scheme"),
        "activation": _either(_ref("scheme"), {"type": "null"}),
        "dlhs": _either(_text("A scheme's name: the arm that quantizes the gradient in it."), _ref("arm")),
        "drhs": _either(_text("A scheme's name: the arm that quantizes the gradient in it."), _ref("arm")),
        "clips_gradient": _flag("Whether elements beyond a calibrated range get no gradient."),
        "delayed": _either(_ref("delayed"), {"type": "null"}),
        "accumulator": _accumulator(),
    }
    return _object("How a product is computed, forwards and backwards.", properties, required=("weight",))


def _arm() -> dict[str, Any]:
    properties = {
        "gradient": _either(_ref("scheme"), {"type": "null"}),
        "operand": {**_ref("scheme"), "description": "'forward', 'original', or the scheme it is quantized anew in."},
        "rounding": {"enum": ["nearest", "stochastic"]},
        "tiled_axis": {"enum": ["last", "first"]},
        "hadamard": _either({"type": "integer", "minimum": 2}, {"type": "null"}),
        "noise": {"enum": ["element", "row", "tensor"]},
        "accumulator": _accumulator(),
    }
    return _object("One product of the backward pass.", properties)


def _accumulator() -> dict[str, Any]:
    return {"enum": ["int32", "float32", "bfloat16", None], "description": "What products of codes are summed in."}


def _delayed() -> dict[str, Any]:
    properties = {"length": {"type": "integer", "minimum": 1}, "margin": {"type": "integer"}}
    return _object("Scales from the largest magnitudes of the steps before.", properties)


def _sparsity() -> dict[str, Any]:
    properties = {
        "n": {"type": "integer", "minimum": 1},
        "m": {"type": "integer", "minimum": 1},
        "axis": _axes(),
        "start_step": {"type": "integer", "minimum": 0},
        "update_step": {"type": "integer", "minimum": 1},
        "gradient": {"enum": ["identity", "masked"]},
    }
    return _object("Of every m weights the n largest are kept.", properties, required=("n", "m"))


def _axes() -> dict[str, Any]:
    return _either({"type": "integer"}, {"type": "array", "items": {"type": "integer"}}, {"type": "null"})


def _scheme() -> dict[str, Any]:
    return _either(_text("A scheme's name: `fewbit schemes` lists them; _g<N> sets the tile."), _ref("scheme_fields"))


def _scheme_fields() -> dict[str, Any]:
    length = _either({"type": "integer", "minimum": 1}, {"type": "null"})
    properties = {
        "format": _ref("format"),
        "tile": {
            "type": "object",
            "patternProperties": {r"^(\*|-[1-9][0-9]*)$": length},
            "additionalProperties": False,
            "description": "For each axis from the end, how many elements share a scale; null: all. '*' is every other axis.",
        },
        "scale": _ref("holder"),
        "tensor_scale": _flag("Whether there is one more float32 scale for the tensor."),
        "zero_point": _either(_ref("holder"), {"type": "null"}),
        "calibration": _text("How scales are chosen: 'absmax', 'absmax,0.9', 'fixed,-0.6,0.6', 'mse', ..."),
        "packing": _ref("packing"),
        "pack_axis": {"type": "integer", "maximum": -1},
    }
    return _object("How one tensor is quantized.", properties, required=("format",))


def _packing() -> dict[str, Any]:
    properties = {
        "interleave": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "high_first": _flag("Whether the first code of a byte takes its high bits."),
    }
    return _object("The order of the codes in their bytes.", properties)


def _format_of(kind: str, cls: type[AbstractFormat]) -> dict[str, Any]:
    """A format that has no registered name, by its kind and fields; `fb.recipe` checks their values."""
    fields: dict[str, Any] = {"kind": {"const": kind}, **{f.name: {} for f in dataclasses.fields(cls)}}
    return _object(f"A format of kind {kind}.", fields, required=("kind", "name"))


def _object(description: str, properties: dict[str, Any], required: tuple[str, ...] = ()) -> dict[str, Any]:
    form: dict[str, Any] = {"description": description, "type": "object", "properties": properties}
    return form | {"required": list(required), "additionalProperties": False}


def _either(*forms: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": list(forms)}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _flag(description: str) -> dict[str, Any]:
    return {"type": "boolean", "description": description}
