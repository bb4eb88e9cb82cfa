"""Roles from the names of tensors, by a table of families: `families.json`."""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from ..recipe import Role, TensorRole
from ..recipe.roles import refined

Shape = tuple[int, ...]

_LAYOUTS = {
    "matmul [out, in]": (Role.MATMUL, -1),
    "matmul [in, out]": (Role.MATMUL, -2),
    "experts [E, out, in]": (Role.EXPERTS, -1),
    "experts [E, in, out]": (Role.EXPERTS, -2),
    "convolution [out, in, ...]": (Role.CONVOLUTION, None),
    "embedding": (Role.EMBEDDING, -1),
}
"""What the lists of the table mean: a role, and the contracted axis; None: the window and the input channels."""

_RANKS = {Role.MATMUL: (2,), Role.EXPERTS: (3,), Role.CONVOLUTION: (3, 4, 5), Role.EMBEDDING: (2,)}


@dataclasses.dataclass(frozen=True)
class Family:
    """Architectures that name their parameters alike.

    Attributes:
        name: what the family is called in plans.
        model_types: the `model_type`s of config.json that belong to it; "gguf" stands for all GGUF files, since llama.cpp names the
            tensors of every architecture alike.
        patterns: for each layout of `_LAYOUTS`, the pattern of whole names.
    """

    name: str
    model_types: tuple[str, ...]
    patterns: tuple[tuple[str, re.Pattern[str]], ...]

    def role(self, name: str, shape: Shape) -> TensorRole | None:
        """The role of a tensor by its name; None where the table does not have it, or not with so many axes."""
        layout = next((layout for layout, pattern in self.patterns if pattern.fullmatch(name)), None)
        if layout is None:
            return None
        role, axis = _LAYOUTS[layout]
        if len(shape) not in _RANKS[role]:
            return None
        axes = (*range(2 - len(shape), 0), 1 - len(shape)) if axis is None else (axis,)
        return TensorRole(role, axes, f"names: {self.name}")


@functools.cache
def families() -> tuple[Family, ...]:
    """Every family of the table."""
    table = json.loads(resources.files("fewbit.models").joinpath("families.json").read_text(encoding="utf-8"))
    return tuple(_family(form) for form in table["families"])


def _family(form: Mapping[str, Any]) -> Family:
    patterns = tuple((layout, _pattern(form[layout])) for layout in _LAYOUTS if layout in form)
    return Family(form["name"], tuple(form["model_types"]), patterns)


def _pattern(ends: list[str]) -> re.Pattern[str]:
    """The regular expression of names that end as one of the table's patterns."""
    marks = {"*": "[^.]+", "{": "(?:", "}": ")", ",": "|", ".": r"\."}
    return re.compile(r"(?:.+\.)?(?:" + "|".join("".join(marks.get(c, c) for c in end) for end in ends) + ")")


def family_roles(shapes: Mapping[str, Shape], model_type: str | None) -> dict[str, TensorRole]:
    """The roles of those tensors whose names the table has for the family of a checkpoint.

    Args:
        shapes: the shape of each tensor, by name.
        model_type: config.json's `model_type`, or "gguf" for a GGUF file. None where nothing says what the network is: then every
            family counts that knows each of the matrices by its name, and a tensor has a role where all of them agree.

    >>> family_roles({"model.layers.0.mlp.experts.down_proj": (4, 24, 16)}, "gpt_oss").popitem()[1].axis
    (-2,)
    >>> family_roles({"model.layers.0.mlp.experts.down_proj": (4, 24, 16)}, None)
    {}
    """
    if model_type is not None:
        fitting = [family for family in families() if model_type in family.model_types]
    else:
        names = refined(dict.fromkeys(shapes, Role.UNKNOWN))
        matrices = [name for name, shape in shapes.items() if len(shape) >= 2 and names[name] is Role.UNKNOWN]
        fitting = [family for family in families() if all(family.role(name, shapes[name]) for name in matrices)]
    return {name: role for name, shape in shapes.items() if (role := _agreed(fitting, name, shape)) is not None}


def _agreed(fitting: list[Family], name: str, shape: Shape) -> TensorRole | None:
    """The role that all of these families give a tensor, by the name of the first; None where they differ or none has it."""
    roles = [family.role(name, shape) for family in fitting]
    if len({None if role is None else (role.role, role.axis) for role in roles}) != 1:
        return None
    return roles[0]
