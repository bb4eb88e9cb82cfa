"""The TPU kernel as libtpu compiles it, which needs no TPU: `pip install libtpu`. Left out where it is not installed."""

import importlib.util
import os
import subprocess
import sys

import pytest

SCHEMES = ("int4_g64", "uint4_g64", "q4_1", "nf4_dq", "mxfp8", "nvfp4", "fp8_block128", "int8")

# In a process of its own: libtpu reads its settings when it is loaded, and stays.
COMPILES = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
import fewbit as fb
from fewbit.kernels.qmatmul.pallas_ragged import grouped_product
from fewbit.kernels.qmatmul.pallas_tpu import stacked_product

here = jax.sharding.SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[2]).devices[0])
for axis, contracts_last, (rows, columns), dtype in [
    (-2, False, (4096, 1024), jnp.bfloat16),
    (-1, True, (1000, 4096), jnp.float32),
    (-2, True, (1430, 600), jnp.float32),
    (-1, False, (600, 1430), jnp.bfloat16),
]:
    q = jax.eval_shape(lambda w: fb.quantize(w, sys.argv[1], axis=axis), jax.ShapeDtypeStruct((1, rows, columns), dtype))
    x = jax.ShapeDtypeStruct((1, 300, columns if contracts_last else rows), dtype)
    product = lambda x, q: stacked_product(x, q, contracts_last=contracts_last, result=dtype)
    compiled = jax.jit(product, in_shardings=here, out_shardings=here).lower(x, q).compile()
    held = compiled.memory_analysis().temp_size_in_bytes
    # x and the result may be laid out anew, scales repeated; a copy of the unpacked weight would be more than all of them.
    assert held <= 8 * 300 * (rows + columns) + 4 * q.scale.size, held

for axis, contracts_last in (-1, True), (-2, False):
    shape = jax.ShapeDtypeStruct((8, 1000, 1024), jnp.bfloat16)
    q = jax.eval_shape(lambda w: fb.quantize(w, sys.argv[1], axis=axis), shape)
    x = jax.ShapeDtypeStruct((300, 1024 if contracts_last else 1000), jnp.bfloat16)
    product = lambda x, q, sizes: grouped_product(x, q, sizes, contracts_last=contracts_last, result=jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    compiled = jax.jit(product, in_shardings=here, out_shardings=here).lower(x, q, sizes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 8 * 300 * 2024 + 4 * q.scale.size
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("chip", ["v4:2x2x1", "v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_compiles_without_an_unpacked_copy(scheme: str, chip: str):
    settings = {**os.environ, "TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", COMPILES, scheme, chip], check=True, env=settings)
