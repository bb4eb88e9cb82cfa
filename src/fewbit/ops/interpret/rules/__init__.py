"""The rule of each JAX primitive with a quantized operand."""

from ..evaluator import Rule
from .control_flow import CONTROL
from .custom_derivatives import DERIVATIVES
from .layout import LAYOUT
from .products import PRODUCT
from .sharding import SHARDING

SHARED: dict[str, Rule] = CONTROL | DERIVATIVES
"""The rules of equations with bodies, for operands of every kind."""

RULES: dict[str, Rule] = PRODUCT | LAYOUT | SHARDING | SHARED
"""The rule of each primitive with quantized operands, by name."""
