"""Importance matrices in files, and the weights of a model that they describe."""

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...calibration.measure import Observation
from ...errors import QuantError
from ...io.files import file_sha256
from ...io.gguf.imatrix import ImportanceMatrix, read_imatrix
from ...io.gguf.layers.linear_attention import LinearHeads
from ...methods.imatrix import IMatrix
from ...models.families.family import GGUF
from ...models.families.gguf.config import gguf_table_of
from ...models.families.multimodal import language_config
from ...models.families.table import family_of
from ...recipe.method import AbstractMethod
from ...recipe.plan import Plan
from ...recipe.rows import PlanRow
from ..model import Model
from .experts import EXPERT


@dataclasses.dataclass(frozen=True)
class ImportanceFile:
    """An importance matrix and the file that it was read from.

    Attributes:
        path: the file.
        matrix: its content.
    """

    path: Path
    matrix: ImportanceMatrix

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "ImportanceFile":
        """Reads a file of llama.cpp or fewbit.

        Args:
            path: the file, in either layout.

        Returns:
            The matrix.

        Raises:
            QuantError: as `read_imatrix`.
        """
        return cls(Path(path), read_imatrix(path))

    @property
    def facts(self) -> dict[str, Any]:
        """The provenance recorded in a directory."""
        datasets = list(self.matrix.datasets)
        return {"imatrix": self.path.name, "datasets": datasets, "sha256": file_sha256(self.path)}

    def observations_for(self, method: AbstractMethod, model: Model, plan: Plan) -> dict[str, Observation]:
        """The `observations` for a method; QuantError for one that needs more than squares."""
        if method.collect != IMatrix.collect:
            raise QuantError(
                f"method {method.name} needs {', '.join(method.collect) or 'no data'}, and an importance matrix has squares only"
            )
        return self.observations(model, plan)

    def observations(self, model: Model, plan: Plan) -> dict[str, Observation]:
        """The squares of the inputs of a plan's weights.

        Args:
            model: the model.
            plan: its plan.

        Returns:
            The statistics by path, without weights that the file has no tensor for, and experts without a token.

        Raises:
            QuantError: for a tensor of another shape, and when the file has none of the plan's weights.
        """
        rows = [row for row in plan if row.policy is not None]
        found = {row.path: one for row in rows if (one := self._observation(model, row)) is not None}
        if rows and not found:
            raise QuantError(
                f"{self.path} has no tensor of {model.name}: it has {next(iter(self.matrix.entries))}, the model has "
                f"{tensor_names(model, rows[0].path)[0]}; take the importance matrix of this model"
            )
        return found

    def _observation(self, model: Model, row: PlanRow) -> Observation | None:
        name = tensor_names(model, row.path)[0]
        one, expert = self.matrix.entries.get(name), EXPERT.search(row.path)
        if one is None:
            return None
        length = math.prod(row.shape[a] for a in row.axis)
        matrices = row.shape[0] if len(row.shape) - len(row.axis) == 2 else 1  # experts in one tensor
        if expert is not None:
            experts = model.runnable_config().experts
            assert experts is not None
            matrices = experts.count
        if one.squares.shape not in ((matrices, length), (1, matrices * length)):
            raise QuantError(
                f"{self.path}: {name} has values {one.squares.shape}, and {row.path} {row.shape} of {model.name} needs "
                f"{(matrices, length)}; take the importance matrix of this model"
            )
        squares = one.squares.reshape(matrices, length)
        if (order := input_order(model, row.path)) is not None:
            squares = squares[:, np.argsort(order)]
        counts = np.repeat(one.counts, matrices // len(one.counts))
        if expert is not None:
            index = int(expert[1])
            squares, counts = squares[index], counts[index]
        elif matrices == 1:
            squares, counts = squares[0], counts[0]
        if not np.any(counts):
            return None
        return Observation(squares=jnp.asarray(squares), count=jnp.asarray(counts))


def input_order(model: Model, path: str) -> np.ndarray | None:
    """The order of the input channels of a weight in a GGUF file, by their places in the model.

    None: they are in the order of the model. Those of the output projection of Qwen3.5's linear attention are not.

    Args:
        model: the model.
        path: the weight's path.
    """
    linear = None if model.config is None else model.config.linear
    if (
        linear is None
        or linear.layout != "separate"
        or not path.endswith("/attn/out")
        or tensor_names(model, path) == (path,)
    ):
        return None
    return LinearHeads(linear.key_heads, linear.value_heads, linear.key_dim, linear.value_dim, True).order(linear.value_dim)


def tensor_names(model: Model, path: str) -> tuple[str, ...]:
    """The names of a weight in a GGUF file. For fused experts they are those of both parts.

    Args:
        model: the model.
        path: the weight's path.

    Returns:
        The names; the path itself, if it has no other.
    """
    if model.config is None:
        return (path,)
    table = GGUF
    if model.kind == "gguf":
        table = gguf_table_of(model.metadata, model.config)
    elif "model_type" in model.metadata:
        table = family_of(language_config(model.metadata)).gguf_table_of(model.config)
    stacked = EXPERT.sub("experts/", path)
    parts = (stacked,)
    if stacked.endswith("/experts/gate+up"):
        parts = tuple(stacked.replace("gate+up", part) for part in ("gate", "up"))
    if stacked.endswith("/attn/qkvz"):
        parts = tuple(stacked.replace("qkvz", part) for part in ("qkv", "z"))
    try:
        return tuple(table.name(part) for part in parts)
    except QuantError:  # llama.cpp has no such tensor
        return (path,)
