"""Exports programs that call fewbit's kernels, and reads them.

>>> from fewbit import export
>>> exported = export.export(jax.jit(lambda x, w: x @ w))(jnp.ones((2, 64)), fb.quantize(jnp.ones((64, 8)), "int4"))
>>> exported.platforms
('cpu',)
"""

import re
from collections.abc import Callable, Sequence

import jax.export
import jax.stages

from ..errors import UnsupportedError
from ..kernels.extension import EXTENSIONS, HOW_TO_BUILD, extension


def export(
    fn: jax.stages.Wrapped,
    *,
    platforms: Sequence[str] | None = None,
    disabled_checks: Sequence[jax.export.DisabledSafetyCheck] = (),
) -> Callable[..., jax.export.Exported]:
    """Exports a jitted function that multiplies quantized arrays.

    This is `jax.export.export`, which alone refuses the calls of our C++ and Triton kernels: their names and arguments are
    those of one version of fewbit, and the process that runs the program needs the same.

    Args:
        fn: the result of `jax.jit`.
        platforms: as for `jax.export.export`; None: that of JAX's default device.
        disabled_checks: further checks that JAX leaves out.

    Returns:
        A function of the arguments of `fn`, or of their shapes and dtypes, QArrays of them included. Its result is a
        `jax.export.Exported`, whose `serialize` needs `pip install fewbit[export]`. QArrays and caches may be arguments and
        results. Products whose sizes are left open (`jax.export.symbolic_shape`) are computed without kernels.
    """
    ours = [jax.export.DisabledSafetyCheck.custom_call(name) for name in (*_targets(), "triton_kernel_call")]
    return jax.export.export(fn, platforms=platforms, disabled_checks=[*disabled_checks, *ours])


def deserialize(blob: bytes | bytearray) -> jax.export.Exported:
    """Reads what `Exported.serialize` wrote, in a process that may have done nothing else with fewbit.

    Args:
        blob: the bytes.

    Returns:
        The program. `call` runs it, also within other programs.

    Raises:
        UnsupportedError: when the program calls a C++ kernel that this process does not have.
    """
    exported = jax.export.deserialize(bytearray(blob))
    if any(extension(module).missing for module in EXTENSIONS):  # else the text, which has all constants, is not needed
        called = re.findall(r"custom_call @(fewbit_\w+)", exported.mlir_module())
        if missing := sorted(set(called) - set(_targets())):
            raise UnsupportedError(
                f"the program calls {', '.join(missing)}, and no such kernel is loaded here; {HOW_TO_BUILD}"
            )
    return exported


def _targets() -> list[str]:
    """The names of the C++ kernels that are loaded here."""
    return [name for module in EXTENSIONS for name in extension(module).targets]
