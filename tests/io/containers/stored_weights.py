"""What the tests of containers share: weights without quantizing, directories without files, and mutated directories."""

import dataclasses
import gc
import json
import math
import random
import struct
import time
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import fewbit as fb
from fewbit import QuantError, UnsupportedError
from fewbit.array.packing import packed_length
from fewbit.cli.progress import peak_memory
from fewbit.formats import AbstractFormat
from fewbit.io.checkpoint import TensorInfo, Tensors
from fewbit.io.containers.container import AbstractContainer, Weight
from fewbit.io.safetensors.file import array_bytes, file_header, ordered
from fewbit.io.safetensors.reader import read_safetensors_directory
from tests.conformance import array_laws as laws
from tests.io.mutations import mutated_bytes, mutated_json

ROUNDS = (300, 100_000)


def example(scheme: fb.Scheme | str, shape: tuple[int, ...], dtype: str = "float32", *, axis: int = -1, seed: int = 0):
    """A QArray of random codes, -0 among them, with a row of zeros and scales of many sizes. Its leaves are NumPy arrays."""
    if isinstance(scheme, str):
        scheme = fb.scheme(scheme)
    scheme = scheme.along(axis, len(shape)) if axis != -1 else scheme
    rng = np.random.default_rng(seed)
    q = laws.random_qarray(scheme, shape, seed)
    codes = rng.integers(0, 256, q.codes.shape, np.uint8)
    if scheme.format.bits == 8 and scheme.format.has_nan:
        codes[(codes & 127) == 127] = 128
    if scheme.zero_point is None:
        codes[0] = 0
    if isinstance(scheme.scale, AbstractFormat) and scheme.scale.name == "e8m0":
        scale = rng.integers(100, 140, q.scale.shape, np.uint8)
        scale.reshape(-1)[0] = 0
    elif isinstance(scheme.scale, AbstractFormat):
        scale = rng.integers(0, 127, q.scale.shape, np.uint8)
        scale.reshape(-1)[:3] = 0, 1, 126
    else:
        scale = (rng.standard_normal(q.scale.shape) * 0.01).astype(np.dtype(scheme.scale))
    tensor = None
    if q.tensor_scale is not None:
        tensor = np.full((1,) * len(shape), 0.00123456, np.float32)
    return fb.QArray.tree_unflatten(
        (scheme, np.dtype(jax.numpy.dtype(dtype)), q.slack, None), (codes, scale, q.zero_point, tensor)
    )


def numbers(q: fb.QArray) -> np.ndarray:
    """The dequantized values in the dtype of the QArray, without JAX."""
    return laws.numpy_dequantize(q).astype(q.dtype)


def weight(q: fb.QArray, name: str = "model.layers.0.mlp.up_proj.weight", activations: str | None = None) -> Weight:
    return Weight(name, q.shape, q.dtype.name, q.scheme, None if activations is None else fb.scheme(activations))


def tensors_of(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> Tensors:
    """Arrays as a file would hold them."""
    info = {name: TensorInfo(a.shape, a.dtype.name, a.dtype.name, a.nbytes) for name, a in arrays.items()}
    return Tensors(info, arrays.__getitem__, metadata)


@dataclasses.dataclass(frozen=True)
class Stored:
    """What a container makes of weights: the configuration, the arrays and the metadata of the file."""

    config: dict[str, Any]
    arrays: dict[str, np.ndarray]
    metadata: dict[str, str]
    small: dict[str, bytes]

    @property
    def tensors(self) -> Tensors:
        return tensors_of(self.arrays, self.metadata)


def stored(
    container: AbstractContainer,
    qs: Mapping[str, fb.QArray],
    kept: Mapping[str, np.ndarray] | None = None,
    config: Mapping[str, Any] | None = None,
    activations: str | None = None,
) -> Stored:
    """The weights in a container, and some arrays that are not quantized."""
    weights = [weight(q, name, activations) for name, q in qs.items()]
    container.check(weights)
    kept, config = dict(kept or {}), dict(config or {})
    files = container.files(weights, tuple(kept), config)
    arrays = dict(kept)
    for one in weights:
        arrays |= container.encoded(one, qs[one.name])
    return Stored({**config, **files.config}, arrays, dict(files.metadata), dict(files.small))


def read_back(container: AbstractContainer, found: Stored) -> Tensors:
    """The tensors of what `stored` made."""
    assert container.recognises(found.config, found.tensors)
    return container.decoded(found.config, found.tensors, "here")


def same(q: fb.QArray, other: object) -> None:
    """Checks that two QArrays are the same but for their calibration."""
    assert isinstance(other, fb.QArray)
    scheme = dataclasses.replace(other.scheme, calibration=q.scheme.calibration)
    assert (scheme.name, other.shape, other.dtype) == (q.scheme.name, q.shape, q.dtype)
    bits = q.shape[q.scheme.pack_axis] * q.scheme.format.bits
    assert packed_length(q.shape[q.scheme.pack_axis], q.scheme.format.bits) == math.ceil(bits / 8)
    np.testing.assert_array_equal(laws.unpacked(other), laws.unpacked(q))
    for leaf in ("scale", "zero_point", "tensor_scale"):
        ours, theirs = getattr(q, leaf), getattr(other, leaf)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            np.testing.assert_array_equal(np.asarray(theirs), np.asarray(ours))


def fuzz(container: AbstractContainer, found: Stored, directory, rounds: int) -> None:
    """Mutates the files of a directory; every one ends in our own error or is read, soon and in little memory."""
    arrays = ordered(found.arrays)
    header = file_header(arrays, found.metadata)
    body = b"".join(bytes(array_bytes(np.ascontiguousarray(a))) for a in arrays.values())
    original = {"config.json": json.dumps(found.config).encode(), "model.safetensors": header + body}

    def read() -> None:
        checkpoint = read_safetensors_directory(directory)
        if not container.recognises(checkpoint.metadata, checkpoint.tensors):
            raise QuantError("not recognised")
        tensors = container.decoded(checkpoint.metadata, checkpoint.tensors, str(directory))
        for name in tensors:
            assert tensors[name].shape == tensors.info[name].shape

    for name, data in original.items():
        (directory / name).write_bytes(data)
    read()
    refused, early = 0, 0
    for turn in range(rounds):
        draw = random.Random(zlib.crc32(f"{container.name} {turn}".encode()))
        kind = draw.randrange(4)
        name = "config.json" if kind == 0 else "model.safetensors"
        if kind == 0:
            changed = mutated_json(original[name], draw)
        elif kind == 1:
            changed = mutated_bytes(original[name], draw)
        else:
            text = mutated_json(header[8:], draw)
            changed = struct.pack("<Q", len(text)) + text + body
        (directory / name).write_bytes(changed)
        start = time.process_time()
        try:
            read()
        except (QuantError, UnsupportedError) as error:
            refused += len(str(error).encode()) > 0
        except BaseException as error:
            raise AssertionError(f"mutation {turn}: {type(error).__name__}: {error!r:.300}; {changed!r:.600}") from error
        assert time.process_time() - start < 2
        (directory / name).write_bytes(original[name])
        if turn == rounds // 10:
            gc.collect()
            early = peak_memory() or 0
    assert refused > rounds // 10
    assert (peak_memory() or 0) <= 1.5 * early
