"""Tensor roles from names, by `families.json`."""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from importlib import resources

from ...recipe.role import Role
from ...recipe.roles import TensorRole, refined

Shape = tuple[int, ...]

_LAYOUTS = {
    "matmul [out, in]": (Role.MATMUL, -1),
    "matmul [in, out]": (Role.MATMUL, -2),
    "experts [E, out, in]": (Role.EXPERTS, -1),
    "experts [E, in, out]": (Role.EXPERTS, -2),
    "convolution [out, in, ...]": (Role.CONVOLUTION, None),
    "embedding": (Role.EMBEDDING, -1),
}
"""The role and the contraction axis of each list of the table; None: the window and the input channels."""

_RANKS = {Role.MATMUL: (2,), Role.EXPERTS: (3,), Role.CONVOLUTION: (3, 4, 5), Role.EMBEDDING: (2,)}


@dataclasses.dataclass(frozen=True)
class NameRoles:
    """Architectures with the same parameter names.

    Attributes:
        name: the family's name in plans.
        model_types: the `model_type`s of config.json that belong to it; "gguf" is all GGUF files, since llama.cpp uses the
            same tensor names for every architecture.
        patterns: for each layout of `_LAYOUTS`, the pattern of full names.
    """

    name: str
    model_types: tuple[str, ...]
    patterns: tuple[tuple[str, re.Pattern[str]], ...]

    def role(self, name: str, shape: Shape) -> TensorRole | None:
        """The role of a tensor by name. None for an unknown name or rank."""
        layout = next((layout for layout, pattern in self.patterns if pattern.fullmatch(name)), None)
        if layout is None:
            return None
        role, axis = _LAYOUTS[layout]
        if len(shape) not in _RANKS[role]:
            return None
        if axis is None:
            axis = (*range(2 - len(shape), 0), 1 - len(shape))
        return TensorRole(role, axis, f"names: {self.name}")


@functools.cache
def families() -> tuple[NameRoles, ...]:
    """Every family of the table."""
    table = json.loads(resources.files("fewbit.models.roles").joinpath("families.json").read_text(encoding="utf-8"))
    found = []
    for form in table["families"]:
        patterns = tuple((layout, _pattern(form[layout])) for layout in _LAYOUTS if layout in form)
        found.append(NameRoles(form["name"], tuple(form["model_types"]), patterns))
    return tuple(found)


def _pattern(ends: list[str]) -> re.Pattern[str]:
    """The regular expression of names that end in one of the table's patterns."""
    marks = {"*": "[^.]+", "{": "(?:", "}": ")", ",": "|", ".": r"\."}
    return re.compile(r"(?:.+\.)?(?:" + "|".join("".join(marks.get(c, c) for c in end) for end in ends) + ")")


def family_roles(shapes: Mapping[str, Shape], model_type: str | None) -> dict[str, TensorRole]:
    """The roles of the tensors that the table lists for a checkpoint's family.

    Args:
        shapes: the shape of each tensor, by name.
        model_type: config.json's `model_type`, or "gguf" for a GGUF file. None if the architecture is unknown: then all
            families that list every matrix count, and a tensor has a role if they agree.

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


def _agreed(fitting: list[NameRoles], name: str, shape: Shape) -> TensorRole | None:
    """The role that these families agree on; None if they do not."""
    roles = [role for family in fitting if (role := family.role(name, shape)) is not None]
    if len(roles) < len(fitting) or len({(role.role, role.axis) for role in roles}) != 1:
        return None
    return roles[0]
