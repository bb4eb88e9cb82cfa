"""What a container of quantized weights must provide."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ...array.qarray import QArray
from ...array.scheme import Scheme, scheme
from ...array.validity import misfit
from ...errors import QuantError, UnsupportedError
from ...recipe.role import Role
from ..checkpoint import Tensor, TensorInfo, Tensors


@dataclasses.dataclass(frozen=True)
class Weight:
    """A quantized weight to be written, before it is computed.

    Attributes:
        name: its name in a float checkpoint, such as "model.layers.0.mlp.up_proj.weight".
        shape: its shape.
        dtype: the name of the dtype of its dequantized values.
        scheme: its scheme, with tiles along the contraction axis.
        activations: the scheme of the other operand of its products; None: it is not quantized.
        role: what it does in the model.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    scheme: Scheme
    activations: Scheme | None = None
    role: Role = Role.MATMUL

    @property
    def module(self) -> str:
        """The name without its last part: the module that owns the weight."""
        return self.name.rpartition(".")[0]


@dataclasses.dataclass(frozen=True)
class Files:
    """What a container adds to a Hugging Face directory, other than tensors.

    Attributes:
        config: keys added to `config.json`.
        small: further small files, by name.
        metadata: the `__metadata__` of each safetensors file.
    """

    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    small: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"format": "pt"})


