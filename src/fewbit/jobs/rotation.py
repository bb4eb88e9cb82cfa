"""The same model with its residual stream rotated at random: weights off any grid that they lay on."""

import dataclasses
import types

import jax

from .. import models
from ..io import TensorInfo
from .model import Model


def rotated(model: Model, *, seed: int = 0) -> Model:
    """The model, decoded and with its residual stream rotated. It is held in memory whole, in float32.

    Args:
        model: a model that can be run.
        seed: draws the rotation.

    Returns:
        A model whose logits are those of the given one, to float32 rounding.

    Raises:
        UnsupportedError: when the model cannot be run.
    """
    config = model.runnable_config()
    params, config = models.rotate_residual(model.float_params(), config, key=jax.random.key(seed))
    arrays = models.paths_of_params(params, config)
    info = {path: TensorInfo(a.shape, "float32", "F32", a.nbytes) for path, a in arrays.items()}
    of_hugging_face = {path: models.HUGGING_FACE.name(path) for path in arrays} if model.names else {}
    metadata = {**model.metadata, "tie_word_embeddings": config.tied} if model.names else model.metadata
    note = f"the residual stream was rotated at random (seed {seed}); losses are relative to the rotated float32 weights"
    return dataclasses.replace(
        model,
        config=config,
        info=types.MappingProxyType(info),
        load=arrays.__getitem__,
        facts={**model.facts, "rotation_seed": seed},
        notes=(*model.notes, note),
        metadata=metadata,
        names=of_hugging_face,
    )
