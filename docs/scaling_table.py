"""Writes the tables of docs/scaling.md: `python docs/scaling_table.py`.

The bytes are those of the library's own plans, of shapes alone: no weight is made.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import P

import fewbit as fb
from fewbit.models import DecoderConfig, config_from_hf, forward, params_from_paths, shapes

PAGE = Path(__file__).parent / "scaling.md"

_LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
_LLAMA |= {"rope_theta": 500000.0, "max_position_embeddings": 8192, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "8B": _LLAMA | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336},
    "70B": _LLAMA | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672},
    "400B mixture": {
        **_LLAMA,
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "intermediate_size": 8192,
        "moe_intermediate_size": 2560,
        "num_experts": 160,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
}
"""The shapes of Llama 3.1, and those of a Qwen3 mixture with 160 experts of 2560."""

TRAINING = fb.Recipe(
    (fb.Rule(r"layers/.*/(q|k|v|o|gate|up|down)", fb.Policy("mxfp8", "mxfp8", dlhs="mxfp8_e5m2", drhs="mxfp8_e5m2")),)
)
"""The recipe of training: embeddings, head, norms and routers stay float."""
REDUCTION = "mxfp8_e5m2"

TRAINING_MESHES = (("8B", 8), ("8B", 64), ("70B", 64), ("70B", 256), ("400B mixture", 256), ("400B mixture", 1024))
SERVING_MESHES = (("8B", 1), ("8B", 4), ("70B", 4), ("70B", 8), ("400B mixture", 4), ("400B mixture", 8))
SERVING = {name: P("tensor") for name in ("q", "k", "v", "gate", "up", "embed", "head")} | {
    name: P(None, "tensor") for name in ("o", "down")
}
"""The spec of each matrix `[out, in]` by its last name; norms and routers are whole on every device."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of a model.

    Attributes:
        path: its path.
        shape: its shape.
        scheme: its scheme under the recipe; None where it stays float.
        coded: its bytes in that scheme; None likewise.
        reduced: the bytes of its gradient in `REDUCTION`; None likewise.
    """

    path: str
    shape: tuple[int, ...]
    scheme: fb.Scheme | None = None
    coded: int | None = None
    reduced: int | None = None

    @property
    def size(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)


def parameters(config: DecoderConfig, recipe: fb.Recipe | str) -> list[Parameter]:
    """The parameters of a model, from the plan of one layer with two experts, whose shapes all others have."""
    one = dataclasses.replace(config, layers=1)
    if config.experts is not None:
        one = dataclasses.replace(one, experts=dataclasses.replace(config.experts, count=2, active=1, layers=()))
    rows = {row.path: row for row in plan_of(one, recipe)}
    return [
        parameter(path, shape, rows[re.sub(r"(layers|experts)/\d+", r"\1/0", path)])
        for path, shape in shapes(config).items()
    ]


def plan_of(config: DecoderConfig, recipe: fb.Recipe | str, dtype: Any = jnp.bfloat16) -> fb.Plan:
    """The plan of a decoder's abstract parameters."""

    def logits(params: Mapping[str, jax.Array], tokens: jax.Array) -> jax.Array:
        return forward(params_from_paths(params, config), tokens, config)

    structs = {path: jax.ShapeDtypeStruct(shape, dtype) for path, shape in shapes(config).items()}
    return fb.plan(logits, structs, jax.ShapeDtypeStruct((1, 8), jnp.int32), recipe=recipe)


def parameter(path: str, shape: tuple[int, ...], row: Any) -> Parameter:
    """A parameter whose row of a plan is known."""
    if row.policy is None:
        return Parameter(path, shape)
    assert row.shape == shape
    return Parameter(path, shape, row.policy.weight, row.bytes_after, reduced_bytes(shape))


@functools.cache
def reduced_bytes(shape: tuple[int, ...]) -> int:
    """The bytes of a gradient in `REDUCTION`."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract(shape, REDUCTION)))


def abstract(shape: tuple[int, ...], scheme: fb.Scheme | str) -> Any:
    """A QArray of shapes alone."""
    return jax.eval_shape(lambda x: fb.quantize(x, scheme), jax.ShapeDtypeStruct(shape, jnp.float32))


def collectives(found: Iterable[Parameter], devices: int, itemsize: int) -> dict[tuple[str, str], int]:
    """The result bytes of the collectives of one fully sharded step on a device, each weight gathered once.

    Args:
        found: the parameters.
        devices: the length of the mesh axis.
        itemsize: of a parameter that stays float, and of its gradient.
    """
    found = list(found)
    coded = [p for p in found if p.coded is not None]
    plain = itemsize * sum(p.size for p in found if p.coded is None)
    return {
        ("all-gather", "codes"): sum(p.coded or 0 for p in coded),
        ("all-to-all", "codes"): sum(p.reduced or 0 for p in coded),
        ("all-gather", "float"): plain,
        ("reduce-scatter", "float"): plain // devices,
    }


def state_bytes(found: Iterable[Parameter], devices: int) -> int:
    """The bytes of float32 weights, their gradients and Adam's two moments on one device, fully sharded."""
    return 16 * sum(p.size for p in found) // devices


