"""Adapters in the files of Hugging Face's PEFT: `adapter_model.safetensors` and `adapter_config.json`.

PEFT keeps `lora_A.weight` as `[r, in]` and `lora_B.weight` as `[out, r]`, under `base_model.model.` and the name of the module,
and adds `lora_alpha / r` times their product to a weight. So the factors are transposed, several axes of one kind are one
there, and each element of stacked axes is a module of its own.

Reference: PEFT, developer guide "Checkpoint format".
"""

import collections
import dataclasses
import itertools
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np

from .._json import converted, dumped, file_text, parsed_object
from .._patterns import Pattern
from .._registry import near_names
from ..errors import QuantError
from ..training.lora import Adapter
from .atomic import StagedDirectory
from .mapped import content
from .output import check_output
from .safetensors_file import file_header, ordered, read_file

TENSORS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def dotted(path: str, *index: int) -> str:
    """The module's name that a path has by default: dots for slashes, then the place in the stacked axes.

    Args:
        path: the path of a parameter.
        index: which element of its stacked axes; none for a weight that is not stacked.

    Returns:
        The name.

    >>> dotted("layers/attn/q", 3)
    'layers.attn.q.3'
    """
    return ".".join([path.replace("/", "."), *map(str, index)])


def write_adapters(
    path: str | os.PathLike[str],
    adapters: Mapping[str, Adapter],
    *,
    names: Callable[..., str] = dotted,
    base_model: str | None = None,
    overwrite: bool = False,
) -> pathlib.Path:
    """Writes adapters as PEFT does, whole or not at all; the file is read back before it is in place.

    Ranks and alphas that differ from the most frequent one go to `rank_pattern` and `alpha_pattern`, whose keys PEFT matches
    against the end of a module's name: a key that would match several modules is anchored, `^x\\.up`. Every adapter is written
    as one of a linear layer. PEFT has other names for tables that are looked up and other shapes for kernels of convolutions,
    so it does not take adapters of those.

    Args:
        path: the directory to be.
        adapters: by path, like those of `fb.lora.init`.
        names: `names(path, *index)`, the name that the base model's module has: the index tells the element of stacked axes,
            and there is none without them. A name may end in ".weight", so that a table of weights' names serves too.
        base_model: what the config calls the base model.
        overwrite: whether a directory of adapters may be replaced.

    Returns:
        The directory.

    Raises:
        QuantError: when there are no adapters, two have one name, `path` exists (without `overwrite`) or holds no adapters (with
            it), or it cannot be written.

    >>> import tempfile
    >>> adapter = Adapter(jnp.ones((4, 2)), jnp.zeros((2, 8)), alpha=4.0, inputs=(-2,))
    >>> path = write_adapters(pathlib.Path(tempfile.mkdtemp()) / "adapter", {"up": adapter})
    >>> read_adapters(path, {"up": adapter})
    {'up': Adapter(a=[4, 2], b=[2, 8], alpha=4)}
    """
    target = check_output(path, overwrite=overwrite, foreign=_foreign_files)
    modules = _modules(adapters, names)
    tensors = ordered({name: x for module in modules.values() for name, x in module.tensors().items()})
    header = file_header(tensors, {"format": "pt"})
    files = {CONFIG: [dumped(_config(modules, base_model), CONFIG)], TENSORS: [header, *map(_bytes, tensors.values())]}
    with StagedDirectory(target, overwrite=overwrite) as staged:
        for name, parts in files.items():
            staged.write(name, parts, sum(len(part) for part in parts))
            if content(staged.path / name) != b"".join(map(bytes, parts)):
                raise QuantError(f"{target}: {name} reads back other than it was written; the disk may be failing")
        check_output(path, overwrite=overwrite, foreign=_foreign_files)
        staged.commit()
    return target


def read_adapters(
    path: str | os.PathLike[str], like: Mapping[str, Adapter], *, names: Callable[..., str] = dotted
) -> dict[str, Adapter]:
    """Reads adapters that PEFT or `write_adapters` wrote.

    Args:
        path: the directory.
        like: adapters of the same weights, which tell their axes: those of `fb.lora.init`, of any rank and alpha.
        names: as for `write_adapters`.

    Returns:
        Adapters with the ranks, alphas and numbers of the files; those with `use_rslora`, whose factor is `alpha / sqrt(r)`,
        get the alpha that means the same here.

    Raises:
        QuantError: when a file is missing or damaged, the config is of another kind than LoRA, tensors of `like` are missing
            or others are left over, or shapes do not fit.
    """
    directory = pathlib.Path(path)
    form = parsed_object(file_text(directory / CONFIG, "adapter configuration"), str(directory / CONFIG))
    if form.get("peft_type") != "LORA":
        raise QuantError(f"{directory / CONFIG}: peft_type is {form.get('peft_type')!r:.80}; fewbit reads LORA")
    config = converted(form, _LoraConfig, str(directory / CONFIG))
    for setting in ("use_dora", "lora_bias", "use_qalora"):
        if getattr(config, setting):
            raise QuantError(
                f"{directory / CONFIG}: {setting} is true; fewbit reads plain LoRA and rsLoRA, not this variant"
            )
    stored, _ = read_file(directory / TENSORS)
    modules = _modules(like, names)
    wanted = {tensor: None for name in modules for tensor in _tensor_names(name)}
    if missing := [name for name in wanted if name not in stored]:
        raise QuantError(f"{directory / TENSORS} lacks {missing[0]!r}; {near_names(missing[0], tuple(stored))}")
    if extra := [name for name in stored if name not in wanted]:
        raise QuantError(f"{directory / TENSORS} holds {len(extra)} tensors of no adapter in like, such as {extra[0]!r}")

    def element(module: _Module) -> tuple[np.ndarray, np.ndarray, tuple[float, bool]]:
        a, b = (stored[tensor].array() for tensor in _tensor_names(module.name))
        return a, b, _alpha(config, module.name, directory)

    return {
        path: _joined(adapter, [element(module) for module in modules.values() if module.path == path], path)
        for path, adapter in like.items()
    }


