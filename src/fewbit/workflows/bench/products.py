"""Benchmarks matmuls with quantized weights, after a check of their results.

Each matmul is timed interleaved with the dense float32 matmul of the same layout. Weights cycle through copies, so that
they are read from memory as in a model; short matmuls are chained in one program, to amortize the call overhead.
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

from ...array.qarray import QArray
from ...array.scheme import Scheme
from ...array.scheme import scheme as as_scheme
from ...errors import UnsupportedError
from ...evaluate.timing import timed
from ...kernels.backend import select
from ...kernels.qmatmul.dispatch import BACKENDS
from ...kernels.qmatmul.problem import Operand, Problem
from ...kernels.quantize.dispatch import dequantize, quantize
from ...ops.dot import dot_general
from ...ops.policy import Policy
from ..activations import activation_refusal, int8_activation, with_int8_table

DENSE = "dense"
"""The backend name of float products."""

LAYOUTS = {"[N, K]": -1, "[K, N]": -2}
"""The contraction axis of a weight in each of its two layouts: `x @ w.T` and `x @ w`."""

SCHEMES = ("int4_g64", "nf4", "mxfp4", "nvfp4", "q4_1", "uint4_g64", "int8", "q8_0", "fp8", "mxfp6", "int3_g64", "ternary")
"""The schemes that are measured by default."""

ROTATED_BYTES = 384 << 20
"""The total bytes of the copies of one weight: more than the last-level caches of common machines."""

Contender: TypeAlias = tuple[str, str, str]

_MOST_COPIES, _MOST_LINKS = 256, 4
_LONG = 2**26  # multiplications that take much longer than the call of a program


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured product.

    Attributes:
        backend: its name; `DENSE` for a product of floats.
        weight: the name of the weight's scheme, or its dtype.
        layout: "[N, K]" for `x @ w.T`, "[K, N]" for `x @ w`; tiles run along K.
        m: rows of x, which is float32 unless the weight is dense and of another dtype.
        k: length of the contraction.
        n: columns of the result.
        ms: median milliseconds.
        ratio: the lowest, median and highest ratio to the dense float32 product of the same layout, measured in pairs.
        date: when it was measured, as ISO 8601 writes it.
        activation: the scheme in which each product quantizes x; None: x stays float.
    """

    backend: str
    weight: str
    layout: str
    m: int
    k: int
    n: int
    ms: float
    ratio: tuple[float, float, float]
    date: str
    activation: str | None = None


@dataclasses.dataclass(frozen=True)
class Grid:
    """The matmuls to benchmark.

    Attributes:
        schemes: names of weight schemes.
        sizes: K = N.
        rows: M, the rows of x.
        rounds: how many times each matmul runs.
        backend: the backend; None: the default of this machine.
        rotated_bytes: the total bytes of the copies of one weight.
        int8_activations: whether x is quantized to int8 in each product whose codes kernels multiply as integers.
    """

    schemes: tuple[str, ...] = SCHEMES
    sizes: tuple[int, ...] = (4096,)
    rows: tuple[int, ...] = (1, 256)
    rounds: int = 15
    backend: str | None = None
    rotated_bytes: int = ROTATED_BYTES
    int8_activations: bool = False

    @property
    def steps(self) -> int:
        """How often `measured` calls `done`."""
        return (len(LAYOUTS) + 1) * len(self.sizes) * len(self.schemes)


def measured(grid: Grid, done: Callable[[str], None] = lambda _: None) -> tuple[Row, ...]:
    """Times quantized matmuls, and dense float32 and bfloat16 ones.

    Args:
        grid: the matmuls.
        done: called with what was just checked or measured, `grid.steps` times.

    Raises:
        UnsupportedError: when a result differs from the float64 product of the dequantized weight by more than rounding
            explains (nothing is timed then), or the named backend cannot compute a matmul.
        QuantError: for an unknown scheme.
    """
    schemes = [as_scheme(name).name for name in grid.schemes]
    weights = {size: random_weight(size) for size in grid.sizes}
    errors: dict[str, float] = {}
    for size, name, (layout, axis) in itertools.product(grid.sizes, schemes, LAYOUTS.items()):
        q = _weight(weights[size], name, axis, grid)
        error = beyond_rounding(q, axis, grid.rows, grid.backend)
        errors[f"{name} {layout}, {size} x {size}"] = error
        done(f"{name}, {size} x {size}: checked")
    check_errors(errors)
    rows: list[Row] = []
    for size, w in weights.items():
        floats = {dtype: copies(w.astype(dtype), grid.rotated_bytes) for dtype in ("float32", "bfloat16")}
        dense = {(DENSE, dtype, layout): weights for dtype, weights in floats.items() for layout in LAYOUTS}
        rows += [row for m in grid.rows for row in _timed(dense, m, size, grid)]
        del dense, floats["bfloat16"]
        for name in schemes:
            rows += _of_scheme(name, w, floats["float32"], grid)
            done(f"{name}, {size} x {size}")
    return tuple(rows)


