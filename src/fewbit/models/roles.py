"""The roles of a checkpoint's tensors: from module classes where transformers is installed, else from a table of names."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedError
from ..recipe import Role, TensorRole
from ..recipe.roles import refined
from .families import Shape, family_roles
from .modules import module_roles


@dataclasses.dataclass(frozen=True)
class CheckpointRoles:
    """What is known of a checkpoint's tensors without its code.

    Attributes:
        roles: the role of every tensor, by name; `Role.UNKNOWN` where nothing says it.
        note: a sentence that says where they come from.
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
    """The role of every tensor of a checkpoint, by its architecture's module classes and then by names.

    Args:
        shapes: the shape of each tensor, by its name in the checkpoint.
        config: the checkpoint's `config.json`; None or without a `model_type`: the names alone decide.
        kind: the container: "gguf" names the tensors of every architecture alike.
        use_modules: whether transformers is asked, where it is installed.

    Returns:
        The roles, with the contracted axis of each weight.

    >>> found = checkpoint_roles({"wte.weight": (9, 4), "h.0.mlp.c_fc.weight": (4, 16)}, {"model_type": "gpt2"}, use_modules=False)
    >>> [(str(one.role), one.axis) for one in found.roles.values()]
    [('embedding', (-1,)), ('matmul', (-2,))]
    """
    said = None if config is None else config.get("model_type")
    model_type = said if isinstance(said, str) else None
    by_module: dict[str, TensorRole] = {}
    why_not = "" if kind == "gguf" else "nothing names the architecture (no config.json with a model_type)"
    if kind != "gguf" and use_modules and config is not None and model_type is not None:
        try:
            by_module, why_not = module_roles(shapes, config), ""
        except UnsupportedError as error:
            why_not = str(error)
    by_name = family_roles(shapes, "gguf" if kind == "gguf" else model_type)
    known = {name: by_module.get(name) or by_name.get(name) or TensorRole(Role.UNKNOWN) for name in shapes}
    final = refined({name: one.role for name, one in known.items()})
    roles = {
        name: known[name] if final[name] is known[name].role else TensorRole(final[name], source=_by_name(known[name]))
        for name in shapes
    }
    return CheckpointRoles(roles, "; ".join(filter(None, (_sources(roles), why_not))))


def _sources(roles: Mapping[str, TensorRole]) -> str:
    """Where the roles come from, with counts."""
    sources = [one.source.split(",")[0] for one in roles.values()]
    by_module = sum(source.startswith("transformers") for source in sources)
    names = sorted({source for source in sources if source.startswith("names")})
    listed = [
        *([f"{by_module} from transformers' module classes"] if by_module else []),
        *(f"{sources.count(name)} from the table of {name}" for name in names),
        *([f"{count} from their own names"] if (count := sources.count("its name")) else []),
        *([f"{count} unknown"] if (count := sum(one.role is Role.UNKNOWN for one in roles.values())) else []),
    ]
    return f"no code was traced; the roles of {len(roles)} tensors: {', '.join(listed)}"


def _by_name(one: TensorRole) -> str:
    """Who says the role of a tensor whose name refined it."""
    return f"{one.source}, its name" if one.source else "its name"
