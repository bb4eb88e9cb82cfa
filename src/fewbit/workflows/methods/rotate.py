"""Rotates a model's residual stream at random."""

import dataclasses
import types

import jax

from ...io.checkpoint import TensorInfo
from ...models.families.table import family_of
from ...models.names import paths_of_params
from ...models.rotate import rotate_residual
from ..model import Model


def rotated(model: Model, *, seed: int = 0) -> Model:
    """Dequantizes the model and rotates its residual stream.

    All parameters are in memory, as float32.

    Args:
        model: a model that can be run.
        seed: the seed of the rotation.

    Returns:
        A model with the same logits, to float32 rounding.

    Raises:
        UnsupportedError: when the model cannot be run.
    """
    config = model.runnable_config()
    params, config = rotate_residual(model.float_params(), config, key=jax.random.key(seed))
    arrays = paths_of_params(params, config)
    info = {path: TensorInfo(a.shape, "float32", "F32", a.nbytes) for path, a in arrays.items()}
    metadata, names = model.metadata, {}
    if model.names:
        metadata = {**metadata, "tie_word_embeddings": config.tied}
        table = family_of(metadata).table
        names = {path: table.name(path) for path in arrays}
    note = f"the residual stream was rotated at random (seed {seed}); losses are relative to the rotated float32 weights"
    return dataclasses.replace(
        model,
        config=config,
        info=types.MappingProxyType(info),
        load=arrays.__getitem__,
        facts={**model.facts, "rotation_seed": seed},
        notes=(*model.notes, note),
        metadata=metadata,
        names=names,
    )
