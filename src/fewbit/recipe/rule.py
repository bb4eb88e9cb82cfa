"""Rule: which parameters follow which policy."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from .._json import checked, form_of
from .._patterns import Pattern
from .._registry import near_names
from ..errors import QuantError
from ..ops.policy import POLICY, Policy
from .role import QUANTIZED_ROLES, Role, as_role
from .sparsity import AXES, SPARSITY, Sparsity, as_axes

PRODUCT_OPS = ("dot_general", "conv_general_dilated", "ragged_dot")
"""The products that contract a parameter; `@` and einsums are `dot_general`s."""

OPS = (*PRODUCT_OPS, "take")
"""The uses of a parameter that a rule can select."""


@dataclasses.dataclass(frozen=True, init=False)
class Rule:
    """Gives a policy to the parameters whose path matches a regular expression.

    A rule without `roles` matches matmul weights, embedding tables, convolution kernels and expert stacks, or any role if it
    has neither policy nor sparsity. With an `axis` it also matches parameters of unknown role, for which only the axis was
    missing. All other roles (routers, norms, position tables, ...) are matched only by rules that name them.

    Among the `products` of a recipe, a rule is for products without a parameter, and its path matches their names.

    Attributes:
        path: a regular expression that must match the full path: `"layers/[0-9]+/mlp/.*"`; `".*"` matches every one.
        policy: how they are quantized; None leaves them as they are. A scheme's name is a weight-only policy.
        ops: match only parameters with one of these uses ("dot_general", "take" for look-ups, "conv_general_dilated",
            "ragged_dot"); empty: any use.
        axis: the axis or axes along which tiles run, where the uses of a parameter disagree or no code can be traced;
            None takes what its products contract. Groups of a sparsity follow it only there.
        optional: whether the rule may match nothing, or match everything that later rules would.
        sparsity: N:M sparsity of the parameters, with or without a policy: products use, and `fb.quantize_params` stores,
            zeros for the pruned weights. None keeps every weight.
        roles: match only parameters of these roles, by `fewbit.recipe.Role` or its name; empty: see above.

    >>> Rule("layers/.*", "nf4").policy.weight.name
    'nf4'
    >>> print(Rule(".*", "q8_0", roles="embedding"))
    .* of role embedding -> q8_0
    """

    path: str
    policy: Policy | None
    ops: tuple[str, ...]
    axis: tuple[int, ...] | None
    optional: bool
    sparsity: Sparsity | None
    roles: tuple[Role, ...]

    def __init__(
        self,
        path: str,
        policy: Policy | str | Mapping[str, Any] | None,
        ops: str | Sequence[str] = (),
        axis: int | Sequence[int] | None = None,
        optional: bool = False,
        sparsity: Sparsity | Mapping[str, Any] | None = None,
        roles: str | Sequence[str] = (),
    ):
        if isinstance(ops, str):
            ops = (ops,)
        if not isinstance(path, str):
            raise QuantError(f"a rule's path is {path!r}; must be a regular expression, a string")
        for op in ops:
            if op not in OPS:
                raise QuantError(f"rule {path!r}: unknown op {op!r}; {near_names(op, OPS)}")
        object.__setattr__(self, "path", path)
        self.pattern  # noqa: B018 - refuses what is no regular expression
        if policy is not None and not isinstance(policy, Policy):
            policy = Policy.from_json(policy)
        object.__setattr__(self, "policy", policy)
        object.__setattr__(self, "ops", tuple(ops))
        object.__setattr__(self, "axis", as_axes(axis))
        if not isinstance(optional, bool):
            raise QuantError(f"rule {path!r}: optional is {optional!r}, must be True or False")
        object.__setattr__(self, "optional", optional)
        if sparsity is not None and not isinstance(sparsity, Sparsity):
            sparsity = Sparsity.from_json(sparsity)
        object.__setattr__(self, "sparsity", sparsity)
        if sparsity is not None and policy is not None:
            sparsity.check(policy.weight)
        if isinstance(roles, str):
            roles = (roles,)
        object.__setattr__(self, "roles", tuple(as_role(name, f"role of rule {path!r}:") for name in roles))

    @functools.cached_property
    def pattern(self) -> Pattern:
        """The expression of the path."""
        return Pattern(self.path, "rule path")

    @property
    def changes(self) -> bool:
        """Whether the rule quantizes or prunes what it matches."""
        return self.policy is not None or self.sparsity is not None

    @property
    def taken_roles(self) -> tuple[Role, ...]:
        """The roles that the rule matches: those it names, or the default ones."""
        if self.roles or not self.changes:
            return self.roles or tuple(Role)
        return QUANTIZED_ROLES if self.axis is None else (*QUANTIZED_ROLES, Role.UNKNOWN)

    def matches_path(self, path: str) -> bool:
        """Whether the rule's path matches this one in full."""
        return self.pattern.fullmatch(path)

    def matches(self, path: str, ops: tuple[str, ...], role: Role | None = None) -> bool:
        """Whether a parameter with this path, used by these operations, follows this rule.

        Args:
            path: the path, or the name of a product without a parameter.
            ops: what uses it.
            role: its role; None for a product without a parameter.
        """
        if not self.matches_path(path) or not (role is None or role in self.taken_roles):
            return False
        return not self.ops or any(op in self.ops for op in ops)

    def __str__(self) -> str:
        text = self.path
        if self.ops:
            text += f" used by {' or '.join(self.ops)}"
        if self.roles:
            text += f" of role {' or '.join(self.roles)}"
        return f"{text} -> {', '.join(map(str, filter(None, (self.policy, self.sparsity)))) or 'left as it is'}"

    def to_json(self) -> dict[str, Any]:
        """The JSON form: the fields that differ from their defaults, and the policy."""
        form: dict[str, Any] = {"path": self.path, "policy": self.policy and self.policy.to_json()}
        if self.ops:
            form["ops"] = list(self.ops)
        if self.axis is not None:
            form["axis"] = list(self.axis)
        if self.optional:
            form["optional"] = True
        if self.sparsity is not None:
            form["sparsity"] = self.sparsity.to_json()
        if self.roles:
            form["roles"] = [str(role) for role in self.roles]
        return form

    @classmethod
    def from_json(cls, form: object) -> Self:
        """The rule of a JSON form. An unknown key raises QuantError with the nearest name."""
        return cls(**checked(form, RULE, "a rule"))


_ROLES = Literal[tuple(map(str, Role))]  # type: ignore[valid-type]
RULE = form_of(
    Rule,
    policy=str | POLICY | None,
    ops=list[Literal[OPS]],
    axis=AXES,
    sparsity=SPARSITY | None,
    roles=_ROLES | list[_ROLES],
)
"""The JSON schema of a rule."""
