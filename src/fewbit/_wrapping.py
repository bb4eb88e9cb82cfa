"""Wrappers with the name, docstring and signature of the function that they wrap."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

_ATTRIBUTES = ("__module__", "__name__", "__qualname__", "__doc__")


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a function. None for one that has none, as some built-in functions."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


def copy_signature(
    fn: Callable[..., Any], wrapper: Callable[..., Any], second: str | None = None, keywords: tuple[str, ...] = ()
) -> None:
    """Gives a wrapper the name, the docstring and the signature of a function, for `help` and `jax.jit(static_argnames=)`.

    Args:
        fn: the function.
        wrapper: what is called instead of it; its attributes are set.
        second: the name of an argument that the wrapper takes after the first one of `fn`.
        keywords: the names of its further keyword arguments, whose default is None.
    """
    functools.update_wrapper(wrapper, fn, _ATTRIBUTES, ())
    del wrapper.__wrapped__  # type: ignore[attr-defined] # inspect would take its signature for the wrapper's
    found = signature_of(fn)
    if found is None:
        return
    parameters = list(found.parameters.values())
    if second is not None:
        if not parameters or parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
            return
        parameters.insert(1, inspect.Parameter(second, parameters[0].kind))
    end = len(parameters) - any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    new = [name for name in keywords if name not in found.parameters]
    parameters[end:end] = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in new]
    wrapper.__signature__ = found.replace(parameters=parameters)  # type: ignore[attr-defined]
