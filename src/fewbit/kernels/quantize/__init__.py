"""Quantize and dequantize: reference, C++ on CPU, Pallas on TPU, Triton on CUDA."""

from .cpu.backend import CpuDequantizer as CpuDequantizer
from .cpu.backend import CpuQuantizer as CpuQuantizer
from .dispatch import DEQUANTIZERS as DEQUANTIZERS
from .dispatch import QUANTIZERS as QUANTIZERS
from .dispatch import dequantize as dequantize
from .dispatch import quantize as quantize
from .gpu.backend import TritonDequantizer as TritonDequantizer
from .gpu.backend import TritonQuantizer as TritonQuantizer
from .problem import Decoding as Decoding
from .problem import Quantization as Quantization
from .tpu.backend import PallasTPUQuantizer as PallasTPUQuantizer
from .tpu.dequantize_backend import PallasTPUDequantizer as PallasTPUDequantizer
