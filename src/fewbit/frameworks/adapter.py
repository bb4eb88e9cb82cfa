"""SplitModel: a framework's model as parameters and rest."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import PyTree

from ..recipe.plan import Plan
from ..recipe.recipe import RecipeLike
from . import tree


@dataclasses.dataclass(frozen=True)
class SplitModel:
    """A model split into its parameters and its other values, for the functions of `fb`.

    Attributes:
        params: the tree of parameters, whose paths the rules match.
        rest: all other values.
        rebuild: the model of a tree of parameters and of other values.
    """

    params: PyTree
    rest: PyTree
    rebuild: Callable[[PyTree, PyTree], Any]

    def call(self, fn: Callable[..., Any], **kwargs: object) -> tuple[Callable[..., Any], PyTree, PyTree]:
        """`fn(model, *inputs, **kwargs)` as a function `(params, rest, *inputs)`, and its first two arguments."""
        return lambda params, rest, *inputs: fn(self.rebuild(params, rest), *inputs, **kwargs), self.params, self.rest

    def replaced(self, change: Callable[[PyTree], PyTree]) -> Any:
        """The model with parameters `change(params)`."""
        return self.rebuild(change(self.params), self.rest)

    def quantize(
        self, fn: Callable[..., Any], *inputs: PyTree, recipe: RecipeLike | Plan, donate: bool, **kwargs: object
    ) -> Any:
        """The model with quantized parameters; other arrays are shared with it."""
        params = tree.quantize(*self.call(fn, **kwargs), *inputs, recipe=recipe, donate=donate)
        return self.rebuild(params, self.rest)
