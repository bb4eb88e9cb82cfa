"""Prints the table of calls in docs/design/index.md: `python docs/call_path_table.py`.

Each row is a process of its own, which imports fewbit and makes the operands first. A profiler counts the calls of Python
functions in src/fewbit, and the files that they are in.
"""

import pathlib
import subprocess
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp

import fewbit as fb

HOME = str(pathlib.Path(fb.__file__).parent)
X, W = jnp.ones((2, 64)), jnp.ones((64, 128))
SIZES = jnp.full((4,), 2, jnp.int32)


def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """The sum of a product."""
    return (x @ params["w"]).sum()


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "`x @ q`": (lambda: fb.quantize(W, "int8", axis=0), lambda q: X @ q),
    "`x @ q.T`": (lambda: fb.quantize(W.T, "int8"), lambda q: X @ q.T),
    "`fb.dot_general(x, q, ...)`": (
        lambda: fb.quantize(W, "int8", axis=0),
        lambda q: fb.dot_general(X, q, (((1,), (0,)), ((), ()))),
    ),
    "`fb.einsum('mk,kn->mn', x, q)`": (
        lambda: fb.quantize(W, "int8", axis=0),
        lambda q: fb.einsum("mk,kn->mn", X, q),
    ),
    "`fb.ragged_dot(x, q, sizes)`": (
        lambda: (jnp.ones((8, 64)), fb.quantize(jnp.ones((4, 64, 128)), "int8", axis=1)),
        lambda operands: fb.ragged_dot(*operands, SIZES),
    ),
    "`fb.quantize(w, 'int8')`": (lambda: fb.quantize and W, lambda w: fb.quantize(w, "int8", axis=0)),
    "trace of the gradient of `fb.train`, one product": (
        lambda: fb.train and {"w": W},
        lambda params: jax.make_jaxpr(jax.grad(fb.train(loss, "w8a8")))(params, X),
    ),
}
"""What is made first, and the call that is counted. Naming a function of `fb` imports it."""


def counted(call: Callable[[], object]) -> str:
    """The files and the calls of fewbit's functions in a call, as `files / calls`."""
    files, calls = set[str](), 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(HOME):
            calls += 1
            files.add(name)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return f"{len(files)} / {calls:,}"


def row(name: str) -> str:
    """The row of one call: the first, the one after a warm-up, and the one after `jax.clear_caches()`."""
    made, call = CASES[name]
    operand = made()
    cells = [counted(lambda: call(operand))]
    call(operand)
    cells.append(counted(lambda: call(operand)))
    jax.clear_caches()
    cells.append(counted(lambda: call(operand)))
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(row(sys.argv[1]))  # noqa: T201 - a script
    else:
        print("| call | first | warm | after `jax.clear_caches()` |\n| --- | --- | --- | --- |", flush=True)  # noqa: T201
        for name in CASES:
            subprocess.run([sys.executable, __file__, name], check=True)
