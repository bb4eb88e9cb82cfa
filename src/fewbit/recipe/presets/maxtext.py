"""Every value of MaxText's `quantization`, with the numerics that it has there: AQT's, Qwix's, Flax's, Transformer Engine's.

`fb.recipe("maxtext/<value>")` is the value with MaxText's other settings at their defaults. `int8` and `fp8` mean two things in
MaxText; with `use_qwix_quantization` they are `maxtext/int8_qwix` and `maxtext/fp8_qwix`. The bare names `int8`, `int4`, `fp8` and
`fp4` are weight-only recipes of fewbit, which are for inference.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..._registry import near_names
from ...array import SCHEMES, Scheme
from ...array.scales import AbsMax, Fixed, MinMax, parse_calibration
from ...errors import QuantError, UnsupportedError
from ...formats import FORMATS
from ...ops import Policy
from ...ops.delayed import DelayedScaling
from ...ops.policy import Arm
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
    """The recipe of MaxText's `quantization` and of the fields beside it, by MaxText's names.

    A field that a value does not read in MaxText is refused. Accumulation and scales are float32 here, where MaxText's are the
    activation's dtype; a layer's products are told by the parameter they use, so attention's scores stay float.

    Args:
        quantization: the value: int8, int4, intmp, fp8, fp8_e4m3, fp8_e5m2, fp8_full, fp8_gpu, fp8_nanoo, nanoo_fp8, fp4, aqt_fp8,
            aqt_fp8_full, serve_fp8_weight, te_fp8_delayedscaling, te_fp8_currentscaling, te_mxfp8, te_nvfp4, te_nvfp4_no_rht or
            te_no_quant.
        use_qwix_quantization: whether Qwix does it; None: what the value says, and where it can mean both AQT's int8 and Flax's fp8.
        quantization_local_shard_count: for int8, int4, fp4, fp8_e4m3, fp8_e5m2: in how many parts the contraction of the weight's
            gradient is cut. None is 1; 0 leaves that product in floating point (AQT's int8 only).
        weight_quantization_calibration_method: for fp8_full: "absmax", "absmax,0.9", "rms,7" or "fixed,max"; None is "absmax".
        act_quantization_calibration_method: the same for activations; also for serve_fp8_weight.
        bwd_quantization_calibration_method: for fp8_full, the same for gradients.
        drhs_grad_quantization_calibration_method: for fp8_full, in place of it in the weight's gradient.
        constant_bound_config: for aqt_fp8_full, six largest magnitudes: activation, weight; gradient, weight in the activation's
            gradient; gradient, activation in the weight's. None for one, or for all, takes them from the array.
        quant_cfg_path: for intmp, the JSON or its file, see `maxtext_mixed_precision`.
        weight_block_size: for serve_fp8_weight: None: one scale a tensor; n: weights in n x n blocks, activations in n.
        weight_sparsity_n: for fp8_full, how many of each `weight_sparsity_m` weights along the contracted axis are kept; None: all.
        weight_sparsity_m: how many weights make a group.
        weight_sparsity_start_step: the step of the first mask; None is 50.
        weight_sparsity_update_step: how many steps later each next mask is made; None is 10.
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
    make, read, text = (_QWIX if in_qwix else _OWN)[quantization]
    for field in fields:
        if field not in read:
            what = f"it reads {', '.join(read)}" if read else "it reads none"
            raise QuantError(f"quantization {quantization!r} does not read {field} in MaxText ({what})")
    name = f"maxtext/{quantization}" + ("_qwix" if in_qwix and quantization in _OWN else "")
    if quantization == "intmp":
        if quant_cfg_path is None:
            raise QuantError("quantization 'intmp' needs quant_cfg_path, a JSON of bits by layer")
        return maxtext_mixed_precision(quant_cfg_path, name=name, path=path, description=text)
    ops = ("dot_general", "ragged_dot") if quantization == "fp8_full" else ("dot_general",)
    return Recipe((Rule(path, make(fields), ops=ops, sparsity=_sparsity(fields)),), name, text)


def _sparsity(fields: Mapping[str, Any]) -> Sparsity | None:
    """The sparsity that the fields ask for."""
    n, m, start, update = (fields.get(name) for name in _SPARSITY)
    if n is None and m is None and start is None and update is None:
        return None
    if n is None or m is None:
        raise QuantError(f"{_SPARSITY[0]} is {n} and {_SPARSITY[1]} {m}; sparsity needs both")
    return Sparsity(n, m, start_step=50 if start is None else start, update_step=10 if update is None else update)


def _in_qwix(quantization: str, asked: bool | None) -> bool:
    """Whether Qwix computes a value."""
    can = {place for place, values in ((True, _QWIX), (False, _OWN)) if quantization in values}
    if asked is not None and asked not in can:
        raise QuantError(f"quantization {quantization!r} needs {_QWIX_FLAG}={not asked}")
    return asked if asked is not None else False not in can


# --- the numerics, each a Policy from the fields that were given ---


def _aqt_int8(fields: Mapping[str, Any]) -> Policy:
    """AQT's config_v3: all int8, gradients by chance; the backward operands are quantized anew from floating point."""
    arm = Arm("int8_aqt", operand="int8_aqt", rounding="stochastic", tiled_axis="first")
    drhs = arm if _shards(fields, allowed=(0, 1)) else Arm(operand="original")
    return Policy("int8_aqt", "int8_aqt", arm, drhs, clips_gradient=False)


def _qwix(scheme: str | Scheme) -> Callable[[Mapping[str, Any]], Policy]:
    """Qwix's rule of one type for weight, activation and gradient: gradients meet the codes of the forward pass."""

    def make(fields: Mapping[str, Any]) -> Policy:
        _shards(fields, allowed=(1,))
        arm = Arm(scheme)
        return Policy(scheme, scheme, arm, arm)

    return make


def _fp8_full(fields: Mapping[str, Any]) -> Policy:
    """Qwix's E4M3 forwards and E5M2 backwards, each with the calibration asked for."""
    weight, activation, gradient, drhs = (fields.get(name) for name in _CALIBRATIONS)
    dlhs, wgrad = (Arm(_calibrated("fp8_e5m2", text)) for text in (gradient, drhs or gradient))
    return Policy(_calibrated("fp8", weight), _calibrated("fp8", activation), dlhs, wgrad)


def _delayed(forward: str, backward: str) -> Callable[[Mapping[str, Any]], Policy]:
    """Flax's fp8 operations: one scale a tensor, from the 1024 steps before."""
    arm = Arm(backward)
    return lambda fields: Policy(forward, forward, arm, arm, delayed=DelayedScaling())


def _aqt_fp8(fields: Mapping[str, Any]) -> Policy:
    """E4M3 forwards, float backwards from the operands as they came."""
    arm = Arm(operand="original")
    return Policy("fp8", "fp8", arm, arm, clips_gradient=False)


def _aqt_fp8_full(fields: Mapping[str, Any]) -> Policy:
    """E4M3 forwards; backwards E5M2 for both operands; one scale a tensor, perhaps constant."""
    bounds = tuple(fields.get("constant_bound_config", ())) or (None,) * 6
    if len(bounds) != 6:
        raise QuantError(f"constant_bound_config has {len(bounds)} numbers; it takes six, or none")
    names = ("fp8_tensor",) * 2 + ("fp8_e5m2_tensor",) * 4
    schemes = [_calibrated(n, None if b is None else f"fixed,{b}") for n, b in zip(names, bounds, strict=True)]
    activation, weight, g_left, weight_again, g_right, activation_again = schemes
    dlhs, drhs = Arm(g_left, operand=weight_again), Arm(g_right, operand=activation_again)
    return Policy(weight, activation, dlhs, drhs, clips_gradient=False)


def _serve_fp8(fields: Mapping[str, Any]) -> Policy:
    """E4M3 weights as they are stored, E4M3 activations with scales of the same grain."""
    block = fields.get("weight_block_size")
    if block is None:
        weight, activation = SCHEMES["fp8_tensor"], SCHEMES["fp8_tensor"]
    else:
        weight, activation = Scheme(FORMATS["e4m3fn"], {...: 1, -2: block, -1: block}), SCHEMES["fp8"].with_tile(block)
    return Policy(weight, _calibrated(activation, fields.get(_CALIBRATIONS[1])))


def _calibrated(scheme: str | Scheme, text: str | None) -> Scheme:
    """The scheme with a calibration of Qwix's grammar; a constant range is one for the whole tensor."""
    plain = SCHEMES[scheme] if isinstance(scheme, str) else scheme
    if text is None:
        return plain
    calibration = parse_calibration(text)
    if isinstance(calibration, MinMax) or (isinstance(calibration, Fixed) and calibration.low != -calibration.high):
        raise QuantError(
            f"calibration {text!r} is asymmetric, which floating-point codes cannot be; use absmax or fixed,max"
        )
    tile = {} if isinstance(calibration, Fixed) else plain.tile
    return Scheme(plain.format, tile, calibration=calibration if calibration != AbsMax() else plain.calibration)


def _shards(fields: Mapping[str, Any], allowed: tuple[int, ...]) -> int:
    """The shard count, of those that can be expressed."""
    count = fields.get(_SHARDS, 1)
    if count not in allowed:
        raise UnsupportedError(
            f"{_SHARDS}={count}: a tile of the weight's gradient has a length here, and the contraction over {count} depends on the "
            f"batch. Pass {' or '.join(map(str, allowed))}, or write the recipe with drhs schemes of that tile"
        )
    return count


_Value = tuple[Callable[[Mapping[str, Any]], Policy | None], tuple[str, ...], str]


def _te(name: str) -> _Value:
    policy, text = TE_POLICIES[name]
    return lambda fields: policy, (), text


_ANY = "weights, activations and gradients, one scale an output channel and a token: MaxText's Qwix rule"

_OWN: dict[str, _Value] = {
    "int8": (_aqt_int8, (_SHARDS,), "int8 in all three products, gradients rounded stochastically: AQT's config_v3."),
    "intmp": (lambda fields: None, ("quant_cfg_path",), "MaxText's intmp: AQT's integers with bits by layer."),
    "fp8": (
        _delayed("fp8_tensor", "fp8_e5m2_tensor"),
        (),
        "E4M3 forwards, E5M2 gradients, scales from the 1024 steps before: Flax's Fp8DirectDotGeneralOp.",
    ),
    "nanoo_fp8": (
        _delayed("fp8_e4m3fnuz_tensor", "fp8_e5m2fnuz_tensor"),
        (),
        "AMD's fnuz E4M3 and E5M2, scales from the 1024 steps before: Flax's NANOOFp8DotGeneralOp.",
    ),
    "aqt_fp8": (
        _aqt_fp8,
        (),
        "E4M3 forwards, one scale an output channel and a token, float backwards: AQT's config_fwd_fp8.",
    ),
    "aqt_fp8_full": (
        _aqt_fp8_full,
        ("constant_bound_config",),
        "E4M3 forwards, E5M2 for both operands backwards, one scale a tensor: AQT's fp8 with six optional constant bounds.",
    ),
    "serve_fp8_weight": (
        _serve_fp8,
        ("weight_block_size", _CALIBRATIONS[1]),
        "For serving: E4M3 weights as stored, E4M3 activations, never decoded: MaxText's native_fp8_dot_general.",
    ),
    **{name: _te(name) for name in TE_POLICIES},
    "te_no_quant": (lambda fields: None, (), "Transformer Engine without quantization: every layer as it is."),
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
        "E4M3 weights and activations, E5M2 gradients, MoE's ragged products too: MaxText's Qwix rule, calibrations to choose.",
    ),
    "fp8_gpu": (_OWN["fp8"][0], (), "maxtext/fp8 by way of Qwix: the same operation in Flax."),
    "fp8_nanoo": (_OWN["nanoo_fp8"][0], (), "maxtext/nanoo_fp8 by way of Qwix: the same operation in Flax."),
}
"""Values of MaxText with Qwix, likewise."""

VALUES = tuple(dict.fromkeys((*_OWN, *_QWIX)))
"""Every value of MaxText's `quantization`."""

for _value in VALUES:
    if _value != "intmp":
        _recipe = maxtext_recipe(_value)
        RECIPES.add(_recipe.name, _recipe)
for _value in ("int8", "fp8"):
    _recipe = maxtext_recipe(_value, use_qwix_quantization=True)
    RECIPES.add(_recipe.name, _recipe)
