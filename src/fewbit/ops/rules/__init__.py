"""What each JAX primitive does with a quantized operand: one file a kind of primitive, `RULES` for all of them."""

from . import parameters as parameters
from .control import CONTROL
from .derivatives import DERIVATIVES
from .layout import LAYOUT
from .products import PRODUCT
from .rule import Rule
from .sharding import SHARDING

SHARED: dict[str, Rule] = CONTROL | DERIVATIVES
"""The rules of equations that carry operands of every kind to the equations of their bodies."""

RULES: dict[str, Rule] = PRODUCT | LAYOUT | SHARDING | SHARED
"""For each primitive, by its name, how an equation with quantized operands is computed."""
