"""Quantizes a decoder's weights by a method, layer by layer.

A calibration text runs through the layers one at a time. The inputs of a layer are the outputs of the quantized layers before
it, so that its weights are chosen for the inputs that they will multiply. One layer is in memory: its weights, its statistics and
a batch of the text. A run with finished parts has the residual streams of the whole text, and the quantized layers, on the disk.
"""

import dataclasses
import functools
import operator
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from ...array.qarray import QArray, is_qarray
from ...calibration.measure import Inputs, Measure, Observation, with_cross
from ...calibration.range_rules import AbsMaxRange
from ...errors import QuantError
from ...io.checkpoint import Tensors
from ...io.parts import FinishedParts
from ...methods.scaling import AbstractScaling, ScaledProduct
from ...methods.sequential import input_groups
from ...models.config import DecoderConfig
from ...models.decoder import first_stream, layer_output, output_logits
from ...models.joined import stack_experts
from ...models.names import shapes, tree_from_paths
from ...ops.interpret.observe import AbstractMeasure, Measurements, calibration_rules, observed
from ...ops.interpret.parameter_uses import parameter_paths, with_leaves
from ...ops.interpret.transparent import evaluated, transparent
from ...recipe.method import AbstractMethod
from ...recipe.plan import Plan
from ...recipe.quantize_row import non_finite_counts, non_finite_message, quantize_row
from ...recipe.rows import PlanRow
from ..convert.fused import quantized_together
from ..model import Model, decoded, is_kept
from .calibration_data import CalibrationData
from .experts import EXPERT, ExpertTokens, with_unseen_experts
from .folding import scaled_inputs

_BATCH_TOKENS = 4096
_TOKENS = "expert_tokens"
"""The name of the tokens of a layer's experts among its finished parts."""

Progress = Callable[[int, int], None]
"""Called with the number of layers done and of all layers."""


def calibrated_scales(
    model: Model,
    plan: Plan,
    scaling: AbstractScaling,
    data: CalibrationData,
    *,
    parts: FinishedParts | None = None,
    progress: Progress | None = None,
) -> dict[str, np.ndarray]:
    """The scales of the inputs of a decoder's products, for `scaled_model`.

    The inputs are those of the float model, as in the AWQ and SmoothQuant papers, so that the scales of a layer do not depend on how
    others are quantized.

    Args:
        model: a model that can be run.
        plan: its plan.
        scaling: the scaling.
        data: the calibration data.
        parts: where the scales of finished layers and the residual stream are kept, for a run that resumes this one and to save
            memory.
        progress: called before the first layer and after each.

    Returns:
        The scales by the name of the input; none for experts that are rounded to nearest because no token was routed to them.

    Raises:
        QuantError: as in `calibrated_weights`.
        UnsupportedError: when the model cannot be run.
    """
    inputs, policies = scaled_inputs(model, plan), {row.path: row.policy for row in plan if row.policy is not None}
    readers = {part.path for one in inputs for part in one.readers if part.path in policies}
    measure, found = Measure(AbsMaxRange(), scaling.collect), {}  # type: ignore[arg-type]
    layers = range(model.runnable_config().layers)
    for index in layers:
        done = _finished(parts, f"scales-{index}")
        found |= done or {}
        if done is None and parts is not None and any(path.startswith(f"layers/{index}/") for path in readers):
            for later in layers[index:]:  # a residual stream after this layer would let the run begin after it
                parts.remove(f"float-stream-{later + 1}")
    for layer in float_layers(model, data.windows, progress, parts):
        values: Mapping[str, Any] | None = _finished(parts, f"scales-{layer.index}")
        if values is None:
            new, observed = dict[str, Any](), layer.statistics(measure, readers, data.unseen_experts)
            for one in inputs:
                products = [
                    ScaledProduct(
                        jnp.asarray(decoded(model.load(part.path))),
                        policies[part.path].weight,
                        part.axis,
                        observed[part.path],
                    )
                    for part in one.readers
                    if part.path in observed
                ]
                if products:
                    _check_finite(one.name, products)
                    channels = jnp.asarray(one.channels, jnp.int32)
                    new[one.name] = scaling.scales(products, channels, one.size, by_expert=bool(one.groups))
            values = _kept(parts, f"scales-{layer.index}", new)
        found |= values
    return {name: np.asarray(scales) for name, scales in found.items()}


