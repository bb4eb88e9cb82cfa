"""LoRA adapters in PEFT's files.

`adapter_model.safetensors` stores `lora_A.weight` as `[r, in]` and `lora_B.weight` as `[out, r]`, under `base_model.model.` and the
name of the module; PEFT adds `lora_alpha / r` times their product to a weight. So the factors are transposed, several input or
output axes are flattened into one, and each element of stacked axes is a separate module. `adapter_config.json` has the rest.

Reference: PEFT, developer guide "Checkpoint format".
"""

import collections
import contextlib
import dataclasses
import functools
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
from ..training.lora.adapter import Adapter
from .atomic_directory import StagedDirectory
from .output import OutputKind, check_output
from .safetensors.file import array_bytes, file_header, ordered, read_file

TENSORS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def dotted(path: str, *index: int) -> str:
    """The default module name of a path. It has dots for slashes, then the index in the stacked axes.

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
    """Writes adapters in PEFT's format, atomically and verified.

    Ranks and alphas that differ from the most frequent one go to `rank_pattern` and `alpha_pattern`. Every adapter is written for
    a linear layer: PEFT has other names for embeddings and other shapes for convolutions, so it cannot load adapters of those.

    Args:
        path: the directory to create.
        adapters: by path, like those of `fb.lora.init`.
        names: `names(path, *index)`, the module's name in the base model, perhaps ending in ".weight"; see `dotted`.
        base_model: the name of the base model in the config.
        overwrite: whether a directory of adapters may be replaced.

    Returns:
        The directory.

    Raises:
        QuantError: without adapters, for duplicate names, and when `check_output` refuses the path or it cannot be written.

    >>> import tempfile
    >>> adapter = Adapter(jnp.ones((4, 2)), jnp.zeros((2, 8)), alpha=4.0, inputs=(-2,))
    >>> path = write_adapters(pathlib.Path(tempfile.mkdtemp()) / "adapter", {"up": adapter})
    >>> read_adapters(path, {"up": adapter})
    {'up': Adapter(a=[4, 2], b=[2, 8], alpha=4)}
    """
    check = functools.partial(check_output, overwrite=overwrite, kind=OutputKind(_foreign_files))
    target = check(path)
    modules = _modules(adapters, names)
    tensors = ordered({name: x for module in modules.values() for name, x in module.tensors().items()})
    content = [file_header(tensors, {"format": "pt"}), *map(array_bytes, tensors.values())]
    with StagedDirectory(target, overwrite=overwrite, check=check) as staged:
        staged.write_verified(CONFIG, dumped(_config(modules, base_model), CONFIG))
        staged.write_verified(TENSORS, b"".join(content))
        staged.commit()
    return target


def read_adapters(
    path: str | os.PathLike[str], like: Mapping[str, Adapter], *, names: Callable[..., str] = dotted
) -> dict[str, Adapter]:
    """Reads adapters that PEFT or `write_adapters` wrote.

    Args:
        path: the directory.
        like: adapters of the same weights, for their axes: those of `fb.lora.init`, of any rank and alpha.
        names: as for `write_adapters`.

    Returns:
        Adapters with the ranks, alphas and values of the files; the alpha of `use_rslora` is multiplied by `sqrt(r)`.

    Raises:
        QuantError: for a missing or damaged file, another kind of adapter than LoRA, or other tensors or shapes than in `like`.
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
        raise QuantError(f"{directory / TENSORS} has {len(extra)} tensors without an adapter in like, such as {extra[0]!r}")

    def element(module: _Module) -> tuple[np.ndarray, np.ndarray, tuple[float, bool]]:
        a, b = (stored[tensor].array() for tensor in _tensor_names(module.name))
        return a, b, _alpha(config, module.name, directory)

    return {
        path: _joined(adapter, [element(module) for module in modules.values() if module.path == path], path)
        for path, adapter in like.items()
    }


class _LoraConfig(msgspec.Struct):
    """JSON schema of the fields that fewbit reads from `adapter_config.json`."""

    lora_alpha: float
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    use_qalora: bool = False


@dataclasses.dataclass(frozen=True)
class _Module:
    """One PEFT module: an adapter, or one element of its stacked axes."""

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
    """The modules of all adapters by name."""
    modules: dict[str, _Module] = {}
    for path, adapter in adapters.items():
        for index in itertools.product(*map(range, adapter.a.shape[: len(adapter.stacked)])):
            name = names(path, *index).removesuffix(".weight")
            if name in modules:
                raise QuantError(
                    f"names gives both {modules[name].path} and {path} the name {name!r}; return a different one for each element"
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
        "lora_alpha": _as_json_number(alpha),
        "target_modules": sorted(modules),
        "rank_pattern": {keys[name]: r for name, r in ranks.items() if r != rank},
        "alpha_pattern": {keys[name]: _as_json_number(a) for name, a in alphas.items() if a != alpha},
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
    }


def _pattern_key(name: str, modules: tuple[str, ...]) -> str:
    """The key of a module in `rank_pattern` and `alpha_pattern`.

    PEFT reads it as a regex. It is the name where that matches this module alone, else the escaped name, anchored only if that
    matches other modules too: PEFT before 0.14 does not know anchored keys.
    """
    escaped = re.escape(name)
    for key in (name, escaped):
        with contextlib.suppress(QuantError):  # a name may be no regex
            if [module for module in modules if _is_key_of(key, module)] == [name]:
                return key
    return f"^{escaped}"


def _is_key_of(key: str, module: str, where: str = "the name of a module") -> bool:
    """Whether a key matches the end of a module's name. As in PEFT, the end is the whole name, or begins after a dot."""
    return Pattern(rf"(.*\.)?({key})", where).fullmatch(module)


def _as_json_number(number: float) -> float | int:
    """An integral number as int, as PEFT writes it.

    Raises:
        QuantError: for infinity and NaN, which JSON lacks.
    """
    if not math.isfinite(number):
        raise QuantError(f"the alpha of an adapter is {number}; it must be finite")
    if number == int(number):
        return int(number)
    return number


def _alpha(config: _LoraConfig, module: str, directory: pathlib.Path) -> tuple[float, bool]:
    """The alpha of a module, and whether it is divided by sqrt(r)."""
    where = f"{directory / CONFIG}: alpha_pattern"
    found = (alpha for key, alpha in (config.alpha_pattern or {}).items() if _is_key_of(key, module, where))
    return next(found, config.lora_alpha), config.use_rslora


def _joined(like: Adapter, parts: list[tuple[np.ndarray, np.ndarray, tuple[float, bool]]], path: str) -> Adapter:
    """Stacks the tensors of an adapter's modules."""
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
    a = np.stack([a.T for a, _, _ in parts]).reshape(*stacked, *rows, rank)  # [*stacked, *in, r]
    b = np.stack([b.T for _, b, _ in parts]).reshape(*stacked, rank, *columns)  # [*stacked, r, *out]
    if is_over_root:
        alpha *= math.sqrt(rank)
    return Adapter(jnp.asarray(a), jnp.asarray(b), alpha, like.inputs, like.stacked)


def _foreign_files(directory: pathlib.Path) -> list[str]:
    """The names in a directory that are not PEFT's two files."""
    with os.scandir(directory) as entries:
        return sorted(e.name for e in entries if e.name not in (CONFIG, TENSORS) or not e.is_file(follow_symlinks=False))
