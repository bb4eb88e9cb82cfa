"""Integer schemes with float scales, one scale a row until a tile is named (`int4_g64`); ternary and binary."""

from ...formats import FORMATS
from ..scales import AbsMean, MinMax
from ..scheme import SCHEMES, Scheme

_ROW = {...: 1, -1: None}

for _bits in range(2, 9):
    SCHEMES.add(f"int{_bits}", Scheme(FORMATS[f"int{_bits}"], _ROW))
    SCHEMES.add(f"int{_bits}_narrow", Scheme(FORMATS[f"int{_bits}_narrow"], _ROW))
    _unsigned = FORMATS[f"uint{_bits}"]
    SCHEMES.add(f"uint{_bits}", Scheme(_unsigned, _ROW, zero_point=_unsigned, calibration=MinMax()))

SCHEMES.add("ternary", Scheme(FORMATS["ternary"], {}, calibration=AbsMean()))
SCHEMES.add("binary", Scheme(FORMATS["binary"], _ROW, calibration=AbsMean()))
