"""Scalings of rotary frequencies for long contexts, as transformers defines them."""

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ..._json import checked, form_of
from ..._registry import near_names
from ...errors import QuantError


@dataclasses.dataclass(frozen=True)
class RopeScaling(abc.ABC):
    """How rotary frequencies are scaled."""

    kind: ClassVar[str]
    grows: ClassVar[bool] = False
    """Whether the frequencies change while a sequence grows in a KV cache."""

    @property
    def gain(self) -> float:
        """The factor of cosines and sines."""
        return 1.0

    @abc.abstractmethod
    def frequencies(self, plain: np.ndarray, theta: float, length: int) -> np.ndarray:
        """The scaled frequencies.

        Args:
            plain: `theta ** (-2 i / rotary_dim)`, float64.
            theta: the base.
            length: the tokens of the sequence.

        Returns:
            The frequencies, float64, of the same shape.
        """


@dataclasses.dataclass(frozen=True)
class Linear(RopeScaling):
    """Position interpolation: every frequency is divided by `factor`."""

    kind: ClassVar[str] = "linear"
    factor: float

    def frequencies(self, plain: np.ndarray, theta: float, length: int) -> np.ndarray:
        return plain / self.factor


@dataclasses.dataclass(frozen=True)
class Dynamic(RopeScaling):
    """Dynamic NTK scaling: a larger base for sequences longer than `original_context`.

    Attributes:
        factor: the growth of the base.
        original_context: the context that the model was trained with.
    """

    kind: ClassVar[str] = "dynamic"
    grows: ClassVar[bool] = True
    factor: float
    original_context: int

    def frequencies(self, plain: np.ndarray, theta: float, length: int) -> np.ndarray:
        dim = 2 * len(plain)
        if dim == 2:
            return plain
        growth = self.factor * max(length, self.original_context) / self.original_context - (self.factor - 1)
        return plain * growth ** (-2 * np.arange(len(plain)) / (dim - 2))


@dataclasses.dataclass(frozen=True)
class Llama3(RopeScaling):
    """Llama 3.1: low frequencies are divided by `factor`, high ones kept, those between interpolated.

    Attributes:
        factor: the divisor of low frequencies.
        low_freq_factor: a frequency is low below `low_freq_factor` periods in the original context.
        high_freq_factor: a frequency is high above `high_freq_factor` periods.
        original_context: the context that the model was trained with.
    """

    kind: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def frequencies(self, plain: np.ndarray, theta: float, length: int) -> np.ndarray:
        periods = self.original_context * plain / (2 * math.pi)
        smooth = (periods - self.low_freq_factor) / (
            (self.high_freq_factor - self.low_freq_factor) or 1.0
        )  # both are 1 in Llama 4
        between = (1 - smooth) * plain / self.factor + smooth * plain
        found = np.where(periods < self.low_freq_factor, plain / self.factor, between)
        return np.where(periods > self.high_freq_factor, plain, found)


@dataclasses.dataclass(frozen=True)
class Yarn(RopeScaling):
    """YaRN: divides low frequencies by `factor`, and keeps high ones. Between them is a linear ramp by index.

    Attributes:
        factor: the divisor of low frequencies.
        original_context: the context that the model was trained with.
        beta_fast: the periods in the original context at which the ramp begins.
        beta_slow: the periods at which it ends.
        truncate: whether the ramp's ends are rounded outwards to whole indices.
        attention_factor: the factor of cosines and sines; 0: `0.1 log(factor) + 1`.
    """

    kind: ClassVar[str] = "yarn"
    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 0.0

    @property
    def gain(self) -> float:
        return self.attention_factor or yarn_gain(self.factor)

    def frequencies(self, plain: np.ndarray, theta: float, length: int) -> np.ndarray:
        dim = 2 * len(plain)

        def index(periods: float) -> float:
            return dim * math.log(self.original_context / (periods * 2 * math.pi)) / (2 * math.log(theta))

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001  # as transformers, which avoids a division by zero so
        ramp = np.clip((np.arange(len(plain)) - low) / (high - low), 0, 1)
        return plain / self.factor * ramp + plain * (1 - ramp)


def yarn_gain(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor of cosines and sines, `0.1 scale log(factor) + 1`."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


@dataclasses.dataclass(frozen=True)
class LongRope(RopeScaling):
    """LongRoPE: each frequency has its own divisor. It is of one of two sets, by the length of the sequence.

    In a KV cache the max length of the cache decides, as in llama.cpp and vLLM, so that all keys have the same set.

    Attributes:
        short: the divisors up to `original_context` tokens.
        long: the divisors of longer sequences.
        original_context: the context that the model was trained with.
        attention_factor: the factor of cosines and sines.
    """

    kind: ClassVar[str] = "longrope"
    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    attention_factor: float

    @property
    def gain(self) -> float:
        return self.attention_factor

    def frequencies(self, plain: np.ndarray, theta: float, length: int) -> np.ndarray:
        divisors = self.long if length > self.original_context else self.short
        if len(divisors) != len(plain):
            raise QuantError(f"longrope has {len(divisors)} factors, but rotary embedding has {len(plain)} frequencies")
        return plain / np.asarray(divisors, np.float64)


@dataclasses.dataclass(frozen=True)
class Proportional(RopeScaling):
    """The first pairs of coordinates rotate as in a head of which all do, and the others do not (Gemma 4).

    Attributes:
        pairs: how many pairs rotate.
        factor: divides every frequency.
    """

    kind: ClassVar[str] = "proportional"
    pairs: int
    factor: float = 1.0

    def frequencies(self, plain: np.ndarray, theta: float, length: int) -> np.ndarray:
        return np.where(np.arange(len(plain)) < self.pairs, plain / self.factor, 0.0)


def scaling_to_json(scaling: RopeScaling) -> dict[str, Any]:
    """The JSON object of a scaling, for `scaling_from_json`."""
    form = {"kind": scaling.kind, **dataclasses.asdict(scaling)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in form.items()}


def scaling_from_json(obj: Mapping[str, Any], where: str) -> RopeScaling:
    """Reads the JSON object of `scaling_to_json`.

    Raises:
        QuantError: for an unknown kind or field.
    """
    fields = dict(obj)
    kind = fields.pop("kind", None)
    if kind not in _KINDS:
        raise QuantError(f"{where} has kind {kind!r}; {near_names(str(kind), tuple(_KINDS))}")
    form = checked(fields, _FORMS[kind], where)
    for name in ("short", "long"):
        if name in form:
            form[name] = tuple(form[name])
    return _KINDS[kind](**form)


_KINDS = {cls.kind: cls for cls in (Linear, Dynamic, Llama3, Yarn, LongRope, Proportional)}
_FORMS = {kind: form_of(cls) for kind, cls in _KINDS.items()} | {
    LongRope.kind: form_of(LongRope, short=list[float], long=list[float])
}
