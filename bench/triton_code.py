"""Counts instructions of the compiled Triton kernels, without a GPU.

    python -m bench.triton_code [--only TEXT] [--save]

The counts are instructions an element and widths of loads and stores, by architecture. A kernel is compiled for sm_80, sm_90
and sm_100 and disassembled. `lane instructions` are the static SASS instructions of a thread times the threads of a program
over its elements: loops that are not unrolled count once, branches that are seldom taken count. Of products, `in_loop` is the
same for the longest loop alone, the steps along K, over the weights that a step decodes.
"""

import argparse
import collections
import dataclasses
import functools
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import fewbit as fb
from fewbit.kernels.qmatmul.gpu import launch as triton_launch
from fewbit.kernels.qmatmul.gpu.config import Gpu, blocks_for, gpu_config
from fewbit.kernels.qmatmul.gpu.weight import Matrix
from fewbit.kernels.quantize.gpu import dequantize as triton_dequantize
from fewbit.kernels.quantize.gpu import hessian as triton_hessian
from fewbit.kernels.quantize.gpu import quantize as kernels
from fewbit.kernels.quantize.gpu.problem import TileProblem
from fewbit.torch.quantize import chosen

from .facts import save

ARCHITECTURES = (80, 90, 100)
KERNELS = (
    ("mxfp4", "naive"), ("mxfp4", "optimal"), ("mxfp6", "optimal"), ("mxfp8", "naive"), ("mxfp8", "optimal"),
    ("nvfp4", "naive"), ("nvfp4", "optimal"), ("nf4", "naive"), ("int4_g32", "naive"), ("int8_g128", "naive"),
    ("nf4", "optimal"), ("int4_g32", "optimal"),
)  # fmt: skip
BY_PTX = (("mxfp4", "naive"), ("nvfp4", "optimal"))
DECODED = ("mxfp4", "nvfp4")
FEW = ("int4_g64", "uint4_g64", "nf4", "mxfp4", "nvfp4", "int8", "fp8")
MULTIPLIED = (
    *((name, "x1") for name in FEW), ("int4_g64", "x16"), ("nvfp4", "x16"), ("fp8", "x16"),
    ("int4_g64", "x1-float32"), ("mxfp4", "x1-float32"), ("int8", "x1-float32"),
    ("int4_g64", "x16-stepped"), ("int4_g64", "x256"), ("mxfp4", "x256"), ("mxfp4", "grouped"),
)  # fmt: skip
FAMILIES = {"x1": 1, "x16": 16, "grouped": 512, "x1-float32": 1, "x16-stepped": 16, "x256": 256}
"""By name, how many rows of bfloat16 are multiplied with the matrix, or 32 of them; float32 and "stepped" do not decode in pairs."""
PAIRS = ("x1", "x16", "grouped")
CODES = ("int8", "fp8")
HOPPER = Gpu(132, 163 * 1024)
"""The multiprocessors of an H200, and the shared memory that an A100 has, too."""
TOOLS = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def main() -> int:
    """Prints a line a kernel and architecture."""
    parser = argparse.ArgumentParser(prog="python -m bench.triton_code")
    parser.add_argument("--save", action="store_true", help="write bench/results/triton.json")
    parser.add_argument("--only", default="", help="compile the kernels whose title contains this; the others' rows stay")
    options = parser.parse_args()
    rows = [row for title, make in makers().items() if options.only in title for row in make()]
    for row in rows:
        print(
            "{kernel:18} sm_{sm:<4} {lane_instructions:7.1f} a lane and element  {registers:4} registers  {memory}".format(
                **row
            )
        )
    if options.save:
        save("triton", ("triton",), rows=[*kept(rows), *rows])
    return 0


def makers() -> dict[str, Callable[[], list[dict[str, Any]]]]:
    """What makes the rows of each kernel, by its title."""
    found: dict[str, Callable[[], list[dict[str, Any]]]] = {}
    for name, method in KERNELS:
        found[f"{name} {method}"] = functools.partial(quantizer_rows, name, method)
    for name, method in BY_PTX:
        found[f"{name} {method}-ptx"] = functools.partial(quantizer_rows, name, method, (100,), inline_ptx=True)
    for name in DECODED:
        found[f"{name} decoded"] = functools.partial(decoder_rows, name)
        found[f"{name} swept"] = functools.partial(sweep_rows, name)
    for name, family in MULTIPLIED:
        found[f"{name} {family}"] = functools.partial(product_rows, name, family)
    return found | {f"{name} codes": functools.partial(codes_rows, name) for name in CODES}


