"""FP8, FP4 and NF4 schemes with float32 scales; NF4 double-quantized."""

from ...formats.format import FORMATS
from ..scales.centred import CentredAbsMax
from ..scheme import SCHEMES, Scheme

_ROW = {...: 1, -1: None}
_BLOCK_64 = {...: 1, -1: 64}

SCHEMES.add("fp8", Scheme(FORMATS["e4m3fn"], _ROW))
SCHEMES.add("fp8_e5m2", Scheme(FORMATS["e5m2"], _ROW))
SCHEMES.add("fp8_e4m3fnuz", Scheme(FORMATS["e4m3fnuz"], _ROW))
SCHEMES.add("fp8_e5m2fnuz", Scheme(FORMATS["e5m2fnuz"], _ROW))
SCHEMES.add("fp8_tensor", Scheme(FORMATS["e4m3fn"], {}))
SCHEMES.add("fp8_e5m2_tensor", Scheme(FORMATS["e5m2"], {}))
SCHEMES.add("fp8_e4m3fnuz_tensor", Scheme(FORMATS["e4m3fnuz"], {}))
SCHEMES.add("fp8_e5m2fnuz_tensor", Scheme(FORMATS["e5m2fnuz"], {}))
SCHEMES.add("fp8_block128", Scheme(FORMATS["e4m3fn"], {...: 1, -2: 128, -1: 128}))
SCHEMES.add("fp4", Scheme(FORMATS["e2m1"], _BLOCK_64))
SCHEMES.add("nf4", Scheme(FORMATS["nf4"], _BLOCK_64))
SCHEMES.add("bnb_fp4", Scheme(FORMATS["bnb_fp4"], _BLOCK_64))

# QLoRA's double quantization: 8-bit scales around their mean. bitsandbytes has a range for each 256 flattened scales; one
# range for all of them can be sliced with the array, and the error is no larger.
_nested = Scheme(FORMATS["dynamic8"], {}, zero_point="float32", calibration=CentredAbsMax())
SCHEMES.add("nf4_dq", Scheme(FORMATS["nf4"], _BLOCK_64, scale=_nested))
