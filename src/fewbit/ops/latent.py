"""Float arrays that carry a policy: what a parameter is while it is trained."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..array import QArray
from ..array.sharding import spec_entries
from ..errors import UnsupportedError
from .policy import Policy
from .served import Served
from .standin import StandIn
from .stepped import StepScales, copies, forked

PARAMETER_RULES: dict[str, Any] = {}
"""For primitives by name, how an equation with a Latent is computed; `fewbit.ops.rules.parameters` fills it at import."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Latent(StandIn):
    """A floating array whose products follow a policy: quantized on the way in, with the policy's gradients.

    Everywhere else it is the array. `fb.train` makes one of each parameter that a rule matches.

    Attributes:
        value: the array.
        key: a JAX random key for arms that draw random numbers; None where there is none.
        policy: how its products are computed.
        scales: those that earlier steps decided, for a policy with delayed scaling; None for every other.
        held: the array quantized, where code took away elements that share scales with those that are left; None elsewhere.
        served: the tiles that it has where it is served; None: those that each product asks for.
    """

    rules: ClassVar[Mapping[str, Any]] = PARAMETER_RULES

    value: Any
    key: Any
    policy: Policy = dataclasses.field(metadata={"static": True})
    scales: Any = None
    held: Any = None
    served: Served | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def dtype(self) -> np.dtype:
        return self.value.dtype

    @property
    def ndim(self) -> int:
        """How many axes the array has."""
        return self.value.ndim

    def __repr__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)} trained as {self.policy}"

    def array(self) -> jax.Array:
        return self.value

    def stacked(self) -> "Latent":
        from .rules.control import stacked  # it needs this class

        length = self.shape[0]
        key = None if self.key is None else jax.random.split(self.key, length)
        scales = copies(self.scales, length) if self.scales is not None and not self.scales.ndim else self.scales
        held = None if self.held is None else stacked(self.held)
        return dataclasses.replace(self, key=key, scales=scales, held=held)

    def forked(self) -> tuple["Latent", "Latent"]:
        if self.scales is None:
            return self, self
        one, other = forked(self.scales)
        return dataclasses.replace(self, scales=one), dataclasses.replace(self, scales=other)

    def turns(self, length: int) -> Any:
        return () if self.scales is None else copies(self.scales, length)

    def in_turn(self, own: Any) -> "Latent":
        return self if self.scales is None else dataclasses.replace(self, scales=own)

    def shards(self, spec: PartitionSpec, mesh: Mapping[str, int]) -> tuple["Latent", "Latent"]:
        along = [] if self.scales is None or not self.scales.ndim else spec_entries(spec, self.ndim)[: self.scales.ndim]
        used = [name for entry in along for name in (entry if isinstance(entry, tuple) else (entry,))]
        others = tuple(name for name in mesh if name not in used)
        key = None if self.key is None else jnp.broadcast_to(self.key, (math.prod(mesh.values()),))
        scales = None if self.scales is None else copies(self.scales, math.prod(mesh[name] for name in others))
        if self.held is not None:
            reason = "it shares scales with elements that were sliced away before; slice it inside"
            raise UnsupportedError("a part of a trained parameter cannot be cut by shard_map", {repr(self): reason})
        specs = Latent(
            spec, PartitionSpec(tuple(mesh)), self.policy, PartitionSpec(others or None, *along), None, self.served
        )
        return dataclasses.replace(self, key=key, scales=scales), specs

    def on_device(self) -> "Latent":
        key, scales = jax.tree.map(lambda leaf: leaf[0], (self.key, self.scales))
        return dataclasses.replace(self, key=key, scales=scales)

    def moved(self, value: Any, scales: StepScales | None, served: Served | None) -> "Latent":
        """The same parameter after its array, and its scales with it, was moved about: transposed, cast, sliced."""
        return dataclasses.replace(self, value=value, scales=scales, served=served)

    def quantized(self, axis: tuple[int, ...] | None = None) -> QArray | None:
        """The array as it is served, for a product that contracts `axis`; None where nothing but the product says how."""
        if self.held is not None or self.served is None:
            return self.held
        value = jax.lax.stop_gradient(self.value)
        return self.served.on_last(self.ndim).quantized(value, self.policy.weight, axis)


def is_latent(x: Any) -> TypeGuard[Latent]:
    """Whether a value is a Latent."""
    return isinstance(x, Latent)


def plain(x: Any) -> Any:
    """The array of a Latent; anything else as it is."""
    return x.value if is_latent(x) else x
