"""The `quant` object of MaxText's layers: Linen modules that compute each product by a Policy or by a Recipe's rules.

Names are those that MaxText's own functions look for: a module `AqtDotGeneral_0` next to `kernel`, and the stored weight in it at
`qrhs/frozen`. So `LayerwiseQuantization` drops the float kernels next to ours, and `from_pretrained` reads what it wrote.

Inside Flax Linen a module knows its own path, and a Recipe's rules match it. MaxText's NNX layers call the modules outside of any
tree: there `maybe_quantize_model` of `maxtext.py` sets each module's `site` once the model is built. Until then a module
only makes a placeholder, which records the shape of its weight and the axes that its product contracts.
"""

import dataclasses
import enum
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..array import Scheme, is_qarray
from ..errors import QuantError, UnsupportedError
from ..kernels.quantize import quantize
from ..ops import Policy, dot_general, einsum
from ..ops.latent import Latent
from ..ops.stepped import StepScales
from ..recipe import Recipe, Rule
from ..recipe import recipe as as_recipe
from ..recipe.sparsity import Sparsity, SparsityState
from ..training.delayed_state import ProductScales
from ._flax import flax

OVERWRITTEN = "_overwrite_with_gradient"
"""The collection, by Flax's name for it, of variables whose gradient is their next value."""

PLACEHOLDER = "unbound_"
"""What the name of a placeholder begins with; the number of the weight's axes and those that the product contracts follow."""

CALLED = PLACEHOLDER + "called"
"""The variable that says that MaxText has called a module that it builds."""

_GROUPED = {"int8": "int8", "int8_narrow": "int8", "int4": "int4", "int4_narrow": "int4"}
_GROUPED |= {"e4m3fn": "float8_e4m3fn", "e5m2": "float8_e5m2", "e4m3fnuz": "float8_e4m3fnuz", "e5m2fnuz": "float8_e5m2fnuz"}
"""The dtypes of MaxText's grouped matmul, by format."""


class QuantMode(enum.Enum):
    """What a MaxText run does with its weights; equal to the member of AQT's QuantMode with that name.

    MaxText compares `quant.quant_mode` with AQT's members, and assigns them.

    >>> QuantMode("serve")
    <QuantMode.SERVE: 'serve'>
    """

    TRAIN = "train"
    CONVERT = "convert"
    SERVE = "serve"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, enum.Enum) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)  # as an Enum's own


