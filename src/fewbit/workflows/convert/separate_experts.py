"""Splits stacks of experts into matrices, for containers that store weights of modules."""

import dataclasses
import functools
import re

import numpy as np

from ...io.checkpoint import TensorInfo
from ...recipe.plan import Plan
from ...recipe.rows import PlanRow
from ..model import Model, Value

_STACK = re.compile(r"(layers/\d+/mlp/experts)/(gate\+up|down)")
_MATRIX = re.compile(r"(layers/\d+/mlp/experts)/(\d+)/(gate|up|down)")
_NAMES = {"gate+up": "gate_up_proj", "down": "down_proj"}


def with_separate_experts(model: Model) -> Model:
    """The model with a matrix `[out, in]` for each expert, where it has Llama 4's stacks `[E, in, out]`.

    transformers and vLLM put modules in the place of such a stack where they load quantized weights. A model without stacks comes back
    unchanged, and so does one whose stacks are quantized.

    Args:
        model: a model with the names of a Hugging Face checkpoint.
    """
    config = model.config
    if config is None or config.experts is None or config.experts.layout != "joined_in_out":
        return model
    if any(info.scheme is not None for path, info in model.info.items() if _STACK.fullmatch(path)):
        return model
    count = config.experts.count
    info, names = dict[str, TensorInfo](), dict[str, str]()
    for path, one in model.info.items():
        if found := _STACK.fullmatch(path):
            for expert in range(count):
                for part in found[2].split("+"):
                    own = f"{found[1]}/{expert}/{part}"
                    info[own] = _of_matrix(one, found[2])
                    names[own] = model.names[path].replace(_NAMES[found[2]], f"{expert}.{part}_proj.weight")
        else:
            info[path] = one
            if path in model.names:
                names[path] = model.names[path]
    stack = functools.lru_cache(maxsize=1)(model.load)

    def load(path: str) -> Value:
        if not (found := _MATRIX.fullmatch(path)):
            return model.load(path)
        at, expert, part = found[1], int(found[2]), found[3]
        if part == "down":
            return np.asarray(stack(f"{at}/down"))[expert].T
        halves = np.split(np.asarray(stack(f"{at}/gate+up"))[expert], 2, axis=-1)
        return halves[part == "up"].T

    experts = dataclasses.replace(config.experts, layout="separate")
    return dataclasses.replace(model, config=dataclasses.replace(config, experts=experts), info=info, names=names, load=load)


def with_separate_rows(plan: Plan, model: Model) -> Plan:
    """The plan of a model with stacks of experts, for the result of `with_separate_experts`. Another plan comes back unchanged.

    Args:
        plan: the plan.
        model: the model with a matrix for each expert.
    """
    matrices: dict[str, list[str]] = {}
    for path in model.info:
        if found := _MATRIX.fullmatch(path):
            matrices.setdefault(f"{found[1]}/{'down' if found[3] == 'down' else 'gate+up'}", []).append(path)

    def separate(row: PlanRow) -> list[PlanRow]:
        own = matrices.get(row.path)
        if own is None or row.path in model.info:
            return [row]
        return [
            dataclasses.replace(
                row,
                path=path,
                shape=model.info[path].shape,
                axis=(-1,) if row.axis else (),
                contracted=(-1,) if row.contracted else (),
                stacked=(),
                bytes_before=row.bytes_before // len(own),
                bytes_after=row.bytes_after // len(own),
            )
            for path in own
        ]

    if not matrices:
        return plan
    return dataclasses.replace(plan, rows=tuple(part for row in plan for part in separate(row)))


def _of_matrix(stack: TensorInfo, part: str) -> TensorInfo:
    """The description of one matrix of a stack."""
    count, inputs, outputs = stack.shape
    matrices = len(part.split("+"))
    return dataclasses.replace(stack, shape=(outputs // matrices, inputs), nbytes=stack.nbytes // (count * matrices))
