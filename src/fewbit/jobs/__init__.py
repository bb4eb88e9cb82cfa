"""The pipelines behind the commands of `fewbit`."""

from .compare import Baseline as Baseline
from .compare import Candidate as Candidate
from .compare import baseline as baseline
from .compare import compare as compare
from .compare import released as released
from .demo import Demo as Demo
from .demo import demo as demo
from .inspection import Inspection as Inspection
from .inspection import inspect as inspect
from .load import load as load
from .model import Model as Model
from .planning import folded as folded
from .planning import plan_model as plan_model
from .quality import Quality as Quality
from .quality import evaluate as evaluate
from .quality import evaluation_windows as evaluation_windows
from .quality import weight_sqnr as weight_sqnr
from .quantize import Outcome as Outcome
from .quantize import quantize as quantize
from .quantize import worst as worst
from .rotation import rotated as rotated
from .tensors import TensorResult as TensorResult
from .tensors import quantized_tensors as quantized_tensors
from .writing import Sample as Sample
from .writing import generate_text as generate_text
