"""Lossless conversion of ggml blocks to QArrays.

Codes, scales and minima stay the same, in our order. A block of 32 has a float16 scale (MXFP4: one exponent byte), for
the _1 types a float16 minimum, for the 5-bit types four bytes with the fifth bit of each code, and the low four bits of codes
j and j + 16 in byte j. ggml stores signed codes with an offset; flipping the sign bit gives two's complement.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from ...array.packing import code_capacity, pack
from ...array.qarray import QArray
from ...array.scheme import SCHEMES

_BLOCK = 32


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Layout of a 32-element block of one ggml type.

    Attributes:
        scheme: the name of the scheme that represents it exactly.
        has_minimum: whether a float16 minimum follows the scale.
        sign_bit: the mask that is xored into the codes.
    """

    scheme: str
    has_minimum: bool = False
    sign_bit: int = 0


LAYOUTS = {
    "Q8_0": Blocks("q8_0"),
    "Q4_0": Blocks("q4_0", sign_bit=8),
    "Q4_1": Blocks("q4_1", has_minimum=True),
    "Q5_0": Blocks("q5_0", sign_bit=16),
    "Q5_1": Blocks("q5_1", has_minimum=True),
    "MXFP4": Blocks("mxfp4"),
}
"""The layout of each ggml type that has a scheme."""

_NAN_EXPONENT = 255


def is_lossless(data: np.ndarray, type_name: str) -> bool:
    """True if a QArray represents these blocks exactly.

    MXFP4 blocks of exponent byte 255 are the exception: ggml reads that byte as 2**128, halved; in E8M0 it is NaN.
    """
    return type_name != "MXFP4" or not (data.reshape(-1, 17)[:, 0] == _NAN_EXPONENT).any()


def qarray_from_blocks(data: np.ndarray, type_name: str, shape: tuple[int, ...]) -> QArray:
    """Converts ggml blocks to a QArray with bit-identical dequantized values.

    In MXFP4 ggml reads codes 0 and 8 as 0; E2M1 would read 8 as -0, so it becomes 0. XLA on CPU flushes numbers below 2**-126
    to zero, which elements of MXFP4 blocks with exponent bytes 0 to 2 can be.

    Args:
        data: the bytes of the tensor.
        type_name: a key of `LAYOUTS`.
        shape: the tensor's shape; its last axis is a multiple of 32.

    Returns:
        A float32 QArray in the scheme of the type.
    """
    layout = LAYOUTS[type_name]
    scheme = SCHEMES[layout.scheme]
    blocks = data.reshape(*shape[:-1], shape[-1] // _BLOCK, -1)  # [*rows, K/32, bytes]
    if type_name == "MXFP4":
        scale, rest = blocks[..., 0], blocks[..., 1:]  # [*rows, K/32]
    else:
        scale, rest = _halves(blocks[..., :2]), blocks[..., 2:]
    minimum = None
    if layout.has_minimum:
        minimum, rest = jnp.asarray(_halves(rest[..., :2])), rest[..., 2:]
    codes = _codes(rest, scheme.format.bits) ^ np.uint8(layout.sign_bit)
    if type_name == "MXFP4":
        codes = np.where(codes == 8, np.uint8(0), codes)
    packed = pack(jnp.asarray(codes.reshape(shape)), scheme.format.bits, scheme.packing)
    slack = code_capacity(packed.shape[-1], scheme.format.bits) - shape[-1]
    return QArray(packed, jnp.asarray(scale), minimum, None, scheme, np.dtype(np.float32), slack)


def _halves(pairs: np.ndarray) -> np.ndarray:
    """Reads pairs of bytes as little-endian float16."""
    return np.ascontiguousarray(pairs).view("<f2")[..., 0]


def _codes(rest: np.ndarray, bits: int) -> np.ndarray:
    """Unpacks the 32 codes of each block to one byte each."""
    if bits == 8:
        return rest
    nibbles = rest[..., -16:]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
    if bits == 5:
        codes |= np.unpackbits(rest[..., :4], axis=-1, bitorder="little") << 4
    return codes
