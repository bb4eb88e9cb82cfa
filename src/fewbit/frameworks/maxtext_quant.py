"""The `quant` object of MaxText's layers.

It creates Linen modules that compute each matmul by a Policy or by a Recipe's rules. Names are those that MaxText's own functions
expect: a module `AqtDotGeneral_0` next to `kernel`, with the stored weight at `qrhs/frozen`. So `LayerwiseQuantization` drops the
float kernels next to ours, and `from_pretrained` reads what it wrote.

In Flax Linen a module knows its path, which a Recipe's rules match. MaxText's NNX layers call the modules outside of any tree:
there `maybe_quantize_model` of `maxtext.py` sets each module's `site` on the finished model. Until then a module only creates a
placeholder, which records the shape of its weight and the contracted axes.
"""

import dataclasses
import enum
import functools
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ..array.qarray import QArray, is_qarray
from ..array.scheme import Scheme
from ..errors import QuantError, UnsupportedError
from ..kernels.quantize.dispatch import quantize
from ..ops import einsum
from ..ops.dot import dot_general
from ..ops.policy import Policy
from ..ops.qat.delayed_scales import StepScales
from ..ops.qat.latent import Latent
from ..recipe import recipe as as_recipe
from ..recipe.recipe import Recipe
from ..recipe.role import Role
from ..recipe.rule import Rule
from ..recipe.sparsity import Sparsity, SparsityState
from ..training.delayed_state import ProductScales
from ._flax import flax
from .tree import RecipeLike

Weight: TypeAlias = jax.Array | QArray | Latent
"""The right operand of a matmul."""

OVERWRITTEN = "_overwrite_with_gradient"
"""Flax's collection of variables whose gradient is their next value."""

PLACEHOLDER = "unbound_"
"""The prefix of a placeholder's name, before the weight's number of axes and the contracted axes."""

CALLED = PLACEHOLDER + "called"
"""The variable that marks a module that MaxText has called once to build it."""

ROLES = (Role.MATMUL, Role.ROUTER, Role.EXPERTS)
"""The roles of the weights whose products MaxText asks the object for; it multiplies embeddings and logits without it."""

_ROUTER = re.compile(r"(?:.*/)?(?:shared_expert_)?gate/kernel")
"""MaxText's routers; the gate of its gated MLPs is `wi_0`."""

_GROUPED = {"int8": "int8", "int8_narrow": "int8", "int4": "int4", "int4_narrow": "int4"}
_GROUPED |= {"e4m3fn": "float8_e4m3fn", "e5m2": "float8_e5m2", "e4m3fnuz": "float8_e4m3fnuz", "e5m2fnuz": "float8_e5m2fnuz"}
"""The dtype of MaxText's grouped matmul for each format."""


