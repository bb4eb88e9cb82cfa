"""Maps checkpoint names to pytree paths and back."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .._registry import near_names
from ..errors import QuantError
from .config import DecoderConfig
from .layer import Params
from .part_configs import Experts, LatentAttention, LinearAttention, Mamba2, ShortConvolution


@dataclasses.dataclass(frozen=True)
class NameTable:
    """A naming convention of a decoder's parameters.

    Attributes:
        title: its name in messages.
        names: our path -> their name; `{}` is the number of the layer, a second one that of the expert, in both. A path with its numbers
            comes before such a pattern.
        transposed: the paths whose weights are stored `[in, out]`.
        derived: a pattern of buffers that the decoder does not read, such as frequencies and ranges of a cache.
        others: a pattern of the tensors of other parts of the model, such as a vision tower.
    """

    title: str
    names: Mapping[str, str]
    transposed: frozenset[str] = frozenset()
    derived: str = r"(?!)"
    others: str = r"(?!)"

    def __hash__(self) -> int:
        return hash((self.title, tuple(self.names.items())))

    def name(self, path: str) -> str:
        """Their name of one of our paths.

        >>> from fewbit.models import HUGGING_FACE
        >>> HUGGING_FACE.name("layers/3/attn/q")
        'model.layers.3.self_attn.q_proj.weight'
        """
        return _translated(path, self.names, f"parameter path of a decoder (to {self.title} names)")

    def path(self, name: str) -> str:
        """Our path of one of their names.

        >>> from fewbit.models import GGUF
        >>> GGUF.path("blk.3.attn_q.weight")
        'layers/3/attn/q'
        """
        paths = {theirs: ours for ours, theirs in self.names.items()}
        return _translated(name, paths, f"{self.title} name of a decoder's parameter")

    def is_derived(self, name: str) -> bool:
        """Whether the name is a buffer that the decoder does not read: computed from the configuration, or a cache's range."""
        return re.fullmatch(self.derived, name) is not None

    def is_other(self, name: str) -> bool:
        """Whether the name is a tensor of another part of the model."""
        return re.fullmatch(self.others, name) is not None

    def is_transposed(self, path: str) -> bool:
        """Whether the weight of this path is stored `[in, out]`."""
        return _pattern(path)[0] in self.transposed

    def oriented(self, path: str, array: Any) -> Any:
        """The array, transposed if it is stored `[in, out]`; its own inverse."""
        if self.is_transposed(path):
            return array.T
        return array


def shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by path.

    Args:
        config: the configuration.

    Returns:
        The shapes, in the order of the pytree.

    >>> shapes(DecoderConfig(vocab=64, layers=1, width=16, heads=4, kv_heads=2, head_dim=4, hidden=24))["layers/0/attn/k"]
    (8, 16)
    """
    D = config.width
    result: dict[str, tuple[int, ...]] = {"embed": (config.vocab, D)}
    if config.positions:
        result["position_embed"] = (config.positions, D)
    if (inputs := config.per_layer) is not None:
        width = config.layers * inputs.width
        result["per_layer_embed"] = (inputs.vocab, width)
        result |= {"per_layer_projection": (width, D), "per_layer_norm": (inputs.width,)}
    for i in range(config.layers):
        attention = _attention_shapes(config, i) if config.has_attention(i) else ()
        mlp = _mlp_shapes(config, i) if config.has_mlp(i) else ()
        for part, shape in (*attention, *mlp, *_other_shapes(config, i)):
            path = f"layers/{i}/{part}"
            result[path] = shape
            if config.scales_input_of(path):
                result[f"{path}_input_scale"] = (*shape[:-2], shape[contraction_axis(path, config)])
    result |= dict(_norm_shapes("norm", config))
    if not config.tied:
        result["head"] = (config.vocab, D)
    if config.head_bias:
        result["head_bias"] = (config.vocab,)
    return result


Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _norm_shapes(path: str, config: DecoderConfig) -> Shapes:
    """The shapes of a norm of the residual stream."""
    yield path, (config.width,)
    if config.norm_bias:
        yield f"{path}_bias", (config.width,)


def _attention_shapes(config: DecoderConfig, layer: int) -> Shapes:
    """The shapes of the attention's parameters, by the path within a layer."""
    D, part = config.width, config.recurrent_of(layer)
    if config.norms != "post":
        yield from _norm_shapes("attn/norm", config)
    if isinstance(part, LinearAttention):
        yield from _linear_shapes(D, part)
    elif isinstance(part, Mamba2):
        yield from _mamba_shapes(D, part)
    elif part is not None:
        yield from _short_conv_shapes(part)
    else:
        yield from _softmax_shapes(config, layer)
    if config.norms != "pre":
        yield "attn/post_norm", (D,)


