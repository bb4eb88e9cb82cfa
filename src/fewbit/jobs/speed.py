"""How fast products with quantized weights are on this machine: a gate of correctness, and then the times.

A product is timed in turns with the dense float32 product of the same layout. Weights rotate through copies, so that they
come from memory, as those of a model do; where one product is short, a program holds several, one after another, so that
they share what calling it costs.
"""

import dataclasses
import datetime
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..array import QArray
from ..array import scheme as as_scheme
from ..errors import UnsupportedError
from ..evaluate.timing import timed
from ..kernels.qmatmul import BACKENDS, Problem
from ..kernels.qmatmul.problem import Operand
from ..kernels.qmatmul.times import DENSE, Row
from ..kernels.quantize import dequantize, quantize
from ..kernels.select import select
from ..ops import Policy, dot_general

LAYOUTS = {"[N, K]": -1, "[K, N]": -2}
"""The contracted axis of a weight in each of its two layouts: that of `x @ w.T` and that of `x @ w`."""

SCHEMES = ("int4_g64", "nf4", "mxfp4", "nvfp4", "q4_1", "uint4_g64", "int8", "q8_0", "fp8", "mxfp6", "int3_g64", "ternary")
"""The schemes that are measured when none are named."""

ROTATED_BYTES = 384 << 20
"""How many bytes the copies of one weight take together: more than the last-level caches of common machines."""

Contender: TypeAlias = tuple[str, str, str]

_MOST_COPIES, _MOST_LINKS = 256, 4
_LONG = 2**26  # multiplications, beside which the call of a program is short


@dataclasses.dataclass(frozen=True)
class Grid:
    """Which products are measured.

    Attributes:
        schemes: names of schemes.
        sizes: K, which is N as well.
        rows: M, the rows of x.
        rounds: how many times each product runs.
        backend: what computes them; None: what is chosen here.
        rotated_bytes: how many bytes the copies of one weight take together.
        activation: the scheme that x, a float32 array, is quantized to within each product; empty: it is not.
    """

    schemes: tuple[str, ...] = SCHEMES
    sizes: tuple[int, ...] = (4096,)
    rows: tuple[int, ...] = (1, 256)
    rounds: int = 15
    backend: str | None = None
    rotated_bytes: int = ROTATED_BYTES
    activation: str = ""

    @property
    def steps(self) -> int:
        """How often `measured` says that something was done."""
        return (len(LAYOUTS) + 1) * len(self.sizes) * len(self.schemes)


def measured(grid: Grid, done: Callable[[str], None] = lambda _: None) -> tuple[Row, ...]:
    """The times of a grid of products with quantized weights, and of the dense products in float32 and bfloat16.

    Args:
        grid: which ones.
        done: called with what was just checked or measured, as often as the grid has steps.

    Raises:
        UnsupportedError: where a product is further from that of the decoded weight than its sums may round; nothing is
            timed then. Where the named backend cannot compute one.
        QuantError: for an unknown scheme.
    """
    schemes = [as_scheme(name).name for name in grid.schemes]
    weights = {size: random_weight(size) for size in grid.sizes}
    errors: dict[str, float] = {}
    for size, name, (layout, axis) in itertools.product(grid.sizes, schemes, LAYOUTS.items()):
        q = quantized(weights[size], name, axis)
        error = beyond_rounding(q, axis, grid.rows, grid.backend, grid.activation)
        errors[f"{name} {layout}, {size} x {size}"] = error
        done(f"{name}, {size} x {size}: checked")
    refuse_red(errors)
    rows: list[Row] = []
    for size, w in weights.items():
        floats = {dtype: copies(w.astype(dtype), grid.rotated_bytes) for dtype in ("float32", "bfloat16")}
        dense = {(DENSE, dtype, layout): held for dtype, held in floats.items() for layout in LAYOUTS}
        if not grid.activation:  # where it is told, the grid is one beside another
            rows += [row for m in grid.rows for row in _timed(dense, m, size, grid)]
        del dense, floats["bfloat16"]
        for name in schemes:
            rows += _of_scheme(name, w, floats["float32"], grid)
            done(f"{name}, {size} x {size}")
    return tuple(rows)


def fastest(rows: Sequence[Row], m: int, size: int) -> dict[int, Row]:
    """For each number of bits of a code, the fastest product of that many rows and that size; the fastest of all comes first."""
    found: dict[int, Row] = {}
    for row in sorted(rows, key=lambda row: row.ms):
        if row.backend != DENSE and not row.activation and (row.m, row.k) == (m, size):
            found.setdefault(as_scheme(row.weight).format.bits, row)
    return found


def bits_per_weight(name: str, size: int) -> float:
    """How many bits a weight of a scheme takes for each of its elements."""
    x = jax.ShapeDtypeStruct((size, size), jnp.float32)
    return jax.eval_shape(lambda x: quantize(x, name), x).bits_per_weight


def refuse_red(errors: dict[str, float]) -> None:
    """Raises UnsupportedError where an error is not below 1, that is, beyond what rounding explains."""
    red = {
        name: f"its error is {error:.3g} of what its sums may round away" for name, error in errors.items() if not error < 1
    }
    if red:
        raise UnsupportedError("the correctness gate is red, so no speed is told", red)


def random_weight(size: int) -> jax.Array:
    """The weight that is measured, `[size, size]`."""
    return jnp.asarray(np.random.default_rng(0).normal(size=(size, size)), jnp.float32)


@functools.partial(jax.jit, static_argnames=("name", "axis"))
def quantized(w: jax.Array, name: str, axis: int) -> QArray:
    """A weight in a scheme, with its tiles along the last axis ([N, K]) or the one before it ([K, N])."""
    return quantize(w, name, axis=axis)


