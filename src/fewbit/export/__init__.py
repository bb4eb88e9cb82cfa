"""`jax.export` for programs with quantized arrays and fewbit's kernels."""

from . import pytrees as _pytrees  # noqa: F401 - registers them
from .program import deserialize as deserialize
from .program import export as export
