"""Turning the residual stream of a Llama by a random rotation: the same function, with weights off their old grid.

Such a turn spreads outliers over all coordinates. And it takes a checkpoint whose weights lie on a quantization grid
already off that grid, so that quantizing it anew is a fair test.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from ..errors import QuantError
from .config import LlamaConfig
from .llama import Params
from .names import params_from_paths, paths_of_params

_READERS = ("attn/q", "attn/k", "attn/v", "mlp/gate", "mlp/up")
_WRITERS = ("attn/o", "mlp/down")


def random_rotation(width: int, *, key: Key[Array, ""]) -> np.ndarray:
    """An orthogonal matrix `[width, width]`, uniform over all of them, in float64.

    The Q of a matrix of independent normal numbers, each column with the sign that makes R's diagonal positive.

    Args:
        width: how many rows and columns.
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


def rotate_residual(params: Params, config: LlamaConfig, *, key: Key[Array, ""]) -> tuple[Params, LlamaConfig]:
    """Rotates the residual stream: `x` becomes `x Q` everywhere, and the logits stay what they are.

    The norm gains go into the weights that read the normed stream, since only a norm without gains commutes with a
    rotation:

        embed' = embed Q,   W' = W diag(gain) Q  for q, k, v, gate, up, head,   W' = Q^T W  for o, down,   gain' = 1

    A tied head reads the stream through the last norm's gain, and the embedding does not. So the head of the result is
    a matrix of its own, and the result's configuration is untied (a tied head stays tied where the last gain is all
    ones). Computed in float64 on the host, and rounded once to float32: logits agree to float32 rounding.

    Args:
        params: float parameters with unstacked layers.
        config: the network.
        key: draws the rotation.

    Returns:
        The rotated parameters as float32 numpy arrays, and their configuration.

    Raises:
        QuantError: when the layers are stacked, or a parameter is not a floating array.
    """
    if not isinstance(params["layers"], list):
        raise QuantError("rotate_residual needs params['layers'] to be a list of layers; rotate before stack_layers")
    old = {path: _wide(array, path) for path, array in paths_of_params(params, config).items()}
    turn = random_rotation(config.width, key=key)
    tied = config.tied and bool(np.all(old["norm"] == 1))
    new_config = dataclasses.replace(config, tied=tied)
    new = {path: _rotated(path, old, turn).astype(np.float32) for path in old}
    if config.tied and not tied:
        new["head"] = (old["embed"].astype(np.float64) * old["norm"][None, :] @ turn).astype(np.float32)
    return params_from_paths(new, new_config), new_config


def _rotated(path: str, old: dict[str, np.ndarray], turn: np.ndarray) -> np.ndarray:
    """One parameter of the rotated network, float64."""
    array = old[path].astype(np.float64)
    if path.endswith("norm"):
        return np.ones_like(array)
    if path == "embed":
        return array @ turn
    if path == "head":
        return array * old["norm"][None, :] @ turn
    if path.endswith(_WRITERS):
        return turn.T @ array
    assert path.endswith(_READERS), path
    gain = old[path.rsplit("/", 1)[0] + "/norm"]
    return array * gain[None, :] @ turn


def _wide(array: object, path: str) -> np.ndarray:
    """A parameter on the host; QArrays and integers are refused."""
    dtype = getattr(array, "dtype", None)
    if not isinstance(array, np.ndarray | jax.Array) or not jnp.issubdtype(array.dtype, jnp.floating):
        raise QuantError(f"{path} is {type(array).__name__} of {dtype}; rotate the float parameters, then quantize them")
    return np.asarray(array)
