"""Saves and loads trees of parameters: `fb.save` and `fb.load`.

A tree is written as a fewbit directory (see `io.write`): each array under its path in the tree, `layers/0/attn/q`. In a key
`~` is written `~0`, `/` is `~1` and an empty key `~2`; a tree that is one leaf has the name `~`. The section `tree` of
`config.json` has what a file of arrays has no form for: `scalars` (Python's numbers and strings), `keys` (JAX's random keys, of
which the files hold the data) and `dtypes` (those that safetensors lacks, such as int4; the files hold the bytes, along an axis more).
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.core import Tracer

from .._json import converted
from .._registry import near_names
from ..array import QArray, is_qarray
from ..errors import QuantError
from .checkpoint import Checkpoint
from .directory import is_fewbit_directory
from .mapped import checked_path
from .read import read
from .safetensors_file import DTYPES
from .writer import DirectoryWriter

_SECTION = "tree"
_ROOT = "~"
_FLOAT_HEX = (float, complex)
_NATIVE = frozenset(DTYPES.values())


def save(path: str | os.PathLike[str], tree: Any, *, overwrite: bool = False) -> pathlib.Path:
    """Writes a tree of arrays to a directory, whole or not at all; every byte is read back before it is in place.

    Leaves may be QArrays, JAX and numpy arrays of any numeric dtype, random keys, and Python's numbers and strings. Functions,
    which modules of Equinox have among their leaves, are code and are not written; `load` takes them from `like`.

    Args:
        path: the directory to be; missing parents are created.
        tree: any pytree: nested dicts and lists, Linen variables, an Equinox or NNX module, an `nnx.State`, an optimizer's state.
        overwrite: whether a directory that fewbit wrote may be replaced; the old one stands until the end.

    Returns:
        The directory.

    Raises:
        QuantError: for a leaf that has no form in the file, such as an abstract array or one with shards on other hosts; for two
            leaves of one path; for a tree without arrays; and as `io.DirectoryWriter`.

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
    with DirectoryWriter(path, config={_SECTION: section}, overwrite=overwrite) as writer:
        for name, value in arrays.items():
            writer.add(name, value)
    return writer.path


def load(path: str | os.PathLike[str], like: Any = None) -> Any:
    """Reads a tree that `save` wrote; each array's bytes are compared with their hash.

    Args:
        path: the directory; one that `io.write` or `fewbit quantize` wrote will do.
        like: a tree of the same structure, shapes and dtypes. Its leaves are arrays or `jax.ShapeDtypeStruct`s, those of QArrays
            too, as `jax.eval_shape` gives them. None: nested dicts of the paths, in which a list is a dict with keys "0", "1", ...

    Returns:
        With `like`, a tree of its structure: numpy where `like` has numpy, else JAX arrays with the shardings of `like`'s leaves;
        functions are those of `like`. Without it JAX arrays, and numpy arrays for the 64-bit dtypes that JAX would narrow.

    Raises:
        QuantError: when there is no such directory or its files were changed; when leaves of `like` are missing, others are
            left over, or shapes, dtypes or schemes differ: the message names them.

    >>> import tempfile
    >>> path = fb.save(tempfile.mkdtemp() + "/params", {"w": fb.quantize(jnp.ones((4, 64)), "int8"), "b": [jnp.ones(2)]})
    >>> like = jax.eval_shape(lambda: {"w": fb.quantize(jnp.ones((4, 64)), "int8"), "b": [jnp.ones(2)]})
    >>> fb.load(path, like)["b"]
    [Array([1., 1.], dtype=float32)]
    """
    if not is_fewbit_directory(checked_path(path)):
        raise QuantError(f"{path} is no directory that fewbit wrote; fewbit.io.read opens other checkpoints")
    checkpoint = read(path)
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
        raise QuantError(f"{checkpoint.path} does not fit like: {_shortened(faults)}")
    structure = jax.tree.structure(like, is_leaf=is_qarray)
    return jax.tree.unflatten(
        structure, [_placed(values[name], leaf) if name in values else leaf for name, leaf in named.items()]
    )


