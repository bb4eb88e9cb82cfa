"""Writes the tables of docs/interop.md: `python docs/interop_table.py`."""

import re
from collections.abc import Iterator
from pathlib import Path

from fewbit.array.scheme import SCHEMES, Scheme, scheme
from fewbit.io.containers.container import AbstractContainer, Weight
from fewbit.io.containers.registry import CONTAINERS
from fewbit.io.gguf.blocks import why_not as why_not_gguf
from fewbit.recipe.role import Role

PAGE = Path(__file__).parent / "interop.md"

ORACLES = {
    "compressed-tensors": "compressed-tensors 0.20 decodes what we write and we decode what it writes; transformers 5.23 runs it",
    "modelopt": "nvidia-modelopt 0.47: its `NVFP4QTensor` and its FP8 formula",
    "fp8-blocks": "transformers 5.23: `Fp8Quantize`, `Fp8Dequantize` and its models on CPU, which dequantize whole blocks",
    "gpt-oss": "transformers 5.23: `convert_moe_packed_tensors`",
    "torchao": "torchao 0.18: `unflatten_tensor_state_dict` and its tensors",
    "gptq": "AutoGPTQ's published formula in numpy",
    "awq": "AutoAWQ's published formula in numpy; `dequantize_gemm` of autoawq 0.2.9",
    "bitsandbytes": "bitsandbytes 0.50 on CPU; transformers 5.23 runs it, but no mixture of experts",
    "bitnet": "transformers 5.23: `pack_weights`, `unpack_weights`, and its BitNet runs it",
    "mlx": "mlx 0.32 on CPU: `mx.dequantize`; mlx-lm 0.32 runs it",
    "gguf": "gguf 0.19; llama.cpp by llama-cpp-python 0.3 runs it",
    "orbax": "orbax-checkpoint 0.12",
    "hf": "safetensors 0.8, transformers 5.23",
}
"""The other program that reads what fewbit writes, and writes what fewbit reads, in the tests."""


def directions() -> Iterator[str]:
    """The rows of the containers."""
    yield "| `--to` | read | written | checked against |"
    yield "| --- | --- | --- | --- |"
    for name, oracle in ORACLES.items():
        yield f"| `{name}` | {READ.get(name, 'exact')} | {WRITTEN.get(name, 'exact or refused')} | {oracle} |"


READ = {
    "gguf": "exact; types without a scheme are decoded to float32",
    "gptq": "exact; act-order is decoded to float",
    "bitsandbytes": "exact; nested scales of several ranges are decoded to float32, blocks that cross rows to float",
    "hf": "exact",
}
WRITTEN = {"hf": "dequantized to bfloat16, as asked"}


GROUPED = ("int4_g128", "uint4_g128", "int4_f16_g128", "uint4_f16_g128", "int4_f16_g64")
"""Schemes with another group size than that of their name."""


def schemes() -> Iterator[str]:
    """The rows of the schemes, with what stores each exactly."""
    names = [one.name for one in CONTAINERS]
    yield "| scheme | " + " | ".join([*names, "gguf"]) + " |"
    yield "| --- " * (len(names) + 2) + "|"
    alone = []
    for name in (*SCHEMES.names(), *GROUPED):
        cells = [*(cell(one, name) for one in CONTAINERS), gguf_cell(scheme(name))]
        if any(cells):
            yield f"| `{name}` | " + " | ".join(cells) + " |"
        else:
            alone.append(f"`{name}`")
    yield ""
    yield f"Only in `fewbit` and `orbax`, which store every scheme: {', '.join(alone)}."


def cell(container: AbstractContainer, name: str) -> str:
    """Whether a container stores a scheme exactly."""
    for dtype, text in (
        ("float32", "exact"),
        ("bfloat16", "exact (bfloat16 models)"),
        ("float16", "exact (float16 models)"),
    ):
        if any(container.refusal(weight) is None for weight in weights(scheme(name), dtype, container.activations)):
            return text if container.activations is None else f"{text} ({container.activations} activations)"
    return ""


def weights(found: Scheme, dtype: str, activations: str | None) -> Iterator[Weight]:
    """A matrix in the scheme, an embedding, and a stack of experts `[E, in, out]`."""
    other = None if activations is None else scheme(activations)
    for role in (Role.MATMUL, Role.EMBEDDING):
        yield Weight("model.layers.0.mlp.up_proj.weight", (256, 256), dtype, found, other, role=role)
    experts = found.along(-2, 3)
    yield Weight("model.layers.0.mlp.experts.gate_up_proj", (4, 256, 256), dtype, experts, role=Role.EXPERTS)


def gguf_cell(found: Scheme) -> str:
    """Whether GGUF stores a scheme exactly."""
    return "exact" if why_not_gguf(found, (256, 256)) is None else ""


def page(text: str) -> str:
    """The page with its tables replaced."""
    for name, rows in (("directions", directions()), ("schemes", schemes())):
        block = f"<!-- {name} -->\n" + "\n".join(rows) + f"\n<!-- end {name} -->"
        text = re.sub(rf"<!-- {name} -->\n.*?<!-- end {name} -->", lambda _, block=block: block, text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
