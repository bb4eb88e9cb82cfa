"""A policy takes the schemes whose scales attention can fold, says what it is, and refuses the others with the way out."""

import dataclasses

import pytest

import fewbit as fb
from fewbit.array.scales import MSE
from fewbit.errors import QuantError
from fewbit.formats import FORMATS
from fewbit.kvcache import KVPolicy, kv_policy

SYMMETRIC = [f.name for f in FORMATS if f.min < 0 < f.max]


@pytest.mark.parametrize("name", SYMMETRIC)
def test_every_format_with_both_signs_is_taken(name: str):
    assert kv_policy(name).keys.format.name in (name, f"{name}_narrow")
    assert kv_policy(FORMATS[name]).values.format == FORMATS[name]


@pytest.mark.parametrize("name", [f.name for f in FORMATS if f.name not in SYMMETRIC])
def test_every_other_format_is_refused(name: str):
    with pytest.raises(QuantError, match=f"the keys has format {name}, which lacks negative or positive numbers"):
        kv_policy(name)


@pytest.mark.parametrize(("name", "means"), [("int8", "int8_narrow"), ("int4", "int4_narrow"), ("fp8", "e4m3fn")])
def test_a_number_and_its_negative_come_back_alike_by_name(name: str, means: str):
    fmt = kv_policy(name).keys.format
    assert fmt.name == means
    assert fmt.min == -fmt.max == -fmt.bound


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (kv_policy("fp8", per="token"), "e4m3fn per token"),
        (kv_policy("int8", "int4"), "keys int8_narrow per head, values int4_narrow per head"),
        (kv_policy("int4", scale=FORMATS["e8m0"], sees_raw=True), "int4_narrow per head, e8m0 scales, raw within a call"),
        (kv_policy("int8", int8_queries=True), "int8_narrow per head, int8 queries"),
    ],
)
def test_it_says_what_it_is(policy: KVPolicy, text: str):
    assert str(policy) == text


def test_a_search_for_scales_is_named():
    searched = dataclasses.replace(kv_policy("int4").keys, calibration=MSE())
    assert str(KVPolicy(searched, searched)) == f"int4_narrow per head, {MSE()}"


@pytest.mark.parametrize(
    ("name", "per", "message"),
    [
        ("int44", "head", "unknown cache format 'int44'; did you mean 'int4'"),
        ("fp9", "head", "unknown cache format 'fp9'; did you mean 'fp8'"),
        ("int8", "heads", "unknown per 'heads'; did you mean 'head'"),
    ],
)
def test_unknown_names_are_answered_with_near_ones(name: str, per: str, message: str):
    with pytest.raises(QuantError, match=message):
        kv_policy(name, per=per)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("uint8", "the scheme of the values has format uint8"),
        ("nvfp4", "the scheme of the values has two levels of scales"),
        ("int8_g32", r"the scheme of the values has tiles .*; use \{...: 1, -1: None\}"),
        (fb.Scheme(FORMATS["int8"]), "has tiles {}; use"),
        (
            fb.Scheme(FORMATS["int8"], {...: 1, -1: None}, zero_point="float32"),
            "has zero points; attention folds scales only",
        ),
        (fb.Scheme(FORMATS["int8"], {...: 1, -1: None}, pack_axis=-2), "has tiles"),
    ],
    ids=["unsigned", "two-level", "blocks", "tensor", "offset", "packed-elsewhere"],
)
def test_schemes_that_cannot_be_folded_are_refused(scheme: str | fb.Scheme, message: str):
    with pytest.raises(QuantError, match=message):
        KVPolicy(fb.scheme("int8"), fb.scheme(scheme))


@pytest.mark.parametrize(
    ("keys", "values", "name"), [("int8", "int4", "values are int4"), ("fp8", "int8", "keys are e4m3fn")]
)
def test_int8_queries_need_int8_keys_and_values(keys: str, values: str, name: str):
    with pytest.raises(QuantError, match=f"int8 queries need int8 keys and values; the {name}"):
        kv_policy(keys, values, int8_queries=True)
