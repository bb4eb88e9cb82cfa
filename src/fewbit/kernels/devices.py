"""Refuses kernels that XLA cannot partition where there are several devices."""

import jax
from jax.sharding import AxisType


def split_refusal() -> str | None:
    """Why a Pallas or Triton kernel is not chosen on several devices; None on one, and inside `jax.shard_map` on TPUs."""
    mesh = jax.sharding.get_abstract_mesh()
    is_manual = not mesh.empty and all(kind == AxisType.Manual for kind in mesh.axis_types)
    if jax.device_count() == 1 or (jax.default_backend() == "tpu" and is_manual):
        return None
    return "there are several devices, and XLA cannot partition this kernel; use jax.shard_map, or name the backend"
