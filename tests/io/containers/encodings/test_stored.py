"""What containers share: dtypes of a configuration, and scales one per tile."""

import dataclasses

import numpy as np
import pytest

from fewbit import QuantError
from fewbit.array.packing import Packing
from fewbit.io.containers.encodings.stored import checked_info, config_dtype, packed_codes, per_tile

from ..stored_weights import example, tensors_of


def test_the_dtype_of_a_configuration():
    assert config_dtype({"torch_dtype": "float16"}, "float32").name == "float16"
    assert config_dtype({"dtype": "torch.bfloat16"}, "float32").name == "bfloat16"
    assert config_dtype({"text_config": {"dtype": "bfloat16"}}, "float32").name == "bfloat16"
    assert config_dtype({"dtype": 3, "torch_dtype": "auto"}, "float32").name == "float32"


def test_a_scale_that_is_shared_is_repeated():
    q = example("int4_g32", (3, 64))
    assert per_tile(np.ones((1, 2), np.float32), q).shape == (3, 2)
    with pytest.raises(QuantError, match="has scales of shape"):
        per_tile(np.ones((3, 3), np.float32), q)


def test_codes_in_another_order_are_put_in_order():
    q = example("int4", (2, 6))
    high = dataclasses.replace(q.scheme, packing=Packing(high_first=True))
    other = type(q).tree_unflatten((high, q.dtype, q.slack, None), (q.codes, q.scale, None, None))
    codes = np.asarray(q.codes)
    np.testing.assert_array_equal(packed_codes(other), (codes >> 4) | (codes << 4))


def test_missing_and_wrong_arrays_are_named():
    tensors = tensors_of({"a": np.ones((2, 3), np.float32), "b": np.ones((0, 3), np.float32)})
    assert checked_info(tensors, "a", "here", ["float32"], 2).shape == (2, 3)
    for name, dtypes, ndim, reason in (
        ("c", ["float32"], 2, "'c' is missing"),
        ("a", ["int8", "uint8"], 2, "is float32, expected int8 or uint8"),
        ("a", ["float32"], 3, "expected 3 axes"),
        ("b", ["float32"], 2, "has no elements"),
    ):
        with pytest.raises(QuantError, match=reason):
            checked_info(tensors, name, "here", dtypes, ndim)
