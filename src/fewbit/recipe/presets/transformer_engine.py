"""Transformer Engine's training recipes with its defaults, by MaxText's names."""

from ...ops.delayed import DelayedScaling
from ...ops.policy import Arm, Policy
from ..recipe import RECIPES, Recipe
from ..role import Role
from ..rule import Rule

_HYBRID_ARM = Arm("fp8_e5m2_tensor")
_MX_ARM = Arm("mxfp8_rceil", operand="mxfp8_rceil")
# A 16 x 16 block is the same block transposed, so dgrad uses the codes of the forward pass.
_NV_DGRAD = Arm("nvfp4_absmax", rounding="stochastic")


def _nv_wgrad(hadamard: int | None) -> Arm:
    return Arm("nvfp4_absmax", operand="nvfp4_absmax", rounding="stochastic", hadamard=hadamard)


TE_POLICIES: dict[str, tuple[Policy, str]] = {
    "te_fp8_delayedscaling": (
        Policy("fp8_tensor", "fp8_tensor", _HYBRID_ARM, _HYBRID_ARM, delayed=DelayedScaling()),
        "E4M3 forward, E5M2 gradients, per-tensor scales from the last 1024 steps: TE's DelayedScaling().",
    ),
    "te_fp8_currentscaling": (
        Policy("fp8_tensor", "fp8_tensor", _HYBRID_ARM, _HYBRID_ARM),
        "E4M3 forward, E5M2 gradients, per-tensor scales of the current tensor: TE's Float8CurrentScaling().",
    ),
    "te_mxfp8": (
        Policy("mxfp8_rceil", "mxfp8_rceil", _MX_ARM, _MX_ARM),
        "MXFP8 (E4M3, E8M0 scales, block size 32) in forward, dgrad and wgrad, each operand quantized along each "
        "contraction axis: "
        "TE's MXFP8BlockScaling().",
    ),
    "te_nvfp4": (
        Policy("nvfp4_16x16", "nvfp4_absmax", _NV_DGRAD, _nv_wgrad(16)),
        "NVFP4 in forward, dgrad and wgrad: weights in 16 x 16 blocks, gradients rounded stochastically, a random "
        "Hadamard rotation "
        "of 16 in wgrad: TE's NVFP4BlockScaling().",
    ),
    "te_nvfp4_no_rht": (
        Policy("nvfp4_16x16", "nvfp4_absmax", _NV_DGRAD, _nv_wgrad(None)),
        "te_nvfp4 without the Hadamard rotation: TE's NVFP4BlockScaling(disable_rht=True).",
    ),
}
"""The policy and the description of each of Transformer Engine's recipes."""

for _name, (_policy, _text) in TE_POLICIES.items():
    _rules = (Rule(".*", None, roles=(Role.EMBEDDING,), optional=True), Rule(".*", _policy, ops=("dot_general",)))
    RECIPES.add(_name, Recipe(_rules, _name, _text))
