"""What a parameter does in its model."""

import enum

from .._registry import near_names
from ..errors import QuantError


class Role(enum.StrEnum):
    """What a parameter does in its model.

    >>> Role("router").words
    'a router or gate of experts'
    """

    MATMUL = "matmul"
    EMBEDDING = "embedding"
    CONVOLUTION = "convolution"
    EXPERTS = "experts"
    NORM = "norm"
    BIAS = "bias"
    ROUTER = "router"
    POSITION = "position"
    CLASS_TOKEN = "class_token"
    RELATIVE_BIAS = "relative_bias"
    SINKS = "sinks"
    STATE_SPACE = "state_space"
    OTHER = "other"
    UNKNOWN = "unknown"

    @property
    def words(self) -> str:
        """The role as a noun phrase."""
        return _WORDS[self]


_WORDS = {
    Role.MATMUL: "a matmul weight",
    Role.EMBEDDING: "an embedding table",
    Role.CONVOLUTION: "a convolution kernel",
    Role.EXPERTS: "an expert stack",
    Role.NORM: "a norm",
    Role.BIAS: "a bias",
    Role.ROUTER: "a router or gate of experts",
    Role.POSITION: "a position table",
    Role.CLASS_TOKEN: "a class, mask or register token",
    Role.RELATIVE_BIAS: "a relative position bias",
    Role.SINKS: "attention sinks",
    Role.STATE_SPACE: "a state-space parameter",
    Role.OTHER: "no weight of a product",
    Role.UNKNOWN: "of unknown role",
}

WEIGHT_ROLES = (Role.MATMUL, Role.CONVOLUTION, Role.EXPERTS)
"""The roles that a product contracts."""

QUANTIZED_ROLES = (*WEIGHT_ROLES, Role.EMBEDDING)
"""The roles that a rule without roles quantizes."""


def as_role(name: str, what: str = "role") -> Role:
    """The Role of a name. An unknown one raises QuantError with the names near it."""
    try:
        return Role(name)
    except ValueError:
        raise QuantError(f"unknown {what} {name!r}; {near_names(name, tuple(map(str, Role)))}") from None
