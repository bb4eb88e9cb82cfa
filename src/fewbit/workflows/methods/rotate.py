"""Models with a rotated residual stream, or rotated inputs of products."""

import dataclasses
import math
import types

import jax
import jax.numpy as jnp

from ...errors import QuantError
from ...io.checkpoint import TensorInfo
from ...models.config import ChangedInput
from ...models.families.table import family_of
from ...models.names import paths_of_params
from ...models.rotate import rotate_residual, rotated_weight
from ..model import Model, Value, check_alone, decoded


def rotated(model: Model, *, seed: int = 0) -> Model:
    """Dequantizes the model and rotates its residual stream.

    All parameters are in memory, as float32. A model whose blocks have norms on their outputs is then in fewbit's own form, whose
    decoder rotates these outputs; only fewbit's own layouts store it.

    Args:
        model: a model that can be run.
        seed: the seed of the rotation.

    Returns:
        A model with the same logits, to float32 rounding.

    Raises:
        QuantError: when it is rotated already.
        UnsupportedError: when the model cannot be run, or has other parts than a language model.
    """
    config = model.runnable_config()
    check_alone(model, "rotating the residual stream")
    if (earlier := model.facts.get("rotation_seed")) is not None:
        raise QuantError(f"the residual stream of {model.name} is rotated already (seed {earlier}); start from its source")
    params, config = rotate_residual(model.float_params(), config, key=jax.random.key(seed))
    arrays = paths_of_params(params, config)
    info = {path: TensorInfo(a.shape, "float32", "F32", a.nbytes) for path, a in arrays.items()}
    metadata, names = model.metadata, {}
    if config.rotated_outputs:
        metadata = {}
    elif model.names:
        metadata = {**metadata, "tie_word_embeddings": config.tied}
        table = family_of(metadata).table_of(config)
        names = {path: table.name(path) for path in arrays}
    note = f"the residual stream was rotated at random (seed {seed}); losses are relative to the rotated float32 weights"
    if config.rotated_outputs:
        note += "; the outputs of blocks, after their norms, are multiplied by a Hadamard matrix when the model runs"
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


def with_rotated_inputs(model: Model, products: tuple[ChangedInput, ...]) -> Model:
    """The model in fewbit's own form, whose decoder rotates the inputs of some products.

    Their weights are dequantized and rotated one at a time, when they are loaded. Only fewbit's decoder runs such a model, and only
    fewbit's own layouts store it.

    Args:
        model: a model that can be run.
        products: "o", after attention, and "down", after the activation; of experts, too.

    Returns:
        A model with the same logits, to float32 rounding.

    Raises:
        QuantError: for another product, or when inputs are rotated or scaled already.
        UnsupportedError: when the model cannot be run, or has other parts than a language model.
    """
    config = model.runnable_config()
    check_alone(model, "rotating inputs")
    if config.rotated_inputs:
        raise QuantError(
            f"{model.name} rotates the inputs of {', '.join(config.rotated_inputs)} already; start from its source"
        )
    if config.scaled_inputs:
        raise QuantError(
            f"{model.name} scales the inputs of {', '.join(config.scaled_inputs)}, and a rotation comes before scales; start from its source"
        )
    config = dataclasses.replace(config, rotated_inputs=products)

    def load(path: str) -> Value:
        value = model.load(path)
        if not config.rotates_input_of(path):
            return value
        return rotated_weight(path, jnp.asarray(decoded(value), jnp.float32), config)

    info = {
        path: TensorInfo(one.shape, "float32", "F32", math.prod(one.shape) * 4) if config.rotates_input_of(path) else one
        for path, one in model.info.items()
    }
    note = (
        f"inputs of {' and '.join(products)} are multiplied by a Hadamard matrix when the model runs, and their weights were"
    )
    return dataclasses.replace(
        model, config=config, info=types.MappingProxyType(info), load=load, notes=(*model.notes, note), metadata={}, names={}
    )
