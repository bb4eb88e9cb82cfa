"""Methods: how the scales and codes of weights are chosen."""

from ..recipe.method import RTN as RTN
from ..recipe.method import AbstractMethod as AbstractMethod
from .allocation import Choice as Choice
from .allocation import allocate as allocate
from .awq import AWQ as AWQ
from .awq import AWQScaling as AWQScaling
from .bias_correction import correct_biases as correct_biases
from .gptq import GPTQ as GPTQ
from .gptq_mse import GPTQMSE as GPTQMSE
from .hqq import HQQ as HQQ
from .imatrix import IMatrix as IMatrix
from .named import METHODS as METHODS
from .named import SCALINGS as SCALINGS
from .named import method as method
from .named import scaled_method as scaled_method
from .qep import QEP as QEP
from .rounding import LearnedRounding as LearnedRounding
from .scaling import AbstractScaling as AbstractScaling
from .scaling import ScaledProduct as ScaledProduct
from .sequential import quantize_sequentially as quantize_sequentially
from .smoothquant import SmoothQuant as SmoothQuant
