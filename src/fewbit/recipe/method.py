"""The interface of methods, which choose the codes of a parameter."""

import abc
import dataclasses
from typing import Any, ClassVar

import jax

from ..array.qarray import QArray
from ..array.scheme import Scheme
from ..kernels.quantize.dispatch import quantize


@dataclasses.dataclass(frozen=True)
class AbstractMethod(abc.ABC):
    """Chooses scales and codes of a weight: float weight, statistics and Scheme -> QArray. A frozen dataclass.

    Attributes:
        name: its name in the command line, such as "gptq".
        collect: what `fb.observe` must collect for it; empty for a method without calibration data.
    """

    name: ClassVar[str]
    collect: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def quantized(self, x: jax.Array, scheme: Scheme, axis: tuple[int, ...], observation: Any) -> QArray:
        """Quantizes one weight. Traced: it must be jit-compatible.

        Args:
            x: the weight, without the axes that a loop runs over.
            scheme: the scheme, with tiles on its last axis.
            axis: the contraction axes, negative.
            observation: the `Observation` of its products; None without statistics, as for an embedding.

        Returns:
            A QArray that differs from `fb.quantize(x, scheme, axis=axis)` in the values of its leaves only.
        """


@dataclasses.dataclass(frozen=True)
class RTN(AbstractMethod):
    """Rounds every element to the nearest number, with scales from the scheme's calibration: `fb.quantize`."""

    name = "rtn"

    def quantized(self, x: jax.Array, scheme: Scheme, axis: tuple[int, ...], observation: Any) -> QArray:
        return quantize(x, scheme, axis=axis)


NEAREST = RTN()
"""The default method."""