@dataclasses.dataclass(init=False, unsafe_hash=True)
class Quantization:
    """The `quant` of MaxText's layers.

    Under a policy with delayed scaling each module keeps the histories of its product in the collection `OVERWRITTEN`, as Flax's
    fp8 modules do: the gradient of these variables is what they are in the next step. MaxText's train step, and Flax's
    TrainState, put it there. As in Flax, layers that a scan stacks must have the collection stacked, too.

    Under a rule with sparsity each module keeps its mask and the number of its training steps in `collection`, which the
    train step must carry from step to step, as MaxText's does.

    Attributes:
        recipe: a Recipe, or anything that `fb.recipe` takes, whose rules match the path of each layer's kernel; or a Policy for
            every product that the object is asked for.
        quant_mode: "train" quantizes on the way in; "convert" does, and stores each weight in `collection`; "serve" computes from
            what is stored there, whatever the parameter holds. Or a member of AQT's QuantMode. This field alone can be
            assigned, as MaxText does.
        collection: the variable collection of stored weights; MaxText's layers make "aqt" mutable.
        rng: the name of the RNG stream that stochastic rounding draws from.
        shards: in how many parts the contraction of the weight's gradient is cut, each with scales of its own: MaxText's
            `quantization_local_shard_count`. Parts of the first axis of the activation (AQT: the batch) or of the last one
            before its features (Qwix: the sequence), as the arm's `tiled_axis` says.
        site: the path of the experts that this copy of the object serves; `maybe_quantize_model` sets it.

    Raises:
        QuantError: for an unknown mode, and for a recipe that `fb.recipe` refuses.
        UnsupportedError: for delayed scaling in another mode than "train".

    >>> quant = Quantization(Policy("int8", "int8"))
    >>> quant.quant_mode = "serve"
    >>> quant.quant_mode, quant.get_block_size()
    (<QuantMode.SERVE: 'serve'>, 1)
    """

    recipe: Recipe
    quant_mode: QuantMode
    collection: str
    rng: str
    shards: int
    site: str | None

    def __init__(
        self,
        recipe: Any,
        quant_mode: str | enum.Enum = "train",
        collection: str = "aqt",
        rng: str = "params",
        shards: int = 1,
        site: str | None = None,
    ):
        made = Recipe((Rule(".*", recipe),), "policy") if isinstance(recipe, Policy) else as_recipe(recipe)
        if shards < 1:
            raise QuantError(f"shards is {shards}; must be at least 1")
        fields = {"recipe": made, "collection": collection, "rng": rng, "shards": shards, "site": site}
        self.__dict__.update(fields)
        self.quant_mode = _mode(quant_mode)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "quant_mode":
            raise dataclasses.FrozenInstanceError(f"cannot assign to {name!r}; quant_mode alone can change")
        mode = _mode(value)
        if mode != QuantMode.TRAIN and (delayed := [rule for rule in self.rules if _delayed(rule) is not None]):
            reason = (
                "its activations' scales belong to a training step; serve a policy without it, such as te_fp8_currentscaling"
            )
            raise UnsupportedError(f"delayed scaling cannot {mode.value}", {str(rule): reason for rule in delayed})
        self.__dict__["quant_mode"] = mode

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The recipe's rules for products."""
        return tuple(rule for rule in self.recipe.rules if not rule.ops or "dot_general" in rule.ops)

    @property
    def needs_path(self) -> bool:
        """Whether the path of a layer decides how it computes."""
        return bool(self.rules) and self.rules[0].path != ".*"

    @property
    def needs_apply_rngs(self) -> bool:
        """Whether products draw random numbers; if not, MaxText's layers keep no RNG state for them."""
        draws = any(rule.policy is not None and rule.policy.needs_key for rule in self.rules)
        return self.quant_mode == QuantMode.TRAIN and draws

    def rule(self, path: str | None) -> Rule | None:
        """The rule that a layer follows; None where no rule matches it.

        Args:
            path: the path of its kernel, `decoder/layers/mlp/wi_0/kernel`; None where it is not known.

        Returns:
            The first rule that matches.

        Raises:
            QuantError: where the rules need a path and there is none.
            UnsupportedError: where the rule asks for tiles along an axis of its own.
        """
        if self.needs_path and path is None:
            raise QuantError(
                f"recipe {self.recipe.name!r} has rules by layer, and this layer's path is not known; besides configure_quantization, "
                "assign maxtext.layers.quantizations.maybe_quantize_model = fewbit.frameworks.maxtext.maybe_quantize_model (before MaxText "
                "0.2.5 that needs pure_nnx=true)"
            )
        rule = next((rule for rule in self.recipe.rules if rule.matches(path or "", ("dot_general",))), None)
        if rule is not None and rule.axis is not None:
            raise UnsupportedError(
                f"{path}: rule {rule} has an axis", {"MaxText": "tiles run along what the product contracts; leave axis out"}
            )
        return rule

    def dot_general_cls(self, mesh_axes: Any = ()) -> Any:
        """What makes the module that a layer calls as `dot_general`; sharding needs no axes here.

        Raises:
            UnsupportedError: when flax is not installed.
        """
        return functools.partial(modules()[0], self)

    def einsum(self, mesh_axes: Any = (), dtype: Any = None) -> Any:
        """A module that a layer calls as `einsum(equation, lhs, rhs)`, with operands cast to `dtype` first unless it is None.

        Outside of a Flax module it computes as well, where the mode is "train" and its policy keeps no state.

        Raises:
            UnsupportedError: when flax is not installed.
        """
        return modules()[1](self, dtype, self.site)

    def get_block_size(self) -> int:
        """By what the batch of the shapes at initialization must be divisible: any will do."""
        return 1

    @property
    def quant_dg(self) -> Any:
        """What MaxText's grouped matmul reads: the dtypes of its operands, at `fwd.dg_quantizer.lhs.numerics.get_dtype()`.

        MaxText computes that product itself, with one scale a row and an output channel, and float gradients.

        Raises:
            QuantError: where the rules need a path and there is none.
            UnsupportedError: for schemes that this product cannot follow.
        """
        rule = self.rule(self.site)
        policy = None if rule is None else rule.policy
        reasons: dict[str, str] = {}
        if rule is not None and rule.sparsity is not None:
            reasons["sparsity"] = f"{rule.sparsity} is not applied in it"
        schemes = {"lhs": None, "rhs": None} if policy is None else {"lhs": policy.activation, "rhs": policy.weight}
        for side, scheme in schemes.items():
            if scheme is not None and not _fits_grouped(scheme):
                reasons[side] = f"{scheme.name} is not an 8- or 4-bit format with one scale a row or an output channel"
        if reasons:
            raise UnsupportedError("MaxText's grouped matmul cannot follow this rule; set sparse_matmul=false", reasons)
        numerics = {side: types.SimpleNamespace(get_dtype=functools.partial(_dtype, s)) for side, s in schemes.items()}
        sides = {side: types.SimpleNamespace(numerics=each) for side, each in numerics.items()}
        return types.SimpleNamespace(fwd=types.SimpleNamespace(dg_quantizer=types.SimpleNamespace(**sides)))