class QuantMode(enum.Enum):
    """The mode of a MaxText run.

    Members are equal to those of AQT's QuantMode with the same name, since MaxText compares and assigns these.

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

    With delayed scaling each module keeps its amax histories in the collection `OVERWRITTEN`, as Flax's fp8 modules do: the
    gradient of these variables is their next value, which MaxText's train step and Flax's TrainState assign. As in Flax, layers
    that a scan stacks must have the collection stacked, too.

    With sparsity each module keeps its mask and its step count in `collection`, which the train step must carry, as MaxText's does.

    Attributes:
        recipe: a Recipe, or anything that `fb.recipe` takes, whose rules match the path and the role of each layer's kernel; or a
            Policy for every matmul of the object. A rule without roles matches kernels, experts and, as MaxText's own values
            do, routers.
        quant_mode: "train" quantizes float weights in each matmul; "convert" also stores each in `collection`; "serve" reads the
            stored weights and ignores the parameters. Or a member of AQT's QuantMode. Only this field can be assigned, as
            MaxText does.
        collection: the variable collection of stored weights; MaxText's layers make "aqt" mutable.
        rng: the name of the RNG stream for stochastic rounding.
        shards: the number of parts of wgrad's contraction, each with its own scales: MaxText's
            `quantization_local_shard_count`. Parts of the first axis of the activation (AQT: the batch) or of the last before its
            features (Qwix: the sequence), by wgrad's `tiled_axis`.
        site: the path of the experts of this copy; set by `maybe_quantize_model`.

    Raises:
        QuantError: for an unknown mode, for a recipe without a rule for matmuls, and as `fb.recipe`.
        UnsupportedError: for rules of products without a parameter, and for delayed scaling in another mode than "train".

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
        recipe: RecipeLike | Policy,
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
        if made.products:
            reason = (
                "MaxText computes products without a parameter, such as attention's, without the quant object; remove it"
            )
            raise UnsupportedError(
                f"recipe {made.name!r} has rules of products", {f"product {rule}": reason for rule in made.products}
            )
        if not self.rules:
            raise QuantError(
                f"recipe {made.name!r} has no rule for MaxText's matmuls: each has other roles than {', '.join(ROLES)}, or other ops "
                "than dot_general; add a rule for them"
            )
        self.quant_mode = _mode(quant_mode)

    def __setattr__(self, name: str, value: object) -> None:
        if name != "quant_mode":
            raise dataclasses.FrozenInstanceError(f"cannot assign to {name!r}; only quant_mode can be assigned")
        mode = _mode(value)
        if mode != QuantMode.TRAIN and (delayed := [rule for rule in self.rules if _delayed(rule) is not None]):
            reason = "its activation scales are training state; serve a policy without it, such as te_fp8_currentscaling"
            raise UnsupportedError(f"delayed scaling cannot {mode.value}", {str(rule): reason for rule in delayed})
        self.__dict__["quant_mode"] = mode

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The recipe's rules for matmuls, of kernels, routers or experts."""
        multiplied = (rule for rule in self.recipe.rules if not rule.ops or "dot_general" in rule.ops)
        return tuple(rule for rule in multiplied if not rule.roles or not set(ROLES).isdisjoint(rule.roles))

    @property
    def needs_path(self) -> bool:
        """True if the matching rule depends on the layer's path, which also tells a router from other kernels."""
        kernel, router, experts = (self._rules_of(role)[:1] for role in ROLES)
        return kernel != router or any(rule.path != ".*" for rule in (*kernel, *experts))

    @property
    def needs_apply_rngs(self) -> bool:
        """True if matmuls draw random numbers, so that MaxText's layers keep RNG state."""
        draws = any(rule.policy is not None and rule.policy.needs_key for rule in self.rules)
        return self.quant_mode == QuantMode.TRAIN and draws

    def _rules_of(self, role: Role) -> tuple[Rule, ...]:
        """The rules that match weights of a role."""
        return tuple(rule for rule in self.rules if not rule.roles or role in rule.roles)

    def rule(self, path: str | None, role: Role = Role.MATMUL) -> Rule | None:
        """The first rule that matches a layer, or None.

        Args:
            path: the path of its kernel, `decoder/layers/mlp/wi_0/kernel`; None if unknown.
            role: `Role.EXPERTS` for a layer of experts. The path shows which kernels are routers: `gate/kernel`.

        Raises:
            QuantError: when the rules need a path and there is none.
            UnsupportedError: for a rule with its own axis.
        """
        if self.needs_path and path is None:
            raise QuantError(
                f"recipe {self.recipe.name!r} has rules by layer or by role, and this layer's path is unknown; in addition to "
                "configure_quantization, assign maxtext.layers.quantizations.maybe_quantize_model = "
                "fewbit.frameworks.maxtext.maybe_quantize_model (before MaxText 0.2.5 that needs pure_nnx=true)"
            )
        path = path or ""
        if role is Role.MATMUL and _ROUTER.fullmatch(path):
            role = Role.ROUTER
        rule = next((rule for rule in self._rules_of(role) if rule.matches_path(path)), None)
        if rule is not None and rule.axis is not None:
            raise UnsupportedError(
                f"{path}: rule {rule} has an axis",
                {"MaxText": "tiles run along the contraction axes; remove axis from the rule"},
            )
        return rule

    def dot_general_cls(self, mesh_axes: object = ()) -> Any:
        """The constructor of a layer's `dot_general` module; `mesh_axes` is unused.

        Raises:
            UnsupportedError: when flax is not installed.
        """
        return functools.partial(modules()[0], self)

    def einsum(self, mesh_axes: object = (), dtype: DTypeLike | None = None) -> Any:
        """A layer's module `einsum(equation, lhs, rhs)`, which casts operands to `dtype` unless it is None.

        Outside of a Flax module it works in the mode "train" if its rule keeps no state.

        Raises:
            UnsupportedError: when flax is not installed.
        """
        return modules()[1](self, dtype, self.site)

    def get_block_size(self) -> int:
        """1: the batch at initialization may have any size."""
        return 1

    @property
    def quant_dg(self) -> Any:
        """The operand dtypes of MaxText's grouped matmul, at `fwd.dg_quantizer.lhs.numerics.get_dtype()`.

        MaxText computes it, with per-row and per-output-channel scales, and float gradients.

        Raises:
            QuantError: when the rules need a path and there is none.
            UnsupportedError: for unsupported schemes.
        """
        rule = self.rule(self.site, Role.EXPERTS)
        reasons: dict[str, str] = {}
        schemes: dict[str, Scheme | None] = {"lhs": None, "rhs": None}
        if rule is not None and rule.sparsity is not None:
            reasons["sparsity"] = f"{rule.sparsity} is not supported"
        if rule is not None and rule.policy is not None:
            schemes = {"lhs": rule.policy.activation, "rhs": rule.policy.weight}
        for side, scheme in schemes.items():
            if scheme is not None and not _fits_grouped(scheme):
                reasons[side] = f"{scheme.name} is not an 8- or 4-bit format with one scale per row or output channel"
        if reasons:
            raise UnsupportedError("MaxText's grouped matmul does not support this rule; set sparse_matmul=false", reasons)
        numerics = {
            side: types.SimpleNamespace(get_dtype=functools.partial(_grouped_dtype, s)) for side, s in schemes.items()
        }
        sides = {side: types.SimpleNamespace(numerics=each) for side, each in numerics.items()}
        return types.SimpleNamespace(fwd=types.SimpleNamespace(dg_quantizer=types.SimpleNamespace(**sides)))


