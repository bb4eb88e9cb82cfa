"""The named recipes."""

from ..ops import Policy
from .recipe import RECIPES, Recipe, weight_only
from .rule import Rule

for _name, _scheme in {
    "int8": "int8",
    "int4": "int4_g32",
    "uint4": "uint4_g32",
    "int3": "int3_g32",
    "fp8": "fp8",
    "fp4": "fp4",
    "nf4": "nf4",
    "mxfp4": "mxfp4",
    "mxfp6": "mxfp6",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
    "nvint4": "nvint4",
    "ternary": "ternary",
}.items():
    RECIPES.add(_name, weight_only(_scheme, name=_name))


def _weights_and_activations(name: str, scheme: str) -> Recipe:
    """Both operands of every product in one scheme; tables as in the weight-only recipes."""
    table = Rule(".*", Policy("q8_0"), ops=("take",), optional=True)
    return Recipe((table, Rule(".*", Policy(scheme, activation=scheme), ops=("dot_general",))), name)


RECIPES.add("w8a8", _weights_and_activations("w8a8", "int8"))
RECIPES.add("fp8_w8a8", _weights_and_activations("fp8_w8a8", "fp8"))

# Attention's values and outputs, and the projection back from the MLP, lose most at 4 bits in small Llamas; they take 8.
RECIPES.add(
    "mixed",
    Recipe(
        (
            Rule(".*", Policy("q8_0"), ops=("take",), optional=True),
            Rule(r".*(down|attn/v|attn/o|[vo]_proj.*|down_proj.*)", Policy("int8"), ops=("dot_general",), optional=True),
            Rule(".*", Policy("nf4"), ops=("dot_general",)),
        ),
        "mixed",
    ),
)
