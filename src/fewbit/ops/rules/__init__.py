"""What each JAX primitive does with a quantized operand: one file a kind of primitive, `RULES` for all of them."""

from .control import CONTROL
from .derivatives import DERIVATIVES
from .layout import LAYOUT
from .products import PRODUCT
from .rule import Rule
from .sharding import SHARDING

RULES: dict[str, Rule] = PRODUCT | LAYOUT | SHARDING | CONTROL | DERIVATIVES
"""For each primitive, by its name, how an equation with quantized operands is computed."""
