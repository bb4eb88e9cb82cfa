"""fewbit for PyTorch: quantized tensors as a subclass of torch.Tensor, of the same bytes as fewbit's in JAX.

On a CPU tensors are handed to JAX without a copy, so every scheme, calibration, search and kernel of fewbit serves torch too; on CUDA
Triton's kernels do what they can (`fewbit.torch.explain` says). `import fewbit` alone never imports torch.
"""

from . import convolution as convolution
from .checkpoint import load as load
from .compat_qwantize import dequantize_blocks as dequantize_blocks
from .compat_qwantize import quantize_blocks as quantize_blocks
from .matmul import explain_matmul as explain_matmul
from .matmul import matmul as matmul
from .metrics import Metrics as Metrics
from .metrics import metrics as metrics
from .module import plan as plan
from .module import quantize_ as quantize_
from .qtensor import QTensor as QTensor
from .qtensor import from_qarray as from_qarray
from .qtensor import to_qarray as to_qarray
from .quantize import dequantize as dequantize
from .quantize import explain as explain
from .quantize import quantize as quantize
from .ragged import ragged_dot as ragged_dot
