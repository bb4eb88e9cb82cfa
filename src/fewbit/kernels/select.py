"""Which backend computes a product: the first in order that can, or the one that was named."""

import abc
import dataclasses
from typing import Any, ClassVar, Generic, TypeVar

import jax

from .._registry import Registry, near_names
from ..errors import QuantError, UnsupportedError

P = TypeVar("P")


@dataclasses.dataclass(frozen=True)
class AbstractBackend(abc.ABC, Generic[P]):
    """One implementation of one product.

    A backend lives in its own file, and joins its product's registry there. Later ones are asked first: the reference,
    which can compute everything, is registered before all others.

    Attributes:
        name: its name in the registry.
        platform: the one it runs on, as JAX's lowering names it ("cpu", "cuda", "rocm", "tpu"); None: all.
        experimental: whether it never ran on its hardware, only in an interpreter and through the compiler.
    """

    name: ClassVar[str]
    platform: ClassVar[str | None] = None
    experimental: ClassVar[bool] = False

    @abc.abstractmethod
    def unsupported(self, problem: P) -> str | None:
        """Why this backend cannot compute the problem, in a sentence that says what would help; None when it can."""

    def passed_over(self, problem: P) -> str | None:
        """Why this backend leaves a problem that it can compute to another, unless it is named; None when it does not."""
        return None

    def about(self) -> str:
        """What it is on this machine, in a few words for `fb.explain`."""
        return self.name

    @abc.abstractmethod
    def run(self, problem: P, *operands: Any) -> jax.Array:
        """The product of the operands. Called only where `unsupported` is None."""


@dataclasses.dataclass(frozen=True)
class Choice(Generic[P]):
    """The backend that computes a problem.

    Attributes:
        backend: it.
        reasons: for each backend that was asked before it, why it does not.
    """

    backend: AbstractBackend[P]
    reasons: dict[str, str]


def select(backends: Registry[AbstractBackend[P]], problem: P, backend: str | None = None) -> Choice[P]:
    """The backend for a problem.

    Args:
        backends: the product's backends, in the order of registration; the last that can is taken.
        problem: what is to be computed.
        backend: a name, when the caller insists on one; it is never replaced by another.

    Returns:
        The backend, and why those that were asked before it do not serve.

    Raises:
        UnsupportedError: when the named backend cannot compute the problem, or none can, with every reason.
        QuantError: for a name that is not registered.
    """
    if backend is not None and backend not in backends:
        raise QuantError(f"{backends.kind} has no backend {backend!r}; {near_names(backend, backends.names())}")
    candidates = (backends[backend],) if backend is not None else tuple(backends)[::-1]
    reasons: dict[str, str] = {}
    for candidate in candidates:
        reason = candidate.unsupported(problem)
        if reason is None and backend is None:
            reason = _elsewhere(candidate) or candidate.passed_over(problem)
        if reason is None:
            return Choice(candidate, reasons)
        reasons[candidate.name] = reason
    raise UnsupportedError(f"{backends.kind} cannot run {problem}", reasons)


def _elsewhere(backend: AbstractBackend[Any]) -> str | None:
    """Why a backend does not run on JAX's default devices; None when it does. JAX calls those of NVIDIA and AMD "gpu"."""
    here = jax.default_backend()
    held = ("cuda", "rocm") if here == "gpu" else (here,)
    return None if backend.platform in (None, *held) else f"it runs on {backend.platform}, the device is {here}"
