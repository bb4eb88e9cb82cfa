"""A model of what bounds products on TPUs; nothing is measured.

    python -m bench.tpu_model [--only weights|ragged|pairs] [--save]

The bytes are counted from the kernels' own blocks, and the rates are the chips' documented ones. Where libtpu can be imported
(`pip install libtpu`; it needs no TPU), its compiler's schedule for v5e says how many cycles one block of decoding and
multiplying takes; decoding is the third bound. Stalls, and the start of the pipeline, are left out.

Three products: bfloat16 rows with one weight; rows in groups, as of a mixture of experts, each with its group's weight; and two
operands of integers.
"""

import argparse
import dataclasses
import glob
import os
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fewbit as fb
from fewbit.kernels.qmatmul.tpu import ragged
from fewbit.kernels.qmatmul.tpu.blocks import PLAIN, Block, Cut, bytes_moved
from fewbit.kernels.qmatmul.tpu.gemm import DecodedProduct, stacked_product
from fewbit.kernels.qmatmul.tpu.int8_blocks import Pair
from fewbit.kernels.qmatmul.tpu.int8_gemm import PairedProduct, paired_stacks
from fewbit.kernels.qmatmul.tpu.kernel import blocks_of
from fewbit.kernels.qmatmul.tpu.problem import Form

from .facts import save

# Bytes a second of HBM, and bfloat16 operations a second, of one chip: cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}.
CHIPS = {"v4": (1.2e12, 275e12), "v5e": (0.819e12, 197e12), "v5p": (2.765e12, 459e12), "v6e": (1.64e12, 918e12)}
V5E_CLOCK = 197e12 / (4 * 128 * 128 * 2)  # four matrix units of 128 x 128, each a product and a sum a cycle
INT8 = {"v5e": 394e12, "v5p": 918e12, "v6e": 1836e12}  # operations a second; Mosaic has no int8 products on v4
SHAPE = (4096, 4096)
SCHEMES = ("int8", "int4_g64", "uint4_g64", "mxfp8", "mxfp4", "nvfp4", "nf4")
EXPERTS, EXPERT = 32, (2880, 2880)  # one of gpt-oss-20b's matrices
GROUPS = [(4, 4), (64, 32), (4096, 32)]  # rows, and how many experts have some: a token of four, a few, and many
PAIRS = [("int8", "int8", 16), ("int8", "int4_g128", 16), ("int8", "int4_g64", 16)]  # and the rows of x
PAIRS += [("int8", "int8", 4096), ("int8", "int4_g128", 4096), ("int8", "int4_g64", 4096)]


def main() -> None:
    """Prints a row for each product and chip, and saves them where asked, one file a kind of product."""
    parser = argparse.ArgumentParser(prog="python -m bench.tpu_model", description="the bounds of products on TPUs, a model")
    parser.add_argument("--only", choices=["weights", "ragged", "pairs"], help="one kind of product; all of them otherwise")
    parser.add_argument("--save", action="store_true", help="write bench/results/tpu_model*.json")
    options = parser.parse_args()
    tables: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "weights": lambda: [row for name in SCHEMES for row in bounds(name, 16)],
        "ragged": lambda: [row for m, active in GROUPS for row in ragged_bounds("mxfp4", m, active)],
        "pairs": lambda: [row for case in PAIRS for row in pair_bounds(*case)],
    }
    for kind in [options.only] if options.only else tables:
        rows = tables[kind]()
        for row in rows:
            print(" ".join(f"{key} {value}" for key, value in row.items()))
        if options.save:
            shape = (EXPERTS, *EXPERT) if kind == "ragged" else SHAPE
            name = "tpu_model" if kind == "weights" else f"tpu_model_{kind}"
            save(name, ("libtpu",), model=True, shape=shape, rows=rows)


def bounds(name: str, m: int) -> list[dict[str, Any]]:
    """The bounds of `x @ w` for m rows of bfloat16 and one scheme, in microseconds, on each chip."""
    q, x = quantized(name, (1, *SHAPE)), jax.ShapeDtypeStruct((1, m, SHAPE[0]), jnp.bfloat16)
    cut = Cut.of(Form.of(x, q, contracts_last=False, result=jnp.bfloat16), PLAIN)
    moved = sum(bytes_moved(blocks_of(DecodedProduct(cut), x, q), cut.grid).values())
    cycles = scheduled_cycles("fewbit_qmatmul", stacked_product, x, q)
    return [
        {"scheme": name, "chip": chip, "m": m}
        | times(
            chip, moved, 2 * (SHAPE[0] * SHAPE[1] + m * sum(SHAPE)), 2 * m * SHAPE[0] * SHAPE[1] / rate, cycles, cut.grid
        )
        for chip, (_, rate) in CHIPS.items()
    ]


