"""The pipelines behind the commands of `fewbit`."""

from .compare import Baseline as Baseline
from .compare import Candidate as Candidate
from .compare import baseline as baseline
from .compare import compare as compare
from .compare import released as released
from .demo import Demo as Demo
from .demo import demo as demo
from .evaluate import Quality as Quality
from .evaluate import evaluate as evaluate
from .evaluate import evaluation_windows as evaluation_windows
from .evaluate import weight_sqnr as weight_sqnr
from .generate import Sample as Sample
from .generate import generate_text as generate_text
from .inspect import Inspection as Inspection
from .inspect import inspect as inspect
from .load import load as load
from .model import Model as Model
from .plan import folded as folded
from .plan import plan_model as plan_model
from .quantize import Outcome as Outcome
from .quantize import quantize as quantize
from .rotate import rotated as rotated
from .tensors import TensorResult as TensorResult
from .tensors import quantized_tensors as quantized_tensors
from .tensors import worst as worst
from .to_gguf import write_gguf as write_gguf
