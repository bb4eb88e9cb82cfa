"""Stored arrays for the tests of containers: written, read back, described without being written."""

import jax.numpy as jnp
import numpy as np

import fewbit as fb
from fewbit._tiles import tile_counts
from fewbit.array.validity import misfit
from fewbit.io.checkpoint import TensorInfo, Tensors
from fewbit.io.containers.container import Weight

NAME = "model.layers.0.mlp.up_proj.weight"
MODULE = NAME.removesuffix(".weight")


def tensors(arrays):
    """Arrays as a container reads them."""
    info = {name: TensorInfo(a.shape, a.dtype.name, a.dtype.name, a.nbytes) for name, a in arrays.items()}
    return Tensors(info, arrays.__getitem__)


def quantized(scheme, shape, dtype="float32", name=NAME):
    """A weight and its QArray of random codes, scales of both signs and zero, and random zero points."""
    scheme, rng = fb.scheme(scheme), np.random.default_rng(0)
    counts = tile_counts(shape, scheme.tiles(len(shape)))
    codes = rng.integers(0, 256, (*shape[:-1], shape[-1] * scheme.format.bits // 8), np.uint8)
    zero = None
    if isinstance(scheme.scale, fb.Scheme):
        scale = quantized(scheme.scale, counts)[1]
    elif isinstance(scheme.scale, np.dtype):
        scale = jnp.asarray(rng.choice([0, 0.0123, -0.5, 3.25, 0.1], counts), scheme.scale)
    else:
        scale = jnp.asarray(rng.integers(100, 126, counts, np.uint8))
    if isinstance(scheme.zero_holder, np.dtype):
        zero = jnp.asarray(rng.normal(size=counts), scheme.zero_holder)
    elif scheme.zero_holder is not None:
        zero = jnp.asarray(rng.integers(0, 2**scheme.zero_holder.bits, counts, np.uint8))
    q = fb.QArray(jnp.asarray(codes), scale, zero, None, scheme, np.dtype(jnp.dtype(dtype)))
    assert misfit(q) is None
    return Weight(name, shape, dtype, scheme), q


def read_back(container, weight, q, **config):
    """The arrays of a weight, and what the container reads of them."""
    assert container.refusal(weight) is None
    arrays = container.encoded(weight, q)
    config |= container.files([weight], ["model.norm.weight"], {}).config
    return arrays, container.decoded(config, tensors(arrays), "here")[weight.name]


def values(x, dtype=np.float32):
    """The dequantized numbers, in float32 for comparison."""
    if isinstance(x, fb.QArray):
        x = fb.dequantize(x, dtype)
    return np.asarray(x).astype(np.float32)
