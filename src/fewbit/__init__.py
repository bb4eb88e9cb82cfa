"""fewbit makes neural networks few-bit in JAX: one numerics from post-training quantization to training and serving.

>>> import fewbit as fb
>>> q = fb.quantize(jnp.ones((64, 128)), "nf4")
>>> q.shape, q.nbytes
((64, 128), 4608)
"""

from . import array as array
from . import formats as formats
from . import frameworks as frameworks
from . import statistics as statistics
from . import training as training
from .array import SCHEMES as SCHEMES
from .array import Packing as Packing
from .array import QArray as QArray
from .array import Scheme as Scheme
from .array import hessian_blocks as hessian_blocks
from .array import is_qarray as is_qarray
from .array import quantize_with_hessian as quantize_with_hessian
from .array import scheme as scheme
from .array import shardings_of as shardings_of
from .array import specs_of as specs_of
from .errors import QuantError as QuantError
from .errors import UnsupportedError as UnsupportedError
from .formats import FORMATS as FORMATS
from .io import load as load
from .io import save as save
from .kernels.quantize import dequantize as dequantize
from .kernels.quantize import quantize as quantize
from .ops import Arm as Arm
from .ops import DelayedScaling as DelayedScaling
from .ops import Policy as Policy
from .ops import conv_general_dilated as conv_general_dilated
from .ops import dot_general as dot_general
from .ops import einsum as einsum
from .ops import explain as explain
from .ops import ragged_dot as ragged_dot
from .ops import ragged_dot_general as ragged_dot_general
from .ops import take as take
from .ops import transparent as transparent
from .recipe import RECIPES as RECIPES
from .recipe import Plan as Plan
from .recipe import Recipe as Recipe
from .recipe import Role as Role
from .recipe import Rule as Rule
from .recipe import Sparsity as Sparsity
from .recipe import TensorRole as TensorRole
from .recipe import maxtext_mixed_precision as maxtext_mixed_precision
from .recipe import maxtext_recipe as maxtext_recipe
from .recipe import plan as plan
from .recipe import quantize_params as quantize_params
from .recipe import recipe as recipe
from .recipe import weight_only as weight_only
from .statistics import Stats as Stats
from .statistics import observe as observe
from .training import DelayedState as DelayedState
from .training import ModelSparsity as ModelSparsity
from .training import delayed_state as delayed_state
from .training import fake_quant as fake_quant
from .training import lora as lora
from .training import sparsity_state as sparsity_state
from .training import train as train
