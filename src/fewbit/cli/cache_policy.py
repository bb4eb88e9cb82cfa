"""The options for a quantized KV cache."""

from ..errors import QuantError
from ..kvcache.policy import KVPolicy, kv_policy


def cache_policy(kv: str | None, per: str | None) -> KVPolicy | None:
    """The KV cache's policy, from the two options."""
    if kv is None and per is not None:
        raise QuantError(f"--kv-scale {per} is about a quantized KV cache; it needs --kv, such as --kv int8")
    if kv is None:
        return None
    schemes = [scheme.strip() for scheme in kv.split(",", 1)]
    return kv_policy(*schemes, per=per or "head")
