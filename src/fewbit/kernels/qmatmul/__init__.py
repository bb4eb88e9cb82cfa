"""Matmul with quantized operands: dot_general and ragged_dot."""

from .cpu.backend import Cpu as Cpu
from .cpu.backend import CpuRagged as CpuRagged
from .cpu.backend import reads_packed_weights as reads_packed_weights
from .gpu.backend import TritonGPU as TritonGPU
from .gpu.backend import TritonGPURagged as TritonGPURagged
from .problem import Problem as Problem
from .ragged import RAGGED as RAGGED
from .ragged import RaggedProblem as RaggedProblem
from .ragged import ragged_product as ragged_product
from .reference import BACKENDS as BACKENDS
from .stacked import product as product
from .tpu.backend import PallasTPU as PallasTPU
from .tpu.backend import PallasTPURagged as PallasTPURagged