SERVERS_FUSE = (
    *(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3")),
    *(("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")),
)
"""What vLLM, SGLang and TensorRT-LLM multiply at once; they take one NVFP4 tensor scale for each of these."""


class AbstractContainer(abc.ABC):
    """A layout of quantized weights in a Hugging Face directory.

    A weight is stored exactly, so that it dequantizes to the same numbers, or it is refused.
    """

    name: ClassVar[str]
    """The name for `--to`."""
    schemes: ClassVar[tuple[str, ...]]
    """Schemes that it stores, by name, as examples in messages and tables."""
    config_keys: ClassVar[tuple[str, ...]] = ("quantization_config",)
    """The keys of `config.json` that describe the quantized weights."""
    roles: ClassVar[tuple[Role, ...]] = (Role.MATMUL, Role.EXPERTS)
    """The roles of weights that the other program expects quantized."""
    activations: ClassVar[str | None] = None
    """The scheme of the activations that all its products quantize, by name; None: a weight may have float activations."""
    fused: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """The modules of one parent that its readers multiply at once, with one tensor scale; see `SERVERS_FUSE`."""

    @abc.abstractmethod
    def why_not(self, weight: Weight) -> str | None:
        """Why the container cannot store a weight exactly; None if it can. Reads nothing but shapes and schemes."""

    def representable(self, q: QArray) -> QArray:
        """A weight that was just quantized, with scales of the layout.

        These are scales that the layout can express. By default it is the weight itself.
        """
        return q

    @abc.abstractmethod
    def encoded(self, weight: Weight, q: QArray) -> dict[str, np.ndarray]:
        """The arrays that store one weight, by their names in the files."""

    @abc.abstractmethod
    def files(self, weights: Sequence[Weight], kept: Sequence[str], config: Mapping[str, Any]) -> Files:
        """The configuration of a directory.

        Args:
            weights: the quantized weights; each passed `why_not`.
            kept: the names of the tensors that are not quantized.
            config: the model's own `config.json`.

        Raises:
            UnsupportedError: when the weights cannot be in one directory, such as different schemes where it has one.
        """

    @abc.abstractmethod
    def recognises(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        """Whether a directory with this `config.json` and these tensors is in this layout."""

    @abc.abstractmethod
    def decoded(self, config: Mapping[str, Any], tensors: Tensors, where: str) -> Tensors:
        """The tensors with quantized weights as QArrays, under the names of a float checkpoint.

        Args:
            config: the `config.json`.
            tensors: the stored arrays; they are read one weight at a time, when it is indexed.
            where: the path, for messages.

        Raises:
            QuantError: when a tensor of a weight is missing, or has a wrong shape or dtype.
            UnsupportedError: for a variant of the layout that has no scheme.
        """

    def refusal(self, weight: Weight) -> str | None:
        """Why a weight cannot be stored, by its role or its scheme. None if it can."""
        if weight.role not in self.roles:
            return f"weights of role {weight.role} are not quantized in it"
        return self.why_not(weight)

    def check(self, weights: Sequence[Weight]) -> None:
        """Refuses weights that the container cannot store exactly.

        The message names the nearest schemes that fit. A container for quantized weights also refuses an empty list.
        """
        if self.schemes and not weights:
            raise UnsupportedError(f"no weight is quantized, and {self.name} is for quantized models; hf stores float ones")
        reasons: dict[str, list[Weight]] = {}
        for weight in weights:
            if reason := self.refusal(weight):
                reasons.setdefault(reason, []).append(weight)
        if not reasons:
            return
        listed = "; ".join(f"{reason} ({_some_names(refused)})" for reason, refused in reasons.items())
        advice = self._advice(next(iter(reasons.values()))[0])
        raise UnsupportedError(f"{self.name} cannot store this exactly: {listed}. {advice}")

    def _advice(self, weight: Weight) -> str:
        """A sentence with the schemes nearest in size that fit a refused weight."""
        bits, said = weight.scheme.format.bits, "Schemes that fit"
        if self.activations is not None:
            said, weight = f"{said}, with {self.activations} activations", _with_activations(weight, self.activations)
        fitting = [name for name in self.schemes if self.refusal(_in_scheme(weight, name)) is None]
        if not fitting and weight.activations is not None:
            said, weight = "Schemes that fit, with float activations", dataclasses.replace(weight, activations=None)
            fitting = [name for name in self.schemes if self.refusal(_in_scheme(weight, name)) is None]
        if not fitting:
            return f"No scheme of {self.name} fits a tensor of shape {weight.shape}: keep it in float"
        fitting.sort(key=lambda name: abs(_in_scheme(weight, name).scheme.format.bits - bits))
        return f"{said}: {', '.join(fitting[:6])}"


def _in_scheme(weight: Weight, name: str) -> Weight:
    """The weight in a named scheme, along the same axis."""
    axis = weight.scheme.pack_axis
    return dataclasses.replace(weight, scheme=scheme(name).along(axis, len(weight.shape)))


def _with_activations(weight: Weight, name: str) -> Weight:
    """The weight with the other operand in a named scheme."""
    return dataclasses.replace(weight, activations=scheme(name))


def _some_names(weights: Sequence[Weight]) -> str:
    if len(weights) == 1:
        return weights[0].name
    return f"{weights[0].name} and {len(weights) - 1} more"


@dataclasses.dataclass(frozen=True)
class Group:
    """The stored arrays of one weight.

    Attributes:
        info: the description of the QArray; without a scheme if no QArray has the same values, and `load` decodes to float.
            `stored` then says why, such as "GPTQ with act-order", for `notes_on_floats`.
        parts: the names of its stored arrays.
        load: builds the QArray or the float array from the stored arrays, which it reads by name.
    """

    info: TensorInfo
    parts: tuple[str, ...]
    load: Callable[[Mapping[str, np.ndarray]], np.ndarray | QArray]


def grouped(tensors: Tensors, groups: Mapping[str, Group], where: str) -> Tensors:
    """Tensors in which each group of stored arrays is one QArray.

    Args:
        tensors: the stored arrays.
        groups: each quantized weight by its name; each is at the place of its first part.
        where: the path, for messages.

    Returns:
        A mapping that reads a weight's arrays when it is indexed, and refuses a QArray whose parts do not fit.

    Raises:
        QuantError: when a part is missing, used twice, or the name of a weight is taken.
    """
    owners: dict[str, str] = {}
    for name, group in groups.items():
        for part in group.parts:
            if part not in tensors.info:
                raise QuantError(f"{where}: tensor {part!r} of the weight {name!r} is missing")
            if part in owners:
                raise QuantError(f"{where}: tensor {part!r} belongs to both {owners[part]!r} and {name!r}")
            owners[part] = name
    for name in groups:
        if name in tensors.info and name not in owners:
            raise QuantError(f"{where}: {name!r} is both a tensor and the name of a quantized weight")
    names = dict.fromkeys(owners.get(name, name) for name in tensors.info)
    info = {name: groups[name].info if name in groups else tensors.info[name] for name in names}
    return Tensors(info, functools.partial(_loaded, tensors, groups, where))


def _loaded(tensors: Tensors, groups: Mapping[str, Group], where: str, name: str) -> np.ndarray | QArray:
    """One tensor: a QArray of its group, or the stored array."""
    if name not in groups:
        return tensors[name]
    group = groups[name]
    value = group.load({part: plain_array(tensors[part]) for part in group.parts})
    if isinstance(value, QArray) and (reason := misfit(value)):
        raise QuantError(f"{where}: the tensors of {name!r} do not fit together: {reason}")
    return value


def notes_on_floats(stored: Tensors, decoded: Tensors) -> tuple[str, ...]:
    """A sentence for each reason why `AbstractContainer.decoded` gives some quantized weights as float arrays."""
    reasons: dict[str, list[str]] = {}
    for name, info in decoded.info.items():
        if info.scheme is None and stored.info.get(name) != info:
            reasons.setdefault(info.stored, []).append(name)
    return tuple(f"{len(names)} weights are decoded to float, {why}: {', '.join(names)}" for why, names in reasons.items())


def plain_array(value: Tensor) -> np.ndarray:
    """A stored array on the host; a QArray cannot be a part of another."""
    assert not isinstance(value, QArray)
    return np.asarray(value)


def why_not_matrix(weight: Weight) -> str | None:
    """Why a weight is not a module's matrix, packed along the last axis. Such a matrix is `[out, in]`. None for one."""
    if not weight.name.endswith(".weight"):
        return "it stores weights of modules, whose names end in .weight"
    if len(weight.shape) != 2:
        return f"it stores matrices, and the weight has {len(weight.shape)} axes"
    if weight.scheme.pack_axis != -1:
        return f"codes are packed along the last axis there, and along axis {weight.scheme.pack_axis} here"
    return None
