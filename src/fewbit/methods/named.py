"""Methods by name."""

from .._registry import near_names
from ..errors import QuantError
from ..recipe.method import RTN, AbstractMethod
from .gptq import GPTQ
from .hqq import HQQ
from .imatrix import IMatrix
from .qep import QEP
from .rounding import LearnedRounding

METHODS: dict[str, type[AbstractMethod]] = {one.name: one for one in (RTN, GPTQ, IMatrix, HQQ, QEP, LearnedRounding)}
"""Every method by its name."""


def method(name: str) -> AbstractMethod:
    """A method with its default settings.

    Args:
        name: "rtn", "gptq", "imatrix", "hqq", "qep" or "rounding".

    Returns:
        The method.

    Raises:
        QuantError: for an unknown name.

    >>> method("gptq")
    GPTQ(damping=0.01, act_order=True)
    """
    if name not in METHODS:
        raise QuantError(f"unknown method {name!r}; {near_names(name, tuple(METHODS))}")
    return METHODS[name]()
