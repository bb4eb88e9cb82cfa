"""Tensors and arrays handed between torch and JAX, without a copy where memory allows it.

On a CPU a compiled JAX function takes torch's memory as it is, through numpy's buffer protocol (5 us an array, where importing a DLPack
capsule takes 30), if it is contiguous and begins at a multiple of 64 bytes; else JAX copies it. Results come back by DLPack. A CUDA
tensor goes both ways by DLPack, where JAX runs on the GPU too. Every call waits for its result, so nothing that is done to a tensor
afterwards can reach a product that is still running.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_dtypes
import torch

from ..errors import UnsupportedError

LIBRARY = torch.library.Library("fewbit", "FRAGMENT")
"""The operators of torch that fewbit defines, of plain tensors and the JSON of their form."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The floating dtypes that both have; JAX has float64 only where it is switched on."""


def refusal(device: torch.device) -> str | None:
    """Why JAX cannot compute with tensors of a device, in a sentence; None when it can."""
    if device.type == "cpu" or (device.type == "cuda" and jax.default_backend() == "gpu"):
        return None
    return f"the tensor is on {device.type} and JAX computes on {jax.default_backend()}; q.cpu() moves it there"


def check_device(what: str, device: torch.device) -> None:
    """Raises UnsupportedError where JAX cannot compute with tensors of a device."""
    if reason := refusal(device):
        raise UnsupportedError(f"{what} cannot run here", {"jax": reason})


def operand(t: torch.Tensor) -> Any:
    """A tensor as an argument of a compiled JAX function: its own memory where that is contiguous and aligned."""
    t = t.detach().contiguous()
    if t.device.type != "cpu":
        return jax.dlpack.from_dlpack(t)
    name = str(t.dtype).removeprefix("torch.")
    if t.dtype == torch.bfloat16 or name.startswith("float8"):  # numpy has them from ml_dtypes
        return t.view(torch.int16 if t.element_size() == 2 else torch.uint8).numpy().view(getattr(ml_dtypes, name))
    return t.numpy()


def array(t: torch.Tensor) -> jax.Array:
    """The JAX array of a tensor, which shares its memory where that is contiguous and aligned."""
    return jax.dlpack.from_dlpack(t.detach().contiguous())


def tensor(x: Any) -> torch.Tensor:
    """The tensor of a JAX array, which shares its memory; a sharded array is gathered on the first device of its platform."""
    x = jax.numpy.asarray(x)
    if len(x.devices()) > 1:
        first: Any = min(x.devices(), key=lambda device: device.id)  # type: ignore[union-attr]  # pyright: ignore
        x = jax.device_put(x, first)
    return torch.from_dlpack(jax.block_until_ready(x))


def call(fn: Callable[..., jax.Array], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor that a compiled JAX function gives for tensors; all of them on one device, where JAX computes.

    Torch's CPU tensors are computed with on JAX's CPU, whatever JAX's default device is.
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
    """Defines an operator of torch.

    Args:
        schema: its name and arguments, in torch's notation.
        run: what computes it, on every device.
        shape: the empty result, for tensors without numbers (torch.compile).
    """
    LIBRARY.define(schema)
    name = schema.partition("(")[0]
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fewbit::{name}", shape, lib=LIBRARY)
