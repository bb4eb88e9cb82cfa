"""A small container for the tests: per-channel int8, codes and scales in two tensors."""

import jax.numpy as jnp
import numpy as np

from fewbit.array.qarray import QArray
from fewbit.array.scheme import scheme
from fewbit.io.checkpoint import TensorInfo
from fewbit.io.containers.container import AbstractContainer, Files, Group, grouped

INT8 = scheme("int8")


class Simple(AbstractContainer):
    name = "simple"
    schemes = ("int8",)

    def __init__(self, error=0.0):
        self.error = error

    def why_not(self, weight):
        if weight.scheme != INT8:
            return f"{weight.scheme.name} is not int8"
        return None

    def encoded(self, weight, q):
        return {
            f"{weight.module}.codes": np.asarray(q.codes),
            f"{weight.module}.scales": np.asarray(q.scale) * np.float32(1 + self.error),
        }

    def files(self, weights, kept, config):
        section = {"quant_method": "simple", "ignore": list(kept)}
        return Files({"quantization_config": section}, {"simple.json": b"{}\n"})

    def recognises(self, config, tensors):
        return config.get("quantization_config", {}).get("quant_method") == "simple"

    def decoded(self, config, tensors, where):
        groups = {}
        for name, info in tensors.info.items():
            if name.endswith(".codes"):
                stem = name.removesuffix(".codes")
                groups[f"{stem}.weight"] = _group(stem, info.shape)
        return grouped(tensors, groups, where)


def _group(stem, shape):
    def load(arrays):
        codes, scales = (jnp.asarray(arrays[f"{stem}.{part}"]) for part in ("codes", "scales"))
        return QArray(codes, scales, None, None, INT8, np.dtype(np.float32), 0)

    info = TensorInfo(shape, "float32", "simple int8", shape[0] * (shape[1] + 4), INT8)
    return Group(info, (f"{stem}.codes", f"{stem}.scales"), load)
