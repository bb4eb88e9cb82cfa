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
        name: a name of `METHODS`, such as "gptq"; "qep+gptq_mse" is QEP with another method than GPTQ to round by.

    Returns:
        The method.

    Raises:
        QuantError: for an unknown name, for a scaling of inputs, and for a method that QEP cannot round by.

    >>> method("gptq")
    GPTQ(damping=0.01, act_order=True)
    >>> method("qep+gptq_mse").method.gptq
    GPTQ(damping=0.01, act_order=True)
    """
    first, _, rest = name.partition("+")
    if first == QEP.name and rest:
        return QEP(method(rest))
    if name not in METHODS and first in SCALINGS:
        raise QuantError(
            f"{name!r} scales the inputs of products first, in a decoder that the scales are folded into: `fewbit quantize "
            f"--method {name}`, or fewbit.workflows.with_scaling and fb.methods.scaled_method"
        )
    if name not in METHODS:
        raise QuantError(f"unknown method {name!r}; {near_names(name, tuple(METHODS | SCALINGS))}")
    return METHODS[name]()


def method_name(method: AbstractMethod | AbstractScaling) -> str:
    """The name of a method or a scaling; inverse of `method`, but for settings that are not the defaults.

    >>> method_name(QEP()), method_name(QEP(GPTQMSE())), method_name(SmoothQuant())
    ('qep', 'qep+gptq_mse', 'smoothquant')
    """
    if isinstance(method, QEP) and method.method.name != GPTQ.name:
        return f"{method.name}+{method.method.name}"
    return method.name


def scaled_name(scaling: str | None, method: str) -> str:
    """The name that `scaled_method` takes for a scaling and the name of a method.

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
    first, plus, rest = name.partition("+")
    if first not in SCALINGS:
        return None, method(name)
    return SCALINGS[first](), method(rest if plus else _CODES_OF[first])
