"""Backends of an operation, and their selection."""

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Generic, TypeVar

import jax
from jaxtyping import PyTree

from .._registry import near_names
from ..errors import QuantError, UnsupportedError

P = TypeVar("P")


@dataclasses.dataclass(frozen=True)
class AbstractBackend(abc.ABC, Generic[P]):
    """One implementation of one operation.

    Attributes:
        name: how `backend=` names it.
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


class Backends(Generic[P]):
    """The backends of one operation, in the order in which they are asked; the last one supports every problem.

    Args:
        kind: the operation, for errors.
        backends: the backends.
    """

    def __init__(self, kind: str, *backends: AbstractBackend[P]):
        self.kind = kind
        self._backends = backends

    def __iter__(self) -> Iterator[AbstractBackend[P]]:
        return iter(self._backends)

    def __getitem__(self, name: str) -> AbstractBackend[P]:
        for backend in self._backends:
            if backend.name == name:
                return backend
        raise QuantError(f"{self.kind} has no backend {name!r}; {near_names(name, self.names())}")

    def names(self) -> tuple[str, ...]:
        """The name of each backend."""
        return tuple(backend.name for backend in self._backends)


@dataclasses.dataclass(frozen=True)
class Choice(Generic[P]):
    """The backend that computes a problem.

    Attributes:
        backend: the backend.
        reasons: why each backend that was asked before it was not chosen.
        kernels: the first backend of each platform that would be chosen there; only the named one, where one is named.
    """

    backend: AbstractBackend[P]
    reasons: dict[str, str]
    kernels: tuple[AbstractBackend[P], ...]


def select(backends: Backends[P], problem: P, backend: "str | AbstractBackend[P] | None" = None) -> Choice[P]:
    """Selects the backend for a problem; each is asked once.

    Args:
        backends: the operation's backends.
        problem: what to compute.
        backend: the only backend to use, or its name; None chooses.

    Returns:
        The backend, why those that were asked before it were not chosen, and the backends of other platforms.

    Raises:
        UnsupportedError: when the named backend cannot compute the problem, or none can, with every reason.
        QuantError: for an unknown name.
    """
    if backend is not None:
        named = backend
        if isinstance(named, str):
            named = backends[named]
        if reason := named.unsupported(problem):
            raise UnsupportedError(f"{backends.kind} cannot run {problem}", {named.name: reason})
        return Choice(named, {}, (named,))
    reasons: dict[str, str] = {}
    usable: list[AbstractBackend[P]] = []
    chosen = None
    for candidate in backends:
        reason = candidate.unsupported(problem)
        hindrance = reason or candidate.not_chosen(problem)
        if hindrance is None:
            usable.append(candidate)
        reason = reason or _elsewhere(candidate) or hindrance
        if chosen is None and reason is None:
            chosen = candidate
        elif chosen is None:
            reasons[candidate.name] = str(reason)
    if chosen is None:
        raise UnsupportedError(f"{backends.kind} cannot run {problem}", reasons)
    by_platform = {kernel.platform: kernel for kernel in reversed(usable) if kernel.platform is not None}
    return Choice(chosen, reasons, tuple(by_platform.values()))


def _elsewhere(backend: AbstractBackend[Any]) -> str | None:
    """Why a backend does not run on JAX's default devices; None when it does."""
    here = jax.default_backend()  # "gpu" for both cuda and rocm
    if backend.platform in (None, here) or (here == "gpu" and backend.platform in ("cuda", "rocm")):
        return None
    return f"it runs on {backend.platform}, the device is {here}"
