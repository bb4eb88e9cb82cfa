"""Integer, ternary and binary schemes, per-channel unless grouped (`int4_g64`)."""

from ...formats.format import FORMATS
from ..scales.absmax import AbsMax
from ..scales.minmax import MinMax
from ..scales.moments import AbsMean
from ..scheme import SCHEMES, Scheme

_ROW = {...: 1, -1: None}

for _bits in range(2, 9):
    SCHEMES.add(f"int{_bits}", Scheme(FORMATS[f"int{_bits}"], _ROW))
    SCHEMES.add(f"int{_bits}_narrow", Scheme(FORMATS[f"int{_bits}_narrow"], _ROW))
    _unsigned = FORMATS[f"uint{_bits}"]
    SCHEMES.add(f"uint{_bits}", Scheme(_unsigned, _ROW, zero_point=_unsigned, calibration=MinMax()))

# AQT maps the largest element to the edge of the last code, and never uses the most negative one.
for _bits in (4, 8):
    _top = 2 ** (_bits - 1) - 1
    SCHEMES.add(f"int{_bits}_aqt", Scheme(FORMATS[f"int{_bits}_narrow"], _ROW, calibration=AbsMax(_top / (_top + 0.5))))

SCHEMES.add("ternary", Scheme(FORMATS["ternary"], {}, calibration=AbsMean()))
SCHEMES.add("binary", Scheme(FORMATS["binary"], _ROW, calibration=AbsMean()))
