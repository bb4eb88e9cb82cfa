"""Programs that multiply quantized arrays are exported and read: the kernels' calls, sizes left open, other platforms."""

import subprocess
import sys

import jax
import jax.export
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


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("scheme", ["int4_g64", "nf4_dq", "nvfp4", "uint4_g64", "ternary"])
def test_a_program_takes_and_returns_quantized_arrays(scheme):
    def program(x, q):
        return x @ q.T, q

    q = fb.quantize(W, scheme)
    y, same = exported(program, X, q).call(X, q)
    np.testing.assert_array_equal(y, jax.jit(program)(X, q)[0])
    assert same.scheme == q.scheme and same.dtype == q.dtype and same.shape == q.shape
    jax.tree.map(np.testing.assert_array_equal, same, q)


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
