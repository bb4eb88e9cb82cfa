"""The JAX primitive of every kernel call.

A traced program has one equation for an operation. When it is lowered for a platform, the equation becomes that platform's
kernel, or the reference where there is none. So the reference of a program that runs a kernel is never traced.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.core import ShapedArray, Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, ManualAxisType, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ..errors import UnsupportedError
from .backend import AbstractBackend, AbstractProblem, Choice

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

Leaves: TypeAlias = Sequence[Any]
P = TypeVar("P", bound=AbstractProblem)

primitive = Primitive("fewbit_kernel")
primitive.multiple_results = True


@dataclasses.dataclass(frozen=True)
class AbstractCall(abc.ABC):
    """The static parameter of the primitive: an operation on arrays. Equal calls share a compiled program.

    Attributes:
        kernels: at most one backend for each platform.
        is_named: whether the caller named the backend, so that no other may replace it.
    """

    kernels: tuple[Any, ...]
    is_named: bool

    @property
    @abc.abstractmethod
    def operation(self) -> str:
        """The name of the operation, for errors."""

    @abc.abstractmethod
    def by_kernel(self, kernel: Any, *leaves: jax.Array) -> Leaves:
        """The results of one of `kernels`."""

    @abc.abstractmethod
    def by_reference(self, *leaves: jax.Array) -> Leaves:
        """The results in plain JAX."""

    @abc.abstractmethod
    def results(self, *leaves: ShapedArray) -> Sequence[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the results."""

    @abc.abstractmethod
    def batched(self, leaves: Leaves, axes: Sequence[int | None]) -> tuple[Leaves, Sequence[int]]:
        """The results under `vmap` and their mapped axes."""

    def tangents(self, leaves: Leaves, tangents: Leaves) -> Leaves:
        """The tangents of the results, by the reference."""
        return reference_tangents(self, leaves, tangents)

    def transposed(self, cotangents: Leaves, *leaves: object) -> Leaves:
        """The cotangents of the operands in which the operation is linear."""
        raise NotImplementedError(f"{self.operation} is not linear")


def bind(call: AbstractCall, *leaves: ArrayLike) -> list[jax.Array]:
    """The results of a call, from the kernel of the platform that the program is compiled for.

    Raises:
        UnsupportedError: where the named backend does not run on that platform; for a traced program, when it is compiled.
    """
    results: list[jax.Array] = primitive.bind(*leaves, call=call)
    return results


def reference_tangents(call: AbstractCall, leaves: Leaves, tangents: Leaves) -> Leaves:
    """The tangents of a call's results by the JVP of its reference; `ad.Zero` for results that are integers."""
    moved = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

    def of_moved(*those: jax.Array) -> Leaves:
        own = list(leaves)
        for i, leaf in zip(moved, those, strict=True):
            own[i] = leaf
        return call.by_reference(*own)

    results, moves = jax.jvp(of_moved, [leaves[i] for i in moved], [tangents[i] for i in moved])
    return [zero_tangent(y) if t.dtype == jax.dtypes.float0 else t for y, t in zip(results, moves, strict=True)]


def zero_tangent(x: jax.Array) -> ad.Zero:
    """The symbolic zero of an array's tangents."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


# --- the rules of the primitive ---


def _lowered(platform: str | None, *leaves: jax.Array, call: AbstractCall) -> Leaves:
    """The results by the platform's kernel, else by the reference if no backend was named."""
    for kernel in call.kernels:
        if kernel.platform == platform:
            return call.by_kernel(kernel, *leaves)
    if call.is_named:
        where = f"the program is compiled for {platform or 'another platform'}"
        reasons = {kernel.name: f"it runs on {kernel.platform}, and {where}" for kernel in call.kernels}
        raise UnsupportedError(f"{call.operation} cannot run here", reasons)
    return call.by_reference(*leaves)


@functools.cache
def _compiled(call: AbstractCall) -> Callable[..., Leaves]:
    return jax.jit(functools.partial(primitive.bind, call=call))


def _run(*leaves: ArrayLike, call: AbstractCall) -> Leaves:
    with jax.disable_jit(False):  # else the compiled function would bind the primitive again, endlessly
        return _compiled(call)(*leaves)


def _abstract(*leaves: ShapedArray, call: AbstractCall) -> list[ShapedArray]:
    varying = frozenset().union(*(leaf.manual_axis_type.varying for leaf in leaves))
    return [
        ShapedArray(
            result.shape,
            result.dtype,
            sharding=leaves[0].sharding.update(spec=PartitionSpec(*[None] * len(result.shape))),
            manual_axis_type=ManualAxisType(varying=varying),
        )
        for result in call.results(*leaves)
    ]


def _jvp(leaves: Leaves, tangents: Leaves, *, call: AbstractCall) -> tuple[Leaves, Leaves]:
    return bind(call, *leaves), call.tangents(leaves, tangents)


