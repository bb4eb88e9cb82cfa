"""fewbit for PyTorch: QTensor, a torch.Tensor subclass with a QArray's bytes.

CPU tensors are passed to JAX without a copy, so torch has every scheme, calibration, search and kernel of fewbit; CUDA
tensors use the Triton kernels where they support the scheme (see `fewbit.torch.explain`). `import fewbit` alone never
imports torch.
"""

from . import convolution as convolution
from . import indexing as indexing
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