class _Section(msgspec.Struct):
    """The JSON schema of the section of `config.json`."""

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
        """The leaf: a Python scalar, a QArray, a JAX array of random keys, or a numpy array."""
        if name in self._scalars:
            return _scalar(self._scalars[name], f"{self._where}, {name!r}")
        value = self._tensors[name]
        if name in self._keys:
            try:
                return jax.random.wrap_key_data(jnp.asarray(value), impl=self._keys[name])
            except (TypeError, ValueError) as error:
                raise QuantError(f"{self._where}: {name!r} is no random key of {self._keys[name]!r:.80}: {error}") from error
        if name in self._dtypes:
            try:
                return np.ascontiguousarray(value).view(jnp.dtype(self._dtypes[name]))[..., 0]
            except (TypeError, ValueError, IndexError) as error:
                raise QuantError(f"{self._where}: {name!r} is no array of {self._dtypes[name]!r:.80}: {error}") from error
        return value


def _named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by the names of their paths; a QArray is one leaf."""
    result: dict[str, Any] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_qarray)[0]:
        words = (jax.tree_util.keystr((key,), simple=True) for key in keys)
        name = "/".join(word.replace("~", "~0").replace("/", "~1") or "~2" for word in words) if keys else _ROOT
        if name in result:
            raise QuantError(f"two leaves of the tree have the path {name!r}: keys such as 1 and '1' are the same in a file")
        result[name] = leaf
    return result


def _is_code(leaf: Any) -> bool:
    """Whether a leaf is a function or class, which modules have among their leaves."""
    return callable(leaf) and not hasattr(leaf, "dtype")


def _storable(name: str, leaf: Any, section: dict[str, dict[str, Any]]) -> Any:
    """The array that the file holds for a leaf; what it leaves out goes to the section."""
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
    _check_readable(name, leaf)
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        section["keys"][name] = str(jax.random.key_impl(leaf))
        return jax.random.key_data(leaf)
    dtype = leaf.dtype.newbyteorder("=")
    if dtype in _NATIVE or dtype.hasobject or not jnp.issubdtype(dtype, jnp.number):
        return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf  # the writer refuses what it cannot hold
    section["dtypes"][name] = dtype.name
    return np.array(leaf, dtype, order="C")[..., None].view(np.uint8)


def _check_readable(name: str, leaf: Any) -> None:
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise QuantError(f"leaf {name!r} was deleted or donated; save the tree before that")
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise QuantError(
            f"leaf {name!r} has shards on other hosts; fb.save writes what one host holds. Use Orbax (docs/io.md)"
        )


def _scalar_form(value: Any) -> list[Any]:
    """The JSON form of a Python scalar: its type's name and its value, floats exactly in hexadecimal."""
    if isinstance(value, bool | str):
        return [type(value).__name__, value]
    if isinstance(value, int):
        return ["int", hex(value)]
    return ["float", value.hex()] if isinstance(value, float) else ["complex", [value.real.hex(), value.imag.hex()]]


def _scalar(form: Any, where: str) -> Any:
    """The Python scalar of its JSON form."""
    match form:
        case ["bool", bool() as value] | ["str", str() as value]:
            return value
        case ["int", str() as text]:
            return int(text, 16)
        case ["float", str() as text]:
            return float.fromhex(text)
        case ["complex", [str() as real, str() as imaginary]]:
            return complex(float.fromhex(real), float.fromhex(imaginary))
    raise QuantError(f"{where}: {form!r:.80} is no scalar that fb.save wrote")


