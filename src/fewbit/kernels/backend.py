"""Backends of an operation, and their selection."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import jax
from jaxtyping import PyTree

from .._registry import near_names
from ..errors import QuantError, UnsupportedError


class AbstractProblem:
    """What an operation is asked to compute.

    Attributes:
        operation: the name of the operation, for errors.
    """

    operation: ClassVar[str]


P = TypeVar("P", bound=AbstractProblem)


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
        """Why this backend cannot compute the problem, and what would help. None when it can."""

    def not_chosen(self, problem: P) -> str | None:
        """Why this backend is chosen only when it is named.

        The problem is one that it supports. None when it is chosen anyway.
        """
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
        reasons: why each backend that was asked before it was not chosen; why a named one does not run on the default devices.
        kernels: the first backend of each platform that would be chosen there; only the named one, where one is named.
    """

    backend: AbstractBackend[P]
    reasons: dict[str, str]
    kernels: tuple[AbstractBackend[P], ...]


def named(backends: Sequence[AbstractBackend[P]], name: str) -> AbstractBackend[P]:
    """The backend of a name.

    Raises:
        QuantError: when there is none.
    """
    for backend in backends:
        if backend.name == name:
            return backend
    raise QuantError(f"no backend is named {name!r}; {near_names(name, tuple(backend.name for backend in backends))}")


def select(
    backends: Sequence[AbstractBackend[P]], problem: P, backend: "str | AbstractBackend[P] | None" = None
) -> Choice[P]:
    """Selects the backend for a problem; each is asked once.

    Args:
        backends: the operation's backends, in the order in which they are asked; the last one supports every problem.
        problem: what to compute.
        backend: the only backend to use, or its name; None chooses.

    Returns:
        The backend, why those that were asked before it were not chosen, and the backends of other platforms.

    Raises:
        UnsupportedError: when the named backend cannot compute the problem, or none can, with every reason.
        QuantError: for an unknown name.
    """
    if backend is not None:
        only = backend
        if isinstance(only, str):
            only = named(backends, only)
        if reason := only.unsupported(problem):
            raise UnsupportedError(f"{problem.operation} cannot run {problem}", {only.name: reason})
        elsewhere = _elsewhere(only)
        return Choice(only, {} if elsewhere is None else {only.name: elsewhere}, (only,))
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
        raise UnsupportedError(f"{problem.operation} cannot run {problem}", reasons)
    by_platform = {kernel.platform: kernel for kernel in reversed(usable) if kernel.platform is not None}
    return Choice(chosen, reasons, tuple(by_platform.values()))


def _elsewhere(backend: AbstractBackend[Any]) -> str | None:
    """Why a backend does not run on JAX's default devices. None when it does."""
    here = jax.default_backend()  # "gpu" for both cuda and rocm
    if backend.platform in (None, here) or (here == "gpu" and backend.platform in ("cuda", "rocm")):
        return None
    return f"it runs on {backend.platform}, the device is {here}"
