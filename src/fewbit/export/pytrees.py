"""How `Exported.serialize` writes QArrays and caches among the arguments and results of a program."""

import dataclasses
import json
from typing import Any

import jax.export
import numpy as np

from ..array.qarray import QArray
from ..array.scheme import Scheme
from ..errors import QuantError
from ..kvcache.cache import QuantizedCache
from ..kvcache.policy import KVPolicy
from ..models.attention.linear import LinearState
from ..models.cache import Cache, HybridCache
from ..ops.policy import Policy


def _qarray_to_json(static: tuple[Any, ...]) -> bytes:
    scheme, dtype, slack, policy = static
    if policy is not None and not isinstance(policy, Policy):
        raise QuantError(
            f"a QArray with a policy of {type(policy).__name__} cannot be serialized; pass one with a fb.Policy"
        )
    form = {"scheme": scheme.to_json(), "dtype": np.dtype(dtype).name, "slack": slack}
    return json.dumps(form if policy is None else form | {"policy": policy.to_json()}).encode()


def _qarray_from_json(text: bytes | bytearray) -> tuple[Any, ...]:
    form = json.loads(text)
    policy = Policy.from_json(form["policy"]) if "policy" in form else None
    return Scheme.from_json(form["scheme"]), np.dtype(form["dtype"]), form["slack"], policy


def _cache_to_json(static: tuple[Any, ...]) -> bytes:
    policy, head_dim = static
    form = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    schemes = {name: form[name].to_json() for name in ("keys", "values")}
    return json.dumps({"policy": form | schemes, "head_dim": head_dim}).encode()


def _cache_from_json(text: bytes | bytearray) -> tuple[Any, ...]:
    form = json.loads(text)
    schemes = {name: Scheme.from_json(form["policy"][name]) for name in ("keys", "values")}
    return KVPolicy(**form["policy"] | schemes), form["head_dim"]


for _kind, _to_json, _from_json in (
    (QArray, _qarray_to_json, _qarray_from_json),
    (QuantizedCache, _cache_to_json, _cache_from_json),
    *((kind, lambda static: b"", lambda text: ()) for kind in (Cache, HybridCache, LinearState)),
):
    jax.export.register_pytree_node_serialization(
        _kind, serialized_name=f"fewbit.{_kind.__name__}", serialize_auxdata=_to_json, deserialize_auxdata=_from_json
    )
