"""ggml's block types q8_0, q4_0, q5_0, q4_1, q5_1, iq4_nl and tq2_0.

Blocks of 32 elements (tq2_0: 256) with a float16 scale; the _1 types also have a float16 minimum. Codes are two's complement
in order; ggml stores signed codes with an offset, and pairs element j with j + 16, so tensors convert without loss.
"""

from ...formats.format import FORMATS
from ..scales.absmax import AbsMax
from ..scales.minmax import MinMax
from ..scales.moments import AbsMean
from ..scales.signed_max import SignedMax
from ..scheme import SCHEMES, Scheme

_BLOCK = {...: 1, -1: 32}
_range = MinMax(1.0, 0)

SCHEMES.add("q8_0", Scheme(FORMATS["int8_narrow"], _BLOCK, scale="float16", calibration=AbsMax()))
SCHEMES.add("q4_0", Scheme(FORMATS["int4"], _BLOCK, scale="float16", calibration=SignedMax()))
SCHEMES.add("q5_0", Scheme(FORMATS["int5"], _BLOCK, scale="float16", calibration=SignedMax()))
SCHEMES.add("q4_1", Scheme(FORMATS["uint4"], _BLOCK, scale="float16", zero_point="float16", calibration=_range))
SCHEMES.add("q5_1", Scheme(FORMATS["uint5"], _BLOCK, scale="float16", zero_point="float16", calibration=_range))
SCHEMES.add("iq4_nl", Scheme(FORMATS["iq4_nl"], _BLOCK, scale="float16", calibration=AbsMax()))
SCHEMES.add("tq2_0", Scheme(FORMATS["ternary"], {...: 1, -1: 256}, scale="float16", calibration=AbsMean()))
