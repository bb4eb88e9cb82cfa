"""The Triton kernels as modules that run in Triton's interpreter, on the CPU, in a process that may have imported them already."""

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from .ptx import evaluated

MODULES = tuple(
    f"fewbit.kernels.{name}"
    for name in (
        *("triton.formats", "quantize.gpu.search", "quantize.gpu.memory"),
        *("quantize.gpu.quantize", "quantize.gpu.dequantize", "quantize.gpu.hessian"),
        *("triton.decode", "qmatmul.gpu.groups", "qmatmul.gpu.gemv", "qmatmul.gpu.gemm"),
        *("qmatmul.gpu.gemv_bf16", "qmatmul.gpu.int8_gemm", "qmatmul.gpu.launch"),
    )
)


@contextmanager
def interpreted_kernels(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Imports the kernels anew with the interpreter on; afterwards those that were there before are back."""
    packages = {name: importlib.import_module(name.rpartition(".")[0]) for name in MODULES}
    patch.setenv("TRITON_INTERPRET", "1")
    _interpret_the_language(patch)
    _leave_nothing_patched(patch)
    _multiply_bfloat16(patch)
    _evaluate_ptx(patch)
    for name, package in packages.items():
        patch.delitem(sys.modules, name, raising=False)
        patch.delattr(package, name.rpartition(".")[2], raising=False)
    for name in MODULES:
        importlib.import_module(name)
    yield
    for name, package in packages.items():
        sys.modules.pop(name, None)
        package.__dict__.pop(name.rpartition(".")[2], None)


def stand_in_for_jax_triton(patch: pytest.MonkeyPatch) -> None:
    """A module in the place of jax-triton, which needs a GPU: the program calls back for the interpreter."""
    import jax
    import torch

    # The threads of XLA count subnormal numbers as zero, which GPUs do not: the work is done on another, begun here.
    plain = ThreadPoolExecutor(1)
    plain.submit(int).result()

    def triton_call(*args: Any, kernel: Any, out_shape: Any, grid: tuple[int, ...], **settings: Any) -> Any:
        leaves, structure = jax.tree.flatten(out_shape)
        numbers = [a for a in args if not isinstance(a, jax.Array)]

        def run(*arrays: Any) -> Any:
            tensors = [torch.tensor(np.array(a)) for a in arrays]
            made = [torch.zeros(s.shape, dtype=getattr(torch, np.dtype(s.dtype).name)) for s in leaves]
            kernel[grid](*tensors, *numbers, *made, **settings)
            return jax.tree.unflatten(structure, [y.numpy() for y in made])

        return jax.pure_callback(
            lambda *arrays: plain.submit(run, *arrays).result(), out_shape, *(a for a in args if isinstance(a, jax.Array))
        )

    fake = types.ModuleType("jax_triton")
    fake.triton_call = triton_call  # type: ignore[attr-defined]
    fake.__spec__ = importlib.machinery.ModuleSpec("jax_triton", None)
    patch.setitem(sys.modules, "jax_triton", fake)


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


def _multiply_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """The interpreter holds bfloat16 as its bits, and its `tl.dot` multiplies those as whole numbers."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, widened(a), widened(b), *rest)

    patch.setattr(InterpreterBuilder, "create_dot", create_dot)


def _evaluate_ptx(patch: pytest.MonkeyPatch) -> None:
    """Inline PTX that makes bfloat16, from as many neighbours of the last axis as fill a register, each operand's."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    class Call:
        def __init__(self, results: list[np.ndarray]):
            self.results = results

        def get_result(self, i: int) -> Any:
            return TensorHandle(self.results[i], tl.bfloat16)

    def create(self: Any, text: str, constraints: str, operands: Any, types: Any, is_pure: bool, pack: int) -> Call:
        shape, registers = operands[0].data.shape, constraints.count("=")
        words = [np.ascontiguousarray(operand.data).reshape(-1, pack).view("<u4")[:, 0] for operand in operands]
        made, each = evaluated(text, words, registers), pack // 2
        tensors = [np.stack(made[i : i + each], 1).view("<u2").reshape(shape) for i in range(0, registers, each)]
        return Call(tensors)

    patch.setattr(InterpreterBuilder, "create_inline_asm", create, raising=False)
