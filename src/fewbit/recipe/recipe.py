"""Recipe: ordered rules; the first match decides."""

import dataclasses
import difflib
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Self, TypeAlias

from .._json import checked, converted, file_text, form_of, parsed, schema_document
from .._registry import Registry
from ..array import scheme as as_scheme
from ..array.scheme import SCHEMES, Scheme
from ..errors import QuantError
from ..ops.policy import Policy
from .role import WEIGHT_ROLES, Role
from .rule import RULE, Rule


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Ordered rules; each parameter follows the first that matches it.

    Attributes:
        rules: the rules; a parameter that none matches is left as it is.
        name: its name in reports.
        description: one line: what it does, and which system's numerics it follows.
        products: rules for products without a parameter, such as attention's; their paths match the products' names in the
            plan. A product that none matches stays in floating point. A recipe has a rule or a product's rule.

    >>> print(Recipe((Rule("embed", None), Rule(".*", "nf4"))))
    recipe
      embed -> left as it is
      .* -> nf4
    """

    rules: tuple[Rule, ...]
    name: str = "recipe"
    description: str = ""
    products: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        if not self.rules and not self.products:
            raise QuantError(f"recipe {self.name!r} has no rules")
        object.__setattr__(self, "rules", tuple(self.rules))
        object.__setattr__(self, "products", tuple(self.products))
        for rule in self.products:
            where = f"recipe {self.name!r}: a product's rule ({rule})"
            if rule.axis is not None:
                raise QuantError(f"{where} takes no axis; the product itself says which axes it contracts")
            if rule.sparsity is not None:
                raise QuantError(f"{where} takes no sparsity; only parameters can be sparse")
            if rule.roles:
                raise QuantError(f"{where} takes no roles; only parameters have roles")

    def __str__(self) -> str:
        return "\n  ".join([self.name, *map(str, self.rules), *(f"product {rule}" for rule in self.products)])

    def to_json(self) -> dict[str, Any]:
        """The JSON form. It has the description and the products' rules only where there are any."""
        form: dict[str, Any] = {"name": self.name, "rules": [rule.to_json() for rule in self.rules]}
        if self.description:
            form["description"] = self.description
        if self.products:
            form["products"] = [rule.to_json() for rule in self.products]
        return form

    @classmethod
    def from_json(cls, form: Mapping[str, Any]) -> Self:
        """The recipe of a JSON form. An unknown key raises QuantError with the nearest name."""
        fields = checked(form, RECIPE, "a recipe")
        for key in ("rules", "products"):
            if key in fields:
                fields[key] = tuple(_rule(rule, f"{key}[{index}]") for index, rule in enumerate(fields[key]))
        return cls(**fields)

    @staticmethod
    def json_schema() -> dict[str, Any]:
        """The JSON schema, published as `docs/schemas/recipe.schema.json`."""
        return schema_document(RECIPE, "fewbit recipe")


def _rule(form: Mapping[str, Any], place: str) -> Rule:
    """The rule of a checked form. Errors in its schemes and expressions name their place."""
    try:
        return Rule.from_json(form)
    except QuantError as error:
        raise QuantError(f"{place}: {error}") from error


RecipeLike: TypeAlias = str | os.PathLike | Recipe | Mapping[str, Any]
"""What `fb.recipe` takes."""

RECIPE = form_of(Recipe, rules=list[RULE], products=list[RULE])
"""The JSON schema of a recipe."""


RECIPES: Registry[Recipe] = Registry("recipe")
"""Every named recipe; `fb.RECIPES.names()` lists them."""


def recipe(spec: RecipeLike) -> Recipe:
    """The Recipe of a name, a scheme, a JSON file or a JSON form.

    Args:
        spec: a registered name (`fb.RECIPES.names()`); a path that ends in `.json`; a scheme's name, such as `"int4_g64"`,
            which makes `weight_only` of it; the object that `Recipe.to_json` gives; or a Recipe.

    Returns:
        The recipe.

    Raises:
        QuantError: for an unknown name, with the names near it; for a file that cannot be read or is not a recipe.

    >>> recipe("int4_g64").rules[-1].policy.weight.tile
    {...: 1, -1: 64}
    """
    if isinstance(spec, Recipe):
        return spec
    if isinstance(spec, Mapping):
        return Recipe.from_json(spec)
    if not isinstance(spec, str | os.PathLike):
        raise QuantError(f"a recipe is a name, a JSON file or form, or a Recipe, not {spec!r}")
    if isinstance(spec, os.PathLike) or spec.endswith(".json"):
        return _from_file(pathlib.Path(spec))
    if spec in RECIPES:
        return RECIPES[spec]
    try:
        return weight_only(spec)
    except QuantError:
        raise QuantError(f"unknown recipe {spec!r}; {_near(spec)}") from None


def _near(spec: str) -> str:
    """The names that contain `spec` (`maxtext/fp8_full` for `fp8_full`), or else the nearest."""
    listed = "`fewbit recipes` and fb.RECIPES.names() list them all"
    if whole := [name for name in RECIPES.names() if f"/{spec}/" in f"/{name}/"]:
        return f"did you mean {' or '.join(map(repr, whole))}? {listed}"
    known = tuple(dict.fromkeys((*RECIPES.names(), *SCHEMES.names())))
    if near := difflib.get_close_matches(spec.lower(), known, n=3):
        return f"did you mean {' or '.join(map(repr, near))}? {listed}"
    nearest = difflib.get_close_matches(spec.lower(), known, n=3, cutoff=0.0)
    return f"the nearest names are {', '.join(map(repr, nearest))}; {listed}"


def weight_only(
    scheme: str | Scheme, *, embedding: str | Scheme | None = "q8_0", name: str | None = None, description: str = ""
) -> Recipe:
    """Weight-only quantization of all matmul weights, convolution kernels and experts.

    Embedding tables, tied heads included, are more sensitive and have their own scheme. No other parameter is quantized;
    `fewbit.recipe.Role` lists the roles.

    Args:
        scheme: the scheme of these weights.
        embedding: the scheme of embedding tables; None leaves them as they are.
        name: the recipe's name; None takes the scheme's.
        description: one line about it.

    Returns:
        The recipe, of two rules: embedding tables, then matmul weights, convolution kernels and expert stacks.
    """
    scheme = as_scheme(scheme)
    table = None if embedding is None else Policy(as_scheme(embedding))
    rules = Rule(".*", table, roles=(Role.EMBEDDING,), optional=True), Rule(".*", Policy(scheme), roles=WEIGHT_ROLES)
    return Recipe(rules, name or scheme.name, description)


def _from_file(path: pathlib.Path) -> Recipe:
    where = f"recipe file {path}"
    form = converted(parsed(file_text(path, "recipe file"), where), dict[str, Any], where)
    try:
        if "rules" not in form and any(isinstance(one, dict) and {"w_bits", "a_bits"} & one.keys() for one in form.values()):
            raise QuantError(
                "it is a mixed-precision file of MaxText (its entries have 'w_bits'), which "
                f"fb.maxtext_mixed_precision({os.fspath(path)!r}) reads. For the command line, write its rules to a file "
                "first: "
                "json.dump(fb.maxtext_mixed_precision(...).to_json(), open('rules.json', 'w'))"
            )
        return Recipe.from_json({"name": path.stem, **form})
    except QuantError as error:
        raise QuantError(f"{where}: {error}") from error