def _mode(value: str | enum.Enum) -> QuantMode:
    """The mode of a name or of a member of any enumeration of modes."""
    name = value.name.lower() if isinstance(value, enum.Enum) else value
    try:
        return QuantMode(name)
    except ValueError:
        known = ", ".join(mode.value for mode in QuantMode)
        raise QuantError(f"quant_mode is {value!r}; must be one of {known}") from None


def _delayed(rule: Rule) -> Any:
    return None if rule.policy is None else rule.policy.delayed


def _keeps_state(rule: Rule | None) -> bool:
    """Whether training by a rule keeps variables from step to step."""
    return rule is not None and (_delayed(rule) is not None or rule.sparsity is not None)


def _fits_grouped(scheme: Scheme) -> bool:
    """Whether MaxText's grouped matmul has numbers of this format, and scales of this kind."""
    whole = {a: n for a, n in scheme.tile.items() if a is not ... and n is None}
    per_row = scheme.tile.get(...) == 1 and set(whole) == {-1} == set(scheme.tile) - {...}
    return scheme.format.name in _GROUPED and scheme.zero_point is None and (per_row or not scheme.tile)


def _dtype(scheme: Scheme | None) -> Any:
    return None if scheme is None else jnp.dtype(_GROUPED[scheme.format.name])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StoredWeight:
    """A stored weight as a value without a shape: MaxText's tools take what has one for a single array.

    Attributes:
        weight: a QArray, or a float array where no rule quantizes it.
    """

    weight: Any


