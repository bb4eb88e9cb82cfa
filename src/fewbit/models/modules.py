"""Roles from the module classes of a checkpoint's own architecture, built by transformers without weights.

The model is built on torch's `meta` device: no weight is allocated, read or downloaded. Each tensor of the checkpoint is traced to the module
that owns it, through the renamings that transformers applies when it loads (experts of a Mixtral lie apart in its file and stacked in the
module). The class of the module says what the tensor is, and in which layout.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..errors import UnsupportedError
from ..recipe import Role, TensorRole

Shape = tuple[int, ...]

_MOST_EXPERTS = 4096
_COUNT = re.compile(r"(?:num|n)_\w*(?:layers?|experts?|blocks?|stages?)|\w*_?(?:layers|depth|experts)")
"""Counts of config.json that are larger than the number of tensors, and than this, are not built: they would make modules without end."""


def module_roles(shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> dict[str, TensorRole]:
    """The roles of a checkpoint's tensors, by the classes of the modules that own them.

    Args:
        shapes: the shape of each tensor, by its name in the checkpoint.
        config: the checkpoint's `config.json`.

    Returns:
        The roles of those tensors whose module is of a known class; names that the architecture lacks, shapes that differ from its own,
        and parameters owned by classes of unknown meaning are left out.

    Raises:
        UnsupportedError: when transformers is not installed, or cannot build the architecture.
    """
    model = _built(config, len(shapes))
    owned = _owned(model)
    found = {}
    for name, (own_name, operations) in _names_of_modules(model, shapes, owned).items():
        if own_name in owned:
            role = _role(*owned[own_name], operations, shapes[name])
            found |= {} if role is None else {name: role}
    return found


def _built(config: Mapping[str, Any], tensors: int) -> Any:
    """The model of a config.json, on the meta device."""
    try:
        import torch
        import transformers
        from huggingface_hub.errors import StrictDataclassError
    except ImportError as error:
        raise UnsupportedError(
            f"roles from module classes need transformers, which cannot be imported ({error}): pip install fewbit[transformers]"
        ) from error
    _check_counts(config, tensors)
    form, logging = _plain(config), transformers.logging
    verbosity = logging.get_verbosity()
    # What a stranger's config.json can make the constructors raise.
    faults = (
        *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NotImplementedError, OSError),
        *(RuntimeError, TypeError, ValueError, StrictDataclassError),
    )
    try:
        logging.set_verbosity_error()  # its advice on the configuration is for who runs the model
        settings = transformers.CONFIG_MAPPING[form.get("model_type", "")].from_dict(form)
        named = [getattr(transformers, name, None) for name in form.get("architectures") or ()]
        cls = next((c for c in named if isinstance(c, type) and issubclass(c, transformers.PreTrainedModel)), None)
        with torch.device("meta"):
            return transformers.AutoModel.from_config(settings) if cls is None else cls._from_config(settings)
    except faults as error:
        first = str(error).strip().split("\n")[0][:200]
        raise UnsupportedError(f"transformers cannot build the architecture: {type(error).__name__}: {first}") from error
    finally:
        logging.set_verbosity(verbosity)


def _check_counts(config: Mapping[str, Any], tensors: int) -> None:
    """Refuses counts that no checkpoint of so many tensors can have."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check_counts(value, tensors)
        elif isinstance(value, int) and value > max(tensors, _MOST_EXPERTS) and _COUNT.fullmatch(key):
            raise UnsupportedError(f"config.json's {key} is {value}, and the checkpoint has {tensors} tensors")


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without what makes constructors fetch weights, or need a kernel or a quantizer that may not be here."""
    dropped = ("attn_implementation", "_attn_implementation", "auto_map", "quantization_config")
    inner = {
        key: _plain(value) if isinstance(value, Mapping) else value for key, value in config.items() if key not in dropped
    }
    return inner | {key: False for key in ("use_pretrained_backbone", "pretrained") if key in inner}


def _owned(model: Any) -> dict[str, tuple[Any, str, Shape]]:
    """For each parameter and buffer its module, its name in the module, and its shape."""
    return {
        ".".join(filter(None, (path, name))): (module, name, tuple(value.shape))
        for path, module in model.named_modules(remove_duplicate=False)
        for name, value in itertools.chain(
            module.named_parameters(recurse=False, remove_duplicate=False), module.named_buffers(recurse=False)
        )
    }


def _names_of_modules(model: Any, names: Iterable[str], own: Collection[str]) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """For each name of the checkpoint the parameter that it becomes, and the operations that make it that."""
    prefix = f"{model.base_model_prefix}."
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming
    except ImportError as error:
        raise UnsupportedError(
            f"the installed transformers does not say how it renames tensors ({error}); take 5.0 or later"
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
        # A model with a head loads a checkpoint of its body, and the other way round.
        return next((one for one in (new, prefix + new, new.removeprefix(prefix)) if one in own), new), operations

    return {name: resolved(name) for name in names}


# Operations between checkpoint and module that keep which axis is contracted; a Transpose swaps the last two.
_KEEPING = ("Chunk", "Concatenate", "Interleave", "MergeModulelist", "PermuteForRope", "Split", "SplitModulelist")


def _role(module: Any, name: str, own_shape: Shape, operations: tuple[Any, ...], shape: Shape) -> TensorRole | None:
    """The role of a tensor of the checkpoint that becomes this parameter of a module; None where the class does not say."""
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


def role_in_module(module: Any, name: str, shape: Shape) -> TensorRole | None:
    """The role of a parameter by the class of the module that owns it.

    Args:
        module: the torch module.
        name: the parameter's name in it.
        shape: its shape.

    Returns:
        The role; None where the class does not say.
    """
    from torch import nn

    kind = type(module).__name__
    source = f"transformers: {kind}"
    if "Router" in kind or "TopK" in kind:
        return TensorRole(Role.ROUTER, source=source)
    if name == "weight" and isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return TensorRole(Role.POSITION, source=source) if "Position" in kind else TensorRole(Role.EMBEDDING, -1, source)
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
    return TensorRole(Role.NORM, source=source) if "Norm" in kind else None
