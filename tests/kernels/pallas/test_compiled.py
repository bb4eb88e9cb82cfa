"""The TPU kernels as libtpu compiles them, which needs no TPU. `make test-all` has libtpu in a folder of its own.

Installed like any package it would be found by every JAX process of the environment, and searched for a TPU.
"""

import importlib.util
import os
import subprocess
import sys

import pytest

OWN_FOLDER = os.path.join(sys.prefix, "libtpu")
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None and not os.path.isdir(OWN_FOLDER), reason="libtpu is not installed"
)


def run(program: str, *arguments: str) -> None:
    """Runs a program in a process of its own: libtpu reads its settings when it is loaded, and stays."""
    path = os.pathsep.join([*sys.path, OWN_FOLDER])
    # Another worker of pytest may have loaded libtpu, which else allows one process.
    alone = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}
    settings = {**os.environ, **alone, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, env=settings)


SCHEMES = ("int4_g64", "uint4_g64", "q4_1", "nf4_dq", "mxfp8", "mxfp6", "nvfp4", "fp8_block128", "int8")
CHIPS = ("v4:2x2x1", "v5e:2x2", "v6e:2x2")
SOME = (("int4_g64", "v4:2x2x1"), ("nvfp4", "v5e:2x2"), ("q4_1", "v6e:2x2"))
REST = ((scheme, chip) for scheme in SCHEMES for chip in CHIPS if (scheme, chip) not in SOME)
CASES = (*SOME, *(pytest.param(*case, marks=pytest.mark.long) for case in REST))

COMPILES = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
import fewbit as fb
from fewbit.kernels.qmatmul.tpu.ragged import grouped_product
from fewbit.kernels.qmatmul.tpu.gemm import stacked_product

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
@needs_libtpu
@pytest.mark.parametrize(("scheme", "chip"), CASES)
def test_it_compiles_without_an_unpacked_copy(scheme: str, chip: str):
    run(COMPILES, scheme, chip)


MULTIPLIES_PAIRS = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
import fewbit as fb
from fewbit.kernels.qmatmul.tpu.int8_gemm import paired_stacks
from fewbit.kernels.qmatmul.tpu.ragged import grouped_pair

here = jax.sharding.SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1]).devices[0])
for left, right, axis, contracts_last, (rows, columns), m in [
    ("int8", "int4_g64", -2, False, (4096, 1024), 300),
    ("uint8", "uint4", -1, True, (1430, 600), 300),
    ("int8", "int4", -2, True, (1430, 600), 16),
    ("mxfp8", "mxfp8", -1, True, (1430, 600), 16),
    ("fp8", "fp8", -2, False, (600, 1430), 300),
]:
    length = columns if contracts_last else rows
    q = jax.eval_shape(lambda w: fb.quantize(w, right, axis=axis), jax.ShapeDtypeStruct((1, rows, columns), jnp.bfloat16))
    x = jax.eval_shape(lambda x: fb.quantize(x, left), jax.ShapeDtypeStruct((1, m, length), jnp.bfloat16))
    product = lambda x, q: paired_stacks(x, q, contracts_last=contracts_last, result=jnp.bfloat16)
    compiled = jax.jit(product, in_shardings=here, out_shardings=here).lower(x, q).compile()
    # Scales are laid as the result is, x is filled up to whole blocks; an unpacked copy of the weight would be more.
    assert compiled.memory_analysis().temp_size_in_bytes <= 4 * m * (rows + columns) + 8 * q.scale.size + 2**16

for left, right, axis in ("int8", "int4_g64", -2), ("uint8", "uint4", -1), ("fp8", "fp8", -1):
    q = jax.eval_shape(lambda w: fb.quantize(w, right, axis=axis), jax.ShapeDtypeStruct((8, 1430, 600), jnp.bfloat16))
    x = jax.eval_shape(lambda x: fb.quantize(x, left), jax.ShapeDtypeStruct((1, 300, 600 if axis == -1 else 1430), jnp.bfloat16))
    product = lambda x, q, sizes: grouped_pair(x, q, sizes, contracts_last=axis == -1, result=jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    compiled = jax.jit(product, in_shardings=here, out_shardings=here).lower(x, q, sizes).compile()
    # As above, with x and the result laid out anew (5 MB); an unpacked copy would be 6.9 MB more.
    assert compiled.memory_analysis().temp_size_in_bytes <= 8 * 300 * 2030 + 8 * q.scale.size + 2**16
"""


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("chip", ["v5e:2x2", pytest.param("v6e:2x2", marks=pytest.mark.long)])
def test_pairs_compile_without_an_unpacked_copy(chip: str):
    run(MULTIPLIES_PAIRS, chip)


QUANTIZES = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
import fewbit as fb
from fewbit.kernels.quantize import Decoding, PallasTPUDequantizer
from fewbit.kernels.quantize.tpu.quantize import quantized_tiles

here = jax.sharding.SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1]).devices[0])
some = [
    *[("mxfp4", -1, 32, 0), ("int4_g64", -2, 64, 0), ("nf4", -1, 64, 0), ("int8", -1, 2048, 0)],
    *[("mxfp6", -1, 32, 0), ("nvfp4_absmax", -2, 16, 50), ("uint4_g64", -2, 64, 3000)],
]
others = [
    *[("fp8", -2, 2048, 0), ("nvfp4", -1, 16, 0), ("mxfp6", -2, 32, 0), ("int3_g64", -1, 64, 0)],
    *[("uint4_g64", -1, 64, 50), ("int5", -1, 1998, 50)],
]
for name, axis, tile, short in some if sys.argv[2] == "some" else some + others:
    x = jax.ShapeDtypeStruct((1, 2048 - short, 2048 - short) if short < 2048 else (1, 5000, 256), jnp.bfloat16)
    scheme = fb.scheme(name).along(axis, 3)
    unit = jnp.ones(1) if scheme.tensor_scale else None
    run = lambda x: quantized_tiles(x, scheme, tile, unit, is_last=axis == -1)
    compiled = jax.jit(run, in_shardings=here, out_shardings=here).lower(x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= short * 2**16, name

for name, axis in ("mxfp6", -1), ("uint4_g64", -2), ("nvfp4", -1), ("int3_g64", -2), ("q8_0", -2):
    q = jax.eval_shape(lambda x: fb.quantize(x, name, axis=axis), jax.ShapeDtypeStruct((1000, 2000), jnp.bfloat16))
    backend = PallasTPUDequantizer()
    run = lambda q: backend.run(Decoding(q.shape, "bfloat16", q.scheme, q.tiles), q)
    jax.jit(run, in_shardings=here, out_shardings=here).lower(q).compile()
"""


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
    ("chip", "schemes"),
    [("v5e:2x2", "some"), *(pytest.param(chip, "all", marks=pytest.mark.long) for chip in ("v5e:2x2", "v6e:2x2"))],
)
def test_the_quantizer_compiles_and_makes_nothing_beside_its_results(chip: str, schemes: str):
    run(QUANTIZES, chip, schemes)
