"""Matmul with quantized operands: dot_general and ragged_dot."""

from .cpu import Cpu as Cpu
from .cpu import CpuRagged as CpuRagged
from .cpu import reads_packed_weights as reads_packed_weights
from .gpu import TritonGPU as TritonGPU
from .gpu import TritonGPURagged as TritonGPURagged
from .problem import Problem as Problem
from .ragged import RAGGED as RAGGED
from .ragged import RaggedProblem as RaggedProblem
from .ragged import ragged_product as ragged_product
from .reference import BACKENDS as BACKENDS
from .stacked import product as product
from .tpu import PallasTPU as PallasTPU
from .tpu import PallasTPURagged as PallasTPURagged
