"""Linear layers, and modules that stay in float."""

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from .container import Weight

_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def linear_misfit(weight: Weight) -> str | None:
    """Why a weight is not that of a linear layer whose activations stay in float. None if it is."""
    if not weight.name.endswith(".weight"):
        return "its name does not end in .weight, as that of a linear layer does"
    if len(weight.shape) != 2:
        return f"it has {len(weight.shape)} axes, and a linear layer has 2"
    if weight.activations is not None:
        return "its activations are quantized too, and this program quantizes weights only"
    return None


def float_modules(weights: Sequence[Weight], kept: Sequence[str]) -> list[str]:
    """The modules whose weights are not quantized, but for norms and embeddings.

    Programs replace every linear layer by a quantized one unless its name is listed. `lm_head` is listed whenever it is not
    quantized: a head that is tied to the embedding has no tensor of its own.
    """
    quantized = {weight.module for weight in weights}
    modules = [name.removesuffix(".weight") for name in kept if name.endswith(".weight")]
    found = [m for m in modules if not any(word in m.rpartition(".")[2] for word in ("norm", "embed"))]
    return [module for module in dict.fromkeys((*found, "lm_head")) if module not in quantized]


def model_dtype(config: Mapping[str, Any], default: np.dtype) -> np.dtype:
    """The dtype of a model's own weights by its `config.json`."""
    name = config.get("dtype", config.get("torch_dtype"))
    if isinstance(name, str) and name in _DTYPES:
        return np.dtype(_DTYPES[name])
    return default
