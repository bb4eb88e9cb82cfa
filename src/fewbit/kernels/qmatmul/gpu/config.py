"""Block sizes of the GPU kernels, by device.

Other devices use reasoned defaults. `python -m bench.qmatmul_gpu --tune --save` tunes them on its device and writes the file.
"""

import dataclasses
import functools
import pathlib
from typing import Any

from ...._json import checked, file_text, form_of, parsed_object
from ....errors import QuantError

FOLDER = pathlib.Path(__file__).parent / "configs"
DEFAULT = "gpu_default"


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The device properties that launches depend on.

    Attributes:
        multiprocessors: their number.
        shared: bytes of shared memory per program.
        sm: the compute capability, 90 for 9.0.
    """

    multiprocessors: int
    shared: int
    sm: int = 80


@dataclasses.dataclass(frozen=True)
class GemvConfig:
    """Block sizes of the float32 GEMV kernel.

    Attributes:
        rows: rows of the matrix `[N, K]` per program; fewer for several rows of activations.
        words: 32-bit words of each row per step.
        warps: warps per program.
    """

    rows: int
    words: int
    warps: int


@dataclasses.dataclass(frozen=True)
class PairsConfig:
    """Block sizes of the bfloat16 GEMV kernel on tensor cores.

    Attributes:
        rows: rows of the matrix `[N, K]` per program.
        step: elements along the contraction per step.
        warps: warps per program.
        stages: pipeline stages (steps loaded ahead).
    """

    rows: int
    step: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class DotConfig:
    """Block sizes of the GEMM kernel on tensor cores.

    Attributes:
        up_to: the largest number of rows of activations; None: any number.
        m: rows of activations in a block.
        n: columns of the result in a block.
        k: elements along the contraction per step.
        warps: warps per program.
        stages: pipeline stages (steps loaded ahead).
    """

    up_to: int | None
    m: int
    n: int
    k: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class GpuConfig:
    """The kernel configuration of one device.

    Attributes:
        device: its name, as CUDA gives it; empty for the defaults.
        measured: the date of the tuning; empty for untuned defaults.
        gemv_rows: the most rows of activations for the float32 GEMV kernel.
        pairs_rows: the most rows of bfloat16 activations for the bfloat16 GEMV kernel, where it supports the weight.
        ptx: whether that kernel decodes with inline PTX instead of Triton operations.
        torch_from: the fewest rows for which torch multiplies the dequantized weight instead.
        gemv: blocks of the float32 GEMV kernel, by the bits of a code.
        pairs: blocks of the bfloat16 GEMV kernel, likewise.
        dot: blocks of the GEMM kernel, by ascending rows of activations.
        codes: blocks of the kernel for two 8-bit operands, likewise.
        about: a comment for readers of the file.
    """

    device: str
    measured: str
    gemv_rows: int
    pairs_rows: int
    ptx: bool
    torch_from: int
    gemv: dict[int, GemvConfig]
    pairs: dict[int, PairsConfig]
    dot: tuple[DotConfig, ...]
    codes: tuple[DotConfig, ...]
    about: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, form: dict[str, Any]) -> "GpuConfig":
        """The configuration from the parsed JSON."""
        form = checked(form, _FORM, "a GPU configuration")
        fields = {name: form[name] for name in ("device", "measured", "gemv_rows", "pairs_rows", "ptx", "torch_from")}
        gemv = {int(bits): GemvConfig(**blocks) for bits, blocks in form["gemv"].items()}
        pairs = {int(bits): PairsConfig(**blocks) for bits, blocks in form["pairs"].items()}
        dot, codes = (tuple(DotConfig(**blocks) for blocks in form[name]) for name in ("dot", "codes"))
        return cls(**fields, gemv=gemv, pairs=pairs, dot=dot, codes=codes, about=tuple(form.get("about", ())))

    def to_json(self) -> dict[str, Any]:
        """The JSON form, as read by `from_json`."""
        return dataclasses.asdict(self)

    def __post_init__(self) -> None:
        for family in (self.dot, self.codes):
            ends = [blocks.up_to or 1 << 62 for blocks in family]
            if not family or ends != sorted(ends) or family[-1].up_to is not None:
                raise QuantError("blocks must ascend by up_to, and the last must have up_to=None")


_FORM = form_of(
    GpuConfig,
    gemv=dict[str, form_of(GemvConfig)],
    pairs=dict[str, form_of(PairsConfig)],
    dot=list[form_of(DotConfig)],
    codes=list[form_of(DotConfig)],
    about=list[str],
)


def blocks_for(family: tuple[DotConfig, ...], m: int) -> DotConfig:
    """The first block sizes that cover `m` rows.

    >>> blocks_for(gpu_config("").dot, 5).m
    16
    """
    return next(blocks for blocks in family if blocks.up_to is None or m <= blocks.up_to)


def splits_for(blocks: DotConfig, m: int, n: int, k: int, multiprocessors: int) -> int:
    """The number of splits of K that fills the GPU. Each split has four steps or more.

    >>> splits_for(DotConfig(16, 16, 64, 128, 4, 3), 16, 4096, 4096, 132)
    4
    """
    programs = -(-m // blocks.m) * -(-n // blocks.n)
    most = max(1, -(-k // blocks.k) // 4)
    splits = 1
    while splits * 2 <= most and programs * splits < multiprocessors and splits < 16:
        splits *= 2
    return splits


def stages_for(blocks: DotConfig | PairsConfig, step_bytes: int, gpu: Gpu) -> int:
    """The pipeline stages that fit in shared memory, at least one.

    >>> stages_for(DotConfig(None, 256, 128, 64, 8, 3), 36864, Gpu(128, 101376))
    2
    """
    return max(1, min(blocks.stages, gpu.shared // step_bytes))


def file_name(device: str) -> str:
    """The file stem of a device.

    >>> file_name("NVIDIA H200")
    'nvidia_h200'
    """
    return device.lower().replace(" ", "_") or DEFAULT


@functools.cache
def gpu_config(device: str) -> GpuConfig:
    """The configuration of a device, or the defaults if it has none.

    Args:
        device: the name, as `torch.cuda.get_device_name()` gives it; empty for the defaults.

    Returns:
        The configuration.

    >>> gpu_config("NVIDIA of tomorrow").measured
    ''
    """
    path = FOLDER / f"{file_name(device)}.json"
    if not path.exists():
        path = FOLDER / f"{DEFAULT}.json"
    return GpuConfig.from_json(parsed_object(file_text(path, "GPU configuration"), str(path)))
