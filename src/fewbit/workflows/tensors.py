"""Quantizes and measures a model's tensors one at a time."""

import dataclasses
import math
import time
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..array.qarray import QArray
from ..calibration.measure import Observation
from ..errors import QuantError
from ..evaluate.metrics import sqnr_db
from ..io.checkpoint import TensorInfo
from ..recipe.apply import check_storable
from ..recipe.method import NEAREST, AbstractMethod
from ..recipe.plan import Plan
from ..recipe.quantize_row import non_finite_counts, non_finite_message, quantize_finite
from ..recipe.rows import PlanRow
from .convert.fused import quantized_together
from .methods.experts import ExpertTokens
from .model import Model, Value, decoded, is_kept


@dataclasses.dataclass(frozen=True)
class TensorResult:
    """The result of one tensor.

    Attributes:
        path: the parameter's path.
        shape: its shape.
        scheme: its new scheme, or its dtype.
        is_quantized: whether it was quantized or pruned in this run; else it is unchanged.
        sqnr_db: the signal-to-quantization-noise ratio against the file's values; None if it is unchanged.
        bytes_before: its bytes in the file.
        bytes_after: its new bytes.
        seconds: how long it took.
        method: the name of the method that chose its codes, if it was quantized.
        tokens: the tokens of the calibration data that its expert got, or each of its experts; empty for other weights.
        scaled: what scales that were folded did to it; empty: nothing.
    """

    path: str
    shape: tuple[int, ...]
    scheme: str
    is_quantized: bool
    sqnr_db: float | None
    bytes_before: int
    bytes_after: int
    seconds: float
    method: str = "rtn"
    tokens: tuple[int, ...] = ()
    scaled: str = ""

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        quality = f"{self.sqnr_db:.2f} dB" if self.sqnr_db is not None else "unchanged"
        if self.sqnr_db is None and self.scaled:
            quality = "float"
        sizes = f"{self.bytes_before:,} -> {self.bytes_after:,} bytes"
        scheme = self.scheme if self.method == "rtn" else f"{self.scheme} by {self.method}"
        words = [self.path, shape, scheme, quality, *filter(None, [self.scaled]), sizes, f"{self.seconds:.2f} s"]
        if self.tokens:
            words.append(" to ".join(f"{count:,}" for count in sorted({min(self.tokens), max(self.tokens)})) + " tokens")
        return "  ".join(words)

    def to_json(self) -> dict[str, Any]:
        """The JSON form; an infinite SQNR, which JSON lacks, is text."""
        return {**dataclasses.asdict(self), "sqnr_db": str(self.sqnr_db)}

    @classmethod
    def from_json(cls, form: Mapping[str, Any]) -> "TensorResult":
        """Reads the JSON form."""
        sqnr = None if form["sqnr_db"] == "None" else float(form["sqnr_db"])
        return cls(**{**form, "shape": tuple(form["shape"]), "sqnr_db": sqnr, "tokens": tuple(form["tokens"])})


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of quantizing a checkpoint.

    Attributes:
        path: the directory.
        tensors: the result of each tensor.
        size: the number of elements of all parameters.
        file_bytes: the bytes of all files of the directory.
        tensor_file_bytes: the bytes of its safetensors files.
        array_bytes: the bytes of the arrays.
        seconds: how long it took, reading back included.
    """

    path: Path
    tensors: tuple[TensorResult, ...]
    size: int
    file_bytes: int
    tensor_file_bytes: int
    array_bytes: int
    seconds: float

    @property
    def file_bits_per_weight(self) -> float:
        """`8 * tensor_file_bytes / size`."""
        return 8 * self.tensor_file_bytes / max(self.size, 1)

    @property
    def array_bits_per_weight(self) -> float:
        """`8 * array_bytes / size`."""
        return 8 * self.array_bytes / max(self.size, 1)


def worst(tensors: Iterable[TensorResult], count: int = 5) -> list[TensorResult]:
    """The tensors of lowest SQNR.

    Args:
        tensors: the result of each tensor.
        count: how many at most.

    Returns:
        The worst first; lossless tensors are left out.
    """
    lossy = [t for t in tensors if t.sqnr_db is not None and math.isfinite(t.sqnr_db)]
    return sorted(lossy, key=lambda t: t.sqnr_db or 0.0)[:count]


def quantized_tensors(
    model: Model,
    plan: Plan,
    fused: Mapping[str, tuple[PlanRow, ...]] = types.MappingProxyType({}),
    calibrated: Mapping[str, QArray] = types.MappingProxyType({}),
    method: AbstractMethod = NEAREST,
    observed: Mapping[str, Observation] = types.MappingProxyType({}),
    finished: Collection[str] = frozenset(),
    tokens: Iterable[ExpertTokens] = (),
    scaled: Mapping[str, str] = types.MappingProxyType({}),
) -> Iterator[tuple[Value, TensorResult]]:
    """Quantizes the parameters of a model, in the order of the plan.

    Args:
        model: the model.
        plan: its plan; see `plan_model`.
        fused: the rows that share a tensor scale, by the path of each; see `fused_rows`.
        calibrated: weights that are quantized already, see `calibrated_weights`.
        method: the method that quantized them, and quantizes the other weights that it can.
        observed: the statistics of other weights, for a method that needs some.
        finished: the paths of parameters that are left out.
        tokens: the tokens of the experts of each layer in its calibration data.
        scaled: what scales that were folded into the model did to its parameters, by path.

    Returns:
        An iterator of the values and their results.

    Raises:
        QuantError: when a parameter has NaN or infinity; the message names each such parameter and the counts.
        UnsupportedError: for a plan that stored parameters cannot express.
    """
    check_storable(plan)
    rows, together, layers = iter(plan), dict[str, QArray](), tuple(tokens)
    for row in rows:
        if row.path in finished:
            continue
        start = time.perf_counter()
        stored = model.load(row.path)
        x = _float_values(stored, row)
        if counts := non_finite_counts([(row.path, x)]):
            counts |= non_finite_counts((r.path, _float_values(model.load(r.path), r)) for r in rows)
            raise QuantError(f"{model.path} has {non_finite_message(counts, 'nothing was written; repair the checkpoint')}")
        if row.path in fused and row.path not in calibrated and row.path not in together:
            parts = {r.path: _float_values(model.load(r.path), r) for r in fused[row.path]}
            joint = quantized_together(parts, row, method, observed.get(row.path))
            together |= {path: q for path, q in joint.items() if path not in finished}
        if row.path in calibrated or row.path in together:
            q = calibrated[row.path] if row.path in calibrated else together.pop(row.path)
            value = jax.block_until_ready(q)
            sqnr = sqnr_db(jnp.asarray(x), value)
        else:
            value, sqnr = _converted(stored, x, row, model.info[row.path], method, observed.get(row.path))
        if row.path in scaled and isinstance(value, QArray):
            value = value.astype(row.dtype.replace("float64", "float32"))  # it was scaled in float32
        seconds = time.perf_counter() - start
        scheme = value.scheme.name if isinstance(value, QArray) else np.dtype(value.dtype).name
        before = model.info[row.path].nbytes
        is_chosen = row.path in calibrated or row.path in observed or not method.collect
        chosen_by = method.name if is_chosen else NEAREST.name
        seen = tuple(count for layer in layers for count in layer.of(row.path))
        measured = (sqnr is not None, sqnr, before, int(value.nbytes), seconds)
        yield value, TensorResult(row.path, row.shape, scheme, *measured, chosen_by, seen, scaled.get(row.path, ""))


def _float_values(stored: Value, row: PlanRow) -> np.ndarray | jax.Array:
    """The dequantized values. Float64 is rounded to float32 if the row quantizes or prunes."""
    x = decoded(stored)
    if x.dtype != np.float64 or (row.policy is None and row.sparsity is None):
        return x
    with np.errstate(over="ignore"):  # what overflows to infinity is counted and named
        return np.asarray(x, np.float32)


def _converted(
    stored: Value,
    x: np.ndarray | jax.Array,
    row: PlanRow,
    info: TensorInfo,
    method: AbstractMethod,
    observation: Observation | None,
) -> tuple[Value, float | None]:
    """One parameter as its row says, and its SQNR if it was quantized or pruned."""
    if row.policy is None and row.sparsity is None:
        return stored, None
    if row.policy is not None and isinstance(stored, QArray) and is_kept(row, info):
        return dataclasses.replace(stored, policy=None if row.policy.is_weight_only else row.policy), None
    if x.shape != row.shape:
        raise QuantError(f"{row.path} has shape {x.shape}, but the plan was made for {row.shape}")
    x = jnp.asarray(x)
    q = jax.block_until_ready(quantize_finite(x, row, method, observation))
    return q, sqnr_db(x, q)
