"""The collectives of a compiled program, and their bytes."""

import collections
import math
import re
from collections.abc import Callable
from typing import Any

import jax

_COLLECTIVE = re.compile(r" = (.*?) (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+)(\d+)\w*\[([\d,]*)\]")


def collective_bytes(fn: Callable[..., Any], *args: Any) -> dict[tuple[str, str], int]:
    """The bytes of the results of a jitted function's collectives on one device, by operation and dtype (`u8`, `f32`)."""
    return bytes_of_text(jax.jit(fn).lower(*args).compile().as_text())


def bytes_of_text(text: str) -> dict[tuple[str, str], int]:
    """`collective_bytes` of the text of a compiled program."""
    found: dict[tuple[str, str], int] = collections.defaultdict(int)
    for results, operation in _COLLECTIVE.findall(text):
        for kind, bits, shape in _ARRAY.findall(results):
            found[operation, kind + bits] += int(bits) * math.prod(map(int, filter(None, shape.split(",")))) // 8
    return dict(found)
