"""Reading and writing of checkpoint files."""

from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import TensorInfo as TensorInfo
from .checkpoint import Tensors as Tensors
from .native.reader import is_fewbit_directory as is_fewbit_directory
from .native.tree import load as load
from .native.tree import save as save
from .native.verify import Finding as Finding
from .native.verify import verify as verify
from .native.writer import DirectoryWriter as DirectoryWriter
from .native.writer import write as write
from .output import check_output as check_output
from .peft import read_adapters as read_adapters
from .peft import write_adapters as write_adapters
from .read import read as read
