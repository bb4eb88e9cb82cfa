"""Times products by AMX beside the same ones by AVX-512, in one process, and dense ones by XLA.

    python -m bench.amx [--rows 64 512] [--shapes 1536x576 4096x4096] [--rounds 15] [--save]

x in bfloat16 times weights in float scales (AMX multiplies bfloat16), and x in int8 times weights of integers (AMX multiplies bytes),
both with weights [N, K]. A product is timed only if it is within the rounding of its float32 sums of that of the decoded operands.
"""

import argparse
import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fewbit as fb
from fewbit.evaluate.timing import timed
from fewbit.kernels.extension import extension
from fewbit.kernels.qmatmul import Cpu, Problem
from fewbit.kernels.qmatmul.problem import Operand

from .facts import save
from .integers import CONTRACTS

FLOATS = ("mxfp4", "nvfp4", "q4_1", "int4_g64", "nf4", "int8")
INTEGERS = (("int8", "int8"), ("int4", "int8"), ("int8_g128", "int8_g128"), ("int4_g64", "int8_g64"))
LEVELS = ("avx512", "amx")


def main() -> int:
    """Runs the comparison; the exit status is 1 where there is no AMX or a value is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.amx", description="AMX beside AVX-512")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--shapes", nargs="+", default=["1536x576", "4096x4096"], help="N x K")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true", help="write bench/results/amx.json")
    options = parser.parse_args()
    modules = [f"fewbit.kernels.qmatmul.cpu.{name}" for name in ("_dequant_gemm", "_int8_gemm")]
    if any(extension(module).isa != "amx" for module in modules):
        print("this processor, system or FEWBIT_ISA has no AMX", file=sys.stderr)
        return 1
    rows: list[dict[str, Any]] = []
    for shape in options.shapes:
        n, k = map(int, shape.split("x"))
        w = jnp.asarray(np.random.default_rng(0).normal(size=(n, k)), jnp.float32)
        for m in options.rows:
            x = jnp.asarray(np.random.default_rng(m).normal(size=(m, k)), jnp.float32)
            dense = {
                "dense, float32": (jax.jit(jnp.dot), x, w.T),
                "dense, bfloat16": (jax.jit(_in_float32), x.astype(jnp.bfloat16), w.T.astype(jnp.bfloat16)),
            }
            for name in FLOATS:
                rows.append(_row(name, "bfloat16", x.astype(jnp.bfloat16), fb.quantize(w, name), dense, options.rounds))
            for name, kind in INTEGERS:
                rows.append(_row(name, kind, fb.quantize(x, kind), fb.quantize(w, name), {}, options.rounds))
    if None in rows:
        return 1
    if options.save:
        save("amx", (), rounds=options.rounds, rows=rows)
    return 0


def _in_float32(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.dot(x, w, preferred_element_type=jnp.float32)


def _row(name: str, kind: str, x: Any, q: fb.QArray, dense: dict[str, Any], rounds: int) -> dict[str, Any] | None:
    """Times one product at both levels; None where its values are wrong."""
    problem = Problem(Operand.of(x), Operand.of(q), CONTRACTS[-1], preferred_element_type=jnp.float32)
    calls = {}
    for isa in LEVELS:
        backend = dataclasses.replace(Cpu(), isa=isa)
        calls[isa] = jax.jit(lambda x, q, backend=backend: backend.run(problem, x, q)), x, q
    exact = np.asarray(fb.dequantize(x) if isinstance(x, fb.QArray) else x, np.float64) @ np.float64(fb.dequantize(q)).T
    for isa, (run, *operands) in calls.items():
        if not np.allclose(run(*operands), exact, rtol=0, atol=2.0**-16 * np.abs(exact).max()):
            print(f"a value is wrong, so no times are printed: {name}, x in {kind}, {isa}", file=sys.stderr)
            return None
    calls |= dense
    times = timed({who: (lambda call=call: call[0](*call[1:])) for who, call in calls.items()}, rounds=rounds)
    beside = times["amx"].ratio(times["avx512"])
    operations = 2.0 * len(x) * q.size
    rates = {who: operations / timing.median / 1e6 for who, timing in times.items()}  # of milliseconds: 1e9 a second
    print(
        f"{name:9} {q.shape[0]}x{q.shape[1]}, {len(x):4} rows of {kind:9} {beside[1]:.2f} of AVX-512's time "
        f"({beside[0]:.2f} to {beside[2]:.2f})  "
        + ", ".join(f"{who} {rate:.0f}" for who, rate in rates.items())
        + " billion operations a second",
        flush=True,
    )
    return {
        "scheme": name,
        "x": kind,
        "shape": q.shape,
        "m": len(x),
        "ms": {who: timing.median for who, timing in times.items()},
        "of_avx512": beside[1],
        "of_avx512_from": beside[0],
        "of_avx512_to": beside[2],
    }


if __name__ == "__main__":
    sys.exit(main())
