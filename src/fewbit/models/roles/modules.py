"""Tensor roles from transformers' module classes.

The model is built on torch's `meta` device: no weight is allocated, read or downloaded. Each tensor of the checkpoint is
mapped to the module that owns it, through the renamings that transformers applies on loading (experts of a Mixtral are
separate in its file and stacked in the module). The class of the module determines role and layout.
"""

import contextlib
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from ...errors import QuantError, UnsupportedError
from ...recipe.role import Role
from ...recipe.roles import TensorRole

Shape = tuple[int, ...]

_MOST_EXPERTS = 4096
_COUNT = re.compile(r"(?:num|n)_\w*(?:layers?|experts?|blocks?|stages?)|\w*_?(?:layers|depth|experts)")
"""The counts of config.json that are limited by the number of tensors (or `_MOST_EXPERTS`), to bound the module count."""


def module_roles(shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> dict[str, TensorRole]:
    """The roles of a checkpoint's tensors, by the classes of their modules.

    Args:
        shapes: the shape of each tensor, by its name in the checkpoint.
        config: the checkpoint's `config.json`.

    Returns:
        The roles of tensors whose module has a known class, and whose name and shape match the architecture.

    Raises:
        UnsupportedError: when transformers is not installed, or cannot build the architecture.
    """
    model = _built(config, shapes)
    owned = _owned(model)
    found = {}
    for name, (own_name, operations) in _names_of_modules(model, shapes, owned).items():
        if own_name in owned:
            found[name] = _role(*owned[own_name], operations, shapes[name])
    return {name: role for name, role in found.items() if role is not None}


def _built(config: Mapping[str, Any], names: Collection[str]) -> Any:
    """Builds the model of a config.json on the meta device."""
    with guarded():
        cls, settings = architecture(config, names)
        import torch

        with torch.device("meta"):
            return cls._from_config(settings)


def architecture(config: Mapping[str, Any], names: Collection[str]) -> tuple[Any, Any]:
    """The model class and the configuration of transformers for a config.json.

    Args:
        config: the checkpoint's `config.json`.
        names: the names of its tensors; their number limits the number of layers.

    Returns:
        The class that `architectures` names. Without one the base model of the `model_type`, or the causal language model if
        the names have the prefix of a base model inside another. And its configuration object.

    Raises:
        UnsupportedError: when transformers is not installed, or a count is too large. Call it within `guarded`.
    """
    transformers = _transformers()
    _check_counts(config, len(names))
    form = _plain(config)
    settings = transformers.CONFIG_MAPPING[form.get("model_type", "")].from_dict(form)
    named = [getattr(transformers, name, None) for name in form.get("architectures") or ()]
    for cls in named:
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            return cls, settings
    base = _first(transformers.MODEL_MAPPING[type(settings)])
    prefix = f"{base.base_model_prefix}."
    if type(settings) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and any(name.startswith(prefix) for name in names):
        return _first(transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]), settings
    return base, settings


def _first(found: Any) -> Any:
    """A class, or the first of several."""
    return found[0] if isinstance(found, tuple) else found


@contextlib.contextmanager
def guarded(doing: str = "build the architecture") -> Iterator[None]:
    """Silences transformers, and turns what untrusted files make it raise into UnsupportedError.

    Args:
        doing: what it cannot do, for the message.
    """
    logging = _transformers().utils.logging
    from huggingface_hub.errors import StrictDataclassError

    verbosity, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    faults = (
        *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NotImplementedError, OSError),
        *(RuntimeError, TypeError, ValueError, StrictDataclassError),
    )
    try:
        logging.set_verbosity_error()  # its advice on the configuration is for those who train the model
        logging.disable_progress_bar()
        yield
    except (QuantError, UnsupportedError):
        raise
    except faults as error:
        first = str(error).strip().split("\n")[0][:200]
        raise UnsupportedError(f"transformers cannot {doing}: {type(error).__name__}: {first}") from error
    finally:
        logging.set_verbosity(verbosity)
        if shows_bars:
            logging.enable_progress_bar()


def _transformers() -> ModuleType:
    """The package transformers, with torch."""
    try:
        import torch  # noqa: F401 - transformers without it has no models
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            f"transformers, which has the architecture's module classes, cannot be imported ({error}): "
            "pip install fewbit[transformers]"
        ) from error
    return transformers


def _check_counts(config: Mapping[str, Any], tensors: int) -> None:
    """Refuses counts too large for the number of tensors."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check_counts(value, tensors)
        elif isinstance(value, int) and value > max(tensors, _MOST_EXPERTS) and _COUNT.fullmatch(key):
            raise UnsupportedError(f"config.json's {key} is {value}, and the checkpoint has {tensors} tensors")


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without keys that constructors must not get.

    They would download weights, or need other kernels or quantizers.
    """
    dropped = ("attn_implementation", "_attn_implementation", "auto_map", "quantization_config")
    plain = {key: _decoded(value) for key, value in config.items() if key not in dropped}
    return plain | {key: False for key in ("use_pretrained_backbone", "pretrained") if key in plain}


