"""`fb.save` and `fb.load` of pytrees.

A tree is written as a fewbit directory (see `io.write`): each array under its path in the tree, `layers/0/attn/q`. In a key
`~` is written `~0`, `/` is `~1` and an empty key `~2`; a tree of a single leaf has the name `~`. The section `tree` of
`config.json` has what safetensors cannot store: `scalars` (Python's numbers and strings), `keys` (the implementations of JAX's
random keys, stored as key data) and `dtypes` (those that safetensors lacks, such as int4, stored as bytes with a trailing axis).
"""

import itertools
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding, Sharding
from jaxtyping import PyTree

from ..._json import converted
from ..._registry import near_names
from ...array.qarray import QArray, is_qarray
from ...errors import QuantError
from ..checkpoint import Checkpoint
from ..files import checked_path
from ..safetensors.file import DTYPES
from .reader import is_fewbit_directory, read_directory
from .writer import DirectoryWriter

_SECTION = "tree"
_ROOT = "~"
_FLOAT_HEX = (float, complex)
_NATIVE = frozenset(DTYPES.values())


def save(path: str | os.PathLike[str], tree: PyTree, *, overwrite: bool = False) -> pathlib.Path:
    """Writes a pytree to a directory, atomically and verified.

    Leaves may be QArrays, JAX and numpy arrays of any numeric dtype, random keys, and Python's numbers and strings. Functions,
    which are leaves of Equinox modules, are not written; `load` takes them from `like`.

    Args:
        path: the directory to create; missing parents are created.
        tree: any pytree: nested dicts and lists, Linen variables, an Equinox or NNX module, an `nnx.State`, an optimizer's state.
        overwrite: whether a directory that fewbit wrote may be replaced; the old one remains until the end.

    Returns:
        The directory.

    Raises:
        QuantError: for a leaf that cannot be stored, duplicate paths, a tree without arrays, and as `io.DirectoryWriter`.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/params"
    >>> tree = {"up": fb.quantize(jnp.ones((4, 64)), "nf4"), "bias": jnp.zeros(4, jnp.bfloat16), "step": 3}
    >>> fb.load(fb.save(path, tree))
    {'bias': Array([0, 0, 0, 0], dtype=bfloat16), 'step': 3, 'up': QArray(nf4, float32[4, 64], 144 bytes, 4.500 bits/weight)}
    """
    arrays: dict[str, Any] = {}
    section: dict[str, dict[str, Any]] = {"scalars": {}, "keys": {}, "dtypes": {}}
    for name, leaf in _named_leaves(tree).items():
        if isinstance(leaf, bool | int | float | complex | str) and not isinstance(leaf, np.generic):
            section["scalars"][name] = _scalar_form(leaf)
        elif not _is_code(leaf):
            arrays[name] = _storable(name, leaf, section)
    if not arrays:
        raise QuantError("the tree has no arrays; fb.save needs at least one")
    with DirectoryWriter(path, config={_SECTION: section}, overwrite=overwrite) as writer:
        for name, value in arrays.items():
            writer.add(name, value)
    return writer.path


def load(path: str | os.PathLike[str], like: PyTree = None) -> PyTree:
    """Reads a tree that `save` wrote; checks every hash.

    Args:
        path: the directory; also one that `io.write` or `fewbit quantize` wrote.
        like: a tree of the same structure, shapes and dtypes, with arrays or `jax.ShapeDtypeStruct`s, also inside QArrays, as
            `jax.eval_shape` returns them. None: nested dicts of the paths, in which a list is a dict with keys "0", "1", ...

    Returns:
        With `like`, a tree of its structure: numpy where `like` has numpy, else JAX arrays with the shardings of `like`'s leaves;
        functions are those of `like`, and what its NNX modules share (tied parameters) is shared again. Without it JAX arrays, and
        numpy arrays for 64-bit dtypes that JAX would narrow.

    Raises:
        QuantError: for a missing or changed directory, and naming the leaves of `like` of other path, shape, dtype or scheme, or
            tied where the directory has different values; for a sharding of `like` on an abstract mesh outside `jax.set_mesh`.

    >>> import tempfile
    >>> path = fb.save(tempfile.mkdtemp() + "/params", {"w": fb.quantize(jnp.ones((4, 64)), "int8"), "b": [jnp.ones(2)]})
    >>> like = jax.eval_shape(lambda: {"w": fb.quantize(jnp.ones((4, 64)), "int8"), "b": [jnp.ones(2)]})
    >>> fb.load(path, like)["b"]
    [Array([1., 1.], dtype=float32)]
    """
    directory = checked_path(path)
    if not is_fewbit_directory(directory):
        raise QuantError(f"{path} is not a directory that fewbit wrote; fewbit.io.read opens other checkpoints")
    checkpoint = read_directory(directory)
    stored = _Stored(checkpoint)
    if like is None:
        return _nested({name: stored.value(name) for name in stored.names}, stored.is_tree, checkpoint.path)
    named = _named_leaves(like)
    wanted = {name: leaf for name, leaf in named.items() if not _is_code(leaf)}
    _check_names(wanted, stored.names, checkpoint.path)
    values, faults = {}, []
    for name, leaf in wanted.items():
        values[name] = stored.value(name)
        if reason := _misfit(values[name], leaf):
            faults.append(f"{name}: {reason}")
    if faults:
        raise QuantError(f"{checkpoint.path} does not match like: {_shortened(faults)}")
    placed = {name: _placed(value, wanted[name]) for name, value in values.items()}
    return _filled(like, named | placed, values, checkpoint.path)


