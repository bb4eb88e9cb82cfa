"""What each JAX primitive does with a quantized operand: one file a kind of primitive, `RULES` for all of them."""

from .control import CONTROL as CONTROL
from .derivatives import DERIVATIVES
from .layout import LAYOUT
from .products import PRODUCT
from .rule import Rule
from .sharding import SHARDING

RULES: dict[str, Rule] = PRODUCT | LAYOUT | SHARDING | CONTROL | DERIVATIVES
"""For each primitive, by its name, how an equation with quantized operands is computed."""

PARAMETER_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
"""The products that follow the policy of a parameter in training."""

MOVES = frozenset(
    {
        *("convert_element_type", "copy", "copy_p", "name", "optimization_barrier", "sharding_constraint", "all_gather"),
        *("transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "slice", "dynamic_slice", "split", "rev"),
    }
)
"""The primitives after which a parameter in training is still that parameter."""
