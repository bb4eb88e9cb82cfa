"""Lossless conversion between ggml blocks and QArrays.

Codes, scales and minima stay the same, in our order. A block has one scale (NVFP4: four): a float16, or a byte in the MX and
NVFP4 types. The `_1` types have a float16 minimum. ggml stores signed codes with an offset; flipping the sign bit gives two's
complement. NVFP4 has the float32 scale of the tensor in a tensor of its own.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from ...array.packing import code_capacity, pack, unpack
from ...array.qarray import QArray
from ...array.scheme import SCHEMES, Scheme
from ...errors import QuantError
from ...formats.integer import Integer
from .codes import CODES, PackedCodes


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Layout of a block of one ggml type.

    Attributes:
        scheme: the name of the scheme that represents it exactly.
        codes: how its codes are packed.
        length: the number of elements.
        nbytes: the number of bytes.
        scale: the byte where its scales begin.
        first: the byte where its codes begin.
        minimum: the byte where its float16 minimum begins, or None.
        sign_bit: the mask that is xored into the codes.
    """

    scheme: str
    codes: PackedCodes
    length: int
    nbytes: int
    scale: int = 0
    first: int = 2
    minimum: int | None = None
    sign_bit: int = 0

    @property
    def tile(self) -> int:
        """The number of elements of a scale."""
        return SCHEMES[self.scheme].tile[-1] or self.length


LAYOUTS = {
    "Q8_0": Blocks("q8_0", CODES["bytes"], 32, 34),
    "Q4_0": Blocks("q4_0", CODES["nibbles"], 32, 18, sign_bit=8),
    "Q4_1": Blocks("q4_1", CODES["nibbles"], 32, 20, first=4, minimum=2),
    "Q5_0": Blocks("q5_0", CODES["fives"], 32, 22, sign_bit=16),
    "Q5_1": Blocks("q5_1", CODES["fives"], 32, 24, first=4, minimum=2),
    "IQ4_NL": Blocks("iq4_nl", CODES["nibbles"], 32, 18),
    "MXFP4": Blocks("mxfp4", CODES["nibbles"], 32, 17, first=1),
    "NVFP4": Blocks("nvfp4", CODES["short nibbles"], 64, 36, first=4),
    "TQ2_0": Blocks("tq2_0", CODES["crumbs"], 256, 66, scale=64, first=0),
    "TQ1_0": Blocks("tq2_0", CODES["trits"], 256, 54, scale=52, first=0),
}
"""The layout of each ggml type that has a scheme. Of two types with one scheme the first is written by default."""

_ZERO_CODES = ("MXFP4", "NVFP4")  # ggml reads code 8, the -0 of E2M1, as 0
_LARGEST_SCALE = {"MXFP4": 254, "NVFP4": 126}  # larger bytes are NaN or negative in the scheme, other numbers in ggml


def is_lossless(data: np.ndarray, type_name: str) -> bool:
    """True if a QArray represents these blocks exactly.

    The exceptions are scale bytes that ggml reads otherwise: 255 of MXFP4 (2**128, halved; NaN in E8M0), and those above 126
    of NVFP4 (NaN or negative in E4M3); and code 3 of TQ2_0, 2 in ggml, which no quantizer writes.
    """
    layout = LAYOUTS[type_name]
    blocks = data.reshape(-1, layout.nbytes)
    if type_name == "TQ2_0":
        codes = blocks[:, layout.first : layout.first + layout.codes.nbytes]
        return not (codes & codes >> 1 & 0b01010101).any()
    if type_name not in _LARGEST_SCALE:
        return True
    scales = blocks[:, layout.scale : layout.first]
    return not (scales > _LARGEST_SCALE[type_name]).any()


def qarray_from_blocks(
    data: np.ndarray, type_name: str, shape: tuple[int, ...], tensor_scale: np.ndarray | None = None
) -> QArray:
    """Converts ggml blocks to a QArray with bit-identical dequantized values.

    ggml reads codes 0 and 8 of MXFP4 and NVFP4 as 0; E2M1 would read 8 as -0, so it becomes 0. XLA on CPU flushes numbers
    below 2**-126 to zero, which elements of MXFP4 blocks with exponent bytes 0 to 2 can be.

    Args:
        data: the bytes of the tensor.
        type_name: a key of `LAYOUTS`.
        shape: the tensor's shape; its last axis is a multiple of the block.
        tensor_scale: float32, for NVFP4: one element, or one for each element of the first axis. None: 1.

    Returns:
        A float32 QArray in the scheme of the type.
    """
    layout = LAYOUTS[type_name]
    scheme = SCHEMES[layout.scheme]
    rows, blocks_of_row = shape[:-1], shape[-1] // layout.length
    blocks = data.reshape(*rows, blocks_of_row, layout.nbytes)
    stored = blocks[..., layout.scale : layout.scale + _scale_bytes(layout)]
    if not scheme.tensor_scale and type_name != "MXFP4":
        stored = _halves(stored)
    scale = stored.reshape(*rows, -1)  # [*rows, K/tile]
    minimum = None
    if layout.minimum is not None:
        minimum = jnp.asarray(_halves(blocks[..., layout.minimum : layout.minimum + 2])[..., 0])
    codes = layout.codes.unpacked(blocks[..., layout.first : layout.first + layout.codes.nbytes])
    codes = codes ^ np.uint8(layout.sign_bit)
    if type_name in _ZERO_CODES:
        codes = np.where(codes == 8, np.uint8(0), codes)
    packed = _packed(codes.reshape(shape), scheme.format.bits, scheme.packing)
    slack = code_capacity(packed.shape[-1], scheme.format.bits) - shape[-1]
    unit = None
    if scheme.tensor_scale:
        unit = jnp.asarray(_tensor_scale(tensor_scale, len(shape)))
    return QArray(packed, jnp.asarray(scale), minimum, unit, scheme, np.dtype(np.float32), slack)


