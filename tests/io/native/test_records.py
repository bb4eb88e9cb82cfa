"""Every registered scheme goes into a record and comes back: leaves, scheme, dtype, slack and policy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import QuantError
from fewbit._json import dumped, parsed
from fewbit.array import misfit
from fewbit.io.native.records import Table, checked_record, leaf_names, leaves, qarray, record
from tests.io.damage import leaves as bytes_of
from tests.io.examples import quantized, random_qarray


def through_json(q: fb.QArray) -> fb.QArray:
    schemes, policies = Table(), Table()
    form = parsed(dumped(record(q, schemes, policies, "w"), "w"), "w")
    tables = [parsed(dumped(table.values, "t"), "t") for table in (schemes, policies)]
    arrays = {name: np.asarray(leaf) for name, leaf in leaves("w", q).items()}
    checked = checked_record(form, *tables, "w")
    assert set(leaf_names("w", checked)) == set(arrays)
    return qarray("w", checked, arrays.__getitem__)


def assert_same(a: fb.QArray, b: fb.QArray) -> None:
    assert bytes_of(a) == bytes_of(b)
    assert jax.tree.structure(a) == jax.tree.structure(b)  # scheme, dtype, slack, policy, and those of nested scales
    assert a.shape == b.shape


@pytest.mark.parametrize("name", fb.SCHEMES.names())
def test_every_scheme_comes_back(name):
    q = random_qarray(name)
    assert misfit(q) is None
    assert_same(through_json(q), q)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nf4", "nvfp4", "int3_g32", "q4_1", "nf4_dq", "fp8_block128", "fp8_tensor"])
def test_what_was_moved_comes_back(name):
    q = random_qarray(name, (48, 64))
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), q, q)
    for moved in (q.T, q[:16], q.astype(jnp.bfloat16), stacked, stacked[1], random_qarray(name, (48, 64), axis=0)):
        assert misfit(moved) is None
        assert_same(through_json(moved), moved)


def test_a_policy_comes_back():
    q = dataclasses.replace(quantized("int8"), policy=fb.Policy("int8", activation="int8"))
    assert through_json(q).policy == q.policy


def test_a_policy_of_another_kind_is_refused():
    q = dataclasses.replace(quantized("int8"), policy="mine")
    with pytest.raises(QuantError, match=r"tensor 'w' has a policy of type str; files store only fb\.Policy"):
        record(q, Table(), Table(), "w")


def test_equal_schemes_stand_once():
    schemes = Table()
    for name in ("nf4", "int8", "nf4"):
        record(quantized(name), schemes, Table(), "w")
    assert len(schemes.values) == 2


Q = quantized("q4_1")
BAD = {
    "codes dtype": ({"codes": Q.codes.astype(jnp.int32)}, "codes is int32, expected uint8"),
    "scale": ({"scale": Q.scale[:, :1]}, r"scale has shape \(8, 1\), expected \(8, 2\)"),
    "no zero point": ({"zero_point": None}, "zero_point is missing, and scheme q4_1 has one"),
}


@pytest.mark.parametrize("name", BAD)
def test_parts_that_do_not_fit_are_refused(name):
    change, message = BAD[name]
    with pytest.raises(QuantError, match=f"tensor 'w' is not a valid QArray: {message}"):
        record(dataclasses.replace(Q, **change), Table(), Table(), "w")


SCHEME = fb.SCHEMES["int8"].to_json()
BAD_FORMS = {
    "a list": ([], r"w is \[\]; expected object"),
    "unknown field": ({"scheme": 0, "dtype": "float32", "slack": 0, "more": 1}, "w has no field 'more'"),
    "no scheme": ({"dtype": "float32", "slack": 0}, "w lacks the field 'scheme'"),
    "no such scheme": ({"scheme": 1, "dtype": "float32", "slack": 0}, "names entry 1 of a table of 1"),
    "dtype": ({"scheme": 0, "dtype": "float99", "slack": 0}, "'float99' is not a dtype"),
    "whole numbers": ({"scheme": 0, "dtype": "int8", "slack": 0}, "dtype is .int8.; a QArray has a floating dtype"),
    "alias": ({"scheme": 0, "dtype": "a", "slack": 0}, "dtype is .a.; a QArray has a floating dtype"),
    "slack": ({"scheme": 0, "dtype": "float32", "slack": "0"}, "slack is '0'; expected int"),
    "nested": ({"scheme": 0, "dtype": "float32", "slack": 0, "scale": 3}, r"w: scale is 3; expected object"),
}


@pytest.mark.parametrize("name", BAD_FORMS)
def test_records_are_of_a_closed_form(name):
    form, message = BAD_FORMS[name]
    with pytest.raises(QuantError, match=message):
        checked_record(form, [SCHEME], [], "w")
