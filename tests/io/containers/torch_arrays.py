"""Arrays as torch tensors and back, bfloat16 and 8-bit floats included."""

import ml_dtypes
import numpy as np

_BITS = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8, "float8_e8m0fnu": np.uint8}


def to_torch(array: np.ndarray):
    """A tensor of an array."""
    import torch

    array = np.array(array)
    if array.dtype.name in _BITS:
        return torch.from_numpy(array.view(_BITS[array.dtype.name])).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def to_numpy(tensor) -> np.ndarray:
    """The array of a tensor."""
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    tensor = tensor.detach().contiguous()
    if name in _BITS:
        bits = torch.uint16 if _BITS[name] is np.uint16 else torch.uint8
        return tensor.view(bits).numpy().view(getattr(ml_dtypes, name))
    return tensor.numpy()