def _mode(value: object) -> QuantMode:
    """The mode of a name, or of an enum member with that name."""
    try:
        return QuantMode(value.name.lower() if isinstance(value, enum.Enum) else value)
    except ValueError:
        known = ", ".join(mode.value for mode in QuantMode)
        raise QuantError(f"quant_mode is {value!r}; must be one of {known}") from None


def _delayed(rule: Rule) -> Any:
    return None if rule.policy is None else rule.policy.delayed


def _keeps_state(rule: Rule | None) -> bool:
    """True if training by a rule keeps variables between steps."""
    return rule is not None and (_delayed(rule) is not None or rule.sparsity is not None)


def _fits_grouped(scheme: Scheme) -> bool:
    """True if MaxText's grouped matmul supports a scheme's format and tile."""
    whole = {a: n for a, n in scheme.tile.items() if a is not ... and n is None}
    per_row = scheme.tile.get(...) == 1 and set(whole) == {-1} == set(scheme.tile) - {...}
    return scheme.format.name in _GROUPED and scheme.zero_point is None and (per_row or not scheme.tile)


def _grouped_dtype(scheme: Scheme | None) -> Any:
    return None if scheme is None else jnp.dtype(_GROUPED[scheme.format.name])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StoredWeight:
    """A stored weight without a `shape`. MaxText's tools treat values with a shape as arrays.

    Attributes:
        weight: a QArray, or a float array if no rule quantizes it.
    """

    weight: Any