_packed = jax.jit(pack, static_argnums=(1, 2))  # one program for a shape; op by op a small model takes a second


def type_of(scheme: Scheme) -> str | None:
    """The ggml type that stores a scheme without loss, or None."""
    for name, layout in LAYOUTS.items():
        ours = SCHEMES[layout.scheme]
        same = dataclasses.replace(scheme, format=ours.format, calibration=ours.calibration, packing=ours.packing)
        if _same_numbers(scheme, ours) and same == ours:
            return name
    return None


def why_not(scheme: Scheme, shape: tuple[int, ...]) -> str | None:
    """Why a GGUF file cannot store an array of this scheme exactly. The reason names the nearest schemes that fit.

    Args:
        scheme: its scheme.
        shape: its shape, output features first.

    Returns:
        The reason, or None if it can.

    >>> why_not(SCHEMES["q4_0"], (8, 64)) is None
    True
    >>> print(why_not(SCHEMES["nf4"], (8, 64)))
    GGUF has no type for nf4; the nearest schemes that fit are q4_0, q4_1, iq4_nl
    """
    name = type_of(scheme)
    if name is not None and shape and shape[-1] % LAYOUTS[name].length == 0:
        return None
    fitting = [layout for layout in LAYOUTS.values() if shape and shape[-1] % layout.length == 0]
    if not fitting:
        return f"GGUF stores quantized rows in blocks of 32, 64 or 256, which do not divide the last axis of {shape}; keep it float"
    fitting.sort(key=lambda layout: abs(SCHEMES[layout.scheme].format.bits - scheme.format.bits))
    nearest = ", ".join(list(dict.fromkeys(layout.scheme for layout in fitting))[:3])
    if name is None:
        return f"GGUF has no type for {scheme.name}; the nearest schemes that fit are {nearest}"
    return (
        f"GGUF stores {scheme.name} in blocks of {LAYOUTS[name].length}, which do not divide the last axis of {shape}; the nearest "
        f"schemes that fit are {nearest}"
    )


def blocks_from_qarray(q: QArray, what: str, ternary: str = "TQ2_0") -> tuple[str, np.ndarray]:
    """Converts a QArray to ggml blocks, without loss.

    Args:
        q: the array.
        what: its name, for messages.
        ternary: the ggml type of ternary arrays, "TQ2_0" or "TQ1_0".

    Returns:
        The ggml type, and the bytes `[*rows, bytes of a row]`. The tensor scale of NVFP4 is not among them.

    Raises:
        QuantError: when the scheme, the shape or a scale has no place in the type; the message names the schemes that fit.
    """
    if reason := why_not(q.scheme, q.shape):
        raise QuantError(f"{what} cannot be written: {reason}")
    name = type_of(q.scheme) or ""
    if name == "TQ2_0":
        name = ternary
    layout = LAYOUTS[name]
    codes = np.asarray(unpack(q.codes, q.scheme.format.bits, q.shape[-1], q.scheme.packing))
    if name in _ZERO_CODES:
        codes = np.where(codes == 8, np.uint8(0), codes)
    if name == "TQ1_0" and (codes == 3).any():
        raise QuantError(f"{what} has ternary codes 3, which TQ1_0 cannot store; write TQ2_0")
    codes = codes ^ np.uint8(layout.sign_bit)
    rows, blocks_of_row = q.shape[:-1], q.shape[-1] // layout.length
    blocks = np.zeros((*rows, blocks_of_row, layout.nbytes), np.uint8)
    packed = layout.codes.packed(codes.reshape(*rows, blocks_of_row, layout.length))
    blocks[..., layout.first : layout.first + layout.codes.nbytes] = packed
    scales = np.broadcast_to(np.asarray(q.scale), (*rows, q.shape[-1] // layout.tile))
    stored = np.ascontiguousarray(scales).view(np.uint8).reshape(*rows, blocks_of_row, -1)
    blocks[..., layout.scale : layout.scale + stored.shape[-1]] = stored
    if layout.minimum is not None:
        minima = np.broadcast_to(np.asarray(q.zero_point), scales.shape)
        stored = np.ascontiguousarray(minima).view(np.uint8).reshape(*rows, blocks_of_row, 2)
        blocks[..., layout.minimum : layout.minimum + 2] = stored
    data = blocks.reshape(*rows, -1)
    if not is_lossless(data, name):
        raise QuantError(
            f"{what} has a NaN or negative scale, which {name} cannot store; quantize it again from finite weights"
        )
    return name, data


def _same_numbers(scheme: Scheme, ours: Scheme) -> bool:
    """Whether the codes of both schemes mean the same numbers.

    `int4_narrow` counts as `int4`, of which it lacks one code.
    """
    one, other = scheme.format, ours.format
    if isinstance(one, Integer) and isinstance(other, Integer):
        return (one.width, one.signed, one.step) == (other.width, other.signed, other.step)
    return one == other


def _scale_bytes(layout: Blocks) -> int:
    """The bytes of the scales of a block."""
    if layout.first == 0:  # the scale follows the codes
        return layout.nbytes - layout.scale
    if layout.minimum is not None:
        return layout.minimum
    return layout.first


def _halves(pairs: np.ndarray) -> np.ndarray:
    """Reads pairs of bytes as little-endian float16."""
    return np.ascontiguousarray(pairs).view("<f2")


def _tensor_scale(values: np.ndarray | None, ndim: int) -> np.ndarray:
    """The tensor scale with the axes of the array."""
    if values is None:
        values = np.ones(1, np.float32)
    return np.asarray(values, np.float32).reshape(math.prod(values.shape), *(1,) * (ndim - 1))
