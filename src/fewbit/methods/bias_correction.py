"""Bias correction: biases absorb the mean error of quantized products.

With the mean `m` of a product's inputs, `W m - Q m` is the mean of what quantizing `W` to `Q` changes in its outputs. Added to the
bias it is gone, at no cost in bytes or time. If the inputs of the quantized model have another mean `m'`, it is `W m - Q m'`.

Reference: Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction, ICCV 2019.
"""

import types
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ..array.qarray import QArray, is_qarray
from ..calibration.measure import Observation
from ..errors import QuantError, UnsupportedError
from ..kernels.quantize.dispatch import dequantize
from ..ops.interpret.parameter_uses import parameter_paths, with_leaves
from ..recipe.plan import Plan
from ..recipe.quantize_row import SupportsObservations, non_finite_counts, non_finite_message
from ..recipe.rows import PlanRow
from ..recipe.rule import PRODUCT_OPS
from .weight_matrices import MatrixAxes

WEIGHT_NAMES = ("kernel", "weight", "w", "W")
BIAS_NAMES = ("bias", "b")


def correct_biases(
    params: PyTree,
    quantized: PyTree,
    plan: Plan,
    stats: SupportsObservations,
    *,
    biases: Mapping[str, str | None] = types.MappingProxyType({}),
) -> PyTree:
    """Adds to each bias the mean error of its quantized product.

    The bias of `dense/kernel` (or `weight`, `w`, `W`) is `dense/bias` or `dense/b`; that of any other `attn/q` is `attn/q_bias`. A
    weight without such a parameter, or with one of another shape than its outputs, has none. A stack of layers has the same axis in
    both.

    Args:
        params: the float parameters.
        quantized: the same tree with quantized weights, as `fb.quantize_params` gives it by any method.
        plan: the plan of `params`.
        stats: what `fb.observe` collected with `collect=("sum",)`.
        biases: the path of a weight's bias, where it has another name; None: it has none.

    Returns:
        `quantized` with other biases, in their dtypes.

    Raises:
        QuantError: when a weight with a bias has no sums, or sums with NaN or infinity, or `biases` names what is not there, is
            quantized, or has another shape than the outputs.
        UnsupportedError: when a weight with a bias has batch axes that are not its first ones, in the order of the product.

    >>> import fewbit as fb
    >>> params = {"kernel": jnp.array([[0.3, 7.0]]).T, "bias": jnp.zeros(1)}
    >>> def layer(params, x):
    ...     return x @ params["kernel"] + params["bias"][None]
    >>> x = jnp.array([[1.0, 2.0], [3.0, 2.0]])
    >>> plan = fb.plan(layer, params, x, recipe="int4")
    >>> quantized = fb.quantize_params(params, plan)
    >>> stats = fb.observe(layer, params, [x], "int4", collect=("sum",))
    >>> error = (layer(params, x) - fb.transparent(layer)(quantized, x)).mean()
    >>> corrected = correct_biases(params, quantized, plan, stats)
    >>> bool(jnp.allclose(corrected["bias"], error))
    True
    """
    before, after = parameter_paths(params), parameter_paths(quantized)
    if set(before) != set(after):
        raise QuantError(f"params and quantized have different parameters: {sorted(set(before) ^ set(after))[:5]}")
    rows = [row for row in plan if isinstance(after.get(row.path), QArray)]
    if unknown := sorted(set(biases) - {row.path for row in rows}):
        raise QuantError(f"biases names {unknown[0]!r}, which is not quantized by the plan")
    return with_leaves(quantized, after | corrected_biases(before, after, rows, stats.observations, biases=biases))


def corrected_biases(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    rows: Iterable[PlanRow],
    seen: Mapping[str, Observation],
    seen_quantized: Mapping[str, Observation] | None = None,
    *,
    biases: Mapping[str, str | None] = types.MappingProxyType({}),
) -> dict[str, Array]:
    """The corrected biases of some weights.

    Args:
        before: the float parameters, by path.
        after: likewise with quantized weights.
        rows: the plan's rows of these weights.
        seen: sums of their inputs in the float model.
        seen_quantized: those in the quantized model; None: the same.
        biases: as for `correct_biases`.

    Returns:
        New biases, by path.
    """
    found = dict[str, Array]()
    for row in rows:
        path = row.path
        bias = biases[path] if path in biases else bias_of(path, before)
        if bias is None or not set(row.ops) & set(PRODUCT_OPS):
            continue
        if bias not in after:
            raise QuantError(f"the bias {bias!r} of {path} is not among the parameters")
        weight = dequantize(after[path], dtype=jnp.float32)
        old = found[bias] if bias in found else after[bias]  # two weights may have one bias
        mean = _mean_input(row, seen)
        shift = _mean_output(before[path].astype(jnp.float32) - weight, row, mean, seen[path].batch)
        if seen_quantized is not None:
            shift += _mean_output(weight, row, mean - _mean_input(row, seen_quantized), seen[path].batch)
        if not is_qarray(old) and _long(old.shape) == _long(shift.shape):
            found[bias] = (old.astype(jnp.float32) + shift.reshape(old.shape)).astype(old.dtype)
        elif path in biases:
            raise QuantError(f"the bias {bias!r} of {path} is {old!r}; it must be a float array of shape {shift.shape}")
    return found


