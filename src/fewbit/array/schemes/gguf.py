"""ggml's simple block types: 32 elements along the fastest axis, a float16 scale, and a float16 minimum for the _1 types.

The codes are ours (two's complement, densely packed in order), so a file's tensors come in without loss; ggml stores signed
codes with an offset, and pairs element j with j + 16.
"""

from ...formats import FORMATS
from ..scales import AbsMax, MinMax, SignedMax
from ..scheme import SCHEMES, Scheme

_BLOCK = {...: 1, -1: 32}
_range = MinMax(1.0, 0)

SCHEMES.add("q8_0", Scheme(FORMATS["int8_narrow"], _BLOCK, scale="float16", calibration=AbsMax()))
SCHEMES.add("q4_0", Scheme(FORMATS["int4"], _BLOCK, scale="float16", calibration=SignedMax()))
SCHEMES.add("q5_0", Scheme(FORMATS["int5"], _BLOCK, scale="float16", calibration=SignedMax()))
SCHEMES.add("q4_1", Scheme(FORMATS["uint4"], _BLOCK, scale="float16", zero_point="float16", calibration=_range))
SCHEMES.add("q5_1", Scheme(FORMATS["uint5"], _BLOCK, scale="float16", zero_point="float16", calibration=_range))
