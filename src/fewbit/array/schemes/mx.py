"""OCP MX, NVFP4 and NVINT4: block schemes with 8-bit scales.

MX: a power-of-two scale for 32 elements, found by exact search; `calibration=MX("floor")` selects another rule. NVFP4 and
NVINT4: E4M3 scales for 16 elements and a float32 tensor scale.
"""

from ...formats.format import FORMATS
from ..scales.absmax import AbsMax
from ..scales.mx import MX
from ..scales.search.mse import MSE
from ..scheme import SCHEMES, Scheme

_BLOCK_32, _BLOCK_16 = {...: 1, -1: 32}, {...: 1, -1: 16}
_ELEMENTS = {
    "mxfp4": "e2m1",
    "mxfp6": "e2m3",
    "mxfp6_e3m2": "e3m2",
    "mxfp8": "e4m3fn",
    "mxfp8_e5m2": "e5m2",
    "mxint8": "mxint8_element",
}

for _name, _element in _ELEMENTS.items():
    SCHEMES.add(_name, Scheme(FORMATS[_element], _BLOCK_32, scale=FORMATS["e8m0"], calibration=MX("optimal")))
SCHEMES.add("mxfp8_rceil", Scheme(FORMATS["e4m3fn"], _BLOCK_32, scale=FORMATS["e8m0"], calibration=MX("rceil")))

_e4m3 = FORMATS["e4m3fn"]
SCHEMES.add("nvfp4", Scheme(FORMATS["e2m1"], _BLOCK_16, scale=_e4m3, tensor_scale=True, calibration=MSE()))
SCHEMES.add("nvfp4_absmax", Scheme(FORMATS["e2m1"], _BLOCK_16, scale=_e4m3, tensor_scale=True, calibration=AbsMax()))
SCHEMES.add("nvfp4_16x16", Scheme(FORMATS["e2m1"], {...: 1, -2: 16, -1: 16}, scale=_e4m3, tensor_scale=True))
SCHEMES.add("nvint4", Scheme(FORMATS["int4_narrow"], _BLOCK_16, scale=_e4m3, tensor_scale=True, calibration=AbsMax()))
