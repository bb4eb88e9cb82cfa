"""Products on quantized operands, and `transparent` for unchanged model code."""

from .conv import conv_general_dilated as conv_general_dilated
from .delayed import DelayedScaling as DelayedScaling
from .dot import dot_general as dot_general
from .dot import matmul as matmul
from .einsum import einsum as einsum
from .explain import explain as explain
from .hadamard import hadamard_transform as hadamard_transform
from .interpret.evaluator import Decoded as Decoded
from .interpret.transparent import transparent as transparent
from .policy import Arm as Arm
from .policy import Policy as Policy
from .psum_scatter import psum_scatter as psum_scatter
from .ragged import ragged_dot as ragged_dot
from .ragged import ragged_dot_general as ragged_dot_general
from .take import take as take
