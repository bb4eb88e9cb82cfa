"""MaxText's `quant` object: what its layers ask for their products, so that MaxText trains, converts and serves by a Policy.

MaxText hands one object to every layer, asks it for a module that computes `dot_general` and for a callable that computes
`einsum`, and calls them. Nothing of MaxText is imported here; `configure_quantization` returns `Quantization(...)` instead
of its own.
"""

import dataclasses
import enum
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ..array import QArray
from ..errors import QuantError, UnsupportedError
from ..kernels.quantize import quantize
from ..ops import Policy, dot_general, einsum
from ..ops.latent import Latent
from ..ops.stepped import StepScales
from ..training.delayed_state import ProductScales
from ._flax import flax

Mode = Literal["train", "convert", "serve"]
"""What a MaxText run does with its weights."""
_MODES = ("train", "convert", "serve")

OVERWRITTEN = "_overwrite_with_gradient"
"""The collection, by Flax's name for it, of variables whose gradient is their next value."""


@dataclasses.dataclass(frozen=True)
class Quantization:
    """The `quant` of MaxText's layers, for one Policy.

    Under a policy with delayed scaling each module keeps the histories of its product in the collection `OVERWRITTEN`, as Flax's
    fp8 modules do: the gradient of these variables is what they are in the next step. MaxText's train step, and Flax's
    TrainState, put it there. As in Flax, layers that a scan stacks must have the collection stacked, too.

    Attributes:
        policy: how products are computed.
        quant_mode: "train" quantizes on the way in; "convert" does, and stores each weight's QArray in `collection`; "serve"
            computes from what is stored there, whatever the parameter holds. Or the member of AQT's QuantMode with that name:
            MaxText's layers compare with its SERVE, and hold no float weights then.
        collection: the variable collection of stored weights; MaxText's layers make "aqt" mutable.
        rng: the name of the RNG stream that stochastic rounding draws from.

    >>> Quantization(Policy("int8", "int8")).get_block_size()
    1
    """

    policy: Policy
    quant_mode: Mode | enum.Enum = "train"
    collection: str = "aqt"
    rng: str = "params"

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise QuantError(f"quant_mode is {self.quant_mode!r}; must be one of {', '.join(_MODES)}")
        if self.policy.delayed is not None and self.mode != "train":
            reason = "its activations' scales belong to a training step; serve a policy without it, such as maxtext/serve_fp8_weight"
            raise UnsupportedError(f"delayed scaling cannot {self.mode}", {str(self.policy): reason})

    @property
    def mode(self) -> str:
        """The name of `quant_mode`: train, convert or serve."""
        return self.quant_mode.name.lower() if isinstance(self.quant_mode, enum.Enum) else self.quant_mode

    @property
    def needs_apply_rngs(self) -> bool:
        """Whether products draw random numbers; if not, MaxText's layers keep no RNG state for them."""
        return self.mode == "train" and self.policy.needs_key

    def dot_general_cls(self, mesh_axes: Any = ()) -> Any:
        """What makes the module that a layer calls as `dot_general`; sharding needs no axes here.

        Raises:
            UnsupportedError: when flax is not installed.
        """
        return functools.partial(_modules()[0], self)

    def einsum(self, mesh_axes: Any = (), dtype: Any = None) -> Any:
        """A module that a layer calls as `einsum(equation, lhs, rhs)`, with operands cast to `dtype` first unless it is None.

        Raises:
            UnsupportedError: when flax is not installed.
        """
        return _modules()[1](self, dtype)

    def get_block_size(self) -> int:
        """By what the batch of the shapes at initialization must be divisible: any will do."""
        return 1


@functools.cache
def _modules() -> tuple[Any, Any]:
    """The two Linen modules; classes of Flax's can be made only where it is installed."""
    nn = flax("linen")

    class DotGeneral(nn.Module):
        """`dot_general` as a module, called with `(lhs, rhs, dimension_numbers, precision=None)`."""

        quant: Quantization

        @nn.compact
        def __call__(
            self, lhs: Any, rhs: Any, dimension_numbers: Any, precision: Any = None, preferred_element_type: Any = None
        ) -> jax.Array:
            weight = _weight(self, rhs, tuple(sorted(dimension_numbers[0][1])))  # in the order of the product itself
            return dot_general(lhs, weight, dimension_numbers, precision, preferred_element_type)

    class Einsum(nn.Module):
        """`einsum` of two operands as a module, called with `(equation, lhs, rhs)`; the right one is the weight."""

        quant: Quantization
        dtype: Any = None

        @nn.compact
        def __call__(self, equation: str, lhs: Any, rhs: Any) -> jax.Array:
            if self.dtype is not None:
                lhs, rhs = jnp.asarray(lhs, self.dtype), jnp.asarray(rhs, self.dtype)
            return einsum(equation, lhs, _weight(self, rhs, _contracted(equation, rhs.ndim)))

    return DotGeneral, Einsum


def _weight(module: Any, rhs: Any, axes: tuple[int, ...]) -> Any:
    """The right operand of a module's product: a parameter in training, or the QArray that is stored for it."""
    quant = module.quant
    if quant.mode == "train":
        has_key = quant.policy.needs_key and module.has_rng(quant.rng)
        scales = None if quant.policy.delayed is None else _carried_scales(module)
        return Latent(jnp.asarray(rhs), module.make_rng(quant.rng) if has_key else None, quant.policy, scales)

    def stored() -> QArray:
        return dataclasses.replace(quantize(rhs, quant.policy.weight, axis=axes), policy=quant.policy)

    held = module.variable(quant.collection, "weight", stored)
    if quant.mode == "convert":
        held.value = stored()
    return held.value


def _carried_scales(module: Any) -> StepScales:
    """The scales of this step, from the variables that the last one left."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(ProductScales.init(module.quant.policy))
    names = ["_".join(key.name for key in path) for path, _ in leaves]
    held = [module.variable(OVERWRITTEN, name, lambda x=x: x).value for name, (_, x) in zip(names, leaves, strict=True)]
    return _overwriting(jax.tree.unflatten(treedef, held))


@jax.custom_vjp
def _overwriting(state: ProductScales) -> StepScales:
    """The scales of a state, whose gradient is the state of the next step."""
    return state.scales


def _next_state(state: ProductScales, seen: StepScales) -> tuple[ProductScales]:
    """The state after a step that saw these magnitudes."""
    pairs = ((state.weight, seen.weight), (state.activation, seen.activation), (state.gradient, seen.gradient))
    return (ProductScales(*(None if held is None else held.advance(amax) for held, amax in pairs)),)  # type: ignore[arg-type]


_overwriting.defvjp(lambda state: (state.scales, state), _next_state)


def _contracted(equation: str, ndim: int) -> tuple[int, ...]:
    """The axes of the right operand that an equation sums over."""
    operands, arrow, result = equation.replace(" ", "").partition("->")
    _, comma, right = operands.partition(",")
    if not arrow or not comma or len(right) != ndim or "." in equation:
        raise QuantError(f"equation {equation!r} must name both operands and the result, as in 'btd,df->btf'")
    return tuple(axis for axis, letter in enumerate(right) if letter not in result) or (ndim - 1,)
