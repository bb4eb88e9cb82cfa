"""Recipes that need no other system to explain them: weights alone, or weights and activations, in one scheme."""

from ...ops import Policy
from ..recipe import RECIPES, Recipe, weight_only
from ..roles import WEIGHT_ROLES, Role
from ..rule import Rule

_TABLES = "; embedding tables as q8_0"

# name: scheme of the matrices, what that is
_WEIGHTS_IN_BLOCKS = {
    "int8": ("int8", "Weights in 8-bit integers, one scale a row, as Qwix's and compressed-tensors' int8"),
    "int4": ("int4_g32", "Weights in 4-bit integers, one scale for 32"),
    "uint4": ("uint4_g32", "Weights in 4-bit integers with zero points, one scale for 32, as AWQ and GPTQ files have it"),
    "int3": ("int3_g32", "Weights in 3-bit integers, one scale for 32"),
    "fp8": ("fp8", "Weights in E4M3, one scale a row, as compressed-tensors' channel-wise fp8"),
    "fp4": ("fp4", "Weights in E2M1, one scale for 64"),
    "nf4": ("nf4", "Weights in NF4, one scale for 64, as QLoRA and eFormer have it"),
    "mxfp4": ("mxfp4", "Weights in OCP MXFP4, scales by exact search"),
    "mxfp6": ("mxfp6", "Weights in OCP MXFP6 (E2M3), scales by exact search"),
    "mxfp8": ("mxfp8", "Weights in OCP MXFP8 (E4M3), scales by exact search"),
    "nvfp4": ("nvfp4", "Weights in NVIDIA's NVFP4, scales by exact search"),
    "nvint4": ("nvint4", "Weights in 4-bit integers with NVFP4's two levels of scales"),
}

for _name, (_scheme, _text) in _WEIGHTS_IN_BLOCKS.items():
    RECIPES.add(_name, weight_only(_scheme, name=_name, description=f"{_text}{_TABLES}."))


def _matrices(name: str, policy: Policy, description: str) -> None:
    """The recipe that gives every weight of a product a policy, and leaves embedding tables as they are."""
    rules = (Rule(".*", None, roles=(Role.EMBEDDING,), optional=True), Rule(".*", policy, roles=WEIGHT_ROLES))
    RECIPES.add(name, Recipe(rules, name, description))


_WHERE = "one scale an output channel"
_BOTH = f"{_WHERE} and a token, as Qwix's rule of the same types"

_matrices("w8", Policy("int8"), f"Weights in int8, {_WHERE}; embedding tables stay float.")
_matrices("w4", Policy("int4"), f"Weights in int4, {_WHERE}; embedding tables stay float.")
_matrices("w8a8", Policy("int8", "int8"), f"Products of int8 weights and int8 activations, {_BOTH}.")
_matrices("w4a8", Policy("int4", "int8"), f"Products of int4 weights and int8 activations, {_BOTH}.")
_matrices("fp8_w8a8", Policy("fp8", "fp8"), f"Products of E4M3 weights and activations, {_BOTH}.")
_matrices(
    "ternary",
    Policy("ternary", "int8_narrow"),
    "BitNet b1.58: weights -1, 0, 1 times their mean magnitude, int8 activations with one scale a token; embedding tables stay float.",
)

# Attention's values and outputs, and the projection back from the MLP, lose most at 4 bits in small Llamas; they take 8.
_sensitive = r".*(down|attn/v|attn/o|[vo]_proj.*|down_proj.*)"
_mixed_rules = (
    Rule(".*", Policy("q8_0"), roles=(Role.EMBEDDING,), optional=True),
    Rule(_sensitive, Policy("int8"), roles=WEIGHT_ROLES, optional=True),
    Rule(".*", Policy("nf4"), roles=WEIGHT_ROLES),
)
_mixed_text = "Weights in NF4, in int8 where small Llamas lose most (attention's values and outputs, the MLP's way back)"
RECIPES.add("mixed", Recipe(_mixed_rules, "mixed", f"{_mixed_text}{_TABLES}."))
