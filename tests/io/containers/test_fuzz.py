"""Mutated tensors and configurations of other programs end in our own errors, soon, and without growth."""

import json
import random
import time
import zlib

import jax
import numpy as np
import pytest

from fewbit import QuantError, UnsupportedError
from fewbit._json import parsed_object
from fewbit.io.containers.registry import container
from tests.io.containers.stored import quantized, tensors
from tests.io.mutations import mutated_json

SECONDS = 2.0
"""How much processor time reading one directory may take."""
GROWTH = 40
"""How many times the size of the stored arrays the result may have: 1-bit codes in words become float32."""
ROUNDS = pytest.mark.parametrize(
    "rounds", [pytest.param(300, id="few"), pytest.param(100_000, id="many", marks=pytest.mark.long)]
)
# For each subject a container, its schemes, and what is changed after writing.
SUBJECTS = {
    "gptq": ("gptq", ("int4_f16_g16", "int8_f16")),
    "gptq_v2": ("gptq", ("uint4_f16_g16",)),
    "gptq_act_order": ("gptq", ("int4_f16_g16",)),
    "awq": ("awq", ("uint4_f16_g32", "int4_f16_g32")),
    "bitsandbytes": ("bitsandbytes", ("nf4",)),
    "bitsandbytes_nested": ("bitsandbytes", ("nf4_dq",)),
    "bitsandbytes_int8": ("bitsandbytes", ("int8_narrow",)),
    "mlx": ("mlx", ("affine4", "mxfp4", "q8_0", "nvfp4_one_level")),
}
DTYPES = (np.uint8, np.int8, np.int32, np.uint32, np.float16, np.float32, np.float64, np.int64, np.bool_)


def subject(kind):
    """The container, the stored arrays and the configuration."""
    name, schemes = SUBJECTS[kind]
    found, weights, arrays = container(name), [], {}
    for i, scheme in enumerate(schemes):
        weight, q = quantized(scheme, (8, 64), name=f"layers.{i}.proj.weight")
        if scheme == "int8_narrow":
            scale = np.abs(np.asarray(q.scale)) / np.float32(127)
            q = jax.tree.unflatten(jax.tree.structure(q), [q.codes, jax.numpy.asarray(scale)])
        weights.append(weight)
        arrays |= found.encoded(weight, q)
    if kind == "gptq_act_order":
        arrays["layers.0.proj.g_idx"] = arrays["layers.0.proj.g_idx"][::-1].copy()
    config = {"dtype": "float16", **found.files(weights, ["norm.weight", "gate.weight"], {}).config}
    return found, arrays | {"norm.weight": np.ones(8, np.float16)}, config


def mutated(arrays, config, draw):
    """Stored arrays and a configuration or its text, one of them changed."""
    if draw.random() < 0.3:
        return arrays, mutated_json(json.dumps(config).encode(), draw)
    arrays = dict(arrays)
    for _ in range(draw.choice((1, 1, 1, 2))):
        name = draw.choice(sorted(arrays))
        arrays |= {name: changed_array(arrays[name], draw)}
        if draw.random() < 0.1:
            arrays[draw.choice(sorted(arrays)) + draw.choice(("", "x", ".scales", ".SCB", ".qweight", ".g_idx"))] = arrays[
                name
            ]
        if draw.random() < 0.1:
            del arrays[name]
        if not arrays:
            return {name: np.ones(1)}, config
    return arrays, config


def changed_array(array, draw):
    """An array with another content, dtype or shape."""
    data = np.ascontiguousarray(array)
    kind = draw.randrange(7)
    if kind == 0 and data.size:
        flat = data.reshape(-1).view(np.uint8).copy()
        for _ in range(draw.choice((1, 4, 64))):
            flat[draw.randrange(flat.size)] ^= 1 << draw.randrange(8)
        return flat.view(data.dtype).reshape(data.shape)
    if kind == 1 and data.dtype == np.uint8 and data.ndim == 1 and data[:1].tobytes() == b"{":
        try:
            return np.frombuffer(mutated_json(data.tobytes(), draw), np.uint8)
        except ValueError:  # changed before, and no JSON any more
            return data[: data.size // 2]
    if kind == 2:
        with np.errstate(all="ignore"):
            return data.astype(draw.choice(DTYPES))
    if kind == 3 and data.ndim:
        return data[tuple(slice(draw.randrange(n + 1)) for n in data.shape)]
    if kind == 4:
        return data.reshape(draw.choice(((-1,), (1, -1), (-1, 1), (*data.shape, 1), (1, *data.shape))))
    if kind == 5:
        shape = tuple(draw.choice((0, 1, 2, 3, 8, 64)) for _ in range(draw.randrange(4)))
        return np.full(shape, draw.choice((0, 1, 2, 100)), data.dtype)
    return data.T


def outcome(found, arrays, config):
    """All tensors, loaded."""
    if isinstance(config, bytes):
        config = parsed_object(config, "config.json")
    stored = tensors(arrays)
    if not found.recognises(config, stored):
        raise QuantError("not recognised")
    decoded = found.decoded(config, stored, "here")
    return [decoded[name] for name in decoded]


@pytest.mark.slow_after(2)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", SUBJECTS)
@ROUNDS
def test_a_mutated_directory_ends_in_our_own_error_soon(kind, rounds):
    found, original, config = subject(kind)
    assert outcome(found, original, config)
    refused = 0
    for turn in range(rounds):
        draw = random.Random(zlib.crc32(f"{kind} {turn}".encode()))
        arrays, settings = mutated(original, config, draw)
        start = time.process_time()
        try:
            results = outcome(found, arrays, settings)
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(results))
            assert size <= GROWTH * sum(array.nbytes for array in arrays.values())
        except (QuantError, UnsupportedError) as error:
            refused += len(str(error).encode()) > 0  # it can be printed
        except BaseException as error:
            shapes = {name: (array.dtype, array.shape) for name, array in arrays.items()}
            raise AssertionError(f"{kind}, mutation {turn}: {error!r:.300}; {settings} {shapes}") from error
        assert time.process_time() - start < SECONDS, (kind, turn)
    assert refused > rounds // 10
