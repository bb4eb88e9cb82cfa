"""Quantize and dequantize: reference, C++ on CPU, Pallas on TPU, Triton on CUDA."""

from .backends import DEQUANTIZERS as DEQUANTIZERS
from .backends import QUANTIZERS as QUANTIZERS
from .cpu import CpuDequantizer as CpuDequantizer
from .cpu import CpuQuantizer as CpuQuantizer
from .dispatch import dequantize as dequantize
from .dispatch import quantize as quantize
from .gpu import TritonDequantizer as TritonDequantizer
from .gpu import TritonQuantizer as TritonQuantizer
from .problem import Decoding as Decoding
from .problem import Quantization as Quantization
from .tpu import PallasTPUQuantizer as PallasTPUQuantizer
from .tpu_dequantize import PallasTPUDequantizer as PallasTPUDequantizer