def calibrated_weights(
    model: Model,
    plan: Plan,
    method: AbstractMethod,
    data: CalibrationData,
    *,
    fused: Mapping[str, tuple[PlanRow, ...]] = types.MappingProxyType({}),
    parts: FinishedParts | None = None,
    progress: Progress | None = None,
    on_experts: Callable[[ExpertTokens], None] | None = None,
) -> Mapping[str, QArray]:
    """The quantized weights of a decoder's products, by a method with calibration data.

    Args:
        model: a model that can be run.
        plan: its plan.
        method: the method.
        data: the calibration data.
        fused: the rows that share a tensor scale, by the path of each; see `fused_rows`.
        parts: where finished layers and the residual streams are kept, for a run that resumes this one and to save memory; layers
            of an earlier run are not computed again. None: in memory.
        progress: called before the first layer with the number that an earlier run finished, and after each layer.
        on_experts: called with the tokens of a layer's experts.

    Returns:
        The QArrays by path, those of finished parts loaded when they are asked for. Embeddings that no product contracts, experts that
        are rounded to nearest because no token was routed to them, and weights that the file stores in the planned scheme already
        are not among them.

    Raises:
        QuantError: when a token has no embedding, a weight or a statistic is not finite, another process writes the parts, or an
            expert has no token and `data.unseen_experts` is "error".
        UnsupportedError: when the model cannot be run, or the method cannot quantize a weight.
    """
    config, rows = _checked_config(model, data.windows), {row.path: row for row in plan}
    chosen = {path for path, row in rows.items() if row.policy is not None and not is_kept(row, model.info[path])}
    collect = tuple(name for name in method.collect if name != "cross")
    measure = Measure(AbsMaxRange(), collect)  # type: ignore[arg-type]
    count = 2 if "cross" in method.collect else 1  # the second residual stream is that of the float model
    found: dict[str, Mapping[str, Any]] = {}

    def take(values: Mapping[str, Any], prefix: str) -> None:
        found.update({path: values for path in values if path != _TOKENS})
        if _TOKENS in values and on_experts is not None and config.experts is not None:
            path = f"{prefix}{config.experts.part}/experts"
            on_experts(ExpertTokens(path, tuple(np.asarray(values[_TOKENS]).tolist())))

    start, streams = _last_streams(parts, "stream", config.layers)
    for index in range(config.layers):
        if (finished := _finished(parts, f"layer-{index}")) is not None:
            take(finished, f"layers/{index}/")
        elif index < start and any(path.startswith(f"layers/{index}/") for path in chosen):
            start = 0
    if start == 0:
        tables = (_stored_tables(model),) * count
        # QEP corrects for the errors of the embedding; other methods gain nothing from them. A tied one is quantized last.
        if count == 2 and "embed" in chosen and not config.tied:
            embed = quantize_row(decoded(tables[0]["embed"]), rows["embed"], method)
            tables = ({**tables[0], "embed": embed}, tables[1])
        streams = _kept_streams(parts, "stream", 0, _first_streams(tables, data.windows, config))
    if progress is not None:
        progress(start, config.layers)
    for index in range(start, config.layers):
        prefix, layer, number = f"layers/{index}/", _stored_layer(model, index), jnp.int32(index)
        inside = [path for path in parameter_paths(layer) if prefix + path in chosen]
        if not any(prefix + path in found for path in inside):
            values: dict[str, Any] = {}
            floats = _floats(layer)
            # Other methods gain nothing from the errors inside a layer (docs/design/methods.md).
            groups = _groups(floats, streams, number, config, inside) if count == 2 else [inside]
            for group in groups:
                known = {path: decoded(values[prefix + path]) for path in inside if prefix + path in values}
                forms = (with_leaves(floats, known), floats)[:count]
                observed, tokens = _layer_observations(forms, streams, number, config, group, measure, data.unseen_experts)
                stats = {prefix + path: one for path, one in observed.items()}
                values |= _quantized(layer, prefix, list(stats), rows, method, stats, fused)
                if tokens is not None:
                    values[_TOKENS] = tokens
            take(_kept(parts, f"layer-{index}", values), prefix)
        paths = [path for path in parameter_paths(layer) if prefix + path in found]
        quantized = with_leaves(layer, {path: found[prefix + path][prefix + path] for path in paths})
        forms = tuple(map(_with_stacked_experts, (quantized, layer)[:count]))
        streams = _kept_streams(parts, "stream", index + 1, _next_streams(forms, streams, number, config))
        if progress is not None:
            progress(index + 1, config.layers)
    if (head := _head_path(config)) in chosen:
        ends = _stored_ends(model)
        stats = _head_observations(ends, streams, config, chosen, measure)
        take(_kept(parts, "head", _quantized(ends, "", [head], rows, method, stats, fused)), "")
    weights = _Found(found)
    return dict(weights) if parts is None else weights