def _softmax_shapes(config: DecoderConfig, layer: int) -> Shapes:
    """The shapes of the parameters of softmax attention."""
    has_keys, is_full = config.has_keys(layer), config.full is not None and config.kind_of(layer) == 1
    has_values = has_keys and not (is_full and config.full is not None and config.full.keys_are_values)
    config = config.kinds[config.kind_of(layer)]
    D, h = config.width, config.head_dim
    widths = {"q": config.query_width, "k": config.kv_heads * h, "v": config.kv_heads * h}
    if not has_values:
        del widths["v"]
    if not has_keys:
        del widths["k"]
    if config.latent is not None:
        yield from _latent_shapes(config, config.latent)
    elif config.fused:
        yield "attn/q+k+v", (sum(widths.values()), D)
    else:
        yield from ((f"attn/{name}", (width, D)) for name, width in widths.items())
    if config.qkv_bias and config.fused:
        yield "attn/q+k+v_bias", (sum(widths.values()),)
    elif config.qkv_bias and config.latent is None:
        yield from ((f"attn/{name}_bias", (width,)) for name, width in widths.items())
    if config.qk_norm not in ("none", "without_gain"):
        heads = {"q": config.heads, "k": config.kv_heads} if has_keys else {"q": config.heads}
        yield from ((f"attn/{name}_norm", (n * h if config.qk_norm == "projection" else h,)) for name, n in heads.items())
    if config.separate_gate:
        yield "attn/gate", (config.heads * h, D)
    if config.sinks:
        yield "attn/sinks", (config.heads,)
    if config.sub_norms:
        yield "attn/sub_norm", (config.heads * config.value_dim,)
    yield "attn/o", (D, config.heads * config.value_dim)
    if config.o_bias:
        yield "attn/o_bias", (D,)


def _latent_shapes(config: DecoderConfig, latent: LatentAttention) -> Shapes:
    """The shapes of the projections of multi-head latent attention."""
    D, H, h, rotated = config.width, config.heads, config.head_dim, config.rotary_dim
    if latent.query_rank:
        yield from (("attn/q_a", (latent.query_rank, D)), ("attn/q_a_norm", (latent.query_rank,)))
        yield "attn/q_b", (H * h, latent.query_rank)
    else:
        yield "attn/q", (H * h, D)
    yield from (("attn/kv_a", (latent.rank + rotated, D)), ("attn/kv_a_norm", (latent.rank,)))
    if latent.split:
        yield from (("attn/k_b", (H, latent.rank, h - rotated)), ("attn/v_b", (H, latent.value_dim, latent.rank)))
    else:
        yield "attn/kv_b", (H * (h - rotated + latent.value_dim), latent.rank)
    if config.qkv_bias:
        if latent.query_rank:
            yield "attn/q_a_bias", (latent.query_rank,)
        yield "attn/kv_a_bias", (latent.rank + rotated,)


def _linear_shapes(D: int, linear: LinearAttention) -> Shapes:
    """The shapes of the parameters of linear attention."""
    M, values = linear.value_heads, linear.values_width
    if linear.layout == "by_key_head":
        yield "attn/qkvz", (linear.channels + values, D)
    else:
        yield from (("attn/qkv", (linear.channels, D)), ("attn/z", (values, D)))
    if linear.layout in ("by_key_head", "gguf"):
        yield "attn/ba", (2 * M, D)
    else:
        yield from (("attn/beta", (M, D)), ("attn/alpha", (M, D)))
    one = () if linear.is_gguf else (1,)
    yield from (("attn/conv1d", (linear.channels, *one, linear.kernel)), ("attn/dt_bias", (M,)))
    yield "attn/A" if linear.is_gguf else "attn/A_log", (M,)
    yield from (("attn/out_norm", (linear.value_dim,)), ("attn/out", (D, values)))


