"""The functions of `fb` for the models of any framework.

An adapter of a framework is a function `split(model)` that returns a SplitModel. SplitModel has the functions of a model,
SplitFunction those that transform a function of a model; `linen` and `nnx` give them their signatures.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Int, Key, PyTree

from ..array.scheme import Scheme
from ..calibration.measure import Statistic
from ..calibration.observe import observe
from ..calibration.ranges import AbstractRange
from ..calibration.stats import Stats
from ..methods.bias_correction import correct_biases
from ..ops.interpret.transparent import Decoded, transparent
from ..recipe.method import AbstractMethod
from ..recipe.plan import Plan, plan
from ..recipe.quantize_row import SupportsObservations
from ..recipe.recipe import RecipeLike
from ..training.delayed_state import DelayedState, delayed_state
from ..training.lora.adapter import Adapter, init
from ..training.lora.apply import apply
from ..training.lora.merge import merge
from ..training.model_sparsity import ModelSparsity, sparsity_state
from ..training.train import train
from . import tree

_R = TypeVar("_R")


@dataclasses.dataclass(frozen=True)
class SplitModel:
    """A model split into its parameters and its other values. Its methods are the functions of `fb` for such a model.

    Methods take `fn(model, *inputs, **kwargs)` where functions of `fb` take a function of the parameters. Their other
    arguments, results and errors are those of the function of the same name in `fb`.

    Attributes:
        params: the tree of parameters, whose paths the rules match.
        rest: all other values.
        rebuild: the model of a tree of parameters and of other values.

    >>> model = {"w": jnp.ones((64, 32)), "offset": jnp.ones((1, 32))}
    >>> def split(model):
    ...     return SplitModel({"w": model["w"]}, model["offset"], lambda params, offset: {**params, "offset": offset})
    >>> def fn(model, x):
    ...     return x @ model["w"] + model["offset"]
    >>> as_given = {"method": fb.methods.RTN(), "stats": None, "donate": False}
    >>> quantized = split(model).quantize(fn, jnp.ones((1, 64)), recipe="int8", **as_given)
    >>> quantized["w"], quantized["offset"] is model["offset"]
    (QArray(int8, float32[64, 32], 2,176 bytes, 8.500 bits/weight), True)
    """

    params: PyTree
    rest: PyTree
    rebuild: Callable[[PyTree, PyTree], PyTree]

    def call(self, fn: Callable[..., _R], /, **kwargs: object) -> tuple[Callable[..., _R], PyTree, PyTree]:
        """`fn(model, *inputs, **kwargs)` as a function `(params, rest, *inputs)`, and its first two arguments."""
        return lambda params, rest, *inputs: fn(self.rebuild(params, rest), *inputs, **kwargs), self.params, self.rest

    def replaced(self, change: Callable[[PyTree], PyTree]) -> PyTree:
        """The model with parameters `change(params)`; other values are shared with it."""
        return self.rebuild(change(self.params), self.rest)

    def plan(self, fn: Callable[..., Any], /, *inputs: PyTree, recipe: RecipeLike, **kwargs: object) -> Plan:
        """The plan of a recipe, as `fb.plan`."""
        return plan(*self.call(fn, **kwargs), *inputs, recipe=recipe)

    def quantize(
        self,
        fn: Callable[..., Any],
        /,
        *inputs: PyTree,
        recipe: RecipeLike | Plan,
        method: AbstractMethod,
        stats: SupportsObservations | None,
        donate: bool,
        **kwargs: object,
    ) -> PyTree:
        """The model with quantized parameters, as `tree.quantize`."""
        called = self.call(fn, **kwargs)
        params = tree.quantize(*called, *inputs, recipe=recipe, method=method, stats=stats, donate=donate)
        return self.rebuild(params, self.rest)

    def correct_biases(
        self, params: PyTree, plan: Plan, stats: SupportsObservations, *, biases: Mapping[str, str | None]
    ) -> PyTree:
        """The quantized model with other biases, as `fb.methods.correct_biases`. `params` are those of the float model."""
        return self.replaced(lambda quantized: correct_biases(params, quantized, plan, stats, biases=biases))

    def observe(
        self,
        fn: Callable[..., Any],
        batches: Iterable[PyTree],
        recipe: RecipeLike,
        /,
        *,
        rule: AbstractRange,
        collect: Sequence[Statistic],
        **kwargs: object,
    ) -> Stats:
        """Statistics of the activations over batches, as `fb.observe`."""

        def called(params: PyTree, *inputs: PyTree) -> PyTree:
            return fn(self.rebuild(params, self.rest), *inputs, **kwargs)

        return observe(called, self.params, batches, recipe, rule=rule, collect=collect)

    def delayed_state(
        self, fn: Callable[..., Any], /, *inputs: PyTree, recipe: RecipeLike, **kwargs: object
    ) -> DelayedState:
        """The initial state of delayed scaling, as `fb.delayed_state`."""
        return delayed_state(*self.call(fn, **kwargs), *inputs, recipe=recipe)

    def sparsity_state(
        self, fn: Callable[..., Any], /, *inputs: PyTree, recipe: RecipeLike, **kwargs: object
    ) -> ModelSparsity:
        """The initial sparsity masks, as `fb.sparsity_state`."""
        return sparsity_state(*self.call(fn, **kwargs), *inputs, recipe=recipe)

    def update_sparsity(self, state: ModelSparsity, step: Int[ArrayLike, ""] | None) -> ModelSparsity:
        """The sparsity masks of one step, as `fb.ModelSparsity.update`."""
        return state.update(self.params, step)

    def pruned(self, state: ModelSparsity) -> PyTree:
        """The sparse model, as `fb.ModelSparsity.apply`."""
        return self.replaced(state.apply)

    def lora_init(
        self,
        key: Key[Array, ""],
        fn: Callable[..., Any],
        /,
        *inputs: PyTree,
        match: str,
        rank: int,
        alpha: float | None,
        dtype: DTypeLike,
        without_product: Literal["error", "skip"],
        axis: int | tuple[int, ...] | None,
        **kwargs: object,
    ) -> dict[str, Adapter]:
        """LoRA adapters for the parameters whose path matches, as `fb.lora.init`."""
        return init(
            key,
            *self.call(fn, **kwargs),
            *inputs,
            match=match,
            rank=rank,
            alpha=alpha,
            dtype=dtype,
            without_product=without_product,
            axis=axis,
        )

    def lora_merge(self, adapters: Mapping[str, Adapter], *, scheme: str | Scheme | Mapping[str, Any] | None) -> PyTree:
        """The model with the updates of LoRA adapters added to its parameters, as `fb.lora.merge`."""
        return self.replaced(functools.partial(merge, adapters=adapters, scheme=scheme))


@dataclasses.dataclass(frozen=True)
class SplitFunction(Generic[_R]):
    """A function of a model that each call splits. Its methods are the transformations of `fb` for it.

    Attributes:
        fn: the function, `fn(model, *args, **kwargs)`.
        split: splits the model.

    >>> def split(model):
    ...     return SplitModel({"w": model["w"]}, model["offset"], lambda params, offset: {**params, "offset": offset})
    >>> trained = SplitFunction(lambda model, x: x @ model["w"] + model["offset"], split).train("w8a8", report=None)
    >>> trained({"w": jnp.eye(4), "offset": jnp.ones((1, 4))}, jnp.zeros((1, 4))).tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """

    fn: Callable[..., _R]
    split: Callable[[PyTree], SplitModel]

    def transparent(
        self, *, fallback: Literal["error", "dequantize"], report: Callable[[Decoded], None] | None
    ) -> Callable[..., _R]:
        """The function for a quantized model, as `fb.transparent`."""
        return self._of_model(transparent(self._joined, fallback=fallback, report=report))

    def train(self, recipe: RecipeLike, *, report: Callable[[Decoded], None] | None) -> Callable[..., _R]:
        """The function with quantized forward and backward matmuls, and `key=`, `delayed=` and `sparsity=`, as `fb.train`."""
        return self._of_model(train(self._joined, recipe, report=report))

    def lora_apply(
        self, *, dropout: float, fallback: Literal["error", "dequantize"], report: Callable[[Decoded], None] | None
    ) -> Callable[..., _R]:
        """The function `(model, adapters, *args, dropout_key=None, **kwargs)` of a model with LoRA adapters, as `fb.lora.apply`."""
        pure = apply(self._joined, dropout=dropout, fallback=fallback, report=report)

        def adapted(model: PyTree, adapters: Mapping[str, Adapter], /, *args: PyTree, **kwargs: PyTree) -> _R:
            split = self.split(model)
            return pure(split.params, adapters, split.rest, split.rebuild, *args, **kwargs)

        return adapted

    def _joined(
        self, params: PyTree, rest: PyTree, rebuild: Callable[[PyTree, PyTree], PyTree], /, *args: PyTree, **kwargs: PyTree
    ) -> _R:
        """The function of a split model."""
        return self.fn(rebuild(params, rest), *args, **kwargs)

    def _of_model(self, pure: Callable[..., _R]) -> Callable[..., _R]:
        """A transformed `_joined` as a function of a model."""

        def run(model: PyTree, /, *args: PyTree, **kwargs: PyTree) -> _R:
            split = self.split(model)
            return pure(split.params, split.rest, split.rebuild, *args, **kwargs)

        return run