def fastest(rows: Sequence[Row], m: int, size: int) -> dict[int, Row]:
    """The fastest matmul per code width in bits. It is for M rows and one size; the fastest of all comes first."""
    found: dict[int, Row] = {}
    for row in sorted(rows, key=lambda row: row.ms):
        if row.backend != DENSE and (row.m, row.k) == (m, size):
            found.setdefault(as_scheme(row.weight).format.bits, row)
    return found


def bits_per_weight(name: str, size: int) -> float:
    """The bits per element of a `[size, size]` weight, scales included."""
    x = jax.ShapeDtypeStruct((size, size), jnp.float32)
    return jax.eval_shape(lambda x: quantize(x, name), x).bits_per_weight


def check_errors(errors: dict[str, float]) -> None:
    """Raises UnsupportedError if an error is 1 or more (in rounding tolerances), or NaN."""
    wrong = {name: f"its error is {error:.3g} times the tolerance" for name, error in errors.items() if not error < 1}
    if wrong:
        raise UnsupportedError("results exceed the rounding tolerance; not benchmarking", wrong)


def random_weight(size: int) -> jax.Array:
    """A normally distributed weight `[size, size]`."""
    return jnp.asarray(np.random.default_rng(0).normal(size=(size, size)), jnp.float32)


@functools.partial(jax.jit, static_argnames=("name", "axis"))
def quantized(w: jax.Array, name: str, axis: int) -> QArray:
    """Quantizes a weight with groups along one of its last axes.

    It is the last axis ([N, K]) or the one before it ([K, N]).
    """
    return quantize(w, name, axis=axis)


def float_activations(grid: Grid) -> dict[str, str]:
    """Why x stays float in products that `int8_activations` asks to quantize. There is a reason by scheme and layout."""
    x, reasons = jax.ShapeDtypeStruct((grid.sizes[0],) * 2, jnp.float32), {}
    for name, (layout, axis) in itertools.product(grid.schemes, LAYOUTS.items()):
        q = jax.eval_shape(lambda x, name=name, axis=axis: with_int8_table(quantized(x, name, axis)), x)
        if reason := activation_refusal(q, int8_activation(q, axis), axis):
            reasons[f"{name} {layout}"] = reason
    return reasons


def _weight(w: jax.Array, name: str, axis: int, grid: Grid) -> QArray:
    """A quantized weight, with a policy where x is quantized."""
    q = quantized(w, name, axis)
    if not grid.int8_activations:
        return q
    if (with_policy := with_int8_policy(q, axis)) is not None:
        return with_policy
    return q


def with_int8_policy(q: QArray, axis: int) -> QArray | None:
    """The weight with a policy that quantizes x to int8.

    It quantizes x in the weight's blocks. None where kernels do not multiply its codes as integers.
    """
    coded, activation = with_int8_table(q), int8_activation(q, axis)
    if activation_refusal(coded, activation, axis):
        return None
    return dataclasses.replace(coded, policy=Policy(coded.scheme, activation))


def _activation(q: QArray) -> Scheme | None:
    """The scheme in which products of a weight quantize x; None: none."""
    return q.policy.activation if isinstance(q.policy, Policy) else None


def product(x: jax.Array, w: "jax.Array | QArray", axis: int, backend: str | None = None) -> jax.Array:
    """Contracts the last axis of x with one axis of the weight."""
    numbers = (((1,), (axis % 2,)), ((), ()))
    if not isinstance(w, QArray):
        return jax.lax.dot_general(x, w, numbers)
    return dot_general(x, w, numbers, backend=backend)