class _LoraConfig(msgspec.Struct):
    """The JSON schema of what fewbit reads of `adapter_config.json`."""

    lora_alpha: float
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    use_qalora: bool = False


@dataclasses.dataclass(frozen=True)
class _Module:
    """One element of an adapter's stacked axes, which PEFT has as a module: the path, the module's name, the place."""

    path: str
    name: str
    adapter: Adapter
    index: tuple[int, ...]

    def tensors(self) -> dict[str, np.ndarray]:
        """`lora_A.weight` `[r, in]` and `lora_B.weight` `[out, r]` by their names."""
        rank = self.adapter.rank
        a = np.asarray(self.adapter.a)[self.index].reshape(-1, rank).T
        b = np.asarray(self.adapter.b)[self.index].reshape(rank, -1).T
        return {name: np.ascontiguousarray(x) for name, x in zip(_tensor_names(self.name), (a, b), strict=True)}


def _modules(adapters: Mapping[str, Adapter], names: Callable[..., str]) -> dict[str, _Module]:
    """Every element of every adapter by the name of its module."""
    modules: dict[str, _Module] = {}
    for path, adapter in adapters.items():
        for index in itertools.product(*map(range, adapter.a.shape[: len(adapter.stacked)])):
            name = names(path, *index).removesuffix(".weight")
            if name in modules:
                raise QuantError(
                    f"names calls both {modules[name].path} and {path} {name!r}; each element needs its own name"
                )
            modules[name] = _Module(path, name, adapter, index)
    if not modules:
        raise QuantError("adapters is empty; there is nothing to write or to read")
    return modules


def _tensor_names(module: str) -> tuple[str, str]:
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


def _config(modules: Mapping[str, _Module], base_model: str | None) -> dict[str, Any]:
    """The content of `adapter_config.json`."""
    ranks = {name: module.adapter.rank for name, module in modules.items()}
    alphas = {name: module.adapter.alpha for name, module in modules.items()}
    keys = {name: _pattern_key(name, tuple(modules)) for name in modules}
    rank, alpha = (collections.Counter(found.values()).most_common(1)[0][0] for found in (ranks, alphas))
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base_model,
        "task_type": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _whole(alpha),
        "target_modules": sorted(modules),
        "rank_pattern": {keys[name]: r for name, r in ranks.items() if r != rank},
        "alpha_pattern": {keys[name]: _whole(a) for name, a in alphas.items() if a != alpha},
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
    }


def _pattern_key(name: str, modules: tuple[str, ...]) -> str:
    """The key of one module in `rank_pattern` and `alpha_pattern`: its name, anchored if that matches other modules too.

    PEFT before 0.14 does not know anchored keys, so a name that is unambiguous stays as it is.
    """
    is_ambiguous = sum(_is_key_of(name, module) for module in modules) > 1
    return f"^{re.escape(name)}" if is_ambiguous else name


def _is_key_of(key: str, module: str, where: str = "the name of a module") -> bool:
    """Whether a key of a pattern applies to a module: a regular expression for the end of its name, from a dot on, as in PEFT."""
    return Pattern(rf"(.*\.)?({key})", where).fullmatch(module)


def _whole(number: float) -> float | int:
    """The number as PEFT writes it: without a point where it is whole."""
    return int(number) if number == int(number) else number


def _alpha(config: _LoraConfig, module: str, directory: pathlib.Path) -> tuple[float, bool]:
    """The alpha of a module, and whether it is meant over the root of the rank."""
    where = f"{directory / CONFIG}: alpha_pattern"
    found = (alpha for key, alpha in (config.alpha_pattern or {}).items() if _is_key_of(key, module, where))
    return next(found, config.lora_alpha), config.use_rslora


def _joined(like: Adapter, parts: list[tuple[np.ndarray, np.ndarray, tuple[float, bool]]], path: str) -> Adapter:
    """The adapter of the tensors of its elements."""
    stacked = like.a.shape[: len(like.stacked)]
    rows, columns = like.a.shape[len(stacked) : -1], like.b.shape[len(stacked) + 1 :]
    rank, (alpha, is_over_root) = parts[0][0].shape[0], parts[0][2]
    for a, b, meant in parts:
        expected = (rank, math.prod(rows)), (math.prod(columns), rank)
        if (a.shape, b.shape) != expected or meant != parts[0][2]:
            raise QuantError(
                f"the tensors of {path} have shapes {a.shape} and {b.shape} and alpha {meant[0]:g}; expected "
                f"{expected[0]} and {expected[1]} and alpha {alpha:g}"
            )
    a = np.stack([a.T for a, _, _ in parts]).reshape(*stacked, *rows, rank)
    b = np.stack([b.T for _, b, _ in parts]).reshape(*stacked, rank, *columns)
    alpha = alpha * math.sqrt(rank) if is_over_root else alpha
    return Adapter(jnp.asarray(a), jnp.asarray(b), alpha, like.inputs, like.stacked)


def _foreign_files(directory: pathlib.Path) -> list[str]:
    """The names in a directory that `write_adapters` did not write."""
    with os.scandir(directory) as entries:
        return sorted(e.name for e in entries if e.name not in (CONFIG, TENSORS) or not e.is_file(follow_symlinks=False))


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)