def ragged_bounds(name: str, m: int, active: int) -> list[dict[str, Any]]:
    """The same for m rows, evenly in groups of so many experts, the others being empty."""
    q, x = quantized(name, (EXPERTS, *EXPERT)), jax.ShapeDtypeStruct((m, EXPERT[0]), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((1, *x.shape), x.dtype)
    cut = Cut.of(Form.of(rows, q, contracts_last=False, result=jnp.bfloat16), ragged.PLAIN)
    sizes = np.zeros(EXPERTS, np.int32)
    sizes[:active] = m // active
    visits = ragged.Visits.of(jnp.asarray(sizes), m, cut.m)
    groups, blocks = np.asarray(visits.group), np.asarray(visits.block)

    def known(block: Block) -> Block:
        return dataclasses.replace(block, index=lambda *step: tuple(map(int, block.index(*step, groups, blocks))))

    grid = (cut.grid[1], int(visits.count), cut.grid[2])
    of_groups = ragged.grouped_blocks(DecodedProduct(cut), rows, q)
    moved = sum(bytes_moved(list(map(known, of_groups)), grid).values())

    def product(x: Any, q: Any, *, contracts_last: bool, result: Any) -> jax.Array:
        return ragged.grouped_product(x, q, jnp.asarray(sizes), contracts_last=contracts_last, result=result)

    cycles = scheduled_cycles("fewbit_qmatmul_ragged", product, x, q)
    dense = 2 * (active * EXPERT[0] * EXPERT[1] + m * sum(EXPERT))
    work = 2 * int(visits.count) * cut.m * EXPERT[0] * EXPERT[1]  # a visit multiplies all rows of its block
    return [
        {"scheme": name, "chip": chip, "m": m, "experts": active, "visits": int(visits.count)}
        | times(chip, moved, dense, work / rate, cycles, grid)
        for chip, (_, rate) in CHIPS.items()
    ]


def pair_bounds(left: str, right: str, m: int) -> list[dict[str, Any]]:
    """The same for two operands of integers."""
    q = quantized(right, (1, *SHAPE))
    x = jax.eval_shape(lambda x: fb.quantize(x, left), jax.ShapeDtypeStruct((1, m, SHAPE[0]), jnp.bfloat16))
    pair = Pair.of(x, q, contracts_last=False, result=jnp.bfloat16)
    moved = sum(bytes_moved(blocks_of(PairedProduct(pair), x, q), pair.grid).values())
    cycles = scheduled_cycles("fewbit_paired_qmatmul", paired_stacks, x, q)
    dense, work = 2 * (SHAPE[0] * SHAPE[1] + m * sum(SHAPE)), 2 * m * SHAPE[0] * SHAPE[1]
    return [
        {"left": left, "right": right, "chip": chip, "m": m}
        | times(chip, moved, dense, work / rate, cycles, pair.grid)
        | {"dense_matrix_us": round(1e6 * work / CHIPS[chip][1], 1)}
        for chip, rate in INT8.items()
    ]


def quantized(name: str, shape: tuple[int, ...]) -> Any:
    """The shapes of a stack of bfloat16 matrices, quantized along their first axis."""
    return jax.eval_shape(lambda w: fb.quantize(w, name, axis=-2), jax.ShapeDtypeStruct(shape, jnp.bfloat16))


def times(
    chip: str, moved: float, dense: float, matrix: float, cycles: int | None, grid: tuple[int, ...]
) -> dict[str, float]:
    """The bounds by memory, by the matrix unit and, on v5e, by the schedule, in microseconds; `dense` is in bytes, too."""
    bandwidth = CHIPS[chip][0]
    row = {"megabytes": round(moved / 1e6, 2), "memory_us": round(1e6 * moved / bandwidth, 1)}
    row |= {"dense_memory_us": round(1e6 * dense / bandwidth, 1), "matrix_us": round(1e6 * matrix, 1)}
    if chip == "v5e" and cycles is not None:
        row["decoding_us"] = round(1e6 * cycles * int(np.prod(grid)) / V5E_CLOCK, 1)
    return row


def scheduled_cycles(name: str, product: Callable[..., Any], x: Any, q: Any) -> int | None:
    """The instruction bundles of one step of a kernel's grid as libtpu schedules them for v5e; None without libtpu."""
    if DUMPS is None:
        return None
    from jax.experimental import topologies

    chip = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    here = jax.sharding.SingleDeviceSharding(chip)

    def program(x: Any, q: Any) -> jax.Array:
        return product(x, q, contracts_last=False, result=jnp.bfloat16)

    for old in glob.glob(f"{DUMPS}/*"):
        os.remove(old)
    jax.jit(program, in_shardings=here, out_shardings=here).lower(x, q).compile()
    (path,) = (p for p in glob.glob(f"{DUMPS}/*{name}*-final_bundles.txt") if "schedule" not in p)
    with open(path) as lines:
        return sum(1 for line in lines if re.match(r"\s*0x[0-9a-f]+\s+[A-Z]*\s*: >", line))


def dumps() -> str | None:
    """The folder that libtpu writes its schedules to, set before it starts; None where there is no libtpu."""
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
