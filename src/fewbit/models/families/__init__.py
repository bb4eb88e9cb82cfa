"""Families of checkpoints: configurations, parameter names and roles."""

from .family import GGUF as GGUF
from .family import HUGGING_FACE as HUGGING_FACE
from .family import Family as Family
from .gguf.config import config_from_gguf as config_from_gguf
from .glassllm import GLASSLLM as GLASSLLM
from .glassllm import config_from_glassllm as config_from_glassllm
from .table import FAMILIES as FAMILIES
from .table import config_from_hf as config_from_hf
from .table import family_of as family_of
