"""Reduce-scatter that exchanges codes and accumulates in float32.

A ring that adds on its way would requantize partial sums at every hop. Here each device quantizes each chunk once, an
all-to-all brings the chunks to the devices that own them, and these add the decoded chunks: as many elements on the wire as in
a ring of floats, in the bits of the scheme, and one rounding for each device's contribution.

Reference: ZeRO++ (Wang et al. 2023), section 3.3.
"""

import functools
from collections.abc import Hashable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from .._tiles import from_front
from ..array import scheme as as_scheme
from ..errors import QuantError
from ..kernels.quantize.dispatch import dequantize, quantize
from .policy import SchemeSpec


def psum_scatter(
    x: Float[Array, "..."],
    axis_name: Hashable,
    *,
    scheme: SchemeSpec,
    scatter_dimension: int = 0,
    tiled: bool = False,
    key: Key[Array, ""] | None = None,
) -> Float[Array, "..."]:
    """`jax.lax.psum_scatter` in few bits. Device `d` gets `sum_s Q(x_s[d])`, for the chunks `x_s[d]` of the devices `s`.

    Within `jax.shard_map`. The devices add in the order of their indices, so every run gives the same bytes. The gradient
    takes rounding for the identity: it is that of `jax.lax.psum_scatter`, an all-gather of the cotangent in the dtype of `x`.

    Args:
        x: this device's array; `scatter_dimension` divides into one chunk for each device.
        axis_name: the mesh axis, or a tuple of several.
        scheme: how chunks are quantized, their tiles along the last axis. A scalar chunk is a tile of its own.
        scatter_dimension: the axis that is cut into chunks.
        tiled: as in `jax.lax.psum_scatter`: True keeps the axis; False needs one element for each device, and removes it.
        key: a JAX random key, one for each device, for stochastic rounding; None rounds to nearest.

    Returns:
        The sum of this device's chunk in the dtype of `x`, accumulated in float32. A tile with a NaN becomes NaN.

    Raises:
        QuantError: when `x` does not have the axis, or it does not divide into chunks.

    >>> from fewbit.ops import psum_scatter
    >>> mesh = jax.make_mesh((2,), ("data",))
    >>> x = jnp.array([[127.0, 2.0, 3.0, 127.0], [127.0, 5.0, 127.0, 7.0]])
    >>> def add(x):
    ...     return psum_scatter(x[0], "data", scheme="int8_narrow", tiled=True)
    >>> jax.shard_map(add, mesh=mesh, out_specs=jax.P("data"))(jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))).tolist()
    [254.0, 7.0, 130.0, 134.0]
    """
    chosen, count = as_scheme(scheme), jax.lax.axis_size(axis_name)
    scatter_dimension = from_front(scatter_dimension, x.ndim)
    length = x.shape[scatter_dimension]
    if length % count or not (tiled or length == count):
        raise QuantError(f"axis {scatter_dimension} of {x.shape} does not divide into chunks for {count} devices")

    @jax.custom_jvp
    def added(x: Array, key: Array | None) -> Array:
        chunks = jnp.moveaxis(x.astype(jnp.float32), scatter_dimension, 0)
        if tiled:
            chunks = chunks.reshape(count, length // count, *chunks.shape[1:])
            chunks = jnp.moveaxis(chunks, 1, scatter_dimension + 1)
        # [count, *chunk]: the leaves of every chunk have the devices first
        shape = chunks.shape[1:]
        encode = functools.partial(quantize, scheme=chosen)
        chunks = chunks.reshape(count, *(shape or (1,)))
        if key is None:
            sent = jax.vmap(encode)(chunks)
        else:
            sent = jax.vmap(lambda chunk, key: encode(chunk, key=key))(chunks, jax.random.split(key, count))
        received = jax.tree.map(lambda leaf: jax.lax.all_to_all(leaf, axis_name, 0, 0, tiled=True), sent)
        parts = jax.vmap(functools.partial(dequantize, dtype=jnp.float32))(received)
        return functools.reduce(jnp.add, [parts[i] for i in range(count)]).reshape(shape).astype(x.dtype)

    @added.defjvp
    def straight_through(primals: tuple[Array, Array | None], tangents: tuple[Array, object]) -> tuple[Array, Array]:
        tangent = jax.lax.psum_scatter(tangents[0], axis_name, scatter_dimension=scatter_dimension, tiled=tiled)
        return added(*primals), tangent

    return added(x, key)
