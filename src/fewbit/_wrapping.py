"""Wrappers with the name, docstring and signature of the function that they wrap."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import QuantError

_ATTRIBUTES = ("__module__", "__name__", "__qualname__", "__doc__")


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a function. None for one that has none, as some built-in functions."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


def refuse_shared_keywords(
    signature: inspect.Signature | None, args: Sequence[object], passed: Mapping[str, object], wrapper: str
) -> None:
    """Refuses a keyword argument of a wrapper that the function takes, too: it would not get it.

    Args:
        signature: the function's.
        args: its positional arguments; one of them may have the name of a keyword of the wrapper.
        passed: the values of the wrapper's keywords; None: not passed.
        wrapper: its name, for the error.
    """
    for name, value in passed.items():
        if signature is None or value is None or name not in signature.parameters:
            continue
        if name not in signature.bind_partial(*args).arguments:
            raise QuantError(
                f"the function takes {name}= and so does {wrapper}, so it is unclear whose it is; pass the function's by position, "
                f"or pass a function in which it has another name: lambda params, x, own: fn(params, x, {name}=own)"
            )


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