def beyond_rounding(q: QArray, axis: int, rows: Sequence[int], backend: str | None = None) -> float:
    """The largest error over the rounding tolerance of K multiply-adds. NaN if a result is NaN.

    The rounding unit is float32's on a CPU, and bfloat16's elsewhere, where dense matmuls may use it. Every element of
    every result is compared with float64; x repeats three rows.

    Args:
        q: the weight.
        axis: its contraction axis.
        rows: the values of M.
        backend: the backend; None: the default of this machine.
    """
    unit = 2.0**-24 if jax.default_backend() == "cpu" else 2.0**-8
    x = np.random.default_rng(1).normal(size=(3, q.shape[axis])).astype(np.float32)
    w = np.moveaxis(np.asarray(dequantize(q), np.float64), axis, 0)  # [K, N]
    magnitude, activation, decoded = np.abs(w), _activation(q), x
    if activation is not None:
        decoded = np.asarray(dequantize(quantize(x, activation)))
    allowed = unit * (w.shape[0] + 4) * (np.abs(x) @ magnitude + np.abs(x).sum(1, keepdims=True) * magnitude.max())
    exact, worst = decoded.astype(np.float64) @ w, 0.0
    for m in rows:
        repeated = np.arange(m) % 3
        y = np.asarray(chain(jnp.asarray(x[repeated]), q, axis=axis, backend=backend))
        worst = np.maximum(worst, np.max(np.abs(y - exact[repeated]) / allowed[repeated]))
    return float(worst)


def copies(weight: "jax.Array | QArray", nbytes: int) -> list[Any]:
    """Copies of a weight that take `nbytes` together; at least two."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(weight))
    count = min(max(2, nbytes // size), _MOST_COPIES)
    return [jax.tree.map(lambda a: jnp.array(a, copy=True), weight) for _ in range(count)]


def in_turn(run: Callable[..., Any], weights: Sequence[Any], links: int = 1) -> Callable[[], Any]:
    """A function without arguments that runs the next `links` weights at each call, cyclically."""
    sets = [tuple(weights[i : i + links]) for i in range(0, len(weights) - links + 1, links)]
    cycle = itertools.cycle(sets)
    return lambda: run(*next(cycle))


@functools.partial(jax.jit, static_argnames=("axis", "backend"))
def chain(x: jax.Array, *weights: "jax.Array | QArray", axis: int, backend: str | None = None) -> jax.Array:
    """Runs the matmuls of x with each weight, and returns the last. Each is made to depend on the one before."""
    for w in weights[:-1]:
        x = x + (jnp.max(product(x, w, axis, backend)) * 1e-30).astype(x.dtype)
    return product(x, weights[-1], axis, backend)


def _of_scheme(name: str, w: jax.Array, floats: list[Any], grid: Grid) -> list[Row]:
    """The rows of one scheme and size."""
    weights = {layout: _weight(w, name, axis, grid) for layout, axis in LAYOUTS.items()}
    copied = {layout: copies(q, grid.rotated_bytes) for layout, q in weights.items()}
    rows = []
    for m in grid.rows:
        contenders = {(DENSE, "float32", layout): floats for layout in LAYOUTS}
        for layout, q in weights.items():
            contenders[_chosen(m, q, LAYOUTS[layout], grid), name, layout] = copied[layout]
        rows += [row for row in _timed(contenders, m, len(w), grid) if row.backend != DENSE]
    return rows


def _timed(contenders: dict[Contender, list[Any]], m: int, size: int, grid: Grid) -> list[Row]:
    """Times contenders (backend, name, layout) interleaved, each with the copies of its weight."""
    fewest = min(map(len, contenders.values()))
    links = max(1, min(_MOST_LINKS, _LONG // (m * size**2), fewest))
    x = jnp.asarray(np.random.default_rng(2).normal(size=(m, size)), jnp.float32)

    def run(contender: Contender, weights: list[Any]) -> Callable[[], Any]:
        backend, name, layout = contender
        lhs, named = x, grid.backend
        if backend == DENSE:
            lhs, named = x.astype(name), None
        return in_turn(functools.partial(chain, lhs, axis=LAYOUTS[layout], backend=named), weights, links)

    times = timed({contender: run(contender, weights) for contender, weights in contenders.items()}, rounds=grid.rounds)
    today = datetime.date.today().isoformat()

    def row(contender: Contender) -> Row:
        low, middle, high = (float(f"{r:.4g}") for r in times[contender].ratio(times[DENSE, "float32", contender[2]]))
        ms = float(f"{times[contender].median / links:.4g}")
        weight = contenders[contender][0]
        activation = _activation(weight) if isinstance(weight, QArray) else None
        quantized_x = None if activation is None else activation.name
        return Row(*contender, m, size, size, ms, (low, middle, high), today, quantized_x)

    return [row(contender) for contender in contenders]


def _chosen(m: int, q: QArray, axis: int, grid: Grid) -> str:
    """The name of the backend that computes a matmul."""
    x = Operand((m, q.shape[axis]), "float32", _activation(q))
    problem = Problem(x, Operand.of(q), dimension_numbers=(((1,), (axis % 2,)), ((), ())))
    return select(BACKENDS, problem, grid.backend).backend.name
