"""Matmul with quantized operands: dot_general and ragged_dot."""

from .cpu.backend import Cpu as Cpu
from .cpu.backend import reads_packed_weights as reads_packed_weights
from .dispatch import BACKENDS as BACKENDS
from .dispatch import product as product
from .gpu.backend import TritonGPU as TritonGPU
from .problem import Problem as Problem
from .tpu.backend import PallasTPU as PallasTPU