class _Found(Mapping):
    """QArrays by path, each from the part that has it."""

    def __init__(self, parts: Mapping[str, Mapping[str, QArray]]):
        self._parts = parts

    def __getitem__(self, path: str) -> QArray:
        return self._parts[path][path]

    def __contains__(self, path: object) -> bool:
        return path in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _finished(parts: FinishedParts | None, name: str) -> Tensors | None:
    """A finished part."""
    if parts is None:
        return None
    return parts.load(name)


def _kept(parts: FinishedParts | None, name: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values themselves, or a finished part that has them."""
    if parts is None or not values:
        return values
    return parts.save(name, values.items())


def _kept_streams(parts: FinishedParts | None, name: str, index: int, batches: Iterable[Array]) -> Collection[Any]:
    """The residual streams in front of a layer, in batches.

    They are in memory, or in a part that replaces that of the layer before.
    """
    if parts is None:
        return list(batches)
    streams = parts.save(f"{name}-{index}", ((str(i), batch) for i, batch in enumerate(batches)))
    parts.remove(f"{name}-{index - 1}")
    return streams.values()


def _last_streams(parts: FinishedParts | None, name: str, layers: int) -> tuple[int, Collection[Any]]:
    """The number of layers that an earlier run finished, and the residual streams after them."""
    for index in range(layers, 0, -1):
        if (streams := _finished(parts, f"{name}-{index}")) is not None:
            return index, streams.values()
    return 0, ()


def _quantized(
    params: PyTree,
    prefix: str,
    paths: Iterable[str],
    rows: Mapping[str, PlanRow],
    method: AbstractMethod,
    observed: Mapping[str, Observation],
    fused: Mapping[str, tuple[PlanRow, ...]],
) -> dict[str, QArray]:
    """The quantized weights of `paths` that have statistics."""
    leaves = {prefix + path: leaf for path, leaf in parameter_paths(params).items()}
    found: dict[str, QArray] = {}
    for path in paths:
        if path in found or path not in observed:
            continue
        row = rows[path]
        if path in fused:
            weights = {one.path: decoded(leaves[one.path]) for one in fused[path]}
            found |= quantized_together(weights, row, method, observed[path])
        else:
            found[path] = jax.block_until_ready(quantize_row(decoded(leaves[path]), row, method, observed[path]))
    return found


def _check_finite(name: str, products: Sequence[ScaledProduct]) -> None:
    """Refuses statistics and weights with NaN or infinity."""
    parts = {
        f"the weights of the input scaled at {name}": [product.weight for product in products],
        f"the statistics of the input scaled at {name}": [product.observation for product in products],
    }
    if counts := non_finite_counts(parts.items()):
        raise QuantError(non_finite_message(counts, "check the model and the calibration text"))


@dataclasses.dataclass(frozen=True)
class FloatLayer:
    """A layer of the float model on the calibration data. The one after the last layer is the final norm and the head.

    Attributes:
        index: the number of the layer.
        params: its parameters; experts are stacked where they are alike.
        streams: the residual stream before it, in batches `[1, B, T, W]`.
        config: the decoder's configuration.
    """

    index: int
    params: PyTree
    streams: Collection[Any]
    config: DecoderConfig

    @property
    def prefix(self) -> str:
        """What the paths of its parameters begin with: "layers/3/"; "" for the norm and the head."""
        return f"layers/{self.index}/" if self.index < self.config.layers else ""

    @property
    def paths(self) -> list[str]:
        """The paths of its parameters, such as `layers/3/attn/q` and, of all experts, `layers/3/mlp/experts/gate`."""
        return [self.prefix + path for path in parameter_paths(self.params)]

    def statistics(self, measure: Measure, paths: Collection[str], unseen: str = "nearest") -> dict[str, Observation]:
        """The statistics of the inputs of its products.

        Args:
            measure: what is collected.
            paths: the weights, of any layer; those of experts that are stacked here may have a path each.
            unseen: what happens to experts without tokens, see `experts.UNSEEN`.

        Returns:
            The statistics by path, without embeddings that no product contracts, and experts to which no token was routed.
        """
        if not self.prefix:
            return _head_observations(self.params, self.streams, self.config, paths, measure)
        inside = [path.removeprefix(self.prefix) for path in paths if path.startswith(self.prefix)]
        index = jnp.int32(self.index)
        found, _ = _layer_observations((self.params,), self.streams, index, self.config, inside, measure, unseen)
        return {self.prefix + path: one for path, one in found.items()}


def float_layers(
    model: Model,
    windows: Int[np.ndarray, "W T"],
    progress: Progress | None = None,
    parts: FinishedParts | None = None,
) -> Iterator[FloatLayer]:
    """Runs a text through a float decoder, layer by layer.

    One layer's weights are in memory at a time, and without `parts` the residual stream of the whole text.

    Args:
        model: a model that can be run.
        windows: token ids.
        progress: called before the first layer and after each.
        parts: where the residual stream is kept, for a run that resumes this one and to save memory.

    Returns:
        Each layer with its inputs, and the final norm with the head. A run that resumes another begins with the layer that the other
        did not finish.

    Raises:
        QuantError: when a token has no embedding.
        UnsupportedError: when the model cannot be run.
    """
    config = _checked_config(model, windows)
    start, streams = _last_streams(parts, "float-stream", config.layers)
    if start == 0:
        streams = _kept_streams(parts, "float-stream", 0, _first_streams((_stored_tables(model),), windows, config))
    if progress is not None:
        progress(start, config.layers)
    for index in range(start, config.layers):
        layer = _with_stacked_experts(_floats(_stored_layer(model, index)))
        yield FloatLayer(index, layer, streams, config)
        streams = _kept_streams(parts, "float-stream", index + 1, _next_streams((layer,), streams, jnp.int32(index), config))
        if progress is not None:
            progress(index + 1, config.layers)
    yield FloatLayer(config.layers, _floats(_stored_ends(model)), streams, config)


def _checked_config(model: Model, windows: Int[np.ndarray, "W T"]) -> DecoderConfig:
    """The configuration of a model that has embeddings of all tokens."""
    config = model.runnable_config()
    for token in (windows.min(), windows.max()):
        if not 0 <= token < config.vocab:
            raise QuantError(f"the calibration data has token {token}, and {model.name} has {config.vocab} tokens")
    return config


def _stored_layer(model: Model, index: int) -> PyTree:
    """The parameters of one layer as stored; no others are loaded."""
    prefix = f"layers/{index}/"
    paths = [path for path in shapes(model.runnable_config()) if path.startswith(prefix)]
    return tree_from_paths({path.removeprefix(prefix): model.load(path) for path in paths})


def _stored_tables(model: Model) -> PyTree:
    """What gives the first layer its input, as stored: the embeddings of tokens, of positions and of each layer."""
    config = model.runnable_config()
    return {path: model.load(path) for path in shapes(config) if "/" not in path and path not in _ENDS}


def _stored_ends(model: Model) -> PyTree:
    """The final norm and the head as stored, with their biases."""
    config = model.runnable_config()
    names = [path for path in shapes(config) if path in _ENDS]
    return {path: model.load(path) for path in dict.fromkeys((*names, _head_path(config)))}


_ENDS = ("norm", "norm_bias", "head", "head_bias")


def _head_path(config: DecoderConfig) -> str:
    """The path of the weight that gives the logits."""
    return "embed" if config.tied else "head"


def _first_streams(
    tables: tuple[PyTree, ...], windows: Int[np.ndarray, "W T"], config: DecoderConfig
) -> Iterator[Float[Array, "S B T W"]]:
    """The inputs of the first layer in batches, with a residual stream for each of the tables of embeddings."""
    size = max(_BATCH_TOKENS // windows.shape[1], 1)
    for i in range(0, len(windows), size):
        tokens = jnp.asarray(windows[i : i + size])
        yield jnp.stack([_first_stream(params, tokens, config=config) for params in tables])


def _next_streams(
    forms: tuple[PyTree, ...], streams: Iterable[Any], index: Array, config: DecoderConfig
) -> Iterator[Float[Array, "S B T W"]]:
    """The outputs of the forms of a layer, in batches.

    The forms are quantized or float, each for a residual stream of its own.
    """
    return (_layer_outputs(forms, batch, index, config=config) for batch in map(jnp.asarray, streams))


def _head_observations(
    params: PyTree, streams: Iterable[Any], config: DecoderConfig, paths: Collection[str], measure: Measure
) -> dict[str, Observation]:
    """The statistics of the product with the head, if that is among the paths."""
    if _head_path(config) not in paths:
        return {}
    ends, measured = _floats(params), functools.partial(_head_statistics, config=config, measure=measure)
    return _joined(measure, (measured(ends, batch) for batch in map(jnp.asarray, streams)))


def _groups(
    layer: PyTree, streams: Iterable[Any], index: Array, config: DecoderConfig, paths: Collection[str]
) -> list[list[str]]:
    """Paths of one layer in the order of their use; those of products with one input are one group."""
    layer, (x, *_) = _with_stacked_experts(layer), jnp.asarray(next(iter(streams)))
    stacked = _stacked(layer, paths)
    chosen = tuple(dict.fromkeys(stacked.values()))
    groups = input_groups(lambda layer, x: layer_output(layer, x, config, index), layer, (x,), chosen)
    return [[path for path, name in stacked.items() if name in group] for group in groups]


def _stacked(layer: PyTree, paths: Iterable[str]) -> dict[str, str]:
    """The parameter of a layer with stacked experts that each path is, or is a part of."""
    inside = parameter_paths(layer)
    return {path: path if path in inside else EXPERT.sub("experts/", path) for path in paths}


def _layer_observations(
    forms: tuple[PyTree, ...],
    streams: Iterable[Any],
    index: Array,
    config: DecoderConfig,
    paths: Iterable[str],
    measure: Measure,
    unseen: str,
) -> tuple[dict[str, Observation], np.ndarray | None]:
    """The statistics of one layer's products by path, and the tokens of its experts.

    The first of the forms of the layer is as far quantized as it is. With the float layer as a second form, and the float model's
    residual stream as a second stream, cross moments are among them.
    """
    forms = tuple(map(_with_stacked_experts, forms))
    stacked = _stacked(forms[0], paths)
    chosen = tuple(dict.fromkeys(stacked.values()))
    measured = functools.partial(_layer_statistics, config=config, paths=chosen, measure=measure)
    stats, found = _joined(measure, (measured(forms, batch, index) for batch in map(jnp.asarray, streams))), {}
    stats, tokens = with_unseen_experts(stats, measure.folded, unseen, f"layers/{index}")
    for path, name in stacked.items():
        one = stats.get(name)
        if one is not None and (expert := EXPERT.search(path)) and name != path:
            one = jax.tree.map(operator.itemgetter(int(expert[1])), one)
        if one is not None and (one.count is None or np.any(one.count)):
            found[path] = one
    return found, tokens


def _with_stacked_experts(layer: PyTree) -> PyTree:
    """The layer with its experts stacked where they are alike. A token then passes its own experts only.

    Float experts of several dtypes are stacked in float32, so that their statistics are of their own tokens.
    """
    leaves = jax.tree.leaves(layer.get("mlp", {}).get("experts"), is_leaf=is_qarray)
    if not any(map(is_qarray, leaves)) and len({x.dtype for x in leaves}) > 1:
        experts = jax.tree.map(lambda x: x.astype(jnp.float32), layer["mlp"]["experts"])
        layer = {**layer, "mlp": {**layer["mlp"], "experts": experts}}
    return stack_experts({"layers": [layer]})["layers"][0]


def _joined(measure: Measure, batches: Iterable[dict[str, Observation]]) -> dict[str, Observation]:
    """The statistics of all batches."""
    total: dict[str, Any] = {}
    for batch in batches:
        total = {path: measure.joined(total[path], one) if total else one for path, one in batch.items()}
    return total


def _floats(params: PyTree) -> PyTree:
    """The parameters dequantized."""
    return jax.tree.map(lambda value: jnp.asarray(decoded(value)), params, is_leaf=is_qarray)


@functools.partial(jax.jit, static_argnames="config")
def _first_stream(params: PyTree, tokens: Int[Array, "B T"], *, config: DecoderConfig) -> Float[Array, "B T W"]:
    return transparent(lambda params: first_stream(params, tokens, config))(params)


@functools.partial(jax.jit, static_argnames=("config", "paths", "measure"))
def _layer_statistics(
    forms: tuple[PyTree, ...],
    streams: Float[Array, "S B T W"],
    index: Int[Array, ""],
    *,
    config: DecoderConfig,
    paths: tuple[str, ...],
    measure: Measure,
) -> dict[str, Any]:
    """The statistics of the products of one layer, see `_layer_observations`."""

    def run(layer: PyTree, x: Array) -> Array:
        return layer_output(layer, x, config, index)

    return _measured(run, forms, paths, streams, measure)


@functools.partial(jax.jit, static_argnames="config")
def _layer_outputs(
    forms: tuple[PyTree, ...], streams: Float[Array, "S B T W"], index: Int[Array, ""], *, config: DecoderConfig
) -> Float[Array, "S B T W"]:
    run = transparent(lambda layer, x: layer_output(layer, x, config, index))
    return jnp.stack([run(layer, x) for layer, x in zip(forms, streams, strict=True)])


@functools.partial(jax.jit, static_argnames=("config", "measure"))
def _head_statistics(
    params: PyTree, streams: Float[Array, "S B T W"], *, config: DecoderConfig, measure: Measure
) -> dict[str, Any]:
    """The statistics of the product with the head."""
    forms = (params,) * len(streams)
    return _measured(lambda params, x: output_logits(params, x, config), forms, (_head_path(config),), streams, measure)


def _measured(
    fn: Callable[[PyTree, Array], Array],
    forms: tuple[PyTree, ...],
    paths: tuple[str, ...],
    streams: Float[Array, "S B T W"],
    measure: Measure,
) -> dict[str, Any]:
    """The statistics of the products of some parameters.

    The products are those in `fn(params, x)`, for the first stream as `x`. A second one is the float model's, for cross moments.
    """

    def run(params: PyTree, x: Array, measure: AbstractMeasure) -> dict[str, Any]:
        notes = Measurements(measure)
        evaluated(fn, "dequantize", None, calibration_rules(notes))(observed(params, paths, notes), x)
        return notes.values

    first, *exact = zip(forms, streams, strict=True)
    found = run(*first, measure)
    if not exact:
        return found
    return with_cross(found, run(*exact[0], Inputs()), run(*first, Inputs()))
