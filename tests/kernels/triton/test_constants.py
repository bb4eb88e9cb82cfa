"""Formats and scales as compile-time constants: plain values, and a key of its own for each."""

import dataclasses

import pytest

import fewbit as fb
from fewbit.formats import FORMATS
from fewbit.kernels.qmatmul.gpu.weight import Matrix
from fewbit.kernels.quantize.gpu.problem import TileProblem
from fewbit.kernels.triton.constants import Codes, Scales

PLAIN = (bool, int, float, str)


def values(constant):
    for field in dataclasses.fields(constant):
        value = getattr(constant, field.name)
        yield from value if isinstance(value, tuple) else (value,)


@pytest.mark.once
def test_each_format_has_its_own_key():
    """Triton's cache keys contain the `repr`: constants that differ must differ in it."""
    names = ("e2m1", "e2m3", "e4m3fn", "e5m2", "int4", "uint4", "int8", "nf4", "bnb_fp4")
    constants = [Codes.of(FORMATS[name]) for name in names]
    assert len(set(constants)) == len({repr(c) for c in constants}) == len(names)
    for constant in constants:
        assert all(type(value) in PLAIN for value in values(constant))
        assert all(field.repr and field.compare for field in dataclasses.fields(constant))
        other = dataclasses.replace(constant, bits=constant.bits + 1)
        assert other != constant and repr(other) != repr(constant)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "nf4", "int4_g64", "q4_1", "uint4_g64", "fp8"])
def test_constants_of_a_scheme_are_plain(name: str):
    scheme = fb.scheme(name).along(0, 2)
    for constants in (Matrix(scheme, 256, 256).constants(), TileProblem(scheme, 256, 256).encoding(100)):
        assert hash(tuple(constants.items()))
        for value in constants.values():
            assert type(value) in PLAIN or all(type(v) in PLAIN for v in values(value))


def test_zero_points_and_tensor_scales():
    assert (Scales.of(fb.scheme("nvfp4")).kind, Scales.of(fb.scheme("nvfp4")).has_tensor_scale) == ("minifloat", True)
    assert Scales.of(fb.scheme("mxfp4")).kind == "power"
    assert Scales.of(fb.scheme("int8")).zero == "none"
    assert Scales.of(fb.scheme("uint4_g64")).zero == "codes"
    assert Scales.of(fb.scheme("q4_1")).zero == "offsets"


def test_a_kernel_is_compiled_for_each_constant():
    pytest.importorskip("triton")
    from triton.compiler import ASTSource

    from fewbit.kernels.quantize.gpu.dequantize import dequantize_kernel as kernel

    def key(name: str) -> str:
        constants = TileProblem(fb.scheme(name), 256, 256).decoding()
        types = {"out_ptr": "*bf16"} | dict.fromkeys(("codes_ptr", "scale_ptr", "unit_ptr"), "*u8")
        types |= dict.fromkeys(("tiles", "length", "tiles_in_row", "row_bytes"), "i32") | dict.fromkeys(
            constants, "constexpr"
        )
        return ASTSource(kernel, {n: types[n] for n in kernel.arg_names}, constexprs=constants).hash()

    names = ("mxfp4", "mxfp8", "int4_g32", "int4_g64", "nf4")
    assert len({key(name) for name in names}) == len(names) and key("mxfp4") == key("mxfp4")
