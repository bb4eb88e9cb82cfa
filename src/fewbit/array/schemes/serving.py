"""Schemes with 16-bit scales that serving programs store: GPTQ, AWQ, MLX."""

import dataclasses

from ...formats.format import FORMATS
from ..scales.minmax import MinMax
from ..scales.search.mse import MSE
from ..scheme import SCHEMES, Scheme

# GPTQ (symmetric: int, asymmetric: uint) and AWQ (uint4).
for _name in ("int4", "int8", "uint4"):
    SCHEMES.add(f"{_name}_f16", dataclasses.replace(SCHEMES[_name], scale="float16"))

# MLX's affine mode: a scale and a float offset for 64 elements, in the dtype of the model.
_range = MinMax(1.0, 0)
for _bits in (4, 8):
    _codes = FORMATS[f"uint{_bits}"]
    _tile = {...: 1, -1: 64}
    SCHEMES.add(f"affine{_bits}", Scheme(_codes, _tile, scale="bfloat16", zero_point="bfloat16", calibration=_range))

# MLX's nvfp4 mode: one level of scales.
SCHEMES.add("nvfp4_one_level", Scheme(FORMATS["e2m1"], {...: 1, -1: 16}, scale=FORMATS["e4m3fn"], calibration=MSE()))
