"""Mixtures of experts: parameter names, and the configuration of DeepSeek's."""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from ..._json import Count, Positive
from ...errors import QuantError
from ..part_configs import ExpertLayout, Experts
from .family import Common, Number, refuse_unless


def expert_layout(names: Collection[str]) -> ExpertLayout:
    """The layout of experts, by the tensors' names. They are separate matrices, or one stack as in transformers' modules."""
    if any(name.endswith(".experts.gate_up_proj") for name in names):
        return "joined"
    return "separate"


def expert_names(shared: str) -> dict[str, str]:
    """The names of a router, its experts and the shared expert.

    Experts are separate matrices or stacks. The shared expert is a module called `shared`.
    """
    projections = ("gate", "up", "down")
    return {
        "mlp/router": "mlp.gate.weight",
        **{f"mlp/experts/{{}}/{name}": f"mlp.experts.{{}}.{name}_proj.weight" for name in projections},
        "mlp/experts/gate+up": "mlp.experts.gate_up_proj",
        "mlp/experts/down": "mlp.experts.down_proj",
        **{f"mlp/shared/{name}": f"mlp.{shared}.{name}_proj.weight" for name in projections},
    }


ROUTED_NAMES = {"mlp/router_correction_bias": "mlp.gate.e_score_correction_bias", **expert_names("shared_experts")}
"""The names of the mixtures of `routed_experts`."""

MIXTRAL_NAMES = {
    "mlp/router": "block_sparse_moe.gate.weight",
    "mlp/experts/{}/gate": "block_sparse_moe.experts.{}.w1.weight",
    "mlp/experts/{}/up": "block_sparse_moe.experts.{}.w3.weight",
    "mlp/experts/{}/down": "block_sparse_moe.experts.{}.w2.weight",
}
"""The names of Mixtral's mixture and of those after it."""


class Routed(Common, kw_only=True):
    """The schema of DeepSeek's mixtures: dense layers first, experts in groups, experts that every token passes."""

    experts: Positive = msgspec.field(name="n_routed_experts")
    active: Positive = msgspec.field(name="num_experts_per_tok")
    expert_hidden: Positive = msgspec.field(name="moe_intermediate_size")
    shared: Count | None = msgspec.field(name="n_shared_experts", default=None)
    groups: Positive | None = msgspec.field(name="n_group", default=None)
    active_groups: Positive | None = msgspec.field(name="topk_group", default=None)
    scale: Number = msgspec.field(name="routed_scaling_factor", default=1.0)
    normalized: bool = msgspec.field(name="norm_topk_prob", default=False)
    dense: Count = msgspec.field(name="first_k_dense_replace", default=0)


def sparse_layers(kinds: Sequence[str], count: int) -> tuple[int, ...] | None:
    """The layers with experts, as `Experts.layers`; None: no layer has them.

    Args:
        kinds: "dense" or "sparse" for each layer (`mlp_layer_types`).
        count: the number of layers.

    Raises:
        UnsupportedError: for another kind of layer.
        QuantError: for another number of kinds than layers.
    """
    for kind in kinds:
        refuse_unless(kind, ("dense", "sparse"), "mlp_layer_types")
    if len(kinds) != count:
        raise QuantError(f"config.json has {len(kinds)} mlp_layer_types and num_hidden_layers {count}")
    layers = tuple(i for i, kind in enumerate(kinds) if kind == "sparse")
    if not layers:
        return None
    return layers if len(layers) < count else ()


def routed_experts(
    found: Routed, names: Collection[str], kinds: Sequence[str] | None = None, **settings: Any
) -> Experts | None:
    """The mixture of experts; None if every layer is dense.

    Args:
        found: the fields of config.json.
        names: the names of the checkpoint's tensors.
        kinds: "dense" or "sparse" for each layer (`mlp_layer_types`); None: the first ones are dense.
        settings: further fields of `Experts`.

    Raises:
        UnsupportedError: for another kind of layer.
        QuantError: for another number of kinds than layers.
    """
    if kinds is None:
        kinds = ["dense" if i < found.dense else "sparse" for i in range(found.layers)]
    layers = sparse_layers(kinds, found.layers)
    if layers is None:
        return None
    return Experts(
        found.experts,
        found.active,
        found.expert_hidden,
        normalized=found.normalized,
        layers=layers,
        groups=found.groups or 1,
        active_groups=found.active_groups or 1,
        scale=found.scale,
        shared_hidden=(found.shared or 0) * found.expert_hidden,
        shared_gate=False,
        layout=expert_layout(names),
        **settings,
    )
