"""Times quantizing and dequantizing a 4096 x 4096 float32 array.

    python -m bench.quantize [--size 4096] [--rounds 7] [--schemes int8 nf4] [--isa avx2] [--save]

They are compared with other JAX packages and a copy of the array. Prints nothing about speed unless every scheme's error is
what its numbers of bits allow, measured first. "plain" is fewbit without its C++ kernels: the reference in plain JAX.

Times are given in two copies of the array, which run in the same rounds: one by all cores in place, which reads and writes memory
that is there (a donated array plus one), the yardstick of quantizing; and one that returns a fresh array, whose pages the system
must first provide, as it must for a dequantized array: the yardstick of dequantizing.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import fewbit as fb
from fewbit.array.scales import MX
from fewbit.evaluate.timing import Timing, timed

from .facts import add_isa, headline, save
from .peers import quantizers

SCHEMES = {
    name: fb.scheme(name) for name in ("nf4", "int8", "int8_narrow", "int4", "int4_g64", "fp8", "nvfp4_absmax", "q4_1")
}
# The rule that Qwix has for its mx types, and then the searches, which no JAX peer does.
SCHEMES |= {f"{name} even": dataclasses.replace(fb.scheme(name), calibration=MX("even")) for name in ("mxfp4", "mxfp8")}
SCHEMES |= {name: fb.scheme(name) for name in ("mxfp4", "mxfp8", "nvfp4")}

IN_PLACE, FRESH = "copy in place", "fresh copy"

PEERS = ("qwix", "aqtp", "eformer")

# Relative Frobenius errors on a Gaussian, in percent, that a correct quantizer stays below; 15 for the 4-bit ones.
CEILING = {"int8": 1.0, "int8_narrow": 1.0, "fp8": 3.0, "mxfp8": 3.0, "mxfp8 even": 3.0, "q4_1": 9.0}


def main() -> int:
    """Runs the comparison; the exit status is 1 when a value is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.quantize", description="fewbit against other JAX quantizers, in one run"
    )
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--schemes", nargs="*", choices=list(SCHEMES), help="only these; all by default")
    add_isa(parser)
    parser.add_argument("--save", action="store_true", help="write bench/results/quantize.json")
    options = parser.parse_args()
    x = jnp.asarray(np.random.default_rng(0).normal(size=(options.size, options.size)) * 0.02, jnp.float32)
    errors = {name: relative_error(x, name) for name in options.schemes or SCHEMES}
    wrong = {name: error for name, error in errors.items() if not error < CEILING.get(name, 15.0)}
    if wrong:
        print(f"a value is wrong, so no times are printed: {wrong}", file=sys.stderr)
        return 1
    print(headline(PEERS))
    rows = [row for name in options.schemes or SCHEMES for row in measured(x, name, errors[name], options.rounds)]
    for row in rows:
        print(row["text"])
    if options.save:
        save("quantize", PEERS, size=options.size, rounds=options.rounds, rows=rows)
    return 0


def relative_error(x: jax.Array, name: str) -> float:
    """The relative Frobenius error of one scheme, in percent."""
    y = fb.dequantize(fb.quantize(x, SCHEMES[name]))
    return float(100 * jnp.linalg.norm(y - x) / jnp.linalg.norm(x))


def measured(x: jax.Array, name: str, error: float, rounds: int) -> list[dict]:
    """The rows of one scheme: quantize against other packages, and dequantize, all against both copies."""

    def by(backend: str | None) -> tuple[Callable, Callable]:
        return (
            jax.jit(lambda x: fb.quantize(x, SCHEMES[name], backend=backend)),
            jax.jit(lambda q: fb.dequantize(q, backend=backend)),
        )

    (ours, back), (plain, plain_back) = by(None), by("reference")
    q, copies = ours(x), {IN_PLACE: copied_in_place(x), FRESH: copied_afresh(x)}
    contenders = {
        **copies,
        "fewbit": lambda: ours(x),
        "plain": lambda: plain(x),
        **quantizers(x).get(name, {}),
    }
    times = timed(contenders, rounds=rounds)
    rows = [row(name, "quantize", who, times, error) for who in times if who not in copies]
    times = timed({**copies, "fewbit": lambda: back(q), "plain": lambda: plain_back(q)}, rounds=rounds)
    return [*rows, *(row(name, "dequantize", who, times, error) for who in ("fewbit", "plain"))]


def copied_in_place(x: jax.Array) -> Callable[[], jax.Array]:
    """A pass over an array of this shape that stays where it is."""
    held, step = [jnp.zeros_like(x)], jax.jit(lambda x: x + jnp.float32(1), donate_argnums=0)

    def run() -> jax.Array:
        held[0] = step(held[0])
        return held[0]

    return run


def copied_afresh(x: jax.Array) -> Callable[[], jax.Array]:
    """A pass over the array into one that did not exist."""
    copy = jax.jit(lambda x: x + jnp.float32(1))
    return lambda: copy(x)


def row(name: str, what: str, who: str, times: dict[str, Timing], error: float) -> dict:
    """One contender's figures, and the line that shows them."""
    (low, middle, high), fresh = times[who].ratio(times[IN_PLACE]), times[who].ratio(times[FRESH])[1]
    ahead = "" if who == "fewbit" else f"; fewbit takes {times['fewbit'].ratio(times[who])[1]:.2f} of its time"
    milliseconds = times[who].median
    copies = f"{middle:5.2f} copies in place ({low:.2f} to {high:.2f}), {fresh:5.2f} fresh ones"
    return {
        "scheme": name,
        "what": what,
        "who": who,
        "ms": milliseconds,
        "copy_in_place_ms": times[IN_PLACE].median,
        "copies_in_place": middle,
        "copies_in_place_quartiles": times[who].quartiles(times[IN_PLACE]),
        "fresh_copy_ms": times[FRESH].median,
        "fresh_copies": fresh,
        "error_percent": error,
        "text": f"{name:14} {what:10} {who:8} {milliseconds:7.1f} ms  {copies}{ahead}",
    }


if __name__ == "__main__":
    sys.exit(main())
