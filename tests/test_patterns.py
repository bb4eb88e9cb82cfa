"""Regular expressions of Python's `re`, in bounded time."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fewbit as fb
from fewbit._patterns import Pattern

CATASTROPHIC = [
    ("l(a+)+$", "l" + "a" * 40 + "b"),
    ("(a|aa)+$", "a" * 60 + "b"),
    ("((a{1,50}){1,50}){1,50}b", "a" * 60),
    ("(a|a)(a|a)" * 20 + "b", "a" * 40),
    ("(?=(a+)+$)l?a*b", "a" * 60 + "b"),
    (".*" * 12 + "x", "a" * 2000),
    ("(.*.*)*x", "a" * 60),
    ("a*a*a*a*a*b", "a" * 900),
]


@pytest.mark.finding(17)
@pytest.mark.parametrize(("pattern", "name"), CATASTROPHIC, ids=[pattern[:24] for pattern, _ in CATASTROPHIC])
def test_no_expression_takes_long(pattern, name):
    start, message = time.process_time(), ""
    try:
        assert not Pattern(pattern, "rule path").fullmatch(name)
    except fb.QuantError as error:
        message = str(error)
    assert not message or (f"rule path '{pattern[:20]}" in message and "takes longer than 0.5 s" in message)
    assert time.process_time() - start < 2


@pytest.mark.finding(17)
def test_the_message_names_the_rule_and_the_path():
    with pytest.raises(fb.QuantError, match=r"rule path '\(a\|aa\)\+\$' takes longer than 0.5 s to compare with 'aaa"):
        fb.Rule("(a|aa)+$", "int8").matches("a" * 80 + "b", ())


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "is not a regular expression: missing"),
        ("(" * 5000 + ")" * 5000, "is not a regular expression"),
        ("a{99999999999999999999}", "is not a regular expression"),
        ("a*" * 6000, "has 12,000 characters"),
        ("[[:alpha:]]", "has a POSIX class"),
        (r"\p{L}", "is not a regular expression: bad escape"),
    ],
)
def test_what_is_refused(pattern, message):
    with pytest.raises(fb.QuantError, match=message):
        Pattern(pattern, "rule path")


PIECES = [
    "a",
    "b",
    ".",
    "[ab]",
    "a*",
    "(ab)*",
    "(?:a|b)+",
    "(?!ab)",
    "(?=a)",
    "(?<=a)",
    r"\d",
    r"\w+",
    "b?",
    "a{2}",
    "{x}",
    "a{e}",
    "^",
    "$",
    "()",
]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), st.text("ab{ex}1", max_size=8))
def test_both_engines_agree_with_re(pattern, name):
    try:
        expected = re.fullmatch(pattern, name) is not None
    except re.error:
        return
    found = Pattern(pattern, "rule path")
    assert found.fullmatch(name) == expected
    assert (found._limited.fullmatch(name) is not None) == expected


def test_every_rule_of_a_preset_is_matched_alike_by_both():
    names = [
        "decoder/layers/3/mlp/wi_0/kernel",
        "params/decoder/layers/self_attention/query/kernel",
        "encoder/layers/x",
        "head",
    ]
    patterns = {rule.path for recipe in fb.RECIPES for rule in (*recipe.rules, *recipe.products)}
    for pattern in patterns:
        for name in names:
            expected = re.fullmatch(pattern, name) is not None
            assert Pattern(pattern, "p").fullmatch(name) == expected
            assert (Pattern(pattern, "p")._limited.fullmatch(name) is not None) == expected
