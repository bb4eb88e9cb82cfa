"""Families of checkpoints: configurations, parameter names and roles."""

from .family import Family as Family
from .gguf import config_from_gguf as config_from_gguf
from .glassllm import config_from_glassllm as config_from_glassllm
from .table import FAMILIES as FAMILIES
from .table import config_from_hf as config_from_hf
from .table import family_of as family_of
from .tables import GGUF as GGUF
from .tables import GLASSLLM as GLASSLLM
from .tables import HUGGING_FACE as HUGGING_FACE