@functools.cache
def modules() -> tuple[Any, Any]:
    """The two Linen modules; classes of Flax's can be made only where it is installed."""
    nn = flax("linen")

    class Stored(nn.Module):
        """Where a weight is stored: the variable `frozen`, as AQT's freezer has it."""

        @nn.compact
        def __call__(self, collection: str, make: Callable[[], Any], is_new: bool) -> Any:
            if self.is_initializing():
                return self.variable(collection, "frozen", lambda: empty(make)).value
            if is_new or self.has_variable(collection, "frozen"):
                variable = self.variable(collection, "frozen", make)
                if is_new:
                    variable.value = make()
                return variable.value
            raise QuantError(
                f"{'/'.join(self.path)}: quant_mode is 'serve' and no weight is stored in collection {collection!r}; run the model "
                "in 'convert' first, and pass what that stored"
            )

    class AqtDotGeneral(nn.Module):
        """`dot_general` as a module, called with `(lhs, rhs, dimension_numbers, precision=None)`."""

        quant: Quantization
        site: str | None = None

        def __call__(
            self, lhs: Any, rhs: Any, dimension_numbers: Any, precision: Any = None, preferred_element_type: Any = None
        ) -> jax.Array:
            (axes, rhs_axes), (batch, _) = dimension_numbers
            weight = self.operand(rhs, tuple(sorted(rhs_axes)))  # in the order of the product itself
            if not isinstance(weight, Latent) and not is_qarray(weight):
                weight = jnp.asarray(weight, lhs.dtype)
                return jax.lax.dot_general(lhs, weight, dimension_numbers, precision, preferred_element_type)

            def product(lhs: Any, weight: Any) -> jax.Array:
                return dot_general(lhs, weight, dimension_numbers, precision, preferred_element_type)

            free = [a for a in range(lhs.ndim) if a not in {*axes, *batch}]
            places = {a: len(batch) + i for i, a in enumerate(free)}
            return in_parts(product, lhs, weight, places, self.quant.shards)

        def operand(self, rhs: Any, axes: tuple[int, ...]) -> Any:
            """The right operand of the product: a parameter in training, or what is stored for it; a mask of booleans as it is."""
            if not jnp.issubdtype(rhs.dtype, jnp.floating):
                return rhs
            return self._stateless(rhs) if self.scope is None else self._bound(rhs, axes)

        def _stateless(self, rhs: Any) -> Any:
            """The weight outside of a Flax module, which could keep nothing."""
            quant = self.quant
            rule = quant.rule(self.site)
            if quant.quant_mode != QuantMode.TRAIN or _keeps_state(rule):
                asked = f"mode {quant.quant_mode.value!r} of rule {rule}"
                raise UnsupportedError(
                    "a product outside of a Flax module keeps no state", {asked: "call it as a submodule, or by apply"}
                )
            return rhs if rule is None or rule.policy is None else Latent(jnp.asarray(rhs), None, rule.policy, None)

        @nn.compact
        def _bound(self, rhs: Any, axes: tuple[int, ...]) -> Any:
            quant = self.quant
            path = self.site or (f"{'/'.join(self.path[:-1])}/kernel".lstrip("/") if self.path else None)
            if quant.needs_path and path is None and self._is_built(rhs, axes):
                return rhs
            rule = quant.rule(path)
            if quant.quant_mode == QuantMode.TRAIN:
                return self._trained(rhs, axes, rule)
            is_new = quant.quant_mode == QuantMode.CONVERT
            mask = self.get_variable(quant.collection, "mask") if is_new else None
            return Stored(name="qrhs")(quant.collection, lambda: stored(rhs, axes, rule, mask), is_new).weight

        def _is_built(self, rhs: Any, axes: tuple[int, ...]) -> bool:
            """Whether MaxText builds the layer: it initializes the module and calls it once, before its path can be known."""
            collection, name = self.quant.collection, PLACEHOLDER + "_".join(map(str, (rhs.ndim, *axes)))
            if self.is_initializing():
                self.variable(collection, name, lambda: jnp.zeros((*rhs.shape, 0), rhs.dtype))
                return True
            if not self.has_variable(collection, name) or self.has_variable(collection, CALLED):
                return False
            self.variable(collection, CALLED, lambda: jnp.zeros((0,)))
            return True

        def _trained(self, rhs: Any, axes: tuple[int, ...], rule: Rule | None) -> Any:
            """The weight as a parameter whose products follow the rule."""
            if rule is None:
                return rhs
            if rule.sparsity is not None:
                rhs = self._sparse(jnp.asarray(rhs), along(rule.sparsity, axes, rhs.ndim))
            policy = rule.policy
            if policy is None:
                return rhs
            has_key = policy.needs_key and self.has_rng(self.quant.rng)
            scales = None
            if policy.delayed is not None:
                first = scale_leaves(policy)
                values = [self.variable(OVERWRITTEN, name, lambda x=x: x).value for name, x in first.items()]
                scales = _overwriting(jax.tree.unflatten(jax.tree.structure(ProductScales.init(policy)), values))
            return Latent(jnp.asarray(rhs), self.make_rng(self.quant.rng) if has_key else None, policy, scales)

        def _sparse(self, rhs: jax.Array, sparsity: Sparsity) -> jax.Array:
            """The weight with zeros where its mask prunes it; a step that may write renews the mask when that is due."""
            collection, first = self.quant.collection, sparsity.init(rhs)
            mask = self.variable(collection, "mask", lambda: first.mask)
            # Outside of a tree MaxText calls a layer once to build it, which is no step of training.
            step = self.variable(collection, "step", lambda: first.step - (0 if self.path else 1))
            state = SparsityState(mask.value, step.value)
            if self.is_mutable_collection(collection) and not self.is_initializing():
                state = sparsity.update(state, rhs)
                mask.value, step.value = state.mask, state.step
            return sparsity.apply(rhs, state)

    class AqtEinsum(nn.Module):
        """`einsum` of two operands as a module, called with `(equation, lhs, rhs)`; the right one is the weight."""

        quant: Quantization
        dtype: Any = None
        site: str | None = None

        def __call__(self, equation: str, lhs: Any, rhs: Any) -> jax.Array:
            if self.dtype is not None:
                lhs, rhs = jnp.asarray(lhs, self.dtype), jnp.asarray(rhs, self.dtype)
            axes, places = contracted(equation, lhs.ndim, rhs.ndim)
            if self.scope is None or not jnp.issubdtype(rhs.dtype, jnp.floating):
                weight = AqtDotGeneral(self.quant, self.site, parent=None).operand(rhs, axes)
            else:
                weight = self._bound(rhs, axes)
            if not isinstance(weight, Latent) and not is_qarray(weight):
                return jnp.einsum(equation, lhs, jnp.asarray(weight, lhs.dtype))
            return in_parts(functools.partial(einsum, equation), lhs, weight, places, self.quant.shards)

        @nn.compact
        def _bound(self, rhs: Any, axes: tuple[int, ...]) -> Any:
            quant, site = self.quant, self.site or "/".join(self.path[:-1]) or None
            rule = quant.rule(site)
            if not self.path and self.is_initializing() and (quant.quant_mode == QuantMode.SERVE or _keeps_state(rule)):
                advice = (
                    "train experts by a rule without delayed scaling or sparsity, and serve them from their float weights "
                    "(checkpoint_is_quantized=false)"
                )
                raise UnsupportedError(
                    "MaxText makes the module of an einsum at its first call, and what it keeps would start anew with it",
                    {f"mode {quant.quant_mode.value!r} of rule {rule}": advice},
                )
            return AqtDotGeneral(quant, site or "einsum", name="AqtDotGeneral_0").operand(rhs, axes)

    return AqtDotGeneral, AqtEinsum


