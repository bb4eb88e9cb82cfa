"""Passes tensors between torch and JAX.

On a CPU a compiled JAX function reads torch's memory through numpy's buffer protocol (5 us an array; a DLPack import takes
30) if it is contiguous and aligned to 64 bytes; else JAX copies it. Results are returned by DLPack. CUDA tensors are passed
both ways by DLPack
if JAX runs on the GPU. Every call blocks until its result is ready, so a later in-place write to an operand is safe.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import torch

from ..errors import UnsupportedError

LIBRARY = torch.library.Library("fewbit", "FRAGMENT")
"""The torch operators that fewbit defines; they take plain tensors and the JSON of a form."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The floating dtypes of both; JAX has float64 only with `jax_enable_x64`."""


def refusal(device: torch.device) -> str | None:
    """Why JAX cannot compute with tensors of a device; None when it can."""
    if device.type == "cpu" or (device.type == "cuda" and jax.default_backend() == "gpu"):
        return None
    return f"the tensor is on {device.type} and JAX computes on {jax.default_backend()}; pass q.cpu()"


def check_device(what: str, device: torch.device) -> None:
    """Raises UnsupportedError if JAX cannot compute with tensors of the device."""
    if reason := refusal(device):
        raise UnsupportedError(f"{what} cannot run here", {"jax": reason})


def operand(t: torch.Tensor) -> np.ndarray | jax.Array:
    """A tensor as an argument of a compiled JAX function, not copied if contiguous and aligned."""
    t = t.detach().contiguous()
    if t.device.type != "cpu":
        return jax.dlpack.from_dlpack(t)
    name = str(t.dtype).removeprefix("torch.")
    if t.dtype == torch.bfloat16 or name.startswith("float8"):  # dtypes of ml_dtypes in numpy
        bits = torch.int16 if t.element_size() == 2 else torch.uint8
        return t.view(bits).numpy().view(getattr(ml_dtypes, name))
    return t.numpy()


def array(t: torch.Tensor) -> jax.Array:
    """The JAX array of a tensor. It shares its memory if contiguous and aligned."""
    return jax.dlpack.from_dlpack(t.detach().contiguous())


def tensor(value: jax.Array | np.ndarray) -> torch.Tensor:
    """The tensor of a JAX array; it shares its memory. A sharded array is gathered on its first device."""
    x = jax.numpy.asarray(value)
    if len(x.devices()) > 1:
        first: Any = min(x.devices(), key=lambda device: device.id)  # type: ignore[union-attr]  # pyright: ignore
        x = jax.device_put(x, first)
    return torch.from_dlpack(jax.block_until_ready(x))


def call(fn: Callable[..., jax.Array], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Calls a compiled JAX function on tensors, all on one device that JAX supports.

    CPU tensors are computed on JAX's CPU device, whatever JAX's default device is.
    """
    arguments = [operand(t) for t in tensors]
    if _cpu_is_default() or tensors[0].device.type != "cpu":
        return torch.from_dlpack(fn(*arguments).block_until_ready())
    with jax.default_device(jax.devices("cpu")[0]):
        return torch.from_dlpack(fn(*arguments).block_until_ready())


@functools.cache
def _cpu_is_default() -> bool:
    return jax.default_backend() == "cpu"


def operator(schema: str, run: Callable[..., Any], shape: Callable[..., Any]) -> None:
    """Defines a torch operator.

    Args:
        schema: its torch schema.
        run: the implementation for all devices.
        shape: the fake implementation (torch.compile): an empty result.
    """
    LIBRARY.define(schema)
    name = schema.partition("(")[0]
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fewbit::{name}", shape, lib=LIBRARY)
