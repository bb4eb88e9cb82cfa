"""A rule of a recipe: which parameters, by their path, or which products, by their name, and what happens to them."""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from .._json import checked, form_of
from .._patterns import Pattern
from .._registry import near_names
from ..errors import QuantError
from ..ops import Policy
from ..ops.policy import POLICY
from .roles import QUANTIZED_ROLES, Role, as_role
from .sparsity import AXES, SPARSITY, Sparsity

PRODUCT_OPS = ("dot_general", "conv_general_dilated", "ragged_dot")
"""The products that contract a parameter; `@` and einsums are `dot_general`s."""

OPS = (*PRODUCT_OPS, "take")
"""What uses a parameter in a way that a rule can ask for."""


@dataclasses.dataclass(frozen=True, init=False)
class Rule:
    """Parameters whose whole path matches a regular expression follow a policy, or stay as they are.

    A rule that names no role takes matmul weights, embedding tables, convolution kernels and expert stacks, or where it leaves
    parameters as they are, any. With an `axis` it takes parameters of unknown role, too: the axis is what was not known of them. Every
    other role (routers, norms, position tables, ...) is taken by a rule that names it, only.

    Among the `products` of a recipe, a rule is for products without a parameter, and its path for their names.

    Attributes:
        path: a regular expression that must match the whole path: `"layers/[0-9]+/mlp/.*"`; `".*"` is every one.
        policy: what happens to them; None leaves them as they are. A scheme's name is taken as weight-only.
        ops: match only parameters of which some use is one of these ("dot_general", "take" for look-ups,
            "conv_general_dilated", "ragged_dot"); empty: whatever uses them.
        axis: the axis or axes along which tiles run, where the uses of a parameter disagree or no code can be traced;
            None takes what its products contract.
        optional: whether it is fine that the rule matches nothing, and that it leaves nothing to rules after it.
        sparsity: N:M sparsity of the parameters, beside the policy or alone: products see, and `fb.quantize_params` stores, zeros
            for what it prunes. None keeps every weight.
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
        ops = (ops,) if isinstance(ops, str) else tuple(ops)
        for op in ops:
            if op not in OPS:
                raise QuantError(f"rule {path!r}: unknown op {op!r}; {near_names(op, OPS)}")
        object.__setattr__(self, "path", path)
        if self.literal is None:
            self._pattern  # noqa: B018 - refuses what is no regular expression
        is_form = policy is not None and not isinstance(policy, Policy)
        object.__setattr__(self, "policy", Policy.from_json(policy) if is_form else policy)
        object.__setattr__(self, "ops", ops)
        object.__setattr__(self, "axis", (axis,) if isinstance(axis, int) else None if axis is None else tuple(axis))
        object.__setattr__(self, "optional", optional)
        is_form = sparsity is not None and not isinstance(sparsity, Sparsity)
        object.__setattr__(self, "sparsity", Sparsity.from_json(sparsity) if is_form else sparsity)
        if self.sparsity is not None and self.policy is not None:
            self.sparsity.check(self.policy.weight)
        names = (roles,) if isinstance(roles, str) else tuple(roles)
        object.__setattr__(self, "roles", tuple(as_role(name, f"role of rule {path!r}:") for name in names))

    @functools.cached_property
    def literal(self) -> str | None:
        """The one path that the rule matches, where its path is no pattern; else None."""
        return _literal(self.path)

    @functools.cached_property
    def _pattern(self) -> Pattern:
        """The expression of the path, compiled once."""
        return Pattern(self.path, "rule path")

    @property
    def changes(self) -> bool:
        """Whether the rule quantizes or prunes what it matches."""
        return self.policy is not None or self.sparsity is not None

    @property
    def taken_roles(self) -> tuple[Role, ...]:
        """The roles that the rule takes: those it names, or those of a rule that names none."""
        if self.roles or not self.changes:
            return self.roles or tuple(Role)
        return QUANTIZED_ROLES if self.axis is None else (*QUANTIZED_ROLES, Role.UNKNOWN)

    def matches_path(self, path: str) -> bool:
        """Whether the rule's path matches the whole of this one."""
        return path == self.literal if self.literal is not None else self._pattern.fullmatch(path)

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
        ops = f" used by {' or '.join(self.ops)}" if self.ops else ""
        ops += f" of role {' or '.join(self.roles)}" if self.roles else ""
        return f"{self.path}{ops} -> {', '.join(map(str, filter(None, (self.policy, self.sparsity)))) or 'left as it is'}"

    def to_json(self) -> dict[str, Any]:
        """The JSON form: the fields that differ from their defaults, and the policy."""
        form: dict[str, Any] = {"path": self.path, "policy": None if self.policy is None else self.policy.to_json()}
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
    def from_json(cls, form: Any) -> Self:
        """The rule of a JSON form; an unknown key raises QuantError with the near name."""
        return cls(**checked(form, RULE, "a rule"))


def _literal(path: str) -> str | None:
    """The text that a regular expression matches if it has no special character but escaped ones; else None."""
    if re.fullmatch(r"(?:[\w/ :,-]|\\[^\w\s])*", path) is None:
        return None
    return re.sub(r"\\(.)", r"\1", path)


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
