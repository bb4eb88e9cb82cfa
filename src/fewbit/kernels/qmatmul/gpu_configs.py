"""The blocks that the GPU's kernels take: a JSON file for each device, and one of reasoned defaults for all others.

`python -m bench.qmatmul_gpu --tune --save` measures on the machine it runs on and writes the file of its device.
"""

import dataclasses
import functools
import pathlib
from typing import Any

from ..._json import checked, file_text, form_of, parsed_object
from ...errors import QuantError

FOLDER = pathlib.Path(__file__).parent / "configs"
DEFAULT = "gpu_default"


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What the launches depend on of a device.

    Attributes:
        multiprocessors: how many it has.
        shared: the bytes of shared memory that one program may have.
        sm: the compute capability, 90 for 9.0.
    """

    multiprocessors: int
    shared: int
    sm: int = 80


@dataclasses.dataclass(frozen=True)
class GemvConfig:
    """The blocks of the product of a few rows.

    Attributes:
        rows: how many rows of the matrix `[N, K]` a program has; fewer where there are more rows of activations.
        words: how many words of 32 bits of each it reads in a step.
        warps: how many warps it has.
    """

    rows: int
    words: int
    warps: int


@dataclasses.dataclass(frozen=True)
class PairsConfig:
    """The blocks of the product of a few rows of bfloat16 on tensor cores.

    Attributes:
        rows: how many rows of the matrix `[N, K]` a program has.
        step: the length of a step along the contraction.
        warps: how many warps a program has.
        stages: how many steps are loaded ahead.
    """

    rows: int
    step: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class DotConfig:
    """The blocks of a product on tensor cores.

    Attributes:
        up_to: how many rows of activations it is for; None: any number.
        m: rows of activations in a block.
        n: columns of the result in a block.
        k: the length of a step along the contraction.
        warps: how many warps a program has.
        stages: how many steps are loaded ahead.
    """

    up_to: int | None
    m: int
    n: int
    k: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class GpuConfig:
    """What is taken on one device.

    Attributes:
        device: its name, as CUDA gives it; empty for the defaults.
        measured: the date of the tuning; empty where nothing was measured.
        gemv_rows: up to how many rows of activations the product of a few rows serves.
        pairs_rows: up to how many rows of bfloat16 the product of a few rows on tensor cores serves, where it can.
        ptx: whether it decodes by inline PTX, not by operations of Triton.
        torch_from: from how many rows on torch's own product of the decoded weight is taken.
        gemv: blocks of the product of a few rows, by the bits of a code.
        pairs: those of the one on tensor cores, likewise.
        dot: blocks on tensor cores, by rows of activations in ascending order.
        codes: the same for products of codes of 8 bits with such codes.
        about: what a reader of the file should know.
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
        """The configuration of a file's contents."""
        form = checked(form, _FORM, "a GPU configuration")
        fields = {name: form[name] for name in ("device", "measured", "gemv_rows", "pairs_rows", "ptx", "torch_from")}
        gemv = {int(bits): GemvConfig(**blocks) for bits, blocks in form["gemv"].items()}
        pairs = {int(bits): PairsConfig(**blocks) for bits, blocks in form["pairs"].items()}
        dot, codes = (tuple(DotConfig(**blocks) for blocks in form[name]) for name in ("dot", "codes"))
        return cls(**fields, gemv=gemv, pairs=pairs, dot=dot, codes=codes, about=tuple(form.get("about", ())))

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return dataclasses.asdict(self)

    def __post_init__(self) -> None:
        for family in (self.dot, self.codes):
            ends = [blocks.up_to or 1 << 62 for blocks in family]
            if not family or ends != sorted(ends) or family[-1].up_to is not None:
                raise QuantError("blocks ascend by up_to, and the last serve any number of rows")


_FORM = form_of(
    GpuConfig,
    gemv=dict[str, form_of(GemvConfig)],
    pairs=dict[str, form_of(PairsConfig)],
    dot=list[form_of(DotConfig)],
    codes=list[form_of(DotConfig)],
    about=list[str],
)


def blocks_for(family: tuple[DotConfig, ...], m: int) -> DotConfig:
    """The blocks for a number of rows.

    >>> blocks_for(gpu_config("").dot, 5).m
    16
    """
    return next(blocks for blocks in family if blocks.up_to is None or m <= blocks.up_to)


def splits_for(blocks: DotConfig, m: int, n: int, k: int, multiprocessors: int) -> int:
    """Into how many parts K is cut, so that each multiprocessor has a block; each part has four steps at least.

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
    """How many steps are loaded ahead: as many as the blocks say, or fit into the shared memory; one at least.

    >>> stages_for(DotConfig(None, 256, 128, 64, 8, 3), 36864, Gpu(128, 101376))
    2
    """
    return max(1, min(blocks.stages, gpu.shared // step_bytes))


def file_name(device: str) -> str:
    """The stem of a device's file.

    >>> file_name("NVIDIA H200")
    'nvidia_h200'
    """
    return device.lower().replace(" ", "_") if device else DEFAULT


@functools.cache
def gpu_config(device: str) -> GpuConfig:
    """The configuration of a device, by the name that CUDA gives it; the defaults where nobody measured.

    Args:
        device: the name, as `torch.cuda.get_device_name()` gives it; empty for the defaults.

    Returns:
        The configuration.

    >>> gpu_config("NVIDIA of tomorrow").measured
    ''
    """
    path = FOLDER / f"{file_name(device)}.json"
    path = path if path.exists() else FOLDER / f"{DEFAULT}.json"
    return GpuConfig.from_json(parsed_object(file_text(path, "GPU configuration"), str(path)))
