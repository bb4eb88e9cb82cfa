"""Loads and stores of the Triton quantizers, and conversions by inline PTX."""

# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportMissingImports=false, reportCallIssue=false
# (pyright takes `import triton` for this folder's own file)

import typing

import triton
import triton.language as tl

from ...triton.formats import as_bits, as_float


@triton.jit
@typing.no_type_check
def loaded_tiles(x_ptr, tile, tiles, length, tiles_in_row, TILES: tl.constexpr):
    """Tiles `[count, padded]` as float32, the row and first column of each, and the masks of tiles and elements."""
    K: tl.constexpr = TILES.length
    KP: tl.constexpr = TILES.padded
    is_tile = tile < tiles
    k = tl.arange(0, KP)[None, :]
    if TILES.is_even:
        row, column = tile * 0, tile * K
        is_element = is_tile[:, None]
    else:
        row = tile // tiles_in_row
        column = (tile % tiles_in_row) * K
        is_element = is_tile[:, None] & (k < K) & (column[:, None] + k < length)
    start = x_ptr + (row * length + column)[:, None]
    if TILES.is_even and KP == 16:
        half = tl.arange(0, 8)[None, :]
        low = tl.load(start + half, mask=is_element, other=0.0)
        high = tl.load(start + 8 + half, mask=is_element, other=0.0)
        loaded = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (TILES.count, KP))
    else:
        loaded = tl.load(start + k, mask=is_element, other=0.0)
    return loaded.to(tl.float32), row, column, is_tile, is_element


@triton.jit
@typing.no_type_check
def store_codes(codes_ptr, code, row, column, is_tile, length, row_bytes, BITS: tl.constexpr, TILES: tl.constexpr):
    """Packs the codes of tiles `[count, padded]` and stores them."""
    R: tl.constexpr = TILES.count
    K: tl.constexpr = TILES.length
    KP: tl.constexpr = TILES.padded
    if BITS == 8:
        k = tl.arange(0, KP)[None, :]
        is_code = is_tile[:, None] if TILES.is_even else is_tile[:, None] & (k < K) & (column[:, None] + k < length)
        tl.store(codes_ptr + (row * row_bytes + column)[:, None] + k, code.to(tl.uint8), mask=is_code)
    elif BITS == 4:
        low, high = tl.split(tl.reshape(code.to(tl.uint8), (R, KP // 2, 2)))
        k = tl.arange(0, KP // 2)[None, :]
        is_pair = is_tile[:, None] if TILES.is_even else is_tile[:, None] & (2 * k < K) & (column[:, None] + 2 * k < length)
        tl.store(codes_ptr + (row * row_bytes + column // 2)[:, None] + k, low | (high << 4), mask=is_pair)
    else:
        pairs = tl.reshape(code, (R, KP // 4, 2, 2))
        even, odd = tl.split(pairs)
        c0, c2 = tl.split(even)
        c1, c3 = tl.split(odd)
        word = c0 | (c1 << 6) | (c2 << 12) | (c3 << 18)
        start = (column * 3 // 4)[:, None] + 3 * tl.arange(0, KP // 4)[None, :]
        is_group = is_tile[:, None] & (4 * tl.arange(0, KP // 4) < K)[None, :]
        for byte in tl.static_range(3):
            is_byte = is_group if TILES.is_even else is_group & (start + byte < row_bytes)
            tl.store(codes_ptr + (row * row_bytes)[:, None] + start + byte, (word >> 8 * byte).to(tl.uint8), mask=is_byte)


@triton.jit
@typing.no_type_check
def store_pairs_by_ptx(codes_ptr, y, sign, is_finite, tile, is_tile, TILES: tl.constexpr):
    """Encodes pairs of E2M1 codes by one instruction of sm_100 and stores them; needs whole tiles."""
    R: tl.constexpr = TILES.count
    KP: tl.constexpr = TILES.padded
    even, odd = tl.split(tl.reshape(as_float(as_bits(y) | sign), (R, KP // 2, 2)))
    pair = tl.inline_asm_elementwise(
        "{ .reg .b8 pair; cvt.rn.satfinite.e2m1x2.f32 pair, $2, $1; cvt.u32.u8 $0, pair; }",
        "=r,f,f",
        [even, odd],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    pair = tl.where(is_finite[:, None], pair, 0).to(tl.uint8)
    tl.store(codes_ptr + (tile * (KP // 2))[:, None] + tl.arange(0, KP // 2)[None, :], pair, mask=is_tile[:, None])


@triton.jit
@typing.no_type_check
def e4m3_code_by_ptx(held):
    """The E4M3 code of each magnitude up to 448, by an instruction of sm_89 and later."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 pair; .reg .f32 zero; mov.f32 zero, 0f00000000; "
        "cvt.rn.satfinite.e4m3x2.f32 pair, zero, $1; cvt.u32.u16 $0, pair; }",
        "=r,f",
        [held],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
