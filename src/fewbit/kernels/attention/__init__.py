"""Attention over float or quantized keys and values: reference, C++ on CPU."""

from .cpu.backend import Cpu as Cpu
from .dispatch import BACKENDS as BACKENDS
from .dispatch import attention as attention
from .problem import QUERIES as QUERIES
from .problem import AttentionProblem as AttentionProblem
from .problem import Block as Block
from .problem import seen_positions as seen_positions
from .problem import window_start as window_start
