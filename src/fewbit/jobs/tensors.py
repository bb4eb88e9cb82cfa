"""Quantizing a model tensor by tensor: each one is loaded, quantized, measured and handed on before the next."""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..array import QArray
from ..errors import QuantError
from ..evaluate import sqnr_db
from ..recipe import Plan, PlanRow, check_storable, quantize_row
from .model import Model, Value, decoded
from .planning import is_kept


@dataclasses.dataclass(frozen=True)
class TensorResult:
    """What happened to one tensor.

    Attributes:
        path: the parameter.
        shape: its shape.
        scheme: the scheme that it has now, or its dtype.
        is_quantized: whether it was quantized, or pruned, in this run; else it was handed on as it was.
        sqnr_db: the signal-to-quantization-noise ratio against what the file holds; None when it was not quantized.
        bytes_before: its bytes in the file.
        bytes_after: its bytes now.
        seconds: how long it took.
    """

    path: str
    shape: tuple[int, ...]
    scheme: str
    is_quantized: bool
    sqnr_db: float | None
    bytes_before: int
    bytes_after: int
    seconds: float

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        quality = f"{self.sqnr_db:.2f} dB" if self.sqnr_db is not None else "unchanged"
        sizes = f"{self.bytes_before:,} -> {self.bytes_after:,} bytes"
        return f"{self.path}  {shape}  {self.scheme}  {quality}  {sizes}  {self.seconds:.2f} s"


def quantized_tensors(model: Model, plan: Plan) -> Iterator[tuple[Value, TensorResult]]:
    """The parameters of a model as its plan says, one after another, in the order of the plan.

    Args:
        model: the model.
        plan: its plan; see `plan_model`.

    Returns:
        An iterator of the values and what happened to each.

    Raises:
        QuantError: when a parameter holds NaN or infinity; the message names every such parameter and how many.
        UnsupportedError: for a plan that quantized parameters cannot carry out on their own.
    """
    check_storable(plan)
    rows = iter(plan)
    for row in rows:
        start = time.perf_counter()
        stored = model.load(row.path)
        if bad := _non_finite(stored, row):
            raise QuantError(_non_finite_message(model, {row.path: bad} | _more_non_finite(model, rows)))
        value, sqnr = _converted(stored, row, model)
        seconds = time.perf_counter() - start
        scheme = value.scheme.name if isinstance(value, QArray) else np.dtype(value.dtype).name
        before = model.info[row.path].nbytes
        yield value, TensorResult(row.path, row.shape, scheme, sqnr is not None, sqnr, before, int(value.nbytes), seconds)


def _converted(stored: Value, row: PlanRow, model: Model) -> tuple[Value, float | None]:
    """One parameter as its row says, and its signal-to-noise ratio when it was quantized or pruned."""
    if row.policy is None and row.sparsity is None:
        return stored, None
    if row.policy is not None and isinstance(stored, QArray) and is_kept(row, model.info[row.path]):
        return dataclasses.replace(stored, policy=None if row.policy.is_weight_only else row.policy), None
    x = jnp.asarray(_float32(decoded(stored)))
    q = jax.block_until_ready(quantize_row(x, row))
    return q, sqnr_db(x, q)


def _float32(x: Any) -> Any:
    """float64 rounded to float32; all other arrays as they are."""
    if x.dtype != np.float64:
        return x
    with np.errstate(over="ignore"):  # what overflows is found as infinity and named
        return np.asarray(x, np.float32)


def _non_finite(value: Value, row: PlanRow) -> int:
    """How many elements are NaN or infinite, as the row takes them: decoded, and float64 rounded if it is quantized."""
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return 0
    is_kept_whole = row.policy is None and row.sparsity is None
    x = decoded(value) if is_kept_whole else _float32(decoded(value))
    if isinstance(x, np.ndarray) and x.dtype.kind in "fc":
        return int(x.size - np.count_nonzero(np.isfinite(x)))
    return int(jnp.sum(~jnp.isfinite(jnp.asarray(x))))


def _more_non_finite(model: Model, rows: Iterator[PlanRow]) -> dict[str, int]:
    """The other parameters that are not finite, so that one message names them all."""
    counts = {row.path: _non_finite(model.load(row.path), row) for row in rows}
    return {path: count for path, count in counts.items() if count}


def _non_finite_message(model: Model, counts: dict[str, int]) -> str:
    named = [f"{path} ({count:,} of {_size(model, path):,})" for path, count in counts.items()]
    more = f" and {len(named) - 20} more parameters" if len(named) > 20 else ""
    return (
        f"{model.path} holds values that are NaN or infinite in {', '.join(named[:20])}{more}; nothing was written. "
        "Repair the checkpoint: a tile with one such value decodes to NaN"
    )


def _size(model: Model, path: str) -> int:
    return int(np.prod(model.info[path].shape, dtype=np.int64))
