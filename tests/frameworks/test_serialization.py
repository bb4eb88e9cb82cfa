"""QArrays through flax.serialization: the same bytes back, and never read by another scheme."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import QuantError
from tests.io.examples import quantized

serialization = pytest.importorskip("flax.serialization")


@pytest.fixture(autouse=True)
def registered():
    fb.frameworks.serialization.register()


TREE = {
    "dense": {"kernel": quantized("nf4_dq"), "bias": jnp.ones(3, jnp.bfloat16)},
    "head": quantized("q4_1").T,
    "wide": quantized("nvfp4"),
}


@pytest.mark.finding(14)
def test_to_bytes_and_back():
    back = serialization.from_bytes(TREE, serialization.to_bytes(TREE))
    assert jax.tree.structure(back) == jax.tree.structure(TREE)
    jax.tree.map(np.testing.assert_array_equal, back, TREE)
    assert isinstance(back["head"].codes, jax.Array)


@pytest.mark.finding(14)
def test_the_state_dict_holds_only_arrays_and_comes_back_into_an_abstract_target():
    state = serialization.to_state_dict(TREE)
    assert set(state["wide"]) == {"form", "codes", "scale", "tensor_scale"}
    assert all(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(state))
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), TREE)
    jax.tree.map(np.testing.assert_array_equal, serialization.from_state_dict(target, state), TREE)


@pytest.mark.finding(14)
def test_another_scheme_shape_or_state_is_refused():
    state = serialization.to_state_dict(quantized("int4"))
    with pytest.raises(QuantError, match=r'the state is not that of the target QArray: found .*"int4".*expected .*"int8"'):
        serialization.from_state_dict(quantized("int8"), state)
    with pytest.raises(
        QuantError, match=r"the state of a QArray in nvfp4 has \['codes', 'form', 'scale', 'tensor_scale'\]; found"
    ):
        serialization.from_state_dict(quantized("nvfp4"), state)
    with pytest.raises(QuantError, match=r"the state's codes has shape \(8, 32\), the target's \(4, 32\)"):
        serialization.from_state_dict(quantized("int4")[:4], state)


@pytest.mark.finding(14)
@pytest.mark.slow
def test_importing_fewbit_does_not_import_flax_and_quantizing_a_module_registers():
    program = """
import sys, fewbit as fb
assert "flax" not in sys.modules
import jax.numpy as jnp
from flax import linen, serialization
dense, x = linen.Dense(32), jnp.ones((1, 64))
import jax
variables = fb.frameworks.linen.quantize(dense, dense.init(jax.random.key(0), x), x, recipe="int8")
back = serialization.from_bytes(variables, serialization.to_bytes(variables))
assert (back["params"]["kernel"].codes == variables["params"]["kernel"].codes).all()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
