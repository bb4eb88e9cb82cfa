"""Whether kernels that XLA cannot split over devices serve here."""

import jax
from jax.sharding import AxisType


def split_refusal() -> str | None:
    """Why a Pallas kernel is left aside on several devices; None where there is one, or each computes for itself."""
    if jax.device_count() == 1 or (jax.default_backend() == "tpu" and _is_manual()):
        return None
    return "there are several devices, and XLA splits no kernel over them; call it within jax.shard_map, or name it"


def _is_manual() -> bool:
    """Whether each device computes for itself here, as within `jax.shard_map` over the whole mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and all(kind == AxisType.Manual for kind in mesh.axis_types)
