"""Recipes with the numerics of each value of MaxText's `quantization`.

`fb.recipe("maxtext/<value>")` is the value with MaxText's other settings at their defaults. `int8` and `fp8` are ambiguous
in MaxText; with `use_qwix_quantization` they are `maxtext/int8_qwix` and `maxtext/fp8_qwix`. The plain names `int8`, `int4`,
`fp8` and `fp4` are weight-only recipes of fewbit, for inference.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..._registry import near_names
from ...array.scales.absmax import AbsMax
from ...array.scales.calibration import parse_calibration
from ...array.scales.fixed import Fixed
from ...array.scales.minmax import MinMax
from ...array.scheme import SCHEMES, Scheme
from ...errors import QuantError, UnsupportedError
from ...formats.format import FORMATS
from ...ops.delayed import DelayedScaling
from ...ops.policy import Arm, Policy
from ..recipe import RECIPES, Recipe
from ..rule import Rule
from ..sparsity import Sparsity
from .mixed_precision import LAYERS, maxtext_mixed_precision
from .transformer_engine import TE_POLICIES

_FP4_ROW = Scheme(FORMATS["e2m1"], {...: 1, -1: None})
_SHARDS, _QWIX_FLAG = "quantization_local_shard_count", "use_qwix_quantization"
_CALIBRATIONS = tuple(f"{who}_quantization_calibration_method" for who in ("weight", "act", "bwd", "drhs_grad"))
_SPARSITY = tuple(f"weight_sparsity_{field}" for field in ("n", "m", "start_step", "update_step"))


def maxtext_recipe(
    quantization: str,
    *,
    use_qwix_quantization: bool | None = None,
    quantization_local_shard_count: int | None = None,
    weight_quantization_calibration_method: str | None = None,
    act_quantization_calibration_method: str | None = None,
    bwd_quantization_calibration_method: str | None = None,
    drhs_grad_quantization_calibration_method: str | None = None,
    constant_bound_config: Sequence[float | None] | None = None,
    quant_cfg_path: str | os.PathLike | Mapping[str, Any] | None = None,
    weight_block_size: int | None = None,
    weight_sparsity_n: int | None = None,
    weight_sparsity_m: int | None = None,
    weight_sparsity_start_step: int | None = None,
    weight_sparsity_update_step: int | None = None,
    path: str = LAYERS,
) -> Recipe:
    """The recipe of MaxText's `quantization` and its related fields.

    A field that a value does not read in MaxText is refused. Accumulation and scales are float32 here, in MaxText they have
    the activation's dtype. Products are selected by the parameter they use, so attention's scores stay float.

    Args:
        quantization: the value: int8, int4, intmp, fp8, fp8_e4m3, fp8_e5m2, fp8_full, fp8_gpu, fp8_nanoo, nanoo_fp8, fp4,
            aqt_fp8, aqt_fp8_full, serve_fp8_weight, te_fp8_delayedscaling, te_fp8_currentscaling, te_mxfp8, te_nvfp4,
            te_nvfp4_no_rht or te_no_quant.
        use_qwix_quantization: whether Qwix computes it; None: as the value implies, with AQT for int8 and Flax for fp8.
        quantization_local_shard_count: for int8, int4, fp4, fp8_e4m3, fp8_e5m2: the number of parts of the contraction of
            wgrad. None is 1; 0 computes wgrad in floating point (AQT's int8 only).
        weight_quantization_calibration_method: for fp8_full: "absmax", "absmax,0.9", "rms,7" or "fixed,max"; None: "absmax".
        act_quantization_calibration_method: the same for activations; also for serve_fp8_weight.
        bwd_quantization_calibration_method: for fp8_full, the same for gradients.
        drhs_grad_quantization_calibration_method: for fp8_full, the gradient's calibration in wgrad.
        constant_bound_config: for aqt_fp8_full, six amax: activation, weight in the forward pass; gradient, weight in dgrad;
            gradient, activation in wgrad. None for one, or for all, takes them from the array.
        quant_cfg_path: for intmp, the JSON or its file, see `maxtext_mixed_precision`.
        weight_block_size: for serve_fp8_weight: None: per-tensor scales; n: weights in n x n blocks, activations in n.
        weight_sparsity_n: for fp8_full, how many of `weight_sparsity_m` weights along the contraction are kept (None: all).
        weight_sparsity_m: the group size of the sparsity.
        weight_sparsity_start_step: the step of the first mask; None is 50.
        weight_sparsity_update_step: the number of steps between masks; None is 10.
        path: which parameters; MaxText's are those of the decoder's layers.

    Returns:
        The recipe.

    Raises:
        QuantError: for an unknown value, and for a field that the value does not read.
        UnsupportedError: for more than one shard, whose tiles depend on the batch.

    >>> print(maxtext_recipe("fp8_full", act_quantization_calibration_method="fixed,6"))
    maxtext/fp8_full
      (?!.*encoder/).*layers.* used by dot_general or ragged_dot -> fp8 x e4m3fn{}, gradient fp8_e5m2
    """
    fields = {name: value for name, value in locals().items() if name not in ("quantization", "path") and value is not None}
    qwix = fields.pop(_QWIX_FLAG, None)
    if quantization not in VALUES:
        raise QuantError(f"unknown quantization {quantization!r}; {near_names(quantization, tuple(VALUES))}")
    in_qwix = _in_qwix(quantization, qwix)
    name, table = f"maxtext/{quantization}", _OWN
    if in_qwix:
        table = _QWIX
        if quantization in _OWN:
            name += "_qwix"
    make, read, text = table[quantization]
    for field in fields:
        if field not in read:
            what = ", ".join(read) or "none"
            raise QuantError(f"quantization {quantization!r} does not read {field} in MaxText (it reads {what})")
    if quantization == "intmp":
        if quant_cfg_path is None:
            raise QuantError("quantization 'intmp' needs quant_cfg_path, a JSON of bits by layer")
        return maxtext_mixed_precision(quant_cfg_path, name=name, path=path, description=text)
    ops = ("dot_general", "ragged_dot") if quantization == "fp8_full" else ("dot_general",)
    return Recipe((Rule(path, make(fields), ops=ops, sparsity=_sparsity(fields)),), name, text)


def _sparsity(fields: Mapping[str, Any]) -> Sparsity | None:
    """The sparsity of the fields."""
    if fields.keys().isdisjoint(_SPARSITY):
        return None
    n, m, start, update = map(fields.get, _SPARSITY, (None, None, 50, 10))
    if n is None or m is None:
        raise QuantError(f"{_SPARSITY[0]} is {n} and {_SPARSITY[1]} {m}; sparsity needs both")
    return Sparsity(n, m, start_step=start, update_step=update)


def _in_qwix(quantization: str, asked: bool | None) -> bool:
    """Whether Qwix computes a value."""
    can = {place for place, values in ((True, _QWIX), (False, _OWN)) if quantization in values}
    if asked is None:
        return False not in can
    if asked not in can:
        raise QuantError(f"quantization {quantization!r} needs {_QWIX_FLAG}={not asked}")
    return asked


# --- the numerics, each a Policy from the given fields ---


def _aqt_int8(fields: Mapping[str, Any]) -> Policy:
    """AQT's config_v3: all int8, gradients rounded stochastically; dgrad and wgrad quantize the float operands."""
    arm = Arm("int8_aqt", operand="int8_aqt", rounding="stochastic", tiled_axis="first")
    drhs = arm if _shards(fields, allowed=(0, 1)) else Arm(operand="original")
    return Policy("int8_aqt", "int8_aqt", arm, drhs, clips_gradient=False)


def _qwix(scheme: str | Scheme) -> Callable[[Mapping[str, Any]], Policy]:
    """Qwix's rule of one type. dgrad and wgrad use the codes of the forward pass."""

    def make(fields: Mapping[str, Any]) -> Policy:
        _shards(fields, allowed=(1,))
        arm = Arm(scheme)
        return Policy(scheme, scheme, arm, arm)

    return make


def _fp8_full(fields: Mapping[str, Any]) -> Policy:
    """Qwix's E4M3 forward and E5M2 backward, each with its calibration."""
    weight, activation, gradient, drhs = (fields.get(name) for name in _CALIBRATIONS)
    dlhs, wgrad = (Arm(_calibrated("fp8_e5m2", text)) for text in (gradient, drhs or gradient))
    return Policy(_calibrated("fp8", weight), _calibrated("fp8", activation), dlhs, wgrad)


def _delayed(forward: str, backward: str) -> Callable[[Mapping[str, Any]], Policy]:
    """Flax's fp8 operations: per-tensor delayed scaling over 1024 steps."""
    arm = Arm(backward)
    return lambda fields: Policy(forward, forward, arm, arm, delayed=DelayedScaling())


def _aqt_fp8(fields: Mapping[str, Any]) -> Policy:
    """E4M3 forward, float backward from the unquantized operands."""
    arm = Arm(operand="original")
    return Policy("fp8", "fp8", arm, arm, clips_gradient=False)


def _aqt_fp8_full(fields: Mapping[str, Any]) -> Policy:
    """E4M3 forward, E5M2 backward for both operands; per-tensor scales, optionally constant."""
    bounds = tuple(fields.get("constant_bound_config", ())) or (None,) * 6
    if len(bounds) != 6:
        raise QuantError(f"constant_bound_config has {len(bounds)} numbers; it takes six, or none")
    names = ("fp8_tensor",) * 2 + ("fp8_e5m2_tensor",) * 4
    schemes = [_calibrated(n, None if b is None else f"fixed,{b}") for n, b in zip(names, bounds, strict=True)]
    activation, weight, g_left, weight_again, g_right, activation_again = schemes
    dlhs, drhs = Arm(g_left, operand=weight_again), Arm(g_right, operand=activation_again)
    return Policy(weight, activation, dlhs, drhs, clips_gradient=False)


def _serve_fp8(fields: Mapping[str, Any]) -> Policy:
    """E4M3 weights as stored, E4M3 activations with the same block size."""
    block = fields.get("weight_block_size")
    weight = activation = SCHEMES["fp8_tensor"]
    if block is not None:
        weight, activation = Scheme(FORMATS["e4m3fn"], {...: 1, -2: block, -1: block}), SCHEMES["fp8"].with_tile(block)
    return Policy(weight, _calibrated(activation, fields.get(_CALIBRATIONS[1])))


def _calibrated(scheme: str | Scheme, text: str | None) -> Scheme:
    """The scheme with a calibration in Qwix's grammar; a constant range is per-tensor."""
    if isinstance(scheme, str):
        scheme = SCHEMES[scheme]
    if text is None:
        return scheme
    calibration, tile = parse_calibration(text), scheme.tile
    if isinstance(calibration, MinMax) or (isinstance(calibration, Fixed) and calibration.low != -calibration.high):
        raise QuantError(
            f"calibration {text!r} is asymmetric, but floating-point codes are symmetric; use absmax or fixed,max"
        )
    if isinstance(calibration, Fixed):
        tile = {}
    elif calibration == AbsMax():
        calibration = scheme.calibration
    return Scheme(scheme.format, tile, calibration=calibration)


def _shards(fields: Mapping[str, Any], allowed: tuple[int, ...]) -> int:
    """The shard count; UnsupportedError for one that is not allowed."""
    count = fields.get(_SHARDS, 1)
    if count not in allowed:
        raise UnsupportedError(
            f"{_SHARDS}={count}: tiles have a fixed length here, and that of {count} shards of wgrad's contraction "
            "depends on the "
            f"batch. Pass {' or '.join(map(str, allowed))}, or write a recipe whose drhs schemes have that tile"
        )
    return count


_Value = tuple[Callable[[Mapping[str, Any]], Policy | None], tuple[str, ...], str]


def _te(name: str) -> _Value:
    policy, text = TE_POLICIES[name]
    return lambda fields: policy, (), text


_ANY = "weights, activations and gradients, per-channel and per-token scales: MaxText's Qwix rule"

_OWN: dict[str, _Value] = {
    "int8": (_aqt_int8, (_SHARDS,), "int8 in forward, dgrad and wgrad, gradients rounded stochastically: AQT's config_v3."),
    "intmp": (lambda fields: None, ("quant_cfg_path",), "MaxText's intmp: AQT's integers with bits by layer."),
    "fp8": (
        _delayed("fp8_tensor", "fp8_e5m2_tensor"),
        (),
        "E4M3 forward, E5M2 gradients, scales from the last 1024 steps: Flax's Fp8DirectDotGeneralOp.",
    ),
    "nanoo_fp8": (
        _delayed("fp8_e4m3fnuz_tensor", "fp8_e5m2fnuz_tensor"),
        (),
        "AMD's fnuz E4M3 and E5M2, scales from the last 1024 steps: Flax's NANOOFp8DotGeneralOp.",
    ),
    "aqt_fp8": (
        _aqt_fp8,
        (),
        "E4M3 forward, per-channel and per-token scales, float backward: AQT's config_fwd_fp8.",
    ),
    "aqt_fp8_full": (
        _aqt_fp8_full,
        ("constant_bound_config",),
        "E4M3 forward, E5M2 for both operands backward, per-tensor scales: AQT's fp8 with six optional constant bounds.",
    ),
    "serve_fp8_weight": (
        _serve_fp8,
        ("weight_block_size", _CALIBRATIONS[1]),
        "For serving: E4M3 weights as stored, E4M3 activations, never dequantized: MaxText's native_fp8_dot_general.",
    ),
    **{name: _te(name) for name in TE_POLICIES},
    "te_no_quant": (lambda fields: None, (), "Transformer Engine without quantization."),
}
"""Values of MaxText without Qwix: the policy, the fields it reads, the description."""

_QWIX: dict[str, _Value] = {
    "int8": (_qwix("int8"), (_SHARDS,), f"int8 {_ANY}."),
    "int4": (_qwix("int4"), (_SHARDS,), f"int4 {_ANY}."),
    "fp4": (_qwix(_FP4_ROW), (_SHARDS,), f"E2M1 {_ANY}."),
    "fp8": (_qwix("fp8"), (_SHARDS,), f"E4M3 {_ANY}."),
    "fp8_e4m3": (_qwix("fp8"), (_SHARDS,), f"E4M3 {_ANY}."),
    "fp8_e5m2": (_qwix("fp8_e5m2"), (_SHARDS,), f"E5M2 {_ANY}."),
    "fp8_full": (
        _fp8_full,
        (*_CALIBRATIONS, *_SPARSITY),
        "E4M3 weights and activations, E5M2 gradients, MoE's ragged products too: MaxText's Qwix rule with selectable "
        "calibrations.",
    ),
    "fp8_gpu": (_OWN["fp8"][0], (), "maxtext/fp8 through Qwix: the same operation in Flax."),
    "fp8_nanoo": (_OWN["nanoo_fp8"][0], (), "maxtext/nanoo_fp8 through Qwix: the same operation in Flax."),
}
"""The same for values of MaxText with Qwix."""

VALUES = tuple(dict.fromkeys((*_OWN, *_QWIX)))
"""Every value of MaxText's `quantization`."""

for _value in VALUES:
    if _value != "intmp":
        _recipe = maxtext_recipe(_value)
        RECIPES.add(_recipe.name, _recipe)
for _value in ("int8", "fp8"):
    _recipe = maxtext_recipe(_value, use_qwix_quantization=True)
    RECIPES.add(_recipe.name, _recipe)