def _decoded(value: Any) -> Any:
    """A value of a configuration; transformers writes an infinite float as `{"__float__": "Infinity"}`."""
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if set(value) == {"__float__"}:
        return float(value["__float__"])
    return _plain(value)


def _owned(model: Any) -> dict[str, tuple[Any, str, Shape]]:
    """The module, the name in it, and the shape of each parameter and buffer."""
    return {
        ".".join(filter(None, (path, name))): (module, name, tuple(value.shape))
        for path, module in model.named_modules(remove_duplicate=False)
        for name, value in itertools.chain(
            module.named_parameters(recurse=False, remove_duplicate=False), module.named_buffers(recurse=False)
        )
    }


def _names_of_modules(model: Any, names: Iterable[str], own: Collection[str]) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """For each checkpoint name, the parameter's name in the model, and the conversion operations."""
    prefix = f"{model.base_model_prefix}."
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming
    except ImportError as error:
        raise UnsupportedError(
            f"the installed transformers has no conversion mapping ({error}); install transformers 5.0 or later"
        ) from error
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]

    def resolved(name: str) -> tuple[str, tuple[Any, ...]]:
        if name in own:
            return name, ()
        new = name
        for renaming in renamings:
            new, _ = renaming.rename_source_key(new)
        operations: tuple[Any, ...] = ()
        for converter in converters:
            new, matched = converter.rename_source_key(new)
            if matched is not None:
                operations = tuple(converter.operations)
                break
        # A model with a head loads a checkpoint of its base model, and vice versa.
        return next((one for one in (new, prefix + new, new.removeprefix(prefix)) if one in own), new), operations

    return {name: resolved(name) for name in names}


# Conversion operations that preserve the contraction axis; a Transpose swaps the last two.
_KEEPING = ("Chunk", "Concatenate", "Interleave", "MergeModulelist", "PermuteForRope", "Split", "SplitModulelist")


def _role(module: object, name: str, own_shape: Shape, operations: tuple[Any, ...], shape: Shape) -> TensorRole | None:
    """The role of a checkpoint tensor that is converted to this parameter. None if unknown."""
    role = role_in_module(module, name, own_shape)
    if role is None or (not operations and shape != own_shape):
        return None
    kinds = [type(operation).__name__ for operation in operations]
    if any(kind not in (*_KEEPING, "Transpose") for kind in kinds):
        return None
    if role.role is Role.EXPERTS and len(shape) == 2:
        role = TensorRole(Role.MATMUL, role.axis, role.source)
    elif len(shape) != len(own_shape):
        return None
    if kinds.count("Transpose") % 2 and role.axis:
        role = TensorRole(role.role, -3 - role.axis[-1], role.source)
    return role


def role_in_module(module: object, name: str, shape: Shape) -> TensorRole | None:
    """The role of a parameter by the class of its module.

    Args:
        module: the torch module.
        name: the parameter's name in it.
        shape: its shape.

    Returns:
        The role; None if the class is unknown.
    """
    from torch import nn

    kind = type(module).__name__
    source = f"transformers: {kind}"
    if "Router" in kind or "TopK" in kind:
        return TensorRole(Role.ROUTER, source=source)
    if name == "weight" and isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if "Position" in kind:
            return TensorRole(Role.POSITION, source=source)
        return TensorRole(Role.EMBEDDING, -1, source)
    if name == "weight" and isinstance(module, nn.Linear):
        return TensorRole(Role.MATMUL, -1, source)
    if name.endswith("proj_weight") and isinstance(module, nn.MultiheadAttention):
        return TensorRole(Role.MATMUL, -1, source)
    if name == "weight" and f"{type(module).__module__}.{kind}" == "transformers.pytorch_utils.Conv1D":
        return TensorRole(Role.MATMUL, -2, source)
    if name == "weight" and isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return TensorRole(Role.CONVOLUTION, (*range(2 - len(shape), 0), 1 - len(shape)), source)
    if name == "weight" and isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return TensorRole(Role.CONVOLUTION, (*range(2 - len(shape), 0), -len(shape)), source)
    is_transposed = getattr(module, "is_transposed", None)
    if "Expert" in kind and len(shape) == 3 and isinstance(is_transposed, bool):
        return TensorRole(Role.EXPERTS, -2 if is_transposed else -1, source)
    if name == "bias":
        return TensorRole(Role.BIAS, source=source)
    if "Norm" in kind:
        return TensorRole(Role.NORM, source=source)
    return None
