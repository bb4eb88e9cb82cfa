"""The section of compressed-tensors in config.json."""

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from ...._json import converted
from ...._patterns import Pattern
from ....errors import QuantError, UnsupportedError
from ..encodings.names import OLDER_HEADS, linear_modules, parts_apart

VERSION = "0.20.0"
"""The version of compressed-tensors whose layout is written."""
METHOD = "compressed-tensors"
_SECTIONS = ("quantization_config", "compression_config")
_DENSE = (None, "dense", "")
_REGEX = "re:"

Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


class Arguments(msgspec.Struct, frozen=True):
    """JSON schema of the quantization of weights or activations."""

    num_bits: Annotated[int, msgspec.Meta(ge=1, le=64)] = 8
    type: str = "int"
    strategy: str | None = None
    symmetric: bool = True
    dynamic: bool | str = False
    group_size: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] | None = None
    block_structure: tuple[Size, Size] | str | None = None

    def blocks(self, where: str) -> tuple[int, int] | None:
        """The rows and columns of a block. None if the configuration does not say."""
        structure = self.block_structure
        if not isinstance(structure, str):
            return structure
        found = re.fullmatch(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})", structure)
        if found is None:
            raise QuantError(f"{where}: block_structure is {structure!r:.40}, expected rows and columns")
        return int(found[1]), int(found[2])


class ConfigGroup(msgspec.Struct, frozen=True):
    """JSON schema of the modules that are quantized alike."""

    targets: list[str]
    weights: Arguments | None = None
    input_activations: Arguments | None = None


class _Section(msgspec.Struct, frozen=True):
    config_groups: dict[str, ConfigGroup | list[str]] | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None
    version: str = ""


class Section:
    """A checked section of a `config.json`.

    Args:
        config: the `config.json`.
        where: the path, for messages.

    Raises:
        QuantError: for a malformed section.
        UnsupportedError: for sparse or rotated weights, and for preset names in place of settings.
    """

    def __init__(self, config: Mapping[str, Any], where: str):
        where = f"{where}: the quantization configuration in config.json"
        form = converted(section_of(config), _Section, where)
        self.version = form.version
        if (form.sparsity_config or {}).get("format") not in _DENSE:
            raise UnsupportedError(f"{where} has sparse weights; fewbit reads dense ones")
        if (form.transform_config or {}).get("config_groups"):
            raise UnsupportedError(
                f"{where} has transforms: the weights are rotated, and fewbit would not rotate activations"
            )
        self._groups: list[ConfigGroup] = []
        self._named: dict[str, ConfigGroup] = {}
        for name, group in (form.config_groups or {}).items():
            if not isinstance(group, ConfigGroup):
                raise UnsupportedError(f"{where} names the preset {name!r:.40}; fewbit reads the settings written out")
            self._groups.append(group)
            self._named |= dict.fromkeys(group.targets, group)
        # Where several fit, compressed-tensors takes the first in the alphabet (utils/match.py, match_targets).
        self._patterns = [
            (Pattern(f"(?:{target[len(_REGEX) :]}).*", f"{where}: a target"), group)
            for target, group in sorted(self._named.items(), key=operator.itemgetter(0))
            if target.startswith(_REGEX)
        ]

    def group_of(self, module: str) -> ConfigGroup:
        """The group of a quantized module.

        It is found by the module's name, else by the first pattern in alphabetical order, else by the module's class.
        """
        if len(self._groups) == 1:
            return self._groups[0]
        if module in self._named:
            return self._named[module]
        for pattern, group in self._patterns:
            if pattern.fullmatch(module):
                return group
        # Only embeddings are not linear layers.
        return self._named.get("Embedding" if _is_embedding(module) else "Linear", ConfigGroup([]))


def section_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The section of compressed-tensors; None if there is none."""
    for key in _SECTIONS:
        section = config.get(key)
        if isinstance(section, Mapping) and section.get("quant_method") == METHOD:
            return section
    return None


def section(groups: Sequence[dict[str, Any]], modules: Sequence[Sequence[str]], kept: Sequence[str]) -> dict[str, Any]:
    """The section for a directory.

    Args:
        groups: the distinct settings: `weights`, `input_activations` and `format`.
        modules: the modules of each.
        kept: the names of the tensors that are not quantized.
    """
    quantized = [module for group in modules for module in group]
    formats = {group["format"] for group in groups}
    is_linear = len(groups) == 1 and not any(map(_is_embedding, quantized))
    config_groups = {
        f"group_{i}": {
            "targets": ["Linear"] if is_linear else _targets(names, kept, quantized),
            "output_activations": None,
            **group,
        }
        for i, (group, names) in enumerate(zip(groups, modules, strict=True))
    }
    return {
        "quant_method": METHOD,
        "format": min(formats) if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": config_groups,
        "ignore": linear_modules(kept, quantized, [r"re:(?:.*\.)?{}\..*"]),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": VERSION,
    }


def _is_embedding(module: str) -> bool:
    """Whether a module is an embedding, by its name."""
    return "embed" in module.rpartition(".")[2] and module not in OLDER_HEADS


def _targets(names: Sequence[str], kept: Sequence[str], quantized: Sequence[str]) -> list[str]:
    """The modules of a group. Those of a model with other parts are patterns, since their names may begin otherwise when it runs."""
    if not parts_apart(kept, quantized):
        return [*names, *(OLDER_HEADS[name] for name in names if name in OLDER_HEADS)]
    tails = [name[max(name.find("layers."), 0) :] for name in names]
    return [rf"re:.*\b{re.escape(tail)}$" for tail in tails]
