"""What a process with one CPU device chooses by itself, check by check: prints the outcome of each as JSON."""

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

import fewbit as fb
from fewbit import export, kvcache
from tests.conformance import array_laws as laws

SCHEMES = ("int8", "uint3", "q4_1", "nf4_dq", "mxfp6", "nvfp4")
random = np.random.default_rng(0)
w = jnp.asarray(random.normal(size=(64, 128)), jnp.float32)
x = jnp.asarray(random.normal(size=(3, 128)), jnp.float32)


def called(target: str, function: Callable[..., Any], *operands: Any) -> None:
    assert target in jax.jit(function).lower(*operands).as_text(), target


def scheme(name: str) -> None:
    """Quantize, dequantize, product and look-up of a scheme."""
    # Where scales are quantized themselves only the codes are made in C++.
    called("fewbit_encode" if name == "nf4_dq" else "fewbit_quantize", lambda w: fb.quantize(w, name), w)
    q = fb.quantize(w, name)
    called("fewbit_dequantize", fb.dequantize, q)
    called("fewbit_qmatmul", lambda x, q: x @ q.T, x, q)
    dense = laws.numpy_dequantize(q)
    np.testing.assert_array_equal(fb.dequantize(q), dense)
    np.testing.assert_allclose(x @ q.T, np.asarray(x) @ dense.T, rtol=0, atol=1e-3)
    np.testing.assert_array_equal(fb.take(q, jnp.array([5, 0]), 0), dense[[5, 0]])


def explain() -> None:
    line = fb.explain(x, fb.quantize(w, "nf4").T).splitlines()[0]
    assert ": cpu (compiled for " in line, line


def transparent() -> None:
    q = fb.quantize(w, "nf4")
    model = fb.transparent(lambda w, x: jnp.tanh(x @ w.T))
    called("fewbit_qmatmul", model, q, x)
    np.testing.assert_allclose(model(q, x), np.tanh(np.asarray(x) @ laws.numpy_dequantize(q).T), rtol=1e-5, atol=1e-5)


def gradient() -> None:
    called("fewbit_qmatmul", jax.grad(lambda x, q: jnp.sin(x @ q.T).sum()), x, fb.quantize(w, "int8"))


def pairs() -> None:
    policy = fb.Policy("int8", "int8")
    product = lambda x, q: fb.dot_general(x, q, (((1,), (1,)), ((), ())), policy=policy)  # noqa: E731
    called("fewbit_integers", product, x, fb.quantize(w, "int8"))


def ragged() -> None:
    experts = fb.quantize(w.reshape(4, 16, 128), "int8")
    called("fewbit_qmatmul", fb.ragged_dot, x, experts.swapaxes(1, 2), jnp.array([1, 0, 1, 1]))


def attention() -> None:
    cache = kvcache.empty_quantized_cache(kvcache.kv_policy("int8"), layers=2, batch=1, heads=2, head_dim=16, max_length=8)
    k, v, queries = (jnp.ones((1, heads, 3, 16)) for heads in (2, 2, 4))
    cache = cache.written(1, k, v)
    read = lambda cache, queries: kvcache.attention(queries, cache.blocks(1, k, v))  # noqa: E731
    called("fewbit_attention", read, cache, queries)


def training() -> None:
    trained = fb.train(lambda w, x: jnp.tanh(x @ w.T), fb.recipe("int8"))
    assert jnp.isfinite(jax.grad(lambda w: trained(w, x).sum())(w)).all()
    assert "int8" in str(fb.plan(lambda w, x: x @ w.T, w, x, recipe=fb.recipe("int8")))


def open_size(program: Callable[..., Any]) -> None:
    """A size that `jax.export` leaves open is every size; products then take no kernel."""
    (batch,) = jax.export.symbolic_shape("batch")
    q = fb.quantize(w, "int4_g64")
    exported = export.export(jax.jit(program))(jax.ShapeDtypeStruct((batch, 128), jnp.float32), q)
    assert "fewbit_qmatmul" not in exported.mlir_module()
    bound = 128 * 2.0**-23 * float(jnp.max(jnp.abs(x) @ jnp.abs(fb.dequantize(q)).T))  # 128 products in another order
    for rows in (x, x[:1]):
        np.testing.assert_allclose(exported.call(rows, q), program(rows, q), rtol=0, atol=bound)


def scanned(x: jax.Array, q: fb.QArray) -> jax.Array:
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), q)
    return fb.transparent(lambda x, stack: jax.lax.scan(lambda x, w: (x, x @ w.T), x, stack)[1])(x, stack)


OPEN = {
    "product": lambda x, q: x @ q.T,
    "einsum": lambda x, q: fb.einsum("bk,nk->bn", x, q),
    "rows": lambda x, q: fb.transparent(lambda q: q[x[:, 0].astype(jnp.int32)])(q),
    "quantize": lambda x, q: fb.dequantize(fb.quantize(x, "int8")),
    "policy": lambda x, q: fb.dot_general(x, q, (((1,), (1,)), ((), ())), policy=fb.Policy(q.scheme, "int8")),
    "scan": scanned,
}
"""Programs whose number of rows is left open."""

CHECKS: dict[str, Callable[[], None]] = {
    **{name: lambda name=name: scheme(name) for name in SCHEMES},
    **{f"open size: {name}": lambda program=program: open_size(program) for name, program in OPEN.items()},
    **{f.__name__: f for f in (explain, transparent, gradient, pairs, ragged, attention, training)},
}


def outcome(check: Callable[[], None]) -> str:
    try:
        check()
    except (AssertionError, ValueError, TypeError, RuntimeError):
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    assert jax.device_count("cpu") == 1
    sys.stdout.write(json.dumps({name: outcome(check) for name, check in CHECKS.items()}))
