"""Groups of stored arrays: complete, owned once, and consistent."""

import dataclasses

import numpy as np
import pytest

import fewbit as fb
from fewbit.errors import QuantError, UnsupportedError
from fewbit.io.checkpoint import TensorInfo, Tensors
from fewbit.io.containers.container import Group, Weight, grouped
from fewbit.io.containers.registry import container
from tests.io.containers.simple import INT8, Simple


def tensors(**shapes):
    arrays = {name.replace("_", "."): np.zeros(shape, np.uint8) for name, shape in shapes.items()}
    info = {name: TensorInfo(a.shape, "uint8", "U8", a.nbytes) for name, a in arrays.items()}
    return Tensors(info, arrays.__getitem__)


def group(*parts):
    return Group(TensorInfo((4, 8), "float32", "x", 48, INT8), parts, dict)


def test_a_missing_part_is_named():
    with pytest.raises(QuantError, match=r"tensor 'a\.scales' of the weight 'a\.weight' is missing"):
        Simple().decoded({}, tensors(a_codes=(4, 8)), "here")


def test_parts_that_do_not_fit_are_refused():
    found = Simple().decoded({}, tensors(a_codes=(4, 8), a_scales=(4, 1)), "here")
    with pytest.raises(QuantError, match=r"here: the tensors of 'a\.weight' do not fit together: scale is uint8"):
        found["a.weight"]


def test_each_array_has_one_owner():
    with pytest.raises(QuantError, match="belongs to both 'a' and 'b'"):
        grouped(tensors(x=(2,)), {"a": group("x"), "b": group("x")}, "here")
    with pytest.raises(QuantError, match="both a tensor and the name of a quantized weight"):
        grouped(tensors(x=(2,), a=(2,)), {"a": group("x")}, "here")


def test_a_weight_may_have_the_name_of_one_of_its_parts():
    assert list(grouped(tensors(w=(2,), s=(2,), z=(1,)), {"w": group("w", "s")}, "here")) == ["w", "z"]


@pytest.mark.parametrize("name", ["gptq", "mlx", "torchao"])
def test_schemes_of_float_activations_are_named_where_activations_are_what_does_not_fit(name):
    weight = Weight("a.weight", (128, 128), "float32", fb.scheme("int8"), fb.scheme("int8"))
    with pytest.raises(UnsupportedError, match="Schemes that fit, with float activations: ") as caught:
        container(name).check([weight])
    for said in str(caught.value).rpartition(": ")[2].split(", "):
        fitting = fb.scheme(said).along(-1, 2)
        container(name).check([dataclasses.replace(weight, scheme=fitting, activations=None)])
