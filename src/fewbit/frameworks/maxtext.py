"""Replacements of MaxText's quantization functions.

    from maxtext.layers import quantizations
    from fewbit.frameworks import maxtext

    quantizations.configure_quantization = maxtext.configure_quantization
    quantizations.configure_kv_quant = maxtext.configure_kv_quant

Rules by layer need `quantizations.maybe_quantize_model = maxtext.maybe_quantize_model` as well, and stored experts the two
methods of `LayerwiseQuantization` that `docs/maxtext.md` names. Nothing of MaxText is imported here.
"""

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..errors import QuantError, UnsupportedError
from ..ops.policy import Policy
from ..recipe.presets.maxtext import maxtext_recipe
from ..recipe.presets.mixed_precision import LAYERS
from ..recipe.recipe import Recipe
from ..recipe.role import Role
from ..recipe.rule import Rule
from ._flax import flax
from .maxtext_kv import KVQuant as KVQuant
from .maxtext_kv import configure_kv_quant as configure_kv_quant
from .maxtext_quant import CALLED, PLACEHOLDER, empty, modules, scale_leaves, stored
from .maxtext_quant import OVERWRITTEN as OVERWRITTEN
from .maxtext_quant import Quantization as Quantization
from .maxtext_quant import QuantMode as QuantMode
from .maxtext_quant import StoredWeight as StoredWeight
from .tree import RecipeLike

_SHARDS = "quantization_local_shard_count"
_CALIBRATIONS = tuple(f"{who}_quantization_calibration_method" for who in ("weight", "act", "bwd", "drhs_grad"))

_DEFAULTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_CALIBRATIONS, ("absmax", None, "")),
    "constant_bound_config": ("", None, [], ()),
    "quant_cfg_path": ("", None),
    "weight_sparsity_n": (None,),
    "weight_sparsity_m": (None,),
}
"""The fields that a value of `quantization` may read, and their unset values."""

_SCHEDULE = {"weight_sparsity_start_step": 50, "weight_sparsity_update_step": 10}
"""MaxText's default schedule of sparsity masks."""

EXPERTS = ("wi_0", "wi_1", "wo")
"""The weights of a layer of experts."""

EINSUM = "quant_einsum_"
"""MaxText's prefix of the modules of a layer's einsums."""

_SHARDED = ("int8", "int4", "fp4", "fp8", "fp8_e4m3", "fp8_e5m2")
"""The values of `quantization` that read `quantization_local_shard_count`; fp8 only with Qwix, whose meaning is another."""

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_batch_split_schedule": (
        (False, None),
        "the batch-split schedule multiplies without the quant object; leave it false",
    ),
    "use_manual_quantization": ((False, None), "it is for the batch-split schedule; leave it false"),
    "quantize_logits_proj": (
        (False, None),
        "MaxText builds logits_dense without a quant object; leave it false, or quantize the trained kernel by fb.quantize_params",
    ),
    "logits_proj_quant_calibration_method": (
        ("", None),
        "MaxText builds logits_dense without a quant object; leave it empty",
    ),
    "unquantized_modules": (([], (), None), "it is for fp8 weight_dtype; write a rule with policy null for these modules"),
    "weight_block_size": ((None,), "it is for fp8 weight_dtype; take a recipe with blocks, such as deepseek_fp8"),
    "te_comm_gemm_overlap": (("disabled", "", None), "it overlaps Transformer Engine's own products; leave it at disabled"),
    "te_moe_block": ((False, None), "that block calls Transformer Engine; leave it false"),
    "te_gmm_quantization": (("", None), "it is for Transformer Engine's block of experts; leave it empty"),
    "moe_quantize_token_all_gather": ((False, None), "it asks Qwix for its rule; leave it false"),
    "moe_quantize_combine_bwd_method": (("", None), "it asks Qwix for its rule; leave it empty"),
}
"""The fields that the object cannot honour: their unset values, and advice."""


