"""Adapters for plain trees, Equinox, Flax Linen and Flax NNX.

Functions of `linen` and `nnx` do what those of the same name in `fb` do, and raise what they raise; without flax they raise
UnsupportedError. All share these arguments:

Args:
    module: a Linen module.
    variables: the variables of a Linen module, with the collection `params`; arrays or `jax.ShapeDtypeStruct`s, boxed or not.
    model: an NNX model.
    inputs: example inputs of the method or model; arrays or `jax.ShapeDtypeStruct`s.
    fn: a function of an NNX model, `fn(model, *inputs)`; None calls the model.
    recipe: a Recipe, or anything that `fb.recipe` takes; `quantize` takes a Plan, too.
    method: how `quantize` chooses scales and codes, as in `fb.quantize_params`; `linen.quantize` says how to choose a method
        of the module.
    stats: what `observe` of the same framework collected, as in `fb.quantize_params`.
    plan: a plan of the float model, from `plan` of the same framework.
    biases: the path of a weight's bias, where it has another name, as in `fb.methods.correct_biases`.
    kwargs: other arguments of `module.apply`: `method`, `rngs`, `mutable`, and keyword arguments of the method.
    donate: whether each float array is deleted once it is quantized, as in `tree.quantize`.
    state: the sparsity state of the model.
    step: the number of this step; None counts the updates from 0.
"""

from . import linen as linen
from . import nnx as nnx
from . import serialization as serialization
from . import tree as tree
