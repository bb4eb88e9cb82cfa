"""Latent: a float weight that carries a Policy."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from ...array.axis_move import LAYOUT_PRIMITIVES
from ...array.scheme import Scheme
from ...array.sharding import axis_names, spec_entries
from ...kernels.quantize.dispatch import dequantize
from ..interpret.proxy import ArrayProxy
from ..policy import Policy
from .delayed_scales import copies, forked
from .serving_tiles import ServingTiles

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
"""The primitives that multiply a parameter."""
MOVES = (*LAYOUT_PRIMITIVES, "optimization_barrier")
"""The layout primitives, whose result is still the parameter."""
PARAMETER_RULES: dict[str, Any] = {}
"""The rule of each primitive with a Latent operand, by name; `fewbit.ops.qat.rules` fills it at import."""


@dataclasses.dataclass(frozen=True, eq=False)
class Label:
    """A parameter's path, for messages.

    All labels of one model are equal, so that its layers of equal shapes share compiled functions. An error of a gradient names
    the first of them.

    Attributes:
        path: the path; or the name of a product without a parameter.
        model: the paths and names of all labels of the model.
    """

    path: str = ""
    model: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Label) and self.model == other.model

    def __hash__(self) -> int:
        return hash(self.model)

    def __str__(self) -> str:
        return self.path


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Latent(ArrayProxy):
    """A float array whose products follow a policy. Everywhere else it is the array.

    Its products quantize it and have the policy's gradients. `fb.train` wraps each parameter that a rule matches.

    Attributes:
        value: the array.
        key: a JAX random key for gradients that draw random numbers; or None.
        policy: how its products are computed.
        scales: the scales from earlier steps, for a policy with delayed scaling; else None.
        prequantized: the quantized array, once slicing or sharding removed elements that share scales with the remaining ones;
            else None.
        served: its tiles at serving time; None: those that each product asks for.
        label: the parameter's path; empty where it has none.
        reduction: the scheme in which devices exchange its gradient after `all_gather`; None: as it is.
    """

    rules: ClassVar[Mapping[str, Any]] = PARAMETER_RULES

    value: Any
    key: Any
    policy: Policy = dataclasses.field(metadata={"static": True})
    scales: Any = None
    prequantized: Any = None
    served: ServingTiles | None = dataclasses.field(default=None, metadata={"static": True})
    label: Label = dataclasses.field(default=Label(), metadata={"static": True})
    reduction: Scheme | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def dtype(self) -> np.dtype:
        return self.value.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.value.ndim

    def __repr__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)} trained as {self.policy}"

    def array(self) -> jax.Array:
        return self.value

    def stacked(self) -> "Latent":
        from ..interpret.rules.control_flow import stacked  # it needs this class

        length, changes = self.shape[0], {}
        if self.key is not None:
            changes["key"] = jax.random.split(self.key, length)
        if self.scales is not None and not self.scales.ndim:
            changes["scales"] = copies(self.scales, length)
        if self.prequantized is not None:
            changes["prequantized"] = stacked(self.prequantized)
        return dataclasses.replace(self, **changes)

    def forked(self) -> tuple["Latent", "Latent"]:
        if self.scales is None:
            return self, self
        one, other = forked(self.scales)
        return dataclasses.replace(self, scales=one), dataclasses.replace(self, scales=other)

    def saved(self) -> jax.Array:
        from .serving_quantize import quantized_latent  # it needs this class

        # A product under the policy would quantize a gradient as an activation, in its static range, and has no transpose.
        q = quantized_latent(self)
        return self.value if q is None else dequantize(q)

    def turns(self, length: int) -> PyTree:
        return () if self.scales is None else copies(self.scales, length)

    def in_turn(self, own: PyTree) -> "Latent":
        return self if self.scales is None else dataclasses.replace(self, scales=own)

    def shards(self, spec: PartitionSpec, mesh: Mapping[str, int]) -> tuple["Latent", "Latent"]:
        from .serving_quantize import cut_latent  # it needs this class

        key, scales, along = self.key, self.scales, ()
        if scales is not None and scales.ndim:
            along = spec_entries(spec, self.ndim)[: scales.ndim]
        used = [name for entry in along for name in axis_names(entry)]
        others = tuple(name for name in mesh if name not in used)
        if key is not None:
            key = jnp.broadcast_to(key, (math.prod(mesh.values()), *key.shape))
        if scales is not None:
            scales = copies(scales, math.prod(mesh[name] for name in others))
        specs = Latent(
            spec,
            PartitionSpec(tuple(mesh) or None),
            self.policy,
            PartitionSpec(others or None, *along),
            spec,
            self.served,
            label=self.label,
            reduction=self.reduction,
        )
        return dataclasses.replace(self, key=key, scales=scales, prequantized=cut_latent(self, spec, mesh)), specs

    def on_device(self) -> "Latent":
        key, scales = jax.tree.map(lambda leaf: leaf[0], (self.key, self.scales))
        return dataclasses.replace(self, key=key, scales=scales)


def is_latent(x: object) -> TypeGuard[Latent]:
    """Whether a value is a Latent."""
    return isinstance(x, Latent)


def plain(x: PyTree) -> PyTree:
    """The array of a Latent; anything else as it is."""
    return x.value if is_latent(x) else x
