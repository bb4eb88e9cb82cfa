"""Training: fake quantization, QAT, delayed scaling, N:M sparsity, LoRA."""

from ..array.covered import is_covered as is_covered
from ..array.straight_through import passed_through as passed_through
from . import lora as lora
from .delayed import DelayedScale as DelayedScale
from .delayed_state import DelayedState as DelayedState
from .delayed_state import ProductScales as ProductScales
from .delayed_state import delayed_state as delayed_state
from .fake_quant import fake_quant as fake_quant
from .model_sparsity import ModelSparsity as ModelSparsity
from .model_sparsity import sparsity_state as sparsity_state
from .train import train as train
