"""Measuring products: what is measured, and that nothing is told where a product is wrong."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.kernels.qmatmul import BACKENDS, dispatch
from fewbit.kernels.qmatmul.reference import Reference
from fewbit.workflows.bench import products as speed

TINY = speed.Grid(("int8",), sizes=(32,), rows=(2,), rounds=2, rotated_bytes=1 << 14)


@pytest.mark.slow
def test_what_is_measured():
    said: list[str] = []
    rows = speed.measured(TINY, said.append)
    named = {(r.backend, r.weight, r.layout) for r in rows}
    assert named == {
        (*who, layout)
        for who in ((speed.DENSE, "float32"), (speed.DENSE, "bfloat16"), ("reference", "int8"))
        for layout in speed.LAYOUTS
    }
    assert len(rows) == 6 and all((r.m, r.k, r.n) == (2, 32, 32) and r.ms > 0 for r in rows)
    assert all(r.ratio[0] <= r.ratio[1] <= r.ratio[2] for r in rows)
    assert all(r.ratio == (1, 1, 1) for r in rows if r.weight == "float32")
    assert len(said) == TINY.steps == 3


@dataclasses.dataclass(frozen=True)
class Poisoned(Reference):
    """The reference with one wrong element, in products of some rows."""

    name: ClassVar[str] = "poisoned"

    def run(self, problem, *operands):
        y = super().run(problem, *operands)
        return y.at[-1, 5].multiply(1.001) if len(y) > 4 else y


def test_a_wrong_product_is_not_timed(monkeypatch):
    monkeypatch.setattr(speed, "timed", None)
    monkeypatch.setattr(dispatch, "BACKENDS", (Poisoned(), *BACKENDS))
    with pytest.raises(fb.UnsupportedError, match="results exceed the rounding tolerance; not benchmarking") as caught:
        speed.measured(dataclasses.replace(TINY, rows=(2, 5), backend="poisoned"))
    assert list(caught.value.reasons) == ["int8 [N, K], 32 x 32", "int8 [K, N], 32 x 32"]


def test_the_gate_lets_rounding_pass():
    w = speed.random_weight(64)
    q = speed.quantized(w, "nf4", -2)
    assert 0 < speed.beyond_rounding(q, -2, (1, 5), "reference") < 1


def test_a_chain_waits_and_changes_nothing():
    x, w = jnp.ones((2, 16)), jnp.asarray(np.random.default_rng(0).normal(size=(3, 16, 16)), jnp.float32)
    assert jnp.array_equal(speed.chain(x, *w, axis=-2), jax.jit(jnp.matmul)(x, w[2]))


def test_weights_take_turns():
    runs: list[tuple[int, ...]] = []
    run = speed.in_turn(lambda *weights: runs.append(weights), [1, 2, 3, 4, 5], links=2)
    for _ in range(3):
        run()
    assert runs == [(1, 2), (3, 4), (1, 2)]
    assert len(speed.copies(jnp.ones(8), 100)) == 3 and len(speed.copies(jnp.ones(8), 1)) == 2


def test_the_fastest_of_each_number_of_bits():
    def row(weight: str, ms: float, m: int = 1) -> speed.Row:
        return speed.Row("cpu", weight, "[N, K]", m, 64, 64, ms, (ms, ms, ms), "2026-01-02")

    rows = (row("int8", 3.0), row("nf4", 2.0), row("mxfp4", 1.0), row("ternary", 0.1, m=2), row("q8_0", 4.0))
    assert [(bits, r.weight) for bits, r in speed.fastest(rows, 1, 64).items()] == [(4, "mxfp4"), (8, "int8")]
