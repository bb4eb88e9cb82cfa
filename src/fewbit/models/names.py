"""Maps checkpoint names to pytree paths and back."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from .._registry import near_names
from ..errors import QuantError
from .config import LlamaConfig
from .llama import Params


@dataclasses.dataclass(frozen=True)
class NameTable:
    """A naming convention of a Llama's parameters.

    Attributes:
        title: its name in messages.
        names: our path -> their name; `{}` is the layer number in both.
        transposed: the paths whose weights are stored `[in, out]`.
        derived: a pattern of buffers that are computed from the configuration.
    """

    title: str
    names: Mapping[str, str]
    transposed: frozenset[str] = frozenset()
    derived: str = r"(?!)"

    def __hash__(self) -> int:
        return hash((self.title, tuple(self.names.items())))

    def name(self, path: str) -> str:
        """Their name of one of our paths.

        >>> HUGGING_FACE.name("layers/3/attn/q")
        'model.layers.3.self_attn.q_proj.weight'
        """
        return _translated(path, self.names, f"parameter path of a Llama (to {self.title} names)")

    def path(self, name: str) -> str:
        """Our path of one of their names.

        >>> GGUF.path("blk.3.attn_q.weight")
        'layers/3/attn/q'
        """
        paths = {theirs: ours for ours, theirs in self.names.items()}
        return _translated(name, paths, f"{self.title} name of a Llama's parameter")

    def is_derived(self, name: str) -> bool:
        """Whether the name is a buffer computed from the configuration."""
        return re.fullmatch(self.derived, name) is not None

    def is_transposed(self, path: str) -> bool:
        """Whether the weight of this path is stored `[in, out]`."""
        return _pattern(path)[0] in self.transposed

    def oriented(self, path: str, array: Any) -> Any:
        """The array, transposed if it is stored `[in, out]`; its own inverse."""
        if self.is_transposed(path):
            return array.T
        return array


_LAYER = ("attn/norm", "attn/q", "attn/k", "attn/v", "attn/o", "mlp/norm", "mlp/gate", "mlp/up", "mlp/down")


def _table(title: str, outside: dict[str, str], layer: str, parts: str, **options: Any) -> NameTable:
    """A table of the names outside the layers, and of the parts of a layer in the order of `_LAYER`."""
    in_layers = {
        f"layers/{{}}/{ours}": layer.format("{}", theirs) for ours, theirs in zip(_LAYER, parts.split(), strict=True)
    }
    return NameTable(title, {"embed": outside["embed"], **in_layers, **outside}, **options)


GGUF = _table(
    "GGUF",
    {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"},
    "blk.{}.{}.weight",
    "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down",
)
"""The names of a GGUF file. Its rows of q and k are ordered for the "interleaved" layout of rotary embedding."""

HUGGING_FACE = _table(
    "Hugging Face",
    {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"},
    "model.layers.{}.{}.weight",
    "input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj "
    "post_attention_layernorm mlp.gate_proj mlp.up_proj mlp.down_proj",
    derived=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)
"""The names of a `LlamaForCausalLM`, whose rotary embedding has the "half" layout."""

GLASSLLM = _table(
    "glassllm",
    {"embed": "E", "norm": "norm_f.gamma"},
    "blocks.{}.{}",
    "norm1.gamma attn.W_Q attn.W_K attn.W_V attn.W_O norm2.gamma ffn.W1 ffn.W3 ffn.W2",
    transposed=frozenset(f"layers/{{}}/{part}" for part in _LAYER if not part.endswith("norm")),
    derived="__config__",
)
"""The names of a glassllm `.npz`: weights are `[in, out]`, rotary embedding is "interleaved"."""


def shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by path.

    Args:
        config: the configuration.

    Returns:
        The shapes, in the order of the pytree.

    >>> shapes(LlamaConfig(vocab=64, layers=1, width=16, heads=4, kv_heads=2, head_dim=4, hidden=24))["layers/0/attn/k"]
    (8, 16)
    """
    D, F = config.width, config.hidden
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = ((D,), (q, D), (kv, D), (kv, D), (D, q), (D,), (F, D), (F, D), (D, F))
    of_layers = {f"layers/{i}/{part}": s for i in range(config.layers) for part, s in zip(_LAYER, layer, strict=True)}
    result = {"embed": (config.vocab, D), **of_layers, "norm": (D,)}
    if not config.tied:
        result["head"] = (config.vocab, D)
    return result


def check_layers(config: LlamaConfig, count: int) -> None:
    """Refuses a configuration with more layers than the checkpoint has arrays.

    Args:
        config: the configuration.
        count: the number of arrays.

    Raises:
        QuantError: when there are fewer arrays than layers.
    """
    if config.layers > count:
        raise QuantError(
            f"the configuration has {config.layers:,} layers, but the checkpoint has {count:,} tensors; check that it is "
            "complete and the configuration its own"
        )


def names_by_path(stored: Mapping[str, tuple[int, ...]], table: NameTable, config: LlamaConfig) -> dict[str, str]:
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
        if table.is_derived(name):
            continue
        path = table.path(name)
        if path == "head" and config.tied:
            continue
        if table.is_transposed(path):
            shape = shape[::-1]
        if path not in expected:
            raise QuantError(
                f"tensor {name!r} is {path}, but the model has {config.layers} layers; check that the configuration is its own"
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


def params_from_named(arrays: Mapping[str, Any], table: NameTable, config: LlamaConfig) -> Params:
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


def named_from_params(params: Params, table: NameTable, config: LlamaConfig) -> dict[str, Any]:
    """The arrays of a pytree by the names of `table`; inverse of `params_from_named`.

    Args:
        params: the pytree.
        table: the naming convention of a container.
        config: the configuration.

    Returns:
        The arrays by name.
    """
    return {table.name(path): table.oriented(path, array) for path, array in paths_of_params(params, config).items()}


def params_from_paths(flat: Mapping[str, Any], config: LlamaConfig) -> Params:
    """The pytree of arrays given by path, such as `layers/0/attn/q`.

    Args:
        flat: the arrays by path.
        config: the configuration.

    Returns:
        The pytree.
    """

    def block(i: int, kind: str) -> dict[str, Any]:
        return {part.split("/")[1]: flat[f"layers/{i}/{part}"] for part in _LAYER if part.startswith(kind)}

    layers = [{"attn": block(i, "attn"), "mlp": block(i, "mlp")} for i in range(config.layers)]
    params = {"embed": flat["embed"], "layers": layers, "norm": flat["norm"]}
    if not config.tied:
        params["head"] = flat["head"]
    return params


def paths_of_params(params: Params, config: LlamaConfig) -> dict[str, Any]:
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


def _pattern(text: str) -> tuple[str, str]:
    """The text with its layer number replaced by `{}`, and the number."""
    found = re.search(r"(?<=[/.])\d+(?=[/.])", text)
    if found is None:
        return text, ""
    return text[: found.start()] + "{}" + text[found.end() :], found.group()


def _translated(text: str, table: Mapping[str, str], kind: str) -> str:
    """The table's entry for the text, with its layer number filled in."""
    pattern, number = _pattern(text)
    if pattern not in table:
        raise QuantError(f"unknown {kind} {text!r}; {near_names(pattern, tuple(table))}")
    return table[pattern].replace("{}", number)
