"""Codes of 1 to 8 bits in bytes, in torch: the bytes of `fewbit.array.packing`."""

import math

import torch

from ..array.packing import packed_length


def pack(codes: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """The codes along one axis as a dense stream of bits, code 0 in the lowest bits of byte 0.

    Args:
        codes: uint8, below `2**bits`.
        bits: 1 to 8.
        axis: the axis whose codes share bytes.

    Returns:
        uint8, `ceil(n * bits / 8)` bytes along `axis` for its `n` codes.
    """
    if bits == 8:
        return codes
    last = codes.movedim(axis, -1)
    unit, unit_bytes = _unit(bits)
    groups = _in_groups(last, unit)
    if bits == 4:
        whole = (groups[..., 0] | groups[..., 1] << 4).unsqueeze(-1)
    else:
        place = torch.arange(unit, device=codes.device) * bits
        word = (groups.to(torch.int64) << place).sum(-1, keepdim=True)
        whole = (word >> 8 * torch.arange(unit_bytes, device=codes.device)).to(torch.uint8)
    stream = whole.reshape(*last.shape[:-1], -1)[..., : packed_length(last.shape[-1], bits)]
    return stream.movedim(-1, axis).contiguous()


def unpack(packed: torch.Tensor, bits: int, length: int, axis: int) -> torch.Tensor:
    """The `length` codes along `axis` that `pack` put there, each in the low bits of a uint8."""
    if bits == 8:
        return packed.narrow(axis, 0, length)
    last = packed.movedim(axis, -1)
    unit, unit_bytes = _unit(bits)
    groups = _in_groups(last, unit_bytes)
    place = 8 * torch.arange(unit_bytes, device=packed.device)
    word = (groups.to(torch.int64) << place).sum(-1, keepdim=True)
    codes = (word >> bits * torch.arange(unit, device=packed.device)).to(torch.uint8) & (2**bits - 1)
    return codes.reshape(*last.shape[:-1], -1)[..., :length].movedim(-1, axis)


def _unit(bits: int) -> tuple[int, int]:
    """The smallest number of codes that end at a byte's edge, and how many bytes they take."""
    unit = 8 // math.gcd(bits, 8)
    return unit, unit * bits // 8


def _in_groups(x: torch.Tensor, group: int) -> torch.Tensor:
    """The last axis split into whole groups, the last one filled with zeros."""
    missing = -x.shape[-1] % group
    x = torch.nn.functional.pad(x, (0, missing)) if missing else x
    return x.reshape(*x.shape[:-1], -1, group)
