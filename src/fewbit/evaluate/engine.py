"""The interface of the programs that run models for evaluation."""

import abc
import dataclasses
from collections.abc import Callable, Iterable
from typing import TypeAlias

import jax
import numpy as np

from ..array.qarray import QArray
from .perplexity import LogitsFn

Value: TypeAlias = np.ndarray | jax.Array | QArray


@dataclasses.dataclass(frozen=True)
class Engine(abc.ABC):
    """A program that runs one architecture with given weights.

    Attributes:
        title: the program and its version, for reports.
        vocab: the vocabulary size; None for a model without tokens.
        context: the most tokens of an input; None if there is no limit.
    """

    title: str
    vocab: int | None
    context: int | None

    @abc.abstractmethod
    def network(self, paths: Iterable[str], load: Callable[[str], Value]) -> LogitsFn:
        """The architecture with these weights, as a function from tokens to logits.

        Args:
            paths: the paths of the parameters.
            load: loads the parameter of a path; it is called once for each. Quantized ones are dequantized, or run as they are.

        Returns:
            The function; it keeps the weights in memory.
        """
