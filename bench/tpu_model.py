"""What bounds a product on TPUs, as a model: nothing here is measured on one.

    python -m bench.tpu_model [--save]

The bytes are counted from the kernel's own blocks, and the two rates are the chips' documented ones. Where libtpu can be
imported (`pip install libtpu`; it needs no TPU), its compiler's schedule for v5e says how many cycles one block of decoding
and multiplying takes; decoding is the third bound. Stalls, and the start of the pipeline, are left out.
"""

import argparse
import glob
import os
import re
import tempfile
from typing import Any

import jax
import jax.numpy as jnp

import fewbit as fb
from fewbit.kernels.qmatmul.pallas_blocks import PLAIN, Cut, bytes_moved
from fewbit.kernels.qmatmul.pallas_form import Form
from fewbit.kernels.qmatmul.pallas_tpu import blocks_of, stacked_product

from .facts import save

# Bytes a second of HBM, and bfloat16 operations a second, of one chip: cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}.
CHIPS = {"v4": (1.2e12, 275e12), "v5e": (0.819e12, 197e12), "v5p": (2.765e12, 459e12), "v6e": (1.64e12, 918e12)}
V5E_CLOCK = 197e12 / (4 * 128 * 128 * 2)  # four matrix units of 128 x 128, each a product and a sum a cycle
SHAPE = (4096, 4096)
SCHEMES = ("int8", "int4_g64", "uint4_g64", "mxfp8", "mxfp4", "nvfp4", "nf4")


def main() -> None:
    """Prints a row for each scheme and chip, and saves them where asked."""
    parser = argparse.ArgumentParser(prog="python -m bench.tpu_model", description="the bounds of products on TPUs, a model")
    parser.add_argument("--save", action="store_true", help="write bench/results/tpu_model.json")
    options = parser.parse_args()
    rows = [row for name in SCHEMES for row in bounds(name, 16)]
    for row in rows:
        print(" ".join(f"{key} {value}" for key, value in row.items()))
    if options.save:
        save("tpu_model", ("libtpu",), model=True, shape=SHAPE, rows=rows)


def bounds(name: str, m: int) -> list[dict[str, Any]]:
    """The bounds of `x @ w` for m rows of bfloat16 and one scheme, in microseconds, on each chip."""
    q = jax.eval_shape(lambda w: fb.quantize(w, name, axis=-2), jax.ShapeDtypeStruct((1, *SHAPE), jnp.bfloat16))
    x = jax.ShapeDtypeStruct((1, m, SHAPE[0]), jnp.bfloat16)
    cut = Cut.of(Form.of(x, q, contracts_last=False, result=jnp.bfloat16), PLAIN)
    moved = sum(bytes_moved(blocks_of(cut, q), cut.grid).values())
    dense = 2 * (SHAPE[0] * SHAPE[1] + m * sum(SHAPE))
    steps = cut.grid[0] * cut.grid[1] * cut.grid[2]
    cycles = scheduled_cycles(x, q)
    rows = []
    for chip, (bandwidth, rate) in CHIPS.items():
        row = {"scheme": name, "chip": chip, "m": m, "megabytes": round(moved / 1e6, 2)}
        row |= {"memory_us": round(1e6 * moved / bandwidth, 1), "dense_memory_us": round(1e6 * dense / bandwidth, 1)}
        row["matrix_us"] = round(1e6 * 2 * m * SHAPE[0] * SHAPE[1] / rate, 1)
        if chip == "v5e" and cycles is not None:
            row["decoding_us"] = round(1e6 * cycles * steps / V5E_CLOCK, 1)
        rows.append(row)
    return rows


def scheduled_cycles(x: Any, q: Any) -> int | None:
    """The instruction bundles of one step of the kernel's grid as libtpu schedules them for v5e; None without libtpu."""
    if DUMPS is None:
        return None
    from jax.experimental import topologies

    chip = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    here = jax.sharding.SingleDeviceSharding(chip)

    def product(x: Any, q: Any) -> jax.Array:
        return stacked_product(x, q, contracts_last=False, result=jnp.bfloat16)

    for old in glob.glob(f"{DUMPS}/*"):
        os.remove(old)
    jax.jit(product, in_shardings=here, out_shardings=here).lower(x, q).compile()
    (path,) = (p for p in glob.glob(f"{DUMPS}/*fewbit_qmatmul*-final_bundles.txt") if "schedule" not in p)
    with open(path) as lines:
        return sum(1 for line in lines if re.match(r"\s*0x[0-9a-f]+\s+[A-Z]*\s*: >", line))


def dumps() -> str | None:
    """The folder that libtpu writes its schedules to, told to it before it starts; None where there is no libtpu."""
    try:
        import libtpu  # noqa: F401  # type: ignore[import-not-found]
    except ImportError:
        return None
    folder = tempfile.mkdtemp()
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    return folder


DUMPS = dumps()

if __name__ == "__main__":
    main()
