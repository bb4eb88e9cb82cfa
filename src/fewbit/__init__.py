"""Quantizes neural networks in JAX to 1-8 bits: post-training, training, serving.

>>> import fewbit as fb
>>> q = fb.quantize(jnp.ones((64, 128)), "nf4")
>>> q.shape, q.nbytes
((64, 128), 4608)
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import frameworks as frameworks
    from ._api import *  # noqa: F403 - all of them


class _Package(types.ModuleType):
    """The package, which imports `_api` (and JAX) on first use of a public name."""

    @property
    def recipe(self) -> Any:
        """The function `fb.recipe`, which importing the subpackage of the same name would replace."""
        return importlib.import_module("._api", __name__).recipe

    @recipe.setter
    def recipe(self, module: types.ModuleType) -> None:
        """Ignores the subpackage that the import system sets."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "frameworks":  # on its own, because it imports everything else
            return importlib.import_module(".frameworks", __name__)
        public = vars(importlib.import_module("._api", __name__))
        if name not in public and name not in vars(self):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        vars(self).update({each: value for each, value in public.items() if not each.startswith("_")})
        return vars(self)[name]

    def __dir__(self) -> list[str]:
        names = [name for name in vars(importlib.import_module("._api", __name__)) if not name.startswith("_")]
        return [*names, "frameworks"]


sys.modules[__name__].__class__ = _Package