@functools.cache
def modules() -> tuple[Any, Any]:
    """The two Linen module classes, created here because flax is optional."""
    nn = flax("linen")

    class Stored(nn.Module):
        """Stores a weight in the variable `frozen`, as AQT's freezer does."""

        @nn.compact
        def __call__(self, collection: str, make: Callable[[], StoredWeight], is_new: bool) -> StoredWeight:
            if self.is_initializing():
                return self.variable(collection, "frozen", lambda: empty(make)).value
            if is_new or self.has_variable(collection, "frozen"):
                variable = self.variable(collection, "frozen", make)
                if is_new:
                    variable.value = make()
                return variable.value
            raise QuantError(
                f"{'/'.join(self.path)}: quant_mode is 'serve' and no weight is stored in collection {collection!r}; run the model "
                "in 'convert' first, and pass the collection that it returns"
            )

    class AqtDotGeneral(nn.Module):
        """`dot_general` as a module, called with `(lhs, rhs, dimension_numbers, precision=None)`."""

        quant: Quantization
        site: str | None = None
        role: Role = Role.MATMUL

        def __call__(
            self,
            lhs: jax.Array,
            rhs: jax.Array,
            dimension_numbers: tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]],
            precision: jax.lax.PrecisionLike = None,
            preferred_element_type: DTypeLike | None = None,
        ) -> jax.Array:
            (axes, rhs_axes), (batch, _) = dimension_numbers
            weight = self.operand(rhs, tuple(sorted(rhs_axes)))  # in the order of the product itself
            if not isinstance(weight, Latent) and not is_qarray(weight):
                weight = jnp.asarray(weight, lhs.dtype)
                return jax.lax.dot_general(lhs, weight, dimension_numbers, precision, preferred_element_type)

            def product(lhs: jax.Array, weight: Weight) -> jax.Array:
                return dot_general(lhs, weight, dimension_numbers, precision, preferred_element_type)

            free = [a for a in range(lhs.ndim) if a not in {*axes, *batch}]
            places = {a: len(batch) + i for i, a in enumerate(free)}
            return in_parts(product, lhs, weight, places, self.quant.shards)

        def operand(self, rhs: jax.Array, axes: tuple[int, ...]) -> Weight:
            """The parameter in training, or its stored weight; unchanged if not floating."""
            if not jnp.issubdtype(rhs.dtype, jnp.floating):
                return rhs
            if self.scope is None:
                return self._stateless(rhs)
            return self._bound(rhs, axes)

        def _stateless(self, rhs: jax.Array) -> Weight:
            """The weight outside of a Flax module, which keeps no state."""
            quant = self.quant
            rule = quant.rule(self.site, self.role)
            if quant.quant_mode != QuantMode.TRAIN or _keeps_state(rule):
                asked = f"mode {quant.quant_mode.value!r} of rule {rule}"
                raise UnsupportedError(
                    "a matmul outside of a Flax module keeps no state", {asked: "call it as a submodule, or by apply"}
                )
            if rule is None or rule.policy is None:
                return rhs
            return Latent(jnp.asarray(rhs), None, rule.policy, None)

        @nn.compact
        def _bound(self, rhs: jax.Array, axes: tuple[int, ...]) -> Weight:
            quant = self.quant
            path = self.site or None
            if path is None and self.path:
                path = f"{'/'.join(self.path[:-1])}/kernel".lstrip("/")
            if quant.needs_path and path is None and self._is_built(rhs, axes):
                return rhs
            rule = quant.rule(path, self.role)
            if quant.quant_mode == QuantMode.TRAIN:
                return self._trained(rhs, axes, rule)
            is_new = quant.quant_mode == QuantMode.CONVERT
            mask = self.get_variable(quant.collection, "mask") if is_new else None
            return Stored(name="qrhs")(quant.collection, lambda: stored(rhs, axes, rule, mask), is_new).weight

        def _is_built(self, rhs: jax.Array, axes: tuple[int, ...]) -> bool:
            """True while MaxText builds the layer. It initializes the module, and calls it once without a path."""
            collection, name = self.quant.collection, PLACEHOLDER + "_".join(map(str, (rhs.ndim, *axes)))
            if self.is_initializing():
                self.variable(collection, name, lambda: jnp.zeros((*rhs.shape, 0), rhs.dtype))
                return True
            if not self.has_variable(collection, name) or self.has_variable(collection, CALLED):
                return False
            self.variable(collection, CALLED, lambda: jnp.zeros((0,)))
            return True

        def _trained(self, rhs: jax.Array, axes: tuple[int, ...], rule: Rule | None) -> Weight:
            """The weight as a trained parameter with the rule's policy."""
            if rule is None:
                return rhs
            if rule.sparsity is not None:
                rhs = self._sparse(jnp.asarray(rhs), along(rule.sparsity, axes, rhs.ndim))
            policy = rule.policy
            if policy is None:
                return rhs
            key = scales = None
            if policy.needs_key and self.has_rng(self.quant.rng):
                key = self.make_rng(self.quant.rng)
            if policy.delayed is not None:
                first = scale_leaves(policy)
                values = [self.variable(OVERWRITTEN, name, lambda x=x: x).value for name, x in first.items()]
                scales = _overwriting(jax.tree.unflatten(jax.tree.structure(ProductScales.init(policy)), values))
            return Latent(jnp.asarray(rhs), key, policy, scales)

        def _sparse(self, rhs: jax.Array, sparsity: Sparsity) -> jax.Array:
            """The pruned weight; a step with mutable variables updates the mask on schedule."""
            collection, first = self.quant.collection, sparsity.init(rhs)
            mask = self.variable(collection, "mask", lambda: first.mask)
            # Outside of a tree MaxText calls a layer once to build it, which is not a training step.
            step = self.variable(collection, "step", lambda: first.step - (0 if self.path else 1))
            state = SparsityState(mask.value, step.value)
            if self.is_mutable_collection(collection) and not self.is_initializing():
                state = sparsity.update(state, rhs)
                mask.value, step.value = state.mask, state.step
            return sparsity.apply(rhs, state)

    class AqtEinsum(nn.Module):
        """`einsum` as a module, called with `(equation, lhs, rhs)`; `rhs` is the weight."""

        quant: Quantization
        dtype: Any = None
        site: str | None = None

        def __call__(self, equation: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            if self.dtype is not None:
                lhs, rhs = jnp.asarray(lhs, self.dtype), jnp.asarray(rhs, self.dtype)
            axes, places = contracted(equation, lhs.ndim, rhs.ndim)
            if self.scope is None or not jnp.issubdtype(rhs.dtype, jnp.floating):
                weight = AqtDotGeneral(self.quant, self.site, Role.EXPERTS, parent=None).operand(rhs, axes)
            else:
                weight = self._bound(rhs, axes)
            if not isinstance(weight, Latent) and not is_qarray(weight):
                return jnp.einsum(equation, lhs, jnp.asarray(weight, lhs.dtype))
            return in_parts(functools.partial(einsum, equation), lhs, weight, places, self.quant.shards)

        @nn.compact
        def _bound(self, rhs: jax.Array, axes: tuple[int, ...]) -> Weight:
            quant, site = self.quant, self.site
            if site is None and self.path:
                site = "/".join(self.path[:-1])
            rule = quant.rule(site, Role.EXPERTS)
            if not self.path and self.is_initializing() and (quant.quant_mode != QuantMode.TRAIN or _keeps_state(rule)):
                advice = (
                    "train experts by a rule without delayed scaling or sparsity; to store and serve them, assign "
                    "maybe_quantize_model, and copy_parameters and strip_quantized of fewbit.frameworks.maxtext as docs/maxtext.md shows"
                )
                raise UnsupportedError(
                    "MaxText creates the module of an einsum at its first call, which would reset its state",
                    {f"mode {quant.quant_mode.value!r} of rule {rule}": advice},
                )
            return AqtDotGeneral(quant, site or "einsum", Role.EXPERTS, name="AqtDotGeneral_0").operand(rhs, axes)

    return AqtDotGeneral, AqtEinsum


def stored(rhs: jax.Array, axes: tuple[int, ...], rule: Rule | None, mask: jax.Array | None = None) -> StoredWeight:
    """Prunes and quantizes a weight by its rule.

    Args:
        rhs: the weight, in the layer's compute dtype.
        axes: the contracted axes.
        rule: the rule; None stores the float array.
        mask: the elements that training kept; None prunes by magnitude if the rule is sparse.

    Returns:
        A QArray with the rule's policy, or an array, as a StoredWeight.
    """
    if rule is None:
        return StoredWeight(rhs)
    if rule.sparsity is not None:
        if mask is None:
            rhs = along(rule.sparsity, axes, rhs.ndim).pruned(rhs)
        else:
            rhs = jnp.where(mask, rhs, 0)
    if rule.policy is None:
        return StoredWeight(rhs)
    return StoredWeight(dataclasses.replace(quantize(rhs, rule.policy.weight, axis=axes), policy=rule.policy))


def empty(make: Callable[[], PyTree]) -> PyTree:
    """Zeros of the structure that `make` returns; it is only traced.

    Args:
        make: the function; it is traced only.

    Returns:
        A tree of the same structure.
    """
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(make))


