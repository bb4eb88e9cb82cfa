"""QArrays for the tests: of every scheme with random bytes, which takes no quantizing, and a few really quantized."""

import functools

import jax
import numpy as np

import fewbit as fb

X = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)


@functools.cache
def random_qarray(name: str, shape: tuple[int, ...] = (48, 70), axis: int = -1) -> fb.QArray:
    """A QArray of a scheme whose codes and scales are random bytes: what files must give back, whatever it means."""
    rng = np.random.default_rng(0)
    form = jax.eval_shape(lambda x: fb.quantize(x, name, axis=axis), jax.ShapeDtypeStruct(shape, np.float32))

    def filled(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        data = rng.integers(0, 256, leaf.size * leaf.dtype.itemsize, np.uint8)
        return jax.numpy.asarray(data.view(leaf.dtype).reshape(leaf.shape))

    return jax.tree.map(filled, form)


@functools.cache
def quantized(name: str) -> fb.QArray:
    """`X` in a scheme."""
    return jax.jit(fb.quantize, static_argnums=1)(X, name)
