"""fewbit makes neural networks few-bit in JAX: one numerics from post-training quantization to training and serving.

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
    from ._api import *  # noqa: F403 - all of them


class _Package(types.ModuleType):
    """The package, whose public names stand in `_api`: it imports JAX, which help and lists of the command line do without."""

    @property
    def recipe(self) -> Any:
        """The function `fb.recipe`; importing the folder of the same name would put the module in its place."""
        return importlib.import_module("._api", __name__).recipe

    @recipe.setter
    def recipe(self, module: types.ModuleType) -> None:
        """What the import system sets when it imports the folder is not wanted."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        public = vars(importlib.import_module("._api", __name__))
        if name not in public and name not in vars(self):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        vars(self).update({each: value for each, value in public.items() if not each.startswith("_")})
        return vars(self)[name]

    def __dir__(self) -> list[str]:
        return [name for name in vars(importlib.import_module("._api", __name__)) if not name.startswith("_")]


sys.modules[__name__].__class__ = _Package
