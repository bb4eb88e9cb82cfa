"""The interface of the formats of compressed-tensors."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from ....array.qarray import QArray
from ....array.scheme import Scheme
from ....errors import QuantError
from ...checkpoint import TensorInfo, Tensors
from ..container import Group, Weight
from ..encodings.stored import checked_info, described
from .config import Arguments

RANGES = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")
"""Parts with static ranges of activations, which products of a weight that is read do not use."""
Loader: TypeAlias = Callable[[Mapping[str, np.ndarray]], QArray]


@dataclasses.dataclass(frozen=True)
class Module:
    """The stored arrays of one module.

    Attributes:
        name: its name; a part is called `name.part`.
        tensors: all stored arrays.
        arguments: the `weights` of its config group.
        dtype: the dtype of the model's values.
        version: the version of compressed-tensors that wrote the directory, empty if unknown.
        where: the path, for messages.
    """

    name: str
    tensors: Tensors
    arguments: Arguments
    dtype: np.dtype
    version: str
    where: str

    def path(self, part: str) -> str:
        """The name of a part in the file."""
        return f"{self.name}.{part}".removeprefix(".")

    def has(self, part: str) -> bool:
        """Whether a part is stored."""
        return self.path(part) in self.tensors.info

    def info(self, part: str, *dtypes: str, ndim: int | None = None) -> TensorInfo:
        """The description of a part. QuantError if it is missing, or has another dtype or number of axes."""
        return checked_info(self.tensors, self.path(part), self.where, dtypes, ndim)

    def read(self, part: str) -> np.ndarray:
        """A part, read now; for small ones."""
        value = self.tensors[self.path(part)]
        assert not isinstance(value, QArray)
        return np.asarray(value)

    def fault(self, text: str) -> QuantError:
        """The error of arrays that do not fit together."""
        return QuantError(f"{self.where}: module {self.name!r} {text}")

    def group(
        self, parts: tuple[str, ...], shape: tuple[int, int], dtype: np.dtype, stored: str, scheme: Scheme, load: Loader
    ) -> Group:
        """The group of a weight; `load` builds it from its arrays by part."""
        paths = {self.path(part): part for part in (*parts, *(part for part in RANGES if self.has(part)))}
        info = described(self.tensors, tuple(paths), shape, dtype, stored, scheme)
        return Group(info, tuple(paths), lambda arrays: load({paths[path]: array for path, array in arrays.items()}))


class AbstractLayout(abc.ABC):
    """One format of compressed-tensors."""

    name: str
    """Its name in `config.json`."""

    @abc.abstractmethod
    def fits(self, weight: Weight) -> bool:
        """Whether it is the format for the weight's numbers, scales and activations."""

    @abc.abstractmethod
    def why_not(self, weight: Weight) -> str | None:
        """Why a weight that `fits` cannot be stored exactly."""

    @abc.abstractmethod
    def arguments(self, weight: Weight) -> dict[str, Any]:
        """The `weights` of its config group."""

    @abc.abstractmethod
    def encoded(self, q: QArray) -> dict[str, np.ndarray]:
        """The arrays by the last part of their names."""

    @abc.abstractmethod
    def group(self, module: Module) -> Group:
        """The weight of a module in this format."""
