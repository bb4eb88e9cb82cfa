"""Compares a model's outputs and hidden states with a reference's."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from ..errors import QuantError

Outputs = Mapping[str, np.ndarray]
"""The outputs of a model for one example, by name."""


@dataclasses.dataclass(frozen=True)
class OutputError:
    """How far one output of a model is from the reference's, over all examples.

    Attributes:
        name: the output's name: `last_hidden_state`, `logits`.
        shape: its shape for the first example.
        cosine: the mean cosine similarity of its vectors (last axis).
        lowest_cosine: the lowest cosine similarity.
        relative_error: `max |reference - candidate| / max |reference|`.
    """

    name: str
    shape: tuple[int, ...]
    cosine: float
    lowest_cosine: float
    relative_error: float


@dataclasses.dataclass(frozen=True)
class OutputQuality:
    """The result of comparing a model's outputs with a reference's.

    Attributes:
        inputs: what the inputs were.
        examples: how many there were.
        outputs: the error of each output.
        blocks: the relative error of each block's output for the first example, by module.
        sqnr_db: the SQNR of each parameter of two or more axes against the reference's.
        notes: what was left out, and why.
        engine: the program that ran the models.
    """

    inputs: str
    examples: int
    outputs: tuple[OutputError, ...]
    blocks: dict[str, float]
    sqnr_db: dict[str, float]
    notes: tuple[str, ...]
    engine: str


def output_errors(reference: Sequence[Outputs], candidate: Sequence[Outputs]) -> tuple[OutputError, ...]:
    """The error of each output over all examples.

    Args:
        reference: the reference's outputs for each example.
        candidate: the candidate's, for the same examples.

    Returns:
        One result for each output.

    Raises:
        QuantError: when there is no example, or the outputs differ in name or shape.

    >>> output_errors([{"y": np.array([[3.0, 4.0]])}], [{"y": np.array([[3.0, 4.5]])}])[0].relative_error
    0.125
    """
    if not reference or len(reference) != len(candidate):
        raise QuantError(
            f"there are outputs of {len(reference)} and of {len(candidate)} examples; the same number is needed"
        )
    for p, q in zip(reference, candidate, strict=True):
        shapes, others = ({name: np.shape(value) for name, value in of.items()} for of in (p, q))
        if shapes != others:
            raise QuantError(f"the models have different outputs: {shapes} and {others}; compare models of one architecture")
    return tuple(_error(name, [p[name] for p in reference], [q[name] for q in candidate]) for name in reference[0])


def _error(name: str, reference: Sequence[np.ndarray], candidate: Sequence[np.ndarray]) -> OutputError:
    cosines = np.concatenate([_cosines(p, q) for p, q in zip(reference, candidate, strict=True)])
    differences = [_largest(p, q) for p, q in zip(reference, candidate, strict=True)]
    relative = _ratio(float(np.max(differences)), float(np.max([_largest(p) for p in reference])))
    return OutputError(name, np.shape(reference[0]), float(cosines.mean()), float(cosines.min()), relative)


def _cosines(p: np.ndarray, q: np.ndarray) -> Float[np.ndarray, " rows"]:
    """The cosine similarity of each vector along the last axis. 1 for two zero vectors, 0 if one is zero."""
    unit_p, unit_q = _unit_vectors(p), _unit_vectors(q)
    both_zero = ~unit_p.any(-1) & ~unit_q.any(-1)
    return np.where(both_zero, 1.0, np.clip((unit_p * unit_q).sum(-1), -1.0, 1.0))


def _unit_vectors(x: np.ndarray) -> Float[np.ndarray, "rows width"]:
    """The vectors along the last axis, each divided by its norm. Zero vectors stay zero."""
    rows = np.asarray(x, np.float64).reshape(-1, np.shape(x)[-1] if np.ndim(x) else 1)
    largest = np.abs(rows).max(-1, keepdims=True, initial=0.0)
    scaled = np.divide(rows, largest, out=np.zeros_like(rows), where=largest != 0)  # squares of tiny values are zero
    norms = np.linalg.norm(scaled, axis=-1, keepdims=True)
    return np.divide(scaled, norms, out=np.zeros_like(rows), where=norms != 0)


def _largest(x: np.ndarray, other: np.ndarray | float = 0.0) -> float:
    """The largest absolute difference."""
    return float(np.max(np.abs(np.asarray(x, np.float64) - other), initial=0.0))


def relative_errors(reference: Outputs, candidate: Outputs) -> dict[str, float]:
    """`|reference - candidate| / |reference|` of each array, in the Frobenius norm.

    Args:
        reference: the reference's arrays.
        candidate: the candidate's, of the same names and shapes; other names are left out.

    Returns:
        The relative errors by name; infinite if only the reference is zero.

    >>> relative_errors({"layer.0": np.array([3.0, 4.0])}, {"layer.0": np.array([3.0, 3.0])})
    {'layer.0': 0.2}
    """
    return {name: _relative(reference[name], candidate[name]) for name in reference if name in candidate}


def _relative(p: np.ndarray, q: np.ndarray) -> float:
    wide = np.asarray(p, np.float64)
    if wide.shape != np.shape(q):
        raise QuantError(f"a hidden state has shape {np.shape(q)}, but the reference's has {wide.shape}")
    return _ratio(float(np.linalg.norm(wide - q)), float(np.linalg.norm(wide)))


def _ratio(difference: float, size: float) -> float:
    if difference == 0:
        return 0.0
    if size == 0:
        return math.inf
    return difference / size