def _mamba_shapes(D: int, mamba: Mamba2) -> Shapes:
    """The shapes of the parameters of a state space layer."""
    M, C, width = mamba.heads, mamba.channels, mamba.width
    yield "attn/in", (width + C + M, D)
    yield "attn/conv1d", (C, mamba.kernel) if mamba.is_gguf else (C, 1, mamba.kernel)
    if mamba.conv_bias:
        yield "attn/conv1d_bias", (C,)
    yield "attn/dt_bias", (M,)
    if mamba.is_gguf:
        yield from (("attn/A", (M, 1)), ("attn/D", (M, 1)), ("attn/out_norm", (mamba.groups, width // mamba.groups)))
    else:
        yield from (("attn/A_log", (M,)), ("attn/D", (M,)), ("attn/out_norm", (width,)))
    yield "attn/out", (D, width)
    if mamba.bias:
        yield from (("attn/in_bias", (width + C + M,)), ("attn/out_bias", (D,)))


def _short_conv_shapes(part: ShortConvolution) -> Shapes:
    """The shapes of the parameters of a gated short convolution."""
    C, one = part.channels, () if part.is_gguf else (1,)
    yield from (("attn/in", (3 * C, C)), ("attn/conv1d", (C, *one, part.kernel)), ("attn/out", (C, C)))
    if part.bias:
        yield from (("attn/in_bias", (3 * C,)), ("attn/conv1d_bias", (C,)), ("attn/out_bias", (C,)))


def _mlp_shapes(config: DecoderConfig, layer: int) -> Shapes:
    """The shapes of the feed-forward block's or the experts' parameters, by the path within a layer."""
    D, F = config.width, config.hidden_of(layer)
    experts = config.experts_of(layer)
    if config.norms != "post" and config.parallel != "one_norm":
        yield from _norm_shapes("mlp/norm", config)
    if experts is not None and not experts.beside_dense:
        yield from _expert_shapes("mlp", experts, config, is_joined=config.fused_mlp)
    else:
        yield from _block_shapes("mlp", D, F, gated=config.gated, is_joined=config.fused or config.fused_mlp)
    if config.mlp_bias and (experts is None or experts.beside_dense):
        names = {"gate": F, "up": F, "down": D} if config.gated else {"up": F, "down": D}
        yield from ((f"mlp/{name}_bias", (width,)) for name, width in names.items())
    if config.activation == "xielu":
        yield from (("mlp/alpha_p", (1,)), ("mlp/alpha_n", (1,)), ("mlp/beta", ()), ("mlp/eps", ()))
    if config.sub_norms:
        yield "mlp/sub_norm", (F,)
    if config.norms != "pre":
        yield "mlp/post_norm", (D,)


def _other_shapes(config: DecoderConfig, layer: int) -> Shapes:
    """The shapes of experts beside a dense block, of per-layer inputs and of the layer's scale, by the path within a layer."""
    D, experts = config.width, config.experts_of(layer)
    if experts is not None and experts.beside_dense:
        yield from (("mlp/out_norm", (D,)), ("moe/norm", (D,)), ("moe/router_norm", (D,)))
        yield from _expert_shapes("moe", experts, config)
        if experts.router_scale:
            yield "moe/router_scale", (experts.count,)
        yield "moe/out_norm", (D,)
    if config.per_layer is not None:
        P = config.per_layer.width
        yield from (("per_layer/gate", (P, D)), ("per_layer/projection", (D, P)))
        if config.norms != "pre":
            yield "per_layer/post_norm", (D,)
    if config.layer_scale:
        yield "scale", (1,)


def _block_shapes(path: str, D: int, F: int, *, gated: bool = True, is_joined: bool = False) -> Shapes:
    """The shapes of a feed-forward block."""
    if not gated:
        yield f"{path}/up", (F, D)
    elif is_joined:
        yield f"{path}/gate+up", (2 * F, D)
    else:
        yield from ((f"{path}/gate", (F, D)), (f"{path}/up", (F, D)))
    yield f"{path}/down", (D, F)


def _expert_shapes(at: str, experts: Experts, config: DecoderConfig, *, is_joined: bool = False) -> Shapes:
    """The shapes of a mixture of experts, by its layout; `is_joined` is whether gate and up of the shared expert are one leaf."""
    E, F, path, width, gated = experts.count, experts.hidden, f"{at}/experts", config.width, config.gated
    D = experts.latent or width
    yield f"{at}/router", (E, width)
    if experts.latent:
        yield from ((f"{at}/latent_in", (D, width)), (f"{at}/latent_out", (width, D)))
    if experts.bias:
        yield f"{at}/router_bias", (E,)
    if experts.has_correction:
        yield f"{at}/router_correction_bias", (1, E) if experts.correction_row else (E,)
    match experts.layout:
        case "separate":
            for e in range(E):
                yield from _block_shapes(f"{path}/{e}", D, F, gated=gated)
        case "stacked":
            yield from ((name, (E, *shape)) for name, shape in _block_shapes(path, D, F, gated=gated))
        case "joined":
            yield from ((f"{path}/gate+up", (E, 2 * F, D)), (f"{path}/down", (E, D, F)))
        case "joined_in_out" | "interleaved":
            yield from ((f"{path}/gate+up", (E, D, 2 * F)), (f"{path}/down", (E, F, D)))
    if experts.bias:
        names = {"gate+up": 2 * F} if experts.is_in_out or experts.layout == "joined" else {"gate": F, "up": F}
        yield from ((f"{path}/{name}_bias", (E, size)) for name, size in {**names, "down": D}.items())
    if experts.shared_hidden:
        yield from _block_shapes(f"{at}/shared", width, experts.shared_hidden, gated=gated, is_joined=is_joined)
        if experts.shared_gate:
            yield f"{at}/shared_expert_gate", (1, width)


def check_layers(config: DecoderConfig, count: int) -> None:
    """Refuses a configuration with more layers than the checkpoint has arrays.

    The same holds for experts with matrices of their own.

    Args:
        config: the configuration.
        count: the number of arrays.

    Raises:
        QuantError: when there are fewer arrays.
    """
    check_layer_count(config.layers, count)
    experts = config.experts
    if experts is not None and experts.layout == "separate":
        check_layer_count(experts.count * (len(experts.layers) or config.layers), count, what="experts")


def check_layer_count(layers: int, count: int, least: int = 0, *, what: str = "layers") -> None:
    """Raises QuantError when there are more layers than `count` tensors, and than `least`."""
    if layers > max(count, least):
        raise QuantError(
            f"the configuration has {layers:,} {what}, but the checkpoint has {count:,} tensors; check that it is "
            "complete and the configuration its own"
        )


def names_by_path(stored: Mapping[str, tuple[int, ...]], table: NameTable, config: DecoderConfig) -> dict[str, str]:
    """The tensor name of each parameter path, in the order of `shapes`.

    Args:
        stored: the shape of each tensor by the names of `table`.
        table: their naming convention.
        config: the configuration. If it is tied, a head among the tensors repeats the embedding and is dropped.

    Returns:
        The names by path.

    Raises:
        QuantError: for an unknown or missing name, or a shape that contradicts the configuration.
    """
    check_layers(config, len(stored))
    expected = shapes(config)
    found: dict[str, str] = {}
    for name, shape in stored.items():
        if table.is_derived(name) or table.is_other(name) or is_extra(name, config):
            continue
        path = table.path(name)
        if path == "head" and config.tied:
            continue
        if table.is_transposed(path):
            shape = shape[::-1]
        if path not in expected:
            raise QuantError(
                f"tensor {name!r} is {path}, but the model has {config.layers} layers, and none with such a parameter; check "
                "that the configuration is its own"
            )
        if shape != expected[path]:
            raise QuantError(f"tensor {name!r} ({path}) has shape {shape}, but the configuration makes it {expected[path]}")
        found[path] = name
    missing = [table.name(path) for path in expected if path not in found]
    if missing:
        listed = ", ".join(missing[:3])
        if len(missing) > 3:
            listed += f" and {len(missing) - 3} more"
        raise QuantError(f"the {table.title} checkpoint lacks {listed}; check that it is complete")
    return {path: found[path] for path in expected}


def is_extra(name: str, config: DecoderConfig) -> bool:
    """Whether a tensor belongs to a layer for multi-token prediction, after the last one that runs.

    Args:
        name: its name in the checkpoint.
        config: the configuration.
    """
    _, numbers = _pattern(name)
    return bool(numbers) and config.layers <= int(numbers[0]) < config.layers + config.extra_layers


def params_from_named(arrays: Mapping[str, Any], table: NameTable, config: DecoderConfig) -> Params:
    """Builds the pytree of parameters from a checkpoint's arrays, and checks shapes.

    Args:
        arrays: arrays or QArrays by the names of `table`; they are not copied, at most transposed.
        table: their naming convention.
        config: the configuration. If it is tied, a head among the arrays repeats the embedding and is dropped.

    Returns:
        The pytree for `forward`.

    Raises:
        QuantError: for an unknown or missing name, or a shape that contradicts the configuration.
    """
    names = names_by_path({name: tuple(array.shape) for name, array in arrays.items()}, table, config)
    return params_from_paths({path: table.oriented(path, arrays[name]) for path, name in names.items()}, config)


def named_from_params(params: Params, table: NameTable, config: DecoderConfig) -> dict[str, Any]:
    """The arrays of a pytree by the names of `table`; inverse of `params_from_named`.

    Args:
        params: the pytree.
        table: the naming convention of a container.
        config: the configuration.

    Returns:
        The arrays by name.
    """
    return {table.name(path): table.oriented(path, array) for path, array in paths_of_params(params, config).items()}


def params_from_paths(flat: Mapping[str, Any], config: DecoderConfig) -> Params:
    """The pytree of arrays given by path, such as `layers/0/attn/q`.

    Args:
        flat: the arrays by path.
        config: the configuration.

    Returns:
        The pytree.
    """
    return tree_from_paths({path: flat[path] for path in shapes(config)})


def tree_from_paths(flat: Mapping[str, Any]) -> Params:
    """The pytree of arrays given by path, such as those of one layer, `attn/q`.

    Args:
        flat: the arrays by path.

    Returns:
        The pytree.
    """
    tree: Params = {}
    for path, leaf in flat.items():
        node, steps = tree, path.split("/")
        for step in steps[:-1]:
            node = node.setdefault(step, {})
        node[steps[-1]] = leaf
    return _with_lists(tree)


def _with_lists(node: Any) -> Any:
    """The tree with lists in place of dictionaries whose keys are numbers."""
    if not isinstance(node, dict):
        return node
    children = {name: _with_lists(child) for name, child in node.items()}
    if all(name.isdigit() for name in children):
        return list(children.values())
    return children


def contraction_axis(path: str, config: DecoderConfig) -> int:
    """The contraction axis of a weight. It is -1 of `[out, in]`, and -2 of experts `[E, in, out]`."""
    experts = config.experts
    return -2 if experts is not None and experts.is_in_out and "/experts/" in path else -1


def paths_of_params(params: Params, config: DecoderConfig) -> dict[str, Any]:
    """The arrays of a pytree by path, in the order of `shapes`.

    Args:
        params: the pytree, its layers a list.
        config: the configuration.

    Returns:
        The arrays by path.
    """

    def at(path: str) -> Any:
        node: Any = params
        for step in path.split("/"):
            node = node[int(step)] if isinstance(node, list) else node[step]
        return node

    return {path: at(path) for path in shapes(config)}


def _pattern(text: str) -> tuple[str, list[str]]:
    """The text with its layer and expert numbers replaced by `{}`, and the numbers."""
    return _NUMBER.sub("{}", text), _NUMBER.findall(text)


_NUMBER = re.compile(r"(?<=[/.])\d+(?=[/.])")


def _translated(text: str, table: Mapping[str, str], kind: str) -> str:
    """The table's entry for the text itself, or for its pattern, with the numbers filled in."""
    if text in table:
        return table[text]
    pattern, numbers = _pattern(text)
    if pattern not in table:
        raise QuantError(f"unknown {kind} {text!r}; {near_names(pattern, tuple(table))}")
    return table[pattern].format(*numbers)