def along(sparsity: Sparsity, axes: tuple[int, ...], ndim: int) -> Sparsity:
    """The sparsity with groups along the contracted axes.

    These are negative axes. A sparsity that has its own axes keeps them.

    Args:
        sparsity: the rule's sparsity.
        axes: the contracted axes of the weight.
        ndim: the number of axes of the weight.

    Returns:
        The sparsity with negative axes.
    """
    return dataclasses.replace(sparsity, axis=sparsity.axis or tuple(a - ndim for a in axes))


def scale_leaves(policy: Policy, stack: tuple[int, ...] = ()) -> dict[str, Any]:
    """The initial variables of delayed scaling: `weight_scale`, `weight_amax_history` and so on.

    Args:
        policy: the policy, with delayed scaling.
        stack: the leading axes, such as stacked layers, of which each element has its own scales.

    Returns:
        The arrays.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(ProductScales.init(policy, stack))
    return {"_".join(key.name for key in path): x for path, x in leaves}


@jax.custom_vjp
def _overwriting(state: ProductScales) -> StepScales:
    """The scales of a state; the VJP returns the next state."""
    return state.scales


def _next_state(state: ProductScales, seen: StepScales) -> tuple[ProductScales]:
    """The state after a step with these amax."""
    pairs = ((state.weight, seen.weight), (state.activation, seen.activation), (state.gradient, seen.gradient))
    return (ProductScales(*(None if history is None else history.advance(amax) for history, amax in pairs)),)  # type: ignore[arg-type]


_overwriting.defvjp(lambda state: (state.scales, state), _next_state)


def in_parts(
    product: Callable[[jax.Array, Any], jax.Array], lhs: jax.Array, weight: Weight, places: dict[int, int], shards: int
) -> jax.Array:
    """A matmul whose wgrad contracts an activation axis in `shards` parts, summed in float.

    Args:
        product: the matmul of an activation and the weight.
        lhs: the activation.
        weight: the weight, a Latent in training.
        places: from the activation axes that wgrad contracts, in order, to their axes in the result.
        shards: the number of parts.

    Returns:
        The matmul. Differentiating it raises QuantError if `shards` does not divide the axis.
    """
    if shards == 1 or not places or not isinstance(weight, Latent) or weight.policy.drhs.gradient is None:
        return product(lhs, weight)
    axis = list(places)[0 if weight.policy.drhs.tiled_axis == "first" else -1]
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
    """Identity whose VJP raises QuantError."""
    return x


def _refuse(reason: str, _: None, gradient: jax.Array) -> Any:
    raise QuantError(reason)


_refusing.defvjp(lambda x, reason: (x, None), _refuse)


def contracted(equation: str, left_ndim: int, right_ndim: int) -> tuple[tuple[int, ...], dict[int, int]]:
    """The contracted axes of an einsum's weight, and those of its wgrad.

    Args:
        equation: the einsum's equation, which names both operands and the result.
        left_ndim: the number of axes of the activation.
        right_ndim: the number of axes of the weight.

    Returns:
        The contracted axes of the weight; and the activation axes that wgrad contracts, with their axes in the result.

    Raises:
        QuantError: for an equation that omits names.
    """
    operands, arrow, result = equation.replace(" ", "").partition("->")
    left, comma, right = operands.partition(",")
    if not arrow or not comma or (len(left), len(right)) != (left_ndim, right_ndim) or "." in equation:
        raise QuantError(f"equation {equation!r} must name both operands and the result, as in 'btd,df->btf'")
    places = {axis: result.index(letter) for axis, letter in enumerate(left) if letter in result and letter not in right}
    return tuple(axis for axis, letter in enumerate(right) if letter not in result) or (right_ndim - 1,), places
