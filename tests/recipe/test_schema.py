"""The published JSON schema: what the code gives, true of every preset, and no laxer about keys than the code."""

import copy
import dataclasses
import json
import pathlib

import pytest

import fewbit as fb
from fewbit.formats.serial import KINDS
from tests.recipe.json_schema import errors

PUBLISHED = pathlib.Path(__file__).parents[2] / "docs" / "schemas" / "recipe.schema.json"
SCHEMA = fb.Recipe.json_schema()


def test_the_published_file_is_what_the_code_gives():
    again = (
        "PYTHONPATH=src python -c 'from fewbit.cli import main; main()' recipes --schema > docs/schemas/recipe.schema.json"
    )
    assert json.loads(PUBLISHED.read_text()) == SCHEMA, f"write it anew: {again}"


@pytest.mark.parametrize("name", fb.RECIPES.names())
def test_every_preset_validates(name):
    assert errors(fb.RECIPES[name].to_json(), SCHEMA) == []


@pytest.mark.parametrize("name", fb.SCHEMES.names())
def test_every_scheme_validates(name):
    assert errors({"rules": [{"path": ".*", "policy": {"weight": fb.SCHEMES[name].to_json()}}]}, SCHEMA) == []


@pytest.mark.parametrize(
    ("definition", "of"),
    [
        ("Rule", fb.Rule),
        ("Policy", fb.Policy),
        ("Arm", fb.Arm),
        ("DelayedScaling", fb.DelayedScaling),
        ("Sparsity", fb.Sparsity),
        ("Scheme", fb.Scheme),
        ("Packing", fb.Packing),
    ],
)
def test_its_properties_are_the_fields(definition, of):
    assert list(SCHEMA["$defs"][definition]["properties"]) == [f.name for f in dataclasses.fields(of)]


def test_the_recipe_and_the_formats_have_all_their_fields():
    assert set(SCHEMA["properties"]) == {f.name for f in dataclasses.fields(fb.Recipe)}
    kinds = {
        form["properties"]["kind"]["enum"][0]: set(form["properties"])
        for form in SCHEMA["$defs"].values()
        if "kind" in form["properties"]
    }
    assert kinds == {kind: {"kind", *(f.name for f in dataclasses.fields(cls))} for kind, cls in KINDS.items()}


NESTED = {
    "name": "nested",
    "description": "Everything that a recipe can say.",
    "rules": [
        {
            "path": ".*",
            "ops": ["dot_general"],
            "axis": [-1],
            "optional": True,
            "sparsity": {"n": 2, "m": 4, "axis": [-1], "start_step": 1, "update_step": 2, "gradient": "masked"},
            "policy": {
                "weight": {
                    "format": {
                        "kind": "integer",
                        "name": "int4_mine",
                        "width": 4,
                        "signed": True,
                        "narrow": False,
                        "step": 0.5,
                    },
                    "tile": {"*": 1, "-1": 32},
                    "scale": {"format": "dynamic8", "zero_point": "float32", "calibration": "centred"},
                    "packing": {"interleave": [1, 0], "high_first": False},
                    "pack_axis": -1,
                },
                "activation": "int8",
                "dlhs": "int8",
                "drhs": {"gradient": "nvfp4_absmax", "operand": "nvfp4_absmax", "rounding": "stochastic", "hadamard": 16},
                "clips_gradient": False,
            },
        },
        {"path": "b", "policy": {"weight": "fp8_tensor", "delayed": {"length": 2, "margin": 0}}},
    ],
    "products": [{"path": "attn.*", "policy": "int8"}],
}


def test_a_recipe_of_every_level_is_read_and_validates():
    recipe = fb.recipe(NESTED)
    assert errors(NESTED, SCHEMA) == []
    assert errors(recipe.to_json(), SCHEMA) == []
    assert fb.recipe(json.loads(json.dumps(recipe.to_json()))) == recipe
    assert recipe.rules[0].policy.drhs.hadamard == 16


LEVELS = [
    ((), "rule", "a recipe has no field 'rule'; did you mean 'rules'"),
    (("rules", 0), "opts", r"rules\[0\] has no field 'opts'; did you mean 'ops'"),
    (("rules", 0, "policy"), "wieght", r"rules\[0\].policy has no field 'wieght'; did you mean 'weight'"),
    (("rules", 0, "policy", "weight"), "formt", r"rules\[0\].policy.weight has no field 'formt'; did you mean 'format'"),
    (
        ("rules", 0, "policy", "weight", "format"),
        "wdith",
        r"rules\[0\].policy.weight.format has no field 'wdith'; did you mean 'width'",
    ),
    (("rules", 0, "policy", "weight", "tile"), "last", "tile has a key that is 'last'; expected str matching regex"),
    (
        ("rules", 0, "policy", "weight", "scale"),
        "calibraton",
        "a scheme has no field 'calibraton'; did you mean 'calibration'",
    ),
    (
        ("rules", 0, "policy", "weight", "packing"),
        "high_frist",
        "packing has no field 'high_frist'; did you mean 'high_first'",
    ),
    (("rules", 0, "policy", "drhs"), "rouding", "drhs has no field 'rouding'; did you mean 'rounding'"),
    (("rules", 1, "policy", "delayed"), "margins", "policy.delayed has no field 'margins'; did you mean 'margin'"),
    (("rules", 0, "sparsity"), "start", "sparsity has no field 'start'; did you mean 'start_step'"),
    (("products", 0), "polcy", r"products\[0\] has no field 'polcy'; did you mean 'policy'"),
]


@pytest.mark.parametrize(("level", "key", "message"), LEVELS, ids=[key for _, key, _ in LEVELS])
def test_an_unknown_key_is_refused_at_every_level(level, key, message):
    form = copy.deepcopy(NESTED)
    place = form
    for step in level:
        place = place[step]
    place[key] = 1
    with pytest.raises(fb.QuantError, match=message):
        fb.recipe(form)
    assert errors(form, SCHEMA)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"rules": ["nf4"]}, r"rules\[0\] is 'nf4'; expected object with the fields path, policy"),
        (
            {"rules": [{"path": ".*", "policy": 4}]},
            r"rules\[0\].policy is 4; expected str | object | null with the fields weight",
        ),
        ({"rules": [{"path": ".*", "policy": {"weight": "int8", "dlhs": 4}}]}, "policy.dlhs is 4; expected str | object"),
        (
            {"rules": [{"path": ".*", "policy": {"weight": "fp8_tensor", "delayed": 4}}]},
            "policy.delayed is 4; expected object",
        ),
        ({"rules": [{"path": ".*", "policy": None, "sparsity": 4}]}, "sparsity is 4; expected object"),
        ({"name": 4, "rules": [{"path": ".*", "policy": None}]}, "name is 4; expected str"),
        ({"rules": [{"path": ".*", "policy": None}], "products": {}}, "products is {}; expected array"),
        (
            {"rules": [{"path": ".*", "policy": None}], "products": [{"path": "a", "policy": None, "axis": -1}]},
            "takes no axis",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_is_no_object(form, message):
    with pytest.raises(fb.QuantError, match=message):
        fb.recipe(form)


def test_the_check_itself_finds_errors():
    rule = {"path": ".*", "policy": None}
    assert errors({"rules": [rule]}, SCHEMA) == []
    for wrong in (
        {},
        {"rules": [{"path": ".*"}]},
        {"rules": [rule | {"ops": ["dot"]}]},
        {"rules": [rule | {"axis": 1.5}]},
        [],
    ):
        assert errors(wrong, SCHEMA), wrong
