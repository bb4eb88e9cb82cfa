"""The containers, in the order in which they are tried."""

from ...errors import QuantError
from .awq import AWQ
from .bitnet import BitNet
from .bitsandbytes import BitsAndBytes
from .compressed_tensors.container import CompressedTensors
from .container import AbstractContainer
from .fp8_blocks import FP8Blocks
from .gpt_oss import GptOss
from .gptq import GPTQ
from .mlx import MLX
from .modelopt import ModelOpt
from .torchao.container import TorchAO

CONTAINERS: tuple[AbstractContainer, ...] = (
    CompressedTensors(),
    ModelOpt(),
    FP8Blocks(),
    GptOss(),
    TorchAO(),
    GPTQ(),
    AWQ(),
    BitsAndBytes(),
    BitNet(),
    MLX(),
)


def container(name: str) -> AbstractContainer:
    """The container of a name, as `--to` takes it.

    Raises:
        QuantError: for another name.
    """
    found = next((one for one in CONTAINERS if one.name == name), None)
    if found is None:
        raise QuantError(f"{name!r} is not a container; there are {', '.join(one.name for one in CONTAINERS)}")
    return found