def stored(rhs: Any, axes: tuple[int, ...], rule: Rule | None, mask: Any = None) -> StoredWeight:
    """What is stored for a weight: pruned and quantized as its rule says, or the float array itself.

    Args:
        rhs: the weight, in the dtype that the layer computes in.
        axes: the axes that its product contracts.
        rule: the rule; None stores it as it is.
        mask: which elements training kept; None prunes by magnitude, where the rule is sparse.

    Returns:
        A QArray with the rule's policy, or an array, as a StoredWeight.
    """
    if rule is None:
        return StoredWeight(rhs)
    if rule.sparsity is not None:
        rhs = jnp.where(mask, rhs, 0) if mask is not None else along(rule.sparsity, axes, rhs.ndim).pruned(rhs)
    if rule.policy is None:
        return StoredWeight(rhs)
    return StoredWeight(dataclasses.replace(quantize(rhs, rule.policy.weight, axis=axes), policy=rule.policy))


def empty(make: Callable[[], Any]) -> Any:
    """Zeros in the place of every array that a function makes.

    Args:
        make: the function; it is traced only.

    Returns:
        A tree of the same structure.
    """
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(make))


def along(sparsity: Sparsity, axes: tuple[int, ...], ndim: int) -> Sparsity:
    """The sparsity with groups along the axes that the product contracts, unless it names its own.

    Args:
        sparsity: the rule's sparsity.
        axes: the axes of the weight that its product contracts.
        ndim: how many axes the weight has.

    Returns:
        The sparsity with negative axes.
    """
    return dataclasses.replace(sparsity, axis=sparsity.axis or tuple(a - ndim for a in axes))