def product(x: jax.Array, w: "jax.Array | QArray", axis: int, backend: str | None = None, activation: str = "") -> jax.Array:
    """The product that contracts the last axis of x, quantized to `activation` if that is told, and one axis of the weight."""
    numbers = (((1,), (axis % 2,)), ((), ()))
    if not isinstance(w, QArray):
        return jax.lax.dot_general(x, w, numbers)
    return dot_general(x, w, numbers, backend=backend, policy=Policy(w.scheme.name, activation) if activation else None)


def beyond_rounding(q: QArray, axis: int, rows: Sequence[int], backend: str | None = None, activation: str = "") -> float:
    """The largest error of products, over what they may round away in K products and sums; NaN where one is NaN.

    They round to float32 on a CPU; elsewhere to bfloat16, as dense products may there. Every element of every product is
    compared: the rows of x are three, again and again.

    Args:
        q: the weight.
        axis: its contracted axis.
        rows: the numbers of rows of x.
        backend: what computes them; None: what is chosen here.
        activation: the scheme that x is quantized to; empty: it is not.
    """
    unit = 2.0**-24 if jax.default_backend() == "cpu" else 2.0**-8
    x = np.random.default_rng(1).normal(size=(3, q.shape[axis])).astype(np.float32)
    w = np.asarray(dequantize(q), np.float64)
    w = w.T if axis % 2 else w
    magnitude = np.abs(w)
    allowed = unit * (w.shape[0] + 4) * (np.abs(x) @ magnitude + np.abs(x).sum(1, keepdims=True) * magnitude.max())
    met = np.asarray(dequantize(quantize(jnp.asarray(x), activation))) if activation else x
    exact, worst = met @ w, 0.0
    for m in rows:
        taken = np.arange(m) % 3
        y = np.asarray(chain(jnp.asarray(x[taken]), q, axis=axis, backend=backend, activation=activation))
        worst = np.maximum(worst, np.max(np.abs(y - exact[taken]) / allowed[taken]))
    return float(worst)


def copies(weight: Any, nbytes: int) -> list[Any]:
    """Copies of a weight, which take so many bytes together: at least two."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(weight))
    count = min(max(2, nbytes // size), _MOST_COPIES)
    return [jax.tree.map(lambda a: jnp.array(a, copy=True), weight) for _ in range(count)]


def in_turn(run: Callable[..., Any], weights: Sequence[Any], links: int = 1) -> Callable[[], Any]:
    """A function without arguments, which runs the next weights at each call, `links` of them."""
    sets = [tuple(weights[i : i + links]) for i in range(0, len(weights) - links + 1, links)]
    turns = itertools.cycle(sets)
    return lambda: run(*next(turns))


@functools.partial(jax.jit, static_argnames=("axis", "backend", "activation"))
def chain(x: jax.Array, *weights: Any, axis: int, backend: str | None = None, activation: str = "") -> jax.Array:
    """The products of x with one weight after another, of which the last is given: each waits for the one before."""
    for w in weights[:-1]:
        x = x + (jnp.max(product(x, w, axis, backend, activation)) * 1e-30).astype(x.dtype)
    return product(x, weights[-1], axis, backend, activation)


def _of_scheme(name: str, w: jax.Array, floats: list[Any], grid: Grid) -> list[Row]:
    """The rows of one scheme and size."""
    weights = {layout: quantized(w, name, axis) for layout, axis in LAYOUTS.items()}
    held = {layout: copies(q, grid.rotated_bytes) for layout, q in weights.items()}
    rows = []
    for m in grid.rows:
        contenders = {(DENSE, "float32", layout): floats for layout in LAYOUTS}
        for layout, q in weights.items():
            contenders[_chosen(m, q, LAYOUTS[layout], grid), name, layout] = held[layout]
        rows += [row for row in _timed(contenders, m, len(w), grid) if row.backend != DENSE]
    return rows


def _timed(contenders: dict[Contender, list[Any]], m: int, size: int, grid: Grid) -> list[Row]:
    """The rows of contenders that take turns: backend, name and layout of each, with the copies of its weight."""
    fewest = min(map(len, contenders.values()))
    links = max(1, min(_MOST_LINKS, _LONG // (m * size**2), fewest))
    x = jnp.asarray(np.random.default_rng(2).normal(size=(m, size)), jnp.float32)

    def run(contender: Contender, weights: list[Any]) -> Callable[[], Any]:
        backend, name, layout = contender
        dtype = name if backend == DENSE else "float32"
        ours = {} if backend == DENSE else {"backend": grid.backend, "activation": grid.activation}
        options = {"axis": LAYOUTS[layout], **ours}
        return in_turn(functools.partial(chain, x.astype(dtype), **options), weights, links)

    times = timed({contender: run(contender, weights) for contender, weights in contenders.items()}, rounds=grid.rounds)

    today = datetime.date.today().isoformat()

    def row(contender: Contender) -> Row:
        low, middle, high = (float(f"{r:.4g}") for r in times[contender].ratio(times[DENSE, "float32", contender[2]]))
        ms = float(f"{times[contender].median / links:.4g}")
        activation = "" if contender[0] == DENSE else grid.activation
        return Row(*contender, m, size, size, ms, (low, middle, high), today, activation)

    return [row(contender) for contender in contenders]


def _chosen(m: int, q: QArray, axis: int, grid: Grid) -> str:
    """The name of the backend that computes a product."""
    met = as_scheme(grid.activation).along(1, 2) if grid.activation else None
    x = Operand((m, q.shape[axis]), "float32", met)
    problem = Problem(x, Operand.of(q), dimension_numbers=(((1,), (axis % 2,)), ((), ())))
    return select(BACKENDS, problem, grid.backend).backend.name
