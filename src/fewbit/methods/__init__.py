"""Methods: how the scales and codes of weights are chosen."""

from ..recipe.method import RTN as RTN
from ..recipe.method import AbstractMethod as AbstractMethod
from .allocation import Choice as Choice
from .allocation import allocate as allocate
from .gptq import GPTQ as GPTQ
from .hqq import HQQ as HQQ
from .imatrix import IMatrix as IMatrix
from .named import METHODS as METHODS
from .named import method as method
from .qep import QEP as QEP
from .rounding import LearnedRounding as LearnedRounding
