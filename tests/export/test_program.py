"""Programs that multiply quantized arrays are exported and read: the kernels' calls, sizes left open, other platforms."""

import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import fewbit as fb
from fewbit import UnsupportedError, export
from fewbit.kernels.extension import EXTENSIONS, Extension, extension

pytest.importorskip("flatbuffers")

X = jax.random.normal(jax.random.key(0), (3, 128))
W = jax.random.normal(jax.random.key(1), (64, 128))


needs_kernels = pytest.mark.skipif(any(extension(one).missing for one in EXTENSIONS), reason="the C++ kernels are not built")
NUMBERS = (((1,), (1,)), ((), ()))


def by_kernel(x, q):
    return fb.dot_general(x, q, NUMBERS, backend="cpu")


def exported(fn, *args, **options):
    return export.deserialize(export.export(jax.jit(fn), **options)(*args).serialize())


@pytest.mark.parametrize("scheme", ["int4_g64", "nf4_dq", "nvfp4", "uint4_g64", "ternary"])
def test_a_program_takes_and_returns_quantized_arrays(scheme):
    def program(x, q):
        return x @ q.T, q

    q = fb.quantize(W, scheme)
    y, same = exported(program, X, q).call(X, q)
    np.testing.assert_array_equal(y, jax.jit(program)(X, q)[0])
    assert same.scheme == q.scheme and same.dtype == q.dtype and same.shape == q.shape
    jax.tree.map(np.testing.assert_array_equal, same, q)


def scanned(x, q):
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), q)
    return fb.transparent(lambda x, stack: jax.lax.scan(lambda x, w: (x, x @ w.T), x, stack)[1])(x, stack)


def by_policy(x, q):
    return fb.dot_general(x, q, NUMBERS, policy=fb.Policy(q.scheme, "int8"))


@pytest.mark.slow
@pytest.mark.skipif(not jaxtyping.config.jaxtyping_disable, reason="annotations have sizes that are numbers")
@pytest.mark.parametrize(
    "program",
    [
        lambda x, q: x @ q.T,
        lambda x, q: fb.einsum("bk,nk->bn", x, q),
        lambda x, q: fb.transparent(lambda q: q[x[:, 0].astype(jnp.int32)])(q),
        lambda x, q: fb.dequantize(fb.quantize(x, "int8")),
        by_policy,
        scanned,
    ],
    ids=["product", "einsum", "rows", "quantize", "policy", "scan"],
)
def test_sizes_may_be_left_open(program):
    (batch,) = jax.export.symbolic_shape("batch")
    q = fb.quantize(W, "int4_g64")
    found = exported(program, jax.ShapeDtypeStruct((batch, 128), jnp.float32), q)
    sums = jnp.max(jnp.abs(X) @ jnp.abs(fb.dequantize(q)).T)  # of 128 magnitudes, which the kernel adds in another order
    for x in (X, X[:1]):
        np.testing.assert_allclose(found.call(x, q), program(x, q), rtol=0, atol=128 * 2.0**-23 * sums)


def test_one_file_has_the_programs_of_several_platforms():
    found = exported(lambda x, q: x @ q.T, X, fb.quantize(W, "int4_g64"), platforms=("cpu", "cuda", "tpu"))
    assert found.platforms == ("cpu", "cuda", "tpu")


@needs_kernels
def test_the_kernels_are_called():
    q = fb.quantize(W, "int4_g64")
    found = exported(by_kernel, X, q)
    assert "custom_call @fewbit_qmatmul" in found.mlir_module()
    np.testing.assert_array_equal(found.call(X, q), by_kernel(X, q))


@needs_kernels
def test_kernels_that_are_missing(monkeypatch):
    blob = export.export(jax.jit(by_kernel))(X, fb.quantize(W, "int4_g64")).serialize()
    monkeypatch.setattr("fewbit.export.program.extension", lambda module: Extension(missing="it is not built"))
    with pytest.raises(
        UnsupportedError, match="the program calls fewbit_qmatmul, and no such kernel is loaded here; install"
    ):
        export.deserialize(blob)


@pytest.mark.slow
def test_another_process_runs_it(tmp_path):
    q = fb.quantize(W, "int4_g64")
    fn = jax.jit(lambda x: x @ q.T)
    (tmp_path / "program").write_bytes(export.export(fn)(X).serialize())
    np.save(tmp_path / "x.npy", X)
    script = (
        "import sys, pathlib, numpy as np; from fewbit import export; folder = pathlib.Path(sys.argv[1]);"
        "program = export.deserialize((folder / 'program').read_bytes());"
        "np.save(folder / 'y.npy', program.call(np.load(folder / 'x.npy')))"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), fn(X))