def kept(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The committed rows of kernels that were not compiled now, and are still made."""
    path, now = pathlib.Path(__file__).parent / "results" / "triton.json", {row["kernel"] for row in rows}
    committed = json.loads(path.read_text())["rows"] if path.exists() else []
    return [row for row in committed if row["kernel"] not in now and row["kernel"] in makers()]


def quantizer_rows(
    name: str, method: str, architectures: tuple[int, ...] = ARCHITECTURES, *, inline_ptx: bool = False
) -> list[dict[str, Any]]:
    """The figures of one quantizer, reading bfloat16 rows that its tiles divide; with inline PTX for the last architecture."""
    problem = TileProblem(chosen(fb.scheme(name), method), 4096, 4096)
    holder = problem.scheme.scale
    scale = "*u8" if isinstance(holder, fb.formats.AbstractFormat) else {"float32": "*fp32", "float16": "*fp16"}[str(holder)]
    types = {
        "x_ptr": "*bf16",
        "codes_ptr": "*u8",
        "scale_ptr": scale,
        "unit_ptr": "*fp32" if problem.scheme.tensor_scale else scale,
    }
    types |= {"fractions_ptr": "*fp32"} | dict.fromkeys(("tiles", "length", "tiles_in_row", "row_bytes"), "i32")
    constants = problem.encoding(architectures[-1] if inline_ptx else 0)
    elements = problem.tiles_in_program * problem.padded_tile
    title = f"{name} {method}-ptx" if inline_ptx else f"{name} {method}"
    return rows_of(title, kernels.quantize_kernel, types, constants, problem.warps, elements, architectures)


def decoder_rows(name: str, architectures: tuple[int, ...] = ARCHITECTURES) -> list[dict[str, Any]]:
    """The figures of one decoder to bfloat16."""
    problem = TileProblem(fb.scheme(name), 4096, 4096)
    types = {
        "codes_ptr": "*u8",
        "scale_ptr": "*u8",
        "unit_ptr": "*fp32" if problem.scheme.tensor_scale else "*u8",
        "out_ptr": "*bf16",
    }
    types |= dict.fromkeys(("tiles", "length", "tiles_in_row", "row_bytes"), "i32")
    elements = problem.tiles_in_program * problem.padded_tile
    kernel = triton_dequantize.dequantize_kernel
    return rows_of(f"{name} decoded", kernel, types, problem.decoding(), problem.warps, elements, architectures)


def sweep_rows(name: str, architectures: tuple[int, ...] = ARCHITECTURES) -> list[dict[str, Any]]:
    """The figures of one Hessian sweep; the loop over candidates counts once."""
    problem = TileProblem(fb.scheme(name), 4096, 4096)
    types = {"x_ptr": "*bf16", "H_ptr": "*fp32", "scale_ptr": "*fp32", "candidates_ptr": "*fp32"}
    types |= dict.fromkeys(("rows", "length", "tiles_in_row", "candidates"), "i32")
    elements = triton_hessian.ROWS * problem.padded_tile
    constants = triton_hessian.constants(problem)
    return rows_of(f"{name} swept", triton_hessian.sweep_kernel, types, constants, 4, elements, architectures)


def product_rows(name: str, family: str, architectures: tuple[int, ...] = ARCHITECTURES) -> list[dict[str, Any]]:
    """The figures of one product with a matrix of 4096 x 4096, stored as `[N, K]`; a step along K counts once."""
    return [product_row(name, family, sm) for sm in architectures]


def product_row(name: str, family: str, sm: int) -> dict[str, Any]:
    """The same for one architecture."""
    scheme, m, config = fb.scheme(name).along(0, 2), FAMILIES[family], gpu_config("")
    matrix = Matrix(scheme, 4096, 4096)
    tiles = 4096 // matrix.tile_k if matrix.tile_k else 1
    row_bytes, scale_strides = 4096 * matrix.bits // 8, (1, tiles)
    if family in PAIRS:
        gpu = dataclasses.replace(HOPPER, sm=sm)
        groups = triton_launch.Groups(32, 4096 * row_bytes, 4096 * tiles, 1) if family == "grouped" else triton_launch.ONE
        how: Any = {"ptx": config.ptx, "gpu": gpu, "groups": groups}
        few = config.pairs[matrix.bits]
        launch = triton_launch.pairs_launch(matrix, m, 4096, row_bytes, scale_strides, few, **how)
        elements = launch.constants["BN"] * launch.constants["KS"] * launch.constants["CHUNK"]
    elif m <= config.gemv_rows:
        launch = triton_launch.gemv_launch(matrix, m, 4096, row_bytes // 4, scale_strides, config.gemv[matrix.bits])
        elements = launch.constants["BN"] * launch.constants["BW"] * (32 // matrix.bits)
    else:
        settings: Any = {"precision": "bf16", "gpu": HOPPER}
        blocks = blocks_for(config.dot, m)
        launch = triton_launch.dot_launch(matrix, m, 4096, (1, row_bytes), scale_strides, blocks, **settings)
        elements = launch.constants["BN"] * launch.constants["BK"]
    held = scheme.scale
    scale = "*u8" if isinstance(held, fb.formats.AbstractFormat) else "*fp32"
    zero = "*u8" if scheme.zero_point is not None else scale
    y, codes = "*bf16" if launch.splits == 1 else "*fp32", "*i32" if "BW" in launch.constants else "*u8"
    return launched_rows(
        f"{name} {family}",
        launch,
        ("*bf16", codes, scale, zero, "*fp32", "*fp32", *(("*i32",) if launch.takes_sizes else ()), y),
        elements,
        (sm,),
    )[0]


def codes_rows(name: str, architectures: tuple[int, ...] = ARCHITECTURES) -> list[dict[str, Any]]:
    """The figures of one product of codes with codes, both along K; 8-bit floats need sm_89 or later."""
    config, is_whole = gpu_config("").codes[-1], name == "int8"
    launch = triton_launch.codes_launch(4096, 4096, 4096, (4096, 1, 1, 4096), (1, 1), config, is_whole=is_whole, gpu=HOPPER)
    code = "*i8" if is_whole else "*fp8e4nv"
    able = tuple(sm for sm in architectures if is_whole or sm >= 89)
    return launched_rows(f"{name} codes", launch, (code, code, "*fp32", "*fp32", "*bf16"), config.n * config.k, able)


def launched_rows(
    name: str, launch: Any, pointers: tuple[str, ...], elements: int, architectures: tuple[int, ...]
) -> list[dict[str, Any]]:
    """The figures of a launch; numbers that are 1 are compiled in, as Triton does it."""
    names = [n for n in launch.kernel.arg_names if n not in launch.constants]
    numbers = dict(zip(names[len(pointers) - 1 : -1], launch.numbers, strict=True))
    ones = {n: 1 for n, value in numbers.items() if value == 1}
    types = dict(zip([*names[: len(pointers) - 1], names[-1]], pointers, strict=True)) | dict.fromkeys(
        set(numbers) - set(ones), "i32"
    )
    constants = launch.constants | ones
    return rows_of(name, launch.kernel, types, constants, launch.warps, elements, architectures, launch.stages)


def rows_of(
    name: str,
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    warps: int,
    elements: int,
    architectures: tuple[int, ...],
    stages: int = 3,
) -> list[dict[str, Any]]:
    """The figures of one kernel for each architecture; every argument is divisible by 16, as those of whole tensors are."""
    signature = {n: types.get(n, "constexpr") for n in kernel.arg_names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n in types}
    rows = []
    for sm in architectures:
        source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", sm, 32),
            options={"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True},
        )
        text = disassembled("nvdisasm", compiled.asm["cubin"], "-c")
        operations = sass(text)
        memory = collections.Counter(op for op in operations if op.startswith(("LDG", "STG", "STL", "LDL", "LDGSTS")))
        rows.append(
            {
                "kernel": name,
                "sm": sm,
                "lane_instructions": round(len(operations) * warps * 32 / elements, 1),
                "registers": registers(compiled.asm["cubin"]),
                "memory": dict(sorted(memory.items())),
                "shuffles": sum(op.startswith("SHFL") for op in operations),
                **({"in_loop": round(loop(text) * warps * 32 / elements, 1)} if {"BW", "BK", "KS"} & set(constants) else {}),
                **matrix_instructions(operations, compiled.metadata.shared),
            }
        )
    return rows


def matrix_instructions(operations: list[str], shared: int) -> dict[str, Any]:
    """The instructions of the tensor cores, where there are any, and the bytes of shared memory."""
    found = collections.Counter(op for op in operations if re.match(r"[HIQU]?[HIQ]?MMA|[HIQ]GMMA|UTC\w*MMA", op))
    return {"matrix": dict(sorted(found.items())), "shared": shared} if found else {}


def loop(text: str) -> int:
    """How many instructions the longest loop of a disassembly has."""
    starts: dict[str, int] = {}
    count, longest = 0, 0
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            starts[label[1]] = count
        count += len(sass(line))
        back = re.search(r"BRA(?:\.\w+)* .*`\((\.L_x_\d+)\)", line)
        if back and back[1] in starts:
            longest = max(longest, count - starts[back[1]])
    return longest


def sass(text: str) -> list[str]:
    """The operations of a disassembly, in order, without padding."""
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text)
    return [op for op in found if op != "NOP"]


def registers(cubin: bytes) -> int:
    """How many registers a thread takes."""
    found = re.search(r"REG:(\d+)", disassembled("cuobjdump", cubin, "-res-usage"))
    return int(found[1]) if found else 0


def disassembled(tool: str, cubin: bytes, *options: str) -> str:
    """What a tool of the wheel says of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([TOOLS / tool, *options, file.name], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