def configure_quantization(
    config: object, quant_mode_str: str = "train", *, recipe: RecipeLike | Policy | None = None
) -> Quantization | None:
    """The `quant` object of a configuration; replaces MaxText's function of this name.

    Args:
        config: an object with MaxText's fields; absent ones have MaxText's default.
        quant_mode_str: "train", "convert" or "serve".
        recipe: a Recipe, or anything that `fb.recipe` takes, instead of that of `config.quantization`; bind it with
            `functools.partial`.

    Returns:
        The object; None without `quantization`, and for a recipe that changes no matmul, such as `maxtext/te_no_quant`.

    Raises:
        QuantError: for an unknown value or field, or a field that the value does not read.
        UnsupportedError: for a field that the object cannot honour, with advice; for a recipe's rules of products.

    >>> import types
    >>> quant = configure_quantization(types.SimpleNamespace(quantization="int8", quantization_local_shard_count=-1), "serve")
    >>> print(quant.recipe, quant.quant_mode.value)
    maxtext/int8
      .* used by dot_general -> int8_aqt x int8_aqt, gradient int8_aqt serve
    """
    value = _text(getattr(config, "quantization", None))
    if recipe is None and not value:
        return None
    _refuse_fields(config, value, recipe is not None)
    shards = 1
    if recipe is None:
        recipe, shards = _recipe(config, value), _shards(config, value)
    quant = Quantization(recipe, quant_mode_str, shards=shards)
    if not any(rule.changes for rule in quant.rules):
        return None
    _check_experts(config, quant)
    return quant


def _text(value: object) -> str:
    """The text of a string or a member of MaxText's string enums; "" for None."""
    return str(getattr(value, "value", value) or "")


def _refuse_fields(config: object, value: str, has_recipe: bool) -> None:
    """Refuses a configuration that the object cannot honour."""
    reasons = {}
    for field, (unset, advice) in _REFUSED.items():
        given = getattr(config, field, unset[0])
        given = getattr(given, "value", given)
        if given not in unset:
            reasons[f"{field}={given!r}"] = advice
    weight_dtype = str(getattr(config, "weight_dtype", ""))
    if "float8" in weight_dtype or "fp8" in weight_dtype:
        reasons[f"weight_dtype={weight_dtype}"] = (
            "weights stored as fp8 with scales are MaxText's own to multiply; keep its configure_quantization for them, or store float "
            "weights and convert them here"
        )
    if value == "serve_fp8_weight" and not has_recipe:
        reasons["quantization='serve_fp8_weight'"] = (
            "it is for weights that MaxText stores as fp8; keep its configure_quantization for them, or pass recipe='maxtext/serve_fp8_weight' "
            "to convert and serve float weights"
        )
    if has_recipe and getattr(config, "use_qwix_quantization", False):
        reasons["use_qwix_quantization=True"] = "recipe= replaces it; leave it false"
    if reasons:
        raise UnsupportedError("this MaxText configuration cannot be honoured", reasons)


def _recipe(config: object, value: str) -> Recipe:
    """The recipe of `config.quantization`: one policy for every matmul, or rules by layer."""
    is_qwix = bool(getattr(config, "use_qwix_quantization", False))
    given = {field: getattr(config, field, unset[0]) for field, unset in _DEFAULTS.items()}
    fields = {field: x for field, x in given.items() if x not in _DEFAULTS[field]}
    if isinstance(bounds := fields.get("constant_bound_config"), str):
        try:
            fields["constant_bound_config"] = tuple(float(bound) for bound in bounds.split(","))
        except ValueError as error:
            raise QuantError(f"constant_bound_config is {bounds!r}, must be six numbers with commas between them") from error
    if "weight_sparsity_n" in fields:
        fields |= {field: getattr(config, field, default) for field, default in _SCHEDULE.items()}
    if _reads_shards(config, value) and getattr(config, _SHARDS, -1) == 0:
        fields[_SHARDS] = 0
    if value in ("int8", "fp8") or is_qwix:
        fields["use_qwix_quantization"] = is_qwix
    path = LAYERS
    if is_qwix and getattr(config, "quantize_mtp", False):
        path += "|(?:.*/)?mtp_block/.*"
    recipe = maxtext_recipe(value, path=path, **fields)
    rules = recipe.rules
    if not is_qwix and value != "intmp":
        # In these cases MaxText quantizes every layer that has the object.
        rules = tuple(dataclasses.replace(rule, path=".*") for rule in rules)
    if value == "fp8_full" and getattr(config, "mtp_num_layers", 0) and not getattr(config, "quantize_mtp", False):
        rules = (Rule("(?:.*/)?mtp_block/.*", None, optional=True), *rules)
    if not getattr(config, "quantize_router_proj", True):
        rules = (Rule(".*/gate/kernel", None, optional=True), *rules)
    return dataclasses.replace(recipe, rules=rules)


