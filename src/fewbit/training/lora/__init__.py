"""LoRA: low-rank adapters on frozen weights, quantized (QLoRA) or not."""

from .adapter import Adapter as Adapter
from .adapter import init as init
from .apply import apply as apply
from .merge import merge as merge
