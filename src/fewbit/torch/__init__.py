"""fewbit for PyTorch: quantizes torch tensors to the very bytes that `fewbit.quantize` gives, and multiplies with them.

The formats, schemes and calibrations are those of the JAX library. Tensors on a CPU are quantized by torch operations, those on
a CUDA device by Triton kernels where one serves (`fewbit.torch.explain` says which, and why not). `import fewbit` alone never
imports torch; `from fewbit import torch as fbt` does.
"""

from .blocks import dequantize_blocks as dequantize_blocks
from .blocks import quantize_blocks as quantize_blocks
from .metrics import Metrics as Metrics
from .metrics import metrics as metrics
from .products import explain_matmul as explain_matmul
from .products import matmul as matmul
from .qtensor import QTensor as QTensor
from .qtensor import from_qarray as from_qarray
from .quantize import dequantize as dequantize
from .quantize import explain as explain
from .quantize import quantize as quantize
from .ragged import ragged_dot as ragged_dot
