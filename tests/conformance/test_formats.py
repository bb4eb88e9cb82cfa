"""Every registered format keeps every law of formats; a format that is added is tested by that alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fewbit.formats import E8M0, FORMATS, Binary, Codebook, Integer, Minifloat, Ternary
from tests.conformance import format_laws as laws

# Formats that differ from a tested sibling by their width only are left to the full run.
_SIBLINGS = {f"{sign}int{b}{end}" for sign in ("", "u") for b in range(1, 9) for end in ("", "_narrow")} - {
    "int1",
    "int4",
    "int8",
    "uint4",
    "int4_narrow",
}

_FEW = ("int4", "e4m3fn", "e2m1", "e8m0", "nf4", "dynamic8", "ternary")

# Of these, those that `make test` leaves out where every format is compiled or drawn from anew: `make test-long` has them all.
_LONG = [pytest.mark.slow, pytest.mark.long]

# An integer format is its width: of these, few are not left to `make test-long`.
_NEAR = {"int2", "int7", "uint2", "uint8", "int3_narrow", "int8_narrow"}

each_format = pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n not in _SIBLINGS else [pytest.mark.slow] if n in _NEAR else _LONG)
        for n in FORMATS.names()
    ],
)

# What the docstring of each kind says of a tie between two neighbours: whether the upper one is taken.
TIE_RULES: dict[type, laws.TieRule] = {
    Integer: lambda low, up, low_code, up_code: up_code % 2 == 0,
    Minifloat: lambda low, up, low_code, up_code: up_code % 2 == 0,
    E8M0: lambda low, up, low_code, up_code: up_code % 2 == 0,
    Codebook: lambda low, up, low_code, up_code: np.zeros(low.shape, bool),
    Ternary: lambda low, up, low_code, up_code: up == 0,
    Binary: lambda low, up, low_code, up_code: np.ones(low.shape, bool),
}


@each_format
def test_codes_decode_to_values(name: str):
    laws.check_codes(FORMATS[name])


@pytest.mark.slow
@each_format
def test_numbers_encode_to_themselves(name: str):
    laws.check_identity(FORMATS[name])


@pytest.mark.slow
@each_format
def test_every_bfloat16_is_rounded_to_the_nearest(name: str):
    laws.check_nearest(FORMATS[name], TIE_RULES[type(FORMATS[name])])


@each_format
def test_midpoints_of_all_neighbours(name: str):
    fmt = FORMATS[name]
    numbers, _ = laws.numbers_of(fmt)
    middles = ((numbers[1:] + numbers[:-1]) / 2)[np.abs(numbers[1:]) != 2.0**-126]
    middles = middles.astype(np.float32)
    around = np.concatenate([middles, np.nextafter(middles, np.float32(-9e9)), np.nextafter(middles, np.float32(9e9))])
    laws.check_nearest(fmt, TIE_RULES[type(fmt)], laws.repeated(around[np.abs(around) >= 2.0**-126], 1024))


@pytest.mark.slow
@each_format
def test_saturates(name: str):
    laws.check_saturation(FORMATS[name])


@pytest.mark.slow
@each_format
def test_input_dtypes(name: str):
    laws.check_input_dtypes(FORMATS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=_LONG if n in _SIBLINGS else []) for n in FORMATS.names()])
def test_jit_and_vmap(name: str):
    laws.check_transforms(FORMATS[name])


@pytest.mark.slow
@each_format
def test_stochastic_rounding_is_unbiased(name: str):
    laws.check_stochastic(FORMATS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in _FEW else _LONG) for n in FORMATS.names()])
def test_stochastic_rounding_is_unbiased_over_many_draws(name: str):
    laws.check_stochastic(FORMATS[name], draws=2**22, seed=1)


@each_format
def test_json_round_trip(name: str):
    laws.check_json(FORMATS[name])
    assert FORMATS[name].name == name


@pytest.mark.slow
@each_format
def test_negative_zero_is_kept_where_it_exists(name: str):
    fmt = FORMATS[name]
    values = fmt.values()
    has_both = len(values[(values == 0)]) == 2
    for key in (None, jax.random.key(0)):
        decoded = np.asarray(fmt.decode(fmt.encode(jnp.array([-0.0, 0.0]), key=key)))
        if 0.0 in values:
            assert np.signbit(decoded).tolist() == [has_both, False]
            assert (decoded == 0).all()


@each_format
def test_subnormals_count_as_zero(name: str):
    fmt = FORMATS[name]
    tiny = jnp.asarray(np.float32([1e-40, -1e-40, 2.0**-127]))
    zero = jnp.array([0.0, -0.0, 0.0])
    assert np.array_equal(fmt.decode(fmt.encode(tiny)), fmt.decode(fmt.encode(zero)))


@pytest.mark.slow
def test_float64_is_rounded_to_float32_first():
    # 0.5 + 2**-30 is above the tie of int4 in float64, and on it in float32.
    with jax.enable_x64(True):
        x = jnp.asarray(np.array([0.5 + 2.0**-30, 1.7, -2.5]))
        assert x.dtype == jnp.float64
        for fmt in FORMATS:
            assert np.array_equal(fmt.encode(x), fmt.encode(x.astype(jnp.float32)))
        assert FORMATS["int4"].encode(x).tolist()[0] == 0
