"""Schemes: what the constructor takes and refuses, names, JSON, and how tiles follow the axis."""

import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array import Packing, paired
from fewbit.array.scales import MSE, MX, AbsMax, CentredAbsMax
from fewbit.errors import QuantError
from fewbit.formats import FORMATS, Codebook

INT4, E8M0, E4M3 = FORMATS["int4"], FORMATS["e8m0"], FORMATS["e4m3fn"]


def test_equality_and_hash_follow_the_meaning():
    a = fb.Scheme(INT4, {...: 1, -1: 32}, scale="float32")
    b = fb.Scheme(INT4, {-1: 32, ...: 1}, scale=np.float32)
    assert a == b and hash(a) == hash(b)
    different = [
        fb.Scheme(INT4, {...: 1, -1: 64}),
        fb.Scheme(FORMATS["int4_narrow"], {...: 1, -1: 32}),
        fb.Scheme(INT4, {...: 1, -1: 32}, scale="bfloat16"),
        fb.Scheme(INT4, {...: 1, -1: 32}, zero_point="float32"),
        fb.Scheme(INT4, {...: 1, -1: 32}, calibration=AbsMax(0.9)),
        fb.Scheme(INT4, {...: 1, -1: 32}, packing=Packing(high_first=True)),
        fb.Scheme(INT4, {...: 1, -2: 32}, pack_axis=-2),
    ]
    assert all(a != other for other in different)
    assert len({a, b, *different}) == 1 + len(different)


def test_schemes_are_frozen_and_pickle():
    scheme = fb.SCHEMES["nf4_dq"]
    with pytest.raises(AttributeError):
        scheme.tensor_scale = True  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(scheme)) == scheme


def test_every_field_goes_through_json():
    table = Codebook("mine", (-1.0, 0.1, 0.7))
    schemes = [
        fb.Scheme(table, {-1: 8, ...: 1}, packing=Packing(paired(8), high_first=True)),
        fb.Scheme(INT4, {...: 1, -3: None, -1: 16}, scale=E8M0, calibration=MX("even"), pack_axis=-3),
        fb.Scheme(FORMATS["uint4"], {-1: 16}, scale="bfloat16", zero_point="float16", calibration=AbsMax(0.123456789)),
        fb.Scheme(FORMATS["e2m1"], {...: 1, -1: 16}, scale=E4M3, tensor_scale=True, calibration=MSE(32, 0.25)),
        fb.Scheme(INT4, {...: 1, -1: 16}, scale=fb.Scheme(E4M3, {}, calibration=CentredAbsMax(), zero_point="float32")),
        fb.Scheme(INT4, scale=Codebook("unregistered", (0.5, 1.0))),
    ]
    for scheme in schemes:
        assert fb.Scheme.from_json(json.loads(json.dumps(scheme.to_json()))) == scheme


@pytest.mark.parametrize(
    ("spec", "tile"),
    [("int4_g64", {...: 1, -1: 64}), ("nf4_g128", {...: 1, -1: 128}), ("mxfp4_g16", {...: 1, -1: 16})],
)
def test_names_with_tile_lengths(spec: str, tile: dict):
    scheme = fb.scheme(spec)
    assert scheme.tile == tile and scheme.name == spec
    assert fb.scheme(spec.split("_g")[0]).name == spec.split("_g")[0]


