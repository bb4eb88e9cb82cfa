"""Roles of parameters, which decide what is quantized.

A role comes from the trace (`traced_roles`), or from knowledge of the architecture (`fewbit.models.checkpoint_roles`). Names
only remove a parameter from the quantized roles (`refined`): a router is traced as a matmul, a position table as a look-up.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

from ..errors import QuantError
from ..ops.interpret.parameter_uses import Use
from .role import QUANTIZED_ROLES, Role, as_role


@dataclasses.dataclass(frozen=True)
class TensorRole:
    """The role of a parameter, and the axes that its product contracts.

    Attributes:
        role: the role, or its name.
        axis: the contracted axes, negative; blocks run along the last of them. Of an embedding table the axis of its
            features. An int is one axis. Empty for roles that no product contracts.
        source: where the role comes from, for the plan: "trace", "transformers: Linear", ...

    >>> TensorRole("matmul", -1).axis
    (-1,)
    """

    role: Role
    axis: tuple[int, ...] = ()
    source: str = ""

    def __init__(self, role: Role | str, axis: int | tuple[int, ...] = (), source: str = ""):
        object.__setattr__(self, "role", as_role(role))
        object.__setattr__(self, "axis", (axis,) if isinstance(axis, int) else tuple(axis))
        object.__setattr__(self, "source", source)
        if any(a >= 0 for a in self.axis):
            raise QuantError(f"the axes of a role are {self.axis}; they must be negative, since they count from the end")
        if self.role in QUANTIZED_ROLES and not self.axis:
            raise QuantError(f"{self.role.words} needs the axis that its product contracts, such as -1 of [out, in]")

    def uses(self, ndim: int) -> tuple[Use, ...]:
        """The use that the role implies for a parameter. It is what a trace would find for a parameter of `ndim` axes."""
        if any(a < -ndim for a in self.axis):
            raise QuantError(f"{self.role.words} of axis {self.axis} has {ndim} axes only")
        match self.role:
            case Role.EMBEDDING:
                return (Use("take", tuple(a for a in range(-ndim, 0) if a not in self.axis), tiled=self.axis),)
            case Role.CONVOLUTION:
                return (Use("conv_general_dilated", self.axis, tiled=self.axis),)
            case Role.EXPERTS:
                return (Use("ragged_dot", self.axis, batch=(-ndim,), tiled=self.axis),)
            case _ if self.axis:
                return (Use("dot_general", self.axis, tiled=self.axis),)
        return ()


def traced_roles(uses: Mapping[str, tuple[Use, ...]]) -> dict[str, Role]:
    """The roles of traced parameters, by the equations that use each, refined by names.

    An embedding that a product contracts as well (tied embeddings) is an embedding. Stacked matrices with a batch axis in
    their product are an expert stack.

    Args:
        uses: the uses of each parameter, by its path.

    Returns:
        The role of each; `Role.OTHER` where no product and no look-up uses it.
    """
    return refined({path: _role_of_uses(used) for path, used in uses.items()})


def _role_of_uses(uses: tuple[Use, ...]) -> Role:
    """The role that follows from the equations that use a parameter."""
    ops = {use.op for use in uses}
    if "take" in ops:
        return Role.EMBEDDING
    if "conv_general_dilated" in ops:
        return Role.CONVOLUTION
    if "ragged_dot" in ops or any(use.op == "dot_general" and use.batch for use in uses):
        return Role.EXPERTS
    if "dot_general" in ops:
        return Role.MATMUL
    return Role.OTHER


_LEAVES = ("weight", "kernel", "value", "w", "embedding", "scale")
"""Names of a parameter within its module that do not show its role."""

# Patterns of one part of a path that show a role.
_EXPERTS = re.compile(r"(?:local_)?experts?(?:_\d+)?", re.IGNORECASE)
_MIXTURE = re.compile(r"\w*moe(?:block)?(?:_\w+)?", re.IGNORECASE)
_ROUTER = re.compile(r"routers?|router_gate|shared_expert_gate|ffn_gate_inp(?:_shexp)?", re.IGNORECASE)
_GATE = re.compile(r"gate|wg|gating|gate_weight")
_STATE_SPACE_MARK = re.compile(r"A_log|dt_bias|ssm_a")
_STATE_SPACE = re.compile(
    r"A_log|[AD]|dt_\w+|ssm_(?:a|d|dt|conv1d|alpha|beta|ba)|(?:\w+_)?conv1d|alpha|beta|ba|in_proj_(?:a|b|ba)"  # a, b: gates of states
)
_RELATIVE = re.compile(r"\w*relative\w*|rel_pos_[hwd]|rel_embeddings|distance_embedding|r_[wr]_bias|attn_rel_b")
_TOKEN = re.compile(
    r"(?:cls|class|mask|dist|distillation|register|reg|storage|query)_?tokens?|class_embedding|cls_embed|cls|probe"
)
_SINKS = re.compile(r"(?:attn_)?sinks?")
_POSITION = re.compile(r"wpe|(?:\w+_)?pos(?:ition|itional|itions)?(?:_\w+)?", re.IGNORECASE)
_BIAS = re.compile(r"b\d*|(?:[\w+]+_)?bias", re.IGNORECASE)
_NORM = re.compile(r"\w*norm(?:_\w+|\d+)?|ln(?:_\w+|\d+)?|\w+_ln", re.IGNORECASE)


def refined(roles: Mapping[str, Role]) -> dict[str, Role]:
    """Corrects roles by names: routers among matrices, position tables among tables.

    A name never makes a parameter one that recipes quantize. `gate` is a router only in a module that has experts, since the
    gate of a gated MLP has the same name; `conv1d` is a state space's only in a module with an `A_log` or a `dt_bias`, and so
    are the gates of its state.

    Args:
        roles: the roles so far, by path; the parts of a path are separated by `.` or `/`.

    >>> paths = ("moe.gate.weight", "moe.experts.w1", "mlp.gate.weight")
    >>> [str(role) for role in refined(dict.fromkeys(paths, Role.MATMUL)).values()]
    ['router', 'matmul', 'matmul']
    """
    split = {path: tuple(re.split("[./]", path)) for path in roles}
    modules = _Modules(
        experts=frozenset(prefix for path, parts in split.items() for prefix in _expert_modules(parts, roles[path])),
        state_spaces=frozenset(
            parts[:i] for parts in split.values() for i, part in enumerate(parts) if _STATE_SPACE_MARK.fullmatch(part)
        ),
    )
    return {path: _refined_role(split[path], role, modules) for path, role in roles.items()}


@dataclasses.dataclass(frozen=True)
class _Modules:
    """The modules, by the parts of their paths, that have experts or are state spaces."""

    experts: frozenset[tuple[str, ...]]
    state_spaces: frozenset[tuple[str, ...]]


def _expert_modules(parts: tuple[str, ...], role: Role) -> Iterator[tuple[str, ...]]:
    """The modules that have experts, as one parameter shows."""
    yield from (parts[:i] for i, part in enumerate(parts) if _EXPERTS.fullmatch(part))
    yield from (parts[: i + 1] for i, part in enumerate(parts) if _MIXTURE.fullmatch(part))
    if role is Role.EXPERTS:
        depth = max((i for i, part in enumerate(parts) if part not in _LEAVES), default=0)
        yield parts[:depth]


def _refined_role(parts: tuple[str, ...], role: Role, modules: _Modules) -> Role:
    """The role of the parameter whose path has these parts."""

    def has_part(pattern: re.Pattern[str], of: frozenset[tuple[str, ...]] | None = None) -> bool:
        """Whether a part matches, directly in one of the modules where they are given."""
        return any(pattern.fullmatch(part) and (of is None or parts[:i] in of) for i, part in enumerate(parts))

    if role is not Role.EMBEDDING:
        if has_part(_ROUTER) or (role is not Role.EXPERTS and has_part(_GATE, modules.experts)):
            return Role.ROUTER
        if has_part(_STATE_SPACE, modules.state_spaces):
            return Role.STATE_SPACE
    own = next((part for part in reversed(parts) if part not in _LEAVES), parts[-1])
    is_open = role in (Role.OTHER, Role.UNKNOWN)
    named: tuple[tuple[re.Pattern[str], Role], ...] = ()
    if is_open or role is Role.EMBEDDING:
        named = ((_RELATIVE, Role.RELATIVE_BIAS), (_POSITION, Role.POSITION), (_BIAS, Role.BIAS))
    if is_open:
        named += ((_TOKEN, Role.CLASS_TOKEN), (_SINKS, Role.SINKS), (_BIAS, Role.BIAS), (_NORM, Role.NORM))
    names = (own, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", own))
    return next((found for pattern, found in named if any(map(pattern.fullmatch, names))), role)