class _Section(msgspec.Struct):
    """JSON schema of the section of `config.json`."""

    scalars: dict[str, Any]
    keys: dict[str, str]
    dtypes: dict[str, str]


class _Stored:
    """The leaves of a directory by name."""

    def __init__(self, checkpoint: Checkpoint):
        where = f"{checkpoint.path}, section {_SECTION!r} of config.json"
        self.is_tree = _SECTION in checkpoint.metadata
        section = converted(checkpoint.metadata[_SECTION], _Section, where) if self.is_tree else _Section({}, {}, {})
        self._scalars, self._keys, self._dtypes = section.scalars, section.keys, section.dtypes
        self._tensors, self._where = checkpoint.tensors, where
        self.names = tuple(sorted({*self._tensors, *self._scalars}))

    def value(self, name: str) -> Any:
        """The leaf of this name. It is a Python scalar, a QArray, a JAX array of random keys, or a numpy array."""
        if name in self._scalars:
            return _scalar(self._scalars[name], f"{self._where}, {name!r}")
        value = self._tensors[name]
        if name in self._keys:
            try:
                return jax.random.wrap_key_data(jnp.asarray(value), impl=self._keys[name])
            except (TypeError, ValueError) as error:
                raise QuantError(
                    f"{self._where}: {name!r} is not a random key of {self._keys[name]!r:.80}: {error}"
                ) from error
        if name in self._dtypes:
            try:
                return np.ascontiguousarray(value).view(jnp.dtype(self._dtypes[name]))[..., 0]
            except (TypeError, ValueError, IndexError) as error:
                raise QuantError(
                    f"{self._where}: {name!r} is not an array of {self._dtypes[name]!r:.80}: {error}"
                ) from error
        return value


