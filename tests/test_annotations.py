"""The tests check annotations at every call, as conftest.py sets it up."""

from typing import Any

import jax.numpy as jnp
import jaxtyping
import pytest
from beartype.roar import BeartypeCallHintParamViolation

from fewbit.array.packing import code_capacity
from fewbit.methods.scaling import moments_error

TEXT: Any = "4"
pytestmark = pytest.mark.skipif(jaxtyping.config.jaxtyping_disable, reason="JAXTYPING_DISABLE=1 checks no annotation")


def test_types_are_checked():
    assert code_capacity(3, 4) == 6
    with pytest.raises(BeartypeCallHintParamViolation, match="bits"):
        code_capacity(3, TEXT)


def test_so_are_shapes_that_arguments_share():
    errors = jnp.ones((2, 3))
    assert moments_error(errors, jnp.ones((3, 3))).shape == ()
    with pytest.raises(jaxtyping.TypeCheckError, match="hessian"):
        moments_error(errors, jnp.ones((4, 4)))


def test_a_test_may_hand_in_a_wrong_type_to_read_our_own_message(unchecked):
    with pytest.raises(TypeError, match="unsupported operand"):
        code_capacity(3, TEXT)