def decoding_collectives(config: DecoderConfig, found: Iterable[Parameter], batch: int = 1) -> dict[tuple[str, str], int]:
    """The result bytes of the collectives of one tensor-parallel decode step on a device, with its greedy choice of tokens.

    The partitioner sums each product of `o` and `down` over the devices in float32, before it is rounded to the dtype of the
    residual stream, and the product of each active expert by itself. The row of a token comes from the device that has it.

    Args:
        config: the configuration; experts are stacked, and none is shared.
        found: its parameters.
        batch: the number of sequences.
    """
    experts = [config.experts_of(layer) for layer in range(config.layers)]
    sums = sum(1 + (1 if one is None else one.active) for one in experts)
    embed = next(p for p in found if p.path == "embed")
    row = 4 * config.width if embed.coded is None else 0
    return {
        ("all-reduce", "float"): batch * (4 * config.width * sums + row + 4),  # and the largest logit
        ("all-reduce", "codes"): batch * (embed.coded or 0) // config.vocab,
        ("all-reduce", "token"): batch * 4,
    }


@functools.cache
def held_bytes(shape: tuple[int, ...], scheme: fb.Scheme | None, name: str, devices: int) -> int:
    """The bytes that one device has of a parameter in tensor-parallel serving.

    Args:
        shape: its shape.
        scheme: its scheme; None: bfloat16.
        name: the last name of its path.
        devices: the length of the mesh axis.

    Raises:
        QuantError: when a shard would cut a tile or a byte.
    """
    whole = jax.ShapeDtypeStruct(shape, jnp.bfloat16) if scheme is None else abstract(shape, scheme)
    shardings = fb.shardings_of(whole, jax.sharding.AbstractMesh((devices,), ("tensor",)), SERVING.get(name))
    parts = jax.tree.map(lambda leaf, s: math.prod(s.shard_shape(leaf.shape)) * leaf.dtype.itemsize, whole, shardings)
    return sum(jax.tree.leaves(parts))


def weight_bytes(found: Iterable[Parameter], devices: int) -> int:
    """The bytes of all parameters on one device in tensor-parallel serving; those without a scheme are bfloat16."""
    return sum(held_bytes(p.shape, p.scheme, p.path.rsplit("/", 1)[-1], devices) for p in found)


# --- the tables ---


@functools.cache
def planned(name: str, recipe: fb.Recipe | str) -> list[Parameter]:
    """The parameters of a model of the page."""
    return parameters(config(name), recipe)


def training() -> Iterator[str]:
    """The rows of fully sharded training."""
    yield "| model | mesh | state | one layer, bfloat16 | mxfp8 | wire, bfloat16 | codes | codes, low-bit gradients |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, devices in TRAINING_MESHES:
        found = planned(name, TRAINING)
        size = sum(p.size for p in found)
        layer = [p for p in found if p.path.startswith("layers/0/")]
        sent = collectives(found, devices, 2)
        gathered = 2 * (sent["all-gather", "codes"] + sent["all-gather", "float"])
        plain = devices * sent["reduce-scatter", "float"]
        cells = [
            state_bytes(found, devices),
            sum(2 * p.size for p in layer),
            sum(p.coded or 2 * p.size for p in layer),
            received(2 * 2 * size + 4 * size, devices),
            received(gathered + 4 * size, devices),
            received(gathered + sent["all-to-all", "codes"] + 2 * plain, devices),
        ]
        yield f"| {name} | `fsdp={devices}` | " + " | ".join(map(written, cells)) + " |"


def serving() -> Iterator[str]:
    """The rows of tensor-parallel serving."""
    yield "| model | mesh | bfloat16 | int8 | nvfp4 | wire for each token |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for name, devices in SERVING_MESHES:
        coded = planned(name, "nvfp4")
        plans = [[Parameter(p.path, p.shape) for p in coded], planned(name, "int8"), coded]
        # An all-reduce is a reduce-scatter and an all-gather.
        wire = received(2 * sum(decoding_collectives(config(name), coded).values()), devices)
        cells = [*(weight_bytes(found, devices) for found in plans), wire]
        yield f"| {name} | `tensor={devices}` | " + " | ".join(map(written, cells)) + " |"


@functools.cache
def config(name: str) -> DecoderConfig:
    """The configuration of a model of the page."""
    return config_from_hf(MODELS[name])


def received(nbytes: float, devices: int) -> float:
    """What one device receives of so many bytes, of which it has its part."""
    return nbytes * (devices - 1) / devices


def written(nbytes: float) -> str:
    """Bytes in decimal units."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes / 1e3:,.0f} kB"


def page(text: str) -> str:
    """The page with its tables replaced."""
    for name, rows in (("training", training()), ("serving", serving())):
        block = f"<!-- {name} -->\n" + "\n".join(rows) + f"\n<!-- end {name} -->"
        text = re.sub(rf"<!-- {name} -->\n.*?<!-- end {name} -->", lambda _, block=block: block, text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
