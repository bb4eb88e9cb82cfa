"""Quality metrics: perplexity, KL divergence, top-1 agreement, SQNR; engines that run models."""

from .metrics import Divergence as Divergence
from .metrics import Estimate as Estimate
from .metrics import estimate as estimate
from .metrics import kl_divergence as kl_divergence
from .metrics import sqnr_db as sqnr_db
from .metrics import top1_agreement as top1_agreement
from .outputs import OutputError as OutputError
from .outputs import OutputQuality as OutputQuality
from .outputs import output_errors as output_errors
from .outputs import relative_errors as relative_errors
from .perplexity import Comparison as Comparison
from .perplexity import Perplexity as Perplexity
from .perplexity import compare_models as compare_models
from .perplexity import perplexity as perplexity
from .perplexity import token_windows as token_windows
