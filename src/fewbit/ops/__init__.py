"""Products of operands that may be quantized, and the transformation that brings them to unchanged code."""

from .delayed import DelayedScaling as DelayedScaling
from .dot import dot_general as dot_general
from .dot import matmul as matmul
from .einsum import einsum as einsum
from .policy import Arm as Arm
from .policy import Policy as Policy
from .take import take as take
from .transparent import Decoded as Decoded
from .transparent import transparent as transparent