def _reads_shards(config: object, value: str) -> bool:
    """Whether a value of `quantization` reads `quantization_local_shard_count`."""
    return value in _SHARDED and (value != "fp8" or bool(getattr(config, "use_qwix_quantization", False)))


def _shards(config: object, value: str) -> int:
    """The number of parts of wgrad's contraction. -1 is one per local device, as in MaxText."""
    count = getattr(config, _SHARDS, -1)
    if count == 0 or not _reads_shards(config, value):
        return 1
    if count == -1:
        return jax.local_device_count()
    return count


def _check_experts(config: object, quant: Quantization) -> None:
    """Refuses unsupported modes of experts, and warns of experts that stay in floating point."""
    experts = getattr(config, "num_experts", 1)
    if experts <= 1:
        return
    is_sparse = getattr(config, "sparse_matmul", True)
    if quant.quant_mode != QuantMode.TRAIN:
        reasons = {}
        if is_sparse:
            reasons["sparse_matmul=True"] = (
                "MaxText's grouped matmul looks for stored weights where its NNX layers have none; set sparse_matmul=false"
            )
        if getattr(config, "scan_layers", True):
            reasons["scan_layers=True"] = (
                "MaxText cannot build scanned layers of experts without float weights; set scan_layers=false, with an "
                "unscanned checkpoint"
            )
        if getattr(config, "prefuse_moe_weights", False):
            reasons["prefuse_moe_weights=True"] = "MaxText has no fused weights in this mode; leave it false"
        if reasons:
            what = f"MaxText cannot {quant.quant_mode.value} experts (num_experts={experts})"
            raise UnsupportedError(
                f"{what}; or serve the float checkpoint (checkpoint_is_quantized=false), which quantizes in each product",
                reasons,
            )
    if not is_sparse:
        return
    if getattr(config, "use_qwix_quantization", False):
        if any("ragged_dot" in rule.ops for rule in quant.recipe.rules):
            advice = (
                "MaxText's grouped matmul reads its rule from Qwix, which is not used here; set use_qwix_quantization=false or "
                "sparse_matmul=false"
            )
            raise UnsupportedError(
                "experts cannot follow fp8_full with use_qwix_quantization=true", {"sparse_matmul=True": advice}
            )
        return  # Qwix's other values leave the experts in floating point
    has_kernel = any(getattr(config, field, default) for field, default in (("megablox", True), ("use_tokamax_gmm", False)))
    if not has_kernel:
        warnings.warn(
            "sparse_matmul=true with megablox=false: MaxText multiplies experts by jax.lax.ragged_dot, which uses no quant object, "
            "so they stay in floating point; set megablox=true or sparse_matmul=false to quantize them",
            stacklevel=3,
        )


def maybe_quantize_model(model: PyTree, config: object) -> PyTree:
    """Sets the path of each layer, for rules by layer. It replaces MaxText's function of this name.

    MaxText calls it on a new model. Its own rewrites the model by Qwix if `use_qwix_quantization` is set; here the object of
    `configure_quantization` implements that flag.

    Args:
        model: an NNX model; a Linen model is returned unchanged, since its modules know their paths.
        config: MaxText's configuration, of which only `scan_layers` is read: the model's `quant` object has the rest.

    Returns:
        The same model.

    Raises:
        QuantError: for a rule that matches no layer, unless it is optional.
        UnsupportedError: when flax is not installed.
    """
    nnx = flax("nnx")
    if not isinstance(model, nnx.Module):
        return model
    product, _ = modules()
    sites: dict[str, Rule | None] = {}
    quants = []
    for path, node in list(nnx.iter_graph(model)):
        if not isinstance(node, nnx.Module):
            continue
        place = "/".join(map(str, path))
        module, quant = vars(node).get("to_nnx__module"), vars(node).get("quant")
        if isinstance(module, product):
            site = f"{place.rpartition('/')[0]}/kernel".lstrip("/")
            node.to_nnx__module = module.clone(site=site)
            sites[site] = module.quant.rule(site)
            quants.append(module.quant)
            _fill(nnx, node, module.quant, sites[site])
        elif isinstance(quant, Quantization) and hasattr(node, "get_einsum"):
            node.quant = dataclasses.replace(quant, site=place)
            sites[place] = quant.rule(place, Role.EXPERTS)
            if quant.quant_mode == QuantMode.TRAIN and not getattr(config, "scan_layers", True):
                # MaxText creates them at the first call, which its unscanned layers refuse.
                for name in EXPERTS:
                    setattr(node, EINSUM + name, nnx.data(nnx.bridge.ToNNX(node.quant.einsum(), rngs=node.rngs)))
            if quant.quant_mode == QuantMode.SERVE:
                _add_einsums(nnx, node)
                for name in EXPERTS:
                    setattr(node, name, nnx.data(nnx.Param(_spared(getattr(node, name)))))
    for quant in dict.fromkeys(quants):
        _check_matched(quant, sites)
    return model


