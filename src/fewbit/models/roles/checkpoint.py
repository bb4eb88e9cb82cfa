"""Infers the roles of a checkpoint's tensors."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...errors import UnsupportedError
from ...recipe.role import Role
from ...recipe.roles import TensorRole, refined
from .families import Shape, family_roles
from .modules import module_roles


@dataclasses.dataclass(frozen=True)
class CheckpointRoles:
    """The roles of a checkpoint's tensors, inferred without its code.

    Attributes:
        roles: the role of every tensor, by name; else `Role.UNKNOWN`.
        note: a sentence on their sources.
    """

    roles: Mapping[str, TensorRole]
    note: str

    @property
    def unknown(self) -> tuple[str, ...]:
        """The tensors of unknown role."""
        return tuple(name for name, role in self.roles.items() if role.role is Role.UNKNOWN)


def checkpoint_roles(
    shapes: Mapping[str, Shape],
    config: Mapping[str, Any] | None = None,
    *,
    kind: str = "safetensors",
    use_modules: bool = True,
) -> CheckpointRoles:
    """The role of every tensor, by module classes of transformers, then by names.

    Args:
        shapes: the shape of each tensor, by its name in the checkpoint.
        config: the checkpoint's `config.json`; None or without a `model_type`: only the names decide.
        kind: the container: "gguf" has the same tensor names for every architecture.
        use_modules: whether to use transformers, if it is installed.

    Returns:
        The roles, with the contraction axis of each weight.

    >>> found = checkpoint_roles({"wte.weight": (9, 4), "h.0.mlp.c_fc.weight": (4, 16)}, {"model_type": "gpt2"}, use_modules=False)
    >>> [(str(one.role), one.axis) for one in found.roles.values()]
    [('embedding', (-1,)), ('matmul', (-2,))]
    """
    config = config or {}
    model_type = config.get("model_type")
    by_module: dict[str, TensorRole] = {}
    why_not = ""
    if kind == "gguf":
        model_type = "gguf"
    elif not isinstance(model_type, str) or not use_modules:
        why_not = "the architecture is unknown (no config.json with a model_type)"
    else:
        try:
            by_module = module_roles(shapes, config)
        except UnsupportedError as error:
            why_not = str(error)
    if not isinstance(model_type, str):
        model_type = None
    by_name = family_roles(shapes, model_type)
    roles = {name: by_module.get(name) or by_name.get(name) or TensorRole(Role.UNKNOWN) for name in shapes}
    for name, role in refined({name: one.role for name, one in roles.items()}).items():
        if role is not roles[name].role:
            source = ", ".join(filter(None, (roles[name].source, "its name")))
            roles[name] = TensorRole(role, source=source)
    return CheckpointRoles(roles, "; ".join(filter(None, (_sources(roles), why_not))))


def _sources(roles: Mapping[str, TensorRole]) -> str:
    """A sentence that counts the roles by source."""
    sources = [one.source.split(",")[0] for one in roles.values()]
    names = sorted({source for source in sources if source.startswith("names")})
    counts = {
        "from transformers' module classes": sum(source.startswith("transformers") for source in sources),
        **{f"from the table of {name}": sources.count(name) for name in names},
        "from their own names": sources.count("its name"),
        "unknown": sum(one.role is Role.UNKNOWN for one in roles.values()),
    }
    listed = ", ".join(f"{count} {text}" for text, count in counts.items() if count)
    return f"no code was traced; the roles of {len(roles)} tensors: {listed}"
