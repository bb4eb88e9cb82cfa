"""Which quantized weights of a decoder get int8 activations, and what is said of the others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.errors import QuantError
from fewbit.formats.codebook import nf4
from fewbit.workflows.activations import activation_kind, with_int8_activations


def weight(name: str, length: int = 64) -> fb.QArray:
    x = np.random.default_rng(0).normal(size=(8, length))
    return fb.quantize(jnp.asarray(x, jnp.float32), name, backend="reference")


@pytest.mark.parametrize(
    ("name", "activation"),
    [("q4_1", "int8_g32"), ("nvfp4", "int8_g16"), ("int8", "int8"), ("q8_0", "int8_g32"), ("int4_g64", "int8")],
)
def test_activations_have_the_blocks_of_the_weight(name, activation):
    params, found = with_int8_activations({"attn": {"o": weight(name)}, "norm": jnp.ones(8)})
    assert found.schemes == {"attn/o": activation} and not found.refusals
    assert params["attn"]["o"].policy == fb.Policy(name, activation)
    assert str(found) == f"{activation} with 1 weight"


def test_tables_are_rounded_to_int8_and_it_is_said():
    params, found = with_int8_activations({"o": weight("nf4", 128), "up": weight("iq4_nl")})
    q = params["o"]
    assert q.scheme.format == nf4.in_int8() and q.policy == fb.Policy(q.scheme, "int8_g64")
    assert params["up"].scheme.format == fb.FORMATS["iq4_nl"]
    assert set(found.rounded) == {"nf4"} and 0.003 < found.rounded["nf4"] <= 0.5 / 127
    assert str(found).endswith("the table of nf4 rounded to int8, by 0.0037 at most")


def test_the_others_stay_float_and_the_reason_is_said():
    fp8, q4 = weight("fp8"), weight("q4_0")
    own = dataclasses.replace(weight("int8"), policy=fb.Policy("int8", "int8"))
    tree = {"embed": q4, "head": q4, "layers": [{"own": own, "down": fp8, "mlp": {"experts": [{"up": q4}]}}]}
    params, found = with_int8_activations(tree)
    assert found.schemes == {"head": "int8_g32", "layers/0/own": "int8"}
    assert set(found.refusals) == {"layers/0/down", "layers/0/mlp/experts/0/up"}
    assert str(found) == (
        "int8_g32 with 1 weight; int8 with 1 weight; float with 1 (the codes of e4m3fn are not integers); "
        "float with 1 (experts are multiplied in groups of rows)"
    )
    kept = [params["embed"], params["layers"][0]["down"], params["layers"][0]["mlp"]["experts"][0]["up"]]
    assert all(leaf.policy is None for leaf in kept) and params["layers"][0]["own"].policy == own.policy
    assert jax.tree.structure(jax.tree.leaves(params)) == jax.tree.structure(jax.tree.leaves(tree))


def test_nothing_quantized_is_said_and_other_kinds_are_refused():
    assert str(with_int8_activations({"o": jnp.ones((4, 4))})[1]) == "float, since no weight is quantized"
    assert activation_kind("int8") and not activation_kind(None)
    with pytest.raises(QuantError, match="activations 'int4' are unknown; did you mean 'int8'"):
        activation_kind("int4")