def _fill(nnx: ModuleType, node: PyTree, quant: Quantization, rule: Rule | None) -> None:
    """Replaces a module's placeholder by the variables of its rule, stacked as the layers are."""
    names = [name for name in vars(node) if name.startswith(PLACEHOLDER)]
    for name in names:
        placeholder = vars(node)[name]
        delattr(node, name)
        if name == CALLED:
            continue
        ndim, *axes = map(int, name.removeprefix(PLACEHOLDER).split("_"))
        recorded = placeholder.get_value()  # [*stack, *shape, 0]
        depth = recorded.ndim - 1 - ndim
        stack, shape = recorded.shape[:depth], recorded.shape[depth:-1]
        if quant.quant_mode != QuantMode.TRAIN:
            each = empty(lambda: stored(jnp.zeros(shape, recorded.dtype), tuple(axes), rule))  # noqa: B023 - called at once
            weight = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*stack, *leaf.shape)), each)  # noqa: B023
            node.qrhs = nnx.data({"frozen": placeholder.replace(value=weight)})
            continue
        if rule is not None and rule.sparsity is not None:
            node.mask = placeholder.replace(value=jnp.ones((*stack, *shape), jnp.bool_))
            node.step = placeholder.replace(value=jnp.zeros(stack, jnp.int32))
        if rule is not None and rule.policy is not None and rule.policy.delayed is not None:
            kind = nnx.variable_type_from_name(OVERWRITTEN, allow_register=True)
            for leaf, x in scale_leaves(rule.policy, stack).items():
                setattr(node, leaf, kind(x, **placeholder.get_metadata()))


def _add_einsums(nnx: ModuleType, node: Any) -> None:
    """Gives a layer of experts the modules of its einsums. They have zeros for the stored weights."""
    rule = node.quant.rule(node.quant.site, Role.EXPERTS)
    kind = nnx.variable_type_from_name(node.quant.collection, allow_register=True)
    for name in EXPERTS:
        like = jax.ShapeDtypeStruct(getattr(node, name).shape, node.dtype)  # [E, K, N]
        weight = empty(lambda: stored(jnp.zeros(like.shape, like.dtype), (1,), rule))  # noqa: B023 - called at once
        einsum = nnx.bridge.ToNNX(node.quant.einsum())
        einsum.AqtDotGeneral_0 = nnx.data({"qrhs": {"frozen": kind(weight)}})
        setattr(node, EINSUM + name, nnx.data(einsum))


def _spared(weight: jax.Array) -> jax.Array:
    """What MaxText's layer passes to an einsum that has its own weight.

    It is zeros with the number of experts and of axes of the weight.
    """
    return jnp.zeros((weight.shape[0], *[1] * (weight.ndim - 1)), weight.dtype)


def copy_parameters(target: PyTree, source: PyTree) -> None:
    """Copies every parameter to a model in the mode "convert"; replaces `LayerwiseQuantization._copy_kernel_leaves_`.

    MaxText's own copies no weights of experts.

    Args:
        target: the NNX model that converts, of `maybe_quantize_model`.
        source: the NNX model with the float parameters.

    Raises:
        UnsupportedError: when flax is not installed.
    """
    nnx = flax("nnx")
    nnx.update(target, nnx.state(source, nnx.Param))
    for _, node in list(nnx.iter_graph(target)):
        if isinstance(node, nnx.Module) and hasattr(node, "get_einsum") and isinstance(node.quant, Quantization):
            _add_einsums(nnx, node)


