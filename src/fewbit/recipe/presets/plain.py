"""Weight-only and weight-activation recipes in one scheme."""

from ...ops.policy import Policy
from ..recipe import RECIPES, Recipe, weight_only
from ..role import WEIGHT_ROLES, Role
from ..rule import Rule

_TABLES = "; embedding tables as q8_0"

# name: scheme of the matrices, description
_WEIGHTS_IN_BLOCKS = {
    "int8": ("int8", "int8 weights, per-channel scales, as Qwix's and compressed-tensors' int8"),
    "int4": ("int4_g32", "int4 weights, group size 32"),
    "uint4": ("uint4_g32", "4-bit asymmetric weights (zero points), group size 32, as in AWQ and GPTQ files"),
    "int3": ("int3_g32", "int3 weights, group size 32"),
    "fp8": ("fp8", "E4M3 weights, per-channel scales, as compressed-tensors' channel-wise fp8"),
    "fp4": ("fp4", "E2M1 weights, group size 64"),
    "nf4": ("nf4", "NF4 weights, group size 64, as in QLoRA and eFormer"),
    "mxfp4": ("mxfp4", "OCP MXFP4 weights, scales by exact search"),
    "mxfp6": ("mxfp6", "OCP MXFP6 (E2M3) weights, scales by exact search"),
    "mxfp8": ("mxfp8", "OCP MXFP8 (E4M3) weights, scales by exact search"),
    "nvfp4": ("nvfp4", "NVIDIA NVFP4 weights, scales by exact search"),
    "nvint4": ("nvint4", "int4 weights with NVFP4's two levels of scales"),
}

for _name, (_scheme, _text) in _WEIGHTS_IN_BLOCKS.items():
    RECIPES.add(_name, weight_only(_scheme, name=_name, description=f"{_text}{_TABLES}."))


def _matrices(name: str, policy: Policy, description: str) -> None:
    """Registers a recipe with one policy for all weights; embedding tables stay float."""
    rules = (Rule(".*", None, roles=(Role.EMBEDDING,), optional=True), Rule(".*", policy, roles=WEIGHT_ROLES))
    RECIPES.add(name, Recipe(rules, name, description))


_WHERE = "per-channel scales; embedding tables stay float"
_BOTH = "per-channel weight scales, per-token activation scales, as Qwix's rule of the same types"

_matrices("w8", Policy("int8"), f"int8 weights, {_WHERE}.")
_matrices("w4", Policy("int4"), f"int4 weights, {_WHERE}.")
_matrices("w8a8", Policy("int8", "int8"), f"int8 weights and int8 activations, {_BOTH}.")
_matrices("w4a8", Policy("int4", "int8"), f"int4 weights and int8 activations, {_BOTH}.")
_matrices("fp8_w8a8", Policy("fp8", "fp8"), f"E4M3 weights and activations, {_BOTH}.")
_matrices(
    "ternary",
    Policy("ternary", "int8_narrow"),
    "BitNet b1.58: weights -1, 0, 1 times their mean magnitude, int8 activations with per-token scales; embedding tables "
    "stay float.",
)

# The value and output projections and the MLP's down projection lose most at 4 bits in small Llamas, so they have 8.
_sensitive = r".*(down|attn/v|attn/o|[vo]_proj.*|down_proj.*)"
_mixed_rules = (
    Rule(".*", Policy("q8_0"), roles=(Role.EMBEDDING,), optional=True),
    Rule(_sensitive, Policy("int8"), roles=WEIGHT_ROLES, optional=True),
    Rule(".*", Policy("nf4"), roles=WEIGHT_ROLES),
)
_mixed_text = "NF4 weights, int8 where small Llamas lose most (value, output and down projections)"
RECIPES.add("mixed", Recipe(_mixed_rules, "mixed", f"{_mixed_text}{_TABLES}."))
