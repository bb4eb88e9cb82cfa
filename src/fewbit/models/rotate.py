"""Rotations of a decoder's residual stream and of its products' inputs.

The model's function does not change. A rotation spreads outliers over all coordinates. It also makes an already
quantized checkpoint a fair test: its weights are no longer values of the format that quantized them.

The residual stream is rotated by a random orthogonal matrix, by its weights alone. No weight can rotate what comes after attention,
an activation, or the norm of a block's output, so the decoder multiplies it by a Hadamard matrix, in O(n log n) for each token.

Reference: Ashkboos et al., QuaRot, arXiv 2404.00456.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from ..errors import QuantError
from ..ops.hadamard import hadamard, hadamard_transform
from .config import DecoderConfig
from .layer import Params
from .names import contraction_axis, params_from_paths, paths_of_params

_LINEAR_READERS = ("qkv", "z", "beta", "alpha", "qkvz", "ba", "in")
_READERS = (
    *("q", "k", "v", "q+k+v", "q_a", "kv_a", *_LINEAR_READERS, "gate", "up", "gate+up", "router", "shared_expert_gate"),
    "latent_in",
    "per_layer_projection",
)
_NORMS = ("norm", "router_norm")
_WRITERS = ("o", "out", "down", "latent_out")


def random_rotation(width: int, *, key: Key[Array, ""]) -> np.ndarray:
    """A uniformly random orthogonal matrix `[width, width]`, in float64.

    The Q of a matrix of independent normal numbers, with the column signs that make R's diagonal positive.

    Args:
        width: rows and columns.
        key: a JAX random key.

    Returns:
        The matrix.

    >>> q = random_rotation(8, key=jax.random.key(0))
    >>> bool(np.abs(q.T @ q - np.eye(8)).max() < 1e-14)
    True
    """
    normal = np.asarray(jax.random.normal(key, (width, width), jnp.float32), np.float64)
    q, r = np.linalg.qr(normal)
    return q * np.sign(np.diag(r))[None, :]


def mean_preserving_rotation(width: int, *, key: Key[Array, ""]) -> np.ndarray:
    """A random orthogonal matrix `[width, width]` whose rows and columns have the sum 1, in float64.

    So `x` times the matrix has the mean of `x`. It is a uniformly random rotation of the vectors with mean 0.

    Args:
        width: rows and columns.
        key: a JAX random key.

    Returns:
        The matrix.

    >>> q = mean_preserving_rotation(8, key=jax.random.key(0))
    >>> bool(np.abs(q.T @ q - np.eye(8)).max() < 1e-14), bool(np.allclose(q.sum(0), 1))
    (True, True)
    """
    if width == 1:
        return np.ones((1, 1))
    inner = np.eye(width)
    inner[1:, 1:] = random_rotation(width - 1, key=key)
    between = np.full(width, -(width**-0.5))
    between[0] += 1
    reflection = np.eye(width) - 2 / (between @ between) * np.outer(between, between)  # of the first axis to the mean's
    return reflection @ inner @ reflection


def signed_hadamard(width: int, *, key: Key[Array, ""]) -> tuple[np.ndarray, np.ndarray]:
    """A Hadamard matrix `[width, width]` whose rows have random signs, in float64, and the signs.

    `x` times the matrix is `hadamard_transform(x * signs)`.

    Args:
        width: rows and columns.
        key: a JAX random key.

    Returns:
        The matrix and the signs of its rows, 1 and -1.

    >>> q, signs = signed_hadamard(8, key=jax.random.key(0))
    >>> x = np.arange(8.0)
    >>> bool(np.allclose(x @ q, hadamard_transform(jnp.asarray(x * signs, jnp.float32)), atol=1e-5))
    True
    """
    signs = np.asarray(jax.random.rademacher(key, (width,), jnp.float32), np.float64)
    return signs[:, None] * hadamard(width).astype(np.float64), signs


def rotate_residual(params: Params, config: DecoderConfig, *, key: Key[Array, ""]) -> tuple[Params, DecoderConfig]:
    """Replaces the residual stream `x` by `x Q`, with unchanged logits.

    The norm gains are folded into the weights that read the normed stream, since only a norm without gains commutes with
    a rotation:

        embed' = embed Q,   W' = W diag(gain) Q  for q, k, v, gate, up, head,   W' = Q^T W  for o, down,   gain' = 1

    The head reads the stream through the last norm's gain, the embedding does not. So a tied head becomes a separate
    matrix, and the configuration untied (unless the last gain is all ones). Computed in float64 on the host, and rounded
    once to float32: logits agree to float32 rounding.

    Where norms are LayerNorms, Q preserves the mean of the stream, `Q 1 = 1`. A bias b becomes `(b / gain) Q`.

    Where blocks have norms on their outputs (Gemma 2 and 3, OLMo 2), the gain comes after the last weight, and no weight can
    rotate what it scales. Then Q is a Hadamard matrix H with random signs s on its rows, the decoder multiplies the outputs by H
    (`config.rotated_outputs`), o and down stay as they are, and the norm has `gain' = gain s`.

    Args:
        params: float parameters with unstacked layers.
        config: the configuration.
        key: a JAX random key.

    Returns:
        The rotated parameters as float32 numpy arrays, and their configuration.

    Raises:
        QuantError: when the layers are stacked, a parameter is not a floating array, or a LayerNorm with a bias has a gain of zero.
    """
    if not isinstance(params["layers"], list):
        raise QuantError("rotate_residual needs params['layers'] to be a list of layers; rotate before stack_layers")
    if config.rotated_outputs:
        raise QuantError("the residual stream is rotated already: config.rotated_outputs is True; rotate the original model")
    old = {path: _wide(array, path) for path, array in paths_of_params(params, config).items()}
    signs = None
    if config.norm_kind == "layer":
        q = mean_preserving_rotation(config.width, key=key)
    elif config.norms == "pre":
        q = random_rotation(config.width, key=key)
    else:
        q, signs = signed_hadamard(config.width, key=key)
    offset = config.norm_offset
    tied = config.tied and bool(np.all(old["norm"] + offset == 1))
    new_config = dataclasses.replace(config, tied=tied, rotated_outputs=signs is not None)
    new = {path: _rotated(path, old, q, signs, offset, contraction_axis(path, config)).astype(np.float32) for path in old}
    if config.tied and not tied:
        new["head"] = (old["embed"].astype(np.float64) * (old["norm"] + offset)[None, :] @ q).astype(np.float32)
    return params_from_paths(new, new_config), new_config


def rotated_weight(path: str, array: Float[Array, "..."], config: DecoderConfig) -> Float[Array, "..."]:
    """A parameter for a decoder that rotates the inputs of `config.rotated_inputs`. Others stay as they are.

    `(x H) (W H)^T = x W^T`, since H is orthogonal.

    Args:
        path: the parameter: layers/3/attn/o, layers/3/mlp/experts/0/down.
        array: its value, floating.
        config: the configuration.

    Returns:
        The parameter, in its dtype.
    """
    if not config.rotates_input_of(path):
        return array
    return hadamard_transform(array, axis=contraction_axis(path, config))


def _rotated(
    path: str, old: dict[str, np.ndarray], q: np.ndarray, signs: np.ndarray | None, offset: float, axis: int
) -> np.ndarray:
    """One rotated parameter, float64. `axis` is the contraction axis of a weight; with `signs` the decoder rotates outputs."""
    array, name = old[path].astype(np.float64), path.rsplit("/", 1)[-1]
    if signs is not None and name == "post_norm":
        return (array + offset) * signs - offset
    if signs is not None and name.removesuffix("_bias") in _WRITERS:
        return array
    if "/experts/" in path and f"{path.partition('/experts/')[0]}/latent_in" in old:
        return array  # reads and writes the latent of the stream
    if name in _NORMS:
        return np.full_like(array, 1 - offset)
    if name == "norm_bias":
        gain = old[path.removesuffix("_bias")] + offset
        if not gain.all():
            raise QuantError(
                f"{path.removesuffix('_bias')} has a gain of zero, by which the bias after it cannot be divided"
            )
        return array / gain @ q
    if path in ("embed", "position_embed"):
        return array @ q
    if path == "head":
        return array * (old["norm"] + offset)[None, :] @ q
    if name in _WRITERS:
        return q.T @ array if axis == -1 else array @ q
    if name.removesuffix("_bias") in _WRITERS:
        return array @ q
    if name in _READERS:
        gain = np.ones(len(q))
        if (norm := _norm_before(path, old)) in old:
            gain = old[norm] + offset
        return array * gain @ q if axis == -1 else q.T @ (gain[:, None] * array)
    return array  # the norms of q and k, biases and sinks do not touch the residual stream


def _norm_before(path: str, old: Mapping[str, np.ndarray]) -> str:
    """The norm whose output a weight reads; one that the decoder has not: it reads the residual stream itself."""
    part = "/".join(path.split("/")[:3])  # layers/3/attn
    if path.endswith("/router") and f"{part}/router_norm" in old:
        return f"{part}/router_norm"
    if part.endswith("/mlp") and f"{part}/norm" not in old:
        return part.removesuffix("mlp") + "attn/norm"  # of parallel blocks
    return f"{part}/norm"


def _wide(array: object, path: str) -> np.ndarray:
    """The parameter as a NumPy array; refuses QArrays and integers."""
    dtype = getattr(array, "dtype", None)
    if not isinstance(array, np.ndarray | jax.Array) or not jnp.issubdtype(array.dtype, jnp.floating):
        raise QuantError(f"{path} is {type(array).__name__} of {dtype}; rotate the float parameters, then quantize them")
    return np.asarray(array)