def strip_quantized(state: Mapping[str, Any]) -> dict[str, Any]:
    """Removes float weights that are stored; replaces `LayerwiseQuantization._strip_kernels_at_quantized_paths`.

    MaxText's own removes no weights of experts. A model that serves still has a parameter for each: zeros, one for an expert.

    Args:
        state: the variables of a model that has converted, nested dictionaries.

    Returns:
        The variables without those weights.

    >>> sorted(strip_quantized({"wi": {"kernel": jnp.ones((4, 32)), "AqtDotGeneral_0": {}, "bias": jnp.ones(32)}})["wi"])
    ['AqtDotGeneral_0', 'bias']
    """
    kept = {}
    for name, value in state.items():
        if name == "kernel" and "AqtDotGeneral_0" in state:
            continue
        if EINSUM + name in state:
            value = _spared(value)
        elif isinstance(value, Mapping):
            value = strip_quantized(value)
        kept[name] = value
    return kept


def _check_matched(quant: Quantization, sites: Mapping[str, Rule | None]) -> None:
    """Refuses a rule that matches no layer."""
    for number, rule in enumerate(quant.recipe.rules, 1):
        if rule in sites.values() or rule.optional or rule not in quant.rules:
            continue
        more = " and more" if len(sites) > 8 else ""
        raise QuantError(
            f"rule {number} of recipe {quant.recipe.name!r} ({rule}) matches no layer; MaxText's quantized layers are "
            f"{', '.join(list(sites)[:8])}{more}. Correct its path, or mark it optional"
        )


def remove_quantized_params(params: PyTree, aqt_vars: PyTree) -> PyTree:
    """Removes parameters that have a stored weight; replaces MaxText's function of this name.

    Args:
        params: the parameters, nested dictionaries.
        aqt_vars: the collection `aqt` of a run in the mode "convert".

    Returns:
        The tree with `{}` for each parameter that is stored.

    Raises:
        QuantError: for a stored weight without a parameter, so that no float weight is kept silently.

    >>> weight = StoredWeight(fb.quantize(jnp.ones((4, 32)), "int8"))
    >>> aqt = {"wi": {"AqtDotGeneral_0": {"qrhs": {"frozen": weight}}}}
    >>> remove_quantized_params({"wi": {"kernel": jnp.ones((4, 32)), "bias": jnp.ones(32)}}, aqt)["wi"]["kernel"]
    {}
    """
    removed: set[tuple[str, ...]] = set()
    for path, weight in _stored_weights(aqt_vars, ()):
        layer = _at(params, path)
        shape = tuple(weight.shape)
        of_shape = [name for name, x in layer.items() if _shape(x) == shape and (*path, name) not in removed]
        name = "kernel" if "kernel" in of_shape else next((name for name in sorted(of_shape) if name != "bias"), None)
        if name is None:
            have = {name: _shape(x) for name, x in layer.items()}
            raise QuantError(f"{'/'.join(path)}: no parameter has the shape {shape} of the stored weight: {have}")
        removed.add((*path, name))
    return _without(params, removed, ())


def _stored_weights(tree: PyTree, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The stored weights of a collection in order, with the paths of their layers."""
    for name in sorted(tree):
        value = tree[name]
        if name == "qrhs" and isinstance(value, Mapping) and "frozen" in value:
            layer = path[:-1]
            if layer and layer[-1].startswith("AqtEinsum_"):
                layer = layer[:-1]
            yield layer, value["frozen"].weight
        elif isinstance(value, Mapping):
            yield from _stored_weights(value, (*path, name))


def _at(tree: PyTree, path: tuple[str, ...]) -> Mapping[str, Any]:
    """The subtree at a path; empty where there is none."""
    for name in path:
        if not isinstance(tree, Mapping):
            return {}
        tree = tree.get(name, {})
    return tree if isinstance(tree, Mapping) else {}


def _shape(x: PyTree) -> tuple[int, ...] | None:
    """The shape of a parameter, boxed or not; None of a dictionary."""
    if isinstance(x, Mapping):
        return None
    return tuple(jax.tree.leaves(x)[0].shape)


def _without(tree: PyTree, removed: set[tuple[str, ...]], path: tuple[str, ...]) -> PyTree:
    if path in removed:
        return {}
    if not isinstance(tree, Mapping):
        return tree
    return {name: _without(value, removed, (*path, name)) for name, value in tree.items()}