def _transpose(cotangents: Leaves, *leaves: object, call: AbstractCall) -> Leaves:
    if all(type(cotangent) is ad.Zero for cotangent in cotangents):
        return [None] * len(leaves)
    return call.transposed(cotangents, *leaves)


primitive.def_impl(_run)
primitive.def_abstract_eval(_abstract)
ad.primitive_jvps[primitive] = _jvp
ad.primitive_transposes[primitive] = _transpose
batching.primitive_batchers[primitive] = lambda leaves, axes, call: call.batched(leaves, axes)
for _platform in (*PLATFORMS, None):
    _rule = mlir.lower_fun(functools.partial(_lowered, _platform), multiple_results=True)
    mlir.register_lowering(primitive, _rule, platform=_platform)


# --- operations that are mapped and differentiated by JAX: quantize, dequantize, attention ---


@dataclasses.dataclass(frozen=True)
class OperationCall(AbstractCall):
    """A call whose batching is the `vmap` of its kernel, and whose derivatives are those of its reference.

    Attributes:
        problem: what the backends compute.
        reference: the backend of every other platform.
        form: the tree structure of the operands.
        mapped: for each `vmap`, the innermost first, the mapped axis of every leaf.
    """

    problem: AbstractProblem
    reference: AbstractBackend[Any]
    form: Any
    mapped: tuple[tuple[int | None, ...], ...] = ()

    @property
    def operation(self) -> str:
        return self.problem.operation

    def function(self, backend: AbstractBackend[Any]) -> Callable[..., PyTree]:
        """A backend as a function of the leaves."""

        def run(*leaves: jax.Array) -> PyTree:
            return backend.run(self.problem, *jax.tree.unflatten(self.form, leaves))

        for axes in self.mapped:
            run = jax.vmap(run, in_axes=axes)
        return run

    def by_kernel(self, kernel: AbstractBackend[Any], *leaves: jax.Array) -> Leaves:
        return jax.tree.leaves(self.function(kernel)(*leaves))

    def by_reference(self, *leaves: jax.Array) -> Leaves:
        return jax.tree.leaves(self.function(self.reference)(*leaves))

    def results(self, *leaves: ShapedArray) -> Sequence[jax.ShapeDtypeStruct]:
        return jax.tree.leaves(self.result(*leaves))

    def result(self, *leaves: Any) -> PyTree:
        """The result as a tree of shapes and dtypes; the leaves have `shape` and `dtype`."""
        return _result(self, tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves))

    def batched(self, leaves: Leaves, axes: Sequence[int | None]) -> tuple[Leaves, Sequence[int]]:
        results = bind(dataclasses.replace(self, mapped=(*self.mapped, tuple(axes))), *leaves)
        return results, [0] * len(results)


@functools.lru_cache(maxsize=1024)
def _result(call: OperationCall, forms: tuple[tuple[tuple[int, ...], Any], ...]) -> PyTree:
    """The shapes of a call's result: of the kernel for JAX's default devices, which has to be traced in any case."""
    here = jax.default_backend()
    backend = next((kernel for kernel in call.kernels if kernel.platform == here), call.reference)
    return jax.eval_shape(call.function(backend), *(jax.ShapeDtypeStruct(*form) for form in forms))


def computed(choice: Choice[P], problem: P, *operands: PyTree, reference: AbstractBackend[P], is_named: bool) -> PyTree:
    """The result of the chosen backend; under `jit`, of that of the platform for which the program is compiled.

    Args:
        choice: the backends of each platform.
        problem: what they compute.
        *operands: pytrees of arrays.
        reference: the backend of platforms that have none.
        is_named: whether the caller named the backend.

    Returns:
        The result, of the structure that the backend's `run` returns.

    Raises:
        UnsupportedError: where the named backend does not run on the platform.
    """
    is_everywhere = choice.backend.platform is None and (is_named or choice.backend is not reference)
    if is_everywhere or not choice.kernels:
        return choice.backend.run(problem, *operands)
    leaves, form = jax.tree.flatten(operands)
    call = OperationCall(choice.kernels, is_named, problem, reference, form)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(call.result(*leaves)), bind(call, *leaves))


# --- arrays on several devices ---


def split_refusal() -> str | None:
    """Why a Pallas or Triton kernel is not chosen on several devices. None on one, and inside `jax.shard_map` on TPUs."""
    mesh = jax.sharding.get_abstract_mesh()
    is_manual = not mesh.empty and all(kind == AxisType.Manual for kind in mesh.axis_types)
    if jax.device_count() == 1 or (jax.default_backend() == "tpu" and is_manual):
        return None
    return "there are several devices, and XLA cannot partition this kernel; use jax.shard_map, or name the backend"


def are_split(*arrays: object) -> bool:
    """Whether an array is on several devices. Eager code knows how it is sharded; a jitted function, on an auto mesh, does not."""
    concrete = (a for a in arrays if isinstance(a, jax.Array) and not isinstance(a, Tracer))
    return any(len(a.sharding.device_set) > 1 for a in concrete)
