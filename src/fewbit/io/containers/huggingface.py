"""Plain Hugging Face directories: float tensors only."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...array.qarray import QArray
from ..checkpoint import Tensors
from .container import AbstractContainer, Files, Weight


class HuggingFace(AbstractContainer):
    """Float tensors, as transformers writes them. Quantized weights are dequantized before they are added."""

    name = "hf"
    schemes = ()

    def why_not(self, weight: Weight) -> str | None:
        return "it stores no quantized weights"

    def encoded(self, weight: Weight, q: QArray) -> dict[str, np.ndarray]:
        raise AssertionError("no weight passes why_not")

    def files(self, weights: Sequence[Weight], kept: Sequence[str], config: Mapping[str, Any]) -> Files:
        return Files()

    def recognises(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        return False

    def decoded(self, config: Mapping[str, Any], tensors: Tensors, where: str) -> Tensors:
        return tensors