def test_names_of_unnamed_schemes_describe_them():
    assert fb.Scheme(INT4, {...: 1, -1: 32, -2: 2}).name == "int4{...: 1, -2: 2, -1: 32}"
    assert fb.scheme("int4").along(-2, 2).name == "int4"
    assert fb.scheme("ternary").with_tile(64).name == "ternary{...: 1, -1: 64}"  # fb.scheme refuses "ternary_g64"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("int44", "unknown scheme 'int44'; did you mean"),
        ("nf4_gx", "unknown scheme 'nf4_gx'; did you mean 'nf4"),
        ("nope_g32", "unknown scheme 'nope_g32'"),
        ("int4_g²", "unknown scheme 'int4_g²'"),
        ("int4_g0", "the tile on axis -1 is 0, must be at least 1"),
        ("fp8_block128_g64", "scheme 'fp8_block128' has no single tile along the last axis"),
        ("fp8_tensor_g64", "scheme 'fp8_tensor' has no single tile along the last axis"),
        ({"formt": "int4"}, "a scheme has no field 'formt'; did you mean 'format'?"),
        ({"scale": "float32"}, "a scheme lacks the field 'format'"),
        ({"format": "int4", "scale": "float64"}, "scale is 'float64'; pass one of float32, bfloat16, float16"),
        ({"format": "int4", "calibration": "absmx"}, "unknown calibration 'absmx'; did you mean 'absmax'"),
        ({"format": "int4", "tile": {"0": 4}}, "tile has a key that is .0.; expected str matching"),
        (None, "a scheme is a name, a JSON form or a Scheme, not None"),
        (8, "a scheme is a name, a JSON form or a Scheme, not 8"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("unchecked")
def test_names_and_json_are_refused(spec, message: str):
    with pytest.raises(QuantError, match=message):
        fb.scheme(spec)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "nf4"}, "format is 'nf4'; pass a Format such as fb.formats.nf4"),
        ({"scale": np.int32}, "scale is int32; its dtype must be one of float32, bfloat16, float16"),
        ({"zero_point": np.int8}, "zero_point is int8; its dtype must be one of"),
        ({"zero_point": fb.SCHEMES["int8"]}, "zero_point is .*; pass one of float32, bfloat16, float16, or a Format object"),
        ({"tensor_scale": True}, "a tensor scale needs scales stored in a Format such as e4m3fn"),
        ({"pack_axis": 0}, "pack_axis is 0, must be negative"),
        ({"calibration": "mse"}, r"calibration is 'mse'; pass an object: .*parse_calibration parses a text"),
        ({"scale": fb.SCHEMES["nf4"], "tensor_scale": True}, "take no tensor scale and no third level"),
        ({"scale": fb.SCHEMES["nf4_dq"]}, "take no tensor scale and no third level"),
    ],
    ids=[
        "name",
        "scale-dtype",
        "zero-dtype",
        "zero-scheme",
        "tensor-scale",
        "pack-axis",
        "calibration",
        "nested-tensor-scale",
        "third-level",
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_constructor_refusals(fields: dict, message: str):
    with pytest.raises(QuantError, match=message):
        fb.Scheme(**{"format": INT4, **fields})


def test_tiles_follow_the_axis():
    scheme = fb.scheme("mxfp4")
    assert scheme.along(0, 3).tiles(3) == (32, 1, 1)
    assert scheme.along(-1, 3) == scheme.along(2, 3) == scheme
    assert fb.scheme("fp8_block128").along(-2, 3).tiles(3) == (1, 128, 128)
    assert fb.scheme("int8").along((0, 2), 3).tiles(3) == (None, 1, None)
    assert fb.scheme("int4_g32").along((0, 2), 3).tiles(3) == (1, 1, 32)
    assert fb.scheme("fp8_tensor").along(0, 2).tiles(2) == (None, None)


@pytest.mark.parametrize(("axis", "packed"), [(-1, -2), (-2, -1), (0, -1)])
def test_the_packed_axis_follows_the_axis_as_tiles_do(axis: int, packed: int):
    scheme = fb.Scheme(INT4, {...: 1, -1: 32}, pack_axis=-2).along(axis, 3)
    assert scheme.tile == {...: 1, axis if axis < 0 else axis - 3: 32}
    assert scheme.pack_axis == packed
    assert scheme.along(-1, 3) == scheme


def test_a_packed_axis_that_is_not_there_is_refused():
    with pytest.raises(QuantError, match="the scheme packs axis -3, but the array has 2 axes"):
        fb.Scheme(INT4, {...: 1, -1: 32}, pack_axis=-3).along(-1, 2)


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        (3, "axis is 3, but the array has 2 axes"),
        (-3, "axis is -3, but the array has 2 axes"),
        ((0, -2), r"axis \(0, -2\) names one axis twice"),
        ((), r"axis is \(\), must name at least one axis"),
    ],
)
def test_bad_axes(axis, message: str):
    with pytest.raises(QuantError, match=message):
        fb.scheme("nf4").along(axis, 2)


def test_bits_of_the_presets():
    # Large enough that the short last tiles and the tensor's own numbers vanish.
    shape, expected = (256, 512), {"mxfp4": 4.25, "mxfp6": 6.25, "mxfp8": 8.25, "mxint8": 8.25, "nf4": 4.5, "q8_0": 8.5}
    expected |= {"q4_0": 4.5, "q4_1": 5.0, "q5_0": 5.5, "q5_1": 6.0, "int4_g64": 4.5, "int3_g32": 4.0}
    expected |= {"nvfp4": 4.5 + 32 / 2**17, "nf4_dq": 4.125 + 64 / 2**17, "ternary": 2 + 32 / 2**17, "binary": 1 + 32 / 512}
    for name, bits in expected.items():
        abstract = jax_eval(name, shape)
        assert sum(leaf.size * leaf.dtype.itemsize for leaf in abstract) * 8 / (256 * 512) == bits, name


def jax_eval(name: str, shape: tuple[int, int]) -> list:
    """The leaves' shapes and dtypes, without computing them."""
    return jax.tree.leaves(jax.eval_shape(lambda x: fb.quantize(x, name), jnp.zeros(shape)))
