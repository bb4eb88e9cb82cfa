"""The commands that list formats, schemes and recipes."""

import json as jsonlib
from typing import Annotated

import typer

from ..._table import Column, table
from ...errors import QuantError
from ..app import app
from ..completion import recipe_names, records
from ..console import emit_json, say
from ..options import Json

KEEP = "keep"


@app.command()
def formats(json: Json = False) -> None:
    """Lists the formats: the sets of numbers that codes represent."""
    columns = [Column("name"), *(Column(key, align="right") for key in ("bits", "values", "smallest", "min", "max"))]
    _show_list("formats", columns, json)


@app.command()
def schemes(json: Json = False) -> None:
    """Lists the schemes: how one tensor is quantized. A suffix _g<N> sets the group size: int4_g128."""
    columns = [
        Column("name"),
        Column("format"),
        Column("tile", "group size"),
        Column("scale"),
        Column("tensor scale", rank=3),
        Column("zero point", rank=2),
        Column("calibration", rank=1),
        Column("bits per weight", align="right"),
    ]
    _show_list("schemes", columns, json)


@app.command()
def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A recipe's name, a scheme's name, or a .json file: print its rules.", autocompletion=recipe_names
        ),
    ] = None,
    json: Json = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of recipe files.")] = False,
) -> None:
    """Lists the recipes, or prints the rules of one. A scheme's name is a recipe too, and a .json file of rules."""
    if schema and (name is not None or json):
        raise QuantError("--schema prints the schema of all recipes; leave out the name and --json")
    if schema:
        from ...recipe.recipe import Recipe

        say(jsonlib.dumps(Recipe.json_schema(), indent=1))
    elif name is None:
        _show_list("recipes", [Column("name"), Column("description", kind="words", rank=1)], json)
    elif name == KEEP:
        record = records("recipes")[-1]
        _show(record, f"{KEEP}: {record['description']}", json)
    else:
        from ...recipe import recipe as as_recipe
        from ..listing import rules_table

        recipe = as_recipe(name)
        _show(recipe.to_json(), rules_table(recipe), json)


def _show_list(kind: str, columns: list[Column], json: bool) -> None:
    found = records(kind)
    _show({kind: found}, table(found, columns), json)


def _show(form: object, shown: str, json: bool) -> None:
    if json:
        emit_json(form)
    else:
        say(shown)
