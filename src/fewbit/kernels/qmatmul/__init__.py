"""The general product of two operands of which at least one is quantized."""

from .cpu import Cpu as Cpu
from .cpu import reads_packed_weights as reads_packed_weights
from .gpu import TritonGPU as TritonGPU
from .problem import Problem as Problem
from .reference import BACKENDS as BACKENDS
from .stacked import product as product
from .tpu import PallasTPU as PallasTPU
