"""Methods by name."""

from .._registry import near_names
from ..errors import QuantError
from ..recipe.method import RTN, AbstractMethod
from .awq import AWQ, AWQScaling
from .gptq import GPTQ
from .gptq_mse import GPTQMSE
from .hqq import HQQ
from .imatrix import IMatrix
from .qep import QEP
from .rounding import LearnedRounding
from .scaling import AbstractScaling
from .smoothquant import SmoothQuant

METHODS: dict[str, type[AbstractMethod]] = {
    one.name: one for one in (RTN, GPTQ, GPTQMSE, AWQ, IMatrix, HQQ, QEP, LearnedRounding)
}
"""Every method by its name."""

SCALINGS: dict[str, type[AbstractScaling]] = {one.name: one for one in (AWQScaling, SmoothQuant)}
"""Every scaling of inputs by its name."""

_CODES_OF: dict[str, str] = {"awq": "awq", "smoothquant": "rtn"}
"""The method that goes with a scaling, unless another is named."""


def method(name: str) -> AbstractMethod:
    """A method with its default settings.

    Args:
        name: a name of `METHODS`, such as "gptq".

    Returns:
        The method.

    Raises:
        QuantError: for an unknown name.

    >>> method("gptq")
    GPTQ(damping=0.01, act_order=True)
    """
    if name not in METHODS:
        raise QuantError(f"unknown method {name!r}; {near_names(name, (*METHODS, *SCALINGS))}")
    return METHODS[name]()


def scaled_name(scaling: str | None, method: str) -> str:
    """The name that `scaled_method` takes for a scaling and a method.

    >>> scaled_name("awq", "gptq"), scaled_name("awq", "awq"), scaled_name(None, "qep")
    ('awq+gptq', 'awq', 'qep')
    """
    return "+".join(dict.fromkeys(filter(None, (scaling, method))))


def scaled_method(name: str) -> tuple[AbstractScaling | None, AbstractMethod]:
    """A scaling of inputs and a method, with default settings, as the command line names them.

    Args:
        name: a name of `METHODS`, or of `SCALINGS`, or of both, as in "awq+gptq".

    Returns:
        The scaling, which is folded into a model first, or None; and the method.

    Raises:
        QuantError: for an unknown name.

    >>> scaled_method("smoothquant")
    (SmoothQuant(alpha=0.5), RTN())
    >>> scaled_method("awq+gptq")
    (AWQScaling(grid=20), GPTQ(damping=0.01, act_order=True))
    """
    first, _, rest = name.partition("+")
    if first not in SCALINGS:
        return None, method(name)
    return SCALINGS[first](), method(rest or _CODES_OF[first])
