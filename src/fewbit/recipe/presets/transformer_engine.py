"""Transformer Engine's recipes for training, by the names that MaxText gives them, with TE's defaults."""

from ...ops import Policy
from ...ops.delayed import DelayedScaling
from ...ops.policy import Arm
from ..recipe import RECIPES, Recipe
from ..roles import Role
from ..rule import Rule

_HYBRID_ARM = Arm("fp8_e5m2_tensor")
_MX_ARM = Arm("mxfp8_rceil", operand="mxfp8_rceil")
# A 16 x 16 block is the same block transposed, so the codes of the forward pass serve the gradient of the activation, too.
_NV_DGRAD = Arm("nvfp4_absmax", rounding="stochastic")


def _nv_wgrad(hadamard: int | None) -> Arm:
    return Arm("nvfp4_absmax", operand="nvfp4_absmax", rounding="stochastic", hadamard=hadamard)


TE_POLICIES: dict[str, tuple[Policy, str]] = {
    "te_fp8_delayedscaling": (
        Policy("fp8_tensor", "fp8_tensor", _HYBRID_ARM, _HYBRID_ARM, delayed=DelayedScaling()),
        "E4M3 forwards, E5M2 gradients, one scale a tensor from the 1024 steps before: TE's DelayedScaling().",
    ),
    "te_fp8_currentscaling": (
        Policy("fp8_tensor", "fp8_tensor", _HYBRID_ARM, _HYBRID_ARM),
        "E4M3 forwards, E5M2 gradients, one scale a tensor from the tensor at hand: TE's Float8CurrentScaling().",
    ),
    "te_mxfp8": (
        Policy("mxfp8_rceil", "mxfp8_rceil", _MX_ARM, _MX_ARM),
        "MXFP8 (E4M3, 32 to an E8M0 scale) in all three products, each operand quantized once along each: TE's MXFP8BlockScaling().",
    ),
    "te_nvfp4": (
        Policy("nvfp4_16x16", "nvfp4_absmax", _NV_DGRAD, _nv_wgrad(16)),
        "NVFP4 in all three products: weights in 16 x 16 blocks, gradients rounded stochastically, a random Hadamard rotation of 16 "
        "in the weight's gradient: TE's NVFP4BlockScaling().",
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
