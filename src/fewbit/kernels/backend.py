"""Selects the backend of a product: the named one, or the first that supports it."""

import abc
import dataclasses
from typing import Any, ClassVar, Generic, TypeVar

import jax
from jaxtyping import PyTree

from .._registry import Registry, near_names
from ..errors import QuantError, UnsupportedError

P = TypeVar("P")


@dataclasses.dataclass(frozen=True)
class AbstractBackend(abc.ABC, Generic[P]):
    """One implementation of one product.

    Each backend is registered by its own file, and the last one registered is asked first: the reference, which supports
    every problem, is registered before all others.

    Attributes:
        name: its name in the registry.
        platform: the lowering platform that it runs on ("cpu", "cuda", "rocm", "tpu"); None: all.
        experimental: whether it was only interpreted and compiled, never run on its hardware.
    """

    name: ClassVar[str]
    platform: ClassVar[str | None] = None
    experimental: ClassVar[bool] = False

    @abc.abstractmethod
    def unsupported(self, problem: P) -> str | None:
        """Why this backend cannot compute the problem, and what would help; None when it can."""

    def not_chosen(self, problem: P) -> str | None:
        """Why this backend is not chosen unless it is named, for a problem that it supports; None when it is."""
        return None

    def about(self) -> str:
        """A short description for `fb.explain`."""
        return self.name

    @abc.abstractmethod
    def run(self, problem: P, *operands: PyTree) -> jax.Array:
        """Computes the product; called only where `unsupported` is None."""


@dataclasses.dataclass(frozen=True)
class Choice(Generic[P]):
    """The backend that computes a problem.

    Attributes:
        backend: the backend.
        reasons: why each backend that was asked before it was not chosen.
    """

    backend: AbstractBackend[P]
    reasons: dict[str, str]


def select(backends: Registry[AbstractBackend[P]], problem: P, backend: str | None = None) -> Choice[P]:
    """Selects the backend for a problem.

    Args:
        backends: the product's backends; the last registered one that supports the problem is chosen.
        problem: what to compute.
        backend: the name of the only backend to use; None chooses.

    Returns:
        The backend, and why those that were asked before it were not chosen.

    Raises:
        UnsupportedError: when the named backend cannot compute the problem, or none can, with every reason.
        QuantError: for an unknown name.
    """
    candidates = tuple(backends)[::-1]
    if backend is not None:
        if backend not in backends:
            raise QuantError(f"{backends.kind} has no backend {backend!r}; {near_names(backend, backends.names())}")
        candidates = (backends[backend],)
    reasons: dict[str, str] = {}
    for candidate in candidates:
        reason = candidate.unsupported(problem)
        if reason is None and backend is None:
            reason = _elsewhere(candidate) or candidate.not_chosen(problem)
        if reason is None:
            return Choice(candidate, reasons)
        reasons[candidate.name] = reason
    raise UnsupportedError(f"{backends.kind} cannot run {problem}", reasons)


def _elsewhere(backend: AbstractBackend[Any]) -> str | None:
    """Why a backend does not run on JAX's default devices; None when it does."""
    here = jax.default_backend()  # "gpu" for both cuda and rocm
    if backend.platform in (None, here) or (here == "gpu" and backend.platform in ("cuda", "rocm")):
        return None
    return f"it runs on {backend.platform}, the device is {here}"
