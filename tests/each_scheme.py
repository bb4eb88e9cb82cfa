"""Tests of every scheme."""

from collections.abc import Sequence

import pytest

import fewbit as fb

KINDS = (
    *("int8", "int4_g64", "int3", "int2_narrow", "uint4", "fp8", "fp8_block128", "fp8_tensor", "nf4", "nf4_dq", "ternary"),
    *("binary", "q4_0", "q4_1", "q8_0", "tq2_0", "mxfp4", "mxfp6", "mxint8", "nvfp4", "nvfp4_16x16", "affine4", "int8_aqt"),
)
"""One of each kind of format, scale and tile; the others differ from one of them by a width or a table."""


def each_scheme(fast: Sequence[str]) -> pytest.MarkDecorator:
    """A test of every scheme: `fast` in `make test`, one of each kind in `make test-all`, the rest in `make test-long`."""
    marks = dict.fromkeys(fb.SCHEMES.names(), pytest.mark.long) | dict.fromkeys(KINDS, pytest.mark.slow)
    assert set(fast) <= set(marks)
    return pytest.mark.parametrize("name", [n if n in fast else pytest.param(n, marks=mark) for n, mark in marks.items()])
