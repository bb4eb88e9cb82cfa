"""Quantized KV caches, and attention that reads them in place."""

from ..kernels.attention import Block as Block
from ..kernels.attention import attention as attention
from ..kernels.attention import seen_positions as seen_positions
from .cache import QuantizedCache as QuantizedCache
from .cache import empty_quantized_cache as empty_quantized_cache
from .policy import KVPolicy as KVPolicy
from .policy import kv_policy as kv_policy
