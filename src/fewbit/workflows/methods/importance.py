"""Computes the importance matrix of a decoder."""

import numpy as np

from ...calibration.measure import Measure
from ...calibration.range_rules import AbsMaxRange
from ...errors import QuantError
from ...io.gguf.imatrix import Importance, ImportanceMatrix
from ..model import Model
from ..plan import plan_model
from .calibrated import Progress, float_layers
from .calibration_data import CalibrationData
from .experts import EXPERT
from .importance_file import input_order, tensor_names


def importance_matrix(model: Model, data: CalibrationData, progress: Progress | None = None) -> ImportanceMatrix:
    """Measures the importance of a model's weights on a text.

    It runs the float decoder, and sums the squares of the inputs of each weight.

    Args:
        model: a model that can be run.
        data: the text.
        progress: called after each layer.

    Returns:
        The matrix, by the names of GGUF files; a weight without such a name has our own.

    Raises:
        QuantError: when a token has no embedding, or a statistic is not finite.
        UnsupportedError: when the model cannot be run.
    """
    paths = {row.path for row in plan_model(model, recipe="int8") if row.policy is not None}
    measure, found = Measure(AbsMaxRange(), ("squares",)), {}
    for layer in float_layers(model, data.windows, progress):
        found |= layer.statistics(measure, paths, data.unseen_experts)
    sums: dict[str, np.ndarray] = {}
    counts: dict[str, np.ndarray] = {}
    for path, one in found.items():
        squares, count = np.asarray(one.squares), np.asarray(one.count)
        for name in tensor_names(model, path):
            if expert := EXPERT.search(path):
                experts = model.runnable_config().experts
                assert experts is not None
                sums.setdefault(name, np.zeros((experts.count, squares.size), np.float32))[int(expert[1])] = squares
                counts.setdefault(name, np.zeros(experts.count, np.float32))[int(expert[1])] = count
            else:
                # A stack of heads has a row for each, and one count.
                order = input_order(model, path)
                sums[name] = np.atleast_2d(squares if order is None else squares[..., order])
                counts[name] = np.broadcast_to(count, len(sums[name]))
    windows, length = data.windows.shape
    try:
        entries = {name: Importance(values, counts[name]) for name, values in sums.items()}
    except QuantError as error:
        raise QuantError(f"the activations of {model.name} overflow on {data.text}: {error}") from error
    return ImportanceMatrix(entries, (data.text,), windows, length)
