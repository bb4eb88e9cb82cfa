"""Reading and writing of checkpoint files."""

from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import TensorInfo as TensorInfo
from .checkpoint import Tensors as Tensors
from .directory import is_fewbit_directory as is_fewbit_directory
from .output import check_output as check_output
from .peft import read_adapters as read_adapters
from .peft import write_adapters as write_adapters
from .read import read as read
from .tree import load as load
from .tree import save as save
from .verify import Finding as Finding
from .verify import verify as verify
from .writer import DirectoryWriter as DirectoryWriter
from .writer import write as write