def scale_leaves(policy: Policy, stack: tuple[int, ...] = ()) -> dict[str, Any]:
    """The variables of delayed scaling before the first step, by name: `weight_scale`, `weight_amax_history` and so on.

    Args:
        policy: the policy, with delayed scaling.
        stack: the lengths of leading axes, such as that of stacked layers, of which each element has scales of its own.

    Returns:
        The arrays.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(ProductScales.init(policy, stack))
    return {"_".join(key.name for key in path): x for path, x in leaves}


@jax.custom_vjp
def _overwriting(state: ProductScales) -> StepScales:
    """The scales of a state, whose gradient is the state of the next step."""
    return state.scales


def _next_state(state: ProductScales, seen: StepScales) -> tuple[ProductScales]:
    """The state after a step that saw these magnitudes."""
    pairs = ((state.weight, seen.weight), (state.activation, seen.activation), (state.gradient, seen.gradient))
    return (ProductScales(*(None if history is None else history.advance(amax) for history, amax in pairs)),)  # type: ignore[arg-type]


_overwriting.defvjp(lambda state: (state.scales, state), _next_state)


def in_parts(
    product: Callable[[Any, Any], jax.Array], lhs: Any, weight: Any, places: dict[int, int], shards: int
) -> jax.Array:
    """A product whose weight's gradient is one of `shards` parts of an axis of the activation, summed in floating point.

    Args:
        product: the product of an activation and the weight.
        lhs: the activation.
        weight: the weight, a Latent where it is trained.
        places: the axes of the activation that the weight's gradient sums, in order, and where each is in the result.
        shards: how many parts.

    Returns:
        The product. Where `shards` does not divide the axis its gradient is refused.
    """
    arm = weight.policy.drhs if isinstance(weight, Latent) else None
    if shards == 1 or arm is None or arm.gradient is None or not places:
        return product(lhs, weight)
    axis = list(places)[0 if arm.tiled_axis == "first" else -1]
    length, at = lhs.shape[axis], places[axis]
    if length % shards:
        reason = (
            f"axis {axis} of the activation {tuple(lhs.shape)} has {length} elements, which quantization_local_shard_count={shards} "
            "does not divide; choose a batch and a sequence length that it divides, or pass 1"
        )
        return product(lhs, dataclasses.replace(weight, value=_refusing(weight.value, reason)))
    parts = lhs.reshape(*lhs.shape[:axis], shards, length // shards, *lhs.shape[axis + 1 :])
    result = jax.vmap(product, in_axes=(axis, None), out_axes=at)(parts, weight)
    return result.reshape(*result.shape[:at], length, *result.shape[at + 2 :])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _refusing(x: jax.Array, reason: str) -> jax.Array:
    """The array itself, whose gradient is refused."""
    return x


def _refuse(reason: str, _: None, gradient: jax.Array) -> Any:
    raise QuantError(reason)


_refusing.defvjp(lambda x, reason: (x, None), _refuse)


def contracted(equation: str, left_ndim: int, right_ndim: int) -> tuple[tuple[int, ...], dict[int, int]]:
    """What an equation says of a weight's product.

    Args:
        equation: the einsum's equation, with both operands and the result named.
        left_ndim: how many axes the activation has.
        right_ndim: how many axes the weight has.

    Returns:
        The axes of the weight that are summed; and the axes of the activation that the weight's gradient sums, each with
        its place in the result.

    Raises:
        QuantError: for an equation that leaves names out.
    """
    operands, arrow, result = equation.replace(" ", "").partition("->")
    left, comma, right = operands.partition(",")
    if not arrow or not comma or (len(left), len(right)) != (left_ndim, right_ndim) or "." in equation:
        raise QuantError(f"equation {equation!r} must name both operands and the result, as in 'btd,df->btf'")
    places = {axis: result.index(letter) for axis, letter in enumerate(left) if letter in result and letter not in right}
    return tuple(axis for axis, letter in enumerate(right) if letter not in result) or (right_ndim - 1,), places