def _named_leaves(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by path name; a QArray is one leaf."""
    result: dict[str, Any] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_qarray)[0]:
        words = (jax.tree_util.keystr((key,), simple=True) for key in keys)
        name = _ROOT
        if keys:
            name = "/".join(word.replace("~", "~0").replace("/", "~1") or "~2" for word in words)
        if name in result:
            raise QuantError(f"two leaves of the tree have the path {name!r}: keys such as 1 and '1' are the same in a file")
        result[name] = leaf
    return result


def _is_code(leaf: object) -> bool:
    """True for a function or class, which modules have among their leaves."""
    return callable(leaf) and not hasattr(leaf, "dtype")


def _storable(name: str, leaf: PyTree, section: dict[str, dict[str, Any]]) -> Any:
    """The array that is stored for a leaf. What it does not contain is added to the section."""
    if any(isinstance(part, Tracer) for part in jax.tree.leaves(leaf)):
        raise QuantError(f"leaf {name!r} is traced; call fb.save outside jit")
    if isinstance(leaf, QArray) and all(isinstance(part, jax.Array | np.ndarray) for part in jax.tree.leaves(leaf)):
        for part in jax.tree.leaves(leaf):
            _check_readable(name, part)
        return leaf
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        kind = "an abstract array" if hasattr(leaf, "dtype") or is_qarray(leaf) else f"a {type(leaf).__name__}"
        raise QuantError(
            f"leaf {name!r} is {kind}; fb.save writes arrays, QArrays, random keys, numbers and strings. "
            "Make it static in its module, or leave it out"
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise QuantError(f"leaf {name!r} is a masked array, whose mask has no place in a file; save its data and its mask")
    _check_readable(name, leaf)
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        section["keys"][name] = str(jax.random.key_impl(leaf))
        return jax.random.key_data(leaf)
    dtype = leaf.dtype.newbyteorder("=")
    is_number = jnp.issubdtype(dtype, jnp.number) and dtype.kind != "m"  # NumPy counts time differences as integers
    if dtype in _NATIVE or dtype.hasobject or not is_number:
        return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf  # the writer refuses other dtypes
    section["dtypes"][name] = dtype.name
    return np.array(leaf, dtype, order="C")[..., None].view(np.uint8)


def _check_readable(name: str, leaf: object) -> None:
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise QuantError(f"leaf {name!r} was deleted or donated; save the tree before that")
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise QuantError(f"leaf {name!r} has shards on other hosts; fb.save writes from one host. Use Orbax (docs/io.md)")


def _scalar_form(value: complex | str) -> list[Any]:  # complex: any Python number
    """The JSON form of a Python scalar: type name and value, floats in exact hexadecimal."""
    if isinstance(value, bool):
        return ["bool", value]
    if isinstance(value, str):  # also an enum's
        return ["str", str.__str__(value)]
    if isinstance(value, int):
        return ["int", hex(value)]
    if isinstance(value, float):
        return ["float", value.hex()]
    return ["complex", [value.real.hex(), value.imag.hex()]]


def _scalar(form: object, where: str) -> Any:
    """Parses the JSON form of a Python scalar."""
    match form:
        case ["bool", bool() as value] | ["str", str() as value]:
            return value
        case ["int", str() as text]:
            return int(text, 16)
        case ["float", str() as text]:
            return float.fromhex(text)
        case ["complex", [str() as real, str() as imaginary]]:
            return complex(float.fromhex(real), float.fromhex(imaginary))
    raise QuantError(f"{where}: {form!r:.80} is not a scalar that fb.save wrote")


def _check_names(wanted: Mapping[str, Any], stored: tuple[str, ...], path: pathlib.Path) -> None:
    """Refuses a `like` whose leaf names differ from the directory's."""
    missing, extra = [n for n in wanted if n not in stored], [n for n in stored if n not in wanted]
    parts = []
    if missing:
        parts.append(f"it lacks {_shortened(missing)} ({near_names(missing[0], stored[:400])})")
    if extra:
        parts.append(f"like lacks {_shortened(extra)}")
    if parts:
        raise QuantError(f"{path} does not match like: {'; '.join(parts)}")


def _shortened(items: list[str]) -> str:
    more = f" and {len(items) - 5} more" if len(items) > 5 else ""
    return ", ".join(items[:5]) + more


def _misfit(value: object, like: PyTree) -> str | None:
    """Why a stored leaf differs from that of `like`, or None."""
    found, expected = _described(value), _described(like)
    if isinstance(value, QArray) and is_qarray(like) and jax.tree.structure(value) == jax.tree.structure(like):
        pairs = zip(jax.tree.leaves(value), jax.tree.leaves(like), strict=True)
        if all(_described(a) == _described(b) for a, b in pairs):
            return None
    if found != expected:
        return f"the file has {found}, like has {expected}"
    if isinstance(value, QArray):
        return f"the file has {found}, like has {expected}, with policies {value.policy} and {like.policy}"
    if isinstance(value, np.ndarray) and not isinstance(like, np.ndarray | np.generic) and _is_narrowed(value.dtype):
        return f"JAX has {value.dtype} only with jax_enable_x64; switch it on, or put a numpy array into like"
    return None


def _described(leaf: PyTree) -> str:
    """Dtype and shape of an array, the scheme of a QArray, the type of anything else."""
    if is_qarray(leaf):
        return f"{leaf.scheme.name} for {leaf.dtype.name}[{', '.join(map(str, leaf.shape))}]"
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        dtype = leaf.dtype.name if isinstance(leaf.dtype, np.dtype) else leaf.dtype  # in any byte order
        return f"{dtype}[{', '.join(map(str, leaf.shape))}]"
    return f"a Python {type(leaf).__name__}"


def _placed(value: PyTree, like: PyTree) -> PyTree:
    """Converts a stored leaf to numpy or to the sharding of `like`."""
    if is_qarray(like):
        return jax.tree.map(_placed, value, like)
    if isinstance(like, np.ndarray):
        return np.array(value, like.dtype)
    if isinstance(like, np.generic):
        return np.asarray(value, like.dtype)[()]
    if not hasattr(like, "dtype"):
        return value
    sharding = getattr(like, "sharding", None)
    if sharding is None or not getattr(like, "committed", True):
        return jnp.asarray(value)
    return jax.device_put(value, _on_devices(sharding))


def _on_devices(sharding: Sharding) -> Sharding:
    """The sharding on devices: `jax.eval_shape` of arrays on an explicit mesh gives one on an abstract mesh."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, AbstractMesh):
        return sharding
    if jax.sharding.get_abstract_mesh() != sharding.mesh:
        raise QuantError(
            f"like has the sharding {sharding.spec} on an abstract mesh, which has no devices; call fb.load within jax.set_mesh, "
            "or give like the shardings of fb.shardings_of"
        )
    return NamedSharding(jax.sharding.get_mesh(), sharding.spec, memory_kind=sharding.memory_kind)


def _filled(like: PyTree, leaves: Mapping[str, Any], stored: Mapping[str, Any], path: pathlib.Path) -> PyTree:
    """The tree of `like` with other leaves. An NNX object that is in several places of `like` is one object in it too."""
    objects: dict[int, tuple[PyTree, PyTree, list[str]]] = {}  # with each object itself, so that its id remains its own

    def filled(node: PyTree, names: Iterator[str]) -> PyTree:
        children, structure = jax.tree.flatten(node, is_leaf=lambda x: x is not node or is_qarray(x))
        if children and children[0] is node:
            return leaves[next(names)]
        if not _is_nnx_object(node):
            return structure.unflatten([filled(child, names) for child in children])
        own = list(itertools.islice(names, len(jax.tree.leaves(node, is_leaf=is_qarray))))
        if id(node) not in objects:
            rest = iter(own)
            objects[id(node)] = node, structure.unflatten([filled(child, rest) for child in children]), own
        _, result, first = objects[id(node)]
        for one, other in zip(first, own, strict=True):
            if one != other and one in stored and _bits(stored[one]) != _bits(stored[other]):
                raise QuantError(
                    f"{path} does not match like: {one} and {other} have different values, and are one Variable in like; "
                    "load with like=None, or with a model that does not tie them"
                )
        return result

    return filled(like, iter(leaves))


def _is_nnx_object(node: object) -> bool:
    """True for an NNX module or Variable: a model may refer to one from several places, as to tied embeddings."""
    nnx = sys.modules.get("flax.nnx")  # without it there are none, and importing it takes a second
    return nnx is not None and isinstance(node, nnx.Pytree | nnx.Variable)


def _bits(value: PyTree) -> list[bytes]:
    """The bytes of a stored leaf."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return [np.asarray(part).tobytes() for part in jax.tree.leaves(value)]


def _nested(values: Mapping[str, Any], is_tree: bool, path: pathlib.Path) -> PyTree:
    """Nested dicts of the paths."""
    if list(values) == [_ROOT] and is_tree:
        return _unlike(values[_ROOT])
    result: dict[str, Any] = {}
    for name, value in values.items():
        words = name.split("/")
        if is_tree:
            words = ["" if word == "~2" else word.replace("~1", "/").replace("~0", "~") for word in words]
        node = result
        for word in words[:-1]:
            node = node.setdefault(word, {})
            if not isinstance(node, dict):
                raise QuantError(f"{path}: {name!r} is below another array; fewbit.io.read gives the arrays by name")
        if words[-1] in node:
            raise QuantError(f"{path}: {name!r} is above other arrays; fewbit.io.read gives the arrays by name")
        node[words[-1]] = _unlike(value)
    return result


def _unlike(value: object) -> Any:
    """A loaded leaf without `like`: a JAX array, unless JAX would narrow it."""
    if not isinstance(value, np.ndarray):
        return value
    return np.array(value) if _is_narrowed(value.dtype) else jnp.asarray(value)


def _is_narrowed(dtype: np.dtype) -> bool:
    """True if JAX, as configured, narrows this dtype, or lacks it."""
    return dtype.char in "gG" or dtype.name.startswith("float6_") or jax.dtypes.canonicalize_dtype(dtype) != dtype
