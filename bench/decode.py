"""Times decoding NF4 to float32, compared with bitsandbytes.

    python -m bench.decode [--size 4096] [--rounds 15] [--save]

NF4 is decoded into a fresh array and into one that exists. Most of a fresh array's time goes to the pages that the system must
first provide, so only like is compared with like. A jitted function of ours decodes into an array that it is given to keep,
`donate_argnums`. bitsandbytes' `out=` has no CPU kernel (0.50), so the C function that its CPU kernel calls is called here
with a tensor that is there. Times are of the processor, on all cores, which other programs on the machine change little.
"""

import argparse
import ctypes
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fewbit as fb
from fewbit.evaluate.timing import timed

from .facts import headline, save

PACKAGES = ("bitsandbytes", "torch")


def main() -> int:
    """Runs the comparison; the exit status is 1 when a value is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.decode", description="NF4 decode against bitsandbytes, in one run"
    )
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true", help="write bench/results/decode.json")
    options = parser.parse_args()
    x = np.random.default_rng(0).normal(size=(options.size, options.size)).astype(np.float32)
    contenders = {**ours(x), **theirs(x)}
    results = [np.array(decode()) for decode in contenders.values()]
    # bitsandbytes multiplies by a reciprocal, so that an element next to a midpoint may get the neighbouring code.
    if not all((result == results[0]).mean() > 0.9999 for result in results):
        print("a value is wrong, so no times are printed: the decoded arrays differ", file=sys.stderr)
        return 1
    print(headline(PACKAGES))
    times = timed(contenders, rounds=options.rounds, clock=time.process_time)
    rows = []
    for memory in ("fresh", "reused"):
        mine, other = times[f"fewbit, {memory}"], times[f"bitsandbytes, {memory}"]
        low, middle, high = mine.ratio(other)
        rows.append(
            {"memory": memory, "fewbit_ms": mine.median, "bitsandbytes_ms": other.median, "ratio": [low, middle, high]}
        )
        print(
            f"{memory:6} fewbit {mine.median:6.1f} ms, bitsandbytes {other.median:6.1f} ms: "
            f"{middle:.2f} of its time ({low:.2f} to {high:.2f})"
        )
    if options.save:
        save("decode", PACKAGES, size=options.size, rounds=options.rounds, rows=rows)
    return 0


def ours(x: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Our decode, into both kinds of memory."""
    q, held = fb.quantize(jnp.asarray(x), "nf4"), [jnp.zeros_like(x)]
    fresh = jax.jit(fb.dequantize)
    reused = jax.jit(lambda q, out: fb.dequantize(q), donate_argnums=1, keep_unused=True)

    def into_held() -> jax.Array:
        held[0] = reused(q, held[0])
        return held[0]

    return {"fewbit, fresh": lambda: fresh(q), "fewbit, reused": into_held}


def theirs(x: np.ndarray) -> dict[str, Callable[[], Any]]:
    """That of bitsandbytes, which runs on torch."""
    import torch
    from bitsandbytes.backends.cpu.ops import lib
    from bitsandbytes.functional import dequantize_4bit, get_ptr, quantize_4bit

    codes, state = quantize_4bit(torch.from_numpy(x), blocksize=64, quant_type="nf4")
    out, sizes = torch.empty(x.shape), [ctypes.c_longlong(n) for n in (64, *x.shape)]

    def into_out() -> torch.Tensor:
        lib.cdequantize_blockwise_cpu_nf4_fp32(get_ptr(codes), get_ptr(state.absmax), get_ptr(out), *sizes)
        return out

    return {"bitsandbytes, fresh": lambda: dequantize_4bit(codes, state), "bitsandbytes, reused": into_out}


if __name__ == "__main__":
    sys.exit(main())
