"""How checkpoints name the parameters of a Llama, and how those names map to the paths of our tree, both ways."""

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
    """One naming of a Llama's parameters.

    Attributes:
        title: what the naming is called in messages.
        names: our path -> their name, `{}` standing for the number of the layer in both.
        transposed: the paths whose matrices they keep `[in, out]`.
        derived: a pattern of names that hold nothing of their own (buffers that follow from the configuration).
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
        return _translated(
            name, {theirs: ours for ours, theirs in self.names.items()}, f"{self.title} name of a Llama's parameter"
        )

    def is_derived(self, name: str) -> bool:
        """Whether the name holds nothing of its own."""
        return re.fullmatch(self.derived, name) is not None

    def is_transposed(self, path: str) -> bool:
        """Whether they keep the matrix of this path `[in, out]`."""
        return _pattern(path)[0] in self.transposed


_LAYER = ("attn/norm", "attn/q", "attn/k", "attn/v", "attn/o", "mlp/norm", "mlp/gate", "mlp/up", "mlp/down")


def _table(
    title: str, embed: str, norm: str, head: str | None, layer: str, parts: tuple[str, ...], **more: Any
) -> NameTable:
    """A table of the names outside the layers and of those in a layer, in the order of `_LAYER`."""
    names = {
        "embed": embed,
        **{f"layers/{{}}/{ours}": layer + theirs for ours, theirs in zip(_LAYER, parts, strict=True)},
    }
    return NameTable(title, {**names, "norm": norm, **({} if head is None else {"head": head})}, **more)


GGUF = _table(
    "GGUF",
    "token_embd.weight",
    "output_norm.weight",
    "output.weight",
    "blk.{}.",
    tuple(
        f"{part}.weight"
        for part in (
            "attn_norm",
            "attn_q",
            "attn_k",
            "attn_v",
            "attn_output",
            "ffn_norm",
            "ffn_gate",
            "ffn_up",
            "ffn_down",
        )
    ),
)
"""The names of a GGUF file. Its rows of q and k are ordered for the "interleaved" layout of rotary positions."""

HUGGING_FACE = _table(
    "Hugging Face",
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
    "model.layers.{}.",
    tuple(
        f"{part}.weight"
        for part in (
            "input_layernorm",
            *(f"self_attn.{p}_proj" for p in "qkvo"),
            "post_attention_layernorm",
            *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
        )
    ),
    derived=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)
"""The names of a `LlamaForCausalLM`, whose rotary positions have the "half" layout."""

GLASSLLM = _table(
    "glassllm",
    "E",
    "norm_f.gamma",
    None,
    "blocks.{}.",
    ("norm1.gamma", *(f"attn.W_{p}" for p in "QKVO"), "norm2.gamma", "ffn.W1", "ffn.W3", "ffn.W2"),
    transposed=frozenset(f"layers/{{}}/{part}" for part in _LAYER if not part.endswith("norm")),
    derived="__config__",
)
"""The names of a glassllm `.npz`, whose matrices are `[in, out]` and whose rotary positions are "interleaved"."""


def shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by its path.

    Args:
        config: the network.

    Returns:
        The shapes, in the order of the tree.

    >>> shapes(LlamaConfig(vocab=64, layers=1, width=16, heads=4, kv_heads=2, head_dim=4, hidden=24))["layers/0/attn/k"]
    (8, 16)
    """
    D, F = config.width, config.hidden
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = ((D,), (q, D), (kv, D), (kv, D), (D, q), (D,), (F, D), (F, D), (D, F))
    of_layers = {f"layers/{i}/{part}": s for i in range(config.layers) for part, s in zip(_LAYER, layer, strict=True)}
    head = {} if config.tied else {"head": (config.vocab, D)}
    return {"embed": (config.vocab, D), **of_layers, "norm": (D,), **head}


def check_layers(config: LlamaConfig, count: int) -> None:
    """Refuses a configuration of more layers than a checkpoint can have, before a name is built for each.

    Args:
        config: the network.
        count: how many arrays the checkpoint has.

    Raises:
        QuantError: when there are fewer arrays than layers.
    """
    if config.layers > count:
        raise QuantError(
            f"the configuration has {config.layers:,} layers, but the checkpoint has {count:,} tensors; is it complete, and the "
            "configuration its own?"
        )


def params_from_named(arrays: Mapping[str, Any], table: NameTable, config: LlamaConfig) -> Params:
    """The tree of parameters of a checkpoint's arrays, each with its shape checked.

    Args:
        arrays: arrays or QArrays by the names of `table`; they are not copied, at most transposed.
        table: how they are named.
        config: the network. When it is tied, a head among the arrays is the embedding again, and is left out.

    Returns:
        The tree that `forward` takes.

    Raises:
        QuantError: for a name that a Llama does not have, one that is missing, or a shape that does not fit the
            configuration.
    """
    check_layers(config, len(arrays))
    expected = shapes(config)
    flat: dict[str, Any] = {}
    for name, array in arrays.items():
        if table.is_derived(name):
            continue
        path = table.path(name)
        if path == "head" and config.tied:
            continue
        array = array.T if table.is_transposed(path) else array
        if path not in expected:
            raise QuantError(
                f"tensor {name!r} is {path}, but the model has {config.layers} layers; is the configuration its own?"
            )
        if tuple(array.shape) != expected[path]:
            raise QuantError(
                f"tensor {name!r} ({path}) has shape {tuple(array.shape)}, the configuration makes it {expected[path]}"
            )
        flat[path] = array
    missing = [table.name(path) for path in expected if path not in flat]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise QuantError(f"the {table.title} checkpoint lacks {', '.join(missing[:3])}{more}; is it complete?")
    return params_from_paths(flat, config)


def named_from_params(params: Params, table: NameTable, config: LlamaConfig) -> dict[str, Any]:
    """The arrays of a tree by the names of `table`: what `params_from_named` reads back.

    Args:
        params: the tree.
        table: the names of a container.
        config: the network.

    Returns:
        The arrays by name.
    """
    return {
        table.name(path): array.T if table.is_transposed(path) else array
        for path, array in paths_of_params(params, config).items()
    }


def params_from_paths(flat: Mapping[str, Any], config: LlamaConfig) -> Params:
    """The tree of arrays that are given by path, such as `layers/0/attn/q`.

    Args:
        flat: the arrays by path.
        config: the network.

    Returns:
        The tree.
    """

    def block(i: int, kind: str) -> dict[str, Any]:
        return {part.split("/")[1]: flat[f"layers/{i}/{part}"] for part in _LAYER if part.startswith(kind)}

    layers = [{"attn": block(i, "attn"), "mlp": block(i, "mlp")} for i in range(config.layers)]
    head = {} if config.tied else {"head": flat["head"]}
    return {"embed": flat["embed"], "layers": layers, "norm": flat["norm"], **head}


def paths_of_params(params: Params, config: LlamaConfig) -> dict[str, Any]:
    """The arrays of a tree of unstacked layers by path, in the order of `shapes`.

    Args:
        params: the tree, its layers a list.
        config: the network.

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
    """The text with its number (of a layer) replaced by `{}`, and the number."""
    found = re.search(r"(?<=[/.])\d+(?=[/.])", text)
    return (text, "") if found is None else (text[: found.start()] + "{}" + text[found.end() :], found.group())


def _translated(text: str, table: Mapping[str, str], kind: str) -> str:
    """What the table has for the text, with its number put in."""
    pattern, number = _pattern(text)
    if pattern not in table:
        raise QuantError(f"unknown {kind} {text!r}; {near_names(pattern, tuple(table))}")
    return table[pattern].replace("{}", number)
