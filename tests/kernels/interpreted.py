"""The Triton kernels as modules that run in Triton's interpreter, on the CPU, in a process that may have imported them already."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

PACKAGE = "fewbit.kernels.quantize"
NAMES = tuple(f"triton{part}" for part in ("_numbers", "_search", "_memory", "", "_dequantize", "_hessian"))


@contextmanager
def interpreted_kernels(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Imports the kernels anew with the interpreter on; afterwards those that were there before are back."""
    package = importlib.import_module(PACKAGE)
    patch.setenv("TRITON_INTERPRET", "1")
    _interpret_the_language(patch)
    _leave_nothing_patched(patch)
    for name in NAMES:
        patch.delitem(sys.modules, f"{PACKAGE}.{name}", raising=False)
        patch.delattr(package, name, raising=False)
    for name in NAMES:
        importlib.import_module(f"{PACKAGE}.{name}")
    yield
    for name in NAMES:
        sys.modules.pop(f"{PACKAGE}.{name}", None)
        package.__dict__.pop(name, None)


def _interpret_the_language(patch: pytest.MonkeyPatch) -> None:
    """Triton's own functions (`tl.max`) were made for the compiler if Triton was imported without the interpreter."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for module in (tl, tl.standard):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                patch.setattr(module, name, InterpretedFunction(value.fn))


def _leave_nothing_patched(patch: pytest.MonkeyPatch) -> None:
    """The interpreter patches `tl` for each function that a kernel calls and undoes it for the kernel only; the compiler would trip."""
    from triton.runtime import interpreter

    patch_language, scopes = interpreter._patch_lang, []

    def patched(fn: Any) -> Any:
        scope = patch_language(fn)
        scopes.append(scope)

        def restore() -> None:
            while scopes:
                inner = scopes.pop()
                type(inner).restore(inner)
                if inner is scope:
                    return

        scope.restore = restore
        return scope

    patch.setattr(interpreter, "_patch_lang", patched)