def _check_names(wanted: Mapping[str, Any], stored: tuple[str, ...], path: pathlib.Path) -> None:
    """Refuses a `like` with other leaves than the directory."""
    missing, extra = [n for n in wanted if n not in stored], [n for n in stored if n not in wanted]
    parts = []
    if missing:
        parts.append(f"it lacks {_shortened(missing)} ({near_names(missing[0], stored[:400])})")
    if extra:
        parts.append(f"like lacks {_shortened(extra)}")
    if parts:
        raise QuantError(f"{path} does not fit like: {'; '.join(parts)}")


def _shortened(items: list[str]) -> str:
    return ", ".join(items[:5]) + (f" and {len(items) - 5} more" if len(items) > 5 else "")


def _misfit(value: Any, like: Any) -> str | None:
    """Why a stored leaf cannot take the place of one of `like`, or None."""
    if isinstance(value, QArray) or is_qarray(like):
        same = is_qarray(like) and jax.tree.structure(value) == jax.tree.structure(like)
        pairs = zip(jax.tree.leaves(value), jax.tree.leaves(like), strict=True) if same else ()
        if same and all(_described(a) == _described(b) for a, b in pairs):
            return None
        what, expected = _described(value), _described(like)
        policies = "" if what != expected else f", with policies {value.policy} and {like.policy}"
        return f"the file has {what}, like has {expected}{policies}"
    what, expected = _described(value), _described(like)
    if what != expected:
        return f"the file has {what}, like has {expected}"
    if isinstance(value, np.ndarray) and not isinstance(like, np.ndarray | np.generic) and _is_narrowed(value.dtype):
        return f"JAX has {value.dtype} only with jax_enable_x64; switch it on, or put a numpy array into like"
    return None


def _described(leaf: Any) -> str:
    """Dtype and shape of an array, the scheme of a QArray, the type of anything else."""
    if is_qarray(leaf):
        return f"{leaf.scheme.name} for {leaf.dtype.name}[{', '.join(map(str, leaf.shape))}]"
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"
    return f"a Python {type(leaf).__name__}"


def _placed(value: Any, like: Any) -> Any:
    """A stored leaf as `like` has it: in numpy, or on the devices of its sharding."""
    if is_qarray(like):
        return jax.tree.map(_placed, value, like)
    if isinstance(like, np.ndarray):
        return np.array(value)
    if isinstance(like, np.generic):
        return np.asarray(value)[()]
    if not hasattr(like, "dtype"):
        return value
    sharding = getattr(like, "sharding", None)
    if sharding is None or not getattr(like, "committed", True):
        return jnp.asarray(value)
    return jax.device_put(value, sharding)


def _nested(values: Mapping[str, Any], is_tree: bool, path: pathlib.Path) -> Any:
    """Nested dicts of the paths that the names stand for."""
    if list(values) == [_ROOT] and is_tree:
        return _unlike(values[_ROOT])
    result: dict[str, Any] = {}
    for name, value in values.items():
        words = [_unescaped(word) if is_tree else word for word in name.split("/")]
        node = result
        for word in words[:-1]:
            node = node.setdefault(word, {})
            if not isinstance(node, dict):
                raise QuantError(f"{path}: {name!r} is below another array; fewbit.io.read gives the arrays by name")
        if words[-1] in node:
            raise QuantError(f"{path}: {name!r} is above other arrays; fewbit.io.read gives the arrays by name")
        node[words[-1]] = _unlike(value)
    return result


def _unescaped(word: str) -> str:
    return "" if word == "~2" else word.replace("~1", "/").replace("~0", "~")


def _unlike(value: Any) -> Any:
    """A leaf where there is no `like`: JAX's, unless JAX would narrow it."""
    if not isinstance(value, np.ndarray):
        return value
    return np.array(value) if _is_narrowed(value.dtype) else jnp.asarray(value)


def _is_narrowed(dtype: np.dtype) -> bool:
    """Whether JAX, as it is configured, has no arrays of a dtype and takes a narrower one."""
    return jax.dtypes.canonicalize_dtype(dtype) != dtype