def bias_of(path: str, paths: Container[str]) -> str | None:
    """The bias that belongs to a weight by its name, or None. "/" and "." separate the parts of a path.

    >>> bias_of("mlp/dense/kernel", {"mlp/dense/bias"}), bias_of("attn/q", {"attn/q_bias"}), bias_of("attn/q", {"attn/bias"})
    ('mlp/dense/bias', 'attn/q_bias', None)
    >>> bias_of("encoder.0.weight", {"encoder.0.bias"})
    'encoder.0.bias'
    """
    start = max(path.rfind("/"), path.rfind(".")) + 1
    parent, name = path[:start], path[start:]
    names = BIAS_NAMES if name in WEIGHT_NAMES else (f"{name}_bias",)
    return next((parent + one for one in names if parent + one in paths), None)


def _mean_input(row: PlanRow, seen: Mapping[str, Observation]) -> Float[Array, "..."]:
    """The mean of a product's inputs, an element for each channel."""
    one = seen.get(row.path)
    if one is None or one.sum is None:
        raise QuantError(f'{row.path} has no sums of its inputs; pass stats=fb.observe(fn, ..., collect=("sum",))')
    if counts := non_finite_counts([(f"the sums of inputs of {row.path}", one.sum)]):
        raise QuantError(
            non_finite_message(counts, "the activations overflow on the calibration data: check the batches and the model")
        )
    return one.sum / jnp.maximum(one.count, 1).reshape(*one.count.shape, *[1] * (one.sum.ndim - one.count.ndim))


def _mean_output(
    x: Float[Array, "..."], row: PlanRow, mean: Float[Array, "..."], batch_axes: Sequence[int] | None
) -> Float[Array, "..."]:
    """The mean of the outputs of a weight `x`, given that of its inputs.

    There is an element for each of the weight's axes that the product does not contract.
    """
    stacked, contracted = ([a % x.ndim for a in sorted(axes)] for axes in (row.stacked, row.contracted or row.axis))
    inner = [a for a in range(x.ndim) if a not in stacked]
    layers, shape, batch = [x.shape[a] for a in stacked], [x.shape[a] for a in inner], None
    if batch_axes is not None and mean.ndim > len(layers) + 1:
        batch = [inner.index(a % x.ndim) for a in batch_axes]
        if batch != list(range(len(batch))):
            raise UnsupportedError(
                f"{row.path} has the batch axes {batch_axes}, in the order of its product, and the order of its bias is not known; store "
                "them first and in this order, or pass biases={path: None} for it"
            )
    try:
        axes = MatrixAxes.of(shape, [inner.index(a) for a in contracted], mean.shape[len(layers) :], batch)
    except (QuantError, UnsupportedError) as error:
        raise type(error)(f"{row.path}: {error}") from error
    mean = mean.reshape(*layers, *(axes.shape[a] for a in (*axes.groups, *axes.contracted)))
    outputs = jnp.einsum(
        x.transpose(*stacked, *inner).reshape(*layers, *axes.shape),
        [..., *range(len(axes.shape))],
        mean,
        [..., *axes.groups, *axes.contracted],
        [..., *axes.groups, *axes.others],
        precision="highest",
    ).reshape(*layers, *(x.shape[a] for a in inner if a not in contracted))
    order = [*range(len(layers), outputs.ndim)]
    for place, a in enumerate(stacked):  # the layers are along the same axis of the bias
        order.insert(min(a, len(order)), place)
    return outputs.transpose(order)


def _long(shape: tuple[int, ...]) -> list[int]:
    """The lengths of a shape that are not 1. The bias of a convolution may be `[out, 1, 1]`."""
    return [n for n in shape if n != 1]
