"""Every packing of codes inverts; the order is ggml's own where the package can quantize."""

import numpy as np
import pytest

from fewbit.io.gguf.blocks import LAYOUTS
from fewbit.io.gguf.codes import CODES

BITS = {"bytes": 8, "nibbles": 4, "short nibbles": 4, "fives": 5, "crumbs": 2, "trits": 2}
LARGEST = {name: 2**bits - 1 for name, bits in BITS.items()} | {"trits": 2}


@pytest.mark.parametrize("name", CODES)
def test_every_code_comes_back_from_every_place(name):
    length = next(layout.length for layout in LAYOUTS.values() if layout.codes is CODES[name])
    for code in range(1, LARGEST[name] + 1):
        codes = np.eye(length, dtype=np.uint8) * np.uint8(code)  # one code at each place, zeros elsewhere
        packed = CODES[name].packed(codes)
        assert packed.shape == (length, CODES[name].nbytes)
        np.testing.assert_array_equal(CODES[name].unpacked(packed), codes)


def test_every_byte_is_five_ternary_digits():
    """The 256 bytes decode to the digits of `byte * 243 // 256` in base 3, the first code the highest."""
    data = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 52, axis=1)
    codes = CODES["trits"].unpacked(data)
    number = np.arange(256) * 243 // 256
    digits = np.stack([number // 3**place % 3 for place in (4, 3, 2, 1, 0)])
    np.testing.assert_array_equal(codes[:, :160].reshape(256, 5, 32), np.broadcast_to(digits.T[:, :, None], (256, 5, 32)))
